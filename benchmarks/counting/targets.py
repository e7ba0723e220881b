"""Compiles for a named NVIDIA GPU, on a machine that need not have one.

JAX's plugin for CUDA brings the compiler. ``h200.txtpb`` says to it what it would ask
an H200, and :data:`GPUS` what other GPUs would answer otherwise, as far as it decides
which kernels and fusions there are. Rates, caches and library versions stay those of
the H200: count bytes of the others, not times. Nothing runs: what comes back is the
program, as text, and its memory.
"""

import functools
import importlib.metadata
import pathlib
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from . import results
from .measure import IN_A_HURRY


class Gpu(NamedTuple):
    """What the description of a GPU says of it alone.

    The limits of a core are those of its compute capability, in the table of technical
    specifications of NVIDIA's CUDA programming guide.
    """

    name: str  # as its driver says it
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    lanes: int  # float32 units of a core
    threads: int  # of a core, at most
    shared: int  # KiB of a core
    shared_by_block: int  # KiB, if a kernel asks
    memory: float  # GiB; XLA computes again what does not fit


GPUS = {
    "p100": Gpu("Tesla P100-PCIE-16GB", (6, 0), 56, 64, 2048, 64, 48, 16),
    "v100": Gpu("Tesla V100-SXM2-16GB", (7, 0), 80, 64, 2048, 96, 96, 16),
    "t4": Gpu("Tesla T4", (7, 5), 40, 64, 1024, 64, 64, 15),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 164, 163, 80),
    "rtx3090": Gpu("NVIDIA GeForce RTX 3090", (8, 6), 82, 128, 1536, 100, 99, 24),
    "l4": Gpu("NVIDIA L4", (8, 9), 58, 128, 1536, 100, 99, 22.5),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 1536, 100, 99, 24),
    "h200": Gpu("NVIDIA H200", (9, 0), 132, 128, 2048, 228, 227, 141),
    "b200": Gpu("NVIDIA B200", (10, 0), 148, 128, 2048, 228, 227, 178),
    "rtx5090": Gpu("NVIDIA GeForce RTX 5090", (12, 0), 170, 128, 1536, 100, 99, 31.8),
}
H200 = "h200"  # whose description the others are made from
# What `--gpu` takes: one of each generation that people have.
Named = Literal["t4", "a100", "rtx4090", "h200", "b200"]

# The compiler that saved numbers are of. Another one fuses in another way.
JAXLIB = "0.12.0.1"
OPTIONS = IN_A_HURRY | {
    # Without a GPU no candidates can be timed: matrix products go to cuBLAS.
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
}


def hardware(gpu: str = H200) -> str:
    """Says which GPU a program was compiled for."""
    return f"{GPUS[gpu].name}, compiled for and not run"


def unavailable(gpu: str = H200) -> str | None:
    """Returns why this machine cannot compile for a GPU, or None if it can.

    Args:
        gpu: Its key in :data:`GPUS`.
    """
    jaxlib = importlib.metadata.version("jaxlib")
    try:
        plugin = importlib.metadata.version("jax-cuda12-plugin")
    except importlib.metadata.PackageNotFoundError:
        plugin = "not installed"
    if plugin != jaxlib:
        return (
            f"it needs jax-cuda12-plugin {jaxlib}, which is {plugin}; "
            f"`pip install 'jax[cuda12-local]=={jaxlib}'` installs it"
        )
    if jax.config.jax_platforms != "cpu":  # pyright: ignore[reportAttributeAccessIssue]
        return "JAX looks for a GPU here; set `JAX_PLATFORMS=cpu`"
    if jax.__version_info__ < (0, 10):
        return "before 0.10, JAX asks CUDA's libraries, which are not there"
    if GPUS[gpu].capability < (7, 5):  # which CUDA 13 has dropped
        try:
            importlib.metadata.version("nvidia-cuda-nvcc-cu12")
        except importlib.metadata.PackageNotFoundError:
            return (
                f"it needs the assembler of CUDA 12 for a {GPUS[gpu].name}; "
                "`pip install nvidia-cuda-nvcc-cu12` installs it"
            )
    return None


def require(benchmark: str) -> None:
    """Ends a benchmark with the reason where this machine cannot make its numbers.

    Any JAX may count, and one alone save what it has counted.
    """
    jax.config.update("jax_platforms", "cpu")
    reason = unavailable()
    jaxlib = importlib.metadata.version("jaxlib")
    if reason:
        raise SystemExit(f"{benchmark} cannot compile for a GPU: {reason}")
    if results.is_saving() and jaxlib != JAXLIB:
        raise SystemExit(
            f"{benchmark} saves what jaxlib {JAXLIB} compiles, and here is {jaxlib}; "
            f"`pip install 'jax[cuda12-local]=={JAXLIB}'` installs it, on Python 3.12 "
            "or newer"
        )


def compiled(
    fun: Callable[..., Any], *args: Any, donated: int = 0, gpu: str = H200
) -> Any:
    """Compiles a function for a GPU.

    Args:
        fun: The function.
        *args: Its arguments, see :func:`lowered`.
        donated: How many of them, from the first on, are donated.
        gpu: Its key in :data:`GPUS`.

    Returns:
        The ``jax.stages.Compiled``. It has its program, ``as_text()``, and
        ``memory_analysis()``.
    """
    made = lowered(fun, *args, donated=donated, gpu=gpu)
    return made.compile(compiler_options=OPTIONS)


def lowered(
    fun: Callable[..., Any], *args: Any, donated: int = 0, gpu: str = H200
) -> Any:
    """Lowers a function for a GPU.

    Args:
        fun: The function.
        *args: Its arguments: pytrees of arrays, or of anything with a shape and a
            dtype.
        donated: How many of them, from the first on, are donated.
        gpu: Its key in :data:`GPUS`.

    Returns:
        The ``jax.stages.Lowered``, which is to be compiled with :data:`OPTIONS`.
    """
    sharding = SingleDeviceSharding(devices(gpu)[0])
    leaves, structure = jax.tree.flatten(args)

    def flat(donated, others):
        return jax.tree.leaves(fun(*structure.unflatten(donated + others)))

    # Leaves, because jmp's loss scale cannot hold the descriptions that JAX puts in
    # the place of arrays here.
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in leaves]
    split = len(jax.tree.leaves(args[:donated]))
    return jax.jit(flat, donate_argnums=0).lower(shapes[:split], shapes[split:])


@functools.cache
def devices(gpu: str = H200, count: int = 1) -> list[Any]:
    """Returns devices that one can compile for: GPUs, eight of which are in a machine.

    Args:
        gpu: Its key in :data:`GPUS`.
        count: How many.
    """
    machines = max(1, count // 8)
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=description(gpu),
        topology=f"1x{machines}x{count // machines}",
    ).devices


def description(gpu: str) -> str:
    """Returns what a GPU would say to the compiler of itself.

    Args:
        gpu: Its key in :data:`GPUS`.
    """
    text = pathlib.Path(__file__).with_name("h200.txtpb").read_text()
    if gpu == H200:
        return text
    found = GPUS[gpu]
    major, minor = found.capability
    capability = f"major: {major} minor: {minor}"
    if major >= 9:  # XLA asks for what this architecture alone has
        capability += " feature_extension: ACCELERATED_FEATURES"
    memory = int(found.memory * 2**30)
    spelled = f"{major}.{minor}" + "a" * (major >= 9)
    new = {
        "cuda_compute_capability": f"{{ {capability} }}",
        "core_count": found.cores,
        "fpus_per_core": found.lanes,
        "threads_per_core_limit": found.threads,
        "shared_memory_per_core": found.shared * 1024,
        "shared_memory_per_block_optin": found.shared_by_block * 1024,
        "device_memory_size": memory,
        "platform_version": f'"Compute Capability {spelled}"',
        "model_str": f'"sm_{spelled} with {memory}B RAM, {found.cores} cores"',
        "name": f'"{found.name}"',
        "device_description_str": f'"{found.name}"',
    }
    for field, value in new.items():
        pattern = rf'\b{field}(:?) (\{{.*?\}}|".*?"|\S+)'
        text, times = re.subn(pattern, rf"{field}\1 {value}", text)
        assert times == 1, field
    return text
