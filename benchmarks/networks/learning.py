"""Small models that learn: convolutions, an LSTM and an encoder.

The last two are those of ``examples/language_model.py`` and ``examples/masked_lm.py``,
with the learning rates that they have there.
"""

import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
import _bert
import _lstm
import _text


class Task(NamedTuple):
    """A model and its data, for one seed."""

    params: Any
    loss: Callable[[Any, Any], jax.Array]  # of the parameters and a batch
    batches: Any  # each leaf with a leading axis of updates


class Convolutions(nn.Module):
    """Three layers of convolutions, and a layer of logits."""

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, 8, 8, 1]`` to logits."""
        for strides in (1, 2, 2):
            x = nn.relu(nn.Conv(32, (3, 3), strides)(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


def digits(seed: int, updates: int) -> Task:
    """Returns a network of convolutions that reads digits, 32 an update."""
    model = Convolutions()
    images, labels = load_digits(return_X_y=True)
    chosen = np.random.default_rng(seed).integers(len(images), size=(updates, 32))
    images = images.reshape(-1, 8, 8, 1)[chosen].astype(np.float32) / 16

    def loss(params, batch):
        return cross_entropy(model.apply(params, batch[0]), batch[1])

    params = model.init(jax.random.key(seed), images[0])
    return Task(params, loss, (images, labels[chosen].astype(np.int32)))


def characters(seed: int, updates: int) -> Task:
    """Returns an LSTM that predicts characters, with one worker's share of a batch."""
    rows, _ = _text.split(_text.as_characters(_text.read()), 33)
    chosen = np.random.default_rng(seed).integers(len(rows), size=(updates, 128))
    model, init = _lstm.make_model(len(_text.CHARACTERS), 32)

    def loss(params, rows):
        return cross_entropy(model.apply(params, rows[:, :-1]), rows[:, 1:])

    params = init(jax.random.key(seed), rows[:1, :-1])
    return Task(params, loss, rows[chosen])


def masked_words(seed: int, updates: int) -> Task:
    """Returns an encoder that fills in words, with batches of 16 rows."""
    words = _text.as_words(_text.read(), _bert.VOCABULARY)
    rows, _ = _text.split(words, 64)
    rng = np.random.default_rng(seed)
    masked = [_bert.mask(rng, rng.choice(rows, 16)) for _ in range(updates)]
    batches = jax.tree.map(lambda *leaves: np.stack(leaves), *masked)

    def loss(params, batch):
        returned: Any = _bert.SMALL.apply(params, batch.tokens, batch.positions)
        hidden, table = returned
        return cross_entropy(hidden @ table.T, batch.targets)

    first = masked[0]
    params = _bert.init_small(jax.random.key(seed), first.tokens, first.positions)
    return Task(params, loss, batches)


def cross_entropy(logits: Any, labels: Any) -> jax.Array:
    """Returns the mean loss in nats."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()
