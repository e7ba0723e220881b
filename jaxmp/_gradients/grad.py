"""Functions under a policy, and their gradients in true units."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Never, ParamSpec, TypeVar

import jax

from .._base import later
from .._base.around import note_casting, watched
from .._base.checks import check_function, explains
from .._base.gpus import warn_if_emulated
from .._base.objects import refuse_integers, refuse_lost_updates
from .._base.policy import Policy, PolicyLike, casting_policy
from .._base.tree import AxisName
from .._training.loss_scale_state import UNSCALED
from .differentiate import (
    Options,
    Reduction,
    check_loss_function,
    differentiate,
    loss_and_aux,
)

P = ParamSpec("P")
T = TypeVar("T")

_CLOSE_OVER = (
    "Inside `jaxmp.nnx.value_and_grad(fun, policy=policy)`, which has cast the "
    "parameters, close over it: `jaxmp.with_policy(model, policy)(x)`. Elsewhere use "
    "`jaxmp.nnx.autocast(fun, policy)` instead of `with_policy`."
)


@explains('jaxmp.with_policy(fun, "mixed_float16")(*args)')
def with_policy(fun: Callable[P, T], policy: PolicyLike) -> Callable[P, T]:
    """Casts the arguments of a function to compute dtype, its results to output dtype.

    Put it around ``model.apply``, not around the loss: targets and labels must keep
    their precision (a target of 1e5 is Inf in float16), and so must a penalty on the
    parameters. Without this, float32 inputs silently promote matmuls with 16-bit
    parameters to float32.

    Args:
        fun: The function, such as a Linen model's ``apply``. The floating arrays
            among its arguments are cast with :meth:`Policy.cast_to_compute`, each
            argument as a tree of its own; everything else passes through.
        policy: A policy, its string, or a dtype.

    Returns:
        A function with the signature of ``fun``. Its results are cast with
        :meth:`Policy.cast_to_output`.

    Raises:
        TypeError: If ``fun`` changes an NNX object among its arguments: casting has
            copied it, so the update would be lost. And if ``fun`` is not a function.
        ValueError: If the policy has a ``dot_dtype``, which only
            :func:`jaxmp.autocast` can follow.

    Examples:
        >>> def double(x):
        ...     print("computes in", x.dtype)
        ...     return 2 * x
        >>> jaxmp.with_policy(double, "mixed_bfloat16")(jnp.ones(2)).dtype
        computes in bfloat16
        dtype('float32')
    """
    check_function(
        "with_policy",
        fun,
        "with_policy(fun, policy)",
        "Pass its `apply`: `with_policy(model.apply, policy)`.",
    )
    policy = casting_policy(policy, "with_policy")
    return cast_around("with_policy", fun, policy, fun)


def cast_around(
    name: str, fun: Callable[P, T], policy: Policy, plain: Callable
) -> Callable[P, T]:
    """Returns ``fun`` under a policy, see :func:`with_policy`.

    ``plain`` is the user's function, as it would be without one.
    """
    # Its arguments have other dtypes than those that it is given.
    checked: Callable[..., T] = refuse_lost_updates("with_policy", _CLOSE_OVER, fun)

    @functools.wraps(fun, updated=())
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        note_casting()
        warn_if_emulated(policy.compute_dtype, policy.compute_dtype)
        cast_args = [policy.cast_to_compute(arg) for arg in args]
        cast_kwargs = {key: policy.cast_to_compute(arg) for key, arg in kwargs.items()}
        try:
            result = checked(*cast_args, **cast_kwargs)
        except (TypeError, ValueError, NotImplementedError) as error:
            later.function_checks().note_cast(error, name, plain, policy, args, kwargs)
            raise
        return policy.cast_to_output(watched(policy.compute_dtype, result))

    return wrapped


@explains("jaxmp.value_and_grad(loss_fn, loss_scale=opt_state)(*args)")
def value_and_grad(
    fun: Callable[P, Any],
    *positional: Never,
    policy: PolicyLike | None = None,
    loss_scale: Any = UNSCALED,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    allow_int: bool = False,
    accum_steps: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    reduction: Reduction = "mean",
    axis_name: AxisName | None = None,
    mesh: jax.sharding.Mesh | None = None,
    shardings: Any = None,
    gather: bool = True,
) -> Callable[P, tuple[Any, Any]]:
    """Differentiates a function under a loss scale, and returns unscaled gradients.

    Use it instead of ``jax.value_and_grad``. It multiplies the loss by ``loss_scale``
    in float32, and divides the gradients by it in float32 before it returns them. An
    overflow stays visible as Inf or NaN.

    With ``accum_steps=k`` it splits the batch into ``k`` micro-batches, and computes
    one after the other. The scaled gradients add up in float32, and memory holds the
    activations of one micro-batch only.

    Args:
        fun: Function that returns a real floating scalar, the loss, or with
            ``has_aux`` a pair of it and anything. Return a float32 loss: the gradient
            of a float16 one overflows at a ``loss_scale`` of 2**16.
        *positional: Nothing. Pass all options by name.
        policy: None, the usual case, casts nothing: ``fun`` casts for itself, or
            :func:`jaxmp.autocast` is around this. With a policy (or its string, or a
            dtype) only the differentiated arguments are cast, once, and ``fun`` gets
            the 16-bit copies. It must cast its other inputs itself. A penalty on the
            parameters then belongs in the optimizer. Under ``jit``, a ``fun`` without
            :func:`jaxmp.with_policy` is traced once more, to warn if no matmul runs in
            16 bits.
        loss_scale: The state of an optimizer that :func:`jaxmp.loss_scaling` made, or
            anything else that :func:`jaxmp.get_loss_scale` takes; or a positive scalar,
            best a power of two. A tuple of the states of several optimizers stands for
            the smallest of their scales. Inside ``jax.jit``, the state must be an
            argument of the jitted function. If gradients are computed in float16
            without any ``loss_scale``, not even 1.0, this warns.
        argnums: The positional argument or arguments to differentiate.
        has_aux: Whether ``fun`` returns a pair.
        allow_int: Whether leaves that are not floating may be differentiated; their
            gradients are of dtype float0, as those of ``jax.value_and_grad``.
        accum_steps: The number of micro-batches.
        batch_argnums: The positional arguments to split: each array in them on its
            leading axis. Example ``i`` goes to micro-batch ``i % accum_steps``, so
            none of a sharded batch leaves its device. A scalar PRNG key is split
            into one for each micro-batch. Anything else passes through. Pass arguments
            that are the same for every example by keyword: these are never split. An
            array in another position with as many examples as the batch is refused,
            because labels forgotten here would give a wrong loss.
        reduction: ``"mean"`` averages losses and gradients over the micro-batches
            and over ``axis_name``, for a loss that is a mean over the batch.
            ``"sum"`` adds them, for one that divides by the count of the whole
            batch itself, such as that of the tokens that are not masked.
        axis_name: Mesh axes over which to reduce the loss and, in float32 or the
            policy's ``reduce_dtype``, the scaled gradients, inside ``shard_map`` or
            ``pmap``. A scalar PRNG key of the batch then differs by device. The
            gradients of parameters that are sharded over such an axis (experts, FSDP by
            hand) are only averaged, because the collectives in ``fun`` have summed
            them.
        mesh: A mesh over which to do that for you, outside of ``shard_map``: the batch
            is split over ``axis_name`` (all its axes if that is None), and everything
            else is the same on every device. The gradients are reduced once, after the
            micro-batches. ``aux`` has a new leading axis, the devices.
        shardings: Over which mesh axes the differentiated arguments are sharded: a
            pytree of ``PartitionSpec`` or ``NamedSharding`` with their structure, or
            a prefix of it. ``PartitionSpec()`` means the same on every device.
            With ``mesh`` the arguments and the gradients are sharded in this way: the
            copy in compute dtype is gathered once, and a reduce-scatter sums the
            gradients. In a ``shard_map`` of your own, pass it with ``axis_name`` under
            ``check_vma=False`` and ``pmap``, where JAX does not know it.
        gather: False, with ``mesh`` and ``shardings``, passes the function the shards
            of its device as they are stored. It gathers them with :func:`jaxmp.gather`
            where a layer begins. It is traced once more, to find a shard that it does
            not gather.

    Returns:
        A function with the signature of ``fun`` that returns ``(loss, gradients)`` or
        ``((loss, aux), gradients)``. The loss and the gradients are unscaled and at
        least float32. The gradients have the structure and shapes of the differentiated
        arguments; in an Equinox model they are those of ``eqx.filter_grad``, None for
        everything except floating arrays. With several micro-batches, ``aux`` has a new
        leading axis of length ``accum_steps``; leaves that are neither arrays nor
        numbers, such as strings, come back unchanged.

    Raises:
        ValueError: If an option is not understood, ``loss_scale`` is not a positive
            scalar, the policy has a ``dot_dtype``, a leading axis cannot be divided, a
            part of the batch is not in ``batch_argnums``, the mesh has no such axis,
            an argument lies on other devices, ``shard_map`` knows that the loss
            differs over an axis which ``axis_name`` leaves out, ``shardings`` are
            missing, do not fit or are not what ``shard_map`` knows, or a shard is
            never gathered.
        TypeError: If ``fun`` returns something else than a real floating scalar or
            changes an NNX object among its arguments, which it has as a copy; or if a
            differentiated leaf is not floating, or an argument is of another kind.

    Examples:
        >>> def loss_fn(w, x):
        ...     return jnp.mean(jnp.float32(w.astype(jnp.float16) * x))
        >>> w, x = jnp.array(2.0), jnp.full(4, 2.0**-20, jnp.float16)
        >>> loss = lambda w: 2.0**-10 * loss_fn(w, x)
        >>> jax.grad(loss)(w).item()
        0.0
        >>> jaxmp.value_and_grad(loss, loss_scale=2**15)(w)
        (Array(1.8626451e-09, dtype=float32), Array(9.313226e-10, dtype=float32))

    References:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2,
        https://arxiv.org/abs/1710.03740.
    """
    check_loss_function("value_and_grad", fun, positional)
    cast = None
    if policy is not None:
        policy = casting_policy(policy, "value_and_grad")
        cast = policy.cast_to_compute
    cure = "Use `jaxmp.nnx.value_and_grad`, which takes the same arguments."
    checked = refuse_lost_updates("value_and_grad", cure, fun)
    options = Options(
        policy,
        loss_scale=loss_scale,
        argnums=argnums,
        allow_int=allow_int,
        accum_steps=accum_steps,
        batch_argnums=batch_argnums,
        reduction=reduction,
        axis_name=axis_name,
        mesh=mesh,
        shardings=shardings,
        gather=gather,
    )

    user = inspect.unwrap(fun)  # of `grad`, what it was given

    def stateless(state, *args, **kwargs):
        with later.module_scopes()((args, kwargs)):
            result = checked(*args, **kwargs)
        return *loss_and_aux(result, has_aux, user), state

    @functools.wraps(fun, updated=())
    def wrapped(*args, **kwargs):
        positions = options.positions(args)
        if not allow_int:
            name, advice = vars(checked)["refuses_lost_updates"]
            refuse_integers(name, advice, [args[i] for i in positions])
        try:
            loss, aux, grads, _ = differentiate(
                options, stateless, {}, args, kwargs, user=user, cast=cast
            )
        except (TypeError, ValueError, NotImplementedError) as error:
            if policy is not None:
                note = later.function_checks().note_cast
                note(error, "value_and_grad", fun, policy, args, kwargs, positions)
            raise
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


@explains("jaxmp.grad(loss_fn, loss_scale=opt_state)(*args)")
def grad(
    fun: Callable[P, Any],
    *positional: Never,
    policy: PolicyLike | None = None,
    has_aux: bool = False,
    **options: Any,
) -> Callable[P, Any]:
    """Differentiates like :func:`value_and_grad`, and returns the gradients alone.

    It takes the arguments of :func:`value_and_grad`.

    Returns:
        A function that returns ``gradients`` or ``(gradients, aux)``.

    Raises:
        ValueError: As :func:`value_and_grad`.
        TypeError: As :func:`value_and_grad`.

    Examples:
        >>> jaxmp.grad(lambda x: x**2, loss_scale=2.0**15)(3.0)
        Array(6., dtype=float32)
    """
    check_loss_function("grad", fun, positional)
    cure = "Use `jaxmp.nnx.value_and_grad`, which returns the gradients second."
    checked = refuse_lost_updates("grad", cure, fun)
    value_and_grad_fun = value_and_grad(
        checked, policy=policy, has_aux=has_aux, **options
    )

    @functools.wraps(fun, updated=())
    def wrapped(*args, **kwargs):
        value, grads = value_and_grad_fun(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped
