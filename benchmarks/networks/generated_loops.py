"""Layers of generated training steps that are loops, or act like one."""

# ruff: noqa: D103  (a layer is named after what it is)

import jax
import jax.numpy as jnp
from jax import lax

from .generated_layers import SIZE, TOKENS, layers_of, norm


def rnn(s, x, _):
    u, w = s.weight(SIZE, SIZE), s.weight(SIZE, SIZE)

    def body(h, x):
        h = jnp.tanh(s.mm(x, u) + s.mm(h, w))
        return h, h

    return lax.scan(body, jnp.zeros(SIZE), x)[1]


def lstm(s, x, _):
    u, w, b = s.weight(SIZE, 32), s.weight(SIZE, 32), s.weight(32, scale=0.1)

    def body(carry, x):
        c, h = carry
        i, f, g, o = jnp.split(s.mm(x, u) + s.mm(h, w) + b, 4)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h

    return lax.scan(body, (jnp.zeros(SIZE), jnp.zeros(SIZE)), x)[1]


def gru(s, x, _):
    u, w, v, r = (s.weight(SIZE, n) for n in (16, 16, SIZE, SIZE))

    def body(h, x):
        gates = jax.nn.sigmoid(s.mm(x, u) + s.mm(h, w))
        z, a = jnp.split(gates, 2)
        new = jnp.tanh(s.mm(x, v) + a * s.mm(h, r))
        h = (1 - z) * new + z * h
        return h, h

    return lax.scan(body, jnp.zeros(SIZE), x)[1]


def minimal_gru(s, x, _):
    z, new = jax.nn.sigmoid(s.dense(x)), jnp.tanh(s.dense(x))

    def body(h, z_new):
        z, new = z_new
        h = h + z * (new - h)
        return h, h

    return lax.scan(body, jnp.zeros(SIZE), (z, new), reverse=True)[1]


def state_space(s, x, _):
    a, b = jnp.exp(-jax.nn.softplus(s.dense(x) - 2)), s.dense(x)

    def body(h, ab):
        h = ab[0] * h + ab[1]
        return h, h

    return s.dense(norm(lax.scan(body, jnp.zeros(SIZE), (a, b))[1]))


def selective_state(s, x, _):
    step, rate = jax.nn.softplus(s.dense(x)), -jnp.exp(s.weight(SIZE, 4, scale=0.3))
    b, c = s.dense(x, 4), s.dense(x, 4)
    decay = jnp.exp(step[..., None] * rate)
    add = (step * x)[..., None] * b[:, None]

    def body(h, now):
        decay, add, c = now
        h = decay * h + add
        return h, s.dot("ij,j->i", h, c)

    return x + s.dense(lax.scan(body, jnp.zeros((SIZE, 4)), (decay, add, c))[1])


def delta_rule(s, x, _):
    q, k, v = (s.dense(norm(x)) for _ in range(3))
    k = k / jnp.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    rate = jax.nn.sigmoid(s.dense(x, 1))

    def body(memory, now):
        q, k, v, rate = now
        memory += rate * jnp.outer(k, v - s.mm(k, memory))
        return memory, s.mm(q, memory)

    return x + s.dense(lax.scan(body, jnp.zeros((SIZE, SIZE)), (q, k, v, rate))[1])


def combined(one, two):
    return one[0] * two[0], two[0] * one[1] + two[1]


def associative_scan(s, x, _):
    a = jax.nn.sigmoid(s.dense(x) + 2)
    return s.dense(lax.associative_scan(combined, (a, s.dense(x) * (1 - a)))[1])


def gates_by_hand(s, x, _):
    a, b = jax.nn.sigmoid(s.dense(x) + 1), s.dense(x)
    h, out = jnp.zeros(SIZE), []
    for t in range(TOKENS):
        h = a[t] * h + (1 - a[t]) * b[t]
        out.append(h)
    return s.dense(jnp.stack(out))


def running_product(s, x, _):
    return s.dense(norm(x) * jnp.cumprod(jax.nn.sigmoid(s.dense(x) + 2), 0))


def running_log(s, x, _):
    decay = jnp.cumsum(jax.nn.log_sigmoid(s.dense(x) + 2), 0)
    scores = s.dot("td,kd->tk", s.dense(x), s.dense(x)) / 3
    far = (decay[:, None] - decay[None]).mean(-1)
    scores = scores * jnp.exp(jnp.where(jnp.tri(TOKENS, dtype=bool), far, -jnp.inf))
    return x + s.dot("tk,kd->td", scores, s.dense(x)) / 2


def running_sum(s, x, _):
    return s.dense(norm(jnp.cumsum(s.dense(x), 0)))


def moving_average(s, x, _):
    def body(mean, x):
        mean = 0.9 * mean + 0.1 * x
        return mean, x - mean

    return s.dense(lax.scan(body, jnp.zeros(SIZE), s.dense(x))[1])


def stacked_layers(s, x, _):
    weights = s.weight(3, SIZE, 16), s.weight(3, 16, SIZE)

    def body(x, weights):
        h = jax.nn.gelu(s.mm(norm(x), weights[0]))
        return x + s.mm(h, weights[1]), None

    return lax.scan(body, x, weights)[0] / 2


def stacked_and_checkpointed(s, x, y):
    def body(x, w):
        return x + jnp.tanh(s.mm(norm(x), w)) * y, None

    return lax.scan(jax.checkpoint(body), x, s.weight(4, SIZE, SIZE))[0] / 2


def growing_layers(s, x, _):
    def body(x, w):
        return 1.5 * x + s.mm(norm(x), w), None

    return lax.scan(body, x, s.weight(4, SIZE, SIZE))[0] / 8


def shared_layers(s, x, _):
    w = s.weight(SIZE, SIZE)
    body = lambda _, h: jnp.tanh(s.mm(h, w)) + h / 2  # noqa: E731
    return lax.fori_loop(0, 3, body, x)


def fixed_point(s, x, _):
    w = s.weight(SIZE, SIZE) / 4

    def body(z, _):
        return jnp.tanh(s.mm(z, w) + x), None

    return lax.scan(body, jnp.zeros_like(x), None, length=8)[0]


def flow(s, x, _):
    w, v, dt = s.weight(SIZE, 16), s.weight(16, SIZE), 0.125

    def slope(x):
        return s.dot("tj,ji->ti", jnp.tanh(s.mm(x, w)), v)

    def body(x, _):
        a = slope(x)
        b = slope(x + dt / 2 * a)
        return x + dt * b, None

    return lax.scan(body, x, None, length=8)[0]


def leapfrog(s, x, y):
    w = s.weight(SIZE, SIZE)
    force = jax.grad(lambda q: -jnp.sum(jnp.tanh(s.mm(q, w)) ** 2) / 2)

    def body(state, _):
        q, p = state
        p = p + 0.1 * force(q)
        return (q + 0.1 * p, p), None

    return lax.scan(body, (x, y / 2), None, length=6)[0][0]


def diffusion_chain(s, x, y):
    w, times = s.weight(SIZE, SIZE), jnp.linspace(0.05, 0.3, 6)

    def body(x, beta):
        noise = jnp.tanh(s.mm(x, w))
        x = (x - beta / jnp.sqrt(1 - beta) * noise) / jnp.sqrt(1 - beta / 2)
        return x + jnp.sqrt(beta) * y / 4, None

    return lax.scan(body, x, times)[0] / 2


def learned_descent(s, x, _):
    a = s.dense(norm(x))

    def energy(z):
        return ((s.dot("td,d->t", a, z) - x[:, 0]) ** 2).mean() + 0.1 * (z * z).sum()

    def body(z, _):
        return z - 0.2 * jax.grad(energy)(z), None

    z = lax.scan(body, jnp.zeros(SIZE), None, length=6)[0]
    return x + s.dense(z)


def power_iteration(s, x, _):
    """A power iteration on weights, which nobody differentiates."""
    w = s.weight(SIZE, SIZE)

    def body(state):
        i, v, _ = state
        new = s.dot("ij,j->i", w, s.dot("ij,i->j", w, v))
        new = new / jnp.linalg.norm(new)
        return i + 1, new, jnp.abs(new - v).max()

    start = 0, jnp.ones(SIZE) / SIZE**0.5, jnp.float32(1)
    _, v, _ = lax.while_loop(lambda s: (s[2] > 0.02) & (s[0] < 20), body, start)
    size = jnp.linalg.norm(s.dot("ij,i->j", w, lax.stop_gradient(v)))
    return s.mm(x, w / size)


LOOPS = layers_of(globals())
