"""Gates in a row: what multiplies a number many times without a loop.

As a loop that is written out does, or an ``associative_scan``: what is left after many
gates just below one depends on the last digits of each, and on those of what they
multiply. The backward pass multiplies by the same gates, or by gates that it computes
again.
"""

import collections
from collections.abc import Collection, Set
from typing import Any

from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation, Literal
from ..._jaxprs.scopes import Scopes, is_backward
from ..._jaxprs.walk import At, Backward, Forward
from ..._ops import table
from .. import needs
from ..graph import OFTEN, joined
from ..needs import Need

# What a value may be: known to have a bound, so that it may be just below it; made by
# a multiplication, or a sum with such; made of numbers in the program; made by a gate
# of many, or a sum with such.
_GATE, _SCALED, _NUMBER, _STATE = 1, 2, 4, 8


def gates(
    jaxpr: Any, scopes: Scopes, unread: Set[Equation]
) -> Collection[tuple[Any, Any, Need]]:
    """Returns the gates of which many multiply one another's results.

    And these results, where they are of the forward pass. A gate of a loop is one where
    it is used often in one iteration. A marker, see :mod:`jaxmp._autocast.passes`.
    """
    found: set[tuple[Any, Any, Need]] = set()
    multiplications = _followed_by_many(jaxpr) - unread
    if not multiplications:  # as in most programs
        return found

    def made(eqn: Equation, ins: list[int], at: At) -> list[int]:
        out = _made_by(eqn, ins)
        if table.multiplies_entries(eqn):
            many = _SCALED | _GATE if eqn in multiplications else 0
            for var, kind, other in zip(eqn.invars, ins, ins[::-1], strict=True):
                if kind & _GATE and other & (_STATE | many):
                    found.add((at.owner, var, needs.GATE | needs.MANY))
                    out |= _STATE
                if kind & _STATE and not is_backward(eqn, at.scopes):
                    found.add((at.owner, var, needs.DIGITS | needs.MANY))
        return [out] * len(eqn.outvars)

    def enter(eqn: Equation, ins: list[int], at: At) -> list[int]:
        if not _is_loop(eqn):
            return walk.around(eqn, ins, at)
        body, given = _jaxpr.call_layout(eqn).bodies[-1], [0] * len(ins)
        if is_backward(eqn, at.scopes):
            again = _used_again(body.jaxpr, multiplications)
            for i, var in zip(body.operands, _jaxpr.in_vars(body.jaxpr), strict=True):
                given[i] = _GATE * (var in again)
        walk.once(eqn, given, at)
        return [0] * len(eqn.outvars)

    def known(x: Any, at: At) -> int:
        return _NUMBER if isinstance(x, Literal) else 0

    walk = Forward(made, joined, known, enter=enter)
    walk.through(jaxpr, [0] * len(_jaxpr.in_avals(jaxpr)), scopes)
    return found


def _followed_by_many(jaxpr: Any) -> set[Equation]:
    """Returns the multiplications that many others follow.

    With nothing else than sums and moves between. A loop begins and ends such a row.
    """
    found: set[Equation] = set()

    def count(eqn: Equation, outs: list[int], at: At) -> list[int]:
        """Returns how many follow each input, no more than what is many.

        A bit for each of them, so that of several ways the longest counts.
        """
        after = joined(outs[:1])
        if table.multiplies_entries(eqn):
            if not any(isinstance(x, Literal) for x in eqn.invars):
                after = after << 1 | 1
                if after >> OFTEN:
                    found.add(eqn)
            after &= (2 << OFTEN) - 1
        elif not table.is_linear(eqn):
            after = 0
        return [after] * len(eqn.invars)

    def enter(eqn: Equation, outs: list[int], at: At) -> list[int]:
        if not _is_loop(eqn):
            return walk.around(eqn, outs, at)
        walk.once(eqn, [0] * len(outs), at)
        return [0] * len(eqn.invars)

    walk = Backward(count, enter=enter)
    walk.through(jaxpr, [0] * len(_jaxpr.out_avals(jaxpr)))
    return found


def _used_again(jaxpr: Any, multiplications: set[Equation]) -> Collection[Any]:
    """Returns what multiplies many times in an iteration, such as a stacked decay."""
    eqns = _jaxpr.open_jaxpr(jaxpr).eqns
    read = [x for eqn in eqns if eqn in multiplications for x in eqn.invars]
    counts = collections.Counter(_jaxpr.variables(read))
    return [var for var, count in counts.items() if count > OFTEN]


def _made_by(eqn: Equation, ins: list[int]) -> int:
    """Returns what ``eqn`` makes of such inputs."""
    if table.is_bounded(eqn):
        return _GATE
    scales = any(kind == _NUMBER for kind in ins)
    if table.multiplies_entries(eqn) and not scales:
        return _SCALED
    hands_on = table.is_linear(eqn) or table.picks(eqn)
    if not (hands_on or (table.multiplies(eqn) and scales)):
        return 0
    pairs = zip(eqn.invars, ins, strict=True)
    floats = [kind for x, kind in pairs if _jaxpr.is_inexact(x)]
    found = joined(floats) & (_SCALED | _STATE)
    if floats and all(kind & (_GATE | _NUMBER) for kind in floats):
        found |= _GATE if any(kind & _GATE for kind in floats) else _NUMBER
    return found


def _is_loop(eqn: Equation) -> bool:
    return _jaxpr.call_kind(eqn) in ("scan", "while")
