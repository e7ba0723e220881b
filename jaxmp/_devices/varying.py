"""What differs over the axes of a mesh, as ``shard_map`` knows or as we make it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from .._base.tree import (
    is_inexact,
    is_key,
    is_scalar_key,
    varying_axes,
    wide_dtype,
)


def vary(tree: Any, axis_names: tuple[Any, ...]) -> Any:
    """Marks the arrays of a pytree as differing over mesh axes.

    Differentiating with respect to an array that ``shard_map(check_vma=True)`` knows
    to be the same on all devices makes JAX sum the gradient itself, in the dtype of
    the array. Marked first, the gradient stays local and the sum is ours. Where
    nothing tracks this (``check_vma=False``, ``pmap``, ``vmap``) nothing is marked.
    """
    # Elsewhere JAX 0.9 would mark, too, and then sum when it transposes the mark.
    tracked = tracked_axes(axis_names)

    def mark(x):
        same = tracked - varying_axes(x)
        names = tuple(name for name in axis_names if name in same)
        return jax.lax.pcast(x, names, to="varying") if names else x

    return jax.tree.map(mark, tree)


def in_mesh_here(array: Any) -> Any:
    """Returns an array, whole on each device, with the mesh axes that are known here.

    ``jax.sharding.auto_axes`` and ``explicit_axes`` change their kind for some lines.
    """
    here = jax.sharding.get_abstract_mesh()
    if here.empty or jax.typeof(array).sharding.mesh == here:
        return array
    return jax.sharding.reshard(array, jax.sharding.PartitionSpec())


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


def own_keys(
    tree: Any, axes: tuple[Any, ...], is_own: Callable[[Any], bool] = is_scalar_key
) -> Any:
    """Gives each device keys of its own, in the place of some of a tree."""
    device = jax.lax.axis_index(axes)

    def own(x):
        if not is_own(x):
            return x
        fold = jax.random.fold_in
        for _ in x.shape:
            fold = jax.vmap(fold, (0, None))
        return fold(x, device)

    return jax.tree.map(own, tree)


def agreed(x: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Makes one value of those of all devices: their mean, or that of the first one.

    The mean is for what is floating or complex, such as running statistics. Anything
    else, such as a count, is taken to be the same on all.
    """
    if not axes:
        return x
    if is_key(x):
        data = agreed(jax.random.key_data(x), axes)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if is_inexact(x):
        return jax.lax.pmean(x.astype(wide_dtype(x)), axes).astype(x.dtype)
    first = jnp.where(jax.lax.axis_index(axes) == 0, x, jnp.zeros_like(x))
    summable = first.astype(jnp.promote_types(x.dtype, jnp.int8))  # a bool is not
    return jax.lax.psum(summable, axes).astype(x.dtype)
