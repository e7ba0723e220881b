"""Resized images: JAX asks for the highest precision of products, and no user does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from benchmarks.counting.measure import product_dtypes, relative_error
from conftest import normal, usually_bfloat16

X = normal(0, 2, 8, 8, 4)
K = normal(1, 3, 3, 4, 4, scale=1 / 6)
LABELS = np.random.default_rng(2).integers(4, size=(2, 19, 19))


def convolved(x, k):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers)


def resized(x, size=19):
    return jax.image.resize(x, (2, size, size, 4), "bilinear")


def translated(x):
    return jax.image.scale_and_translate(
        x, (2, 19, 19, 4), (1, 2), jnp.full(2, 19 / 8), jnp.zeros(2), "cubic"
    )


def assert_no_further_than_in_16_bits(fun, dtype):
    """Says it of ``fun(K, X)`` under autocast, and of all of it in ``dtype``."""
    cast = jaxmp.autocast(fun, dtype)
    exact, own, found = jax.jit(
        lambda k, x: (fun(k, x), fun(k.astype(dtype), x.astype(dtype)), cast(k, x))
    )(K, X)
    assert relative_error(found, exact) <= relative_error(own, exact)


@usually_bfloat16
@pytest.mark.parametrize("resize", [resized, translated, lambda x: resized(x, 4)])
def test_activations_are_resized_as_near_as_in_16_bits(resize, dtype):
    def loss(k, x):
        x = jax.nn.relu(resize(jax.nn.relu(convolved(x, k))))
        return jnp.square(convolved(x, k)).mean()

    grad = jax.grad(loss, (0, 1))
    assert_no_further_than_in_16_bits(grad, dtype)


def test_what_a_loss_takes_is_resized_in_float32():
    """Labels of pixels, and coordinates."""

    def segmented(k, x):
        logits = resized(convolved(x, k))
        return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()

    def moved(k, x):
        return jnp.abs(resized(1e4 + convolved(x, k)) - 1e4).mean()

    for loss in (segmented, moved):
        found = product_dtypes(jaxmp.autocast(loss, "bfloat16"), K, X)
        assert found == [{"bfloat16"}, {"float32"}, {"float32"}]


def test_what_was_given_is_resized_in_float32():
    """Others may take its digits: a difference, a shortcut, a result."""

    def refined(k, x):
        up = resized(x)
        return up + convolved(jax.nn.relu(convolved(up, k)), k)

    def pyramid(k, x):
        return convolved(8 * (x - resized(resized(x, 4), 8)), k)

    def flow(k, x):
        up = resized(1e3 + x)
        return up, convolved(up, k)

    for fun in (refined, pyramid, flow):
        found = product_dtypes(jaxmp.autocast(fun, "bfloat16"), K, X)
        assert found.count({"float32"}) == (4 if fun is pyramid else 2)
    errors = [
        relative_error(jax.jit(jaxmp.autocast(fun, "bfloat16"))(K, X), fun(K, X))
        for fun in (pyramid, refined)
    ]
    assert max(errors) < 0.01
    np.testing.assert_array_equal(
        jaxmp.autocast(flow, "bfloat16")(K, X)[0], flow(K, X)[0]
    )


def test_what_is_taken_away_is_resized_in_float32():
    def detail(k, x):
        h = convolved(x, k)
        return convolved(h - resized(resized(h, 4), 8), k)

    found = product_dtypes(jaxmp.autocast(detail, "bfloat16"), K, X)
    assert found.count({"float32"}) == 4


@pytest.mark.needs_no_scale
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_is_added_is_resized_as_near_as_in_16_bits(dtype):
    """A pyramid of features: each level is added to the next, and convolved."""

    def pyramid(k, x):
        top = convolved(jax.image.resize(convolved(x, k), (2, 4, 4, 4), "cubic"), k)
        return convolved(resized(top, 8) + convolved(x, k), k)

    grad = jax.grad(lambda k, x: jnp.square(pyramid(k, x)).mean(), (0, 1))
    assert_no_further_than_in_16_bits(grad, dtype)


def test_what_others_compute_with_is_resized_in_float32():
    """A flow that is refined: it is multiplied, and a convolution takes it, too."""

    def refined(k, x):
        flow = resized(convolved(x, k))
        return convolved(flow * convolved(flow, k), k)

    found = product_dtypes(jaxmp.autocast(refined, "bfloat16"), K, X)
    assert found.count({"float32"}) == 2


def test_so_is_the_precision_of_a_resize():
    def fun(k, x):
        size = (2, 9, 9, 4)
        x = jax.image.resize(convolved(x, k), size, "cubic", precision="high")
        return convolved(x, k)

    found = product_dtypes(jaxmp.autocast(fun, "bfloat16"), K, X)
    assert found.count({"float32"}) == 2
