"""The gradient of a `tanh`, such as one that caps attention scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import assert_gradients_near, normal

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


@pytest.mark.needs_no_scale
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
    assert_gradients_near(loss_of(fun), dtype, 4, X, W, argnums=(0, 1))
