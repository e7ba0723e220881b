"""What many devices send each other in one training step, counted in compiled code.

A stack of MLP blocks is compiled for meshes of CPU devices, and nothing is run. The
collectives are read off the program after XLA has partitioned it, those inside a loop
as often as the loop runs, and each counts what a ring sends per device and step: of n
devices in a group and S bytes of the whole array

    all-reduce 2 S (n-1)/n     all-gather, reduce-scatter, all-to-all S (n-1)/n

An all-reduce of which each device keeps its slice alone counts as the reduce-scatter
into which compilers for GPU and TPU turn it.
"""

import collections
import dataclasses
import math
import pathlib
import re
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

from .counting import hlo, results, tables
from .counting.measure import IN_A_HURRY

ALL = ("data", "model")
# Where the two matrices of a block lie, and who sums the gradients. The first axis of
# each counts the blocks. In tensor parallelism each device has some hidden units.
LAYOUTS = {
    "data parallel, jit": (P(), P(), "jit"),
    "data parallel, mesh": (P(), P(), "mesh"),
    "FSDP, jit": (P(None, ALL), P(None, ALL), "jit"),
    "FSDP, mesh": (P(None, ALL), P(None, ALL), "mesh"),
    "FSDP, mesh and shardings": (P(None, ALL), P(None, ALL), "shards"),
    "FSDP x TP, jit": (P(None, "data", "model"), P(None, "model", "data"), "jit"),
}
POLICIES = ("float32", "mixed_bfloat16", "p=f32,c=bf16,o=f32,r=bf16")
# What a ring of n devices sends, over the bytes of a device's result.
RINGS = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,  # the result is a part
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}


@dataclasses.dataclass
class Options:
    """For how many devices to compile, what, and where to save the counts."""

    devices: tuple[int, ...] = (8, 64, 256)
    layouts: tuple[str, ...] = tuple(LAYOUTS)
    width: int = 1024
    blocks: int = 8
    rows: int = 8
    """Sequences per device and step: the batch grows with the devices."""
    tokens: int = 128
    """Of a sequence."""
    tensor_parallel: int = 4
    """Devices in a group that splits the matrices."""
    accum_steps: tuple[int, ...] = (1, 4)
    output: pathlib.Path | None = None


class Collective(NamedTuple):
    """An array that devices exchange."""

    kind: str
    dtype: str  # as XLA spells it
    size: int  # numbers in the result of one device
    times: int  # how often it runs
    devices: int  # in a group
    sliced: bool  # whether each device uses nothing but its slice of the result

    @property
    def sent(self) -> float:
        """The bytes that a device sends."""
        share = RINGS[self.kind](self.devices) / (1 + self.is_scattered_sum)
        return self.times * self.size * hlo.bits(self.dtype) / 8 * share

    @property
    def is_scattered_sum(self) -> bool:
        """Whether compilers for GPU and TPU would make it a reduce-scatter."""
        return self.sliced and self.kind == "all-reduce"


def main(arguments: list[str]) -> None:
    """Prints MB per device and step, and saves them."""
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks collectives")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    parameters = 8 * options.blocks * options.width**2
    title = f"MB sent per device and step; {parameters / 1e6:.0f} million parameters"
    rows = list(measured(options))
    tables.show(title, rows)
    command = ["collectives", *arguments]
    results.save(
        options.output or results.target("collectives"),
        title,
        "counted, not run",
        command,
        rows,
    )


def measured(options: Options) -> Iterator[dict[str, Any]]:
    """Yields the MB of each layout, policy and number of micro-batches."""
    for layout in options.layouts:
        # Under `jit` the policy's `reduce_dtype` has no say.
        for policy in POLICIES[:2] if layout.endswith("jit") else POLICIES:
            for accum_steps in options.accum_steps:
                row = {"layout": layout, "policy": policy, "micro-batches": accum_steps}
                sent = {}
                for n in options.devices:
                    step, args = training_step(options, layout, policy, accum_steps, n)
                    sent = sent_bytes(partitioned(step, *args))
                    row[f"{n} devices"] = round(sum(sent.values()) / 1e6)
                most = [f"{k} {v / 1e6:.0f}" for k, v in sent.items() if v > 1e6]
                yield row | {f"of them on {options.devices[-1]}": ", ".join(most)}


def training_step(
    options: Options, layout: str, policy: str, accum_steps: int, devices: int
) -> tuple[Any, tuple[Any, ...]]:
    """Returns a jitted step, and its arguments as shapes with shardings."""
    spec_in, spec_out, form = LAYOUTS[layout]
    model = options.tensor_parallel if "TP" in layout else 1
    cpus = np.array(jax.devices("cpu")[:devices])
    mesh = Mesh(cpus.reshape(devices // model, model), ALL)
    where = {"in": NamedSharding(mesh, spec_in), "out": NamedSharding(mesh, spec_out)}
    d = options.width

    def shape(shape, sharding):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    params = {
        "in": shape((options.blocks, d, 4 * d), where["in"]),
        "out": shape((options.blocks, 4 * d, d), where["out"]),
    }
    tx = jaxmp.loss_scaling(optax.adam(1e-3), policy)
    state_where = jaxmp.init_shardings(tx, params)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(tx.init, params),
        state_where,
    )
    rows = (options.rows * devices // model, options.tokens, d)
    x = shape(rows, NamedSharding(mesh, P("data")))

    def loss_fn(params, x, y):
        return ((jaxmp.with_policy(_apply, policy)(params, x) - y) ** 2).mean()

    def step(params, state, x, y):
        weights = jaxmp.get_policy(policy).cast_to_compute(params, shardings=where)
        loss, grads = jaxmp.value_and_grad(
            loss_fn,
            policy=policy,
            loss_scale=state,
            accum_steps=accum_steps,
            batch_argnums=(1, 2),
            mesh=None if form == "jit" else mesh,
            shardings=where if form == "shards" else None,
        )(weights, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    jitted = jax.jit(
        step, donate_argnums=(0, 1), out_shardings=(where, state_where, None)
    )
    return jitted, (params, state, x, x)


def _apply(params, x):
    def block(x, weights):
        w_in, w_out = weights
        return x + jax.nn.relu(x @ w_in) @ w_out, None

    return jax.lax.scan(jax.checkpoint(block), x, (params["in"], params["out"]))[0]


def partitioned(jitted: Any, *args: Any) -> str:
    """Returns the program of one device, as XLA's partitioner leaves it."""
    with tempfile.TemporaryDirectory() as folder:
        jitted.lower(*args).compile(
            compiler_options=IN_A_HURRY  # it is read and not run
            | {
                "xla_dump_to": folder,
                "xla_dump_hlo_pass_re": "spmd.*",
                "xla_dump_hlo_as_text": True,
            }
        )
        (dump,) = pathlib.Path(folder).glob("*after_spmd-partition*")
        return dump.read_text()


def sent_bytes(program: str) -> dict[str, float]:
    """Returns the bytes that a device sends, by kind and dtype of the collective."""
    sent: dict[str, float] = collections.defaultdict(float)
    for c in collectives(program):
        kind = "reduce-scatter" if c.is_scattered_sum else c.kind
        sent[f"{kind} {c.dtype}"] += c.sent
    return dict(sorted(sent.items()))


def collectives(program: str) -> list[Collective]:
    """Returns what the devices exchange when they run a program.

    Args:
        program: Text, from :func:`partitioned` or ``compiled.as_text()``.

    Returns:
        One :class:`Collective` for each array. Of a conditional, those of all branches.

    Raises:
        ValueError: If it is not plain how often a loop runs, or with how many devices.
    """
    computations, entry = hlo.parse(program)
    partitions = re.search(r"num_partitions=(\d+)", program)
    everyone = int(partitions[1]) if partitions else 1
    found = []

    def run(name, times):
        lines = computations[name].instructions.values()
        for line in lines:
            if line.opcode == "while":
                (body,) = line.called("body")
                run(body, times * hlo.trip_count(line, computations))
            elif line.opcode in ("call", "conditional"):
                for called in line.called(*hlo.CALLS, *hlo.BRANCHES):
                    run(called, times)
            elif (kind := line.opcode.removesuffix("-done")) in RINGS:
                users = [x.opcode for x in lines if line.name in x.operands]
                sliced = bool(users) and set(users) == {"dynamic-slice"}
                # A GPU starts it, and waits for the result where that is read.
                start = line
                if kind != line.opcode:
                    start = computations[name].instructions[line.operands[0]]
                devices = _group_size(start) or everyone
                for dtype, size in hlo.arrays(line.shape):
                    c = Collective(kind, dtype, size, times, devices, sliced)
                    found.append(c)

    run(entry, 1)
    return found


def _group_size(collective):
    """Returns how many devices take part together, 0 where that are all."""
    _, _, groups = collective.attributes.partition("replica_groups=")
    if not groups or groups.startswith("{}"):
        return 0
    if found := re.match(r"\{\{([\d,]+)\}", groups):  # {{0,1},{2,3}}
        return found[1].count(",") + 1
    if found := re.match(r"\[\d+,(\d+)\]", groups):  # [2,4]<=[8]
        return int(found[1])
    # mesh['a'=2,'b'=4] {'b'}
    if found := re.match(r"mesh\[([^\]]*)\][^{]*\{([^}]*)\}", groups):
        sizes = dict(re.findall(r"('\w+')=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in found[2].split(","))
    raise ValueError(f"`{collective.name}` has unknown groups: {groups[:80]}")
