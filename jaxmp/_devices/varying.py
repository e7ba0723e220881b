"""What ``shard_map`` knows of an array: over which mesh axes its values differ."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

# What `jax.grad` differentiates. A Python number is marked as well as an array.
_NUMBERS = (jax.Array, np.ndarray, np.generic, float, complex)


def vary(tree: Any, axis_names: tuple[Any, ...]) -> Any:
    """Marks the arrays of a pytree as differing over mesh axes.

    Differentiating with respect to an array that ``shard_map(check_vma=True)`` knows
    to be the same on all devices makes JAX sum the gradient itself, in the dtype of
    the array. Marked first, the gradient stays local and the sum is ours. Where
    nothing tracks this (``check_vma=False``, ``pmap``, ``vmap``) nothing is marked.
    """
    # Elsewhere JAX 0.8 would mark, too, and then sum when it transposes the mark.
    tracked = tracked_axes(axis_names)

    def mark(x):
        if not isinstance(x, _NUMBERS):
            return x
        same = tracked - varying_axes(x)
        names = tuple(name for name in axis_names if name in same)
        if not names:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, names, to="varying")
        return jax.lax.pvary(x, names)  # pyright: ignore  # JAX 0.8

    return jax.tree.map(mark, tree)


def tracked_axes(axis_names: Iterable[Any]) -> frozenset[Any]:
    """Returns those of the mesh axes for which JAX tracks what differs over them.

    That is inside ``shard_map(check_vma=True)``. For ``check_vma=False``, ``pmap`` and
    ``vmap`` nothing is known of any array.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return frozenset(
        name
        for name in axis_names
        if name in manual and name in varying_axes(jax.lax.axis_index(name))
    )


def varying_axes(x: Any) -> frozenset[Any]:
    """Returns the mesh axes over which ``shard_map(check_vma=True)`` sees x differ."""
    aval = jax.typeof(x)
    if hasattr(aval, "vma"):  # JAX 0.8
        return aval.vma
    return aval.manual_axis_type.varying
