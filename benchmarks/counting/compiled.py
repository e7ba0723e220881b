"""Training steps compiled for the device at hand, and the memory of compiled code."""

import functools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .steps import FLOOR, Contestant, Unavailable, contestant, on_leaves
from .timing import calls_for, interleaved, ratio

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
    compiled = _compiled(variants, effort)
    samplers, host = {}, {}
    for label, c in compiled.items():
        try:
            samplers[label], host[label] = sampler(c, effort.seconds)
        except jax.errors.JaxRuntimeError as error:
            effort.report(f"{label} does not run: {first_line(error)}")
    if not samplers:
        return []
    times = interleaved(samplers, effort.rounds, until=effort.until)
    rounds = min(map(len, times.values()))
    if rounds < effort.rounds:
        effort.report(f"{rounds} of {effort.rounds} rounds, the time is over")
    floor, float32 = times.get(FLOOR), times.get("float32")
    return [
        {
            "step": label,
            "ms": 1e3 * float(np.median(times[label])),
            f"of {FLOOR}": ratio(times[label], floor) if floor else None,
            "float32 over it": ratio(float32, times[label]) if float32 else None,
            "host ms": 1e3 * float(np.median(host[label])),
            "peak MiB": compiled[label].peak / MIB,
            "of float32's": (
                compiled[label].peak / compiled["float32"].peak if float32 else None
            ),
        }
        for label in times
    ]


def _compiled(variants: Sequence[Variant], effort: Effort) -> dict[str, Compiled]:
    """Compiles training steps, several at a time.

    XLA times candidates for every product and convolution, and remembers the best. The
    first step of a kind does that alone, and those like it wait and take what it has
    found: that is quicker, and all of them are then made of the same kernels.
    """
    batch_of = functools.cache(lambda network: jax.device_put(network.batch()))
    options = effort.compiler_options
    variables_of = functools.cache(lambda network: variables(network, options))
    waiting: dict[Variant, tuple[Future, Future]] = {}
    firsts: dict[Any, Future] = {}
    compiled = {}
    with ThreadPoolExecutor(2 * len(variants)) as pool:  # most of them wait
        for v in variants:
            try:
                made = contestant(v.name, v.network, dtype=v.dtype)
            except Unavailable as reason:
                effort.report(f"{v.label} is left out: {reason}")
                continue
            start = variables_of(v.network)
            init, step = lower(made, start, batch_of(v.network), v.precision)
            kind = (v.name == "float32", v.precision)
            future = pool.submit(_compile_after, firsts.get(kind), step, options)
            firsts.setdefault(kind, future)
            waiting[v] = pool.submit(init.compile, options), future
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
    return compiled


def _compile_after(first, lowered, options):
    if first is not None:
        wait([first])  # also if that one fails
    return lowered.compile(options)


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
        start: The variables of its model: arrays, or their shapes and dtypes.
        batch: The same of a batch.
        precision: Of float32 products.

    Returns:
        A function of ``start`` that returns the leaves of a state; and a step that
        takes and donates them.
    """
    leaves, structure = jax.tree.flatten(jax.eval_shape(made.init, start))
    step = on_leaves(made.step, structure)

    def init(start):  # a copy, because the step donates it
        return jax.tree.leaves(made.init(jax.tree.map(jnp.copy, start)))

    with jax.default_matmul_precision(precision):
        lowered = jax.jit(step, donate_argnums=0).lower(leaves, batch)
    return jax.jit(init).lower(start), lowered


def peak(compiled: Any) -> int:
    """Returns the bytes that a compiled program needs, by its own account."""
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def sampler(
    compiled: Compiled, seconds: float
) -> tuple[Callable[[], float], list[float]]:
    """Returns a function that runs some steps and returns the seconds of one.

    Every call makes the state anew, so that it is in memory no longer than the call.

    Args:
        compiled: The step.
        seconds: About how long a call takes: as many steps as that needs.

    Returns:
        The function; and a list, to which it appends the seconds that it took to hand
        over its first step. The GPU is idle then: later steps would wait for it.
    """
    host = []

    def sample(calls):
        leaves = jax.block_until_ready(compiled.init())
        start = time.perf_counter()
        leaves, _ = compiled.step(leaves, compiled.batch)
        host.append(time.perf_counter() - start)
        for _ in range(calls - 1):
            leaves, _ = compiled.step(leaves, compiled.batch)
        jax.block_until_ready(leaves)
        return (time.perf_counter() - start) / calls

    calls = calls_for(seconds, sample)
    host.clear()  # of warming up
    return functools.partial(sample, calls), host


def largest_batch(
    needed: Callable[[int], int],
    budget: float,
    *,
    tries: float = math.inf,
    until: float = math.inf,
) -> tuple[int, int]:
    """Finds the largest batch that needs no more than a budget of memory.

    Args:
        needed: From a batch size to bytes, about a straight line.
        budget: Bytes.
        tries: How many sizes to look at.
        until: The search ends after this ``time.monotonic()``.

    Returns:
        The largest size found and its bytes; zeros if none fits.

    Examples:
        >>> largest_batch(lambda size: 100 + 7 * size, 1000)
        (128, 996)
    """
    known: dict[int, int] = {}
    fits, size = 0, 1
    while len(known) < tries and time.monotonic() <= until:
        known[size] = needed(size)
        fits = max((n for n in known if known[n] <= budget), default=0)
        too_large = min((n for n in known if known[n] > budget), default=math.inf)
        if too_large == fits + 1:
            break
        size = 4
        if len(known) > 1:
            # The two that are nearest to the budget lie on about the same line.
            a, b = sorted(known, key=lambda n: abs(known[n] - budget))[:2]
            size = a + (budget - known[a]) * (b - a) / (known[b] - known[a])
        size = int(min(max(size, fits + 1), too_large - 1))
    return fits, known.get(fits, 0)


def first_line(error: Exception) -> str:
    """Returns what an error says, in short."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"
