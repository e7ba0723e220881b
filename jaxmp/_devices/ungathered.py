"""Finds shards that a loss reads without their other parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .._jaxprs import jaxpr as _jaxpr

# Of a value: the shards that it was computed from and has not met the other parts of,
# each as its number and a mesh axis.
Alone = frozenset[tuple[int, Any]]
_NOTHING: Alone = frozenset()


def never_gathered(
    loss: Callable[..., Any], shards: Sequence[Any], axes: Sequence[frozenset[Any]]
) -> list[tuple[int, Any]]:
    """Returns the shards that reach a loss through no collective over their axis.

    Args:
        loss: Function of the shards that returns a scalar.
        shards: Arrays.
        axes: For each of them, the mesh axes that it is sharded over.

    Returns:
        The numbers of the shards, each with an axis.
    """
    jaxpr = _jaxpr.trace(lambda *shards: [loss(*shards)], shards)
    given = [
        frozenset((number, axis) for axis in own) for number, own in enumerate(axes)
    ]
    (alone,) = _followed(jaxpr, given, sorted(frozenset().union(*axes), key=str))
    return sorted(alone, key=str)


def _followed(
    jaxpr: Any, given: Sequence[Alone], axes: Sequence[Any]
) -> Sequence[Alone]:
    """Returns what the outputs of a jaxpr were computed from."""

    def follow(jaxpr, ins):
        return _followed(jaxpr, ins, axes)

    def apply(eqn, ins):
        if _jaxpr.call_kind(eqn):
            return _jaxpr.through_bodies(eqn, ins, follow, lambda x: _NOTHING.union(*x))
        met = _jaxpr.collective_axes(eqn, axes)
        alone = frozenset(x for x in _NOTHING.union(*ins) if x[1] not in met)
        return [alone] * len(eqn.outvars)

    def nothing(_):
        return _NOTHING

    return _jaxpr.interpret(jaxpr, given, apply, const=nothing, literal=nothing)
