"""Loops that decide by comparing numbers that products computed: they stay float32.

Fixed points, iterative solvers, searches along a line and steps of adaptive size go on
until an error is small. In 16 bits it may never be. Solvers and samplers also keep what
they carry, or take a step, by such a comparison; where JAX computes the steps again for
the backward pass, that is all that tells them. A loop that ends at a count, or at a
token that an argmax has chosen, is like any other code.
"""

from collections.abc import Callable, Sequence
from typing import Any

from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation, is_inexact
from ..._jaxprs.scopes import (
    BACKWARD,
    IsProduct,
    Scopes,
    in_region,
    inside,
)
from ..._jaxprs.walk import At, Forward
from ..._ops import table
from ..._ops.products import holds_product
from .. import rules
from ..graph import joined

# What is known of a value: it is made of what a product returned; it is decided by
# comparing such numbers, and for many entries at once; it is what the loop carries, and
# no more than moved; it is computed from what was chosen by such a decision, which may
# have left what the loop carries as it is, in this trip; and in the last.
_COMPUTED, _COMPARED, _ALIKE, _CARRIED, _TAKEN, _NEXT = 1, 2, 4, 8, 16, 32
_OF_NUMBERS = _COMPUTED | _CARRIED | _TAKEN | _NEXT
_OF_DECISIONS = _COMPARED | _ALIKE


def endings(
    eqns: Sequence[Equation], jaxpr: Any, scopes: Scopes, is_product: IsProduct
) -> Sequence[Equation]:
    """Returns the equations, loops that decide by comparing in a float32 region.

    A rewrite, see :mod:`jaxmp._autocast.passes`.
    """
    return [
        in_region(eqn, rules.COMPARING)
        if decisions(eqn, scopes, is_product) is not None
        else eqn
        for eqn in eqns
    ]


# For each jaxpr in a loop, the truth values that choose what the loop carries.
Decisions = dict[Any, set[Any]]


def decisions(
    loop: Equation, scopes: Scopes, is_product: IsProduct
) -> Decisions | None:
    """Returns by what a loop chooses what it carries, None if it decides nothing.

    A ``while`` that ends by comparing decides when, and may choose nothing.

    Args:
        loop: An equation, which may be no loop.
        scopes: Named scopes around the jaxpr that it is in.
        is_product: Tells what is a product in 16 bits.
    """
    kind = _jaxpr.call_kind(loop)
    is_loop = kind in ("while", "scan")
    if not is_loop or not holds_product(loop, back=BACKWARD in scopes):
        return None
    around = scopes + _jaxpr.scope_names(loop)
    trail = _Trail(is_product)
    if trail.takes_steps(loop, around):
        return trail.chosen_by
    return {} if kind == "while" and trail.ends_by_comparing(loop, around) else None


class _Trail:
    """Follows what products compute, through calls and around loops."""

    def __init__(self, is_product: IsProduct):
        self._is_product = is_product
        self._feeds_product = False
        self.chosen_by: Decisions = {}
        self._walk = Forward(self._of, joined, known=0, enter=_entered)

    def ends_by_comparing(self, loop: Equation, scopes: Scopes) -> bool:
        """Whether what products of ``loop`` compute decides when it ends."""
        layout = _jaxpr.call_layout(loop)
        known = [0] * len(loop.invars)
        outs = self._walk.around(loop, known, scopes)
        for i, out in zip(layout.fixed_in, layout.fixed_out, strict=True):
            known[i] |= outs[out] & ~(_CARRIED | _TAKEN)
        test = layout.bodies[0]
        ins = [known[i] for i in test.operands]
        outs = self._walk.through(test.jaxpr, ins, inside(loop, scopes))
        return any(x & _COMPARED for x in outs)

    def takes_steps(self, loop: Equation, scopes: Scopes) -> bool:
        """Whether a comparison in ``loop`` decides if it keeps what it carries.

        And products compute with what it carries then, in the next trip. The best of
        all trips, which only the end reads, is no step.
        """
        layout = _jaxpr.call_layout(loop)
        pairs = [*zip(layout.fixed_in, layout.fixed_out, strict=True)]
        known = [0] * len(loop.invars)
        for i, _ in pairs:
            known[i] = _CARRIED if is_inexact(loop.invars[i]) else 0
        outs = self._walk.around(loop, known, scopes)
        if not self.chosen_by:  # as in most loops
            return False
        for i, out in pairs:
            known[i] |= _NEXT if outs[out] & _TAKEN else 0
        self._walk.around(loop, known, scopes)
        return self._feeds_product

    def _of(self, eqn: Equation, ins: list[int], at: At) -> list[int]:
        known = joined(ins)
        if self._is_product(eqn, at.scopes):
            self._feeds_product |= bool(known & _NEXT)
            known |= _COMPUTED
        if known & _COMPUTED and table.tests(eqn):
            known |= _COMPARED
        if not table.is_view(eqn) and not _jaxpr.is_cast(eqn):
            known &= ~_CARRIED
        if known & _COMPARED and _is_for_many(eqn):
            known |= _ALIKE
        if table.selects(eqn):
            known |= joined(ins[1:]) & _CARRIED
            if known & _CARRIED and ins[0] & _ALIKE:
                known |= _TAKEN
                self.chosen_by.setdefault(at.owner, set()).add(eqn.invars[0])
        chosen = not _jaxpr.is_cast(eqn) and any(map(is_inexact, eqn.invars))
        return [_kept(known, var, chosen) for var in eqn.outvars]


def _entered(eqn: Equation, ins: list[int], around: Callable) -> list[int]:
    """Goes through what ``eqn`` holds. A choice decides what a branch returns.

    What another loop carries, and chooses, is its own.
    """
    if _jaxpr.call_kind(eqn) in ("while", "scan"):
        own = _CARRIED | _TAKEN
        return [x & ~own for x in around([x & ~own for x in ins])]
    if _jaxpr.call_kind(eqn) == "cond":
        pairs = zip(around(ins), eqn.outvars, strict=True)
        return [_kept(known | ins[0], var) for known, var in pairs]
    return around(ins)


def _is_for_many(eqn: Equation) -> bool:
    """Whether one truth value that ``eqn`` returns stands for many entries."""
    shapes = [var.aval.shape for var in eqn.outvars]
    return table.copies(eqn) or all(n == 1 for shape in shapes for n in shape)


def _kept(known: int, var: Any, chosen: bool = False) -> int:
    """A floating value is computed, and a truth value is compared.

    An integer may be either: a count of comparisons, or what a float was cast to. A
    place that was chosen, as by an argmax, is no number that was computed.
    """
    if is_inexact(var):
        return known & _OF_NUMBERS
    is_decided = chosen or var.aval.dtype == bool
    return known & _OF_DECISIONS if is_decided else known
