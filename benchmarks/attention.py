"""What attention by cuDNN's kernel saves in a training step.

Transformers under autocast with their attention written out and with
:func:`jaxmp.dot_product_attention`, compiled for an H200 (extra ``aot``; nothing runs):
the bytes that a training step moves, its temporary memory, and its kernels.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import tyro

from .counting import h200, results
from .counting.steps import contestant
from .counting.tables import show
from .machinery import count
from .networks.basic import NETWORKS, Network
from .networks.families import FAMILIES
from .networks.fused import ATTENTION, FUSED, fused

WRITTEN = {name: x for name, x in (NETWORKS | FAMILIES).items() if name in ATTENTION}
# The most of the bytes and of the temporary memory that may be left.
LIMITS = {
    "gpt-160m": (0.58, 0.72),
    "gpt, scanned": (0.64, 0.75),
    "llama": (0.70, 0.78),
    "llama, grouped queries": (0.70, 0.78),
    "vit": (0.72, 0.80),
    "bert, no attention dropout": (0.83, 0.92),
}


@dataclasses.dataclass
class Options:
    """What to compile, and where to save what is found."""

    networks: tuple[str, ...] = tuple(LIMITS)
    dtypes: tuple[str, ...] = ("bfloat16",)
    output: pathlib.Path | None = None


def main(arguments: list[str]) -> None:
    """Prints a table for each dtype, and saves it."""
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks attention")
    h200.require("attention")
    path = options.output or results.target("attention")
    for dtype in options.dtypes:
        rows = list(compared({name: WRITTEN[name] for name in options.networks}, dtype))
        show(dtype, table(rows))
        results.save(path, dtype, h200.HARDWARE, ["attention", *arguments], rows)


def compared(networks: dict[str, Network], dtype: str) -> Iterator[dict[str, Any]]:
    """Yields what was counted in each network, written out and fused."""
    others = fused(networks)
    for name, network in networks.items():
        for form, one in (("written", network), ("fused", others[f"{name}{FUSED}"])):
            found = count(contestant("jaxmp autocast", one, dtype=dtype), one)
            kept = {key: found[key] for key in ("bytes", "temp", "kernels")}
            yield {"network": name, "form": form} | kept


def shares(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Returns which share of bytes and of temporary memory is left, by network."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["network"], {})[row["form"]] = row
    return {
        name: tuple(x["fused"][key] / x["written"][key] for key in ("bytes", "temp"))
        for name, x in found.items()
    }


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows with what is left of the written form."""
    left = shares(rows)
    return [
        {
            "network": row["network"],
            "attention": row["form"],
            "GB": f"{row['bytes'] / 1e9:.2f}",
            "temporary MiB": f"{row['temp'] / 2**20:.0f}",
            "kernels": row["kernels"],
            "bytes": f"{left[row['network']][0]:.2f}" * (row["form"] == "fused"),
            "memory": f"{left[row['network']][1]:.2f}" * (row["form"] == "fused"),
        }
        for row in rows
    ]
