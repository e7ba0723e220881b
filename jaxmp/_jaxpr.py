"""What depends on the version of JAX, in one place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

T = TypeVar("T")


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """Returns the equations of a jaxpr that may carry its constants."""
    # From 0.12 on `Jaxpr` and `ClosedJaxpr` are one class.
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def closed_consts(jaxpr: Any) -> Sequence[Any]:
    """Returns the constants that a jaxpr carries, none when it is open."""
    return jaxpr.consts if isinstance(jaxpr, ClosedJaxpr) else ()


def bind(eqn: JaxprEqn, args: Sequence[Any]) -> list[Any]:
    """Applies the primitive of ``eqn`` to ``args``."""
    bound = eqn.primitive.get_bind_params(eqn.params)  # pyright: ignore
    # Up to 0.8 the functions of a call primitive came apart from its parameters.
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)
    out = eqn.primitive.bind(*subfuns, *args, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def called_once(eqn: JaxprEqn) -> Any:
    """Returns the jaxpr of a ``jit`` or ``checkpoint``, None for anything else."""
    if eqn.primitive.name in ("jit", "remat2"):
        return eqn.params["jaxpr"]
    return None


def named_values(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    """Yields name and type of what ``checkpoint_name`` has named, in order."""
    for eqn in open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"], eqn.outvars[0].aval
        elif inner := called_once(eqn):
            yield from named_values(inner)


def add_to_named(jaxpr: Any, args: Sequence[Any], addends: Iterator[Any]) -> list[Any]:
    """Evaluates a jaxpr with the next addend, or None, on each named value."""
    env = dict(zip(open_jaxpr(jaxpr).constvars, closed_consts(jaxpr), strict=True))
    env.update(zip(open_jaxpr(jaxpr).invars, args, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in open_jaxpr(jaxpr).eqns:
        values = [read(atom) for atom in eqn.invars]
        if inner := called_once(eqn):
            values = add_to_named(inner, values, addends)
        else:
            values = bind(eqn, values)
            if eqn.primitive.name == "name" and (addend := next(addends)) is not None:
                values = [values[0] + addend]
        env.update(zip(eqn.outvars, values, strict=True))
    return [read(atom) for atom in open_jaxpr(jaxpr).outvars]


def vary(tree: T, axis_names: tuple[Any, ...]) -> T:
    """Marks the arrays of a pytree as differing over mesh axes.

    Differentiating with respect to an array that ``shard_map(check_vma=True)`` knows
    to be the same on all devices makes JAX sum the gradient itself, in the dtype of
    the array. Marked first, the gradient stays local and the sum is ours. Where
    nothing tracks this (``pmap``, ``vmap``) nothing is marked.
    """
    tracked = jax.sharding.get_abstract_mesh().manual_axes

    def mark(x):
        if not isinstance(x, jax.Array):
            return x
        same = set(tracked) - getattr(jax.typeof(x), "vma", frozenset())
        names = tuple(name for name in axis_names if name in same)
        if not names:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, names, to="varying")
        return jax.lax.pvary(x, names)  # pyright: ignore  # JAX 0.8

    return jax.tree.map(mark, tree)
