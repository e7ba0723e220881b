"""What the programs of the law are made of: sums far from zero, and who reads them.

A table for each place in a block, see :mod:`benchmarks.law`. A function takes its
:class:`Scope`, the value before it and an earlier one, each ``[TOKENS, SIZE]``, and
returns another of that shape.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .generated_layers import FAR, SIZE, TOKENS, Layer, Scope, norm, rms, unit

PIXELS = 512

# Networks, whose results are near one.
NETS: dict[str, Layer] = {
    "a layer": lambda s, x, y: s.dense(x, bias=False),
    "a layer with a bias": lambda s, x, y: s.dense(x),
    "two layers": lambda s, x, y: s.dense(jnp.tanh(s.dense(x))),
    "two layers and a gelu": lambda s, x, y: jax.nn.gelu(s.dense(jnp.tanh(s.dense(x)))),
    "a convolution": lambda s, x, y: s.convolved(x, s.weight(3, SIZE, SIZE, scale=0.2)),
    "an attention": lambda s, x, y: s.dot(
        "qk,kd->qd",
        jax.nn.softmax(s.dot("qd,kd->qk", s.dense(x), s.dense(x)) / 3),
        s.dense(y),
    ),
    "a gate": lambda s, x, y: jax.nn.sigmoid(s.dense(x)) * s.dense(y),
    "a sum of two": lambda s, x, y: s.dense(x) + s.dense(y),
    "a recurrence": lambda s, x, y: _recurrence(s, x),
    "an average of rows": lambda s, x, y: s.dot(
        "tk,kd->td", jax.nn.softmax(s.weight(TOKENS, TOKENS, scale=1.0)), s.dense(x)
    ),
    "nothing": lambda s, x, y: x,
}


def _recurrence(s: Scope, x):
    w, u = s.weight(SIZE, SIZE), s.weight(SIZE, SIZE)

    def body(h, row):
        h = jnp.tanh(s.mm(h, w) + s.mm(row, u))
        return h, h

    return lax.scan(body, jnp.zeros(SIZE), x)[1]


def _grid(s: Scope) -> jax.Array:
    at = jnp.arange(TOKENS * SIZE, dtype=jnp.float32).reshape(TOKENS, SIZE)
    return s.far(400.0) + at % 37


# What a result is added to.
OFFSETS: dict[str, Layer] = {
    "nothing": lambda s, h, y: h,
    "a grid": lambda s, h, y: _grid(s) + h,
    "a grid, moved a little": lambda s, h, y: _grid(s) + 0.1 * h,
    "an input": lambda s, h, y: s.batch.x + h,
    "a far input": lambda s, h, y: s.batch.far + h,
    "a far input, and an earlier value": lambda s, h, y: (s.batch.far + h) + y,
    "a far input in a product": lambda s, h, y: s.batch.far * (1 + 0.1 * h),
    "less a far input": lambda s, h, y: h - s.batch.far,
    "weights": lambda s, h, y: s.weight(TOKENS, SIZE, scale=1.0, mean=s.far(FAR)) + h,
    "a bias": lambda s, h, y: h + s.weight(SIZE, scale=0.1),
    "a far bias": lambda s, h, y: h + s.weight(SIZE, scale=1.0, mean=s.far(FAR)),
    "a table": lambda s, h, y: s.weight(12, SIZE, scale=3.0)[s.batch.words] + h,
    "a number": lambda s, h, y: h + s.far(300.0),
    "units": lambda s, h, y: h * 5.0 + s.far(300.0),
    "an earlier value": lambda s, h, y: y + h,
    "an earlier value, moved a little": lambda s, h, y: y + 0.1 * h,
    "steps": lambda s, h, y: lax.fori_loop(
        0, 4, lambda _, c: c + 0.25 * h, s.batch.far
    ),
    "steps in a row": lambda s, h, y: s.batch.far + 0.5 * h + 0.5 * jnp.tanh(h),
}


def _mask(s: Scope):
    return (s.batch.labels % 3 != 0).astype(jnp.float32)[:, None]


# What is made of it by arithmetic and moves.
FACTORS: dict[str, Layer] = {
    "nothing": lambda s, h, y: h,
    "times 1": lambda s, h, y: h * 1.0,
    "times 8": lambda s, h, y: h * 8.0,
    "times 0.5": lambda s, h, y: h * 0.5,
    "times 0.9": lambda s, h, y: h * 0.9,
    "times -1": lambda s, h, y: h * -1.0,
    "negative": lambda s, h, y: -h,
    "over a temperature": lambda s, h, y: h / 0.1,
    "a mask": lambda s, h, y: h * _mask(s),
    "a where": lambda s, h, y: jnp.where(_mask(s) > 0, h, 0.0),
    "a dropout": lambda s, h, y: jnp.where(s.batch.y > -1, h / 0.8, 0.0),
    "a scale": lambda s, h, y: h * s.weight(SIZE, scale=0.1, mean=1.0),
    "a gate": lambda s, h, y: h * jax.nn.sigmoid(y),
    "in a jit": lambda s, h, y: jax.jit(lambda h: 3.0 * h)(h),
    "a softmax": lambda s, h, y: jax.nn.softmax(h) * 8.0,
    "a norm": lambda s, h, y: norm(h) * 2.0,
    "a norm with a scale": lambda s, h, y: (
        norm(h) * s.weight(SIZE, scale=0.1, mean=1.0)
    ),
    "rms": lambda s, h, y: rms(h),
    "unit vectors": lambda s, h, y: unit(h) / 0.1,
    "a mean": lambda s, h, y: h.mean(0, keepdims=True) * jnp.ones((TOKENS, 1)),
    "two parts": lambda s, h, y: jnp.concatenate([h[:, 4:], h[:, :4]], 1),
}


def _neighbours(s: Scope, h):
    d = h[1:] - h[:-1]
    return jnp.concatenate([d, d[:1]])


def _moments(s: Scope, h):
    p = jax.nn.softmax(s.weight(TOKENS, TOKENS, scale=1.0))
    mean, square = s.dot("tk,kd->td", p, h), s.dot("tk,kd->td", p, h * h)
    return (square - mean * mean) / (1 + lax.stop_gradient(jnp.abs(mean)))


def _image(s: Scope):
    """Returns a smooth picture, of a number for each pixel."""
    at = jnp.arange(PIXELS, dtype=jnp.float32)
    return jnp.sin(at / 3) + 0.5 * jnp.cos(at / 7)


def _linear(s: Scope, h, wrapped=lambda i: i):
    image = _image(s)
    low = jnp.floor(h)
    i, part = low.astype(jnp.int32), h - low
    return image[wrapped(i)] * (1 - part) + image[wrapped(i + 1)] * part


def _bilinear(s: Scope, h):
    image = _image(s)[:, None] * _image(s)
    low = jnp.floor(h)
    i, j = low.astype(jnp.int32)[:, :2].T
    a, b = (h - low)[:, :2].T
    rows = (image[k, j] * (1 - b) + image[k, j + 1] * b for k in (i, i + 1))
    first, second = rows
    return (first * (1 - a) + second * a).reshape(-1, 1) * jnp.ones(SIZE)


def _carried(h):
    return lax.scan(lambda c, row: (row, row - c), h[0], h)[1]


# Who reads it.
READS: dict[str, Layer] = {
    "nothing": lambda s, h, y: h,
    "neighbours": lambda s, h, y: _neighbours(s, h),
    "a diff": lambda s, h, y: jnp.diff(h, axis=0, append=h[:1]),
    "a roll": lambda s, h, y: h - jnp.roll(h, 1, 0),
    "less the mean": lambda s, h, y: h - h.mean(0),
    "less the first row": lambda s, h, y: h - h[:1],
    "less the largest": lambda s, h, y: h - h.max(-1, keepdims=True),
    "edges": lambda s, h, y: h[s.batch.words % TOKENS] - h[s.batch.labels % TOKENS],
    "halves": lambda s, h, y: jnp.tile(h[:, :4] - h[:, 4:], (1, 2)),
    "a scan": lambda s, h, y: _carried(h),
    "less a number": lambda s, h, y: (h - s.far(298.0)) / 5.0,
    "less the far input": lambda s, h, y: h - s.batch.far,
    "less an earlier value": lambda s, h, y: h - y,
    "in a ratio": lambda s, h, y: 10 * (h / (jnp.abs(h).mean() + 1) - 1),
    "a floor": lambda s, h, y: h - jnp.floor(h),
    "a mod": lambda s, h, y: jnp.mod(h, 1.0),
    "a lookup": lambda s, h, y: _image(s)[h.astype(jnp.int32)] + 0.1 * y,
    "the nearest": lambda s, h, y: _image(s)[jnp.round(h).astype(jnp.int32)] + 0.1 * y,
    "a linear lookup": lambda s, h, y: _linear(s, h),
    "a linear lookup, wrapped": lambda s, h, y: _linear(s, h, lambda i: i % PIXELS),
    "a bilinear lookup": lambda s, h, y: _bilinear(s, h),
    "an interpolation": lambda s, h, y: jnp.interp(
        h, jnp.arange(float(PIXELS)), _image(s)
    ),
    "map_coordinates": lambda s, h, y: jax.scipy.ndimage.map_coordinates(
        _image(s), [h], 1, mode="wrap"
    ),
    "waves": lambda s, h, y: jnp.sin(h),
    "a norm": lambda s, h, y: norm(h),
    "a norm of columns": lambda s, h, y: norm(h, 0),
    "rms": lambda s, h, y: rms(h),
    "a softmax": lambda s, h, y: 8 * jax.nn.softmax(h),
    "distances": lambda s, h, y: jnp.sqrt(((h[:, None] - h[None]) ** 2).mean(-1) + 0.1),
    "moments": lambda s, h, y: _moments(s, h),
    "a variance": lambda s, h, y: h.var(0) * jnp.ones((TOKENS, 1)),
    "a layer": lambda s, h, y: s.dense(h, bias=False) / (1 + jnp.abs(h).mean()),
}

# What is returned of a value beside the loss.
RESULTS: dict[str, Callable] = {
    "itself": lambda h: h,
    "a sum": lambda h: h.sum(),
    "a mean": lambda h: h.mean(),
    "a mean of rows": lambda h: h.mean(0),
    "squares": lambda h: ((h - 0.3) ** 2).mean(),
    "an error": lambda h: jnp.abs(h - 0.1).mean(),
    "the largest": lambda h: h.max(),
    "a logarithm": lambda h: jnp.log1p(jnp.abs(h)).mean(),
}
