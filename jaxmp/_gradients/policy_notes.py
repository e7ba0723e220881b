"""What a call under a policy is told: a warning where no matmul runs in 16 bits, and a
note on an error that the cast of its arguments has led to.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core

from .._base.checks import warn
from .._base.policy import Policy
from .._diagnosis.audit.leaks import Walk
from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.around import CastsItself, inside
from .._jaxprs.flatten import flatten
from .._jaxprs.places import Place, caller, is_users


@dataclasses.dataclass(frozen=True)
class _Held:
    """A leaf that has a value, which the function may ask for."""

    value: Any


def warn_if_promoted(
    policy: Policy, fun: Callable[..., Any], args: Any, kwargs: Any
) -> None:
    """Warns where not one product of ``fun`` runs in 16 bits under a policy.

    The function is traced for it, and does not run. Tracing takes time, and ends where
    ``with_policy`` or ``autocast`` is met, which see to their inputs.

    Args:
        policy: What the parameters among the arguments have been cast by.
        fun: Function that JAX can trace.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    @functools.wraps(fun)
    def of_held(*args, **kwargs):
        args, kwargs = jax.tree.map(
            lambda x: x.value if isinstance(x, _Held) else x, (args, kwargs)
        )
        return fun(*args, **kwargs)

    args, kwargs = jax.tree.map(
        lambda x: x if isinstance(x, jax.core.Tracer) else _Held(x), (args, kwargs)
    )
    flat = flatten(of_held, args, kwargs)
    try:
        with inside(looking=True, unscaled=False):
            jaxpr = jax.make_jaxpr(flat.fun)(*flat.leaves)
    except CastsItself:
        return
    walk = Walk()
    inputs = [*map(walk.argument, flat.names, _jaxpr.in_avals(jaxpr))]
    walk.run(jaxpr, inputs, Place(user=caller()))
    report = walk.report(None, ())
    if not report.flops or report.fraction_16bit > 0:
        return
    why = ""
    if report.leaks:
        leak = report.leaks[0]
        why = f" {os.path.basename(leak.where)}: {leak}."
    warn(
        "No matmul runs in 16 bits. `policy=` casts only the differentiated arguments, "
        f"and other float32 arrays promote every matmul to float32.{why} To run them "
        f"in {policy.compute_dtype}, leave `policy=` out and put autocast around the "
        "gradient function, `autocast(grad_fn, policy)`; or cast the inputs in the "
        "loss too, `jaxmp.with_policy(model.apply, policy)`."
    )


def note_cast(
    error: Exception,
    name: str,
    fun: Callable,
    policy: Any,
    given: tuple[Sequence[Any], dict[str, Any]],
    cast: tuple[Sequence[Any], dict[str, Any]],
) -> None:
    """Adds a note to ``error`` if the cast of its arguments has made ``fun`` fail.

    That is so if JAX takes ``fun`` with the arguments as they were given, and not with
    those that were cast.

    Args:
        error: What was raised.
        name: The function of jaxmp that has cast.
        fun: The user's function.
        policy: By which it has cast.
        given: The positional and keyword arguments before the cast.
        cast: Those after it.
    """
    if _works(fun, cast) or not _works(fun, given):
        return
    # Importing it here, because it takes long.
    from .._autocast.autocast import autocast

    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{x.filename}:{x.lineno}" for x in frames if is_users(x.filename)]
    where = f" at {lines[-1]}" if lines else ""
    dtype = policy.compute_dtype
    cure = "Compute that in float32, of `x.astype(jnp.float32)`"
    if _works(autocast(fun, dtype), given):
        cure += (
            f', or use `jaxmp.autocast(fun, "{dtype}")` without the policy of `{name}`:'
            " it runs this program"
        )
    error.add_note(
        f"{cure}. `{name}` has cast arguments to {dtype}, which JAX does not take"
        f"{where}; as they were given it takes them."
    )
    # Before what JAX says of its frames.
    error.__notes__.insert(0, error.__notes__.pop())


def _works(fun: Callable, arguments: tuple[Sequence[Any], dict[str, Any]]) -> bool:
    """Whether JAX takes ``fun`` with some arguments, without running it."""
    args, kwargs = arguments
    flat = flatten(fun, tuple(args), kwargs)
    try:
        jax.eval_shape(flat.fun, *flat.leaves)
        # An operation that the device lacks in 16 bits shows when it is lowered.
        if not any(isinstance(x, jax.core.Tracer) for x in flat.leaves):
            jax.jit(flat.fun).lower(*flat.leaves)
    except Exception:
        return False
    return True
