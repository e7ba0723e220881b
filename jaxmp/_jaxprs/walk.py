"""What is known of values, followed through a jaxpr: forward, or backward.

Both enter calls, join branches, and go around loops until the iterations find no more.
An analysis says what one equation does that holds no jaxprs (its *transfer function*),
and how facts of a value that may come from, or go to, several places are joined.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from . import jaxpr as _jaxpr
from .jaxpr import Equation
from .scopes import Scopes, inside


class At(NamedTuple):
    """Where an equation is."""

    owner: Any  # the open jaxpr
    scopes: Scopes  # around the equation, with its own


@dataclasses.dataclass(frozen=True)
class Forward:
    """Follows facts from the inputs of a jaxpr to its outputs.

    Args:
        transfer: Takes an equation, a list of what is known of its inputs, and where
            it is; returns what is known of each of its outputs.
        join: Returns what is known of a value that is one of several.
        known: What is known of constants, and of numbers in the code.
        enter: What to do with an equation that holds jaxprs: it takes the equation,
            what is known of its inputs, and a function that goes through the jaxprs
            with such facts.
    """

    transfer: Callable[[Equation, list[Any], At], Sequence[Any]]
    join: Callable[[Sequence[Any]], Any]
    known: Any = None
    enter: Callable[[Equation, list[Any], Callable], Sequence[Any]] | None = None

    def through(self, jaxpr: Any, ins: Sequence[Any], scopes: Scopes = ()) -> list[Any]:
        """Returns what is known of the outputs of a jaxpr, open or closed."""
        owner = _jaxpr.open_jaxpr(jaxpr)

        def apply(eqn: Equation, ins: list[Any]) -> Sequence[Any]:
            return self.of(eqn, ins, At(owner, scopes + _jaxpr.scope_names(eqn)))

        known = lambda _: self.known  # noqa: E731
        return _jaxpr.interpret(jaxpr, ins, apply, const=known, literal=known)

    def of(self, eqn: Equation, ins: list[Any], at: At) -> Sequence[Any]:
        """Returns what is known of the outputs of an equation."""
        if not _jaxpr.call_kind(eqn):
            return self.transfer(eqn, ins, at)
        if self.enter is None:
            return self.around(eqn, ins, at.scopes)
        return self.enter(eqn, ins, lambda ins: self.around(eqn, ins, at.scopes))

    def around(self, eqn: Equation, ins: Sequence[Any], scopes: Scopes) -> list[Any]:
        """Goes through the jaxprs that an equation holds, as often as a loop needs.

        The test of a ``while`` returns nothing that the equation does.
        """
        layout, ins = _jaxpr.call_layout(eqn), list(ins)
        within = inside(eqn, scopes)
        bodies = [body for body in layout.bodies if body.param != "cond_jaxpr"]
        while True:
            found = [
                self.through(body.jaxpr, [ins[i] for i in body.operands], within)
                for body in bodies
            ]
            outs = [self.join(branches) for branches in zip(*found, strict=True)]
            before = list(ins)
            for i, out in zip(layout.fixed_in, layout.fixed_out, strict=True):
                ins[i] = self.join((ins[i], outs[out]))
            if ins == before:
                return outs


@dataclasses.dataclass(frozen=True)
class Backward:
    """Follows sets of bits from the outputs of a jaxpr to its inputs.

    Args:
        transfer: Takes an equation, what is known of its outputs, and where it is;
            returns what that says of each of its inputs.
        test: What is known of the truth value by which a ``while`` ends.
        seeds: Returns what is known of variables of an open jaxpr by themselves.
        choice: What a ``cond`` says of the number by which it chooses, if something is
            known of an output.
    """

    transfer: Callable[[Equation, list[int], At], Sequence[int]]
    test: int = 0
    seeds: Callable[[Any], Mapping[Any, int]] = lambda _: {}
    choice: int = 0

    def through(
        self, jaxpr: Any, outs: Sequence[int], scopes: Scopes = ()
    ) -> list[int]:
        """Returns what is known of the inputs of a jaxpr, open or closed."""
        owner = _jaxpr.open_jaxpr(jaxpr)
        pairs = zip(owner.outvars, outs, strict=True)
        known = self.within(owner, owner.eqns, pairs, scopes)
        return [known.get(x, 0) for x in owner.invars]

    def within(
        self,
        owner: Any,
        eqns: Sequence[Equation],
        outs: Iterable[tuple[Any, int]] = (),
        scopes: Scopes = (),
    ) -> dict[Any, int]:
        """Returns what is known of the variables that some of its equations read.

        ``outs`` are pairs of a result of the jaxpr and what is known of it.
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
        """Returns what is known of the inputs of an equation."""
        if not _jaxpr.call_kind(eqn):
            return self.transfer(eqn, outs, at)
        layout, within = _jaxpr.call_layout(eqn), inside(eqn, at.scopes)
        found = [0] * len(eqn.invars)
        while True:
            for body in layout.bodies:
                is_test = body.param == "cond_jaxpr"
                wanted = [self.test] if is_test else outs
                ins = self.through(body.jaxpr, wanted, within)
                for place, one in zip(body.operands, ins, strict=True):
                    found[place] |= one
            before = list(outs)
            for place, out in zip(layout.fixed_in, layout.fixed_out, strict=True):
                outs[out] |= found[place]
            if outs == before:
                break
        if _jaxpr.call_kind(eqn) == "cond" and any(outs):
            found[0] |= self.choice
        return found
