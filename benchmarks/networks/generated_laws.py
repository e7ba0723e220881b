"""Families of small programs in which rounding once too often does harm.

Each family is a dictionary of layers, see :mod:`.generated_layers`: all combinations of
a few choices. The programs of a family differ in how they are written, and the law for
all of them is the same.
"""

# ruff: noqa: D103  (a function is named after what it is)

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .generated_layers import SIZE, TOKENS, Layer, norm, rms, unit


def combinations(make: Callable[..., Layer], *choices: dict) -> dict[str, Layer]:
    """Returns a layer for each way to choose one of each."""
    return {
        ", ".join(names): make(*(c[n] for c, n in zip(choices, names, strict=True)))
        for names in itertools.product(*choices)
    }


# Layers that keep what they are given, or let it grow, in a row and in a loop.

INNER = {
    "tanh": lambda s, w, x: jnp.tanh(s.mm(x, w[0])),
    "a norm first": lambda s, w, x: s.mm(norm(x), w[0]),
    "two matmuls": lambda s, w, x: s.dot("ti,ij->tj", jax.nn.relu(s.mm(x, w[0])), w[1]),
    "a gate": lambda s, w, x: jax.nn.sigmoid(s.mm(x, w[0])) * s.mm(x, w[1]),
    "linear": lambda s, w, x: s.mm(x, w[0]),
}
KEEPS = {
    "a shortcut": lambda x, h: x + 0.3 * h,
    "a factor": lambda x, h: x * (1 + 0.1 * h),
    "a leak": lambda x, h: 0.9 * x + 0.3 * h,
    "growth": lambda x, h: 1.25 * x + 0.3 * h,
    "an average": lambda x, h: (x + h) / 2,
    "a gate": lambda x, h: x + jax.nn.sigmoid(h - 3) * (h - x),
    "a maximum": lambda x, h: jnp.maximum(x, 0.3 * h),
    "a rotation": lambda x, h: jnp.roll(x, 1, -1) + 0.3 * h,
}
ROWS = {
    "in a row": lambda f, x, ws: functools.reduce(lambda x, w: f(w, x), ws, x),
    "a scan": lambda f, x, ws: lax.scan(lambda x, w: (f(w, x), None), x, ws)[0],
    "a loop": lambda f, x, ws: lax.fori_loop(
        0, len(ws), lambda i, x: f(lax.dynamic_index_in_dim(ws, i, 0, False), x), x
    ),
    "a scan of checkpoints": lambda f, x, ws: lax.scan(
        lambda x, w: (jax.checkpoint(f)(w, x), None), x, ws
    )[0],
    "scans in a scan": lambda f, x, ws: lax.scan(
        lambda x, ws: (lax.scan(lambda x, w: (f(w, x), None), x, ws)[0], None),
        x,
        ws.reshape(2, -1, *ws.shape[1:]),
    )[0],
}


def keeps(inner, keep, row):
    def layer(s, x, _):
        ws = s.weight(8, 2, SIZE, SIZE)
        x = row(lambda w, x: keep(x, inner(s, w, x)), x, ws)
        return s.dense(rms(x))

    return layer


# Sums of numbers that are large for float16.

LARGE = {
    "a large weight": lambda s, x: s.mm(x, s.weight(SIZE, 64, scale=50)),
    "a scale": lambda s, x: 200 * s.dense(x, 64),
    "a product": lambda s, x: s.dense(10 * x, 64) * s.dense(10 * x, 64),
    "a shift": lambda s, x: 200 * s.dense(x, 64) + s.weight(64, scale=100),
}
SUMS = {
    "a sum": lambda s, h: h.sum(-1, keepdims=True) / 64,
    "a mean": lambda s, h: h - h.mean(0),
    "a mean square": lambda s, h: h * lax.rsqrt((h * h).mean(-1, keepdims=True)),
    "a length": lambda s, h: h / jnp.sqrt((h**2).sum(-1, keepdims=True)) * 8,
    "a variance": lambda s, h: norm(h),
    "a running sum": lambda s, h: jnp.cumsum(h, -1) / 64,
    "a sum of two": lambda s, h: (h + h[::-1]) + (jnp.roll(h, 1, 0) + h),
    "sums of windows": lambda s, h: lax.reduce_window(
        h, 0.0, lax.add, (1, 8), (1, 1), "SAME"
    ),
    "sums of segments": lambda s, h: jax.ops.segment_sum(
        h, s.batch.words % 3, num_segments=3
    )[s.batch.words % 3],
    "softmax": lambda s, h: 64 * jax.nn.softmax(h / 100),
    "a scan": lambda s, h: lax.scan(lambda c, r: (c + r, c + r), 0 * h[0], h)[1],
    "a reduce": lambda s, h: functools.reduce(jnp.add, [h] * 40) / 40,
    "a loop": lambda s, h: lax.fori_loop(0, 40, lambda i, c: c + h, 0 * h) / 40,
    "a square": lambda s, h: h * h / (1 + jnp.abs(h)),
}
AFTERWARDS = {
    "a norm": norm,
    "a scale": lambda h: h / 1000,
    "a tanh": lambda h: jnp.tanh(h / 1000),
    "a logarithm": lambda h: jnp.sign(h) * jnp.log1p(jnp.abs(h)) / 3,
}


def sums(large, total, after):
    def layer(s, x, _):
        h = after(total(s, large(s, x)))
        return s.dense(jnp.broadcast_to(h, (TOKENS, 64)))

    return layer


# What is sent back to a norm: its gradient is what is left of two sums that cancel.

NORMS = {
    "layer norm": norm,
    "batch norm": lambda h: norm(h, 0),
    "rms norm": rms,
    "unit vectors": lambda h: unit(h) * SIZE**0.5,
    "group norm": lambda h: norm(h.reshape(TOKENS, 2, -1)).reshape(h.shape),
    "a softmax": lambda h: SIZE * jax.nn.softmax(h),
    "a mean": lambda h: h - h.mean(-1, keepdims=True),
    "a sum of one": lambda h: SIZE * jnp.abs(h) / jnp.abs(h).sum(-1, keepdims=True),
    "in a jit": jax.jit(norm),
    "in a checkpoint": jax.checkpoint(norm),
    "by rows": jax.vmap(norm),
}
BEFORE = {
    "a matmul": lambda s, x: s.dense(x, bias=False),
    "a bias": lambda s, x: s.dense(x),
    "a shortcut": lambda s, x: x + s.dense(x),
    "an activation": lambda s, x: jax.nn.silu(s.dense(x)),
    "a convolution": lambda s, x: s.convolved(x, s.weight(3, SIZE, SIZE, scale=0.2)),
    "a sum of two": lambda s, x: s.dense(x) + s.dense(x),
    "a gate": lambda s, x: jax.nn.sigmoid(s.dense(x)) * s.dense(x),
}
BEHIND = {
    "a matmul": lambda s, h: s.dense(h),
    "a scale and a shift": lambda s, h: s.dense(
        jax.nn.relu(h * s.weight(SIZE, scale=0.1, mean=1) + s.weight(SIZE, scale=0.1))
    ),
    "a shortcut": lambda s, h: h + s.dense(jnp.tanh(s.dense(h))),
    "two matmuls": lambda s, h: s.dense(h) + jnp.tanh(s.dense(h)),
    "attention": lambda s, h: s.dot(
        "qk,kd->qd",
        jax.nn.softmax(s.dot("qd,kd->qk", s.dense(h), s.dense(h)) / 2),
        s.dense(h),
    ),
    "a mean": lambda s, h: s.dense(h + h.mean(0)),
}


def sent_back(normed, before, behind):
    def layer(s, x, _):
        for _ in range(2):
            x = behind(s, normed(before(s, x)))
        return x

    return layer


# Gates just below one, many in a row, without a loop.

GATES = {
    "sigmoid": lambda h: jax.nn.sigmoid(6 + h),
    "one less a sigmoid": lambda h: 1 - jax.nn.sigmoid(h - 6),
    "an exponential": lambda h: jnp.exp(-0.003 * jax.nn.softplus(h)),
    "a clip": lambda h: jnp.clip(0.995 + 0.002 * h, 0, 1),
    "a tanh": lambda h: jnp.tanh(3 + 0.2 * h),
    "in a jit": lambda h: jax.jit(jax.nn.sigmoid)(6 + h),
    "one less a small number": lambda h: 1 - 0.005 * jnp.tanh(h) ** 2,
    "an average": lambda h: (1 + jax.nn.sigmoid(5 + h)) / 2,
    "one and a little": lambda h: 1 + 0.01 * h,
}


def unrolled(g, v):
    states, state = [], 0 * v[0]
    for gate, value in zip(g, v, strict=True):
        state = gate * state + value
        states.append(state)
    return jnp.stack(states)


def associative(g, v):
    def combined(one, two):
        return one[0] * two[0], two[0] * one[1] + two[1]

    return lax.associative_scan(combined, (g, v))[1]


def halved(g, v):
    """The same by halves, as a parallel scan does."""
    while len(g) > 1:
        v = g[1::2] * v[::2] + v[1::2]
        g = g[::2] * g[1::2]
    return v


CHAINS = {
    "in a row": unrolled,
    "associative": associative,
    "by halves": halved,
    "in a jit": jax.jit(unrolled),
    "checkpoints": lambda g, v: functools.reduce(
        lambda c, gv: jax.checkpoint(lambda c, g, v: g * c + v)(c, *gv),
        zip(g, v, strict=True),
        0 * v[0],
    )[None],
    "running products": lambda g, v: jnp.cumprod(g, 0) * v,
    "products": lambda g, v: g.prod(0) * v,
    "products by reduce": lambda g, v: functools.reduce(jnp.multiply, g) * v,
    "running logarithms": lambda g, v: jnp.exp(jnp.cumsum(jnp.log(g), 0)) * v,
    "weights by differences": lambda g, v: jnp.einsum(
        "tsnc,snc->tnc",
        jnp.exp(
            jnp.minimum(
                jnp.cumsum(jnp.log(g), 0)[:, None] - jnp.cumsum(jnp.log(g), 0), 0
            )
        )
        * jnp.tril(jnp.ones((len(g), len(g))))[:, :, None, None],
        v,
    ),
    "a scan": lambda g, v: lax.scan(
        lambda c, gv: (gv[0] * c + gv[1],) * 2, 0 * v[0], (g, v)
    )[1],
}


def gates(gate, chain):
    def layer(s, x, _):
        h = s.dot("ti,ijk->jtk", x, s.weight(SIZE, 32, SIZE, scale=SIZE**-0.5))
        v = s.dot("ti,ijk->jtk", x, s.weight(SIZE, 32, SIZE, scale=SIZE**-0.5))
        return s.dense(rms(chain(gate(h), v)[-1]))

    return layer


FAMILIES: dict[str, dict[str, Layer]] = {
    "kept": combinations(keeps, INNER, KEEPS, ROWS),
    "summed": combinations(sums, LARGE, SUMS, AFTERWARDS),
    "sent back": combinations(sent_back, NORMS, BEFORE, BEHIND),
    "gates": combinations(gates, GATES, CHAINS),
}
