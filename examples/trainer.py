"""Trains in float16, without a loss scale, in a loop that somebody else owns.

    python examples/trainer.py

`Trainer` stands for a library's: it takes a loss, and computes the gradient itself. It
knows nothing of precision, and has no place for a loss scale. All that goes in is
`jaxmp.autocast(loss_fn, policy)`.

The loss is a sum over a few images, divided by ten million, as on one of many workers
of a large job. Its gradients are below the range of float16, and float16 learns
nothing. With the policy "mixed_float16_bfloat16" the loss is computed in float16 and
its gradient in bfloat16, which has the range of float32.
"""

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import tyro
from _data import load_digits
from rich.console import Console
from rich.table import Table

import jaxmp

COUNT = 10_000_000  # of images in the batch of all workers


class Trainer:
    """A training loop of another library."""

    def __init__(self, optimizer: optax.GradientTransformation):
        self.optimizer = optimizer

    def fit(self, loss_fn: Callable[..., jax.Array], params: Any, data: Iterable):
        """Returns trained parameters, and the loss of each step."""
        opt_state, losses = self.optimizer.init(params), []
        for batch in data:
            params, opt_state, loss = self._step(loss_fn, params, opt_state, batch)
            losses.append(float(loss))
        return params, losses

    @partial(jax.jit, static_argnums=(0, 1))
    def _step(self, loss_fn, params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss


class Net(nn.Module):
    """Two layers, and as many numbers as there are digits."""

    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(128)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.gelu(nn.Dense(128)(x)))


@dataclasses.dataclass
class Config:
    """Trains one network in one loop, under three policies."""

    policy: tuple[str, ...] = ("float32", "mixed_float16", "mixed_float16_bfloat16")
    steps: int = 200
    batch: int = 64
    learning_rate: float = 1e-3


class Result(NamedTuple):
    """What a policy has brought."""

    loss: float  # of the last ten steps, for each image
    accuracy: float  # on digits that were held out


def main(config: Config, console: Console | None = None) -> dict[str, Result]:
    """Prints a table, and returns what is in it."""
    console, digits, model = console or Console(), load_digits(), Net()
    batches = [digits.train_batch(0, i, config.batch) for i in range(config.steps)]
    params = jax.jit(model.init)(jax.random.key(0), batches[0][0])
    # The gradients are small, and this epsilon is smaller.
    trainer = Trainer(optax.adam(config.learning_rate, eps=1e-16))

    def loss_fn(params, batch):
        x, y = batch
        logits: Any = model.apply(params, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return losses.sum() / COUNT

    found = {}
    table = Table("policy", "loss at the end", "accuracy")
    for policy in config.policy:
        trained, losses = trainer.fit(jaxmp.autocast(loss_fn, policy), params, batches)
        last = sum(losses[-10:]) / len(losses[-10:]) * COUNT / config.batch
        x, y = digits.normalize(digits.test_images), digits.test_labels
        predict = jax.jit(jaxmp.autocast(model.apply, policy))
        right = jnp.argmax(predict(trained, x), axis=-1) == y
        found[policy] = Result(last, float(right.mean()))
        table.add_row(policy, f"{last:.3f}", f"{found[policy].accuracy:.1%}")
    console.print(table)
    return found


if __name__ == "__main__":
    main(tyro.cli(Config))
