"""Looking ahead: how autocast treats each equation, and what its results are for.

A plan is made of a jaxpr alone, from its end to its beginning, before anything is
emitted. What no product takes, neither directly nor through operations of the infer
list, is computed in float32: softmax logits, variances, gradients. And so is what a
steep function or a divisor is computed from elementwise: a probability next to its
logarithm. Products then round it for themselves.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from . import _jaxpr
from ._definitions import unmoved
from ._jaxpr import Equation, is_float32
from ._norms import is_normed
from ._op_lists import (
    COMPARES,
    DIFFERENCES,
    ERRORS,
    EXACT,
    FACTORS,
    JOINS,
    NEGATES,
    REDUCES,
    REMAINDERS,
    REVERSES,
    SCALES,
    SUMS_WINDOWS,
    TOTALS,
    VIEWS,
    axes_of_softmax,
    divisor,
    is_count,
    only_compared,
    softmax_in_dropout,
)
from ._products import PRODUCTS
from ._scopes import Scopes, is_backward
from ._sizes import size_of
from ._slopes import bounded_input, exponent_of_bell, is_difference
from ._twins import twins
from ._uses import FOR_BACKWARD, IN_16BIT, STORED, Use, Want, wanted_for

# How many equations may be between a value and a mean of it that is taken away.
_STEPS = 100

# How to treat an equation: give it 16-bit operands, let it follow its inputs, pass a
# value on whose type alone changes, go inside, multiply a float32 sum by a 16-bit
# matrix, or leave it in its original dtypes.
Rule = Literal["allow", "infer", "retype", "call", "row_sum", "deny"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to treat the equations of a jaxpr, and what its variables are used for.

    Attributes:
        eqns: The equations. Not the jaxpr: the plan must not keep it alive.
        rules: For each of them, how to treat it.
        wants: For each of them, what each of its outputs is wanted for.
        uses: For each variable that is read, what its readers do with it.
        rounds: Whether every product returns 16 bits.
        returned: Variables that are returned to who may need all their digits.
    """

    eqns: Sequence[Equation]
    rules: Sequence[Rule]
    wants: Sequence[tuple[Want, ...]]
    uses: Mapping[Any, int]
    rounds: bool = False
    returned: frozenset[Any] = frozenset()

    def use(self, var: Any) -> int:
        """Tells what the readers of ``var`` do with it."""
        return self.uses.get(var, Use.NOTHING)

    def read(self, eqn: Equation) -> int:
        """Tells what the readers of all that ``eqn`` returns do with it."""
        read = Use.NOTHING
        for var in eqn.outvars:
            read |= self.use(var)
        return read

    def wanted(self, eqn: Equation) -> tuple[Want, ...]:
        """Tells what each output of ``eqn`` is wanted for, after its readers' plans."""
        wanted: tuple[Want, ...] = (*map(self.want, eqn.outvars),)
        if self.rounds and eqn.primitive.name in PRODUCTS:
            (out,), (want,) = eqn.outvars, wanted
            if want not in IN_16BIT and not self.use(out) & Use.REGION:
                return ("rounded",)
        return wanted

    def want(self, var: Any) -> Want:
        """Tells what ``var`` is wanted for."""
        use = self.uses.get(var, Use.NOTHING)
        if use & Use.BOUNDED:
            if is_difference(var, self._definition):
                return "digits"
            use &= ~Use.BOUNDED
        return wanted_for(use)

    def moves_in_16bit(self, eqn: Equation, rule: Rule, scopes: Scopes) -> bool:
        """Tells whether ``eqn`` gathers or reverses weights for 16 bits alone.

        They are rounded before. Gathered, they then travel so; and XLA knows the
        gradient of a convolution by a kernel that is reversed where it is taken. Not
        where their own gradient would add up over a loop, nor what the user reverses:
        it may have many readers, whose gradients would add up in 16 bits.

        Args:
            eqn: The equation.
            rule: How it is treated.
            scopes: Named scopes around it.
        """
        reverses = eqn.primitive.name in REVERSES
        if rule != "infer" or (reverses and not is_backward(eqn, scopes)):
            return False
        (out,) = eqn.outvars
        read = self.use(out) & (Use.IN_16BIT | Use.OTHERWISE | Use.TRIPS)
        in_16bit = read == Use.IN_16BIT or self.want(out) == "stored"
        return in_16bit and is_float32(eqn.invars[0])

    def multiplies_rows(self, eqn: Equation) -> bool:
        """Tells whether products alone take what ``eqn`` looks up, in 16 bits.

        It is the same number if it is rounded before. That is worth it where the rows
        are more than there were.
        """
        (out,) = eqn.outvars
        others = ~(Use.PRODUCT | Use.IN_16BIT | Use.OTHERWISE)
        only = self.use(out) & Use.PRODUCT and not self.use(out) & others
        return bool(only) and size_of(out.aval) > size_of(eqn.invars[0].aval)

    def pools_shared(self, eqn: Equation) -> bool:
        """Tells whether what ``eqn`` pools others take too, and not to compare it."""
        readers = self._readers.get(eqn.invars[0], ())
        compares = [only_compared(other) is not None for other in readers]
        compares += [other.primitive.name in COMPARES for other in readers]
        return len(readers) - sum(compares) > 1

    def evens_out(self, eqn: Equation, normed: bool, scopes: Scopes) -> bool:
        """Tells whether ``eqn`` computes means of windows, or what a mean is taken of.

        Rounding leaves a mean what it is, but for its last digits, and what is then
        multiplied. Not what is left when the mean is taken away. And products return 16
        bits: the means of windows of them are as large.

        Args:
            eqn: The equation.
            normed: Whether it returns what a norm does, or an activation of that.
            scopes: Named scopes around it.
        """
        (out, *_) = eqn.outvars
        if normed:
            return self._is_averaged(out, scopes)
        if divisor(eqn) != 1 or not is_count(eqn.invars[1]):
            return False
        total = self._definition(eqn.invars[0])
        if total is None or total.primitive.name not in SUMS_WINDOWS:
            return False
        made = self._definition(total.invars[0])
        while made is not None and self._keeps_range(made):
            made = self._definition(made.invars[0])
        if made is None or made.primitive.name not in PRODUCTS:
            return False
        # What is returned may be taken away elsewhere.
        return not (out in self.returned or self._is_subtracted(out, (1,)))

    def _is_averaged(self, var: Any, scopes: Scopes) -> bool:
        """Tells whether means of ``var`` are taken for products, and no one needs more.

        Other readers are products, and who multiplies it for products, or in the
        backward pass. Any other may look at the last digits, also one out of sight.
        """
        averages, rest = False, [var]
        while rest:
            var = rest.pop()
            if var in self.returned or self.use(var) & Use.REGION:
                return False
            for other in self._readers.get(var, ()):
                name, rule = other.primitive.name, self._rules[id(other)]
                if name in VIEWS or rule == "retype":
                    rest.extend(other.outvars)
                elif name in TOTALS:
                    averages = True
                    if not self._is_mean_for_products(*other.outvars):
                        return False
                elif name in FACTORS and rule == "infer":
                    if is_backward(other, scopes):
                        continue
                    (out,) = other.outvars
                    computes = self.use(out) & Use.COMPUTES
                    if self.want(out) not in IN_16BIT or computes:
                        return False
                elif rule != "allow":
                    return False
        return averages

    def _is_mean_for_products(self, total: Any) -> bool:
        """Tells whether products alone take a sum, or what it is by a number."""
        while self.want(total) not in FOR_BACKWARD:
            readers = self._readers.get(total, ())
            if len(readers) != 1 or total in self.returned:
                return False
            (reader,) = readers
            numbers = all(isinstance(x, _jaxpr.Literal) for x in reader.invars[1:])
            if reader.primitive.name not in VIEWS | SCALES or not numbers:
                return False
            (total,) = reader.outvars
        return True

    def _keeps_range(self, eqn: Equation) -> bool:
        """Tells whether ``eqn`` moves one value, or adds a bias to it."""
        value, *others = eqn.invars
        if eqn.primitive.name in VIEWS:
            return not any(
                is_float32(x) and not isinstance(x, _jaxpr.Literal) for x in others
            )
        if eqn.primitive.name not in JOINS:
            return False
        (bias,) = others
        size = size_of(bias.aval)
        while (made := self._definition(bias)) is not None:
            if made.primitive.name not in VIEWS or len(made.invars) != 1:
                return False
            bias = made.invars[0]
            size = min(size, size_of(bias.aval))
        return size < size_of(value.aval)

    def subtracts(self, eqn: Equation) -> bool:
        """Tells whether ``eqn`` is a difference, or adds what was negated.

        A value less a mean or a maximum of itself is none here: it is what a norm or a
        softmax computes.
        """
        if eqn.primitive.name in JOINS:
            made = map(self._definition, eqn.invars)
            return any(one and one.primitive.name in NEGATES for one in made)
        if eqn.primitive.name in REMAINDERS:
            return True
        if eqn.primitive.name not in DIFFERENCES:
            return False
        value, taken = (unmoved(x, self._definition) for x in eqn.invars)
        if isinstance(taken, _jaxpr.Literal):
            return taken.val != 0
        return not self._reduces(value, taken)

    def _reduces(self, value: Any, made: Any) -> bool:
        """Tells whether a reduction is on the way from ``value`` to ``made``."""
        if isinstance(value, _jaxpr.Literal) or isinstance(made, _jaxpr.Literal):
            return False
        first = self._place(value)
        parts: set[int] = set()
        rest = collections.deque([made])
        while rest and len(parts) < _STEPS:
            place = self._place(rest.popleft())
            if place > first and place not in parts:
                parts.add(place)
                rest.extend(self.eqns[place].invars)
        # By variable that is made of the value, whether it was reduced on the way.
        found = {value: False}
        for eqn in (self.eqns[place] for place in sorted(parts)):
            read = [found[x] for x in _variables(eqn) if x in found]
            if read:
                found |= dict.fromkeys(eqn.outvars, any(read) or _reduces(eqn))
        return found.get(made, False)

    def keeps_offset(self, eqn: Equation) -> bool:
        """Tells whether what was given keeps its digits where ``eqn`` adds it.

        It may be most of the sum, of which somebody takes away what is as large.
        """
        return bool(self.use(eqn.outvars[0]) & Use.OFFSETS)

    def is_subtracted(self, eqn: Equation) -> bool:
        """Tells whether a difference is made of what ``eqn`` returns."""
        return any(self._is_subtracted(var, (0, 1)) for var in eqn.outvars)

    def _is_subtracted(self, var: Any, places: Sequence[int]) -> bool:
        """Tells whether ``var``, moved or not, is one of these operands of a `sub`."""
        return any(
            other.primitive.name in DIFFERENCES
            and any(read is other.invars[i] for i in places)
            for read, other in self._readers_of(var)
        )

    def _readers_of(self, var: Any) -> Iterator[tuple[Any, Equation]]:
        """Yields who reads ``var``, moved or not, each after what it reads."""
        rest = [var]
        while rest:
            var = rest.pop()
            for other in self._readers.get(var, ()):
                if other.primitive.name in VIEWS and len(other.invars) == 1:
                    rest.extend(other.outvars)
                else:
                    yield var, other

    def is_shared(self, eqn: Equation) -> bool:
        """Tells whether several take the gradient that ``eqn`` adds up, in 16 bits.

        All of them must, but those who sum it up.
        """
        (total,) = eqn.outvars
        readers = self._readers.get(total, ())
        if len(readers) < 2 or total in self.returned:
            return False
        return all(map(self._takes_16bit, readers)) and not self._ends_in_one(total)

    def _ends_in_one(self, var: Any) -> bool:
        """Tells whether all that is made of ``var``, elementwise, is one value.

        As behind the derivative of an activation, which reads it more than once.
        """
        ends, seen, rest = set(), set(), [(var, var)]
        while rest and len(seen) < _STEPS:
            var, unmoved = rest.pop()
            if var in seen:
                continue
            seen.add(var)
            if var in self.returned:
                ends.add(unmoved)
            for other in self._readers.get(var, ()):
                if self._rules[id(other)] not in ("infer", "retype"):
                    ends.add(unmoved)
                    continue
                views = other.primitive.name in VIEWS
                rest += [(x, unmoved if views else x) for x in other.outvars]
        return len(ends) == 1 and not rest

    def _takes_16bit(self, eqn: Equation) -> bool:
        """Tells whether ``eqn`` takes its inputs in 16 bits, or sums them up."""
        rule = self._rules[id(eqn)]
        if rule == "allow" or eqn.primitive.name in TOTALS:
            return True
        wants = {self.want(var) for var in eqn.outvars if is_float32(var)}
        return wants <= (STORED if rule == "call" else IN_16BIT)

    def axes_of_softmax(self, eqn: Equation) -> tuple[int, ...]:
        """Returns the axes over which the result of ``eqn`` sums to one, if any."""
        return axes_of_softmax(eqn, self._definition)

    def is_normed(self, eqn: Equation, ins: Sequence[Any]) -> bool:
        """Tells whether ``eqn`` returns what a norm does, given ``ins``."""
        return is_normed(eqn, self._definition, ins)

    def drops_out(self, eqn: Equation) -> int | None:
        """Returns which input of ``eqn`` is a softmax that a product is to take.

        None if there is none: only dropout is between the two.
        """
        return softmax_in_dropout(eqn, self._definition)

    def is_slope_of_erf(self, eqn: Equation) -> bool:
        """Tells whether ``eqn`` computes ``exp(-x**2)`` where ``erf(x)`` is computed.

        It is the derivative of ``erf``, for an exact GELU. Who rounds ``x`` for the one
        may round it for the other: if ``x`` is off by a relative ``eps``, neither is
        off by more than ``eps``, because ``x`` times the slope is at most 0.74 and
        0.48. The logarithm of a result would magnify that, and a divisor.
        """
        x = exponent_of_bell(eqn, self._definition)
        if x is None:
            return False
        errors = (other for other in self.eqns if other.primitive.name in ERRORS)
        return any(x is other.invars[0] for other in errors)

    def bounded_input(self, eqn: Equation) -> Any:
        """Returns what ``eqn`` computes a bounded exponential of, None if of none."""
        return bounded_input(eqn, self._definition)

    def compares_twins(self, eqn: Equation) -> bool:
        """Tells whether ``eqn`` tests if a number equals what was written once more.

        ``f(x) == f(x).max()`` for one: only with all digits are both the same.
        """
        lhs, rhs = (self._chosen_from(var) for var in eqn.invars)
        return any(self._are_twins(a, b) for a in lhs for b in rhs - {a})

    def _are_twins(self, a: Any, b: Any) -> bool:
        """Tells whether two variables are computed in the same way."""
        one, other = self._definition(a), self._definition(b)
        if one is None or other is None or one.primitive is not other.primitive:
            return False
        return self._twins[a] is self._twins[b]  # They are rare, and found slowly.

    def _chosen_from(self, var: Any) -> set[Any]:
        """Returns ``var`` and what it was moved or chosen from."""
        found, rest = set(), [var]
        while rest:
            var = rest.pop()
            if isinstance(var, _jaxpr.Literal) or var in found or not is_float32(var):
                continue
            found.add(var)
            eqn = self._definition(var)
            if eqn is not None and eqn.primitive.name in EXACT:
                rest.extend(eqn.invars)
        return found

    def _definition(self, atom: Any) -> Equation | None:
        """Returns the equation that computes ``atom``, if it is here."""
        place = self._place(atom)
        return self.eqns[place] if place >= 0 else None

    @functools.cached_property
    def _rules(self) -> dict[int, Rule]:
        """By id of an equation, how it is treated; once all of the plan is there."""
        return {id(e): rule for e, rule in zip(self.eqns, self.rules, strict=True)}

    def _place(self, atom: Any) -> int:
        """Returns which equation computes ``atom``, -1 if none here does."""
        return -1 if isinstance(atom, _jaxpr.Literal) else self._places.get(atom, -1)

    @functools.cached_property
    def _places(self) -> dict[Any, int]:
        return {var: i for i, eqn in enumerate(self.eqns) for var in eqn.outvars}

    @functools.cached_property
    def _readers(self) -> dict[Any, list[Equation]]:
        """By variable, the equations that read it, each of them once."""
        readers: dict[Any, list[Equation]] = {}
        for eqn in self.eqns:
            for var in dict.fromkeys(_variables(eqn)):
                readers.setdefault(var, []).append(eqn)
        return readers

    @functools.cached_property
    def _twins(self) -> dict[Any, Any]:
        return twins(self.eqns)

    def __str__(self) -> str:
        """Writes a line for each equation: its rule, its results, what they are for."""
        return "\n".join(
            f"{rule:<6}  {eqn.primitive.name:<24}"
            + ", ".join(
                f"{var.aval} {want}"
                for var, want in zip(eqn.outvars, wanted, strict=True)
            )
            for eqn, rule, wanted in zip(self.eqns, self.rules, self.wants, strict=True)
        )


def _variables(eqn: Equation) -> list[Any]:
    """Returns what ``eqn`` reads, less numbers."""
    return [x for x in eqn.invars if not isinstance(x, _jaxpr.Literal)]


def _reduces(eqn: Equation) -> bool:
    """Tells whether ``eqn`` is a reduction or a product, or calls one."""
    bodies = map(_jaxpr.open_jaxpr, _jaxpr.sub_jaxprs(eqn))
    return eqn.primitive.name in REDUCES or any(
        _reduces(inner) for body in bodies for inner in body.eqns
    )


def wanted_of_results(jaxpr: Any) -> tuple[Want, ...]:
    """Returns what is wanted of what a whole function returns.

    What was given and is added to it keeps its digits. Not if it is added to gradients,
    nor in what a loop carries, which would make float32 work of the whole loop.
    """
    body = _jaxpr.open_jaxpr(jaxpr)
    others: set[Any] = set()
    for eqn in body.eqns:
        read = _variables(eqn)
        sent_back = not others.isdisjoint(read) or is_backward(eqn, ())
        loops = _jaxpr.call_kind(eqn) in ("scan", "while")
        carried = _jaxpr.call_layout(eqn).fixed_out if loops else ()
        others.update(eqn.outvars if sent_back else (eqn.outvars[i] for i in carried))
    return tuple(
        "result" if isinstance(var, _jaxpr.Literal) or var in others else "offset"
        for var in body.outvars
    )
