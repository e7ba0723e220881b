"""Trains a small NNX network, with BatchNorm and Dropout, in the precision of a string.

    python examples/digits_nnx.py --policy mixed_bfloat16

What differs from Linen: gradients and autocast come from `jaxmp.nnx`, which hands the
running statistics and the random streams back to the model, float32 as they were.
"""

import dataclasses
from functools import partial

import optax
import tyro
from _data import load_digits
from flax import nnx
from rich.console import Console

import jaxmp
import jaxmp.nnx


@dataclasses.dataclass
class Config:
    """Trains a small NNX network in the precision that `--policy` names."""

    policy: str = "mixed_float16"
    """float32, mixed_bfloat16, mixed_float16, or spelt out: p=f32,c=f16,o=f32."""
    epochs: int = 20
    batch_size: int = 100
    learning_rate: float = 3e-3
    seed: int = 0


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 16, (3, 3), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.relu(self.norm2(self.conv2(x)))
        return self.head(self.dropout(x.reshape(len(x), -1)))


def make_train_step(policy: jaxmp.Policy):
    def loss_fn(model, images, labels):
        logits = model(images)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return loss.mean()

    @nnx.jit
    @partial(jaxmp.nnx.autocast, policy=policy)
    def train_step(model, optimizer, images, labels):
        grad_fn = jaxmp.nnx.value_and_grad(loss_fn, loss_scale=optimizer)
        loss, grads = grad_fn(model, images, labels)
        optimizer.update(
            model, grads
        )  # a skipped step leaves the statistics alone, too
        return loss

    return train_step


def main(config: Config, console: Console | None = None) -> tuple[float, nnx.Optimizer]:
    console = console or Console()
    policy = jaxmp.get_policy(config.policy)
    data = load_digits()
    steps_per_epoch = len(data.train_images) // config.batch_size
    steps = config.epochs * steps_per_epoch

    model = Net(nnx.Rngs(config.seed))
    schedule = optax.cosine_decay_schedule(config.learning_rate, steps)
    tx = jaxmp.loss_scaling(optax.adamw(schedule), policy, growth_interval=50)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    train_step = make_train_step(policy)
    for step in range(steps):
        images, labels = data.train_batch(config.seed, step, config.batch_size)
        loss = train_step(model, optimizer, images, labels)
        if (step + 1) % steps_per_epoch == 0:
            logged = jaxmp.scalars(optimizer, prefix="")
            console.print(
                f"epoch {(step + 1) // steps_per_epoch:2}/{config.epochs}  "
                f"loss {loss:.3f}  loss scale {logged['loss_scale']:,.0f}  "
                f"skipped {logged['skipped']}",
                highlight=False,
            )
            jaxmp.check_loss_scale(optimizer.opt_state, loss=loss)

    model.eval()
    images = data.normalize(data.test_images)
    predict = nnx.jit(jaxmp.nnx.autocast(lambda model, x: model(x), policy))
    logits = predict(model, images)
    accuracy = float((logits.argmax(-1) == data.test_labels).mean())
    console.print(f"{config.policy}: test accuracy {accuracy:.1%}", highlight=False)
    return accuracy, optimizer


if __name__ == "__main__":
    main(tyro.cli(Config))
