"""What the user keeps in float32 has all digits, on devices that take fewer too."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxmp
from benchmarks.counting import targets
from benchmarks.counting.measure import traced
from conftest import crossed, normal

# It is about what stays float32.
pytestmark = pytest.mark.keeps_float32

HIGHEST = (lax.Precision.HIGHEST,) * 2
DEFAULT = (lax.Precision.DEFAULT,) * 2


def products(fun, *args):
    """Returns dtype and precision of each product, those in calls and loops too."""
    found = [
        (str(eqn.invars[0].aval.dtype), eqn.params["precision"])
        for eqn in traced(fun, *args)
        if "precision" in eqn.params
    ]
    return [(dtype, None if x == DEFAULT else x) for dtype, x in found]


def named(x, w):
    with jax.named_scope("head"):
        return x @ w


def in_region(x, w):
    with jax.named_scope("jaxmp.float32"):
        return x @ w


def jitted(x, w):
    return jaxmp.float32_region(jax.jit(jnp.dot))(x, w)


def scanned(x, w):
    def layer(x, _):
        return jaxmp.float32_region(jnp.dot)(x, w), None

    return lax.scan(layer, x, length=3)[0]


def recomputed(x, w):
    return jax.checkpoint(jaxmp.float32_region(jnp.dot))(x, w)


def chosen(x, w):
    return jaxmp.float32_region(
        lambda x, w: lax.cond(x[0, 0] > 0, jnp.dot, lambda x, w: x @ w.T, x, w)
    )(x, w)


def convolved(x, w):
    with jax.named_scope("head"):
        return lax.conv(x[None, None], w[None, None], (1, 1), "SAME")[0, 0]


PATH = {"float32_paths": ("head",)}
KEPT = {
    "a path": (named, PATH),
    "a named scope": (in_region, {}),
    "a jitted region": (jitted, {}),
    "a region in a scan": (scanned, {}),
    "a checkpointed region": (recomputed, {}),
    "a choice": (chosen, {}),
    "a convolution": (convolved, PATH),
    "a denied product": (
        lambda x, w: x @ w,
        {"ops": jaxmp.DEFAULT_OPS.with_deny("dot_general")},
    ),
}
WX = normal(0, 8, 8), normal(1, 8, 8)


def around(loss, options):
    return jaxmp.autocast(jax.grad(loss, (0, 1)), "bfloat16", **options)


def inside(loss, options):
    return jax.grad(jaxmp.autocast(loss, "bfloat16", **options), (0, 1))


@crossed("name place", [*KEPT], [around, inside])
def test_what_the_user_keeps_in_float32_has_all_digits(name, place):
    fun, options = KEPT[name]

    def loss(w, x):
        return jnp.sum(fun(jnp.sin(x), w) ** 2)

    found = products(place(loss, options), *WX)
    assert len(found) >= 3  # forward, and both gradients
    assert set(found) == {("float32", HIGHEST)}
    grads = jax.jit(place(loss, options))(*WX)
    for ours, exact in zip(grads, jax.grad(loss, (0, 1))(*WX), strict=True):
        assert abs(ours - exact).max() < 1e-4 * abs(exact).max()


@pytest.mark.parametrize("place", [around, inside])
def test_a_complex_product_has_all_digits_too(place):
    def loss(w, x):
        with jax.named_scope("head"):
            waves = (x + 2j * jnp.sin(x)) @ (w - 1j)
        return jnp.sum(jnp.abs(waves) ** 2)

    options = {"float32_paths": {"head": "highest"}}
    found = products(place(loss, options), *WX)
    assert len(found) >= 3
    assert set(found) == {("complex64", HIGHEST)}
    plain = jaxmp.audit(jax.grad(loss))(*WX)
    assert plain.default_precision_flops == sum(plain.flops.values()) > 0
    kept = jaxmp.audit(place(loss, options))(*WX)
    assert kept.default_precision_flops == 0


@pytest.mark.parametrize("place", [around, inside])
def test_a_path_may_name_a_cheaper_precision(place):
    def loss(w, x):
        return jnp.sum(named(jnp.sin(x), w) ** 2)

    options = {"float32_paths": {"head": "default"}}
    assert set(products(place(loss, options), *WX)) == {("float32", None)}


@pytest.mark.parametrize("place", [around, inside])
def test_the_audit_counts_each_product_once_at_every_precision(place):
    def loss(w, x):
        return jnp.sum(named(jnp.sin(x), w) ** 2)

    def flops(precision):
        options = {"float32_paths": {"head": precision}}
        return jaxmp.audit(place(loss, options))(*WX).flops

    (w, x), of_highest = WX, flops("highest")
    assert of_highest == {"float32": 3 * 2.0 * x.shape[0] * x.shape[1] * w.shape[1]}
    assert flops("default") == of_highest


def test_a_region_may_name_a_cheaper_precision():
    def loss(w, x):
        return jnp.sum(jaxmp.float32_region(jnp.dot, precision="default")(x, w) ** 2)

    assert set(products(around(loss, {}), *WX)) == {("float32", None)}


def test_a_line_keeps_the_precision_that_it_names():
    def fun(x, w):
        with jax.named_scope("jaxmp.float32"):
            return jnp.dot(x, w, precision="high")

    found = products(jaxmp.autocast(fun, "bfloat16"), *WX)
    assert found == [("float32", (lax.Precision.HIGH,) * 2)]


def squares(w):
    def step(c, _):
        return jnp.matmul(c, c, precision="highest"), None

    return jnp.sum(lax.scan(step, w, None, 4)[0])


def squares_of_sines(w):
    def step(c, _):
        s = jnp.sin(c)
        return jnp.matmul(s, s, precision="highest"), s.sum()

    return jnp.sum(lax.scan(step, w, None, 4)[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("fun", [squares, squares_of_sines])
def test_a_loop_without_a_matmul_in_16_bits_stacks_float32(fun, dtype):
    w, grad = normal(0, 16, 16, scale=0.25), jax.value_and_grad(fun)
    for found, expected in zip(jaxmp.autocast(grad, dtype)(w), grad(w), strict=True):
        assert jnp.array_equal(found, expected)


@pytest.mark.parametrize("policy", ["float32", "bfloat16"])
def test_what_nobody_keeps_has_no_precision(policy):
    def loss(w, x):
        return jnp.sum((x @ w) ** 2)

    found = products(jaxmp.autocast(jax.grad(loss), policy), *WX)
    assert {precision for _, precision in found} == {None}


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_the_exported_program_asks_for_all_digits(platform):
    fun = jaxmp.autocast(
        jax.grad(lambda w, x: jnp.sum(named(jnp.sin(x), w) ** 2)),
        "bfloat16",
        float32_paths={"head": "highest"},
    )
    exported = jax.export.export(jax.jit(fun), platforms=[platform])(*WX)
    lines = exported.mlir_module().splitlines()
    found = [x for x in lines if "stablehlo.dot_general" in x]
    assert len(found) == 2
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in found)


def test_a_precision_that_does_not_exist_is_refused():
    for make in (
        lambda: jaxmp.float32_region(jnp.dot, precision="tf32"),  # pyright: ignore
        lambda: jaxmp.autocast(jnp.dot, float32_paths={"head": "tf32"}),  # pyright: ignore
    ):
        with pytest.raises(ValueError, match="'highest', 'default'"):
            make()


@pytest.mark.filterwarnings("ignore:Of the FLOPs:UserWarning")
def test_a_loop_that_ends_by_comparing_has_all_digits():
    def fixed_point(w, b):
        def body(carry):
            x, _ = carry
            new = jnp.tanh(x @ w + b)
            return new, abs(new - x).max()

        return lax.while_loop(lambda c: c[1] > 1e-6, body, (b, jnp.float32(1)))[0]

    found = products(jaxmp.autocast(fixed_point, "bfloat16"), WX[0] / 8, WX[1])
    assert set(found) == {("float32", HIGHEST)}


def test_an_inner_autocast_has_decided():
    inner = jaxmp.autocast(lambda x, w: x @ w, "bfloat16")

    def fun(x, w):
        with jax.named_scope("jaxmp.float32"):
            return inner(x, w)

    found = products(jaxmp.autocast(fun, "bfloat16"), *WX)
    assert found == products(inner, *WX)


@pytest.mark.skipif(bool(targets.unavailable()), reason=str(targets.unavailable()))
@pytest.mark.parametrize("precision", ["highest", "default"])
def test_code_for_a_gpu_has_all_digits(precision, compiled_anew):
    def loss(w, x):
        return jnp.sum(named(jnp.sin(x), w) ** 2)

    options = {"float32_paths": {"head": precision}}
    shapes = [jax.ShapeDtypeStruct((n, 256), jnp.float32) for n in (256, 512)]
    text = targets.compiled(around(loss, options), *shapes).as_text()
    found = [line for line in text.splitlines() if "matmul" in line and "f32" in line]
    products = [line for line in found if "operand_precision" in line]
    says = {
        "highest": ('"HIGHEST","HIGHEST"', 3),
        "default": ('"DEFAULT","DEFAULT"', 3),
    }
    asked, count = says[precision]
    assert sum(asked in line for line in products) == count
