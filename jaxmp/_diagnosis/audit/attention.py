"""Attention in a program: what keeps it from cuDNN's kernel, and what is written out.

An attention that is written out is found in the traced program, part by part: a matmul,
at most a scale, a bias and a mask, a softmax, and a matmul of that. Where any part is
missing, or anything else is done to the scores or to the weights, it is none.
"""

import math
from typing import Any, NamedTuple

from ..._attention.operation import why_not_kernel
from ..._base.sizes import as_number, size_of
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.places import Place
from ..._jaxprs.scopes import ATTENTION, named_in
from ..._jaxprs.walk import At, Forward, the_one
from ..._ops import table
from ..._ops.products import is_attention, is_batched, is_matrix_product
from .report import UnfusedAttention

# Why Flax's own attention, or that of JAX, was called: see `jaxmp._attention.for_flax`.
_WRITTEN = {
    "dropout": "its dropout is active; pass `deterministic=True`, or drop elsewhere",
    "sown": "its weights are sown; leave out `sow_weights`",
    "asked": "its `precision` or its einsums are its own; leave them out",
    "sizes": "keys and values have other sizes; pad them",
    "decoding": "one query is decoded with a cache of keys",
    "scale": "its scale is an array; multiply the query by it, and pass `scale=1.0`",
}


class _Part(NamedTuple):
    """How much of an attention a value is."""

    stage: str
    scores: Any  # the matmul that computed them
    exps: Any = None  # the exponentials that were summed up


class Attentions:
    """Goes through a program and notes each attention in it."""

    def __init__(self):
        self._rows: dict[Any, UnfusedAttention] = {}
        self._walk = Forward(self._operation, the_one, lambda x, at: None)

    def found(self, jaxpr: Any, around: Place) -> tuple[UnfusedAttention, ...]:
        """Returns the attentions of a program, by the line of the user."""
        inputs = [None] * len(_jaxpr.in_avals(jaxpr))
        self._walk.through(jaxpr, inputs, (), around)
        return tuple(self._rows.values())

    def _operation(self, eqn: Any, ins: list[Any], at: At) -> list[Any]:
        place = at.place
        if asked := named_in(place.scopes, ATTENTION):  # written out for a reason
            self._note(place, _WRITTEN[asked], 0)
        if is_attention(eqn):
            if reason := why_not_kernel(eqn):
                self._note(place, reason, 0)
        elif not place.backward and not place.again:
            return self._part(eqn, ins, place)
        return [None] * len(eqn.outvars)

    def _note(self, place: Place, why: str, size: int) -> None:
        if not place.times:  # what is known of a loop has not settled
            return
        key = place.where, why
        row = self._rows.get(key) or UnfusedAttention(why, 0, place.module, place.where)
        self._rows[key] = UnfusedAttention(why, row.bytes + size, row.module, row.where)

    def _part(self, eqn: Any, ins: list[Any], place: Place) -> list[Any]:
        """Returns how much of an attention the results of an equation are."""
        if not (is_matrix_product(eqn) and is_batched(eqn)):
            return [_next(eqn, ins)] * len(eqn.outvars)
        parts = zip(eqn.invars, ins, strict=True)
        weights = [atom.aval for atom, x in parts if x and x.stage == "weights"]
        if not weights:
            return [_Part("scores", eqn)]
        if named_in(place.scopes, ATTENTION) is None:
            size = as_number(math.prod(weights[0].shape)) * weights[0].dtype.itemsize
            self._note(place, "", int(size) * place.times)
        return [None]


def _next(eqn: Any, ins: list[_Part | None]) -> _Part | None:
    """Returns what an equation makes of parts of an attention, None if no part."""
    parts = [x for x in ins if x is not None]
    if not parts:
        return None
    by_number = any(size_of(x.aval) == 1 for x in eqn.invars)
    first, *others = parts
    if others:
        return _joined(eqn, *parts[:2]) if len(ins) == len(parts) == 2 else None
    if (table.is_view(eqn) or table.is_rounding(eqn)) and len(ins) == 1:
        return first
    match first.stage:
        case "scores" if table.multiplies(eqn) and by_number:
            return first
        case "scores" if table.joins(eqn) or (table.subtracts(eqn) and ins[0] is first):
            return first  # and a bias
        case "scores" if table.selects(eqn) or (table.guards(eqn) and by_number):
            return first  # and a mask
        case "scores" if table.is_maximum(eqn):
            return first._replace(stage="maximum")
        case "maximum" if table.selects(eqn) or table.is_extreme(eqn):
            return first
        case "scores" | "shifted" if table.is_exponential(eqn):
            return first._replace(stage="exps", exps=eqn)
        case "exps" if table.totals(eqn):
            return first._replace(stage="sum")
        case "sum" if table.divides(eqn) and by_number:
            return first._replace(stage="inverse")
    return None


def _joined(eqn: Any, x: _Part, y: _Part) -> _Part | None:
    """Returns what two parts of one attention make, None if they are no two such."""
    if x.scores is not y.scores:
        return None
    match x.stage, y.stage:
        case ("scores", "maximum") if table.subtracts(eqn):
            return x._replace(stage="shifted")
        case ("exps", "sum") if table.divides(eqn) and x.exps is y.exps:
            return x._replace(stage="weights")
        case ("exps", "inverse") if table.multiplies_entries(eqn) and x.exps is y.exps:
            return x._replace(stage="weights")
    return None
