"""The devices of an example, which on a CPU are made up."""

import os
import sys

import jax
import numpy as np
from jax.sharding import Mesh


def make_cpu_devices(count: int) -> None:
    """Splits the CPU into devices. JAX must not have started yet."""
    if count > 1:
        jax.config.update("jax_num_cpu_devices", count)
        # Threads for collectives that run at once; with too few they would hang.
        os.environ.setdefault("NPROC", str(8 * count))


def make_mesh(devices: int) -> Mesh:
    """Lines up the devices, or as many CPU devices where there are too few."""
    found = jax.devices()
    if len(found) < devices:
        found = jax.devices("cpu")
    if len(found) < devices:
        sys.exit(f"`--devices {devices}`, but there are {len(found)}.")
    return Mesh(np.array(found[:devices]), ("data",))
