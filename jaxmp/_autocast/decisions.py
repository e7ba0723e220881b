"""Deciding in which dtype an equation runs, and by which rule: a pure function.

What the readers need comes from the analysis, the facts of the operands from the
replay. The sentences are in :mod:`jaxmp._autocast.rules`. Which products round further,
to float8, is decided beside them: no value has another dtype for it.
"""

from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from .._jaxprs.jaxpr import Equation, is_float32, scope_names
from .._jaxprs.scopes import (
    KEPT_BY_BFLOAT16_PATHS,
    KEPT_FOR_DIGITS,
    KEPT_IN_LOOP,
    KEPT_IN_RULE,
    Scopes,
    is_backward,
    is_under,
)
from .._ops.fp8 import why_16bit
from .._ops.lists import Definition, OpLists
from . import classes, needs, rules
from .classes import Class
from .graph import Trip, joined
from .needs import Need
from .values import Value

How = Literal[
    "float32",  # as it was written
    "half",  # in 16 bits
    "rounded",  # in float32, rounded once
    "stored",  # in float32, stored in 16 bits for a product and the backward pass
    "inside",  # its jaxprs are gone into
]


# The scopes that tell the audit why what follows its operands does not run in 16 bits.
# Where there is none, an operand or a reader is float32.
REASONS = {
    rules.DIGITS: KEPT_FOR_DIGITS,
    rules.LOOP: KEPT_IN_LOOP,
}


class Step(NamedTuple):
    """An equation, and what its replay depends on beside its inputs."""

    eqn: Equation
    kind: Class
    read: Trip  # what is needed of what it returns
    asks: Sequence[Need]  # what it needs of each input
    scopes: Scopes  # around the jaxpr
    definition: Definition
    forward: Collection[Any]  # variables that the forward pass reads, or returns

    @property
    def around(self) -> Scopes:
        """The scopes around the equation, with its own."""
        return self.scopes + scope_names(self.eqn)

    @property
    def back(self) -> bool:
        """Whether the equation belongs to the backward pass."""
        return is_backward(self.eqn, self.scopes)

    @property
    def need(self) -> Need:
        """What the readers of its outputs need."""
        return joined(self.read.wanted)

    @property
    def is_summed(self) -> bool:
        """Whether the trips of a loop add up what it returns."""
        return bool(self.read.summed)


class Decision(NamedTuple):
    """How an equation runs, and the number of the rule that says so."""

    how: How
    rule: int
    computed_by: int = rules.FLOAT32  # the rule by which what is stored is float32


# Of an equation in which each equation is decided.
INSIDE = Decision("inside", rules.FLOAT32)


def decide(
    step: Step, ins: Sequence[Value], dtype: np.dtype, *, kept: int | None
) -> Decision:
    """Decides how an equation runs.

    Args:
        step: The equation, its class, and what its readers need.
        ins: Its inputs.
        dtype: The 16-bit dtype.
        kept: The rule by which its scopes keep it as it was written, None if none does.
    """
    eqn, kind, need = step.eqn, step.kind, step.need
    if not any(map(is_float32, eqn.outvars)):
        return Decision("float32", rules.AS_WRITTEN)
    half = needs.is_half(need)
    if kind == "product":
        if any(map(needs.is_half, step.read.wanted)):
            return Decision("half", rules.PRODUCT)
        return Decision("float32", _of_float32(step, rules.PRODUCT))
    if kind in ("exact", "smooth") and _follows(eqn, kind, ins, half, dtype):
        # All that a number is applied to would be off alike, were it rounded.
        holds = kind == "exact" or all([x.holds(dtype) for x in ins])
        return Decision("half" if holds else "rounded", rules.FOLLOWS)
    cuts = kind == "exact" and classes.cuts(eqn) and ins[0].known.product
    if cuts and any(map(needs.is_half, step.read.wanted)):
        return Decision("rounded", rules.FOLLOWS)  # as if a product returned it alone
    if kind == "smooth" and half and classes.joins(eqn):
        how = _joins(ins, dtype)
        if how is not None:
            return Decision(how, rules.JOINS)
    sums = kind == "smooth" and needs.is_summed_and_handed_on(need)
    if sums and step.back and is_sent_back(eqn, ins):
        return Decision("stored", rules.KEPT)
    # What was given is rounded where it is used.
    if kind != "exact" and needs.is_kept(need) and not _all_given(ins):
        return Decision("stored", rules.KEPT, kept or rules.FLOAT32)
    squashes = classes.squashes(eqn) and not _all_given(ins)
    if half and squashes and needs.leads_to_products_alone(need):
        return Decision("rounded", rules.JOINS)
    if kind == "exact" and needs.is_kept(need) and _all_given(ins):
        # XLA finds the gradient of a convolution where nothing stands between it and
        # the reversed kernel.
        if step.back and needs.is_rounded_for_products(need) and ins[0].is_float32():
            return Decision("half", rules.KEPT)
        if classes.gathers(eqn):  # devices send one another 16 bits
            return Decision("stored", rules.KEPT)
    usual = rules.FOLLOWS if kind == "exact" else rules.FLOAT32
    return Decision("float32", kept or _of_float32(step, usual))


def is_sent_back(eqn: Equation, ins: Sequence[Value]) -> bool:
    """Whether what ``eqn`` of a backward pass returns was sent back by a product.

    It is made of that elementwise, so each of its entries has been rounded, and
    may be once more. Not behind a factor that was given, which may bring them out
    of range. And not copies: these were rounded alike, and their errors add up.
    """
    makes = classes.multiplies(eqn) or classes.adds_terms(eqn)
    if not makes or any([x.is_far() for x in ins]):
        return False
    known = [value.known for value in ins]
    if any(x.kept or (x.given and x.scalar is None) for x in known):
        return False
    return any(x.sent and not x.copied for x in known)


def is_of_product(eqn: Equation, kind: Class, ins: Sequence[Value]) -> bool:
    """Whether what ``eqn`` returns in float32 is made elementwise of a product."""
    if kind not in ("exact", "smooth"):
        return kind == "product"
    joins = classes.joins(eqn)  # with a bias, too
    made = [
        x.known.product or (x.known.half and x.known.kept is None)
        for x, var in zip(ins, eqn.invars, strict=True)
        if is_float32(var) and x.known.scalar is None and not (joins and x.known.given)
    ]
    return bool(made) and all(made)


def is_copied(eqn: Equation, kind: Class, ins: Sequence[Value]) -> bool:
    """Whether what ``eqn`` of a backward pass returns was sent to many alike."""
    known = [value.known for value in ins]
    if classes.copies(eqn):
        return True
    if kind == "product":
        return any(x.copied or x.scalar is not None for x in known)
    computed = [x for x in known if x.scalar is None]
    if classes.multiplies(eqn):
        computed = [x for x in computed if x.sent or x.copied] or computed
    return bool(computed) and all(x.copied for x in computed)


def _of_float32(step: Step, usual: int) -> int:
    """Returns by which rule something is float32, if its readers decide that."""
    need = step.need
    if needs.has_region(need):
        return usual  # what the user keeps, or nobody knows, reads it as it is
    if step.is_summed or needs.has_gate(need):
        return rules.LOOP
    return rules.DIGITS if needs.has_digits(need) else usual


def _follows(
    eqn: Equation, kind: Class, ins: Sequence[Value], half: bool, dtype: np.dtype
) -> bool:
    """Whether elementwise work, a choice or a move runs in 16 bits (rule 3)."""
    floats = [x for x, var in zip(ins, eqn.invars, strict=True) if is_float32(var)]
    if not any([x.known.half for x in floats]):
        return False
    if not half and kind == "smooth":
        return False
    # What is kept is multiplied in float32. To add or to move it makes no difference.
    kept = any([x.known.kept is not None for x in floats])
    if kept and kind == "smooth" and not classes.joins(eqn):
        return False
    return all(
        [x.known.half or (x.known.scalar is not None and x.fits(dtype)) for x in floats]
    )


def _joins(ins: Sequence[Value], dtype: np.dtype) -> How | None:
    """Returns how a sum of 16 bits and of something else is made (rule 4)."""
    if not any([x.known.half for x in ins]):
        return None
    if _all_given([x for x in ins if not x.known.half]):
        return "half"  # a bias is rounded as weights are
    return None if dtype == np.float16 else "rounded"


def _all_given(ins: Sequence[Value]) -> bool:
    return all([x.known.given for x in ins])


class Float8:
    """Knows for one dtype, one set of lists and one of paths."""

    def __init__(
        self, dtype: np.dtype, ops: OpLists, paths: Sequence[str], *, is_on: bool
    ):
        """Takes what the user asks for."""
        self.dtype, self.ops, self.is_on = dtype, ops, is_on
        self.paths = {path: tuple(path.split("/")) for path in paths}
        self.reasons: set[str | None] = set()  # that were returned, None with them

    def why_16bit(
        self, eqn: Equation, kind: Class, scopes: Scopes, *, linear: bool
    ) -> str | None:
        """Returns why an equation rounds nothing to float8; None if it does.

        The reason is the name of a scope, and empty for what is no product in 16 bits.
        """
        if kind != "product" and not classes.is_written_in(eqn, self.ops, self.dtype):
            return ""
        reason = why_16bit(eqn, self.ops.min_size)
        if reason is None and any(is_under(p, scopes) for p in self.paths.values()):
            reason = KEPT_BY_BFLOAT16_PATHS
        elif reason is None and linear:
            reason = KEPT_IN_RULE
        self.reasons.add(reason)
        return reason

    @property
    def is_unused(self) -> bool:
        """Whether products were met, of which none is float8, and nobody asked that."""
        asked = {None, KEPT_BY_BFLOAT16_PATHS}
        return bool(self.reasons) and asked.isdisjoint(self.reasons)
