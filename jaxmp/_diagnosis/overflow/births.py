"""Where the first Inf or NaN of each array was born, followed on the host.

The steps of a program are gone through in the order in which they ran, with the looks
that it has returned (:mod:`~.watch`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation
from .watch import (
    BAD,
    FINITE,
    GIVEN,
    LOST,
    LOW,
    NAN_WRITTEN,
    OVER,
    PEAK,
    RUNS,
    TOP,
    Call,
    Frame,
    Program,
    Site,
    Trail,
    bits_of,
    is_inexact,
    magnitude_of,
)

_SHOWN = 3  # operands of an operation whose magnitudes are remembered

Birth = tuple[tuple[int, ...], tuple[int, ...]]  # see `Trail`


@dataclasses.dataclass
class Seen:
    """What was seen at an operation, in all iterations together.

    Attributes:
        site: The operation.
        number: Its place in the order of the program.
        runs: How often it ran.
        top: The largest finite magnitude.
        low: The smallest that is not zero, 0 if there is none.
        bad: How many values are Inf or NaN.
        lost: How many are zero or subnormal, and would not be in float32.
        over: How many are not finite, and would be in float32.
        births: How often Inf or NaN began here.
        kind: Of the first result that is not finite, ``"Inf"`` or ``"NaN"``.
        born: Where that began.
        inputs: The largest magnitudes of operands then; if all is finite, at the last.
    """

    site: Site
    number: int
    runs: int
    top: float
    low: float
    bad: int
    lost: int
    over: int
    births: int = 0
    kind: str = ""
    born: Birth = FINITE.born
    inputs: tuple[float, ...] = ()


class Run:
    """A run of a program.

    Attributes:
        program: The program.
        given: What it was given with Inf or NaN: how many NaNs and Infs, by the number.
        seen: What was seen at each operation, in the order of the program.
        outs: Where the first Inf or NaN of each result was born.
        failed: Where that was born which made a test of finiteness fail.
    """

    def __init__(self, program: Program, arrays: Sequence[Any]):
        """Runs a program."""
        self.program = program
        looks = program.run(arrays)
        self.seen: list[Seen] = []
        self._of: dict[Site, Seen] = {}
        self._firsts: dict[int, int] = {}  # of the operations of a frame, by its `id`
        self._collect(program.frame, looks)
        self.failed: Birth = FINITE.born
        consts = _jaxpr.closed_consts(program.jaxpr)
        ins = [Trail(((GIVEN + i,), ())) for i in range(len(program.names))]
        outs = self._follow(program.frame, ins, looks, (), ())
        types = _jaxpr.out_avals(program.jaxpr)
        self.outs = [
            x.born if is_inexact(aval) else FINITE.born
            for x, aval in zip(outs, types, strict=True)
        ]
        floating = [i for i, x in enumerate([*arrays, *consts]) if is_inexact(x)]
        # These are looked at first, behind the row that counts.
        bad = [i for row, i in enumerate(floating, 1) if looks[0][row, BAD]]
        self.given = {i: _counted([*arrays, *consts][i]) for i in bad}

    @property
    def births(self) -> list[Birth]:
        """Where that was born which is in results, or made tests fail."""
        return [x for x in [*self.outs, self.failed] if x != FINITE.born]

    @property
    def first(self) -> Birth | None:
        """The first of them that is of an operation."""
        return min((x for x in self.births if x[0][0] < GIVEN), default=None)

    def at(self, birth: Birth) -> Seen:
        """Returns what was seen at the operation of a birth."""
        return self.seen[birth[0][-1]]

    def _collect(self, frame: Frame, looks: Any) -> None:
        """Puts together what was seen at each operation in all iterations."""
        rows, inner = looks
        self._firsts[id(frame)] = len(self.seen)
        rows, inner = rows.reshape(-1, *rows.shape[-2:]), iter(inner)
        counts = rows.sum(axis=0, dtype=np.int64)
        for step in frame.steps:
            if isinstance(step, Call):
                for body, seen in zip(step.frames, next(inner), strict=True):
                    is_kept = isinstance(seen, dict)
                    self._collect(body, seen["rows"] if is_kept else seen)
            elif step.site is not None:
                low = int(rows[:, step.row, LOW].min()) + 1
                is_there = low < bits_of(np.inf, step.dtype)
                seen = Seen(
                    site=step.site,
                    number=len(self.seen),
                    runs=int(counts[0, RUNS]),
                    top=magnitude_of(rows[:, step.row, TOP].max(), step.dtype),
                    low=magnitude_of(low, step.dtype) if is_there else 0.0,
                    bad=int(counts[step.row, BAD]),
                    lost=int(counts[step.row, LOST]),
                    over=int(counts[step.row, OVER]),
                )
                self.seen.append(seen)
                self._of[step.site] = seen

    def _follow(
        self,
        frame: Frame,
        ins: Sequence[Trail],
        looks: Any,
        clock: tuple[int, ...],
        trips: tuple[int, ...],
    ) -> list[Trail]:
        """Follows the trails of values through a body.

        What is not finite is born where nothing that comes in is not finite; where it
        is NaN and what comes in is an Inf from outside, such as a mask; and where
        float32 would have held it.

        Args:
            frame: The body.
            ins: The trails of its inputs.
            looks: What was seen in it.
            clock: What precedes the number of its operations in a moment.
            trips: The indices of the iterations around.
        """
        rows, inner = looks
        trails: list[Any] = list(frame.trails)
        inner = iter(inner)
        for number, trail in zip(frame.ins, ins, strict=True):
            trails[number] = trail
        for step in frame.steps:
            came = [trails[i] for i in step.ins]
            if isinstance(step, Call):
                outs = self._call(step, came, next(inner), clock, trips)
                for number, trail in zip(step.outs, outs, strict=True):
                    trails[number] = trail
                continue
            source = min((x.born for x in came), default=FINITE.born)
            if step.row is None:
                trails[step.out] = Trail(source)
                self.failed = min(self.failed, source if step.is_test else self.failed)
                continue
            look = rows[step.row]
            nan, bad = bool(look[PEAK] > bits_of(np.inf, step.dtype)), look[BAD] > 0
            born = source if bad else FINITE.born
            if step.site is not None:
                seen = self._of[step.site]
                exceeds = look[OVER] > 0 or (nan and not any(x.nan for x in came))
                outside = source[0][0] >= GIVEN and exceeds
                if bad and (outside or source[0][0] >= NAN_WRITTEN):
                    born, seen.births = ((*clock, seen.number), trips), seen.births + 1
                if not seen.kind:
                    seen.inputs = tuple(x.top for x in came[:_SHOWN])
                if bad and not seen.kind:
                    seen.kind, seen.born = "NaN" if nan else "Inf", born
            top = magnitude_of(look[TOP], step.dtype)
            trails[step.out] = Trail(born, nan, top)
        return [trails[i] for i in frame.outs]

    def _call(
        self,
        step: Call,
        ins: list[Trail],
        looks: Any,
        clock: tuple[int, ...],
        trips: tuple[int, ...],
    ) -> list[Trail]:
        """Follows the trails through an equation with bodies."""
        eqn, kind = step.eqn, _jaxpr.call_kind(step.eqn)
        if kind in ("remat", "shard_map"):
            return self._follow(step.frames[0], ins, looks[0], clock, trips)
        if kind == "cond":
            ran = [
                self._follow(frame, ins[1:], branch, clock, trips)
                for frame, branch in zip(step.frames, looks, strict=True)
                if branch[0][0, RUNS]
            ]
            return [_together(*x) for x in zip(*ran, strict=True)]
        if kind == "scan":
            consts, carries = _jaxpr.scan_counts(eqn)
        else:
            consts, carries = eqn.params["body_nconsts"], len(step.outs)
            ins = ins[eqn.params["cond_nconsts"] :]
        carry, xs = ins[consts:][:carries], ins[consts + carries :]
        stacked = [FINITE] * (len(step.outs) - carries)
        ((frame,), (seen,)) = step.frames, looks
        first = self._firsts[id(frame)]
        for trip, index, look in _iterations(eqn, seen):
            moment, around = (*clock, first, trip), (*trips, index)
            values = [*ins[:consts], *carry, *xs]
            outs = self._follow(frame, values, look, moment, around)
            carry = outs[:carries]
            pairs = zip(stacked, outs[carries:], strict=True)
            stacked = [_together(*pair) for pair in pairs]
        return [*carry, *stacked]


def _iterations(eqn: Equation, looks: Any) -> Iterator[tuple[int, int, Any]]:
    """Yields the iterations of a loop in their order.

    Of each the count, the index in what a scan takes slices of, and what was seen.
    Those without an Inf or NaN are one, as all they tell is how large numbers were; but
    the last of them, which tells what the next iteration was given.
    """
    length, reverse = eqn.params.get("length"), eqn.params.get("reverse")
    counts = order = [*range(length or 0)]
    if isinstance(looks, dict):  # of what a loop has kept
        first, looks = int(looks["first"][LOW]), looks["rows"]
        order = [int(i) for i in np.flatnonzero(looks[0][:, 0, RUNS])]
        counts = [first + i - 1 if i else 0 for i in order]
    elif reverse:
        order = order[::-1]
    bad = [
        any((x[i, ..., BAD] > 0).any() for x in jax.tree.leaves(looks)) for i in order
    ]
    quiet: list[int] = []
    for count, i, *are_bad in zip(counts, order, bad, [*bad[1:], True], strict=True):
        if not any(are_bad):
            quiet.append(i)
            continue
        index = length - 1 - count if reverse else count
        for several in filter(None, (quiet, [i])):
            yield count, index, jax.tree.map(lambda x, i=several: _all(x[i]), looks)
        quiet = []


def _all(x: np.ndarray) -> np.ndarray:
    """Returns what was seen in several iterations together."""
    largest, low = x[..., :LOW].max(axis=0), x[..., LOW:BAD].min(axis=0)
    counts = x[..., BAD:].sum(axis=0, dtype=np.int64)
    return np.concatenate([largest, low, counts], axis=-1)


def _together(*trails: Trail) -> Trail:
    """Returns the trail of what is one of several, or all of them."""
    return Trail(
        min(x.born for x in trails),
        any(x.nan for x in trails),
        max(x.top for x in trails),
    )


def _counted(x: Any) -> tuple[int, int]:
    """Returns how many NaNs and Infs are in an array."""
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    return int(jnp.isnan(x).sum()), int(jnp.isinf(x).sum())
