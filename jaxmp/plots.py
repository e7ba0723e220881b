"""Pictures of ranges, overflows, errors and loss scales; needs ``jaxmp[plot]``.

A picture that is given no axes is pyplot's current figure: ``plt.show()`` shows it, and
``plt.savefig(path)`` or ``ax.figure.savefig(path)`` saves it.
"""

from __future__ import annotations

import collections
import math
import posixpath
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ._base.checks import as_scale, check_positive, describe
from ._base.dtypes import as_dtype, is_narrow
from ._diagnosis.exponents import RecordRangesState, exponent_histogram
from ._diagnosis.overflow.report import OverflowReport
from ._diagnosis.parity.report import ParityReport
from ._diagnosis.ranges import range_report, suggest_loss_scale
from ._diagnosis.sensitivity.report import SensitivityReport
from ._names import not_installed
from ._training.loss_scale_state import LossScaleState, get_loss_scale_state, scale_in

try:
    from matplotlib.axes import Axes
except ModuleNotFoundError as _error:
    raise not_installed(__name__, "matplotlib", "plot") from _error

__all__ = ["exponents", "loss_scale", "overflow", "parity", "sensitivity"]

_ROWS = 10  # of a picture of modules
_NAMED = 30  # modules have room for their names below a picture
_DASHED: dict[str, Any] = {"color": "black", "linestyle": "--"}


def exponents(
    ranges: Any,
    dtype: DTypeLike = "float16",
    *,
    loss_scale: Any = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws the share of the values at each binary exponent, and the format's range.

    Zeros, and Inf and NaN if there are any, have a bar of their own at an end. The
    shaded ranges are those that a cast to ``dtype`` makes subnormal and normal. Values
    to the left of both become zero, and values to the right become Inf. A dashed
    outline shows where the loss scale moves the values.

    Args:
        ranges: A pytree of floating arrays, or a :class:`jaxmp.RecordRangesState`,
            in true units. Its first and its last bar hold all that lies beyond. A state
            with leading axes, as ``vmap`` stacks it, is summed; of the states after
            each step, draw the last.
        dtype: The format: float16, bfloat16, or a wider one.
        loss_scale: The positive scale of the outline, as a number or scalar array, or
            an optimizer state that holds one; 1 draws none. None takes
            :func:`jaxmp.suggest_loss_scale` for float16, and 1 for the others, which
            need no scale.
        ax: Where to draw; None makes a new figure.

    Returns:
        The axes.

    Raises:
        TypeError: If a leaf is not floating.
        ValueError: If there are no values, ``loss_scale`` is not positive, or
            ``dtype`` is not one that jaxmp knows.

    Examples:
        >>> import jaxmp.plots
        >>> ax = jaxmp.plots.exponents({"w": jnp.array([0.0, 2.0**-30, 0.5])})
        >>> ax.get_xlabel(), ax.get_ylabel()
        ('log2 of the magnitude', '% of the values')

    References:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, figure 3,
        https://arxiv.org/abs/1710.03740.
    """
    dtype = as_dtype(dtype, "`dtype`")
    low, counts, zeros, nonfinite = _histogram(ranges)
    size = counts.sum() + zeros + nonfinite
    if size == 0:
        raise ValueError(
            "`exponents` needs values to draw, but there are none. Pass gradients, or "
            "a `RecordRangesState` after its first step."
        )
    which = "loss scale" if loss_scale is not None else "suggested loss scale"
    if loss_scale is None:
        is_half = dtype == jnp.float16 and counts.any()
        loss_scale = suggest_loss_scale(ranges, dtype) if is_half else 1.0
    loss_scale = float(as_scale(scale_in(loss_scale)))
    check_positive("loss_scale", loss_scale)
    shift, info = math.log2(loss_scale), jnp.finfo(dtype)
    shares, edges = 100 * counts / size, low + np.arange(len(counts) + 1)
    # Half of the smallest subnormal number and less rounds to zero.
    first = info.minexp - info.nmant - 1
    used = edges[:-1][counts > 0]
    seen = np.r_[used, used + shift]
    if dtype == jnp.float16 or not used.size:  # the others are wider than what is seen
        seen = np.r_[seen, first, info.maxexp - 1]
    left, right = seen.min(), seen.max() + 1
    gap = max(4, (right - left) / 20)  # to the bars of zeros, and of Inf and NaN

    axes = _subplots(1, (7, 4), ax)
    axes.axvspan(first, info.minexp, color="0.96", label=f"{dtype.name} subnormal")
    axes.axvspan(info.minexp, info.maxexp, color="0.9", label=f"{dtype.name} normal")
    axes.stairs(shares, edges, fill=True, label="values")
    style: dict[str, Any] = {"width": gap / 2, "fill": False, "hatch": "////"}
    axes.bar(left - gap, 100 * zeros / size, label="zeros", **style)
    if nonfinite:
        style |= {"edgecolor": "red", "label": "Inf or NaN"}
        axes.bar(right + gap, 100 * nonfinite / size, **style)
    if loss_scale != 1:
        spelled = f"2^{shift:.0f}" if shift.is_integer() else f"{loss_scale:g}"
        label = f"times the {which}, {spelled}"
        axes.stairs(shares, edges + shift, label=label, **_DASHED)
    axes.set(xlabel="log2 of the magnitude", xlim=(left - 2 * gap, right + 2 * gap))
    smallest = min([100.0, *shares[shares > 0]])
    axes.set(ylabel="% of the values", yscale="log", ylim=(smallest / 2, 150))
    axes.set_title(f"{size:,.0f} values in the range of {dtype.name}")
    return _with_legend(axes, ax)


def loss_scale(
    history: LossScaleState | Iterable[Any], *, ax: Axes | None = None
) -> Axes:
    """Draws the loss scale over the steps, and marks those that were skipped.

    A cross is at the scale under which the step overflowed; the line then goes down.

    Args:
        history: The state that ``tx.init`` made and the state after each step, as
            :func:`jaxmp.get_loss_scale_state` returns it, or the optimizer state that
            holds it, in a list; or one ``LossScaleState`` with a leading axis over the
            steps, as ``lax.scan`` stacks it. Keep copies where the training step
            donates its state: ``jax.device_get(state._replace(inner_state=None))``.
            Step 0 is the first state in it.
        ax: Where to draw; None makes a new figure.

    Returns:
        The axes.

    Raises:
        ValueError: If the history is empty, or holds something without a loss scale.

    Examples:
        >>> import jaxmp.plots
        >>> tx = jaxmp.loss_scaling(optax.sgd(0.1), "float16")
        >>> state = tx.init(jnp.ones(2))
        >>> history = [state]
        >>> for grad in (1.0, jnp.inf, 1.0):
        ...     _, state = tx.update(jnp.full(2, grad), state)
        ...     history.append(jaxmp.get_loss_scale_state(state))
        >>> ax = jaxmp.plots.loss_scale(history)
        >>> ax.get_legend_handles_labels()[1]
        ['loss scale', 'skipped (1)']
    """
    if isinstance(history, LossScaleState):
        history = [history]
    states = [get_loss_scale_state(opt_state) for opt_state in history]
    if not states or not np.size(states[0].loss_scale):
        raise ValueError(
            "`loss_scale` needs the state of one step at least, but the history is "
            "empty. Append `jaxmp.get_loss_scale_state(opt_state)` after each step."
        )
    scales, finite = (
        np.concatenate([np.ravel(getattr(state, name)) for state in states])
        for name in ("loss_scale", "last_finite")
    )
    (skipped,) = np.nonzero(~finite)
    axes = _subplots(1, (7, 4), ax)
    # Of a line with one point there is nothing to see.
    marker = "." if len(scales) == 1 else ""
    axes.step(range(len(scales)), scales, marker, where="post", label="loss scale")
    if len(skipped):
        # A state holds the scale for the next step.
        used = scales[np.maximum(skipped - 1, 0)]
        axes.plot(skipped, used, "rx", label=f"skipped ({len(skipped)})")
    title = f"The loss scale over {len(scales) - 1:,} steps"
    axes.set(title=title, xlabel="step", ylabel="loss scale")
    axes.set_yscale("log", base=2)
    return _with_legend(axes, ax)


def overflow(report: OverflowReport) -> Axes:
    """Draws how close a program came to overflow and underflow, module by module.

    The left plot has the bits of each module below overflow, forward and backward: the
    powers of two from its largest value to the largest number of the format.
    "Inf or NaN" stands in place of a bar where an operation was not finite. The right
    plot has the largest share of an operation's values that became zero or subnormal.
    The modules with the fewest bits are at the top; of more than ten, ten are drawn.
    That of the first fault, if it computes in 16 bits, is in bold, and first of all.

    Args:
        report: What :func:`jaxmp.find_overflow` returned.

    Returns:
        The left axes.

    Raises:
        ValueError: If no operation of the program computes in 16 bits.

    Examples:
        >>> import jaxmp.plots
        >>> x = jnp.array([2.0, 200.0], jnp.float16)
        >>> report = jaxmp.find_overflow(lambda x: x * x)(x / 2)
        >>> jaxmp.plots.overflow(report).get_xlabel()
        'fewest bits below overflow'
    """
    _check_report(report, OverflowReport, "overflow", "find_overflow(fun)(*args)")
    rows = [x for x in report.operations if is_narrow(jnp.dtype(x.dtype))]
    if not rows:
        raise ValueError(
            "`overflow` draws what computes in 16 bits, but nothing in the report "
            "does. Pass the report of a function in float16 or bfloat16."
        )
    # Of each module, forward and backward.
    room = collections.defaultdict(lambda: [math.inf, math.inf])
    lost = collections.defaultdict(lambda: [0.0, 0.0])
    for x in rows:
        least, most = room[x.module], lost[x.module]
        headroom = -math.inf if x.nonfinite else x.headroom
        least[x.backward] = min(least[x.backward], headroom)
        most[x.backward] = max(most[x.backward], 100 * x.lost)
    first = report.first.module if report.first else None
    modules = sorted(room, key=lambda x: (x != first, min(room[x])))[:_ROWS]
    left, right = _rows("Distance to overflow by module", modules, len(room), [first])
    for i, label in enumerate(("forward", "backward")):
        place, found = np.arange(len(modules)) + 0.4 * i, [room[x][i] for x in modules]
        style = {"height": 0.4, "fill": i == 0, "hatch": "////" * i, "label": label}
        bars = left.barh(place, np.where(np.isfinite(found), found, 0), **style)
        bad = ["Inf or NaN" if x == -math.inf else "" for x in found]
        left.bar_label(bars, bad, color="red", fontsize="small", padding=2)
        right.barh(place, [lost[x][i] for x in modules], **style)
    left.set(xlabel="fewest bits below overflow", xlim=(0, None))
    right.set(xlabel="% lost to zero", xlim=(0, None))
    return _with_legend(left)


def parity(report: ParityReport, *, ax: Axes | None = None) -> Axes:
    """Draws how far two programs are apart along their depth.

    The line has the error of what each module computes, as the programs run. The points
    have what its own lines add, given the same, and the shaded range is what rounding
    explains of that. A point above it is a difference, and the first has its name.
    Modules are in the order of the program. Errors of 0 and Inf lie at the edges.

    Args:
        report: What :func:`jaxmp.parity` returned.
        ax: Where to draw; None makes a new figure.

    Returns:
        The axes.

    Examples:
        >>> import jaxmp.plots
        >>> def model(x, slope):
        ...     with jax.named_scope("head"):
        ...         return jnp.tanh(slope * x)
        >>> x = jnp.linspace(0, 1, 8)
        >>> report = jaxmp.parity(lambda x: model(x, 1.0), lambda x: model(x, 1.1))(x)
        >>> jaxmp.plots.parity(report).get_title()
        'head is the first that differs'
    """
    _check_report(report, ParityReport, "parity", "parity(f, g)(*args)")
    rows = report.modules
    found = np.array([(x.error, x.added, x.typical) for x in rows]).reshape(-1, 3)
    seen = found[(found > 0) & np.isfinite(found)]
    low, high = (seen.min(), seen.max()) if seen.size else (1e-8, 1.0)
    error, added, typical = np.clip(found, low / 3, high * 3).T
    axes, place = _subplots(1, (7, 4), ax), np.arange(len(rows))
    label = "explained by rounding"
    axes.fill_between(place, low / 3, typical, color="0.9", step="mid", label=label)
    axes.plot(place, error, color="black", label="as the programs run")
    differs = np.array([x.differs for x in rows], bool)
    for which, style in ((~differs, {"fillstyle": "none"}), (differs, {})):
        label = "added" if style else "added, more than rounding"
        options = {"linestyle": "", "marker": "o", "color": "black", "label": label}
        if which.any():
            axes.plot(place[which], added[which], **(options | style))
    title = "No module adds more than rounding explains"
    if (first := report.first) is not None:
        where = next((i for i, x in enumerate(rows) if x.path == first.path), 0)
        axes.axvline(where, **_DASHED)
        title = f"{first.path or 'What is in no module'} is the first that differs"
    axes.set(xlabel="modules in the order of the program", ylabel="relative error")
    axes.set(yscale="log", ylim=(low / 4, high * 4), title=title)
    if len(rows) <= _NAMED:
        axes.set_xticks(place, [x.name for x in rows], rotation=60, ha="right")
        axes.set_xlabel("")
    return _with_legend(axes, ax)


def sensitivity(report: SensitivityReport) -> Axes:
    """Draws the error of each module in 16 bits, and the cost of float32 for it.

    The left plot has the larger of the relative errors of loss and gradients, with only
    the module in 16 bits and with all but the module. A dashed line is the tolerance.
    The right plot has the module's share of the FLOPs. Errors of 0 and Inf lie at the
    edges. The modules are in the order of the report, the worst at the top; of more
    than ten, the ten worst are drawn and those that need another dtype. Those in
    ``report.float32_paths`` or ``bfloat16_paths`` are in bold.

    Args:
        report: What :func:`jaxmp.sensitivity` returned.

    Returns:
        The left axes.

    Examples:
        >>> import jaxmp.plots
        >>> def loss(w, x):
        ...     with jax.named_scope("head"):
        ...         return jnp.mean(x @ w)
        >>> x = jnp.linspace(0, 1, 64).reshape(8, 8)
        >>> report = jaxmp.sensitivity(loss, "bfloat16")(jnp.ones((8, 8)) / 3, x)
        >>> jaxmp.plots.sensitivity(report).get_xlabel()
        'relative error of loss or gradients, the larger'
    """
    _check_report(report, SensitivityReport, "sensitivity", "sensitivity(loss)(*args)")
    named = report.float32_paths + report.bfloat16_paths
    rows = [x for i, x in enumerate(report.modules) if i < _ROWS or x.path in named]
    bold = [x.name for x in rows if x.path in named]
    narrow, names = report.narrow, [x.name for x in rows]
    title = f"Error of each module in {narrow}"
    left, right = _rows(title, names, len(report.modules), bold)
    errors, place = np.array([(x.alone, x.without) for x in rows]), range(len(rows))
    seen = [x for x in (*errors.flat, report.tolerance) if 0 < x < math.inf]
    # Whole decades have labels enough, and between them there is no room for more.
    low, high = np.floor(np.log10(min(seen))), np.ceil(np.log10(max(seen)))
    low, high = 10**low / 2, 10**high * 2
    only, others = np.clip(errors, low, high).T
    left.hlines(place, only, others, color="0.8")
    style = {"linestyle": "", "color": "black", "clip_on": False}
    left.plot(only, place, marker="o", label=f"only this in {narrow}", **style)
    style["fillstyle"] = "none"
    left.plot(others, place, marker="D", label=f"all but this in {narrow}", **style)
    left.axvline(report.tolerance, label=f"tolerance ({report.tolerance:g})", **_DASHED)
    left.set(xscale="log", xlim=(low, high))
    left.xaxis.set_minor_formatter("")
    left.set_xlabel("relative error of loss or gradients, the larger")
    right.barh(place, [100 * (x.stored if report.residuals else x.share) for x in rows])
    right.set_xlabel("% of what is stored" if report.residuals else "% of the FLOPs")
    return _with_legend(left)


def _rows(
    title: str, modules: Sequence[str], of: int, bold: Sequence[str | None]
) -> tuple[Axes, Axes]:
    """Returns two axes of a new figure, with a row for each module from the top.

    They are named without the path that all have in common.
    """
    left, right = _subplots(2, (9, 1.8 + 0.34 * len(modules)), width_ratios=(3, 1))
    shared = posixpath.commonpath([posixpath.dirname(x) for x in modules if x] or [""])
    names = [x.removeprefix(shared).lstrip("/") or "(no module)" for x in modules]
    left.set_yticks(range(len(modules)), names)
    for module, text in zip(modules, left.get_yticklabels(), strict=True):
        text.set_fontweight("bold" if module in bold else "normal")
    left.invert_yaxis()
    left.set_ylabel(f"modules of {shared}" if shared else "modules")
    left.set_title(f"{title}, {len(modules)} of {of}" if len(modules) < of else title)
    return left, right


def _subplots(columns: int, size: Any, ax: Any = None, **options: Any) -> Any:
    """Returns ``ax``, or for None the axes of a new figure of pyplot."""
    if ax is not None:
        if not hasattr(ax, "axvspan"):
            raise TypeError(f"`ax` must be matplotlib's axes, but is {describe(ax)}.")
        return ax
    from matplotlib import pyplot  # late, because it looks for a screen

    options |= {"sharey": True, "figsize": size, "layout": "constrained"}
    figure, axes = pyplot.subplots(1, columns, **options)
    layout: Any = figure.get_layout_engine()
    layout.set(h_pad=0.08)  # inches, from a label to the legend
    return axes


def _histogram(ranges: Any) -> tuple[int, np.ndarray, float, float]:
    """Returns the first bucket, the counts of all, zeros, and Inf and NaN."""
    if isinstance(ranges, RecordRangesState):
        low, length = int(np.ravel(ranges.low)[0]), np.shape(ranges.exponents)[-1]
        counts = np.asarray(ranges.exponents, np.float64).reshape(-1, length).sum(0)
        return low, counts, float(np.sum(ranges.zeros)), float(np.sum(ranges.nonfinite))
    low = -1074  # every exponent that a float64 can have, the subnormal ones included
    counts = exponent_histogram(ranges, low=low, high=1023)
    total = range_report(ranges).total.counts
    return low, np.asarray(counts, np.float64), total["zero"], total["nonfinite"]


def _check_report(report: Any, kind: type, name: str, call: str) -> None:
    """Raises where something else stands in the place of the report to draw."""
    if not isinstance(report, kind):
        raise TypeError(
            f"`plots.{name}` draws a report of `jaxmp.{call}`, but got "
            f"{describe(report)}. Type `jaxmp.plots.{name}(jaxmp.{call})`."
        )


def _with_legend(axes: Axes, ax: Axes | None = None) -> Axes:
    """Adds a legend: below a figure of ours, and inside of axes that were given."""
    if ax is None:
        handles, _ = axes.get_legend_handles_labels()
        figure: Any = axes.figure
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    else:
        axes.legend(fontsize="small")
    return axes
