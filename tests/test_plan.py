"""Looking ahead, alone: a plan is made of a jaxpr, and nothing is emitted."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from jaxmp import _jaxpr
from jaxmp._planner import Planner

X, W = jnp.ones((4, 8)), jnp.ones((8, 8))


def planned(fun, *args, wanted=("original",), ops=jaxmp.DEFAULT_OPS, paths=()):
    """Returns the plan of ``fun`` and the names of its operations."""
    planner = Planner(np.dtype(jnp.bfloat16), ops, paths)
    jaxpr = jax.make_jaxpr(fun)(*args)
    return planner.plan(jaxpr, wanted), [eqn.primitive.name for eqn in jaxpr.eqns]


def rules(fun, *args, **options):
    plan, names = planned(fun, *args, **options)
    return dict(zip(names, plan.rules, strict=True))


def wants(fun, *args, **options):
    plan, names = planned(fun, *args, **options)
    return {name: want for name, (want,) in zip(names, plan.wants, strict=True)}


def test_a_plan_is_printed_line_by_line():
    def layer(x, w):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    plan, _ = planned(layer, X, W)
    assert str(plan).splitlines() == [
        "allow   dot_general             float32[4,8] 16-bit",
        "infer   tanh                    float32[4,8] stored",
        "allow   dot_general             float32[4,8] original",
        "deny    reduce_sum              float32[] original",
    ]


def test_each_rule():
    def fun(x, w):
        weak = lax.convert_element_type_p.bind(
            x, new_dtype=np.dtype(np.float32), weak_type=True, sharding=None
        )
        h = lax.tanh(lax.dot(weak, w))
        return lax.cond(jnp.array(True), lambda x: x, lambda x: -x, lax.exp(h))

    assert rules(fun, X, W) == {
        "convert_element_type": "retype",
        "dot_general": "allow",
        "tanh": "infer",
        "exp": "deny",
        "cond": "call",
    }


def test_what_is_kept_by_the_user_is_denied():
    def fun(x, w):
        with jax.named_scope("head"):
            return x @ w

    assert rules(fun, X, W) == {"dot_general": "allow"}
    assert rules(fun, X, W, paths=("head",)) == {"dot_general": "deny"}
    ops = jaxmp.DEFAULT_OPS.with_deny("dot_general")
    assert rules(fun, X, W, ops=ops) == {"dot_general": "deny"}
    assert rules(jaxmp.float32_region(fun), X, W) == {"dot_general": "deny"}


def test_what_no_product_takes_stays_as_it_was():
    def logits(x, w):
        return jnp.tanh(x @ w)

    assert wants(logits, X, W)["dot_general"] == "original"
    assert wants(logits, X, W, wanted=("16-bit",))["dot_general"] == "16-bit"


def test_what_a_steep_function_is_computed_from_keeps_its_digits():
    def fun(x, w):
        p = jnp.tanh(x @ w)
        return jnp.sum(jnp.log(1 - p)) + jnp.sum(p @ w)

    found = wants(fun, X, W)
    assert found["tanh"] == found["sub"] == "digits"


def test_what_a_loop_carries_is_read_once_more():
    # The carry goes into a product in the next round, but must keep its type; the
    # logarithm of the next round needs the digits of this one.
    def body(carry, w):
        return jnp.log(carry) @ w, None

    def fun(x, ws):
        return lax.scan(body, x, ws)[0]

    planner = Planner(np.dtype(jnp.bfloat16), jaxmp.DEFAULT_OPS)
    (scan,) = jax.make_jaxpr(fun)(X, jnp.ones((3, 8, 8))).eqns
    assert planner.wanted_inside(scan, ("16-bit",), (), frozenset()) == ("digits",)


@pytest.mark.parametrize("wanted", ["16-bit", "original", "digits"])
def test_a_plan_is_made_once_for_each_wish(wanted):
    planner = Planner(np.dtype(jnp.bfloat16), jaxmp.DEFAULT_OPS)
    jaxpr = jax.make_jaxpr(jnp.tanh)(X)
    assert planner.plan(jaxpr, (wanted,)) is planner.plan(jaxpr, (wanted,))
    assert planner.plan(jaxpr, (wanted,)).wants == [(wanted,)]


@pytest.mark.parametrize("kind", [jnp.int8, jnp.bool_])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_product_with_integers_is_one_in_either_order(kind, swapped):
    args = (jnp.ones((8, 8), kind), W)[:: -1 if swapped else 1]
    assert rules(lax.dot, *args)["dot_general"] == "allow"


def test_an_outer_product_is_elementwise_work_with_groups_too():
    def outer(x, y):
        return lax.ragged_dot(x, y, jnp.array([4], jnp.int32))

    assert rules(outer, X, jnp.ones((1, 8, 8)))["ragged_dot_general"] == "allow"
    thin = jnp.ones((4, 1)), jnp.ones((1, 1, 8))
    assert rules(outer, *thin)["ragged_dot_general"] == "deny"


def test_a_plan_keeps_no_jaxpr_alive():
    # An autocast function lives as long as the program, and may trace again and again.
    planner = Planner(np.dtype(jnp.bfloat16), jaxmp.DEFAULT_OPS)
    # Of functions of its own: JAX keeps what it traces as long as a function lives.
    jaxpr = jax.make_jaxpr(lambda x: jax.checkpoint(lambda x: jnp.tanh(x))(x @ W))(X)
    for planned in (jaxpr, jaxpr.jaxpr, next(_jaxpr.sub_jaxprs(jaxpr.eqns[-1]))):
        planner.plan(planned, ("original",))
        planner.matters(planned)
    assert len(planner._plans) >= 2
    del jaxpr, planned
    gc.collect()
    assert len(planner._plans) == len(planner._matters) == 0
