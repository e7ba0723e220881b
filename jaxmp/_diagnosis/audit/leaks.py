"""What made products float32: every float32 value is followed to its causes.

A cause is where float32 came from: an argument, a constant, a cast from 16 bits, an
array or a number made in float32. A leak is a cause that products are charged to.
``Leaks._causes`` says which causes a value has, ``Turn`` which of them are charged.
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
from ..._base.dtypes import is_narrow, is_wide
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs import scopes as _scopes
from ..._jaxprs.jaxpr import Equation
from ..._jaxprs.places import Place, iteration_count
from ..._jaxprs.walk import At, Forward
from ..._ops.products import flops as flops_of
from ..._ops.products import has_default_precision, is_of_float32
from ..._ops.table import is_view, may_multiply
from .report import Kept, Leak


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
        return _bits_of(self.dtype)

    def meet(self, place: Place, bits: int) -> None:
        """Remembers where this met something else, of so many bits."""
        if self.met_at is None or bits < self.meets:
            self.met_at, self.meets = place, min(bits, self.bits)

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


class Widths(NamedTuple):
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


# A floating input of an equation, and the facts of it.
Operand = tuple[Any, Widths]


class Leaks:
    """Follows float32 values through a jaxpr and adds up its products."""

    def __init__(self, default_precision: Any):
        """Starts with nothing found; the argument is JAX's default for products."""
        self.walk = Forward(self._operation, _either, self._known, enter=self._enter)
        self.default_precision = default_precision
        self.flops: dict[str, float] = {}
        self.default_precision_flops = 0.0
        self.kept: dict[Any, Kept] = {}
        self.kept_16bit: dict[Any, Kept] = {}
        self.notes: dict[str, None] = {}  # an ordered set
        self.causes: dict[Any, Cause] = {}  # by what tells one from another
        self.forward: dict[Any, Causes] = {}  # of forward products, by place

    def found(self) -> dict[str, Any]:
        """Returns fields of the report, the worst first."""
        total = sum(self.flops.values())
        leaks = [cause.leak(total) for cause in self.causes.values() if cause.flops]
        return {
            "flops": dict(sorted(self.flops.items(), key=lambda item: -item[1])),
            "leaks": tuple(sorted(leaks, key=lambda leak: -leak.flops)),
            "kept": _sorted(self.kept),
            "kept_16bit": _sorted(self.kept_16bit),
            "notes": tuple(self.notes),
            "default_precision_flops": self.default_precision_flops,
        }

    # The facts of a value that no equation has computed

    def argument(self, name: str, aval: Any) -> Widths:
        return self._given(len(self.causes), Turn.ARGUMENT, "argument", name, aval)

    def _known(self, x: Any, at: At) -> Widths:
        """Returns the facts of a number in the code, or of an array."""
        aval: Any = jax.typeof(x) if not isinstance(x, _jaxpr.Literal) else x.aval
        turn, name = Turn.ARGUMENT, f"constant {aval.dtype}{[*aval.shape]}"
        if not isinstance(x, _jaxpr.Literal):
            if is_wide(aval) and aval.size == 1 and not isinstance(x, _jaxpr.Tracer):
                turn, name = Turn.NUMBER, _number(x)
            return self._given(id(x), turn, "constant", name, aval)
        if not is_wide(aval):
            return Widths()  # and not from 16 bits: a number has no dtype to keep
        # What JAX's own functions compute with is nobody's mistake either.
        is_bare = at.place.shared or getattr(aval, "weak_type", False)
        turn = Turn.BARE_NUMBER if is_bare else Turn.NUMBER
        at_line, name = (at.place.module, at.place.where), _number(x.val)
        cause = self._cause(at_line, turn, "constant", name, aval)
        cause.written_at = at.place
        return Widths(frozenset({cause}))

    def _made(
        self, place: Place, turn: Turn, kind: str, name: str, aval: Any, meets: int = 64
    ) -> Cause:
        """Returns a cause that an equation is, which meets something there."""
        cause = self._cause((place.module, place.where), turn, kind, name, aval)
        cause.meet(place, meets)
        return cause

    def _given(self, at: Any, turn: Turn, kind: str, name: str, aval: Any) -> Widths:
        """Returns the facts of a value that is a cause if it is wide."""
        if not is_wide(aval):
            return Widths(from_16bit=is_narrow(aval))
        return Widths(frozenset({self._cause(at, turn, kind, name, aval)}))

    def _cause(self, at: Any, turn: Turn, kind: str, name: str, aval: Any) -> Cause:
        """Returns the cause of this name, new or known. ``at`` tells it from others."""
        return self.causes.setdefault(
            (kind, name, turn, at), Cause(turn, kind, name, str(aval.dtype))
        )

    # What equations do

    def _enter(self, eqn: Equation, ins: list[Widths], at: At) -> list[Widths]:
        """Goes into the jaxprs of an equation."""
        if iteration_count(eqn) is None:
            self._note("a while loop, counted as one iteration", at.place)
        return self.walk.around(eqn, ins, at)

    def _operation(self, eqn: Equation, ins: list[Widths], at: At) -> list[Widths]:
        """Follows one equation, whose results undo causes or ask for one."""
        place, bodies = at.place, [*_jaxpr.sub_jaxprs(eqn)]
        if not bodies or may_multiply(eqn):
            value = self._computed(eqn, ins, place)
        else:  # of which nothing else is known
            value = _either(ins)
            for jaxpr in bodies:
                body, known = _jaxpr.open_jaxpr(jaxpr), _jaxpr.closed_consts(jaxpr)
                inputs = [value] * len([*body.constvars[len(known) :], *body.invars])
                outs = self.walk.through(jaxpr, inputs, (), place.inside(eqn, jaxpr))
                value = _either([value, *outs])
        return [self._output(eqn, var.aval, value, place) for var in eqn.outvars]

    def _output(self, eqn: Equation, aval: Any, value: Widths, place: Place) -> Widths:
        """Returns the facts of a result: no float32 value is without a cause."""
        if not is_wide(aval):
            return Widths(from_16bit=is_narrow(aval))
        if value.causes:
            return value
        name = f"{aval.dtype} of unknown origin at {place.line or eqn.primitive.name}"
        cause = self._made(place, Turn.MADE_ARRAY, "unknown", name, aval)
        return value._replace(causes=frozenset({cause}))

    def _computed(self, eqn: Equation, ins: list[Widths], place: Place) -> Widths:
        """Returns the facts of what one equation without jaxprs computes."""
        if may_multiply(eqn):
            self._note(f"`{eqn.primitive.name}`, its products not counted", place)
        if not eqn.outvars:  # printed, and nothing more
            return Widths()
        floats = [
            (atom, x)
            for atom, x in zip(eqn.invars, ins, strict=True)
            if is_wide(atom.aval) or is_narrow(atom.aval)
        ]
        causes, widened = Causes(), None
        if _wide(floats) or any(is_wide(var.aval) for var in eqn.outvars):
            causes = self._causes(eqn, floats, place)
            widened = _widened_at(eqn, floats, causes, place)
        if flops := place.times and flops_of(eqn, back=place.backward) * place.times:
            self._product(eqn, causes, flops, place)
        return Widths(causes, any(x.from_16bit for _, x in floats), widened)

    def _causes(self, eqn: Equation, floats: list[Operand], place: Place) -> Causes:
        """Returns the causes of what ``eqn`` computes from or to float32.

        What makes float32 of 16 bits, of numbers or of nothing is a cause itself. All
        else has the causes of its float32 operands, except where one of them was
        widened in the same line because of what it meets here: that is the cause then.
        """
        for i, (_, x) in enumerate(floats):
            # What comes with some operands and not with others meets those.
            others = floats[:i] + floats[i + 1 :]
            for cause in x.causes - _union(others) if others else ():
                cause.meet(place, min(other.bits for _, other in others))
        wide, out = _wide(floats), eqn.outvars[0].aval
        hands_on = is_view(eqn) or _jaxpr.is_cast(eqn)  # a number
        if not _arrays(wide) and not (wide and hands_on and out.size == 1):
            return frozenset({self._made_by(eqn, floats, place)})
        if _widens(eqn):  # to float64, from what may be narrowed again
            return _union(wide) | {self._made_by(eqn, floats, place)}

        widened = [x for _, x in wide if place.is_in_line_of(x.widened_at)]
        others = [one for one in wide if not place.is_in_line_of(one[1].widened_at)]
        causes = _joint(others or wide)
        if not (widened and others and is_wide(out)):
            return causes
        if any(cause.turn <= Turn.CAST for cause in causes):
            return causes
        wideners = [c for c in causes if c.turn is not Turn.BARE_NUMBER]
        if not wideners:  # a number without a dtype widens nothing
            return _either(widened).causes
        if not all(place.is_in_call_of(x.widened_at) for x in widened):
            return _joint(wide)  # widened a step earlier, on purpose
        for cause in wideners:  # charged like an argument
            cause.turn = Turn.ARGUMENT
            cause.meet(place, min(x.bits for x in widened))
        return causes

    def _made_by(self, eqn: Equation, floats: list[Operand], place: Place) -> Cause:
        """Returns the cause that ``eqn`` is: a cast, or what it makes in float32."""
        operation, out, wide = eqn.primitive.name, eqn.outvars[0].aval, _wide(floats)
        if _widens(eqn) or (floats and not wide):
            name = "cast" if _jaxpr.is_cast(eqn) else operation
            return self._made(place, Turn.CAST, "cast", name, out, 32 if wide else 16)
        name = f"{out.dtype}{[*out.shape]} made at {place.line or operation}"
        if wide:
            name += f" of {', '.join(_number(atom.val) for atom, _ in wide)}"
        turn = Turn.MADE_ARRAY if out.size > 1 else Turn.NUMBER
        if wide and place.shared:  # spread by one of JAX's own functions
            turn = Turn.BARE_NUMBER
        return self._made(place, turn, "constant", name, out)

    def _product(
        self, eqn: Equation, causes: Causes, flops: float, place: Place
    ) -> None:
        """Adds a matrix product or convolution to the totals and to its causes.

        A backward product has the causes of the forward products in its place.
        """
        dtypes = [atom.aval.dtype for atom in eqn.invars[:2]]
        dtype = str(max(dtypes, key=lambda d: d.itemsize))
        self.flops[dtype] = self.flops.get(dtype, 0.0) + flops
        is_default = has_default_precision(eqn, self.default_precision)
        if is_of_float32(eqn) and is_default:
            self.default_precision_flops += flops
        step = place.planned
        key = (_scopes.without_repeats(place.scopes), place.user, eqn.primitive.name)
        if not any(map(is_wide, dtypes)):
            if is_wide(eqn.outvars[0].aval) and not place.backward:
                self.forward.setdefault(key, causes)
            is_float8 = all(x.itemsize == 1 for x in dtypes)
            if _scopes.FLOAT8 in place.scopes and not is_float8:
                reason = (step and step.why) or _written_in({*map(str, dtypes)})
                _count(self.kept_16bit, eqn, reason, flops, place)
            return
        if _scopes.AUTOCAST in place.scopes:
            reason, found = _why_kept(eqn, place, step), _dtypes_of(eqn)
            # Autocast leaves float64 as it is. It is a leak where no user asks for it.
            if dtype != "float64" or reason != _written_in(found):
                return _count(self.kept, eqn, reason, flops, place)
        if place.backward:
            causes = self.forward.get(key) or causes
        else:
            self.forward[key] = self.forward.get(key, frozenset()) | causes
        # What is float32 makes nothing float64.
        bits = _bits_of(dtype)
        causes = frozenset(x for x in causes if x.bits == bits) or causes
        first = min((cause.turn for cause in causes), default=None)
        for cause in causes:
            if cause.turn == first:
                cause.meet(place, cause.bits)
                cause.flops += flops

    def _note(self, text: str, place: Place) -> None:
        """Remembers what could not be counted exactly."""
        self.notes[f"{place.line or 'somewhere'}: {text}"] = None


# What autocast has left


def _why_kept(eqn: Equation, place: Place, step: Step | None) -> str:
    """Returns why autocast did not take a product in 16 bits.

    Args:
        eqn: The product.
        place: Where it is.
        step: What was planned for it, None where JAX has written it behind autocast.
    """
    if step is not None and isinstance(step.by, str):
        return f"guard: {step.by}"
    if step is not None and step.kind == "keep" and step.why:
        return step.why
    if not has_default_precision(eqn):
        return "its `precision`"
    if place.opaque:
        return f"inside `{place.opaque}`"
    if (dtypes := _dtypes_of(eqn)) != ["float32"]:
        return _written_in(dtypes)
    if _jaxpr.is_differentiated(eqn):
        return "derivative of an operation that stayed float32"
    return "where autocast does not see it"


def _written_in(dtypes: Any) -> str:
    return f"written in {' and '.join(sorted(dtypes))}"


def _dtypes_of(eqn: Equation) -> list[str]:
    """Returns the floating and complex dtypes of ``eqn``, the widest as the last."""
    dtypes = {x.aval.dtype for x in (*eqn.invars, *eqn.outvars) if _jaxpr.is_inexact(x)}
    return [str(x) for x in sorted(dtypes, key=lambda x: (x.itemsize, str(x)))]


def _count(
    rows: dict[Any, Kept], eqn: Equation, reason: str, flops: float, place: Place
) -> None:
    """Adds a product to those that autocast left as they are for one reason."""
    name = eqn.primitive.name
    key = (name, reason, place.module, place.where)
    empty = Kept(name, reason, 0, 0.0, *key[2:], dtype=_dtypes_of(eqn)[-1])
    row = rows.get(key, empty)
    rows[key] = dataclasses.replace(
        row, count=row.count + place.times, flops=row.flops + flops
    )


def _sorted(rows: dict[Any, Kept]) -> tuple[Kept, ...]:
    return tuple(sorted(rows.values(), key=lambda k: -k.flops))


# Causes and operands


def _wide(floats: list[Operand]) -> list[Operand]:
    return [one for one in floats if is_wide(one[0].aval)]


def _arrays(floats: list[Operand]) -> list[Operand]:
    """Returns those that are given or computed, and no numbers in the code."""
    return [one for one in floats if not isinstance(one[0], _jaxpr.Literal)]


def _either(values: Sequence[Widths]) -> Widths:
    """Returns the facts of a value that is, or is made of, some of these."""
    sets = {x.causes for x in values}
    # A set with the causes of hundreds of arguments is best shared.
    causes = sets.pop() if len(sets) == 1 else frozenset().union(*sets)
    return Widths(causes, any(x.from_16bit for x in values))


def _union(operands: list[Operand]) -> Causes:
    return _either([x for _, x in operands]).causes


def _joint(operands: list[Operand]) -> Causes:
    """Returns the causes of operands, of numbers only where there is nothing else.

    A number that meets an array, or one without a dtype that meets one with, leaves
    its dtype as it was. So does one in the line of an operation on other values.
    """
    causes = _union(_arrays(operands) or operands)
    last = max(min((cause.turn for cause in causes), default=0), Turn.MADE_ARRAY)
    found = frozenset(cause for cause in causes if cause.turn <= last)
    return causes if len(found) == len(causes) else found  # shared, as above


def _widened_at(
    eqn: Equation, floats: list[Operand], causes: Causes, place: Place
) -> Place | None:
    """Returns where the result was widened, if nothing else has happened since."""
    wide = _wide(floats)
    if _jaxpr.is_cast(eqn) and (_widens(eqn) or (floats and not wide)):
        return place
    if is_view(eqn) and len(floats) == 1:
        return floats[0][1].widened_at
    arrays = [x for _, x in _arrays(wide)]
    if arrays and all(place.is_in_call_of(x.widened_at) for x in arrays):
        # Still inside the call that widened them, if no other cause was found.
        return place if causes == _joint(wide) else None
    return None


def _widens(eqn: Equation) -> bool:
    """Whether ``eqn`` casts float32 to float64."""
    if not _jaxpr.is_cast(eqn):
        return False
    old, new = eqn.invars[0].aval, eqn.outvars[0].aval
    return is_wide(old) and is_wide(new) and _bits_of(old.dtype) < _bits_of(new.dtype)


def _number(value: Any) -> str:
    return f"{jax.typeof(value).dtype}({np.asarray(value).item():g})"


def _bits_of(dtype: Any) -> int:
    """Returns the bits of a dtype, or of each part of a complex one."""
    dtype = np.dtype(dtype)
    return 8 * dtype.itemsize // (2 if dtype.kind == "c" else 1)
