"""Trains sharded parameters in several processes, and goes on after one has died.

    python examples/resume.py --checkpoint-dir /tmp/run --processes 2 --kill-at 7
    python examples/resume.py --checkpoint-dir /tmp/run --processes 4

In the first run the last process is killed in step 7, as by a broken machine. The
others end, with an error that says which one. The second run goes on from the last
checkpoint, which all processes have written, on another number of devices.

On real machines SLURM or Open MPI starts the processes; what starts them again after a
fault is theirs, too: `srun --kill-on-bad-exit` and a job that is queued again.
"""

import dataclasses
import faulthandler
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import multiprocess
import numpy as np
import optax
import orbax.checkpoint as ocp
import tyro
from _data import load_digits
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp


@dataclasses.dataclass
class Config:
    """Trains in several processes, and continues from the last checkpoint."""

    checkpoint_dir: Path
    """A folder that all processes see."""
    processes: int = 2
    """The number of processes. SLURM and Open MPI set it themselves."""
    devices: int = 1
    """CPU devices of each process that is started on this machine."""
    policy: str = "mixed_bfloat16"
    steps: int = 12
    batch_size: int = 64
    every: int = 3
    """Steps between two checkpoints."""
    kill_at: int = -1
    """The step in which the last process is killed; -1 for none."""
    heartbeat: int = 10
    """Seconds after which a process without heartbeat counts as dead."""
    process_id: int | None = None
    """Which process this is. Without it, and without SLURM or Open MPI, all are started
    on this machine."""
    coordinator: str = ""
    """Address and port of process 0."""


# The model: layers whose weights are whole only while they are used.

SPECS = {"first": P("data"), "layers": P(None, "data"), "last": P("data")}


def init() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"first": (64, 64), "layers": (4, 64, 64), "last": (64, 16)}
    return {
        name: jax.random.normal(key, shape) / 8
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss_fn(
    policy: jaxmp.Policy, params: Any, images: jax.Array, labels: jax.Array
) -> jax.Array:
    def layer(x, w):
        w = jaxmp.gather(w, P("data"), policy)
        return x + jax.nn.relu(x @ w), None

    ends = {name: params[name] for name in ("first", "last")}
    ends = jaxmp.gather(ends, P("data"), policy)
    x = policy.cast_to_compute(images) @ ends["first"]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = (x @ ends["last"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def work(config: Config) -> dict[str, Any]:
    """Trains as one of the processes, and returns what it came to."""
    multiprocess.join(config)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    if config.batch_size % mesh.size:
        sys.exit(
            f"`--batch-size` must be a multiple of the {mesh.size} devices, but is "
            f"{config.batch_size}."
        )
    policy = jaxmp.get_policy(config.policy)
    tx = jaxmp.loss_scaling(optax.adam(1e-3), policy)
    where = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = jax.jit(init, out_shardings=where)()
    state_where = jaxmp.init_shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=state_where)(params)

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=(where, state_where, None))
    def train_step(params, state, images, labels):
        grad_fn = jaxmp.value_and_grad(
            partial(loss_fn, policy),
            policy=policy,
            loss_scale=state,
            batch_argnums=(1, 2),
            mesh=mesh,
            shardings=where,
            gather=False,
        )
        loss, grads = grad_fn(params, images, labels)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    data, loss = load_digits(), None
    by_row = NamedSharding(mesh, P("data"))
    rows = config.batch_size // jax.process_count()
    mine = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
    # The target says where each array is to lie: on the mesh of now.
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        (params, state),
    )
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    folder = config.checkpoint_dir.absolute()
    with ocp.CheckpointManager(folder, options=options) as checkpoints:
        begin = checkpoints.latest_step() or 0
        if begin:
            restored = ocp.args.StandardRestore(target)
            params, state = checkpoints.restore(begin, args=restored)
        for step in range(begin, config.steps):
            if step == config.kill_at and jax.process_index() == config.processes - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            images, labels = data.train_batch(0, step, config.batch_size)
            images = images.reshape(len(images), -1)[mine]
            batch = [
                jax.make_array_from_process_local_data(by_row, x)
                for x in (images, labels[mine])
            ]
            params, state, loss = train_step(params, state, *batch)
            if (step + 1) % config.every == 0:
                saved = ocp.args.StandardSave((params, state))
                checkpoints.save(step + 1, args=saved)
                checkpoints.wait_until_finished()  # written by all, or not at all
    return {
        "Devices": mesh.size,
        "First step": begin,
        "Last loss": None if loss is None else float(loss),
        "Digest": digest((params, state)),
    }


def digest(tree: Any) -> str:
    """Hashes the whole arrays of a pytree, wherever their parts lie."""
    whole = multihost_utils.process_allgather(tree, tiled=True)
    content = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(whole))
    return hashlib.sha256(content).hexdigest()[:16]


def work_or_say_who_died(config: Config) -> None:
    """Runs :func:`work`; when another process has died, ends with its name."""
    # What hangs in a collective is ended by JAX, when the heartbeat of the other has
    # stayed away; this is for all else.
    faulthandler.dump_traceback_later(20 * config.heartbeat, exit=True)
    try:
        result = work(config)
    except jax.errors.JaxRuntimeError as error:
        # A connection was closed, or ran out of time. JAX ends this process too as
        # soon as it knows which one has died, and says so.
        print(f"A collective failed: {error}", file=sys.stderr, flush=True)
        time.sleep(3 * config.heartbeat)
        raise
    print(json.dumps(result))


def start(config: Config) -> list[subprocess.CompletedProcess]:
    """Starts all processes on this machine, and waits for their end."""
    variables = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(config.devices)}
    flags = ["--coordinator", multiprocess.free_address()]
    for field in dataclasses.fields(config):
        if field.name not in ("process_id", "coordinator"):
            value = str(getattr(config, field.name))
            flags += [f"--{field.name.replace('_', '-')}", value]
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, *flags, "--process-id", str(i)],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(config.processes)
    ]
    try:
        ends = [worker.communicate(timeout=40 * config.heartbeat) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [
        subprocess.CompletedProcess(worker.args, worker.returncode, *end)
        for worker, end in zip(workers, ends, strict=True)
    ]


def main(config: Config) -> list[subprocess.CompletedProcess]:
    if config.process_id is not None or multiprocess.has_launcher():
        work_or_say_who_died(config)
        return []
    ends = start(config)
    for i, end in enumerate(ends):
        if end.returncode == 0:
            print(f"Process {i}: {end.stdout.splitlines()[-1]}")
        elif end.returncode == -signal.SIGKILL:
            print(f"Process {i} was killed.")
        elif died := who_died(end.stderr):
            print(f"Process {i} ended, because process {died} sent no heartbeat.")
        else:
            print(f"Process {i} ended:\n{end.stderr}")
    return ends


def who_died(errors: str) -> str:
    """Returns the numbers of the processes that JAX says have died, if it says so."""
    said = r"(?:unhealthy \(stopped sending heartbeats\):|heartbeat timeout.*, Task:)"
    found = re.search(rf"{said}\s*(\d+(?:[,\s]+\d+)*)", errors)
    return " ".join(re.findall(r"\d+", found[1])) if found else ""


if __name__ == "__main__":
    main(tyro.cli(Config))
