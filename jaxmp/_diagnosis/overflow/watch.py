"""A program that looks at what each operation gives: its extremes, and a few counts.

A jaxpr is replayed as it stands, and loops stack what their iterations saw. When it has
run, :mod:`~.origins` goes through the same jaxpr on the host, a row for each look.
"""

from __future__ import annotations

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
from ..._ops.table import is_exact, is_sum, keeps_magnitudes
from ..._training.exponents import magnitude_bits, real_parts
from ..wide_replay import (
    before_rounding,
    bind_wide,
    jitted,
    platform_of,
    wide_literal,
    widened,
)

# A look at an array, uint32[6]. Magnitudes are their bits, which are ordered in the
# same way: a CPU takes subnormal numbers for zeros. Those of `LOW` are negated, so that
# of several looks the larger has the smaller number, and 0 stands for none.
TOP, LOW, BAD, NAN, LOST, OVER = range(6)
# The largest finite magnitude; the smallest that is not zero; how many are Inf or NaN;
# are NaN; are zero or subnormal and not in float32; are not finite and are in float32.
INFINITE = np.float32(np.inf).view(np.uint32)
# The first row of a body has no array. It counts how often the body ran, and in a loop
# `LOW` is the number of the iteration, inverted.
RUNS = OVER

# A loop stacks no more rows than these, and a while loop keeps so many iterations, from
# the first with an Inf or NaN on. Those before are one, and those after.
_MOST_ROWS, _MOST_ITERATIONS = 2**22, 64
_MOST = np.uint32(2**32 - 1)
_TOGETHER = 2**20  # numbers that wait to be looked at together


class Looks(NamedTuple):
    """What was seen in a body. Loops put an axis for their iterations in front."""

    rows: Any  # uint32[rows, 6], of which the first has no array
    calls: Any  # for each call in it a list of `Looks` or None, one for each body


class Value(NamedTuple):
    """An array; what is known of it is found on the host."""

    array: Any


class Program:
    """A jaxpr that is replayed, and compiled once.

    Attributes:
        jaxpr: The jaxpr. Its constants are its first inputs.
        names: Of its inputs, the constants at the end.
        looked: Which results of an equation are looked at, by its `id`.
        notes: Where nothing could be seen, an ordered set.
    """

    def __init__(
        self, jaxpr: Any, names: Sequence[str], around: Place, *, wide: bool = False
    ):
        """Prepares to replay a jaxpr with named inputs; ``wide`` is in float32."""
        self.closed, self.around, self.wide = jaxpr, around, wide
        self.jaxpr = _jaxpr.without_constants(jaxpr)
        types = map(jax.typeof, jaxpr.consts)
        self.names = [*names, *(f"closed-over {x.dtype}{[*x.shape]}" for x in types)]
        self.platform = "cpu"
        self.looked: dict[int, list[int]] = {}
        self.notes: dict[str, None] = {}
        self._compiled: Any = None

    def run(self, arrays: Sequence[Any]) -> Looks:
        """Returns what was seen, on the host."""
        if self._compiled is None:
            self.platform = platform_of(arrays)
            self._compiled = jitted(self.replay, self.platform)
        with np.errstate(over="ignore"):  # of numbers in the code, said once already
            return jax.device_get(self._compiled(*self.given(arrays)))

    def given(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns what the jaxpr takes: its constants, and what it is given."""
        return [*self.closed.consts, *arrays]

    def replay(self, *given: Any) -> Looks:
        watch = Watch(self)
        values = [watch.part(watch.constant(x).array) for x in given]
        watch.run(self.jaxpr, values, self.around)
        return watch.seen()


class Watch(Replay):
    """The replay of a body, which looks at what its operations give."""

    value = Value

    def __init__(self, program: Program, axes: tuple[Any, ...] = ()):
        super().__init__(program.platform, axes=axes)
        self.program = program
        self._waiting: dict[Any, list[Any]] = {}  # arrays of one type, with their rows
        self._rows: list[int] = []
        self._looks: list[Any] = []  # of these rows
        self._count = 1  # of them, and of what waits, behind the row that counts
        self._calls: list[Any] = []

    def inside(self, scalars: Any, axes: tuple[Any, ...]) -> Watch:
        del scalars
        return Watch(self.program, axes)

    def constant(self, array: Any) -> Value:
        return Value(widened(array) if self.program.wide else array)

    def literal(self, literal: Any) -> Value:
        return Value(wide_literal(literal) if self.program.wide else literal.val)

    def part(self, array: Any, *values: Value) -> Value:
        """Looks at a slice or a mixture, in which no Inf or NaN begins."""
        del values
        if is_inexact(array):
            self._look(array)
        return Value(array)

    def operation(self, eqn: Equation, ins: list[Value], place: Place) -> list[Value]:
        if any(_jaxpr.sub_jaxprs(eqn)) and not is_sum(eqn):
            self.note(f"the search does not see inside `{eqn.primitive.name}`", place)
        arrays, wide = [x.array for x in ins], self.program.wide
        outs = bind_wide(eqn, arrays) if wide else _jaxpr.bind(eqn, arrays)
        looked = [i for i, x in enumerate(outs) if is_inexact(x)]
        if _keeps_magnitudes(eqn):
            looked = []
        self.program.looked[id(eqn)] = looked
        rounds = looked and not wide and not is_exact(eqn)
        in_float32 = before_rounding(eqn, arrays) if rounds else None
        for i in looked:
            self._look(outs[i], in_float32)
        return [*map(Value, outs)]

    def _look(self, array: Any, in_float32: Any = None) -> None:
        """Looks at an array, which gives a row.

        Small arrays of one type are looked at together, because compiling takes longer.
        """
        key = jax.typeof(array), in_float32 is None
        waiting = self._waiting.setdefault(key, [])
        waiting.append((self._count, array, in_float32))
        self._count += 1
        if len(waiting) * array.size > _TOGETHER:
            self._look_at_all(key)

    def _look_at_all(self, key: Any) -> None:
        rows, arrays, in_float32 = zip(*self._waiting.pop(key), strict=True)
        wide = None if in_float32[0] is None else jnp.stack(in_float32)
        self._rows += rows
        self._looks.append(looks(jnp.stack([*map(real_parts, arrays)]), wide))

    def note(self, text: str, place: Place) -> None:
        """Remembers where nothing could be seen."""
        self.program.notes[f"{place.line or 'somewhere'}: {text}"] = None

    def seen(self) -> Looks:
        for key in [*self._waiting]:
            self._look_at_all(key)
        ran = jnp.zeros((1, 6), jnp.uint32).at[0, RUNS].set(1)
        rows = jnp.concatenate(vary([ran, *self._looks], self.axes))
        return Looks(rows[np.argsort([0, *self._rows])], tuple(self._calls))

    def results(
        self, eqn: Equation, arrays: list[Any], bodies: list[Body]
    ) -> list[Value]:
        """Keeps what was seen in bodies. The test of a while loop is not looked at."""
        found, kind = [x.seen for x in bodies], _jaxpr.call_kind(eqn)
        if kind in ("scan", "while"):
            state, stacked = found[-1]
            found[-1] = stacked or state["kept"]
        if kind == "while":
            found[0] = None
            eqns = _jaxpr.open_jaxpr(bodies[0].jaxpr).eqns
            if any(_jaxpr.is_inexact(var) for eqn in eqns for var in eqn.outvars):
                place = bodies[0].place
                self.note("the condition of a while loop is not searched", place)
        self._calls.append(found)
        return super().results(eqn, arrays, bodies)

    # Looks in loops and shards.

    def first(self, seen: Any, length: int | None) -> Any:
        """Returns what a loop begins with: a count, and rows if it is to keep few."""
        count = sum(x.size // 6 for x in jax.tree.leaves(seen))
        state: dict[str, Any] = {"iteration": jnp.uint32(0)}
        if length is None or length * count > _MOST_ROWS:
            most = min(max(_MOST_ROWS // count, 2), _MOST_ITERATIONS) + 1
            kept = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), seen)
            state |= {"row": jnp.uint32(0), "kept": kept}
        return vary(state, self.axes)

    def after(self, state: Any, seen: Looks) -> tuple[Any, Any]:
        """Counts an iteration, and stacks what it saw or adds it to what is kept."""
        count = state["iteration"]
        seen = seen._replace(rows=seen.rows.at[0, LOW].set(~count))
        state = state | {"iteration": count + 1}
        if "kept" not in state:
            return state, seen
        row, kept = state["row"], state["kept"]
        bad = jnp.stack([jnp.any(x[..., BAD] > 0) for x in jax.tree.leaves(seen)])
        last = len(kept.rows) - 1
        row = jnp.where((row > 0) | jnp.any(bad), jnp.minimum(row + 1, last), row)
        kept = jax.tree.map(lambda x, y: x.at[row].set(_merged(x[row], y)), kept, seen)
        return state | {"row": row, "kept": kept}, ()

    def nothing(self, seen: Any) -> Any:
        return vary(super().nothing(seen), self.axes)

    def together(self, seen: Any, axes: tuple[Any, ...]) -> Any:
        """Puts together what the devices along mesh axes have seen."""

        def of_all(x):
            counts = lax.psum(x[..., BAD:].astype(jnp.float32), axes)
            counts = jnp.minimum(counts, 2.0**31).astype(jnp.uint32)
            return jnp.concatenate([lax.pmax(x[..., :BAD], axes), counts], axis=-1)

        return jax.tree.map(of_all, seen)


def merged(rows: np.ndarray) -> np.ndarray:
    """Returns what was seen in several iterations together, on the host."""
    counts = rows[..., BAD:].sum(axis=0, dtype=np.int64)
    return np.concatenate([rows[..., :BAD].max(axis=0), counts], axis=-1)


def _merged(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns what was seen earlier and later together."""
    counts = x[..., BAD:] + y[..., BAD:]
    counts = jnp.where(counts < x[..., BAD:], _MOST, counts)  # it has overflown
    return jnp.concatenate([jnp.maximum(x[..., :BAD], y[..., :BAD]), counts], axis=-1)


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


@jax.jit  # traced once for each type
def looks(xs: jax.Array, in_float32: jax.Array | None = None) -> jax.Array:
    """Returns uint32[arrays, 6] of real arrays, stacked, see `TOP`.

    ``in_float32`` are the same before they were rounded, if they were.
    """
    bits = _bits(xs)
    nan, bad = bits > INFINITE, bits >= INFINITE
    columns = [jnp.where(bad, 0, bits), -bits, bad, nan]
    if in_float32 is not None:
        wide, first = _bits(in_float32), jnp.finfo(xs.dtype).tiny
        first_normal = np.asarray(first, np.float32).view(np.uint32)
        columns += [(bits < first_normal) & (wide > 0), bad & (wide < INFINITE)]
    columns = [x.astype(jnp.uint32) for x in columns]
    how = [lax.max] * BAD + [lax.add] * (len(columns) - BAD)

    def both(xs, ys):
        return [f(x, y) for f, x, y in zip(how, xs, ys, strict=True)]

    starts = [np.uint32(0)] * len(columns)
    found = lax.reduce(columns, starts, both, tuple(range(1, bits.ndim)))
    return jnp.stack([*found, *[jnp.zeros_like(found[0])] * (6 - len(found))], axis=1)


def _bits(x: jax.Array) -> jax.Array:
    """Returns the bits of all magnitudes, as float32 has them."""
    if x.dtype == jnp.float64:
        # What is beyond float32 is as good as its largest number here.
        limit = float(jnp.finfo(jnp.float32).max)
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x)
    return magnitude_bits(x.astype(jnp.float32)).astype(jnp.uint32)
