"""Questions about a graph: who computes a value, and what a loop adds up.

A loop adds up on ways that a product ends: what that returns is off in each iteration
anyway, and there errors even out. Without one, they add up from iteration to iteration.
"""

import functools
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation, Literal, is_float32
from .._jaxprs.scopes import BACKWARD, Scopes
from .._jaxprs.walk import At, Forward
from .._ops.products import has_default_precision, is_matrix_product
from .._ops.table import Definition
from .needs import Need

# So many rounded values, and no more, may multiply one another.
OFTEN = 4
# Equations whose jaxprs are looked through: they run one of them, at least once.
_ENTERED = frozenset(
    {"jit", "call", "remat", "custom_jvp", "custom_vjp", "cond", "scan"}
)

# For each way, the inputs and outputs by which it goes through a jaxpr or an equation,
# as the bits of a number.
Ways = tuple[tuple[int, int], ...]


class Demand(NamedTuple):
    """What is needed of the outputs of a jaxpr, or of an equation."""

    needs: tuple[Need, ...]
    summed: Ways = ()  # through it, by which the iterations of a loop add up


def joined(numbers: Iterable[int]) -> int:
    """Returns the bits that some of the numbers have."""
    return functools.reduce(operator.or_, numbers, 0)


def definitions_of(eqns: Iterable[Equation]) -> Definition:
    """Returns what tells which of the equations computes a variable, None if none."""
    made = {var: eqn for eqn in eqns for var in eqn.outvars}
    return lambda atom: None if isinstance(atom, Literal) else made.get(atom)


def twins(eqns: Sequence[Equation]) -> dict[Any, Any]:
    """Returns for each computed variable the first that is computed in the same way."""
    found: dict[Any, Any] = {}
    seen: dict[Any, Any] = {}
    for eqn in eqns:
        ins = (
            (str(x.val), x.aval) if isinstance(x, Literal) else found.get(x, x)
            for x in eqn.invars
        )
        key = eqn.primitive, tuple(sorted(eqn.params.items())), tuple(ins)
        try:
            first = seen.setdefault(key, eqn.outvars)
        except TypeError:  # a parameter that cannot be compared
            first = eqn.outvars
        found.update(zip(eqn.outvars, first, strict=True))
    return found


def accumulated(body: Any, carried: Sequence[tuple[int, int]], scopes: Scopes) -> Ways:
    """Returns what the iterations of a loop hand on without a product.

    Args:
        body: The jaxpr of an iteration, open or closed.
        carried: Places of what is carried, among its inputs and among its outputs.
        scopes: Named scopes around it.

    Returns:
        A way for each group of ``carried`` that lead to one another without one, over
        one iteration or several, and so each back to itself.
    """
    inputs = _jaxpr.in_vars(body)
    carried = [(place, out) for place, out in carried if is_float32(inputs[place])]
    made = _MADE.through(body, [1 << i for i in range(len(inputs))], scopes)
    for place, out in carried:  # each iteration takes what another returns
        made = [x | made[out] if x >> place & 1 else x for x in made]
    groups = [
        [(i, end) for i, end in carried if made[out] >> i & made[end] >> place & 1]
        for place, out in carried
    ]
    ways = [
        (joined(1 << i for i, _ in group), joined(1 << end for _, end in group))
        for group in groups
        if group
    ]
    return tuple(dict.fromkeys(ways))


def _given(eqn: Equation, ins: list[bool], at: At) -> list[bool]:
    return [x > 0 for x in _made(eqn, [all(ins)], at)]


# Which values are computed from inputs without a product.
GIVEN = Forward(_given, all, known=lambda x, at: True)


def on_ways(
    body: Any, eqns: Sequence[Equation], summed: Ways, scopes: Scopes
) -> tuple[frozenset[Any], ...]:
    """Returns the variables on each way through an open jaxpr of such equations.

    Each way for itself: what is on another one is a term here. ``scopes`` are those
    around the jaxpr.
    """
    ways, links = [], []
    for eqn in eqns if summed else ():
        at = At(scopes=scopes + _jaxpr.scope_names(eqn))
        links.append((eqn, _MADE.of(eqn, [1 << i for i in range(len(eqn.invars))], at)))
    for starts, ends in summed:
        made = set(_chosen(body.invars, starts))
        for eqn, of in links:
            given = _places(eqn.invars, made)
            made.update(x for x, i in zip(eqn.outvars, of, strict=True) if i & given)
        leads = set(_chosen(body.outvars, ends))
        for eqn, of in reversed(links):
            outs = zip(eqn.outvars, of, strict=True)
            leads.update(_chosen(eqn.invars, joined(i for x, i in outs if x in leads)))
        ways.append(frozenset(made & leads))
    return tuple(ways)


def through(eqn: Equation, ways: Sequence[frozenset[Any]]) -> Ways:
    """Returns by which inputs and outputs of ``eqn`` ways go through it."""
    return tuple(
        (_places(eqn.invars, way), _places(eqn.outvars, way))
        for way in ways
        if not way.isdisjoint(eqn.outvars)
    )


def reached(eqns: Sequence[Equation], start: Iterable[Any]) -> set[Any]:
    """Returns ``start``, and the variables that are computed from it."""
    found = set(start)
    for eqn in eqns:
        if not found.isdisjoint(_jaxpr.variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def _made(eqn: Equation, ins: list[int], at: At) -> list[int]:
    end = is_matrix_product(eqn, back=BACKWARD in at.scopes)
    return [0 if end and has_default_precision(eqn) else joined(ins)] * len(eqn.outvars)


def _made_in(eqn: Equation, ins: list[int], at: At) -> list[int]:
    if _jaxpr.call_kind(eqn) not in _ENTERED:
        return [joined(ins)] * len(eqn.outvars)
    chosen = ins[0] if _jaxpr.call_kind(eqn) == "cond" else 0
    return [x | chosen for x in _MADE.around(eqn, ins, at)]


# Of which inputs each value is made without a product, as bits.
_MADE = Forward(_made, joined, known=lambda x, at: 0, enter=_made_in)


def _places(atoms: Sequence[Any], variables: Collection[Any]) -> int:
    return joined(1 << i for i, x in enumerate(atoms) if is_in(x, variables))


def _chosen(atoms: Sequence[Any], places: int) -> Iterator[Any]:
    return _jaxpr.variables(x for i, x in enumerate(atoms) if places >> i & 1)


def is_in(atom: Any, variables: Collection[Any]) -> bool:
    """Whether an atom is one of some variables."""
    return not isinstance(atom, Literal) and atom in variables
