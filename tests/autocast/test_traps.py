"""What made earlier attempts wrong; each fails without its treatment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmp
from benchmarks.counting.measure import product_dtypes, relative_error, traced
from conftest import at_once, crossed, normal

F16 = jnp.float16
EYE = jnp.asarray(np.eye(8, dtype=np.float32))
ORDERS = {
    "outside": lambda loss, argnums=0: jaxmp.autocast(jax.grad(loss, argnums), F16),
    "inside": lambda loss, argnums=0: jax.grad(jaxmp.autocast(loss, F16), argnums),
}
both_orders = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())


@pytest.mark.needs_no_scale
@both_orders
def test_products_with_a_float32_result_have_16_bit_derivatives(order):
    def loss(w, x):
        y = lax.conv(x[None, None], w[None, None], (1, 1), "SAME")[0, 0]
        groups = jnp.array([3, 5])
        z = lax.ragged_dot(jnp.exp(y), jnp.stack([w, w]), groups)
        return jnp.exp(jnp.exp(z) @ w).sum()

    found = product_dtypes(order(loss, (0, 1)), EYE, EYE)
    assert len(found) >= 9
    assert all(dtypes == {"float16"} for dtypes in found)


@both_orders
@pytest.mark.parametrize(
    "shape", [(8,), pytest.param((1, 8), marks=pytest.mark.evidence)]
)
def test_the_gradient_of_a_bias_adds_in_float32(order, shape):
    def loss(b, x):
        return jnp.sum((x @ jnp.ones((8, 8)) + b) @ jnp.ones((8, 1)))

    grad = order(loss)(jnp.zeros(shape), jnp.ones((70_000, 8)))
    np.testing.assert_array_equal(grad, jnp.full(shape, 70_000.0))


@pytest.mark.parametrize(
    "copy",
    [
        lambda y: jnp.broadcast_to(y, (20_000, 8)),
        lambda y: y[jnp.zeros(20_000, int)],
        lambda y: jnp.tile(y, (20_000, 1)),
        lambda y: y + jnp.zeros((20_000, 8), bool),
    ],
    ids=["broadcast", "gather", "tile", "stretch"],
)
def test_the_gradients_of_copies_add_in_float32(copy):
    def loss(x):
        copies = copy(x @ jnp.eye(8))  # in 16 bits, for the product below
        return jnp.sum(copies @ jnp.full((8, 8), 2.0**-6))

    # In float16, a sum of ones stops at 2048.
    grad = ORDERS["inside"](loss)(jnp.ones((1, 8)))
    np.testing.assert_allclose(grad, 20_000 * 2.0**-3, rtol=1e-3)


@pytest.mark.needs_no_scale
@both_orders
def test_the_gradients_of_a_weight_that_is_used_three_times_add_in_float32(order):
    parts = [1.0, 2.0**-12, 2.0**-12]  # of which a sum in float16 keeps the first

    def loss(w, x):
        return sum(jnp.sum((x @ w) * part) for part in parts)

    grad = order(loss)(EYE, EYE)
    np.testing.assert_array_equal(grad, jnp.full((8, 8), sum(parts)))


@pytest.mark.needs_no_scale
def test_gradients_that_a_scan_adds_up_are_near_and_add_up_in_float32():
    def loss(w, b, x):
        return jnp.exp(x @ w + b).mean()

    def accumulated(w, b, xs):
        def step(total, x):
            return total + jax.grad(loss)(w, b, x), None

        return lax.scan(step, jnp.zeros_like(w), xs)[0]

    args = EYE, EYE[0], jax.random.normal(jax.random.key(0), (3, 8, 8))
    cast = jaxmp.autocast(accumulated, F16)
    scan = next(e for e in traced(cast, *args) if e.primitive.name == "scan")
    total = scan.invars[2].aval
    assert total.dtype == jnp.dtype("float32")
    assert relative_error(cast(*args), jax.jit(accumulated)(*args)) < 2e-3


@pytest.mark.keeps_float32
def test_rotary_angles_and_other_outer_products_stay_float32():
    def angles(positions, frequencies):
        return jnp.sin(jnp.einsum("i,j->ij", positions, frequencies))

    args = jnp.arange(4096.0), 10_000.0 ** (-jnp.arange(8.0) / 8)
    np.testing.assert_array_equal(jaxmp.autocast(angles, F16)(*args), angles(*args))
    vectors = jnp.full(8, 300.0), jnp.full(8, 300.0)
    assert product_dtypes(jaxmp.autocast(jnp.vdot), *vectors) == [{"float32"}]


@pytest.mark.parametrize(
    "square", [lambda y: y * y, jnp.square, lambda y: y**2, lambda y: y**4]
)
def test_squares_of_16_bit_values_do_not_overflow(square):
    def fun(w):
        y = 300 * (w @ w)
        scaled = square(y) * 2.0**-24  # for a product, which would take it narrow
        return jnp.sum(square(y)), jnp.linalg.norm(y), (y @ w) @ w, scaled @ w

    for got, want in zip(jaxmp.autocast(fun, F16)(EYE), fun(EYE), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3)


@pytest.mark.needs_no_scale
@both_orders
def test_unscaled_attention_logits_do_not_overflow(order):
    def loss(q, k):
        return (jax.nn.softmax(q @ k.T) @ k).sum()

    q = jnp.eye(4, 8) * 300
    assert jnp.isfinite(jaxmp.autocast(loss, F16)(q, q))
    assert jnp.isfinite(order(loss)(q, q)).all()


LOWEST = -1e9, float(jnp.finfo(jnp.float32).min), -jnp.inf


@crossed("lowest dtype", LOWEST, [jnp.float16, jnp.bfloat16])
def test_a_mask_given_as_an_argument_never_makes_nan(lowest, dtype):
    def attend(x, mask):
        logits = x @ x.T
        masked = logits + mask  # taken in 16 bits by the product below
        return jax.nn.softmax(masked[:, :1] @ jnp.ones((1, 8)) * 0 + masked), masked @ x

    mask = jnp.where(jnp.arange(8) < 2, 0.0, lowest)
    probabilities, _ = jaxmp.autocast(attend, dtype)(EYE, jnp.maximum(mask, -1e9))
    assert jnp.isfinite(probabilities).all()
    probabilities = jaxmp.autocast(lambda x, m: jax.nn.softmax(x @ x + m), dtype)(
        EYE, jnp.broadcast_to(mask, (8, 8))
    )
    expected = jax.nn.softmax(EYE + mask)
    np.testing.assert_allclose(probabilities, expected, atol=1e-3)


def test_an_argument_beyond_float16_saturates_where_it_is_added():
    def fun(x, mask, v):
        return (x @ x + mask) @ v  # the product wants the sum in 16 bits

    cast = jaxmp.autocast(fun, F16)
    lowest = float(jnp.finfo(F16).min)
    y = cast(EYE, jnp.array([0.0, 1.0, -1e9, *5 * [0.0]]), EYE)
    np.testing.assert_array_equal(y[0], [1.0, 1.0, lowest, *5 * [0.0]])
    infinite = cast(EYE, jnp.array([*7 * [1.0], -jnp.inf]), jnp.ones((8, 1)))
    np.testing.assert_array_equal(infinite, -jnp.inf)


@pytest.mark.needs_no_scale
@both_orders
def test_a_kernel_beyond_float16_shows_in_the_gradient_as_in_the_loss(order):
    # A finite gradient of a loss that is Inf would not have the step skipped.
    def loss(x, kernel):
        x = jax.nn.relu(x) * jnp.ones((1, 8, 1))
        return jax.lax.conv(x, kernel, (1,), "SAME").mean()

    grad = order(loss)(jnp.ones((1, 8, 8)), jnp.full((8, 8, 3), 7e4))
    assert not jnp.isfinite(grad).any()


@pytest.mark.needs_no_scale
@both_orders
def test_dot_product_attention_runs_in_float16_on_this_backend(order):
    def loss(x):
        return jnp.square(jax.nn.dot_product_attention(x, x, x, is_causal=True)).sum()

    x = jax.random.normal(jax.random.key(0), (2, 8, 2, 8))
    found, expected = jax.jit(lambda x: (order(loss)(x), jax.grad(loss)(x)))(x)
    assert relative_error(found, expected) < 5e-3
    assert all(dtypes == {"float16"} for dtypes in product_dtypes(order(loss), x))


def test_numbers_are_known_while_tracing_inside_shard_map_too():
    def scores(x):
        return jax.nn.relu((x @ x) / jnp.sqrt(jnp.float32(2 * x.shape[-1]))) @ x

    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    split = jax.shard_map(
        lambda x: scores(x[0])[None], mesh=mesh, in_specs=P("i"), out_specs=P("i")
    )
    for fun, x in [(scores, EYE), (split, jnp.stack([EYE, EYE]))]:
        eqns = traced(jaxmp.autocast(fun, F16), x)
        div = [e for e in eqns if e.primitive.name == "div"]
        assert [e.outvars[0].aval.dtype for e in div] == [F16]


def test_python_values_stay_python_values():
    def fun(x, *, depth, name, scale=0.5, flags=(), table=None):
        assert isinstance(depth, int)
        assert isinstance(scale, float)
        assert isinstance(table, np.ndarray)
        for _ in range(depth):
            x = x @ x * scale
        return {"name": name, "x": x, "flags": flags, "depth": depth}

    options = {"depth": 2, "name": "net", "flags": (True, None), "table": np.eye(2)}
    out = jaxmp.autocast(fun, F16)(EYE, **options)
    assert {**out, "x": None} == {
        "name": "net",
        "x": None,
        "flags": (True, None),
        "depth": 2,
    }


def test_the_inner_autocast_wins():
    def inner(x):
        return x @ x

    def outer(policy):
        return lambda x: jaxmp.autocast(inner, policy)(x @ x) @ x

    for policy, name in [("bfloat16", "bfloat16"), ("float32", "float32")]:
        found = product_dtypes(jaxmp.autocast(outer(policy), F16), EYE)
        assert found == [{"float16"}, {name}, {"float16"}]
    ops = jaxmp.DEFAULT_OPS.with_deny("dot_general")
    kept = jaxmp.autocast(inner, F16, ops=ops)
    found = product_dtypes(jaxmp.autocast(lambda x: kept(x @ x) @ x, F16), EYE)
    assert found == [{"float16"}, {"float32"}, {"float16"}]
    twice = jaxmp.autocast(jaxmp.autocast(inner, F16), F16)
    np.testing.assert_array_equal(twice(EYE / 3), jaxmp.autocast(inner, F16)(EYE / 3))


def test_weight_gradients_of_single_examples_stay_float32():
    def loss(w, x):
        return jnp.exp(x @ w).sum()

    examples = jax.vmap(jax.grad(loss), (None, 0))
    found = product_dtypes(jaxmp.autocast(examples, F16), EYE, EYE)
    assert {"float16"} in found
    assert {"float32"} in found


@pytest.mark.needs_no_scale
def test_a_weight_gradient_beyond_float16_stays_finite_outside():
    def loss(w, x):
        return (x @ w).sum()

    x = jnp.full((2**17, 8), 50.0)
    grad = ORDERS["outside"](loss)(jnp.ones((8, 8)), x)
    np.testing.assert_array_equal(grad, jnp.full((8, 8), 50.0 * 2**17))


def _gradient(factors):
    def loss(w):
        out = factors(w + 2 * jnp.eye(8))
        return jnp.sum(out * jnp.arange(out.size).reshape(out.shape))

    return jax.grad(loss)


FACTORS = {
    "cholesky": lambda w: jnp.linalg.cholesky(w * w.T + 4 * jnp.eye(8)),
    "eigh": lambda w: jnp.linalg.eigh(w + w.T)[1] ** 2,
    "svd": lambda w: jnp.linalg.svd(w)[0] ** 2,
    "solve": lambda w: jnp.linalg.solve(w, w.T),
    "expm": jax.scipy.linalg.expm,
    "qr": lambda w: jnp.linalg.qr(w)[0],
}


@pytest.mark.keeps_float32
@pytest.mark.parametrize(
    "factors",
    # The derivatives of the others are made of these, or of products alone.
    FACTORS.values(),
    ids=FACTORS,
)
def test_gradients_of_factors_stay_float32(factors):
    grad, w = _gradient(factors), normal(0, 8, 8, scale=0.3)
    found, expected = at_once(jaxmp.autocast(grad, "bfloat16"), grad)(w)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.needs_no_scale
@crossed("order number", ORDERS, [2j, -2j, 1 - 1j])
def test_a_complex_number_times_integers_has_no_sign(order, number):
    def loss(w):
        turns = number * jnp.arange(8)  # JAX keeps this number as Python's own
        return jnp.sum((jnp.exp(turns).real * w) @ w)

    found, expected = order(loss)(EYE), jax.grad(loss)(EYE)
    assert relative_error(found, expected) < 1e-3
