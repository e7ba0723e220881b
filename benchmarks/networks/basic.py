"""The networks whose training steps are compared, at any size.

Each has a ``dtype`` as Flax's own layers have: None follows the parameters and the
input. Layers are written out and not scanned, so that every layer has its own leaves.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


class Model(nn.Module, kw_only=True):
    """What the models have in common: layers of their own ``dtype``, in short."""

    dtype: Any = None
    again: bool = False  # whether layers are computed again for the gradients
    scanned: bool = False  # whether equal layers are one scan, which compiles sooner

    def layer(self, fun: Callable[..., Any], x: Any, *rest: Any) -> Any:
        """Returns ``fun(self, x, *rest)``."""
        if self.again:
            return nn.remat(lambda self, x: fun(self, x, *rest))(self, x)
        return fun(self, x, *rest)

    @nn.nowrap  # no scope of its own
    def stacked(self, fun: Callable[..., Any], x: Any) -> Any:
        """Returns ``x`` after as many of such layers as the model has."""
        sizes: Any = self
        if self.scanned:

            class Layer(type(self)):
                @nn.compact
                def __call__(self, x, _):
                    return self.layer(fun, x), None

            scan = nn.scan(
                Layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=sizes.layers,
            )
            own = (x.name for x in dataclasses.fields(self))
            own = {x: getattr(self, x) for x in own if x not in ("parent", "name")}
            return scan(**own)(x, None)[0]
        for _ in range(sizes.layers):
            x = self.layer(fun, x)
        return x

    @nn.nowrap
    def gated(self, activation: Callable[..., Any], features: int, x: Any) -> Any:
        """Returns ``x`` after a gated linear unit."""
        y = activation(self.unbiased(features, x)) * self.unbiased(features, x)
        return self.unbiased(x.shape[-1], y)

    def dense(self, features: int, x: Any, **options: Any) -> Any:
        """Returns a dense layer of ``x``."""
        return nn.Dense(features, dtype=self.dtype, **options)(x)

    def unbiased(self, features: int, x: Any) -> Any:
        """Returns a dense layer of ``x`` without a bias."""
        return nn.Dense(features, use_bias=False, dtype=self.dtype)(x)

    def conv(
        self, features: int, size: int, x: Any, strides: int = 1, **options: Any
    ) -> Any:
        """Returns a convolution of ``x`` with a square kernel."""
        return nn.Conv(features, (size, size), strides, dtype=self.dtype, **options)(x)

    def embed(self, features: int, count: int, x: Any) -> Any:
        """Returns the rows of a table of ``count`` rows."""
        return nn.Embed(count, features, dtype=self.dtype)(x)

    def layer_norm(self, x: Any) -> Any:
        """Returns a layer norm of ``x``."""
        return nn.LayerNorm(dtype=self.dtype)(x)

    def rms_norm(self, x: Any) -> Any:
        """Returns an RMS norm of ``x``."""
        return nn.RMSNorm(dtype=self.dtype)(x)

    def batch_norm(self, x: Any, **options: Any) -> Any:
        """Returns a batch norm of ``x``, in training."""
        return nn.BatchNorm(False, momentum=0.9, dtype=self.dtype, **options)(x)


class MLP(Model):
    """Dense layers of one width."""

    width: int = 2048
    layers: int = 6
    classes: int = 1000

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, features]`` to logits."""

        def layer(self, x):
            return nn.relu(self.dense(self.width, x))

        x = self.stacked(layer, x)
        return self.dense(self.classes, x)


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


class Block(Model):
    """A transformer layer with its norms first."""

    heads: int
    attention: Callable[..., jax.Array]

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, length, width]`` to the same."""
        width = x.shape[-1]
        y = self.dense(3 * width, self.layer_norm(x), name="qkv")
        y = y.reshape(*x.shape[:2], 3, self.heads, width // self.heads)
        y = self.attention(y[:, :, 0], y[:, :, 1], y[:, :, 2]).reshape(x.shape)
        x = x + self.dense(width, y, name="out")
        y = nn.gelu(self.dense(4 * width, self.layer_norm(x), name="up"))
        return x + self.dense(width, y, name="down")


def transformed(model, x):
    """Maps ``x`` by a new layer of a model with ``heads`` and an ``attention``."""
    return Block(model.heads, model.attention, dtype=model.dtype)(x)


class GPT(Model):
    """A decoder in the shape of GPT-2, its head not tied to its embedding."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304
    length: int = 1024
    attention: Callable[..., jax.Array] = causal_attention

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits."""
        x = self.embed(self.width, self.vocabulary, tokens)
        x = x + self.embed(self.width, self.length, jnp.arange(tokens.shape[1]))
        x = self.stacked(transformed, x)
        return self.unbiased(self.vocabulary, self.layer_norm(x))


class Residual(Model):
    """The block of ResNet-18, or with ``bottleneck`` that of ResNet-50."""

    features: int
    strides: int
    bottleneck: bool

    @nn.compact
    def __call__(self, x):
        """Maps images to images."""

        def conv(features, size, x, strides=1):
            return self.conv(features, size, x, strides, use_bias=False)

        if self.bottleneck:
            out = 4 * self.features
            y = nn.relu(self.batch_norm(conv(self.features, 1, x)))
            y = nn.relu(self.batch_norm(conv(self.features, 3, y, self.strides)))
            y = conv(out, 1, y)
        else:
            out = self.features
            y = nn.relu(self.batch_norm(conv(out, 3, x, self.strides)))
            y = conv(out, 3, y)
        y = self.batch_norm(y, scale_init=nn.initializers.zeros)
        if x.shape != y.shape:
            x = self.batch_norm(conv(out, 1, x, self.strides))
        return nn.relu(x + y)


class ResNet(Model):
    """A residual network for images of ImageNet's kind, batch normalised."""

    stages: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    bottleneck: bool = True
    classes: int = 1000
    small_images: bool = False  # of CIFAR's kind, which are not made smaller at once

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, height, width, 3]`` to logits."""

        def layer(self, x, features, strides):
            return Residual(features, strides, self.bottleneck, dtype=self.dtype)(x)

        side, strides = (3, 1) if self.small_images else (7, 2)
        x = self.conv(self.width, side, x, strides, use_bias=False)
        x = nn.relu(self.batch_norm(x))
        if not self.small_images:
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                strides = 2 if stage > 0 and block == 0 else 1
                x = self.layer(layer, x, self.width * 2**stage, strides)
        return self.dense(self.classes, x.mean((1, 2)))


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


def of_numbers(
    model: nn.Module, batch_size: int, *shape: int, axes: int = 0
) -> Network:
    """Returns a model of random numbers, with a label for each place of some axes.

    Args:
        model: With a number of ``classes``.
        batch_size: Examples in a batch.
        *shape: That of an example.
        axes: Those with labels, the first ones.
    """
    sizes: Any = model

    def example(random):
        x = random.standard_normal(shape, np.float32)
        return x, random.integers(sizes.classes, size=shape[:axes], dtype=np.int32)

    return Network(model, batch_size, example)


def mlp(batch_size: int, features: int, **sizes: Any) -> Network:
    """Returns an MLP on vectors."""
    return of_numbers(MLP(**sizes), batch_size, features)


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


def gpt(batch_size: int, **sizes: Any) -> Network:
    """Returns a GPT on random tokens."""
    return sequence_model(GPT(**sizes), batch_size)


def resnet(batch_size: int, image: int, **sizes: Any) -> Network:
    """Returns a ResNet on square images."""
    return of_numbers(ResNet(**sizes), batch_size, image, image, 3)


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
