"""Training steps on one NVIDIA GPU, in under ten minutes.

Ceilings first; then every contestant's training step and its optimizer alone, in turns;
the same models in PyTorch; and the batches that fit in a budget of memory. It needs
jax, flax, optax and jmp. What is missing, and what no time is left for, is left out
with a line that says so. What is measured is saved after every section, the most
important sections are the first, and the program ends in time whatever happens.

A step's time is that of the GPU as long as "host ms", the time that it takes to hand
over a step, is the shorter one.
"""

import argparse
import functools
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import networks, results
from .compiled import (
    MIB,
    Effort,
    Variant,
    compare,
    first_line,
    largest_batch,
    lower,
    peak,
    variables,
)
from .networks import Network
from .optimizer import GivenGradients
from .steps import CONTESTANTS, contestant
from .tables import show
from .timing import spread

ROOT = pathlib.Path(__file__).parent.parent


class Size(NamedTuple):
    """What is measured, in this order, and how large it is."""

    plan: tuple[str, ...]  # a function's name in KINDS, and its arguments
    networks: dict[str, Network]
    copied: int  # numbers
    matrix: int  # rows and columns
    fitted: tuple[str, ...]  # contestants whose largest batches are looked for
    lengths: tuple[int, ...]  # of sequences
    budget_mib: int
    tries: int  # of batch sizes
    effort: Effort


FULL = Size(
    plan=(
        "ceilings",
        "step gpt-160m float16",
        "optimizer gpt-160m float16",
        "torch",
        "batches gpt-160m",
        "step resnet-50 float16",
        "step gpt-160m bfloat16",
        "step mlp float16",
        "step gpt-12m float16",
        "step resnet-18 float16",
        "optimizer resnet-50 float16",
        "step resnet-50 bfloat16",
        "optimizer mlp float16",
        "optimizer gpt-160m bfloat16",
        "step mlp bfloat16",
        "step gpt-12m bfloat16",
        "step resnet-18 bfloat16",
    ),
    networks=networks.NETWORKS,
    copied=2**28,
    matrix=8192,
    fitted=("float32", "jaxmp cast", "jaxmp autocast"),
    lengths=(64, 128, 256, 512, 1024),
    budget_mib=24 * 1024,
    tries=6,
    effort=Effort(),
)
TINY = Size(
    plan=(
        "ceilings",
        "step mlp float16",
        "optimizer mlp bfloat16",
        "torch",
        "batches gpt",
    ),
    networks={
        "mlp": networks.mlp(8, features=16, layers=0, classes=10),
        "gpt": networks.gpt(1, layers=1, width=16, heads=2, vocabulary=32, length=8),
    },
    copied=2**16,
    matrix=64,
    fitted=("float32", "jaxmp cast"),
    lengths=(8,),
    budget_mib=16,
    tries=2,
    effort=Effort(
        rounds=2,
        seconds=0,
        compiler_options={"xla_backend_optimization_level": 0},  # in a hurry
    ),
)


def main(arguments: list[str]) -> None:
    """Runs all sections, in a few processes, and saves what they have measured.

    Processes, because JAX does not give memory back, PyTorch brings its own CUDA, the
    search for batch sizes needs a limit of memory, and one may crash.
    """
    options = _options(arguments)
    if options.here:
        return run_here(options, arguments)
    until = time.monotonic() + options.seconds
    rows: dict[str, Any] = {"left out": []}
    hardware = None

    def report(line):
        print(line, flush=True)
        rows["left out"].append(line)

    for group in groups(options):
        names = ", ".join(group)
        seconds = until - time.monotonic()
        if seconds <= 0:
            report(f"{names}: left out, the {options.seconds:.0f} seconds are over")
            continue
        if group == ["torch"] and importlib.util.find_spec("torch") is None:
            report("torch: left out, it is not installed")
            continue
        part = _in_a_process(group, seconds, options, report)
        if part is None:
            continue
        hardware = hardware or part["hardware"]
        rows["left out"] += part["rows"].pop("left out", [])
        rows |= part["rows"]
        results.save(
            options.output, _key(hardware), hardware, ["gpu", *arguments], rows
        )
    if hardware is None:
        raise SystemExit("Nothing was measured.")
    print(f"saved to {options.output}")


def run_here(options: argparse.Namespace, arguments: list[str]) -> None:
    """Runs the sections of one process, and saves after each."""
    if jax.default_backend() != "gpu" and not options.tiny:
        raise SystemExit(
            f"gpu needs an NVIDIA GPU, but JAX finds only {jax.devices()}. Install "
            "`jax[cuda12]` or `jax[cuda13]`, or try the program out with `--tiny`."
        )
    rows: dict[str, Any] = {"left out": []}
    size = _size(options)
    until = time.monotonic() + options.seconds
    for name in options.only:
        kind, *words = name.split()

        def report(line, name=name):
            print(line, flush=True)
            rows["left out"].append(f"{name}: {line}")

        if time.monotonic() > until:
            report("left out, the time is over")
            continue
        start = time.monotonic()
        try:
            effort = size.effort._replace(report=report, until=until)
            rows[name] = list(KINDS[kind](*words, size._replace(effort=effort)))
        except Exception as error:  # the other sections go on
            report(f"failed, {first_line(error)}")
        show(f"{name}, after {time.monotonic() - start:.0f} s", rows.get(name, ()))
        results.save(
            options.output, _key(device()), device(), ["gpu", *arguments], rows
        )


def groups(options: argparse.Namespace) -> list[list[str]]:
    """Returns the sections by process, in their order."""
    names = [
        name
        for name in _size(options).plan
        if options.only is None or name in options.only
    ]
    found: list[list[str]] = []
    for name in names:
        if found and _process(name) == _process(found[-1][0]):
            found[-1].append(name)
        else:
            found.append([name])
    return found


def ceilings(size: Size) -> Iterator[dict[str, Any]]:
    """Yields how fast the GPU copies and multiplies, which nothing surpasses."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], size.copied)
    rates = 2e-9 * x.nbytes / _seconds(jnp.negative, (x,), size.effort)
    yield {"ceiling": "reading and writing", "rate": spread(rates), "unit": "GB/s"}
    for dtype, precision in (
        ("float16", None),
        ("bfloat16", None),
        ("float32", "tensorfloat32"),
        ("float32", "float32"),
    ):
        shape = (size.matrix, size.matrix)
        matrices = [jax.random.normal(key, shape, dtype) for key in keys]
        product = functools.partial(jnp.matmul, precision=precision)
        rates = 2e-12 * size.matrix**3 / _seconds(product, matrices, size.effort)
        name = f"product of {dtype} matrices" + f" by {precision}" * bool(precision)
        yield {"ceiling": name, "rate": spread(rates), "unit": "TFLOP/s"}


def step(name: str, dtype: str, size: Size) -> list[dict[str, Any]]:
    """Times the training step of every contestant, and of float32 twice."""
    network = size.networks[name]
    variants = [
        Variant(name, name, network, dtype) for name in CONTESTANTS if name != "float32"
    ]
    float32 = Variant("float32", "float32", network, precision="float32")
    tf32 = float32._replace(label="float32 by TF32", precision="tensorfloat32")
    return compare([*variants, float32, tf32], size.effort)


def optimizer(name: str, dtype: str, size: Size) -> list[dict[str, Any]]:
    """Times what comes after the gradients, which are given."""
    network = size.networks[name]
    given, wide = GivenGradients(network, dtype), GivenGradients(network, "float32")
    variants = [
        Variant(name, name, wide if name == "float32" else given, dtype)
        for name in CONTESTANTS
    ]
    return compare(variants, size.effort)


def batches(name: str, size: Size) -> Iterator[dict[str, Any]]:
    """Yields the largest batch that fits in the budget, by the length of a sequence.

    Found by the memory that compiled steps need by their own account, and then run in
    this process, which has the memory of the budget and no more.
    """
    effort, options = size.effort, size.effort.compiler_options
    if jax.default_backend() == "gpu":
        # The memory is the same without timing candidates for each product.
        options = {"xla_gpu_autotune_level": 0}
    fields = ("layers", "width", "heads", "vocabulary")
    sizes = {field: getattr(size.networks[name].model, field) for field in fields}
    for length in size.lengths:
        found = {}
        unit = max(1, 1024 // length)  # batches are multiples of this
        for contestant_name in size.fitted:
            if time.monotonic() > effort.until:
                effort.report(f"{length}, {contestant_name}: left out, time is over")
                continue
            network = networks.gpt(unit, length=length, **sizes)
            trainer = _Trainer(contestant_name, network, options)
            n, needed = largest_batch(
                lambda n, trainer=trainer: peak(trainer.compiled(n)[1]),
                size.budget_mib * MIB,
                tries=size.tries,
            )
            found[contestant_name] = n * unit
            reference = found.get("float32")
            yield {
                "length": length,
                "step": contestant_name,
                "batch": n * unit,
                "of float32's": n * unit / reference if reference else None,
                "peak MiB, compiled": needed / MIB,
                "has run": n > 0 and trainer.runs(n, effort.report),
            }


class _Trainer:
    """A contestant at many batch sizes."""

    def __init__(self, name, network, options):
        self.network, self.options = network, options
        self.contestant = contestant(name, network)
        self.start = jax.tree.map(np.asarray, variables(network, options))
        self.compiled = functools.cache(self.compiled)

    def batch(self, n):
        return jax.tree.map(lambda x: np.concatenate([x] * n), self.network.batch())

    def compiled(self, n):
        init, step = lower(self.contestant, self.start, self.batch(n))
        return init, step.compile(self.options)

    def runs(self, n, report):
        init, step = self.compiled(n)
        try:
            leaves = init.compile(self.options)(self.start)
            jax.block_until_ready(step(leaves, self.batch(n)))
        except jax.errors.JaxRuntimeError as error:
            report(f"{n} x {self.network.batch_size}: {first_line(error)}")
            return False
        return True


KINDS = {"ceilings": ceilings, "step": step, "optimizer": optimizer, "batches": batches}


def device() -> str:
    """Describes the GPU, or what is there instead."""
    driver = _nvidia_smi("driver_version")
    return jax.devices()[0].device_kind + (f", driver {driver}" if driver else "")


def _options(arguments):
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tiny", action="store_true", help="try it out, on a CPU too")
    parser.add_argument("--seconds", type=float, default=540.0, help="when to stop")
    parser.add_argument("--only", action="append", help="a section; may be repeated")
    parser.add_argument("--budget-mib", type=int, help="memory of `batch sizes`")
    parser.add_argument("--here", action="store_true", help="start no processes")
    parser.add_argument("--output", type=pathlib.Path)
    options = parser.parse_args(arguments)
    if options.output is None:  # what `--tiny` gives is no result
        folder = pathlib.Path(tempfile.gettempdir())
        folder = folder if options.tiny else results.FOLDER
        options.output = folder / "gpu.json"
    plan = _size(options).plan
    if options.here and not options.only:
        options.only = [name for name in plan if name != "torch"]
    for name in options.only or ():
        if name not in plan:
            parser.error(f"there is no section {name!r}; there are: {', '.join(plan)}")
    return options


def _size(options):
    size = TINY if options.tiny else FULL
    return size._replace(budget_mib=options.budget_mib or size.budget_mib)


def _key(hardware):
    """Returns the name of results, so that those of two GPUs keep beside each other."""
    return hardware.split(",")[0]


def _process(name):
    """Returns which sections share a process with one: those that return the same."""
    kind = name.split()[0]
    return kind if kind in ("torch", "batches") else "steps"


def _in_a_process(group, seconds, options, report):
    """Runs sections in a process of their own, and returns what it has saved."""
    size = _size(options)
    environment = {}
    if group == ["torch"]:
        command, seconds = ["torch_steps"], min(seconds, 150.0)
    else:
        command = ["gpu", "--here", *(f"--only={name}" for name in group)]
        command.append(f"--budget-mib={size.budget_mib}")
    if _process(group[0]) == "batches" and (total := _nvidia_smi("memory.total")):
        fraction = size.budget_mib / float(total)
        environment["XLA_CLIENT_MEM_FRACTION"] = f"{fraction:.4f}"
    if options.tiny:
        command.append("--tiny")
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "part.json"
        command += [f"--seconds={seconds:.0f}", f"--output={output}"]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks", *command],
                cwd=ROOT,
                env=os.environ | environment,
                timeout=seconds + 20,
            )
            if done.returncode:
                report(f"{', '.join(group)}: ended with {done.returncode}")
        except subprocess.TimeoutExpired:
            report(f"{', '.join(group)}: stopped, the time is over")
        if not output.exists():
            return None
        (part,) = json.loads(output.read_text()).values()
        return part


def _nvidia_smi(query):
    """Asks NVIDIA's tool about the first GPU; returns "" where there is none."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return lines[0].strip() if lines else ""


def _seconds(function, args, effort):
    """Returns samples of the seconds of a call, as an array."""
    function = jax.jit(function)

    def sample(calls):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*args)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    sample(1)
    calls = max(1, int(effort.seconds / sample(1)))
    return np.array([sample(calls) for _ in range(effort.rounds)])
