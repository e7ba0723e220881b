"""What happens over the trips of a loop: errors that grow, and numbers that do not."""

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import _jaxpr
from ._jaxpr import Equation, is_inexact
from ._op_lists import BOUNDED, FACTORS, LINEAR, ONE_MINUS_SQUARE, VIEWS
from ._scopes import Scopes, inside

# Equations that hold one jaxpr and run it once.
_CALLS = frozenset({"jit", "call", "remat", "custom_jvp"})
# So many times, and no more, a trip may multiply by what was rounded.
_OFTEN = 4
# Of what a value is computed, as far as a trip tells: for each carried value (its place
# among the inputs of the loop; None for what is not carried) the inputs that have
# multiplied it on the way.
Trail = dict[int | None, frozenset[int]]


def compounded(
    loop: Equation, is_product: Callable[[Equation, Scopes], bool], scopes: Scopes
) -> frozenset[int]:
    """Returns the inputs of a scan by which each trip multiplies what it carries.

    A decay of 0.99 for one: rounded once it is 0.2% off, and its 256th power 45%. What
    a product takes on the way around is rounded in each trip anyway, and its errors
    even out in sums. Not so a factor that many numbers share, such as the decay of a
    whole matrix: it puts all of them off alike. And one trip alone may multiply many
    times by the same, if it has a loop written out.

    Args:
        loop: The scan.
        is_product: Tells whether an equation, in its scopes, is a product in 16 bits.
        scopes: Named scopes around its body.
    """

    layout = _jaxpr.call_layout(loop)
    (body,) = layout.bodies
    sizes = [var.aval.size for var in _jaxpr.in_vars(body.jaxpr)]

    def through(
        jaxpr: Any, ins: Sequence[Trail], scopes: Scopes, shared: bool
    ) -> list[Trail]:
        def apply(eqn: Equation, ins: list[Trail]) -> list[Trail]:
            here = scopes + _jaxpr.scope_names(eqn)
            if is_product(eqn, here):
                return [_sum_of(ins) if shared else {} for _ in eqn.outvars]
            if _jaxpr.call_kind(eqn) in {"scan", *_CALLS}:
                return around(eqn, ins, inside(eqn, here), shared)
            if not shared:
                return [_joined(eqn, ins)] * len(eqn.outvars)
            return [_joined(eqn, ins, sizes, x.aval.size) for x in eqn.outvars]

        return _jaxpr.interpret(
            jaxpr, ins, apply, const=lambda _: {}, literal=lambda _: {}
        )

    def around(
        eqn: Equation, ins: list[Trail], scopes: Scopes, shared: bool
    ) -> list[Trail]:
        """Goes through a call, or through a scan until its trips find no more."""
        layout = _jaxpr.call_layout(eqn)
        (body,) = layout.bodies
        while True:
            outs = through(body.jaxpr, ins, scopes, shared)
            before, ins = ins, list(ins)
            for i, out in zip(layout.fixed_in, outs, strict=False):
                ins[i] = _sum_of([ins[i], out])
            if ins == before:
                return outs

    carried = layout.fixed_in
    given: list[Trail] = [
        {i: frozenset()} if i in carried else {None: frozenset([i])}
        for i in range(len(loop.invars))
    ]
    found = _used_often(body.jaxpr)
    for shared in (False, True):
        outs = through(body.jaxpr, given, scopes, shared)
        found |= _on_the_way_back(carried, outs)
    return found


def _on_the_way_back(carried: range, outs: Sequence[Trail]) -> frozenset[int]:
    """Returns what multiplies a carried value on a way that leads back to it."""
    steps = {
        (start, end): factors
        for end, out in zip(carried, outs, strict=False)
        for start, factors in out.items()
        if start is not None
    }
    reached = {i: {i} for i in carried}
    for _ in carried:
        for start, end in steps:
            reached[start] |= reached[end]
    back = [fs for (start, end), fs in steps.items() if start in reached[end]]
    return frozenset().union(*back)


def _used_often(jaxpr: Any) -> frozenset[int]:
    """Returns the inputs of a jaxpr by which many of its equations multiply."""
    times: collections.Counter[int] = collections.Counter()

    def through(jaxpr: Any, ins: Sequence[frozenset[int]]) -> list[frozenset[int]]:
        def apply(eqn: Equation, ins: list[frozenset[int]]) -> list[frozenset[int]]:
            if _jaxpr.call_kind(eqn) in {"scan", *_CALLS}:
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
    through(jaxpr, [frozenset([i]) for i in range(len(_jaxpr.in_vars(jaxpr)))])
    return frozenset(i for i, n in times.items() if n > _OFTEN)


def _sum_of(terms: Sequence[Trail]) -> Trail:
    total: Trail = {}
    for term in terms:
        for start, factors in term.items():
            total[start] = total.get(start, frozenset()) | factors
    return total


def _joined(
    eqn: Equation,
    ins: Sequence[Trail],
    sizes: Sequence[int] = (),
    size: float = math.inf,
) -> Trail:
    """Returns of what the result of an operation is computed.

    Args:
        eqn: The operation.
        ins: Of what its operands are computed.
        sizes: If given, those of the inputs of the loop, of which only those that are
            smaller count as factors.
        size: That of the result.
    """
    if eqn.primitive.name in LINEAR:
        return _sum_of(ins)
    factors = [x.get(None, frozenset()) for x in ins]
    terms = []
    for i, operand in enumerate(ins):
        # Who knows what is not a product does: what is in one operand may multiply too.
        own = i if eqn.primitive.name in FACTORS else None
        others = [found for j, found in enumerate(factors) if j != own]
        new = frozenset().union(*others)
        counted = frozenset(j for j in new if sizes[j] < size) if sizes else new
        term = {key: found | counted for key, found in operand.items()}
        if None in operand:
            term[None] = operand[None] | new
        terms.append(term)
    return _sum_of(terms)


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
        if _jaxpr.call_kind(eqn) in _CALLS:
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
