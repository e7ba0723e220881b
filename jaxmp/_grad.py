"""Functions under a policy, and their gradients in true units."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
from jax.typing import ArrayLike

from ._checks import as_count, as_scale, refuse_nnx_modules
from ._jaxpr import vary
from ._policy import get_policy
from ._tree import AxisName, is_inexact, path_name, unscale, wide_dtype, widen


def with_policy(
    fun: Callable[..., Any], policy: str | jmp.Policy
) -> Callable[..., Any]:
    """Puts a function under a policy: arguments in compute, results in output dtype.

    Put it around ``model.apply``, not around the loss: targets and labels must keep
    their precision (a target of 1e5 is Inf in float16), and so must a penalty on the
    parameters. Without it, float32 inputs turn the products with 16-bit parameters
    into float32 ones, in silence.

    Args:
        fun: The function, such as a Linen model's ``apply``. The floating arrays
            among its arguments are cast with :meth:`Policy.cast_to_compute`, each
            argument as a tree of its own; everything else passes through.
        policy: A policy, or its string.

    Returns:
        A function with the signature of ``fun``. Its results are cast with
        :meth:`Policy.cast_to_output`.

    Raises:
        TypeError: When called with an NNX module that holds running statistics or
            random number generators: casting copies it, so their updates would be
            lost.

    Examples:
        >>> def double(x):
        ...     print("computes in", x.dtype)
        ...     return 2 * x
        >>> with_policy(double, "mixed_bfloat16")(jnp.ones(2)).dtype
        computes in bfloat16
        dtype('float32')
    """
    policy = get_policy(policy)

    @functools.wraps(fun, updated=())
    def wrapped(*args, **kwargs):
        refuse_nnx_modules("with_policy", (args, kwargs))
        args = [policy.cast_to_compute(arg) for arg in args]
        kwargs = {key: policy.cast_to_compute(arg) for key, arg in kwargs.items()}
        return policy.cast_to_output(fun(*args, **kwargs))

    return wrapped


def value_and_grad(
    fun: Callable[..., Any],
    policy: str | jmp.Policy | None = None,
    *,
    loss_scale: ArrayLike = 1.0,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    allow_int: bool = False,
    accum_steps: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    reduction: str = "mean",
    axis_name: AxisName | None = None,
) -> Callable[..., Any]:
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
        policy: None where ``fun`` casts for itself, the usual case. With a policy the
            differentiated arguments are cast to compute dtype once, and the 16-bit
            copies are what ``fun`` sees. A penalty on the parameters then belongs
            into the optimizer.
        loss_scale: A positive scalar, best a power of two.
        argnums: The positional argument or arguments to differentiate.
        has_aux: Whether ``fun`` returns a pair.
        allow_int: Whether leaves that are not floating may be differentiated; their
            gradients are of dtype float0, as those of ``jax.value_and_grad``.
        accum_steps: The number of micro-batches.
        batch_argnums: The positional arguments to split: each array in them on its
            leading axis, in contiguous equal parts. A scalar PRNG key is split into
            one for each micro-batch. What is not an array passes through.
        reduction: ``"mean"`` averages losses and gradients over the micro-batches
            and over ``axis_name``, for a loss that is a mean over the batch.
            ``"sum"`` adds them, for one that divides by the count of the whole
            batch itself, such as that of the tokens that are not masked.
        axis_name: Mesh axes over which to reduce the loss and, in float32, the
            scaled gradients, inside ``shard_map`` or ``pmap``.

    Returns:
        A function with the signature of ``fun`` that returns ``(loss, gradients)`` or
        ``((loss, aux), gradients)``. The loss and the gradients are in true units and
        at least float32; the gradients have the structure and shapes of the
        differentiated arguments. With several micro-batches, ``aux`` has a new
        leading axis of length ``accum_steps``.

    Raises:
        ValueError: If an option is not understood, ``loss_scale`` is not a positive
            scalar, or a leading axis cannot be divided by ``accum_steps``.
        TypeError: If ``fun`` returns something else than a real floating scalar, or
            a differentiated leaf is not floating.

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
    policy = None if policy is None else get_policy(policy)
    steps = as_count("accum_steps", accum_steps)
    if reduction not in ("mean", "sum"):
        raise ValueError(f'`reduction` must be "mean" or "sum", but is {reduction!r}.')
    if steps > 1 and batch_argnums is None:
        raise ValueError(
            f"`accum_steps={steps}` needs `batch_argnums`, the positions of the "
            "arguments to split. Pass `batch_argnums=(1, 2)` for `fun(params, x, y)`."
        )
    scale = as_scale(loss_scale)

    def scaled_fun(*args, **kwargs):
        loss, aux = _loss_and_aux(fun(*args, **kwargs), has_aux)
        loss = widen(loss)
        return loss * scale.astype(loss.dtype), (loss, aux)

    grad_fun = jax.grad(scaled_fun, argnums, has_aux=True, allow_int=allow_int)

    @functools.wraps(fun, updated=())
    def wrapped(*args, **kwargs):
        refuse_nnx_modules("value_and_grad", (args, kwargs))
        differentiated = _positions(argnums, args, "argnums")
        args = list(args)
        for i in differentiated:
            if policy is not None:
                args[i] = policy.cast_to_compute(args[i])
            if axis_name is not None:
                args[i] = vary(args[i], _axes(axis_name))
        if steps == 1:
            grads, (loss, aux) = grad_fun(*args, **kwargs)
            grads = widen(grads)
        else:
            batched = _positions(batch_argnums, args, "batch_argnums")
            if both := set(batched) & set(differentiated):
                raise ValueError(
                    f"Argument {min(both)} is in `argnums` and in `batch_argnums`. "
                    "Accumulation adds gradients over the batch, so the batch itself "
                    "cannot be differentiated. Take it out of one."
                )
            params = tuple(args[i] for i in differentiated)
            if isinstance(argnums, int):
                (params,) = params
            grads, loss, aux = _accumulate(
                grad_fun, params, args, kwargs, batched, steps
            )
            if reduction == "mean":
                # A product, because a division by k would merge with that by the
                # scale, and k times the largest scales is Inf.
                loss, grads = _map_inexact(lambda x: x * (1 / steps), (loss, grads))
        if axis_name is not None:
            reduce = jax.lax.pmean if reduction == "mean" else jax.lax.psum
            loss, grads = _map_inexact(lambda x: reduce(x, axis_name), (loss, grads))
        grads = unscale(grads, loss_scale)
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


def grad(
    fun: Callable[..., Any],
    policy: str | jmp.Policy | None = None,
    *,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
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
    value_and_grad_fun = value_and_grad(fun, policy, has_aux=has_aux, **options)

    @functools.wraps(fun, updated=())
    def wrapped(*args, **kwargs):
        value, grads = value_and_grad_fun(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


def _loss_and_aux(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """Takes apart what the user's function returned, and checks the loss."""
    if not has_aux:
        loss, aux = result, None
    elif isinstance(result, tuple) and len(result) == 2:
        loss, aux = result
    else:
        raise TypeError(
            "With `has_aux=True` the function must return a pair `(loss, aux)`, but "
            f"it returned {_describe(result)}."
        )
    is_array = isinstance(loss, (jax.Array, np.ndarray, np.generic, int, float))
    if not (
        is_array
        and jnp.shape(loss) == ()
        and jnp.issubdtype(jnp.result_type(loss), jnp.floating)
    ):
        hint = "Average it with `.mean()`, and" if is_array else "For a pair,"
        raise TypeError(
            "The function to differentiate must return a real floating scalar, the "
            f"loss, but it returned {_describe(loss)}. {hint} pass `has_aux=True` "
            "where more than the loss comes back."
        )
    return loss, aux


def _describe(x: Any) -> str:
    """Says what something is in the words of its user."""
    if hasattr(x, "dtype"):
        return f"an array {x.dtype}{list(x.shape)}"
    if isinstance(x, tuple):
        return f"a tuple of {len(x)}"
    return f"{x!r} of type {type(x).__name__}"


def _accumulate(
    grad_fun: Callable[..., Any],
    params: Any,
    args: list[Any],
    kwargs: dict[str, Any],
    batched: Sequence[int],
    steps: int,
) -> tuple[Any, jax.Array, Any]:
    """Adds the losses and, in float32, the gradients of the micro-batches."""
    leaves, structure = jax.tree.flatten(params)
    zeros = [jnp.zeros_like(x, wide_dtype(x)) for x in leaves if is_inexact(x)]
    entries, batch_structure = jax.tree.flatten_with_path({i: args[i] for i in batched})
    batches = [_split(path, x, steps) for path, x in entries]

    def add_micro_batch(totals, micro_batch):
        micro_batch = [
            whole if part is None else part
            for (_, whole), part in zip(entries, micro_batch, strict=True)
        ]
        micro_args = batch_structure.unflatten(micro_batch)
        grads, (loss, aux) = grad_fun(
            *(micro_args.get(i, arg) for i, arg in enumerate(args)), **kwargs
        )
        addends = filter(is_inexact, jax.tree.leaves(grads))
        totals = [t + g.astype(t.dtype) for t, g in zip(totals, addends, strict=True)]
        return totals, (loss, aux)

    totals, (losses, aux) = jax.lax.scan(add_micro_batch, zeros, batches)
    totals = iter(totals)
    grads = [
        next(totals) if is_inexact(x) else np.zeros(np.shape(x), jax.dtypes.float0)
        for x in leaves
    ]
    return structure.unflatten(grads), losses.sum(), aux


def _split(path: Any, x: Any, steps: int) -> jax.Array | None:
    """Splits an array of the batch into ``[steps, ...]``, and a key into as many."""
    if not isinstance(x, (jax.Array, np.ndarray, np.generic)):
        return None
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and x.ndim == 0:
        return jax.random.split(x, steps)
    name = f"argument {path[0].key}"
    if len(path) > 1:
        name += f", leaf `{path_name(path[1:])}`,"
    if x.dtype == jnp.uint32 and x.shape == (2,):
        raise ValueError(
            f"In `batch_argnums`, {name} looks like a raw PRNG key, uint32[2], which "
            "would be split as if it were data. Make it with `jax.random.key`."
        )
    if x.ndim == 0 or x.shape[0] % steps:
        raise ValueError(
            f"`accum_steps={steps}` must divide the leading axis of every array in "
            f"`batch_argnums`, but {name} has the shape {list(x.shape)}. Change the "
            "batch size, or pass what is not a batch in another argument."
        )
    return x.reshape(steps, x.shape[0] // steps, *x.shape[1:])


def _map_inexact(fun: Callable[[Any], Any], tree: Any) -> Any:
    """Maps the floating and complex leaves, and leaves those of dtype float0."""
    return jax.tree.map(lambda x: fun(x) if is_inexact(x) else x, tree)


def _axes(axis_name: AxisName) -> tuple[Any, ...]:
    """Returns the one name or the several as a tuple."""
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def _positions(argnums: Any, args: Sequence[Any], name: str) -> tuple[int, ...]:
    """Returns argument positions as indices from 0, refusing what is not there."""
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for number in numbers:
        if not -len(args) <= number < len(args):
            raise TypeError(
                f"`{name}={argnums}` needs more positional arguments than the "
                f"{len(args)} given. Pass them by position, not by keyword."
            )
    return tuple(number % len(args) for number in numbers)
