"""Times of training steps on your NVIDIA GPU, and PyTorch beside them.

A network at a time: its training step in float32, cast by hand and by each library.
They are compiled side by side, timed in turns, and saved before the next network
begins. Those of the README come first, and as many are timed as begin within
``--seconds``; one takes up to two minutes, most of it for compiling. PyTorch comes
first, where it is installed, in a process of its own: JAX does not give memory back.

"float32" is what JAX does by default, TF32; "highest" is true float32. "By hand" casts
the model and neither scales nor checks. Memory is what a compiled step needs by its own
account; of PyTorch it is the most that was allocated.
"""

import functools
import importlib.util
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .counting import measure, named, results, steps, timing
from .counting.results import Table
from .counting.steps import AUTOCAST, BACKWARD, FLOOR, INT8
from .networks import basic, families
from .networks.fused import fused

ROOT = pathlib.Path(__file__).parent.parent
MIB = 2**20
FORMS = ("float32", FLOOR, AUTOCAST)
ONE_DTYPE = ("float32", "highest", BACKWARD)  # whatever dtype is asked for
# In the order of their importance, with what tables call them.
NAMES = {
    "gpt-160m": "GPT, 163M parameters",
    "gpt-160m, fused": "GPT, 163M parameters, cuDNN's attention",
    "resnet-50": "ResNet-50",
    "llama": "Llama",
    "llama, fused": "Llama, cuDNN's attention",
    "vit": "ViT",
    "vit, fused": "ViT, cuDNN's attention",
    "bert": "BERT",
    "u-net": "U-Net",
    "llama-1.6b, fused": "Llama, 1.6B parameters, cuDNN's attention",
    "lstm": "LSTM",
    "mlp": "MLP",
    "gemma": "Gemma",
    "state space": "State space",
}
FIRST = "the first times"  # before which bytes had been counted
FULL = families.FAMILIES | families.TIMED
TINY = {
    "llama-1.6b": families.SMALL["llama, grouped queries"],
    "gpt-160m": basic.TINY["gpt"],
    "resnet-50": basic.TINY["resnet"],
    "mlp": basic.TINY["mlp"],
}
TINY = families.SMALL | TINY | fused(TINY)


class Case(NamedTuple):
    """A training step of a network."""

    form: str
    dtype: str


class Compiled(NamedTuple):
    """A step that takes and returns the leaves of its state."""

    init: Callable[[], list[jax.Array]]
    step: Any
    batch: Any
    seconds: tuple[float, float]  # of tracing and of compiling

    def sample(self, hosts: list[float], calls: int) -> float:
        """Runs some steps, and returns the seconds of one.

        Every call makes the state anew, so that it is in memory no longer than that.

        Args:
            hosts: Gets the seconds that it took to hand over the first step. The GPU is
                idle then: later steps would wait for it.
            calls: How many steps.
        """
        leaves = jax.block_until_ready(self.init())
        start = time.perf_counter()
        leaves, _ = self.step(leaves, self.batch)
        hosts.append(time.perf_counter() - start)
        for _ in range(calls - 1):
            leaves, _ = self.step(leaves, self.batch)
        jax.block_until_ready(leaves)
        return (time.perf_counter() - start) / calls


def main(
    *,
    networks: tuple[str, ...] = tuple(NAMES),
    forms: tuple[str, ...] = FORMS,
    dtypes: tuple[str, ...] = ("bfloat16",),
    title: str = "",
    seconds: float = 540.0,
    tiny: bool = False,
    torch: bool = True,
) -> None:
    """Times the training steps of networks.

    Args:
        networks: Which.
        forms: Of a step: `highest`, or a name in `benchmarks/counting/steps.py`.
        dtypes: Of 16 bits. A form that has a dtype of its own is timed in the first.
        title: Of the results. They replace those of an earlier run with that title.
        seconds: No network begins later; what has begun is finished.
        tiny: Try it out with tiny networks, on a CPU too.
        torch: Time PyTorch, where it is installed.
    """
    known = TINY if tiny else FULL
    named.check("network", networks, known)
    named.check("form", forms, ("highest", *steps.CONTESTANTS))
    until = time.monotonic() + seconds
    rows: dict[str, list[Any]] = {"ceilings": [], "steps": [], "left out": []}

    def report(line: str) -> None:
        print(line, flush=True)
        rows["left out"].append(line)

    # Before JAX takes the memory of the GPU.
    if torch and "gpt-160m" in networks and (found := in_torch(seconds, tiny, report)):
        rows["torch"] = found
    if jax.default_backend() != "gpu" and not tiny:
        raise SystemExit(
            f"gpu needs an NVIDIA GPU, but JAX finds only {jax.devices()}. Install "
            "`jax[cuda12]` or `jax[cuda13]`, or try the program out with `--tiny`."
        )
    device = jax.devices()[0].device_kind
    title = f"{device}, {title}" if title else device
    cases = [
        Case(form, dtype)
        for dtype in dtypes
        for form in forms
        if dtype == dtypes[0] or form not in ONE_DTYPE
    ]
    rows["ceilings"] += ceilings(2**16 if tiny else 2**28)
    for name in networks:
        if time.monotonic() > until:
            report(f"{name}: left out, the time is over")
            continue
        start = time.monotonic()
        rows["steps"] += measured(name, known[name], cases, tiny, report)
        results.save("gpu", title, device, rows)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    results.save("gpu", title, device, rows)


def measured(
    name: str, network: Any, cases: Sequence[Case], tiny: bool, report: Any
) -> Iterator[dict]:
    """Compiles the steps of a network, times them in turns and yields their rows."""
    made = compile_steps(cases, network, report, measure.IN_A_HURRY if tiny else None)
    samplers: dict[Case, Callable[[], float]] = {}
    hosts: dict[Case, list[float]] = {case: [] for case in made}
    for case, compiled in made.items():
        sample = functools.partial(compiled.sample, hosts[case])
        try:
            calls = timing.calls_for(0 if tiny else 0.12, sample)
        except jax.errors.JaxRuntimeError as error:
            report(f"{name}, {' in '.join(case)}: does not run, {first_line(error)}")
            continue
        hosts[case].clear()  # of warming up
        samplers[case] = functools.partial(sample, calls)
    times = timing.interleaved(samplers, 2 if tiny else 5)
    for case in samplers:
        traced, took = made[case].seconds
        memory = made[case].step.memory_analysis()
        yield {
            "network": name,
            **case._asdict(),
            "ms": timing.spread(1e3 * np.array(times[case])),
            f"of {FLOOR}": _ratio(times[case], times.get(Case(FLOOR, case.dtype))),
            "TF32 over it": _ratio(times.get(Case("float32", "bfloat16")), times[case]),
            "peak MiB": measure.peak(made[case].step) / MIB,
            "temporary MiB": memory.temp_size_in_bytes / MIB,
            "trace and lower s": traced,
            "compile s": took,
            "host ms": 1e3 * float(np.median(hosts[case])),
        }


def compile_steps(
    cases: Sequence[Case], network: Any, report: Any, options: Any
) -> dict[Case, Compiled]:
    """Returns compiled steps.

    XLA times candidates for every product and convolution, and remembers the best. The
    first step of a dtype does that alone, and those like it wait and take what it has
    found: that is quicker, and all of them are then made of the same kernels.
    """
    batch = jax.device_put(network.batch())
    key = jax.random.key(0)
    init = jax.jit(network.model.init).lower(key, batch[0][:1]).compile(options)
    start = init(key, batch[0][:1])
    waiting: dict[Case, tuple[Future, Future, float]] = {}
    firsts: dict[Any, Future] = {}
    with ThreadPoolExecutor(2 * len(cases)) as pool:  # most of them wait
        for case in cases:
            highest = case.form == "highest"
            form = "float32" if highest else case.form
            began = time.monotonic()
            try:
                made = steps.contestant(form, network, dtype=case.dtype)
            except steps.Unavailable as reason:
                report(f"{case.form} in {case.dtype} is left out: {reason}")
                continue
            with jax.default_matmul_precision("highest" if highest else None):
                init, step = lowered(made, start, batch)
            traced = time.monotonic() - began
            kind = (case.dtype, form == "float32", highest)
            future = pool.submit(_compile_after, firsts.get(kind), step, options)
            firsts.setdefault(kind, future)
            waiting[case] = pool.submit(init.compile, options), future, traced
    done = {}
    for case, (init, step, traced) in waiting.items():
        try:
            program, took = step.result()
            init = functools.partial(init.result(), start)
        except jax.errors.JaxRuntimeError as error:
            report(f"{' in '.join(case)} does not compile: {first_line(error)}")
            continue
        done[case] = Compiled(init, program, batch, (traced, took))
    return done


def lowered(made: steps.Contestant, start: Any, batch: Any) -> tuple[Any, Any]:
    """Returns a function that makes the leaves of a state, and a step of them."""
    leaves, structure = jax.tree.flatten(jax.eval_shape(made.init, start))
    step = steps.on_leaves(made.step, structure)

    def init(start):  # a copy, because the step donates it
        return jax.tree.leaves(made.init(jax.tree.map(jnp.copy, start)))

    step = jax.jit(step, donate_argnums=0).lower(leaves, batch)
    return jax.jit(init).lower(start), step


def ceilings(copied: int) -> Iterator[dict[str, Any]]:
    """Yields how fast the GPU copies and multiplies at most."""
    x = jax.random.normal(jax.random.key(0), (copied,))
    rates = 2e-9 * x.nbytes / _seconds(jnp.negative, x)
    yield {"ceiling": "reading and writing", "rate": rates, "unit": "GB/s"}
    size = int(copied**0.5) // 2
    for name, dtype, precision in (
        ("bfloat16", "bfloat16", None),
        ("float16", "float16", None),
        ("TF32", "float32", None),
        ("float32", "float32", "highest"),
    ):
        x = jax.random.normal(jax.random.key(0), (size, size), dtype)
        square = functools.partial(jnp.matmul, precision=precision)
        rates = 2e-12 * size**3 / _seconds(square, x, x)
        yield {"ceiling": f"matmul in {name}", "rate": rates, "unit": "TFLOP/s"}


def in_torch(seconds: float, tiny: bool, report: Any) -> list[dict[str, Any]]:
    """Times the GPT in PyTorch, in a process that has a third of the time."""
    if importlib.util.find_spec("torch") is None:
        report("PyTorch is left out: it is not installed")
        return []
    command = [sys.executable, "-m", "benchmarks.networks.in_torch"]
    command += ["--tiny"] * tiny
    pipe = subprocess.PIPE
    try:
        done = subprocess.run(command, cwd=ROOT, stdout=pipe, timeout=seconds / 3)
        lines = done.stdout
        if done.returncode:
            report(f"PyTorch ended with {done.returncode}")
    except subprocess.TimeoutExpired as error:
        report("PyTorch was stopped, its time was over")
        lines = error.stdout or b""
    return [json.loads(x) for x in lines.decode().splitlines() if x.endswith("}")]


def first_line(error: Exception) -> str:
    """Returns what an error says, in short."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def _compile_after(first, lowered, options):
    if first is not None:
        wait([first])  # also if that one fails
    start = time.monotonic()
    return lowered.compile(options), time.monotonic() - start


def _ratio(times, reference):
    return timing.ratio(times, reference)["median"] if times and reference else None


def _seconds(function, *args):
    """Returns the seconds of a call."""
    call = functools.partial(jax.jit(function), *args)
    wait_for = jax.block_until_ready
    return float(np.median(timing.of_calls(call, wait_for, seconds=0.1, rounds=5)))


TIMES = """\
## Times on a GPU

Training steps with Adam, each in float32 as JAX does by default (TF32), some in true
float32 (*highest*), and in 16 bits. Medians of five rounds in turns. The temporary
memory is that of the compiled step. *Trace* includes lowering; the compile time of the
first step of each dtype includes the choice of kernels, which the others reuse.
"""

CEILINGS = """\
The highest rates that this GPU reached:
"""

PYTORCH = """\
The same GPT in PyTorch, `torch.amp` under `torch.compile` in bfloat16. The peak is what
was allocated:
"""

PREDICTED = """\
### How well counting predicts times

What had been counted in code compiled for an H200, before any time was measured, and
then the first measured times. The first two columns are bytes, the third is an
estimated time.
"""


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yields what was timed on each GPU, and what had been predicted."""
    yield Table(TIMES, ())
    timed = {title: x for title, x in found.items() if title != "counted before"}
    for title, result in timed.items():
        rows, source, heading = result["rows"], [result], f"### {title}\n"
        if gained := gains(rows["steps"]):
            yield Table(heading, gained, source)
            heading = ""
        yield Table(heading, [*map(_row, rows["steps"])], source)
        if "ceilings" in rows:
            ceilings = rows["ceilings"]
            reached = [
                {"": x["ceiling"], "rate": f"{x['rate']:.0f} {x['unit']}"}
                for x in ceilings
            ]
            yield Table(CEILINGS, reached, source)
        if "torch" in rows:
            of_torch = [
                {
                    "attention": "fused" if x["fused"] else "written out",
                    "ms": f"{x['ms']['median']:.1f}",
                    "peak MiB": f"{x['peak MiB'] or 0:.0f}",
                }
                for x in rows["torch"]
            ]
            yield Table(PYTORCH, of_torch, source)
    if counted := found.get("counted before"):
        # Autocast has changed since, and so has what is counted.
        first = next(x for title, x in timed.items() if title.endswith(FIRST))
        predicted = [_predicted(x, by_case(first)) for x in counted["rows"]]
        yield Table(PREDICTED, predicted, [counted])


def by_case(result: Mapping[str, Any]) -> dict[tuple[str, str, str], Any]:
    """Returns the rows of what was timed by network, form and dtype."""
    rows = result["rows"]["steps"]
    return {(x["network"], x["form"], x["dtype"]): x for x in rows}


def gains(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Returns a row for each network: autocast beside TF32 and pure bfloat16."""
    found = results.by_form(x for x in rows if x["dtype"] == "bfloat16")
    return [
        {
            "network": NAMES.get(name, name),
            "TF32": f"{forms['float32']['ms']['median']:.1f} ms",
            "autocast": f"{forms[AUTOCAST]['ms']['median']:.1f} ms",
            "speedup": f"{forms[AUTOCAST]['TF32 over it']:.2f}x",
            "memory": f"{_memory(forms):.0%}",
            "pure bfloat16": f"{forms[FLOOR]['ms']['median']:.1f} ms",
        }
        for name, forms in found.items()
        if {"float32", AUTOCAST, FLOOR} <= set(forms)
    ]


def _memory(forms: Mapping[str, Any]) -> float:
    return forms[AUTOCAST]["peak MiB"] / forms["float32"]["peak MiB"]


def _row(row: Mapping[str, Any]) -> dict[str, Any]:
    traced, kinds = row["trace and lower s"], {"float32": "TF32", "highest": "float32"}
    return {
        "": NAMES[row["network"]],
        "step": row["form"],
        "dtype": kinds.get(row["form"], row["dtype"]),
        "ms": f"{row['ms']['median']:.2f}",
        "relative to by hand": results.ratio(row[f"of {FLOOR}"], 1),
        "speedup over TF32": results.ratio(row["TF32 over it"], 1),
        "temporary MiB": f"{row['temporary MiB']:.0f}",
        "trace s": "" if traced is None else f"{traced:.1f}",
        "compile s": f"{row['compile s']:.0f}",
    }


def _predicted(counted: Mapping[str, Any], timed: Mapping[Any, Any]) -> dict[str, str]:
    name, dtype = counted["network"], counted["dtype"]
    ours, small = timed[name, AUTOCAST, dtype], timed.get((name, INT8, dtype))
    estimate, int8 = counted.get("seconds of int8, of autocast"), ""
    if estimate and small:
        took = small["ms"]["median"] / ours["ms"]["median"]
        int8 = f"{estimate:.2f}, measured {took:.2f}"
    hand, tf32 = (
        counted[f"bytes of {x}"] for x in ("autocast, of by hand", "TF32, of autocast")
    )
    return {
        "": f"{NAMES[name]}, {dtype}",
        "autocast over by hand": f"{hand:.2f}, measured {ours['of by hand']:.2f}",
        "TF32 over autocast": f"{tf32:.2f}, measured {ours['TF32 over it']:.2f}",
        '`residuals="int8"` over autocast': int8,
    }
