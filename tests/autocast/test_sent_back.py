"""Gradients that several consumers take in 16 bits, and activations stored once."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import relative_error
from conftest import assert_near, at_once, both_dtypes, normal, usually_bfloat16

X, W = normal(0, 16, 8), normal(1, 4, 8, 8, scale=0.3)


def normed(h):
    h = h - h.mean(-1, keepdims=True)
    return h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-3)


def network(activation, shortcut):
    def loss(ws, vs, x):
        for w, v in zip(ws, vs, strict=True):
            h = activation(x @ w + v)
            x = normed(x + h if shortcut else h)
        return jnp.square(x @ ws[0]).mean()

    return loss


ACTIVATIONS = {
    "relu": jax.nn.relu,
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
}


@usually_bfloat16
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_gradients_behind_norms_are_as_near_as_in_16_bits(activation, dtype):
    grad = jax.grad(network(activation, True), (0, 1))
    seeds = 16
    w, v = normal(3, 3, seeds, 8, 8, scale=0.3), normal(4, 3, seeds, 8)
    args = [*w], [*v], normal(5, seeds, 16, 8)

    @jax.jit
    @jax.vmap
    def errors(*args):
        own = grad(*jax.tree.map(lambda x: x.astype(dtype), args))
        found, exact = jaxmp.autocast(grad, dtype)(*args), grad(*args)
        return [
            optax.tree.norm(jax.tree.map(jnp.subtract, one[0], exact[0]))
            for one in (found, own)
        ]

    found, own = errors(*args)
    assert jnp.median(found / own) <= 1


def embedded(table, w):
    """Queries and keys of rows that a norm takes first, as in BERT."""
    x = normed(table[jnp.arange(16) % 4 * 5]) * (1 + w[0, 0])
    return (jnp.tanh(x @ w[1]) * (x @ w[2]) + x * 16**0.5) @ w[3]


@pytest.mark.needs_no_scale
@both_dtypes
def test_what_products_send_back_through_a_norm_to_a_lookup_is_near(dtype):
    grad = jax.grad(lambda *args: jnp.square(embedded(*args)).mean(), (0, 1))
    assert_near(*at_once(jaxmp.autocast(grad, dtype), grad)(X, W), dtype, 4)


@pytest.mark.needs_no_scale
@both_dtypes
def test_a_gradient_whose_digits_are_needed_is_not_rounded(dtype):
    """One that is returned, and one of which a logarithm is taken."""

    def head(h, ws):
        return jnp.square(jax.nn.gelu(h @ ws[0]) + h * ws[1][0]).sum()

    def returned(ws):
        g = jax.grad(head)(X, ws)
        return g, (g @ ws[2]) @ ws[3]

    def logarithm(ws):
        g = jax.grad(head)(X, ws)
        return jnp.square(g @ ws[2]).sum() + jnp.log(1 + jnp.square(g).sum())

    for fun in (returned, logarithm):
        assert_near(*at_once(jaxmp.autocast(fun, dtype), fun)(W), dtype, 4)


def kept(fun, *args):
    """Returns how many arrays of the size of ``X`` the backward pass is given."""
    leaves = jax.tree.leaves(jax.vjp(fun, *args)[1])
    return sum(getattr(leaf, "shape", ()) == X.shape for leaf in leaves)


def test_the_backward_pass_of_a_tanh_reads_what_was_stored():
    def loss(ws):
        x = X
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.square(x).sum()

    cast = jaxmp.autocast(loss, "bfloat16")
    assert kept(cast, [*W]) <= kept(loss, [*W]) + 1  # X is rounded, too
    exact, found = jax.grad(loss)([*W]), jax.grad(cast)([*W])
    assert relative_error(found, exact) < 0.02
