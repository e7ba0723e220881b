"""What an exponential, a logarithm, a divisor, a gate or a loss reads has its digits.

Back to the product that it is made of, also where another product takes the same.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import relative_error
from conftest import crossed, normal, rest_is_evidence

W = normal(0, 64, 64, scale=1 / 8)
X = normal(1, 32, 64)
HALF, SINGLE = np.dtype(jnp.bfloat16), np.dtype(np.float32)
EPS = float(jnp.finfo(HALF).eps)
ACTIVATIONS = {"elu": jax.nn.elu, "softplus": jax.nn.softplus, "mish": jax.nn.mish}
ORDERS = {
    "around": lambda loss, dtype: jaxmp.autocast(jax.grad(loss), dtype),
    "inside": lambda loss, dtype: jax.grad(jaxmp.autocast(loss, dtype)),
}


def loss_of(act):
    return lambda w, x: (act(x @ w) @ w).sum()


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
def test_the_slope_of_a_softplus_is_accurate_far_from_zero(order):
    """As ``exp(x - softplus(x))``, of which XLA rounds one, it is not."""
    w, x = 50 * jnp.eye(64), X.astype(HALF).astype(SINGLE)

    def loss(x):
        h = x @ w
        return jax.nn.softplus(h).sum() + (jax.nn.softplus(h) @ jnp.eye(64)).sum()

    found, exact = jax.jit(order(loss, HALF))(x), jax.jit(jax.grad(loss))(x)
    assert abs(found - exact).max() < 100 * 1.3 * EPS


# Losses.

LOSSES = {
    "sigmoid": optax.sigmoid_binary_cross_entropy,
    "softmax": optax.softmax_cross_entropy,
    "softplus": lambda logits, y: jax.nn.softplus(logits) - y * logits,
}


@pytest.mark.parametrize("scale", [1.0, 32.0])
@pytest.mark.parametrize("loss", rest_is_evidence(LOSSES, "softplus"))
def test_the_gradient_of_a_loss_is_computed_in_float32(loss, scale):
    """Of logits that are right it is small: what is left of one less nearly one."""
    x, y = X.astype(HALF).astype(SINGLE), (X > 0).astype(SINGLE)
    identity = jnp.eye(64)

    def fun(x):
        return loss(scale * x @ identity, y).sum()

    grad = jax.grad(lambda h: loss(scale * h, y).sum())  # before any product
    found = jax.jit(jaxmp.autocast(jax.grad(fun), HALF))(x)
    exact = grad(x)
    assert (abs(found - exact) <= 2 * EPS * abs(exact) + 1e-30).all()


# Places.


def test_it_runs_without_jit():
    grad = jax.grad(loss_of(jax.nn.mish))
    with jax.disable_jit():
        found = jaxmp.autocast(grad, HALF)(W, X)
    assert relative_error(found, jax.jit(grad)(W, X)) < EPS


@crossed("act axis_type", ACTIVATIONS, ["Auto", "Explicit"])
def test_shards_have_their_gradients(act, axis_type):
    kind = getattr(jax.sharding.AxisType, axis_type)
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(kind,))
    spec = jax.P("rows")
    grad = jax.grad(lambda x, w: loss_of(act)(w, x))
    sharded = jax.shard_map(grad, mesh=mesh, in_specs=(spec, jax.P()), out_specs=spec)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, spec))
        found = [jax.jit(jaxmp.autocast(fun, HALF))(x, W) for fun in (sharded, grad)]
    for one in found:
        assert relative_error(one, grad(X, W)) < EPS


# Loops.


def test_a_forward_algorithm_in_a_scan_is_near():
    def loss(w, x):
        h = x @ w

        def step(alpha, row):
            return jnp.logaddexp(alpha, jnp.roll(alpha, 1)) + row, None

        return lax.scan(step, jnp.zeros(64), h)[0].sum() + (h @ w).sum()

    cast = jax.jit(jaxmp.autocast(jax.grad(loss), HALF))
    assert relative_error(cast(W, X), jax.jit(jax.grad(loss))(W, X)) < 0.01


@pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_layers_in_a_scan_have_their_gradients(act):

    def loss(x):
        layer = jax.checkpoint(lambda x, _: (act(x @ W) @ W, None))
        return lax.scan(layer, x, None, 3)[0].sum()

    found = jax.jit(jaxmp.autocast(jax.grad(loss), HALF))(X)
    assert relative_error(found, jax.jit(jax.grad(loss))(X)) < 2 * EPS
