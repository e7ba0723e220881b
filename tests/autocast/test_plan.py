"""The plan of a program: what becomes of each equation, before anything runs."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from jaxmp._autocast import needs
from jaxmp._autocast.facts import GIVEN
from jaxmp._autocast.graph import Trip
from jaxmp._autocast.plan import Planner
from jaxmp._jaxprs import jaxpr as _jaxpr

W, X = jnp.ones((8, 8)), jnp.ones((16, 8))


def planned(fun, *args, planner=None):
    """Returns the plan of a function whose result is returned to the user."""
    planner = planner or Planner(np.dtype("float16"), jaxmp.DEFAULT_OPS)
    jaxpr = jax.make_jaxpr(fun)(*args)
    return planner.program(jaxpr, needs.FULL | needs.DIGITS)


def mean_away(h):
    return h - h.mean(-1, keepdims=True)


# What is made of `X @ W`; then the dtype of that matmul, and the sentence that says so.
CONSUMERS = {
    "another product": (lambda h: h @ W, "half", 2),
    "a product, transposed": (lambda h: h.T @ h, "half", 2),
    "a relu before one": (lambda h: jnp.maximum(h, 0) @ W, "half", 2),
    "a relu by hand": (lambda h: lax.select(h > 0.0, h, 0 * h) @ W, "half", 2),
    "a dropout": (lambda h: ((h > 1.0) * h / 0.9) @ W, "half", 2),
    "a tanh before one": (lambda h: jnp.tanh(h) @ W, "half", 2),
    "a sum": (lambda h: h.sum(), "float32", 3),
    "a shortcut and a norm": (lambda h: (h + mean_away(h) @ W) @ W, "half", 2),
    "an exponential": (jnp.exp, "float32", 3),
    "a softmax": (lambda h: jax.nn.softmax(h) @ W, "float32", 3),
    "a logarithm of a sigmoid": (lambda h: jnp.log(jax.nn.sigmoid(h)), "float32", 3),
    "a divisor": (lambda h: (X / h) @ W, "float32", 3),
    "a mean that is taken away": (lambda h: mean_away(h) @ W, "half", 2),
    "a difference": (lambda h: (h - h[::-1]) @ W, "half", 2),
    "an equality": (lambda h: (h == h[::-1]).sum(), "float32", 3),
    "a scale of a million": (lambda h: (1e6 * h) @ W, "float32", 3),
    "a float32 region": (
        lambda h: jaxmp.float32_region(jnp.matmul)(h, W), "float32", 3
    ),
    "a callback": (
        lambda h: jax.pure_callback(lambda x: x, h, h) @ W, "float32", 3
    ),
    "nobody": (lambda h: W, "float32", 3),
}  # fmt: skip


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
@pytest.mark.parametrize("name", CONSUMERS)
def test_a_matmul_returns_what_its_consumers_need(name, wrap):
    fun, how, rule = CONSUMERS[name]
    plan = planned(lambda w, x: wrap(fun)(x @ w), W, X)
    first = next(x for x in plan.all_steps() if x.eqn.primitive.name == "dot_general")
    assert (first.how, first.rule) == (how, rule)


def inner_loop(c, r, s):
    return lax.scan(lambda c, _: (c * r + s, None), c, None, length=2)[0]


# Iterations, and which of the matmuls `u @ w` and `v @ w` in them are float32.
ITERATIONS = {
    "a decay": (lambda c, r, s: r * c + s, {0, 1}),
    "of a sum": (lambda c, r, s: r * (c + s), {0, 1}),
    "what enters": (lambda c, r, s: c + r * s, {0, 1}),
    "by way of products": (lambda c, r, s: (r * c) @ s, set()),
    "in a loop": (inner_loop, {0, 1}),
}


@pytest.mark.parametrize(("trip", "expected"), ITERATIONS.values(), ids=ITERATIONS)
def test_what_multiplies_what_a_loop_carries_is_float32(trip, expected):
    def fun(w, us, vs):
        return (
            lax.scan(lambda c, x: (trip(c, x[0] @ w, x[1] @ w), None), W, (us, vs))[0]
            @ W
        )

    _, iteration, *_ = planned(fun, W, W[None], W[None]).plans()
    names = [x.eqn.primitive.name for x in iteration.steps]
    u, v = (i for i, name in enumerate(names[:2]) if name == "dot_general")
    found = {i for i in (u, v) if iteration.steps[i].how == "float32"}
    assert found == expected


def test_a_planner_keeps_no_jaxpr_alive():
    # An autocast function lives as long as the program, and may trace again and again.
    gc.freeze()  # what older tests have left takes seconds to search
    planner = Planner(np.dtype("float16"), jaxmp.DEFAULT_OPS)
    # Of functions of its own: JAX keeps what it traces as long as a function lives.
    jaxpr = jax.make_jaxpr(lambda x: jax.checkpoint(lambda x: jnp.tanh(x))(x @ W))(X)
    inner = next(_jaxpr.sub_jaxprs(jaxpr.eqns[-1]))
    for body in (jaxpr, inner):
        ins = [GIVEN] * len(_jaxpr.in_avals(body))
        count = len(_jaxpr.out_avals(body))
        planner.plan(body, ins, Trip((needs.FULL,) * count), ("wide",) * count, ())
    kept = planner._plans, planner.analysis._consumers, planner.analysis._programs
    assert all(len(memo) >= 2 for memo in kept)
    del jaxpr, body, inner
    gc.collect()
    gc.unfreeze()
    assert not any(map(len, kept))


def test_layers_that_share_a_jaxpr_are_planned_once():
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def fun(w, x):
        for _ in range(9):
            x = layer(x, w)
        return x @ w

    plan = planned(fun, W, X)
    assert len(plan.steps) == 10
    # The first is given an argument, and the others what a layer has returned.
    assert len({*plan.plans()}) == 3
