"""Functions under a policy, and their gradients in true units."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ._batch import check_batch_is_whole, over_micro_batches
from ._checks import (
    as_count,
    as_positions,
    as_scale,
    check_axes_are_bound,
    check_function,
    check_mesh,
    describe,
    note_nnx_objects,
    refuse_lost_updates,
    warn,
)
from ._loss_scale_state import scale_in, unscale
from ._mesh import (
    agreed,
    axes_of_shardings,
    mesh_axes,
    over_mesh,
    own_keys,
    own_streams,
    sharded_axes,
)
from ._policy import Policy, PolicyLike, get_policy
from ._tree import AxisName, is_inexact, widen
from ._varying import tracked_axes, vary, varying_axes

P = ParamSpec("P")
T = TypeVar("T")

_CLOSE_OVER = (
    "Inside `jaxmp.nnx.value_and_grad(fun, policy)`, which has cast the parameters, "
    "close over it: `jaxmp.with_policy(model, policy)(x)`. Elsewhere use "
    "`jaxmp.nnx.autocast(fun, policy)` in the place of `with_policy`."
)


def with_policy(fun: Callable[P, T], policy: PolicyLike) -> Callable[P, T]:
    """Puts a function under a policy: arguments in compute, results in output dtype.

    Put it around ``model.apply``, not around the loss: targets and labels must keep
    their precision (a target of 1e5 is Inf in float16), and so must a penalty on the
    parameters. Without it, float32 inputs turn the products with 16-bit parameters
    into float32 ones, in silence.

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

    Examples:
        >>> def double(x):
        ...     print("computes in", x.dtype)
        ...     return 2 * x
        >>> with_policy(double, "mixed_bfloat16")(jnp.ones(2)).dtype
        computes in bfloat16
        dtype('float32')
    """
    check_function(
        "with_policy",
        fun,
        "with_policy(fun, policy)",
        "Pass its `apply`: `with_policy(model.apply, policy)`.",
    )
    policy = get_policy(policy)
    # Its arguments have other dtypes than those that it is given.
    checked: Callable[..., T] = refuse_lost_updates("with_policy", _CLOSE_OVER, fun)

    @functools.wraps(fun, updated=())
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        cast_args = [policy.cast_to_compute(arg) for arg in args]
        cast_kwargs = {key: policy.cast_to_compute(arg) for key, arg in kwargs.items()}
        return policy.cast_to_output(checked(*cast_args, **cast_kwargs))

    return wrapped


def value_and_grad(
    fun: Callable[P, Any],
    policy: PolicyLike | None = None,
    *,
    loss_scale: Any = 1.0,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    allow_int: bool = False,
    accum_steps: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    reduction: str = "mean",
    axis_name: AxisName | None = None,
    mesh: jax.sharding.Mesh | None = None,
    shardings: Any = None,
) -> Callable[P, tuple[Any, Any]]:
    """Differentiates a function under a loss scale and returns true gradients.

    In the place of ``jax.value_and_grad``. The loss is multiplied by ``loss_scale``
    in float32, and the gradients are widened to float32 and divided by it before they
    are returned, so that nothing outside sees the scale. An overflow stays visible as
    Inf or NaN.

    With ``accum_steps=k`` the batch is taken in ``k`` micro-batches, one after the
    other. The scaled gradients add up in float32, and the activations of one
    micro-batch are held at a time.

    Args:
        fun: Function that returns a real floating scalar, the loss, or with
            ``has_aux`` a pair of it and anything. Return a float32 loss: the gradient
            of a float16 one overflows at a ``loss_scale`` of 2**16.
        policy: None where ``fun`` casts for itself, the usual case: nothing is cast.
            With a policy (or its string, or a dtype) the
            differentiated arguments are cast to compute dtype once, and the 16-bit
            copies are what ``fun`` sees. A penalty on the parameters then belongs
            into the optimizer.
        loss_scale: The state of an optimizer that :func:`jaxmp.loss_scaling` made, or
            anything else that :func:`jaxmp.get_loss_scale` takes; or a positive
            scalar, best a power of two.
        argnums: The positional argument or arguments to differentiate.
        has_aux: Whether ``fun`` returns a pair.
        allow_int: Whether leaves that are not floating may be differentiated; their
            gradients are of dtype float0, as those of ``jax.value_and_grad``.
        accum_steps: The number of micro-batches.
        batch_argnums: The positional arguments to split: each array in them on its
            leading axis. Row ``i`` goes to micro-batch ``i % accum_steps``, so that
            no row of a sharded batch leaves its device. A scalar PRNG key is split
            into one for each micro-batch. What is not an array passes through. Pass
            by keyword what is the same for every row: it is never split, whereas an
            array in another position with as many rows as the batch is refused, as
            labels forgotten here would give a wrong loss.
        reduction: ``"mean"`` averages losses and gradients over the micro-batches
            and over ``axis_name``, for a loss that is a mean over the batch.
            ``"sum"`` adds them, for one that divides by the count of the whole
            batch itself, such as that of the tokens that are not masked.
        axis_name: Mesh axes over which to reduce the loss and, in float32 or the
            policy's ``reduce_dtype``, the scaled gradients, inside ``shard_map`` or
            ``pmap``. A scalar PRNG key of the batch then differs by device. The
            gradients of parameters that are sharded over such an axis (experts, FSDP
            by hand) are not summed over it, because the collectives in ``fun`` have
            done so; they are averaged only.
        mesh: A mesh over which to do that for you, where you are not inside
            ``shard_map``: the batch is split over ``axis_name`` (all its axes if that
            is None), and everything else is the same on every device. The gradients
            are reduced once, after the micro-batches. ``aux`` has a new leading axis,
            the devices.
        shardings: Over which mesh axes the differentiated arguments are sharded: a
            pytree of ``PartitionSpec`` or ``NamedSharding`` with their structure, or
            a prefix of it. ``PartitionSpec()`` means the same on every device.
            ``shard_map(check_vma=True)`` knows it; ``shard_map(check_vma=False)`` and
            ``pmap`` do not, and there ``axis_name`` needs it.

    Returns:
        A function with the signature of ``fun`` that returns ``(loss, gradients)`` or
        ``((loss, aux), gradients)``. The loss and the gradients are in true units and
        at least float32; the gradients have the structure and shapes of the
        differentiated arguments. With several micro-batches, ``aux`` has a new
        leading axis of length ``accum_steps``.

    Raises:
        ValueError: If an option is not understood, ``loss_scale`` is not a positive
            scalar, a leading axis cannot be divided, a part of the batch is not in
            ``batch_argnums``, the mesh has no such axis, an argument lies on other
            devices, ``shard_map`` knows that the loss differs over an axis which
            ``axis_name`` leaves out, or ``shardings`` are missing, do not fit or are
            not what ``shard_map`` knows.
        TypeError: If ``fun`` returns something else than a real floating scalar or
            changes an NNX object among its arguments, which it has as a copy; or if a
            differentiated leaf is not floating, or an argument is of another kind.

    Examples:
        >>> def loss_fn(w, x):
        ...     return jnp.mean(jnp.float32(w.astype(jnp.float16) * x))
        >>> w, x = jnp.array(2.0), jnp.full(4, 2.0**-20, jnp.float16)
        >>> jax.grad(lambda w: 2.0**-10 * loss_fn(w, x))(w).item()
        0.0
        >>> value_and_grad(lambda w: 2.0**-10 * loss_fn(w, x), loss_scale=2**15)(w)
        (Array(1.8626451e-09, dtype=float32), Array(9.313226e-10, dtype=float32))

    References:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2,
        https://arxiv.org/abs/1710.03740.
    """
    check_loss_function("value_and_grad", fun, policy)
    policy = None if policy is None else get_policy(policy)
    cure = "Use `jaxmp.nnx.value_and_grad`, which takes the same arguments."
    checked = refuse_lost_updates("value_and_grad", cure, fun)
    grads_of = gradients(
        policy,
        cast=None if policy is None else policy.cast_to_compute,
        loss_scale=loss_scale,
        argnums=argnums,
        allow_int=allow_int,
        accum_steps=accum_steps,
        batch_argnums=batch_argnums,
        reduction=reduction,
        axis_name=axis_name,
        mesh=mesh,
        shardings=shardings,
    )

    def stateless(state, *args, **kwargs):
        user = inspect.unwrap(fun)  # of `grad`, what it was given
        return *loss_and_aux(checked(*args, **kwargs), has_aux, user), state

    @functools.wraps(fun, updated=())
    def wrapped(*args, **kwargs):
        try:
            loss, aux, grads, _ = grads_of(stateless, {}, args, kwargs)
        except TypeError as error:
            note = f"There are NNX objects in the arguments. {cure}"
            note_nnx_objects(error, (args, kwargs), note)
            raise
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


def gradients(
    policy: Policy | None,
    *,
    cast: Callable[[Any], Any] | None,
    loss_scale: Any,
    argnums: int | Sequence[int],
    allow_int: bool,
    accum_steps: int,
    batch_argnums: int | Sequence[int] | None,
    reduction: str,
    axis_name: AxisName | None,
    mesh: jax.sharding.Mesh | None,
    shardings: Any,
) -> Callable[..., Any]:
    """Returns what differentiates a function that may change some state.

    The options are those of :func:`value_and_grad`; ``cast`` is applied to each of
    the differentiated arguments. What comes back takes ``(fun, state, args, kwargs)``
    and returns ``(loss, aux, gradients, changes)``. ``fun(state, *args, **kwargs)``
    returns ``(loss, aux, changes)``. The state and the changes are dicts of arrays.
    Each micro-batch sees the changes of the one before. Each device has random
    streams of its own, and the changes of all devices come back as one.
    """
    check_mesh(mesh)
    argnums = as_positions("argnums", argnums)
    if batch_argnums is not None:
        batch_argnums = as_positions("batch_argnums", batch_argnums)
    reduce_dtype = None if policy is None else policy.reduce_dtype
    steps = as_count("accum_steps", accum_steps)
    if reduction not in ("mean", "sum"):
        raise ValueError(f'`reduction` must be "mean" or "sum", but is {reduction!r}.')
    for name, needs in (("accum_steps", steps > 1), ("mesh", mesh is not None)):
        if needs and batch_argnums is None:
            raise ValueError(
                f"`{name}` needs `batch_argnums`, the positions of the arguments to "
                "split. Pass `batch_argnums=(1, 2)` for `fun(params, x, y)`."
            )
    axes = mesh_axes(axis_name, mesh)
    if shardings is not None and (mesh is not None or not axes):
        raise ValueError(
            "`shardings` needs `axis_name`, inside `shard_map` or `pmap`. Under "
            "`mesh=` the parameters are the same on every device and come gathered: "
            "leave `shardings` out."
        )
    if reduce_dtype is not None and not axes:
        warn(
            f"The `reduce_dtype` of {policy} is not used: `value_and_grad` sums over "
            "devices with `axis_name` (inside `shard_map`) or `mesh` only, and under "
            "plain `jit` JAX sums in the dtype of the backward pass. Pass one of the "
            "two, or leave `r=` out of the policy."
        )
    # A mesh hands every device the whole parameters.
    own_axes = axes_of_shardings(shardings if mesh is None else PartitionSpec())
    loss_scale = scale_in(loss_scale)
    scale = as_scale(loss_scale)

    def params_of(args):
        return (
            args[argnums]
            if isinstance(argnums, int)
            else tuple(args[i] for i in argnums)
        )

    def micro_grads(fun, args, kwargs, state):
        def scaled_fun(*args):
            loss, aux, changes = fun(state, *args, **kwargs)
            # An averaged loss, which `shard_map` knows to be the same on all devices,
            # is to be differentiated on each, as one that differs is: our mean divides
            # by them.
            loss = vary(widen(loss), axes)
            return loss * scale.astype(loss.dtype), (loss, aux, changes)

        grad_fun = jax.grad(scaled_fun, argnums, has_aux=True, allow_int=allow_int)
        grads, (loss, aux, changes) = grad_fun(*args)
        # Gradients of integers, of dtype float0, can be neither added nor sent. They
        # are put back at the end.
        grads = jax.tree.map(lambda g: g if is_inexact(g) else None, widen(grads))
        return loss, grads, aux, changes

    def sum_over_copies(own, grad):
        over = tuple(axis for axis in axes if axis not in own)
        return grad if grad is None else _sum_over(grad, over, reduce_dtype)

    def device_grads(fun, args, kwargs, state):
        args = list(args)
        differentiated = _positions(argnums, args, "argnums")
        batched = _positions(batch_argnums, args, "batch_argnums")
        own = None
        apart = {}
        if axes:
            check_axes_are_bound(axes)
            # What differs by device before the call, such as a sharded buffer or the
            # moving average of a sharded parameter, differs after it.
            apart = {name: varying_axes(x) for name, x in state.items()}
            own = sharded_axes(params_of(args), axes, own_axes)
            if reduce_dtype and all(map(set(axes).issubset, jax.tree.leaves(own))):
                warn(
                    f"The `reduce_dtype` of {policy} is not used: every parameter is "
                    f"sharded over {axes}, so that the collectives in the function sum "
                    "their gradients, in its dtypes. Leave `r=` out of the policy."
                )
            for i in batched:
                args[i] = own_keys(args[i], axes)
            for i in differentiated:
                args[i] = vary(args[i], axes)
            state = vary(own_streams(state, axes), axes)
        run = functools.partial(micro_grads, fun)
        if steps > 1:
            run = over_micro_batches(run, params_of(args), batched, steps)
        loss, grads, aux, changes = run(args, kwargs, state)
        _check_sum_is_ours(loss, params_of(args), axis_name)
        _check_state_is_known(own, changes, state)
        parts = steps * math.prod(map(jax.lax.axis_size, axes))
        if reduction == "mean" and parts > 1:
            # Before the sum, which then does not overflow where the mean does not;
            # and a product, because a division by the count would merge with that by
            # the scale, and the largest scales times a count are Inf.
            loss, grads = jax.tree.map(lambda x: x * (1 / parts), (loss, grads))
        if axes:
            loss = jax.lax.psum(loss, axes)
            grads = jax.tree.map(sum_over_copies, own, grads)
            changes = {
                name: agreed(x, tuple(a for a in axes if a not in apart[name]))
                if name in state
                else x
                for name, x in changes.items()
            }
        return loss, grads, aux, changes

    def grads_of(fun, state, args, kwargs):
        args = list(args)
        differentiated = _positions(argnums, args, "argnums")
        batched = _positions(batch_argnums, args, "batch_argnums")
        if not isinstance(argnums, int) and not 0 < len(argnums) == len(differentiated):
            raise ValueError(
                f"`argnums={argnums}` must name one argument or more, each once. Pass "
                "`argnums=0` for the first."
            )
        if both := set(batched) & set(differentiated):
            raise ValueError(
                f"Argument {min(both)} is in `argnums` and in `batch_argnums`. The "
                "gradients add up over the batch, so the batch itself cannot be "
                "differentiated. Take it out of one."
            )
        if steps > 1 or (mesh is not None and mesh.size > 1):
            check_batch_is_whole(args, batched, differentiated)
        if cast is not None:
            for i in differentiated:
                args[i] = cast(args[i])
        run = functools.partial(device_grads, fun)
        if mesh is not None:
            run = over_mesh(run, mesh, axes, batched, steps)
        loss, grads, aux, changes = run(args, kwargs, state)
        grads = jax.tree.map(
            lambda x, g: np.zeros(np.shape(x), jax.dtypes.float0) if g is None else g,
            params_of(args),
            unscale(grads, loss_scale),
        )
        return loss, aux, grads, changes

    return grads_of


def grad(
    fun: Callable[P, Any],
    policy: PolicyLike | None = None,
    *,
    has_aux: bool = False,
    **options: Any,
) -> Callable[P, Any]:
    """Differentiates as :func:`value_and_grad` does, and returns the gradients alone.

    Args:
        fun: As in :func:`value_and_grad`.
        policy: As in :func:`value_and_grad`.
        has_aux: Whether ``fun`` returns a pair.
        **options: The other options of :func:`value_and_grad`.

    Returns:
        A function that returns ``gradients`` or ``(gradients, aux)``.

    Raises:
        ValueError: As :func:`value_and_grad`.
        TypeError: As :func:`value_and_grad`.

    Examples:
        >>> grad(lambda x: x**2, loss_scale=2.0**15)(3.0)
        Array(6., dtype=float32)
    """
    check_loss_function("grad", fun, policy)
    cure = "Use `jaxmp.nnx.value_and_grad`, which returns the gradients second."
    checked = refuse_lost_updates("grad", cure, fun)
    value_and_grad_fun = value_and_grad(checked, policy, has_aux=has_aux, **options)

    @functools.wraps(fun, updated=())
    def wrapped(*args, **kwargs):
        value, grads = value_and_grad_fun(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


def check_loss_function(name: str, fun: Any, policy: Any) -> None:
    """Raises where something else stands in the place of the loss or the policy."""
    check_function(
        name,
        fun,
        f"{name}(loss_fn, policy)",
        "Pass the loss, a function of the parameters and the batch that calls "
        "`model.apply(params, x)`.",
    )
    if isinstance(policy, (int, np.integer, tuple, list)):
        raise TypeError(
            f"The second argument of `jaxmp.{name}` is the policy, but is {policy!r}. "
            f"Pass `argnums={policy!r}` to choose what to differentiate."
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
    is_array = isinstance(loss, (jax.Array, np.ndarray, np.generic, int, float))
    if not (
        is_array
        and jnp.shape(loss) == ()
        and jnp.issubdtype(jnp.result_type(loss), jnp.floating)
    ):
        hint = "Average it with `.mean()`, and" if is_array else "For a pair,"
        is_model = callable(fun) and not hasattr(fun, "__name__")
        if is_array and is_model and not isinstance(fun, functools.partial):
            hint = f"If that is a model ({type(fun).__name__}), pass its loss, and"
        raise TypeError(
            "The function to differentiate must return a real floating scalar, the "
            f"loss, but it returned {describe(loss)}. {hint} pass `has_aux=True` "
            "where more than the loss comes back."
        )
    return loss, aux


def _check_sum_is_ours(loss: jax.Array, params: Any, axis_name: Any) -> None:
    """Refuses a loss of each device whose gradients JAX has summed over devices."""
    for x in filter(is_inexact, jax.tree.leaves(params)):
        if apart := varying_axes(loss) - varying_axes(x):
            raise ValueError(
                f"The loss differs over the mesh axes {sorted(map(str, apart))} and "
                f"the parameters do not, but `axis_name={axis_name!r}` does not name "
                "them. JAX would add up the gradients itself: their sum and not their "
                "mean, in 16 bits where `fun` computes in 16 bits. Pass these axes as "
                "`axis_name` to `jaxmp.value_and_grad`, or average the float32 loss "
                "in `fun` with `jax.lax.pmean`."
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


def _sum_over(grad: jax.Array, axes: Any, reduce_dtype: Any) -> jax.Array:
    """Sums a gradient over devices in the dtype of the policy."""
    if not axes:
        return grad
    dtype = grad.dtype if reduce_dtype is None else reduce_dtype
    return jax.lax.psum(grad.astype(dtype), axes).astype(grad.dtype)


def _positions(argnums: Any, args: Sequence[Any], name: str) -> tuple[int, ...]:
    """Returns argument positions as indices from 0, refusing what is not there."""
    numbers = (argnums,) if isinstance(argnums, int) else argnums or ()
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise TypeError(
                f"`{name}={argnums}` needs more positional arguments than the "
                f"{len(args)} given. Pass them by position, not by keyword."
            )
    return tuple(dict.fromkeys(number % len(args) for number in numbers))
