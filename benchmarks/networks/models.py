"""Small models of many families, written as a user would write them.

Each has a ``dtype`` as Flax's own layers have: None is the float32 model that autocast
is given, and a 16-bit dtype the native model that it is compared with.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.linen.dtypes import promote_dtype
from jax import lax

from .basic import rotated

KEY = jax.random.key(0)
WIDTH, HEADS, LENGTH, BATCH, VOCABULARY = 32, 4, 16, 8, 50


class MLP(nn.Module):
    """Two hidden layers."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps vectors to logits."""
        for _ in range(2):
            x = nn.relu(nn.Dense(2 * WIDTH, dtype=self.dtype)(x))
        return nn.Dense(10, dtype=self.dtype)(x)


class CNN(nn.Module):
    """Two convolutions with batch normalisation."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps images to logits."""
        for features in (8, 16):
            x = nn.Conv(features, (3, 3), dtype=self.dtype)(x)
            x = nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)
            x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        return nn.Dense(10, dtype=self.dtype)(x.mean((1, 2)))


class Attention(nn.Module):
    """Causal self-attention, with or without rotary embedding."""

    dtype: Any = None
    rope: bool = False
    fused: bool = False
    float32_softmax: bool = False

    @nn.compact
    def __call__(self, x):
        """Maps a sequence to a sequence."""
        width = x.shape[-1]
        q, k, v = (
            nn.DenseGeneral((HEADS, width // HEADS), dtype=self.dtype, name=name)(x)
            for name in ("query", "key", "value")
        )
        if self.rope:
            q, k = rotated(q), rotated(k)
        if self.fused:
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        else:
            mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
            out = nn.dot_product_attention(
                q,
                k,
                v,
                mask=mask,
                dtype=self.dtype,
                force_fp32_for_softmax=self.float32_softmax,
            )
        return nn.DenseGeneral(width, axis=(-2, -1), dtype=self.dtype)(out)


class Block(nn.Module):
    """A transformer layer with normalisation first."""

    dtype: Any = None
    rope: bool = False
    fused: bool = False
    float32_softmax: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, _=None):
        """Maps a sequence to a sequence, in the form that ``nn.scan`` wants."""
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = Attention(self.dtype, self.rope, self.fused, self.float32_softmax)(y)
        x = x + nn.Dropout(self.dropout, deterministic=not self.dropout)(y)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype)(y))
        y = nn.Dense(x.shape[-1], dtype=self.dtype)(y)
        return x + nn.Dropout(self.dropout, deterministic=not self.dropout)(y), None


class Transformer(nn.Module):
    """A decoder; its layers may be scanned, rematerialised or have dropout."""

    dtype: Any = None
    layers: int = 1
    width: int = WIDTH
    length: int = LENGTH
    scanned: bool = False
    remat: bool = False
    tied: bool = False
    fused: bool = False
    float32_softmax: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, tokens):
        """Maps tokens to logits."""
        embed = nn.Embed(VOCABULARY, self.width, dtype=self.dtype)
        x = embed(tokens)
        if not self.tied:
            places = nn.Embed(self.length, self.width, dtype=self.dtype)
            x = x + places(jnp.arange(x.shape[1]))
        block = nn.remat(Block) if self.remat else Block
        softmax = self.float32_softmax
        settings = (self.dtype, self.tied, self.fused, softmax, self.dropout)
        if self.scanned:
            scan = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=self.layers,
            )
            x, _ = scan(*settings)(x, None)
        else:
            for _ in range(self.layers):
                x, _ = block(*settings)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return (
            embed.attend(x) if self.tied else nn.Dense(VOCABULARY, dtype=self.dtype)(x)
        )


class LSTM(nn.Module):
    """A recurrent classifier."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps a sequence of vectors to logits."""
        states: Any = nn.RNN(nn.OptimizedLSTMCell(WIDTH, dtype=self.dtype))(x)
        return nn.Dense(10, dtype=self.dtype)(states[:, -1])


class VAE(nn.Module):
    """A variational autoencoder that returns its reconstruction and divergence."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps vectors to ``(reconstruction, divergence)``."""
        h = nn.relu(nn.Dense(WIDTH, dtype=self.dtype)(x))
        mean = nn.Dense(8, dtype=self.dtype)(h)
        log_var = nn.Dense(8, dtype=self.dtype)(h)
        noise = jax.random.normal(KEY, mean.shape)
        z = mean + jnp.exp(0.5 * log_var) * noise
        h = nn.relu(nn.Dense(WIDTH, dtype=self.dtype)(z))
        divergence = 0.5 * (mean**2 + jnp.exp(log_var) - 1 - log_var).sum(-1)
        return nn.Dense(x.shape[-1], dtype=self.dtype)(h), divergence


class UNet(nn.Module):
    """One level down, one up, and a skip connection."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps images to images."""
        skip = nn.relu(nn.Conv(8, (3, 3), dtype=self.dtype)(x))
        y = nn.Conv(16, (3, 3), strides=(2, 2), dtype=self.dtype)(skip)
        y = nn.silu(nn.GroupNorm(4, dtype=self.dtype)(y))
        y = nn.ConvTranspose(8, (2, 2), strides=(2, 2), dtype=self.dtype)(y)
        y = jnp.concatenate([skip, y], axis=-1)
        return nn.Conv(x.shape[-1], (3, 3), dtype=self.dtype)(y)


class MoE(nn.Module):
    """A mixture of experts that routes each token to one of them."""

    dtype: Any = None
    experts: int = 4

    @nn.compact
    def __call__(self, x):
        """Maps vectors to logits."""
        init = nn.initializers.lecun_normal()
        up = self.param("up", init, (self.experts, x.shape[-1], WIDTH))
        down = self.param("down", init, (self.experts, WIDTH, 10))
        gates = nn.softmax(nn.Dense(self.experts, name="router")(x))
        expert = gates.argmax(-1)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=self.experts)
        y, up, down = promote_dtype(x[order], up, down, dtype=self.dtype)
        y = nn.relu(lax.ragged_dot(y, up, sizes))
        y = lax.ragged_dot(y, down, sizes)
        return y * gates.max(-1)[order][:, None], order


class ViT(nn.Module):
    """A vision transformer with a class token."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps images to logits."""
        x = nn.Conv(WIDTH, (4, 4), strides=(4, 4), dtype=self.dtype)(x)
        x = x.reshape(x.shape[0], -1, WIDTH)
        token = self.param("class", nn.initializers.normal(0.02), (1, 1, WIDTH))
        token = jnp.broadcast_to(token, (x.shape[0], 1, WIDTH)).astype(x.dtype)
        x = jnp.concatenate([token, x], axis=1)
        places = nn.initializers.normal(0.02)
        x = x + self.param("places", places, (1, x.shape[1], WIDTH)).astype(x.dtype)
        for _ in range(2):
            x, _ = Block(self.dtype)(x)
        return nn.Dense(10, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)[:, 0])


class NnxMLP(nnx.Module):
    """Two hidden layers."""

    def __init__(self, dtype=None, *, rngs):
        """Creates the layers."""
        sizes = (WIDTH, 2 * WIDTH, 2 * WIDTH, 10)
        self.layers = nnx.List(
            nnx.Linear(i, o, dtype=dtype, rngs=rngs)
            for i, o in itertools.pairwise(sizes)
        )

    def __call__(self, x):
        """Maps vectors to logits."""
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)


class NnxCNN(nnx.Module):
    """A convolution with batch normalisation and dropout."""

    def __init__(self, dtype=None, *, rngs):
        """Creates the layers."""
        self.conv = nnx.Conv(3, 8, (3, 3), dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(8, dtype=dtype, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(8, 10, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        """Maps images to logits."""
        x = nnx.relu(self.norm(self.conv(x)))
        return self.head(self.drop(x.mean((1, 2))))


class NnxTransformer(nnx.Module):
    """One layer of attention and one of dense work."""

    def __init__(self, dtype=None, *, rngs):
        """Creates the layers."""
        self.embed = nnx.Embed(VOCABULARY, WIDTH, dtype=dtype, rngs=rngs)
        self.norms = nnx.List(
            nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs) for _ in "ab"
        )
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, dtype=dtype, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        """Maps tokens to logits."""
        x = self.embed(tokens)
        x = x + self.attention(self.norms[0](x))
        x = x + self.down(nnx.gelu(self.up(self.norms[1](x))))
        return self.embed.attend(x)


class Family(NamedTuple):
    """A model, its data and its loss."""

    model: Callable[..., Any]  # of a dtype
    inputs: Any
    loss: Callable[..., jax.Array]  # of the model's output


# By NumPy, so that importing this file compiles nothing.
def _normal(*shape):
    return jax.device_put(np.random.default_rng(1).standard_normal(shape, np.float32))


def _labels(*shape, classes=10):
    numbers = np.random.default_rng(2).integers(classes, size=shape, dtype=np.int32)
    return jax.device_put(numbers)


def _cross_entropy(labels):
    def loss(logits):
        logits = logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return loss


def _vae_loss(out):
    reconstruction, divergence = out
    error = jnp.square(reconstruction.astype(jnp.float32) - _VECTORS).sum(-1)
    return (error + divergence.astype(jnp.float32)).mean()


_VECTORS = _normal(BATCH, WIDTH)
_IMAGES = _normal(BATCH, 16, 16, 3)
_SERIES = _normal(BATCH, LENGTH, WIDTH)
_TOKENS = _labels(BATCH, LENGTH, classes=VOCABULARY)
_CLASSIFY = _cross_entropy(_labels(BATCH))
_PREDICT = _cross_entropy(jax.device_put(np.roll(_TOKENS, -1, axis=1)))


def _decoder(**settings):
    def model(dtype=None):
        return Transformer(dtype, **settings)

    return Family(model, _TOKENS, _PREDICT)


LINEN = {
    "mlp": Family(MLP, _VECTORS, _CLASSIFY),
    "cnn": Family(CNN, _IMAGES, _CLASSIFY),
    "transformer": _decoder(),
    "transformer scanned": _decoder(layers=2, scanned=True),
    "transformer remat": _decoder(layers=2, scanned=True, remat=True),
    "transformer dropout": _decoder(dropout=0.1, fused=True),
    "lstm": Family(LSTM, _SERIES, _CLASSIFY),
    "gpt": _decoder(tied=True),
    "vae": Family(VAE, _VECTORS, _vae_loss),
    "u-net": Family(
        UNet, _IMAGES, lambda out: jnp.square(out.astype(jnp.float32) - _IMAGES).mean()
    ),
    "moe": Family(
        MoE,
        _VECTORS,
        lambda out: _cross_entropy(_labels(BATCH)[out[1]])(out[0]),
    ),
    "vit": Family(ViT, _IMAGES, _CLASSIFY),
}

NNX = {
    "mlp": Family(NnxMLP, _VECTORS, _CLASSIFY),
    "cnn": Family(NnxCNN, _IMAGES, _CLASSIFY),
    "transformer": Family(NnxTransformer, _TOKENS, _PREDICT),
}


def linen_loss(family: Family, dtype: Any = None) -> Callable[[Any], jax.Array]:
    """Returns the loss of a Linen family as a function of its parameters."""
    model = family.model(dtype)

    def loss(params):
        variables = {"params": params}
        out, _ = model.apply(
            variables, family.inputs, rngs={"dropout": KEY}, mutable=["batch_stats"]
        )
        return family.loss(out)

    return loss


def linen_params(family: Family) -> Any:
    """Returns the float32 parameters of a Linen family."""
    keys = {"params": KEY, "dropout": KEY}
    return jax.jit(family.model().init)(keys, family.inputs)["params"]


def nnx_loss(family: Family, dtype: Any = None) -> tuple[Callable, Any]:
    """Returns the loss of an NNX family, and its parameters."""
    graphdef, params, rest = nnx.split(
        family.model(dtype, rngs=nnx.Rngs(0)), nnx.Param, ...
    )

    def loss(params):
        model = nnx.merge(graphdef, params, rest, copy=True)
        return family.loss(model(family.inputs))

    return loss, params
