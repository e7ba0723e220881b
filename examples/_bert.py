"""A masked language model in the way of BERT, and the masking of its text."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

MASKED = 0.15  # share of the words to fill in


class Block(nn.Module):
    """Attention and a feed-forward network, each with its norm in front."""

    heads: int

    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x))
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y), None


class MaskedLM(nn.Module):
    """An encoder whose product with its embedding tells the words at some positions."""

    vocabulary: int
    features: int
    heads: int
    layers: int

    @nn.compact
    def __call__(self, tokens, positions):
        words = nn.Embed(self.vocabulary, self.features)
        places = nn.Embed(512, self.features)
        x = words(tokens) + places(jnp.arange(tokens.shape[1]))
        # One block with stacked parameters: a twelfth of the compilation.
        blocks = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.layers,
        )
        x, _ = blocks(self.heads)(x, None)
        x = jnp.take_along_axis(x, positions[..., None], axis=1)
        return nn.LayerNorm()(x), words.embedding  # the loss has the logits by tiles


VOCABULARY = 2000
SMALL = MaskedLM(VOCABULARY + 1, features=64, heads=4, layers=2)
init_small = jax.jit(SMALL.init)  # compiled once for all runs
BERT_BASE = MaskedLM(30522, features=768, heads=12, layers=12)
BERT_LARGE = MaskedLM(30522, features=1024, heads=16, layers=24)


class Batch(NamedTuple):
    """Rows of text and what is to be filled in."""

    tokens: Any  # int32[rows, length], some of them masked
    positions: Any  # int32[rows, masked]
    targets: Any  # int32[rows, masked]


def mask(rng: np.random.Generator, rows: np.ndarray) -> Batch:
    """Masks 15% of each row: 80% of these by a token, 10% by a random word."""
    count = round(MASKED * rows.shape[1])
    positions = rng.random(rows.shape).argsort(axis=1)[:, :count].astype(np.int32)
    targets = np.take_along_axis(rows, positions, axis=1)
    lot = rng.random(targets.shape)
    shown = np.where(lot < 0.8, VOCABULARY, targets)
    shown = np.where(lot > 0.9, rng.integers(VOCABULARY, size=lot.shape), shown)
    tokens = rows.copy()
    np.put_along_axis(tokens, positions, shown, axis=1)
    return Batch(tokens, positions, targets)
