"""Where the first Inf or NaN of each array began, followed on the host.

The steps of a program are gone through in the order in which they ran, with the
statistics that it has returned (:mod:`~.watch`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._base.tree import is_inexact
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation
from ..._training.exponents import real_parts
from .watch import (
    BAD,
    FINITE,
    GIVEN,
    INFINITE,
    LOST,
    LOW,
    NAN_WRITTEN,
    OVER,
    PEAK,
    RUNS,
    TOP,
    Call,
    Frame,
    Known,
    Origin,
    Program,
    Site,
    magnitude_of,
    merged,
)

_SHOWN = 3  # operands of an operation whose magnitudes are remembered


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
        origins: How often Inf or NaN began here.
        kind: Of the first result that is not finite, ``"Inf"`` or ``"NaN"``.
        origin: Where that began.
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
    origins: int = 0
    kind: str = ""
    origin: Origin = FINITE.origin
    inputs: tuple[float, ...] = ()


class Run:
    """A run of a program.

    Attributes:
        program: The program.
        given: What it was given with Inf or NaN: how many NaNs and Infs, by the number.
        seen: What was seen at each operation, in the order of the program.
        outs: The origin of the first Inf or NaN of each result.
        failed: The origin of what made an ``isfinite`` check fail.
    """

    def __init__(self, program: Program, arrays: Sequence[Any]):
        self.program = program
        stats = program.run(arrays)
        self.seen: list[Seen] = []
        self._of: dict[Site, Seen] = {}
        self._firsts: dict[int, int] = {}  # of the operations of a frame, by its `id`
        self._collect(program.frame, stats)
        self.failed: Origin = FINITE.origin
        arrays = [*arrays, *_jaxpr.closed_consts(program.jaxpr)]
        ins = [Known(Origin((GIVEN + i,))) for i in range(len(program.names))]
        outs = self._follow(program.frame, ins, stats, Origin(()))
        types = _jaxpr.out_avals(program.jaxpr)
        self.outs = [
            x.origin if is_inexact(aval) else FINITE.origin
            for x, aval in zip(outs, types, strict=True)
        ]
        floating = [i for i, x in enumerate(arrays) if is_inexact(x)]
        # These are looked at first, behind the row that counts.
        bad = [i for row, i in enumerate(floating, 1) if stats[0][row, BAD]]
        self.given = {i: _counted(arrays[i]) for i in bad}

    @property
    def origins(self) -> list[Origin]:
        """Those of what is in results, or made checks fail."""
        return [x for x in [*self.outs, self.failed] if x != FINITE.origin]

    @property
    def first(self) -> Origin | None:
        """The first of them that is an operation."""
        return min((x for x in self.origins if x.time[0] < GIVEN), default=None)

    def at(self, origin: Origin) -> Seen:
        """Returns what was seen at an origin."""
        return self.seen[origin.time[-1]]

    def _collect(self, frame: Frame, stats: Any) -> None:
        """Puts together what was seen at each operation in all iterations."""
        rows, inner = stats
        self._firsts[id(frame)] = len(self.seen)
        rows, inner = merged(rows.reshape(-1, *rows.shape[-2:])), iter(inner)
        for step in frame.steps:
            if isinstance(step, Call):
                for body, seen in zip(step.frames, next(inner), strict=True):
                    is_kept = isinstance(seen, dict)
                    self._collect(body, seen["rows"] if is_kept else seen)
            elif step.site is not None:
                row = rows[step.row]
                low = int(row[LOW]) + 1
                is_there = low < INFINITE
                seen = Seen(
                    site=step.site,
                    number=len(self.seen),
                    runs=int(rows[0, RUNS]),
                    top=magnitude_of(row[TOP]),
                    low=magnitude_of(low) if is_there else 0.0,
                    bad=int(row[BAD]),
                    lost=int(row[LOST]),
                    over=int(row[OVER]),
                )
                self.seen.append(seen)
                self._of[step.site] = seen

    def _follow(
        self, frame: Frame, ins: Sequence[Known], stats: Any, around: Origin
    ) -> list[Known]:
        """Follows what is known of values through a body, to its results.

        Inf or NaN begins where all that comes in is finite; where it is NaN and what
        comes in is an Inf from outside, such as a mask; and where float32 would have
        held it. ``around`` is what the origins in the body begin with.
        """
        rows, inner = stats
        known: list[Any] = list(frame.known)
        inner = iter(inner)
        for number, x in zip(frame.ins, ins, strict=True):
            known[number] = x
        for step in frame.steps:
            came = [known[i] for i in step.ins]
            if isinstance(step, Call):
                outs = self._call(step, came, next(inner), around)
                for number, x in zip(step.outs, outs, strict=True):
                    known[number] = x
                continue
            source = min((x.origin for x in came), default=FINITE.origin)
            if step.row is None:
                known[step.out] = Known(source)
                self.failed = min(self.failed, source if step.is_test else self.failed)
                continue
            row = rows[step.row]
            nan, bad = bool(row[PEAK] > INFINITE), row[BAD] > 0
            origin = source if bad else FINITE.origin
            if step.site is not None:
                seen = self._of[step.site]
                exceeds = row[OVER] > 0 or (nan and not any(x.nan for x in came))
                outside = source.time[0] >= GIVEN and exceeds
                if bad and (outside or source.time[0] >= NAN_WRITTEN):
                    origin = around._replace(time=(*around.time, seen.number))
                    seen.origins += 1
                if not seen.kind:
                    seen.inputs = tuple(x.top for x in came[:_SHOWN])
                if bad and not seen.kind:
                    seen.kind, seen.origin = "NaN" if nan else "Inf", origin
            known[step.out] = Known(origin, nan, magnitude_of(row[TOP]))
        return [known[i] for i in frame.outs]

    def _call(
        self, step: Call, ins: list[Known], stats: Any, around: Origin
    ) -> list[Known]:
        """Follows what is known through an equation with bodies."""
        eqn, kind = step.eqn, _jaxpr.call_kind(step.eqn)
        if kind in ("remat", "shard_map"):
            return self._follow(step.frames[0], ins, stats[0], around)
        if kind == "cond":
            ran = [
                self._follow(frame, ins[1:], branch, around)
                for frame, branch in zip(step.frames, stats, strict=True)
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
        ((frame,), (seen,)) = step.frames, stats
        first = self._firsts[id(frame)]
        for trip, index, one in _iterations(eqn, seen):
            inside = Origin((*around.time, first, trip), (*around.trips, index))
            outs = self._follow(frame, [*ins[:consts], *carry, *xs], one, inside)
            carry = outs[:carries]
            pairs = zip(stacked, outs[carries:], strict=True)
            stacked = [_together(*pair) for pair in pairs]
        return [*carry, *stacked]


def _iterations(eqn: Equation, stats: Any) -> Iterator[tuple[int, int, Any]]:
    """Yields the iterations of a loop in their order.

    Of each the count, the index in what a scan takes slices of, and what was seen.
    Those without an Inf or NaN are one, as all they tell is how large numbers were; but
    the last of them, which tells what the next iteration was given.
    """
    length, reverse = eqn.params.get("length"), eqn.params.get("reverse")
    counts = order = [*range(length or 0)]
    if isinstance(stats, dict):  # of what a loop has kept
        first, stats = int(stats["first"][LOW]), stats["rows"]
        order = [int(i) for i in np.flatnonzero(stats[0][:, 0, RUNS])]
        counts = [first + i - 1 if i else 0 for i in order]
    elif reverse:
        order = order[::-1]
    bad = [
        any((x[i, ..., BAD] > 0).any() for x in jax.tree.leaves(stats)) for i in order
    ]
    quiet: list[int] = []
    for count, i, *are_bad in zip(counts, order, bad, [*bad[1:], True], strict=True):
        if not any(are_bad):
            quiet.append(i)
            continue
        index = length - 1 - count if reverse else count
        for several in filter(None, (quiet, [i])):
            yield count, index, jax.tree.map(lambda x, i=several: merged(x[i]), stats)
        quiet = []


def _together(*known: Known) -> Known:
    """Returns what is known of a value that is one of several, or all of them."""
    origins, nans, tops = zip(*known, strict=True)
    return Known(min(origins), any(nans), max(tops))


def _counted(x: Any) -> tuple[int, int]:
    """Returns how many NaNs and Infs are in an array."""
    x = real_parts(jnp.asarray(x))
    return int(jnp.isnan(x).sum()), int(jnp.isinf(x).sum())
