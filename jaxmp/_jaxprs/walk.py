"""What is known of values, followed through a jaxpr: forward, or backward.

Both enter calls, join branches, and go around loops until the iterations find no more.
Where no place is given, what is found of a jaxpr with the same facts is found once. An
analysis says what one equation does that holds no jaxprs (its *transfer function*),
and how facts of a value that may come from, or go to, several places are joined.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from . import jaxpr as _jaxpr
from .jaxpr import Equation
from .scopes import Scopes, scopes_inside


class At(NamedTuple):
    """Where an equation is."""

    owner: Any = None  # the open jaxpr
    scopes: Scopes = ()  # around the equation, with its own
    place: Any = None  # a `Place`, if the walk began at one


@dataclasses.dataclass(frozen=True)
class Forward:
    """Follows facts from the inputs of a jaxpr to its outputs.

    Args:
        transfer: Takes an equation, a list of the facts of its inputs, and where
            it is; returns the facts of each of its outputs.
        join: Returns the facts of a value that is one of several.
        known: The facts of a number in the code, which is a ``Literal``, or of an
            array that a jaxpr carries; it is given where that is read.
        enter: What to do with an equation that holds jaxprs: it takes what ``transfer``
            takes, and may call :meth:`around` or :meth:`once`.
    """

    transfer: Callable[[Equation, list[Any], At], Sequence[Any]]
    join: Callable[[Sequence[Any]], Any]
    known: Callable[[Any, At], Any]
    enter: Callable[[Equation, list[Any], At], Sequence[Any]] | None = None
    memo: Any = dataclasses.field(default_factory=WeakKeyDictionary, init=False)

    def through(
        self, jaxpr: Any, ins: Sequence[Any], scopes: Scopes = (), place: Any = None
    ) -> list[Any]:
        """Returns the facts of the outputs of a jaxpr, open or closed.

        Args:
            jaxpr: The jaxpr.
            ins: The facts of its inputs.
            scopes: Named scopes around it.
            place: Where it is, if ``transfer`` is to be given places. It then goes as
                reports do: of a ``lax.platform_dependent`` into the branch for a GPU
                alone, and ``times`` is 0 until what a loop carries has settled.
        """
        memo = {} if place else self.memo.setdefault(jaxpr, {})
        key = () if place else (tuple(ins), scopes)  # facts may have no hash there
        if key in memo:
            return [*memo[key]]
        owner, before = _jaxpr.open_jaxpr(jaxpr), place
        around = At(owner, scopes, place)

        def read(x: Any, at: At) -> Any:
            return self.known(x, at) if isinstance(x, _jaxpr.Literal) else x

        def apply(eqn: Equation, ins: list[Any]) -> Sequence[Any]:
            nonlocal before
            before = place and place.of(eqn, before)
            at = At(owner, scopes + _jaxpr.scope_names(eqn), before)
            return self.of(eqn, [read(x, at) for x in ins], at)

        outs = _jaxpr.interpret(
            jaxpr,
            ins,
            apply,
            const=lambda x: self.known(x, around),
            literal=lambda literal: literal,
        )
        memo[key] = [read(x, around) for x in outs]
        return [*memo[key]]

    def of(self, eqn: Equation, ins: list[Any], at: At) -> Sequence[Any]:
        """Returns the facts of the outputs of an equation."""
        if not _jaxpr.call_kind(eqn):
            return self.transfer(eqn, ins, at)
        return (self.enter or self.around)(eqn, ins, at)

    def around(self, eqn: Equation, ins: Sequence[Any], at: At) -> list[Any]:
        """Goes through the jaxprs that an equation holds, as often as a loop needs."""
        layout, ins, outs = _jaxpr.call_layout(eqn), list(ins), []
        settling = at._replace(place=at.place and at.place._replace(times=0))
        while layout.fixed_in:
            outs, before = self.once(eqn, ins, settling), list(ins)
            for i, out in zip(layout.fixed_in, layout.fixed_out, strict=True):
                ins[i] = self.join((ins[i], outs[out]))
            if ins == before:
                break
        if at.place or not layout.fixed_in:
            outs = self.once(eqn, ins, at)
        if _jaxpr.call_kind(eqn) == "while":  # which may not run at all
            return [ins[i] for i in layout.fixed_in]
        return outs

    def once(self, eqn: Equation, ins: Sequence[Any], at: At) -> list[Any]:
        """Goes through the jaxprs that an equation holds, a loop for one iteration."""
        layout, within = _jaxpr.call_layout(eqn), scopes_inside(eqn, at.scopes)
        bodies, place = layout.bodies, at.place
        if place:
            bodies = _jaxpr.on_platform(eqn, bodies)
        found = [
            self.through(
                body.jaxpr,
                [ins[i] for i in body.operands],
                within,
                place and place.inside(eqn, body.jaxpr),
            )
            for body in bodies
        ]
        if _jaxpr.call_kind(eqn) != "cond" or len(found) == 1:
            return found[-1]  # behind the test of a while
        return [self.join(branches) for branches in zip(*found, strict=True)]


@dataclasses.dataclass(frozen=True)
class Backward:
    """Follows sets of bits from the outputs of a jaxpr to its inputs.

    Args:
        transfer: Takes an equation, the facts of its outputs, and where it is;
            returns what that says of each of its inputs.
        test: The facts of the truth value by which a ``while`` ends.
        seeds: Returns the facts of variables of an open jaxpr by themselves.
        choice: What a ``cond`` says of the number by which it chooses, if something is
            known of an output.
        enter: What to do with an equation that holds jaxprs: it takes what ``transfer``
            takes, and may call :meth:`around` or :meth:`once`.
    """

    transfer: Callable[[Equation, list[int], At], Sequence[int]]
    test: int = 0
    seeds: Callable[[Any], Mapping[Any, int]] = lambda _: {}
    choice: int = 0
    enter: Callable[[Equation, list[int], At], Sequence[int]] | None = None
    memo: Any = dataclasses.field(default_factory=WeakKeyDictionary, init=False)

    def through(
        self, jaxpr: Any, outs: Sequence[int], scopes: Scopes = ()
    ) -> list[int]:
        """Returns the facts of the inputs of a jaxpr, open or closed."""
        owner, memo = _jaxpr.open_jaxpr(jaxpr), self.memo.setdefault(jaxpr, {})
        key = tuple(outs), scopes
        if key not in memo:
            pairs = zip(owner.outvars, outs, strict=True)
            known = self.within(owner, owner.eqns, pairs, scopes)
            memo[key] = [known.get(x, 0) for x in owner.invars]
        return [*memo[key]]

    def within(
        self,
        owner: Any,
        eqns: Sequence[Equation],
        outs: Iterable[tuple[Any, int]] = (),
        scopes: Scopes = (),
    ) -> dict[Any, int]:
        """Returns the facts of the variables that some of its equations read.

        ``outs`` are pairs of a result of the jaxpr and the facts of it.
        """
        known = dict(self.seeds(owner))

        def note(found: Iterable[tuple[Any, int]]) -> None:
            for x, one in found:
                if one and not isinstance(x, _jaxpr.Literal):
                    known[x] = known.get(x, 0) | one

        note(outs)
        for eqn in reversed(eqns):
            at = At(owner, scopes + _jaxpr.scope_names(eqn))
            found = self.of(eqn, [known.get(x, 0) for x in eqn.outvars], at)
            note(zip(eqn.invars, found, strict=True))
        return known

    def of(self, eqn: Equation, outs: list[int], at: At) -> Sequence[int]:
        """Returns the facts of the inputs of an equation."""
        if not _jaxpr.call_kind(eqn):
            return self.transfer(eqn, outs, at)
        return (self.enter or self.around)(eqn, outs, at)

    def around(self, eqn: Equation, outs: Sequence[int], at: At) -> list[int]:
        """Goes through the jaxprs that an equation holds, as often as a loop needs."""
        layout, outs = _jaxpr.call_layout(eqn), list(outs)
        while True:
            found, before = self.once(eqn, outs, at), list(outs)
            for place, out in zip(layout.fixed_in, layout.fixed_out, strict=True):
                outs[out] |= found[place]
            if outs == before:
                break
        if _jaxpr.call_kind(eqn) == "cond" and any(outs):
            found[0] |= self.choice
        return found

    def once(self, eqn: Equation, outs: Sequence[int], at: At) -> list[int]:
        """Goes through the jaxprs that an equation holds, a loop for one iteration."""
        within, found = scopes_inside(eqn, at.scopes), [0] * len(eqn.invars)
        for body in _jaxpr.call_layout(eqn).bodies:
            is_test = body.param == "cond_jaxpr"
            ins = self.through(body.jaxpr, [self.test] if is_test else outs, within)
            for i, one in zip(body.operands, ins, strict=True):
                found[i] |= one
        return found


def the_one(found: Sequence[Any]) -> Any:
    """Returns what all of these are, None if they differ: to join with."""
    return found[0] if len({*found}) == 1 else None
