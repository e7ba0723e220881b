"""Attention in a program: what keeps it from cuDNN's kernel, and what is written out.

An attention that is written out is found in the traced program, part by part: a matmul,
at most a scale, a bias and a mask, a softmax, and a matmul of that. Where any part is
missing, or anything else is done to the scores or to the weights, it is none.
"""

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ..._attention.operation import why_not_kernel
from ..._base.gpus import NEWEST, Gpu, default_gpu, weakest
from ..._jaxprs.places import Place
from ..._jaxprs.scopes import ATTENTION, named_in
from ..._jaxprs.sizes import as_number, size_of
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


class Part(NamedTuple):
    """How much of an attention, or of a loss head, a value is."""

    stage: str
    scores: Any  # the matmul that computed them
    exps: Any = None  # the exponentials that were summed up


class Attentions:
    """The attentions of a program that are not cuDNN's kernel, by line and reason."""

    def __init__(self, gpu: Gpu):
        self.gpu = gpu
        self.rows: dict[Any, UnfusedAttention] = {}

    def look(self, eqn: Any, place: Place) -> None:
        """Notes an operation that says why it is not the kernel."""
        if asked := named_in(place.scopes, ATTENTION):  # written out for a reason
            self._note(place, _WRITTEN[asked], 0)
        if is_attention(eqn) and (reason := why_not_kernel(eqn, self.gpu)):
            self._note(place, reason, 0)

    def multiplied(
        self, eqn: Any, ins: Sequence[Part | None], place: Place
    ) -> Part | None:
        """Returns what a matmul makes, and notes an attention that it completes."""
        if not is_matrix_product(eqn):
            return None
        weights = [
            atom.aval
            for atom, x in zip(eqn.invars, ins, strict=True)
            if x and x.stage == "weights" and is_of_attention(x)
        ]
        if not weights or not is_batched(eqn):
            return Part("scores", eqn)
        if named_in(place.scopes, ATTENTION) is None:
            size = as_number(math.prod(weights[0].shape)) * weights[0].dtype.itemsize
            self._note(place, "", int(size) * place.times)
        return None

    def _note(self, place: Place, why: str, size: int) -> None:
        key = place.where, why
        new = UnfusedAttention(why, 0, place.module, place.where, str(self.gpu))
        row = self.rows.get(key, new)
        self.rows[key] = dataclasses.replace(row, bytes=row.bytes + size)


def judge(args: Any) -> Gpu:
    """Returns the GPU by which attention is judged.

    The one on which the arguments are, or are said to be; else JAX's default device; or
    any one that has the kernel, if neither is an NVIDIA GPU.
    """
    for x in jax.tree.leaves(args):
        with contextlib.suppress(AttributeError, ValueError):  # a mesh without devices
            if gpu := weakest(x.sharding.device_set):
                return gpu
    return default_gpu() or NEWEST


def is_of_attention(part: Part | None) -> bool:
    """Whether a part is of an attention, and not of a loss head."""
    return part is not None and is_batched(part.scores)


def made_of(eqn: Any, ins: Sequence[Part | None]) -> Part | None:
    """Returns what an equation makes of such parts, None if no part."""
    parts = [x for x in ins if x is not None]
    if not parts:
        return None
    by_number = any(size_of(x.aval) == 1 for x in eqn.invars)
    first, *others = parts
    if others:
        return _joined(eqn, *parts[:2]) if len(ins) == len(parts) == 2 else None
    match first.stage:
        case "scores" if table.multiplies(eqn) and by_number:
            return first
        case "scores" if table.squashes(eqn) and not is_of_attention(first):
            return first  # a cap
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
        case "sum" if table.is_magnitude(eqn):
            return first  # as JAX takes the logarithm of
        case "sum" if table.divides(eqn) and by_number:
            return first._replace(stage="inverse")
    return None


def _joined(eqn: Any, x: Part, y: Part) -> Part | None:
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
