"""What jaxmp costs outside compiled code: tracing and compiling.

All of it is time of the CPU, in the thread that does the work, because that hardly
depends on what else the machine does; of compiling, which is done by many threads, time
of the process. Ratios are medians over rounds, each of them between two neighbours in
time, with their quartiles. Steps are compiled for an H200 (extra ``aot``).
"""

import gc
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .counting import results, steps, targets
from .counting.results import Table
from .counting.steps import AUTOCAST, FLOOR
from .counting.timing import interleaved, ratio
from .networks import basic
from .networks.families import FAMILIES

NETWORKS = "gpt-160m", "resnet-50", "llama", "vit", "bert", "u-net"
FORMS = "float32", FLOOR, AUTOCAST

HOST = """\
## Outside compiled code

The ratios are medians over pairs of runs, of the CPU time of the thread. The quartiles
are in brackets.
"""


def main(
    *,
    parts: tuple[str, ...] = ("tracing", "compiling"),
    networks: tuple[str, ...] = NETWORKS,
    rounds: int = 9,
) -> None:
    """Measures tracing and compiling.

    Args:
        parts: Which of these.
        networks: Whose steps are traced and compiled.
        rounds: Of samples.
    """
    known = FAMILIES | basic.NETWORKS
    measure = {
        "tracing": partial(tracing, {x: known[x] for x in networks}, rounds),
        "compiling": partial(compiling, {x: known[x] for x in networks}),
    }
    for part in parts:
        rows = list(measure[part]())
        load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
        results.save("host", part, f"{results.hardware()}, {load}", rows)


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yields what was measured of each part."""
    yield Table(HOST, ())
    for part, result in found.items():
        yield Table(f"### {part.capitalize()}\n", result["rows"], [result])


def tracing(networks: Mapping[str, Any], rounds: int) -> Iterator[dict[str, Any]]:
    """Yields how long JAX takes to trace a training step, and to lower it for XLA."""
    for name, network in networks.items():
        lowerings: dict[str, list[float]] = {form: [] for form in FORMS}
        tracers = {form: _tracer(form, network, lowerings[form]) for form in FORMS}
        for trace in tracers.values():  # to fill the caches that all of them share
            trace()
        for lowering in lowerings.values():
            lowering.clear()
        traces = interleaved(tracers, rounds)
        times = {form: np.add(traces[form], lowerings[form]) for form in FORMS}
        for form in FORMS:
            yield {
                "network": name,
                "step": form,
                "trace (s)": float(np.median(traces[form])),
                "lower (s)": float(np.median(lowerings[form])),
                "both, of float32": ratio(times[form], times["float32"]),
                f"of {FLOOR}": ratio(times[form], times[FLOOR]),
            }


def compiling(networks: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the CPU time in which XLA compiles a training step for an H200."""
    if reason := targets.unavailable():
        print(f"compiling is left out: {reason}")
        return
    for name, network in networks.items():
        seconds = {}
        for form in FORMS:
            made = steps.contestant(form, network, dtype=jnp.bfloat16)
            state = jax.eval_shape(made.init)
            lowered = targets.lowered(made.step, state, network.shapes(), donated=1)
            start = time.process_time()
            lowered.compile(compiler_options=targets.OPTIONS)
            seconds[form] = time.process_time() - start
        for form, took in seconds.items():
            yield {
                "network": name,
                "step": form,
                "compile (s)": took,
                "of float32": took / seconds["float32"],
                f"of {FLOOR}": took / seconds[FLOOR],
            }


def _tracer(name, network, lowering):
    """Returns a sampler of seconds of tracing; appends those of lowering to a list."""
    state = jax.eval_shape(steps.contestant(name, network).init)
    leaves, structure = jax.tree.flatten(state)
    batch = network.batch()
    depths = itertools.cycle(range(0, _FRAMES_OF_A_CHUNK, 13))

    def measured():
        # A new one, or JAX would remember what it has traced.
        step = steps.on_leaves(steps.contestant(name, network).step, structure)
        gc.collect()
        start = time.thread_time()
        traced = jax.jit(step, donate_argnums=0).trace(leaves, batch)
        middle = time.thread_time()
        traced.lower()
        lowering.append(time.thread_time() - middle)
        return middle - start

    return lambda: _below(next(depths), measured)


# CPython keeps the frames of its calls in chunks of 16 KiB. Calls that cross the end of
# one allocate and free the next, each time, which may take as long as a fifth of the
# tracing. Which calls do is chance, so every round begins deeper than the last.
_FRAMES_OF_A_CHUNK = 120


def _below(frames, fun):
    """Calls ``fun`` below a number of other calls."""
    return _below(frames - 1, fun) if frames else fun()
