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
from .._ops.products import is_loss_head
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


class Residuals:
    """What a forward pass computes, and what of it is stored for its backward pass.

    Attributes:
        makers: The equation that computes a variable.
        given: Variables that the backward pass can read anyway.
        how: How a variable is stored that is stored.
    """

    def __init__(self, eqns: Sequence[Equation], given: Iterable[Any], is_left: IsLeft):
        """Looks at the equations, and stores nothing yet.

        Args:
            eqns: Those of the forward pass, in order.
            given: Variables that the backward pass can read anyway.
            is_left: See :func:`leaves_out`.
        """
        self.makers, self.how = dict[Any, Equation](), dict[Any, How]()
        self.given, self._exact = set(given), set[Any]()
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
            left = is_left(_jaxpr.scope_names(eqn)) or is_loss_head(eqn)
            if moved or left or table.is_placed(eqn):
                self._left.update(eqn.outvars)

    def decide(
        self, needed: Sequence[Any], exact: set[Any], roots: Iterable[Any] = ()
    ) -> None:
        """Decides what is stored.

        Args:
            needed: What the backward pass reads, in the order of the program.
            exact: That of it whose digits somebody needs.
            roots: That of it which is to be stored itself.
        """
        self._exact = exact
        for var in (*roots, *filter(self._is_whole, needed)):
            self._store(var)
        for var in needed:
            read = self.read_for(var)
            if not all(self._is_free(x) or x in self.how for x in read):
                self._store(self._source(var))
        for var in reversed(needed):
            for x in self.read_for(var):
                self._store(x)

    def read_for(self, var: Any) -> Iterator[Any]:
        """Yields what must be stored to have a value, or is stored already."""
        seen, rest = set(), [var]
        while rest:
            var = rest.pop()
            if var in seen or var in self.given:
                continue
            seen.add(var)
            is_end = var in self.how or self._is_whole(var)
            eqn = None if is_end else self._maker(var)
            if eqn is None:
                yield var
            else:
                rest += _jaxpr.variables(eqn.invars)

    def reader(
        self, stored: Mapping[Any, Stored], known: Callable[[Any], Any]
    ) -> Callable[[Any], Any]:
        """Returns what reads values of the forward pass, as the backward pass does.

        Args:
            stored: What was stored, by its variables. The rest is computed again.
            known: Returns a value that is there anyway, None for all others.
        """
        found: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            if isinstance(atom, _jaxpr.Literal):
                return atom.val
            if atom not in found:
                if atom in stored:
                    found[atom] = stored[atom].restored()
                elif (value := known(atom)) is not None:
                    return value
                else:
                    eqn = self.makers[atom]
                    ins = [read(x) for x in eqn.invars]
                    outs = ins if table.holds_back(eqn) else _jaxpr.bind(eqn, ins)
                    found.update(zip(eqn.outvars, outs, strict=True))
            return found[atom]

        return read

    def _store(self, var: Any) -> None:
        if var in self.given or var in self.how:
            return
        if not self._is_whole(var):
            self.how[var] = "eight"
        elif eight_bits.packs(var.aval):
            self.how[var] = "bits"
        else:
            # What a compiler may compute for each consumer, and not store.
            eqn = self.makers.get(var)
            fuses = eqn is not None and table.is_repeatable(eqn)
            is_firm = fuses and not eight_bits.is_small(var.aval)
            self.how[var] = "firm" if is_firm else "whole"

    def _is_of_sums(self, eqn: Equation, ins: Sequence[Any]) -> bool:
        """Whether an equation computes statistics from statistics."""
        if not ins or not table.is_elementwise(eqn):
            return False
        if not all(x in self.given or x in self._sums for x in ins):
            return False
        return eqn.outvars[0].aval.size <= max(x.aval.size for x in ins)

    def _is_free(self, atom: Any) -> bool:
        """Whether it costs nothing, or hardly anything, to keep a value as it is."""
        if isinstance(atom, _jaxpr.Literal) or atom in self.given:
            return True
        return atom in self._sums or eight_bits.is_small(atom.aval)

    def _is_whole(self, var: Any) -> bool:
        """Whether a value is stored as it is, if at all."""
        if var in self._exact or var in self._left or self._is_free(var):
            return True
        return not eight_bits.fits(var.aval)

    def _source(self, var: Any) -> Any:
        """Returns what to store for a value: that of which it is made elementwise."""
        while (eqn := self._maker(var)) is not None:
            large = {x for x in eqn.invars if not self._is_free(x)}
            if len(large) != 1 or self._is_whole(x := large.pop()):
                break
            var = x
        return var

    def _maker(self, var: Any) -> Equation | None:
        """Returns the equation by which a value can be computed again, if one can."""
        eqn = self.makers.get(var)
        if eqn is None or not table.is_computed_again(eqn):
            return None
        # What is divided by may have become zero.
        place = table.divisor(eqn)
        return eqn if place is None or self._is_free(eqn.invars[place]) else None


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
