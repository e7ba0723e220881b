"""A `jit`, a call and a name change the dtype of no value."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from random_calls import CALLS, changed, drawn

import jaxmp
from benchmarks.counting.measure import traced
from conftest import normal

both_dtypes = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def named(fun, *args):
    """Returns the dtype of each value with a name, the first where there are two."""
    found = {}
    for eqn in traced(fun, *args):
        if eqn.primitive.name == "name":
            found.setdefault(eqn.params["name"], eqn.outvars[0].aval.dtype)
    return found


def cell(act):
    """An LSTM whose `tanh` is called in some way."""

    def fun(p, x):
        def trip(carry, x):
            c, h = carry
            i, f, g, o = jnp.split(x @ p["u"] + h @ p["w"] + p["b"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * act(g)
            a = checkpoint_name(act(c), "act")
            h = checkpoint_name(jax.nn.sigmoid(o) * a, "h")
            return (c, h), h

        start = jnp.zeros((4, 8)), jnp.zeros((4, 8))
        return jnp.mean((lax.scan(trip, start, x)[1] @ p["o"]) ** 2)

    return fun


def gate(act):
    """A gate that is made of what a norm returns."""

    def fun(p, x):
        h = x @ p["o"].T
        h = h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-6)
        a = checkpoint_name(act(h), "act")
        return jnp.mean(checkpoint_name(a * (x @ p["o"].T), "h") @ p["o"])

    return fun


def difference(act):
    """Sums of inputs and of a `tanh` of a float32 difference."""

    def fun(p, x):
        y = x - x @ p["w"][:, :8]
        a = checkpoint_name(act(y) + p["b"][:8], "act")
        return jnp.mean(checkpoint_name(a + p["b"][8:16], "h") @ p["w"])

    return fun


@both_dtypes
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("program", [cell, gate, difference])
def test_an_activation_that_is_called_changes_no_dtype(program, call, dtype):
    p = {"u": normal(0, 8, 32), "w": normal(1, 8, 32), "b": normal(2, 32)}
    p["o"] = normal(3, 8, 8)
    plain, called = (
        named(jaxmp.autocast(program(act), dtype), p, normal(4, 5, 4, 8))
        for act in (jnp.tanh, CALLS[call](lambda x: jnp.tanh(x)))
    )
    assert plain == called
    assert len(plain) == 2


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "with gradients"])
@pytest.mark.parametrize("seed", range(16))
def test_calls_of_parts_of_a_random_program_change_no_dtype(seed, backward):
    hold(seed, backward)


def hold(seed, backward):
    program, dtype = drawn(seed), ("bfloat16", "float16")[seed % 2]
    assert not changed(program, dtype, backward=backward), program


@pytest.mark.evidence
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "with gradients"])
@pytest.mark.parametrize("seeds", range(0, 400, 50))
def test_calls_of_parts_of_any_program_change_no_dtype(seeds, backward):
    for seed in range(seeds, seeds + 50):
        hold(seed, backward)
