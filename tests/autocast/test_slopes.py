"""The gradient of a `tanh`, such as one that caps attention scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import relative_error
from conftest import at_once, normal, rest_is_evidence, usually_bfloat16

X, W = normal(0, 2, 24, 16), normal(1, 3, 16, 16, scale=1 / 4)
DTYPES = "float16", "bfloat16"
MASK = np.tril(np.ones((24, 24), bool))


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


def of_a_loss(x, w):
    logits = 5 * jnp.tanh(x @ w[0])
    return jax.nn.logsumexp(logits, -1)


def shared(x, w):
    y = jnp.tanh(x @ w[0])
    return jax.nn.softmax(y) @ w[1] + y.sum()


OTHERS = {
    "a layer": lambda x, w: jnp.tanh(x @ w[0]) @ w[1],
    "a loss": of_a_loss,
    "a layer before a softmax": lambda x, w: jax.nn.softmax(
        jax.jit(jnp.matmul)(jnp.tanh(x @ w[0]), w[1])
    ),
    "taken by others": shared,
    "a float32 region": lambda x, w: jaxmp.float32_region(attention)(x, w),
}


def loss_of(fun):
    return lambda x, w: (fun(x, w) ** 2).sum()


CASES = {f"{n}-{d}": (f, d) for n, f in (ATTENTION | OTHERS).items() for d in DTYPES}


@pytest.mark.parametrize(
    ("fun", "dtype"),
    rest_is_evidence(
        CASES,
        *(f"plain-{dtype}" for dtype in DTYPES),
        *(f"{name}-bfloat16" for name in ("a remat", "taken by others")),
    ),
)
def test_gradients_are_near_those_of_float32(fun, dtype):
    grad = jax.value_and_grad(loss_of(fun), (0, 1))
    cast = jaxmp.autocast(grad, dtype)
    (loss, found), (exact, expected) = at_once(cast, grad)(X, W)
    assert abs(loss / exact - 1) < 4 * float(jnp.finfo(dtype).eps)
    assert relative_error(found, expected) < 4 * float(jnp.finfo(dtype).eps)


@usually_bfloat16
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
    assert relative_error(found, jax.jit(grad)(X, W)) < 0.02


def test_it_runs_without_jit():
    grad = jax.grad(loss_of(attention))
    with jax.disable_jit():
        found = jaxmp.autocast(grad, "bfloat16")(X, W)
    assert relative_error(found, jax.jit(grad)(X, W)) < 0.02
