"""Where facts of values join in a walk, and how often it enters what is shared."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxmp._jaxprs.walk import Backward, Forward


def test_what_a_choice_says_goes_to_what_is_compared_for_it():
    def chosen(n, x):
        return lax.cond(n > 0, jnp.sin, jnp.cos, x)

    walk = Backward(lambda eqn, outs, at: [max(outs)] * len(eqn.invars), choice=2)
    assert walk.through(jax.make_jaxpr(chosen)(1, 1.0), [1]) == [2, 1]


def test_backward_facts_join_and_go_around_loops_until_no_more_are_found():
    def shifted(x, y, z):
        return lax.fori_loop(0, 9, lambda i, c: (c[1], c[2], c[2]), (x, y, z))

    walk = Backward(lambda eqn, outs, at: [0] * len(eqn.invars))
    assert walk.through(jax.make_jaxpr(shifted)(1, 1, 1), [1, 2, 4]) == [0, 1, 7]


def test_forward_facts_of_all_branches_are_joined():
    def chosen(x, y):
        return lax.cond(x > 0, lambda: (x, y), lambda: (y, y))

    walk = Forward(lambda eqn, ins, at: [0], max, lambda *_: 0)
    assert walk.through(jax.make_jaxpr(chosen)(1.0, 1.0), [1, 2]) == [2, 2]
    assert walk.through(jax.make_jaxpr(chosen)(1.0, 1.0), [2, 1]) == [2, 1]


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
    assert Forward(transfer, max, lambda *_: 0).through(jaxpr, [1]) == [1]
    assert Backward(transfer).through(jaxpr, [1]) == [1]
    assert len(seen) <= 4
