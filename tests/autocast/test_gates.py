"""Gates near one: what multiplies a number many times keeps its digits.

A gate of 0.9975 is 0.996 in bfloat16, and its 256th power 37% where 53% was meant.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import relative_error, traced
from conftest import assert_gradients_near, crossed

BF16 = np.dtype(jnp.bfloat16)


def forgets(p, h, x):
    """A state of which a gate forgets 0.25% in each iteration."""
    h = jax.nn.sigmoid(6 + x @ p["w"]) * h + 0.01 * jnp.tanh(x @ p["u"])
    return h, h @ p["v"]


def zeros_like_first(xs):
    return jnp.zeros_like(xs[0])


def scanned_by(wrap, cell=forgets, state=zeros_like_first):
    def fun(p, xs):
        return lax.scan(wrap(functools.partial(cell, p)), state(xs), xs)[1][-1]

    return fun


def slow_lstm(p, state, x):
    c, h = state
    forget = jax.nn.sigmoid(6 + x @ p["w"] + h @ p["v"])
    c = forget * c + 0.05 * jnp.tanh(x @ p["u"])
    h = jax.nn.sigmoid(x @ p["v"]) * jnp.tanh(c)
    return (c, h), h


def gates_outside(p, xs):
    """A recurrence whose gates are computed for all iterations at once."""

    def step(c, gate_and_entry):
        gate, entry = gate_and_entry
        c = gate * c + (1 - gate) * entry
        return c, c

    gates = jax.nn.sigmoid(6 + xs @ p["w"]), 5 * (xs @ p["u"])
    return lax.scan(step, zeros_like_first(xs), gates)[1][-1] @ p["v"]


def einsum_by_gate(p, xs):
    """A product without a sum multiplies as well."""

    def step(s, x):
        kept = jnp.einsum("bi,bij->bij", jax.nn.sigmoid(6 + x @ p["w"]), s)
        return kept + 0.1 * x[:, :, None] * (x @ p["v"])[:, None], None

    s = lax.scan(step, jnp.zeros((4, 8, 8), xs.dtype), xs)[0]
    return jnp.einsum("bi,bij->bj", xs[0] @ p["u"], s)


def cumulative_product(p, xs):
    gates = jnp.cumprod(jax.nn.sigmoid(6 + xs @ p["w"]), axis=0)
    return (gates * 0.01 * (xs @ p["u"])).sum(0) @ p["v"]


def jitted_in_parallel(p, xs):
    """Gates put together and masked, for a jitted function that multiplies them."""

    @jax.jit
    def states(gates, entries):
        def after(left, right):
            return left[0] * right[0], left[1] * right[0] + right[1]

        return lax.associative_scan(after, (gates, entries))[1]

    one, other = jnp.split(xs @ p["w"], 2, axis=-1)
    gates = [jax.nn.sigmoid(6 + one), jax.nn.sigmoid(5 + other)]
    gates = jnp.where(xs[:, :, :1] > -0.5, jnp.concatenate(gates, -1), 1.0)
    return states(jnp.flip(gates, -1), 0.01 * (xs @ p["u"]))[-1] @ p["v"]


def exponential(p, h, x):
    """What the state takes up is forgotten as well, and slower."""
    h = jnp.exp(-jnp.exp(x @ p["w"] - 7)) * (h + 0.01 * x @ p["u"])
    return h, h @ p["v"]


SLOW = {
    "an exponential": scanned_by(lambda f: f, exponential),
    "remat": scanned_by(jax.checkpoint),
    "lstm": scanned_by(lambda f: f, slow_lstm, lambda xs: (xs[0] * 0, xs[0] * 0)),
    "gates outside": gates_outside,
    "cumprod": cumulative_product,
}


def parameters_and_inputs():
    *keys, key = jax.random.split(jax.random.key(5), 4)
    weights = (jax.random.normal(key, (8, 8)) / 3 for key in keys)
    return dict(zip("wuv", weights, strict=True)), jax.random.normal(key, (256, 4, 8))


@pytest.mark.parametrize("fun", SLOW.values(), ids=SLOW)
def test_what_multiplies_the_carried_state_keeps_its_digits(fun):
    def loss(p, xs):
        return (fun(p, xs) ** 2).mean().astype(jnp.float32)

    assert_gradients_near(loss, BF16, 3, *parameters_and_inputs())


@pytest.mark.parametrize(
    "fun", [einsum_by_gate, jitted_in_parallel], ids=lambda fun: fun.__name__
)
def test_gates_are_found_in_what_multiplies_by_them(fun):
    p, xs = parameters_and_inputs()
    eqns = traced(jaxmp.autocast(jax.grad(lambda *a: fun(*a).sum()), BF16), p, xs)
    gates = [e.outvars[0].aval for e in eqns if e.primitive.name == "logistic"]
    assert gates
    assert {gate.dtype for gate in gates} == {jnp.dtype("float32")}


def test_a_while_multiplies_what_it_carries_by_all_digits_of_a_gate():
    def fun(w, x):
        def step(state):
            n, h = state
            return n + 1, jax.nn.sigmoid(6 + h @ w * 1e-3) * h

        return lax.while_loop(lambda s: s[0] < 512, step, (0, x))[1] @ w

    w, x = jax.random.normal(jax.random.key(6), (2, 8, 8))
    found = jax.jit(jaxmp.autocast(fun, BF16))(w, x)
    assert relative_error(found, jax.jit(fun)(w, x)) < 0.006


PRODUCTS = {
    "cumprod": lambda factors: jnp.cumprod(factors, axis=-1),
    "prod": lambda factors: jnp.tile(jnp.prod(factors, -1, keepdims=True), 8),
    "written out": lambda factors: jnp.stack(
        [functools.reduce(jnp.multiply, factors.T)] * 8, 1
    ),
}


@pytest.mark.needs_no_scale
@crossed("wrap dtype", PRODUCTS, ["float16", "bfloat16"])
def test_a_product_of_parts_is_in_range_where_that_of_float32_is(wrap, dtype):
    """Half of the factors are small and half large: 2^26 is out of float16's range."""

    def loss(p, x):
        z = x @ p["w"]
        return ((wrap(jnp.where(z > 0, 90 * z, -z / 90)) @ p["v"]) ** 2).mean()

    signs = jnp.where(jnp.arange(8) < 4, -1.0, 1.0)
    w = signs * (1 + jax.random.uniform(jax.random.key(0), (8, 8)) / 8) / 8
    p = {"w": w, "v": jax.random.normal(jax.random.key(1), (8, 4))}
    x = 0.9 + jax.random.uniform(jax.random.key(2), (4, 8)) / 8
    assert_gradients_near(loss, dtype, 4, p, x)
