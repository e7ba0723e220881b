"""How a loss is differentiated: scaled, by micro-batches, summed over devices."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import jmp
import numpy as np
from jax.sharding import PartitionSpec

from .._base.checks import (
    as_axes,
    as_count,
    as_positions,
    as_scale,
    as_tuple,
    check_axes_are_bound,
    check_function,
    check_mesh,
    clipped,
    describe,
    short,
    warn,
)
from .._base.gpus import warn_if_emulated
from .._base.policy import Policy
from .._base.tree import (
    AxisName,
    arrays_of_models,
    is_array,
    is_inexact,
    path_name,
    widen,
    with_rest,
)
from .._devices.batch import GradFun, check_batch_is_whole, over_micro_batches
from .._devices.gather import all_gather, dims_of, sum_scatter
from .._devices.mesh import (
    axes_of_shardings,
    over_mesh,
    parameter_specs,
    sharded_axes,
)
from .._devices.varying import (
    agreed,
    is_key,
    own_keys,
    tracked_axes,
    vary,
    varying_axes,
)
from .._jaxprs.around import (
    GRADIENT,
    autocast_dtype,
    inside,
    is_staged,
    note_float16,
    warn_if_constant,
    warn_unscaled,
)
from .._training.loss_scale_state import (
    UNSCALED,
    divided,
    holds_scale,
    scale_in,
    scales_in,
)

_16_BIT = (jnp.float16, jnp.bfloat16)
# How micro-batches and devices are put together.
Reduction: TypeAlias = Literal["mean", "sum"]


@dataclasses.dataclass(eq=False)
class Options:
    """The options of ``value_and_grad``, as they are given; then checked, in one form.

    Beside them are ``is_scaled``, whether a loss scale was given, be it 1, and
    ``scale``, the same as a float32 scalar; ``scales``, of the states that it is from;
    ``axes``, over which to reduce; and
    ``own_axes``, over which parameters are sharded, None where JAX is to know.
    """

    policy: Policy | None
    _: dataclasses.KW_ONLY
    loss_scale: Any  # then the number or array; a Python number 1 divides nothing
    argnums: Any
    allow_int: bool
    accum_steps: int
    batch_argnums: Any
    reduction: Reduction
    axis_name: AxisName | None
    mesh: jax.sharding.Mesh | None
    shardings: Any  # of the parameters; then over the mesh alone
    gather: bool  # whether the function sees them whole

    def __post_init__(self) -> None:
        """Checks the options, and brings each into one form."""
        mesh, shardings = self.mesh, self.shardings
        check_mesh(mesh)
        self.argnums = as_positions("argnums", self.argnums)
        if self.batch_argnums is not None:
            self.batch_argnums = as_positions("batch_argnums", self.batch_argnums)
        self.accum_steps = as_count("accum_steps", self.accum_steps)
        if self.reduction not in ("mean", "sum"):
            raise ValueError(
                f'`reduction` must be "mean" or "sum", but is {short(self.reduction)}.'
            )
        needs = {"accum_steps": self.accum_steps > 1, "mesh": mesh is not None}
        for name, is_given in needs.items():
            if is_given and self.batch_argnums is None:
                raise ValueError(
                    f"`{name}` needs `batch_argnums`, the positions of the arguments "
                    "to split. Pass `batch_argnums=(1, 2)` for `fun(params, x, y)`."
                )
        self.axes = as_axes(self.axis_name)
        if mesh is not None:
            if self.axis_name is None:
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
        if not isinstance(self.gather, bool):
            raise TypeError(
                f"`gather` must be True or False, but is {short(self.gather)}."
            )
        if not self.gather and (mesh is None or shardings is None):
            raise ValueError(
                "`gather=False` needs `mesh` and `shardings`: the function then sees "
                "the shards of its device, and gathers them with `jaxmp.gather`. Pass "
                "`mesh=mesh, shardings=shardings`. Inside `shard_map` it sees them "
                "anyway: leave `gather` out."
            )
        if self.reduce_dtype is not None and not self.axes:
            warn(
                f"The `reduce_dtype` of {self.policy} is not used: `value_and_grad` "
                "sums over devices with `axis_name` (inside `shard_map`) or `mesh` "
                "only, and under plain `jit` JAX sums in the dtype of the backward "
                "pass. Pass one of the two, or leave `r=` out of the policy."
            )
        self.own_axes = axes_of_shardings(shardings)  # refuses what is none
        if mesh is not None and self.gather:  # the function sees whole parameters
            self.own_axes = axes_of_shardings(PartitionSpec())
        if mesh is None:
            self.shardings = None
        self.is_scaled = self.loss_scale is not UNSCALED
        given = self.loss_scale
        self.loss_scale, self.scales = scale_in(given), scales_in(given)
        self.scale = as_scale(self.loss_scale)

    @property
    def reduce_dtype(self) -> np.dtype | None:
        """The dtype in which gradients are summed over devices, None for their own."""
        return None if self.policy is None else self.policy.reduce_dtype

    def positions(self, args: Sequence[Any], name: str = "argnums") -> tuple[int, ...]:
        """Returns the positions of an option as indices from 0, each once."""
        given = getattr(self, name)
        for number in as_tuple(given):
            if not -len(args) <= number < len(args):
                raise TypeError(
                    f"`{name}={short(given)}` needs more positional arguments than the "
                    f"{len(args)} given. Pass them by position, not by keyword."
                )
        return tuple(dict.fromkeys(number % len(args) for number in as_tuple(given)))

    def params(self, args: Sequence[Any]) -> Any:
        """Returns the differentiated arguments, as ``jax.grad`` returns gradients."""
        if isinstance(self.argnums, int):
            return args[self.argnums]
        return tuple(args[i] for i in self.argnums)

    def specs(self, params: Any) -> Any:
        """Returns the PartitionSpec of each parameter, refusing what does not fit."""
        assert self.mesh is not None
        return parameter_specs(params, self.shardings, self.mesh)

    def sharded(self, params: Any) -> list[frozenset[Any]]:
        """Returns the axes over which the function sees a part of each parameter."""
        named = jax.tree.leaves(axes_of_shardings(self.specs(params)))
        return [own.intersection(self.axes) for own in named]

    def with_params(self, args: Sequence[Any], params: Any) -> list[Any]:
        """Returns the arguments with others in the place of the differentiated."""
        args = list(args)
        if isinstance(self.argnums, int):
            args[self.argnums] = params
        else:
            for i, param in zip(self.argnums, params, strict=True):
                args[i] = param
        return args


def differentiate(
    options: Options,
    fun: Callable[..., Any],
    state: dict[str, Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    user: Callable[..., Any],
    cast: Callable[[Any], Any] | None = None,
    warns: bool = True,
) -> tuple[jax.Array, Any, Any, dict[str, Any]]:
    """Differentiates a function that may change some state.

    Each micro-batch sees the changes of the one before. Each device has random
    streams of its own, and the changes of all devices come back as one.

    Args:
        options: What is differentiated, and how.
        fun: Called as ``fun(state, *args, **kwargs)``, returns
            ``(loss, aux, changes)``.
        state: Dict of arrays, as the changes are.
        args: Positional arguments.
        kwargs: Keyword arguments.
        user: The function that the user gave, whose arguments have names.
        cast: What each of the differentiated arguments goes through before.
        warns: Whether to look for a loss scale or a policy that does nothing.

    Returns:
        ``(loss, aux, gradients, changes)``, in true units.
    """
    args = list(args)
    unscaled = warns and not options.is_scaled
    if warns:
        warn_if_constant(options.loss_scale)
        policy_dtype = None if options.policy is None else options.policy.compute_dtype
        around = autocast_dtype()
        warn_if_emulated(policy_dtype, policy_dtype)
        if np.float16 in (policy_dtype, around):
            note_float16(options.scales)
            if unscaled:
                warn_unscaled()
                unscaled = False  # what is inside need not say it again
        if policy_dtype in _16_BIT and around not in _16_BIT and is_staged():
            # Reading jaxprs takes long to import, here as below.
            from .function_checks import warns_if_promoted

            assert options.policy is not None
            fun = warns_if_promoted(options.policy, fun, user)
    differentiated = options.positions(args)
    batched = options.positions(args, "batch_argnums")
    argnums = options.argnums
    if not isinstance(argnums, int) and not 0 < len(argnums) == len(differentiated):
        raise ValueError(
            f"`argnums={short(argnums)}` must name one argument or more, each once. "
            "Pass `argnums=0` for the first."
        )
    if both := set(batched) & set(differentiated):
        raise ValueError(
            f"Argument {min(both)} is in `argnums` and in `batch_argnums`. The "
            "gradients add up over the batch, so the batch itself cannot be "
            "differentiated. Take it out of one."
        )
    models = options.params(args)
    if (arrays := arrays_of_models(models)) is not models:
        args, of_models = options.with_params(args, arrays), fun

        def of_arrays(state, *args, **kwargs):
            params = with_rest(options.params(args), models)
            return of_models(state, *options.with_params(args, params), **kwargs)

        fun = of_arrays
    stored = options.params(args)
    for path, x in jax.tree.leaves_with_path(stored):
        if not isinstance(x, numbers.Number) and not hasattr(x, "dtype"):
            name = clipped(path_name(path)) or "argument"
            raise TypeError(
                f"The differentiated `{name}` must be an array, but is {describe(x)}. "
                "Pass the parameters, and let the function take all else from around "
                "it, or from an argument that is not in `argnums`."
            )
        dtype = jnp.result_type(x)
        if not (options.allow_int or jnp.issubdtype(dtype, jnp.inexact)):
            name = clipped(path_name(path)) or "argument"
            raise TypeError(
                f"The differentiated `{name}` has no gradient: its dtype is {dtype}. "
                "Pass it in an argument that is not in `argnums`; or type "
                "`allow_int=True`, with which its gradient is one of dtype float0."
            )
    mesh = options.mesh
    if options.accum_steps > 1 or (mesh is not None and mesh.size > 1):
        check_batch_is_whole(args, batched, differentiated)
    if cast is not None:
        for i in differentiated:
            args[i] = cast(args[i])
    if not options.gather:
        from .function_checks import refuses_ungathered

        leaves, structure = jax.tree.flatten(options.params(args))
        axes = options.sharded(stored)
        for i, shard in enumerate(jax.tree.leaves(stored)):
            if axes[i]:  # `jaxmp.gather` casts it
                leaves[i] = shard
        args = options.with_params(args, structure.unflatten(leaves))
        fun = refuses_ungathered(options, fun, axes)
    specs: Any = None if mesh is None else options.specs(stored)
    run = _on_device(options, fun, batched, specs)
    if mesh is not None:
        steps = options.accum_steps
        params_of = options.params
        run = over_mesh(run, mesh, options.axes, batched, steps, params_of, specs)
    with (
        inside(unscaled=unscaled, scales=options.scales, gradient=True),
        jax.named_scope(GRADIENT),
    ):
        loss, grads, aux, changes = run(args, kwargs, state)
    grads = divided(grads, options.loss_scale)
    grads = jax.tree.map(
        lambda x, g: np.zeros(np.shape(x), jax.dtypes.float0) if g is None else g,
        options.params(args),
        grads,
    )
    return loss, aux, grads, changes


def check_loss_function(name: str, fun: Any, others: tuple[Any, ...]) -> None:
    """Raises where something else stands in the place of the loss, or beside it.

    Beside it, in ``others``, there must be nothing.
    """
    check_function(
        name,
        fun,
        f"{name}(loss_fn)",
        "Pass the loss, a function of the parameters and the batch that calls "
        "`model.apply(params, x)`.",
    )
    if not others:
        return
    other = others[0]
    several = other if isinstance(other, (tuple, list)) else [other]
    cure = f"Call what it returns: `jaxmp.{name}(loss_fn)(params, x)`."
    if isinstance(other, (str, jmp.Policy, np.dtype, type)):
        home = "jaxmp.nnx" if name.startswith("nnx.") else "jaxmp"
        cure = (
            "To run all of it in 16 bits, type "
            f"`{home}.autocast(jaxmp.{name}(loss_fn, loss_scale=opt_state), policy)`. "
            "`policy=` casts the parameters alone, for a loss that casts its inputs."
        )
    elif other is None:
        cure = "Leave it out."
    elif holds_scale(other):
        cure = "Pass `loss_scale=opt_state`."
    elif all(isinstance(i, (int, np.integer)) for i in several):
        cure = f"Pass `argnums={short(other)}` to choose what to differentiate."
    raise TypeError(
        f"`jaxmp.{name}` takes the function, and everything else by its name, but was "
        f"given {describe(other)} after it. {cure}"
    )


def loss_and_aux(result: Any, has_aux: bool, fun: Any = None) -> tuple[Any, Any]:
    """Takes apart what the user's function returned, and checks the loss."""
    if not has_aux:
        loss, aux = result, None
    elif isinstance(result, tuple) and len(result) == 2:
        loss, aux = result
    else:
        raise TypeError(
            "With `has_aux=True` the function must return a pair `(loss, aux)`, but "
            f"it returned {describe(result)}."
        )
    is_number = is_array(loss) or isinstance(loss, (int, float))
    if not (
        is_number
        and jnp.shape(loss) == ()
        and jnp.issubdtype(jnp.result_type(loss), jnp.floating)
    ):
        hint = "Average it with `.mean()`, and" if is_number else "For a pair,"
        is_model = callable(fun) and not hasattr(fun, "__name__")
        if is_number and is_model and not isinstance(fun, functools.partial):
            hint = f"If that is a model ({type(fun).__name__}), pass its loss, and"
        raise TypeError(
            "The function to differentiate must return a real floating scalar, the "
            f"loss, but it returned {describe(loss)}. {hint} pass `has_aux=True` "
            "where more than the loss comes back."
        )
    return loss, aux


def _scaled(options: Options, fun: Callable[..., Any]) -> GradFun:
    """Differentiates the scaled loss of one micro-batch on one device."""

    def scaled(args, kwargs, state):
        def scaled_fun(*args):
            loss, aux, changes = fun(state, *args, **kwargs)
            # An averaged loss, which `shard_map` knows to be the same on all devices,
            # is to be differentiated on each, as one that differs is: our mean divides
            # by them.
            loss = vary(widen(loss), options.axes)
            return loss * options.scale.astype(loss.dtype), (loss, aux, changes)

        grad_fun = jax.grad(
            scaled_fun, options.argnums, has_aux=True, allow_int=options.allow_int
        )
        grads, (loss, aux, changes) = grad_fun(*args)
        # Gradients of integers, of dtype float0, can be neither added nor sent. They
        # are put back at the end.
        grads = jax.tree.map(lambda g: g if is_inexact(g) else None, widen(grads))
        return loss, grads, aux, changes

    return scaled


def _on_device(
    options: Options,
    fun: Callable[..., Any],
    batched: Sequence[int],
    specs: Any,
) -> GradFun:
    """Adds up the loss and the gradients of micro-batches, and of all devices.

    Parameters that a mesh has sharded, as ``specs`` say, are gathered before, and
    their gradients sharded by their sum.
    """
    axes, dtype = options.axes, options.reduce_dtype
    on_mesh = options.mesh is not None
    of_batch = _scaled(options, fun)
    if options.accum_steps > 1:
        steps = options.accum_steps
        of_batch = over_micro_batches(of_batch, options.params, batched, steps)

    def of_device(args, kwargs, state):
        loss, grads, aux, changes = of_batch(args, kwargs, state)
        _check_sum_is_ours(loss, options.params(args), options.axis_name)
        parts = options.accum_steps * math.prod(map(jax.lax.axis_size, axes))
        if options.reduction == "mean" and parts > 1:
            # Before the sum, which then does not overflow where the mean does not;
            # and a product, because a division by the count would merge with that by
            # the scale, and the largest scales times a count are Inf.
            loss, grads = jax.tree.map(lambda x: x * (1 / parts), (loss, grads))
        return loss, grads, aux, changes

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
        own = sharded_axes(options.params(args), axes, options.own_axes)
        everything = all(map(set(axes).issubset, jax.tree.leaves(own)))
        if dtype and everything and not on_mesh:
            warn(
                f"The `reduce_dtype` of {options.policy} is not used: every parameter "
                f"is sharded over {axes}, so that the collectives in the function sum "
                "their gradients, in its dtypes. Leave `r=` out of the policy."
            )
        args = list(args)
        for i in batched:
            args[i] = own_keys(args[i], axes)
        sharded = specs
        if not (on_mesh and options.gather):
            sharded = jax.tree.map(lambda _: PartitionSpec(), own)
        whole = jax.tree.map(
            lambda x, spec: vary(all_gather(x, dims_of(spec, axes)), axes),
            options.params(args),
            sharded,
        )
        args = options.with_params(args, whole)
        state = vary(own_keys(state, axes, is_key), axes)
        loss, grads, aux, changes = of_device(args, kwargs, state)
        if not on_mesh:  # where all state is the same on every device
            _check_state_is_known(own, changes, state)
        loss = jax.lax.psum(loss, axes)
        grads = jax.tree.map(summed, own, sharded, grads)
        changes = {
            name: agreed(x, _without(axes, apart[name])) if name in state else x
            for name, x in changes.items()
        }
        return loss, grads, aux, changes

    return of_all if axes else of_device


def _without(axes: tuple[Any, ...], some: frozenset[Any]) -> tuple[Any, ...]:
    return tuple(axis for axis in axes if axis not in some)


def _check_sum_is_ours(loss: jax.Array, params: Any, axis_name: Any) -> None:
    """Refuses a loss of each device whose gradients JAX has summed over devices."""
    for x in filter(is_inexact, jax.tree.leaves(params)):
        if apart := varying_axes(loss) - varying_axes(x):
            axes = (*as_axes(axis_name), *sorted(apart, key=str))
            missing = axes[0] if len(axes) == 1 else axes
            raise ValueError(
                f"Pass `axis_name={missing!r}` to `jaxmp.value_and_grad`: the loss "
                "varies over this mesh axis, and the parameters are replicated. "
                f"`axis_name={axis_name!r}` does not name it. JAX would add up the "
                "gradients itself: their sum and not their mean, in 16 bits where "
                "`fun` computes in 16 bits. Or average the float32 loss in `fun` with "
                "`jax.lax.pmean`."
            )


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
