"""What a function hands back as it was is known, and nothing else is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmp._jaxprs.state import sources

A, B = jnp.arange(3.0), jnp.arange(3.0) + 5


def swapped(a, b):
    return lax.scan(lambda c, _: ((c[1], c[0]), None), (a, b), length=4)[0]


def counted(a, b):
    return lax.scan(lambda c, _: ((c[0], c[1] + 1), None), (a, b), length=4)[0]


def sliced(a, b):
    return lax.scan(lambda last, x: (x[0], x), jnp.zeros(()), (a, b))[1]


def last_everywhere(a, b):
    """The last slice, stacked to the shape of the whole."""
    last, _ = lax.scan(lambda last, x: (x, None), jnp.zeros(()), a)
    return lax.scan(lambda c, _: (c, last), 0, length=3)[1], b


def outer_slice(a, b):
    """Each slice, stacked by a loop inside."""

    def step(_, row):
        return None, lax.scan(lambda c, _: (c, row), 0, length=3)[1]

    return lax.scan(step, None, a)[1], b


def started_elsewhere(a, b):
    return lax.fori_loop(0, 2, lambda i, c: (a, c[1]), (b, b))


def until(a, b):
    def body(c):
        return c[0] + 1, c[1], jnp.flip(c[2])

    return lax.while_loop(lambda c: c[0] < 3, body, (0, a, b))[1:]


def chosen(a, b):
    return lax.cond(
        a.sum() > 0, lambda a, b: (a, b), lambda a, b: (a, jnp.flip(b)), a, b
    )


@jax.custom_vjp
def ruled(a, b):
    return a, b * 2


ruled.defvjp(lambda a, b: (ruled(a, b), None), lambda _, g: g)

PROGRAMS = {
    "as it is": (lambda a, b: (a, b), [0, 1]),
    "the other way": (lambda a, b: (b, a), [1, 0]),
    "computed": (lambda a, b: (a + 0, b * 1), [None, None]),
    "jit": (jax.jit(lambda a, b: (a, b * 2)), [0, None]),
    "remat": (jax.checkpoint(lambda a, b: (jnp.sin(a), b)), [None, 1]),
    "in each other": (jax.jit(jax.checkpoint(lambda a, b: (a, b))), [0, 1]),
    "a carry": (counted, [0, None]),
    "swapped": (swapped, [None, None]),
    "slices": (sliced, [0, 1]),
    "one slice": (last_everywhere, [None, 1]),
    "a loop without a carry": (
        lambda a, b: (lax.scan(lambda c, x: (c, x), None, a)[1], b),
        [0, 1],
    ),
    "a slice of a loop around": (outer_slice, [None, 1]),
    "a carry that began as another": (started_elsewhere, [None, 1]),
    "a while": (until, [0, None]),
    "a cond": (chosen, [0, None]),
    "a rule": (ruled, [0, None]),
    "a constant": (lambda a, b: (jnp.arange(3.0), b), [None, 1]),
}


@pytest.mark.parametrize(("fun", "expected"), PROGRAMS.values(), ids=PROGRAMS)
def test_what_is_handed_back_is_known(fun, expected):
    assert sources(lambda *args: list(fun(*args)), [A, B]) == expected
    for out, source in zip(fun(A, B), expected, strict=True):
        if source is not None:
            np.testing.assert_array_equal(out, (A, B)[source])


def test_shards_may_lie_elsewhere_afterwards():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    spec = jax.sharding.PartitionSpec
    moved = jax.shard_map(
        lambda a: a, mesh=mesh, in_specs=spec("x"), out_specs=spec("y"), check_vma=False
    )
    assert sources(lambda a: [moved(a)], [jnp.arange(4.0)]) == [None]
