"""What happens over the trips of a loop: errors that grow, and numbers that do not."""

import collections
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import _jaxpr
from ._jaxpr import Equation, is_inexact
from ._op_lists import BOUNDED, FACTORS, LINEAR, ONE_MINUS_SQUARE, TOTALS, VIEWS
from ._products import is_outer_product
from ._scopes import IsProduct, Scopes, inside
from ._sizes import size_of

# Equations that hold one jaxpr and run it once.
RUN_ONCE = frozenset({"jit", "call", "remat", "custom_jvp"})
# So many times, and no more, a number may be multiplied by what was rounded.
OFTEN = 4
# A variable, and the open jaxpr that has it.
Factor = tuple[Any, Any]
# For each carried value of which a value is computed (its place among the inputs of the
# loop), what has multiplied it on the way.
Trail = dict[int, frozenset[Factor]]


class _Path(NamedTuple):
    """What is known of a value in a trip: its trail, and of how many numbers it is."""

    trail: Trail
    size: float


def factors(loop: Equation, is_product: IsProduct, scopes: Scopes) -> frozenset[Factor]:
    """Returns by what each trip of a loop multiplies what it carries.

    A decay of 0.99 for one: rounded once it is 0.2% off, and its 256th power 45%. What
    a product or a sum takes on the way around is off in each trip anyway, and there
    errors even out. Not so those of a factor that many numbers share, such as the decay
    of a whole matrix: it puts all of them off alike. And one trip alone may multiply
    many times by the same, if it has a loop written out.

    Args:
        loop: A ``scan`` or a ``while``.
        is_product: Tells whether an equation, in its scopes, is a product in 16 bits.
        scopes: Named scopes around its body.
    """
    (body,) = _bodies(loop)
    found = _used_often(body.jaxpr)
    for shared in (False, True):
        steps = _steps(loop, is_product, scopes, shared)
        found = found.union(*_on_the_way_back(steps).values())
    return found


def handed_on(loop: Equation, is_product: IsProduct, scopes: Scopes) -> frozenset[int]:
    """Returns what a loop hands on from trip to trip by other ways than a product.

    Errors may grow there: a running sum, the cell of an LSTM, a residual stream.

    Args:
        loop: A ``scan`` or a ``while``.
        is_product: Tells whether an equation, in its scopes, is a product in 16 bits.
        scopes: Named scopes around its body.

    Returns:
        Its places among the outputs of ``loop``.
    """
    layout = _jaxpr.call_layout(loop)
    back = _on_the_way_back(_steps(loop, is_product, scopes, shared=False))
    return frozenset(
        layout.fixed_out[start - layout.fixed_in.start] for start, _ in back
    )


def _steps(
    loop: Equation, is_product: IsProduct, scopes: Scopes, shared: bool
) -> dict[tuple[int, int], frozenset[Factor]]:
    """Returns what is made of what in a trip, and what multiplies it on the way.

    Args:
        loop: A ``scan`` or a ``while``.
        is_product: Tells whether an equation, in its scopes, is a product in 16 bits.
        scopes: Named scopes around its body.
        shared: Whether only factors that many numbers share count; then ways through
            products and sums count too.

    Returns:
        By the places, among the inputs of ``loop``, of a carried value and of one of
        the next trip that is made of it.
    """

    def through(jaxpr: Any, ins: Sequence[_Path], scopes: Scopes) -> list[_Path]:
        owner = _jaxpr.open_jaxpr(jaxpr)

        def apply(eqn: Equation, ins: list[_Path]) -> list[_Path]:
            here = scopes + _jaxpr.scope_names(eqn)
            multiplies = is_product(eqn, here)
            if not shared and (multiplies or eqn.primitive.name in TOTALS):
                return [_Path({}, size_of(var.aval)) for var in eqn.outvars]
            if _jaxpr.call_kind(eqn):
                return around(eqn, ins, inside(eqn, here))
            trails = [path.trail for path in ins]
            if eqn.primitive.name in FACTORS or is_outer_product(eqn):
                trails = _multiplied(eqn, ins, owner, shared)
            # A product of a large batch has numbers of its own, whatever it is made of.
            sizes = [] if multiplies else [path.size for path in ins]
            size, trail = max(sizes, default=math.inf), _sum_of(trails)
            return [_Path(trail, min(size, size_of(var.aval))) for var in eqn.outvars]

        return _jaxpr.interpret(
            jaxpr,
            ins,
            apply,
            const=lambda x: _Path({}, np.size(x)),
            literal=lambda x: _Path({}, size_of(x.aval)),
        )

    def around(eqn: Equation, ins: list[_Path], scopes: Scopes) -> list[_Path]:
        """Goes through what ``eqn`` holds, a loop until its trips find no more."""
        carried = _jaxpr.call_layout(eqn).fixed_in
        while True:
            by_body = [
                through(body.jaxpr, [ins[i] for i in body.operands], scopes)
                for body in _bodies(eqn)
            ]
            outs = [
                _Path(_sum_of([x.trail for x in paths]), paths[0].size)
                for paths in zip(*by_body, strict=True)
            ]
            before, ins = ins, list(ins)
            for i, out in zip(carried, outs, strict=False):
                trail = _sum_of([ins[i].trail, out.trail])
                ins[i] = ins[i]._replace(trail=trail)
            if ins == before:
                return outs

    carried = _jaxpr.call_layout(loop).fixed_in
    (body,) = _bodies(loop)
    given = [
        _Path({i: frozenset()} if i in carried else {}, size_of(var.aval))
        for i, var in zip(body.operands, _jaxpr.in_vars(body.jaxpr), strict=True)
    ]
    outs = through(body.jaxpr, given, scopes)
    return {
        (start, end): found
        for end, out in zip(carried, outs, strict=False)
        for start, found in out.trail.items()
    }


def _bodies(eqn: Equation) -> Sequence[_jaxpr.Body]:
    """Returns what ``eqn`` holds, but for the test of a ``while``."""
    bodies = _jaxpr.call_layout(eqn).bodies
    return bodies[1:] if _jaxpr.call_kind(eqn) == "while" else bodies


def _multiplied(
    eqn: Equation, ins: Sequence[_Path], owner: Any, shared: bool
) -> list[Trail]:
    """Returns the trails of what ``eqn`` multiplies, each with the other one in it.

    Of two that are made of what is carried none is a factor: they are float32 as that.

    Args:
        eqn: The equation.
        ins: What is known of its operands.
        owner: The open jaxpr that has it.
        shared: Whether factors are only those that many numbers share.
    """
    trails = []
    size = size_of(eqn.outvars[0].aval)
    for operand, other, var in zip(ins, ins[::-1], eqn.invars[::-1], strict=True):
        counts = other.size < size if shared else not other.trail
        counts &= not isinstance(var, _jaxpr.Literal)
        new = frozenset([(owner, var)] if counts else [])
        trails.append({start: found | new for start, found in operand.trail.items()})
    return trails


def _on_the_way_back(
    steps: dict[tuple[int, int], frozenset[Factor]],
) -> dict[tuple[int, int], frozenset[Factor]]:
    """Returns those of the steps that are on a way that leads back to its start."""
    starts = {start for start, _ in steps}
    reached = {i: {i} for i in starts}
    for _ in starts:
        for start, end in steps:
            reached[start] |= reached.get(end, set())
    return {
        (start, end): found
        for (start, end), found in steps.items()
        if start in reached.get(end, ())
    }


def _used_often(jaxpr: Any) -> frozenset[Factor]:
    """Returns the inputs of a jaxpr by which many of its equations multiply."""
    times: collections.Counter[int] = collections.Counter()

    def through(jaxpr: Any, ins: Sequence[frozenset[int]]) -> list[frozenset[int]]:
        def apply(eqn: Equation, ins: list[frozenset[int]]) -> list[frozenset[int]]:
            if _jaxpr.call_kind(eqn) in {"scan", *RUN_ONCE}:
                (body,) = _jaxpr.call_layout(eqn).bodies
                return through(body.jaxpr, ins)
            if eqn.primitive.name in FACTORS:
                times.update(nothing.union(*ins))
            views = eqn.primitive.name in VIEWS or _jaxpr.is_cast(eqn)
            return [ins[0] if views else nothing] * len(eqn.outvars)

        return _jaxpr.interpret(
            jaxpr, ins, apply, const=lambda _: nothing, literal=lambda _: nothing
        )

    nothing: frozenset[int] = frozenset()
    given = _jaxpr.in_vars(jaxpr)
    through(jaxpr, [frozenset([i]) for i in range(len(given))])
    owner = _jaxpr.open_jaxpr(jaxpr)
    return frozenset((owner, given[i]) for i, n in times.items() if n > OFTEN)


def _sum_of(trails: Sequence[Trail]) -> Trail:
    total: Trail = {}
    for trail in trails:
        for start, found in trail.items():
            total[start] = total.get(start, frozenset()) | found
    return total


def bounds(jaxpr: Any) -> list[float]:
    """Returns how large the outputs of a jaxpr may be, whatever it is given.

    Infinite for those of which that is not known.
    """

    def bound(eqn: Equation, ins: list[float]) -> float:
        name = eqn.primitive.name
        found = [x for x, var in zip(ins, eqn.invars, strict=True) if is_inexact(var)]
        if name in BOUNDED:
            return 1.0
        if name in LINEAR or _jaxpr.is_cast(eqn):
            return sum(found)
        if name in ONE_MINUS_SQUARE:
            return 1 + found[0] ** 2
        return math.prod(found) if name in FACTORS else math.inf

    def apply(eqn: Equation, ins: list[float]) -> list[float]:
        if _jaxpr.call_kind(eqn) in RUN_ONCE:
            (body,) = _jaxpr.call_layout(eqn).bodies
            return through(body.jaxpr, ins)
        return [bound(eqn, ins)] * len(eqn.outvars)

    def through(jaxpr: Any, ins: Sequence[float]) -> list[float]:
        return _jaxpr.interpret(
            jaxpr,
            ins,
            apply,
            const=lambda _: math.inf,
            literal=lambda x: float(np.max(np.abs(x.val))),
        )

    return through(jaxpr, [math.inf] * len(_jaxpr.in_vars(jaxpr)))
