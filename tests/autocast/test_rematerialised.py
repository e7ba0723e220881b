"""Scanned layers that are computed again: what is saved, and what the layers read.

The scan stacks a residual stream in bfloat16, and the layer reads it so in both passes.
The stream itself adds up in float32.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxmp
from benchmarks.counting.measure import product_dtypes, relative_error
from conftest import at_once, normal, rest_is_evidence, usually_bfloat16

DEPTH, SIZE = 6, 32
PARAMS = {
    "a": normal(0, DEPTH, SIZE, 2 * SIZE) / 6,
    "b": normal(1, DEPTH, 2 * SIZE, SIZE) / 8,
    "g": 1 + normal(2, DEPTH, SIZE) / 9,
}
X = normal(3, 16, SIZE)


def norm(x):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6)


def dense(h, p):
    return jax.nn.gelu(h * p["g"] @ p["a"]) @ p["b"]


def layer(x, p):
    return x + dense(norm(x), p)


def leaking(x, p):
    return 0.9 * x + dense(norm(x), p)


def without_norm(x, p):
    return x + 0.3 * jnp.tanh(x @ p["a"]) @ p["b"]


def with_a_jit(x, p):
    return x + jax.jit(dense)(jax.jit(norm)(x), p)


LAYERS = {fun.__name__: fun for fun in (layer, leaking, without_norm, with_a_jit)}


def loss(layer, wrap=lambda fun: fun, unroll=1):
    def fun(p, x):
        body = wrap(lambda x, p: (layer(x, p), None))
        return jnp.mean(lax.scan(body, x, p, unroll=unroll)[0] ** 2)

    return jax.value_and_grad(fun, (0, 1))


def again(fun):
    return jax.checkpoint(fun, policy=jax.checkpoint_policies.nothing_saveable)


def in_float32(fun):
    report = jaxmp.audit(fun)(PARAMS, X).as_dict()
    return report["residual_bytes"].get("float32", 0)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_scan_saves_a_stream_in_16_bits_for_layers_that_are_computed_again(layer):
    plain, remat = (
        jaxmp.autocast(loss(layer, wrap), "mixed_bfloat16")
        for wrap in (lambda fun: fun, again)
    )
    assert in_float32(remat) <= max(1.2 * in_float32(plain), X.nbytes)
    exact, found, other = at_once(loss(layer), remat, plain)(PARAMS, X)
    assert relative_error(found, exact) <= 1.5 * relative_error(other, exact)


def test_a_layer_in_a_jit_is_computed_once_in_each_pass():
    """And not for the stream and for what the layers read of it."""
    grad = loss(lambda x, p: jax.jit(layer)(x, p), again)
    args = PARAMS, X
    usual = len(product_dtypes(grad, *args))
    assert len(product_dtypes(jaxmp.autocast(grad, "bfloat16"), *args)) == usual


@pytest.mark.parametrize("unroll", [1, 2])
def test_the_stream_itself_adds_up_in_float32(unroll):
    """Steps so small that in 16 bits none of them would count."""

    def small(x, p):
        return x + 2.0**-14 * jnp.tanh(norm(x) @ p["a"]) @ p["b"]

    p = jax.tree.map(lambda x: jnp.tile(x, (8, 1, 1)[: x.ndim]), PARAMS)

    def change(wrap):
        body = wrap(lambda x, p: (small(x, p), None))

        def fun(p, x):
            return jnp.sum((lax.scan(body, x, p, unroll=unroll)[0] - x) * x)

        return jax.value_and_grad(fun)

    remat = jaxmp.autocast(change(again), "bfloat16")
    (exact, _), (found, _) = at_once(change(lambda fun: fun), remat)(p, X)
    assert abs(found - exact) < 0.02 * abs(exact)


def test_a_layer_reads_the_same_rounded_stream_in_both_passes():
    """Far from zero, where each pass would see another norm."""
    x = 40 + X

    def as_stacked(x, p):
        rounded = lax.reduce_precision(x, 8, 7)
        return x + dense(norm(x + lax.stop_gradient(rounded - x)), p)

    remat = jaxmp.autocast(loss(layer, again), "bfloat16")
    expected, found = at_once(loss(as_stacked), remat)(PARAMS, x)
    assert relative_error(found, expected) < 0.02


@pytest.mark.needs_no_scale
def test_what_the_forward_pass_reads_too_is_stacked_as_it_is():
    def fun(p, x):
        def body(x, p):
            return layer(x, p), x

        last, all_of_them = lax.scan(again(body), x, p)
        return jnp.mean(last**2) + jnp.mean((all_of_them - x) ** 2)

    grad_fn = jax.value_and_grad(fun)
    remat = jaxmp.autocast(grad_fn, "bfloat16")
    plain = jaxmp.autocast(jax.value_and_grad(fun), "float16")
    exact, found, other = at_once(grad_fn, remat, plain)(PARAMS, 300 + X)
    assert relative_error(found[0], exact[0]) < 1e-4
    assert relative_error(other[0], exact[0]) < 1e-4


POLICIES = {
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots without a batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "names": jax.checkpoint_policies.save_only_these_names("hidden", "out"),
    "everything": jax.checkpoint_policies.everything_saveable,
}


def named(x, p):
    h = checkpoint_name(norm(x) @ p["a"], "hidden")
    return x + checkpoint_name(jax.nn.gelu(h) @ p["b"], "out")


@usually_bfloat16
@pytest.mark.parametrize(
    "name", rest_is_evidence({x: x for x in POLICIES}, "dots", "names")
)
def test_a_policy_saves_products_in_the_dtype_that_they_have(name, dtype):
    """JAX marks what it saves as float32, which changes no number."""

    def forward(fun, p, x):
        rows = [jax.tree.map(lambda w, i=i: w[i], p) for i in range(3)]
        return jnp.mean(functools.reduce(fun, rows, x) ** 2)

    def grad(fun):
        step = jax.value_and_grad(functools.partial(forward, fun), (0, 1))
        return jaxmp.autocast(step, dtype)

    saving = jax.checkpoint(named, policy=POLICIES[name])
    kept = in_float32(grad(saving))
    # The streams and what a norm computes, as without a checkpoint.
    assert kept <= in_float32(grad(named))
    if name != "everything":
        assert kept <= in_float32(grad(again(named)))
    found = jaxmp.audit(grad(saving))(PARAMS, X).residual_bytes[dtype]
    hidden = 3 * 16 * 2 * SIZE * 2  # of each layer, in 16 bits
    assert found >= hidden
    one, other = at_once(grad(named), grad(saving))(PARAMS, X)
    assert relative_error(one, other) < 2 * float(jnp.finfo(dtype).eps)
