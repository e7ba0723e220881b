"""The sign of what a matmul takes in 16 bits is that of the 16 bits."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jaxmp
from benchmarks.counting import targets
from benchmarks.counting.measure import relative_error
from conftest import at_once, crossed, in_both_orders, normal

W = normal(0, 16, 16, scale=0.3)
# To float16 the first is zero, and so is the gradient of its relu.
X = jnp.tile(jnp.array([2.0**-26, 2.0**-20, -1.0, 1.0]), (16, 4))
ORDERS = {
    "outside": lambda loss, policy: jaxmp.autocast(jax.grad(loss), policy),
    "inside": lambda loss, policy: jax.grad(jaxmp.autocast(loss, policy)),
}


@jax.custom_jvp
def ours(x):
    return jnp.maximum(x, 0.0)


ours.defjvps(lambda t, y, x: jnp.where(x > 0, t, 0.0))

RELUS = {
    "jax.nn": jax.nn.relu,
    "linen": nn.relu,
    "nnx": nnx.relu,
    "a call": jax.jit(jax.nn.relu),
    "a rule": ours,
    "a choice": lambda x: jnp.where(x > 0, x, 0.0),
    "a mask": lambda x: x * (x > 0),
    "relu6": jax.nn.relu6,
}


@pytest.mark.needs_no_scale
@crossed("relu order", RELUS, ORDERS)
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_float16_bfloat16"])
def test_a_relu_that_is_zero_in_16_bits_has_no_slope(relu, order, policy):
    ones = jnp.ones((16, 16))
    grad = order(lambda x: (relu(x) @ ones).sum(), policy)
    np.testing.assert_array_equal(jax.jit(grad)(X)[0, :4], [0, 16, 0, 16])


@pytest.mark.needs_no_scale
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_relu_that_float32_work_reads_too_has_its_own_slope(order):
    ones = jnp.ones((16, 16))

    def loss(x):
        y = jax.nn.relu(x)
        return (y @ ones).sum() + y.sum()

    grad = jax.jit(order(loss, "mixed_float16"))
    np.testing.assert_array_equal(grad(X)[0, :4], [17, 17, 0, 17])


NUMBERS = {
    "relu": jax.nn.relu,
    "max": lambda x: lax.max(x, 0.0),
    "gt": lambda x: jnp.where(lax.gt(x, 0.0), x, 0.0),
    "in a scan": lambda x: lax.scan(
        lambda c, _: (c, jax.nn.relu(x)), 0, None, length=1
    )[1][0],
}


@pytest.mark.parametrize("relu", NUMBERS.values(), ids=NUMBERS)
def test_a_relu_of_a_number_is_that(relu):
    cast = jaxmp.autocast(lambda x: x @ W + relu(1.5), "bfloat16")
    np.testing.assert_array_equal(cast(jnp.zeros((16, 16))), 1.5)


def chain(w, x):
    for _ in range(4):
        x = jax.nn.relu(x @ w)
    return jnp.square(x @ w).mean()


def stream(w, x):
    for _ in range(3):
        h = x @ w
        h = (h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5)
        x = jax.nn.relu(x + h)
    return jnp.square(x @ w).mean()


def scanned(w, x):
    return lax.scan(lambda x, _: (jax.nn.relu(x @ w), None), x, None, length=4)[0].sum()


def leaky(w, x):
    return jnp.square(jax.nn.leaky_relu(x @ w) @ w).mean()


LOSSES = {
    "chain": chain,
    "stream": stream,
    "scanned": scanned,
    "computed again": jax.checkpoint(chain),
    "leaky": leaky,
    "no result": lambda w, x: jax.jvp(jax.nn.relu, (x @ w,), (x @ w,))[1].sum(),
}


@pytest.mark.needs_no_scale
@crossed("loss policy", LOSSES, ["bfloat16", "float16", "mixed_float16_bfloat16"])
def test_gradients_of_relus_are_near_those_of_float32(loss, policy):
    exact, *found = at_once(*in_both_orders(loss, policy))(W, normal(1, 64, 16))
    for value, grad in found:
        np.testing.assert_allclose(value, exact[0], rtol=0.02)
        assert relative_error(grad, exact[1]) < 0.05


def test_a_slope_reads_the_result_of_its_relu_and_not_its_argument():
    eqns = jax.make_jaxpr(jaxmp.autocast(jax.grad(chain)))(W, X).eqns
    made_by = {x: eqn for eqn in eqns for x in eqn.outvars}
    slopes = [eqn for eqn in eqns if eqn.primitive.name == "gt"]
    assert len(slopes) == 4
    for slope in slopes:
        *_, result = made_by[slope.invars[0]].invars
        assert result.aval.dtype == jnp.bfloat16
        assert made_by[result].primitive.name == "custom_jvp_call"


@pytest.mark.skipif(bool(targets.unavailable()), reason=str(targets.unavailable()))
def test_the_argument_of_a_relu_is_not_stored_beside_its_result():
    """Bytes for each value: 40 with the arguments, and 32 without."""
    rows, width = 8192, 256
    w, x = (jax.ShapeDtypeStruct((n, width), jnp.float32) for n in (width, rows))
    grad = jaxmp.autocast(jax.grad(chain), "bfloat16")
    memory = targets.compiled(grad, w, x).memory_analysis()
    assert memory.temp_size_in_bytes < 36 * rows * width
