"""Starting the processes of `multiprocess.py` on one machine."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path


def has_launcher() -> bool:
    """Tells whether SLURM's `srun` or Open MPI's `mpirun` has started this process."""
    # Not SLURM_PROCID: the shell of a batch job has that, too.
    return not {"SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_RANK"}.isdisjoint(os.environ)


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def wait(workers: list[subprocess.Popen], logs: list[Path], seconds: int) -> None:
    """Waits for all processes to succeed, and ends the program where one does not."""
    deadline = time.monotonic() + seconds
    while any(worker.poll() is None for worker in workers):
        if any(worker.poll() for worker in workers) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for i, (worker, log) in enumerate(zip(workers, logs, strict=True)):
        if worker.poll():
            sys.exit(f"Process {i} failed:\n{log.read_text()}")
    for i, worker in enumerate(workers):
        if worker.poll() is None:
            sys.exit(f"Process {i} did not end within {seconds} seconds.")
