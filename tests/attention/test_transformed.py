"""Attention wherever autocast works: scans, remat, micro-batches, shards, tangents."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attending import attentions
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from benchmarks.counting.measure import relative_error
from conftest import at_once, crossed, mapped, normal

BATCH, LENGTH, HEADS, GROUPS, SIZE, LAYERS = 4, 48, 4, 2, 16, 2
WIDTH = HEADS * SIZE
# Float16 without a loss scale is near enough where no gradient is tiny.
pytestmark = pytest.mark.filterwarnings("ignore:.*float16.*:UserWarning")
DTYPES = ["bfloat16", "float16"]
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
ATTEND = functools.partial(jaxmp.dot_product_attention, is_causal=True)
WRITTEN = functools.partial(jax.nn.dot_product_attention, is_causal=True)


def layer(attend, x, p):
    mean = jnp.mean(x, -1, keepdims=True)
    y = (x - mean) * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)
    q, k, v = (y @ p[name] for name in "qkv")
    q, k, v = (t.reshape(*t.shape[:2], -1, SIZE) for t in (q, k, v))
    x = x + attend(q, k, v).reshape(x.shape) @ p["o"]
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def loss(params, x, attend=ATTEND, *, scanned=True, remat=False):
    call = functools.partial(layer, attend)
    call = jax.checkpoint(call) if remat else call
    if scanned:
        x, _ = jax.lax.scan(lambda x, p: (call(x, p), None), x, params)
    else:
        for i in range(LAYERS):
            x = call(x, jax.tree.map(lambda t, i=i: t[i], params))
    return jnp.mean(jnp.sin(x) ** 2)


def params_of(width=WIDTH):
    groups = GROUPS * SIZE
    sizes = {
        "q": (width, width),
        "k": (width, groups),
        "v": (width, groups),
        "o": (width, width),
        "up": (width, 2 * width),
        "down": (2 * width, width),
    }
    return {
        name: normal(i, LAYERS, *shape, scale=shape[0] ** -0.5)
        for i, (name, shape) in enumerate(sizes.items())
    }


PARAMS, X = params_of(), normal(9, BATCH, LENGTH, WIDTH)


@functools.cache
def exact():
    return jax.jit(jax.grad(functools.partial(loss, attend=WRITTEN)))(PARAMS, X)


def are_in(dtype, fun, *args):
    """Returns how many attentions of a program take and return a dtype."""
    found = attentions(fun, *args)
    assert all({*operands[:3], results[0]} == {dtype} for operands, results in found)
    return len(found)


def check_near(found, exact, dtype, factor=12):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert x.dtype == y.dtype
        assert relative_error(x, y) < factor * EPS[dtype]


@crossed("scanned remat inside dtype", *[[True, False]] * 3, DTYPES)
def test_layers_that_are_scanned_or_computed_again(scanned, remat, inside, dtype):
    fun = functools.partial(loss, scanned=scanned, remat=remat)
    policy = f"mixed_{dtype}"
    grad = jaxmp.autocast(jax.grad(fun), policy)
    if inside:
        grad = jax.grad(jaxmp.autocast(fun, policy))
    layers = 1 if scanned else LAYERS
    assert are_in(dtype, grad, PARAMS, X) == layers * (2 + remat)
    check_near(jax.jit(grad)(PARAMS, X), exact(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_micro_batches(dtype):
    grad = jaxmp.value_and_grad(loss, accum_steps=2, batch_argnums=1)
    _, grads = jax.jit(jaxmp.autocast(grad, dtype))(PARAMS, X)
    check_near(grads, exact(), dtype)


def test_float16_with_a_loss_scale():
    policy = "mixed_float16"
    tx = jaxmp.loss_scaling(optax.sgd(0.1), policy)
    state = tx.init(PARAMS)
    grad = jaxmp.value_and_grad(loss, loss_scale=state)
    _, grads = jaxmp.autocast(grad, policy)(PARAMS, X)
    check_near(grads, exact(), "float16")


def test_a_batch_of_models():
    many = jax.tree.map(lambda x: jnp.stack([x, 1.1 * x]), PARAMS)
    grad = jax.vmap(jax.grad(loss), (0, None))
    inside = jax.vmap(jax.grad(jaxmp.autocast(loss)), (0, None))
    casts = jaxmp.autocast(grad), inside
    exact, *found = at_once(grad, *casts)(many, X)
    for cast, grads in zip(casts, found, strict=True):
        assert are_in("bfloat16", cast, many, X) == 2
        check_near(grads, exact, "bfloat16")


@pytest.mark.parametrize("inside", [True, False])
def test_tangents_and_second_derivatives(inside):
    def products(fun):
        def along(params):
            return jax.jvp(jax.grad(lambda p: fun(p, X)), (params,), (params,))[1]

        return lambda params: (
            jax.jvp(lambda p: fun(p, X), *[(params,)] * 2),
            along(params),
        )

    exact = products(functools.partial(loss, attend=WRITTEN))
    cast = products(jaxmp.autocast(loss))
    cast = cast if inside else jaxmp.autocast(products(loss))
    exact, ((value, tangent), along) = at_once(exact, cast)(PARAMS)
    assert abs(value - exact[0][0]) < 1e-2 * abs(exact[0][0])
    assert abs(tangent - exact[0][1]) < 5e-2 * abs(exact[0][1])
    check_near(along, exact[1], "bfloat16", factor=30)


def test_under_mixed_fp8_it_stays_in_16_bits():
    ops = jaxmp.DEFAULT_OPS.with_fp8(min_size=16)
    grad = jaxmp.autocast(jax.grad(loss), "mixed_fp8", ops=ops)
    assert are_in("bfloat16", grad, PARAMS, X) == 2
    assert "float8" in str(jax.make_jaxpr(grad)(PARAMS, X))


@pytest.mark.parametrize("residuals", ["int8", "fp8"])
def test_what_it_keeps_is_not_stored_in_eight_bits(residuals):
    arrays = [
        normal(i, BATCH, LENGTH, heads, SIZE) for i, heads in enumerate((4, 2, 2))
    ]

    def total(arrays):
        return jnp.sum(ATTEND(*(jnp.sin(x) for x in arrays)) ** 2)

    grad = jax.grad(total)
    casts = jaxmp.autocast(grad, residuals=residuals), jaxmp.autocast(grad)
    for x, y in zip(*at_once(*casts)(arrays), strict=True):
        np.testing.assert_array_equal(x, y)
    # And all else is, which autocast stores.
    grad = jaxmp.autocast(jax.grad(loss), residuals=residuals)
    kind = {"int8": "i8", "fp8": "f8_e4m3fn"}[residuals]
    stored = set(
        re.findall(rf"{kind}\[([0-9,]+)\]", str(jax.make_jaxpr(grad)(PARAMS, X)))
    )
    assert stored
    assert not any(x.endswith(f"{LENGTH},{LENGTH}") for x in stored)
    check_near(jax.jit(grad)(PARAMS, X), exact(), "bfloat16", factor=50)


def on_mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


SPLIT = {
    "q": P(None, None, "model"),
    "k": P(None, None, "model"),
    "v": P(None, None, "model"),
    "o": P(None, "model"),
    "up": P(None, None, "model"),
    "down": P(None, "model"),
}


@pytest.mark.parametrize("inside", [True, False])
def test_heads_and_examples_on_many_devices(inside):
    mesh = on_mesh()
    params = {
        name: jax.device_put(x, NamedSharding(mesh, SPLIT[name]))
        for name, x in PARAMS.items()
    }
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    grad = jaxmp.autocast(jax.grad(loss))
    if inside:
        grad = jax.grad(jaxmp.autocast(loss))
    compiled = jax.jit(grad).lower(params, x).compile()
    check_near(compiled(params, x), exact(), "bfloat16")
    assert "all-to-all" not in compiled.as_text()


@crossed("check_vma inside", *[[True, False]] * 2)
def test_in_shard_map(check_vma, inside):
    mesh = on_mesh()

    def on_shards(params, x):
        fun = jaxmp.autocast(loss) if inside else loss
        grads = jax.grad(fun)(params, x)
        if check_vma:  # which sums them
            return jax.tree.map(lambda g: g / 4, grads)
        return jax.lax.pmean(grads, "data")

    grad = mapped(on_shards, mesh, (P(), P("data")), P(), check_vma=check_vma)
    grad = grad if inside else jaxmp.autocast(grad)
    check_near(jax.jit(grad)(PARAMS, X), exact(), "bfloat16")


def test_a_bias_that_all_shards_share():
    bias = normal(3, 1, HEADS, LENGTH, LENGTH)
    arrays = [normal(i, BATCH, LENGTH, HEADS, SIZE) for i in range(3)]

    def total(bias, *arrays):
        return jnp.sum(jaxmp.dot_product_attention(*arrays, bias) ** 2)

    grad = jax.shard_map(
        jax.grad(total), mesh=on_mesh(), in_specs=(P(), *[P("data")] * 3), out_specs=P()
    )
    both = at_once(grad, jax.grad(total))(bias, *arrays)
    np.testing.assert_allclose(*both, atol=1e-4)


def test_types_that_name_how_arrays_are_sharded():
    mesh = on_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        spec = NamedSharding(mesh, P("data", None, "model"))
        arrays = [
            jax.device_put(normal(i, BATCH, LENGTH, HEADS, SIZE), spec)
            for i in range(3)
        ]

        def grad(attend):
            return jax.jit(jax.grad(lambda *x: jnp.sum(attend(*x) ** 2)))(*arrays)

        found, expected = grad(ATTEND), grad(WRITTEN)
        assert found.sharding == expected.sharding
        np.testing.assert_allclose(found, expected, atol=1e-6)
