"""Questions about the graph of a loop: what it adds up, and on which way.

A product ends every way: what it returns is off in each trip anyway, and there errors
even out. Without one, they add up from trip to trip.
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation, Literal, is_float32
from .._ops.products import is_matrix_product

# Equations that hold jaxprs and run one of them once, so that it can be looked through.
_ONCE = frozenset({"jit", "call", "remat", "custom_jvp", "custom_vjp", "cond"})


def accumulated(
    body: Any, carried: Sequence[tuple[int, int]]
) -> tuple[tuple[int, int], ...]:
    """Returns what the trips of a loop hand on without a product.

    Args:
        body: The jaxpr of a trip, open or closed.
        carried: Places of what is carried, among its inputs and among its outputs.

    Returns:
        Those of ``carried`` from which a way without a product leads back to
        themselves, over one trip or several.
    """
    jaxpr = _jaxpr.open_jaxpr(body)
    steps: dict[int, set[int]] = {}
    for place, out in carried:
        if is_float32(jaxpr.invars[place]):
            made = made_of(jaxpr.eqns, [jaxpr.invars[place]])
            steps[out] = {k for _, k in carried if is_in(jaxpr.outvars[k], made)}
    return tuple(
        (place, out) for place, out in carried if out in _reachable(out, steps)
    )


def _reachable(start: int, steps: dict[int, set[int]]) -> set[int]:
    """Returns where one comes from ``start`` in one step or more."""
    reached: set[int] = set()
    rest = [start]
    while rest:
        new = steps.get(rest.pop(), set()) - reached
        reached |= new
        rest += new
    return reached


def on_path(
    body: Any, eqns: Sequence[Equation], summed: Iterable[tuple[int, int]]
) -> frozenset[Any]:
    """Returns the variables between what is carried into a trip and out of it.

    Args:
        body: The open jaxpr of the trip.
        eqns: Its equations.
        summed: What it adds up, see :func:`accumulated`.
    """
    path: set[Any] = set()
    for place, out in summed:  # each for itself: what another one has is a term here
        made, leads = made_of(eqns, [body.invars[place]]), {body.outvars[out]}
        for eqn in reversed(eqns):
            if not is_matrix_product(eqn) and not leads.isdisjoint(eqn.outvars):
                leads.update(_variables(eqn))
        path |= made & leads
    return frozenset(path)


def reached(eqns: Sequence[Equation], start: Iterable[Any]) -> set[Any]:
    """Returns ``start``, and the variables that are computed from it."""
    found = set(start)
    for eqn in eqns:
        if not found.isdisjoint(_variables(eqn)):
            found.update(eqn.outvars)
    return found


def made_of(eqns: Sequence[Equation], start: Iterable[Any]) -> set[Any]:
    """Returns what is computed from ``start`` without a product."""
    found = set(start)
    for eqn in eqns:
        if not is_matrix_product(eqn) and not found.isdisjoint(_variables(eqn)):
            found.update(_made_by(eqn, found))
    return found


def _made_by(eqn: Equation, given: set[Any]) -> Iterable[Any]:
    """Returns which outputs of ``eqn`` are made of ``given`` without a product."""
    if _jaxpr.call_kind(eqn) not in _ONCE:
        return eqn.outvars
    found: set[Any] = set()
    for body in _jaxpr.call_layout(eqn).bodies:
        inner = _jaxpr.open_jaxpr(body.jaxpr)
        pairs = zip((eqn.invars[i] for i in body.operands), inner.invars, strict=True)
        made = made_of(inner.eqns, [x for atom, x in pairs if is_in(atom, given)])
        outs = zip(eqn.outvars, inner.outvars, strict=False)
        found.update(var for var, x in outs if is_in(x, made))
    if _jaxpr.call_kind(eqn) == "cond" and is_in(eqn.invars[0], given):
        return eqn.outvars
    return found


def _variables(eqn: Equation) -> Iterator[Any]:
    return itertools.filterfalse(lambda x: isinstance(x, Literal), eqn.invars)


def is_in(atom: Any, variables: Collection[Any]) -> bool:
    """Whether an atom is one of some variables."""
    return not isinstance(atom, Literal) and atom in variables
