"""Facts are followed through calls, branches and loops, forward and backward."""

import functools
import operator

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmp._jaxprs.places import Place
from jaxmp._jaxprs.walk import Backward, Forward


def either(bits):
    return functools.reduce(operator.or_, bits, 0)


def forward(fun, count):
    """Returns of which arguments each result is made, as bits."""
    jaxpr = jax.make_jaxpr(fun)(*[jnp.ones(2)] * count)
    walk = Forward(
        lambda e, ins, at: [either(ins)] * len(e.outvars), either, lambda x, at: 0
    )
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


def iterations_of(fun, *args):
    """Returns for each sine of a program how often it runs, as the walk is told."""
    found = []

    def transfer(eqn, ins, at):
        if eqn.primitive.name == "sin" and at.place.times:
            found.append((at.place.times, at.place.module, *ins))
        return [either(ins)] * len(eqn.outvars)

    jaxpr = jax.make_jaxpr(fun)(*args)
    ins = [1 << i for i in range(len(args))]
    Forward(transfer, either, lambda x, at: 0).through(jaxpr, ins, (), Place())
    return found


def test_a_walk_with_places_counts_once_and_with_all_that_is_known():
    def inner(c, _):
        return (c[1], jnp.sin(c[0])), None

    def outer(c, _):
        with jax.named_scope("layer"):
            return lax.scan(inner, c, length=3)[0], None

    found = iterations_of(lambda x, y: lax.scan(outer, (x, y), length=5)[0], 1.0, 2.0)
    assert found == [(15, "layer", 3)]


def test_a_walk_with_places_enters_the_branch_for_a_gpu():
    def fun(x):
        return lax.platform_dependent(x, cuda=jnp.sin, default=lambda x: jnp.sin(x + x))

    assert len(iterations_of(fun, 1.0)) == 1


def test_a_while_loop_may_return_what_it_is_given():
    def fun(n, x, y):
        start = jnp.sum(n), x
        return lax.while_loop(lambda c: c[0] < n[0], lambda c: (c[0] + 1, y), start)[1]

    assert forward(fun, 3) == [6]


def test_what_is_done_with_a_call_is_said_by_enter():
    def enter(eqn, facts, at):
        return [8] * len(eqn.outvars) if eqn.primitive.name == "scan" else [0]

    jaxpr = jax.make_jaxpr(scanned)(*[jnp.ones(2)] * 3)
    walk = Forward(lambda *_: [1], either, lambda *_: 0, enter=enter)
    assert walk.through(jaxpr, [0, 0, 4]) == [8, 8, 4]
    back = Backward(lambda eqn, *_: [1] * len(eqn.invars), enter=lambda *_: [8, 8])
    assert back.through(jaxpr, [0, 0, 4])[1:] == [8, 4]


def test_a_function_that_is_shared_is_entered_once():
    def twice(fun):
        return jax.jit(lambda x: fun(fun(x)))

    fun, seen = jnp.sin, []
    for _ in range(12):
        fun = twice(fun)

    def transfer(eqn, facts, at):
        seen.append(eqn)
        return [1]

    jaxpr = jax.make_jaxpr(fun)(1.0)
    assert Forward(transfer, either, lambda *_: 0).through(jaxpr, [1]) == [1]
    assert Backward(transfer).through(jaxpr, [1]) == [1]
    assert len(seen) <= 4
