"""Training steps on one NVIDIA GPU, in under ten minutes.

Ceilings first; then every contestant's training step and its optimizer alone, in turns;
the same models in PyTorch; and the batches that fit in a budget of memory. It needs
jax, flax, optax, jmp, rich and tyro. What is missing, and what no time is left for, is
left out with a line that says so. Every row is saved as soon as there is one, the most
important sections are the first, and the program ends in time whatever happens.

A step's time is that of the GPU as long as "host ms", the time that it takes to hand
over a step, is the shorter one. The peak is what a compiled step needs by its own
account.
"""

import dataclasses
import functools
import importlib.util
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from .counting import h200, results, timing
from .counting.compiled import (
    MIB,
    Effort,
    Variant,
    compare,
    first_line,
    largest_batch,
    lower,
    peak,
)
from .counting.measure import IN_A_HURRY
from .counting.steps import CONTESTANTS, contestant
from .counting.tables import show
from .counting.timing import spread
from .networks import basic as networks
from .networks.basic import Network
from .networks.optimizer import GivenGradients

ROOT = pathlib.Path(__file__).parent.parent
FITTED = ("float32", "jaxmp cast")  # whose largest batches are looked for
RESERVED = {"torch": 1 / 5, "batches": 1 / 6}  # of the time, whatever comes before
GRACE = 20.0  # seconds that a process has for the measurement in hand
# To search for batches: quickly, and without what XLA does when memory is short, which
# is to compute things twice; that would fit larger batches, at a price unseen.
SEARCH = h200.OPTIONS | {"xla_disable_hlo_passes": "rematerialization"}


class Size(NamedTuple):
    """What is measured, in this order, and how large it is."""

    plan: tuple[str, ...]  # a function's name in KINDS, and its arguments
    networks: dict[str, Network]
    copied: int  # numbers
    matrix: int  # rows and columns
    lengths: tuple[int, ...]  # of sequences
    budget_mib: int
    tries: int  # of batch sizes
    effort: Effort


FULL = Size(
    plan=(
        "ceilings",
        "step gpt-160m float16",
        "step resnet-50 float16",
        "step mlp float16",
        "optimizer gpt-160m float16",
        "step gpt-160m bfloat16",
        "torch",
        "batches gpt-160m",
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
    lengths=(256, 1024),
    budget_mib=24 * 1024,
    tries=4,
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
        "gpt": networks.gpt(1, layers=0, width=16, heads=2, vocabulary=32, length=8),
    },
    copied=2**16,
    matrix=64,
    lengths=(8,),
    budget_mib=16,
    tries=2,
    effort=Effort(
        rounds=2,
        seconds=0,
        compiler_options=IN_A_HURRY,
    ),
)


@dataclasses.dataclass
class Options:
    """What to measure, how long, and where to save it."""

    tiny: bool = False
    """Try it out, on a CPU too."""
    seconds: float = 540.0
    """When to stop."""
    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A section; may be repeated."""
    budget_mib: int | None = None
    """Memory of `batches`."""
    here: bool = False
    """Start no processes."""
    output: pathlib.Path | None = None
    """A file of JSON."""

    @property
    def size(self) -> Size:
        """What is measured, and how large it is."""
        size = TINY if self.tiny else FULL
        return size._replace(budget_mib=self.budget_mib or size.budget_mib)

    @property
    def sections(self) -> tuple[str, ...]:
        """What was asked for, or all that this process can do."""
        plan = self.size.plan
        return self.only or tuple(x for x in plan if not (self.here and x == "torch"))

    @property
    def path(self) -> pathlib.Path:
        """The file, which is in the scratch folder if the results are not the whole."""
        in_part = results.SCRATCH / "gpu.json"
        whole = in_part if self.tiny or self.only else results.target("gpu")
        return self.output or whole


def main(arguments: list[str]) -> None:
    """Runs all sections, in a few processes, and saves what they have measured.

    Processes, because JAX does not give memory back, PyTorch brings its own CUDA, the
    search for batch sizes needs a limit of memory, and one may crash.
    """
    options = _options(arguments)
    options.path.parent.mkdir(parents=True, exist_ok=True)
    # Better now than after ten minutes, if nothing can be written there.
    tempfile.TemporaryFile(dir=options.path.parent).close()
    if options.here:
        return run_here(options, arguments)
    until = time.monotonic() + options.seconds
    rows: dict[str, Any] = {"left out": []}
    hardware = None

    def report(line):
        print(line, flush=True)
        rows["left out"].append(line)

    waiting = groups(options)
    if ["torch"] in waiting and importlib.util.find_spec("torch") is None:
        report("torch: left out, it is not installed")
        waiting.remove(["torch"])
    while waiting:
        group = waiting.pop(0)
        share, *later = (RESERVED.get(_process(g[0]), 0) for g in [group, *waiting])
        seconds = until - time.monotonic() - options.seconds * sum(later)
        if share and waiting:  # the last one may have all that is left
            seconds = min(seconds, options.seconds * share)
        if seconds <= 0:
            report(f"{', '.join(group)}: left out, the time is over")
        else:
            part, trouble = _in_a_process(group, seconds, options)
            hardware = hardware or part["hardware"]
            rows["left out"] += part["rows"].pop("left out", [])
            rows |= {name: found for name, found in part["rows"].items() if found}
            if trouble:  # costs the section that was in hand; or all, if none was
                begun = [name for name in group if name in part["rows"]]
                lost = begun[-1:] or group
                report(f"{', '.join(lost)}: {trouble}")
                if rest := group[group.index(lost[-1]) + 1 :]:
                    waiting.insert(0, rest)
        if hardware:
            command = ["gpu", *arguments]
            results.save(options.path, _key(hardware), hardware, command, rows)
    if len(rows) == 1:
        raise SystemExit("Nothing was measured.")
    print(f"saved to {options.path}")


def run_here(options: Options, arguments: list[str]) -> None:
    """Runs the sections of one process, and saves every row as it comes."""
    if jax.default_backend() != "gpu" and not options.tiny:
        raise SystemExit(
            f"gpu needs an NVIDIA GPU, but JAX finds only {jax.devices()}. Install "
            "`jax[cuda12]` or `jax[cuda13]`, or try the program out with `--tiny`."
        )
    rows: dict[str, Any] = {"left out": []}
    size, hardware = options.size, device()
    until = time.monotonic() + options.seconds

    def keep():
        command = ["gpu", *arguments]
        results.save(options.path, _key(hardware), hardware, command, rows)

    for name in options.sections:
        kind, *words = name.split()

        def report(line, name=name):
            print(line, flush=True)
            rows["left out"].append(f"{name}: {line}")
            keep()

        if time.monotonic() > until:
            report("left out, the time is over")
            continue
        start = time.monotonic()
        rows[name] = []
        keep()  # so that one sees what was in hand when the process was ended
        effort = size.effort._replace(report=report, until=until)
        try:
            for row in KINDS[kind](*words, size._replace(effort=effort)):
                rows[name].append(row)
                keep()
        except Exception as error:  # the other sections go on
            traceback.print_exc()
            report(f"failed, {first_line(error)}")
        show(f"{name}, after {time.monotonic() - start:.0f} s", rows[name])


def groups(options: Options) -> list[list[str]]:
    """Returns the sections by process, in their order."""
    names = [name for name in options.size.plan if name in options.sections]
    return [list(group) for _, group in itertools.groupby(names, _process)]


def ceilings(size: Size) -> Iterator[dict[str, Any]]:
    """Yields how fast the GPU copies and multiplies, which nothing surpasses."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (size.copied,))
    rates = 2e-9 * x.nbytes / _seconds(jnp.negative, (x,), size.effort)
    yield {"ceiling": "reading and writing", "rate": spread(rates), "unit": "GB/s"}
    for label, dtype, precision in (
        ("float16", "float16", None),
        ("bfloat16", "bfloat16", None),
        ("float32 by TF32", "float32", "default"),
        ("float32", "float32", "highest"),
    ):
        shape = (size.matrix, size.matrix)
        matrices = [jax.random.normal(key, shape, dtype) for key in keys]
        product = functools.partial(jnp.matmul, precision=precision)
        rates = 2e-12 * size.matrix**3 / _seconds(product, matrices, size.effort)
        name = f"product of matrices, {label}"
        yield {"ceiling": name, "rate": spread(rates), "unit": "TFLOP/s"}


def step(name: str, dtype: str, size: Size) -> list[dict[str, Any]]:
    """Times the training step of every contestant, and of float32 twice.

    By TF32 is what users get who ask for nothing; the other one asks for float32.
    """
    network = size.networks[name]
    variants = [
        Variant(name, name, network, dtype) for name in CONTESTANTS if name != "float32"
    ]
    float32 = Variant("float32", "float32", network, precision="highest")
    tf32 = float32._replace(label="float32 by TF32", precision="default")
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
    this process, which has the memory of the budget and hardly more.
    """
    effort, options = size.effort, size.effort.compiler_options
    if jax.default_backend() == "gpu":
        options = SEARCH
    budget = size.budget_mib * MIB
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", budget)
    if limit > 1.05 * budget:
        effort.report(f"what has run had {limit / MIB:.0f} MiB, not the budget's")
    budget = min(budget, limit)
    fields = ("layers", "width", "heads", "vocabulary")
    sizes = {field: getattr(size.networks[name].model, field) for field in fields}

    def search(case):
        length, name = case
        unit = max(1, 1024 // length)  # batches are multiples of this
        network = networks.gpt(unit, length=length, **sizes)
        step_of = _compiler(name, network, options)
        n, needed = largest_batch(
            lambda n: peak(step_of(n)), budget, tries=size.tries, until=effort.until
        )
        return n * unit, needed, step_of(n) if n else None

    cases = list(itertools.product(size.lengths, FITTED))
    batch_of = {}
    with ThreadPoolExecutor(len(cases)) as pool:
        found = zip(cases, pool.map(search, cases), strict=True)
        for (length, contestant_name), (batch, needed, step) in found:
            if time.monotonic() > effort.until:
                effort.report(f"{length}, {contestant_name}: cut, the time is over")
            if step is None:
                effort.report(f"{length}, {contestant_name}: no batch was found")
                continue
            batch_of[length, contestant_name] = batch
            reference = batch_of.get((length, "float32"))
            yield {
                "length": length,
                "step": contestant_name,
                "batch": batch,
                "of float32's": batch / reference if reference else None,
                "peak MiB": needed / MIB,
                "budget MiB": budget / MIB,
                "has run": _runs(step, effort.report),
            }


def _compiler(name, network, options):
    """Returns a function from a number to a step, which takes that many batches."""
    made = contestant(name, network)
    x, _ = network.batch(1)
    start = jax.eval_shape(network.model.init, jax.random.key(0), x)

    @functools.cache
    def compiled(n):
        batch = network._replace(batch_size=n * network.batch_size).shapes()
        _, step = lower(made, start, batch)
        return step.compile(options)

    return compiled


def _runs(step, report):
    """Returns whether a step has room, which does not depend on its numbers."""
    try:
        args, _ = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), step.args_info)
        jax.block_until_ready(step(*jax.device_put(args)))
    except jax.errors.JaxRuntimeError as error:
        report(f"does not run: {first_line(error)}")
        return False
    return True


KINDS = {"ceilings": ceilings, "step": step, "optimizer": optimizer, "batches": batches}


def device() -> str:
    """Describes the GPU, or what is there instead."""
    driver = _nvidia_smi("driver_version")
    return jax.devices()[0].device_kind + (f", driver {driver}" if driver else "")


def _options(arguments: list[str]) -> Options:
    options = tyro.cli(
        Options, args=arguments, prog="python -m benchmarks gpu", description=__doc__
    )
    if unknown := set(options.only) - set(options.size.plan):
        known = ", ".join(options.size.plan)
        raise SystemExit(f"there is no section {unknown.pop()!r}; there are: {known}")
    return options


def _key(hardware):
    """Returns the name of results, so that those of two GPUs keep beside each other."""
    return hardware.split(",")[0]


def _process(name):
    """Returns which sections share a process with one: those that return the same."""
    kind = name.split()[0]
    return kind if kind in RESERVED else "steps"


def _in_a_process(group, seconds, options):
    """Runs sections in a process of their own.

    Returns:
        What it has saved; and what has ended it before its time, if anything has.
    """
    size = options.size
    if group == ["torch"]:
        command = ["torch_steps"]
    else:
        command = ["gpu", "--here", *(f"--only={name}" for name in group)]
        command.append(f"--budget-mib={size.budget_mib}")
    if options.tiny:
        command.append("--tiny")
    # Without the user's settings of memory, which may contradict the limit.
    environment = {k: v for k, v in os.environ.items() if "XLA_PYTHON_CLIENT" not in k}
    if _process(group[0]) == "batches" and (total := _total_mib()):
        # A hundredth more, for what lies beside a step, and because the total of
        # NVIDIA's tool is a little more than CUDA's.
        fraction = min(0.95, 1.01 * size.budget_mib / total)
        environment["XLA_CLIENT_MEM_FRACTION"] = f"{fraction:.4f}"
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "part.json"
        command += [f"--seconds={seconds:.0f}", f"--output={output}"]
        command = [sys.executable, "-m", "benchmarks", *command]
        try:
            limit = seconds + GRACE
            done = subprocess.run(command, cwd=ROOT, env=environment, timeout=limit)
            code = done.returncode
            trouble = f"its process ended with {code}" if code else None
        except subprocess.TimeoutExpired:
            trouble = "stopped, the time is over"
        if not output.exists():
            return {"hardware": None, "rows": {}}, trouble
        (part,) = json.loads(output.read_text()).values()
        return part, trouble


def _total_mib():
    """Returns the memory of the first GPU, or None if that is not to be known."""
    try:
        return float(_nvidia_smi("memory.total"))
    except ValueError:
        return None


def _nvidia_smi(query):
    """Asks NVIDIA's tool about the first GPU; returns "" if it does not answer."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0].strip()


def _seconds(function, args, effort):
    """Returns samples of the seconds of a call, as an array."""
    return timing.of_calls(
        functools.partial(jax.jit(function), *args),
        jax.block_until_ready,
        seconds=effort.seconds,
        rounds=effort.rounds,
    )
