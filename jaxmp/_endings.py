"""Loops that end at a tolerance, and stay float32.

Fixed points, iterative solvers, searches along a line and steps of adaptive size go on
until an error is small. In 16 bits it may never be: a loop that ends after 20 trips in
float32 then runs for ever, or takes steps a hundred times as small. Loops that end at a
count, or at a token, take their products in 16 bits like any other.
"""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from . import _jaxpr
from ._jaxpr import Equation, is_inexact
from ._op_lists import DIFFERENCES, EQUALITIES, ORDERS
from ._scopes import KEPT_TO_END, IsProduct, Scopes, in_region, inside

# What is known of a value: it is made of what a product returned, and no integer; so it
# is, with a difference since, such as an error; it tells if that is within a tolerance.
_COMPUTED, _DIFFERS, _ENDS = 1, 2, 4


def with_endings(
    eqns: Sequence[Equation], scopes: Scopes, is_product: IsProduct
) -> Sequence[Equation]:
    """Returns the equations, loops that end at a tolerance in a float32 region.

    Args:
        eqns: The equations of a jaxpr.
        scopes: Named scopes around it.
        is_product: Tells whether an equation, in its scopes, is a product in 16 bits.
    """

    def ends(eqn: Equation) -> bool:
        if _jaxpr.call_kind(eqn) != "while":
            return False
        around = inside(eqn, scopes + _jaxpr.scope_names(eqn))
        return _ends_at_tolerance(eqn, around, is_product)

    return [in_region(e, KEPT_TO_END) if ends(e) else e for e in eqns]


def _ends_at_tolerance(loop: Equation, scopes: Scopes, is_product: IsProduct) -> bool:
    """Tells whether what its products return decides when ``loop`` ends."""

    def through(
        jaxpr: Any, ins: Sequence[int], scopes: Scopes, settled: bool
    ) -> list[int]:
        def apply(eqn: Equation, ins: list[int]) -> list[int]:
            here = scopes + _jaxpr.scope_names(eqn)
            if _jaxpr.call_kind(eqn):
                return around(eqn, ins, inside(eqn, here), settled)
            if is_product(eqn, here):
                return [_COMPUTED] * len(eqn.outvars)
            known, name = _together(ins), eqn.primitive.name
            if known & _COMPUTED and name in DIFFERENCES:
                known |= _DIFFERS
            # With a tolerance, which may be relative; not of two scores.
            small = len({x & _DIFFERS for x in ins}) > 1 and name in ORDERS
            same = all(x & _COMPUTED for x in ins) and name in EQUALITIES
            if settled and (small or same):
                known |= _ENDS
            floats = _COMPUTED | _DIFFERS
            return [
                known & (floats if is_inexact(var) else _ENDS) for var in eqn.outvars
            ]

        return _jaxpr.interpret(
            jaxpr, ins, apply, const=lambda _: 0, literal=lambda _: 0
        )

    def around(
        eqn: Equation, ins: list[int], scopes: Scopes, settled: bool
    ) -> list[int]:
        """Goes through what ``eqn`` holds, a loop until its trips find no more.

        Args:
            eqn: The equation.
            ins: What is known of its inputs.
            scopes: Named scopes around its body.
            settled: Whether no trip finds more of what is computed, so that it is known
                what a comparison is of.
        """
        layout, kind = _jaxpr.call_layout(eqn), _jaxpr.call_kind(eqn)
        bodies = layout.bodies[kind == "while" :]
        chosen_by = ins[0] & _ENDS if kind == "cond" else 0
        while True:
            by_body = [
                through(body.jaxpr, [ins[i] for i in body.operands], scopes, settled)
                for body in bodies
            ]
            outs = [
                _together(known) | chosen_by for known in zip(*by_body, strict=True)
            ]
            if any(_is_softmax(body.jaxpr) for body in bodies):
                outs = [known & _COMPUTED for known in outs]
            before, ins = ins, list(ins)
            for i, out in zip(layout.fixed_in, outs, strict=False):
                ins[i] |= out
            if ins == before:
                return outs

    layout = _jaxpr.call_layout(loop)
    test = layout.bodies[0]
    known = [0] * len(loop.invars)
    for settled in (False, True):
        carried = around(loop, known, scopes, settled)
        for i, x in zip(layout.fixed_in, carried, strict=True):
            known[i] |= x
    ins = [known[i] for i in test.operands]
    (ends,) = through(test.jaxpr, ins, scopes, True)
    return bool(ends & _ENDS)


def _is_softmax(jaxpr: Any) -> bool:
    """Whether a body is a softmax of JAX: it takes a maximum away, and is no error."""
    name, *_ = _jaxpr.function_of(jaxpr)
    return name in {"softmax", "_softmax", "log_softmax", "logsumexp"}


def _together(known: Iterable[int]) -> int:
    return functools.reduce(operator.or_, known, 0)
