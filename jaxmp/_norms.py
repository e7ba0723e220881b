"""Norms, found in a jaxpr: a value less, or times, a statistic of itself."""

from collections.abc import Callable, Iterator
from typing import Any

from ._jaxpr import Equation, Literal, is_float32
from ._op_lists import CALLS, EXACT, SCALES, SHIFTS, STRETCHED, SUMS
from ._products import PRODUCTS

# Returns the equation that computes a variable, None for what is given.
Definition = Callable[[Any], Equation | None]


def is_normed(eqn: Equation, definition: Definition, of_normed: bool) -> bool:
    """Whether ``eqn`` returns a value less, or times, a statistic of itself.

    Args:
        eqn: The equation.
        definition: Returns the equation that computes a variable, None for an input.
        of_normed: Whether it is given such a value, which it then moves, scales or
            shifts.
    """
    name = eqn.primitive.name
    if of_normed and name in EXACT:
        return True
    if name not in SHIFTS | SCALES:
        return False
    size = eqn.outvars[0].aval.size
    whole = [x for x in eqn.invars if _size(x, definition) == size]
    if len(whole) != 1 or of_normed:
        return of_normed and len(whole) == 1
    own = set(_made_of(whole[0], definition))
    return any(
        not own.isdisjoint(_made_of(total, definition))
        for atom in eqn.invars
        if atom is not whole[0]
        for total in _summed(atom, definition)
    )


def _size(atom: Any, definition: Definition) -> int:
    """Returns the size of ``atom``, or of that which was stretched to it."""
    eqn = definition(atom)
    if eqn is None or eqn.primitive.name not in SHIFTS | SCALES | STRETCHED:
        return atom.aval.size
    return min(atom.aval.size, max(x.aval.size for x in eqn.invars))


def _made_of(atom: Any, definition: Definition) -> Iterator[Any]:
    """Yields a variable, and of what it is made that has its size."""
    while not isinstance(atom, Literal):
        yield atom
        eqn = definition(atom)
        if eqn is None or eqn.primitive.name in PRODUCTS | CALLS:
            return
        same = {
            x
            for x in eqn.invars
            if not isinstance(x, Literal) and x.aval.size == atom.aval.size
        }
        if len(same) != 1:
            return
        (atom,) = same


def _summed(atom: Any, definition: Definition) -> Iterator[Any]:
    """Yields what was summed up for ``atom``, which may be a mean or a variance."""
    seen, rest = set(), [atom]
    while rest:
        atom = rest.pop()
        if isinstance(atom, Literal) or atom in seen or not is_float32(atom):
            continue
        seen.add(atom)
        eqn = definition(atom)
        if eqn is None or eqn.primitive.name in PRODUCTS:
            continue
        # A variance may be a function of its own.
        sums = eqn.primitive.name in SUMS | CALLS
        smaller = [x for x in eqn.invars if x.aval.size <= atom.aval.size]
        rest.extend(smaller)
        if sums:
            yield from (x for x in eqn.invars if x not in smaller)
