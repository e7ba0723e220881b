"""The plan of a program: what becomes of each equation, before anything runs."""

import gc

import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
from jaxmp._autocast import needs
from jaxmp._autocast.facts import GIVEN, Facts, one_of
from jaxmp._autocast.graph import Demand
from jaxmp._autocast.plan import Planner
from jaxmp._jaxprs import jaxpr as _jaxpr

W, X = jnp.ones((8, 8)), jnp.ones((16, 8))


def planned(fun, *args, planner=None):
    """Returns the plan of a function whose result is returned to the user."""
    planner = planner or Planner(np.dtype("float16"), jaxmp.DEFAULT_OPS)
    jaxpr = jax.make_jaxpr(fun)(*args)
    return planner.program(jaxpr, needs.FULL | needs.DIGITS)


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
        planner.plan(body, ins, Demand((needs.FULL,) * count), ("wide",) * count, ())
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


def test_what_is_moved_from_one_of_several_has_the_facts_that_hold_of_each():
    bfloat16, tangent = np.dtype(jnp.bfloat16), Facts(tangent=True)
    given = Facts(bfloat16, given=True, stored=(1,), repeated=(0, 1))
    computed = Facts(bfloat16, digits=True, repeated=(1,))
    for pair in ([given, computed], [computed, given]):
        assert one_of(pair) == Facts(bfloat16, stored=(), digits=True, repeated=(1,))
    for pair in ([tangent, given], [given, tangent]):
        assert one_of(pair) == Facts(tangent=True)
    assert one_of([given]) is given
