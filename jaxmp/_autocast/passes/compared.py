"""What a loop compares with was computed before it: in float32, as in the loop.

A search along a line compares the loss at the next point, which the loop computes in
float32, with that at the first, which it is given. In 16 bits that may be lower than
all others. What counts is what the loop compares entry by entry: such a loss, a slope,
the logarithm of a density. What it multiplies by a matrix or adds up first, to compare
a norm, may be rounded as anywhere: the loop is then about rounded numbers, from its
first trip to its last.
"""

from collections.abc import Iterator
from typing import Any

from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation, Literal, is_inexact
from ..._jaxprs.scopes import BACKWARD, Scopes, inside
from ..._jaxprs.walk import At, Backward
from ..._ops import table
from ..._ops.products import is_matrix_product
from .. import needs
from ..graph import joined
from ..needs import Need
from .endings import Decisions, decisions

# How a value is read: it is compared entry by entry; or it is a truth value, or a
# count, that decides.
_ENTRIES, _DECIDES = 1, 2


def compared(jaxpr: Any, scopes: Scopes) -> Iterator[tuple[Any, Any, Need]]:
    """Yields what loops that decide by comparing are given to compare with.

    Whoever keeps the loop in float32, autocast or the user. A marker, see
    :mod:`jaxmp._autocast.passes`.
    """
    seen: set[Any] = set()

    def found(jaxpr: Any, scopes: Scopes) -> Iterator[tuple[Any, Any, Need]]:
        owner = _jaxpr.open_jaxpr(jaxpr)
        if owner in seen:
            return
        seen.add(owner)
        for eqn in owner.eqns:
            chosen_by = decisions(eqn, scopes, _is_product)
            if chosen_by is not None:
                nothing = [0] * len(eqn.outvars)
                found_in = _walk(chosen_by).of(eqn, nothing, At(owner, scopes))
                for var, read in zip(eqn.invars, found_in, strict=True):
                    if read and not isinstance(var, Literal):
                        yield owner, var, needs.COMPARED
            else:
                for body in _jaxpr.sub_jaxprs(eqn):
                    around = scopes + _jaxpr.scope_names(eqn)
                    yield from found(body, inside(eqn, around))

    yield from found(jaxpr, scopes)


def _is_product(eqn: Equation, scopes: Scopes) -> bool:
    return is_matrix_product(eqn, back=BACKWARD in scopes)


def _walk(chosen_by: Decisions) -> Backward:
    """Returns what goes back from what decides to what a loop is given."""

    def decides(owner: Any) -> dict[Any, int]:
        return dict.fromkeys(chosen_by.get(owner, ()), _DECIDES)

    return Backward(_read_by, test=_DECIDES, seeds=decides, choice=_DECIDES)


def _read_by(eqn: Equation, outs: list[int], at: At) -> list[int]:
    """Returns how ``eqn`` reads its inputs, if its outputs are so read."""
    read = joined(outs)
    if table.tests(eqn) and read:
        return [_ENTRIES if is_inexact(x) else _DECIDES for x in eqn.invars]
    if read & _ENTRIES and not _works_entry_by_entry(eqn):
        return [0] * len(eqn.invars)
    # A number that decides as a truth value was cast to one.
    numbers = _ENTRIES if read & _ENTRIES or _jaxpr.is_cast(eqn) else 0
    return [numbers if is_inexact(x) else _DECIDES if read else 0 for x in eqn.invars]


def _works_entry_by_entry(eqn: Equation) -> bool:
    """Whether each number that ``eqn`` returns is made of one of each input, or few."""
    if table.is_view(eqn):
        return True
    known = table.hands_on(eqn) or table.is_linear(eqn) or table.picks(eqn)
    ndim = len(eqn.outvars[0].aval.shape)
    return known and all(len(x.aval.shape) <= ndim for x in eqn.invars)
