"""What autocast costs over casting the whole model, and what it gives for it.

Networks of many families, compiled for an H200 (extra ``aot``; nothing runs): the bytes
that a training step moves, its temporary memory, its kernels, and an estimate of its
time. And beside it, computed on this machine on small networks of the same families,
how far loss and gradients are from float32.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import tyro

import jaxmp

from .counting import h200, results, worth
from .counting.steps import CONTESTANTS, FLOOR, contestants, errors_of, loss_of
from .counting.tables import show
from .machinery import count
from .networks.families import FAMILIES, NAMES, SMALL

FORMS = (
    FLOOR,
    "jaxmp modules",
    "jaxmp autocast",
    "jaxmp autocast, rounded",
    "jaxmp autocast, inside",
)

# Of autocast: the dtype of both passes, or that of the forward and of the backward one.
PASSES = ("float16", "bfloat16", "float16_bfloat16")
PASSES_TITLE = "errors by the dtypes of both passes"


@dataclasses.dataclass
class Options:
    """What to compile, and where to save what is found."""

    networks: tuple[str, ...] = NAMES
    forms: tuple[str, ...] = ()
    """All of :data:`FORMS`, if none is named."""
    dtypes: tuple[str, ...] = ("float16", "bfloat16")
    accum_steps: tuple[int, ...] = (1, 4)
    seeds: int = 3
    """Of the errors."""
    passes: bool = False
    """Compute nothing but the errors of :data:`PASSES`."""
    output: pathlib.Path | None = None


def main(arguments: list[str]) -> None:
    """Prints a table of prices and one of errors for each dtype, and saves them."""
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks price")
    command = ["price", *arguments]
    worth.check("network", options.networks, FAMILIES)
    worth.check("form", options.forms, CONTESTANTS)
    path = options.output or results.target("price")
    if options.passes:
        new = errors_of_passes(options.networks, options.seeds)
        hardware = results.hardware()
        rows = results.update(path, PASSES_TITLE, hardware, command, new, "network")
        show(f"{PASSES_TITLE} (mean of {options.seeds} seeds)", rows)
        return
    h200.require("price")
    forms = options.forms or FORMS
    for dtype in options.dtypes:
        for accum_steps in options.accum_steps:
            new = prices(options.networks, forms, dtype, accum_steps)
            title = f"{dtype}, {accum_steps} micro-batches"
            by = "network", "form"
            rows = results.update(path, title, h200.HARDWARE, command, new, *by)
            show(f"{title}: relative to the model cast by hand", table(rows))
        new = errors(options.networks, dtype, options.seeds)
        title = f"{dtype}, errors"
        hardware = results.hardware()
        rows = results.update(path, title, hardware, command, new, "network")
        show(f"{title} (mean of {options.seeds} seeds)", rows)


def prices(
    networks: tuple[str, ...], forms: tuple[str, ...], dtype: str, accum_steps: int
) -> Iterator[dict[str, Any]]:
    """Compiles training steps and yields what was counted in each."""
    for name in networks:
        network = FAMILIES[name]
        for form in contestants(network, forms, dtype=dtype, accum_steps=accum_steps):
            yield {"network": name, "form": form.name} | count(form, network)


def table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows as shares of those of the model cast whole.

    The bytes of autocast are shown a second time without those by which it differs on
    purpose: weight gradients are float32, written once, and read by the check and by
    the optimizer, with 2 bytes more each time.
    """
    floors = {row["network"]: row for row in rows if row["form"] == FLOOR}
    shown = []
    for row in rows:
        floor = floors.get(row["network"], row)
        wide = 6 * row["parameters"] if row["form"] == "jaxmp autocast" else 0
        shown.append(
            {
                "network": row["network"],
                "form": row["form"],
                "GB": f"{row['bytes'] / 1e9:.3f}",
                "bytes": f"{row['bytes'] / floor['bytes']:.3f}",
                "less 6N": f"{(row['bytes'] - wide) / floor['bytes']:.3f}",
                "temporary": f"{row['temp'] / floor['temp']:.3f}",
                "kernels": row["kernels"],
                "time (estimate)": f"{row['seconds'] / floor['seconds']:.3f}",
            }
        )
    return shown


def errors(
    networks: tuple[str, ...], dtype: str, seeds: int
) -> Iterator[dict[str, Any]]:
    """Yields how far loss and gradients of small networks are from float32.

    Each number is the mean over the seeds of parameters and batches.
    """
    rounded = jaxmp.DEFAULT_OPS.with_rounded_products()
    for name in networks:
        network = SMALL[name]
        exact = loss_of(network.model.apply)
        native = loss_of(network.with_dtype(jnp.dtype(dtype)).apply)
        grad = jax.value_and_grad(exact, has_aux=True)
        forms = {
            "dtype=": jax.value_and_grad(native, has_aux=True),
            "autocast": jaxmp.autocast(grad, dtype),
            "rounded": jaxmp.autocast(grad, dtype, ops=rounded),
            "inside": jax.value_and_grad(jaxmp.autocast(exact, dtype), has_aux=True),
        }
        yield {"network": name} | _both(errors_of(network, grad, forms, seeds))


def errors_of_passes(networks: tuple[str, ...], seeds: int) -> Iterator[dict[str, Any]]:
    """Yields the same for autocast with one dtype, and with one for each pass."""
    for name in networks:
        network = SMALL[name]
        grad = jax.value_and_grad(loss_of(network.model.apply), has_aux=True)
        forms = {dtypes: jaxmp.autocast(grad, f"mixed_{dtypes}") for dtypes in PASSES}
        yield {"network": name} | _both(errors_of(network, grad, forms, seeds))


def _both(found: dict[str, tuple[float, float]]) -> dict[str, float]:
    return {
        f"{what}, {form}": both[i]
        for i, what in enumerate(("loss", "gradient"))
        for form, both in found.items()
    }
