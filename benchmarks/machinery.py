"""What each library adds to a training step, in code compiled for an H200.

Needs no GPU: it compiles (extra ``aot``) and counts in the compiled program. Bytes and
kernels are those beyond hand-written 16-bit training, which neither scales nor checks.
"""

import dataclasses
import pathlib
from typing import Any, Literal

import jax
import tyro

from .counting import h200, hlo, results
from .counting.compiled import peak
from .counting.steps import CONTESTANTS, FLOOR, Contestant, contestants
from .counting.tables import show
from .networks.basic import NETWORKS, Network


@dataclasses.dataclass
class Options:
    """What to compile, and where to save the counts."""

    networks: tuple[str, ...] = tuple(NETWORKS)
    contestants: tuple[str, ...] = tuple(CONTESTANTS)
    accum_steps: tuple[int, ...] = (1, 4)
    dtype: Literal["float16", "bfloat16"] = "float16"
    output: pathlib.Path | None = None


def main(arguments: list[str]) -> None:
    """Prints a table for each network and number of micro-batches, and saves them."""
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks machinery")
    h200.require("machinery")
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
                )
            ]
            if found:
                show(*table(found))
            rows += found
        key = name if options.dtype == "float16" else f"{name} {options.dtype}"
        command = ["machinery", *arguments]
        results.save(
            options.output or results.target("machinery"),
            key,
            h200.HARDWARE,
            command,
            rows,
        )


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
    compiled = h200.compiled(contestant.step, state, network.shapes(), donated=1)
    work = hlo.work(compiled.as_text())
    memory = compiled.memory_analysis()
    sizes = {x.size for x in params}
    return {
        "parameters": sum(x.size for x in params),
        "bytes": work.bytes,
        "kernels": work.kernels,
        "seconds": work.seconds,
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


def table(rows: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """Returns contestants on one network, measured from the floor, with a title."""
    floor = next((r for r in rows if r["contestant"] == FLOOR), rows[0])
    n = floor["parameters"]
    title = (
        f"{floor['network']}, {n / 1e6:.1f}M parameters, {floor['dtype']}, "
        f"{floor['accum_steps']} micro-batches; {floor['contestant']}: "
        f"{floor['bytes'] / n:.1f}N bytes, {floor['kernels']} kernels"
    )

    def more(row, what):
        return row[what] - floor[what]

    def of_floor(row, what):
        return f"{row[what] / 2**20:.0f} ({row[what] / floor[what]:.3f})"

    return title, [
        {
            "contestant": row["contestant"],
            "bytes": f"{more(row, 'bytes') / n:+.2f}N",
            "kernels": f"{more(row, 'kernels'):+d}",
            "copies of a parameter": f"{more(row, 'parameter_copies'):+d}",
            "temp MiB (of floor)": of_floor(row, "temp"),
            "peak MiB (of floor)": of_floor(row, "peak"),
            "donated": f"{row['aliased'] / row['state']:.0%}",
            "products": "\n".join(f"{n} {kind}" for kind, n in row["products"].items()),
        }
        for row in rows
    ]
