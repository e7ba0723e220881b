"""Small models that learn: a transformer on characters, convolutions on digits."""

import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

from .basic import GPT

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
import _text

LAST = 50  # updates whose loss is taken


class Task(NamedTuple):
    """A model and its data, for one seed."""

    params: Any  # to train
    fixed: Any  # arrays that are not trained
    loss: Callable[[Any, Any, Any], jax.Array]  # of the two and a batch
    batches: Any  # each leaf with a leading axis of updates


def language_model(seed: int, updates: int) -> Task:
    """Returns a transformer that predicts the next character."""
    model = GPT(2, 64, 4, len(_text.CHARACTERS), 64)
    rows, _ = _text.split(_text.as_characters(_text.read()), 65)
    chosen = np.random.default_rng(seed).integers(len(rows), size=(updates, 8))
    batches = rows[chosen]

    def loss(params, _, rows):
        logits: Any = model.apply(params, rows[:, :-1])
        return cross_entropy(logits, rows[:, 1:])

    params = model.init(jax.random.key(seed), batches[0, :, :-1])
    return Task(params, (), loss, batches)


class Convolutions(nn.Module):
    """Three layers of convolutions, and a layer of logits."""

    @nn.compact
    def __call__(self, x):
        """Maps ``[batch, 8, 8, 1]`` to logits."""
        for strides in (1, 2, 2):
            x = nn.relu(nn.Conv(32, (3, 3), strides)(x))
        return nn.Dense(10)(x.reshape(len(x), -1))


def cnn(seed: int, updates: int) -> Task:
    """Returns a network of convolutions that reads digits, 32 an update."""
    model = Convolutions()
    images, labels = load_digits(return_X_y=True)
    chosen = np.random.default_rng(seed).integers(len(images), size=(updates, 32))
    images = images.reshape(-1, 8, 8, 1)[chosen].astype(np.float32) / 16
    batches = images, labels[chosen].astype(np.int32)

    def loss(params, _, batch):
        return cross_entropy(model.apply(params, batch[0]), batch[1])

    params = model.init(jax.random.key(seed), images[0])
    return Task(params, (), loss, batches)


def cross_entropy(logits: Any, labels: Any) -> jax.Array:
    """Returns the mean loss in nats."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def spread(values: list[float]) -> str:
    """Spells a mean and a standard deviation, of runs that do not diverge."""
    if not all(value < 100 for value in values):
        return "diverges"
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"
