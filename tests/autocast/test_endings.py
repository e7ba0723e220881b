"""Loops that end where a number says so run as many iterations as in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import product_dtypes
from conftest import at_once, normal, usually_bfloat16

W, X = normal(0, 16, 16, scale=0.15), normal(1, 4, 16)
MANY = 500
pytestmark = pytest.mark.filterwarnings("ignore:Of the FLOPs:UserWarning")


def step(z, w, x):
    return jnp.tanh(z @ w + x)


def fixed_point(w, x):
    def goes_on(state):
        z, before, iterations = state
        return (jnp.abs(z - before).max() > 1e-5) & (iterations < MANY)

    def body(state):
        z, _, iterations = state
        return step(z, w, x), z, iterations + 1

    return lax.while_loop(goes_on, body, (step(x, w, x), x, 1))[2]


def fixed_point_that_says_so(w, x):
    def body(state):
        z, _, iterations = state
        new = jax.jit(step)(z, w, x)
        return new, jnp.linalg.norm(new - z) < 1e-5, iterations + 1

    return lax.while_loop(
        lambda s: ~s[1] & (s[2] < MANY), body, (x, jnp.array(False), 0)
    )[2]


def residual(w, x):
    """Richardson's iteration; the test has the product."""
    a = w + 2 * jnp.eye(16)

    def goes_on(state):
        return (jnp.linalg.norm(state[0] @ a - x) > 1e-4) & (state[1] < MANY)

    def body(state):
        return state[0] - 0.4 * (state[0] @ a - x), state[1] + 1

    return lax.while_loop(goes_on, body, (x, 0))[1]


def adaptive_steps(w, x):
    """Euler's steps, as large as half a step allows."""

    def body(state):
        t, h, z, iterations = state
        whole = z + h * step(z, w, 0)
        half = z + 0.5 * h * step(z, w, 0)
        error = jnp.abs(half + 0.5 * h * step(half, w, 0) - whole).max()
        factor = jnp.clip(0.9 * jnp.sqrt(1e-5 / (error + 1e-9)), 0.3, 3)
        t, z = lax.cond(error < 1e-5, lambda: (t + h, whole), lambda: (t, z))
        return t, h * factor, z, iterations + 1

    state = jnp.float32(0), jnp.float32(0.1), x, 0
    return lax.while_loop(lambda s: (s[0] < 1) & (s[3] < MANY), body, state)[3]


def until(goes_on, w, x):
    return lax.while_loop(
        lambda s: goes_on(s[0], s[1]) & (s[2] < MANY),
        lambda s: (step(s[0], w, x), s[0], s[2] + 1),
        (step(x, w, x), x, 1),
    )[2]


def until_equal(w, x):
    # XLA rounds the same number in one way or another: until six digits are equal.
    def digits(z):
        return jnp.round(z * 1e5)

    return until(lambda z, before: jnp.any(digits(z) != digits(before)), w, x)


def in_a_branch(w, x):
    def body(state):
        z, iterations = state
        new = step(z, w, x)
        ended = jnp.abs(new - z).max() < 1e-5
        return new, lax.cond(ended, lambda i: i + 1000, lambda i: i + 1, iterations)

    return lax.while_loop(lambda s: s[1] < MANY, body, (x, 0))[1] % 1000


def descended(w, x):
    """Gradient descent on a vector: nothing is subtracted but by `jax.grad`."""
    a, b = w @ w.T + jnp.eye(16), x[0]
    slope = jax.grad(lambda z: 0.5 * z @ a @ z - b @ z)

    def body(state):
        z, _, iterations = state
        d = slope(z)
        return z - 0.3 * d, jnp.linalg.norm(d), iterations + 1

    state = b, jnp.float32(1), 0
    return lax.while_loop(lambda s: (s[1] > 1e-5) & (s[2] < MANY), body, state)[2]


def until_digits_are_equal(w, x):
    """The last comparison is of integers."""

    def digits(z):
        return jnp.int32(z * 1e5)

    return until(lambda z, before: jnp.any(digits(z) != digits(before)), w, x)


def in_an_inner_loop(w, x):
    """The outer loop ends where the inner one has ended often enough."""

    def body(state):
        x, iterations = state
        return x + 0.1, iterations + fixed_point(w, x)

    return lax.while_loop(lambda s: s[1] < MANY - 50, body, (x, 0))[1]


def of_each(w, x):
    return jax.vmap(fixed_point, (None, 0))(w, x[:, None])


@pytest.mark.keeps_float32
@usually_bfloat16
@pytest.mark.parametrize(
    "iterations",
    [
        fixed_point,
        fixed_point_that_says_so,
        residual,
        adaptive_steps,
        until_equal,
        in_a_branch,
        of_each,
        descended,
        until_digits_are_equal,
        in_an_inner_loop,
    ],
)
def test_loops_end_after_as_many_iterations(iterations, dtype):
    cast = jaxmp.autocast(iterations, dtype)
    expected, found = at_once(iterations, cast)(W, X)
    assert np.max(expected) < MANY
    np.testing.assert_allclose(found, expected, atol=1)


def counted(w, x):
    return lax.while_loop(
        lambda s: s[1] < 5, lambda s: (step(s[0], w, x), s[1] + 1), (x, 0)
    )[0]


def timed(w, x):
    """The time is a float, and not computed from what products return."""
    return lax.while_loop(
        lambda s: s[1] < 1,
        lambda s: (s[0] + 0.1 * step(s[0], w, x), s[1] + 0.1),
        (x, 0.0),
    )[0]


def decoded(w, x):
    """Greedy decoding, until all sequences have ended."""

    def body(state):
        z, ended, tokens = state
        z = step(z, w, x)
        tokens = jnp.argmax(z, -1)
        return z, ended | (tokens == 3), tokens

    state = x, jnp.zeros(4, bool), jnp.zeros(4, jnp.int32)
    return lax.while_loop(lambda s: ~s[1].all(), body, state)[2]


def searched(w, x):
    """Beam search ends where no live score can exceed the worst that is finished."""

    def body(state):
        z, live, finished = state
        z = step(z, w, x)
        score = live + z.max(-1)
        return z, score, jnp.maximum(finished, 0.9 * score)

    state = x, jnp.zeros(4), jnp.full(4, -1e7)
    return lax.while_loop(lambda s: s[1].max() > s[2].min() + 9, body, state)[1]


def confident(w, x):
    """Ends where a softmax is sure."""
    return lax.while_loop(
        lambda s: jax.nn.softmax(s)[0].max() < 0.9, lambda s: 2 * step(s, w, x), x
    )


@pytest.mark.parametrize("fun", [counted, timed, decoded])
def test_loops_that_end_at_a_count_or_a_token_run_in_16_bits(fun):
    found = product_dtypes(jaxmp.autocast(fun, "bfloat16"), W, X)
    assert found == [{"bfloat16"}]


@pytest.mark.keeps_float32
@pytest.mark.parametrize("fun", [confident, searched])
def test_loops_that_compare_what_products_return_stay_float32(fun):
    found = product_dtypes(jaxmp.autocast(fun, "bfloat16"), W, X)
    assert found == [{"float32"}]
