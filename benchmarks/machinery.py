"""What each library adds to a training step, in code compiled for an H200.

Needs no GPU: it compiles (extra ``aot``) and counts in the compiled program. Bytes and
kernels are those beyond hand-written 16-bit training, which neither scales nor checks.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxmp._compiled.text import arrays

from .counting import hlo, measure, results, targets
from .counting.results import Table, ratio
from .counting.steps import FLOOR, LIBRARIES, Contestant, contestants
from .networks.basic import Network
from .networks.families import TIMED

# What tables call the networks, in their order.
NAMES = {
    "mlp": "MLP, 27M",
    "gpt-12m": "GPT, 12M",
    "gpt-160m": "GPT, 163M",
    "resnet-18": "ResNet-18",
    "resnet-50": "ResNet-50",
}

STEP = """\
## The memory traffic of a training step

The memory traffic of one step, relative to the step by hand.
"""
IN_BFLOAT16 = """\
### What the check for Inf and NaN costs

Steps in bfloat16. *No check* is autocast in one line, which checks and skips nothing.
"""


def main(
    *,
    networks: tuple[str, ...] = tuple(NAMES),
    contestants: tuple[str, ...] = LIBRARIES,
    accum_steps: tuple[int, ...] = (1, 4),
    dtype: str = "float16",
) -> None:
    """Counts the steps of each library.

    Args:
        networks: Which.
        contestants: What casts, scales and skips in them.
        accum_steps: Micro-batches.
        dtype: Of 16 bits.
    """
    targets.require("machinery")
    for name in networks:
        new = counts(TIMED[name], contestants, accum_steps, dtype)
        title = name if dtype == "float16" else f"{name}, {dtype}"
        by = "contestant", "accum_steps"
        results.update("machinery", title, targets.hardware(), new, *by)


def counts(
    network: Network, names: tuple[str, ...], accum_steps: tuple[int, ...], dtype: str
) -> Iterator[dict[str, Any]]:
    """Yields what was counted in the steps of a network."""
    for n in accum_steps:
        for made in contestants(network, names, dtype=dtype, accum_steps=n):
            which = {"contestant": made.name, "accum_steps": n}
            yield which | count(made, network)


def count(
    contestant: Contestant, network: Network, gpu: str = targets.H200
) -> dict[str, Any]:
    """Compiles a training step and returns what was counted in it.

    Args:
        contestant: The step.
        network: Whose batches it takes.
        gpu: What to compile it for, a key of :data:`targets.GPUS`.

    Returns:
        Plain numbers and dicts of them, in bytes where nothing else is said. The
        estimated seconds are those of an H200, and of no other GPU.
    """
    state = jax.eval_shape(contestant.init)
    params = jax.tree.leaves(state.params)
    args = state, network.shapes()
    compiled = targets.compiled(contestant.step, *args, donated=1, gpu=gpu)
    work = hlo.work(compiled.as_text())
    memory = compiled.memory_analysis()
    sizes = {x.size for x in params}
    return {
        "parameters": sum(x.size for x in params),
        "bytes": work.bytes,
        "kernels": work.kernels,
        **({"seconds": work.seconds} if gpu == targets.H200 else {}),
        "parameter_copies": sum(
            n
            for shape, n in work.copies.items()
            if any(size in sizes - {1} for _, size in arrays(shape))
        ),
        "temp": memory.temp_size_in_bytes,
        "workspace": work.workspace,
        "peak": measure.peak(compiled),
        "state": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)),
        "aliased": memory.alias_size_in_bytes,
        "products": dict(sorted(work.products.items())),
    }


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yields the bytes of each library, as shares of the step by hand."""
    yield Table(STEP, ())
    counted = {name: found[name] for name in NAMES if name in found}
    for n, heading in ((1, "One micro-batch"), (4, "Four micro-batches")):
        moved = {
            (row["contestant"], name): row["bytes"]
            for name, result in counted.items()
            for row in result["rows"]
            if row["accum_steps"] == n
        }
        rows = [
            {"": form}
            | {
                NAMES[x]: ratio(moved.get((form, x)), moved.get((FLOOR, x)))
                for x in counted
            }
            for form in dict.fromkeys(form for form, _ in moved)
        ]
        yield Table(f"### {heading}\n", rows, [*counted.values()])
    checked = {x: y for x, y in found.items() if x.endswith(", bfloat16")}
    rows = [
        {
            "": title.removesuffix(", bfloat16"),
            "step": row["contestant"],
            "GB": f"{row['bytes'] / 1e9:.2f}",
            "temporary MiB": f"{row['temp'] / 2**20:.0f}",
            "kernels": row["kernels"],
            "roofline ms": f"{1e3 * row['seconds']:.2f}",
        }
        for title, result in checked.items()
        for row in result["rows"]
    ]
    yield Table(IN_BFLOAT16, rows, [*checked.values()])
