"""Equinox: modules that are pytrees, and loops with rules of their own."""

import jax
import jax.numpy as jnp
import pytest
from laws import Program, hold, near, programs

import jaxmp

eqx = pytest.importorskip("equinox", reason="Equinox is in the extra `programs`")
eqxi = pytest.importorskip("equinox.internal")

KEY = jax.random.key(0)


def normal(n, *shape):
    return jax.random.normal(jax.random.fold_in(KEY, n), shape)


def split(model, loss):
    """Returns a loss of the model's arrays, and these."""
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return lambda params, *args: loss(eqx.combine(params, static), *args), params


def mlp():
    model = eqx.nn.MLP(8, 4, 32, 2, key=KEY)
    x, y = normal(1, 16, 8), normal(2, 16, 4)
    loss, params = split(model, lambda f, x, y: jnp.mean((jax.vmap(f)(x) - y) ** 2))
    return Program(loss, (params, x, y))


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(3, 16, key=first)
        self.head = eqx.nn.Linear(16, "scalar", key=second)

    def __call__(self, xs):
        def step(h, x):
            return self.cell(x, h), None

        h, _ = jax.lax.scan(step, jnp.zeros(16), xs)
        return self.head(h)


def rnn_in_a_scan():
    xs = normal(1, 8, 12, 3)
    labels = (xs[:, :, 0].sum(1) > 0).astype(jnp.float32)

    def loss_fn(model, xs, labels):
        logits = jax.vmap(model)(xs)
        return jnp.mean(jnp.logaddexp(0, logits) - labels * logits)

    loss, params = split(Recurrent(KEY), loss_fn)
    return Program(loss, (params, xs, labels))


class Denoiser(eqx.Module):
    """Mixes patches and channels in turn, told of the time."""

    into: eqx.nn.Conv2d
    across: list
    norms: list
    out: eqx.nn.ConvTranspose2d

    def __init__(self, key):
        keys = jax.random.split(key, 6)
        self.into = eqx.nn.Conv2d(2, 12, 2, stride=2, key=keys[0])
        self.across = [eqx.nn.MLP(16, 16, 24, 1, key=k) for k in keys[1:3]]
        self.norms = [eqx.nn.LayerNorm((12, 16)) for _ in keys[1:3]]
        self.out = eqx.nn.ConvTranspose2d(12, 1, 2, stride=2, key=keys[3])

    def __call__(self, t, image):
        time = jnp.broadcast_to(t / 5, (1, *image.shape[1:]))
        h = self.into(jnp.concatenate([image, time]))
        shape = h.shape
        h = h.reshape(shape[0], -1)
        for mix, norm in zip(self.across, self.norms, strict=True):
            h = h + jax.vmap(mix)(norm(h))
        return self.out(h.reshape(shape))


def diffusion():
    """Score matching along a process that keeps the variance."""
    images = normal(1, 4, 1, 8, 8)

    def loss_fn(model, images, key):
        def one(image, t, key):
            noise = jax.random.normal(key, image.shape)
            kept = jnp.exp(-t / 2)
            std = jnp.sqrt(jnp.maximum(-jnp.expm1(-t), 1e-5))
            score = model(t, image * kept + std * noise)
            return -jnp.expm1(-t) * jnp.mean((score + noise / std) ** 2)

        time_key, noise_key = jax.random.split(key)
        n = len(images)
        # One time of each of n stretches of equal length.
        t = (jnp.arange(n) + jax.random.uniform(time_key, (n,))) * 5 / n
        return jax.vmap(one)(images, t, jax.random.split(noise_key, n)).mean()

    loss, params = split(Denoiser(KEY), loss_fn)
    return Program(loss, (params, images, KEY))


def checkpointed_loop():
    """As many steps as the numbers ask for, differentiable by checkpoints."""
    w, x = normal(1, 8, 8) / 4, normal(2, 8)

    def loss(w, x):
        def body(carry):
            step, x = carry
            return step + 1, x + 0.1 * jnp.tanh(w @ x)

        def more(carry):
            return (carry[0] < 3) | ((carry[1] ** 2).sum() < 20) & (carry[0] < 12)

        start = jnp.array(0), x
        loop = eqxi.while_loop(more, body, start, max_steps=16, kind="checkpointed")
        return (loop[1] ** 2).mean()

    return Program(loss, (w, x))


def attention_with_dropout():
    attend = eqx.nn.MultiheadAttention(2, 16, dropout_p=0.25, key=KEY)
    x = normal(1, 3, 10, 16)
    mask = jnp.tril(jnp.ones((10, 10), bool))

    def loss_fn(attend, x, keys):
        def one(x, key):
            return attend(x, x, x, mask=mask, key=key)

        return (jax.vmap(one)(x, keys) ** 2).mean()

    loss, params = split(attend, loss_fn)
    return Program(loss, (params, x, jax.random.split(KEY, 3)))


@programs(
    mlp,
    rnn_in_a_scan,
    diffusion,
    checkpointed_loop,
    attention_with_dropout,
)
def test_equinox_programs_are_what_they_were(program, policy, order):
    hold(program, policy, order)
