"""A number in the code has all its digits, whatever it is applied to.

Rounded to bfloat16, 0.9 is 0.8984, and all activations behind a dropout would be too
large by 0.17%: no network evens that out.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmp
from conftest import at_once, in_both_dtypes, normal
from jaxmp import autocast

# Of positive numbers, so that what is off in one direction is seen.
X, W = 0.1 + jnp.abs(normal(0, 256, 64)), jnp.abs(normal(1, 64, 64))
SHAPE = X.shape
NUMBER = jnp.float32(0.9)

NUMBERS = {
    "a factor": lambda h: h * 0.9,
    "a divisor": lambda h: h / 0.9,
    # Larger than `h`, whose own steps in 16 bits would all round the sum alike.
    "a summand": lambda h: h + 300.7,
    "taken away": lambda h: 1000.3 - h,
    "an array": lambda h: h * jnp.full(SHAPE, 0.9),
    "a divisor for each": lambda h: h / jnp.full(SHAPE, 0.9),
    "a constant": lambda h: h * NUMBER,
    "a number of NumPy": lambda h: h * np.float32(0.9),
    "computed": lambda h: h * (1 / jnp.full(SHAPE, 0.9)),
    "cast": lambda h: h * (jnp.array(9) / 10),
    "two": lambda h: h * 0.9 * 0.7,
    "a dropout": lambda h: jnp.where(h > 30, h / 0.9, 0),
    "a mask": lambda h: h * ((h > 30) / 0.9),
    "in a jit": lambda h: jax.jit(lambda h: h * 0.9)(h),
    "given to a jit": lambda h: jax.jit(jnp.multiply)(h, 0.9),
    "in a checkpoint": jax.checkpoint(lambda h: h * 0.9),
    "in a vmap": jax.vmap(lambda row: row * 0.9),
    "in a map": lambda h: lax.map(lambda row: row / 0.9, h),
    "in a loop": lambda h: lax.fori_loop(0, 3, lambda i, h: h * 0.9, h),
    "in a branch": lambda h: lax.cond(h[0, 0] > 0, lambda h: h * 0.9, lambda h: h, h),
    "of a leak": lambda h: jax.nn.leaky_relu(-h, 0.01),
    "of a gelu": lambda h: jax.nn.gelu(h / 20),
    "behind a norm": lambda h: 0.9 * h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True)),
}


@pytest.mark.parametrize(
    ("apply", "dtype"), in_both_dtypes(NUMBERS, "a factor", "a divisor")
)
def test_no_number_brings_all_that_it_is_applied_to_off_alike(apply, dtype):
    def fun(w):
        return apply(X @ w) @ jnp.eye(64)

    exact, found = at_once(fun, autocast(fun, dtype))(W)
    off = jnp.mean(jnp.where(exact == 0, 0, found / exact - 1))
    assert abs(off) < float(jnp.finfo(dtype).eps) / 16


def test_what_a_number_is_applied_to_is_sent_back_by_the_same_number():
    cotangents = jnp.abs(normal(2, *SHAPE))

    def fun(h):
        return jnp.sum(((h @ W) * 0.9) @ W * cotangents)

    exact, found = at_once(jax.grad(fun), autocast(jax.grad(fun)))(X)
    assert abs(jnp.mean(found / exact - 1)) < float(jnp.finfo(jnp.bfloat16).eps) / 16


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
