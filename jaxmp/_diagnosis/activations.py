"""The gradients of activations, as they are in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp

from .._base.around import GRADIENT
from .._base.checks import as_scale, check_function, explains
from .._base.tree import widen
from .._gradients.differentiate import loss_and_aux
from .._jaxprs.jaxpr import (
    JaxprEqn,
    bind,
    call_kind,
    interpret,
    open_jaxpr,
)
from .._jaxprs.replay import where_written
from .._ops.table import given_name
from .._training.loss_scale_state import scale_in
from .text import PASS_THE_LOSS, numbered

P = ParamSpec("P")
_CALLS = ("jit", "remat")  # what runs once as it stands


@explains("jaxmp.activation_gradients(loss_fn)(*args)")
def activation_gradients(
    fun: Callable[P, Any], *, loss_scale: Any = 1.0, has_aux: bool = False
) -> Callable[P, dict[str, jax.Array]]:
    """Differentiates a loss with respect to the activations that have a name.

    A value gets its name from JAX: ``jax.ad_checkpoint.checkpoint_name(x, "hidden")``.
    For Linen models :func:`jaxmp.linen.activation_gradients` names the result of
    every module, and the model stays as it is.

    The gradients are those that the backward pass works with: of the loss times
    ``loss_scale``, in the dtype of the activation. Values that underflow in
    a float16 model are zero here, and those that overflow are Inf.

    What is named inside ``jit``, ``jax.checkpoint`` and ``vmap`` is seen. What is
    named inside a loop, a branch, ``shard_map`` or a function with its own derivative
    rule is not, nor what a function named that was jitted and traced before.

    Args:
        fun: Function that returns a real floating scalar, the loss, or with
            ``has_aux`` a pair of it and anything.
        loss_scale: A positive scalar, multiplied with the loss in float32, or an
            optimizer state that holds one.
        has_aux: Whether ``fun`` returns a pair.

    Returns:
        A function with the arguments of ``fun`` that returns a dict from the names to
        arrays of the activations' shapes and dtypes. A name that comes again gets a
        number: ``hidden``, ``hidden#1``. Put :func:`jax.jit` around it for speed.

    Raises:
        ValueError: If no floating value with a name is found, or ``loss_scale`` is
            not a positive scalar.
        TypeError: If ``fun`` returns something else than a real floating scalar.

    Examples:
        >>> from jax.ad_checkpoint import checkpoint_name
        >>> def loss_fn(w, x):
        ...     hidden = checkpoint_name(w.astype(jnp.float16) * x, "hidden")
        ...     return jnp.mean(hidden.astype(jnp.float32)) * 2.0**-10
        >>> w, x = jnp.ones(()), jnp.ones(2**15, jnp.float16)
        >>> jaxmp.activation_gradients(loss_fn)(w, x)["hidden"].max()  # 2^-25 flushes
        Array(0., dtype=float16)
        >>> scaled = jaxmp.activation_gradients(loss_fn, loss_scale=2.0**15)
        >>> scaled(w, x)["hidden"].max()
        Array(0.000977, dtype=float16)

    References:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, figure 3, shows
        the histogram of such gradients, https://arxiv.org/abs/1710.03740.
    """
    check_function(
        "activation_gradients", fun, "activation_gradients(loss_fn)", PASS_THE_LOSS
    )
    scale = as_scale(scale_in(loss_scale))

    @functools.wraps(fun, updated=())
    def wrapped(*args, **kwargs):
        # Closed over, because arguments such as `train=True` are no arrays.
        def loss():
            return loss_and_aux(fun(*args, **kwargs), has_aux, fun)[0]

        jaxpr = jax.make_jaxpr(loss)()
        named = list(_named_values(jaxpr))
        if not named:
            raise ValueError(
                "`activation_gradients` found no floating value with a name. Name one "
                'with `jax.ad_checkpoint.checkpoint_name(x, "hidden")`, or use '
                "`jaxmp.linen.activation_gradients`; and pass the function as it was "
                "before `jax.jit`, which may keep an older trace."
            )

        def scaled_fun(addends):
            (loss,) = _add_to_named(jaxpr, (), iter(addends))
            loss = widen(loss)
            return loss * scale.astype(loss.dtype)

        # Negative, because -0.0 + 0.0 is 0.0: the forward pass stays what it is.
        addends = [-jnp.zeros(aval.shape, aval.dtype) for _, aval in named]
        names = numbered(name for name, _ in named)
        with jax.named_scope(GRADIENT):
            grads = jax.grad(scaled_fun)(addends)
        return dict(zip(names, grads, strict=True))

    return wrapped


def _named_values(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    """Yields name and type of the floating values that have one, in order."""
    for eqn in open_jaxpr(jaxpr).eqns:
        if _is_named(eqn):
            yield str(given_name(eqn)), eqn.outvars[0].aval
        elif call_kind(eqn) in _CALLS:
            yield from _named_values(eqn.params["jaxpr"])


def _add_to_named(jaxpr: Any, args: Sequence[Any], addends: Iterator[Any]) -> list[Any]:
    """Evaluates a jaxpr with the next addend added to each value that has a name."""

    def apply(eqn, values):
        if call_kind(eqn) in _CALLS:
            return _add_to_named(eqn.params["jaxpr"], values, addends)
        values = bind(eqn, values)
        return [values[0] + next(addends)] if _is_named(eqn) else values

    return interpret(jaxpr, args, where_written(apply))


def _is_named(eqn: JaxprEqn) -> bool:
    """Whether ``checkpoint_name`` gives a floating value a name here."""
    if given_name(eqn) is None:
        return False
    aval: Any = eqn.outvars[0].aval
    return jnp.issubdtype(aval.dtype, jnp.floating)
