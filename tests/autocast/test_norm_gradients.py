"""The gradients of a norm's scale and bias, and of the biases behind it."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmp
from benchmarks.counting.measure import relative_error, traced
from conftest import at_once, in_both_dtypes, mapped, normal

# 128 rows of 16 features, and 8 outputs.
X, W, B = normal(0, 128, 16), normal(1, 16, 8, scale=1 / 4), normal(2, 8)
SCALE, BIAS = 1 + normal(3, 16, scale=1 / 8), normal(4, 16)
ARGS = SCALE, BIAS, X, W, B


def normed(x, scale, bias):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-3) * scale + bias


def dense(y, w, b):
    return jnp.tanh(y @ w + b)


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
    "heads": behind_norm(heads),
    "several": behind_norm(several),
    "on devices": on_devices,
}


def without_bias(y, w, b):
    return jnp.tanh(y @ w)


def in_float32(y, w, b):
    return jaxmp.float32_region(dense)(y, w, b)


def read_elsewhere(y, w, b):
    return dense(y, w, b) + y[:, :8]


def batched(y, w, b):
    return jnp.einsum("nri,nio->nro", y.reshape(2, 64, 16), jnp.stack([w, -w])) + b


OTHERS = {
    "without bias": without_bias,
    "float32 region": in_float32,
    "read elsewhere": read_elsewhere,
    "batched": batched,
}


def gradient(layer):
    def loss(scale, bias, x, w, b):
        return jnp.square(layer(x, scale, bias, w, b)).mean()

    return jax.grad(loss, (0, 1, 4))


@pytest.mark.keeps_float32  # in a region
@pytest.mark.needs_no_scale
@pytest.mark.parametrize(
    ("layer", "dtype"),
    in_both_dtypes(LAYERS | {n: behind_norm(f) for n, f in OTHERS.items()}, "dense"),
)
def test_gradients_are_no_further_than_those_of_a_model_in_16_bits(layer, dtype):
    grad = gradient(layer)
    own = jax.jit(grad)(*(x.astype(dtype) for x in ARGS))
    exact, found = at_once(grad, jaxmp.autocast(grad, dtype))(*ARGS)
    assert relative_error(found, exact) <= relative_error(own, exact)


def test_so_they_are_in_each_iteration_of_a_scan():
    def loss(parameters, x, w):
        biases, b = parameters

        def layer(x, bias):
            scale = SCALE.astype(x.dtype)
            return x + dense(normed(x, scale, bias), w, b) @ w.T, None

        return jnp.square(lax.scan(layer, x, biases)[0]).mean()

    grad, args = jax.grad(loss), ((jnp.stack([BIAS, -BIAS]), B), X, W)
    own = jax.jit(grad)(*jaxmp.cast_tree(args, "bfloat16"))
    exact, found = at_once(grad, jaxmp.autocast(grad))(*args)
    assert relative_error(found, exact) <= relative_error(own, exact)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sums_may_be_divided_between_devices(kind):
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
        found = jax.jit(jaxmp.autocast(grad))(SCALE, BIAS, x, w, B)
        exact = jax.jit(grad)(SCALE, BIAS, x, w, B)
    assert relative_error(found, exact) < 0.01


def test_weights_are_gathered_in_16_bits():
    def loss(w, b, x):
        w = lax.all_gather(w, "data", tiled=True)
        return jnp.square(behind_norm(dense)(x, SCALE, b.mean() + BIAS, w, b)).mean()

    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    axis, whole = PartitionSpec("data"), PartitionSpec()
    grad = mapped(jax.grad(loss, (0, 1)), mesh, (axis, whole, axis), (axis, whole))
    cast = jaxmp.autocast(grad)
    gathers = [e for e in traced(cast, W, B, X) if "all_gather" in e.primitive.name]
    assert [var.aval.dtype for e in gathers for var in e.invars] == [jnp.bfloat16]
    found, exact = at_once(cast, grad)(W, B, X)
    assert relative_error(found, exact) < 0.01
