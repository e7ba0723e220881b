"""Means of squares by products: what is left of two large numbers is a variance."""

import cProfile
import pstats

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import product_dtypes
from conftest import assert_gradients_near, in_both_dtypes, normal

X = 5 + 0.3 * normal(0, 2, 12, 12, 1)
K = normal(1, 3, 3, 1, 1, scale=0.02)
WINDOW = np.full((5, 5, 1, 1), 1 / 25, np.float32)


def convolved(x, k, padding="VALID"):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, k, (1, 1), padding, dimension_numbers=numbers)


def variance(mean, y):
    return mean(y * y) - mean(y) ** 2


def with_window(y):
    return convolved(y, WINDOW)


def with_new_window(y):
    return convolved(y, jnp.ones((5, 5, 1, 1)) / 25)


def by_rows_and_columns(y):
    rows = jnp.full((5, 1, 1, 1), 0.2)
    return convolved(convolved(y, rows), rows.transpose(1, 0, 2, 3))


def by_two_windows(y):
    rows, columns = jnp.full((5, 1, 1, 1), 0.2), jnp.full((1, 3, 1, 1), 1 / 3)
    return convolved(convolved(y, rows), columns)


def by_three_arrays(y):
    fun = jax.jit(lambda y, window, scale: scale * convolved(y, window))
    return fun(y, WINDOW, jnp.float32(1))


def of_two(y):
    m, x = with_window, jnp.square(X) / 5
    return jnp.square(m(x * y) - m(x) * m(y) - 0.1)


def of_a_sum(y):
    m = with_window
    return m(X * X + y * y) - m(X) ** 2 - m(y) ** 2


def pooled(y):
    """The variance under attention weights."""
    y = y.reshape(2, -1)
    weights = jax.nn.softmax(y)
    return variance(lambda z: jnp.einsum("bn,bn->b", z, weights), y)


def of_images(y):
    """The structural similarity to the images, of Wang et al., 2004."""
    mx, my, m = with_window(X), with_window(y), with_window
    both = variance(m, X) + variance(m, y)
    joint = m(X * y) - mx * my
    ratio = (2 * mx * my + 1e-2) / (mx**2 + my**2 + 1e-2)
    return 1 - ratio * (2 * joint + 9e-2) / (both + 9e-2)


def divided_after_the_sum(y):
    """Sums of numbers and of squares, which are divided where they are used."""

    def total(z):
        return convolved(z, jnp.ones((5, 5, 1, 1)))

    return total(y * y) / 25 - (total(y) / 25) ** 2


def of_weights_that_are_normalised(y):
    y = y.reshape(2, -1)
    weights = jnp.exp(y / 5)
    n = weights.sum(1)
    first, second = (jnp.einsum("bn,bn->b", z, weights) for z in (y, y * y))
    return second / n - jnp.square(first / n)


def turned(y):
    """The square of the mean less the mean of the square."""
    return with_window(y) ** 2 - with_window(y * y)


def together(y):
    m, s = jnp.split(with_window(jnp.concatenate([y, jnp.square(y)])), 2)
    return s - m * m


MOMENTS = {
    "similarity": of_images,
    "a window": lambda y: variance(with_window, y),
    "a new window": lambda y: variance(with_new_window, y),
    "a jitted window": lambda y: variance(jax.jit(with_window), y),
    "rows and columns": lambda y: variance(by_rows_and_columns, y),
    "two windows": lambda y: variance(by_two_windows, y),
    "a covariance": of_two,
    "a sum of squares": of_a_sum,
    "a float power": lambda y: with_window(y**2.0) - with_window(y) ** 2,
    "three arrays": lambda y: variance(by_three_arrays, y),
    "weights": pooled,
    "together": together,
    "divided": divided_after_the_sum,
    "normalised": of_weights_that_are_normalised,
    "turned": turned,
    "vmap": jax.vmap(lambda y: variance(with_window, y[None])),
    "scan": lambda y: lax.map(lambda y: variance(with_window, y[None]), y),
}


@pytest.mark.needs_no_scale
@pytest.mark.parametrize(
    ("moment", "dtype"), in_both_dtypes(MOMENTS, "similarity", "weights", "scan")
)
def test_moments_are_near_those_of_float32(moment, dtype):
    def loss(k, x):
        return moment(x + convolved(x - 5, k, "SAME")).mean()

    assert_gradients_near(loss, dtype, 8, K, X)


def test_the_audit_says_why():
    def fun(k, x):
        return variance(with_window, convolved(x, k))

    report = jaxmp.audit(jaxmp.autocast(fun, "bfloat16"))(K, X)
    assert "guard: variance by moments" in str(report)
    found = product_dtypes(jaxmp.autocast(fun, "bfloat16"), K, X)
    assert found == [{"bfloat16"}, {"float32"}, {"float32"}]


SQUARES = {
    "the weights square what they multiply": lambda x, w: (jnp.exp(x @ w) + x * x) @ w,
    "both are added": lambda x, w: (x * x) @ w + (x @ w) ** 2,
    "one after the other": lambda x, w: jnp.tanh(x @ w) @ w + (x * x) @ w,
    "an odd polynomial": lambda x, w: (x * x) @ w - (x @ w),
    "a kernel of squares": lambda x, w: jax.nn.softmax((x @ w) @ ((x**2) @ w).T) @ x,
    "squares of others": lambda x, w: (x * x) @ w - (w @ w) ** 2,
    "by other weights": lambda x, w, v: (x * x) @ w - (x @ v) ** 2,
    "a factorisation machine": lambda x, w, v: (x @ w) ** 2 - (x * x) @ (w * w),
    "a squared relu": lambda x, w, v: jax.nn.relu(x @ w) ** 2 @ v,
    "a gated layer": lambda x, w, v: jnp.tanh((x @ w) * (x @ v)) @ w,
    "squares after it": lambda x, w, v: jnp.tanh((x @ w) ** 2) @ w,
    "a power of zero": lambda x, w: lax.integer_pow(w, 0) @ w + w @ w,
}


@pytest.mark.parametrize("fun", SQUARES.values(), ids=SQUARES.keys())
def test_without_a_difference_a_square_is_no_variance(fun):
    args = [normal(i, 8, 8) for i in range(fun.__code__.co_argcount)]
    cast = jaxmp.autocast(jax.grad(lambda *args: fun(*args).sum()), "bfloat16")
    found = product_dtypes(cast, *args)
    assert found
    assert all(dtypes == {"bfloat16"} for dtypes in found)


@pytest.mark.parametrize("doubled", [False, True])
def test_a_sum_of_many_results_takes_work_in_proportion(doubled):
    """A sum that has the same part on both sides, over and over, has few parts too."""

    def calls(n):
        def fun(w):
            h, total = jnp.ones((4, 8)), jnp.zeros((4, 8))
            for _ in range(n):
                h = h + (h if doubled else jnp.tanh(h @ w))
                total = total + h
            return jnp.mean(total @ w)

        with cProfile.Profile() as profile:
            jax.make_jaxpr(jaxmp.autocast(jax.grad(fun), "bfloat16"))(jnp.eye(8))
        entries = pstats.Stats(profile).stats.items()  # pyright: ignore
        return sum(x[0] for key, x in entries if key[0].endswith("passes/variance.py"))

    assert 0 < calls(40) < 2.5 * calls(20)
