"""What each library adds to a training step, in code compiled for an H200.

Needs no GPU: it compiles (extra ``aot``) and counts in the compiled program. Bytes and
kernels are those beyond hand-written 16-bit training, which neither scales nor checks.
"""

import dataclasses
import pathlib
from typing import Any, Literal

import jax
import tyro
from rich.console import Console
from rich.table import Table

from . import h200, hlo, results
from .compiled import peak
from .networks import NETWORKS, Network
from .steps import CONTESTANTS, FLOOR, Contestant, contestants

HARDWARE = f"{h200.DEVICE}, compiled for and not run"


@dataclasses.dataclass
class Options:
    """What to compile, and where to save the counts."""

    networks: tuple[str, ...] = tuple(NETWORKS)
    contestants: tuple[str, ...] = tuple(CONTESTANTS)
    accum_steps: tuple[int, ...] = (1, 4)
    dtype: Literal["float16", "bfloat16"] = "float16"
    output: pathlib.Path = results.FOLDER / "machinery.json"


def main(arguments: list[str]) -> None:
    """Prints a table for each network and number of micro-batches, and saves them."""
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks machinery")
    jax.config.update("jax_platforms", "cpu")
    if reason := h200.unavailable():
        raise SystemExit(f"machinery cannot compile for a GPU: {reason}")
    console = Console(width=132)
    for name in options.networks:
        rows = []
        for accum_steps in options.accum_steps:
            found = [
                {"network": name, "contestant": contestant.name, "dtype": options.dtype}
                | {"accum_steps": accum_steps}
                | count(contestant, NETWORKS[name])
                for contestant in contestants(
                    NETWORKS[name],
                    options.contestants,
                    dtype=options.dtype,
                    accum_steps=accum_steps,
                    report=lambda line: console.print(line, highlight=False),
                )
            ]
            if found:
                console.print(table(found))
            rows += found
        key = name if options.dtype == "float16" else f"{name} {options.dtype}"
        command = ["machinery", *_arguments(options, name)]
        results.save(options.output, key, HARDWARE, command, rows)


def _arguments(options: Options, network: str) -> list[str]:
    """Returns the command line that does the same for one network."""
    default, words = Options(), ["--networks", network]
    if options.contestants != default.contestants:
        words += ["--contestants", *options.contestants]
    if options.accum_steps != default.accum_steps:
        words += ["--accum-steps", *map(str, options.accum_steps)]
    if options.dtype != default.dtype:
        words += ["--dtype", options.dtype]
    return words


def count(contestant: Contestant, network: Network) -> dict[str, Any]:
    """Compiles a training step and returns what was counted in it.

    Args:
        contestant: The step.
        network: Whose batches it takes.

    Returns:
        Plain numbers and dicts of them, in bytes where nothing else is said.
    """
    state = jax.eval_shape(contestant.init)
    params = jax.tree.leaves(state.params)
    compiled = h200.compiled(contestant.step, state, network.shapes())
    work = hlo.work(compiled.as_text())
    memory = compiled.memory_analysis()
    sizes = {x.size for x in params}
    return {
        "parameters": sum(x.size for x in params),
        "bytes": work.bytes,
        "kernels": work.kernels,
        "parameter_copies": sum(
            n
            for shape, n in work.copies.items()
            if any(size in sizes - {1} for _, size in hlo.arrays(shape))
        ),
        "temp": memory.temp_size_in_bytes,
        "workspace": work.workspace,
        "peak": peak(compiled),
        "state": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)),
        "aliased": memory.alias_size_in_bytes,
        "products": dict(sorted(work.products.items())),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """Returns a table of contestants on one network, measured from the floor."""
    floor = next((r for r in rows if r["contestant"] == FLOOR), rows[0])
    n = floor["parameters"]
    title = (
        f"{floor['network']}, {n / 1e6:.1f}M parameters, {floor['dtype']}, "
        f"{floor['accum_steps']} micro-batches; {floor['contestant']}: "
        f"{floor['bytes'] / n:.1f}N bytes, {floor['kernels']} kernels"
    )
    result = Table(title=title)
    for column in COLUMNS:
        result.add_column(column, justify="right" if result.columns else "left")
    for row in rows:
        result.add_row(
            row["contestant"],
            f"{(row['bytes'] - floor['bytes']) / n:+.2f}N",
            f"{row['kernels'] - floor['kernels']:+d}",
            f"{row['parameter_copies'] - floor['parameter_copies']:+d}",
            f"{row['temp'] / 2**20:.0f} ({row['temp'] / floor['temp']:.3f})",
            f"{row['peak'] / 2**20:.0f} ({row['peak'] / floor['peak']:.3f})",
            f"{row['aliased'] / row['state']:.0%}",
            "\n".join(f"{n} {kind}" for kind, n in row["products"].items()),
        )
    return result


COLUMNS = (
    "contestant",
    "bytes",
    "kernels",
    "copies of a parameter",
    "temp MiB (of floor)",
    "peak MiB (of floor)",
    "donated",
    "products",
)
