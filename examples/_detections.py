"""What `detector.py` shows of its runs: a table and a picture."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

import jaxmp
import jaxmp.plots

# Lines that overlap, and that black and white tells apart.
LINES: dict[str, dict[str, Any]] = {
    "float32": {"color": "0.75", "linewidth": 5},
    "float16 unscaled": {"color": "#c03020"},
    "float16 static 8": {"color": "#4878a8", "linestyle": "-.", "linewidth": 2},
    "float16 dynamic": {"color": "black", "linestyle": "--"},
    "bfloat16": {"color": "black", "linestyle": ":", "linewidth": 2.5},
}


class Result(NamedTuple):
    f1: float  # on the test canvases
    losses: np.ndarray  # float32[steps]
    loss_scale: float
    skipped: int
    params: Any


def results_table(results: dict[str, list[Result]]) -> Table:
    table = Table(title="Digits found on the test canvases")
    table.add_column("Setting")
    for name in ("F1", "± over seeds", "Loss at the end", "Scale", "Skipped"):
        table.add_column(name, justify="right")
    for setting, runs in results.items():
        f1 = [run.f1 for run in runs]
        table.add_row(
            setting,
            f"{np.mean(f1):.2f}",
            f"{np.std(f1, ddof=1):.2f}" if len(f1) > 1 else "",
            f"{np.mean([run.losses[-20:].mean() for run in runs]):.3f}",
            f"{runs[-1].loss_scale:.0f}",
            f"{np.mean([run.skipped for run in runs]):.0f}",
        )
    return table


def draw(results: dict[str, list[Result]], grads: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(5.5 * (len(grads) + 1), 4), layout="constrained")
    *ranges, right = figure.subplots(1, len(grads) + 1)
    for axes, (name, tree) in zip(ranges, grads.items(), strict=True):
        jaxmp.plots.exponents(tree, "float16", loss_scale=8.0, ax=axes)
        axes.set_title(f"{name}: gradients of the activations, and 8 times them")
    for setting, runs in results.items():
        losses = np.mean([run.losses for run in runs], 0)
        window = max(1, len(losses) // 40)
        smooth = np.convolve(losses, np.ones(window) / window, "valid")
        right.plot(smooth, label=setting, **LINES[setting])
    right.set(title="Training", xlabel="update", ylabel="loss, running mean")
    right.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, frameon=False
    )
    figure.savefig(path, dpi=90)
