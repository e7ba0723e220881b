"""Trains a small ResNet in the precision that one string names.

    python examples/digits.py --policy mixed_bfloat16
    python examples/digits.py --compare --mode cast

The data are scikit-learn's scanned digits, so nothing is downloaded. Where CIFAR-10
lies in `data`, or in the folder that `--data-dir` names, this trains a ResNet-50 on it:

    python examples/digits.py --model resnet50 --optimizer sgd --data cifar10 \
        --compare --checkpoint-dir runs --table results.md
"""

import dataclasses
import math
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import tyro
from _checkpoints import open_checkpoints, restore
from _data import Dataset, load_cifar10, load_digits
from _devices import make_cpu_devices, make_mesh
from _resnet import ResNet, ResNet50, State
from _results import (
    Result,
    describe,
    log,
    nbytes,
    peak_bytes,
    progress_bar,
    residual_bytes,
    results_table,
    write_markdown,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import Progress
from tensorboardX import SummaryWriter

import jaxmp

COMPARED = ("float32", "mixed_bfloat16", "mixed_float16")


@dataclasses.dataclass
class Config:
    """Trains a ResNet in the precision that `--policy` names."""

    policy: str = "mixed_float16"
    """float32, mixed_bfloat16, mixed_float16, or spelt out: p=f32,c=f16,o=f32."""
    mode: Literal["autocast", "cast"] = "autocast"
    """Autocast the training step as it stands, or cast the whole model."""
    model: Literal["small", "resnet50"] = "small"
    """Small is a ResNet-8, and a ResNet-20 for CIFAR-10."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """SGD has a momentum of 0.9 and a weight decay of 5e-4."""
    epochs: int = 20
    batch_size: int = 0
    """100 if it is not given, and 128 for CIFAR-10."""
    learning_rate: float = 0.0
    """3e-3 if it is not given, and 0.1 for SGD. It falls to 0 as a cosine."""
    accum_steps: int = 1
    """Micro-batches that a batch is split into."""
    devices: int = 1
    """Devices over which each batch is split. The CPU stands in for missing ones."""
    seed: int = 0
    checkpoint_dir: Path | None = None
    """Holds the last two checkpoints, and that of the epoch with the best accuracy."""
    checkpoint_every: int = 100
    """Steps between two checkpoints; each epoch ends with one, too."""
    resume: bool = False
    """Continue from the newest checkpoint, also with another policy."""
    data: Literal["digits", "cifar10"] = "digits"
    data_dir: Path = Path("data")
    """The folder that holds `cifar-10-batches-py`."""
    log_dir: Path | None = None
    """Where to write logs for TensorBoard, one folder for each policy."""
    compare: bool = False
    """Train in float32, bfloat16 and float16, and print one table."""
    table: Path | None = None
    """Where to write the table, in Markdown."""

    def __post_init__(self):
        is_sgd, is_cifar10 = self.optimizer == "sgd", self.data == "cifar10"
        self.learning_rate = self.learning_rate or (0.1 if is_sgd else 3e-3)
        self.batch_size = self.batch_size or (128 if is_cifar10 else 100)


# One compilation instead of fifty, and one for all precisions.
@partial(jax.jit, static_argnames="model")
def init(model, key, images):
    return model.init(key, images, train=False)


def create_state(config: Config, data: Dataset, steps: int) -> State:
    small = ResNet(blocks=3 if config.data == "cifar10" else 1)
    model = ResNet50() if config.model == "resnet50" else small
    key = jax.random.key(config.seed, impl="rbg")  # compiles faster than the default
    variables = init(model, key, data.normalize(data.train_images[:1]))
    policy = jaxmp.get_policy(config.policy)
    schedule = optax.cosine_decay_schedule(config.learning_rate, steps)
    optimizer = optax.adamw(schedule)
    if config.optimizer == "sgd":
        decay = optax.add_decayed_weights(5e-4)  # to the gradient, as PyTorch does
        optimizer = optax.chain(decay, optax.sgd(schedule, momentum=0.9))
    # The optimizer and its schedule stand inside, so that a skipped step skips them.
    # Under float16 the scale doubles after 50 good steps, because a short run hardly
    # has the usual 2000. Under bfloat16 and float32 it is 1.
    tx = jaxmp.loss_scaling(optimizer, policy, growth_interval=50)
    casts = config.mode == "cast"
    state = State.create(
        apply_fn=jaxmp.with_policy(model.apply, policy) if casts else model.apply,
        autocast=None if casts else policy,
        params=policy.cast_to_param(variables["params"]),
        batch_stats=variables["batch_stats"],
        tx=tx,
    )
    return state.replace(step=jnp.zeros([], jnp.int32))  # create() gives a Python int


def loss_fn(params, state, images, labels):
    variables = {"params": params, "batch_stats": state.batch_stats}
    logits, updates = state.apply_fn(
        variables, images, train=True, mutable=["batch_stats"]
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    accuracy = (logits.argmax(-1) == labels).mean()
    return loss, (updates["batch_stats"], accuracy)


@partial(jax.jit, static_argnames="accum_steps", donate_argnames="state")
def train_step(state, images, labels, accum_steps):
    grad_fn = jaxmp.value_and_grad(
        loss_fn,
        loss_scale=state,
        has_aux=True,
        accum_steps=accum_steps,
        batch_argnums=(2, 3),
    )
    if state.autocast:
        grad_fn = jaxmp.autocast(grad_fn, state.autocast)
    (loss, (batch_stats, accuracy)), grads = grad_fn(
        state.params, state, images, labels
    )
    if accum_steps > 1:  # the running statistics of the last micro-batch
        batch_stats = jax.tree.map(lambda x: x[-1], batch_stats)
    new_state = state.apply_gradients(grads=grads)
    # What the optimizer cannot skip by itself: an overflow made these Inf or NaN.
    batch_stats = jaxmp.keep_if_skipped(new_state, batch_stats, state.batch_stats)
    metrics = {
        "loss": loss,
        "accuracy": accuracy.mean(),
        **jaxmp.scalars(new_state.opt_state, new_state.step),
    }
    return new_state.replace(batch_stats=batch_stats), metrics


@jax.jit
def count_correct(state, images, labels):
    apply_fn = state.apply_fn
    if state.autocast:
        apply_fn = jaxmp.autocast(apply_fn, state.autocast)
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return (apply_fn(variables, images, train=False).argmax(-1) == labels).sum()


def evaluate(state: State, data: Dataset) -> float:
    correct = [count_correct(state, *batch) for batch in data.test_batches(1000)]
    return sum(map(int, correct)) / len(data.test_labels)


def train(config: Config, data: Dataset, progress: Progress) -> Result:
    steps_per_epoch = len(data.train_images) // config.batch_size
    steps = config.epochs * steps_per_epoch
    # The state on each device, and of each batch a part. `train_step` is the same: what
    # has to be summed over the devices is found by `jit`, BatchNorm's means included.
    mesh = make_mesh(config.devices)
    everywhere, by_row = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    state = jax.device_put(create_state(config, data, steps), everywhere)
    checkpoints = open_checkpoints(config.checkpoint_dir, resume=config.resume)
    if checkpoints and config.resume:
        state, where = restore(checkpoints, state)
        progress.console.print(f"{config.policy} goes on from {where}")

    writer = config.log_dir and SummaryWriter(str(config.log_dir / config.policy))
    bar = progress.add_task(config.policy, total=steps, epoch="", shown="")
    seconds, accuracies = [], []
    metrics, shown, start = [], "", time.perf_counter()
    for step in range(int(state.step), steps):
        batch = data.train_batch(config.seed, step, config.batch_size)
        batch = jax.device_put(batch, by_row)
        state, step_metrics = train_step(state, *batch, config.accum_steps)
        metrics.append(step_metrics)
        epoch, i = divmod(step, steps_per_epoch)
        epoch_ends = i == steps_per_epoch - 1
        if epoch_ends or i % 5 == 0:  # not each time: reading waits for the device
            shown = describe(jax.device_get(metrics))
            epoch = f"{epoch + 1:{len(str(config.epochs))}}/{config.epochs}"
            progress.update(bar, completed=step + 1, epoch=epoch, shown=shown)
        if epoch_ends:
            seconds.append(time.perf_counter() - start)
            jaxmp.check_loss_scale(state.opt_state, loss=step_metrics["loss"])
            accuracies.append(evaluate(state, data))
            if not progress.console.is_terminal:
                tested = f"test {accuracies[-1]:.1%}"
                progress.console.print(
                    config.policy, epoch, shown, tested, highlight=False
                )
        if checkpoints and (epoch_ends or (step + 1) % config.checkpoint_every == 0):
            tested = {"accuracy": accuracies[-1]} if epoch_ends else None
            checkpoints.save(
                step + 1, args=ocp.args.StandardSave(state), metrics=tested
            )
        if epoch_ends:
            log(writer, step + 1, metrics)
            metrics, start = [], time.perf_counter()
    if writer:
        writer.close()
    if checkpoints:
        folder = Path(str(checkpoints.directory), str(checkpoints.best_step()))
        progress.console.print(f"The best checkpoint is {folder}", soft_wrap=True)
        checkpoints.close()

    accuracies = accuracies or [evaluate(state, data)]  # nothing was left to do
    policy = jaxmp.get_policy(config.policy)
    rows = config.batch_size // config.accum_steps
    micro_batch = data.train_batch(config.seed, step=0, batch_size=rows)
    loss = partial(loss_fn, state=state, images=micro_batch[0], labels=micro_batch[1])
    if state.autocast:
        loss = jaxmp.autocast(loss, state.autocast)
    batch = jax.device_put(data.train_batch(config.seed, 0, config.batch_size), by_row)
    compiled = train_step.lower(state, *batch, config.accum_steps).compile()
    return Result(
        policy=config.policy,
        state=state,
        accuracy=accuracies[-1],
        best=max(accuracies),
        # The first epoch compiles, and so it counts only where there is no other.
        seconds=statistics.median(seconds[1:] or seconds or [math.nan]),
        stored_bytes=nbytes(state.params),
        compute_bytes=nbytes(jax.eval_shape(policy.cast_to_compute, state.params)),
        residual_bytes=residual_bytes(loss, state.params),
        peak_bytes=peak_bytes(compiled),
    )


def main(config: Config, console: Console | None = None) -> list[Result]:
    console = console or Console()
    if config.resume and not config.checkpoint_dir:
        sys.exit("`--resume` needs the `--checkpoint-dir` to go on from.")
    runs = [config]
    if config.compare:
        folder = config.checkpoint_dir
        runs = [
            dataclasses.replace(
                config, policy=policy, checkpoint_dir=folder and folder / policy
            )
            for policy in COMPARED
        ]
    try:
        jaxmp.get_policy(config.policy)
        is_digits = config.data == "digits"
        data = load_digits() if is_digits else load_cifar10(config.data_dir)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    if not 0 < config.batch_size <= len(data.train_images):
        sys.exit(f"`--batch-size` must lie in [1, {len(data.train_images)}].")
    if config.devices < 1 or config.batch_size % config.devices:
        sys.exit(
            "`--batch-size` must be a multiple of `--devices`, but "
            f"{config.batch_size} is not one of {config.devices}."
        )

    with progress_bar(console) as progress:
        results = [train(run, data, progress) for run in runs]
    table = results_table(results, config.epochs)
    console.print(table)
    if config.table:
        write_markdown(table, config.table)
    return results


if __name__ == "__main__":
    config = tyro.cli(Config)
    make_cpu_devices(config.devices)
    main(config)
