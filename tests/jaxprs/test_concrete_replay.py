"""Replaying jaxprs: what changes nothing computes the same, and counts what runs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxmp._jaxprs import jaxpr as _jaxpr
from jaxmp._jaxprs.places import Place
from jaxmp._jaxprs.replay import Replay

X = jnp.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.5]])


class Value(NamedTuple):
    array: Any


class Counted(Replay):
    """Applies each operation, and counts the sines in the order of bodies."""

    value = Value

    def __init__(self, platform, axes=()):
        super().__init__(platform, axes=axes)
        self.sines, self.inner = 0, []

    def inside(self, scalars, axes):
        return Counted(self.platform, axes)

    def operation(self, eqn, ins, place):
        self.sines += eqn.primitive.name == "sin"
        return [*map(Value, _jaxpr.bind(eqn, [x.array for x in ins]))]

    def seen(self):
        return jnp.int32(self.sines) + sum(self.inner)

    def results(self, eqn, arrays, bodies):
        kind = _jaxpr.call_kind(eqn)
        for body in bodies[kind == "while" :]:
            state, stacked = body.seen if kind in ("scan", "while") else ((), body.seen)
            self.inner.append(state if kind == "while" else jnp.sum(stacked))
        return [*map(Value, arrays)]

    def first(self, seen, length):
        return jnp.int32(0) if length is None else ()

    def after(self, state, seen):
        return ((), seen) if isinstance(state, tuple) else (state + seen, ())

    def together(self, seen, axes):
        return jax.lax.psum(jax.lax.pcast(seen, axes, to="varying"), axes)


def looped(x, n=3):
    return jax.lax.while_loop(
        lambda s: s[0] < n, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x)
    )[1]


def sharded(x):
    mesh = Mesh(jax.devices()[:2], "d")
    return jax.shard_map(
        lambda x: jax.lax.psum(jnp.sin(x), "d"),
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P(),
    )(x)


@jax.custom_vjp
def ruled(x):
    return jnp.sin(x)


ruled.defvjp(lambda x: (jnp.sin(x), x), lambda x, t: (t * jnp.cos(x),))

# A program, and how many sines run in it.
PROGRAMS = {
    "jit": (jax.jit(jnp.sin), 1),
    "scan": (lambda x: jax.lax.scan(lambda c, t: (jnp.sin(c) + t, c), x[0], x), 2),
    "reversed": (
        lambda x: jax.lax.scan(lambda c, t: (jnp.sin(c * t), t), x[0], x, reverse=True),
        2,
    ),
    "while": (looped, 3),
    # The loop goes on while any example does.
    "batch": (lambda x: jax.vmap(looped)(x, jnp.array([1, 4])), 4),
    "cond": (lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), 1),
    "not taken": (lambda x: jax.lax.cond(x[0, 0] < 0, jnp.sin, jnp.cos, x), 0),
    "rule": (jax.grad(lambda x: ruled(x).sum()), 1),
    "nested": (lambda x: jax.lax.map(lambda x: looped(x, 2), x), 4),
    "remat": (
        jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(x) ** 2)(x).sum()),
        2,
    ),
    "shard_map": (sharded, 2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_replay_that_changes_nothing_computes_the_same_and_sees_all(name):
    fun, sines = PROGRAMS[name]
    jaxpr, shapes = jax.make_jaxpr(fun, return_shape=True)(X)

    @jax.jit
    def replayed(x):
        replay = Counted("cpu")
        outs = replay.run(jaxpr, [Value(x)], Place())
        return [x.array for x in outs], replay.seen()

    outs, seen = replayed(X)
    expected = jax.tree.leaves(fun(X))
    assert len(outs) == len(jax.tree.leaves(shapes))
    for x, y in zip(outs, expected, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=1e-6)
    assert seen == sines
