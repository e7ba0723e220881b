"""What an equation needs of its inputs, if so much is needed of what it returns.

This is all that the analysis knows of operations: one function, of one equation that
holds no jaxpr, its class, and what is known around it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation, Literal, is_float32
from .._ops import table
from . import classes, needs
from .classes import Class
from .graph import OFTEN, Ways, is_in, joined
from .needs import Need


class Spotted(NamedTuple):
    """Variables of which the equations of a jaxpr alone say what they are."""

    masks: set[Any]  # those of dropout
    powers: set[Equation]  # multiplications of more than four parts of one value


def needs_of_inputs(
    eqn: Equation,
    kind: Class,
    out: Need,
    *,
    back: bool,
    kept: bool,
    summed: Ways,
    spotted: Spotted,
) -> Sequence[Need]:
    """Returns what ``eqn`` needs of each input.

    Args:
        eqn: The equation.
        kind: Its class, which is not ``"call"``.
        out: What its outputs are needed for.
        back: Whether it belongs to the backward pass.
        kept: Whether the user keeps it in float32.
        summed: The ways by which a loop adds up that go through it.
        spotted: What the equations around it say.
    """
    count = len(eqn.invars)
    # What only the backward pass reads, such as a slope, is part of it.
    in_back = back or needs.is_for_backward(out)
    if kind == "product":
        wide = needs.consumer(False, in_back) | needs.DIGITS
        return [needs.PRODUCT if x else wide for x in classes.rounds(eqn)]
    if kind == "exact":
        return _of_move(eqn, out, in_back)
    usual = _of_work(eqn, kind, out, kept, in_back)
    joins = kind == "smooth" and needs.is_half(out) and not in_back
    later = joins and out & (needs.FULL | needs.LATER)
    found = [usual | needs.LATER if later else usual] * count
    takes = kind == "smooth" and out & needs.PRODUCT and needs.is_half(out)
    # A sum may be out of range where its mean is not.
    masks = spotted.masks
    if takes and _only_scales(eqn, masks) and not table.scales_down(eqn):
        # A product that takes the result takes it: rounded before or after. So whoever
        # else reads the result reads it, too.
        scaled = out | needs.SCALED
        found = [usual if is_in(x, masks) else scaled for x in eqn.invars]
    if summed:
        # What an iteration adds to a sum is one of many terms. Its factors count.
        multiplies = table.multiplies(eqn) or classes.is_small(eqn, back=back)
        term = needs.GATE if multiplies else needs.FULL
        way = joined(starts for starts, _ in summed)
        found = [needs.DIGITS if way >> i & 1 else term for i in range(count)]
    if eqn in spotted.powers:
        found = [x | needs.GATE | needs.MANY for x in found]
    if (i := table.divisor(eqn)) is not None:
        found[i] |= needs.DIGITS
    return found


def masks_in(eqns: Sequence[Equation]) -> set[Any]:
    """Returns the masks of dropout: what was boolean, and at most scaled by numbers."""
    found: set[Any] = set()
    for eqn in eqns:
        made = [x for x in eqn.invars if not isinstance(x, Literal)]
        is_mask = _jaxpr.is_cast(eqn) and bool(made) and made[0].aval.dtype == bool
        if made and not is_mask and found.issuperset(made):
            is_mask = table.is_view(eqn) or _only_scales(eqn, found)
        if is_mask:
            found.update(eqn.outvars)
    return found


def powers_in(eqns: Sequence[Equation]) -> set[Equation]:
    """Returns the multiplications of more than four parts of one value.

    JAX writes them where it differentiates `cumprod` and `prod`. A product of some
    parts may be out of the range of float16 where that of all is not.
    """
    # For what is made of parts of one value: that, and how many of them are multiplied.
    parts: dict[Any, tuple[Any, int]] = {}
    found: set[Equation] = set()
    for eqn in eqns:
        multiplies = table.multiplies_entries(eqn)
        if not multiplies and not table.is_linear(eqn):
            continue
        made = [
            parts.get(x, (x, 1))
            for x in eqn.invars
            if not isinstance(x, Literal) and _jaxpr.is_inexact(x)
        ]
        if len({value for value, _ in made}) != 1:
            continue
        counts = [count for _, count in made]
        count = min(sum(counts) if multiplies else max(counts), OFTEN + 1)
        if multiplies and count > OFTEN:
            found.add(eqn)
        parts.update(dict.fromkeys(eqn.outvars, (made[0][0], count)))
    return found


def _only_scales(eqn: Equation, masks: set[Any]) -> bool:
    """Whether a number or a mask multiplies something, and brings it no range."""
    if not table.multiplies(eqn) or table.scales_far(eqn):
        return False
    return any(isinstance(x, Literal) or x in masks for x in eqn.invars)


def _of_move(eqn: Equation, out: Need, back: bool) -> Sequence[Need]:
    """What is moved or chosen is read by whoever reads it then."""
    count = len(eqn.invars)
    moves = _jaxpr.is_cast(eqn) or table.is_saved(eqn)
    if moves or (table.picks(eqn) and is_float32(eqn.outvars[0])):
        return [out] * count
    if table.tests_equal(eqn) and not back:
        # Once they are rounded, others are equal.
        return [needs.consumer(False, back) | needs.DIGITS] * count
    # To compare with a number in the code is no computing: a relu. Nor is a test of the
    # backward pass, which asks what a maximum has chosen.
    has_number = isinstance(eqn.invars[-1], Literal)
    if table.tests_equal(eqn) or (table.compares(eqn) and has_number):
        return [needs.NOTHING] * count
    # What is sorted or rounded to whole numbers has the digits of what it is made of.
    kept = needs.handed_on(out) if is_float32(eqn.outvars[0]) else needs.NOTHING
    if table.counts(eqn) and not back:
        kept |= needs.DIGITS
    return [needs.consumer(False, back) | kept] * count


def _of_work(eqn: Equation, kind: Class, out: Need, kept: bool, back: bool) -> Need:
    """Returns what elementwise work, and what sees float32, needs of any input."""
    if kept:
        return needs.consumer(False, back) | needs.EVERYTHING
    found = needs.consumer(kind == "smooth" and needs.is_half(out), back)
    # The slope of a GELU is an exponential of what was rounded anyway.
    steep = table.is_steep(eqn) and not (back and table.is_exponential(eqn))
    if steep or (table.counts(eqn) and not back):
        found |= needs.DIGITS
    if kind == "smooth" or table.hands_on(eqn):
        found |= needs.handed_on(out, squashed=table.squashes(eqn))
    return found
