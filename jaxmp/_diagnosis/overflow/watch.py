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
from ..._devices.varying import in_mesh_here, vary
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation
from ..._jaxprs.places import Place
from ..._jaxprs.replay import Replay, TracedBody
from ..._ops.table import is_exact, is_sum, keeps_magnitudes
from ..exponents import float32_bits, real_parts
from ..wide_replay import (
    Wide,
    before_rounding,
    bind_wide,
    jitted,
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

# A loop keeps no more rows than these, and a while loop so many iterations, from the
# first with an Inf or NaN on, and the one before it. All others before are one, and all
# after.
_MOST_ROWS, _MOST_ITERATIONS = 2**22, 64
_MOST = np.uint32(2**32 - 1)
_TOGETHER = 2**20  # numbers that wait to be looked at together


class Looks(NamedTuple):
    """What was seen in a body. Loops put an axis for their iterations in front."""

    rows: Any  # uint32[rows, 6], of which the first has no array
    calls: Any  # for each call in it a list of `Looks` or None, one for each body


class Watched:
    """A jaxpr that is replayed, and compiled once.

    Attributes:
        jaxpr: The jaxpr. Its constants are its first inputs.
        names: Of its inputs, the constants at the end.
        notes: Where nothing could be seen, an ordered set.
    """

    def __init__(
        self,
        jaxpr: Any,
        names: Sequence[str],
        around: Place,
        platform: str,
        *,
        wide: bool = False,
    ):
        """Prepares to replay a jaxpr with named inputs; ``wide`` is in float32."""
        self.closed, self.around, self.wide = jaxpr, around, wide
        self.jaxpr = _jaxpr.without_constants(jaxpr)
        types = map(jax.typeof, jaxpr.consts)
        self.names = [*names, *(f"closed-over {x.dtype}{[*x.shape]}" for x in types)]
        self.notes: dict[str, None] = {}
        self.platform, self.compiled = platform, jitted(self.replay, platform)

    def replay(self, *given: Any) -> Looks:
        """Returns what was seen; :attr:`compiled` does the same."""
        watch = Watch(self)
        values = [watch.part(watch.constant(x).array) for x in given]
        watch.run(self.jaxpr, values, self.around)
        return watch.seen()


class Watch(Replay):
    """The replay of a body, which looks at what its operations give."""

    value = Wide

    def __init__(self, program: Watched, axes: tuple[Any, ...] = ()):
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

    def constant(self, array: Any) -> Wide:
        return Wide(widened(array) if self.program.wide else array)

    def literal(self, literal: Any) -> Wide:
        return Wide(wide_literal(literal) if self.program.wide else literal.val)

    def part(self, array: Any, *values: Wide) -> Wide:
        """Looks at a slice or a mixture, in which no Inf or NaN begins."""
        del values
        if is_looked_at(array):
            self._look(array)
        return Wide(array)

    def operation(self, eqn: Equation, ins: list[Wide], place: Place) -> list[Wide]:
        if any(_jaxpr.sub_jaxprs(eqn)) and not is_sum(eqn):
            self.note(f"the search does not see inside `{eqn.primitive.name}`", place)
        arrays, wide = [x.array for x in ins], self.program.wide
        outs = bind_wide(eqn, arrays) if wide else _jaxpr.bind(eqn, arrays)
        looked = looked_at(eqn)
        rounds = looked and not wide and not is_exact(eqn)
        in_float32 = before_rounding(eqn, arrays) if rounds else None
        for i in looked:
            self._look(outs[i], in_float32)
        return [*map(Wide, outs)]

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
        self._rows += rows
        with jax.sharding.use_abstract_mesh(key[0].sharding.mesh):  # as they were made
            wide = None if in_float32[0] is None else jnp.stack(in_float32)
            self._looks.append(looks(jnp.stack([*map(real_parts, arrays)]), wide))

    def note(self, text: str, place: Place) -> None:
        """Remembers where nothing could be seen."""
        self.program.notes[f"{place.line or 'somewhere'}: {text}"] = None

    def seen(self) -> Looks:
        for key in [*self._waiting]:
            self._look_at_all(key)
        ran = jnp.zeros((1, 6), jnp.uint32).at[0, RUNS].set(1)
        looks = map(in_mesh_here, self._looks)
        rows = jnp.concatenate(vary([ran, *looks], self.axes))
        return Looks(rows[np.argsort([0, *self._rows])], tuple(self._calls))

    def results(
        self, eqn: Equation, arrays: list[Any], bodies: list[TracedBody]
    ) -> list[Wide]:
        """Keeps what was seen in bodies. The test of a while loop is not looked at."""
        found, kind = [x.seen for x in bodies], _jaxpr.call_kind(eqn)
        if kind in ("scan", "while"):
            found[-1] = found[-1][0]["kept"]
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
        """Returns what a loop begins with: counts, and room for what it keeps."""
        count = sum(x.size // 6 for x in jax.tree.leaves(seen))
        most = max(min(length or _MOST_ITERATIONS, _MOST_ROWS // count), 1) + 2
        kept = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), seen)
        state = {"iteration": jnp.uint32(0), "at": jnp.uint32(1), "kept": kept}
        return vary(state, self.axes)

    def after(self, state: Any, seen: Looks) -> tuple[Any, Any]:
        """Counts an iteration, and keeps what it saw."""
        count, at, kept = state["iteration"], state["at"], state["kept"]
        seen = seen._replace(rows=seen.rows.at[0, LOW].set(~count))
        bad = jnp.stack([jnp.any(x[..., BAD] > 0) for x in jax.tree.leaves(seen)])
        last = len(kept.rows) - 1
        at = jnp.where((at > 1) | jnp.any(bad), jnp.minimum(at + 1, last), at)

        def keep(x, y):
            # Until the first Inf or NaN, the iteration before this one makes room.
            quiet = at == 1
            x = x.at[0].set(_merged(x[0], jnp.where(quiet, x[1], 0)))
            return x.at[at].set(_merged(jnp.where(quiet, 0, x[at]), y))

        kept = jax.tree.map(keep, kept, seen)
        return {"iteration": count + 1, "at": at, "kept": kept}, ()

    def nothing(self, seen: Any) -> Any:
        return vary(super().nothing(seen), self.axes)

    def together(self, seen: Any, axes: tuple[Any, ...]) -> Any:
        """Puts together what the devices along mesh axes have seen."""

        def of_all(x):
            counts = lax.psum(x[..., BAD:].astype(jnp.float32), axes)
            counts = jnp.minimum(counts, 2.0**31).astype(jnp.uint32)
            return jnp.concatenate([lax.pmax(x[..., :BAD], axes), counts], axis=-1)

        return jax.tree.map(of_all, seen)


def _merged(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns what was seen earlier and later together."""
    counts = x[..., BAD:] + y[..., BAD:]
    counts = jnp.where(counts < x[..., BAD:], _MOST, counts)  # it has overflown
    return jnp.concatenate([jnp.maximum(x[..., :BAD], y[..., :BAD]), counts], axis=-1)


def looked_at(eqn: Equation) -> list[int]:
    """Returns which results are looked at: floating ones with magnitudes of their own.

    The others have those of the input in their place.
    """
    pairs = [*zip(eqn.invars, eqn.outvars, strict=False)]
    same = all(x.aval.dtype == y.aval.dtype for x, y in pairs)
    is_kept = keeps_magnitudes(eqn) and same and len(pairs) == len(eqn.outvars)
    if _jaxpr.is_cast(eqn):
        ((x, y),) = pairs
        is_kept = same or (is_narrow(x.aval) and _jaxpr.is_float32(y))
    outs = enumerate(eqn.outvars)
    return [] if is_kept else [i for i, x in outs if is_looked_at(x.aval)]


def is_looked_at(x: Any) -> bool:
    """Whether an array, or the type of one, is floating and where kernels compute."""
    if not is_inexact(x):
        return False
    type = x if isinstance(x, _jaxpr.ShapedArray) else jax.typeof(x)
    return type.memory_space != jax.memory.Space.Host


@jax.jit  # traced once for each type
def looks(xs: jax.Array, in_float32: jax.Array | None = None) -> jax.Array:
    """Returns uint32[arrays, 6] of real arrays, stacked, see `TOP`.

    ``in_float32`` are the same before they were rounded, if they were.
    """
    bits = float32_bits(xs)
    nan, bad = bits > INFINITE, bits >= INFINITE
    columns = [jnp.where(bad, 0, bits), -bits, bad, nan]
    if in_float32 is not None:
        wide, first = float32_bits(in_float32), jnp.finfo(xs.dtype).tiny
        first_normal = np.asarray(first, np.float32).view(np.uint32)
        columns += [(bits < first_normal) & (wide > 0), bad & (wide < INFINITE)]
    columns = [x.astype(jnp.uint32) for x in columns]
    how = [lax.max] * BAD + [lax.add] * (len(columns) - BAD)

    def both(xs, ys):
        return [f(x, y) for f, x, y in zip(how, xs, ys, strict=True)]

    starts = [np.uint32(0)] * len(columns)
    found = lax.reduce(columns, starts, both, tuple(range(1, bits.ndim)))
    return jnp.stack([*found, *[jnp.zeros_like(found[0])] * (6 - len(found))], axis=1)
