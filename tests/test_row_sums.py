"""The gradient of a norm's bias, made of those of the biases behind it."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmp
from benchmarks.measure import relative_error, traced
from conftest import at_once, in_both_dtypes, normal
from jaxmp import _planner

# 128 rows of 16 features, and 8 outputs.
X, W, B = normal(0, 128, 16), normal(1, 16, 8, scale=1 / 4), normal(2, 8)
SCALE, BIAS = 1 + normal(3, 16, scale=1 / 8), normal(4, 16)
ARGS = SCALE, BIAS, X, W, B


def normed(x, scale, bias):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-3) * scale + bias


def dense(y, w, b):
    return jnp.tanh(y @ w + b)


def transposed(y, w, b):
    return jnp.tanh(w.T @ y.T + b[:, None])


def heads(y, w, b):
    y = y.reshape(4, 32, 16)
    return jnp.einsum("ble,ehd->blhd", y, w.reshape(16, 2, 4)) + b.reshape(2, 4)


def several(y, w, b):
    q, k, v = dense(y, w, b), dense(y, w[:, ::-1], 2 * b), dense(y, -w, b / 2)
    return jax.nn.softmax(q * k) * v


def behind_norm(layer):
    return lambda x, scale, bias, w, b: layer(normed(x, scale, bias), w, b)


def on_devices(*args):
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    rows, whole = PartitionSpec("data"), PartitionSpec()
    specs = rows, *[whole] * 4
    layer = behind_norm(dense)
    return jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=rows)(*args)


LAYERS = {
    "dense": behind_norm(dense),
    "transposed": behind_norm(transposed),
    "heads": behind_norm(heads),
    "several": behind_norm(several),
    "remat": jax.checkpoint(behind_norm(dense)),
    "jit": jax.jit(behind_norm(dense)),
    "vmap": jax.vmap(behind_norm(dense), (0, *[None] * 4)),
    "on devices": on_devices,
}


def without_bias(y, w, b):
    return jnp.tanh(y @ w)


def bias_by_row(y, w, b):
    return jnp.tanh(y @ w + jnp.outer(jnp.arange(128.0), b))


def in_float32(y, w, b):
    return jaxmp.float32_region(dense)(y, w, b)


def read_elsewhere(y, w, b):
    return dense(y, w, b) + y[:, :8]


def batched(y, w, b):
    return jnp.einsum("nri,nio->nro", y.reshape(2, 64, 16), jnp.stack([w, -w])) + b


OTHERS = {
    "without bias": without_bias,
    "bias by row": bias_by_row,
    "float32 region": in_float32,
    "read elsewhere": read_elsewhere,
    "batched": batched,
}


def gradient(layer):
    def loss(scale, bias, x, w, b):
        return jnp.square(layer(x, scale, bias, w, b)).mean()

    return jax.grad(loss, (0, 1, 4))


def sums_over_rows(fun, *args):
    """Returns how many sums over all rows give a number for each of the features."""
    sizes = X.size, X.size // 2  # the latter on one of two devices
    sums = [eqn for eqn in traced(fun, *args) if eqn.primitive.name == "reduce_sum"]
    avals: list[Any] = [(eqn.invars[0].aval, eqn.outvars[0].aval) for eqn in sums]
    return sum(x.size in sizes and total.shape == BIAS.shape for x, total in avals)


def is_as_written(monkeypatch, grad, *args, **options):
    """Tells whether the program is the one in which every sum adds up rows."""

    def program():  # of a new function, because JAX remembers what it has traced
        return str(jax.make_jaxpr(jaxmp.autocast(grad, **options))(*args))

    found = program()
    with monkeypatch.context() as patch:
        patch.setattr(_planner, "with_row_sums", lambda eqns, *_: eqns)
        return program() == found


@pytest.mark.parametrize(("layer", "dtype"), in_both_dtypes(LAYERS, "dense", "several"))
def test_the_gradient_of_a_bias_sums_no_rows(layer, dtype):
    grad, args = gradient(layer), ARGS
    cast = jaxmp.autocast(grad, dtype)
    assert sums_over_rows(grad, *args) == 2  # those of the scale and of the bias
    assert sums_over_rows(cast, *args) == 1
    own = jax.jit(grad)(*(x.astype(dtype) for x in args))
    exact, found = at_once(grad, cast)(*args)
    assert relative_error(found, exact) <= relative_error(own, exact)


def test_so_it_is_in_each_trip_of_a_scan():
    def loss(parameters, x, w):
        biases, b = parameters

        def layer(x, bias):
            return x + dense(normed(x, SCALE, bias), w, b) @ w.T, None

        return jnp.square(lax.scan(layer, x, biases)[0]).mean()

    grad, args = jax.grad(loss), ((jnp.stack([BIAS, -BIAS]), B), X, W)
    assert sums_over_rows(grad, *args) == 1
    assert sums_over_rows(jaxmp.autocast(grad), *args) == 0


@pytest.mark.parametrize("layer", OTHERS.values(), ids=OTHERS)
def test_what_is_no_sum_of_products_that_have_one_is_as_written(layer, monkeypatch):
    grad = gradient(behind_norm(layer))
    assert is_as_written(monkeypatch, grad, *ARGS)


def test_few_rows_are_summed_as_written(monkeypatch):
    grad, (*norm, x, w, b) = gradient(LAYERS["dense"]), ARGS
    assert is_as_written(monkeypatch, grad, *norm, x[:31], w, b)
    assert not is_as_written(monkeypatch, grad, *norm, x[:32], w, b)


@pytest.mark.parametrize("path", ["dense", "norm"])
def test_what_the_user_keeps_in_float32_is_as_written(path, monkeypatch):
    def layer(x, scale, bias, w, b):
        with jax.named_scope("norm"):
            y = normed(x, scale, bias)
        with jax.named_scope("dense"):
            return dense(y, w, b)

    assert is_as_written(monkeypatch, gradient(layer), *ARGS, float32_paths=path)
    assert not is_as_written(monkeypatch, gradient(layer), *ARGS)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sums_that_are_divided_between_devices_are_as_written(kind, monkeypatch):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,))
    rows = NamedSharding(mesh, PartitionSpec("x", None))

    def layer(y, w, b):
        b = lax.broadcast_in_dim(
            b, (128, 8), (1,), out_sharding=rows if kind == AxisType.Explicit else None
        )
        return jnp.tanh(y @ w + b)

    x, w = jax.device_put((X, W), rows if kind == AxisType.Auto else (rows, None))
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        grad = gradient(behind_norm(layer))
        assert is_as_written(monkeypatch, grad, SCALE, BIAS, x, w, B)


def test_it_is_no_product_in_float32():
    jaxmp.assert_16bit(jaxmp.autocast(gradient(LAYERS["several"])), *ARGS)


def test_weights_are_gathered_in_16_bits():
    def loss(w, b, x):
        w = lax.all_gather(w, "data", tiled=True)
        return jnp.square(behind_norm(dense)(x, SCALE, b.mean() + BIAS, w, b)).mean()

    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    axis, whole = PartitionSpec("data"), PartitionSpec()
    grad = jax.shard_map(
        jax.grad(loss, (0, 1)),
        mesh=mesh,
        in_specs=(axis, whole, axis),
        out_specs=(axis, whole),
    )
    cast = jaxmp.autocast(grad)
    assert sums_over_rows(cast, W, B, X) == 0
    gathers = [e for e in traced(cast, W, B, X) if "all_gather" in e.primitive.name]
    assert [var.aval.dtype for e in gathers for var in e.invars] == [jnp.bfloat16]


def test_a_sum_of_what_is_reshaped_by_columns_is_as_written(monkeypatch):
    @jax.custom_vjp
    def scaled(c, y, w):
        return (y * c) @ w

    def backward(w, d):
        total, sent = d.sum(0), d @ w.T
        turned = lax.reshape(sent, sent.shape, dimensions=(1, 0))
        return turned.sum(0) + total.mean(), sent, None

    scaled.defvjp(lambda c, y, w: (scaled(c, y, w), w), backward)
    grad = jax.grad(lambda c, y, w: jnp.square(scaled(c, y, w)).mean())
    assert is_as_written(monkeypatch, grad, SCALE, X, W)
