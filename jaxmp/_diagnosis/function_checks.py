"""Checks the user's function, for which it is traced once more and does not run.

A warning where no matmul runs in 16 bits, and a note on an error that the cast of
arguments has led to.
"""

from __future__ import annotations

import dataclasses
import functools
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core

from .._base.around import CastsItself, inside
from .._base.checks import warn
from .._base.dtypes import is_wide
from .._base.policy import Policy
from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.flatten import flatten
from .._jaxprs.places import is_users, short_line
from .._jaxprs.scopes import BACKWARD
from .._jaxprs.walk import At, Forward
from .._ops.products import flops


@dataclasses.dataclass(frozen=True)
class _Held:
    """A leaf that has a value, which the function may ask for."""

    value: Any


def warns_if_promoted(
    policy: Policy, fun: Callable[..., Any], user: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns ``fun``, whose first call warns if no product of it runs in 16 bits.

    The parameters among its arguments have been cast by the policy. Their names are
    those of ``user``, the function that the user gave. Tracing takes time, and ends
    where ``with_policy`` or ``autocast`` is met, which see to their inputs.
    """
    seen = False

    def look(state, args, kwargs):
        @functools.wraps(user, updated=())
        def loss(*args, **kwargs):
            args, kwargs = jax.tree.map(
                lambda x: x.value if isinstance(x, _Held) else x, (args, kwargs)
            )
            return fun(state, *args, **kwargs)[0]

        args, kwargs = jax.tree.map(
            lambda x: x if isinstance(x, jax.core.Tracer) else _Held(x), (args, kwargs)
        )
        flat = flatten(loss, args, kwargs)
        try:
            with inside(looking=True, unscaled=False):
                jaxpr = jax.make_jaxpr(flat.fun)(*flat.leaves)
        except CastsItself:
            return
        products = _products(jaxpr, flat.names)
        if not products or any(x is None for x in products):
            return
        why = next(filter(None, products), "")
        warn(
            "No matmul runs in 16 bits. `policy=` casts only the differentiated "
            "arguments, and other float32 arrays promote every matmul to float32."
            f"{why} To run them in {policy.compute_dtype}, leave `policy=` out and put "
            "autocast around the gradient function, `autocast(grad_fn, policy)`; or "
            "cast the inputs in the loss too, `jaxmp.with_policy(model.apply, policy)`."
        )

    def looked_at(state, *args, **kwargs):
        nonlocal seen
        if not seen:
            seen = True
            look(state, args, kwargs)
        return fun(state, *args, **kwargs)

    return looked_at


# What makes a product wide: its rank among others, its name, and its dtype.
Cause = tuple[int, str, str]


def _products(jaxpr: Any, names: Sequence[str]) -> list[str | None]:
    """Returns in words what makes each product of a program wide.

    Arguments come before constants. None stands for a product in 16 bits.
    """
    found: list[str | None] = []

    def causes(rank: int, name: str, aval: Any) -> frozenset[Cause]:
        is_cause = is_wide(aval) and not aval.weak_type
        return frozenset([(rank, name, str(aval.dtype))] if is_cause else [])

    def known(x: Any, at: At) -> frozenset[Cause]:
        aval: Any = x.aval if isinstance(x, _jaxpr.Literal) else jax.typeof(x)
        return causes(len(names), f"a constant {aval.dtype}{[*aval.shape]}", aval)

    def reached(eqn: _jaxpr.Equation, ins: list[Any], at: At) -> list[Any]:
        made = frozenset[Cause]().union(*ins)
        if flops(eqn, back=BACKWARD in at.scopes):
            is_half = not any(is_wide(x.aval) for x in eqn.invars[:2])
            found.append(None if is_half else why(eqn, made))
        return [made if is_wide(x.aval) else frozenset() for x in eqn.outvars]

    def why(eqn: _jaxpr.Equation, made: frozenset[Cause]) -> str:
        _, name, dtype = min(made, default=(0, "", ""))
        if not name:
            return ""
        lines = (f"{x[0]}:{x[1]}" for x in _jaxpr.frames(eqn) if is_users(x[0]))
        where = f" at {short_line(line)}" if (line := next(lines, "")) else ""
        cure = " Cast it to float32 first, `x.astype(jnp.float32)`."
        text = f" The matmul{where} is {dtype} because {name} is."
        return text + cure * (dtype == "float64")

    pairs = zip(names, _jaxpr.in_avals(jaxpr), strict=True)
    given = [causes(i, f"`{name}`", aval) for i, (name, aval) in enumerate(pairs)]
    walk = Forward(reached, lambda xs: frozenset().union(*xs), known)
    walk.through(jaxpr, given)
    return found


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
    those that ``name``, a function of jaxmp, has cast.
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
