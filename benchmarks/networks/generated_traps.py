"""More families of small programs: what loops carry and compare, choices, and numbers.

Each family is a dictionary of layers, as in :mod:`.generated_laws`.
"""

# ruff: noqa: D103  (a function is named after what it is)

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .generated_laws import BEFORE, combinations
from .generated_layers import SIZE, TOKENS, WORDS, norm, rms

# Loops that carry rows of an input, and read how they differ.

ROWS_OF = {
    "rows of data": lambda s: s.batch.far,
    "rows of data, moved": lambda s: s.batch.far + s.weight(SIZE, scale=1.0),
    "rows of data, scaled": lambda s: s.batch.far * s.weight(SIZE, scale=0.1, mean=1),
    "rows of a table": lambda s: s.weight(WORDS, SIZE, scale=1.0, mean=30.0)[
        s.batch.words
    ],
}
DIFFER = {
    "differ": lambda now, before: now - before,
    "with a negative": lambda now, before: now + -before,
    "in a ratio": lambda now, before: 30 * (now / before - 1),
    "in logarithms": lambda now, before: 30 * (jnp.log(now) - jnp.log(before)),
    "in squares": lambda now, before: (now * now - before * before) / 60,
    "in a jit": jax.jit(lambda now, before: now - before),
    "in a norm": lambda now, before: norm(jnp.stack([now, before]), 0)[0],
}


def _shift(differ, out, rows):
    return lax.scan(lambda c, row: (row, out(differ(row, c))), rows[0], rows)[1]


def _two_lags(differ, out, rows):
    def body(carry, row):
        one, two = carry
        return (row, one), out(differ(row, one) + differ(one, two))

    return lax.scan(body, (rows[0], rows[0]), rows)[1]


def _backward(differ, out, rows):
    def body(c, row):
        return row, out(differ(row, c))

    return lax.scan(body, rows[-1], rows, reverse=True)[1]


def _of_checkpoints(differ, out, rows):
    @jax.checkpoint
    def body(c, row):
        return row, out(differ(row, c))

    return lax.scan(body, rows[0], rows, unroll=2)[1]


def _queue(differ, out, rows):
    def body(queue, row):
        return jnp.concatenate([queue[1:], row[None]]), out(differ(row, queue[0]))

    return lax.scan(body, jnp.stack([rows[0]] * 3), rows)[1]


def _counted(differ, out, rows):
    def body(i, state):
        before, outs = state
        row = lax.dynamic_index_in_dim(rows, i, 0, False)
        new = out(differ(row, before))
        return row, lax.dynamic_update_index_in_dim(outs, new, i, 0)

    return lax.fori_loop(0, TOKENS, body, (rows[0], jnp.zeros((TOKENS, SIZE))))[1]


def _largest(differ, out, rows):
    def body(most, row):
        return jnp.maximum(most, row), out(differ(row, most))

    return lax.scan(body, rows[0], rows)[1]


def _last_of_all(differ, out, rows):
    before = lax.associative_scan(lambda one, two: jnp.maximum(one, two), rows)
    return jax.vmap(lambda now, c: out(differ(now, c)))(rows, before)


def _in_a_loop(differ, out, rows):
    def outer(c, rows):
        return lax.scan(lambda c, row: (row, out(differ(row, c))), c, rows)

    return lax.scan(outer, rows[0], rows[: TOKENS // 3 * 3].reshape(3, -1, SIZE))[1]


CARRIED_BY = {
    "a scan": _shift,
    "two lags": _two_lags,
    "a scan from the end": _backward,
    "a scan of checkpoints": _of_checkpoints,
    "a queue": _queue,
    "a counted loop": _counted,
    "the largest so far": _largest,
    "the largest so far, in parallel": _last_of_all,
    "a scan in a scan": _in_a_loop,
    "a jit": lambda *args: jax.jit(functools.partial(_shift, *args[:2]))(args[2]),
}


def carries(rows_of, differ, carried_by):
    def layer(s, x, _):
        rows, w = rows_of(s), s.weight(SIZE, SIZE)
        outs = carried_by(differ, lambda d: s.mm(d, w), rows)
        return x + s.dense(outs.reshape(-1, SIZE)).mean(0) + outs.reshape(-1, SIZE)[-1]

    return layer


# Loops that compare what was computed before them with what they compute. They do
# so in float32, so that what they are compared with is float32, too.


def _energy(s, x):
    """Returns a function of which the least is sought, and its gradient."""
    a, u = s.dense(norm(x)), s.weight(SIZE, SIZE)
    wanted = lax.stop_gradient(norm(x))

    def energy(z):
        h = jnp.tanh(jnp.einsum("td,de->te", a, u * (1 + z)))
        found = jnp.einsum("te,ef->tf", h, u)
        return ((found - wanted) ** 2).mean() + 0.01 * (z * z).sum()

    return energy, jax.grad(energy)


def _backtracking(s, x, loop):
    """The first of some steps, each half as long, that gains enough."""
    energy, gradient = _energy(s, x)
    z = 0.3 * jnp.ones(SIZE)
    g = gradient(z)
    start, gain = energy(z), 1e-2 * (g * g).sum()

    def worse(step):
        return energy(z - step * g) > start - step * gain

    step = loop(worse, lambda step: step / 2, jnp.float32(4.0), 12)
    return lax.stop_gradient(step) * g


def _short_steps(s, x, loop):
    """How many steps gain anything, each less than 16 bits can tell."""
    energy, gradient = _energy(s, x)
    z = 0.3 * jnp.ones(SIZE)
    start, g = energy(z), gradient(z)

    def body(state):
        i, z, best, count = state
        new = z - 2e-3 * g
        value = energy(new)
        took = value < best
        z, best = jnp.where(took, new, z), jnp.where(took, value, best)
        return i + 1, z, best, jnp.where(took, count + 0.05, count)

    start = 0, z, start, jnp.float32(0)
    return lax.stop_gradient(loop(lambda s: s[0] < 20, body, start, 20)[3]) * g


def _fixed_point(s, x, loop):
    """What a map leaves as it is, until it hardly changes; then one step more."""
    w, b = s.weight(SIZE, SIZE) / 2, s.dense(norm(x)).mean(0)

    def f(z):
        return jnp.tanh(jnp.einsum("i,ij->j", z, w) + b)

    def body(state):
        _, z = state
        new = f(z)
        return jnp.abs(new - z).max(), new

    start = jnp.float32(1), f(b)
    return f(lax.stop_gradient(loop(lambda s: s[0] > 1e-4, body, start, 40)[1]))


def _adaptive(s, x, loop):
    """An ordinary differential equation, whose steps depend on their errors."""
    w, start = s.weight(SIZE, SIZE), s.dense(norm(x)).mean(0)

    def slope(z):
        return jnp.tanh(jnp.einsum("i,ij->j", z, w))

    def body(state):
        t, z, h = state
        h = jnp.minimum(h, 1.0 - t)
        a = slope(z)
        b = slope(z + h * a)
        error = jnp.sqrt(jnp.mean((h * (b - a) / 2) ** 2) + 1e-16) / 1e-3
        z = jnp.where(error < 1, z + h * (a + b) / 2, z)
        t = jnp.where(error < 1, t + h, t)
        return t, z, h * jnp.clip(0.9 * lax.stop_gradient(error) ** -0.5, 0.2, 5.0)

    state = jnp.float32(0), start, jnp.float32(0.1)
    return loop(lambda s: s[0] < 1.0 - 1e-6, body, state, 40)[1]


def _newton(s, x, loop):
    """Newton's method for one number, with the value that it had before."""
    h = norm(s.dense(norm(x))).mean(0)
    u = s.weight(SIZE, SIZE)

    def value(z):
        return jnp.einsum("i,ij->j", h, u).mean() + z + z**3 / 3

    def body(state):
        z, v = state
        z = z - v / (1 + z * z)
        return z, value(z)

    z = jnp.float32(1)
    z, v = loop(lambda s: jnp.abs(s[1]) > 1e-5, body, (z, value(z)), 12)
    z, v = lax.stop_gradient(z), value(lax.stop_gradient(z))
    return (z - v / (1 + z * z)) * h


SEARCHES = {
    "backtracking": _backtracking,
    "short steps": _short_steps,
    "a fixed point": _fixed_point,
    "steps by their errors": _adaptive,
    "Newton's method": _newton,
}


def _while(test, body, state, most):
    """A while loop, which nobody differentiates."""
    state = jax.tree.map(lax.stop_gradient, state)
    loop = lax.while_loop(
        lambda s: test(s[1]) & (s[0] < most),
        lambda s: (s[0] + 1, lax.stop_gradient(body(s[1]))),
        (0, state),
    )
    return loop[1]


def _bounded(test, body, state, most):
    """A scan, of which the rest of the iterations change nothing."""

    def guarded(state, _):
        go, new = test(state), body(state)
        return jax.tree.map(lambda a, b: jnp.where(go, a, b), new, state), None

    return lax.scan(guarded, state, None, length=most)[0]


def _of_conds(test, body, state, most):
    def guarded(state, _):
        return lax.cond(test(state), body, lambda s: s, state), None

    return lax.scan(guarded, state, None, length=most)[0]


def _bounded_checkpoints(test, body, state, most):
    return _bounded(test, jax.checkpoint(body), state, most)


ENDED_BY = {
    "a while loop": _while,
    "a scan with selects": _bounded,
    "a scan of checkpoints with selects": _bounded_checkpoints,
    "a scan of conds": _of_conds,
}


def compares(search, ended_by):
    def layer(s, x, _):
        return x + s.dense(search(s, x, ended_by))

    return layer


# What is chosen by its size, and found again by its derivative.

CHOSEN = {
    "at and max": lambda s, h: h.at[0].max(h[1]),
    "at and min": lambda s, h: h.at[2].min(h[1]),
    "at many and max": lambda s, h: h.at[s.batch.labels % TOKENS].max(h),
    "at many and min, of a copy": lambda s, h: (
        (h + 0.0).at[s.batch.words % TOKENS].min(h[::-1])
    ),
    "into slots": lambda s, h: (
        jnp.full((4, SIZE), -1.0).at[s.batch.words % 4].max(h)[s.batch.labels % 4]
    ),
    "segments": lambda s, h: jnp.nan_to_num(
        jax.ops.segment_max(h, s.batch.words % 3, num_segments=3), neginf=0.0
    )[s.batch.words % 3],
    "largest so far": lambda s, h: lax.cummax(h, 0),
    "smallest so far": lambda s, h: lax.cummin(h, 0),
    "largest of a row": lambda s, h: h + h.max(-1, keepdims=True),
    "largest of a window": lambda s, h: lax.reduce_window(
        h, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME"
    ),
    "maximum of two": lambda s, h: jnp.maximum(h, h[::-1]),
    "minimum of two parts": lambda s, h: jnp.minimum(h, jnp.roll(h, 1, -1)),
    "largest, by its place": lambda s, h: jnp.where(
        h == h.max(-1, keepdims=True), h, 0.1 * h
    ),
    "largest, by a lookup": lambda s, h: jnp.take_along_axis(
        h, h.argmax(-1, keepdims=True), -1
    ),
    "largest three": lambda s, h: jnp.where(
        h >= lax.top_k(h, 3)[0][:, -1:], h, 0.1 * h
    ),
    "sorted": lambda s, h: jnp.sort(h, 0),
    "middle": lambda s, h: h - jnp.median(h, -1, keepdims=True),
    "clipped by its mean": lambda s, h: jnp.clip(h, -jnp.abs(h).mean(), h.mean(0)),
    "in a scan": lambda s, h: lax.scan(
        lambda c, r: (c.at[:4].max(r[4:]),) * 2, h[0], h
    )[1],
    "in a checkpoint": lambda s, h: jax.checkpoint(lambda h: h.at[0].max(h[1]))(h),
    "by rows": lambda s, h: jax.vmap(lambda r: r.at[0].max(r[1]))(h),
}
CHOSEN_BEHIND = {
    "a matmul": lambda s, h: s.dense(h),
    "a relu": lambda s, h: s.dense(jax.nn.relu(h)),
    "a norm": lambda s, h: s.dense(norm(h + 0.1 * jnp.arange(SIZE))),
    "a shortcut": lambda s, h: h + s.dense(h),
}


def chooses(before, chosen, behind):
    def layer(s, x, _):
        h = chosen(s, before(s, x))
        return x + behind(s, jnp.broadcast_to(h, x.shape))

    return layer


# Numbers in the code that 16 bits do not hold, often enough to be seen.

NUMBERS = {
    "times": lambda h, y: h * 0.9,
    "over": lambda h, y: h / 1.1,
    "over less than one": lambda h, y: jnp.where(y > -9, h / 0.9, 0),
    "times a root": lambda h, y: h * 0.5**0.5,
    "times a full array": lambda h, y: h * jnp.full(SIZE, 0.9),
    "a leak": lambda h, y: 0.9 * h + 0.1 * jnp.tanh(h),
    "less a part": lambda h, y: h - 0.1 * h,
    "an average": lambda h, y: (h + h + h) / 3.3,
    "a leaky relu": lambda h, y: jnp.where(h >= 0, 1.1 * h, 1.1 * h),
    "in a jit": lambda h, y: jax.jit(lambda h: h * 0.9)(h),
    "a logarithm's base": lambda h, y: h * 0.6931471805599453,
}


def _four(s, number, h):
    """Applies a number four times, and a matmul that multiplies by powers of two."""
    for _ in range(4):
        h = number(h, s.batch.y)
    size = round(4 * math.log2(_size_of(number)))
    return s.mm(h, jnp.roll(jnp.eye(SIZE), 1, 0) * 2.0**-size)


def _size_of(number) -> float:
    x = np.full((1, SIZE), 1e-3, np.float32)
    with jax.ensure_compile_time_eval():
        return float(number(x, x)[0, 0] / x[0, 0])


OFTEN_BY = {
    "in a row": lambda f, h: functools.reduce(lambda h, _: f(h), range(6), h),
    "in a scan": lambda f, h: lax.scan(lambda h, _: (f(h), None), h, None, length=6)[0],
}


def numbers(number, often_by):
    def layer(s, x, _):
        return s.dense(often_by(functools.partial(_four, s, number), s.dense(x)))

    return layer


# Products that add fewer than eight numbers, which gain nothing from 16 bits: they are
# float32 in what is compared with, too.


def _rotation(s):
    """Returns a rotation in three dimensions, of a weight of three angles."""
    a, b, c = s.weight(3, scale=0.5)
    one, zero = jnp.float32(1), jnp.float32(0)
    sin, cos = jnp.sin, jnp.cos
    first = [[cos(a), -sin(a), zero], [sin(a), cos(a), zero], [zero, zero, one]]
    second = [[cos(b), zero, sin(b)], [zero, one, zero], [-sin(b), zero, cos(b)]]
    third = [[one, zero, zero], [zero, cos(c), -sin(c)], [zero, sin(c), cos(c)]]
    return jnp.array(first) @ jnp.array(second) @ jnp.array(third)


def _moved(s, points):
    return points @ _rotation(s).T + jnp.array([0.0, 0.0, 6.0])


def _camera(s, points):
    camera = jnp.array([[500.0, 0, 320], [0, 500, 240], [0, 0, 1]])
    pixels = _moved(s, points) @ camera.T
    return pixels[:, :2] / pixels[:, 2:] / 100


def _chain(s, points):
    joints = [_rotation(s) for _ in range(3)]
    return functools.reduce(lambda p, r: p @ r.T + 0.3, joints, points) / 2


def _quaternions(s, points):
    q = s.weight(4, scale=1.0)
    q = q / jnp.linalg.norm(q)
    w, v = q[0], q[1:]
    return points + 2 * jnp.cross(v, jnp.cross(v, points) + w * points)


def _distances(s, points):
    p = _moved(s, points)
    return (p * p).sum(-1)[:, None] - 2 * p @ p.T + (p * p).sum(-1)


def _phases(s, points):
    places = 300 * points[:, :2] + s.batch.far[:, :2]
    return jnp.sin(places @ (0.05 * s.weight(2, 6, scale=1.0)))


def _powers(s, points):
    x = points[:, 0]
    return jnp.stack([x**0, x, x * x, x**3], 1) @ s.weight(4, 3, scale=1.0)


def _rotated_by_each(s, points):
    angle = 3 * points[:, 0] + s.weight(1, scale=1.0)
    c, r = jnp.cos(angle), jnp.sin(angle)
    turn = jnp.stack([jnp.stack([c, -r], -1), jnp.stack([r, c], -1)], -2)
    return jnp.einsum("tij,tj->ti", turn, points[:, 1:])


def _positions(s, points):
    places = 1000.0 * jnp.arange(TOKENS)[:, None] + 10 * points[:, :1]
    return jnp.sin(places @ (1e-3 * s.weight(1, 6, scale=1.0)))


SMALL = {
    "a pose": _moved,
    "a camera": _camera,
    "joints": _chain,
    "quaternions": _quaternions,
    "distances": _distances,
    "phases": _phases,
    "powers": _powers,
    "a turn for each": _rotated_by_each,
    "positions": _positions,
}
SMALL_BEHIND = {
    "a matmul": lambda s, x, h: x + s.dense(h),
    "a difference": lambda s, x, h: x + s.dense(h - h[:1]),
    "a norm": lambda s, x, h: x + s.dense(rms(h)),
    "a loop": lambda s, x, h: (
        x + s.dense(lax.scan(lambda c, r: (r, r - c), h[0], h)[1])
    ),
}


def small(product, behind):
    def layer(s, x, _):
        points = s.batch.y[:, :3] + 0.1 * s.dense(x, 3)
        return behind(s, x, product(s, points))

    return layer


TRAPS: dict[str, dict[str, Any]] = {
    "carried": combinations(carries, ROWS_OF, DIFFER, CARRIED_BY),
    "compared": combinations(compares, SEARCHES, ENDED_BY),
    "chosen": combinations(chooses, BEFORE, CHOSEN, CHOSEN_BEHIND),
    "numbers": combinations(numbers, NUMBERS, OFTEN_BY),
    "small": combinations(small, SMALL, SMALL_BEHIND),
}
