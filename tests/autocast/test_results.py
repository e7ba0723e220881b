"""What was given keeps its digits where it is added to what a loss is made of.

It may be the last price of a series, which a forecast begins with. In 16 bits the sum
would lose the digits of the loss. A bias alone is rounded where the next matmul reads
the sum, and `audit` warns if it is taken away from that again.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import relative_error
from benchmarks.law import by_hand
from conftest import assert_gradients_near, at_once, both_dtypes, in_both_dtypes, normal
from jaxmp import autocast

X, Y = 1000 + normal(0, 32, 12), 1000 + normal(1, 32, 8)
W = normal(2, 12, 8, scale=0.2)
V = normal(3, 8, 8)


def predicted(w, x):
    """A linear forecast of prices, from what they changed."""
    last = x[:, -1:]
    return (x - last) @ w + last


def squared(z, y):
    return jnp.square(z - y).mean()


def in_scan(w):
    def step(total, y):
        return total + squared(predicted(w, X), y), None

    return lax.scan(step, 0.0, jnp.stack([Y, Y + 1]))[0]


def of_rows(w):
    def row(x, y):
        return squared((x - x[-1]) @ w + x[-1], y)

    return jax.vmap(row)(X, Y).mean()


LOSSES = {
    "squares": lambda w: squared(predicted(w, X), Y),
    "negated": lambda w: jnp.square(predicted(w, X) + -Y).mean(),
    "relative": lambda w: 1e4 * jnp.square(predicted(w, X) / Y - 1).mean(),
    "Huber": lambda w: optax.huber_loss(predicted(w, X), Y).mean(),
    "a norm": lambda w: jnp.linalg.norm(predicted(w, X) - Y, axis=-1).mean(),
    "scan": in_scan,
    "vmap": of_rows,
    "cond": lambda w: squared(
        lax.cond(w[0, 0] > 9, lambda: 2 * predicted(w, X), lambda: predicted(w, X)), Y
    ),
    "a bias": lambda w: squared((X - 1000) @ w + jnp.full(8, 1000.0), Y),
    "a number": lambda w: squared(1003.7 + 2.3 * ((X - 1000) @ w), Y),
    "a lookup": lambda w: squared((X - 1000) @ w + Y[jnp.arange(32) % 4], Y),
}


@pytest.mark.needs_no_scale
@pytest.mark.parametrize(
    ("loss", "dtype"), in_both_dtypes(LOSSES, "squares", "a norm", "scan")
)
def test_what_is_added_for_a_loss_keeps_its_digits(loss, dtype):
    assert_gradients_near(loss, dtype, 4, W)


MEAN = np.float32([1000, 2003, 517, 1501, 803, 1207, 911, 1404])


def between(z):
    """Returns what a second network is given of a forecast."""
    return {
        "plain": lambda: z - MEAN,
        "cond": lambda: lax.cond(z[0, 0] > 9, lambda z: z - MEAN, lambda z: z, z),
        "relu": lambda: jax.nn.relu(z) - MEAN,
        "where": lambda: jnp.where(z > 0, z, MEAN) - MEAN,
        "scaled": lambda: 0.01 * z - 0.01 * MEAN,
        "a ratio": lambda: 1e3 * (z / MEAN - 1),
        "a number": lambda: z - 1000.0,
        "a remainder": lambda: z % 100,
    }


# A remainder is a phase; what is left of the others is no small difference here.
HARMLESS = "a ratio", "a number", "a remainder"


@pytest.mark.parametrize("name", between(None))
def test_the_audit_warns_if_what_is_added_is_taken_away_before_the_next_layer(name):
    def fun(w, mean):
        return between((X - 1000) @ w + mean)[name]() @ V

    cast = autocast(fun, "bfloat16")
    exact, found = at_once(fun, cast)(W, MEAN)
    error = relative_error(found, exact)
    assert error < 0.02 if name in HARMLESS else error > 0.5
    kinds = {"a ratio": [], "a number": [], "a remainder": ["phase"]}
    kinds = kinds.get(name, ["difference"])
    # The gradient alone reads no difference: `fun` is linear.
    step = jax.value_and_grad(lambda w, x: fun(w, x).sum())
    for form in (cast, autocast(step, "bfloat16")):
        assert [x.kind for x in jaxmp.audit(form)(W, MEAN).hazards] == kinds
    assert not jaxmp.audit(fun)(W, MEAN).hazards or name == "a remainder"


def of_its_change(w):
    z = (X - X[:, -1:]) @ w + X[:, -1:]
    return squared(z, Y) + ((z - X[:, :1]) @ V).std()


@pytest.mark.needs_no_scale
@both_dtypes
def test_a_forecast_that_a_layer_reads_is_as_near_as_with_its_matmuls_cast(dtype):
    grad = jax.grad(of_its_change)
    hand, found = at_once(by_hand(grad, dtype), autocast(grad, dtype))(W)
    exact = grad(W)
    assert relative_error(found, exact) <= 3 * relative_error(hand, exact)
    assert not jaxmp.audit(autocast(grad, dtype))(W).hazards


def of_its_bias(w):
    return ((((X - 1000) @ w + MEAN) - MEAN) @ V).std()


def test_the_audit_warns_of_a_far_bias_that_is_taken_away_and_the_cure_cures():
    grad = jax.grad(of_its_bias)
    (hazard,) = jaxmp.audit(autocast(grad))(W).hazards
    assert hazard.kind == "difference"
    assert hazard.cure == 'with jax.named_scope("jaxmp.float32"):'
    cured = autocast(jaxmp.float32_region(grad))
    assert not jaxmp.audit(cured)(W).hazards
    assert relative_error(cured(W), grad(W)) < 1e-5
    assert relative_error(autocast(grad)(W), grad(W)) > 0.5


@pytest.mark.needs_no_scale
def test_targets_of_a_critic_are_no_infinite_numbers_in_float16():
    rewards = 1e5 * (1 + jnp.square(normal(4, 32)))

    def loss(w):
        target = lax.stop_gradient(rewards + 0.99 * (X @ w)[:, 0])
        return 1e-5 * squared((X @ w)[:, 0], target), target

    grad = jax.value_and_grad(loss, has_aux=True)
    (value, target), _ = jaxmp.autocast(grad, "float16")(W)
    (exact, expected), _ = grad(W)
    np.testing.assert_allclose(target, expected, rtol=1e-5)
    np.testing.assert_allclose(value, exact, rtol=1e-3)


@both_dtypes
def test_what_is_added_to_a_result_keeps_its_digits(dtype):
    """A forecast that the next step reads in 16 bits."""

    def fun(w):
        z = predicted(w, X)
        return z, z @ V

    found, exact = jaxmp.autocast(fun, dtype)(W)[0], fun(W)[0]
    assert jnp.abs(found - exact).max() < 8 * float(jnp.finfo(dtype).eps)


@pytest.mark.needs_no_scale
@both_dtypes
def test_an_update_written_inside_does_not_keep_gradients_in_float32(dtype):
    """What is computed from gradients is a result, but not of the forward pass."""

    def step(w, v):
        return jax.tree.map(lambda p, g: p - 0.1 * g, (w, v), plain(w, v))

    def loss(w, v):
        return jnp.square(jax.nn.relu(jax.nn.relu(X[:, :8] @ w) @ v)).mean()

    plain = jax.grad(loss, (0, 1))

    def products(fun):
        eqns = jax.make_jaxpr(jaxmp.autocast(fun, dtype))(V, V).eqns
        return [
            str(e.outvars[0].aval) for e in eqns if e.primitive.name == "dot_general"
        ]

    assert products(step) == products(plain)


def unit(z):
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def normed(z):
    return (z - z.mean(-1, keepdims=True)) / jnp.sqrt(z.var(-1, keepdims=True) + 1e-6)


MASK = jnp.arange(8) % 3 > 0

# What becomes of a float32 result that a sum and a matmul read.
SCALED = {
    "nothing": lambda z: z,
    "times 1": lambda z: z * 1.0,
    "times 2": lambda z: 2.0 * z,
    "times 8": lambda z: z * 8.0,
    "times 10": lambda z: z * 10.0,
    "times -1": lambda z: z * -1.0,
    "times 0.5": lambda z: z * 0.5,
    "over 0.1": lambda z: z / 0.1,
    "over -1": lambda z: z / -1.0,
    "a mask": lambda z: z * MASK.astype(jnp.float32),
    "a dropout": lambda z: z * (MASK.astype(jnp.float32) / 0.8),
    "two factors": lambda z: -(z * 8.0) * 2.0,
    "in a jit": jax.jit(lambda z: z * 8.0),
}
KINDS = {
    "softmax": jax.nn.softmax,
    "unit vectors": unit,
    "a layer norm": normed,
    "a mean": lambda z: z.mean(0, keepdims=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("factor", SCALED)
def test_what_is_summed_for_a_result_and_has_a_factor_is_not_rounded(factor, kind):
    def both(x, w, v, product=jnp.matmul):
        m = SCALED[factor](KINDS[kind](product(x, w)))
        return (m.sum(), ((m - 0.3) ** 2).mean()), m @ v

    def rounded(x):
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    x = normal(4, 16, 12)
    found, _ = jax.jit(autocast(both, "bfloat16"))(x, W, V)
    # Where arithmetic makes `m` of the product, the product may be 16 bits, on a
    # device that rounds it: XLA for CPUs does so from JAX 0.11 on.
    products = jnp.matmul, lambda x, w: jax.lax.reduce_precision(x @ w, 8, 7)
    off = [
        np.max(np.abs(np.subtract(found, exact)) / (1 + np.abs(exact)))
        for product in products
        for exact in [
            jax.jit(both, static_argnums=3)(*map(rounded, (x, W, V)), product)[0]
        ]
    ]
    arithmetic = kind in ("unit vectors", "a layer norm")
    assert min(off[: 1 + arithmetic]) <= 2e-6
