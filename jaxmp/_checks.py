"""Checks of arguments that several functions share, with their messages."""

from __future__ import annotations

import numbers
import operator
import sys
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


def as_scale(loss_scale: ArrayLike) -> jax.Array | np.float32:
    """Returns a loss scale as a float32 scalar, refusing what cannot be one."""
    known = known_number("loss_scale", loss_scale)
    if known is None:
        return jnp.asarray(loss_scale, jnp.float32)
    check_positive("loss_scale", known)
    if isinstance(loss_scale, jax.Array):
        return jnp.asarray(loss_scale, jnp.float32)
    # Not a JAX array: that would start the backend, before a program that builds
    # its functions on import can call `jax.distributed.initialize`.
    return np.float32(known)


def known_number(name: str, value: Any) -> Any:
    """Returns a number or scalar array as a Python number, or None if it is traced.

    A value that is not on a device of this process is not known either.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, np.generic):
        return value
    if not hasattr(value, "dtype"):
        raise TypeError(
            f"`{name}` must be a number, but is {value!r}. Pass a Python float."
        )
    value = plain_array(value)
    if jnp.shape(value) != ():
        raise ValueError(
            f"`{name}` must be a scalar, but has the shape {list(jnp.shape(value))}. "
            "Pass `jaxmp.get_loss_scale(opt_state)`, or a Python float."
        )
    is_number = any(
        jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer)
    )
    if not is_number or isinstance(value, jax.ShapeDtypeStruct):
        raise TypeError(
            f"`{name}` must be a number, but is {value!r} of dtype {value.dtype}. "
            "Pass a Python float."
        )
    if isinstance(value, jax.core.Tracer):
        return None
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    return jax.device_get(value).item()


def plain_array(x: Any) -> Any:
    """Takes an array, or its abstract shape, out of the variable of NNX around it."""
    if isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return x
    (value,) = jax.tree.leaves(x)
    return value if isinstance(value, jax.ShapeDtypeStruct) else x[...]


def check_positive(name: str, value: Any) -> None:
    """Raises unless a number is a positive normal float32, as far as it is known."""
    value = known_number(name, value)
    limits = np.finfo(np.float32)
    if value is not None and not float(limits.tiny) <= value <= float(limits.max):
        raise ValueError(
            f"`{name}` must be finite and positive in float32, but is {value}. "
            "Pass a power of two such as 2.0**15."
        )


def as_count(name: str, value: int) -> int:
    """Returns a number of steps as an int, refusing what is not at least 1."""
    try:
        count = operator.index(value)
    except TypeError:
        raise TypeError(
            f"`{name}` must be an integer, but is {value!r}. Pass a number of steps."
        ) from None
    if not 1 <= count <= np.iinfo(np.int32).max:
        raise ValueError(
            f"`{name}` must be at least 1 and fit into int32, but is {value}."
        )
    return count


def as_axes(axis_name: Any) -> tuple[Any, ...]:
    """Returns one axis name or several as a tuple; none where there is None."""
    if axis_name is None:
        return ()
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def check_axes_are_bound(axes: tuple[Any, ...]) -> None:
    """Raises where an axis is not one of the ``shard_map`` or ``pmap`` around."""
    for axis in axes:
        try:
            jax.lax.axis_size(axis)
        except NameError:
            bound = jax.sharding.get_abstract_mesh().manual_axes
            known = f", which has {bound}," if bound else ""
            raise ValueError(
                "`axis_name` must name axes of the `shard_map` or `pmap` around"
                f"{known} but {axis!r} is not one. Pass the name of a mesh axis inside "
                "`jax.shard_map`, and no `axis_name` under plain `jax.jit`."
            ) from None


def refuse_nnx_modules(
    function: str,
    tree: Any,
    remedy: str = "the function of that name in `jaxmp.nnx`, or close over the module",
) -> None:
    """Raises where an NNX module would lose its updates by passing as a pytree."""
    nnx = sys.modules.get("flax.nnx")  # who has a module has imported it
    if nnx is None:
        return
    for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Module)):
        if isinstance(x, nnx.Module) and jax.tree.leaves(
            nnx.state(x, nnx.Not(nnx.Param))
        ):
            raise TypeError(
                f"`jaxmp.{function}` was given the NNX module `{type(x).__name__}`, "
                "whose running statistics or random streams would be updated in a "
                f"copy and lost. Use {remedy}."
            )
