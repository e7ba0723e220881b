"""Attention under autocast: one operation in 16 bits, as near as the written form."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attending import attentions

import jaxmp
from benchmarks.counting.measure import relative_error
from conftest import at_once, crossed, normal

BATCH, LENGTH, HEADS, SIZE, WIDTH = 2, 32, 4, 8, 32
DTYPES = ["bfloat16", "float16"]
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def params_of(groups=HEADS):
    sizes = {"q": HEADS, "k": groups, "v": groups}
    found = {
        name: normal(i, WIDTH, heads * SIZE, scale=2 * WIDTH**-0.5)
        for i, (name, heads) in enumerate(sizes.items())
    }
    return found | {"o": normal(5, HEADS * SIZE, WIDTH, scale=WIDTH**-0.5)}


X = normal(7, BATCH, LENGTH, WIDTH)


def written(query, key, value, bias=None, mask=None, *, is_causal=False, **lengths):
    """Attends as a user would write it."""
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    if is_causal:
        scores = jnp.where(
            jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf
        )
    if lengths:
        (counts,) = lengths.values()
        keys = jnp.arange(LENGTH) < counts[:, None, None, None]
        scores = jnp.where(keys, scores, -jnp.inf)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, -1), value)


ATTENTIONS = jaxmp.dot_product_attention, written


def projected(params, x, name):
    y = x @ params[name]
    return y.reshape(*y.shape[:2], -1, SIZE)


def loss(attend, params, x, **options):
    arrays = [projected(params, x, name) for name in "qkv"]
    y = attend(*arrays, **options).reshape(*x.shape[:2], -1) @ params["o"]
    return jnp.mean(jnp.sin(x + y) ** 2)


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"mask": (normal(8, BATCH, 1, LENGTH, LENGTH) > 0).at[..., 0].set(True)},
    "bias": {"bias": normal(9, 1, HEADS, LENGTH, LENGTH)},
    "lengths": {"key_value_seq_lengths": jnp.array([9, 32])},
}
ORDERS = {
    "around": lambda fun, dtype: jaxmp.autocast(jax.grad(fun), f"mixed_{dtype}"),
    "inside": lambda fun, dtype: jax.grad(jaxmp.autocast(fun, f"mixed_{dtype}")),
}


def exact_gradient(fun, params, *args):
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float64) if x.dtype == np.float32 else x,
            jax.tree.map(np.asarray, (params, *args)),
        )
        return jax.tree.map(np.asarray, jax.jit(jax.grad(fun))(*wide))


def numbers(options):
    """Returns options as arrays without a dtype of JAX, to be widened."""
    return {k: x if isinstance(x, bool) else np.asarray(x) for k, x in options.items()}


@crossed("options groups order dtype", OPTIONS, [HEADS, 2], [*ORDERS], DTYPES)
def test_gradients_of_projections_are_as_near_as_those_written_out(
    options, groups, order, dtype
):
    params, given = params_of(groups), numbers(options)
    exact = exact_gradient(functools.partial(loss, written, **given), params, X)
    make = ORDERS[order]
    ours = make(functools.partial(loss, jaxmp.dot_product_attention, **options), dtype)
    theirs = make(functools.partial(loss, written, **options), dtype)
    ours, theirs = at_once(ours, theirs)(params, X)
    for name, at in exact.items():
        limit = max(1.3 * relative_error(theirs[name], at), EPS[dtype] / 2)
        assert relative_error(ours[name], at) <= limit, name


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_takes_and_returns_16_bits(order, dtype):
    bias = {"bias": OPTIONS["bias"]["bias"]}
    fun = functools.partial(loss, jaxmp.dot_product_attention, **bias)
    forward, backward = attentions(ORDERS[order](fun, dtype), params_of(), X)
    assert forward == ([dtype] * 3 + ["float32"], [dtype, "float32"])
    # The bias, and the sums of the rows.
    operands = [*[dtype] * 3, "float32", dtype, "float32", dtype]
    assert backward == (operands, [dtype] * 3)


def test_a_bias_that_is_trained_has_float32_gradients():
    def total(attend, bias, params):
        return loss(attend, params, X, bias=bias)

    args = OPTIONS["bias"]["bias"], params_of()
    grads = [jax.grad(functools.partial(total, attend)) for attend in ATTENTIONS]
    found, theirs, exact = at_once(*map(jaxmp.autocast, grads), grads[1])(*args)
    assert found.dtype == jnp.float32
    assert relative_error(found, exact) <= 1.3 * relative_error(theirs, exact)


def kept_by_region(attend):
    return jaxmp.autocast(
        lambda params, x: loss(jaxmp.float32_region(attend), params, x)
    )


def kept_by_path(attend):
    def named(*args, **options):
        with jax.named_scope("attention"):
            return attend(*args, **options)

    fun = functools.partial(loss, named)
    return jaxmp.autocast(fun, float32_paths=("attention",))


def kept_by_list(attend):
    ops = jaxmp.DEFAULT_OPS.with_deny("dot_product_attention")
    return jaxmp.autocast(functools.partial(loss, attend), ops=ops)


def kept_by_precision(attend):
    def exactly(*args, **options):
        with jax.default_matmul_precision("highest"):
            return attend(*args, **options)

    return jaxmp.autocast(functools.partial(loss, exactly))


KEPT = [kept_by_region, kept_by_path, kept_by_list, kept_by_precision]


@pytest.mark.parametrize("kept", KEPT)
def test_what_is_kept_in_float32_is_float32(kept):
    def grad(params, x):
        return jax.grad(kept(jaxmp.dot_product_attention))(params, x)

    for operands, results in attentions(grad, params_of(), X):
        assert {*operands, *results} == {"float32"}


def test_queries_written_in_another_dtype_stay():
    def attend(*args, **options):
        return jaxmp.dot_product_attention(
            *[x.astype(jnp.float16) for x in args], **options
        ).astype(jnp.float32)

    fun = jaxmp.autocast(functools.partial(loss, attend), "mixed_bfloat16")
    ((operands, results),) = attentions(fun, params_of(), X)
    assert {*operands, *results} == {"float16"}
