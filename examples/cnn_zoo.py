"""Trains four kinds of CNN in float32, bfloat16 and float16: the same accuracies.

    python examples/cnn_zoo.py
    python examples/cnn_zoo.py --full
    python examples/cnn_zoo.py --data cifar10 --data-dir D

The form is that of the paper's table of ILSVRC networks: a row for each network, a
column for each precision, the same hyperparameters in a row. Plain and VGG-like
networks have no normalisation, as AlexNet and VGG had none; Inception-like and residual
ones come with BatchNorm and with GroupNorm. The numbers are the mean over seeds, which
draw weights and batches anew, and the standard deviation, without which a difference
of some tenths of a percent says nothing.

References:
    Micikevicius et al., "Mixed Precision Training", ICLR 2018, table 1,
    https://arxiv.org/abs/1710.03740.
"""

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
import tyro
from _data import Dataset, load_cifar10, load_digits
from _networks import NETWORKS, initializer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxmp


@dataclasses.dataclass
class Config:
    """Compares precisions on small CNNs, as mean and deviation over seeds."""

    policy: tuple[str, ...] = ("float32", "mixed_bfloat16", "mixed_float16")
    """Policies to compare."""
    network: tuple[str, ...] = ()
    """Which networks to train, by the names in the table; all if none is given."""
    seeds: int | None = None
    """Runs of each cell: 2, or with `--full` 5."""
    epochs: int | None = None
    """Passes through the data: 8, or with `--full` 30."""
    full: bool = False
    batch_size: int = 100
    learning_rate: float = 3e-3
    data: Literal["digits", "cifar10"] = "digits"
    data_dir: Path = Path("data")
    """The folder that holds `cifar-10-batches-py`."""
    figure: Path | None = None
    """Where to save the picture."""


class Cell(NamedTuple):
    accuracies: list[float]  # on the test data, one for each seed
    skipped: int  # steps, over all seeds


def train(
    network: str, policy: str, config: Config, data: Dataset, console: Console
) -> Cell:
    model = NETWORKS[network]
    apply: Any = jaxmp.with_policy(model.apply, policy)
    seeds, epochs = config.seeds or 2, config.epochs or 8
    steps_per_epoch = len(data.train_images) // config.batch_size
    steps = epochs * steps_per_epoch
    schedule = optax.cosine_decay_schedule(config.learning_rate, steps)
    tx = jaxmp.loss_scaling(optax.adamw(schedule), policy)

    def loss_fn(params, batch_stats, images, labels):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, new = apply(variables, images, train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, new.get("batch_stats", {})

    # Without the option XLA's CPU keeps some 16-bit results in float32.
    @partial(
        jax.jit,
        donate_argnums=(0, 1, 2),
        compiler_options={"xla_allow_excess_precision": False},
    )
    def train_step(params, batch_stats, opt_state, images, labels):
        grad_fn = jaxmp.value_and_grad(loss_fn, loss_scale=opt_state, has_aux=True)
        (_, new_stats), grads = grad_fn(params, batch_stats, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        # The optimizer skips a step that overflows; the running statistics must, too.
        batch_stats = jaxmp.keep_if_skipped(opt_state, new_stats, batch_stats)
        return optax.apply_updates(params, updates), batch_stats, opt_state

    @jax.jit
    def count_correct(variables, images, labels):
        return (apply(variables, images, train=False).argmax(-1) == labels).sum()

    accuracies, skipped = [], 0
    for seed in range(seeds):
        key = jax.random.key(seed, impl="rbg")  # which compiles faster
        variables = initializer(network)(key, data.normalize(data.train_images[:1]))
        params, batch_stats = variables["params"], variables.get("batch_stats", {})
        opt_state = tx.init(params)
        name = f"{network}, {policy}, seed {seed}"
        hidden = not console.is_terminal
        for step in track(range(steps), name, console=console, disable=hidden):
            images, labels = data.train_batch(seed, step, config.batch_size)
            params, batch_stats, opt_state = train_step(
                params, batch_stats, opt_state, images, labels
            )
        jaxmp.check_loss_scale(opt_state)
        variables = {"params": params, "batch_stats": batch_stats}
        correct = [int(count_correct(variables, *b)) for b in data.test_batches(1000)]
        accuracies.append(sum(correct) / len(data.test_labels))
        skipped += int(jaxmp.scalars(opt_state, prefix="")["skipped"])
    shown = ", ".join(f"{accuracy:.1%}" for accuracy in accuracies)
    console.print(f"{network}, {policy}: {shown}", highlight=False)
    return Cell(accuracies, skipped)


def deviation(accuracies: list[float]) -> float:
    """Returns the sample's standard deviation, NaN for a single run."""
    return float(np.std(accuracies, ddof=1)) if len(accuracies) > 1 else float("nan")


def results_table(results: dict[str, dict[str, Cell]]) -> Table:
    table = Table(title="Test accuracy, mean ± standard deviation over seeds")
    table.add_column("Network")
    for policy in next(iter(results.values())):
        table.add_column(policy, justify="right")
    table.add_column("Skipped", justify="right")
    for network, cells in results.items():
        shown = [
            f"{np.mean(cell.accuracies):.1%} ± {deviation(cell.accuracies):.1%}"
            for cell in cells.values()
        ]
        skipped = sum(cell.skipped for cell in cells.values())
        table.add_row(network, *shown, str(skipped))
    return table


def draw(results: dict[str, dict[str, Cell]], path: Path) -> None:
    """Draws a small mark for each run, and a large one for a mean and its deviation."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    ax = figure.subplots()
    policies = list(next(iter(results.values())))
    for i, (policy, marker) in enumerate(zip(policies, "osD^v", strict=False)):
        y = np.arange(len(results)) + 0.22 * (i - (len(policies) - 1) / 2)
        runs = [cells[policy].accuracies for cells in results.values()]
        means, errors = np.mean(runs, 1), np.nan_to_num([deviation(r) for r in runs])
        shade = str(0.65 * i / max(1, len(policies) - 1))
        for accuracies, at in zip(runs, y, strict=True):
            ax.plot(accuracies, [at] * len(accuracies), "|", color=shade, markersize=7)
        ax.errorbar(
            means, y, xerr=errors, fmt=marker, color=shade, capsize=3, label=policy
        )
    ax.set_yticks(range(len(results)), list(results))
    ax.invert_yaxis()
    ax.set_xlabel("test accuracy; each run, their mean and standard deviation")
    ax.xaxis.set_major_formatter("{x:.1%}")
    ax.legend(loc="lower left", frameon=False)
    figure.savefig(path, dpi=90)


def main(config: Config, console: Console | None = None) -> dict[str, dict[str, Cell]]:
    console = console or Console()
    config = dataclasses.replace(
        config,
        seeds=config.seeds or (5 if config.full else 2),
        epochs=config.epochs or (30 if config.full else 8),
        network=config.network or tuple(NETWORKS),
    )
    try:
        for policy in config.policy:
            jaxmp.get_policy(policy)
        is_digits = config.data == "digits"
        data = load_digits() if is_digits else load_cifar10(config.data_dir)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    if unknown := sorted(set(config.network) - set(NETWORKS)):
        sys.exit(f"No network {unknown[0]!r}. Expected: {'; '.join(NETWORKS)}.")
    results = {
        network: {
            policy: train(network, policy, config, data, console)
            for policy in config.policy
        }
        for network in config.network
    }
    console.print(results_table(results))
    if config.figure:
        draw(results, config.figure)
    return results


if __name__ == "__main__":
    main(tyro.cli(Config))
