"""Equations that nobody reads: a metric, a debug value, the other result of a helper.

They stay in the program, and count as consumers of nothing. But whoever asks for a
gradient alone leaves the loss unread. What it reads, such as an error of a prediction,
would then look like a part of the backward pass, and so be rounded. Therefore an
equation counts where nobody else reads what it reads but the backward pass.
"""

import collections
from collections.abc import Sequence
from typing import Any

from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation
from ..._jaxprs.scopes import Scopes, is_backward
from ..._jaxprs.walk import At, Backward
from ..._ops.products import is_matrix_product
from ..graph import joined

# Whether somebody reads a value, and whether the forward pass does.
_READ, _AHEAD = 1, 2


def unread(jaxpr: Any, scopes: Scopes) -> set[Equation]:
    """Returns the equations of a program that count as consumers of nothing.

    Args:
        jaxpr: The program, of which all that it holds is part.
        scopes: Named scopes around it.
    """
    known: dict[Any, int] = collections.defaultdict(int)  # by variable
    seen: dict[Equation, None] = {}

    def note(eqn: Equation, outs: Sequence[int], at: At) -> int:
        seen[eqn] = None
        for var, out in zip(eqn.outvars, outs, strict=True):
            known[var] |= out
        out, back = joined(outs), is_backward(eqn, at.scopes)
        if _jaxpr.has_effects(eqn):
            return _READ | _AHEAD
        if back:
            return out & _READ
        return _READ | _AHEAD if out and is_matrix_product(eqn) else out

    def read(eqn: Equation, outs: list[int], at: At) -> list[int]:
        found = [note(eqn, outs, at)] * len(eqn.invars)
        for var, one in zip(eqn.invars, found, strict=True):
            if not isinstance(var, _jaxpr.Literal):
                known[var] |= one
        return found

    def enter(eqn: Equation, outs: list[int], at: At) -> Sequence[int]:
        if not note(eqn, outs, at):
            return [0] * len(eqn.invars)
        return walk.around(eqn, outs, at)

    all_of_it = _READ | _AHEAD
    walk = Backward(read, all_of_it, choice=all_of_it, enter=enter)
    walk.through(jaxpr, [all_of_it] * len(_jaxpr.out_avals(jaxpr)), scopes)

    def is_live(eqn: Equation) -> bool:
        return _jaxpr.has_effects(eqn) or any(known[x] for x in eqn.outvars)

    # What is read inside of a call is also read by who reads it outside.
    calls = [x for x in seen if _jaxpr.call_kind(x) and is_live(x)]
    changed = True
    while changed:
        changed = False
        for eqn in calls:
            for body in _jaxpr.call_layout(eqn).bodies:
                inner = _jaxpr.in_vars(body.jaxpr)
                for i, var in zip(body.operands, inner, strict=True):
                    x = eqn.invars[i]
                    more = 0 if isinstance(x, _jaxpr.Literal) else known[x]
                    changed |= bool(more & ~known[var])
                    known[var] |= more

    made = set[Any]()
    for eqn in reversed(seen):  # and what is made of their results alone
        floats = {*filter(_jaxpr.is_inexact, _jaxpr.variables(eqn.invars))}
        found = [known[x] for x in floats - made] or [_AHEAD] * len(floats)
        if not is_live(eqn) and _READ not in found and joined(found) & _AHEAD:
            made.update(eqn.outvars)
    return {x for x in seen if x.outvars and made.issuperset(x.outvars)}
