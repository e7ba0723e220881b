"""Training steps compiled for the device at hand: their times and their memory."""

import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .steps import FLOOR, Contestant, Unavailable, contestant
from .timing import interleaved, ratio

MIB = 2**20


class Effort(NamedTuple):
    """How long to measure, and whom to tell what is left out."""

    report: Callable[[str], Any] = print
    rounds: int = 7
    seconds: float = 0.2  # of one sample
    until: float = math.inf  # `time.monotonic()`
    compiler_options: dict[str, Any] | None = None


class Variant(NamedTuple):
    """A contestant under settings."""

    label: str
    name: str
    network: Any
    dtype: str = "float16"
    precision: str | None = None  # of float32 products, as JAX names them


class Compiled(NamedTuple):
    """A step that takes and returns the leaves of its state."""

    init: Callable[[], list[jax.Array]]
    step: Callable[[list[jax.Array], Any], tuple[list[jax.Array], jax.Array]]
    batch: Any
    peak: int  # bytes of arguments, results and what is between


def compare(variants: Sequence[Variant], effort: Effort) -> list[dict[str, Any]]:
    """Compiles training steps, several at a time, and times them in turns.

    Returns:
        A row for each that compiles and runs; a line is reported for each other.
    """
    batch_of = functools.cache(lambda network: jax.device_put(network.batch()))
    options = effort.compiler_options
    variables_of = functools.cache(lambda network: variables(network, options))
    compiled = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        waiting = {}
        for v in variants:
            try:
                made = contestant(v.name, v.network, dtype=v.dtype)
            except Unavailable as reason:
                effort.report(f"{v.label} is left out: {reason}")
                continue
            start = variables_of(v.network)
            lowered = lower(made, start, batch_of(v.network), v.precision)
            waiting[v] = [pool.submit(x.compile, options) for x in lowered]
        for v, futures in waiting.items():
            try:
                init, step = (future.result() for future in futures)
            except jax.errors.JaxRuntimeError as error:
                effort.report(f"{v.label} does not compile: {first_line(error)}")
                continue
            compiled[v.label] = Compiled(
                functools.partial(init, variables_of(v.network)),
                step,
                batch_of(v.network),
                peak(step),
            )
    # The smallest first and each alone: JAX tells the peak of the process alone, and
    # this way it is that of the step that has raised it.
    in_use = {}
    for label in sorted(compiled, key=lambda label: compiled[label].peak):
        try:
            in_use[label] = peak_in_use(compiled[label])
        except jax.errors.JaxRuntimeError as error:
            effort.report(f"{label} does not run: {first_line(error)}")
            del compiled[label]
    host: dict[str, list[float]] = {label: [] for label in compiled}
    samplers = {
        label: sampler(c, host[label], effort.seconds) for label, c in compiled.items()
    }
    for samples in host.values():
        samples.clear()  # those of warming up
    times = interleaved(samplers, effort.rounds, until=effort.until)
    floor, float32 = times.get(FLOOR), times.get("float32")
    return [
        {
            "step": label,
            "ms": 1e3 * float(np.median(times[label])),
            f"of {FLOOR}": ratio(times[label], floor) if floor else None,
            "float32 over it": ratio(float32, times[label]) if float32 else None,
            "host ms": 1e3 * float(np.median(host[label])),
            "peak MiB, compiled": c.peak / MIB,
            "of float32's": c.peak / compiled["float32"].peak if float32 else None,
            "peak MiB, in use": in_use[label] and in_use[label] / MIB,
        }
        for label, c in compiled.items()
    ]


def variables(network: Any, compiler_options: Any = None) -> Any:
    """Returns what a model starts with: parameters, and statistics if it has any."""
    x, _ = network.batch(1)
    init = jax.jit(network.model.init).lower(jax.random.key(0), x)
    return init.compile(compiler_options)(jax.random.key(0), x)


def lower(
    made: Contestant, start: Any, batch: Any, precision: str | None = None
) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
    """Lowers the init and the step of a contestant.

    Args:
        made: The contestant.
        start: The variables of its model.
        batch: Arrays, or their shapes and dtypes.
        precision: Of float32 products.

    Returns:
        A function of ``start`` that returns the leaves of a state; and a step that
        takes and donates them. Of leaves, because jmp's loss scale cannot be lowered.
    """
    leaves, structure = jax.tree.flatten(jax.eval_shape(made.init, start))

    def step(leaves, batch):
        state, loss = made.step(structure.unflatten(leaves), batch)
        return jax.tree.leaves(state), loss

    def init(start):  # a copy, because the step donates it
        return jax.tree.leaves(made.init(jax.tree.map(jnp.copy, start)))

    with jax.default_matmul_precision(precision):
        lowered = jax.jit(step, donate_argnums=0).lower(leaves, batch)
    return jax.jit(init).lower(start), lowered


def peak(compiled: jax.stages.Compiled) -> int:
    """Returns the bytes that a compiled program needs, by its own account."""
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def peak_in_use(compiled: Compiled) -> int | None:
    """Runs a step, and returns the process's peak of memory if that has raised it."""

    def so_far():  # None on a CPU
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)

    before = so_far()
    jax.block_until_ready(compiled.step(compiled.init(), compiled.batch))
    return so_far() if so_far() > before else None


def sampler(
    compiled: Compiled, host: list[float], seconds: float
) -> Callable[[], float]:
    """Returns a function that runs some steps and returns the seconds of one.

    Args:
        compiled: The step.
        host: Where to append the seconds until a step was handed over to the device.
        seconds: About how long a sample takes: as many steps as that needs.
    """
    held = [compiled.init()]

    def sample(calls):
        leaves = held.pop()
        start = time.perf_counter()
        for _ in range(calls):
            leaves, _ = compiled.step(leaves, compiled.batch)
        host.append((time.perf_counter() - start) / calls)
        held.append(jax.block_until_ready(leaves))
        return (time.perf_counter() - start) / calls

    sample(1)
    return functools.partial(sample, max(1, math.ceil(seconds / sample(1))))


def largest_batch(
    needed: Callable[[int], int], budget: int, *, tries: int = 6
) -> tuple[int, int]:
    """Finds the largest batch that needs no more than a budget of memory.

    Args:
        needed: From a batch size to bytes, about a straight line.
        budget: Bytes.
        tries: How many sizes to look at.

    Returns:
        The largest size found and its bytes; zeros if not even 1 fits.

    Examples:
        >>> largest_batch(lambda size: 100 + 7 * size, 1000)
        (128, 996)
    """
    fits, too_large = [(0, 0)], None
    size = 1
    for _ in range(tries):
        bytes_needed = needed(size)
        if bytes_needed <= budget:
            fits.append((size, bytes_needed))
        else:
            too_large = size
        below, used = fits[-1]
        if too_large == below + 1:
            break
        if len(fits) < 3:
            size = 4 * below if too_large is None else (below + too_large) // 2
            continue
        before, used_before = fits[-2]
        slope = (used - used_before) / (below - before)
        size = below + max(1, int((budget - used) / slope))
        if too_large is not None:
            size = min(size, too_large - 1)
    return fits[-1]


def first_line(error: Exception) -> str:
    """Returns what an error says, in short."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
