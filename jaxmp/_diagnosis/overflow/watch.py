"""A program that returns statistics of what each operation gives: a few counts.

A jaxpr is replayed as it stands, and loops stack those of their iterations. What
depends on what is remembered as steps, along which :mod:`~.origins` follows Inf and NaN
once the program has run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._base.dtypes import is_narrow
from ..._base.tree import is_inexact
from ..._devices.varying import vary
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation
from ..._jaxprs.places import Place
from ..._jaxprs.replay import Body, Replay
from ..._ops.table import (
    is_exact,
    is_sum,
    keeps_magnitudes,
    reduces_tests,
    tests_finite,
)
from ..._training.exponents import magnitude_bits, real_parts
from ..wide_replay import (
    before_rounding,
    bind_wide,
    jitted,
    platform_of,
    wide_literal,
    widened,
)
from .report import Line, line_of

# What is seen of an array, uint32[6]. Magnitudes are their bits, which are ordered in
# the same way: a CPU takes subnormal numbers for zeros. `LOW` is that of the smallest
# number that is not zero, less one; what is zero is then beyond all others.
TOP, PEAK, LOW, BAD, LOST, OVER = range(6)
# The largest finite magnitude; the largest, Inf and NaN too; `LOW`; how many are Inf or
# NaN; are zero or subnormal and not in float32; are not finite and are in float32.
NOTHING = np.uint32(2**32 - 1)
INFINITE = np.float32(np.inf).view(np.uint32)
_UNSEEN = np.array([0, 0, NOTHING, 0, 0, 0], np.uint32)
# Each body begins with such a row, which counts how often it runs.
_RUN = np.array([0, 0, NOTHING, 0, 0, 1], np.uint32)
RUNS = OVER

# A loop stacks no more rows than these, and a while loop keeps so many iterations, from
# the first with an Inf or NaN on. Those before are one, and those after.
_MOST_ROWS, _MOST_TRIPS = 2**22, 64
_TOGETHER = 2**20  # numbers that wait to be looked at together

LARGEST = float(jnp.finfo(jnp.float16).max)
_LOST = float(jnp.finfo(jnp.float16).smallest_subnormal) / 2  # and below


class Origin(NamedTuple):
    """Where an Inf or NaN began. What began first is less, as tuples compare."""

    # The number of the operation, in a loop preceded by the number of the loop's first
    # operation and the count of iterations.
    time: tuple[int, ...]
    trips: tuple[int, ...] = ()  # the indices of the iterations around


class Known(NamedTuple):
    """What is known of an array."""

    origin: Origin  # of its first Inf or NaN
    nan: bool = False  # whether a NaN is in it
    top: float = 0.0  # its largest finite magnitude


# Times that are no operation's: of what was given, of an Inf in the code, of a NaN in
# the code, and of what is finite.
GIVEN, INF_WRITTEN, NAN_WRITTEN, NEVER = 2**30, 2**31 - 3, 2**31 - 2, 2**31 - 1
FINITE = Known(Origin((NEVER,)))


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """A floating result of an operation of the program."""

    eqn: Equation
    place: Place
    dtype: np.dtype
    size: int
    operands: tuple[Any, ...]  # types of its floating inputs
    computes: bool  # and does not only move or choose between values
    is_cast: bool
    numbers: frozenset[float]  # in the code, outside float16, that it may read
    argument: str  # the name of what the program is given and it casts

    @functools.cached_property
    def line(self) -> Line:
        return line_of(self.eqn.primitive.name, self.dtype, self.place)


class Step(NamedTuple):
    """An array that was looked at, or a truth value that tells of some.

    ``ins`` and ``out`` are numbers of values in the frame, ``row`` that of statistics.
    """

    ins: tuple[int, ...]
    out: int
    row: int | None = None  # None of a truth value
    site: Site | None = None  # None of a slice, or of what the program is given
    is_test: bool = False  # makes one truth value of many


class Call(NamedTuple):
    """An equation with bodies that are traced on their own."""

    eqn: Equation
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    frames: list[Frame]


@dataclasses.dataclass
class Frame:
    """The steps of a body, and of what is written out in it."""

    steps: list[Step | Call] = dataclasses.field(default_factory=list)
    ins: tuple[int, ...] = ()
    outs: tuple[int, ...] = ()
    # Of what is known beforehand: nothing that is not floating is 0.
    known: list[Known | None] = dataclasses.field(default_factory=lambda: [FINITE])

    def add(self, known: Known | None = None) -> int:
        """Returns the number of a new value."""
        self.known.append(known)
        return len(self.known) - 1


class Value(NamedTuple):
    """An array, its number in the frame, and what is known of it beforehand."""

    array: Any
    number: int = 0
    # Numbers in the code that it may hold as they stand, and that are Inf or zero in
    # float16.
    numbers: frozenset[float] = frozenset()
    argument: str = ""  # its name, if the program is given it


class Program:
    """A jaxpr that is replayed, and compiled once.

    Attributes:
        names: Of what it is given: its inputs and its constants.
        frame: Its steps, once it was traced.
        notes: Where nothing could be seen, an ordered set.
    """

    def __init__(
        self, jaxpr: Any, names: Sequence[str], around: Place, *, wide: bool = False
    ):
        """Prepares to replay a jaxpr with named inputs; ``wide`` is in float32."""
        self.jaxpr, self.around, self.wide = jaxpr, around, wide
        consts = _jaxpr.closed_consts(jaxpr)
        told = [f"closed-over {jnp.result_type(x)}{[*jnp.shape(x)]}" for x in consts]
        self.names, self.platform = [*names, *told], "cpu"
        self.frame, self.notes = Frame(), dict[str, None]()
        self._compiled: Any = None

    def run(self, arrays: Sequence[Any]) -> Any:
        if self._compiled is None:
            self.platform = platform_of(arrays)
            self._compiled = jitted(self.replay, self.platform)
        with np.errstate(over="ignore"):  # of numbers in the code, said once already
            return jax.device_get(self._compiled(*arrays))

    def replay(self, *arrays: Any) -> Any:
        watch = Watch(self)
        consts = _unfolded(_jaxpr.closed_consts(self.jaxpr))
        given = [widened(x) if self.wide else x for x in (*arrays, *consts)]
        values = watch.entered(given, [None] * len(given))
        values = [
            watch.part(x, value)._replace(argument=name)
            for x, value, name in zip(given, values, self.names, strict=True)
        ]
        count = len(arrays)
        outs = watch.run(self.jaxpr, values[:count], self.around, values[count:])
        self.frame = watch.frame
        return watch.seen(outs)


class Watch(Replay):
    """The replay of a body, which looks at what its operations give."""

    value = Value

    def __init__(self, program: Program, axes: tuple[Any, ...] = ()):
        super().__init__(program.platform, axes=axes)
        self.program, self.frame = program, Frame()
        self._count = 1  # of rows
        self._waiting: dict[Any, list[Any]] = {}  # arrays of one type, with their rows
        self._rows: list[int] = [0]
        self._stats: list[Any] = [jnp.asarray(_RUN)[None]]  # of these rows
        self._inner: list[Any] = []  # statistics of bodies

    def inside(self, scalars: Any, axes: tuple[Any, ...]) -> Watch:
        del scalars
        return Watch(self.program, axes)

    def constant(self, array: Any) -> Value:
        if not is_inexact(array):
            return Value(array)
        return self._known(widened(array) if self.program.wide else array, array)

    def literal(self, literal: Any) -> Value:
        value = wide_literal(literal) if self.program.wide else literal.val
        if not is_inexact(literal.aval):
            return Value(value)
        with np.errstate(over="ignore"):
            found = np.unique(np.asarray(np.real(literal.val), np.float32))
        sizes = np.abs(found)
        is_outside = (sizes > LARGEST) | ((sizes > 0) & (sizes <= _LOST))
        numbers = frozenset(map(float, found[is_outside])) if found.size == 1 else ()
        return self._known(value, value)._replace(numbers=frozenset(numbers))

    def _known(self, array: Any, numbers: Any) -> Value:
        """Returns an array whose numbers are known."""
        with np.errstate(over="ignore"):
            sizes = np.abs(np.asarray(numbers)).astype(np.float32)
        nan, finite = bool(np.isnan(sizes).any()), sizes[np.isfinite(sizes)]
        is_finite = finite.size == sizes.size
        time = NEVER if is_finite else NAN_WRITTEN if nan else INF_WRITTEN
        known = Known(Origin((time,)), nan, float(finite.max(initial=0)))
        return Value(array, self.frame.add(known))

    def entered(self, arrays: Sequence[Any], outside: Sequence[Any]) -> list[Value]:
        self.frame.ins = tuple(self.frame.add() for _ in arrays)
        numbers = [frozenset() if x is None else x.numbers for x in outside]
        return [*map(Value, arrays, self.frame.ins, numbers)]

    def part(self, array: Any, *values: Value) -> Value:
        """Looks at a slice or a mixture, whose Inf or NaN began where theirs did."""
        if not is_inexact(array):
            return values[-1]._replace(array=array)
        number = self._measure(array, tuple(x.number for x in values))
        return values[-1]._replace(array=array, number=number)

    def _measure(
        self,
        array: Any,
        ins: tuple[int, ...],
        site: Site | None = None,
        in_float32: Any = None,
    ) -> int:
        """Looks at an array, and returns its number.

        Small arrays of one type are looked at together, because compiling takes longer.
        """
        step = Step(ins, self.frame.add(), self._count, site)
        self.frame.steps.append(step)
        self._count += 1
        is_whole = site is not None and site.computes
        key = jax.typeof(array), is_whole, in_float32 is None
        waiting = self._waiting.setdefault(key, [])
        waiting.append((step.row, array, in_float32))
        if len(waiting) * array.size > _TOGETHER:
            self._measure_all(key)
        return step.out

    def _measure_all(self, key: Any) -> None:
        rows, arrays, in_float32 = zip(*self._waiting.pop(key), strict=True)
        wide = None if in_float32[0] is None else jnp.stack(in_float32)
        self._rows += rows
        self._stats.append(
            statistics(jnp.stack([*map(real_parts, arrays)]), wide, is_whole=key[1])
        )

    def operation(self, eqn: Equation, ins: list[Value], place: Place) -> list[Value]:
        arrays, name = [x.array for x in ins], eqn.primitive.name
        if any(_jaxpr.sub_jaxprs(eqn)) and not is_sum(eqn):
            self.note(f"the search does not see inside `{name}`", place)
        # Whether it gives the same whatever the program is given.
        is_made = all(isinstance(x, _jaxpr.Literal) for x in eqn.invars)
        if is_made:
            arrays = _unfolded(arrays)
        wide = self.program.wide
        outs = bind_wide(eqn, arrays) if wide else _jaxpr.bind(eqn, arrays)
        if is_made and not arrays:
            outs = _unfolded(outs)
        if not any(map(is_inexact, outs)):
            return self._truths(eqn, ins, outs)
        if _keeps_magnitudes(eqn):
            return [ins[i]._replace(array=x) for i, x in enumerate(outs)]
        exact, is_cast = is_exact(eqn), _jaxpr.is_cast(eqn)
        in_float32 = None if exact or wide else before_rounding(eqn, arrays)
        read = [
            (x, var.aval)
            for x, var in zip(ins, eqn.invars, strict=True)
            if is_inexact(var.aval)
        ]
        numbers: frozenset[float] = frozenset().union(*(x.numbers for x in ins))
        values = []
        for x in outs:
            if not is_inexact(x):
                values.append(Value(x))
                continue
            site = Site(
                eqn=eqn,
                place=place,
                dtype=x.dtype,
                size=int(x.size),
                operands=tuple(aval for _, aval in read),
                computes=bool(read) and not exact,
                is_cast=is_cast,
                numbers=numbers,
                argument=ins[0].argument if is_cast else "",
            )
            number = self._measure(
                x, tuple(y.number for y, _ in read), site, in_float32
            )
            kept = numbers if exact or is_cast else frozenset()
            values.append(Value(x, number, kept))
        return values

    def _truths(self, eqn: Equation, ins: list[Value], outs: list[Any]) -> list[Value]:
        """Returns truth values, which tell of what they have tested."""
        tests = tests_finite(eqn)
        pairs = zip(ins, eqn.invars, strict=True)
        tested = [x.number for x, var in pairs if tests or not is_inexact(var.aval)]
        tested = tuple(filter(None, tested))
        if not tested:
            return [Value(x) for x in outs]
        number = self.frame.add()
        step = Step(tested, number, is_test=reduces_tests(eqn))
        self.frame.steps.append(step)
        return [Value(x, number) for x in outs]

    def note(self, text: str, place: Place) -> None:
        """Remembers where nothing could be seen."""
        self.program.notes[f"{place.line or 'somewhere'}: {text}"] = None

    def seen(self, outs: Sequence[Value]) -> Any:
        """Returns the statistics of a body: its own rows, and those of bodies in it."""
        self.frame.outs = tuple(x.number for x in outs)
        for key in [*self._waiting]:
            self._measure_all(key)
        stats = jnp.concatenate([self._marked(x) for x in self._stats])
        return stats[np.argsort(self._rows)], tuple(self._inner)

    def results(
        self, eqn: Equation, ins: list[Value], arrays: list[Any], bodies: list[Body]
    ) -> list[Value]:
        """Returns the results of bodies. The test of a while loop is not looked at."""
        if _jaxpr.call_kind(eqn) == "while":
            test, *bodies = bodies
            eqns = _jaxpr.open_jaxpr(test.jaxpr).eqns
            if any(_jaxpr.is_inexact(var) for eqn in eqns for var in eqn.outvars):
                self.note("the condition of a while loop is not searched", test.place)
        outs = tuple(self.frame.add() for _ in arrays)
        frames = [x.replay.frame for x in bodies]
        self.frame.steps.append(Call(eqn, tuple(x.number for x in ins), outs, frames))
        seen = [x.seen for x in bodies]
        if _jaxpr.call_kind(eqn) in ("scan", "while"):
            ((state, stacked),) = seen
            seen = [{x: state[x] for x in ("first", "rows")} if state else stacked]
        self._inner.append(seen)
        return [*map(Value, arrays, outs)]

    # Rows of loops, branches and shards.

    def first(self, seen: Any, length: int | None) -> Any:
        """Returns the rows that a loop carries along if it does not stack them."""
        count = sum(x.size // 6 for x in jax.tree.leaves(seen))
        if length is not None and length * count <= _MOST_ROWS:
            return {}
        kept = min(max(_MOST_ROWS // count, 2), _MOST_TRIPS) + 1
        rows = jax.tree.map(lambda x: _unseen((kept, *x.shape)), seen)
        state = {"trip": np.uint32(0), "row": np.uint32(0), "first": _UNSEEN}
        return self._marked(jax.tree.map(jnp.asarray, state | {"rows": rows}))

    def after(self, state: Any, seen: Any) -> tuple[Any, Any]:
        """Adds the statistics of an iteration to those that a loop carries along."""
        if not state:
            return state, seen
        trip, row, rows = state["trip"], state["row"], state["rows"]
        bad = jnp.stack([jnp.any(x[..., BAD] > 0) for x in jax.tree.leaves(seen)])
        begins = (row == 0) & jnp.any(bad)
        last = jax.tree.leaves(rows)[0].shape[0] - 1
        row = jnp.where(row > 0, jnp.minimum(row + 1, last), begins.astype(row.dtype))
        first = state["first"].at[LOW].min(jnp.where(begins, trip, NOTHING))
        rows = jax.tree.map(lambda x, y: x.at[row].set(_merged(x[row], y)), rows, seen)
        return {"trip": trip + 1, "row": row, "first": first, "rows": rows}, ()

    def nothing(self, seen: Any) -> Any:
        return self._marked(jax.tree.map(lambda x: _unseen(x.shape), seen))

    def together(self, seen: Any, axes: tuple[Any, ...]) -> Any:
        """Puts together the statistics of the devices along mesh axes."""

        def of_all(x):
            largest, low = lax.pmax(x[..., :LOW], axes), lax.pmin(x[..., LOW:BAD], axes)
            counts = lax.psum(x[..., BAD:].astype(jnp.float32), axes)
            counts = jnp.minimum(counts, 2.0**31).astype(jnp.uint32)
            return jnp.concatenate([largest, low, counts], axis=-1)

        return jax.tree.map(of_all, seen)

    def _marked(self, tree: Any) -> Any:
        """Marks what differs between the devices of a shard_map around."""
        return vary(tree, self.axes) if self.axes else tree


def merged(stats: np.ndarray) -> np.ndarray:
    """Returns what was seen in several iterations together, on the host."""
    largest, low = stats[..., :LOW].max(axis=0), stats[..., LOW:BAD].min(axis=0)
    counts = stats[..., BAD:].sum(axis=0, dtype=np.int64)
    return np.concatenate([largest, low, counts], axis=-1)


def _unseen(shape: tuple[int, ...]) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(_UNSEEN), shape)


def _merged(x: jax.Array, y: jax.Array) -> jax.Array:
    """Puts together what was seen earlier and later."""
    counts = x[..., BAD:] + y[..., BAD:]
    counts = jnp.where(counts < x[..., BAD:], NOTHING, counts)  # it has overflown
    columns = [
        jnp.maximum(x[..., :LOW], y[..., :LOW]),
        jnp.minimum(x[..., LOW:BAD], y[..., LOW:BAD]),
        counts,
    ]
    return jnp.concatenate(columns, axis=-1)


def _keeps_magnitudes(eqn: Equation) -> bool:
    """Whether each result has the magnitudes of the input in its place."""
    pairs = [*zip(eqn.invars, eqn.outvars, strict=False)]
    if len(pairs) < len(eqn.outvars):
        return False
    same = all(x.aval.dtype == y.aval.dtype for x, y in pairs)
    if keeps_magnitudes(eqn):
        return same
    return _jaxpr.is_cast(eqn) and (
        same or (is_narrow(pairs[0][0].aval) and _jaxpr.is_float32(pairs[0][1]))
    )


def _unfolded(arrays: Sequence[Any]) -> list[Any]:
    """Returns arrays that XLA does not know to be constant.

    It would find what is seen of constants while it compiles, number by number, which
    takes minutes for a whole program.
    """
    return [lax.optimization_barrier(jnp.asarray(x)) for x in arrays]


# Statistics.


@functools.partial(jax.jit, static_argnames="is_whole")  # traced once for each type
def statistics(
    xs: jax.Array, in_float32: jax.Array | None = None, *, is_whole: bool = True
) -> jax.Array:
    """Returns the statistics of real arrays.

    Args:
        xs: The arrays, stacked.
        in_float32: The same before they were rounded.
        is_whole: Whether to count more than Inf, NaN and the largest magnitude.

    Returns:
        An array uint32[arrays, 6], see `TOP`.
    """
    bits = _bits(xs)
    bad = bits >= INFINITE
    columns = {TOP: jnp.where(bad, 0, bits), PEAK: bits}
    if is_whole:
        columns |= {LOW: bits - 1, BAD: bad.astype(jnp.uint32)}
    if in_float32 is not None:
        wide, first = _bits(in_float32), jnp.finfo(xs.dtype).tiny
        first_normal = np.asarray(first, np.float32).view(np.uint32)
        lost, over = (bits < first_normal) & (wide > 0), bad & (wide < INFINITE)
        columns |= {LOST: lost.astype(jnp.uint32), OVER: over.astype(jnp.uint32)}
    how = [{LOW: lax.min, TOP: lax.max, PEAK: lax.max}.get(x, lax.add) for x in columns]

    def both(xs, ys):
        return [f(x, y) for f, x, y in zip(how, xs, ys, strict=True)]

    starts = [_UNSEEN[column] for column in columns]
    seen = lax.reduce([*columns.values()], starts, both, tuple(range(1, bits.ndim)))
    found = dict(zip(columns, seen, strict=True))
    found.setdefault(BAD, (found[PEAK] >= INFINITE).astype(jnp.uint32))
    nothing = [jnp.full(len(xs), x) for x in _UNSEEN]
    return jnp.stack([found.get(i, x) for i, x in enumerate(nothing)], axis=1)


def _bits(x: jax.Array) -> jax.Array:
    """Returns the bits of all magnitudes, as float32 has them."""
    if x.dtype == jnp.float64:
        # What is beyond float32 is as good as its largest number here.
        limit = float(jnp.finfo(jnp.float32).max)
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x)
    return magnitude_bits(x.astype(jnp.float32)).astype(jnp.uint32)


def magnitude_of(bits: Any) -> float:
    """Returns the magnitude that bits stand for."""
    return float(np.array([bits], np.uint32).view(np.float32)[0])
