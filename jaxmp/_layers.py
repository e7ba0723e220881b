"""Scans over layers, and the residual streams that they carry.

A layer multiplies what is carried by weights of its own. Steps through time look much
alike. They share their weights, go through what was computed, or are scaled by a small
step: what each adds is small, and 16 bits would lose it in the same way every time.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import _jaxpr
from ._jaxpr import Equation
from ._op_lists import (
    ADDS_UP,
    ERRORS,
    FACTORS,
    FOLDS,
    JOINS,
    PICKS,
    SCALES,
    SHIFTS,
    SUMS_WINDOWS,
    TANHS,
    TOTALS,
    VIEWS,
)
from ._scopes import IsProduct, Scopes, inside
from ._sizes import size_of
from ._trips import RUN_ONCE

# Networks are no deeper. What adds to a number more often may be a loop over time.
_MOST = 128
# Nor do layers scale what they add by less, and not by a number that is given.
_LEAST, _GIVEN = 2**-5, 2**-20
_ADDS = JOINS | ADDS_UP | VIEWS
# They return as small a number as they are given.
_KEEPS = PICKS | TANHS | ERRORS | TOTALS | SUMS_WINDOWS


class _Made(NamedTuple):
    """Of what a value in a trip is made, and how."""

    added: frozenset[int] = frozenset()  # carried values, by additions alone
    others: frozenset[int] = frozenset()  # carried values, in other ways; no products
    carried: bool = False  # of something carried, also by products
    slices: frozenset[int] = frozenset()  # of what the scan goes through; no products
    sliced: bool = False  # of what the scan goes through, also by products
    shared: bool = False  # of arrays that all trips share; no products
    weights: frozenset[int] = frozenset()  # slices by which products multiplied it
    number: float | None = None  # which one number it is, NaN if that was given
    scale: float = 1.0  # by which numbers something carried was multiplied
    timed: bool = False  # by a step through time


def residual_streams(
    loop: Equation, is_product: IsProduct, scopes: Scopes
) -> dict[int, frozenset[int]]:
    """Returns to what a scan over layers does nothing but add.

    Args:
        loop: A ``scan`` or a ``while``.
        is_product: Tells whether an equation, in its scopes, is a product in 16 bits.
        scopes: Named scopes around its body.

    Returns:
        Its places among the outputs of ``loop``. For each of them, which of its inputs
        the weights are that it goes through, if they are weights: if they were given.
    """
    length = loop.params.get("length")
    if not isinstance(length, int) or length > _MOST:
        return {}
    layout = _jaxpr.call_layout(loop)

    def through(jaxpr: Any, ins: Sequence[_Made], scopes: Scopes) -> list[_Made]:
        def apply(eqn: Equation, ins: list[_Made]) -> list[_Made]:
            here = scopes + _jaxpr.scope_names(eqn)
            if _jaxpr.call_kind(eqn) in RUN_ONCE:
                (body,) = _jaxpr.call_layout(eqn).bodies
                return through(body.jaxpr, ins, inside(eqn, here))
            if is_product(eqn, here):
                made = _multiplied(ins)
            else:
                made = _computed(eqn, ins, least)
            return [made] * len(eqn.outvars)

        return _jaxpr.interpret(
            jaxpr,
            ins,
            apply,
            const=lambda x: _shared(np.size(x)),
            literal=lambda x: _Made(number=float(abs(x.val))),
        )

    def given(i: int, var: Any) -> _Made:
        size = size_of(var.aval)
        if i in layout.fixed_in:
            out = layout.fixed_out[i - layout.fixed_in.start]
            return _Made(added=frozenset([out]), carried=True)
        if i < layout.fixed_in.start:
            return _shared(size)
        number = math.nan if size == 1 else None
        return _Made(slices=frozenset([i]), sliced=True, number=number)

    (body,) = layout.bodies
    inner = _jaxpr.in_vars(body.jaxpr)
    sizes = [size_of(loop.outvars[i].aval) for i in layout.fixed_out]
    least = min((size for size in sizes if size != 1), default=1)
    ins = [given(i, var) for i, var in zip(body.operands, inner, strict=True)]
    outs = through(body.jaxpr, ins, scopes)
    return {
        i: out.weights
        for i, out in enumerate(outs)
        if i in layout.fixed_out
        and out.added == {i}
        and out.weights
        and not (out.others or out.timed)
    }


def _shared(size: float) -> _Made:
    """Returns of what an array is made that a scan is given for all of its trips."""
    return _Made(number=math.nan) if size == 1 else _Made(shared=True)


def _multiplied(ins: Sequence[_Made]) -> _Made:
    """Returns of what a product is made: by weights, or by what all trips share."""
    nothing: frozenset[int] = frozenset()
    made = _put_together(ins)._replace(
        added=nothing, others=nothing, slices=nothing, shared=False
    )
    if not made.carried:
        return made
    factors = [x for x in ins if not x.carried]
    shares = any(x.shared or not x.sliced for x in factors)
    return made._replace(
        weights=made.weights.union(*(x.slices for x in factors)),
        scale=math.prod(x.scale for x in ins),
        timed=made.timed or shares,
    )


def _computed(eqn: Equation, ins: Sequence[_Made], least: float) -> _Made:
    """Returns of what anything else is made."""
    made, name = _put_together(ins), eqn.primitive.name
    if not made.carried:
        return made._replace(number=_number(eqn, ins))
    made = made._replace(scale=_scale(eqn, ins, least))
    if name in _ADDS or _jaxpr.is_cast(eqn):
        streams = any(x.added and not x.others for x in ins)
        steps = any(x.carried and not x.added and x.scale < _LEAST for x in ins)
        return made._replace(timed=made.timed or (streams and steps))
    return made._replace(others=made.added | made.others)


def _number(eqn: Equation, ins: Sequence[_Made]) -> float | None:
    """Returns which number ``eqn`` computes, of nothing carried, None for an array."""
    values = [x.number for x in ins if x.number is not None]
    if len(values) < len(ins) or not ins:
        return math.nan if size_of(eqn.outvars[0].aval) == 1 else None
    name = eqn.primitive.name
    if len(ins) == 1 and (name in VIEWS or _jaxpr.is_cast(eqn)):
        return values[0]
    with np.errstate(all="ignore"):
        return float(FOLDS[name](*values)) if name in FOLDS else math.nan


def _scale(eqn: Equation, ins: Sequence[_Made], least: float) -> float:
    """Returns by which numbers something carried was multiplied to compute ``eqn``.

    Of what is no longer in proportion to it, such as an exponential, that is one.

    Args:
        eqn: The equation.
        ins: What it is given.
        least: Of how many numbers arrays are carried, at the least.
    """
    name = eqn.primitive.name
    carried = [x.scale for x in ins if x.carried]
    if name in SCALES:
        value, factor = ins
        if name not in FACTORS and factor.carried:
            return _factor(value) / (factor.scale or 1)
        if name not in FACTORS and factor.number:
            factor = factor._replace(number=1 / factor.number)
        if size_of(eqn.outvars[0].aval) < least:  # a mean, which is of fewer numbers
            return max(carried)
        return _factor(value) * _factor(factor)
    if name in SHIFTS | ADDS_UP:  # a bias is no step
        return max(x.scale for x in ins)
    return max(carried) if name in _KEEPS or _jaxpr.is_cast(eqn) else 1.0


def _factor(x: _Made) -> float:
    """Returns by which number a value multiplies, as far as that is known."""
    if x.carried or not x.number:
        return x.scale
    return _GIVEN if math.isnan(x.number) else abs(x.number)


def _put_together(ins: Sequence[_Made]) -> _Made:
    nothing: frozenset[int] = frozenset()
    return _Made(
        added=nothing.union(*(x.added for x in ins)),
        others=nothing.union(*(x.others for x in ins)),
        carried=any(x.carried for x in ins),
        slices=nothing.union(*(x.slices for x in ins)),
        sliced=any(x.sliced for x in ins),
        shared=any(x.shared for x in ins),
        weights=nothing.union(*(x.weights for x in ins)),
        timed=any(x.timed for x in ins),
    )
