"""Gates in a row: what multiplies a number many times without a loop."""

from collections.abc import Sequence
from typing import Any

from . import _jaxpr
from ._jaxpr import Equation
from ._op_lists import BOUNDED, CALLS, FACTORS, LINEAR, PICKS
from ._scopes import Scopes, inside, is_backward, marks
from ._trips import OFTEN, RUN_ONCE, Factor

# Equations that hold one jaxpr and run it once, given and returning the same.
_CALLED = RUN_ONCE | {"custom_vjp", "shard_map"}
# What a value may be: known to have a bound, so that it may be just below it; made by
# a multiplication, or a sum with such; made of numbers in the program.
_GATE, _SCALED, _NUMBER = 1, 2, 4


def gates_in_row(jaxpr: Any, scopes: Scopes) -> frozenset[Factor]:
    """Returns the gates of which many multiply one another's results.

    As the trips of a loop do, see :func:`jaxmp._trips.factors`, that is written out, or
    is an ``associative_scan``. The backward pass multiplies by the same gates.

    Args:
        jaxpr: The jaxpr, open or closed.
        scopes: Named scopes around it.
    """
    rows = _Rows()
    rows.counts(jaxpr, _nothing(_jaxpr.open_jaxpr(jaxpr).outvars), scopes)
    if not rows.found:  # as in most programs
        return frozenset()
    gates = _Gates(rows.found)
    for owner in rows.owners:
        gates.kinds(owner, _nothing(owner.invars))
    return frozenset(gates.found)


class _Rows:
    """Finds multiplications that many others follow.

    Each jaxpr is gone through once for what follows after its outputs.
    """

    def __init__(self):
        self.found: set[Equation] = set()
        self.owners: list[Any] = []  # jaxprs that no other one calls
        self._counts: dict[Any, tuple[int, ...]] = {}

    def counts(
        self, jaxpr: Any, outs: tuple[int, ...], scopes: Scopes, *, called: bool = False
    ) -> tuple[int, ...]:
        """Returns how many multiplications follow one another after each input.

        With nothing else than sums and views between. Those beyond what is many are
        not counted.

        Args:
            jaxpr: The jaxpr, open or closed.
            outs: How many follow after each output.
            scopes: Named scopes around it.
            called: Whether another one calls it.
        """
        owner = _jaxpr.open_jaxpr(jaxpr)
        key = owner, outs, marks(scopes)
        if key not in self._counts:
            if not called:
                self.owners.append(owner)
            self._counts[key] = self._counted(owner, outs, scopes)
        return self._counts[key]

    def _counted(
        self, owner: Any, outs: tuple[int, ...], scopes: Scopes
    ) -> tuple[int, ...]:
        counts: dict[Any, int] = {}

        def note(atoms: Sequence[Any], numbers: Sequence[int]) -> None:
            for atom, n in zip(atoms, numbers, strict=True):
                if n and not isinstance(atom, _jaxpr.Literal):
                    counts[atom] = max(n, counts.get(atom, 0))

        note(owner.outvars, outs)
        for eqn in reversed(owner.eqns):
            name = eqn.primitive.name
            if name in CALLS:
                around = inside(eqn, scopes + _jaxpr.scope_names(eqn))
                if _jaxpr.call_kind(eqn) in _CALLED:
                    after = tuple([counts.get(var, 0) for var in eqn.outvars])
                    (body,) = _jaxpr.call_layout(eqn).bodies
                    before = self.counts(body.jaxpr, after, around, called=True)
                    note(eqn.invars, before)
                    continue
                for body in _jaxpr.sub_jaxprs(eqn):
                    self.counts(body, _nothing(_jaxpr.open_jaxpr(body).outvars), around)
            elif name in FACTORS:
                read = [x for x in eqn.invars if not isinstance(x, _jaxpr.Literal)]
                n = counts.get(eqn.outvars[0], 0)
                here = scopes + _jaxpr.scope_names(eqn)
                if len(read) > 1 and not is_backward(eqn, here):
                    n += 1
                    if n > OFTEN:
                        self.found.add(eqn)
                note(read, [min(n, OFTEN + 1)] * len(read))
            elif name in LINEAR or _jaxpr.is_cast(eqn):
                note(eqn.invars, [counts.get(eqn.outvars[0], 0)] * len(eqn.invars))
        return tuple([counts.get(var, 0) for var in owner.invars])


class _Gates:
    """Finds the gates among the factors of some multiplications.

    Each jaxpr is gone through once for what its inputs may be.
    """

    def __init__(self, multiplications: set[Equation]):
        self.found: set[Factor] = set()
        self._multiplications = multiplications
        self._kinds: dict[Any, dict[Any, int]] = {}

    def kinds(self, jaxpr: Any, ins: tuple[int, ...]) -> dict[Any, int]:
        """Returns what the variables of a jaxpr may be, given that of its inputs."""
        owner = _jaxpr.open_jaxpr(jaxpr)
        if (owner, ins) not in self._kinds:
            kinds = dict(zip(owner.invars, ins, strict=True))
            for eqn in owner.eqns:
                found = self._kinds_of(eqn, kinds, owner)
                kinds.update(zip(eqn.outvars, found, strict=True))
                if eqn in self._multiplications:
                    self._mark(owner, eqn.invars, _read(kinds, eqn.invars))
            self._kinds[owner, ins] = kinds
        return self._kinds[owner, ins]

    def _kinds_of(self, eqn: Equation, kinds: dict[Any, int], owner: Any) -> list[int]:
        """Returns what the results of ``eqn`` may be."""
        if _jaxpr.call_kind(eqn) in _CALLED:
            (body,) = _jaxpr.call_layout(eqn).bodies
            inner = self.kinds(body.jaxpr, _read(kinds, eqn.invars))
            self._hand_out(owner, eqn, body.jaxpr)
            return [*_read(inner, _jaxpr.open_jaxpr(body.jaxpr).outvars)]
        name, kind = eqn.primitive.name, 0
        if name in BOUNDED:
            kind = _GATE
        elif name in FACTORS:
            kind = _SCALED
        elif name in LINEAR or name in PICKS or _jaxpr.is_cast(eqn):
            floats = [x for x in eqn.invars if _jaxpr.is_inexact(x)]
            ins = _read(kinds, floats)
            if ins and all(x & (_GATE | _NUMBER) for x in ins):
                kind = _GATE if any(x & _GATE for x in ins) else _NUMBER
            if any(x & _SCALED for x in ins):
                kind |= _SCALED
        return [kind] * len(eqn.outvars)

    def _mark(self, owner: Any, factors: Sequence[Any], kinds: Sequence[int]) -> None:
        """Marks the gates among two factors, if the other one is any, or scaled."""
        for var, kind, other in zip(factors, kinds, kinds[::-1], strict=True):
            if kind & _GATE and other & (_GATE | _SCALED):
                self.found.add((owner, var))

    def _hand_out(self, owner: Any, call: Equation, jaxpr: Any) -> None:
        """Marks the results of a call that are gates in it: the backward pass reads."""
        inner = _jaxpr.open_jaxpr(jaxpr)
        for var, atom in zip(call.outvars, inner.outvars, strict=True):
            if not isinstance(atom, _jaxpr.Literal) and (inner, atom) in self.found:
                self.found.add((owner, var))


def _nothing(variables: Sequence[Any]) -> tuple[int, ...]:
    return (0,) * len(variables)


def _read(kinds: dict[Any, int], atoms: Sequence[Any]) -> tuple[int, ...]:
    return tuple(
        _NUMBER if isinstance(x, _jaxpr.Literal) else kinds.get(x, 0) for x in atoms
    )
