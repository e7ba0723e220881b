"""The gradient of a `tanh`, such as one that caps attention scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from benchmarks.counting.measure import relative_error
from conftest import at_once, normal, usually_bfloat16

X, W = normal(0, 2, 24, 16), normal(1, 3, 16, 16, scale=1 / 4)
MASK = np.tril(np.ones((24, 24), bool))


def attention(x, w, cap=5.0, softmax=jax.nn.softmax):
    q, k, v = x @ w[0], x @ w[1], x @ w[2]
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    scores = cap * jnp.tanh(scores / cap)
    return softmax(jnp.where(MASK, scores, -1e30)) @ v


def shared(x, w):
    y = jnp.tanh(x @ w[0])
    return jax.nn.softmax(y) @ w[1] + y.sum()


def loss_of(fun):
    return lambda x, w: (fun(x, w) ** 2).sum()


@pytest.mark.parametrize(
    ("fun", "dtype"),
    [
        (attention, "float16"),
        (attention, "bfloat16"),
        (jax.checkpoint(attention), "bfloat16"),
        (shared, "bfloat16"),
    ],
)
def test_gradients_are_near_those_of_float32(fun, dtype):
    grad = jax.value_and_grad(loss_of(fun), (0, 1))
    cast = jaxmp.autocast(grad, dtype)
    (loss, found), (exact, expected) = at_once(cast, grad)(X, W)
    assert abs(loss / exact - 1) < 4 * float(jnp.finfo(dtype).eps)
    assert relative_error(found, expected) < 4 * float(jnp.finfo(dtype).eps)


@usually_bfloat16
def test_second_derivatives_are_those_of_float32(dtype):
    def along(x, w):
        return jax.grad(lambda w: jax.grad(loss_of(attention))(x, w)[0, 3, 5])(w)

    outside = jax.grad(
        lambda w: jaxmp.autocast(jax.grad(loss_of(attention)), dtype)(X, w)[0, 3, 5]
    )
    forms = along, jaxmp.autocast(along, dtype), lambda x, w: outside(w)
    expected, *found = at_once(*forms)(X, W)
    for one in found:
        assert relative_error(one, expected) < 10 * float(jnp.finfo(dtype).eps)
