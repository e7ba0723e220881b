"""What a cast to a 16-bit format would do to values, reported on the host."""

from __future__ import annotations

import dataclasses
import math
import sys
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._base.checks import as_html, known_number, short
from .._base.dtypes import as_dtype
from .exponents import RecordRangesState, floating_leaves
from .text import WIDTH, aligned, numbered

_HEAD = (
    "% of the|zero|under-|sub-|normal|over-|non-|min|max|size",
    "values||flow|normal||flow|finite|||",
)
_CLASSES = ("zero", "underflow", "subnormal", "normal", "overflow", "nonfinite")


@dataclasses.dataclass(frozen=True)
class RangeStats:
    """What a cast would do to some values: six fractions that add up to 1.

    A value belongs to the class of what the cast makes of it, rounding to nearest
    even. Where there are no values, all fields are 0.

    Args:
        zero: Fraction that is zero already.
        underflow: Fraction that is not zero and becomes zero.
        subnormal: Fraction that becomes subnormal, and so loses digits.
        normal: Fraction that becomes a normal number.
        overflow: Fraction that is finite and becomes infinite.
        nonfinite: Fraction that is Inf or NaN already.
        min: Smallest magnitude that is not zero.
        max: Largest finite magnitude.
        size: Number of values.

    Examples:
        >>> jaxmp.range_report(jnp.array([0.0, 1.0, 3.0, 1e6])).total
        RangeStats(zero=0.25, underflow=0.0, subnormal=0.0, normal=0.5, overflow=0.25, \
nonfinite=0.0, min=1.0, max=1000000.0, size=4)
        >>> jaxmp.range_report(jnp.array([0.0, 1.0, 3.0, 1e6])).total.counts["normal"]
        2
    """

    zero: float
    underflow: float
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
        return self.underflow + self.overflow + self.nonfinite


@dataclasses.dataclass(frozen=True)
class RangeReport:
    """What a cast would do to the leaves of a pytree; ``str`` of it is a table.

    Args:
        dtype: Name of the dtype.
        total: The :class:`RangeStats` of all leaves together.
        leaves: Those of each leaf, by its path. A path that comes again gets a
            number, and what is no container has the path ``(root)``.

    Examples:
        >>> report = jaxmp.range_report({"w": jnp.array([0.0, 2.0**-25, 1.0, 3.0])})
        >>> report.total.underflow, report.leaves["w"].max
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
        rows: list[tuple[str, ...]] = [tuple(line.split("|")) for line in _HEAD]
        for path, stats in [("total", self.total), *worst_first]:
            shares = [_percent(getattr(stats, name)) for name in _CLASSES]
            size = f"{stats.size}" if stats.size < 10**8 else f"{stats.size:.2e}"
            rows.append((path, *shares, f"{stats.min:.1e}", f"{stats.max:.1e}", size))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        room = min(widths[0], WIDTH - sum(widths[1:]) - len(widths[1:]))
        lines = map(str.rstrip, aligned(rows, [room, *(-x for x in widths[1:])], " "))
        return "\n".join([f"{self.total.size:,} values as {self.dtype}", *lines])

    _repr_html_ = as_html


def range_report(tree: Any, dtype: DTypeLike = "float16") -> RangeReport:
    """Counts what a cast to ``dtype`` would do to the values of a pytree.

    Runs on the host, outside ``jit``, and counts exactly.

    Args:
        tree: Pytree of floating arrays of any shapes, sharded or not. A complex value
            counts as two, its real and its imaginary part.
        dtype: The format to look at: float16, bfloat16, or a wider one.

    Returns:
        A :class:`RangeReport` with the fractions for every leaf and in total.

    Raises:
        TypeError: If a leaf is neither floating nor complex.
        ValueError: If ``dtype`` is not a floating dtype that jaxmp knows.

    Examples:
        >>> grads = {"w": jnp.array([0.0, 2.0**-25, 1.0, 65520.0]), "b": jnp.ones(4)}
        >>> print(jaxmp.range_report(grads))
        8 values as float16
        % of the  zero under-   sub- normal over-   non-     min     max size
        values           flow normal         flow finite
        total    12.50  12.50      0  62.50 12.50      0 3.0e-08 6.6e+04    8
        w        25.00  25.00      0  25.00 25.00      0 3.0e-08 6.6e+04    4
        b            0      0      0 100.00     0      0 1.0e+00 1.0e+00    4
    """
    dtype = as_dtype(dtype, "`dtype`")
    named = floating_leaves("range_report", tree, on_host=True)
    found = [_classify(x, dtype) for _, x in named]
    size = sum(x.size for x in found)
    counts = [sum(x.counts[name] for x in found) for name in _CLASSES]
    total = RangeStats(
        *(count / max(size, 1) for count in counts),
        min=min((x.min for x in found if x.min), default=0.0),
        max=max((x.max for x in found), default=0.0),
        size=size,
    )
    paths = numbered(path for path, _ in named)
    return RangeReport(dtype.name, total, dict(zip(paths, found, strict=True)))


def suggest_loss_scale(
    tree: Any, dtype: DTypeLike = "float16", *, headroom: float = 8
) -> float:
    """Returns the largest power of two that lets no value overflow ``dtype``.

    That is, the largest at which ``headroom`` times the largest finite magnitude is at
    most the format's maximum, 65504 for float16. The values must be in true units, not
    scaled already. bfloat16 has the range of float32 and needs no scale.

    Args:
        tree: What was seen in one or many steps: a pytree of floating or complex
            arrays, of :class:`RangeReport`, or of :class:`RecordRangesState`. A state
            may have leading axes, as ``vmap`` and ``scan`` stack it.
        dtype: The format.
        headroom: Factor by which later values may be larger, a positive number or
            scalar array. With 1 the largest value may just not overflow.

    Returns:
        A power of two between 2^-126 and 2^127, as a Python float.

    Raises:
        TypeError: If a leaf is neither floating nor complex, or ``headroom`` is not a
            number.
        ValueError: If there is no finite nonzero value, ``headroom`` is not finite
            and positive, or ``dtype`` is not one that jaxmp knows.

    Examples:
        >>> grads = {"w": jnp.array([3e-6, 0.0]), "b": jnp.array([-0.01])}
        >>> jaxmp.suggest_loss_scale(grads)
        524288.0
        >>> jaxmp.suggest_loss_scale(grads, headroom=1)
        4194304.0
    """
    headroom = known_number("headroom", headroom)
    if headroom is None or not 0 < headroom <= sys.float_info.max:
        raise ValueError(
            f"`headroom` must be finite and positive, but is {short(headroom)}. Pass "
            "for example 8, for gradients that may become eight times as large."
        )
    dtype = as_dtype(dtype, "`dtype`")

    def largest_of(x):
        """Returns the largest magnitude of a summary, and all else as it is."""
        if isinstance(x, RangeReport):
            return x.total.max
        return float(np.max(x.max)) if isinstance(x, RecordRangesState) else x

    tree = jax.tree.map(
        largest_of, tree, is_leaf=lambda x: isinstance(x, RecordRangesState)
    )
    hint = (
        "Pass gradients, what `jaxmp.range_report` returned, or what "
        '`jaxmp.record_ranges` keeps: `optax.tree.get(opt_state, "RecordRangesState")`.'
    )
    named = floating_leaves("suggest_loss_scale", tree, hint, on_host=True)
    largest = max((_classify(x, dtype).max for _, x in named), default=0)
    if largest == 0:
        raise ValueError(
            "`suggest_loss_scale` needs a finite nonzero value, but there is none. "
            "Pass the gradients of a step that did not overflow."
        )
    # A fraction of integers, because the product may be too large for a float.
    limit = Fraction(float(jnp.finfo(dtype).max))
    room = limit / (Fraction(largest) * Fraction(headroom))
    exponent = room.numerator.bit_length() - room.denominator.bit_length()
    exponent -= room < Fraction(2) ** exponent  # right, or one too large
    return 2.0 ** min(max(exponent, -126), 127)


@np.errstate(invalid="ignore")  # a signalling NaN is counted without a warning
def _classify(x: Any, dtype: np.dtype) -> RangeStats:
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
    least = float(np.min(magnitude, where=counted, initial=np.inf))
    return RangeStats(
        *(np.diff(up_to, prepend=0) / max(magnitude.size, 1)).tolist(),
        min=least if least < math.inf else 0.0,
        max=float(np.max(magnitude, where=counted, initial=0)),
        size=magnitude.size,
    )


def _as_dict(stats: RangeStats) -> dict[str, Any]:
    return {**dataclasses.asdict(stats), "counts": stats.counts}


def _percent(fraction: float) -> str:
    """Writes a fraction so that a single value in millions still shows."""
    if 0 < fraction < 0.00005:
        return "<0.01"
    return f"{100 * fraction:.2f}" if fraction else "0"
