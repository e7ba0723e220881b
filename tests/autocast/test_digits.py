"""What is given or looked up keeps its digits until 16-bit work reads it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import traced
from conftest import assert_gradients_near, assert_near, crossed, in_both_dtypes, normal
from jaxmp import autocast

HALVES = "float16", "bfloat16"
W = normal(0, 8, 8, scale=8**-0.5)
# Rows that lie close together: in 16 bits their differences are noise.
TABLE = 1 + normal(1, 6, 8, scale=1e-3)
SCHEDULE = jnp.asarray(np.cumprod(1 - np.linspace(1e-4, 0.02, 1000)), jnp.float32)
I, J = jnp.array([0, 1, 2, 3]), jnp.array([4, 5, 0, 1])  # noqa: E741
X = normal(2, 4, 8)


def with_product(fun):
    """Returns ``fun`` so that something in it is read by a product as well."""
    return lambda *args: (fun(*args), jax.tree.map(lambda x: x @ W, fun(*args)))


def noised(t, x):
    a = SCHEDULE[t][:, None] * jnp.ones(8)
    return jnp.sqrt(a) * x + jnp.sqrt(1 - a) * x, a / (1 - a), 1 - a


def coordinates(table):
    d = table[I] - table[J]
    return d / jnp.linalg.norm(d, axis=-1)[:, None], d / table[J], d


OUTSIDE = {
    "schedule": lambda: noised(jnp.array([0, 3, 500, 900]), X),
    "coordinates": lambda: coordinates(TABLE),
    "under vmap": lambda: jax.vmap(lambda i, j: TABLE[i] - TABLE[j])(I, J),
    "under jit": lambda: jax.jit(coordinates)(TABLE),
    "under remat": lambda: jax.checkpoint(coordinates)(TABLE),
    "take": lambda: jnp.take(TABLE, I, axis=0) - jnp.take(TABLE, J, axis=0),
    "one row": lambda: (TABLE[I[0]] - TABLE[J[0]])[None],
    "slices": lambda: lax.dynamic_slice(TABLE, (I[1], I[0]), (2, 8)) - TABLE[:2],
    "comparison": lambda: jnp.where(TABLE[I] > TABLE[J], TABLE[I], 0) - TABLE[J],
    "power": lambda: TABLE[I] ** 3.5 - 1,
    "argument": lambda: X - jnp.roll(X, 1),
    "put together": lambda: jnp.concatenate([TABLE[I], X])[2:6] - TABLE[J],
    "updated": lambda: X.at[0].set(TABLE[0])[:2] - TABLE[:2],
    "sorted": lambda: jnp.diff(jnp.sort(TABLE, axis=0), axis=0)[:4],
    "segments": lambda: jax.ops.segment_sum(TABLE[I] - TABLE[J], I, 4),
}  # fmt: skip


@crossed("fun dtype", OUTSIDE, HALVES)
def test_what_is_computed_from_lookups_alone_is_not_rounded(fun, dtype):
    kept, products = jaxmp.autocast(with_product(fun), dtype)()
    jax.tree.map(np.testing.assert_array_equal, kept, fun())
    assert_near(products, jax.tree.map(lambda x: x @ W, fun()), dtype, 2)


CONSUMERS = {
    "difference": lambda rows, y: rows - y,
    "difference from a vector": lambda rows, y: y - rows[0],
    "ratio": lambda rows, y: y / rows,
    "comparison": lambda rows, y: jnp.where(rows > y, 1.0, 2.0),
    "slice": lambda rows, y: jnp.concatenate([rows[:, :2], y], 1)[:, :2] - rows[:, 2:4],
    "slice of a vector": lambda rows, y: jnp.concatenate([rows[0], y[0]])[:8] - rows[1],
    "choice": lambda rows, y: jnp.where(jnp.arange(4)[:, None] < 2, rows, y)[:2] - 1,
    "padding": lambda rows, y: y.at[:2].set(rows[:2])[:2] - rows[1:3],
}


@crossed("consumer dtype", CONSUMERS, HALVES)
def test_a_lookup_that_meets_16_bit_values_keeps_its_digits_for_others(consumer, dtype):
    def fun(table, w):
        rows = table[I]
        met = consumer(rows, X @ w)
        return met, met @ w[: met.shape[-1]]  # a product takes it in 16 bits

    def at_the_product(table, w):
        x, w = (lax.reduce_precision(a, *bits(dtype)) for a in (X, w))
        return consumer(table[I], x @ w)  # what is returned keeps its digits back to it

    got, _ = autocast(fun, dtype)(TABLE, W)
    np.testing.assert_allclose(got, at_the_product(TABLE, W), rtol=1e-5, atol=1e-6)


def bits(dtype):
    info = jnp.finfo(dtype)
    return info.nexp, info.nmant


@pytest.mark.parametrize("kind", ["scan", "while"])
def test_what_a_loop_carries_is_not_known_by_its_first_value(kind):
    # The carry begins as zeros, and zero is a number that 16 bits have.
    def fun(x, w):
        def step(total, x):
            y = (total * (x @ w)) @ w  # the last product wants all of it narrow
            return total + 1e-4 * x + 0 * y, y

        zeros = jnp.zeros(8)
        if kind == "scan":
            return lax.scan(step, zeros, x)
        return lax.fori_loop(0, 4, lambda i, c: step(c, x[i])[0], zeros)

    eqns = traced(jaxmp.autocast(fun), X, W)
    dtypes = {e.outvars[0].aval.dtype for e in eqns if e.primitive.name == "mul"}
    assert dtypes == {jnp.dtype("float32")}


# Values that are computed from products, and have consumers of two kinds.


ROWS = normal(3, 8, 16)
V = normal(4, 16, 16, scale=0.25)


def clipped_cross_entropy(w):
    p = jnp.clip(jax.nn.sigmoid(ROWS @ w * 8), 1e-7, 1 - 1e-7)
    return -(jnp.log(p) + jnp.log(1 - p)).mean()


def odds(w):
    p = jax.nn.sigmoid(ROWS @ w * 2)
    return (p / (1 - p + 1e-7)).mean() + (p @ w).mean()


def carried_probability(w):
    def step(p, _):  # read by the logarithm of the next step
        return jax.nn.sigmoid((p @ w) * 6), jnp.log(1 - p + 1e-7).mean() + (
            p @ w
        ).mean()

    return lax.scan(step, jax.nn.sigmoid(ROWS @ w), None, length=2)[1].sum()


def nested_probability(w):
    p = jax.jit(lambda x: jax.checkpoint(jax.nn.sigmoid)(x * 6))(ROWS @ w)
    return jax.jit(lambda p: -jnp.log(1 - p + 1e-7))(p).mean() + (p @ w).mean()


def near_one(w):
    return jax.nn.sigmoid(7 + ROWS @ w)


def masked_probability(w):
    p = near_one(w)
    return jnp.log(1 - p.at[0].set(0.5)).mean() + (p @ w).mean()


def log_of_complement_in_a_rule(w):
    @jax.custom_vjp
    def log_complement(p):
        return jnp.log(1 - p)

    log_complement.defvjp(
        lambda p: (log_complement(p), p), lambda p, g: (-g / (1 - p),)
    )
    p = near_one(w)
    return log_complement(p).mean() + (p @ w).mean()


STEEP = [
    masked_probability,
    log_of_complement_in_a_rule,
    clipped_cross_entropy,
    odds,
    carried_probability,
    nested_probability,
]


def cube(w):
    return (jnp.tanh(1e-5 * (ROWS @ w * 50) ** 3) @ w).mean()


def fourth_power(w):
    h = ROWS @ w * 20
    return ((h / jnp.sum(h**4, -1, keepdims=True) ** 0.25) @ w).mean()


def polynomial(w):
    h = ROWS @ w * 300
    return (jnp.tanh(1e-5 * (h + h * h + h**2)) @ w).mean()


def gelu(w):
    return (jax.nn.gelu(ROWS @ w * 40) @ w).mean()


def scaled(scale):
    scale = jnp.asarray(scale)

    def loss(w):
        return (jnp.tanh(ROWS @ w * scale / scale) @ w).mean()

    return loss


OUT_OF_RANGE = {
    "cube": cube,
    "fourth power": fourth_power,
    "gelu": gelu,
    "polynomial": polynomial,
    "large scale": scaled(np.float32(1e5)),
    "large scales": scaled(np.full(16, 1e6, np.float32)),
    "product out of range": lambda w: (((ROWS * 100) @ (w * 300)) / 1e4 @ w).sum(),
    "there and back": lambda w: (((ROWS @ w * 20 * 1e4) / 1e4) @ w).mean(),
    "small scale": scaled(np.float32(1e-8)),
    "scales of rows": scaled(np.linspace(1, 1e6, 8, dtype=np.float32)[:, None]),
}


@pytest.mark.needs_no_scale
@crossed("loss dtype", STEEP, HALVES)
def test_a_steep_function_and_a_product_may_read_the_same_value(loss, dtype):
    assert_gradients_near(loss, dtype, 2, V)


@pytest.mark.needs_no_scale
@pytest.mark.parametrize(("loss", "dtype"), in_both_dtypes(OUT_OF_RANGE, *OUT_OF_RANGE))
def test_what_leaves_the_range_of_16_bits_is_not_cut_before_it_comes_back(loss, dtype):
    assert_gradients_near(loss, dtype, 4, V)


CALLED = {
    "a jitted softmax": jax.nn.log_softmax,
    "a branch": lambda h: lax.cond(h[0, 0] > 0, jnp.exp, jnp.exp, h),
    "a loop": lambda h: lax.scan(lambda c, row: (c, jnp.exp(row)), 0.0, h)[1],
}


@pytest.mark.parametrize("kept", ["a region", "a path"])
@pytest.mark.parametrize("fun", CALLED.values(), ids=CALLED)
def test_what_is_called_in_a_float32_region_reads_all_digits(fun, kept):
    """As it does outside of one, though a product takes the same in 16 bits."""

    def net(x, w):
        h = x @ w
        with jax.named_scope("head"):
            return (jaxmp.float32_region(fun) if kept == "a region" else fun)(h), h @ w

    paths = ("head",) if kept == "a path" else ()
    # Not jitted: XLA would leave out the rounding that it can see.
    found = jaxmp.autocast(net, "bfloat16", float32_paths=paths)(X, W)[0]
    x, w = (v.astype(jnp.bfloat16).astype(jnp.float32) for v in (X, W))
    np.testing.assert_allclose(found, fun(x @ w), rtol=1e-6)
