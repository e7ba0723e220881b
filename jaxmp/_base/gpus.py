"""What NVIDIA GPUs have, by their compute capability, and how a device tells it.

Nothing else in jaxmp compares capabilities. What each of them makes of a policy was
read from compiled code: `python -m benchmarks gpus`.
"""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .checks import short, warn

# The first with tensor cores for bfloat16. XLA runs such products in float32 below it.
BFLOAT16 = 8, 0
# The first with tensor cores for float8. XLA runs such products in 16 bits below it.
FLOAT8 = 8, 9

# The largest head that cuDNN's attention takes, from a capability up to the next one,
# and versions of cuDNN that a capability needs: `check_is_flash_attention` of JAX
# 0.10.2 and 0.12, in jax/_src/cudnn/fused_attention_stablehlo.py. Its other checks are
# of what jaxmp never asks for: float8, packed sequences, and values of another size
# than keys, which need 9.0 too. cuDNN's table has none below 8.0, and 128 from 10.0:
# https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
# cuDNN 9.23 adds 256 alone: https://github.com/NVIDIA/TransformerEngine/pull/3056
LARGEST_HEADS = {(10, 0): 128, (9, 0): 256, (8, 0): 128}
NEEDS_CUDNN = {(10, 3): (9, 11)}


class Gpu(NamedTuple):
    """An NVIDIA GPU, or any one of a compute capability."""

    kind: str
    capability: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.kind} (compute capability {spelled(self.capability)})"

    @property
    def largest_head(self) -> int:
        """Up to which size of heads it has cuDNN's attention, 0 if it has none."""
        return next((n for x, n in LARGEST_HEADS.items() if self.capability >= x), 0)


# What programs are judged by where the device is no NVIDIA GPU.
NEWEST = Gpu("an NVIDIA GPU", (9, 0))


def gpu_of(device: Any) -> Gpu | None:
    """Returns what a ``jax.Device`` is, also one of a topology; None if no NVIDIA GPU.

    AMD's GPUs have a compute capability too: ``gfx90a``.
    """
    text = str(getattr(device, "compute_capability", ""))
    if found := re.match(r"(\d+)\.(\d+)", text):
        return Gpu(device.device_kind, (int(found[1]), int(found[2])))
    return None


def default_device() -> Any:
    """Returns JAX's default device, and starts its backend."""
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if device is None or isinstance(device, str):  # the name of a platform
        return jax.local_devices(backend=device)[0]
    return device


def default_gpu() -> Gpu | None:
    """Returns what JAX's default device is, None if no NVIDIA GPU."""
    return gpu_of(default_device())


def mixed(device: Any = None) -> str:
    """Returns the name of the policy whose 16-bit format a device multiplies.

    None is JAX's default device.
    """
    if device is not None and not isinstance(device, jax.Device):
        raise TypeError(
            f"`device` must be a `jax.Device`, but is {short(device)}. Pass for "
            "example `jax.devices()[0]`, or leave it out for JAX's default device."
        )
    return _mixed(default_gpu() if device is None else gpu_of(device))


def _mixed(gpu: Gpu | None) -> str:
    has_bfloat16 = gpu is None or gpu.capability >= BFLOAT16
    return "mixed_bfloat16" if has_bfloat16 else "mixed_float16"


def warn_if_emulated(forward: Any, backward: Any, *, float8: bool = False) -> None:
    """Warns once if the default device lacks a format in which one computes."""
    if jnp.bfloat16 not in (forward, backward):
        return  # and the machine is not asked
    gpu = default_gpu()
    if gpu is None or gpu.capability >= (FLOAT8 if float8 else BFLOAT16):
        return
    of, lacks = "matmuls", "bfloat16"
    runs = "run in float32 there, and save neither time nor memory"
    if float8:
        lacks = "float8"
        runs = "that asked for it run in 16 bits there, of operands rounded to float8"
    elif forward != jnp.bfloat16:
        of = "matmuls of the backward pass"
    name = _mixed(gpu)
    cure = f'Use the policy "{name}"'
    if name == "mixed_float16":
        cure += " with its loss scale: `tx = jaxmp.loss_scaling(optimizer, policy)` and"
        cure += " `jaxmp.value_and_grad(loss_fn, loss_scale=opt_state)`"
    _warn_once(
        f"{gpu} has no tensor cores for {lacks}: {of} {runs}. {cure}. "
        '`jaxmp.get_policy("mixed")` chooses by the device.'
    )


@functools.cache
def _warn_once(said: str) -> None:
    warn(said)


def weakest(devices: Any) -> Gpu | None:
    """Returns the GPU with the lowest capability; None if one is no NVIDIA GPU."""
    gpus = [*map(gpu_of, devices)]
    known = [gpu for gpu in gpus if gpu is not None]
    if len(known) < len(gpus):
        return None
    return min(known, key=lambda gpu: gpu.capability, default=None)


def spelled(numbers: tuple[int, int]) -> str:
    """Returns a capability, or a version, as people write it."""
    return ".".join(map(str, numbers))
