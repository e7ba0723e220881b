"""What crosses from a forward pass to its backward pass, and how it is stored.

Of what the backward pass reads, the program stores as little as it can: values that are
made elementwise from a stored one are computed again from it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation
from .._jaxprs.scopes import FLOAT8_PRODUCT, FLOAT32, FLOAT32_PATHS, Scopes, is_under
from .._jaxprs.walk import At, Backward
from .._ops import table
from . import eight_bits
from .eight_bits import How, Stored

# Whether what is in some named scopes is to be left alone.
IsLeft = Callable[[Scopes], bool]


def leaves_out(paths: Iterable[str]) -> IsLeft:
    """Returns what says whether the user keeps the residuals of a scope.

    Args:
        paths: Named scopes to leave out, beside those that stay float32.
    """
    named = [tuple(path.split("/")) for path in paths]

    def is_left(scopes: Scopes) -> bool:
        if FLOAT32 in scopes or FLOAT32_PATHS in scopes:
            return True
        return any(is_under(path, scopes) for path in named)

    return is_left


class Forward:
    """What a forward pass computes, and what of it can be computed again."""

    def __init__(self, eqns: Sequence[Equation], given: Iterable[Any], is_left: IsLeft):
        """Looks at the equations.

        Args:
            eqns: Those of the forward pass, in order.
            given: Variables that the backward pass can read anyway.
            is_left: See :func:`leaves_out`.
        """
        self.makers: dict[Any, Equation] = {}
        self.given = set(given)
        self._sums: set[Any] = set()
        self._left: set[Any] = set()
        for eqn in eqns:
            self.makers.update(dict.fromkeys(eqn.outvars, eqn))
            ins = list(_jaxpr.variables(eqn.invars))
            if all(x in self.given for x in ins) and table.is_repeatable(eqn):
                self.given.update(eqn.outvars)
            elif table.reduces(eqn) or self._is_of_sums(eqn, ins):
                self._sums.update(eqn.outvars)
            moved = table.is_moved(eqn) and not self._left.isdisjoint(ins)
            left = is_left(_jaxpr.scope_names(eqn))
            if moved or left or table.is_placed(eqn):
                self._left.update(eqn.outvars)

    def _is_of_sums(self, eqn: Equation, ins: Sequence[Any]) -> bool:
        """Whether an equation computes statistics from statistics."""
        if not ins or not table.is_elementwise(eqn):
            return False
        if not all(x in self.given or x in self._sums for x in ins):
            return False
        return eqn.outvars[0].aval.size <= max(x.aval.size for x in ins)

    def is_free(self, atom: Any) -> bool:
        """Whether it costs nothing, or hardly anything, to keep a value as it is."""
        if isinstance(atom, _jaxpr.Literal) or atom in self.given:
            return True
        return atom in self._sums or eight_bits.is_small(atom.aval)

    def is_whole(self, var: Any, exact: set[Any]) -> bool:
        """Whether a value is stored as it is, if at all."""
        if var in exact or var in self._left or self.is_free(var):
            return True
        return not eight_bits.fits(var.aval)

    def is_fused(self, var: Any) -> bool:
        """Whether a compiler may compute a value for each consumer, and store none."""
        eqn = self.makers.get(var)
        fuses = eqn is not None and table.is_repeatable(eqn)
        return fuses and not eight_bits.is_small(var.aval)

    def source(self, var: Any, exact: set[Any]) -> Any:
        """Returns what to store for a value: that of which it is made elementwise."""
        while (eqn := self.maker(var)) is not None:
            large = {x for x in eqn.invars if not self.is_free(x)}
            if len(large) != 1 or self.is_whole(x := large.pop(), exact):
                break
            var = x
        return var

    def maker(self, var: Any) -> Equation | None:
        """Returns the equation by which a value can be computed again, if one can."""
        eqn = self.makers.get(var)
        if eqn is None or not table.is_computed_again(eqn):
            return None
        # What is divided by may have become zero.
        place = table.divisor(eqn)
        return eqn if place is None or self.is_free(eqn.invars[place]) else None


class Residuals:
    """What is stored of a forward pass for its backward pass."""

    def __init__(
        self,
        forward: Forward,
        needed: Iterable[Any],
        exact: set[Any],
        roots: Iterable[Any] = (),
    ):
        """Decides.

        Args:
            forward: The forward pass.
            needed: What the backward pass reads, in the order of the program.
            exact: That of it whose digits somebody needs.
            roots: That of it which is to be stored itself.
        """
        self.forward, self.how = forward, dict[Any, How]()
        self._exact = exact
        needed = list(needed)
        for var in (*roots, *(x for x in needed if forward.is_whole(x, exact))):
            self._store(var)
        for var in needed:
            if not forward.is_whole(var, exact) and not self._is_there(var, {}):
                self._store(forward.source(var, exact))
        for var in self._leaves(needed):
            self._store(var)

    def _store(self, var: Any) -> None:
        if var in self.forward.given or var in self.how:
            return
        if not self.forward.is_whole(var, self._exact):
            self.how[var] = "eight"
        elif eight_bits.packs(var.aval):
            self.how[var] = "bits"
        else:
            self.how[var] = "firm" if self.forward.is_fused(var) else "whole"

    def sources(self, var: Any) -> Iterator[Any]:
        """Yields the stored values that the backward pass reads for one."""
        rest = [var]
        while rest:
            var = rest.pop()
            if var in self.how:
                yield var
            elif var not in self.forward.given and var in self.forward.makers:
                rest += _jaxpr.variables(self.forward.makers[var].invars)

    def _is_there(self, atom: Any, seen: dict[Any, bool]) -> bool:
        """Whether a value can be had from what is stored so far."""
        if self.forward.is_free(atom) or atom in self.how:
            return True
        if atom not in seen:
            seen[atom] = False
            eqn = self.forward.maker(atom)
            if eqn and not self.forward.is_whole(atom, self._exact):
                seen[atom] = all(self._is_there(x, seen) for x in eqn.invars)
        return seen[atom]

    def _leaves(self, needed: Sequence[Any]) -> Iterator[Any]:
        """Yields what is to be stored so that all that is needed can be had."""
        seen, rest = set(), list(needed)
        while rest:
            var = rest.pop()
            if var in seen or var in self.forward.given:
                continue
            seen.add(var)
            whole = self.forward.is_whole(var, self._exact)
            eqn = None if whole or var in self.how else self.forward.maker(var)
            if eqn is None:
                yield var
            else:
                rest += _jaxpr.variables(eqn.invars)


class Again:
    """Reads what was stored, and computes again what was not."""

    def __init__(
        self,
        residuals: Residuals,
        stored: Mapping[Any, Stored],
        known: Callable[[Any], Any],
    ):
        """Starts with nothing read.

        Args:
            residuals: What is stored.
            stored: That, by its variables.
            known: Returns a value that is there anyway, None for all others.
        """
        self._residuals, self._stored, self._known = residuals, stored, known
        self._read: dict[Any, Any] = {}

    def read(self, atom: Any) -> Any:
        """Returns a value of the forward pass, as the backward pass reads it."""
        if isinstance(atom, _jaxpr.Literal):
            return atom.val
        if atom not in self._read:
            if atom in self._stored:
                self._read[atom] = self._stored[atom].restored()
            elif (value := self._known(atom)) is not None:
                return value
            else:
                eqn = self._residuals.forward.makers[atom]
                ins = [self.read(x) for x in eqn.invars]
                outs = ins if table.holds_back(eqn) else _jaxpr.bind(eqn, ins)
                self._read.update(zip(eqn.outvars, outs, strict=True))
        return self._read[atom]


def exact_of(eqns: Sequence[Equation], is_left: IsLeft) -> set[Any]:
    """Returns the variables of a backward pass whose digits somebody needs."""

    def reads(eqn: Equation, outs: list[int], at: At) -> Sequence[int]:
        places = range(len(eqn.invars))
        if FLOAT8_PRODUCT in at.scopes:  # which looks at bits to find a scale
            return [0 for _ in places]
        hands_on = table.is_elementwise(eqn) and any(outs)
        every = hands_on or is_left(at.scopes)
        return [int(every or table.reads_digits(eqn, i)) for i in places]

    return {*Backward(reads).within(None, eqns)}
