"""What a training run came to: one line for each epoch, and a table at the end."""

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from tensorboardX import SummaryWriter

import jaxmp


class Result(NamedTuple):
    """The result of one training run."""

    policy: str
    state: Any
    accuracy: float  # on the test data
    best: float  # of all epochs
    seconds: float  # per epoch
    peak_bytes: int  # that a step needs on a device
    stored_bytes: int  # of the parameters
    compute_bytes: int  # of their copy in compute dtype
    residual_bytes: int  # of what a batch leaves for the backward pass


def progress_bar(console: Console) -> Progress:
    """Returns a bar for each run; without a terminal, a line for each epoch will do."""
    name, epoch, shown = map(
        TextColumn,
        ["{task.description}", "{task.fields[epoch]}", "{task.fields[shown]}"],
    )
    columns = name, BarColumn(None), epoch, shown
    hidden = not console.is_terminal
    return Progress(*columns, console=console, expand=True, disable=hidden)


def nbytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def residual_bytes(loss: Callable[[Any], Any], params: Any) -> int:
    """Counts what the forward pass leaves for the backward pass, by JAX's account.

    Activations, that is, and the copies of the weights in compute dtype. XLA keeps less
    where it can compute again, such as the float32 copies in which BatchNorm takes its
    mean and variance.
    """
    report = jaxmp.audit(jax.grad(lambda params: loss(params)[0]))(params)
    return sum((report.residual_bytes or {}).values())


def peak_bytes(step: jax.stages.Compiled) -> int:
    memory: Any = step.memory_analysis()
    donated = memory.alias_size_in_bytes  # counted as an argument and as a result
    results = memory.output_size_in_bytes - donated
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + results


def describe(metrics: list[dict[str, Any]]) -> str:
    loss = statistics.mean(float(m["loss"]) for m in metrics)
    accuracy = statistics.mean(float(m["accuracy"]) for m in metrics)
    scale = metrics[-1]["mixed_precision/loss_scale"]
    skipped = metrics[-1]["mixed_precision/skipped"]
    return f"loss {loss:.3f} acc {accuracy:6.1%} scale {power(scale)} skipped {skipped}"


def log(writer: SummaryWriter | None, step: int, metrics: list[dict]) -> None:
    """Writes what some steps returned, of which ``step`` is the last."""
    if writer is None:
        return
    for i, scalars in enumerate(jax.device_get(metrics), step + 1 - len(metrics)):
        for name, value in scalars.items():
            writer.add_scalar(name, value, i)


def power(scale: Any) -> str:
    return f"2^{math.log2(scale):<2.0f}"


def size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.0f} kB"


def results_table(results: list[Result], epochs: int) -> Table:
    timed = "Time per epoch" if epochs > 1 else "Time with compilation"
    rows = {
        "Test accuracy": [f"{r.accuracy:.1%}" for r in results],
        "  of the best epoch": [f"{r.best:.1%}" for r in results],
        timed: [f"{r.seconds:.2f} s" for r in results],
        "Parameters, as stored": [size(r.stored_bytes) for r in results],
        "  in compute dtype": [size(r.compute_bytes) for r in results],
        "Residuals of a batch": [size(r.residual_bytes) for r in results],
        "Peak memory of a step": [size(r.peak_bytes) for r in results],
    }
    logged = [
        jaxmp.scalars(r.state.opt_state, r.state.step, prefix="") for r in results
    ]
    rows["Loss scale at the end"] = [power(x["loss_scale"]) for x in logged]
    rows["Skipped steps"] = [
        f"{x['skipped']} ({x['skipped_share']:.0%})" for x in logged
    ]
    table = Table("", *(r.policy for r in results), title="Results")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def write_markdown(table: Table, path: Path) -> None:
    names = [str(column.header) for column in table.columns]
    columns = [map(str, column.cells) for column in table.columns]
    rows = [names, ["---"] * len(names), *zip(*columns, strict=True)]
    path.write_text("".join(f"| {' | '.join(row)} |\n" for row in rows))
