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

import dataclasses
import functools
import importlib.util
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import jaxmp

from .counting import compiled as steps_on
from .counting import results, steps, timing
from .counting.compiled import MIB, first_line
from .counting.measure import IN_A_HURRY
from .counting.steps import BACKWARD, FLOOR
from .counting.tables import show
from .networks import basic, families
from .networks.fused import fused
from .residuals import checkpointed

ROOT = pathlib.Path(__file__).parent.parent
AUTOCAST, INT8 = "jaxmp autocast", "autocast int8"
FORMS = ("float32", FLOOR, "jaxmp modules", AUTOCAST, "jaxmp autocast, rounded", INT8)
BOTH_PASSES = (AUTOCAST, BACKWARD)
FLOAT16 = (FLOOR, "jaxmp cast", *BOTH_PASSES, "jmp", "flax DynamicScale", "mpx")
ALL_FORMS = ("gpt-160m", "resnet-50")  # also in true float32, and in float16
IN_FLOAT16 = ("llama", "vit", "bert")  # also under autocast in float16
# Autocast with what else saves memory: where `nn.remat` is around each layer, and how
# residuals are stored; or in which dtype the moments of bfloat16 parameters are.
CHECKPOINT, BOTH = "checkpoint", "checkpoint and int8"
RESIDUALS = {INT8: "int8", CHECKPOINT: None, BOTH: "int8"}
STATES = {"bfloat16 state": "bfloat16", "int8 state": "int8"}
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
    "lstm": "LSTM",
    "mlp": "MLP",
    "gemma": "Gemma",
    "state space": "State space",
}
FULL = families.FAMILIES | basic.NETWORKS | fused(basic.NETWORKS)
TINY = families.SMALL | {
    "gpt-160m": basic.TINY["gpt"],
    "resnet-50": basic.TINY["resnet"],
    "mlp": basic.TINY["mlp"],
}
TINY |= fused({"gpt-160m": TINY["gpt-160m"]})


@dataclasses.dataclass
class Options:
    """What to measure, how long, and where to save it."""

    networks: tuple[str, ...] = tuple(NAMES)
    forms: tuple[str, ...] = ()
    """Of a step in bfloat16, if not all that are usual. That with two dtypes comes with
    autocast in float16."""
    seconds: float = 540.0
    """No network begins later; what has begun is finished."""
    tiny: bool = False
    """Try it out with tiny networks, on a CPU too."""
    torch: bool = True
    """Time PyTorch, where it is installed."""
    output: pathlib.Path | None = None
    """A file of JSON."""


class Case(NamedTuple):
    """A training step of a network."""

    form: str
    dtype: str


def main(arguments: list[str]) -> None:
    """Prints a table for each network and one of what is gained, and saves all rows."""
    options = tyro.cli(
        Options, args=arguments, prog="python -m benchmarks gpu", description=__doc__
    )
    networks = TINY if options.tiny else FULL
    if unknown := set(options.networks) - set(networks):
        known = ", ".join(networks)
        raise SystemExit(f"there is no network {unknown.pop()!r}; there are: {known}")
    until = time.monotonic() + options.seconds
    rows: dict[str, list[Any]] = {"ceilings": [], "steps": [], "left out": []}

    def report(line: str) -> None:
        print(line, flush=True)
        rows["left out"].append(line)

    # Before JAX takes the memory of the GPU.
    if options.torch and (found := in_torch(options, report)):
        rows["torch"] = found
        show("PyTorch, torch.amp", found)
    if jax.default_backend() != "gpu" and not options.tiny:
        raise SystemExit(
            f"gpu needs an NVIDIA GPU, but JAX finds only {jax.devices()}. Install "
            "`jax[cuda12]` or `jax[cuda13]`, or try the program out with `--tiny`."
        )
    device = jax.devices()[0].device_kind
    path = options.output or results.target("gpu_tiny" if options.tiny else "gpu")
    save = functools.partial(results.save, path, device, device, ["gpu", *arguments])
    rows["ceilings"] += ceilings(2**16 if options.tiny else 2**28)
    show("the highest rates that this GPU reached", rows["ceilings"])
    for name in options.networks:
        if time.monotonic() > until:
            report(f"{name}: left out, the time is over")
            continue
        start = time.monotonic()
        cases = cases_of(name, options.forms)
        found = list(measure(name, networks[name], cases, options.tiny, report))
        rows["steps"] += found
        save(rows)
        show(f"{name}, after {time.monotonic() - start:.0f} s", found)
    save(rows)
    show(f"what autocast gains on {device}, in bfloat16", gains(rows["steps"]))
    print(f"saved to {path}")


def cases_of(name: str, forms: tuple[str, ...]) -> list[Case]:
    """Returns the steps of a network that are timed: those named, or the usual."""
    cases = [Case(form, "bfloat16") for form in forms or FORMS if form != BACKWARD]
    if name in ALL_FORMS and not forms:
        cases.insert(1, Case("highest", "bfloat16"))
        cases += [Case(form, "float16") for form in FLOAT16]
    elif BACKWARD in forms or (name in IN_FLOAT16 and not forms):
        cases += [Case(form, "float16") for form in BOTH_PASSES]
    return cases


def measure(
    name: str, network: Any, cases: Sequence[Case], tiny: bool, report: Any
) -> Iterator[dict]:
    """Compiles the steps of a network, times them in turns and yields their rows."""
    made = compile_steps(cases, network, report, IN_A_HURRY if tiny else None)
    samplers, host = {}, {}
    for case, (step, _) in made.items():
        try:
            samplers[case], host[case] = steps_on.sampler(step, 0 if tiny else 0.12)
        except jax.errors.JaxRuntimeError as error:
            report(f"{name}, {' in '.join(case)}: does not run, {first_line(error)}")
    times = timing.interleaved(samplers, 2 if tiny else 5)
    for case in samplers:
        step, seconds = made[case]
        yield {
            "network": name,
            **case._asdict(),
            "ms": timing.spread(1e3 * np.array(times[case])),
            f"of {FLOOR}": _ratio(times[case], times.get(Case(FLOOR, case.dtype))),
            "TF32 over it": _ratio(times.get(Case("float32", "bfloat16")), times[case]),
            "peak MiB": step.peak / MIB,
            **seconds,
            "host ms": 1e3 * float(np.median(host[case])),
        }


def compile_steps(
    cases: Sequence[Case], network: Any, report: Any, options: Any
) -> dict[Case, Any]:
    """Returns compiled steps, with the seconds that tracing and compiling took.

    XLA times candidates for every product and convolution, and remembers the best. The
    first step of a dtype does that alone, and those like it wait and take what it has
    found: that is quicker, and all of them are then made of the same kernels.
    """
    batch = jax.device_put(network.batch())
    start = steps_on.variables(network, options)
    waiting: dict[Case, tuple[Future, Future, float]] = {}
    firsts: dict[Any, Future] = {}
    with ThreadPoolExecutor(2 * len(cases)) as pool:  # most of them wait
        for case in cases:
            try:
                made = contestant(case, network)
            except steps.Unavailable as reason:
                report(f"{case.form} in {case.dtype} is left out: {reason}")
                continue
            precision = "highest" if case.form == "highest" else None
            began = time.monotonic()
            with checkpointed(case.form in (CHECKPOINT, BOTH)):
                init, step = steps_on.lower(made, start, batch, precision)
            seconds = time.monotonic() - began
            kind = (case.dtype, case.form in ("float32", "highest"), precision)
            future = pool.submit(_compile_after, firsts.get(kind), step, options)
            firsts.setdefault(kind, future)
            init = pool.submit(init.compile, options)
            waiting[case] = init, future, seconds
    done = {}
    for case, (init, step, traced) in waiting.items():
        try:
            program, seconds = step.result()
            init = functools.partial(init.result(), start)
        except jax.errors.JaxRuntimeError as error:
            report(f"{' in '.join(case)} does not compile: {first_line(error)}")
            continue
        step = steps_on.Compiled(init, program, batch, steps_on.peak(program))
        temporary = program.memory_analysis().temp_size_in_bytes / MIB
        took = {"trace and lower s": traced, "compile s": seconds}
        done[case] = step, {"temporary MiB": temporary} | took
    return done


def contestant(case: Case, network: Any) -> steps.Contestant:
    """Returns the training step of a case."""
    dtype = jnp.dtype(case.dtype)
    if case.form in RESIDUALS:
        stored = RESIDUALS[case.form]
        made = steps.jaxmp_autocast(network, dtype, 1, residuals=stored)
        return steps.made(case.form, network, made)
    if case.form in STATES:
        return narrow(case.form, network, STATES[case.form])
    form = "float32" if case.form == "highest" else case.form
    return steps.contestant(form, network, dtype=dtype)


def narrow(form: str, network: Any, state_dtype: str) -> steps.Contestant:
    """Returns a step that trains bfloat16 parameters, rounded stochastically."""
    adam = optax.adam(steps.LEARNING_RATE)
    tx = jaxmp.stochastic_rounding(adam, state_dtype=state_dtype)
    loss_fn = steps.loss_of(network.model.apply)
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    grad_fn = jaxmp.autocast(grad_fn, "mixed_bfloat16")

    def init(variables):
        params = jaxmp.cast_tree(variables["params"], jnp.bfloat16)
        return steps.State(params, variables.get("batch_stats", {}), tx.init(params))

    def step(state, batch):
        (loss, stats), grads = grad_fn(state.params, state.batch_stats, *batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return steps.State(params, stats, opt_state), loss

    return steps.Contestant(form, init, jax.jit(step, donate_argnums=0))


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


def in_torch(options: Options, report: Any) -> list[dict[str, Any]]:
    """Times the same networks in PyTorch, in a process that has a third of the time."""
    if importlib.util.find_spec("torch") is None:
        report("PyTorch is left out: it is not installed")
        return []
    command = [sys.executable, "-m", "benchmarks.networks.in_torch"]
    command += [*options.networks, *["--tiny"] * options.tiny]
    try:
        seconds = options.seconds / 3
        pipe = subprocess.PIPE
        done = subprocess.run(command, cwd=ROOT, stdout=pipe, timeout=seconds)
        lines = done.stdout
        if done.returncode:
            report(f"PyTorch ended with {done.returncode}")
    except subprocess.TimeoutExpired as error:
        report("PyTorch was stopped, its time was over")
        lines = error.stdout or b""
    return [json.loads(x) for x in lines.decode().splitlines() if x.endswith("}")]


def gains(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Returns a row for each network: autocast in bfloat16 beside TF32 and by hand."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["dtype"] == "bfloat16":
            found.setdefault(row["network"], {})[row["form"]] = row
    shown = []
    for name, forms in found.items():
        if not {"float32", AUTOCAST, FLOOR} <= set(forms):
            continue
        tf32, ours = forms["float32"], forms[AUTOCAST]
        shown.append(
            {
                "network": NAMES.get(name, name),
                "TF32": f"{tf32['ms']['median']:.1f} ms",
                "autocast": f"{ours['ms']['median']:.1f} ms",
                "times as fast": f"{ours['TF32 over it']:.2f}",
                "memory": f"{ours['peak MiB'] / tf32['peak MiB']:.2f}",
                "by hand": f"{forms[FLOOR]['ms']['median']:.1f} ms",
            }
        )
    return shown


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
