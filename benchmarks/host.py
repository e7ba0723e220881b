"""What jaxmp costs outside compiled code: calls, tracing, compiling and importing.

All of it is time of the CPU, in the thread that does the work, because that hardly
depends on what else the machine does; of compiling, which is done by many threads, time
of the process. Ratios are medians over rounds, each of them between two neighbours in
time, with their quartiles. Steps are compiled for an H200 (extra ``aot``).

    python -m benchmarks host --parts tracing --networks llama vit
"""

import dataclasses
import gc
import itertools
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from .counting import h200, results, steps
from .counting.steps import FLOOR
from .counting.tables import show
from .counting.timing import interleaved, ratio, spread
from .networks import basic as networks
from .networks.families import FAMILIES

NATIVE = "Flax's own dtype"
PEERS = ("jaxmp cast", "jmp", "flax DynamicScale", "optax apply_if_finite", "mpx")
TRACED = ("float32", NATIVE, *(name for name in steps.CONTESTANTS if name != "float32"))
NETWORKS = ("gpt-160m", "resnet-50", "llama", "vit", "bert", "u-net")
COMPILED = ("float32", FLOOR, "jaxmp autocast")
GOALS = {
    "dispatch": "jaxmp cast: at most 1.05 of plain containers",
    "tracing": "at most 1.10 of float32 for cast, 1.3 for autocast",
    "compiling": "none",
    "importing": "at most 50 ms after jax and optax",
}


@dataclasses.dataclass
class Options:
    """How much to measure, and where to save it."""

    parts: tuple[str, ...] = ("dispatch", "tracing", "compiling", "importing")
    networks: tuple[str, ...] = NETWORKS
    """Whose steps are traced and compiled."""
    traced: tuple[str, ...] = TRACED
    """Of the first network; of the others only those that are compiled."""
    rounds: int = 9
    calls: int = 50
    """Of a step, in one sample."""
    output: pathlib.Path | None = None


def main(arguments: list[str]) -> None:
    """Prints the tables and saves them."""
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks host")
    command = ["host", *arguments]
    for part in options.parts:
        measure = {
            "dispatch": dispatch,
            "tracing": tracing,
            "compiling": compiling,
            "importing": importing,
        }
        rows = list(measure[part](options))
        show(f"{part} (goal: {GOALS[part]})", rows)
        load = f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
        hardware = f"{results.hardware()}, {load}"
        results.save(
            options.output or results.target("host"), part, hardware, command, rows
        )


def dispatch(options: Options) -> Iterator[dict[str, Any]]:
    """Yields what a call costs, of a step that hands its state on and computes nothing.

    The state is that of a GPT with 77 arrays of parameters, donated. What it is
    compared with are as many arrays in the containers of a hand-written step.
    """
    network = networks.gpt(1, layers=6, width=4, heads=1, vocabulary=4, length=4)
    batch = jax.device_put(network.batch())
    states, samplers = {}, {}
    for contestant in steps.contestants(network, (FLOOR, *PEERS)):
        shapes = jax.eval_shape(contestant.init)
        state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        states[contestant.name] = state
        plain = _in_plain_containers(state, states[FLOOR])
        samplers[contestant.name] = _caller(state, batch, options.calls)
        samplers[contestant.name, "plain"] = _caller(plain, batch, options.calls)
    times = interleaved(samplers, 3 * options.rounds)
    for name, state in states.items():
        yield {
            "step": name,
            "arrays": len(jax.tree.leaves(state)),
            "call (µs)": 1e6 * float(np.median(times[name])),
            "of plain containers": ratio(times[name], times[name, "plain"]),
            f"of {FLOOR}": ratio(times[name], times[FLOOR]),
        }


def tracing(options: Options) -> Iterator[dict[str, Any]]:
    """Yields how long JAX takes to trace a training step, and to lower it for XLA."""
    for name in options.networks:
        network = (networks.NETWORKS | FAMILIES)[name]
        traced = options.traced if name == options.networks[0] else COMPILED
        yield from _traced(name, network, ("float32", FLOOR, *traced), options.rounds)


def _traced(name, network, forms, rounds):
    tracers, lowerings = {}, {}
    for form in dict.fromkeys(forms):
        try:
            tracers[form] = _tracer(form, network, lowerings.setdefault(form, []))
        except steps.Unavailable as reason:
            print(f"{form} is left out: {reason}")
    for trace in tracers.values():  # to fill the caches that all of them share
        trace()
    for lowering in lowerings.values():
        lowering.clear()
    traces = interleaved(tracers, rounds)
    times = {form: np.add(traces[form], lowerings[form]) for form in tracers}
    for form in tracers:
        yield {
            "network": name,
            "step": form,
            "trace (s)": float(np.median(traces[form])),
            "lower (s)": float(np.median(lowerings[form])),
            "both, of float32": ratio(times[form], times["float32"]),
            f"of {FLOOR}": ratio(times[form], times[FLOOR]),
        }


def compiling(options: Options) -> Iterator[dict[str, Any]]:
    """Yields the CPU time in which XLA compiles a training step for an H200."""
    if reason := h200.unavailable():
        print(f"compiling is left out: {reason}")
        return
    for name in options.networks:
        network = (networks.NETWORKS | FAMILIES)[name]
        seconds = {}
        for form in COMPILED:
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


def importing(options: Options) -> Iterator[dict[str, Any]]:
    """Yields what ``import jaxmp`` takes in a new process, after other imports."""
    before = ("jax, optax", "jax, optax, flax")
    samplers = {loaded: _importer(loaded) for loaded in before}
    samplers[before[0]]()  # writes bytecode, and warms the file cache
    for loaded, times in interleaved(samplers, options.rounds).items():
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

    def fresh_step():  # or JAX would remember what it has traced
        if name != NATIVE:
            return steps.contestant(name, network).step
        native = network._replace(model=network.with_dtype(jnp.float16))
        return steps.by_hand(native, jnp.dtype(jnp.float32), 1)[2]

    kept = "float32" if name == NATIVE else name
    state = jax.eval_shape(steps.contestant(kept, network).init)
    leaves, structure = jax.tree.flatten(state)
    batch = network.batch()
    depths = itertools.cycle(range(0, _FRAMES_OF_A_CHUNK, 13))

    def measured():
        step = steps.on_leaves(fresh_step(), structure)
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
