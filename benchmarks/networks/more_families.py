"""More families of networks: whether what holds for the others holds in general.

Written as in :mod:`benchmarks.networks.families`, which lists them.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from .basic import Network, image_classifier, rotated, sequence_model


class BERT(nn.Module):
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
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits; zeros are padding."""
        key = jax.random.key(tokens.sum())  # so that no mask is a constant
        keys = iter(jax.random.split(key, 3 * self.layers))

        def dropped(x):
            return nn.Dropout(self.dropout, deterministic=False)(x, rng=next(keys))

        def dense(features, x):
            return nn.Dense(features, dtype=self.dtype)(x)

        def norm(x):
            return nn.LayerNorm(dtype=self.dtype)(x)

        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        places = nn.Embed(self.length, self.width, dtype=self.dtype)
        x = norm(embed(tokens) + places(jnp.arange(tokens.shape[1])))
        mask = nn.make_attention_mask(tokens > 0, tokens > 0)
        for _ in range(self.layers):
            y = nn.MultiHeadDotProductAttention(
                self.heads,
                self.dtype,
                dropout_rate=self.attention_dropout,
                attention_fn=self.attention,
            )(x, mask=mask, deterministic=False, dropout_rng=next(keys))
            x = norm(x + dropped(y))
            y = nn.gelu(dense(4 * self.width, x), approximate=False)
            x = norm(x + dropped(dense(self.width, y)))
        return embed.attend(norm(nn.gelu(dense(self.width, x), approximate=False)))


class Mixer(nn.Module):
    """Perceptrons along the image and along the channels. Tolstikhin et al., 2021."""

    layers: int = 4
    width: int = 512
    patch: int = 16
    classes: int = 1000
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, height, width, 3]`` to logits."""

        def perceptron(hidden, x):
            y = nn.gelu(nn.Dense(hidden, dtype=self.dtype)(x))
            return nn.Dense(x.shape[-1], dtype=self.dtype)(y)

        size = (self.patch, self.patch)
        x = nn.Conv(self.width, size, size, dtype=self.dtype)(x)
        x = x.reshape(x.shape[0], -1, self.width)
        for _ in range(self.layers):
            y = nn.LayerNorm(dtype=self.dtype)(x).swapaxes(1, 2)
            x = x + perceptron(self.width // 2, y).swapaxes(1, 2)
            x = x + perceptron(4 * self.width, nn.LayerNorm(dtype=self.dtype)(x))
        x = nn.LayerNorm(dtype=self.dtype)(x).mean(1)
        return nn.Dense(self.classes, dtype=self.dtype)(x)


class EfficientNet(nn.Module):
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
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, height, width, 3]`` to logits."""

        def normed(features, size, x, stride=1, groups=1):
            x = nn.Conv(
                features,
                (size, size),
                stride,
                feature_group_count=groups,
                use_bias=False,
                dtype=self.dtype,
            )(x)
            return nn.BatchNorm(False, momentum=0.9, dtype=self.dtype)(x)

        def gates(x, features):
            x = x.mean((1, 2), keepdims=True)
            x = nn.swish(nn.Conv(features, (1, 1), dtype=self.dtype)(x))
            return nn.sigmoid(nn.Conv(wide, (1, 1), dtype=self.dtype)(x))

        x = nn.swish(normed(self.stem, 3, x, 2))
        for expand, features, layers, stride in self.stages:
            for i in range(layers):
                wide, y = expand * x.shape[-1], x
                if expand > 1:
                    y = nn.swish(normed(wide, 1, y))
                y = normed(wide, 3, y, stride if i == 0 else 1, groups=wide)
                y = nn.swish(y)
                y = normed(features, 1, y * gates(y, x.shape[-1] // 4))
                x = x + y if x.shape == y.shape else y
        x = nn.swish(normed(self.head, 1, x)).mean((1, 2))
        return nn.Dense(self.classes, dtype=self.dtype)(x)


class DenseNet(nn.Module):
    """Convolutions of all that was computed before. Huang et al., 2017."""

    blocks: tuple[int, ...] = (4, 6, 6)
    growth: int = 32
    classes: int = 1000
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, height, width, 3]`` to logits."""

        def conv(features, size, x, stride=1):
            return nn.Conv(
                features, (size, size), stride, use_bias=False, dtype=self.dtype
            )(x)

        def activated(x):
            return nn.relu(nn.BatchNorm(False, momentum=0.9, dtype=self.dtype)(x))

        x = activated(conv(2 * self.growth, 7, x, 2))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        for block, layers in enumerate(self.blocks):
            if block:
                x = conv(x.shape[-1] // 2, 1, activated(x))
                x = nn.avg_pool(x, (2, 2), (2, 2))
            for _ in range(layers):
                y = conv(4 * self.growth, 1, activated(x))
                y = conv(self.growth, 3, activated(y))
                x = jnp.concatenate([x, y], -1)
        x = activated(x).mean((1, 2))
        return nn.Dense(self.classes, dtype=self.dtype)(x)


class Gemma(nn.Module):
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
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        """Maps ``[batch, length]`` tokens to logits."""

        def dense(features, x):
            return nn.Dense(features, use_bias=False, dtype=self.dtype)(x)

        def norm(x):
            return nn.RMSNorm(dtype=self.dtype)(x)

        def capped(limit, x):
            return limit * jnp.tanh(x / limit)

        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        x = embed(tokens) * self.width**0.5
        batch, length = tokens.shape
        size, shared = self.width // self.heads, self.heads // self.groups
        mask = jnp.tril(jnp.ones((length, length), bool))[:, None, None]
        for _ in range(self.layers):
            y = norm(x)
            q = rotated(dense(self.width, y).reshape(batch, length, self.heads, size))
            q = q.reshape(batch, length, self.groups, shared, size) * size**-0.5
            k, v = (
                dense(self.groups * size, y).reshape(batch, length, self.groups, size)
                for _ in range(2)
            )
            scores = jnp.einsum("BTKGH,BSKH->BTKGS", q, rotated(k))
            lowest = jnp.finfo(scores.dtype).min
            weights = nn.softmax(jnp.where(mask, capped(50.0, scores), lowest))
            y = jnp.einsum("BTKGS,BSKH->BTKGH", weights, v).reshape(x.shape)
            x = x + norm(dense(self.width, y))
            y = norm(x)
            y = nn.gelu(dense(3 * self.width, y)) * dense(3 * self.width, y)
            x = x + norm(dense(self.width, y))
        return capped(30.0, embed.attend(norm(x)))


class GraphNetwork(nn.Module):
    """Messages along the edges of a mesh, the same for each graph of a batch.

    Battaglia et al., 2018, https://arxiv.org/abs/1806.01261.
    """

    nodes: int = 1024
    degree: int = 8
    width: int = 256
    steps: int = 3
    features: int = 16
    classes: int = 16
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, nodes, features]`` to logits of each node."""
        receivers = np.repeat(np.arange(self.nodes), self.degree)
        away = np.random.default_rng(0).integers(1, self.nodes, receivers.size)
        senders = (receivers + away) % self.nodes

        def mlp(*parts):
            y = jnp.concatenate(parts, axis=-1)
            y = nn.silu(nn.Dense(self.width, dtype=self.dtype)(y))
            y = nn.Dense(self.width, dtype=self.dtype)(y)
            return nn.LayerNorm(dtype=self.dtype)(y)

        nodes = mlp(x)
        edges = mlp(nodes[:, senders] - nodes[:, receivers])
        for _ in range(self.steps):
            edges += mlp(edges, nodes[:, senders], nodes[:, receivers])
            received = jnp.zeros_like(nodes).at[:, receivers].add(edges)
            nodes += mlp(nodes, received)
        return nn.Dense(self.classes, dtype=self.dtype)(nodes)


def graphs(model: GraphNetwork, batch_size: int) -> Network:
    """Returns a model that classifies the nodes of random graphs."""

    def example(random):
        x = random.standard_normal((model.nodes, model.features), np.float32)
        return x, random.integers(model.classes, size=model.nodes, dtype=np.int32)

    return Network(model, batch_size, example)


MORE_FAMILIES: dict[str, Network] = {
    "bert": sequence_model(BERT(), 32),
    "mixer": image_classifier(Mixer(), 64, 224),
    "efficientnet": image_classifier(EfficientNet(), 64, 128),
    "densenet": image_classifier(DenseNet(), 64, 128),
    "graph network": graphs(GraphNetwork(), 8),
    "gemma": sequence_model(Gemma(), 16),
}

# The same in small, for gradients that are computed on a CPU.
MORE_SMALL: dict[str, Network] = {
    "bert": sequence_model(BERT(2, 32, heads=2, vocabulary=64, length=16), 8),
    "mixer": image_classifier(Mixer(2, 32, patch=4, classes=10), 8, 16),
    "efficientnet": image_classifier(
        EfficientNet(((1, 8, 1, 1), (4, 12, 2, 2)), stem=8, head=32, classes=10), 8, 16
    ),
    "densenet": image_classifier(DenseNet((2, 2), growth=8, classes=10), 8, 32),
    "graph network": graphs(GraphNetwork(16, 4, width=32, steps=2, classes=10), 4),
    "gemma": sequence_model(Gemma(2, 32, heads=4, vocabulary=64, length=16), 8),
}
