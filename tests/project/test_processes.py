"""Real processes that must agree."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # before an installed `multiprocess`

import _data  # noqa: E402
import digits  # noqa: E402
import multiprocess  # noqa: E402

CPUS = np.array(jax.devices("cpu")[:8])


# Real processes. Each ends itself when its time is over, so that a hang is a failure.


@pytest.mark.evidence
def test_two_processes_agree_though_the_data_of_one_overflow(tmp_path):
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=80, file=nowhere)
        config = multiprocess.Config(
            steps=4, overflow_at=2, checkpoint_dir=tmp_path, devices=2
        )
        first, second = multiprocess.main(config, console)
    assert first == second
    assert "All 2 processes agree" in console.export_text()
    assert (first["Steps skipped"], first["Loss scale"]) == (1, 2.0**14)
    assert first["Good steps since"] == 1  # the last of four
    assert first["Digest restored"] == first["Digest of the state"]

    # What two processes saved, one process restores onto eight devices.
    everywhere = NamedSharding(Mesh(CPUS, ("data",)), P())
    target = jax.eval_shape(
        lambda: multiprocess.numbers(
            digits.create_state(digits.Config(), _data.load_digits(), 4)
        )
    )
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), target
    )
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", target)
    assert multiprocess.digest(restored) == first["Digest of the state"]


def by_slurm(i, job):
    """Returns what SLURM tells a process of a job of two."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(i),
        "SLURM_LOCALID": str(i),
    }


def launch(tmp_path, *arguments):
    """Runs two processes of two devices as a launcher does, and returns their ends."""
    check_name()
    # JAX makes the port of the coordinator from the number of the job.
    first = 2**16 - 2**12
    job = next(n for n in range(os.getpid() % 2**12, 2**12) if is_free(first + n))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    command = ["timeout", "-k", "5", "300", sys.executable, *arguments]
    workers = []
    for i in range(2):
        with (
            (tmp_path / str(i)).open("w") as out,
            (tmp_path / f"e{i}").open("w") as err,
        ):
            variables = by_slurm(i, job)
            workers.append(
                subprocess.Popen(
                    command,
                    env={**env, "PYTHONPATH": str(EXAMPLES.parent), **variables},
                    stdout=out,
                    stderr=err,
                )
            )
    return [
        (
            worker.wait(),
            (tmp_path / str(i)).read_text(),
            (tmp_path / f"e{i}").read_text(),
        )
        for i, worker in enumerate(workers)
    ]


def is_free(port):
    with socket.socket() as free:
        try:
            free.bind(("", port))  # one that is taken need not listen yet
        except OSError:
            return False
        return True


def check_name():
    """Fails where this machine cannot find itself, as in some chroots."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        pytest.fail(
            f"JAX's collectives on CPUs look for this machine by its name, {name!r}, "
            f"which it does not know. Put the line `127.0.0.1 {name}` into /etc/hosts."
        )


# In place of the example's training, which takes most of its time to import and to
# compile, three steps with one weight, in the second of which the data of one process
# overflow.
JOIN = f"""
import sys; sys.path.insert(0, {str(EXAMPLES)!r})
from unittest import mock
sys.modules.update(_data=mock.MagicMock(), digits=mock.MagicMock())
import jax, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import jaxmp, multiprocess

tx = jaxmp.dynamic_loss_scale(optax.sgd(0.5), init_scale=8, growth_interval=1)

@jax.jit
def step(w, state, x):
    grad_fn = jaxmp.grad(lambda w, x: (w * x).mean(), loss_scale=state.loss_scale)
    updates, state = tx.update(grad_fn(w, x), state, w)
    return optax.apply_updates(w, updates), state

def work(config):
    multiprocess.join(config)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    w, state = jax.device_put(
        (np.float32(1), jax.jit(tx.init)(np.float32(1))), NamedSharding(mesh, P())
    )
    by_row = NamedSharding(mesh, P("data"))
    for i in range(3):
        overflows = i == 1 and jax.process_index() == 1
        mine = np.full(2, np.inf if overflows else 1, np.float32)
        x = jax.make_array_from_process_local_data(by_row, mine)
        w, state = step(w, state, x)
    joined = jax.process_index(), jax.process_count(), jax.device_count()
    return joined, (float(w), int(state.skipped), float(state.loss_scale))

multiprocess.work = work
multiprocess.main(multiprocess.Config())
"""


def test_processes_of_a_launcher_need_no_flags_and_skip_together(tmp_path):
    for i, (code, out, errors) in enumerate(launch(tmp_path, "-c", JOIN)):
        assert code == 0, errors
        joined, agreed = json.loads(out.splitlines()[-1])
        assert joined == [i, 2, 4]
        assert agreed == [0, 1, 16]  # 1 - 2 * 0.5; 8, doubled, halved and doubled


def test_a_batch_is_split_over_the_devices_that_have_joined(monkeypatch):
    monkeypatch.setattr(multiprocess, "join", lambda config: None)
    with pytest.raises(SystemExit, match="of all devices, but 12 is not one of 8"):
        multiprocess.work(multiprocess.Config(batch_size=12))


def test_where_jax_finds_no_address_the_error_says_what_to_pass(monkeypatch):
    def initialize(**options):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(SystemExit, match=r"`--coordinator` of each\. JAX says: coord"):
        multiprocess.join(multiprocess.Config())


@pytest.mark.parametrize(
    ("code", "seconds", "message"),
    [
        ("raise SystemExit('no such policy')", 60, "Process 1 failed:\nno such policy"),
        ("pass", 1, "Process 0 did not end within 1 seconds"),
    ],
    ids=["failure", "hang"],
)
def test_one_that_fails_or_hangs_ends_the_wait(tmp_path, code, seconds, message):
    logs, workers = [tmp_path / "0", tmp_path / "1"], []
    for log, program in zip(logs, ["import time; time.sleep(60)", code], strict=True):
        with log.open("w") as file:
            command = [sys.executable, "-c", program]
            workers.append(subprocess.Popen(command, stdout=file, stderr=file))
    try:
        with pytest.raises(SystemExit, match=message):
            multiprocess.wait(workers, logs, seconds)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"processes": 3}, "of all devices, but 100 is not one of 3.*-size 99`"),
        ({"devices": 4, "batch_size": 4}, "but 4 is not one of 8.*-size 8`"),
        ({"batch_size": 0}, "`--batch-size` must be"),
        ({"processes": 0}, "`--processes` must be at least 1"),
        ({"devices": 0}, "`--devices` must be at least 1"),
        ({"policy": "float61"}, "float61"),
        ({"steps": 0}, "`--steps` must be at least 1"),
    ],
)
def test_a_wrong_flag_starts_no_process(flags, message):
    with pytest.raises(SystemExit, match=message):
        multiprocess.main(multiprocess.Config(**flags))
