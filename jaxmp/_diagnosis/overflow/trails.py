"""When the first Inf or NaN in an array was born, and what was seen at an operation.

A moment is the number of an operation, in a loop preceded by the number of the loop's
first operation and the trip: moments are compared as tuples are. A trail is what is
known of an array: a moment, whether a NaN is in it, and its largest finite magnitude.
Trails are the rows of tables, int32[arrays, moment + 2].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._base.dtypes import is_narrow
from ..._training.exponents import magnitude_bits

# Moments that are no operation's: of what was given, of an Inf in the code, of a NaN in
# the code, and of what is finite.
GIVEN = 2**30
INF_WRITTEN = 2**31 - 3
NAN_WRITTEN = 2**31 - 2
NEVER = 2**31 - 1

OPERANDS = 3  # of an operation, whose magnitudes are remembered


class Rows(NamedTuple):
    """What was seen at each of some operations, over all trips."""

    bits: Any  # int32[operations, 3 + moment + operands]
    counts: Any  # float32[operations, 8]


# Columns of `Rows.bits`; after them the moment of birth and the largest operands.
TOP, LOW, KIND = range(3)
# Columns of `Rows.counts`.
NAN, INF, ZERO, SUBNORMAL, LOST, OVER, BIRTHS, RUNS = range(8)


class Operation(NamedTuple):
    """An operation that was looked at, or a number in the code, which has no number."""

    number: int | None
    inputs: tuple[int, ...]  # rows in the table
    dtype: np.dtype


def no_rows(depth: int, count: int) -> Rows:
    """Returns the rows of operations that have not run."""
    never = [NEVER] + [0] * (depth - 1)
    columns = [0, NOTHING, 0, *never, *[0] * OPERANDS]
    # Not one array, which would be a constant of the jaxpr.
    bits = jnp.stack([jnp.full(count, x, jnp.int32) for x in columns], axis=1)
    return Rows(bits, jnp.zeros((count, RUNS + 1), jnp.float32))


def trail(depth: int, born: int, *, nan: bool = False) -> np.ndarray:
    """Returns the trail of something in the code: a moment, nan, and no magnitude."""
    return np.array([born, *[0] * (depth - 1), nan, 0], np.int32)


def trail_of(look: jax.Array, dtype: Any, born: Any) -> jax.Array:
    """Returns the trail of what was looked at, born at ``born`` if it is not finite."""
    never = trail(born.shape[0], NEVER)[:-2]
    moment = jnp.where(look[2] + look[3] > 0, born, never)
    top = float32_bits(look[:1], [seen_as(dtype)])
    return jnp.concatenate([moment, (look[2:3] > 0).astype(jnp.int32), top])


def followed(
    table: jax.Array,
    clock: Sequence[Any],
    operations: Sequence[Operation],
    looks: Sequence[jax.Array],
    mark: Callable[[Any], Any],
) -> tuple[jax.Array, Rows]:
    """Follows Inf and NaN through operations that run one after the other.

    What is not finite is born where nothing that comes in is not finite; where it is
    NaN and what comes in is an Inf from outside, such as a mask; and where float32
    would have held it.

    Args:
        table: Trails of what there is already.
        clock: What precedes the numbers of these operations in a moment.
        operations: Their inputs are rows of the table, or of those that are added.
        looks: What each of them gives, int32[8].
        mark: Marks scalars as what differs between devices.

    Returns:
        The table with a row for each operation, and the rows of what was seen.
    """
    depth = table.shape[1] - 2
    known, count = table.shape[0], len(operations)
    look = Look(*jnp.stack(looks).T)
    width = max(OPERANDS, *(len(x.inputs) for x in operations))
    # Row 0 is finite, and has nothing in it.
    sources = np.zeros((count, width), np.int32)
    for row, operation in zip(sources, operations, strict=True):
        row[: len(operation.inputs)] = operation.inputs
    sources = mark(jnp.asarray(sources))
    numbers = jnp.asarray([x.number or 0 for x in operations], jnp.int32)
    now = [*(jnp.full(count, x, jnp.int32) for x in clock), numbers]
    now += [jnp.zeros(count, jnp.int32)] * (depth - len(now))
    now = mark(jnp.stack(now, axis=1))
    never = mark(jnp.asarray([NEVER] + [0] * (depth - 1), jnp.int32))

    is_nan, bad = look.nan > 0, look.nan + look.inf > 0
    nan = jnp.concatenate([table[:, -2] > 0, is_nan])
    new_nan = is_nan & ~jnp.any(nan[sources], axis=1)
    exceeds = new_nan | (look.over > 0)

    def follow(i, state):
        # A loop, because XLA would write out the chain for each link of it.
        born, births = state
        source = first(born[sources[i]])
        outside, here = source[0] >= GIVEN, source[0] >= NAN_WRITTEN
        here = bad[i] & (here | (outside & exceeds[i]))
        moment = jnp.where(bad[i], jnp.where(here, now[i], source), never)
        return born.at[known + i].set(moment), births.at[i].set(here)

    old = table[:, :-2]
    born = jnp.concatenate([old, jnp.tile(never, (count, 1))])
    born, births = lax.fori_loop(0, count, follow, (born, jnp.zeros_like(bad)))

    dtypes = [x.dtype for x in operations]
    top, low = float32_bits(look.top, dtypes), float32_bits(look.low, dtypes)
    tops = jnp.concatenate([table[:, -1], top])
    table = jnp.concatenate([born, nan[:, None].astype(jnp.int32), tops[:, None]], 1)
    kind = jnp.where(is_nan, 2, jnp.where(bad, 1, 0))
    operands = tops[sources[:, :OPERANDS]]
    columns = [top[:, None], low[:, None], kind[:, None], born[known:], operands]
    counts = [look.nan, look.inf, look.zero, look.subnormal, look.lost, look.over]
    counts.append(births)
    counts = [x.astype(jnp.float32) for x in counts]
    counts = jnp.stack([*counts, jnp.ones_like(counts[0])], axis=1)
    sites = [i for i, x in enumerate(operations) if x.number is not None]
    sites = np.array(sites, np.int32)
    return table, Rows(jnp.concatenate(columns, axis=1)[sites], counts[sites])


def first(moments: jax.Array) -> jax.Array:
    """Returns the first of moments, along the axis before the last."""
    found: list[Any] = []
    left: Any = True
    for i in range(moments.shape[-1]):
        x = jnp.where(left, moments[..., i], NEVER)
        found.append(jnp.min(x, axis=-1, initial=NEVER))
        left = left & (x == found[-1][..., None])
    return jnp.stack(found, axis=-1)


def merged(old: Rows, new: Rows) -> Rows:
    """Puts together what was seen earlier and later at the same operations."""
    a, b = old.bits, new.bits
    top = jnp.maximum(a[:, TOP], b[:, TOP])
    low = jnp.minimum(a[:, LOW], b[:, LOW])
    earliest = jnp.where(a[:, KIND, None] > 0, a[:, KIND:], b[:, KIND:])
    bits = jnp.concatenate([top[:, None], low[:, None], earliest], axis=1)
    return Rows(bits, old.counts + new.counts)


def stacked(tables: jax.Array) -> jax.Array:
    """Returns the trails of arrays that a scan has stacked."""
    born = first(jnp.swapaxes(tables[..., :-2], 0, 1))
    return jnp.concatenate([born, jnp.max(tables[..., -2:], axis=0, initial=0)], axis=1)


def table_over(table: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Puts together the trails of the devices along mesh axes."""
    born = _first_over(table[:, :-2], axes)
    return jnp.concatenate([born, lax.pmax(table[:, -2:], axes)], axis=1)


def rows_over(rows: Rows, axes: tuple[Any, ...]) -> Rows:
    """Puts together what the devices along mesh axes have seen."""
    bits = rows.bits
    top, low = lax.pmax(bits[:, TOP], axes), lax.pmin(bits[:, LOW], axes)
    # The moment comes first in the order, then the rest of the record.
    kind, rest = -bits[:, KIND, None], bits[:, KIND + 1 :]
    record = _first_over(jnp.concatenate([rest, kind], axis=1), axes)
    columns = [top[:, None], low[:, None], -record[:, -1:], record[:, :-1]]
    return Rows(jnp.concatenate(columns, axis=1), lax.psum(rows.counts, axes))


def moment_over(moment: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Returns the first of the moments of the devices along mesh axes."""
    return _first_over(moment[None], axes)[0]


def _first_over(columns: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    found: list[Any] = []
    left: Any = True
    for i in range(columns.shape[1]):
        x = jnp.where(left, columns[:, i], NEVER)
        found.append(lax.pmin(x, axes))
        left = left & (x == found[-1])
    return jnp.stack(found, axis=1)


def float32_bits(bits: jax.Array, dtypes: Sequence[np.dtype]) -> jax.Array:
    """Returns the bits of float32 for those of magnitudes in other dtypes."""
    is_half = np.array([x == jnp.float16 for x in dtypes])
    is_bfloat = np.array([x == jnp.bfloat16 for x in dtypes])
    half = lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)
    half = lax.bitcast_convert_type(half.astype(jnp.float32), jnp.int32)
    wide = jnp.where(is_half, half, jnp.where(is_bfloat, bits << 16, bits))
    return jnp.where(bits == NOTHING, NOTHING, wide)


# Magnitudes are compared as their bits, which are ordered in the same way: a CPU takes
# subnormal numbers for zeros. These are beyond all of them.
NOTHING = np.int32(2**31 - 1)


class Look(NamedTuple):
    """What one array holds. Magnitudes are their bits."""

    top: Any  # int32[], the largest finite magnitude
    low: Any  # int32[], the smallest that is not zero, `NOTHING` if there is none
    nan: Any  # int32[], how many are NaN
    inf: Any  # int32[], how many are Inf
    zero: Any  # int32[], how many are zero
    subnormal: Any  # int32[], how many are subnormal
    lost: Any  # int32[], how many of those are normal numbers in float32
    over: Any  # int32[], how many are not finite and are in float32


@jax.jit  # JAX traces it once for all arrays of one type
def look(x: jax.Array, wide: jax.Array | None = None) -> jax.Array:
    """Looks at an array once, and returns a :class:`Look` as int32[8].

    Of a complex one at the real and imaginary parts. ``wide`` is the same in float32,
    before it was rounded.
    """
    bits, first_normal, infinite = _bits(x)
    zero, is_subnormal = bits == 0, (bits > 0) & (bits < first_normal)
    finite = bits < infinite
    arrays = [
        jnp.where(finite, bits, 0),
        jnp.where(finite & ~zero, bits, NOTHING),
        *_counted(bits > infinite, bits == infinite, zero, is_subnormal),
    ]
    if wide is not None:
        wide_bits, *_ = _bits(wide)
        lost = (zero | is_subnormal) & (wide_bits > 0)
        over = ~finite & (wide_bits < bits_of(np.inf, wide.dtype))
        arrays += _counted(lost, over)
    return jnp.stack([*_reduced(arrays), *[jnp.int32(0)] * (8 - len(arrays))])


@jax.jit
def glance(x: jax.Array) -> jax.Array:
    """Looks at an array for its NaN, its Inf and its largest magnitude alone."""
    bits, _, infinite = _bits(x)
    top = jnp.where(bits < infinite, bits, 0)
    none = jnp.full_like(bits, NOTHING)
    top, low, nan, inf = _reduced(
        [top, none, *_counted(bits > infinite, bits == infinite)]
    )
    return jnp.stack([top, low, nan, inf, *[jnp.int32(0)] * 4])


def bits_of(number: Any, dtype: Any) -> int:
    """Returns the bits of the magnitude of a number as those of a 16-bit or float32."""
    width = 8 * np.dtype(dtype).itemsize
    bits = np.asarray(number).astype(dtype).reshape(1).view(f"uint{width}")[0]
    return int(bits) & (2 ** (width - 1) - 1)


def float32_of(bits: Any) -> float:
    """Returns the magnitude that bits of float32 stand for."""
    return float(np.array([bits], np.int32).view(np.float32)[0])


def seen_as(dtype: Any) -> np.dtype:
    """Returns the dtype that arrays of a dtype are looked at in."""
    dtype = np.dtype(dtype)
    is_16bit = is_narrow(dtype) and dtype.itemsize == 2
    return dtype if is_16bit else np.dtype(np.float32)


def _counted(*conditions: jax.Array) -> list[jax.Array]:
    return [condition.astype(jnp.int32) for condition in conditions]


def _reduced(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Returns the maximum, the minimum and sums, in one reduction."""

    def both(xs, ys):
        (a, b, *xs), (c, d, *ys) = xs, ys
        sums = map(jax.lax.add, xs, ys)
        return [jax.lax.max(a, c), jax.lax.min(b, d), *sums]

    starts = [np.int32(0), NOTHING, *[np.int32(0)] * (len(arrays) - 2)]
    return jax.lax.reduce(arrays, starts, both, tuple(range(arrays[0].ndim)))


def _bits(x: jax.Array) -> tuple[jax.Array, int, int]:
    """Returns the bits of all magnitudes, of the smallest normal number, and of Inf."""
    dtype = x.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    seen = seen_as(x.dtype)
    tiny = bits_of(jnp.finfo(x.dtype).tiny, seen)
    if x.dtype == jnp.float64:
        # What is beyond float32 is as good as its largest number here.
        limit = float(jnp.finfo(jnp.float32).max)
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x)
    x = x.astype(seen)
    return magnitude_bits(x).astype(jnp.int32), tiny, bits_of(np.inf, seen)
