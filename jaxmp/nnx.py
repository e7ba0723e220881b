"""Flax NNX: gradients and autocast of modules, with their state kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from flax import nnx

from ._autocast import autocast as _autocast
from ._grad import value_and_grad as _value_and_grad
from ._policy import PolicyLike

P = ParamSpec("P")
T = TypeVar("T")


def value_and_grad(
    fun: Callable[P, Any],
    policy: PolicyLike | None = None,
    *,
    loss_scale: Any = 1.0,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
) -> Callable[P, tuple[Any, Any]]:
    """Differentiates a function of an NNX module, as ``nnx.value_and_grad`` does.

    ``fun(model, *args)`` sees the parameters in compute dtype, and everything else in
    the module as it is: running statistics stay float32. Its updates of statistics
    and random streams reach the caller's module. The gradients are in true units and
    at least float32, as those of :func:`jaxmp.value_and_grad`.

    The parameters alone are cast. Inside ``fun``, call the module under the policy
    too, ``jaxmp.with_policy(model, policy)(x)``, so that its inputs are in compute
    dtype and its outputs in float32; or cast them yourself.

    Args:
        fun: Function of an NNX module and other arguments that returns the loss, a
            real floating scalar, or with ``has_aux`` a pair of it and anything.
        policy: None where the module casts for itself (built with ``dtype=...``);
            otherwise a policy, or its string.
        loss_scale: As for :func:`jaxmp.value_and_grad`, such as the ``nnx.Optimizer``.
        wrt: NNX filter of the variables to differentiate.
        has_aux: Whether ``fun`` returns a pair.

    Returns:
        A function ``(model, *args)`` that returns ``(loss, gradients)`` or
        ``((loss, aux), gradients)``. The gradients are an ``nnx.State``, as
        ``nnx.Optimizer.update`` takes it.

    Raises:
        TypeError: If ``fun`` returns something else than a real floating scalar.
        ValueError: If ``loss_scale`` is not a positive scalar.

    Examples:
        >>> from flax import nnx
        >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        >>> def loss_fn(model, x):
        ...     return jaxmp.with_policy(model, "mixed_float16")(x).mean()
        >>> grad_fn = value_and_grad(loss_fn, "mixed_float16", loss_scale=2.0**15)
        >>> loss, grads = grad_fn(model, jnp.ones((4, 2)))
        >>> jax.tree.map(lambda g: str(g.dtype), nnx.to_pure_dict(grads))
        {'bias': 'float32', 'kernel': 'float32'}
    """

    call: Callable[..., Any] = fun  # of a copy of the module

    @functools.wraps(fun, updated=())
    def wrapped(model, *args, **kwargs):
        graphdef, params, rest = nnx.split(model, wrt, ...)

        def pure(params, rest, *args, **kwargs):
            # A copy, so that `fun` cannot write to variables of the caller's trace.
            copy = nnx.merge(graphdef, params, rest, copy=True)
            result = call(copy, *args, **kwargs)
            loss, aux = result if has_aux else (result, None)
            return loss, (aux, nnx.state(copy, nnx.Not(wrt)))

        grad_fun = _value_and_grad(pure, policy, loss_scale=loss_scale, has_aux=True)
        (loss, (aux, rest)), grads = grad_fun(params, rest, *args, **kwargs)
        nnx.update(model, rest)
        return ((loss, aux) if has_aux else loss), grads

    return wrapped


def autocast(
    fun: Callable[P, T],
    policy: PolicyLike | None = None,
    **options: Any,
) -> Callable[P, T]:
    """Runs a function of an NNX module in mixed precision, its state kept.

    As :func:`jaxmp.autocast`, for ``fun(model, *args)``. What ``fun`` changes in the
    module (running statistics, random streams, parameters) reaches the caller's
    module. It works under ``nnx.jit``, and inside or around ``nnx.value_and_grad``;
    around it is better.

    Args:
        fun: Function of an NNX module and other arguments.
        policy: As for :func:`jaxmp.autocast`.
        **options: The keyword arguments of :func:`jaxmp.autocast`.

    Returns:
        A function with the signature of ``fun``.

    Raises:
        ValueError: As :func:`jaxmp.autocast`.

    Examples:
        >>> from flax import nnx
        >>> norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        >>> out = autocast(lambda norm, x: norm(x), "bfloat16")(norm, jnp.ones((4, 2)))
        >>> norm.mean.dtype, bool((norm.mean[...] > 0).all())
        (dtype('float32'), True)
    """

    call: Callable[..., Any] = fun  # of a copy of the module

    @functools.wraps(fun, updated=())
    def wrapped(model, *args, **kwargs):
        graphdef, state = nnx.split(model)

        @functools.wraps(fun, updated=())
        def pure(state, *args, **kwargs):
            # A copy, so that `fun` cannot write to variables of the caller's trace.
            copy = nnx.merge(graphdef, state, copy=True)
            return call(copy, *args, **kwargs), nnx.state(copy)

        out, state = _autocast(pure, policy, **options)(state, *args, **kwargs)
        nnx.update(model, state)
        return out

    return wrapped
