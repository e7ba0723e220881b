"""What one call computes does not depend on the calls before it.

Each pair of calls runs in both orders in one process, and each call gives what it gives
where nothing was kept: JAX's caches and ours are emptied before it.
"""

import functools
import gc
import sys
import threading

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmp
from benchmarks.counting.measure import dtypes, traced
from conftest import bits, mapped, normal, rest_is_evidence

SHAPE = 4, 8, 2, 8  # examples, places, heads, sizes


def mesh_of(count, name="d"):
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((count,), (name,), auto, devices=jax.devices()[:count])


def matmul(q):
    return jnp.tanh(q @ q.swapaxes(2, 3)) @ q


def layers(q):
    w = jnp.eye(8) + 1 / 3

    def layer(c, _):
        return jax.nn.gelu(c @ w) / 4, None

    return lax.scan(layer, q, None, length=2)[0] @ w


@jax.jit
def helper(q):
    return jax.nn.softmax(q @ q.swapaxes(2, 3)) @ q


FUNS = {
    "attention": lambda q: jaxmp.dot_product_attention(q, q, q),
    "matmul": matmul,
    "a scan": layers,
    "a helper": lambda q: helper(helper(q)),
}


def gradient(around, inside, policy):
    """Returns a gradient by autocast around it, or in what is mapped."""

    def step(fun):
        cast = functools.partial(jaxmp.autocast, policy=policy)
        if inside:
            return jax.grad(lambda q: around(cast(fun))(q).sum())
        return cast(jax.grad(lambda q: around(fun)(q).sum()))

    return step


def over(count, *, check_vma=True, name="d"):
    def around(fun):
        return mapped(fun, mesh_of(count, name), P(name), P(name), check_vma=check_vma)

    return around


def by_vmap(fun):
    return jax.vmap(lambda q: fun(q[None])[0])


def alone(fun):
    return fun


def with_residuals(fun):
    return jax.checkpoint(fun)


# Each is a step, of a function.
CALLS = {
    "outside": gradient(over(4), False, "mixed_bfloat16"),
    "inside": gradient(over(4), True, "mixed_bfloat16"),
    "unchecked": gradient(over(4, check_vma=False), True, "mixed_bfloat16"),
    "two devices": gradient(over(2), True, "mixed_bfloat16"),
    "another axis": gradient(over(4, name="e"), True, "mixed_bfloat16"),
    "float16": gradient(over(4), True, "mixed_float16"),
    "hybrid": gradient(over(4), True, "mixed_float16_bfloat16"),
    "vmap": gradient(by_vmap, True, "mixed_bfloat16"),
    "vmap outside": gradient(by_vmap, False, "mixed_bfloat16"),
    "alone": gradient(alone, True, "mixed_bfloat16"),
    "checkpoint": gradient(with_residuals, False, "mixed_bfloat16"),
}


def forget():
    """Empties all caches, ours by their methods wherever they are in the package."""
    jax.clear_caches()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "jaxmp":
            for x in list(vars(module).values()):
                if hasattr(x, "cache_clear"):
                    x.cache_clear()
    gc.collect()


def value(call, fun):
    return bits(jax.jit(CALLS[call](FUNS[fun]))(normal(0, *SHAPE)))


@functools.cache
def fresh(call, fun):
    forget()
    return value(call, fun)


@pytest.mark.parametrize(
    "fun", rest_is_evidence({x: x for x in FUNS}, "attention", "a helper")
)
def test_calls_give_what_they_give_alone(fun):
    expected = {call: fresh(call, fun) for call in CALLS}
    for order in ([*CALLS], [*CALLS][::-1]):
        forget()
        for call in order:
            assert value(call, fun) == expected[call], (call, order)


def test_calls_in_threads_give_what_they_give_alone():
    calls = "outside", "inside", "unchecked", "alone", "float16"
    expected = {call: fresh(call, "attention") for call in calls}
    assert in_threads({x: lambda x=x: value(x, "attention") for x in calls}) == expected


def in_threads(todo):
    """Returns what functions return that begin at once, each in its thread."""
    found, start = {}, threading.Barrier(len(todo))

    def run(name, fun):
        start.wait()
        found[name] = fun()

    forget()
    threads = [threading.Thread(target=run, args=x) for x in todo.items()]
    for x in threads:
        x.start()
    for x in threads:
        x.join()
    return found


# JAX shares the jaxpr of a jitted helper between programs. More than four gates in a
# row are float32, one is not.


@jax.jit
def gated(h, state):
    return jax.nn.sigmoid(h + 6) * state


def often(x, w):
    state = x @ w
    for _ in range(6):
        state = gated(x @ w, state)
    return state @ w


def once(x, w):
    return gated(x @ w, x @ w) @ w


def autocast_of_any():
    return jaxmp.autocast(lambda fun, *args: fun(*args), "mixed_bfloat16")


@pytest.mark.parametrize("first", [often, once])
def test_a_program_keeps_nothing_in_float32_for_another_that_shares_a_helper(first):
    args = normal(0, 8, 8), normal(1, 8, 8)
    programs = [often, once]
    cast = autocast_of_any()

    def equations_of(cast, fun):
        eqns = traced(lambda *args: cast(fun, *args), *args)
        return [(eqn.primitive.name, dtypes(eqn)) for eqn in eqns]

    expected = {fun: equations_of(autocast_of_any(), fun) for fun in programs}
    order = sorted(programs, key=lambda x: x is not first)
    assert {fun: equations_of(cast, fun) for fun in order} == expected
    todo = {fun: lambda fun=fun: equations_of(cast, fun) for fun in order}
    assert in_threads(todo) == expected
