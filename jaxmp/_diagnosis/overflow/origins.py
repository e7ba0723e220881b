"""Where the first Inf or NaN of each value began, followed on the host.

When a program has run, its jaxpr is gone through once more, each iteration of a loop
for itself, with what was seen of its arrays (:mod:`~.watch`) instead of the arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._base.tree import is_inexact
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation, is_call
from ..._jaxprs.places import Place
from ..._ops.table import is_exact, reduces_tests, tests_finite
from ..wide_replay import widened
from .report import Fault, Line
from .watch import (
    BAD,
    LOW,
    RUNS,
    TOP,
    Looks,
    Watch,
    Watched,
    is_looked_at,
    looked_at,
)

_LARGEST = float(jnp.finfo(jnp.float16).max)
_LOST = float(jnp.finfo(jnp.float16).smallest_subnormal) / 2  # and below
_SHOWN = 3  # operands of an operation whose magnitudes are remembered


class Origin(NamedTuple):
    """Where an Inf or NaN began. What began first is less, as tuples compare."""

    # The number of the operation, in a loop preceded by the number of the loop's first
    # operation and the count of iterations.
    time: tuple[int, ...]
    iterations: tuple[int, ...] = ()  # the indices of the iterations around


# Times that are no operation's: of what was given, of an Inf in the code, of a NaN in
# the code, and of what is finite.
GIVEN, INF_WRITTEN, NAN_WRITTEN, NEVER = 2**30, 2**31 - 3, 2**31 - 2, 2**31 - 1
NOWHERE = Origin((NEVER,))


class Known(NamedTuple):
    """The facts of a value."""

    origin: Origin = NOWHERE  # of its first Inf or NaN
    nan: bool = False  # whether a NaN is in it
    top: float = 0.0  # its largest magnitude
    # What it may hold as it stands: names of arguments, and numbers in the code that
    # float16 does not have.
    holds: frozenset[str | float] = frozenset()


class Look(NamedTuple):
    """What was seen of an array, see :data:`~.watch.TOP`."""

    top: float = 0.0
    low: float = 0.0
    bad: int = 0
    nan: int = 0
    lost: int = 0
    over: int = 0

    @property
    def largest(self) -> float:
        return float("inf") if self.bad > self.nan else self.top


UNSEEN = Look()


@dataclasses.dataclass(eq=False)
class Site:
    """An operation, and what was seen of its floating results.

    Attributes:
        eqn: The operation.
        place: Where it is.
        number: When it comes in the program.
        type: Of its first floating result, else of an input.
        looked: The results that are looked at.
        holds: What it may move or cast, see :class:`Known`.
        look: What was seen in all iterations together.
        runs: How often it ran.
        births: How often Inf or NaN began here.
        kind: Of the first result that is not finite, ``"Inf"`` or ``"NaN"``.
        origin: Where that began.
        inputs: The largest magnitudes of operands then; if all is finite, at the last.
    """

    eqn: Equation
    place: Place
    number: int
    type: Any
    looked: list[int]
    holds: frozenset[Any]
    look: Look = UNSEEN
    runs: int = 0
    births: int = 0
    kind: str = ""
    origin: Origin = NOWHERE
    inputs: tuple[float, ...] = ()

    @functools.cached_property
    def line(self) -> Line:
        place = self.place
        return Line(
            operation=self.eqn.primitive.name,
            dtype=str(np.dtype(self.type.dtype)),
            where=place.where,
            module=place.module,
            backward=place.backward,
            code=place.code,
        )

    @property
    def size(self) -> int:
        """How many numbers are looked at."""
        return sum(self.eqn.outvars[i].aval.size for i in self.looked)

    @property
    def operands(self) -> list[Any]:
        """The types of its floating inputs."""
        return [x.aval for x in self.eqn.invars if is_inexact(x.aval)]

    @property
    def argument(self) -> str:
        """The name of the argument that this casts, empty if it casts none."""
        names = [x for x in self.holds if isinstance(x, str)]
        return names[0] if _jaxpr.is_cast(self.eqn) and len(names) == 1 else ""

    def fault(self, iterations: tuple[int, ...] = ()) -> Fault:
        """Returns what happened here."""
        shown = zip(self.operands, self.inputs, strict=False)
        return Fault(
            **vars(self.line),
            kind=self.kind or "Inf",
            iterations=iterations,
            inputs=tuple((str(x.dtype), x.shape, top) for x, top in shown),
            largest=float(jnp.finfo(self.type.dtype).max),
            finite_in_float32=self.look.over > 0,
        )


class Run:
    """A run of a program.

    Attributes:
        program: The program.
        given: How many NaNs and Infs are in what it was given, by its number.
        sites: Its operations, in the order of the program.
        outs: The origin of the first Inf or NaN of each result.
        failed: The origin of what made an ``isfinite`` check fail.
    """

    def __init__(self, program: Watched, arrays: Sequence[Any]):
        self.program, self.failed = program, NOWHERE
        self.given: dict[int, tuple[int, int]] = {}
        self.sites: list[Site] = []
        self.next = 0  # the number of the next of them
        self.replay = Watch(program)  # which knows what is replayed and how
        self._written: dict[int, Known] = {}
        given = [*program.closed.consts, *arrays]
        with np.errstate(over="ignore"):  # of numbers in the code, said once already
            looks = jax.device_get(program.compiled(*given))
        body = _Iteration(self, looks, Origin(()))
        ins, names = [], program.names
        for i, x in enumerate(given, len(arrays) - len(given)):
            i %= len(names)  # the constants are at the end of the names
            known = Known(Origin((GIVEN + i,)), holds=frozenset([names[i]]))
            ins.append(body.part(x, known))
            if is_inexact(x) and ins[-1].origin != NOWHERE:
                self.given[i] = body.look.nan, body.look.bad - body.look.nan
        outs = body.through(program.jaxpr, ins, program.around)
        types = _jaxpr.out_avals(program.jaxpr)
        self.outs = [
            x.origin if is_inexact(aval) else NOWHERE
            for x, aval in zip(outs, types, strict=True)
        ]

    @property
    def origins(self) -> list[Origin]:
        """Those of what is in results, or made checks fail."""
        return [x for x in [*self.outs, self.failed] if x != NOWHERE]

    @property
    def first(self) -> Origin | None:
        """The first of them that is an operation."""
        return min((x for x in self.origins if x.time[0] < GIVEN), default=None)

    def at(self, origin: Origin) -> Site:
        return self.sites[origin.time[-1]]

    def written(self, numbers: Any) -> Known:
        """Returns the facts of numbers that stand in the code."""
        known = self._written.get(id(numbers))
        if known is None:
            known = self._written[id(numbers)] = _known(numbers)
        return known

    def site(
        self, eqn: Equation, ins: list[Known], around: Place, before: Place
    ) -> Site:
        """Returns the next operation. Each iteration comes to the same ones."""
        number, self.next = self.next, self.next + 1
        if number == len(self.sites):
            place = around.of(eqn, before)
            looked = [] if is_call(eqn) else looked_at(eqn)
            atoms = (x.aval for x in (*eqn.outvars, *eqn.invars))
            type = next(filter(is_inexact, atoms), None)
            type = widened(type) if self.program.wide else type
            moved = ins if is_exact(eqn) or _jaxpr.is_cast(eqn) else ()
            self.sites.append(Site(eqn, place, number, type, looked, _held(moved)))
        return self.sites[number]


class _Iteration:
    """A body of which one iteration is gone through.

    Inf or NaN begins where all that comes in is finite; where it is NaN and what comes
    in is an Inf from outside, such as a mask; and where float32 would have held it.
    """

    look = UNSEEN  # of the last array

    def __init__(self, run: Run, looks: Looks | None, around: Origin):
        """Begins with what was seen; ``around`` is what origins in here begin with.

        What does not run, and the test of a while loop, is gone through without looks.
        """
        self.run, self.around, self.runs = run, around, 0
        self.calls: Iterator[Any] = itertools.repeat(None)
        self._looks: Iterator[Look] = itertools.repeat(UNSEEN)
        if looks is not None:
            self.runs = int(looks.rows[0, RUNS])
            self.calls, self._looks = iter(looks.calls), _looks(looks.rows[1:])

    def through(self, jaxpr: Any, ins: Sequence[Known], place: Place) -> list[Known]:
        """Returns the facts of the results of a jaxpr."""
        before = place

        def apply(eqn: Equation, ins: list[Known]) -> Sequence[Known]:
            nonlocal before
            site = self.run.site(eqn, ins, place, before)
            before = site.place
            return (self.call if is_call(eqn) else self.operation)(site, ins)

        return _jaxpr.interpret(
            jaxpr,
            ins,
            apply,
            const=self.run.written,
            literal=lambda x: self.run.written(x.val),
        )

    def part(self, type: Any, *values: Known) -> Known:
        """Returns the facts of an array that is made of others, and looked at."""
        if not is_looked_at(type):
            return values[-1]
        self.look = look = next(self._looks)
        origin = min(x.origin for x in values) if look.bad else NOWHERE
        return Known(origin, look.nan > 0, look.largest, _held(values))

    def operation(self, site: Site, ins: list[Known]) -> Sequence[Known]:
        eqn = site.eqn
        site.runs += self.runs
        pairs = [*zip(ins, eqn.invars, strict=True)]
        read = [x for x, var in pairs if is_inexact(var.aval)]
        if not site.kind:
            site.inputs = tuple(x.top for x in read[:_SHOWN])
        if not any(is_inexact(x.aval) for x in eqn.outvars):
            # Truth values, which tell of what they have tested.
            tests = tests_finite(eqn)
            tested = [x.origin for x, var in pairs if tests or not is_inexact(var.aval)]
            origin = min(tested, default=NOWHERE)
            if reduces_tests(eqn):
                self.run.failed = min(self.run.failed, origin)
            return [Known(origin)] * len(eqn.outvars)
        if not site.looked:  # each has the magnitudes of the input in its place
            return ins[: len(eqn.outvars)]
        outs = [Known()] * len(eqn.outvars)
        for i in site.looked:
            look, origin = next(self._looks), NOWHERE
            nan = look.nan > 0
            if look.bad:
                origin = min((x.origin for x in read), default=NOWHERE)
                exceeds = look.over or (nan and not any(x.nan for x in read))
                if origin.time[0] >= (GIVEN if exceeds else NAN_WRITTEN):
                    site.births += 1
                    time = (*self.around.time, site.number)
                    origin = self.around._replace(time=time)
                if not site.kind:
                    site.kind, site.origin = "NaN" if nan else "Inf", origin
            site.look = added(site.look, look)
            outs[i] = Known(origin, nan, look.largest, site.holds)
        return outs

    def call(self, site: Site, ins: list[Known]) -> Sequence[Known]:
        """Follows what is known through an equation with bodies."""
        eqn, replay = site.eqn, self.run.replay
        if not replay.apart(eqn):
            jaxpr, ins = replay.written_out(eqn, ins)
            return self.through(jaxpr, ins, site.place.inside(eqn, jaxpr))
        bodies, ran = _jaxpr.call_layout(eqn).bodies, []
        for body, looks in zip(
            bodies, next(self.calls) or [None] * len(bodies), strict=True
        ):
            place = site.place.inside(eqn, body.jaxpr)
            given = [ins[i] for i in body.operands]
            if body.param == "body_jaxpr" or _jaxpr.call_kind(eqn) == "scan":
                return self._loop(eqn, body, given, place, looks)
            one = _Iteration(self.run, looks, self.around)
            outs = one.through(body.jaxpr, given, place)
            ran += [outs] * (one.runs > 0)  # of several branches one
        if not ran:
            return [Known()] * len(eqn.outvars)
        return [_together(*x) for x in zip(*ran, strict=True)]

    def _loop(
        self,
        eqn: Equation,
        body: _jaxpr.Body,
        ins: list[Known],
        place: Place,
        looks: Looks | None,
    ) -> list[Known]:
        """Follows what is known through the iterations of a loop."""
        layout, first = _jaxpr.call_layout(eqn), self.run.next
        start, count = len(ins) - len(eqn.invars), len(layout.fixed_in)
        start += layout.fixed_in.start
        consts, carry, xs = ins[:start], ins[start:][:count], ins[start + count :]
        carry = [Known(*x[:3]) for x in carry]  # of other iterations as well
        types = _jaxpr.in_avals(body.jaxpr)[start:]
        test = layout.bodies[0].jaxpr
        is_batch = test is not body.jaxpr and _jaxpr.out_avals(test)[0].shape
        stacked = [Known()] * (len(eqn.outvars) - count)
        for number, index, seen in _iterations(eqn, looks):
            self.run.next = first
            time = (*self.around.time, first, number)
            around = Origin(time, (*self.around.iterations, index))
            one = _Iteration(self.run, seen, around)
            slices = [*map(one.part, types[count:], xs)]
            outs = one.through(body.jaxpr, [*consts, *carry, *slices], place)
            if is_batch:  # those that have ended wait for the others
                outs = [*map(one.part, types, carry, outs)]
            if one.runs:
                carry = [Known(*x[:3]) for x in outs[:count]]
                stacked = [*map(_together, stacked, outs[count:])]
        return [*carry, *stacked]


def _iterations(
    eqn: Equation, looks: Looks | None
) -> Iterator[tuple[int, int, Looks | None]]:
    """Yields the iterations of a loop in their order, or one if it does not run.

    Of each the count, the index in what a scan takes slices of, and what was seen.
    """
    ran = () if looks is None else np.flatnonzero(looks.rows[:, 0, RUNS])
    for i in ran:
        seen = jax.tree.map(lambda x, i=i: x[i], looks)
        index = number = int(~seen.rows[0, LOW])
        if eqn.params.get("reverse"):
            index = eqn.params["length"] - 1 - number
        yield number, index, seen
    if not len(ran):
        yield 0, 0, None


def _looks(rows: np.ndarray) -> Iterator[Look]:
    """Yields what was seen of each array."""
    top, low = (x.view(np.float32) for x in (rows[:, TOP], -rows[:, LOW]))
    low = np.where(np.isfinite(low), low, 0)
    return map(Look, top.tolist(), low.tolist(), *rows[:, BAD:].T.tolist())


def added(x: Look, y: Look) -> Look:
    """Returns what was seen in several iterations together."""
    low = min(x.low or y.low, y.low or x.low)
    bad, nan, lost, over = (sum(pair) for pair in zip(x[BAD:], y[BAD:], strict=True))
    return Look(max(x.top, y.top), low, int(bad), int(nan), int(lost), int(over))


def _held(values: Sequence[Known]) -> frozenset[Any]:
    """Returns what a value may hold that is one of several."""
    return frozenset().union(*(x.holds for x in values))


def _together(*known: Known) -> Known:
    """Returns the facts of a value that is one of several, or all of them."""
    origins, nans, tops, *_ = zip(*known, strict=True)
    return Known(min(origins), any(nans), max(tops))


def _known(numbers: Any) -> Known:
    """Returns the facts of numbers."""
    if not is_inexact(numbers):
        return Known()
    with np.errstate(over="ignore"):
        sizes = np.abs(np.asarray(numbers)).astype(np.float32)
    nan, finite = bool(np.isnan(sizes).any()), sizes[np.isfinite(sizes)]
    time = NAN_WRITTEN if nan else INF_WRITTEN
    origin = NOWHERE if finite.size == sizes.size else Origin((time,))
    known = Known(origin, nan, float(finite.max(initial=0)))
    if sizes.ndim or sizes == 0 or _LOST < sizes <= _LARGEST:
        return known
    return known._replace(holds=frozenset([float(np.float32(np.real(numbers)))]))
