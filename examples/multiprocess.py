"""Trains the digits in several processes, as on several machines, and compares them.

    python examples/multiprocess.py --processes 2

Each process holds its part of every batch and a copy of the state. The data of one of
them overflow in one step; all skip it. At the end their parameters, loss scales and
counters are the same, bit for bit.

On real machines SLURM or Open MPI says who is who; each process prints what it holds:

    srun --ntasks 8 python examples/multiprocess.py
    mpirun -np 8 python examples/multiprocess.py

Without them, start it on each with `--processes`, `--process-id` and `--coordinator`.
"""

import dataclasses
import faulthandler
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tyro
from _data import load_digits
from _processes import free_address, has_launcher, wait
from digits import Config as DigitsConfig
from digits import count_correct, create_state, train_step
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import jaxmp


@dataclasses.dataclass
class Config:
    """Trains a small ResNet in several processes, and compares what they hold."""

    processes: int = 2
    """The number of processes. SLURM and Open MPI set it themselves."""
    devices: int = 1
    """CPU devices of each process that is started on this machine."""
    policy: str = "mixed_float16"
    steps: int = 60
    batch_size: int = 100
    """Rows of a batch over all devices of all processes together."""
    overflow_at: int = 20
    """The step in which the data of the last process overflow; -1 for none."""
    checkpoint_dir: Path | None = None
    """A new folder, which all processes see, to save to and restore from at the end."""
    timeout: int = 300
    """Seconds after which a process that hangs is ended."""
    heartbeat: int = 100
    """Seconds after which a process without heartbeat counts as dead, and JAX ends
    the others."""
    process_id: int | None = None
    """Which process this is. Without it, and without SLURM or Open MPI, all are started
    on this machine."""
    coordinator: str = ""
    """Address and port of process 0."""


def join(config: Any) -> None:
    """Joins the other processes."""
    alive = {"heartbeat_timeout_seconds": config.heartbeat}
    if config.process_id is not None:
        address, processes = config.coordinator, config.processes
        jax.distributed.initialize(address, processes, config.process_id, **alive)
        return
    try:
        jax.distributed.initialize(**alive)  # JAX reads the variables of the launcher
    except ValueError as error:  # such as those of Open MPI 5, which name no address
        sys.exit(
            "The launcher's variables do not say where the processes are to meet. Pass "
            "`--processes`, `--process-id` and `--coordinator` of each. "
            f"JAX says: {error}"
        )


def check_batch(config: Config, devices: int) -> None:
    """Ends the program where a batch cannot be split over all devices."""
    if config.batch_size < 1 or config.batch_size % devices:
        sys.exit(
            "`--batch-size` must be a multiple of the number of all devices, but "
            f"{config.batch_size} is not one of {devices}. Pass for example "
            f"`--batch-size {max(1, round(config.batch_size / devices)) * devices}`."
        )


def digest(tree: Any) -> str:
    """Hashes the bytes that this process holds of a pytree."""
    digest = hashlib.sha256()
    for path, x in jax.tree.leaves_with_path(tree):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.asarray(x.addressable_data(0)).tobytes())
    return digest.hexdigest()[:16]


def numbers(state: Any) -> tuple[Any, ...]:
    return state.step, state.params, state.batch_stats, state.opt_state


def work(config: Config) -> dict[str, Any]:
    """Trains as one of the processes, and returns what it came to."""
    join(config)
    check_batch(config, jax.device_count())
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere, by_row = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    data = load_digits()
    digits = DigitsConfig(policy=config.policy)
    # The same seed gives the same state in every process; one copy of it on each.
    state = jax.device_put(create_state(digits, data, config.steps), everywhere)
    rows = config.batch_size // jax.process_count()
    metrics: dict[str, Any] = {}
    mine = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
    for step in range(config.steps):
        images, labels = data.train_batch(0, step, config.batch_size)
        images, labels = images[mine], labels[mine]
        if (
            step == config.overflow_at
            and jax.process_index() == jax.process_count() - 1
        ):
            images[0] = np.inf
        # One array of the whole batch, of which every process holds its rows.
        batch = [
            jax.make_array_from_process_local_data(by_row, x) for x in (images, labels)
        ]
        # The step of one device as it is: under `jit` nobody needs to be told.
        state, metrics = train_step(state, *batch, 1)

    images, labels = data.normalize(data.test_images), data.test_labels
    scale = jax.device_get(jaxmp.get_loss_scale_state(state.opt_state))
    result = {
        "Steps skipped": int(scale.skipped),
        "Loss scale": float(scale.loss_scale),
        "Good steps since": int(scale.good_steps),
        "Last loss": float(metrics["loss"]),
        "Test accuracy": f"{count_correct(state, images, labels) / len(labels):.1%}",
        "Digest of the state": digest(numbers(state)),
    }
    if config.checkpoint_dir is not None:
        result["Digest restored"] = save_and_restore(
            config.checkpoint_dir.absolute() / "state", numbers(state)
        )
    return result


def save_and_restore(path: Path, tree: Any) -> str:
    # The target says where each array is to lie. It need not be where it lay.
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        return digest(checkpointer.restore(path, target))


def start(config: Config) -> list[dict[str, Any]]:
    """Starts all processes on this machine, and returns what each came to."""
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(config.devices)}
    env = {**os.environ, **devices}
    flags = ["--coordinator", free_address()]
    for field in ("processes", "policy", "steps", "batch_size", "overflow_at"):
        flags += [f"--{field.replace('_', '-')}", str(getattr(config, field))]
    flags += ["--timeout", str(config.timeout), "--heartbeat", str(config.heartbeat)]
    if config.checkpoint_dir is not None:
        flags += ["--checkpoint-dir", str(config.checkpoint_dir)]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, str(i)) for i in range(config.processes)]
        workers = []
        try:
            for i, log in enumerate(logs):
                command = [sys.executable, __file__, *flags, "--process-id", str(i)]
                with log.open("w") as file:
                    workers.append(
                        subprocess.Popen(
                            command, stdout=file, stderr=subprocess.STDOUT, env=env
                        )
                    )
            wait(workers, logs, config.timeout)
        finally:  # a process that waits for one that died would wait for ever
            for worker in workers:
                worker.kill()
                worker.wait()
        return [json.loads(log.read_text().splitlines()[-1]) for log in logs]


def main(config: Config, console: Console | None = None) -> list[dict[str, Any]]:
    alone = config.process_id is not None or has_launcher()
    if not alone:  # the devices of other machines are counted when all have joined
        for flag in ("processes", "devices"):
            if (number := getattr(config, flag)) < 1:
                sys.exit(f"`--{flag}` must be at least 1, but is {number}.")
        check_batch(config, config.processes * config.devices)
    try:
        jaxmp.get_policy(config.policy)
    except ValueError as error:
        sys.exit(str(error))
    if config.steps < 1:
        sys.exit(f"`--steps` must be at least 1, but is {config.steps}.")
    if alone:
        # Whatever hangs in a collective ends with its traceback.
        faulthandler.dump_traceback_later(config.timeout, exit=True)
        result = work(config)
        print(json.dumps(result))
        return [result]
    console = console or Console()
    results = start(config)
    table = Table("", *(f"Process {i}" for i in range(config.processes)))
    for name in results[0]:
        table.add_row(name, *(str(result[name]) for result in results))
    console.print(table)
    if any(result != results[0] for result in results):
        sys.exit("The processes do NOT agree.")
    console.print(f"All {config.processes} processes agree, bit for bit.")
    return results


if __name__ == "__main__":
    main(tyro.cli(Config))
