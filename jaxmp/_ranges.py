"""Where the values of a pytree lie in the range of a 16-bit format."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from ._checks import as_axes, as_count, check_axes_are_bound, known_number
from ._dtypes import as_dtype
from ._tree import AxisName, alike, is_floating_array, path_name
from ._varying import varying_axes

# Rows of counters that the elements of an array take turns in; a power of two. With
# one row the atomic additions of a GPU would all meet in the few busy buckets.
_LANES = 64

_CLASSES = ("zero", "flushed", "subnormal", "normal", "overflow", "nonfinite")


def exponent_histogram(
    tree: Any, *, low: int = -40, high: int = 16, per_leaf: bool = False
) -> Any:
    """Counts the entries of a pytree by binary exponent.

    A finite nonzero ``x`` counts under ``floor(log2(abs(x)))``, clipped to
    ``[low, high]``; exactly, also where ``x`` is subnormal. Zeros, Inf and NaN are
    not counted. Works under ``jit``; the counts of sharded arrays are global.

    Args:
        tree: Pytree of floating arrays of any shapes; dtypes may differ.
        low: Exponent of the first bucket.
        high: Exponent of the last bucket.
        per_leaf: Whether to count each leaf for itself.

    Returns:
        An int32 array of shape ``[high - low + 1]``; with ``per_leaf`` a pytree of
        the structure of ``tree`` with such an array for each leaf.

    Raises:
        TypeError: If a leaf is not floating.
        ValueError: If ``low`` is not below ``high``, or there are more entries to
            count together than an int32 holds.

    Examples:
        >>> grads = {"w": jnp.array([1.0, 3.0, 2.0**-30, 0.0])}
        >>> exponent_histogram(grads, low=-2, high=2).tolist()
        [1, 0, 1, 1, 0]

    References:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, figure 3,
        https://arxiv.org/abs/1710.03740.
    """
    _check_buckets(low, high)
    length = high - low + 1
    leaves = [x for _, x in _floating_leaves("exponent_histogram", tree)]
    sizes = [math.prod(jnp.shape(x)) for x in leaves]
    together = max(sizes, default=0) if per_leaf else sum(sizes)
    if together > np.iinfo(np.int32).max:
        raise ValueError(
            f"`exponent_histogram` counts in int32, but was given {together} entries "
            "to count together. Pass `per_leaf=True` and add on the host, or pass a "
            "part of the tree at a time."
        )
    counts = [
        _count(_exact_buckets(x, low, length), length).sum(0, dtype=jnp.int32)[:-2]
        for x in leaves
    ]
    if per_leaf:
        return jax.tree.structure(tree).unflatten(counts)
    return sum(counts, jnp.zeros(length, jnp.int32))


@dataclasses.dataclass(frozen=True)
class RangeStats:
    """What a cast would do to some values: six fractions that add up to 1.

    A value belongs to the class of what the cast makes of it, rounding to nearest
    even. Where there are no values, all fields are 0.

    Args:
        zero: Fraction that is zero already.
        flushed: Fraction that is not zero and becomes it.
        subnormal: Fraction that becomes subnormal, and so loses digits.
        normal: Fraction that becomes a normal number.
        overflow: Fraction that is finite and becomes infinite.
        nonfinite: Fraction that is Inf or NaN already.
        min: Smallest magnitude that is not zero.
        max: Largest finite magnitude.
        size: Number of values.

    Examples:
        >>> range_report(jnp.array([0.0, 1.0, 3.0, 1e6])).total
        RangeStats(zero=0.25, flushed=0.0, subnormal=0.0, normal=0.5, overflow=0.25, \
nonfinite=0.0, min=1.0, max=1000000.0, size=4)
        >>> range_report(jnp.array([0.0, 1.0, 3.0, 1e6])).total.counts["normal"]
        2
    """

    zero: float
    flushed: float
    subnormal: float
    normal: float
    overflow: float
    nonfinite: float
    min: float
    max: float
    size: int

    @property
    def counts(self) -> dict[str, int]:
        """The exact number of values of each class."""
        # The fraction was rounded once, and so is the product: below 2^51 values the
        # integer next to it is the count.
        return {name: round(getattr(self, name) * self.size) for name in _CLASSES}

    @property
    def lost(self) -> float:
        """The fraction of which the format keeps nothing."""
        return self.flushed + self.overflow + self.nonfinite


@dataclasses.dataclass(frozen=True)
class RangeReport:
    """What a cast would do to the leaves of a pytree; ``str`` of it is a table.

    Args:
        dtype: Name of the dtype.
        total: The :class:`RangeStats` of all leaves together.
        leaves: Those of each leaf, by its path. A path that comes again gets a
            number, and what is no container has the path ``(root)``.

    Examples:
        >>> report = range_report({"w": jnp.array([0.0, 2.0**-25, 1.0, 3.0])})
        >>> report.total.flushed, report.leaves["w"].max
        (0.25, 3.0)
        >>> report.as_dict()["leaves"]["w"]["size"]
        4
    """

    dtype: str
    total: RangeStats
    leaves: dict[str, RangeStats]

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as nested dicts of strings and numbers, for a log."""
        leaves = {path: _as_dict(stats) for path, stats in self.leaves.items()}
        return {"dtype": self.dtype, "total": _as_dict(self.total), "leaves": leaves}

    def __str__(self) -> str:
        """Draws a table, the leaves that lose the largest fraction first."""
        worst_first = sorted(
            self.leaves.items(), key=lambda item: (-item[1].lost, -item[1].subnormal)
        )
        rows: list[tuple[str, ...]] = [
            ("% of the values", *_CLASSES, "min", "max", "size")
        ]
        width = _telling_width(list(self.leaves))
        for path, stats in [("total", self.total), *worst_first]:
            path = path if len(path) <= width else "…" + path[1 - width :]
            shares = [_percent(getattr(stats, name)) for name in _CLASSES]
            size = f"{stats.size}" if stats.size < 10**8 else f"{stats.size:.2e}"
            rows.append((path, *shares, f"{stats.min:.1e}", f"{stats.max:.1e}", size))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{self.total.size:,} values as {self.dtype}"]
        for name, *cells in rows:
            cells = map(str.rjust, cells, widths[1:])
            lines.append(" ".join([name.ljust(widths[0]), *cells]))
        return "\n".join(lines)


def range_report(tree: Any, dtype: DTypeLike = "float16") -> RangeReport:
    """Tells what a cast to ``dtype`` would do to the values of a pytree.

    Runs on the host, outside ``jit``, and counts exactly.

    Args:
        tree: Pytree of floating arrays of any shapes, sharded or not.
        dtype: The format to look at: float16, bfloat16, or a wider one.

    Returns:
        A :class:`RangeReport` with the fractions for every leaf and in total.

    Raises:
        TypeError: If a leaf is not floating.
        ValueError: If ``dtype`` is not a floating dtype that jaxmp knows.

    Examples:
        >>> grads = {"w": jnp.array([0.0, 2.0**-25, 1.0, 65520.0]), "b": jnp.ones(4)}
        >>> print(range_report(grads))
        8 values as float16
        % of the values  zero flushed subnormal normal overflow nonfinite     min     max size
        total           12.50   12.50         0  62.50    12.50         0 3.0e-08 6.6e+04    8
        w               25.00   25.00         0  25.00    25.00         0 3.0e-08 6.6e+04    4
        b                   0       0         0 100.00        0         0 1.0e+00 1.0e+00    4
    """  # noqa: E501
    dtype = as_dtype(dtype, "`dtype`")
    named = _floating_leaves("range_report", tree, on_host=True)
    counts = [_classify(x, dtype) for _, x in named]
    paths = numbered(path for path, _ in named)
    return RangeReport(
        dtype=dtype.name,
        total=_stats(counts),
        leaves={p: _stats([n]) for p, n in zip(paths, counts, strict=True)},
    )


class RecordRangesState(NamedTuple):
    """State of :func:`record_ranges`: counts of the values of the counted steps."""

    steps: jax.Array  # int32[], updates since init
    low: jax.Array  # int32[], exponent of the first bucket
    exponents: jax.Array  # float32[buckets], finite nonzero values by binary exponent
    zeros: jax.Array  # float32[], values that were zero
    nonfinite: jax.Array  # float32[], values that were Inf or NaN
    max: jax.Array  # float32[], largest finite magnitude in all steps


def record_ranges(
    *,
    every: int = 10,
    low: int = -40,
    high: int = 16,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Records the exponents of the updates that pass through, and changes nothing.

    Place it where the values of interest pass: first in a chain for the gradients. In
    the wrapper of :func:`jaxmp.loss_scaling` it sees the finite steps only; outside,
    before it, the overflows too. Find the state with
    ``optax.tree.get(opt_state, "RecordRangesState")``; give it to
    :func:`suggest_loss_scale` or to :func:`jaxmp.plots.exponents`.

    Where Adam moves 28 bytes for each parameter in a step, this adds 1.2 on a GPU, and
    3.3 with ``every=1``.

    Args:
        every: Count the first step and every ``every``-th after it. The largest
            magnitude is that of all steps.
        low: Exponent of the first bucket, which also counts what is below. A state
            that was restored keeps the buckets that it has.
        high: Exponent of the last bucket, which also counts what is above.
        axis_name: Mesh axes over which the updates differ, inside ``shard_map`` or
            ``pmap``. Under ``jit`` the counts of sharded arrays are global anyway.
            Updates that are the same on all devices count once, except where nothing
            tells that they are: ``pmap``, and ``shard_map(check_vma=False)``.

    Returns:
        A :class:`optax.GradientTransformationExtraArgs` whose state is a
        :class:`RecordRangesState`. The counts are float32. They do not overflow, are
        exact up to 2^24, and beyond it each addition rounds to 24 bits: after a
        thousand counted steps a bucket is wrong by less than 1 in 10,000, and what
        adds less than 1 in 2^25 to its bucket is not seen. Leaves that are not
        floating are not counted.

    Raises:
        ValueError: If ``every`` is below 1 or ``low`` not below ``high``; in an
            update, if the updates differ over mesh axes that are not in
            ``axis_name``, or one of those does not exist.
        TypeError: If ``every``, ``low`` or ``high`` is not an integer.

    Examples:
        >>> tx = optax.chain(record_ranges(every=1, low=-2, high=2), optax.sgd(0.1))
        >>> opt_state = tx.init(jnp.zeros(3))
        >>> for grads in ([1.0, 3.0, 0.0], [0.25, 1.0, jnp.inf]):
        ...     _, opt_state = tx.update(jnp.array(grads), opt_state)
        >>> ranges = optax.tree.get(opt_state, "RecordRangesState")
        >>> ranges.exponents.tolist(), ranges.zeros.item(), ranges.max.item()
        ([1.0, 0.0, 2.0, 1.0, 0.0], 1.0, 3.0)

    References:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, figure 3,
        https://arxiv.org/abs/1710.03740.
    """
    every = as_count("every", every)
    _check_buckets(low, high)

    def init_fn(params):
        del params
        return RecordRangesState(
            steps=jnp.zeros([], jnp.int32),
            low=jnp.array(low, jnp.int32),
            exponents=jnp.zeros(high - low + 1, jnp.float32),
            zeros=jnp.zeros([], jnp.float32),
            nonfinite=jnp.zeros([], jnp.float32),
            max=jnp.zeros([], jnp.float32),
        )

    axes = as_axes(axis_name)

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        check_axes_are_bound(axes)
        length = state.exponents.shape[-1]
        maxima = [_float32_bits(state.max)]
        entries = []
        for path, x in jax.tree.leaves_with_path(updates):
            if is_floating_array(x):
                _check_agreement(x, state, axes)
                maxima.append(_largest(x))
                # What a cond reads has to be in memory. That is one byte for each
                # value here; the updates might exist only within a fusion.
                entries.append((path, _buckets(x, state.low, length)))
        largest = jnp.stack(maxima).max()
        if axes:
            largest = jax.lax.pmax(largest, axes)
        old = (state.exponents, state.zeros, state.nonfinite)
        exponents, zeros, nonfinite = jax.lax.cond(
            state.steps % every == 0,
            lambda old, buckets: _add_counts(old, buckets, length, axes),
            lambda old, buckets: old,
            old,
            alike(entries),  # XLA's compilers are slow with hundreds of scatters
        )
        return updates, RecordRangesState(
            steps=jnp.asarray(optax.safe_increment(state.steps)),
            low=state.low,
            exponents=exponents,
            zeros=zeros,
            nonfinite=nonfinite,
            max=jax.lax.bitcast_convert_type(largest, jnp.float32),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def suggest_loss_scale(
    tree: Any, dtype: DTypeLike = "float16", *, headroom: float = 1.0
) -> float:
    """Returns the largest power of two that lets no value overflow ``dtype``.

    That is, the largest at which the largest finite magnitude is at most the format's
    maximum, 65504 for float16. The values must be in true units, not scaled already.
    bfloat16 has the range of float32 and needs no scale.

    Args:
        tree: What was seen in one or many steps: a pytree of floating arrays, of
            :class:`RangeReport`, or of :class:`RecordRangesState`. A state may have
            leading axes, as ``vmap`` and ``scan`` stack it.
        dtype: The format.
        headroom: Factor by which later values may be larger, a positive number or
            scalar array.

    Returns:
        A power of two between 2^-126 and 2^127, as a Python float.

    Raises:
        TypeError: If a leaf is not floating or ``headroom`` not a number.
        ValueError: If there is no finite nonzero value, ``headroom`` is not finite
            and positive, or ``dtype`` is not one that jaxmp knows.

    Examples:
        >>> grads = {"w": jnp.array([3e-6, 0.0]), "b": jnp.array([-0.01])}
        >>> suggest_loss_scale(grads)
        4194304.0
        >>> suggest_loss_scale(grads, headroom=8)
        524288.0
    """
    headroom = known_number("headroom", headroom)
    if headroom is None or not 0 < headroom < math.inf:
        raise ValueError(
            f"`headroom` must be finite and positive, but is {headroom}. Pass for "
            "example 8, for gradients that may become eight times as large."
        )
    dtype = as_dtype(dtype, "`dtype`")
    summaries = (RangeReport, RecordRangesState)
    maxima = [0.0]

    def take_summary(x):
        if not isinstance(x, summaries):
            return x
        largest = x.total.max if isinstance(x, RangeReport) else np.max(x.max)
        maxima.append(float(largest))
        return None

    arrays = jax.tree.map(
        take_summary, tree, is_leaf=lambda x: isinstance(x, summaries)
    )
    hint = (
        "Pass gradients, what `jaxmp.range_report` returned, or what "
        '`jaxmp.record_ranges` keeps: `optax.tree.get(opt_state, "RecordRangesState")`.'
    )
    named = _floating_leaves("suggest_loss_scale", arrays, hint, on_host=True)
    maxima += [_classify(x, dtype).max for _, x in named]
    if max(maxima) == 0:
        raise ValueError(
            "`suggest_loss_scale` needs a finite nonzero value, but there is none. "
            "Pass the gradients of a step that did not overflow."
        )
    # By mantissas and exponents, because the product may be too large for a float.
    largest, factor = math.frexp(max(maxima)), math.frexp(headroom)
    limit = math.frexp(float(jnp.finfo(dtype).max))
    mantissa, carry = math.frexp(largest[0] * factor[0])
    # The quotient of two mantissas in [1/2, 1) is in (1/2, 2), so that the difference
    # of the exponents is right or one too large.
    exponent = limit[1] - (largest[1] + factor[1] + carry) - (mantissa > limit[0])
    return 2.0 ** min(max(exponent, -126), 127)


def _exact_buckets(x: Any, low: int, length: int) -> jax.Array:
    """Returns the buckets of an array or Python float, in the precision it has."""
    if getattr(x, "dtype", np.float64) == np.float64:
        with jax.enable_x64(True):  # or JAX would make a float32 of it
            return _buckets(jnp.asarray(x), low, length)
    return _buckets(jnp.asarray(x), low, length)


@functools.partial(jax.jit, static_argnames="length")
def _buckets(x: jax.Array, low: Any, length: int) -> jax.Array:
    """Returns each element's bucket; two more are for zeros and for Inf or NaN."""
    bits, info = _magnitude_bits(x), jnp.finfo(x.dtype)
    # Integers, because XLA may flush subnormals to zero in arithmetic.
    field = (bits >> info.nmant).astype(jnp.int32)
    highest_bit = jnp.iinfo(bits.dtype).bits - 1 - jax.lax.clz(bits).astype(jnp.int32)
    exponent = info.minexp + jnp.where(field > 0, field - 1, highest_bit - info.nmant)
    bucket = jnp.clip(exponent - low, 0, length - 1)
    # If nothing else used the bits, LLVM would compare floats here, and the CPU's
    # takes subnormals for zeros. The exponent uses them, as there are two buckets.
    bucket = jnp.where(bits == 0, length, bucket)
    bucket = jnp.where(jnp.isfinite(x), bucket, length + 1)
    return bucket.astype(np.min_scalar_type(length + 1))


@functools.partial(jax.jit, static_argnames="length")
def _count(buckets: jax.Array, length: int) -> jax.Array:
    """Counts elements into an int32 array of shape ``[_LANES, length + 2]``.

    A scatter, because it reads the array once. Comparing each element with each
    bucket reads it as often as there are buckets.
    """
    # No ravel: that would gather an array which is sharded along a later axis.
    places = [
        jax.lax.broadcasted_iota(jnp.int32, buckets.shape, i)
        for i in range(buckets.ndim)
    ]
    lane = sum(places, jnp.zeros(buckets.shape, jnp.int32)) % _LANES
    index = lane * (length + 2) + buckets.astype(jnp.int32)
    mesh, out_sharding = jax.typeof(buckets).sharding.mesh, None
    if AxisType.Explicit in mesh.axis_types:  # JAX wants to know where the sum lies
        out_sharding = NamedSharding(mesh, P(None))
    counts = jnp.zeros(_LANES * (length + 2), jnp.int32)
    counts = counts.at[index].add(1, out_sharding=out_sharding)
    return counts.reshape(_LANES, length + 2)


def _add_counts(
    old: tuple[jax.Array, jax.Array, jax.Array],
    groups: list[list[jax.Array]],
    length: int,
    axes: tuple[Any, ...],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds the counts of all devices to those of exponents, zeros, and Inf or NaN."""
    counts = collections.defaultdict(lambda: jnp.zeros(length + 2, jnp.float32))
    for group in groups:
        buckets = jnp.stack(group)
        # Each lane is exact; their sum may be more than an int32 holds.
        lanes = _count(buckets, length).astype(jnp.float32)
        counts[_axes_to_add(buckets, axes)] += lanes.sum(0)
    total = jnp.zeros(length + 2, jnp.float32)
    for apart, part in counts.items():
        total += jax.lax.psum(part, apart) if apart else part
    exponents, zeros, nonfinite = old
    return exponents + total[:-2], zeros + total[-2], nonfinite + total[-1]


def _axes_to_add(x: jax.Array, axes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the axes over which ``x`` differs, or all where JAX does not track it."""
    if not axes or not varying_axes(jax.lax.axis_index(axes)):
        return axes
    return tuple(axis for axis in axes if axis in varying_axes(x))


def _check_agreement(
    x: jax.Array, state: RecordRangesState, axes: tuple[Any, ...]
) -> None:
    """Refuses updates that differ over devices where the counts are one for all."""
    if apart := varying_axes(x) - varying_axes(state.exponents) - set(axes):
        raise ValueError(
            f"The updates differ over the mesh axes {sorted(map(str, apart))}, but the "
            "counts of `record_ranges` are one for all. Pass these axes as `axis_name`."
        )


@jax.jit
def _largest(x: jax.Array) -> jax.Array:
    """Returns the largest finite magnitude as the bits of a float32."""
    # Magnitudes are ordered as their bits are.
    bits = jnp.max(jnp.where(jnp.isfinite(x), _magnitude_bits(x), 0), initial=0)
    bits = bits.astype(f"uint{jnp.finfo(x.dtype).bits}")
    largest = jax.lax.bitcast_convert_type(bits, x.dtype)
    if x.dtype == jnp.float64:
        largest = jnp.minimum(largest, jnp.finfo(jnp.float32).max)
    return _float32_bits(largest)


def _float32_bits(x: jax.Array) -> jax.Array:
    # Integers, because the CPU's maximum of floats takes subnormals for zeros.
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def _magnitude_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of ``abs(x)`` as an integer of at least 32 bits."""
    width = jnp.finfo(x.dtype).bits
    bits = jax.lax.bitcast_convert_type(x, f"uint{width}")
    bits = bits.astype(f"uint{max(width, 32)}")
    return bits & (2 ** (width - 1) - 1)


class _Counts(NamedTuple):
    """What :class:`RangeStats` is made of, before the division."""

    classes: list[int]
    min: float  # Inf where there is none
    max: float


def _stats(parts: list[_Counts]) -> RangeStats:
    """Adds exact counts and divides them by their sum."""
    classes = [sum(counts) for counts in zip(*(p.classes for p in parts), strict=True)]
    size = sum(classes)
    if not size:
        return RangeStats(*[0.0] * 8, size=0)
    zero, flushed, subnormal, normal, overflow, nonfinite = (n / size for n in classes)
    smallest = min(part.min for part in parts)
    return RangeStats(
        zero,
        flushed,
        subnormal,
        normal,
        overflow,
        nonfinite,
        min=smallest if smallest < math.inf else 0.0,
        max=max(part.max for part in parts),
        size=size,
    )


@np.errstate(invalid="ignore")  # a signalling NaN is counted without a warning
def _classify(x: Any, dtype: np.dtype) -> _Counts:
    """Counts the values of each class, and finds the extreme magnitudes."""
    info = jnp.finfo(dtype)
    half_step = float(info.smallest_subnormal) / 2
    # Halfway to the next value of the format a tie goes to the even one, and that is
    # zero, the smallest normal number, and infinity.
    first_normal = float(info.tiny) - half_step
    first_overflow = float(info.max) + math.ldexp(info.eps, info.maxexp - 2)
    magnitude = np.abs(np.asarray(x))
    if magnitude.dtype.itemsize < 4:
        magnitude = magnitude.astype(np.float32)
    up_to = np.array(
        [
            np.count_nonzero(magnitude == 0),
            # NumPy compares with its own float64 exactly, and would round a Python
            # float to the dtype of the array.
            np.count_nonzero(magnitude <= np.float64(half_step)),
            np.count_nonzero(magnitude < np.float64(first_normal)),
            np.count_nonzero(magnitude < np.float64(first_overflow)),
            np.count_nonzero(magnitude < np.inf),
            magnitude.size,
        ]
    )
    counted = (magnitude > 0) & (magnitude < np.inf)
    return _Counts(
        np.diff(up_to, prepend=0).tolist(),
        float(np.min(magnitude, where=counted, initial=np.inf)),
        float(np.max(magnitude, where=counted, initial=0)),
    )


def _floating_leaves(
    function: str,
    tree: Any,
    hint: str = "Pass the parameters or gradients only.",
    *,
    on_host: bool = False,
) -> list[tuple[str, Any]]:
    """Returns the leaves with their paths, refusing those that are not floating."""
    leaves = jax.tree.leaves_with_path(tree)
    leaves = [(path_name(path) or "(root)", x) for path, x in leaves]
    for path, x in leaves:
        if not (isinstance(x, float) or is_floating_array(x)):
            kind = getattr(x, "dtype", type(x).__name__)
            raise TypeError(
                f"`{function}` needs floating leaves, but `{path}` is {kind}. {hint}"
            )
        if on_host and isinstance(x, jax.core.Tracer):
            raise TypeError(
                f"`{function}` reads values on the host, but `{path}` is traced, by "
                "`jax.jit` for one. Return it and call `jaxmp."
                f"{function}` outside; `jaxmp.exponent_histogram` and "
                "`jaxmp.record_ranges` count inside."
            )
    return leaves


def numbered(names: Iterable[str]) -> list[str]:
    """Gives a number to each name that comes again: ``h``, ``h#1``."""
    given = {}  # a dict keeps the order
    for name in names:
        choices = itertools.chain([name], (f"{name}#{i}" for i in itertools.count(1)))
        given[next(choice for choice in choices if choice not in given)] = None
    return list(given)


def _telling_width(paths: list[str]) -> int:
    """Returns how long the shortened paths must be to tell all leaves apart."""
    longest = max(map(len, paths), default=0)
    for width in range(22, longest):
        if len({path[1 - width :] for path in paths}) == len(paths):
            return width
    return max(longest, 22)


def _check_buckets(low: int, high: int) -> None:
    for name, value in (("low", low), ("high", high)):
        try:
            operator.index(value)
        except TypeError:
            raise TypeError(
                f"`{name}` must be an integer, but is {value!r}. The usual buckets are "
                "those from `low=-40` to `high=16`."
            ) from None
    if low >= high:
        raise ValueError(
            f"`low` must be below `high`, but they are {low} and {high}. "
            "The usual ones are -40 and 16."
        )


def _as_dict(stats: RangeStats) -> dict[str, Any]:
    return {**dataclasses.asdict(stats), "counts": stats.counts}


def _percent(fraction: float) -> str:
    """Writes a fraction so that a single value in millions still shows."""
    if 0 < fraction < 0.00005:
        return "<0.01"
    return f"{100 * fraction:.2f}" if fraction else "0"
