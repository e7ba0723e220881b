"""Compiles for an NVIDIA H200, on a machine that need not have one.

JAX's plugin for CUDA brings the compiler, and ``h200.txtpb`` says to it what it would
ask the GPU. Nothing runs: what comes back is the program, as text, and its memory.
"""

import functools
import importlib.metadata
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from .measure import IN_A_HURRY

DEVICE = "NVIDIA H200"
HARDWARE = f"{DEVICE}, compiled for and not run"
# The compiler that the numbers are of. Another one fuses in another way.
JAXLIB = "0.10.2"
OPTIONS = IN_A_HURRY | {
    # Without a GPU no candidates can be timed: matrix products go to cuBLAS.
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
}


def unavailable() -> str | None:
    """Returns why this machine cannot compile for a GPU, or None if it can."""
    found = importlib.metadata.version("jaxlib")
    if found != JAXLIB:
        return (
            f"the numbers are those of jaxlib {JAXLIB}, and here is {found}; "
            f"`pip install 'jax[cuda12-local]=={JAXLIB}'` installs it"
        )
    try:
        plugin = importlib.metadata.version("jax-cuda12-plugin")
    except importlib.metadata.PackageNotFoundError:
        plugin = "not installed"
    if plugin != JAXLIB:
        return (
            f"it needs jax-cuda12-plugin {JAXLIB}, which is {plugin}; "
            f"`pip install 'jax[cuda12-local]=={JAXLIB}'` installs it"
        )
    if jax.config.jax_platforms != "cpu":  # pyright: ignore[reportAttributeAccessIssue]
        return "JAX looks for a GPU here; set `JAX_PLATFORMS=cpu`"
    return None


def require(benchmark: str) -> None:
    """Ends a benchmark with the reason where this machine cannot compile for a GPU."""
    jax.config.update("jax_platforms", "cpu")
    if reason := unavailable():
        raise SystemExit(f"{benchmark} cannot compile for a GPU: {reason}")


def compiled(fun: Callable[..., Any], *args: Any, donated: int = 0) -> Any:
    """Compiles a function for an H200.

    Args:
        fun: The function.
        *args: Its arguments, see :func:`lowered`.
        donated: How many of them, from the first on, are donated.

    Returns:
        The ``jax.stages.Compiled``. It has its program, ``as_text()``, and
        ``memory_analysis()``.
    """
    return lowered(fun, *args, donated=donated).compile(compiler_options=OPTIONS)


def lowered(fun: Callable[..., Any], *args: Any, donated: int = 0) -> Any:
    """Lowers a function for an H200.

    Args:
        fun: The function.
        *args: Its arguments: pytrees of arrays, or of anything with a shape and a
            dtype.
        donated: How many of them, from the first on, are donated.

    Returns:
        The ``jax.stages.Lowered``, which is to be compiled with :data:`OPTIONS`.
    """
    sharding = SingleDeviceSharding(devices()[0])
    leaves, structure = jax.tree.flatten(args)

    def flat(donated, others):
        return jax.tree.leaves(fun(*structure.unflatten(donated + others)))

    # Leaves, because jmp's loss scale cannot hold the descriptions that JAX puts in
    # the place of arrays here.
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in leaves]
    split = len(jax.tree.leaves(args[:donated]))
    return jax.jit(flat, donate_argnums=0).lower(shapes[:split], shapes[split:])


@functools.cache
def devices(count: int = 1) -> list[Any]:
    """Describes H200s, eight of which are in a machine."""
    machines = max(1, count // 8)
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=pathlib.Path(__file__).with_name("h200.txtpb").read_text(),
        topology=f"1x{machines}x{count // machines}",
    ).devices
