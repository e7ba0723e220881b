"""The language model of `language_model.py`: two LSTM layers."""

from functools import cache
from typing import Any

import flax.linen as nn
import jax

import jaxmp
import jaxmp.plots


class LanguageModel(nn.Module):
    """Two LSTM layers. The dtype of its parameters is that of its arithmetic."""

    vocabulary: int
    features: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        # Embeddings of size 1, because the first update needs something to go on.
        unit = nn.initializers.normal(1.0)
        x: Any = nn.Embed(self.vocabulary, self.features, embedding_init=unit)(tokens)
        for _ in range(2):
            cell = nn.OptimizedLSTMCell(self.features)
            # By itself, nn.RNN starts from zeros of the cell's `param_dtype`. These are
            # float32, and would promote all the recurrent products, in silence.
            shape = (len(tokens), self.features)
            carry = cell.initialize_carry(jax.random.key(0), shape)
            x = nn.RNN(cell)(x, initial_carry=jaxmp.cast_tree(carry, x.dtype))
        return nn.Dense(self.vocabulary)(x)


@cache
def make_model(vocabulary: int, features: int) -> tuple[LanguageModel, Any]:
    """Returns a model and its init, which is compiled once for all runs."""
    model = LanguageModel(vocabulary, features)
    return model, jax.jit(model.init)
