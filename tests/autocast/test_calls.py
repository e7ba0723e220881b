"""A `jit`, a call and a name change the dtype of no value.

Random parts of a generated program are called in some way. Each value has a name, by
which one finds it in what autocast makes of the program with its calls and without.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmp
from benchmarks import golden
from benchmarks.counting.measure import traced
from jaxmp._jaxprs import jaxpr as _jaxpr

pytestmark = pytest.mark.filterwarnings("ignore:Of the FLOPs:UserWarning")
KNOWN = 16, 41  # programs of which a call has changed a dtype


def with_rule(fun):
    """Calls a function with a derivative rule, which is that of JAX."""
    called = jax.custom_jvp(fun)
    called.defjvp(lambda primals, tangents: jax.jvp(fun, primals, tangents))
    return called


def as_it_is(fun):
    return fun


CALLS = [
    *[as_it_is] * 3,
    *(jax.jit, functools.partial(jax.named_call, name="part"), with_rule),
    *(lambda fun: jax.jit(jax.jit(fun)), lambda fun: jax.jit(with_rule(fun))),
]
# These compute values again, and what reads them in the backward pass reads the second.
FORWARD = [jax.checkpoint, lambda fun: jax.checkpoint(jax.jit(fun))]


def named(seed):
    """Returns a generated loss as a jaxpr in which each number has a name."""
    fun, args = golden._generated(seed)
    leaves, tree = jax.tree.flatten(args)
    jaxpr = jax.make_jaxpr(lambda *xs: inspect.unwrap(fun)(*tree.unflatten(xs)))
    jaxpr, count = jaxpr(*leaves), iter(range(10**6))

    def apply(eqn, ins):
        for out in _jaxpr.bind(eqn, ins):
            is_float = jnp.issubdtype(out.dtype, jnp.floating)
            yield checkpoint_name(out, f"value {next(count)}") if is_float else out

    run = functools.partial(_jaxpr.interpret, jaxpr, apply=apply)
    return jax.make_jaxpr(lambda *xs: run(xs))(*leaves), leaves


def read_by(eqns):
    return dict.fromkeys(_jaxpr.variables(x for eqn in eqns for x in eqn.invars))


def called(jaxpr, calls, seed):
    """Returns the function of a jaxpr, parts of which are called in random ways."""
    eqns, rng, cuts = _jaxpr.live(jaxpr), np.random.default_rng(seed), [0]
    while cuts[-1] < len(eqns):
        cuts.append(cuts[-1] + int(rng.integers(1, 9)))
    ways = [calls[i] for i in rng.integers(len(calls), size=len(cuts))]

    def fun(*args):
        body = jaxpr.jaxpr
        known = dict(zip(body.constvars, jaxpr.consts, strict=True))
        known |= dict(zip(body.invars, args, strict=True))
        for start, stop, call in zip(cuts, cuts[1:], ways, strict=False):
            made = [var for eqn in eqns[start:stop] for var in eqn.outvars]
            taken = [x for x in read_by(eqns[start:stop]) if x not in {*made}]
            behind = {*read_by(eqns[stop:]), *body.outvars}
            returned = [x for x in made if x in behind]
            part = _jaxpr.part(jaxpr, eqns[start:stop], taken, returned)
            outs = call(_jaxpr.jaxpr_as_fun(part))(*(known[x] for x in taken))
            known |= dict(zip(returned, outs, strict=True))
        return known[body.outvars[0]]

    return fun


def dtypes(fun, args, dtype):
    eqns = traced(jaxmp.autocast(fun, dtype), *args)
    names = [eqn for eqn in eqns if eqn.primitive.name == "name"]
    return {eqn.params["name"]: eqn.outvars[0].aval.dtype for eqn in names}


def hold(seed, backward):
    jaxpr, args = named(seed)
    weights = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]
    plain, parts = (
        called(jaxpr, calls, seed + 1000)  # what is drawn is other than in the program
        for calls in ([as_it_is], CALLS if backward else CALLS + FORWARD)
    )
    if backward:
        plain, parts = (jax.value_and_grad(x, weights) for x in (plain, parts))
    dtype = ("bfloat16", "float16")[seed % 2]
    before, after = (dtypes(fun, args, dtype) for fun in (plain, parts))
    both = before.keys() & after.keys()
    assert len(both) > 0.9 * len(before)
    assert not {k: (before[k], after[k]) for k in both if before[k] != after[k]}


@pytest.mark.needs_no_scale
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "with gradients"])
@pytest.mark.parametrize("seed", [*range(6), *KNOWN])
def test_calls_of_parts_of_a_random_program_change_no_dtype(seed, backward):
    hold(seed, backward)


@pytest.mark.evidence
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "with gradients"])
@pytest.mark.parametrize("seeds", range(0, 400, 50))
def test_calls_of_parts_of_any_program_change_no_dtype(seeds, backward):
    for seed in range(seeds, seeds + 50):
        hold(seed, backward)
