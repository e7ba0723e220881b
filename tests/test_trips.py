"""What is found out about the body of a loop: what it multiplies by, and bounds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmp import _jaxpr
from jaxmp._op_lists import DEFAULT_OPS
from jaxmp._planner import Planner
from jaxmp._trips import bounds
from jaxmp._uses import Use

X = jnp.ones((4, 4))


def multiplies_the_carry(step, carry: Any = X, r: Any = X):
    """Returns which of two inputs keep their digits, since a scan multiplies by them.

    They are the second and the third input of each trip.
    """

    def fun(carry, r, s):
        return lax.scan(lambda c, x: (step(c, *x), None), carry, (r, s))[0]

    jaxpr = jax.make_jaxpr(fun)(carry, r[None], X[None])
    planner = Planner(np.dtype(jnp.bfloat16), DEFAULT_OPS)
    planner.find_factors(jaxpr, ())
    (loop,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    layout = _jaxpr.call_layout(loop)
    (body,) = layout.bodies
    plan = planner.plan(body.jaxpr, ("original",) * len(loop.outvars))
    inputs = _jaxpr.in_vars(body.jaxpr)[layout.fixed_in.stop :]
    return {i for i, var in enumerate(inputs) if plan.use(var) & Use.EXACT}


def inner_loop(c, r, s):
    return lax.scan(lambda c, _: (c * r + s, None), c, None, length=2)[0]


@pytest.mark.parametrize(
    ("step", "found"),
    {
        "a decay": (lambda c, r, s: r * c + s, {0}),
        "of a sum": (lambda c, r, s: r * (c + s), {0}),
        "what enters": (lambda c, r, s: c + r * s, set()),
        "by way of products": (lambda c, r, s: (r * c) @ s, set()),
        "beside a product": (lambda c, r, s: r * c + (s * c) @ c, {0}),
        "the slope": (lambda c, r, s: jnp.sin(r * c) / s, {0, 1}),
        "in a jit": (jax.jit(lambda c, r, s: r * c + s), {0}),
        "in a remat": (jax.checkpoint(lambda c, r, s: r * c + s), {0}),
        "in a loop": (inner_loop, {0}),
    }.values(),
)
def test_what_multiplies_the_carry_is_told_from_what_enters(step, found):
    assert multiplies_the_carry(step) == found


def test_a_factor_on_the_way_from_one_carry_to_another_does_not_grow():
    def onward(carry, r, s):
        a, b = carry
        return a @ X, r * a + s * b

    def around(carry, r, s):
        a, b = carry
        return s * b, r * a

    assert multiplies_the_carry(onward, (X, X)) == {1}
    assert multiplies_the_carry(around, (X, X)) == {0, 1}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit"])
def test_what_all_share_grows_by_way_of_products_too(wrap):
    step = wrap(lambda c, r, s: (r * c) @ s)
    assert multiplies_the_carry(step, r=X[:, :1]) == {0}
    assert multiplies_the_carry(step, r=X[0, 0]) == {0}


@pytest.mark.parametrize(("times", "found"), [(4, set()), (5, {0})])
def test_a_loop_written_out_multiplies_many_times_by_the_same(times, found):
    multiply = jax.jit(lambda r, y: r * y)

    def step(c, r, s):
        for i in range(times):
            s = multiply(r, s) if i % 2 else r.T * s
        return c + s

    assert multiplies_the_carry(step) == found


def test_bounds_are_known_of_what_has_them():
    def fun(x):
        gate = jax.nn.sigmoid(x)
        return gate, gate * (1 - gate), 3 * jnp.tanh(x)[::-1] + gate, x, x * gate

    assert bounds(jax.make_jaxpr(fun)(X)) == [1, 2, 4, jnp.inf, jnp.inf]
