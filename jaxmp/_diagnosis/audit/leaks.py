"""What made products float32: every float32 value is followed to its causes.

A cause is where float32 came from: an argument, a constant, a cast from 16 bits, an
array or a number made in float32. A leak is a cause that products are charged to.
``Leaks.causes_of`` says which causes a value has, ``Turn`` which of them are charged.
What is said here of float32 holds for float64 too, which comes from float32 as float32
comes from 16 bits.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..._autocast.plan import Step
from ..._base.dtypes import bits_of, is_narrow, is_wide
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs import scopes as _scopes
from ..._jaxprs.places import Place, iteration_count
from ..._jaxprs.walk import At, Forward
from ..._ops.products import flops as flops_of
from ..._ops.products import is_float32_at_default
from ..._ops.table import is_view, may_multiply
from .reasons import computes, dtypes_of, is_float64_leak, why_16bit, why_kept
from .report import DtypeReport, Hazard, Kept, Leak, UnfusedAttention


class Turn(enum.IntEnum):
    """When a cause is charged: a product is charged to its causes of the first turn.

    What was given or cast can be changed at one place; what was made in float32 may
    follow from it, and a number seldom makes anything float32.
    """

    ARGUMENT = 1  # or an array constant, or whatever was seen to widen 16-bit values
    CAST = 2
    MADE_ARRAY = 3  # in float32, or by an operation that nothing is known of
    NUMBER = 4  # with a float32 dtype of its own
    BARE_NUMBER = 5  # without one, or of JAX's own


@dataclasses.dataclass(eq=False)
class Cause:
    """Where float32 came from, and where it first mattered."""

    turn: Turn
    kind: str
    name: str
    dtype: str
    written_at: Place | None = None  # only of a number that stands in the code
    met_at: Place | None = None  # where it first met something, at best narrower
    meets: int = 64  # the bits of that, at most
    flops: float = 0.0

    @functools.cached_property
    def bits(self) -> int:
        """Those of its dtype."""
        return bits_of(self.dtype)

    def meet(self, place: Place, bits: int) -> None:
        """Remembers where this met something else, of so many bits."""
        if self.met_at is None or bits < self.meets:
            self.met_at, self.meets = place, bits

    def leak(self, total: float) -> Leak:
        """Returns the row of the report. ``total`` are the FLOPs of all products."""
        place = self.written_at or self.met_at
        assert place is not None, "a product is a place too"
        return Leak(
            source=self.name,
            kind=self.kind,
            dtype=self.dtype,
            meets_16bit=self.meets == 16,
            module=place.module,
            where=place.where,
            flops=self.flops,
            share=self.flops / total,
            meets="float32" if self.meets == 32 and self.dtype == "float64" else "",
        )


Causes = frozenset[Cause]


class Origin(NamedTuple):
    """What the walk knows of a value.

    There are no causes if it has at most 16 bits: whatever made it wide is undone.
    """

    causes: Causes = frozenset()
    from_16bit: bool = False  # computed from something 16-bit
    widened_at: Place | None = None  # if nothing else has happened since

    @property
    def bits(self) -> int:
        """The fewest that something had from which this was computed."""
        return 16 if self.from_16bit else min((x.bits for x in self.causes), default=64)


class Operand(NamedTuple):
    """A floating input of an equation."""

    atom: Any
    value: Origin
    is_wide: bool  # of more than 16 bits

    @property
    def is_array(self) -> bool:
        """Whether it is given or computed, and no number in the code."""
        return not isinstance(self.atom, _jaxpr.Literal)


class Leaks:
    """Follows float32 values through a jaxpr and adds up its products."""

    def __init__(self, default_precision: Any, steps: Sequence[Step]):
        """Starts with nothing found.

        Args:
            default_precision: What JAX is told of all products.
            steps: What autocast has planned, by their numbers in the program.
        """
        self.walk = Forward(self.operation, _either, self.known, enter=self.enter)
        self.default_precision, self.steps = default_precision, steps
        self.flops: dict[str, float] = {}
        self.default_precision_flops = 0.0
        self.kept: dict[Any, Kept] = {}
        self.kept_16bit: dict[Any, Kept] = {}
        self.notes: dict[str, None] = {}  # an ordered set
        self.causes: dict[Any, Cause] = {}  # by what tells one from another
        self.forward: dict[Any, Causes] = {}  # of forward products, by place

    def report(
        self,
        residual_bytes: dict[str, int] | None,
        hazards: tuple[Hazard, ...],
        attention: tuple[UnfusedAttention, ...],
    ) -> DtypeReport:
        """Returns what was found, the worst first."""
        total = sum(self.flops.values())
        leaks = [cause.leak(total) for cause in self.causes.values() if cause.flops]
        return DtypeReport(
            flops=dict(sorted(self.flops.items(), key=lambda item: -item[1])),
            leaks=tuple(sorted(leaks, key=lambda leak: -leak.flops)),
            kept=_sorted(self.kept),
            kept_16bit=_sorted(self.kept_16bit),
            residual_bytes=residual_bytes,
            notes=tuple(self.notes),
            hazards=hazards,
            default_precision_flops=self.default_precision_flops,
            attention=attention,
        )

    # What is known of a value

    def argument(self, name: str, aval: Any) -> Origin:
        """Returns what is known of an argument."""
        number = len(self.causes)
        return self.given(number, Turn.ARGUMENT, "argument", name, aval)

    def known(self, x: Any, at: At) -> Origin:
        """Returns what is known of a number in the code, or of an array."""
        if isinstance(x, _jaxpr.Literal):
            return self.number(x, at.place)
        aval = jax.typeof(x)
        turn, name = Turn.ARGUMENT, f"constant {aval.dtype}{[*aval.shape]}"
        if is_wide(aval) and aval.size == 1 and not isinstance(x, _jaxpr.Tracer):
            turn, name = Turn.NUMBER, _number(x)
        return self.given(id(x), turn, "constant", name, aval)

    def given(self, at: Any, turn: Turn, kind: str, name: str, aval: Any) -> Origin:
        """Returns what is known of a value that is a cause if it is wide."""
        if not is_wide(aval):
            return Origin(from_16bit=is_narrow(aval))
        return Origin(frozenset({self.cause(at, turn, kind, name, aval)}))

    def number(self, x: _jaxpr.Literal, place: Place) -> Origin:
        """Returns what is known of a number in the code."""
        aval: Any = x.aval
        if not is_wide(aval):
            return Origin()  # and not from 16 bits: a number has no dtype to keep
        # What JAX's own functions compute with is nobody's mistake either.
        is_bare = place.shared or getattr(aval, "weak_type", False)
        turn = Turn.BARE_NUMBER if is_bare else Turn.NUMBER
        cause = self.cause(_line(place), turn, "constant", _number(x.val), aval)
        cause.written_at = place
        return Origin(frozenset({cause}))

    def output(
        self, eqn: _jaxpr.Equation, aval: Any, value: Origin, place: Place
    ) -> Origin:
        """Returns what is known of a result, whose type undoes causes or asks for one.

        No float32 value is without a cause.
        """
        if not is_wide(aval):
            return Origin(from_16bit=is_narrow(aval))
        if value.causes:
            return value
        name = f"{aval.dtype} of unknown origin at {place.line or eqn.primitive.name}"
        cause = self.cause(_line(place), Turn.MADE_ARRAY, "unknown", name, aval)
        cause.meet(place, cause.bits)
        return value._replace(causes=frozenset({cause}))

    def cause(self, at: Any, turn: Turn, kind: str, name: str, aval: Any) -> Cause:
        """Returns the cause of this name, new or known. ``at`` tells it from others."""
        key = (kind, name, turn, at)
        if key not in self.causes:
            self.causes[key] = Cause(turn, kind, name, str(aval.dtype))
        return self.causes[key]

    # What equations do

    def enter(self, eqn: _jaxpr.Equation, ins: list[Origin], at: At) -> list[Origin]:
        """Goes into the jaxprs of an equation."""
        if iteration_count(eqn) is None:
            self.note("a while loop, counted as one iteration", at.place)
        return self.walk.around(eqn, ins, at)

    def operation(
        self, eqn: _jaxpr.Equation, ins: list[Origin], at: At
    ) -> list[Origin]:
        """Follows one equation."""
        if any(_jaxpr.sub_jaxprs(eqn)) and not _jaxpr.is_kernel(eqn):
            value = self.unknown_call(eqn, ins, at.place)
        else:
            value = self.computed(eqn, ins, at.place)
        return [self.output(eqn, var.aval, value, at.place) for var in eqn.outvars]

    def unknown_call(
        self, eqn: _jaxpr.Equation, ins: list[Origin], place: Place
    ) -> Origin:
        """Goes into the jaxprs of an equation of which nothing else is known."""
        mixed = _either(ins)
        for jaxpr in _jaxpr.sub_jaxprs(eqn):
            inputs = [mixed] * len(_jaxpr.in_avals(jaxpr))
            inside = place.inside(eqn, jaxpr)
            mixed = _either([mixed, *self.walk.through(jaxpr, inputs, (), inside)])
        return mixed

    def computed(self, eqn: _jaxpr.Equation, ins: list[Origin], place: Place) -> Origin:
        """Returns what is known of what one equation without jaxprs computes."""
        if may_multiply(eqn):
            self.note(f"`{eqn.primitive.name}`, its products not counted", place)
        if not eqn.outvars:  # printed, and nothing more
            return Origin()
        operands = [
            Operand(atom, value, is_wide(atom.aval))
            for atom, value in zip(eqn.invars, ins, strict=True)
            if is_wide(atom.aval) or is_narrow(atom.aval)
        ]
        wide_in = any(x.is_wide for x in operands)
        wide_out = any(is_wide(var.aval) for var in eqn.outvars)
        causes: Causes = frozenset()
        if wide_in or wide_out:
            causes = self.causes_of(eqn, operands, place)
        # Finding the scale of a product in float8 is no choice.
        scales = _scopes.FLOAT8_PRODUCT in place.scopes
        if place.times:
            flops = flops_of(eqn, back=place.backward) * place.times
            if flops:
                self.product(eqn, causes, flops, place)
            elif wide_out and _scopes.AUTOCAST in place.scopes and not scales:
                self.keep(eqn, 0.0, place)
        return Origin(
            causes,
            from_16bit=any(x.value.from_16bit for x in operands),
            widened_at=_widened_at(eqn, operands, causes, place),
        )

    def causes_of(
        self, eqn: _jaxpr.Equation, operands: list[Operand], place: Place
    ) -> Causes:
        """Returns the causes of what ``eqn`` computes from or to float32.

        What makes float32 of 16 bits, of numbers or of nothing is a cause itself. All
        else has the causes of its float32 operands, except where one of them was
        widened in the same line because of what it meets here: that is the cause then.
        """
        _note_meetings(operands, place)
        wide = [x for x in operands if x.is_wide]
        has_arrays = any(x.is_array for x in wide)
        if not has_arrays and not (wide and _hands_on_number(eqn)):
            return frozenset({self.made_by(eqn, operands, place)})
        if _widens(eqn):  # to float64, from what may be narrowed again
            return _union(wide) | {self.made_by(eqn, operands, place)}

        widened = [x for x in wide if place.is_in_line_of(x.value.widened_at)]
        others = [x for x in wide if not place.is_in_line_of(x.value.widened_at)]
        causes = _joint(others or wide)
        if not (widened and others and is_wide(eqn.outvars[0].aval)):
            return causes
        if any(cause.turn <= Turn.CAST for cause in causes):
            return causes
        wideners = [c for c in causes if c.turn is not Turn.BARE_NUMBER]
        if not wideners:  # a number without a dtype widens nothing
            return _union(widened)
        if not all(place.is_in_call_of(x.value.widened_at) for x in widened):
            return _joint(wide)  # widened a step earlier, on purpose
        for cause in wideners:  # charged like an argument
            cause.turn = Turn.ARGUMENT
            cause.meet(place, min(x.value.bits for x in widened))
        return causes

    def made_by(
        self, eqn: _jaxpr.Equation, operands: list[Operand], place: Place
    ) -> Cause:
        """Returns the cause that ``eqn`` is: a cast, or what it makes in float32."""
        operation, out = eqn.primitive.name, eqn.outvars[0].aval
        wide = [x for x in operands if x.is_wide]
        is_cast = _widens(eqn) or (bool(operands) and not wide)
        if is_cast:
            name = "cast" if _jaxpr.is_cast(eqn) else operation
            cause = self.cause(_line(place), Turn.CAST, "cast", name, out)
            cause.meet(place, 32 if wide else 16)
        else:
            name = f"{out.dtype}{[*out.shape]} made at {place.line or operation}"
            if wide:
                name += f" of {', '.join(_number(x.atom.val) for x in wide)}"
            turn = Turn.MADE_ARRAY if out.size > 1 else Turn.NUMBER
            if wide and place.shared:  # spread by one of JAX's own functions
                turn = Turn.BARE_NUMBER
            cause = self.cause(_line(place), turn, "constant", name, out)
            cause.meet(place, cause.bits)
        return cause

    def product(
        self, eqn: _jaxpr.Equation, causes: Causes, flops: float, place: Place
    ) -> None:
        """Adds a matrix product or convolution to the totals and to its causes.

        A backward product has the causes of the forward products in its place.
        """
        dtypes = [atom.aval.dtype for atom in eqn.invars[:2]]
        dtype = str(max(dtypes, key=lambda d: d.itemsize))
        self.flops[dtype] = self.flops.get(dtype, 0.0) + flops
        if is_float32_at_default(eqn, self.default_precision):
            self.default_precision_flops += flops
        key = (_scopes.without_repeats(place.scopes), place.user, eqn.primitive.name)
        if not any(map(is_wide, dtypes)):
            if is_wide(eqn.outvars[0].aval) and not place.backward:
                self.forward.setdefault(key, causes)
            is_float8 = all(x.itemsize == 1 for x in dtypes)
            if _scopes.FLOAT8 in place.scopes and not is_float8:
                reason = why_16bit(eqn, place.step_among(self.steps))
                _count(self.kept_16bit, eqn, reason, flops, place)
            return
        is_leak = is_float64_leak(eqn, place, place.step_among(self.steps))
        if _scopes.AUTOCAST in place.scopes and not is_leak:
            return self.keep(eqn, flops, place)
        if place.backward:
            causes = self.forward.get(key) or causes
        else:
            self.forward[key] = self.forward.get(key, frozenset()) | causes
        # What is float32 makes nothing float64.
        bits = bits_of(dtype)
        causes = frozenset(x for x in causes if x.bits == bits) or causes
        first = min((cause.turn for cause in causes), default=None)
        for cause in causes:
            if cause.turn == first:
                cause.meet(place, cause.bits)
                cause.flops += flops

    def keep(self, eqn: _jaxpr.Equation, flops: float, place: Place) -> None:
        """Adds to what autocast left in float32, with the reason."""
        if not computes(eqn):
            return
        reason = why_kept(
            eqn, place, place.step_among(self.steps), is_product=bool(flops)
        )
        _count(self.kept, eqn, reason, flops, place)

    def note(self, text: str, place: Place) -> None:
        """Remembers what could not be counted exactly."""
        self.notes[f"{place.line or 'somewhere'}: {text}"] = None


def _count(
    rows: dict[Any, Kept],
    eqn: _jaxpr.Equation,
    reason: str,
    flops: float,
    place: Place,
) -> None:
    """Adds an operation to those that autocast left as they are for one reason."""
    name = eqn.primitive.name
    key = (name, reason, place.module, place.where)
    dtype = dtypes_of(eqn)[-1]
    row = rows.get(key, Kept(name, reason, 0, 0.0, place.module, place.where, dtype))
    arrays = [x.aval for x in eqn.outvars if isinstance(x.aval, _jaxpr.ShapedArray)]
    size = sum(x.size * x.dtype.itemsize for x in arrays)
    rows[key] = dataclasses.replace(
        row,
        count=row.count + place.times,
        flops=row.flops + flops,
        size=row.size + size * place.times,
    )


def _sorted(rows: dict[Any, Kept]) -> tuple[Kept, ...]:
    return tuple(sorted(rows.values(), key=lambda k: (-k.flops, -k.size)))


def _line(place: Place) -> tuple[str, str]:
    return place.module, place.where


def _either(values: Sequence[Origin]) -> Origin:
    """Returns what is known of a value that is, or is made of, some of these."""
    sets = {x.causes for x in values}
    # A set with the causes of hundreds of arguments is best shared.
    causes = sets.pop() if len(sets) == 1 else frozenset().union(*sets)
    return Origin(causes, any(x.from_16bit for x in values))


def _union(operands: list[Operand]) -> Causes:
    return _either([x.value for x in operands]).causes


def _joint(operands: list[Operand]) -> Causes:
    """Returns the causes of operands, of numbers only where there is nothing else.

    A number that meets an array, or one without a dtype that meets one with, leaves
    its dtype as it was. So does one in the line of an operation on other values.
    """
    causes = _union([x for x in operands if x.is_array] or operands)
    turns = {cause.turn for cause in causes}
    if all(turn <= Turn.MADE_ARRAY for turn in turns):
        return causes
    last = max(min(turns), Turn.MADE_ARRAY)
    return frozenset(cause for cause in causes if cause.turn <= last)


def _note_meetings(operands: list[Operand], place: Place) -> None:
    """Lets the causes that come with some operands and not with others meet those."""
    if len(operands) < 2:
        return
    for i, x in enumerate(operands):
        others = operands[:i] + operands[i + 1 :]
        if causes := x.value.causes - _union(others):
            bits = min(other.value.bits for other in others)
            for cause in causes:
                cause.meet(place, min(bits, cause.bits))


def _widened_at(
    eqn: _jaxpr.Equation, operands: list[Operand], causes: Causes, place: Place
) -> Place | None:
    """Returns where the result was widened, if nothing else has happened since."""
    wide = [x for x in operands if x.is_wide]
    if _jaxpr.is_cast(eqn) and (_widens(eqn) or (operands and not wide)):
        return place
    if is_view(eqn) and len(operands) == 1:
        return operands[0].value.widened_at
    arrays = [x.value for x in wide if x.is_array]
    if arrays and all(place.is_in_call_of(x.widened_at) for x in arrays):
        # Still inside the call that widened them, if no other cause was found.
        return place if causes == _joint(wide) else None
    return None


def _widens(eqn: _jaxpr.Equation) -> bool:
    """Whether ``eqn`` casts float32 to float64."""
    if not _jaxpr.is_cast(eqn):
        return False
    old, new = eqn.invars[0].aval, eqn.outvars[0].aval
    return is_wide(old) and is_wide(new) and bits_of(old.dtype) < bits_of(new.dtype)


def _hands_on_number(eqn: _jaxpr.Equation) -> bool:
    """Whether ``eqn`` returns its operand, a number, in another shape or dtype."""
    moves = is_view(eqn) or _jaxpr.is_cast(eqn)
    return moves and eqn.outvars[0].aval.size == 1


def _number(value: Any) -> str:
    return f"{jax.typeof(value).dtype}({np.asarray(value).item():g})"
