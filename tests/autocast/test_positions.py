"""Positions that a network moves keep their digits, and so does what becomes an index.

By hand, and in `torch.autocast`, `positions + net(x)` is float32, because positions
are. In 16 bits what they have in common cancels behind the sum, and the rounding stays.
A bias, which a sum repeats along its rows, is rounded as weights are.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.law import by_hand
from conftest import both_dtypes, in_both_dtypes, normal
from jaxmp import autocast
from jaxmp._jaxprs import jaxpr as _jaxpr

NODES = 64
POSITIONS = 50 + normal(0, NODES, 2)
FEATURES = normal(1, NODES, 16)
WEIGHTS = {
    "in": normal(2, 16, 16, scale=0.25),
    "out": normal(3, 16, 2, scale=0.25),
    "end": normal(4, 8, 16, scale=0.3),
    "bias": normal(5, 16),
}
IMAGE = jax.image.resize(normal(6, 16, 16), (128, 128), "cubic")
FROM, TO = jax.random.randint(jax.random.key(7), (2, NODES), 0, NODES)


def linear(x):
    """Reads an image between four pixels."""
    low = jnp.floor(x)
    (i, j), (u, v) = low.astype(int).T, (x - low).T
    left = IMAGE[i, j] * (1 - v) + IMAGE[i, j + 1] * v
    right = IMAGE[i + 1, j] * (1 - v) + IMAGE[i + 1, j + 1] * v
    return (left * (1 - u) + right * u)[:, None]


READS = {
    "edges": lambda x: x[FROM] - x[TO],
    "neighbours": lambda x: x[1:] - x[:-1],
    "a diff": lambda x: jnp.diff(x, axis=0),
    "a roll": lambda x: x - jnp.roll(x, 1, 0),
    "less the mean": lambda x: x - x.mean(0),
    "less the first": lambda x: x - x[:1],
    "in a jit": jax.jit(lambda x: x[1:] - x[:-1]),
    "in a loop": lambda x: lax.fori_loop(0, 1, lambda _, d: d + x - x[:1], 0 * x),
    "a modulus": lambda x: jnp.mod(x, 1.0),
    "an image": linear,
    "an image by SciPy": lambda x: jax.scipy.ndimage.map_coordinates(
        IMAGE, x.T, 1, mode="nearest"
    )[:, None],
}


def moved(w, x, features):
    return x + jnp.tanh(features @ w["in"]) @ w["out"]


ADDS = {
    "positions": moved,
    "a batch of one": lambda w, x, f: moved(w, x[None], f[None])[0],
    "in a jit": jax.jit(moved),
    "in a checkpoint": jax.checkpoint(moved),
    "by rows": jax.vmap(moved, (None, 0, 0)),
    "a column": lambda w, x, f: moved(w, x[:, :1], f),
    "a template of a batch": lambda w, x, f: moved(w, x, jnp.stack([f, 2 * f]))[1],
    "positions less others": lambda w, x, f: moved(w, 2 * x - x[:1], f),
}


def loss_of(add, read):
    def loss(w, x, features):
        found = read(add(w, x, features))
        beside = jnp.pad(found, ((0, 0), (0, 8 - found.shape[-1])))
        return jnp.mean(jnp.tanh(beside @ w["end"]) ** 2)

    return loss


def off(found, exact):
    found, exact = (
        np.concatenate([*map(np.ravel, jax.tree.leaves(x))]) for x in (found, exact)
    )
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def hold(loss, dtype, *args):
    grad = jax.grad(loss)
    exact, hand, found = (
        jax.jit(f)(*args) for f in (grad, by_hand(grad, dtype), autocast(grad, dtype))
    )
    assert off(found, exact) <= 3 * off(hand, exact)


@pytest.mark.needs_no_scale
@pytest.mark.parametrize(("read", "dtype"), in_both_dtypes(READS, "edges"))
def test_a_difference_or_an_index_of_moved_positions_is_as_near_as_by_hand(read, dtype):
    hold(loss_of(moved, read), dtype, WEIGHTS, POSITIONS, FEATURES)


@pytest.mark.parametrize("add", ADDS)
def test_so_it_is_wherever_they_are_moved(add):
    hold(loss_of(ADDS[add], READS["edges"]), "bfloat16", WEIGHTS, POSITIONS, FEATURES)


@pytest.mark.needs_no_scale
@both_dtypes
def test_what_becomes_an_index_is_exact_without_positions(dtype):
    def loss(w, x, features):
        at = 40 + 30 * jax.nn.sigmoid(features @ w["in"] @ w["out"])
        return jnp.mean(jnp.tanh(jnp.pad(linear(at), ((0, 0), (0, 7))) @ w["end"]) ** 2)

    hold(loss, dtype, WEIGHTS, POSITIONS, FEATURES)


BIASES = {
    "a vector": lambda x, w, b: x @ w + b,
    "a vector in a row": lambda x, w, b: x @ w + b[None],
    "stretched": lambda x, w, b: x @ w + jnp.broadcast_to(b[None], x.shape),
    "scaled": lambda x, w, b: x @ w + 0.5 * jnp.broadcast_to(b, x.shape),
    "of a batch": lambda x, w, b: x.reshape(4, -1, 16) @ w + b,
    "in a jit": lambda x, w, b: jax.jit(lambda x, b: x + b)(x @ w, b),
    "turned": lambda x, w, b: (
        x.reshape(4, -1, 16) @ w
        + jnp.broadcast_to(b[:, None], (16, 16, 4)).transpose(2, 0, 1)
    ),
    "in a scan": lambda x, w, b: lax.scan(
        lambda _, xs: (0, xs[0] @ w + xs[1]),
        0,
        (x.reshape(4, -1, 16), jnp.broadcast_to(b, (4, 16, 16))),
    )[1],
    "by rows": lambda x, w, b: jax.vmap(lambda x: x @ w + b)(x),
    "weights first": lambda x, w, b: jax.vmap(lambda x: w.T @ x + b)(x),
    "channels first": lambda x, w, b: (
        jnp.einsum("bic,ch->bhi", x.reshape(4, -1, 16), w) + b[:, None]
    ),
}


@pytest.mark.parametrize("bias", BIASES)
def test_a_bias_is_added_in_16_bits(bias):
    def fun(w, x):
        y = jnp.tanh(BIASES[bias](x, w["in"], w["bias"]))
        return y.reshape(-1, 16) @ w["out"]

    def sums(jaxpr):
        for eqn in _jaxpr.open_jaxpr(jaxpr).eqns:
            if eqn.primitive.name in ("add", "tanh"):
                yield eqn.outvars[0].aval.dtype
            for inner in _jaxpr.sub_jaxprs(eqn):
                yield from sums(inner)

    jaxpr = jax.make_jaxpr(autocast(fun, "bfloat16"))(WEIGHTS, FEATURES)
    assert {*sums(jaxpr)} == {jnp.dtype("bfloat16")}
