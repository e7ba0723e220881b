"""The transformer of `narrow.py`, which predicts the next character."""

from functools import cache
from typing import Any

import _text
import flax.linen as nn
import jax

LENGTH = 64  # characters to predict in a row of text


class Block(nn.Module):
    """Causal attention and a layer of hidden units, each added to what comes in."""

    dot: Any
    heads: int = 4

    @nn.compact
    def __call__(self, x):
        mask, dot = nn.make_causal_mask(x[..., 0]), self.dot
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(
            self.heads, qkv_dot_general=dot, out_dot_general=dot
        )(h, mask=mask)
        h = nn.Dense(4 * x.shape[-1], dot_general=dot)(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1], dot_general=dot)(nn.gelu(h))


class LanguageModel(nn.Module):
    """A transformer of two blocks."""

    features: int
    dot: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        position = self.param(
            "position", nn.initializers.normal(0.02), (LENGTH, self.features)
        )
        x = nn.Embed(len(_text.CHARACTERS), self.features)(tokens) + position
        for _ in range(2):
            x = Block(self.dot)(x)
        x = nn.LayerNorm()(x)
        return nn.Dense(len(_text.CHARACTERS), dot_general=self.dot)(x)


@cache
def make_model(features: int, dot: Any) -> tuple[LanguageModel, Any]:
    """Returns a model and its init, which is compiled once for all runs."""
    model = LanguageModel(features, dot)
    return model, jax.jit(model.init)
