"""Counts on paper what many devices send each other in one training step.

    python examples/scaling.py

A stack of MLP blocks is compiled for meshes of 8, 64 and 256 CPU devices, and nothing
is run. The collectives are read off the program after XLA has partitioned it, those
inside a loop as often as the loop runs, and each counts what a ring sends per device
and step: of n devices in a group and S bytes of the whole array

    all-reduce 2 S (n-1)/n     all-gather, reduce-scatter, all-to-all S (n-1)/n

An all-reduce of which each device keeps its slice alone counts as the reduce-scatter
into which compilers for GPU and TPU turn it.
"""

import collections
import dataclasses
import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxmp

BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4}
ALL = ("data", "model")
# Where the two matrices of a block lie, and who sums the gradients. The first axis of
# each counts the blocks. In tensor parallelism each device has some hidden units.
LAYOUTS = {
    "data parallel, jit": (P(), P(), "jit"),
    "data parallel, mesh": (P(), P(), "mesh"),
    "FSDP, jit": (P(None, ALL), P(None, ALL), "jit"),
    "FSDP, mesh": (P(None, ALL), P(None, ALL), "mesh"),
    "FSDP x TP, jit": (P(None, "data", "model"), P(None, "model", "data"), "jit"),
}
POLICIES = ("float32", "mixed_bfloat16", "p=f32,c=bf16,o=f32,r=bf16")


@dataclasses.dataclass
class Config:
    """Counts the bytes that each device sends in one training step."""

    devices: tuple[int, ...] = (8, 64, 256)
    width: int = 1024
    blocks: int = 8
    rows: int = 8
    """Sequences per device and step: the batch grows with the devices."""
    tokens: int = 128
    """Of a sequence."""
    tensor_parallel: int = 4
    """Devices in a group that splits the matrices."""
    accum_steps: tuple[int, ...] = (1, 4)


def apply(params, x):
    def block(x, weights):
        w_in, w_out = weights
        return x + jax.nn.relu(x @ w_in) @ w_out, None

    return jax.lax.scan(jax.checkpoint(block), x, (params["in"], params["out"]))[0]


def training_step(
    config: Config, layout: str, policy: str, steps: int, devices: int
) -> tuple[Callable, tuple[Any, ...]]:
    """Returns the step, and its arguments as shapes with shardings."""
    spec_in, spec_out, form = LAYOUTS[layout]
    model = config.tensor_parallel if "TP" in layout else 1
    cpus = np.array(jax.devices("cpu")[:devices])
    mesh = Mesh(cpus.reshape(devices // model, model), ("data", "model"))
    where = {"in": NamedSharding(mesh, spec_in), "out": NamedSharding(mesh, spec_out)}
    by_row = NamedSharding(mesh, P("data"))
    d = config.width

    def shape(shape, sharding):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    params = {
        "in": shape((config.blocks, d, 4 * d), where["in"]),
        "out": shape((config.blocks, 4 * d, d), where["out"]),
    }
    tx = jaxmp.loss_scaling(optax.adam(1e-3), policy)
    state_where = jaxmp.init_shardings(tx, params)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(tx.init, params),
        state_where,
    )
    x = shape((config.rows * devices // model, config.tokens, d), by_row)

    def loss_fn(params, x, y):
        out = jaxmp.with_policy(apply, policy)(params, x)
        return ((out - y) ** 2).mean()

    def step(params, state, x, y):
        weights = jaxmp.get_policy(policy).cast_to_compute(params, shardings=where)
        loss, grads = jaxmp.value_and_grad(
            loss_fn,
            policy,
            loss_scale=state,
            accum_steps=steps,
            batch_argnums=(1, 2),
            mesh=mesh if form == "mesh" else None,
        )(weights, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    jitted = jax.jit(
        step, donate_argnums=(0, 1), out_shardings=(where, state_where, None)
    )
    return jitted, (params, state, x, x)


def partitioned(step: Any, args: tuple[Any, ...]) -> str:
    """Returns the program of one device, as XLA's partitioner leaves it."""
    with tempfile.TemporaryDirectory() as folder:
        step.lower(*args).compile(
            compiler_options={
                "xla_dump_to": folder,
                "xla_dump_hlo_pass_re": "spmd.*",
                "xla_dump_hlo_as_text": True,
                "xla_backend_optimization_level": 0,  # it is read and not run
            }
        )
        (dump,) = Path(folder).glob("*after_spmd-partition*")
        return dump.read_text()


def sent_bytes(program: str, devices: int) -> dict[str, float]:
    """Returns the bytes that a device sends, by kind and dtype of the collective."""
    bodies: dict[str, list[str]] = {}
    entry = body = ""
    for line in program.splitlines():
        if line.endswith("{"):
            match = re.match(r"(ENTRY )?%?([\w.\-]+)", line)
            assert match is not None
            body = match[2]
            bodies[body] = []
            entry = body if match[1] else entry
        elif " = " in line:
            bodies[body].append(line.strip())
    times: collections.Counter[str] = collections.Counter()

    def run(name: str, count: int) -> None:
        times[name] += count
        for line in bodies[name]:
            if loop := re.search(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)", line):
                # `scan` counts from 0 to the one constant of the condition.
                (trips,) = re.findall(r"constant\((\d+)\)", "\n".join(bodies[loop[1]]))
                run(loop[2], count * int(trips))
            elif call := re.search(r" call\(.*to_apply=%?([\w.\-]+)", line):
                run(call[1], count)

    run(entry, 1)
    sent: dict[str, float] = collections.defaultdict(float)
    for name, count in times.items():
        for line in bodies[name]:
            match = re.search(
                r"%?([\w.\-]+) = (.*) (all-reduce|all-gather|reduce-scatter|all-to-all|"
                r"collective-permute)(?:-start)?\(",
                line,
            )
            if match is None:
                continue
            result, shapes, kind = match.groups()
            n = group_size(line, devices)
            if kind == "all-reduce" and is_sliced(result, bodies[name]):
                kind = "reduce-scatter of all"
            share = {
                "all-reduce": 2 * (n - 1) / n,
                "all-gather": (n - 1) / n,
                "reduce-scatter of all": (n - 1) / n,
                "reduce-scatter": n - 1,  # the result is a part
                "all-to-all": (n - 1) / n,
                "collective-permute": 1,
            }[kind]
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
                size = math.prod(int(d) for d in dims.split(",") if d)
                kind = kind.removesuffix(" of all")
                sent[f"{kind} {dtype}"] += count * size * BYTES[dtype] * share
    return dict(sent)


def group_size(line: str, devices: int) -> int:
    """Reads how many devices take part in a collective together."""
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
        return int(iota[2])
    if groups := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return groups[1].count(",") + 1
    return devices


def is_sliced(result: str, lines: list[str]) -> bool:
    """Tells whether of a result each device uses nothing but its slice."""
    uses = [x for x in lines if re.search(rf"\(.*%?\b{re.escape(result)}[,)]", x)]
    return bool(uses) and all(" dynamic-slice(" in x for x in uses)


def main(config: Config, console: Console | None = None) -> Table:
    console = console or Console()
    parameters = 8 * config.blocks * config.width**2
    table = Table(
        *("Layout", "Policy", "Micro-batches"),
        *(f"{n} devices" for n in config.devices),
        f"of them on {config.devices[-1]}",
        title=f"MB sent per device and step; {parameters / 1e6:.0f} million parameters",
    )
    cases = [(a, b, c) for a in LAYOUTS for b in POLICIES for c in config.accum_steps]
    # Under `jit` the policy's `reduce_dtype` has no say.
    cases = [c for c in cases if not (c[0].endswith("jit") and c[1] == POLICIES[2])]
    for layout, policy, steps in track(cases, console=console, transient=True):
        cells, sent = [], {}
        for n in config.devices:
            program = partitioned(*training_step(config, layout, policy, steps, n))
            sent = sent_bytes(program, n)
            cells.append(f"{sum(sent.values()) / 1e6:.0f}")
        most = [f"{k} {v / 1e6:.0f}" for k, v in sorted(sent.items()) if v > 1e6]
        table.add_row(layout, policy, str(steps), *cells, ", ".join(most))
    console.print(table)
    return table


if __name__ == "__main__":
    config = tyro.cli(Config)
    jax.config.update("jax_num_cpu_devices", max(config.devices))
    main(config)
