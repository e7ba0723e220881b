"""Gradients over several devices: what each of them sees, and how they are summed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from .._base import later
from .._base.checks import as_axes, check_axes_are_bound, short, warn
from .._base.policy import Policy
from .._base.tree import AxisName, is_inexact, is_key, varying_axes
from .._gradients.differentiate import Options
from .._gradients.micro_batches import GradFun
from .gather import all_gather, dims_of, sum_scatter
from .mesh import axes_of_shardings, over_mesh, parameter_specs, sharded_axes
from .varying import agreed, own_keys, tracked_axes, vary


class Devices:
    """Over which devices gradients are taken: options of ``value_and_grad``.

    Attributes:
        axes: The mesh axes over which to reduce.
        mesh: The mesh to split the batch over, None in a ``shard_map`` of the user.
        gather: Whether the function sees whole parameters.
        reduce_dtype: The dtype in which gradients are summed, None for their own.
    """

    def __init__(
        self,
        policy: Policy | None,
        axis_name: AxisName | None,
        mesh: jax.sharding.Mesh | None,
        shardings: Any,
        gather: bool,
    ) -> None:
        _check_mesh(mesh)
        self.axes = as_axes(axis_name)
        if mesh is not None:
            if axis_name is None:
                self.axes = tuple(mesh.axis_names)
            if unknown := set(self.axes) - set(mesh.axis_names):
                raise ValueError(
                    f"`axis_name` must name axes of the mesh, {mesh.axis_names}, but "
                    f"{short(unknown.pop())} is not one. Pass one of them, or several "
                    "as a tuple."
                )
        if shardings is not None and not self.axes:
            raise ValueError(
                "`shardings` needs `mesh`, or `axis_name` inside `shard_map` or "
                "`pmap`. Under plain `jax.jit` the arrays have their shardings: leave "
                "it out."
            )
        if not isinstance(gather, bool):
            raise TypeError(f"`gather` must be True or False, but is {short(gather)}.")
        if not gather and (mesh is None or shardings is None):
            raise ValueError(
                "`gather=False` needs `mesh` and `shardings`: the function then sees "
                "the shards of its device, and gathers them with `jaxmp.gather`. Pass "
                "`mesh=mesh, shardings=shardings`. Inside `shard_map` it sees them "
                "anyway: leave `gather` out."
            )
        self.mesh, self.gather, self._policy = mesh, gather, policy
        self.reduce_dtype = None if policy is None else policy.reduce_dtype
        # Over which axes parameters are sharded, None where JAX is to know.
        self._own_axes = axes_of_shardings(shardings)  # refuses what is none
        if mesh is not None and gather:  # the function sees whole parameters
            self._own_axes = axes_of_shardings(PartitionSpec())
        self._shardings = None if mesh is None else shardings

    @property
    def splits(self) -> bool:
        """Whether the batch is split here, over more than one device."""
        return self.mesh is not None and self.mesh.size > 1

    def count(self) -> int:
        """Returns over how many devices there are sums, on one of them."""
        return math.prod(map(jax.lax.axis_size, self.axes))

    def differing(self, loss: jax.Array) -> jax.Array:
        """Returns the loss of a device as one that differs over devices.

        An averaged loss, which ``shard_map`` knows to be the same on all, is to be
        differentiated on each, as one that differs is: our mean divides by them.
        """
        return vary(loss, self.axes)

    def sharded(self, params: Any) -> list[frozenset[Any]]:
        """Returns the axes over which the function sees a part of each parameter."""
        named = jax.tree.leaves(axes_of_shardings(self._specs(params)))
        return [own.intersection(self.axes) for own in named]

    def shown_shards(
        self, options: Options, fun: Callable[..., Any], args: list[Any], stored: Any
    ) -> tuple[list[Any], Callable[..., Any]]:
        """Lets the function see the stored shards where it is to gather them itself."""
        if self.gather:
            return args, fun
        leaves, structure = jax.tree.flatten(options.params(args))
        axes = self.sharded(stored)
        for i, shard in enumerate(jax.tree.leaves(stored)):
            if axes[i]:  # `jaxmp.gather` casts it
                leaves[i] = shard
        args = options.with_params(args, structure.unflatten(leaves))
        refuses = later.function_checks().refuses_ungathered
        return args, refuses(options, fun, axes)

    def around(
        self, options: Options, run: GradFun, batched: Sequence[int], stored: Any
    ) -> GradFun:
        """Returns ``run``, which works on one device, for all of them."""
        specs = None if self.mesh is None else self._specs(stored)
        run = self._summed(options, run, batched, specs)
        if self.mesh is None:
            return run
        steps, params_of = options.accum_steps, options.params
        return over_mesh(run, self.mesh, self.axes, batched, steps, params_of, specs)

    def _specs(self, params: Any) -> Any:
        """Returns the PartitionSpec of each parameter, refusing what does not fit."""
        assert self.mesh is not None
        return parameter_specs(params, self._shardings, self.mesh)

    def _summed(
        self, options: Options, run: GradFun, batched: Sequence[int], specs: Any
    ) -> GradFun:
        """Adds up what ``run`` returns on all devices.

        Parameters that a mesh has sharded, as ``specs`` say, are gathered before, and
        their gradients sharded by their sum.
        """
        axes, dtype, on_mesh = self.axes, self.reduce_dtype, self.mesh is not None

        def summed(own, spec, grad):  # in the dtype of the policy, onto the shards
            apart = _without(axes, own)
            if grad is None or not apart:
                return grad
            part = grad.astype(grad.dtype if dtype is None else dtype)
            part = sum_scatter(part, dims_of(spec, apart))
            if rest := _without(apart, axes_of_shardings(spec)):
                part = jax.lax.psum(part, rest)
            return part.astype(grad.dtype)

        def of_all(args, kwargs, state):
            check_axes_are_bound(axes)
            # What differs by device before the call, such as a sharded buffer or the
            # moving average of a sharded parameter, differs after it.
            apart = {name: varying_axes(x) for name, x in state.items()}
            own = sharded_axes(options.params(args), axes, self._own_axes)
            everything = all(map(set(axes).issubset, jax.tree.leaves(own)))
            if dtype and everything and not on_mesh:
                warn(
                    f"The `reduce_dtype` of {self._policy} is not used: every "
                    f"parameter is sharded over {axes}, so that the collectives in the "
                    "function sum their gradients, in its dtypes. Leave `r=` out of "
                    "the policy."
                )
            args = list(args)
            for i in batched:
                args[i] = own_keys(args[i], axes)
            sharded = specs
            if not (on_mesh and self.gather):
                sharded = jax.tree.map(lambda _: PartitionSpec(), own)
            whole = jax.tree.map(
                lambda x, spec: vary(all_gather(x, dims_of(spec, axes)), axes),
                options.params(args),
                sharded,
            )
            args = options.with_params(args, whole)
            state = vary(own_keys(state, axes, is_key), axes)
            loss, grads, aux, changes = run(args, kwargs, state)
            if not on_mesh:  # where all state is the same on every device
                _check_state_is_known(own, changes, state)
            loss = jax.lax.psum(loss, axes)
            grads = jax.tree.map(summed, own, sharded, grads)
            changes = {
                name: agreed(x, _without(axes, apart[name])) if name in state else x
                for name, x in changes.items()
            }
            return loss, grads, aux, changes

        return of_all if axes else run


def _without(axes: tuple[Any, ...], some: frozenset[Any]) -> tuple[Any, ...]:
    return tuple(axis for axis in axes if axis not in some)


def _check_state_is_known(own: Any, changes: dict, state: dict) -> None:
    """Refuses to average state that may be sharded as the parameters beside it are."""
    sharded = frozenset().union(*jax.tree.leaves(own))
    unknown = sharded - tracked_axes(sharded)
    names = [name for name, x in changes.items() if name in state and is_inexact(x)]
    if unknown and names:
        raise ValueError(
            f"The function changes `{names[0].partition(' #')[0]}`, and parameters are "
            f"sharded over {sorted(map(str, unknown))}, where JAX does not know "
            "whether it is sharded as they are, or to be averaged. Use "
            "`shard_map(check_vma=True)`, which knows."
        )


def _check_mesh(mesh: Any) -> None:
    """Raises where a name, a sharding or devices stand in the place of a mesh."""
    if mesh is None or isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        return
    cure = 'Pass for example `mesh=jax.sharding.Mesh(jax.devices(), ("data",))`.'
    if isinstance(mesh, jax.sharding.NamedSharding):
        cure = "Pass the mesh in it: `mesh=sharding.mesh`."
    elif isinstance(mesh, str):
        cure += f" Inside `shard_map`, pass `axis_name={short(mesh)}` and no mesh."
    raise TypeError(
        f"`mesh` must be a `jax.sharding.Mesh`, but is {short(mesh)}. {cure}"
    )
