"""The networks whose training steps are compared, at any size.

Each has a ``dtype`` as Flax's own layers have: None follows the parameters and the
input. Layers are written out and not scanned, so that every layer has its own leaves.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


class MLP(nn.Module):
    """Dense layers of one width."""

    width: int = 2048
    layers: int = 6
    classes: int = 1000
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, features]`` to logits."""
        for _ in range(self.layers):
            x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
        return nn.Dense(self.classes, dtype=self.dtype)(x)


def rotated(x):
    """Applies rotary position embedding to ``[batch, length, heads, size]``."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half) / half)
    angles = jnp.einsum(
        "i,j->ij", jnp.arange(x.shape[1], dtype=jnp.float32), frequencies
    )
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = jnp.split(x, 2, axis=-1)
    out = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return out.astype(x.dtype)


def causal_attention(q, k, v):
    """Computes attention over ``[batch, length, heads, size]``, softmax in float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(seen, scores.astype(jnp.float32), -jnp.inf)
    # Back to 16 bits, which Flax's own attention forgets: its softmax in float32 makes
    # every product after it a float32 one.
    weights = nn.softmax(scores).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


class Block(nn.Module):
    """A transformer layer with its norms first."""

    heads: int
    attention: Callable[..., jax.Array]
    dtype: Any

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, length, width]`` to the same."""
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.Dense(3 * width, dtype=self.dtype, name="qkv")(y)
        y = y.reshape(*x.shape[:2], 3, self.heads, width // self.heads)
        y = self.attention(y[:, :, 0], y[:, :, 1], y[:, :, 2]).reshape(x.shape)
        x = x + nn.Dense(width, dtype=self.dtype, name="out")(y)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype, name="up")(y))
        return x + nn.Dense(width, dtype=self.dtype, name="down")(y)


class GPT(nn.Module):
    """A decoder in the shape of GPT-2, its head not tied to its embedding."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304
    length: int = 1024
    attention: Callable[..., jax.Array] = causal_attention
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits."""
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        places = jnp.arange(tokens.shape[1])
        x = x + nn.Embed(self.length, self.width, dtype=self.dtype)(places)
        for _ in range(self.layers):
            x = Block(self.heads, self.attention, self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(x)


class Residual(nn.Module):
    """The block of ResNet-18, or with ``bottleneck`` that of ResNet-50."""

    features: int
    strides: int
    bottleneck: bool
    dtype: Any

    @nn.compact
    def __call__(self, x):
        """Maps images to images."""

        def norm(**options):
            return nn.BatchNorm(
                use_running_average=False, momentum=0.9, dtype=self.dtype, **options
            )

        def conv(features, size, strides=1):
            return nn.Conv(
                features, (size, size), strides, use_bias=False, dtype=self.dtype
            )

        if self.bottleneck:
            out = 4 * self.features
            y = nn.relu(norm()(conv(self.features, 1)(x)))
            y = nn.relu(norm()(conv(self.features, 3, self.strides)(y)))
            y = conv(out, 1)(y)
        else:
            out = self.features
            y = nn.relu(norm()(conv(out, 3, self.strides)(x)))
            y = conv(out, 3)(y)
        y = norm(scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = norm()(conv(out, 1, self.strides)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A residual network for images of ImageNet's kind, batch normalised."""

    stages: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    bottleneck: bool = True
    classes: int = 1000
    small_images: bool = False  # of CIFAR's kind, which are not made smaller at once
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, height, width, 3]`` to logits."""
        side, strides = (3, 1) if self.small_images else (7, 2)
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        x = conv(self.width, (side, side), strides)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(x)
        x = nn.relu(x)
        if not self.small_images:
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                strides = 2 if stage > 0 and block == 0 else 1
                features = self.width * 2**stage
                x = Residual(features, strides, self.bottleneck, self.dtype)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2)))


class Network(NamedTuple):
    """A model, and the batches it is trained on."""

    model: nn.Module
    batch_size: int
    example: Callable[[np.random.Generator], tuple[Any, Any]]  # one row: input, label

    def with_dtype(self, dtype: Any) -> nn.Module:
        """Returns the model with Flax's own ``dtype``."""
        return self.model.clone(dtype=dtype)

    def batch(
        self, size: int | None = None, seed: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and labels, the same ones on every call with a seed."""
        random = np.random.default_rng(seed)
        rows = [self.example(random) for _ in range(size or self.batch_size)]
        return np.stack([x for x, _ in rows]), np.stack([y for _, y in rows])

    def shapes(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Returns the shapes and dtypes of a batch, to compile for."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((self.batch_size, *x.shape[1:]), x.dtype),
            self.batch(1),
        )


def mlp(batch_size: int, features: int, **sizes: Any) -> Network:
    """Returns an MLP on vectors."""
    model = MLP(**sizes)

    def example(random):
        x = random.standard_normal(features, np.float32)
        return x, random.integers(model.classes, dtype=np.int32)

    return Network(model, batch_size, example)


def _label(random, image, classes):
    return random.integers(classes, dtype=np.int32)


def sequence_model(model: nn.Module, batch_size: int) -> Network:
    """Returns a model that predicts the next token, on random ones.

    Args:
        model: With a ``vocabulary`` and a ``length``.
        batch_size: Sequences in a batch.
    """
    sizes: Any = model

    def example(random):
        tokens = random.integers(sizes.vocabulary, size=sizes.length + 1)
        tokens = tokens.astype(np.int32)
        return tokens[:-1], tokens[1:]

    return Network(model, batch_size, example)


def image_classifier(
    model: nn.Module, batch_size: int, image: int, labels: Callable[..., Any] = _label
) -> Network:
    """Returns a model of square images, on random ones.

    Args:
        model: With a number of ``classes``.
        batch_size: Images in a batch.
        image: Height and width of one.
        labels: Makes the labels of an image from a generator, its size and the number
            of classes; one label if not given.
    """
    sizes: Any = model

    def example(random):
        x = random.standard_normal((image, image, 3), np.float32)
        return x, labels(random, image, sizes.classes)

    return Network(model, batch_size, example)


def gpt(batch_size: int, **sizes: Any) -> Network:
    """Returns a GPT on random tokens."""
    return sequence_model(GPT(**sizes), batch_size)


def resnet(batch_size: int, image: int, **sizes: Any) -> Network:
    """Returns a ResNet on square images."""
    return image_classifier(ResNet(**sizes), batch_size, image)


NETWORKS = {
    "mlp": mlp(256, features=2048),
    "gpt-12m": gpt(32, layers=6, width=384, heads=6, vocabulary=2048, length=256),
    "gpt-160m": gpt(8),
    "resnet-18": resnet(64, image=224, stages=(2, 2, 2, 2), bottleneck=False),
    "resnet-50": resnet(64, image=224),
}

# The same in small, to try the programs out on a CPU.
TINY = {
    "mlp": mlp(8, features=16, width=16, layers=2, classes=10),
    "gpt": gpt(8, layers=2, width=16, heads=2, vocabulary=32, length=8),
    "resnet": resnet(8, image=16, stages=(1, 1), width=8, classes=10),
}
