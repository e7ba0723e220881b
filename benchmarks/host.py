"""What jaxmp costs outside compiled code: calls, tracing, compiling and importing.

All of it is time of the CPU, in the thread that does the work, because that hardly
depends on what else the machine does; of compiling, which is done by many threads, time
of the process. Ratios are medians over rounds, each of them between two neighbours in
time, with their quartiles. Steps are compiled for an H200 (extra ``aot``).
"""

import gc
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .counting import h200, results, steps
from .counting.results import Table
from .counting.steps import AUTOCAST, FLOOR
from .counting.timing import interleaved, ratio, spread
from .networks import basic
from .networks.families import FAMILIES

PEERS = (
    FLOOR, "jaxmp cast", "jmp", "flax DynamicScale", "optax apply_if_finite", "mpx",
)  # fmt: skip
NETWORKS = "gpt-160m", "resnet-50", "llama", "vit", "bert", "u-net"
FORMS = "float32", FLOOR, AUTOCAST

HOST = """\
## Outside compiled code

The ratios are medians over pairs of runs, of the CPU time of the thread. The quartiles
are in brackets.
"""


def main(
    *,
    parts: tuple[str, ...] = ("dispatch", "tracing", "compiling", "importing"),
    networks: tuple[str, ...] = NETWORKS,
    rounds: int = 9,
) -> None:
    """Measures calls, tracing, compiling and importing.

    Args:
        parts: Which of these.
        networks: Whose steps are traced and compiled.
        rounds: Of samples.
    """
    known = FAMILIES | basic.NETWORKS
    measure = {
        "dispatch": partial(dispatch, rounds),
        "tracing": partial(tracing, {x: known[x] for x in networks}, rounds),
        "compiling": partial(compiling, {x: known[x] for x in networks}),
        "importing": partial(importing, rounds),
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


def dispatch(rounds: int, calls: int = 50) -> Iterator[dict[str, Any]]:
    """Yields what a call costs, of a step that hands its state on and computes nothing.

    The state is that of a GPT with 77 arrays of parameters, donated. What it is
    compared with are as many arrays in the containers of a hand-written step.
    """
    network = basic.gpt(1, layers=6, width=4, heads=1, vocabulary=4, length=4)
    batch = jax.device_put(network.batch())
    states, samplers = {}, {}
    for contestant in steps.contestants(network, PEERS):
        shapes = jax.eval_shape(contestant.init)
        state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        states[contestant.name] = state
        plain = _in_plain_containers(state, states[FLOOR])
        samplers[contestant.name] = _caller(state, batch, calls)
        samplers[contestant.name, "plain"] = _caller(plain, batch, calls)
    times = interleaved(samplers, 3 * rounds)
    for name, state in states.items():
        yield {
            "step": name,
            "arrays": len(jax.tree.leaves(state)),
            "call (µs)": 1e6 * float(np.median(times[name])),
            "of plain containers": ratio(times[name], times[name, "plain"]),
            f"of {FLOOR}": ratio(times[name], times[FLOOR]),
        }


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
    if reason := h200.unavailable():
        print(f"compiling is left out: {reason}")
        return
    for name, network in networks.items():
        seconds = {}
        for form in FORMS:
            made = steps.contestant(form, network, dtype=jnp.bfloat16)
            state = jax.eval_shape(made.init)
            lowered = h200.lowered(made.step, state, network.shapes(), donated=1)
            start = time.process_time()
            lowered.compile(compiler_options=h200.OPTIONS)
            seconds[form] = time.process_time() - start
        for form, took in seconds.items():
            yield {
                "network": name,
                "step": form,
                "compile (s)": took,
                "of float32": took / seconds["float32"],
                f"of {FLOOR}": took / seconds[FLOOR],
            }


def importing(rounds: int) -> Iterator[dict[str, Any]]:
    """Yields what ``import jaxmp`` takes in a new process, after other imports."""
    before = ("jax, optax", "jax, optax, flax")
    samplers = {loaded: _importer(loaded) for loaded in before}
    samplers[before[0]]()  # writes bytecode, and warms the file cache
    for loaded, times in interleaved(samplers, rounds).items():
        yield {"after": loaded, "import jaxmp (ms)": spread(times)}


def _in_plain_containers(state, floor):
    """Returns a hand-written state with as many arrays as ``state``."""
    more = len(jax.tree.leaves(state)) - len(jax.tree.leaves(floor))
    return floor._replace(loss_scale=tuple(jnp.zeros(()) for _ in range(more)))


def _caller(state, batch, calls):
    """Returns a sampler of the seconds that one call takes."""
    step = jax.jit(lambda state, batch: (state, jnp.float32(0)), donate_argnums=0)
    # A copy, because two callers cannot donate one array.
    held = [step(jax.tree.map(jnp.copy, state), batch)[0]]

    def sample():
        state = held.pop()
        start = time.thread_time()
        for _ in range(calls):
            state, _ = step(state, batch)
        seconds = time.thread_time() - start
        held.append(jax.block_until_ready(state))
        return seconds / calls

    return sample


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


def _importer(loaded):
    """Returns a sampler of the milliseconds that a new process imports jaxmp for."""
    code = f"import time, {loaded}; start = time.thread_time(); import jaxmp; " + (
        "print(1e3 * (time.thread_time() - start))"
    )
    # As after `pip install`, which compiles what it installs.
    environment = {
        k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"
    }

    def sample():
        command = [sys.executable, "-c", code]
        output = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        )
        return float(output.stdout)

    return sample
