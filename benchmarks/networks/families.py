"""Networks of more families, for what the usual five do not show.

They are written as their papers and libraries have them, with a ``dtype`` as Flax's own
layers have. Each maps a batch to logits, so that any training step can take it.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from .basic import (
    Block,
    Network,
    causal_attention,
    gpt,
    image_classifier,
    mlp,
    resnet,
    rotated,
    sequence_model,
)
from .dear_families import DEAR_FAMILIES, DEAR_SMALL
from .fused import fused
from .more_families import BERT, MORE_FAMILIES, MORE_SMALL


def grouped_attention(q, k, v):
    """Computes causal attention in which a group of queries shares a key."""
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    return causal_attention(q, k, v)


class Llama(nn.Module):
    """A decoder with RMSNorm, rotary positions and gated linear units.

    Touvron et al., "LLaMA", 2023, https://arxiv.org/abs/2302.13971. With fewer heads of
    keys than of queries, as from the second of that name on.
    """

    layers: int = 4
    width: int = 768
    heads: int = 12
    key_heads: int | None = None  # as many
    attention: Callable[..., jax.Array] = grouped_attention
    vocabulary: int = 8192
    length: int = 512
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits."""

        def dense(features, x):
            return nn.Dense(features, use_bias=False, dtype=self.dtype)(x)

        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        size, key_heads = self.width // self.heads, self.key_heads or self.heads

        def projected(heads, x):
            return dense(heads * size, x).reshape(*tokens.shape, heads, size)

        for _ in range(self.layers):
            y = nn.RMSNorm(dtype=self.dtype)(x)
            q, k, v = (
                projected(heads, y) for heads in (self.heads, key_heads, key_heads)
            )
            y = self.attention(rotated(q), rotated(k), v).reshape(x.shape)
            x = x + dense(self.width, y)
            y = nn.RMSNorm(dtype=self.dtype)(x)
            y = nn.silu(dense(3 * self.width, y)) * dense(3 * self.width, y)
            x = x + dense(self.width, y)
        return dense(self.vocabulary, nn.RMSNorm(dtype=self.dtype)(x))


class ScannedGPT(nn.Module):
    """A transformer whose layers are scanned, and computed again for the gradients."""

    layers: int = 6
    width: int = 512
    heads: int = 8
    vocabulary: int = 4096
    length: int = 512
    attention: Callable[..., jax.Array] = causal_attention
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits."""
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)

        def body(block, x, _):
            return block(x), None

        layer = nn.remat(Block)(self.heads, self.attention, self.dtype)
        scanned = nn.scan(
            body,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.layers,
        )
        x, _ = scanned(layer, x, None)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(x)


class MixtureOfExperts(nn.Module):
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
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits."""
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            x = Block(self.heads, causal_attention, self.dtype)(x)
            x = x + self.routed(nn.LayerNorm(dtype=self.dtype)(x))
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(x)

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


class ViT(nn.Module):
    """A vision transformer. Dosovitskiy et al., 2020."""

    layers: int = 4
    width: int = 384
    heads: int = 6
    patch: int = 16
    classes: int = 1000
    attention: Callable[..., jax.Array] = nn.dot_product_attention
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, height, width, 3]`` to logits."""
        size = (self.patch, self.patch)
        x = nn.Conv(self.width, size, size, dtype=self.dtype)(x)
        x = x.reshape(x.shape[0], -1, self.width)
        places = nn.initializers.normal(0.02)
        x = x + self.param("places", places, (1, *x.shape[1:])).astype(x.dtype)
        for _ in range(self.layers):
            x = Block(self.heads, self.attention, self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x).mean(1)
        return nn.Dense(self.classes, dtype=self.dtype)(x)


class ConvNeXt(nn.Module):
    """A convolutional network in the manner of transformers. Liu et al., 2022."""

    layers: tuple[int, ...] = (2, 2, 2)
    width: int = 96
    classes: int = 1000
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, height, width, 3]`` to logits."""
        for stage, layers in enumerate(self.layers):
            width = self.width * 2**stage
            size = (4, 4) if stage == 0 else (2, 2)
            x = nn.Conv(width, size, size, dtype=self.dtype)(x)
            x = nn.LayerNorm(dtype=self.dtype)(x)
            for i in range(layers):
                y = nn.Conv(width, (7, 7), feature_group_count=width, dtype=self.dtype)(
                    x
                )
                y = nn.LayerNorm(dtype=self.dtype)(y)
                y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y))
                y = nn.Dense(width, dtype=self.dtype)(y)
                scale = nn.initializers.constant(1e-6)
                name = f"scale_{stage}_{i}"
                x = x + y * self.param(name, scale, (width,)).astype(y.dtype)
        x = nn.LayerNorm(dtype=self.dtype)(x.mean((1, 2)))
        return nn.Dense(self.classes, dtype=self.dtype)(x)


class UNet(nn.Module):
    """A network for images of classes: down, up again, and skips between.

    Ronneberger et al., 2015, with the group norms of diffusion models.
    """

    width: int = 64
    levels: int = 3
    classes: int = 21
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, height, width, 3]`` to logits for each pixel."""

        def convolved(features, x):
            for _ in range(2):
                x = nn.Conv(features, (3, 3), dtype=self.dtype)(x)
                x = nn.silu(nn.GroupNorm(8, dtype=self.dtype)(x))
            return x

        skips = []
        for level in range(self.levels):
            x = convolved(self.width * 2**level, x)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = convolved(self.width * 2**self.levels, x)
        for level in reversed(range(self.levels)):
            features = self.width * 2**level
            x = nn.ConvTranspose(features, (2, 2), (2, 2), dtype=self.dtype)(x)
            x = convolved(features, jnp.concatenate([x, skips[level]], axis=-1))
        return nn.Conv(self.classes, (1, 1), dtype=self.dtype)(x)


class Recurrent(nn.Module):
    """Two recurrent layers that predict the next token.

    LSTM: Hochreiter and Schmidhuber, 1997. GRU: Cho et al., 2014.
    """

    cell: Any = nn.OptimizedLSTMCell
    layers: int = 2
    width: int = 512
    vocabulary: int = 4096
    length: int = 64
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits."""
        x: Any = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)

        def zeros(key, shape, dtype):
            # Flax makes the first state in float32 (the default of `param_dtype`), and
            # then products with it are float32, whatever the parameters are.
            return jnp.zeros(shape, x.dtype)

        for _ in range(self.layers):
            cell = self.cell(self.width, dtype=self.dtype, carry_init=zeros)
            x = nn.RNN(cell)(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x)


class StateSpace(nn.Module):
    """Layers of gated linear recurrences, scanned in parallel.

    De et al., "Griffin", 2024, https://arxiv.org/abs/2402.19427, section 2.4.
    """

    layers: int = 3
    width: int = 512
    vocabulary: int = 4096
    length: int = 512
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits."""
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for layer in range(self.layers):
            y = nn.RMSNorm(dtype=self.dtype)(x)
            gate = nn.gelu(nn.Dense(self.width, dtype=self.dtype)(y))
            y = nn.Dense(self.width, dtype=self.dtype)(y)
            recurrence = nn.sigmoid(nn.Dense(self.width, dtype=self.dtype)(y))
            entry = nn.sigmoid(nn.Dense(self.width, dtype=self.dtype)(y))
            decay = self.param(f"decay_{layer}", nn.initializers.ones, (self.width,))
            a = jnp.exp(-8 * nn.softplus(decay.astype(y.dtype)) * recurrence)
            b = jnp.sqrt(1 - a * a + 1e-6) * entry * y

            def after(left, right):
                return left[0] * right[0], left[1] * right[0] + right[1]

            _, h = lax.associative_scan(after, (a, b), axis=1)
            x = x + nn.Dense(self.width, dtype=self.dtype)(h * gate)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(x)


def _pixels(random, image, classes):
    return random.integers(classes, size=(image, image), dtype="int32")


FAMILIES: dict[str, Network] = {
    "llama": sequence_model(Llama(), 16),
    "gpt": gpt(16, layers=4, width=512, heads=8, vocabulary=8192, length=512),
    "gpt, scanned": sequence_model(ScannedGPT(), 16),
    "mixture of experts": sequence_model(MixtureOfExperts(), 16),
    "vit": image_classifier(ViT(), 64, 224),
    "convnext": image_classifier(ConvNeXt(), 64, 128),
    "resnet": resnet(64, image=128, stages=(2, 2, 2), bottleneck=True),
    "u-net": image_classifier(UNet(), 16, 128, labels=_pixels),
    "lstm": sequence_model(Recurrent(), 128),
    "state space": sequence_model(StateSpace(), 16),
    "mlp": mlp(512, features=1024, width=2048, layers=4),
    **MORE_FAMILIES,
    "gru": sequence_model(Recurrent(nn.GRUCell), 128),
    **DEAR_FAMILIES,
    "llama, grouped queries": sequence_model(Llama(key_heads=4), 16),
    "bert, no attention dropout": sequence_model(BERT(attention_dropout=0.0), 32),
}
FAMILIES |= fused(FAMILIES)

# The same in small, for gradients that are computed on a CPU.
SMALL: dict[str, Network] = {
    "llama": sequence_model(
        Llama(layers=2, width=32, heads=2, vocabulary=64, length=16), 8
    ),
    "gpt": gpt(8, layers=2, width=32, heads=2, vocabulary=64, length=16),
    "gpt, scanned": sequence_model(
        ScannedGPT(layers=2, width=32, heads=2, vocabulary=64, length=16), 8
    ),
    "mixture of experts": sequence_model(
        MixtureOfExperts(width=32, heads=2, experts=4, vocabulary=64, length=16), 8
    ),
    "vit": image_classifier(
        ViT(layers=2, width=32, heads=2, patch=4, classes=10), 8, 16
    ),
    "convnext": image_classifier(ConvNeXt((1, 1), width=16, classes=10), 8, 16),
    "resnet": resnet(8, image=16, stages=(1, 1), width=8, classes=10),
    "u-net": image_classifier(UNet(width=8, levels=2), 4, 16, labels=_pixels),
    "lstm": sequence_model(Recurrent(width=32, vocabulary=64, length=16), 8),
    "state space": sequence_model(StateSpace(2, width=32, vocabulary=64, length=16), 8),
    "mlp": mlp(32, features=32, width=64, layers=2, classes=10),
    **MORE_SMALL,
    "gru": sequence_model(Recurrent(nn.GRUCell, width=32, vocabulary=64, length=16), 8),
    **DEAR_SMALL,
    "llama, grouped queries": sequence_model(
        Llama(2, width=32, heads=4, key_heads=2, vocabulary=64, length=16), 8
    ),
    "bert, no attention dropout": sequence_model(
        BERT(2, 32, heads=2, vocabulary=64, length=16, attention_dropout=0.0), 8
    ),
}
SMALL |= fused(SMALL)
