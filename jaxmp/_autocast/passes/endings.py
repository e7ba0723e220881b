"""Loops that end by comparing numbers that products computed: they stay float32.

Fixed points, iterative solvers, searches along a line and steps of adaptive size go on
until an error is small. In 16 bits it may never be. A loop that ends at a count, or at
a token that an argmax has chosen, is like any other code.
"""

from collections.abc import Sequence
from typing import Any

from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation, is_inexact
from ..._jaxprs.scopes import KEPT_TO_END, IsProduct, Scopes, in_region, inside
from .. import classes
from ..graph import joined

# What is known of a value: it is made of what a product returned; it is decided by
# comparing such numbers.
_COMPUTED, _COMPARED = 1, 2


def endings(
    eqns: Sequence[Equation], jaxpr: Any, scopes: Scopes, is_product: IsProduct
) -> Sequence[Equation]:
    """Returns the equations, loops that end at a comparison in a float32 region.

    A rewrite, see :mod:`jaxmp._autocast.passes`.
    """

    def ends(eqn: Equation) -> bool:
        if _jaxpr.call_kind(eqn) != "while":
            return False
        around = inside(eqn, scopes + _jaxpr.scope_names(eqn))
        return _Trail(is_product).ends_by_comparing(eqn, around)

    return [in_region(e, KEPT_TO_END) if ends(e) else e for e in eqns]


class _Trail:
    """Follows what products compute, through calls and around loops."""

    def __init__(self, is_product: IsProduct):
        self._is_product = is_product

    def ends_by_comparing(self, loop: Equation, scopes: Scopes) -> bool:
        """Whether what products of ``loop`` compute decides when it ends."""
        layout = _jaxpr.call_layout(loop)
        known = [0] * len(loop.invars)
        for i, x in zip(
            layout.fixed_in, self._around(loop, known, scopes), strict=True
        ):
            known[i] |= x
        test = layout.bodies[0]
        ins = [known[i] for i in test.operands]
        return any(x & _COMPARED for x in self._through(test.jaxpr, ins, scopes))

    def _through(self, jaxpr: Any, ins: Sequence[int], scopes: Scopes) -> list[int]:
        def apply(eqn: Equation, ins: list[int]) -> list[int]:
            here = scopes + _jaxpr.scope_names(eqn)
            if _jaxpr.call_kind(eqn):
                return self._around(eqn, ins, inside(eqn, here))
            known = joined(ins)
            if self._is_product(eqn, here):
                known |= _COMPUTED
            if known & _COMPUTED and classes.tests(eqn):
                known |= _COMPARED
            chosen = not _jaxpr.is_cast(eqn) and any(map(is_inexact, eqn.invars))
            return [_kept(known, var, chosen) for var in eqn.outvars]

        return _jaxpr.interpret(
            jaxpr, ins, apply, const=lambda _: 0, literal=lambda _: 0
        )

    def _around(self, eqn: Equation, ins: list[int], scopes: Scopes) -> list[int]:
        """Goes through what ``eqn`` holds. A choice decides what a branch returns."""
        outs = _jaxpr.through_bodies(
            eqn, ins, lambda jaxpr, ins: self._through(jaxpr, ins, scopes), joined
        )
        if _jaxpr.call_kind(eqn) != "cond":
            return outs
        pairs = zip(outs, eqn.outvars, strict=True)
        return [_kept(known | ins[0], var) for known, var in pairs]


def _kept(known: int, var: Any, chosen: bool = False) -> int:
    """A floating value is computed, and a truth value is compared.

    An integer may be either: a count of comparisons, or what a float was cast to. A
    place that was chosen, as by an argmax, is no number that was computed.
    """
    if is_inexact(var):
        return known & _COMPUTED
    return known & _COMPARED if chosen or var.aval.dtype == bool else known
