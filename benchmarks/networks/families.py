"""Networks of more families, for what the usual five do not show.

They are written as their papers and libraries have them, with a ``dtype`` as Flax's own
layers have. Each maps a batch to logits, so that any training step can take it. And
each is there in small, for gradients that are computed on a CPU.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .basic import (
    GPT,
    NETWORKS,
    Block,
    Model,
    Network,
    causal_attention,
    mlp,
    of_numbers,
    resnet,
    rotated,
    sequence_model,
    transformed,
)
from .fused import fused

# Sequences


def grouped_attention(q, k, v):
    """Computes causal attention in which a group of queries shares a key."""
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    return causal_attention(q, k, v)


def flax_attention(q, k, v):
    """Computes Flax's causal attention, whose softmax has the dtype of its scores."""
    mask = nn.make_causal_mask(jnp.ones((1, q.shape[1])))
    return nn.dot_product_attention(q, k, v, mask=mask)


class Llama(Model):
    """A decoder with RMSNorm, rotary positions and gated linear units.

    Touvron et al., "LLaMA", 2023, https://arxiv.org/abs/2302.13971. With fewer heads of
    keys than of queries, as from the second of that name on.
    """

    layers: int = 4
    width: int = 768
    heads: int = 12
    key_heads: int | None = None  # as many
    joint: bool = False  # whether queries, keys and values are of one product
    attention: Callable[..., jax.Array] = grouped_attention
    vocabulary: int = 8192
    length: int = 512

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits."""
        size, key_heads = self.width // self.heads, self.key_heads or self.heads

        def layer(self, x):
            def projected(heads, x):
                return self.unbiased(heads * size, x).reshape(*x.shape[:2], heads, size)

            y = self.rms_norm(x)
            if self.joint:
                y = projected(self.heads + 2 * key_heads, y)
                q, k, v = jnp.split(y, (self.heads, self.heads + key_heads), -2)
            else:
                q, k, v = (projected(n, y) for n in (self.heads, key_heads, key_heads))
            y = self.attention(rotated(q), rotated(k), v).reshape(x.shape)
            x = x + self.unbiased(self.width, y)
            return x + self.gated(nn.silu, 3 * self.width, self.rms_norm(x))

        x = self.embed(self.width, self.vocabulary, tokens)
        x = self.stacked(layer, x)
        return self.unbiased(self.vocabulary, self.rms_norm(x))


class Rematerialised(Model):
    """A transformer whose layers are computed again for the gradients.

    Chen et al., "Training deep nets with sublinear memory cost", 2016,
    https://arxiv.org/abs/1604.06174. With Flax's attention, cast whole, it has scores
    in 16 bits.
    """

    scanned: bool = False
    layers: int = 6
    width: int = 512
    heads: int = 8
    vocabulary: int = 4096
    length: int = 256
    attention: Callable[..., jax.Array] = flax_attention

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits."""
        x = self.embed(self.width, self.vocabulary, tokens)
        layer = partial(nn.remat(Block), self.heads, self.attention, dtype=self.dtype)
        if self.scanned:
            scanned = nn.scan(
                lambda block, x, _: (block(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.layers,
            )
            x, _ = scanned(layer(), x, None)
        else:
            for _ in range(self.layers):
                x = layer()(x)
        return self.unbiased(self.vocabulary, self.layer_norm(x))


class MixtureOfExperts(Model):
    """A transformer that sends each token to one of its experts, up to a capacity.

    Fedus et al., "Switch Transformers", 2021, https://arxiv.org/abs/2101.03961. The
    router is float32 in every precision, as there.
    """

    layers: int = 2
    width: int = 512
    heads: int = 8
    experts: int = 8
    vocabulary: int = 4096
    length: int = 512

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits."""

        def layer(self, x):
            x = Block(self.heads, causal_attention, dtype=self.dtype)(x)
            return x + self.routed(self.layer_norm(x))

        x = self.embed(self.width, self.vocabulary, tokens)
        x = self.stacked(layer, x)
        return self.unbiased(self.vocabulary, x)

    def routed(self, x):
        """Maps ``[batch, length, width]`` to the same, each token by one expert."""
        router = nn.Dense(self.experts, dtype=jnp.float32)
        gates = nn.softmax(router(x.astype(jnp.float32)))
        chosen = jax.nn.one_hot(gates.argmax(-1), self.experts)
        place = jnp.cumsum(chosen, axis=1) * chosen - 1  # in the queue of its expert
        capacity = 2 * x.shape[1] // self.experts
        sent = jax.nn.one_hot(place.astype(int), capacity, dtype=x.dtype)  # none beyond
        y = jnp.einsum("blec,blw->becw", sent, x)
        experts = nn.vmap(
            nn.Dense,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=1,
            out_axes=1,
            axis_size=self.experts,
        )
        y = nn.gelu(experts(4 * self.width, dtype=self.dtype)(y))
        y = experts(self.width, dtype=self.dtype)(y)
        y = jnp.einsum("blec,becw->blw", sent, y)
        return y * gates.max(-1, keepdims=True).astype(y.dtype)


class BERT(Model):
    """An encoder that is normed after each addition, with dropout and exact GELUs.

    Devlin et al., "BERT", 2018, https://arxiv.org/abs/1810.04805.
    """

    layers: int = 4
    width: int = 512
    heads: int = 8
    vocabulary: int = 8192
    length: int = 256
    dropout: float = 0.1
    attention_dropout: float = 0.1
    attention: Callable[..., jax.Array] = nn.dot_product_attention

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits; zeros are padding."""
        key = jax.random.key(tokens.sum())  # so that no mask is a constant
        keys = iter(jax.random.split(key, 3 * self.layers))
        gelu = partial(nn.gelu, approximate=False)
        mask = nn.make_attention_mask(tokens > 0, tokens > 0)

        def dropped(x):
            return nn.Dropout(self.dropout, deterministic=False)(x, rng=next(keys))

        def layer(self, x):
            y = nn.MultiHeadDotProductAttention(
                self.heads,
                self.dtype,
                dropout_rate=self.attention_dropout,
                attention_fn=self.attention,
            )(x, mask=mask, deterministic=False, dropout_rng=next(keys))
            x = self.layer_norm(x + dropped(y))
            y = self.dense(self.width, gelu(self.dense(4 * self.width, x)))
            return self.layer_norm(x + dropped(y))

        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        places = nn.Embed(self.length, self.width, dtype=self.dtype)
        x = self.layer_norm(embed(tokens) + places(jnp.arange(tokens.shape[1])))
        x = self.stacked(layer, x)
        return embed.attend(self.layer_norm(gelu(self.dense(self.width, x))))


class Gemma(Model):
    """A decoder whose queries share keys, with soft caps on scores and logits.

    Gemma Team, "Gemma 2", 2024, https://arxiv.org/abs/2408.00118, with the products of
    its reference code.
    """

    layers: int = 3
    width: int = 512
    heads: int = 8
    groups: int = 2
    vocabulary: int = 4096
    length: int = 512

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits."""

        def capped(limit, x):
            return limit * jnp.tanh(x / limit)

        batch, length = tokens.shape
        size, shared = self.width // self.heads, self.heads // self.groups
        mask = jnp.tril(jnp.ones((length, length), bool))[:, None, None]

        def layer(self, x):
            y = self.rms_norm(x)
            q = self.unbiased(self.width, y).reshape(batch, length, self.heads, size)
            q = rotated(q)
            q = q.reshape(batch, length, self.groups, shared, size) * size**-0.5
            k, v = (
                self.unbiased(self.groups * size, y).reshape(
                    batch, length, self.groups, size
                )
                for _ in range(2)
            )
            scores = jnp.einsum("BTKGH,BSKH->BTKGS", q, rotated(k))
            lowest = jnp.finfo(scores.dtype).min
            weights = nn.softmax(jnp.where(mask, capped(50.0, scores), lowest))
            y = jnp.einsum("BTKGS,BSKH->BTKGH", weights, v).reshape(x.shape)
            x = x + self.rms_norm(self.unbiased(self.width, y))
            y = self.gated(nn.gelu, 3 * self.width, self.rms_norm(x))
            return x + self.rms_norm(y)

        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        x = embed(tokens) * self.width**0.5
        x = self.stacked(layer, x)
        return capped(30.0, embed.attend(self.rms_norm(x)))


def zeros_of(dtype):
    """Returns what makes the first state of a cell.

    Flax makes it in float32 (the default of `param_dtype`), and then products with it
    are float32, whatever the parameters are.
    """
    return lambda key, shape, _: jnp.zeros(shape, dtype)


class Recurrent(Model):
    """Two recurrent layers that predict the next token.

    LSTM: Hochreiter and Schmidhuber, 1997. GRU: Cho et al., 2014.
    """

    cell: Any = nn.OptimizedLSTMCell
    layers: int = 2
    width: int = 512
    vocabulary: int = 4096
    length: int = 64

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits."""
        x: Any = self.embed(self.width, self.vocabulary, tokens)
        options = {"dtype": self.dtype, "carry_init": zeros_of(x.dtype)}

        def layer(self, x):
            return nn.RNN(self.cell(self.width, **options))(x)

        x = self.stacked(layer, x)
        return self.dense(self.vocabulary, x)


class StateSpace(Model):
    """Layers of gated linear recurrences, scanned in parallel.

    De et al., "Griffin", 2024, https://arxiv.org/abs/2402.19427, section 2.4.
    """

    layers: int = 3
    width: int = 512
    vocabulary: int = 4096
    length: int = 512

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits."""

        def layer(self, x, i):
            y = self.rms_norm(x)
            gate = nn.gelu(self.dense(self.width, y))
            y = self.dense(self.width, y)
            recurrence = nn.sigmoid(self.dense(self.width, y))
            entry = nn.sigmoid(self.dense(self.width, y))
            decay = self.param(f"decay_{i}", nn.initializers.ones, (self.width,))
            a = jnp.exp(-8 * nn.softplus(decay.astype(y.dtype)) * recurrence)
            b = jnp.sqrt(1 - a * a + 1e-6) * entry * y

            def after(left, right):
                return left[0] * right[0], left[1] * right[0] + right[1]

            _, h = lax.associative_scan(after, (a, b), axis=1)
            return x + self.dense(self.width, h * gate)

        x = self.embed(self.width, self.vocabulary, tokens)
        for i in range(self.layers):
            x = self.layer(layer, x, i)
        return self.unbiased(self.vocabulary, x)


class Mamba2(Model):
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

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits."""

        def layer(self, x, i):
            return x + self.mixed(self.rms_norm(x), i)

        x = self.embed(self.width, self.vocabulary, tokens)
        for i in range(self.layers):
            x = self.layer(layer, x, i)
        return self.unbiased(self.vocabulary, self.rms_norm(x))

    def mixed(self, x, i):
        """Maps ``[batch, length, width]`` to the same, along the length."""
        wide, n = 2 * self.width, self.states
        heads = wide // self.head_size

        def of_heads(name, init):
            return self.param(f"{name}_{i}", init, (heads,)).astype(y.dtype)

        def slow(key, shape):  # whose softplus is between 0.001 and 0.1
            powers = jax.random.uniform(key, shape, minval=-3, maxval=-1)
            return jnp.log(jnp.expm1(10**powers))

        def rates(key, shape):
            return jnp.log(jax.random.uniform(key, shape, minval=1, maxval=16))

        y = self.unbiased(2 * (wide + n) + heads, x)
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
        y = self.rms_norm(y.reshape(*y.shape[:2], -1) * nn.silu(gate))
        return self.unbiased(self.width, y)


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


# Images


class ViT(Model):
    """A vision transformer. Dosovitskiy et al., 2020."""

    layers: int = 4
    width: int = 384
    heads: int = 6
    patch: int = 16
    classes: int = 1000
    attention: Callable[..., jax.Array] = nn.dot_product_attention

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, height, width, 3]`` to logits."""
        x = self.conv(self.width, self.patch, x, self.patch)
        x = x.reshape(x.shape[0], -1, self.width)
        places = nn.initializers.normal(0.02)
        x = x + self.param("places", places, (1, *x.shape[1:])).astype(x.dtype)
        x = self.stacked(transformed, x)
        return self.dense(self.classes, self.layer_norm(x).mean(1))


class Mixer(Model):
    """Perceptrons along the image and along the channels. Tolstikhin et al., 2021."""

    layers: int = 4
    width: int = 512
    patch: int = 16
    classes: int = 1000

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, height, width, 3]`` to logits."""

        def layer(self, x):
            def perceptron(hidden, x):
                return self.dense(x.shape[-1], nn.gelu(self.dense(hidden, x)))

            y = self.layer_norm(x).swapaxes(1, 2)
            x = x + perceptron(self.width // 2, y).swapaxes(1, 2)
            return x + perceptron(4 * self.width, self.layer_norm(x))

        x = self.conv(self.width, self.patch, x, self.patch)
        x = x.reshape(x.shape[0], -1, self.width)
        x = self.stacked(layer, x)
        return self.dense(self.classes, self.layer_norm(x).mean(1))


class ConvNeXt(Model):
    """A convolutional network in the manner of transformers. Liu et al., 2022.

    The second has a norm of each channel's strength among that of the others: Woo et
    al., 2023, https://arxiv.org/abs/2301.00808.
    """

    layers: tuple[int, ...] = (2, 2, 2)
    width: int = 96
    classes: int = 1000
    second: bool = False

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, height, width, 3]`` to logits."""

        def layer(self, x, name):
            width = x.shape[-1]
            y = self.conv(width, 7, x, feature_group_count=width)
            y = nn.gelu(self.dense(4 * width, self.layer_norm(y)))
            if self.second:
                return x + self.dense(width, self.normed(y, f"norm_{name}"))
            y = self.dense(width, y)
            scale = nn.initializers.constant(1e-6)
            scale = self.param(f"scale_{name}", scale, (width,))
            return x + y * scale.astype(y.dtype)

        for stage, layers in enumerate(self.layers):
            size = 4 if stage == 0 else 2
            x = self.layer_norm(self.conv(self.width * 2**stage, size, x, size))
            for i in range(layers):
                x = self.layer(layer, x, f"{stage}_{i}")
        return self.dense(self.classes, self.layer_norm(x.mean((1, 2))))

    def normed(self, x, name):
        """Multiplies channels by their strength, relative to the mean of all."""
        strength = jnp.sqrt(jnp.square(x).sum((1, 2), keepdims=True) + 1e-6)
        strength = strength / (strength.mean(-1, keepdims=True) + 1e-6)
        parts = self.param(name, nn.initializers.zeros, (2, x.shape[-1]))
        scale, bias = parts.astype(x.dtype)
        return scale * (x * strength) + bias + x


class UNet(Model):
    """A network for images of classes: down, up again, and skips between.

    Ronneberger et al., 2015, with the group norms of diffusion models.
    """

    width: int = 64
    levels: int = 3
    classes: int = 21

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, height, width, 3]`` to logits for each pixel."""

        def layer(self, x, features):
            for _ in range(2):
                x = self.conv(features, 3, x)
                x = nn.silu(nn.GroupNorm(8, dtype=self.dtype)(x))
            return x

        skips = []
        for level in range(self.levels):
            x = self.layer(layer, x, self.width * 2**level)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = self.layer(layer, x, self.width * 2**self.levels)
        for level in reversed(range(self.levels)):
            features = self.width * 2**level
            x = nn.ConvTranspose(features, (2, 2), (2, 2), dtype=self.dtype)(x)
            x = jnp.concatenate([x, skips[level]], axis=-1)
            x = self.layer(layer, x, features)
        return self.conv(self.classes, 1, x)


class EfficientNet(Model):
    """Depthwise convolutions, swish, and gates from means of channels.

    Tan and Le, "EfficientNet", 2019, https://arxiv.org/abs/1905.11946. A stage is how
    much its blocks expand, their channels, their number and their stride.
    """

    stages: tuple[tuple[int, int, int, int], ...] = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 40, 2, 2),
        (6, 80, 2, 2),
    )
    stem: int = 32
    head: int = 640
    classes: int = 1000

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, height, width, 3]`` to logits."""

        def normed(self, features, size, x, stride=1, groups=1):
            options = {"feature_group_count": groups, "use_bias": False}
            return self.batch_norm(self.conv(features, size, x, stride, **options))

        def layer(self, x, expand, features, stride):
            wide, y = expand * x.shape[-1], x
            if expand > 1:
                y = nn.swish(normed(self, wide, 1, y))
            y = nn.swish(normed(self, wide, 3, y, stride, groups=wide))
            gates = self.conv(x.shape[-1] // 4, 1, y.mean((1, 2), keepdims=True))
            gates = nn.sigmoid(self.conv(wide, 1, nn.swish(gates)))
            y = normed(self, features, 1, y * gates)
            return x + y if x.shape == y.shape else y

        x = nn.swish(normed(self, self.stem, 3, x, 2))
        for expand, features, layers, stride in self.stages:
            for i in range(layers):
                x = self.layer(layer, x, expand, features, stride if i == 0 else 1)
        x = nn.swish(normed(self, self.head, 1, x)).mean((1, 2))
        return self.dense(self.classes, x)


class DenseNet(Model):
    """Convolutions of all that was computed before. Huang et al., 2017."""

    blocks: tuple[int, ...] = (4, 6, 6)
    growth: int = 32
    classes: int = 1000

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, height, width, 3]`` to logits."""

        def conv(self, features, size, x, stride=1):
            return self.conv(features, size, x, stride, use_bias=False)

        def activated(self, x):
            return nn.relu(self.batch_norm(x))

        def layer(self, x):
            y = conv(self, 4 * self.growth, 1, activated(self, x))
            y = conv(self, self.growth, 3, activated(self, y))
            return jnp.concatenate([x, y], -1)

        x = activated(self, conv(self, 2 * self.growth, 7, x, 2))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for block, layers in enumerate(self.blocks):
            if block:
                x = conv(self, x.shape[-1] // 2, 1, activated(self, x))
                x = nn.avg_pool(x, (2, 2), (2, 2))
            for _ in range(layers):
                x = self.layer(layer, x)
        return self.dense(self.classes, activated(self, x).mean((1, 2)))


class ConvolutionalLSTM(Model):
    """Recurrent layers of images that predict the next image.

    Shi et al., 2015, https://arxiv.org/abs/1506.04214, with Flax's cell, which has no
    peepholes.
    """

    layers: int = 2
    width: int = 64
    size: int = 5
    classes: int = 16

    @nn.compact
    def __call__(self, x: Any):
        """Maps ``[batch, length, height, width, features]`` to logits of each pixel."""
        first = zeros_of(self.dtype or x.dtype)
        options = {"dtype": self.dtype, "carry_init": first}

        def layer(self, x):
            cell = nn.ConvLSTMCell(self.width, (self.size,) * 2, **options)
            return nn.RNN(cell)(x)

        x = self.stacked(layer, x)
        return self.dense(self.classes, x)


class FourierOperator(Model):
    """Products with the lowest frequencies of an image, beside products of its pixels.

    Li et al., 2021, https://arxiv.org/abs/2010.08895. JAX has no Fourier transform of
    16 bits: frequencies are complex64 in every precision. Weights are pairs of reals.
    """

    layers: int = 4
    width: int = 64
    modes: int = 16
    classes: int = 16

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, height, width, features]`` to logits of each pixel."""

        def layer(self, x, i):
            y = self.of_frequencies(x, i)
            return nn.gelu(y + self.dense(self.width, x))

        x = self.dense(self.width, x)
        for i in range(self.layers):
            x = self.layer(layer, x, i)
        return self.dense(self.classes, nn.gelu(self.dense(2 * self.width, x)))

    def of_frequencies(self, x, i):
        """Maps an image to one of the same shape with the lowest frequencies alone."""
        n, shape = self.modes, (2, self.modes, self.modes, self.width, self.width)
        init = nn.initializers.uniform(1 / self.width**2)
        found = jnp.fft.rfft2(x.astype(jnp.float32), axes=(1, 2))
        made = jnp.zeros_like(found)
        for name, rows in ("low", slice(n)), ("high", slice(-n, None)):
            parts = self.param(f"{name}_{i}", init, shape)
            weights = lax.complex(*parts.astype(jnp.float32))
            y = jnp.einsum("bhwi,hwio->bhwo", found[:, rows, :n], weights)
            made = made.at[:, rows, :n].set(y)
        return jnp.fft.irfft2(made, x.shape[1:3], axes=(1, 2)).astype(x.dtype)


# Vectors, sets and graphs


class Highway(Model):
    """Dense layers, each of which a gate mixes with what it was given.

    Srivastava et al., "Highway networks", 2015, https://arxiv.org/abs/1505.00387.
    """

    width: int = 512
    layers: int = 6
    classes: int = 10

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, features]`` to logits."""
        closed = nn.initializers.constant(-2.0)

        def layer(self, x):
            y = nn.relu(self.dense(self.width, x))
            gate = nn.sigmoid(self.dense(self.width, x, bias_init=closed))
            return gate * y + (1 - gate) * x

        x = nn.relu(self.dense(self.width, x))
        x = self.stacked(layer, x)
        return self.dense(self.classes, x)


class DeepSet(Model):
    """Layers of what sets an element off from the largest numbers of its set.

    Zaheer et al., 2017, https://arxiv.org/abs/1703.06114, as for clouds of points.
    """

    layers: int = 3
    width: int = 256
    classes: int = 40

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, elements, features]`` to logits of each set."""

        def layer(self, x):
            x = x - x.max(1, keepdims=True)
            return nn.elu(self.dense(self.width, x))

        x = self.stacked(layer, x)
        return self.dense(self.classes, nn.elu(self.dense(self.width, x.max(1))))


class GraphNetwork(Model):
    """Messages along the edges of a mesh, the same for each graph of a batch.

    Battaglia et al., 2018, https://arxiv.org/abs/1806.01261.
    """

    nodes: int = 1024
    degree: int = 8
    width: int = 256
    steps: int = 3
    classes: int = 16

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, nodes, features]`` to logits of each node."""
        receivers = np.repeat(np.arange(self.nodes), self.degree)
        away = np.random.default_rng(0).integers(1, self.nodes, receivers.size)
        senders = (receivers + away) % self.nodes

        def mlp(self, *parts):
            y = nn.silu(self.dense(self.width, jnp.concatenate(parts, axis=-1)))
            return self.layer_norm(self.dense(self.width, y))

        def layer(self, graph):
            nodes, edges = graph
            edges += mlp(self, edges, nodes[:, senders], nodes[:, receivers])
            received = jnp.zeros_like(nodes).at[:, receivers].add(edges)
            return nodes + mlp(self, nodes, received), edges

        nodes = mlp(self, x)
        edges = mlp(self, nodes[:, senders] - nodes[:, receivers])
        for _ in range(self.steps):
            nodes, edges = self.layer(layer, (nodes, edges))
        return self.dense(self.classes, nodes)


class Both(NamedTuple):
    """A network as it is used, and the same in small."""

    usual: Network
    small: Network


# What a small model has of each, if it has that at all and nothing else is said.
FEW = {
    "layers": 2,
    "width": 32,
    "heads": 2,
    "vocabulary": 64,
    "length": 16,
    "patch": 4,
    "classes": 10,
}


def in_small(make: Callable[..., Any], sizes: dict[str, Any]) -> Any:
    """Returns a model with a few of everything."""
    few = {name: size for name, size in FEW.items() if hasattr(make(), name)}
    return make(**few | sizes)


def tokens(make: Callable[..., Any], batch_size: int, **small: Any) -> Both:
    """Returns a model of tokens."""
    return Both(
        sequence_model(make(), batch_size), sequence_model(in_small(make, small), 8)
    )


def numbers(
    make: Callable[..., Any],
    shape: tuple[int, ...],
    small_shape: tuple[int, ...],
    axes: int = 0,
    **small: Any,
) -> Both:
    """Returns a model of random numbers, with a label for each place of some axes.

    Args:
        make: Makes the model.
        shape: That of a batch.
        small_shape: The same in small.
        axes: Those of an example, the first ones.
        **small: What the small model has.
    """
    return Both(
        of_numbers(make(), *shape, axes=axes),
        of_numbers(in_small(make, small), *small_shape, axes=axes),
    )


def images(
    make: Callable[..., Any],
    sizes: tuple[int, int],
    small_sizes: tuple[int, int] = (8, 16),
    **options: Any,
) -> Both:
    """Returns a model of images; sizes are those of a batch and of an image."""
    usual, small = ((n, side, side, 3) for n, side in (sizes, small_sizes))
    return numbers(make, usual, small, **options)


_GPT = partial(GPT, layers=4, width=512, heads=8, vocabulary=8192, length=512)
_SCANNED = partial(Rematerialised, True)
_WRITTEN = partial(_SCANNED, length=512, attention=causal_attention)
_STAGES = (1, 8, 1, 1), (4, 12, 2, 2)
_BOTH: dict[str, Both] = {
    "llama": tokens(Llama, 16),
    "gpt": tokens(_GPT, 16),
    "gpt, scanned": tokens(_WRITTEN, 16),
    "mixture of experts": tokens(MixtureOfExperts, 16, experts=4),
    "vit": images(ViT, (64, 224)),
    "convnext": images(ConvNeXt, (64, 128), layers=(1, 1), width=16),
    "resnet": Both(
        resnet(64, image=128, stages=(2, 2, 2), bottleneck=True),
        resnet(8, image=16, stages=(1, 1), width=8, classes=10),
    ),
    "u-net": images(
        UNet, (16, 128), (4, 16), axes=2, width=8, levels=2, classes=UNet.classes
    ),
    "lstm": tokens(Recurrent, 128),
    "state space": tokens(StateSpace, 16),
    "mlp": Both(
        mlp(512, features=1024, width=2048, layers=4),
        mlp(32, features=32, width=64, layers=2, classes=10),
    ),
    "bert": tokens(BERT, 32),
    "mixer": images(Mixer, (64, 224)),
    "efficientnet": images(EfficientNet, (64, 128), stages=_STAGES, stem=8, head=32),
    "densenet": images(DenseNet, (64, 128), (8, 32), blocks=(2, 2), growth=8),
    "graph network": numbers(
        GraphNetwork, (8, 1024, 16), (4, 16, 16), 1, nodes=16, degree=4, steps=2
    ),
    "gemma": tokens(Gemma, 16, heads=4),
    "gru": tokens(partial(Recurrent, nn.GRUCell), 128),
    "transformer, rematerialised": tokens(Rematerialised, 32),
    "transformer, scanned and rematerialised": tokens(_SCANNED, 32),
    "mamba 2": tokens(Mamba2, 16, head_size=16, states=8, chunk=8, length=32),
    "convolutional lstm": numbers(
        ConvolutionalLSTM,
        (16, 16, 32, 32, 16),
        (4, 8, 8, 8, 4),
        axes=3,
        width=8,
        size=3,
        classes=ConvolutionalLSTM.classes,
    ),
    "highway network": numbers(
        Highway, (4096, 784), (32, 32), width=64, layers=Highway.layers
    ),
    "fourier operator": numbers(
        FourierOperator, (16, 128, 128, 3), (4, 16, 16, 3), 2, width=16, modes=4
    ),
    "deep set with a maximum": numbers(
        DeepSet, (64, 1000, 3), (8, 32, 3), layers=DeepSet.layers
    ),
    "convnext v2": images(
        partial(ConvNeXt, second=True), (64, 128), layers=(1, 1), width=16
    ),
}
NAMES = tuple(_BOTH)  # and two that differ from one of these by their attention alone
_BOTH |= {
    "llama, grouped queries": tokens(
        partial(Llama, key_heads=4), 16, heads=4, key_heads=2
    ),
    "bert, no attention dropout": tokens(partial(BERT, attention_dropout=0.0), 32),
}
# Of a billion parameters in its layers and half a billion around them.
LARGE_LLAMA = sequence_model(
    Llama(
        layers=22,
        width=2048,
        heads=32,
        key_heads=4,
        vocabulary=128_256,
        length=2048,
        scanned=True,
        again=True,
    ),
    8,
)
# Those that are timed on a GPU, and their forms with cuDNN's attention.
TIMED = NETWORKS | {"llama-1.6b": LARGE_LLAMA}
TIMED |= fused(TIMED)
FAMILIES: dict[str, Network] = {name: both.usual for name, both in _BOTH.items()}
FAMILIES |= fused(FAMILIES)
SMALL: dict[str, Network] = {name: both.small for name, both in _BOTH.items()}
SMALL |= fused(SMALL)
