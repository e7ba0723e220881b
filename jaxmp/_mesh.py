"""Gradients and optimizer states on a mesh of devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ._batch import GradFun, check_leading_axis, is_array, is_scalar_key
from ._checks import as_axes
from ._tree import AxisName, is_inexact, path_name, wide_dtype


def init_shardings(tx: optax.GradientTransformation, params: Any) -> Any:
    """Returns the shardings that an optimizer state needs beside sharded parameters.

    ``jax.jit(tx.init)`` alone forgets the shardings of the parameters. With
    ``out_shardings`` from here, every moment lies where its parameter lies; counts,
    the loss scale and whatever has not the shape of its parameter lie on all devices.

    Args:
        tx: The optimizer.
        params: Pytree of arrays, or of ``jax.ShapeDtypeStruct`` with shardings.

    Returns:
        A pytree of ``jax.sharding.Sharding`` with the structure of ``tx.init(params)``.

    Raises:
        ValueError: If the parameters lie on different meshes.

    Examples:
        >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        >>> mesh = Mesh(jax.devices(), ("data",))
        >>> params = jax.device_put({"w": jnp.ones(8)}, NamedSharding(mesh, P("data")))
        >>> tx = jaxmp.loss_scaling(optax.adam(1e-3), "mixed_float16")
        >>> init = jax.jit(tx.init, out_shardings=init_shardings(tx, params))
        >>> init(params).inner_state[0].mu["w"].sharding == params["w"].sharding
        True
    """
    shardings = jax.tree.map(lambda x: x.sharding, params)
    leaves = jax.tree.leaves(shardings)
    meshes: set[Any] = {getattr(sharding, "mesh", None) for sharding in leaves}
    if len(meshes) != 1 or None in meshes:
        raise ValueError(
            "`init_shardings` needs parameters that lie on one mesh, but these lie on "
            f"{meshes or 'none'}. Put them there with "
            "`jax.device_put(params, jax.sharding.NamedSharding(mesh, spec))`."
        )
    everywhere = NamedSharding(meshes.pop(), P())
    state = jax.eval_shape(tx.init, params)
    return optax.tree_map_params(
        tx,
        lambda x, param, sharding: sharding if x.shape == param.shape else everywhere,
        state,
        params,
        shardings,
        transform_non_params=lambda _: everywhere,
    )


def over_mesh(
    fun: GradFun, mesh: Mesh, axes: tuple[Any, ...], batched: Sequence[int], steps: int
):
    """Returns ``fun`` with its batch split over the axes of a mesh.

    Inside, ``fun`` sees the part of its device, and returns a loss and gradients that
    are the same on all, as the changes of the state are. Every ``aux`` is kept along a
    new leading axis.
    """
    devices = math.prod(mesh.shape[axis] for axis in axes)
    over = f"{devices} devices"
    if steps > 1:
        over = f"`accum_steps={steps}` on {over}"

    def split(args, kwargs, state):
        entries, structure = jax.tree.flatten_with_path((tuple(args), kwargs, state))
        arrays, specs = {}, {}
        for number, (path, x) in enumerate(entries):
            if not is_array(x):
                continue
            _check_devices(path, x, mesh)
            specs[number] = P()
            if path[0].idx == 0 and path[1].idx in batched and not is_scalar_key(x):
                check_leading_axis(path[1:], x, devices * steps, over)
                specs[number] = P(axes)
            arrays[number] = x
            if AxisType.Explicit in mesh.axis_types:
                sharding = NamedSharding(mesh, specs[number])
                arrays[number] = jax.sharding.reshard(x, sharding)

        def on_device(arrays):
            leaves = [arrays.get(number, x) for number, (_, x) in enumerate(entries)]
            loss, grads, aux, changes = fun(*structure.unflatten(leaves))
            aux = jax.tree.map(lambda x: jnp.asarray(x)[None], aux)
            return loss, grads, aux, changes

        # Without the check of what varies, because a model need not know of it (a
        # scan over layers whose carry begins as zeros would be refused).
        return jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=(P(), P(), P(axes), P()),
            axis_names=set(axes),
            check_vma=False,
        )(arrays)

    return split


def mesh_axes(axis_name: AxisName | None, mesh: Mesh | None) -> tuple[Any, ...]:
    """Returns the axes to reduce over as a tuple, refusing what the mesh has not."""
    if axis_name is None and mesh is not None:
        return tuple(mesh.axis_names)
    axes = as_axes(axis_name)
    if mesh is not None and (unknown := set(axes) - set(mesh.axis_names)):
        raise ValueError(
            f"`axis_name` must name axes of the mesh, {mesh.axis_names}, but "
            f"{unknown.pop()!r} is not one. Pass one of them, or several as a tuple."
        )
    return axes


def own_keys(tree: Any, axes: tuple[Any, ...]) -> Any:
    """Gives each device its own scalar PRNG keys."""
    device = jax.lax.axis_index(axes)
    return jax.tree.map(
        lambda x: jax.random.fold_in(x, device) if is_scalar_key(x) else x, tree
    )


def own_streams(state: dict[str, Any], axes: tuple[Any, ...]) -> dict[str, Any]:
    """Gives each device its own PRNG keys, of whatever shape, in place of those."""
    device = jax.lax.axis_index(axes)

    def own(x):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        keys = jax.vmap(jax.random.fold_in, (0, None))(x.ravel(), device)
        return keys.reshape(x.shape)

    return {name: own(x) for name, x in state.items()}


def agreed(x: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Makes one value of those of all devices: their mean, or that of the first one.

    The mean is for what is floating or complex, such as running statistics. Anything
    else, such as a count, is taken to be the same on all.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = agreed(jax.random.key_data(x), axes)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if is_inexact(x):
        return jax.lax.pmean(x.astype(wide_dtype(x)), axes).astype(x.dtype)
    first = jnp.where(jax.lax.axis_index(axes) == 0, x, jnp.zeros_like(x))
    summable = first.astype(jnp.promote_types(x.dtype, jnp.int8))  # a bool is not
    return jax.lax.psum(summable, axes).astype(x.dtype)


def _check_devices(path: Any, x: Any, mesh: Mesh) -> None:
    """Raises where an argument has been put on other devices than those of the mesh."""
    if isinstance(x, jax.core.Tracer) or not getattr(x, "committed", False):
        return
    there = x.sharding.device_set
    if there != set(mesh.devices.flat):
        kinds = "positional argument", "keyword argument", "NNX variable"
        raise ValueError(
            f"`mesh` has {mesh.size} devices, but the {kinds[path[0].idx]} "
            f"`{path_name(path[1:])}` was put on {len(there)}, which are not the same: "
            f"{x.sharding}. Put it there with "
            "`jax.device_put(x, jax.sharding.NamedSharding(mesh, P()))`."
        )
