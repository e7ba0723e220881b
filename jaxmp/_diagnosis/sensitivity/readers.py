"""Which parts of a program read what autocast has rounded, directly or elementwise.

A product returns 16 bits if 16-bit work reads the result, and elementwise work follows
its readers. So what a part reads that is kept in float32 has all of its digits, back to
the product that computes it.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation
from ..._jaxprs.places import Place
from ..._jaxprs.replay import is_call
from ..._jaxprs.scopes import AUTOCAST, Scopes
from ..._ops.lists import DEFAULT_OPS
from ..._ops.table import hands_on, is_barrier, is_exact
from ..wide_replay import bodies_of

Parts = frozenset[str]

_NOBODY: Parts = frozenset()


class Readers:
    """The parts, but for its own, that read each value computed inside of autocast."""

    def __init__(self, part_of: Callable[[Place], str], platform: str):
        """Starts with nothing found."""
        self.part_of, self.platform = part_of, platform
        self._found: dict[tuple[Scopes, Any], Parts] = {}

    def of(self, var: Any, place: Place) -> Parts:
        """Returns the readers of what is computed at a place."""
        return self._found.get((place.scopes, var), _NOBODY)

    def sets(self) -> list[Parts]:
        """Returns the sets of readers that there are, each once."""
        return [parts for parts in dict.fromkeys(self._found.values()) if parts]

    def find(self, jaxpr: Any, around: Place, outs: Sequence[Parts]) -> list[Parts]:
        """Finds those of all values in a jaxpr, from its end to its beginning.

        Of its outputs they are known, and those of its inputs are returned.
        """
        body, place, places = _jaxpr.open_jaxpr(jaxpr), around, []
        for eqn in body.eqns:
            place = around.of(eqn, before=place)
            places.append(place)
        found: dict[Any, Parts] = collections.defaultdict(lambda: _NOBODY)

        def read(atoms, readers):
            for atom, parts in zip(atoms, readers, strict=True):
                if not isinstance(atom, _jaxpr.Literal):
                    found[atom] |= parts

        read(body.outvars, outs)
        for eqn, place in zip(reversed(body.eqns), reversed(places), strict=True):
            readers = [found[var] for var in eqn.outvars]
            if AUTOCAST in place.scopes:
                own = {self.part_of(place)}
                for var, parts in zip(eqn.outvars, readers, strict=True):
                    key = place.scopes, var
                    self._found[key] = self._found.get(key, _NOBODY) | parts - own
            if is_call(eqn):
                read(eqn.invars, self._through(eqn, place, readers))
            elif is_barrier(eqn):
                read(eqn.invars, readers)
            else:
                parts = self._reads(eqn, place, _NOBODY.union(*readers))
                read(eqn.invars, [parts] * len(eqn.invars))
        return [found[var] for var in body.invars]

    def _reads(self, eqn: Equation, place: Place, readers: Parts) -> Parts:
        """Returns who reads what an equation takes, if these read what it returns."""
        if is_exact(eqn) or _jaxpr.is_cast(eqn):
            return readers
        here = frozenset({self.part_of(place)})
        follows = hands_on(eqn) or eqn.primitive.name in DEFAULT_OPS.infer
        return here | readers if follows else here

    def _through(self, eqn: Equation, place: Place, outs: list[Parts]) -> list[Parts]:
        """Returns who reads the inputs of an equation that holds jaxprs."""
        layout, ins = _jaxpr.call_layout(eqn), [_NOBODY] * len(eqn.invars)
        running, outs = bodies_of(eqn, self.platform), list(outs)
        while True:
            for body in layout.bodies:
                if body.jaxpr not in running:
                    continue
                count = len(_jaxpr.out_avals(body.jaxpr))
                wanted = outs if count == len(outs) else [_NOBODY] * count
                found = self.find(body.jaxpr, place.inside(eqn, body.jaxpr), wanted)
                for i, parts in zip(body.operands, found, strict=True):
                    ins[i] |= parts
            carried = zip(layout.fixed_in, layout.fixed_out, strict=True)
            before, outs = outs, list(outs)
            for i, out in carried:
                outs[out] |= ins[i]
            if outs == before:
                return ins
