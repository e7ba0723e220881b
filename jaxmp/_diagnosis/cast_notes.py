"""Notes on errors that a cast of the arguments to 16 bits has led to."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core

from .._jaxprs.flatten import flatten
from .._jaxprs.places import is_users


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
