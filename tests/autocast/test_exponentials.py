"""What an exponential, a logarithm, a divisor, a gate or a loss reads has its digits.

Back to the product that it is made of, also where another product takes the same.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import relative_error, traced
from conftest import normal, rest_is_evidence

W = normal(0, 64, 64, scale=1 / 8)
X = normal(1, 32, 64)
HALF, SINGLE = np.dtype(jnp.bfloat16), np.dtype(np.float32)
EPS = float(jnp.finfo(HALF).eps)
ACTIVATIONS = {
    "elu": jax.nn.elu,
    "softplus": jax.nn.softplus,
    "mish": jax.nn.mish,
}
ORDERS = {
    "around": lambda loss, dtype: jaxmp.autocast(jax.grad(loss), dtype),
    "inside": lambda loss, dtype: jax.grad(jaxmp.autocast(loss, dtype)),
}


def loss_of(act):
    return lambda w, x: (act(x @ w) @ w).sum()


def equations(fun, *args) -> list[Any]:
    return [*traced(fun, *args)]


def products(fun, *args):
    """Returns the dtypes that products return, in the order of the program."""
    eqns = equations(fun, *args)
    return [e.outvars[0].aval.dtype for e in eqns if e.primitive.name == "dot_general"]


@pytest.mark.parametrize("dtype", [HALF, np.dtype(np.float16)])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_an_activation_with_an_exponential_reads_float32_sums(act, order, dtype):
    cast = order(loss_of(act), dtype)
    assert products(cast, W, X)[0] == SINGLE
    found, exact = jax.jit(cast)(W, X), jax.jit(jax.grad(loss_of(act)))(W, X)
    assert relative_error(found, exact) < jnp.finfo(dtype).eps


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
def test_the_slope_of_a_softplus_is_accurate_far_from_zero(order):
    """As ``exp(x - softplus(x))``, of which XLA rounds one, it is not."""
    w, x = 50 * jnp.eye(64), X.astype(HALF).astype(SINGLE)

    def loss(x):
        h = x @ w
        return jax.nn.softplus(h).sum() + (jax.nn.softplus(h) @ jnp.eye(64)).sum()

    found, exact = jax.jit(order(loss, HALF))(x), jax.jit(jax.grad(loss))(x)
    assert abs(found - exact).max() < 100 * 1.3 * EPS


@pytest.mark.parametrize("scaled", [False, True])
def test_one_is_added_to_an_exponential_in_float32(scaled):
    def fun(w, x, scale):
        h = x @ w
        return (jax.nn.elu(h * scale if scaled else h) + 1) @ w

    eqns = equations(jaxmp.autocast(fun, HALF), W, X, jnp.ones(64))
    added = [e.outvars[0].aval.dtype for e in eqns if e.primitive.name == "add"]
    assert added == [SINGLE]


# Digits that are needed. Products take the result in 16 bits as well.


@jax.custom_jvp
def logaddexp(h):
    return jnp.exp(h)


logaddexp.defjvps(lambda t, y, h: t * y)

NEEDED = {
    "a variance under a logarithm": lambda h: jnp.log(jax.nn.softplus(h)),
    "a step under an exponential": lambda h: jnp.exp(-jax.nn.softplus(h) * 8),
    "two variables": lambda h: jnp.logaddexp(h, h[::-1]),
    "a softmax": jax.nn.softmax,
    "an elu of a difference": lambda h: jax.nn.elu(h - h[::-1]),
    "a softplus of a difference": lambda h: jax.nn.softplus(h - h.mean(0)),
    "turned around": lambda h: jnp.exp(jnp.minimum(h, 0) / -2),
    "a region's softplus": jaxmp.float32_region(jax.nn.softplus),
}


@pytest.mark.parametrize("fun", NEEDED.values(), ids=NEEDED)
def test_what_is_made_of_all_digits_keeps_them(fun):
    def both(w, x):
        h = x @ w
        return (fun(h) @ w).sum() + (h @ w).sum()

    for cast in (both, jax.grad(both)):
        assert products(jaxmp.autocast(cast, HALF), W, X)[0] == SINGLE


def test_a_scale_that_is_divided_by_elsewhere_keeps_its_digits():
    """As in a variational autoencoder: the same softplus scales what products take."""

    def loss(w, x):
        scale = jax.nn.softplus(x @ w)
        sample = (X * scale) @ w
        return jnp.square(sample).sum() + (jnp.square(x / scale) + jnp.log(scale)).sum()

    cast = jaxmp.autocast(jax.value_and_grad(loss), HALF)
    assert products(cast, W, X)[0] == SINGLE


# Losses.

LOSSES = {
    "sigmoid": optax.sigmoid_binary_cross_entropy,
    "softmax": optax.softmax_cross_entropy,
    "softplus": lambda logits, y: jax.nn.softplus(logits) - y * logits,
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_a_loss_behind_an_activation_reads_float32_logits(loss):
    def fun(w, x):
        return loss(jax.nn.silu(x @ w) @ w, jax.nn.softmax(x)).sum()

    cast = jaxmp.autocast(jax.value_and_grad(fun), HALF)
    assert products(cast, W, X)[:2] == [HALF, SINGLE]


def test_a_loss_reads_float32_logits_that_a_product_takes_too():
    def fun(w, x):
        h = x @ w
        return jax.nn.softplus(h).sum() + (h @ w).sum()

    assert products(jaxmp.autocast(jax.grad(fun), HALF), W, X)[0] == SINGLE


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


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("act", ACTIVATIONS.values(), ids=ACTIVATIONS)
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


def gated(act):
    """Returns the sum of states, each of which the gates decay by."""

    def loss(w, x):
        h = x @ w
        decays = act(h)

        def step(state, gate):
            return state * gate + 1, None

        state = lax.scan(step, jnp.ones(h.shape[1:]), decays)[0]
        return state.sum() + (decays @ w).sum() + (h @ w).sum()

    return loss


GATES = {
    "elu": lambda h: jnp.exp(jnp.minimum(h, 0)),
}


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_what_decays_a_state_is_made_of_all_digits(gate):
    cast = jaxmp.autocast(jax.grad(gated(gate)), HALF)
    assert products(cast, W, X)[0] == SINGLE


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


# Derivatives.


@pytest.mark.parametrize("act", [jax.nn.softplus])
def test_an_activation_may_be_differentiated_again(act):

    def twice(cast):
        grad = cast(jax.grad(lambda x: loss_of(act)(W, x)))
        return jax.jit(jax.grad(lambda x: (grad(x) ** 2).sum()))(X)

    def all_of_it(x):
        grad = jax.grad(lambda x: loss_of(act)(W, x))
        return (grad(x) ** 2).sum()

    exact = twice(lambda grad: grad)
    found = twice(lambda grad: jaxmp.autocast(grad, HALF))
    assert relative_error(found, exact) < 4 * EPS
    around = jax.jit(jaxmp.autocast(jax.grad(all_of_it), HALF))(X)
    assert relative_error(around, exact) < 4 * EPS
