"""The slope of a `tanh` that caps attention scores, kept in 16 bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal
from jax.interpreters.ad import add_jaxvals

import jaxmp
from benchmarks.measure import relative_error, traced
from conftest import at_once, normal, rest_is_evidence
from jaxmp._slopes import slope_of_tanh

X, W = normal(0, 2, 24, 16), normal(1, 3, 16, 16, scale=1 / 4)
SCORES = (2, 24, 24)
MASK = np.tril(np.ones(SCORES[1:], bool))


def attention(x, w, cap=5.0, softmax=jax.nn.softmax):
    q, k, v = x @ w[0], x @ w[1], x @ w[2]
    scores = jnp.einsum("bqd,bkd->bqk", q, k)
    scores = cap * jnp.tanh(scores / cap)
    return softmax(jnp.where(MASK, scores, -1e30)) @ v


def scanned(x, w):
    layer = jax.checkpoint(attention)
    return lax.scan(lambda x, _: (layer(x, w), None), x, None, 2)[0]


def twice(x, w):
    return attention(attention(x, w), w)


ATTENTION = {
    "plain": attention,
    "a remat": jax.checkpoint(attention),
    "a scan of remats": scanned,
    "two layers": twice,
    "vmapped": lambda x, w: jax.vmap(lambda x: attention(x[None], w)[0])(x),
    "far": lambda x, w: attention(3 * x, w),
}


def loss_of(fun):
    return lambda x, w: (fun(x, w) ** 2).sum()


def kept(fun, *args):
    """Returns the dtypes of the arrays of the scores' size that barriers keep."""
    avals: list[Any] = [
        var.aval
        for eqn in traced(fun, *args)
        if eqn.primitive.name == "optimization_barrier"
        for var in eqn.outvars
    ]
    return {aval.dtype for aval in avals if aval.shape == SCORES}


def slopes(fun, *args):
    """Returns how many slopes a function computes by logistic functions."""
    names = [eqn.primitive.name for eqn in traced(fun, *args)]
    return names.count("logistic") // 2


def is_read_by_gradients(fun, *args):
    """Whether gradients read what a `tanh` returned."""
    eqns = list(traced(fun, *args))
    capped = {v for e in eqns if e.primitive.name == "tanh" for v in e.outvars}
    return any(
        "transpose" in str(eqn.source_info.name_stack)
        and not isinstance(var, Literal)
        and var in capped
        for eqn in eqns
        for var in eqn.invars
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "name", rest_is_evidence({name: name for name in ATTENTION}, "plain", "a remat")
)
def test_the_backward_pass_reads_a_16_bit_slope_and_no_float32_scores(name, dtype):
    grad = jax.value_and_grad(loss_of(ATTENTION[name]), (0, 1))
    cast = jaxmp.autocast(grad, dtype)
    assert slopes(cast, X, W)
    assert not is_read_by_gradients(cast, X, W)
    assert np.dtype(dtype) in kept(cast, X, W) or name == "vmapped"
    (loss, found), (exact, expected) = at_once(cast, grad)(X, W)
    assert abs(loss / exact - 1) < 4 * float(jnp.finfo(dtype).eps)
    assert relative_error(found, expected) < 4 * float(jnp.finfo(dtype).eps)


def test_the_slope_is_that_of_tanh_where_it_is_small():
    """As one minus a square it would be zero from 9 on."""
    x = jnp.linspace(-40, 40, 1601)
    found = slope_of_tanh(x)
    np.testing.assert_allclose(found, 1 / np.cosh(np.float64(x)) ** 2, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_second_derivatives_are_those_of_float32(dtype):
    def along(x, w):
        return jax.grad(lambda w: jax.grad(loss_of(attention))(x, w)[0, 3, 5])(w)

    outside = jax.grad(
        lambda w: jaxmp.autocast(jax.grad(loss_of(attention)), dtype)(X, w)[0, 3, 5]
    )
    forms = along, jaxmp.autocast(along, dtype), lambda x, w: outside(w)
    expected, *found = at_once(*forms)(X, W)
    for one in found:
        assert relative_error(one, expected) < 10 * float(jnp.finfo(dtype).eps)


def of_a_loss(x, w):
    logits = 5 * jnp.tanh(x @ w[0])
    return jax.nn.logsumexp(logits, -1)


def shared(x, w):
    y = jnp.tanh(x @ w[0])
    return jax.nn.softmax(y) @ w[1] + y.sum()


LEFT_ALONE = {
    "a layer": lambda x, w: jnp.tanh(x @ w[0]) @ w[1],
    "a loss": of_a_loss,
    "a layer before a softmax": lambda x, w: jax.nn.softmax(
        jax.jit(jnp.matmul)(jnp.tanh(x @ w[0]), w[1])
    ),
    "taken by others too": shared,
    "a float32 region": lambda x, w: jaxmp.float32_region(attention)(x, w),
    "written in 16 bits": lambda x, w: attention(
        x.astype(jnp.float16), w.astype(jnp.float16)
    ).astype(jnp.float32),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_any_other_tanh_is_left_alone(name):
    grad = jax.grad(loss_of(LEFT_ALONE[name]), (0, 1))
    assert not slopes(jaxmp.autocast(grad, "bfloat16"), X, W)


def test_a_tanh_that_the_user_denies_is_left_alone():
    grad = jax.grad(loss_of(attention), (0, 1))
    ops = jaxmp.DEFAULT_OPS.with_deny("tanh")
    assert not slopes(jaxmp.autocast(grad, "bfloat16", ops=ops), X, W)


def test_what_else_reads_parts_of_the_gradient_has_them():
    def fun(x, t):
        y = jnp.tanh(x)
        s = t * (1 - y)
        return add_jaxvals(s, s * y), s, jax.nn.softmax(y) @ x

    args = normal(2, 8, 8), normal(3, 8, 8)
    found = jaxmp.autocast(fun, "bfloat16")(*args)
    np.testing.assert_array_equal(found[0], fun(*args)[0])
    np.testing.assert_array_equal(found[1], fun(*args)[1])


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_shards_have_their_gradients(axis_type):
    kind = getattr(jax.sharding.AxisType, axis_type)
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(kind,))
    spec = jax.P("rows"), jax.P()
    grad = jax.grad(loss_of(attention))
    sharded = jax.shard_map(grad, mesh=mesh, in_specs=spec, out_specs=spec[0])
    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, spec[0]))
        found = jax.jit(jaxmp.autocast(sharded, "bfloat16"))(x, W)
    assert relative_error(found, grad(X, W)) < 0.02


def test_it_runs_without_jit():
    grad = jax.grad(loss_of(attention))
    with jax.disable_jit():
        found = jaxmp.autocast(grad, "bfloat16")(X, W)
    assert relative_error(found, grad(X, W)) < 0.02
