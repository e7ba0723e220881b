"""A number in the code has all its digits, whatever it is applied to.

Rounded to bfloat16, 0.9 is 0.8984, and all activations behind a dropout would be too
large by 0.17%: no network evens that out.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jaxmp
from conftest import at_once, normal
from jaxmp import autocast

# Of positive numbers, so that what is off in one direction is seen.
X, W = 0.1 + jnp.abs(normal(0, 256, 64)), jnp.abs(normal(1, 64, 64))
SHAPE = X.shape


def test_what_a_number_is_applied_to_is_sent_back_by_the_same_number():
    cotangents = jnp.abs(normal(2, *SHAPE))

    def fun(h):
        return jnp.sum(((h @ W) * 0.9) @ W * cotangents)

    exact, found = at_once(jax.grad(fun), autocast(jax.grad(fun)))(X)
    assert abs(jnp.mean(found / exact - 1)) < float(jnp.finfo(jnp.bfloat16).eps) / 16


@pytest.mark.needs_no_scale
@pytest.mark.parametrize(("dtype", "most"), [("float16", 5e-5), ("bfloat16", 4e-4)])
def test_a_loss_behind_a_dropout_is_as_near_as_without(dtype, most):
    def loss(a, b, x):
        h = jax.nn.gelu(x @ a)
        h = h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
        h = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, h.shape), h / 0.9, 0)
        labels = jnp.arange(256)
        return optax.softmax_cross_entropy_with_integer_labels(h @ b, labels).mean()

    args = normal(3, 64, 128, scale=1 / 8), normal(4, 128, 500), normal(5, 256, 64)
    grad = jax.value_and_grad(loss)
    (exact, _), (found, _) = at_once(grad, autocast(grad, dtype))(*args)
    assert abs(found / exact - 1) < most


def gelu(cubic, scale):
    return lambda h: 0.5 * h * (1 + jnp.tanh(scale * (h + cubic * h**3)))


@pytest.mark.parametrize(
    ("act", "of_16_bits"),
    [
        (lambda h: h / 0.9, lambda h: h / 0.875),
        (gelu(0.044715, 0.7978846), gelu(0.04296875, 0.796875)),
    ],
    ids=["a dropout", "a gelu"],
)
def test_no_number_makes_the_backward_pass_keep_more(act, of_16_bits):
    def kept(act):
        def loss(w, x):
            return jnp.mean((act(act(x @ w) @ w) @ w) ** 2)

        grad = autocast(jax.value_and_grad(loss))
        return jaxmp.audit(grad)(W, X).as_dict()["residual_bytes"]

    assert kept(act) == kept(of_16_bits)
