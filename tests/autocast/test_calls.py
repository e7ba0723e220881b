"""A `jit`, a call and a name change the dtype of no value.

Random parts of a random program are called in some way. Each value has a name, by
which one finds it in what autocast makes of the program with its calls and without.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxmp
from benchmarks.counting.measure import traced
from jaxmp._jaxprs import jaxpr as _jaxpr

SIZE = 8  # of a matrix
ARGS = (jnp.ones((SIZE, SIZE)),) * 4


def normed(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6)


ONE = [
    jnp.tanh,
    jax.nn.sigmoid,
    jax.nn.relu,
    lambda x: jnp.maximum(x, 0),
    jax.nn.gelu,
    jax.nn.silu,
    jax.nn.softplus,
    jax.nn.softmax,
    normed,
    lambda x: jnp.exp(-x),
    lambda x: jnp.log1p(jnp.abs(x)),
    jnp.square,
    jnp.sin,
    lambda x: 0.5 * x,
    lambda x: x / 0.9,
    lambda x: 1 - x,
    lambda x: -x,
    lambda x: x.T,
    lambda x: x.reshape(-1, 2, SIZE).reshape(x.shape),
    lambda x: x[::-1],
    lambda x: jnp.concatenate([x[:, SIZE // 2 :], x[:, : SIZE // 2]], -1),
    lambda x: jnp.tile(x[:, : SIZE // 2], 2),
    lambda x: jnp.tile(jnp.split(x, 2, -1)[1], 2),
    lambda x: jnp.where(jnp.tri(SIZE, dtype=bool), x, 0),
    lambda x: jnp.clip(x, -3, 3),
    lambda x: x - x.mean(0),
    lambda x: jnp.broadcast_to(x.sum(-1, keepdims=True), x.shape),
    lambda x: jnp.cumsum(x, 0) / SIZE,
]
TWO = [
    lambda x, y: x @ y,
    lambda x, y: x @ y.T,
    lambda x, y: x + y,
    lambda x, y: x - y,
    lambda x, y: x * y,
    lambda x, y: jax.nn.sigmoid(x) * y,
    lambda x, y: x / (1 + jnp.abs(y)),
    jnp.maximum,
    lambda x, y: jnp.where(x > 0, x, y),
]


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


def drawn(seed):
    """Returns a random program on a pool of matrices, of which four are given."""
    rng, lines = np.random.default_rng(seed), []
    for i in range(4, 4 + int(rng.integers(3, 12))):
        recent = [int(i - 1 - min(i - 1, rng.geometric(0.4) - 1)) for _ in range(2)]
        if rng.random() < 0.35:
            recent[1] = int(rng.integers(4))  # such as a weight
        some = ONE if rng.random() < 0.5 else TWO + [jnp.matmul] * 5 + [jnp.add] * 2
        lines.append((some[rng.integers(len(some))], recent[: 2 - (some is ONE)]))

    def run(*values):
        values = list(values)
        for fun, takes in lines:
            values.append(fun(*(values[k] for k in takes)))
        return values[-1]

    return run


def named(seed):
    """Returns a program as a jaxpr in which each number has a name."""
    jaxpr, count = jax.make_jaxpr(drawn(seed))(*ARGS), itertools.count()

    def apply(eqn, ins):
        outs = _jaxpr.bind(eqn, ins)
        return [checkpoint_name(x, f"value {next(count)}") for x in outs]

    return jax.make_jaxpr(lambda *xs: _jaxpr.interpret(jaxpr, xs, apply))(*ARGS)


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


def dtypes(fun, dtype):
    eqns = traced(jaxmp.autocast(fun, dtype), *ARGS)
    names = [eqn for eqn in eqns if eqn.primitive.name == "name"]
    return {eqn.params["name"]: eqn.outvars[0].aval.dtype for eqn in names}


def hold(seed, backward):
    jaxpr, dtype = named(seed), ("bfloat16", "float16")[seed % 2]
    plain, parts = (
        called(jaxpr, calls, seed)
        for calls in ([as_it_is], CALLS if backward else CALLS + FORWARD)
    )
    if backward:
        plain, parts = (
            jax.value_and_grad(lambda *xs, f=f: jnp.mean(f(*xs) ** 2), (0, 1, 2, 3))
            for f in (plain, parts)
        )
    before, after = dtypes(plain, dtype), dtypes(parts, dtype)
    both = before.keys() & after.keys()
    assert len(both) > 0.9 * len(before)
    assert not {k: (before[k], after[k]) for k in both if before[k] != after[k]}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "with gradients"])
@pytest.mark.parametrize("seed", range(16))
def test_calls_of_parts_of_a_random_program_change_no_dtype(seed, backward):
    hold(seed, backward)


@pytest.mark.evidence
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "with gradients"])
@pytest.mark.parametrize("seeds", range(0, 400, 50))
def test_calls_of_parts_of_any_program_change_no_dtype(seeds, backward):
    for seed in range(seeds, seeds + 50):
        hold(seed, backward)
