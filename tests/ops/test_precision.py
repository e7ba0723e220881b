"""What JAX is told of all products is no request of one of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import traced
from conftest import crossed, rest_is_evidence

W = jax.random.normal(jax.random.key(0), (16, 16)) / 4
X = jax.random.normal(jax.random.key(1), (8, 16))
IMAGE = jax.random.normal(jax.random.key(2), (2, 3, 8, 8))
KERNEL = jax.random.normal(jax.random.key(3), (3, 3, 3, 3))

# Float32 products to which the default applies.
by_default = functools.partial(jaxmp.float32_region, precision="default")

# What JAX writes into a product for each of them.
HIGH, HIGHEST, LOWEST = (
    (p, p) for p in (lax.Precision.HIGH, lax.Precision.HIGHEST, lax.Precision.DEFAULT)
)
DEFAULTS = {
    None: None,
    "high": HIGH,
    "tensorfloat32": HIGH,
    "highest": HIGHEST,
    "float32": HIGHEST,
    "BF16_BF16_F32_X3": lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
}
NAMES = [name for name in DEFAULTS if name]
each_default = pytest.mark.parametrize("default", NAMES)
# Where it is the precision that matters, and not how it is spelt.
each_precision = pytest.mark.parametrize(
    "default",
    rest_is_evidence(
        dict(zip(NAMES, NAMES, strict=True)), "high", "highest", "BF16_BF16_F32_X3"
    ),
)


def products(fun, *args):
    """Returns dtype of the operands and precision of each product, wherever it is."""
    return [
        (str(eqn.invars[0].aval.dtype), eqn.params["precision"])
        for eqn in traced(fun, *args)
        if eqn.primitive.name in ("dot_general", "conv_general_dilated")
    ]


def wide(w, x):
    return jnp.mean(jnp.tanh(by_default(jnp.matmul)(x, w) @ w) ** 2)


def in_scan(w, x):
    def body(x, b):
        return by_default(jnp.matmul)(x @ w, w) + b, x.sum()

    return jnp.mean(lax.scan(body, x, jnp.ones((3, 16)))[0] ** 2)


def in_scan_over_16_bits(w, x):
    h = jnp.tanh(x @ w)

    def body(carry, _):
        i, x = carry
        return (i + 1, by_default(jnp.matmul)(x @ h.T @ h, w)), i

    (_, x), _ = lax.scan(body, (0, x), length=3)
    return jnp.mean(x**2)


def in_cond(w, x):
    return lax.cond(x.sum() > 0, wide, lambda w, x: wide(w.T, x), w, x)


@jax.custom_jvp
def ruled(w, x):
    return wide(w, x)


@ruled.defjvp
def ruled_jvp(primals, tangents):
    w, x = primals
    out, (dw, _) = ruled(w, x), tangents
    slope = by_default(jnp.matmul)(x.T, x) @ w
    return out, jnp.sum(slope * dw)


@jax.custom_vjp
def pulled(w, x):
    return wide(w, x)


def pulled_backward(residuals, cotangent):
    w, x = residuals
    return cotangent * by_default(jnp.matmul)(x.T, x) @ w, None


pulled.defvjp(lambda w, x: (pulled(w, x), (w, x)), pulled_backward)

# In an order in which rules, loops and branches are usually differentiated below.
WIDE = {
    "flat": wide,
    "custom_vjp": pulled,
    "custom_jvp": ruled,
    "jit": jax.jit(wide),
    "scan": in_scan,
    "scan over 16 bits": in_scan_over_16_bits,
    "remat of a scan": jax.checkpoint(in_scan),
    "remat": jax.checkpoint(wide),
    "cond": in_cond,
    "custom_jvp in jit": jax.jit(lambda w, x: ruled(w, x)),
}
ORDERS = {
    "called": lambda fun: jaxmp.autocast(fun),
    "autocast of grad": lambda fun: jaxmp.autocast(jax.grad(fun)),
    "grad of autocast": lambda fun: jax.grad(jaxmp.autocast(fun)),
}


POLICIES = "mixed_bfloat16", "mixed_float16", "mixed_fp8"


@pytest.mark.filterwarnings("ignore:No matmul runs in float8")
@crossed("policy default", POLICIES, NAMES)
def test_autocast_runs_whatever_the_default_precision(policy, default):
    def loss(w, x, kernel):
        images = lax.conv(IMAGE, kernel, (1, 1), "SAME")
        return jnp.mean(jnp.tanh(x @ w) ** 2) + jnp.mean(images**2)

    fun = jaxmp.autocast(jax.grad(loss, (0, 2)), policy)
    want, report = fun(W, X, KERNEL), jaxmp.audit(fun)(W, X, KERNEL)
    with jax.default_matmul_precision(default):
        for got, expected in zip(fun(W, X, KERNEL), want, strict=True):
            np.testing.assert_array_equal(got, expected)
        flops = jaxmp.audit(fun)(W, X, KERNEL).flops
    assert flops == report.flops
    assert report.fraction_16bit == 1


# A gradient has the forward pass in it, unless a rule of the function's is for it.
@crossed("fun order", WIDE, ORDERS)
def test_products_left_in_float32_have_the_default_precision(fun, order):
    cast = order(fun)
    dtypes = [dtype for dtype, _ in products(cast, W, X)]
    for default in ("highest", "BF16_BF16_F32_X3", None):  # and keep none
        with jax.default_matmul_precision(default):
            found = products(cast, W, X)
            got, want = cast(W, X), order(fun)(W, X)
        assert [dtype for dtype, _ in found] == dtypes
        precisions = {p for dtype, p in found if dtype == "float32"}
        assert precisions - {LOWEST} == {DEFAULTS[default]}
        # Nor do derivatives ask for more where the product does not.
        assert {p for dtype, p in found if dtype == "bfloat16"} <= {LOWEST}
        np.testing.assert_array_equal(got, want)


def test_the_setting_of_a_whole_program_is_a_default_too():
    cast = jax.grad(jaxmp.autocast(wide))
    jax.config.update("jax_default_matmul_precision", "high")
    try:
        lowered = jax.jit(cast).lower(W, X).as_text()
        found = products(cast, W, X)
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    assert ("float32", DEFAULTS["high"]) in found
    assert ("bfloat16", LOWEST) in found
    assert "precision = [HIGH, HIGH]" in lowered


@each_default
def test_what_a_product_asks_for_itself_is_kept_and_the_audit_says_so(default):
    def asks(w, x):
        with jax.default_matmul_precision("float32"):
            x = jnp.tanh(x @ w)
        return jnp.matmul(jnp.matmul(x, w, precision="high"), w) @ w

    cast = jaxmp.autocast(asks)
    with jax.default_matmul_precision(default):
        report = jaxmp.audit(cast)(W, X)
        found = products(cast, W, X)
    of_float32 = [p for dtype, p in found if dtype == "float32" and p != LOWEST]
    assert of_float32 == [DEFAULTS["float32"], DEFAULTS["high"]]
    assert report.fraction_16bit == 0.5
    kept = [x.reason for x in report.kept]
    assert kept == ["its `precision`"] * 2


@each_precision
def test_the_audit_gives_the_reasons_that_it_gives_without_a_default(default):
    def loss(w, x):
        return jnp.mean(jnp.linalg.qr((x @ w).T)[0] ** 2) + wide(w, x)

    for fun in (loss, jaxmp.autocast(jax.grad(loss)), jax.grad(jaxmp.autocast(loss))):
        want = jaxmp.audit(fun)(W, X)
        with jax.default_matmul_precision(default):
            got = jaxmp.audit(fun)(W, X)
        # A default names a precision, so less is float32 without one.
        assert got.default_precision_flops <= want.default_precision_flops
        assert places(got) == places(want)
        assert not any(x.at_default_precision for x in got.hazards)
        flops, hazards = want.default_precision_flops, want.hazards
        got = dataclasses.replace(got, default_precision_flops=flops, hazards=hazards)
        assert str(got) == str(want)
        assert got == want


def places(report):
    """Returns what is wrong in 16 bits, and where."""
    return [(x.kind, x.why, x.module, x.where) for x in report.hazards]


@each_precision
def test_the_audit_sees_the_hazards_of_a_plain_function_at_any_default(default):
    def phases(w, x):
        return jnp.sin(x @ w)

    want = jaxmp.audit(phases)(W, X)
    assert [x.at_default_precision for x in want.hazards] == [True]
    with jax.default_matmul_precision(default):
        got = jaxmp.audit(phases)(W, X)
        in_16_bits = jaxmp.audit(jaxmp.autocast(phases))(W, X)
    # In mixed precision it is in 16 bits, whatever the default is.
    assert got.hazards == in_16_bits.hazards
    assert places(got) == places(want)


@crossed("order default", ORDERS, ["default", "bfloat16"])
def test_a_default_of_the_lowest_precision_changes_no_bit(order, default):
    cast = order(in_scan)
    want = cast(W, X)
    with jax.default_matmul_precision(default):
        np.testing.assert_array_equal(cast(W, X), want)
        assert set(jaxmp.audit(cast)(W, X).flops) == {"bfloat16", "float32"}


@each_precision
def test_a_float32_policy_changes_no_bit_at_any_default(default):
    with jax.default_matmul_precision(default):
        for fun in (wide, jax.grad(wide)):
            cast = jaxmp.autocast(fun, "float32")
            np.testing.assert_array_equal(cast(W, X), fun(W, X))
            assert products(cast, W, X) == products(fun, W, X)


def test_autocast_inside_of_autocast_has_the_default_once():
    inner = jaxmp.autocast(wide)

    def loss(w, x):
        return inner(w, x) + wide(w, x)

    for cast in (jaxmp.autocast(jax.grad(loss)), jax.grad(jaxmp.autocast(loss))):
        with jax.default_matmul_precision("high"):
            found = products(cast, W, X)
        precisions = {p for dtype, p in found if dtype == "float32"}
        assert precisions - {LOWEST} == {DEFAULTS["high"]}


def test_a_linear_solve_keeps_its_parts():
    def solve(w, x):
        return jax.scipy.sparse.linalg.cg(lambda v: w.T @ (w @ v) + v, x[0])[0].sum()

    want = jaxmp.autocast(jax.grad(solve))(W, X)
    with jax.default_matmul_precision("high"):
        got = jaxmp.autocast(jax.grad(solve))(W, X)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_the_derivative_of_a_qr_decomposition_is_precise_inside_autocast_alone():
    def loss(w):
        return jnp.sum(jnp.sin(jnp.linalg.qr(w @ w)[0]))

    plain = products(jax.grad(loss), W)
    found = products(jaxmp.autocast(jax.grad(loss)), W)
    precise = [dtype for dtype, p in found if p == HIGHEST]
    # All but the matmul and its two gradients.
    assert precise == ["float32"] * (len(plain) - 3)
    assert len(plain) > 3
    assert plain == products(jax.grad(loss), W)
    assert {p for _, p in plain} == {None}
