"""Families of networks for which autocast costs more than for most.

Written as in :mod:`benchmarks.networks.families`, which lists them.
`docs/performance.md` says what makes each of them dear.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .basic import Block, Network, image_classifier, sequence_model


def attention(q, k, v):
    """Computes Flax's causal attention, whose softmax has the dtype of its scores."""
    mask = nn.make_causal_mask(jnp.ones((1, q.shape[1])))
    return nn.dot_product_attention(q, k, v, mask=mask)


class Rematerialised(nn.Module):
    """A transformer whose layers are computed again for the gradients.

    Chen et al., "Training deep nets with sublinear memory cost", 2016,
    https://arxiv.org/abs/1604.06174. With Flax's attention, unlike
    :class:`~benchmarks.networks.families.ScannedGPT`: cast whole, it has scores in
    16 bits.
    """

    scanned: bool = False
    layers: int = 6
    width: int = 512
    heads: int = 8
    vocabulary: int = 4096
    length: int = 256
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits."""
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)

        layer = nn.remat(Block)
        options = self.heads, attention, self.dtype

        def body(block, x, _):
            return block(x), None

        if self.scanned:
            scanned = nn.scan(
                body,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.layers,
            )
            x, _ = scanned(layer(*options), x, None)
        else:
            for _ in range(self.layers):
                x = layer(*options)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(x)


class Mamba2(nn.Module):
    """State spaces whose steps are products inside of chunks and sums between them.

    Dao and Gu, "Transformers are SSMs", 2024, https://arxiv.org/abs/2405.21060.
    """

    layers: int = 3
    width: int = 512
    head_size: int = 64
    states: int = 64
    chunk: int = 64
    vocabulary: int = 4096
    length: int = 512
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits."""
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for layer in range(self.layers):
            x = x + self.mixed(nn.RMSNorm(dtype=self.dtype)(x), layer)
        x = nn.RMSNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(x)

    def mixed(self, x, layer):
        """Maps ``[batch, length, width]`` to the same, along the length."""
        wide, n = 2 * self.width, self.states
        heads = wide // self.head_size

        def of_heads(name, init):
            return self.param(f"{name}_{layer}", init, (heads,)).astype(y.dtype)

        def slow(key, shape):  # whose softplus is between 0.001 and 0.1
            powers = jax.random.uniform(key, shape, minval=-3, maxval=-1)
            return jnp.log(jnp.expm1(10**powers))

        def rates(key, shape):
            return jnp.log(jax.random.uniform(key, shape, minval=1, maxval=16))

        y = nn.Dense(2 * (wide + n) + heads, use_bias=False, dtype=self.dtype)(x)
        gate, y, steps = jnp.split(y, [wide, 2 * (wide + n)], axis=-1)
        features = y.shape[-1]
        options: Any = {"feature_group_count": features, "padding": "CAUSAL"}
        y = nn.Conv(features, (4,), dtype=self.dtype, **options)(y)
        y, entry, out = jnp.split(nn.silu(y), [wide, wide + n], axis=-1)
        steps = nn.softplus(steps + of_heads("steps", slow))
        decays = -jnp.exp(of_heads("rates", rates)) * steps
        y = y.reshape(*y.shape[:2], heads, self.head_size)
        h = in_chunks(self.chunk, y * steps[..., None], decays, entry, out)
        y = h + y * of_heads("skips", nn.initializers.ones)[:, None]
        y = nn.RMSNorm(dtype=self.dtype)(y.reshape(*y.shape[:2], -1) * nn.silu(gate))
        return nn.Dense(self.width, use_bias=False, dtype=self.dtype)(y)


def in_chunks(chunk, x, decays, entry, out):
    """Computes ``h = exp(decays) * h + entry * x`` along a sequence, and ``out @ h``.

    Of ``x``, ``[batch, length, heads, size]``; decays have no size, and the others are
    ``[batch, length, states]``. A chunk of steps is one product.
    """
    shape = x.shape
    x, decays, entry, out = (
        a.reshape(a.shape[0], -1, chunk, *a.shape[2:]) for a in (x, decays, entry, out)
    )
    sums = jnp.cumsum(decays, axis=2)  # batch, chunks, steps, heads

    def lasting(to, since, offset):
        """Returns what is left where there is a way, ``[batch, ..., to, since]``."""
        away = to[..., :, None] - since[..., None, :]
        ways = np.tri(away.shape[-1], k=offset, dtype=bool)
        return jnp.exp(jnp.where(ways, away, -jnp.inf))

    rows = sums.transpose(0, 1, 3, 2)
    scores = jnp.einsum("bcln,bcsn->bcls", out, entry)[:, :, None]
    y = jnp.einsum("bchls,bcshp->bclhp", scores * lasting(rows, rows, 0), x)
    # What is left of a chunk at its end, and of all that ended before one begins.
    x = x * jnp.exp(sums[:, :, -1:] - sums)[..., None]
    ends = jnp.einsum("bcsn,bcshp->bchpn", entry, x)
    whole = rows[..., -1].transpose(0, 2, 1)  # batch, heads, chunks
    until = jnp.cumsum(whole, axis=-1)
    begins = jnp.einsum("bhzc,bchpn->bzhpn", lasting(until - whole, until, -1), ends)
    begun = jnp.einsum("bcln,bchpn->bclhp", out, begins)
    return (y + begun * jnp.exp(sums)[..., None]).reshape(shape)


class ConvolutionalLSTM(nn.Module):
    """Recurrent layers of images that predict the next image.

    Shi et al., 2015, https://arxiv.org/abs/1506.04214, with Flax's cell, which has no
    peepholes.
    """

    layers: int = 2
    width: int = 64
    size: int = 5
    classes: int = 16
    dtype: Any = None

    @nn.compact
    def __call__(self, x: Any):
        """Maps ``[batch, length, height, width, features]`` to logits of each pixel."""
        size, dtype = (self.size, self.size), self.dtype or x.dtype

        def zeros(key, shape, _):
            return jnp.zeros(shape, dtype)  # see `families.Recurrent`

        for _ in range(self.layers):
            cell = nn.ConvLSTMCell(self.width, size, dtype=self.dtype, carry_init=zeros)
            x = nn.RNN(cell)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(x)


class Highway(nn.Module):
    """Dense layers, each of which a gate mixes with what it was given.

    Srivastava et al., "Highway networks", 2015, https://arxiv.org/abs/1505.00387.
    """

    width: int = 512
    layers: int = 6
    classes: int = 10
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, features]`` to logits."""
        closed = nn.initializers.constant(-2.0)
        x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
        for _ in range(self.layers):
            y = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
            gate = nn.Dense(self.width, dtype=self.dtype, bias_init=closed)(x)
            gate = nn.sigmoid(gate)
            x = gate * y + (1 - gate) * x
        return nn.Dense(self.classes, dtype=self.dtype)(x)


class FourierOperator(nn.Module):
    """Products with the lowest frequencies of an image, beside products of its pixels.

    Li et al., 2021, https://arxiv.org/abs/2010.08895. JAX has no Fourier transform of
    16 bits: frequencies are complex64 in every precision. Weights are pairs of reals.
    """

    layers: int = 4
    width: int = 64
    modes: int = 16
    classes: int = 16
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, height, width, features]`` to logits of each pixel."""
        x = nn.Dense(self.width, dtype=self.dtype)(x)
        for layer in range(self.layers):
            y = self.of_frequencies(x, layer)
            x = nn.gelu(y + nn.Dense(self.width, dtype=self.dtype)(x))
        x = nn.gelu(nn.Dense(2 * self.width, dtype=self.dtype)(x))
        return nn.Dense(self.classes, dtype=self.dtype)(x)

    def of_frequencies(self, x, layer):
        """Maps an image to one of the same shape with the lowest frequencies alone."""
        n, most = self.modes, 1 / self.width**2
        init = nn.initializers.uniform(most)
        found = jnp.fft.rfft2(x.astype(jnp.float32), axes=(1, 2))
        made = jnp.zeros_like(found)
        for name, rows in ("low", slice(n)), ("high", slice(-n, None)):
            parts = self.param(
                f"{name}_{layer}", init, (2, n, n, self.width, self.width)
            )
            weights = lax.complex(*parts.astype(jnp.float32))
            y = jnp.einsum("bhwi,hwio->bhwo", found[:, rows, :n], weights)
            made = made.at[:, rows, :n].set(y)
        return jnp.fft.irfft2(made, x.shape[1:3], axes=(1, 2)).astype(x.dtype)


class DeepSet(nn.Module):
    """Layers of what sets an element off from the largest numbers of its set.

    Zaheer et al., 2017, https://arxiv.org/abs/1703.06114, as for clouds of points.
    """

    layers: int = 3
    width: int = 256
    classes: int = 40
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, elements, features]`` to logits of each set."""
        for _ in range(self.layers):
            x = x - x.max(1, keepdims=True)
            x = nn.elu(nn.Dense(self.width, dtype=self.dtype)(x))
        x = nn.elu(nn.Dense(self.width, dtype=self.dtype)(x.max(1)))
        return nn.Dense(self.classes, dtype=self.dtype)(x)


class ConvNeXtV2(nn.Module):
    """ConvNeXt with a norm of each channel's strength among that of the others.

    Woo et al., 2023, https://arxiv.org/abs/2301.00808.
    """

    layers: tuple[int, ...] = (2, 2, 2)
    width: int = 96
    classes: int = 1000
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, height, width, 3]`` to logits."""

        def normed(x, name):
            strength = jnp.sqrt(jnp.square(x).sum((1, 2), keepdims=True) + 1e-6)
            strength = strength / (strength.mean(-1, keepdims=True) + 1e-6)
            zeros = nn.initializers.zeros
            parts = self.param(f"norm_{name}", zeros, (2, x.shape[-1]))
            scale, bias = parts.astype(x.dtype)
            return scale * (x * strength) + bias + x

        for stage, layers in enumerate(self.layers):
            width = self.width * 2**stage
            size = (4, 4) if stage == 0 else (2, 2)
            x = nn.Conv(width, size, size, dtype=self.dtype)(x)
            x = nn.LayerNorm(dtype=self.dtype)(x)
            for i in range(layers):
                y = nn.Conv(width, (7, 7), feature_group_count=width, dtype=self.dtype)
                y = nn.LayerNorm(dtype=self.dtype)(y(x))
                y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y))
                y = normed(y, f"{stage}_{i}")
                x = x + nn.Dense(width, dtype=self.dtype)(y)
        x = nn.LayerNorm(dtype=self.dtype)(x.mean((1, 2)))
        return nn.Dense(self.classes, dtype=self.dtype)(x)


def classifier(
    model: nn.Module, batch_size: int, *shape: int, axes: int = 0
) -> Network:
    """Returns a model of random numbers, with a label for each place of some axes."""
    sizes: Any = model

    def example(random):
        x = random.standard_normal(shape, np.float32)
        return x, random.integers(sizes.classes, size=shape[:axes], dtype=np.int32)

    return Network(model, batch_size, example)


DEAR_FAMILIES: dict[str, Network] = {
    "transformer, rematerialised": sequence_model(Rematerialised(), 32),
    "transformer, scanned and rematerialised": sequence_model(Rematerialised(True), 32),
    "mamba 2": sequence_model(Mamba2(), 16),
    "convolutional lstm": classifier(ConvolutionalLSTM(), 16, 16, 32, 32, 16, axes=3),
    "highway network": classifier(Highway(), 4096, 784),
    "fourier operator": classifier(FourierOperator(), 16, 128, 128, 3, axes=2),
    "deep set with a maximum": classifier(DeepSet(), 64, 1000, 3),
    "convnext v2": image_classifier(ConvNeXtV2(), 64, 128),
}

# The same in small, for gradients that are computed on a CPU.
DEAR_SMALL: dict[str, Network] = {
    "transformer, rematerialised": sequence_model(
        Rematerialised(False, 2, 32, heads=2, vocabulary=64, length=16), 8
    ),
    "transformer, scanned and rematerialised": sequence_model(
        Rematerialised(True, 2, 32, heads=2, vocabulary=64, length=16), 8
    ),
    "mamba 2": sequence_model(
        Mamba2(2, 32, head_size=16, states=8, chunk=8, vocabulary=64, length=32), 8
    ),
    "convolutional lstm": classifier(
        ConvolutionalLSTM(width=8, size=3), 4, 8, 8, 8, 4, axes=3
    ),
    "highway network": classifier(Highway(64), 32, 32),
    "fourier operator": classifier(
        FourierOperator(2, width=16, modes=4, classes=10), 4, 16, 16, 3, axes=2
    ),
    "deep set with a maximum": classifier(DeepSet(width=32, classes=10), 8, 32, 3),
    "convnext v2": image_classifier(ConvNeXtV2((1, 1), width=16, classes=10), 8, 16),
}
