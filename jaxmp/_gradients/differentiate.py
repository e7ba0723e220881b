"""How a loss is differentiated: scaled, by micro-batches, summed over devices."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import jmp
import numpy as np

from .._base import later
from .._base.around import (
    GRADIENT,
    autocast_dtype,
    is_staged,
    knowing,
    note_float16,
    warn_if_constant,
    warn_unscaled,
)
from .._base.checks import (
    as_axes,
    as_count,
    as_positions,
    as_scale,
    as_tuple,
    check_function,
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
    varying_axes,
    widen,
    with_rest,
)
from .._training.loss_scale_state import (
    UNSCALED,
    divided,
    holds_scale,
    scale_in,
    scales_in,
)
from .micro_batches import GradFun, check_batch_is_whole, over_micro_batches

_16_BIT = (jnp.float16, jnp.bfloat16)
# How micro-batches and devices are put together.
Reduction: TypeAlias = Literal["mean", "sum"]


class Options:
    """The options of ``value_and_grad``, checked and each in one form.

    Attributes:
        policy: The policy that casts the parameters, or None.
        loss_scale: The number or array that multiplies the loss; 1 divides nothing.
        is_scaled: Whether a loss scale was given, be it 1.
        scale: The same as a float32 scalar.
        scales: Those of the states that it is from.
        argnums: What is differentiated: one position, or a tuple.
        allow_int: Whether integers may be.
        accum_steps: The number of micro-batches.
        batch_argnums: The positions of the batch, or None.
        reduction: How micro-batches and devices are put together.
        axis_name: The mesh axes over which to do that, as they were given.
        devices: All that is done over several devices; None on one.
    """

    def __init__(
        self,
        policy: Policy | None,
        *,
        loss_scale: Any,
        argnums: Any,
        allow_int: bool,
        accum_steps: int,
        batch_argnums: Any,
        reduction: Reduction,
        axis_name: AxisName | None,
        mesh: jax.sharding.Mesh | None,
        shardings: Any,
        gather: bool,
    ) -> None:
        self.policy, self.allow_int, self.axis_name = policy, allow_int, axis_name
        self.argnums = as_positions("argnums", argnums)
        if batch_argnums is not None:
            batch_argnums = as_positions("batch_argnums", batch_argnums)
        self.batch_argnums = batch_argnums
        self.accum_steps = as_count("accum_steps", accum_steps)
        if reduction not in ("mean", "sum"):
            raise ValueError(
                f'`reduction` must be "mean" or "sum", but is {short(reduction)}.'
            )
        self.reduction = reduction
        needs = {"accum_steps": self.accum_steps > 1, "mesh": mesh is not None}
        for name, is_given in needs.items():
            if is_given and batch_argnums is None:
                raise ValueError(
                    f"`{name}` needs `batch_argnums`, the positions of the arguments "
                    "to split. Pass `batch_argnums=(1, 2)` for `fun(params, x, y)`."
                )
        self.devices = None
        if gather is not True or any(
            x is not None for x in (axis_name, mesh, shardings)
        ):
            of_devices = later.devices().Devices
            self.devices = of_devices(policy, axis_name, mesh, shardings, gather)
        is_summed = self.devices is not None and self.devices.axes
        if policy is not None and policy.reduce_dtype is not None and not is_summed:
            warn(
                f"The `reduce_dtype` of {policy} is not used: `value_and_grad` "
                "sums over devices with `axis_name` (inside `shard_map`) or `mesh` "
                "only, and under plain `jit` JAX sums in the dtype of the backward "
                "pass. Pass one of the two, or leave `r=` out of the policy."
            )
        self.is_scaled = loss_scale is not UNSCALED
        self.loss_scale, self.scales = scale_in(loss_scale), scales_in(loss_scale)
        self.scale = as_scale(self.loss_scale)

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
    unscaled = False
    if warns:
        fun, unscaled = _watched(options, fun, user)
    differentiated, batched = _positions(options, args)
    args, fun = _as_arrays(options, list(args), fun)
    stored = options.params(args)
    _check_parameters(stored, options.allow_int)
    devices = options.devices
    if options.accum_steps > 1 or (devices is not None and devices.splits):
        check_batch_is_whole(args, batched, differentiated)
    if cast is not None:
        for i in differentiated:
            args[i] = cast(args[i])
    if devices is not None:
        args, fun = devices.shown_shards(options, fun, args, stored)

    run = _scaled(options, fun)
    if options.accum_steps > 1:
        run = over_micro_batches(run, options.params, batched, options.accum_steps)
    run = _reduced(options, run)
    if devices is not None:
        run = devices.around(options, run, batched, stored)
    with (
        knowing(unscaled=unscaled, scales=options.scales, gradient=True),
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


def _watched(
    options: Options, fun: Callable[..., Any], user: Callable[..., Any]
) -> tuple[Callable[..., Any], bool]:
    """Warns of a loss scale that does nothing, and lets ``fun`` warn of a policy.

    Returns the function, and whether what runs in float16 inside it has no scale.
    """
    warn_if_constant(options.loss_scale)
    dtype = None if options.policy is None else options.policy.compute_dtype
    around = autocast_dtype()
    warn_if_emulated(dtype, dtype)
    unscaled = not options.is_scaled
    if np.float16 in (dtype, around):
        note_float16(options.scales)
        if unscaled:
            warn_unscaled()
            unscaled = False  # what is inside need not say it again
    if dtype in _16_BIT and around not in _16_BIT and is_staged():
        checks = later.function_checks()
        fun = checks.warns_if_promoted(options.policy, fun, user)
    return fun, unscaled


def _positions(
    options: Options, args: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the positions of what is differentiated, and of the batch."""
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
    return differentiated, batched


def _as_arrays(
    options: Options, args: list[Any], fun: Callable[..., Any]
) -> tuple[list[Any], Callable[..., Any]]:
    """Takes the arrays out of Equinox models, which ``fun`` is given whole."""
    models = options.params(args)
    arrays = arrays_of_models(models)
    if arrays is models:
        return args, fun

    def of_arrays(state, *args, **kwargs):
        params = with_rest(options.params(args), models)
        return fun(state, *options.with_params(args, params), **kwargs)

    return options.with_params(args, arrays), of_arrays


def _check_parameters(params: Any, allow_int: bool) -> None:
    """Refuses to differentiate what is no array, or has no gradient."""
    for path, x in jax.tree.leaves_with_path(params):
        if not isinstance(x, numbers.Number) and not hasattr(x, "dtype"):
            name = clipped(path_name(path)) or "argument"
            raise TypeError(
                f"The differentiated `{name}` must be an array, but is {describe(x)}. "
                "Pass the parameters, and let the function take all else from around "
                "it, or from an argument that is not in `argnums`."
            )
        dtype = jnp.result_type(x)
        if not (allow_int or jnp.issubdtype(dtype, jnp.inexact)):
            name = clipped(path_name(path)) or "argument"
            raise TypeError(
                f"The differentiated `{name}` has no gradient: its dtype is {dtype}. "
                "Pass it in an argument that is not in `argnums`; or type "
                "`allow_int=True`, with which its gradient is one of dtype float0."
            )


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
            loss = widen(loss)
            if options.devices is not None:
                loss = options.devices.differing(loss)
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


def _reduced(options: Options, run: GradFun) -> GradFun:
    """Makes a part of the mean over micro-batches and devices of what was added up."""

    def reduced(args, kwargs, state):
        loss, grads, aux, changes = run(args, kwargs, state)
        _check_sum_is_ours(loss, options.params(args), options.axis_name)
        parts = options.accum_steps
        if options.devices is not None:
            parts *= options.devices.count()
        if options.reduction == "mean" and parts > 1:
            # Before the sum, which then does not overflow where the mean does not;
            # and a product, because a division by the count would merge with that by
            # the scale, and the largest scales times a count are Inf.
            loss, grads = jax.tree.map(lambda x: x * (1 / parts), (loss, grads))
        return loss, grads, aux, changes

    return reduced


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
