"""Gates in a row: what multiplies a number many times without a loop.

As the trips of a loop do that is written out, or is an ``associative_scan``: what is
left after many gates just below one depends on the last digits of each, and on those
of what they multiply. The backward pass multiplies by the same gates, or by gates that
it computes again.
"""

import collections
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation, Literal
from ..._jaxprs.scopes import Scopes, inside, is_backward, marks
from ..._ops import table
from .. import needs
from ..graph import OFTEN, joined
from ..needs import Need

# What a value may be: known to have a bound, so that it may be just below it; made by
# a multiplication, or a sum with such; made of numbers in the program; made by a gate
# of many, or a sum with such.
_GATE, _SCALED, _NUMBER, _STATE = 1, 2, 4, 8


def gates(jaxpr: Any, scopes: Scopes) -> Iterator[tuple[Any, Any, Need]]:
    """Yields the gates of which many multiply one another's results.

    And these results, where they are of the forward pass. A marker, see
    :mod:`jaxmp._autocast.passes`.
    """
    rows = _Rows()
    rows.before(jaxpr, [0] * len(_jaxpr.out_avals(jaxpr)))
    if rows.found:  # as in few programs
        found = _Gates(rows.found)
        found.through(jaxpr, [0] * len(_jaxpr.in_avals(jaxpr)), scopes)
        yield from found.found


class _Rows:
    """Finds multiplications that many others follow."""

    def __init__(self):
        self.found: set[Equation] = set()
        self._before: dict[Any, list[int]] = {}

    def before(self, jaxpr: Any, after: Sequence[int]) -> list[int]:
        """Returns how many multiplications follow one another after each input.

        With nothing else than sums and moves between, and ``after`` behind its outputs.
        Those beyond what is many are not counted.
        """
        owner = _jaxpr.open_jaxpr(jaxpr)
        key = owner, tuple(after)
        if key not in self._before:
            counts: dict[Any, int] = {}
            _note(counts, owner.outvars, after)
            for eqn in reversed(owner.eqns):
                outs = [counts.get(var, 0) for var in eqn.outvars]
                _note(counts, eqn.invars, self._of(eqn, outs))
            self._before[key] = [counts.get(var, 0) for var in owner.invars]
        return self._before[key]

    def _of(self, eqn: Equation, after: list[int]) -> Sequence[int]:
        """Returns how many follow after each input of ``eqn``."""
        if _jaxpr.call_kind(eqn):
            counts: dict[Any, int] = {}
            for body in _jaxpr.call_layout(eqn).bodies:
                ends = (
                    [0] * len(_jaxpr.out_avals(body.jaxpr)) if _is_loop(eqn) else after
                )
                found = self.before(body.jaxpr, ends)
                _note(counts, [*body.operands], found)
            return [
                0 if _is_loop(eqn) else counts.get(i, 0) for i in range(len(eqn.invars))
            ]
        count = after[0] if after else 0
        if table.multiplies_entries(eqn):
            read = [x for x in eqn.invars if not isinstance(x, Literal)]
            if len(read) > 1:
                count += 1
                if count > OFTEN:
                    self.found.add(eqn)
            count = min(count, OFTEN + 1)
        elif not table.is_linear(eqn):
            count = 0
        return [count] * len(eqn.invars)


class _Gates:
    """Finds the gates among the factors of some multiplications, and their results."""

    def __init__(self, multiplications: set[Equation]):
        self.found: set[tuple[Any, Any, Need]] = set()
        self._multiplications = multiplications
        self._outs: dict[Any, list[int]] = {}

    def through(self, jaxpr: Any, ins: Sequence[int], scopes: Scopes) -> list[int]:
        """Returns what the outputs of a jaxpr may be, given that of its inputs."""
        owner = _jaxpr.open_jaxpr(jaxpr)

        def apply(eqn: Equation, ins: list[int]) -> list[int]:
            here = scopes + _jaxpr.scope_names(eqn)
            if _jaxpr.call_kind(eqn):
                return self._inside(eqn, ins, inside(eqn, here))
            made = _made_by(eqn, ins)
            if table.multiplies_entries(eqn):
                many = _SCALED | _GATE if eqn in self._multiplications else 0
                for var, kind, other in zip(eqn.invars, ins, ins[::-1], strict=True):
                    if kind & _GATE and other & (_STATE | many):
                        self.found.add((owner, var, needs.GATE | needs.MANY))
                        made |= _STATE
                    if kind & _STATE and not is_backward(eqn, here):
                        self.found.add((owner, var, needs.DIGITS | needs.MANY))
            return [made] * len(eqn.outvars)

        key = owner, tuple(ins), marks(scopes)
        if key not in self._outs:
            self._outs[key] = _jaxpr.interpret(
                jaxpr, ins, apply, const=lambda _: 0, literal=lambda _: _NUMBER
            )
        return self._outs[key]

    def _inside(self, eqn: Equation, ins: list[int], scopes: Scopes) -> list[int]:
        outs = [0] * len(eqn.outvars)
        for body in _jaxpr.call_layout(eqn).bodies:
            given = [ins[i] for i in body.operands]
            if _is_loop(eqn):
                again = self._used_again(body.jaxpr) if is_backward(eqn, scopes) else ()
                given = [_GATE * (var in again) for var in _jaxpr.in_vars(body.jaxpr)]
            made = self.through(body.jaxpr, given, scopes)
            if not _is_loop(eqn):
                outs = [one | other for one, other in zip(outs, made, strict=True)]
        return outs

    def _used_again(self, jaxpr: Any) -> Collection[Any]:
        """Returns what multiplies many times in a trip, such as a stacked decay."""
        eqns = _jaxpr.open_jaxpr(jaxpr).eqns
        read = [x for eqn in eqns if eqn in self._multiplications for x in eqn.invars]
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
    """Whether an equation runs what it holds again and again."""
    return _jaxpr.call_kind(eqn) in ("scan", "while")


def _note(counts: dict[Any, int], atoms: Sequence[Any], numbers: Sequence[int]) -> None:
    for atom, n in zip(atoms, numbers, strict=True):
        if n and not isinstance(atom, Literal):
            counts[atom] = max(n, counts.get(atom, 0))
