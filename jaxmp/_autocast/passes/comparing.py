"""Loops that decide by comparing what products compute, with what they compare.

Fixed points, iterative solvers, searches along a line and steps of adaptive size go on
until an error is small. In 16 bits it may never be: these loops stay float32. Solvers
and samplers also keep what they carry, or take a step, by such a comparison; where JAX
computes the steps again for the backward pass, that is all that names them. A loop that
ends at a count, or at a token that an argmax has chosen, is like any other code.

What such a loop compares with was computed before it: in float32 too. A search compares
the loss at the next point, which the loop computes, with that at the first, which it is
given. In 16 bits that may be lower than all others. What counts is what the loop
compares entry by entry: such a loss, a slope, the logarithm of a density. What it
multiplies by a matrix or adds up first, to compare a norm, may be rounded as anywhere:
the loop is then about rounded numbers, from its first iteration to its last.
"""

from collections.abc import Callable, Collection, Sequence, Set
from typing import Any

from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation, Literal, is_inexact
from ..._jaxprs.scopes import BACKWARD, Asked, Scopes, in_region, scopes_inside
from ..._jaxprs.walk import At, Backward, Forward
from ..._ops import table
from ..._ops.products import holds_product, is_matrix_product
from .. import needs, rules
from ..graph import joined
from ..needs import Need

# For each jaxpr in a loop, the truth values that choose what the loop carries.
Decisions = dict[Any, set[Any]]


def loops(
    eqns: Sequence[Equation], jaxpr: Any, scopes: Scopes, asked: Asked
) -> Sequence[Equation]:
    """Returns the equations, loops that decide by comparing in a float32 region.

    A rewrite, see :mod:`jaxmp._autocast.passes`.
    """

    def decides(eqn: Equation) -> bool:
        if not _jaxpr.call_kind(eqn):
            return False
        at = At(scopes=scopes + _jaxpr.scope_names(eqn))
        return _decisions(eqn, at, asked.is_product) is not None

    return [in_region(x, rules.COMPARING) if decides(x) else x for x in eqns]


def compared(
    jaxpr: Any, scopes: Scopes, unread: Set[Equation]
) -> Collection[tuple[Any, Any, Need]]:
    """Returns what loops that decide by comparing are given to compare with.

    Whoever keeps the loop in float32, autocast or the user. A marker, see
    :mod:`jaxmp._autocast.passes`.
    """
    found: dict[Any, list[tuple[Any, Any, Need]]] = {}  # by jaxpr

    def look(jaxpr: Any, scopes: Scopes) -> None:
        owner = _jaxpr.open_jaxpr(jaxpr)
        if owner in found:
            return
        found[owner] = []
        for eqn in filter(_jaxpr.call_kind, owner.eqns):
            if eqn in unread:
                continue
            at = At(owner, scopes + _jaxpr.scope_names(eqn))
            chosen_by = _decisions(
                eqn, at, lambda x, around: is_matrix_product(x, back=BACKWARD in around)
            )
            if chosen_by is None:
                for body in _jaxpr.sub_jaxprs(eqn):
                    look(body, scopes_inside(eqn, at.scopes))
                continue
            seeds = {x: dict.fromkeys(of, _DECIDES) for x, of in chosen_by.items()}
            walk = Backward(
                _read_by,
                test=_DECIDES,
                seeds=lambda owner, seeds=seeds: seeds.get(owner, {}),
                choice=_DECIDES,
            )
            read = walk.around(eqn, [0] * len(eqn.outvars), at)
            found[owner] += [
                (owner, x, needs.COMPARED)
                for x, one in zip(eqn.invars, read, strict=True)
                if one and not isinstance(x, Literal)
            ]

    look(jaxpr, scopes)
    return [x for several in found.values() for x in several]


# Which loops decide.

# What is known of a value: it is made of what a product returned; it is decided by
# comparing such numbers, and for many entries at once; it is what the loop carries, and
# no more than moved; it is computed from what was chosen by such a decision, which may
# have left what the loop carries as it is.
_COMPUTED, _COMPARED, _ALIKE, _CARRIED, _TAKEN = 1, 2, 4, 8, 16
_OF_NUMBERS = _COMPUTED | _CARRIED | _TAKEN
_OF_DECISIONS = _COMPARED | _ALIKE


def _decisions(loop: Equation, at: At, is_product: Callable) -> Decisions | None:
    """Returns by what a loop chooses what it carries, None if it decides nothing.

    A comparison in it chooses if it keeps what it carries, and products compute with
    that. The best of all iterations, which only the end reads, is no such choice. A
    ``while`` that ends by comparing decides when, and may choose nothing.

    Args:
        loop: An equation, which may be no loop.
        at: Where it is.
        is_product: Says what is a product in 16 bits.
    """
    kind = _jaxpr.call_kind(loop)
    is_loop = kind in ("while", "scan")
    if not is_loop or not holds_product(loop, back=BACKWARD in at.scopes):
        return None
    trail, layout = _Trail(is_product), _jaxpr.call_layout(loop)
    known = [0] * len(loop.invars)
    for i in layout.fixed_in:
        known[i] = _CARRIED if is_inexact(loop.invars[i]) else 0
    outs = trail.walk.around(loop, known, at)
    if trail.chosen_by and trail.goes_on_with_choice:
        return trail.chosen_by
    if kind == "scan":
        return None
    known[layout.fixed_in.start :] = outs
    test = layout.bodies[0]
    ins = [known[i] for i in test.operands]
    tested = trail.walk.through(test.jaxpr, ins, scopes_inside(loop, at.scopes))
    return {} if joined(tested) & _COMPARED else None


class _Trail:
    """Follows what products compute, through calls and around loops."""

    def __init__(self, is_product: Callable):
        self._is_product = is_product
        self.goes_on_with_choice = False
        self.chosen_by: Decisions = {}
        self.walk = Forward(self._of, joined, lambda x, at: 0, enter=self._enter)

    def _of(self, eqn: Equation, ins: list[int], at: At) -> list[int]:
        known = joined(ins)
        if self._is_product(eqn, at.scopes):
            self.goes_on_with_choice |= bool(known & _TAKEN)
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

    def _enter(self, eqn: Equation, ins: list[int], at: At) -> list[int]:
        """Goes into what ``eqn`` holds. A choice decides what a branch returns.

        What another loop keeps of what this one carries is its own.
        """
        kind = _jaxpr.call_kind(eqn)
        if kind in ("while", "scan"):
            ins = [x & ~_CARRIED for x in ins]
        outs = self.walk.around(eqn, ins, at)
        if kind != "cond":
            return outs
        pairs = zip(outs, eqn.outvars, strict=True)
        return [_kept(known | ins[0], var) for known, var in pairs]


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


# What they compare with.

# How a value is read: it is compared entry by entry; or it is a truth value, or a
# count, that decides.
_ENTRIES, _DECIDES = 1, 2


def _read_by(eqn: Equation, outs: list[int], at: At) -> list[int]:
    """Returns how ``eqn`` reads its inputs, if its outputs are so read."""
    read = joined(outs)
    if table.tests(eqn) and read:
        return [_ENTRIES if is_inexact(x) else _DECIDES for x in eqn.invars]
    if read & _ENTRIES and not _works_entry_by_entry(eqn):
        return [0] * len(eqn.invars)
    # A number that decides as a truth value was cast to one.
    numbers = _ENTRIES if read & _ENTRIES or _jaxpr.is_cast(eqn) else 0
    return [numbers if is_inexact(x) else _DECIDES if read else 0 for x in eqn.invars]


def _works_entry_by_entry(eqn: Equation) -> bool:
    """Whether each number that ``eqn`` returns is made of one of each input, or few."""
    if table.is_view(eqn):
        return True
    known = table.hands_on(eqn) or table.is_linear(eqn) or table.picks(eqn)
    ndim = len(eqn.outvars[0].aval.shape)
    return known and all(len(x.aval.shape) <= ndim for x in eqn.invars)
