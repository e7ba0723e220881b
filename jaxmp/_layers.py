"""Scans over layers, and the residual streams that they carry.

A layer multiplies what is carried by weights of its own. Steps through time look much
alike. They share their weights, go through what was computed, or are scaled by a small
step: what each adds is small, and 16 bits would lose it in the same way every time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import _jaxpr
from ._jaxpr import Equation, Literal, is_inexact
from ._op_lists import ADDS_UP, FACTORS, JOINS, SCALES, VIEWS
from ._scopes import IsProduct, Scopes, inside
from ._sizes import size_of
from ._trips import RUN_ONCE

# Networks are no deeper. What adds to a number more often may be a loop over time.
_MOST = 128
# Nor do layers scale what they add by less, if by a number in the code.
_LEAST = 2**-5
_ADDS = JOINS | ADDS_UP | VIEWS


class _Made(NamedTuple):
    """Of what a value in a trip is made, and how."""

    added: frozenset[int] = frozenset()  # carried values, by additions alone
    others: frozenset[int] = frozenset()  # carried values, in other ways; no products
    carried: bool = False  # of something carried, also by products
    slices: frozenset[int] = frozenset()  # of what the scan goes through, by any way
    weights: frozenset[int] = frozenset()  # slices by which products multiplied it
    number: bool = False  # one number that the loop is given, or many times the same
    # How many numbers were multiplied by such a number or by a small one, at the least,
    # of all that is carried and that it is made of.
    scaled: float = 0
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
    (body,) = layout.bodies
    inner = _jaxpr.in_vars(body.jaxpr)
    def through(jaxpr: Any, ins: Sequence[_Made], scopes: Scopes) -> list[_Made]:
        def apply(eqn: Equation, ins: list[_Made]) -> list[_Made]:
            here = scopes + _jaxpr.scope_names(eqn)
            if _jaxpr.call_kind(eqn) in RUN_ONCE:
                (body,) = _jaxpr.call_layout(eqn).bodies
                return through(body.jaxpr, ins, inside(eqn, here))
            if is_product(eqn, here):
                made = _multiplied(ins)
            else:
                made = _computed(eqn, ins)
            return [made] * len(eqn.outvars)

        return _jaxpr.interpret(
            jaxpr,
            ins,
            apply,
            const=lambda x: _Made(number=np.size(x) == 1),
            literal=lambda _: _Made(number=True),
        )

    def given(i: int, var: Any) -> _Made:
        if i in layout.fixed_in:
            out = layout.fixed_out[i - layout.fixed_in.start]
            return _Made(added=frozenset([out]), carried=True)
        slices = frozenset([i] if i >= layout.fixed_in.stop else [])
        return _Made(slices=slices, number=size_of(var.aval) == 1)

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


def _multiplied(ins: Sequence[_Made]) -> _Made:
    """Returns of what a product is made: by weights, or by what all trips share."""
    made = _put_together(ins)._replace(added=frozenset(), others=frozenset())
    if not made.carried:
        return made
    factors = [x for x in ins if not x.carried]
    weights = made.weights.union(*(x.slices for x in factors))
    shares = any(not x.slices for x in factors)
    return made._replace(weights=weights, timed=made.timed or shares)


def _computed(eqn: Equation, ins: Sequence[_Made]) -> _Made:
    """Returns of what anything else is made."""
    made, name = _put_together(ins), eqn.primitive.name
    size = size_of(eqn.outvars[0].aval)
    number = size == 1 or all(x.number for x in ins)
    made = made._replace(number=number and not made.carried)
    if name in _ADDS or _jaxpr.is_cast(eqn):
        streams = any(x.added and not x.others for x in ins)
        # Not a mean of what is carried, which is of fewer numbers.
        steps = any(x.scaled >= size and not x.added for x in ins)
        return made._replace(timed=made.timed or (streams and steps))
    if made.carried and name in SCALES:
        steps = (
            _is_small(atom, name) if isinstance(atom, Literal) else x.number
            for x, atom in zip(ins, eqn.invars, strict=True)
        )
        made = made._replace(scaled=size if any(steps) else made.scaled)
    return made._replace(others=made.added | made.others)


def _is_small(factor: Literal, name: str) -> bool:
    """Whether to multiply by ``factor``, or to divide by it, makes a value small."""
    if np.ndim(factor.val) or not is_inexact(factor) or not factor.val:
        return False
    size = abs(float(factor.val))
    return size < _LEAST if name in FACTORS else size > 1 / _LEAST


def _put_together(ins: Sequence[_Made]) -> _Made:
    nothing: frozenset[int] = frozenset()
    carried = [x for x in ins if x.carried]
    return _Made(
        added=nothing.union(*(x.added for x in ins)),
        others=nothing.union(*(x.others for x in ins)),
        carried=bool(carried),
        slices=nothing.union(*(x.slices for x in ins)),
        weights=nothing.union(*(x.weights for x in ins)),
        scaled=min((x.scaled for x in carried), default=0),
        timed=any(x.timed for x in ins),
    )
