"""What lies where on a mesh of devices: batches, parameters, optimizer states."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .._base.checks import as_axes, clipped, short
from .._base.tree import (
    is_array,
    is_inexact,
    is_scalar_key,
    path_name,
    taken_out,
    varying_axes,
)
from .._gradients.micro_batches import GradFun, check_leading_axis
from .._optimizers.blocks import Int8Blocks, is_blocks
from .varying import tracked_axes

_CONSTRAINT = (
    "Under `mesh=` of `jaxmp.value_and_grad` each device sees its part of the batch, "
    "and the function cannot constrain an array over the axes {axes} again. Leave them "
    "out of `jax.lax.with_sharding_constraint`. Flax's logical constraints are off in "
    "`with flax.linen.logical_axis_rules([]):` around the call, and those of boxed "
    "parameters after `flax.linen.meta.unbox(params)`. Or leave `mesh=` out: under "
    "plain `jax.jit` the constraints work."
)


def init_shardings(tx: optax.GradientTransformation, params: Any) -> Any:
    """Returns shardings for the optimizer state of sharded parameters.

    Pass them to ``jax.jit(tx.init, out_shardings=...)``. Without them ``jit`` forgets
    the shardings of the parameters. Every moment is then sharded like its parameter.
    Counts, the loss scale, and arrays of other shapes than their parameter are on all
    devices.

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
        >>> init = jax.jit(tx.init, out_shardings=jaxmp.init_shardings(tx, params))
        >>> init(params).inner_state[0].mu["w"].sharding == params["w"].sharding
        True
    """
    if not callable(getattr(tx, "init", None)):
        raise TypeError(
            f"`init_shardings(tx, params)` takes the optimizer first, but got "
            f"{short(tx)}. Pass for example `optax.adam(1e-3)`."
        )
    shardings = jax.tree.map(lambda x: getattr(x, "sharding", "no device"), params)
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

    def beside(x, param, sharding):
        if not is_blocks(x):
            return sharding if x.shape == param.shape else everywhere
        spec, shape = sharding.spec, x.units.shape
        axes = as_axes(spec[-1]) if len(spec) == len(shape) else ()
        if not shape[-1] % math.prod(sharding.mesh.shape[axis] for axis in axes):
            return Int8Blocks(sharding, sharding)
        # The units of a row that are too few for its devices are on each.
        return Int8Blocks(sharding, sharding.update(spec=P(*spec[:-1])))

    return optax.tree_map_params(
        tx,
        beside,
        state,
        params,
        shardings,
        transform_non_params=lambda _: everywhere,
        is_leaf=is_blocks,
    )


def over_mesh(
    fun: GradFun,
    mesh: Mesh,
    axes: tuple[Any, ...],
    batched: Sequence[int],
    steps: int,
    params_of: Callable[[Sequence[Any]], Any],
    param_specs: Any,
):
    """Returns ``fun`` with its batch split over the axes of a mesh.

    Inside, ``fun`` sees the part of its device, and returns a loss that is the same on
    all, as the changes of the state are. Every ``aux`` is kept along a new leading
    axis. The parameters, ``params_of(args)``, and their gradients lie as
    ``param_specs`` says, of which ``fun`` sees shards over ``axes``.
    """
    explicit = AxisType.Explicit in mesh.axis_types
    put = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
    param_specs = jax.tree.leaves(param_specs)
    devices = math.prod(mesh.shape[axis] for axis in axes)
    over = f"{devices} devices"
    if steps > 1:
        over = f"`accum_steps={steps}` on {over}"

    def split(args, kwargs, state):
        entries, structure = jax.tree.flatten_with_path((tuple(args), kwargs, state))
        numbers = jax.tree.leaves(
            params_of(structure.unflatten(range(len(entries)))[0])
        )
        params = dict(zip(numbers, param_specs, strict=True))
        arrays, specs = {}, {}
        for number, (path, x) in enumerate(entries):
            if not is_array(x):
                continue
            _check_devices(path, x, mesh)
            spec = params.get(number, P())
            if path[0].idx == 0 and path[1].idx in batched and not is_scalar_key(x):
                check_leading_axis(path[1:], x, devices * steps, over)
                spec = P(axes)
            specs[number], arrays[number] = _manual_spec(spec, axes), x
            if explicit:
                arrays[number] = put(x, NamedSharding(mesh, spec))
        # Of what is not floating there are no gradients.
        grad_specs = [spec for n, spec in params.items() if is_inexact(entries[n][1])]
        structure_of_grads: Any = None
        put_back: Any = None

        def on_device(arrays):
            nonlocal structure_of_grads, put_back
            leaves = [arrays.get(number, x) for number, (_, x) in enumerate(entries)]
            loss, grads, aux, changes = fun(*structure.unflatten(leaves))
            grads, structure_of_grads = jax.tree.flatten(grads)
            aux, put_back = taken_out(aux)
            aux = [jnp.asarray(x)[None] for x in aux]
            return loss, grads, aux, changes

        # Without the check of what varies, because a model need not know of it (a
        # scan over layers whose carry begins as zeros would be refused).
        on_devices = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=(P(), [_manual_spec(s, axes) for s in grad_specs], P(axes), P()),
            axis_names=set(axes),
            check_vma=False,
        )
        try:
            loss, grads, aux, changes = on_devices(arrays)
        except ValueError as error:
            # JAX says so of a sharding constraint on one of our axes, in several ways.
            if "manual" in str(error).lower():
                error.add_note(_CONSTRAINT.format(axes=", ".join(map(repr, axes))))
            raise
        for i, spec in enumerate(grad_specs):
            if spec != _manual_spec(spec, axes):  # the rest is the compiler's
                grads[i] = put(grads[i], NamedSharding(mesh, spec))
        return loss, structure_of_grads.unflatten(grads), put_back(aux), changes

    return split


def _manual_spec(spec: P, axes: tuple[Any, ...]) -> P:
    """Returns what a spec says of some mesh axes."""
    return P(*(names or None for names in named_axes(spec, axes)))


def named_axes(spec: P, axes: Any) -> list[tuple[Any, ...]]:
    """Returns, of each entry of a spec, those of its mesh axes that are in ``axes``."""
    return [tuple(axis for axis in as_axes(entry) if axis in axes) for entry in spec]


def parameter_specs(params: Any, shardings: Any, mesh: Mesh) -> Any:
    """Returns the PartitionSpec of each parameter, refusing what does not fit."""
    if shardings is None:
        return jax.tree.map(lambda _: P(), params)

    def fitting(path, x, sharding):
        name, spec = path_name(path) or "the parameter", as_spec(sharding)
        here = getattr(sharding, "mesh", mesh)
        if dict(here.shape) != dict(mesh.shape):
            raise ValueError(
                f"`shardings` puts `{name}` on a mesh of {dict(here.shape)}, but "
                f"`mesh` has {dict(mesh.shape)}. Make both of the same mesh."
            )
        if len(spec) > jnp.ndim(x):
            raise ValueError(
                f"`shardings` has {len(spec)} entries for `{name}`, {spec}, but its "
                f"shape is {list(jnp.shape(x))}. Pass a PartitionSpec with at most one "
                "entry for each of its axes."
            )
        for size, entry in zip(jnp.shape(x), spec, strict=False):
            names = as_axes(entry)
            if unknown := [axis for axis in names if axis not in mesh.axis_names]:
                raise ValueError(
                    f"`shardings` shards `{name}` over {short(unknown[0])}, which is "
                    f"not an axis of the mesh, {mesh.axis_names}. Pass one of these."
                )
            parts = math.prod(mesh.shape[axis] for axis in names)
            if size % parts:
                raise ValueError(
                    f"`shardings` splits an axis of `{name}` into {parts} parts, "
                    f"{spec}, but its shape is {list(jnp.shape(x))}. Shard another "
                    f"axis of it, or pass `PartitionSpec()` to replicate it."
                )
        return spec

    whose = "the differentiated arguments"
    shardings = spread_shardings(shardings, params, "shardings", whose)
    return jax.tree.map_with_path(fitting, params, shardings)


def sharded_axes(params: Any, axes: tuple[Any, ...], shardings: Any) -> Any:
    """Returns a frozenset of the mesh axes over which each parameter is sharded.

    Of a parameter that is sharded over an axis each device has a part, whose gradient
    comes from the losses of all devices: the collectives in the function bring it
    there. Of one that is the same everywhere each device has the gradient of its own
    loss alone.

    Args:
        params: The differentiated arguments, not yet marked as varying.
        axes: The bound axes over which the caller reduces.
        shardings: What the user says, made by :func:`axes_of_shardings`, or None.
    """

    def known_axes(x):  # what is not floating has no gradient
        return varying_axes(x) if is_inexact(x) else frozenset()

    if shardings is None:
        if unknown := sorted(set(axes) - tracked_axes(axes), key=str):
            raise ValueError(
                f"`axis_name` names {short(unknown[0])}, an axis of "
                "`shard_map(check_vma=False)`, `pmap` or `vmap`, where JAX does not "
                "know which parameters are the same on every device, so that their "
                "gradients must be summed, and which are sharded. Pass "
                "`shardings=jax.sharding.PartitionSpec()` where all are the same, "
                "or the `in_specs` of the parameters. Or use "
                "`shard_map(check_vma=True)`, which knows."
            )
        return jax.tree.map(known_axes, params)
    around = jax.sharding.get_abstract_mesh().axis_names
    for axis in frozenset().union(*jax.tree.leaves(shardings)) - set(axes):
        try:
            jax.lax.axis_size(axis)
        except NameError:
            if axis in around:  # but is not manual: JAX does what is needed
                continue
            known = f" of {around}" if around else ""
            raise ValueError(
                f"`shardings` names the mesh axis {short(axis)}, but there is none "
                f"around the call. Pass PartitionSpecs with the axes{known} that the "
                "parameters are sharded over."
            ) from None
        if not tracked_axes((axis,)):
            raise ValueError(
                f"`shardings` says that parameters are sharded over {short(axis)}, "
                f"which `axis_name={axes}` does not name. Without `check_vma=True` JAX "
                "adds up the losses of all devices along it. Pass "
                f"`axis_name={(*axes, axis)}`."
            )
    said = spread_shardings(
        shardings, params, "shardings", "the differentiated arguments"
    )
    for (path, x), own in zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves(said), strict=True
    ):
        known = known_axes(x)
        if is_inexact(x) and (wrong := tracked_axes(own) ^ known):
            axis = min(wrong, key=str)
            states = ("the same on every device", "sharded or different")
            raise ValueError(
                f"`shardings` says that `{path_name(path) or 'the parameter'}` is "
                f"{states[axis in own]} over the mesh axis {short(axis)}, but "
                f"`shard_map(check_vma=True)` knows that it is "
                f"{states[axis in known]}. Leave `shardings` out, or pass the "
                "`in_specs` of the parameters."
            )
    return said


def axes_of_shardings(shardings: Any) -> Any:
    """Returns, for each sharding in a pytree, a frozenset of the axes that it names."""

    return jax.tree.map(
        lambda own: frozenset(a for entry in as_spec(own) for a in as_axes(entry)),
        shardings,
        is_leaf=lambda x: isinstance(x, P),
    )


def as_spec(sharding: Any, option: str = "shardings") -> P:
    """Returns the PartitionSpec of a sharding that a user gave for an option."""
    spec = getattr(sharding, "spec", sharding)
    if not isinstance(spec, P):
        raise TypeError(
            f"`{option}` must be made of `jax.sharding.PartitionSpec` or "
            f"`NamedSharding`, but got {short(sharding)}. Pass the `in_specs` of the "
            "parameters, such as `PartitionSpec()` for what is the same on every "
            "device."
        )
    if P.UNCONSTRAINED in spec:
        raise ValueError(
            f"`{option}` must say how every axis is sharded, but {spec} has an "
            "unconstrained one. Pass None in its place, or the name of an axis."
        )
    return spec


def spread_shardings(prefix: Any, tree: Any, option: str, whose: str) -> Any:
    """Gives to each leaf of a tree its sharding out of a prefix of the tree.

    Args:
        prefix: A pytree of anything but None, with P and NamedSharding as leaves.
        tree: The tree.
        option: The name of the option that ``prefix`` was given for.
        whose: What the tree is, for the error.
    """
    try:
        return jax.tree.map(
            lambda own, part: jax.tree.map(lambda _: own, part),
            prefix,
            tree,
            is_leaf=lambda x: isinstance(x, P),
        )
    except (TypeError, ValueError, KeyError) as error:
        several = ", and with several `argnums` a tuple has one for each"
        # JAX 0.9 quotes the tree behind these words, with all numbers.
        reason = re.split(", got |, value: ", str(error))[0]
        raise ValueError(
            f"`{option}` must have the structure of {whose}, or of a prefix: one "
            f"PartitionSpec serves a whole tree{several * (option == 'shardings')}. "
            f"JAX says: {clipped(reason, 400)}"
        ) from error


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
