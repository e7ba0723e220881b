"""Pictures of ranges, overflows, errors and loss scales; needs ``jaxmp[plot]``.

A picture that is given no axes is pyplot's current figure: ``plt.show()`` shows it, and
``plt.savefig(path)`` or ``ax.figure.savefig(path)`` saves it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ._base.checks import as_scale, check_positive, describe
from ._base.dtypes import as_dtype, is_narrow
from ._diagnosis.overflow.report import OverflowReport
from ._diagnosis.ranges import range_report, suggest_loss_scale
from ._diagnosis.sensitivity.report import SensitivityReport
from ._training.exponents import RecordRangesState, exponent_histogram
from ._training.loss_scale_state import LossScaleState, get_loss_scale_state, scale_in

try:
    from matplotlib.axes import Axes
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "`jaxmp.plots` needs matplotlib. Install it with pip install 'jaxmp[plot]'"
    ) from error

__all__ = ["exponents", "loss_scale", "overflow", "sensitivity"]

_ROWS = 10  # of a picture of modules
_RED = "#c03020"
# Told apart without colour: filled bars, hatched bars, a dashed outline.
_VALUES: dict[str, Any] = {"color": "#4878a8"}
_HATCHED: dict[str, Any] = {"fill": False, "edgecolor": "black", "hatch": "////"}
_HOLLOW: dict[str, Any] = {"fillstyle": "none", "color": "black"}
_NONFINITE: dict[str, Any] = {"fill": False, "edgecolor": _RED, "hatch": "xxxx"}
_DASHED: dict[str, Any] = {"color": "black", "linewidth": 1.4, "linestyle": "--"}
_NORMAL: dict[str, Any] = {"color": "0.92"}
_SUBNORMAL: dict[str, Any] = {"fill": False, "edgecolor": "0.8", "hatch": "...."}


def exponents(
    ranges: Any,
    dtype: DTypeLike = "float16",
    *,
    loss_scale: Any = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws the share of the values at each binary exponent, and the format's range.

    The axis of the shares is logarithmic. Zeros, and Inf and NaN if there are any, have
    a bar of their own at an end. The shaded ranges are those that a cast to ``dtype``
    makes subnormal and normal. Values to the left of both become zero, and values to
    the right become Inf. A dashed outline shows where the loss scale moves the values.

    Args:
        ranges: A pytree of floating arrays, or a :class:`jaxmp.RecordRangesState`,
            in true units. A state with leading axes, as ``vmap`` stacks it, is
            summed; of the states after each step, draw the last.
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
    shift = math.log2(loss_scale)
    used = np.flatnonzero(counts) if counts.any() else np.array([-low])
    edges = low + np.arange(used[0], used[-1] + 2)
    shares = 100 * counts[used[0] : used[-1] + 1] / size

    info = jnp.finfo(dtype)
    # Half of the smallest subnormal number and less rounds to zero.
    first = info.minexp - info.nmant - 1
    left, right = min(edges[0], edges[0] + shift), max(edges[-1], edges[-1] + shift)
    if dtype == jnp.float16:  # the others are far wider than what is to be seen
        left, right = min(left, first), max(right, info.maxexp)
    gap = max(4, (right - left) / 20)  # to the bars of zeros, and of Inf and NaN

    (axes,) = _axes(ax, 1)
    spans = ("subnormal", first, info.minexp), ("normal", info.minexp, info.maxexp)
    for (name, start, end), style in zip(spans, (_SUBNORMAL, _NORMAL), strict=True):
        start, end = max(start, left - 1), min(end, right + 1)
        if start < end:
            style = {"label": f"{dtype.name} {name}", "linewidth": 0, **style}
            axes.axvspan(start, end, zorder=0, **style)
    ends = [f"first bar: all below 2^{low + 1}"] * bool(counts[0])
    ends += [f"last bar: all from 2^{low + len(counts) - 1}"] * bool(counts[-1])
    label = f"values ({', '.join(ends)})" if ends else "values"
    axes.bar(edges[:-1], shares, 0.9, align="edge", label=label, **_VALUES)
    axes.bar(left - gap, 100 * zeros / size, gap / 2, label="zeros", **_HATCHED)
    if nonfinite:
        style = {"label": "Inf or NaN", **_NONFINITE}
        axes.bar(right + gap, 100 * nonfinite / size, gap / 2, **style)
    if loss_scale != 1:
        spelled = f"2^{shift:.0f}" if shift.is_integer() else f"{loss_scale:g}"
        label = f"times the {which}, {spelled}"
        axes.stairs(shares, edges + shift, **_DASHED, label=label)
    axes.set_yscale("log")
    axes.set_ylim(min([100.0, *shares[shares > 0]]) / 2, 150)
    axes.set_xlabel("log2 of the magnitude")
    axes.set_ylabel("% of the values")
    return _finished(axes, f"{size:,.0f} values in the range of {dtype.name}", ax)


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
            Without the first state the line begins with the state after the first
            step, if that changed the scale: at step 1 if it was skipped, and at step 0
            if the scale grew, as this looks like the state that ``tx.init`` made.
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
    if not isinstance(history, Iterable):
        raise TypeError(
            "`plots.loss_scale` draws a history of states, but got "
            f"{describe(history)}. Type `history.append(jaxmp.get_loss_scale_state("
            "opt_state))` after each step, and `jaxmp.plots.loss_scale(history)`."
        )
    states = [get_loss_scale_state(opt_state) for opt_state in history]
    if not states or not np.size(states[0].loss_scale):
        raise ValueError(
            "`loss_scale` needs the state of one step at least, but the history is "
            "empty. Append `jaxmp.get_loss_scale_state(opt_state)` after each step."
        )
    scales, finite, good = (
        np.concatenate([np.ravel(getattr(state, name)) for state in states])
        for name in ("loss_scale", "last_finite", "good_steps")
    )
    if finite[0] and good[0]:  # its step did not change the scale
        scales, finite = np.r_[scales[0], scales], np.r_[True, finite]
    steps = np.arange(len(scales)) + (not finite[0])
    # A state holds the scale for the next step.
    used = np.r_[scales[0], scales[:-1]]

    (axes,) = _axes(ax, 1)
    # Of a line with one point there is nothing to see.
    style = {"color": "black", "marker": "." if len(steps) == 1 else None}
    axes.step(steps, scales, where="post", label="loss scale", **style)
    if not finite.all():
        label = f"skipped ({np.count_nonzero(~finite)})"
        axes.plot(steps[~finite], used[~finite], "x", color=_RED, label=label)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("step")
    axes.set_ylabel("loss scale")
    return _finished(axes, f"The loss scale over {steps[-1]:,} steps", ax)


def overflow(report: OverflowReport, *, ax: Sequence[Axes] | None = None) -> Axes:
    """Draws how close a program came to overflow and underflow, module by module.

    The left plot has the headroom of each module, forward and backward: the powers of
    two from the largest value of its operations to the largest number of the format. A
    cross in place of a bar marks a module with an operation that was not finite. The
    right plot has the largest share of an operation's values that became zero or
    subnormal. The modules are in the order of the program; of more than ten, those of
    faults and those with the least headroom are drawn. The module of the first fault is
    in bold, and an arrow points at it: in the left plot for Inf or NaN, in the right
    one for zeros.

    Args:
        report: What :func:`jaxmp.find_overflow` returned.
        ax: Two axes to draw on, the left and the right; None makes a new figure.

    Returns:
        The left axes.

    Raises:
        ValueError: If no operation of the program computes in 16 bits.

    Examples:
        >>> import jaxmp.plots
        >>> x = jnp.array([2.0, 200.0], jnp.float16)
        >>> report = jaxmp.find_overflow(lambda x: x * x)(x / 2)
        >>> jaxmp.plots.overflow(report).get_xlabel()
        'least headroom (powers of two)'
    """
    _check_report(report, OverflowReport, "overflow", "find_overflow(fun)(*args)")
    rows = [x for x in report.operations if is_narrow(jnp.dtype(x.dtype))]
    if not rows:
        raise ValueError(
            "`overflow` draws what computes in 16 bits, but nothing in the report "
            "does. Pass the report of a function in float16 or bfloat16."
        )
    first, near = report.first, dict[str, float]()  # the least headroom of a module
    for x in rows:
        near[x.module] = min(near.get(x.module, math.inf), x.headroom)
    if first is not None:
        near.setdefault(first.module, math.inf)
    guilty = [x.module for x in (first, *report.others) if x and x.module in near]
    chosen = [*dict.fromkeys([*guilty, *sorted(near, key=near.__getitem__)])][:_ROWS]
    modules = [module for module in near if module in chosen]
    left, right = _rows(ax, modules, [first.module] if first else ())
    crosses = []
    for backward, style, shift in ((False, _VALUES, -0.2), (True, _HATCHED, 0.2)):
        parts = [
            [x for x in rows if (x.module, x.backward) == (module, backward)]
            for module in modules
        ]
        places = np.arange(len(modules)) + shift
        is_bad = np.array([any(x.nonfinite for x in part) for part in parts])
        room = [min([math.inf, *(x.headroom for x in part)]) for part in parts]
        room = np.where(is_bad | np.isinf(room), math.nan, room)
        lost = [100 * max([0.0, *(x.lost for x in part)]) for part in parts]
        label = "backward" if backward else "forward"
        left.barh(places, room, 0.38, label=label, **style)
        right.barh(places, lost, 0.38, **style)
        crosses += [*places[is_bad]]
    if crosses:
        style = {"color": _RED, "clip_on": False, "zorder": 3, "label": "Inf or NaN"}
        left.plot(np.zeros(len(crosses)), crosses, "x", **style)
    left.set_xlabel("least headroom (powers of two)")
    right.set_xlabel("% lost to zero")
    for axes in (left, right):
        axes.set_xlim(0, max(1.0, axes.get_xlim()[1]))
    if first is not None:
        place = modules.index(first.module) + (0.2 if first.backward else -0.2)
        axes = right if first.kind == "zeros" else left
        end, arrow = axes.get_xlim()[1], {"arrowstyle": "-|>", "color": _RED}
        style = {"color": _RED, "ha": "center", "va": "center", "arrowprops": arrow}
        style["bbox"] = {"color": "white", "pad": 0.5}  # where it lies on a bar
        axes.annotate("first fault", (0.04 * end, place), (0.6 * end, place), **style)
    title = f"Distance to overflow by module{_part(modules, near)}"
    return _finished(left, title, ax)


def sensitivity(report: SensitivityReport, *, ax: Sequence[Axes] | None = None) -> Axes:
    """Draws the error of each module in 16 bits, and the cost of float32 for it.

    The left plot has the larger of the relative errors of loss and gradients, with only
    the module in 16 bits and with all but the module. A dashed line is the tolerance.
    The right plot has the module's share of the FLOPs. In a report on residuals the
    errors are those of eight bits, and the share is that of what is stored. Errors of 0
    and Inf lie at the edges. The modules are in the order of the report, the worst at
    the top; of more than ten, the ten worst are drawn and those that need another
    dtype. Those in ``report.float32_paths`` or ``bfloat16_paths`` are in bold.

    Args:
        report: What :func:`jaxmp.sensitivity` returned.
        ax: Two axes to draw on, the left and the right; None makes a new figure.

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
    rest = [x for x in report.modules[_ROWS:] if x.path in named]
    rows = [*report.modules[:_ROWS], *rest]
    bold = [x.name for x in rows if x.path in named]
    left, right = _rows(ax, [x.name for x in rows], bold)
    places, narrow = np.arange(len(rows)), report.narrow
    only, others = np.transpose([(row.alone, row.without) for row in rows])
    seen = [x for x in (*only, *others, report.tolerance) if 0 < x < math.inf]
    only, others = (np.clip(x, min(seen) / 10, max(seen) * 10) for x in (only, others))
    left.hlines(places, only, others, color="0.8", linewidth=1.0, zorder=0)
    left.plot(only, places, "o", label=f"only this in {narrow}", **_VALUES)
    left.plot(others, places, "D", label=f"all but this in {narrow}", **_HOLLOW)
    label = f"tolerance ({report.tolerance:g})"
    left.axvline(report.tolerance, zorder=0.5, label=label, **_DASHED)
    # Whole decades have labels enough, and between them there is no room for more.
    ends = np.log10([min(*only, *others, *seen), max(*only, *others, *seen)])
    left.set_xscale("log")
    left.set_xlim(0.7 * 10 ** np.floor(ends[0]), 1.4 * 10 ** np.ceil(ends[1]))
    left.xaxis.set_minor_formatter("")
    left.set_xlabel("relative error of loss or gradients, the larger")
    costs = [100 * (row.stored if report.residuals else row.share) for row in rows]
    right.barh(places, costs, 0.6, **_VALUES)
    right.set_xlabel("% of what is stored" if report.residuals else "% of the FLOPs")
    title = f"Error of each module in {narrow}{_part(rows, report.modules)}"
    return _finished(left, title, ax)


def _part(shown: Sized, every: Sized) -> str:
    """Says how many rows are shown, if not all."""
    return f", {len(shown)} of {len(every)}" if len(every) > len(shown) else ""


def _rows(ax: Any, modules: Sequence[str], bold: Sequence[str]) -> tuple[Axes, Axes]:
    """Returns two axes with a row for each module, the first at the top.

    They are named without the path that all have in common.
    """
    left, right = _axes(ax, 2, rows=len(modules))
    levels = zip(*(x.split("/")[:-1] for x in modules if x), strict=False)
    alike = itertools.takewhile(lambda names: len({*names}) == 1, levels)
    shared = "".join(f"{name}/" for name, *_ in alike)
    names = [module.removeprefix(shared) or "(no module)" for module in modules]
    names = [x if len(x) <= 48 else f"…{x[-47:]}" for x in names]
    left.set_yticks(range(len(names)), names)
    for module, text in zip(modules, left.get_yticklabels(), strict=True):
        text.set_fontweight("bold" if module in bold else "normal")
    left.set_ylabel(f"modules of {shared[:-1]}" if shared else "modules")
    right.tick_params(labelleft=False)
    for axes in (left, right):
        axes.set_ylim(len(modules) - 0.4, -0.6)
    return left, right


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


def _axes(ax: Any, count: int, rows: int = 0) -> list[Axes]:
    """Returns the axes that were given; for None new ones, side by side."""
    if ax is None:
        from matplotlib import pyplot  # late, because it looks for a screen

        size = (9, 1.8 + 0.34 * rows) if count == 2 else (7, 4)
        figure = pyplot.figure(figsize=size, layout="constrained")
        options = {"sharey": True, "width_ratios": [3, 1][:count]}
        ax = np.ravel(figure.subplots(1, count, **options))
    found = list(ax) if isinstance(ax, (Sequence, np.ndarray)) else [ax]
    if len(found) != count or not all(isinstance(x, Axes) for x in found):
        what, cure = (
            ("axes", "one of `figure.subplots()`"),
            ("two axes", "both of `figure.subplots(2)`"),
        )[count - 1]
        raise TypeError(
            f"`ax` must be {what} of matplotlib, but is {describe(ax)}. Leave it out "
            f"for a new figure, or pass {cure}."
        )
    return found


def _finished(axes: Axes, title: str, ax: Any) -> Axes:
    """Adds a title, where there is none, and a legend: below a figure of ours."""
    if not any(axes.get_title(loc) for loc in ("left", "center", "right")):
        axes.set_title(title, fontsize="medium")
    if ax is None:
        figure: Any = axes.figure
        handles, _ = axes.get_legend_handles_labels()
        options = {"loc": "outside lower center", "ncols": 3, "frameon": False}
        figure.legend(handles=handles, **options)
    else:
        axes.legend(fontsize="small", labelspacing=0.2, handlelength=1.5)
    return axes
