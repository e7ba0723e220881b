"""Small models that train with their optimizers' states in 32, 16 and 8 bits.

A language model on characters and a network of convolutions on digits, each with AdamW,
SGD with momentum, Lion, Adafactor and Muon. What is compared is the loss, three seeds
in one program. The weights are of a size at which moments are stored in 8 bits.
"""

import dataclasses
import pathlib
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from sklearn.datasets import load_digits

import jaxmp
from jaxmp._base.blocks import is_blocks

from .counting import results
from .counting.tables import show
from .networks.basic import GPT

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
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


MODELS = {"language model": language_model, "cnn": cnn}
OPTIMIZERS = {
    "adamw": partial(optax.adamw, 2e-3),
    "sgd": partial(optax.sgd, 0.1, momentum=0.9),
    "lion": partial(optax.lion, 3e-4),
    "adafactor": partial(optax.adafactor, 1e-2, momentum=0.9),
    "muon": partial(optax.contrib.muon, 2e-3),
}


def linear(inner: Any) -> optax.GradientTransformation:
    """Stores moments in 8 bits without what keeps them right: the usual first idea.

    The codes are in proportion to the numbers, and are rounded to the nearest.
    """

    def stored(new, blocks):
        def round_it(x, like):
            if not is_blocks(like):
                return x
            width = x.shape[-1] // like.units.shape[-1]
            rows = x.reshape(*like.units.shape, width)
            unit = jnp.abs(rows).max(-1, keepdims=True) / 127
            unit = jnp.where(unit > 0, unit, 1)
            return (jnp.round(rows / unit) * unit).reshape(x.shape)

        return jax.tree.map(round_it, new, blocks)

    in_8_bits = jaxmp.with_state_dtype(inner, "int8")

    def update(updates, state, params=None):
        blocks = jax.eval_shape(in_8_bits.init, params).inner_state
        updates, new = inner.update(updates, state, params)
        return updates, stored(new, blocks)

    return optax.GradientTransformation(inner.init, update)


class Storage(NamedTuple):
    """How parameters and the state of an optimizer are stored."""

    wrap: Callable[[Any], Any]
    params: Any = jnp.float32


STORAGES = {
    "float32": Storage(lambda tx: tx),
    "int8": Storage(partial(jaxmp.with_state_dtype, state_dtype="int8")),
    "int8, at random": Storage(
        partial(jaxmp.stochastic_rounding, state_dtype="int8"), jnp.bfloat16
    ),
    "linear int8": Storage(linear),
}


@dataclasses.dataclass
class Options:
    """What to train, and where to save the losses."""

    models: tuple[str, ...] = tuple(MODELS)
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    storages: tuple[str, ...] = tuple(STORAGES)
    seeds: int = 3
    updates: int = 200
    output: pathlib.Path | None = None


def main(arguments: list[str]) -> None:
    """Prints a table for each model, and saves it."""
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks moments")
    path = options.output or results.target("moments")
    for name in options.models:
        rows = list(losses(name, options))
        show(name, rows)
        results.save(path, name, results.hardware(), ["moments", *arguments], rows)


def losses(name: str, options: Options):
    """Yields the losses of a model, a row for each optimizer."""
    tasks = [MODELS[name](seed, options.updates) for seed in range(options.seeds)]
    for optimizer in options.optimizers:
        row = {"optimizer": optimizer}
        for storage in options.storages:
            found = train(tasks, OPTIMIZERS[optimizer](), STORAGES[storage])
            row[storage] = spread(found)
            print(name, optimizer, storage, row[storage], flush=True)
        yield row


def spread(values: list[float]) -> str:
    """Spells a mean and a standard deviation, of runs that do not diverge."""
    if not all(value < 100 for value in values):
        return "diverges"
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


def train(tasks: list[Task], tx: Any, storage: Storage) -> list[float]:
    """Returns the mean loss of the last updates of each seed."""
    tx, loss_fn = optax.with_extra_args_support(storage.wrap(tx)), tasks[0].loss

    def run(params, fixed, batches):
        def step(carry, batch):
            params, state = carry
            # Products in float32: what is compared is the optimizer.
            wide = jaxmp.cast_tree(params, jnp.float32)
            loss, grads = jax.value_and_grad(loss_fn)(wide, fixed, batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        params = jaxmp.cast_tree(params, storage.params)
        return jax.lax.scan(step, (params, tx.init(params)), batches)[1]

    args = [(task.params, task.fixed, task.batches) for task in tasks]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *args)
    found = jax.jit(jax.vmap(run))(*stacked)
    return found[:, -LAST:].mean(1).tolist()
