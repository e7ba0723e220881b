"""Facts are followed through calls, branches and loops, forward and backward."""

import functools
import operator

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmp._jaxprs.walk import Backward, Forward


def either(bits):
    return functools.reduce(operator.or_, bits, 0)


def forward(fun, count):
    """Returns of which arguments each result is made, as bits."""
    jaxpr = jax.make_jaxpr(fun)(*[jnp.ones(2)] * count)
    walk = Forward(lambda e, ins, at: [either(ins)] * len(e.outvars), either, known=0)
    return walk.through(jaxpr, [1 << i for i in range(count)])


def backward(fun, count, outs):
    """Returns into which results each argument goes, as bits."""
    jaxpr = jax.make_jaxpr(fun)(*[jnp.ones(2)] * count)
    walk = Backward(lambda e, outs, at: [either(outs)] * len(e.invars), choice=1)
    return walk.through(jaxpr, outs)


def shifted(x, y, z):
    """The first iteration has no use for x, and the last has seen y and z."""
    return lax.fori_loop(0, 9, lambda i, c: (c[1], c[2], c[2]), (x, y, z))


def scanned(x, y, z):
    carry, stacked = lax.scan(lambda c, s: (c + s, c), x[0], y)
    return carry, stacked, z


def chosen(x, y, z):
    return *lax.cond(x[0] > 0, lambda: (y, z), lambda: (z, z)), x


@pytest.mark.parametrize(
    ("fun", "made", "goes"),
    [
        (lambda x, y, z: (x + y, jax.jit(jnp.sin)(z), y), [3, 4, 2], [1, 5, 2]),
        (shifted, [6, 4, 4], [0, 1, 7]),
        (chosen, [6, 4, 1], [5, 1, 3]),
        (scanned, [3, 3, 4], [3, 3, 4]),
    ],
)
def test_facts_go_everywhere_that_values_go(fun, made, goes):
    assert forward(fun, 3) == made
    assert backward(fun, 3, [1, 2, 4]) == goes


def test_backward_facts_join_where_a_value_is_read_twice():
    assert backward(lambda x: (x, x), 1, [2, 4]) == [6]


def test_the_test_of_a_while_reads_too():
    jaxpr = jax.make_jaxpr(lambda n: lax.while_loop(lambda i: i < n, lambda i: i, 0))(3)
    walk = Backward(lambda e, outs, at: [either(outs)] * len(e.invars), test=8)
    assert walk.through(jaxpr, [0]) == [8]
