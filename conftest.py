"""Eight CPU devices, the same examples on every run, and the docstrings' names."""

import os

# XLA's threads. With fewer than devices that wait in independent collectives, JAX
# 0.10.2 waits for ever on CPU devices.
os.environ.setdefault("NPROC", "64")
# Also where there is a GPU, and where the compiler for one makes JAX look for it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

import jaxmp  # noqa: E402

settings.register_profile("same", derandomize=True, database=None, deadline=None)
settings.load_profile("same")


@pytest.fixture(autouse=True)
def names_of_the_docstrings(doctest_namespace):
    """Lets every docstring use the same four names."""
    doctest_namespace.update(jax=jax, jnp=jnp, optax=optax, jaxmp=jaxmp)


@pytest.fixture(scope="module")
def compiled_in_a_hurry():
    """Saves a quarter of the time where compiling takes most of it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
