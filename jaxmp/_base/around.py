"""What goes on around a call: whose trace it is in, and who asks for its plan.

What scales its gradients is known here too. Warnings of a loss scale that does nothing
need that, and nothing else: no result depends on it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.core
import numpy as np
from jax.custom_derivatives import SymbolicZero

from . import later
from .checks import known_number, warn
from .marks import Marked
from .tree import is_inexact, taken_out

T = TypeVar("T")

# Around a gradient of ours, which scales the loss or is told not to: a named scope,
# because JAX may have traced it before.
GRADIENT = "jaxmp.gradient"


class Around(NamedTuple):
    """What is known of the functions of ours that a call is in."""

    own: Any = None  # the trace of ours, to replay or to read what it holds
    staged: bool = False  # whether that is inside one that JAX keeps
    autocast: np.dtype | None = None  # the compute dtype of the innermost autocast
    unscaled: bool = False  # in a gradient of ours that was given no loss scale
    scales: Sequence[Any] = ()  # of the states that such a gradient was given
    gradient: bool = False  # in a gradient of ours
    casting: list[bool] | None = None  # has an entry for what has cast its inputs here


_NOTHING = Around()
_AROUND: contextvars.ContextVar[Around] = contextvars.ContextVar("around")
_IN_FLOAT16 = Marked()  # loss scales with which gradients in it were computed


@contextlib.contextmanager
def knowing(**known: Any) -> Iterator[None]:
    """Lets what is called in here know more of what is around it."""
    token = _AROUND.set(_AROUND.get(_NOTHING)._replace(**known))
    try:
        yield
    finally:
        _AROUND.reset(token)


def autocast_dtype() -> np.dtype | None:
    """Returns the compute dtype of the autocast that a call is in, None without one."""
    return _AROUND.get(_NOTHING).autocast


def note_casting() -> None:
    """Notes that what is called here casts its inputs, for a look at what is around."""
    if (casting := _AROUND.get(_NOTHING).casting) is not None:
        casting.append(True)


def is_staged() -> bool:
    """Returns whether JAX keeps what it traces here, to run it another time.

    As ``jax.jit`` and ``lax.scan`` do. What we trace ourselves (autocast, an audit)
    runs at once, or never.
    """
    stage, around = later.traces().stage(), _AROUND.get(_NOTHING)
    return around.staged if stage is around.own else stage is not None


def warn_if_constant(loss_scale: Any) -> None:
    """Warns where a loss scale that will change becomes a constant of a program.

    A number is meant to stay as it is, and so is a scale of 1.
    """
    if not isinstance(loss_scale, jax.Array) or isinstance(loss_scale, jax.core.Tracer):
        return
    if not is_staged() or known_number("loss_scale", loss_scale) == 1:
        return
    warn(
        "The loss scale becomes a constant of this traced function, because the state "
        "that it is from comes from outside: the function keeps this scale while the "
        "one in `opt_state` adapts, or compiles again for each. Make the state an "
        "argument of what you jit: `jax.jit(lambda params, opt_state, x: jaxmp."
        "value_and_grad(loss_fn, loss_scale=opt_state)(params, x))`; in a `lax.scan` "
        "pass it in the carry. For a scale that is to stay pass a number: "
        "`loss_scale=2.0**10`."
    )


def warn_unscaled() -> None:
    """Warns of gradients in float16 that were given no loss scale."""
    warn(
        "These gradients are computed in float16 without a loss scale, so that those "
        "below 2**-25 become 0. Pass `loss_scale=opt_state` to `jaxmp.value_and_grad` "
        "(or `jaxmp.nnx.value_and_grad`), in the place of that of JAX or Flax, where "
        "`opt_state` is the state of `jaxmp.loss_scaling(optimizer, policy)`; or "
        "`loss_scale=1.0` where you want none."
    )


def in_gradient() -> bool:
    """Returns whether a call is in a gradient of ours, which asks for a scale."""
    return _AROUND.get(_NOTHING).gradient


def watched(dtype: Any, results: T) -> T:
    """Returns what ran in ``dtype``, so that its gradients warn if they have no scale.

    They are in float16 then. A rule for derivatives tells them, as JAX may trace what
    it differentiates before: in a ``jit``, a scan, a ``jax.checkpoint``.
    """
    if dtype != np.float16 or not in_gradient():
        return results
    leaves, put_back = taken_out(results, _is_differentiable)
    return put_back(_same(*leaves))


def _is_differentiable(x: Any) -> bool:
    return isinstance(x, jax.Array) and is_inexact(x)


@jax.custom_jvp
def _same(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return arrays


def _noticed(arrays: Any, tangents: Any) -> tuple[Any, Any]:
    around = _AROUND.get(_NOTHING)
    if not all(isinstance(x, SymbolicZero) for x in tangents):
        if around.unscaled:
            warn_unscaled()
        note_float16(around.scales)
    return arrays, tangents


_same.defjvp(_noticed, symbolic_zeros=True)


def note_float16(scales: Sequence[Any]) -> None:
    """Notes of loss scales that gradients in float16 are computed with them."""
    _IN_FLOAT16.add(scales)


def warn_if_float16(loss_scale: Any, policy: str) -> None:
    """Warns where gradients in float16 have a scale that a policy keeps at 1."""
    if loss_scale in _IN_FLOAT16:
        warn(
            "These gradients are computed in float16, but the optimizer is wrapped by "
            f'`jaxmp.loss_scaling(optimizer, "{policy}")`, which keeps the loss scale '
            "at 1, so that those below 2**-25 become 0. Give both the same policy, "
            '`jaxmp.loss_scaling(optimizer, "mixed_float16")`; or type '
            "`jaxmp.static_loss_scale(optimizer)` where you want no scale."
        )
