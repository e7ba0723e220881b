"""Checks of arguments that several functions share, with their messages."""

from __future__ import annotations

import functools
import numbers
import operator
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


def as_scale(loss_scale: ArrayLike) -> jax.Array | np.float32:
    """Returns a loss scale as a float32 scalar, refusing what cannot be one."""
    if isinstance(loss_scale, (int, float, str)):
        check_positive("loss_scale", loss_scale)
        # Not a JAX array: that would start the backend, before a program that builds
        # its functions on import can call `jax.distributed.initialize`.
        return np.float32(loss_scale)
    if jnp.shape(loss_scale) != ():
        raise ValueError(
            f"`loss_scale` must be a scalar, but has the shape "
            f"{list(jnp.shape(loss_scale))}. Pass `jaxmp.get_loss_scale(opt_state)`."
        )
    return jnp.asarray(loss_scale, jnp.float32)


def check_positive(name: str, value: float) -> None:
    """Raises unless a number is a positive normal float32."""
    check_number(name, value)
    limits = np.finfo(np.float32)
    if not float(limits.tiny) <= value <= float(limits.max):
        raise ValueError(
            f"`{name}` must be finite and positive in float32, but is {value}. "
            "Pass a power of two such as 2.0**15."
        )


def check_number(name: str, value: float) -> None:
    """Raises unless a value is a real number."""
    if not isinstance(value, numbers.Real):
        raise TypeError(
            f"`{name}` must be a number, but is {value!r}. Pass a Python float."
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


def refuse_lost_updates(function: str, cure: str, fun: Callable) -> Callable:
    """Returns ``fun``, raising where it changes an NNX object that it got as a copy.

    An NNX object that crosses a JAX transformation as a pytree arrives as a copy, and
    what ``fun`` changes in it would be lost. One that is only read may pass.
    """

    @functools.wraps(fun, updated=())
    def checked(*args, **kwargs):
        nnx = sys.modules.get("flax.nnx")  # who has an object has imported it
        if nnx is None or not _nnx_leaves(nnx, (args, kwargs)):
            return fun(*args, **kwargs)
        # `jax.grad` hands on what it does not differentiate as it is.
        args, kwargs = jax.tree.map(lambda x: x, (args, kwargs))
        before = _nnx_leaves(nnx, (args, kwargs))
        result = fun(*args, **kwargs)
        after = _nnx_leaves(nnx, (args, kwargs))
        for path in before | after:
            owner, old = before.get(path, (None, None))
            owner, new = after.get(path, (owner, None))
            if new is not old:
                name = jax.tree_util.keystr(path[1:], simple=True, separator="/")
                raise TypeError(
                    f"`jaxmp.{function}` was given the NNX object `{owner}`, and the "
                    f"function changed its variable `{name.removesuffix('/value')}`: "
                    f"in a copy, so that the update would be lost. {cure}"
                )
        return result

    return checked


def _nnx_leaves(nnx: Any, tree: Any) -> dict[Any, tuple[str, Any]]:
    """Returns the leaves of all NNX objects in a pytree, with the class of each one."""
    kinds = (nnx.Pytree, nnx.Variable)
    objects = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kinds))
    return {
        path + inner: (type(x).__name__, leaf)
        for path, x in objects
        if isinstance(x, kinds)
        for inner, leaf in jax.tree.leaves_with_path(x)
    }
