"""What autocast costs over casting the whole model, and what it gives for it.

Networks of many families, compiled for a GPU (extra ``aot``; nothing runs): the bytes
that a training step moves, its temporary memory, its kernels, and for an H200 an
estimate of its time. And beside it, computed on this machine on small networks of the
same families, how far loss and gradients are from float32.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jaxmp

from .counting import named, results, targets
from .counting.results import Table, by_form, ratio
from .counting.steps import (
    AUTOCAST,
    CONTESTANTS,
    FLOOR,
    contestants,
    errors_of,
    loss_of,
)
from .machinery import count
from .networks.families import FAMILIES, NAMES, SMALL

ROUNDED, INSIDE = f"{AUTOCAST}, rounded", f"{AUTOCAST}, inside"
FORMS = FLOOR, AUTOCAST, ROUNDED, INSIDE

# Of autocast: the dtype of both passes, or that of the forward and of the backward one.
PASSES = ("float16", "bfloat16", "float16_bfloat16")
PASSES_TITLE = "errors by the dtypes of both passes"

PRICE = """\
## What autocast costs

The memory traffic and the temporary memory of a training step, relative to the same
model cast by hand. *Less 6N* leaves out the bytes of float32 weight gradients, which
autocast returns on purpose. *Rounded* is autocast with
`DEFAULT_OPS.with_rounded_matmuls()`. *Inside* is
`value_and_grad(autocast(loss, policy))`.
"""

ERROR = """\
## How far gradients are from float32

The norm of the error over the norm of the gradient, as the mean over seeds. It was
computed on a CPU, for small networks of the same families. A star marks a network for
which Flax's own 16 bits are nearer to float32 than autocast.
"""

BY_PASSES = """\
### A dtype for each pass

The same of `mixed_float16`, `mixed_bfloat16` and `mixed_float16_bfloat16`, whose
backward pass alone is in bfloat16; of the loss, too.
"""


def main(
    *,
    networks: tuple[str, ...] = NAMES,
    forms: tuple[str, ...] = FORMS,
    dtypes: tuple[str, ...] = ("float16", "bfloat16"),
    accum_steps: tuple[int, ...] = (1, 4),
    seeds: int = 3,
    passes: bool = False,
    gpu: targets.Named = targets.H200,
) -> None:
    """Counts prices and computes errors for each dtype.

    Args:
        networks: Which.
        forms: How autocast, or another library, is used.
        dtypes: Of 16 bits.
        accum_steps: Micro-batches.
        seeds: Of the errors.
        passes: Compute nothing but the errors of autocast with a dtype for each pass.
        gpu: Count in code for this one. Errors are computed beside an H200's alone.
    """
    named.check("network", networks, FAMILIES)
    named.check("form", forms, CONTESTANTS)
    if passes:
        new = errors_of_passes(networks, seeds)
        results.update("price", PASSES_TITLE, results.hardware(), new, "network")
        return
    targets.require("price")
    for dtype in dtypes:
        for steps in accum_steps:
            new = prices(networks, forms, dtype, steps, gpu)
            hardware = targets.hardware(gpu)
            results.update(
                "price", _title(dtype, steps, gpu), hardware, new, "network", "form"
            )
        if gpu != targets.H200:
            continue
        new = errors(networks, dtype, seeds)
        hardware = results.hardware()
        results.update("price", f"{dtype}, errors", hardware, new, "network")


# In the order of the tables.
_GPUS = targets.H200, *(x for x in targets.GPUS if x != targets.H200)


def _title(dtype: str, accum_steps: int, gpu: str) -> str:
    of = f", {gpu}" if gpu != targets.H200 else ""
    return f"{dtype}, {accum_steps} micro-batches{of}"


def prices(
    networks: tuple[str, ...],
    forms: tuple[str, ...],
    dtype: str,
    accum_steps: int,
    gpu: str = targets.H200,
) -> Iterator[dict[str, Any]]:
    """Compiles training steps and yields what was counted in each."""
    for name in networks:
        network = FAMILIES[name]
        for form in contestants(network, forms, dtype=dtype, accum_steps=accum_steps):
            yield {"network": name, "form": form.name} | count(form, network, gpu)


def errors(
    networks: tuple[str, ...], dtype: str, seeds: int
) -> Iterator[dict[str, Any]]:
    """Yields how far loss and gradients of small networks are from float32.

    Each number is the mean over the seeds of parameters and batches.
    """
    rounded = jaxmp.DEFAULT_OPS.with_rounded_matmuls()
    for name in networks:
        network = SMALL[name]
        exact = loss_of(network.model.apply)
        native = loss_of(network.with_dtype(jnp.dtype(dtype)).apply)
        grad = jax.value_and_grad(exact, has_aux=True)
        # Without a loss scale, on purpose, as the other forms.
        ours = jaxmp.value_and_grad(exact, has_aux=True, loss_scale=1.0)
        forms = {
            "dtype=": jax.value_and_grad(native, has_aux=True),
            "autocast": jaxmp.autocast(ours, dtype),
            "rounded": jaxmp.autocast(ours, dtype, ops=rounded),
            "inside": jax.value_and_grad(jaxmp.autocast(exact, dtype), has_aux=True),
        }
        yield {"network": name} | errors_of(network, grad, forms, seeds)


def errors_of_passes(networks: tuple[str, ...], seeds: int) -> Iterator[dict[str, Any]]:
    """Yields the same for autocast with one dtype, and with one for each pass."""
    for name in networks:
        network = SMALL[name]
        loss_fn = loss_of(network.model.apply)
        grad = jaxmp.value_and_grad(loss_fn, has_aux=True, loss_scale=1.0)
        forms = {dtypes: jaxmp.autocast(grad, f"mixed_{dtypes}") for dtypes in PASSES}
        yield {"network": name} | errors_of(network, grad, forms, seeds)


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yields the prices and the errors of each dtype."""
    yield Table(PRICE, ())
    spelled = {1: "one micro-batch", 4: "four micro-batches"}
    for gpu, dtype, steps in itertools.product(_GPUS, ("bfloat16", "float16"), spelled):
        of = f", {targets.GPUS[gpu].name}" if gpu != targets.H200 else ""
        if result := found.get(_title(dtype, steps, gpu)):
            rows = [*_costs(result["rows"])]
            yield Table(f"### {dtype}, {spelled[steps]}{of}\n", rows, [result])
    yield Table(ERROR, ())
    for dtype in ("bfloat16", "float16"):
        if result := found.get(f"{dtype}, errors"):
            rows = [*map(_away, result["rows"])]
            yield Table(f"### {dtype}\n", rows, [result])
    if result := found.get(PASSES_TITLE):
        rows = [
            {"": row["network"]}
            | {f"{x}, {y}": f"{row[f'{x}, {y}']:.2e}" for x, y in _OF_PASSES}
            for row in result["rows"]
        ]
        yield Table(BY_PASSES, rows, [result])


_OF_PASSES = [(x, y) for x in ("loss", "gradient") for y in PASSES]


def _costs(rows: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Yields the bytes and the memory of each network as shares of the floor's.

    The bytes of autocast are shown a second time without those by which it differs on
    purpose: weight gradients are float32, written once, and read by the check and by
    the optimizer, with 2 bytes more each time.
    """
    for name, forms in by_form(rows).items():
        floor, ours = forms.get(FLOOR, {}), forms.get(AUTOCAST)
        cells = {"": name}
        for form, prefix in (
            (AUTOCAST, ""),
            (ROUNDED, "rounded: "),
            (INSIDE, "inside: "),
        ):
            row = forms.get(form, {})
            cells[f"{prefix}bytes"] = ratio(row.get("bytes"), floor.get("bytes"))
            if form == AUTOCAST:
                less = ours and ours["bytes"] - 6 * ours["parameters"]
                cells["less 6N"] = ratio(less, floor.get("bytes"))
            cells[f"{prefix}memory"] = ratio(row.get("temp"), floor.get("temp"))
        yield cells


def _away(row: dict[str, Any]) -> dict[str, str]:
    flax, ours, rounded, inside = (
        row[f"gradient, {form}"] for form in ("dtype=", "autocast", "rounded", "inside")
    )
    return {
        "": row["network"] + " *" * (ours > flax),
        "Flax's `dtype=`": f"{flax:.2%}",
        "autocast": f"{ours:.2%}",
        "rounded": f"{rounded:.2%}",
        "inside": f"{inside:.2%}",
    }
