"""Loops that end where a number says so, and stay float32.

Fixed points, iterative solvers, searches along a line and steps of adaptive size go on
until an error is small. In 16 bits it may never be: a loop that ends after 20 trips in
float32 then runs for ever, or takes steps a hundred times as small. An error, a norm of
a gradient and a probability look alike in a program: what counts is that floating
values, which products have gone into, are compared. Loops that end at a count, or at a
token, take their products in 16 bits like any other.
"""

from collections.abc import Sequence
from typing import Any

from . import _jaxpr
from ._jaxpr import Equation, is_inexact
from ._op_lists import EQUALITIES, ORDERS
from ._scopes import KEPT_TO_END, IsProduct, Scopes, in_region, inside


def with_endings(
    eqns: Sequence[Equation], scopes: Scopes, is_product: IsProduct
) -> Sequence[Equation]:
    """Returns the equations, those loops in a float32 region.

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
    """Tells whether what its products return decides when ``loop`` ends.

    What is followed, for each value: whether a product has gone into it, if it is
    floating; whether a comparison of such values has, if it is an integer or a boolean.
    """

    def through(jaxpr: Any, ins: Sequence[bool], scopes: Scopes) -> list[bool]:
        def apply(eqn: Equation, ins: list[bool]) -> list[bool]:
            here = scopes + _jaxpr.scope_names(eqn)
            if _jaxpr.call_kind(eqn):
                return around(eqn, ins, inside(eqn, here))
            if is_product(eqn, here):
                return [True] * len(eqn.outvars)
            name = eqn.primitive.name
            compares = name in ORDERS or name in EQUALITIES or _jaxpr.is_cast(eqn)
            decided = any(
                x and (compares or not is_inexact(atom))
                for x, atom in zip(ins, eqn.invars, strict=True)
            )
            return [any(ins) if is_inexact(x) else decided for x in eqn.outvars]

        return _jaxpr.interpret(
            jaxpr, ins, apply, const=lambda _: False, literal=lambda _: False
        )

    def around(eqn: Equation, ins: list[bool], scopes: Scopes) -> list[bool]:
        """Goes through what ``eqn`` holds, a loop until its trips find no more."""
        layout, kind = _jaxpr.call_layout(eqn), _jaxpr.call_kind(eqn)
        bodies = layout.bodies[kind == "while" :]
        while True:
            by_body = [
                through(body.jaxpr, [ins[i] for i in body.operands], scopes)
                for body in bodies
            ]
            outs = [*map(any, zip(*by_body, strict=True))]
            before, ins = ins, list(ins)
            for i, out in zip(layout.fixed_in, outs, strict=False):
                ins[i] |= out
            if ins == before:
                break
        if kind == "while":
            chosen = tested(eqn, ins, scopes)
        else:
            chosen = kind == "cond" and ins[0]
        return [out or chosen for out in outs]

    def tested(loop: Equation, ins: Sequence[bool], scopes: Scopes) -> bool:
        """Whether a comparison of what products return is in the test of a loop."""
        test = _jaxpr.call_layout(loop).bodies[0]
        return any(through(test.jaxpr, [ins[i] for i in test.operands], scopes))

    carried = around(loop, [False] * len(loop.invars), scopes)
    ins = [False] * len(loop.invars)
    for i, out in zip(_jaxpr.call_layout(loop).fixed_in, carried, strict=True):
        ins[i] = out
    return tested(loop, ins, scopes)
