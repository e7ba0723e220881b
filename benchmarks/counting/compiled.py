"""Training steps compiled for the device at hand, and the memory of compiled code."""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .steps import Contestant, on_leaves
from .timing import calls_for

MIB = 2**20


class Compiled(NamedTuple):
    """A step that takes and returns the leaves of its state."""

    init: Callable[[], list[jax.Array]]
    step: Callable[[list[jax.Array], Any], tuple[list[jax.Array], jax.Array]]
    batch: Any
    peak: int  # bytes of arguments, results and what is between


def variables(network: Any, options: Any = None) -> Any:
    """Returns what a model starts with: parameters, and statistics if it has any."""
    x, _ = network.batch(1)
    init = jax.jit(network.model.init).lower(jax.random.key(0), x)
    return init.compile(options)(jax.random.key(0), x)


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


def first_line(error: Exception) -> str:
    """Returns what an error says, in short."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"
