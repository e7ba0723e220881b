"""What the pictures show: axes, labels, series."""

import dataclasses
import functools
import importlib
import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib import pyplot
from matplotlib.figure import Figure

import jaxmp
import jaxmp.plots

VALUES = jnp.array([0.0, 0.0, 2.0**-30, 2.0**-12, 3.0 * 2.0**-12, jnp.inf, 1.0, 1.5])


@pytest.fixture(autouse=True)
def figures_are_closed():
    yield
    pyplot.close("all")


def labels(ax):
    return ax.get_legend_handles_labels()[1]


def bars(ax):
    """Returns the heights of the bars that show values, by exponent."""
    boxes = ax.containers[labels_of_containers(ax).index("values")]
    return {round(b.get_x()): b.get_height() for b in boxes if b.get_height()}


def labels_of_containers(ax):
    return [container.get_label().split(" (")[0] for container in ax.containers]


def render(ax, tmp_path):
    path = tmp_path / "figure.png"
    ax.figure.savefig(path)
    assert path.stat().st_size > 5000


def test_the_bars_are_shares_of_all_values(tmp_path):
    ax = jaxmp.plots.exponents({"w": VALUES})
    assert bars(ax) == {-30: 12.5, -12: 12.5, -11: 12.5, 0: 25.0}
    (zeros,) = ax.containers[labels_of_containers(ax).index("zeros")]
    assert zeros.get_height() == 25.0
    assert zeros.get_x() + zeros.get_width() < -30
    assert (ax.get_xlabel(), ax.get_ylabel()) == (
        "log2 of the magnitude",
        "% of the values",
    )
    assert ax.get_yscale() == "log"
    render(ax, tmp_path)


def test_the_outline_is_moved_by_the_suggested_scale():
    ax = jaxmp.plots.exponents(VALUES)
    outline = ax.patches[-1].get_data()
    assert labels(ax).count("times the suggested loss scale, 2^15") == 1
    assert (outline.edges[0], outline.edges[-1]) == (-30 + 15, 1 + 15)
    assert outline.values[0] == 12.5
    by_hand = jaxmp.plots.exponents(VALUES, loss_scale=12.0)
    assert "times the loss scale, 12" in labels(by_hand)
    for scale in (jnp.float32(8), np.array(8.0)):
        ax = jaxmp.plots.exponents(VALUES, loss_scale=scale)
        assert "times the loss scale, 2^3" in labels(ax)


@pytest.mark.parametrize(
    ("dtype", "ranges"),
    [("float16", {"subnormal": (-25, -14), "normal": (-14, 16)}), ("bfloat16", None)],
)
def test_the_ranges_of_the_format_are_marked(dtype, ranges, tmp_path):
    ax = jaxmp.plots.exponents(VALUES, dtype)
    spans = {
        p.get_label(): (p.get_x(), p.get_x() + p.get_width())
        for p in ax.patches
        if p.get_label().startswith(dtype)
    }
    if ranges is None:  # bfloat16 is normal as far as there is anything to see
        assert list(spans) == ["bfloat16 normal"]
        assert not any(label.startswith("times") for label in labels(ax))
    else:
        assert spans == {f"{dtype} {name}": span for name, span in ranges.items()}
    render(ax, tmp_path)


def test_bfloat16_shows_its_own_subnormal_range(tmp_path):
    ax = jaxmp.plots.exponents(jnp.array([2.0**-149, 1.0]), "bfloat16")
    (span,) = [p for p in ax.patches if p.get_label() == "bfloat16 subnormal"]
    assert (span.get_x(), span.get_x() + span.get_width()) == (-134, -126)
    assert bars(ax) == {-149: 50.0, 0: 50.0}
    render(ax, tmp_path)


def test_what_was_recorded_can_be_drawn(tmp_path):
    tx = jaxmp.record_ranges(low=-20)
    _, state = tx.update(VALUES, tx.init(VALUES))
    ax = jaxmp.plots.exponents(state)
    assert bars(ax) == {-20: 12.5, -12: 12.5, -11: 12.5, 0: 25.0}
    assert "values (first bar: all below 2^-19)" in labels(ax)
    assert "times the suggested loss scale, 2^15" in labels(ax)
    render(ax, tmp_path)


def test_the_last_bar_of_what_was_recorded_holds_all_above(tmp_path):
    tx = jaxmp.record_ranges(high=-1)
    ax = jaxmp.plots.exponents(tx.update(VALUES, tx.init(VALUES))[1])
    assert "values (last bar: all from 2^-1)" in labels(ax)


def test_stacked_states_are_drawn_as_one():
    tx = jaxmp.record_ranges()
    halves = VALUES.reshape(2, 4)
    states = jax.vmap(lambda x: tx.update(x, tx.init(x))[1])(halves)
    assert bars(jaxmp.plots.exponents(states)) == bars(jaxmp.plots.exponents(VALUES))


def test_what_is_not_finite_has_a_bar(tmp_path):
    ax = jaxmp.plots.exponents(VALUES)
    (bar,) = ax.containers[labels_of_containers(ax).index("Inf or NaN")]
    assert bar.get_height() == 12.5
    assert bar.get_x() > 16
    assert "Inf or NaN" not in labels(jaxmp.plots.exponents(VALUES[:5]))


def test_float64_is_drawn_where_it_lies():
    x = np.array([2.0**-1000, 2.0**-990])
    assert bars(jaxmp.plots.exponents(x, "bfloat16")) == {-1000: 50.0, -990: 50.0}


def test_zeros_alone_can_be_drawn(tmp_path):
    ax = jaxmp.plots.exponents(jnp.zeros(3))
    assert bars(ax) == {}
    render(ax, tmp_path)


@pytest.mark.parametrize("scale", [0, -1.0, np.nan, np.inf])
def test_what_cannot_be_drawn_is_refused(scale):
    with pytest.raises(ValueError, match="`loss_scale` must be finite and positive"):
        jaxmp.plots.exponents(VALUES, loss_scale=scale)
    with pytest.raises(ValueError, match="needs values to draw"):
        jaxmp.plots.exponents({})
    with pytest.raises(ValueError, match="needs values to draw"):
        jaxmp.plots.exponents(jaxmp.record_ranges().init(1.0))
    with pytest.raises(TypeError, match="needs floating leaves"):
        jaxmp.plots.exponents({"steps": jnp.arange(2)})
    with pytest.raises(ValueError, match="the history is empty"):
        jaxmp.plots.loss_scale([])


def history(bad):
    tx = jaxmp.dynamic_loss_scale(optax.sgd(0.1), growth_interval=2)
    states = [tx.init(jnp.zeros([]))]
    for is_bad in bad:
        states.append(tx.update(jnp.where(is_bad, jnp.inf, 1.0), states[-1])[1])
    return states


@pytest.mark.parametrize("first", [0, 1], ids=["from init", "from the first step"])
def test_the_scale_is_drawn_with_the_skipped_steps(first, tmp_path):
    states = history([False, True, False, False, True, True])[first:]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
    for given in (states, stacked):
        ax = jaxmp.plots.loss_scale(given)
        scale, skipped = ax.lines
        assert scale.get_drawstyle() == "steps-post"
        assert scale.get_xdata().tolist() == [0, 1, 2, 3, 4, 5, 6]
        assert np.log2(scale.get_ydata()).tolist() == [15, 15, 14, 14, 15, 14, 13]
        assert skipped.get_xdata().tolist() == [2, 5, 6]
        assert np.log2(skipped.get_ydata()).tolist() == [15, 15, 14]  # where it broke
        assert labels(ax) == ["loss scale", "skipped (3)"]
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss scale")
        assert ax.get_title() == "The loss scale over 6 steps"
    render(ax, tmp_path)


def test_the_first_scale_is_shown_although_the_first_step_is_skipped():
    states = history([True, False])
    scale, skipped = jaxmp.plots.loss_scale(states).lines
    assert np.log2(scale.get_ydata()).tolist() == [15, 14, 14]
    assert np.log2(skipped.get_ydata()).tolist() == [15]
    scale, _ = jaxmp.plots.loss_scale(states[1:]).lines  # nothing tells the first one
    assert scale.get_xdata().tolist() == [1, 2]


@pytest.mark.parametrize("skips", [[False], [True, False]], ids=["first", "later"])
def test_a_history_that_begins_when_the_scale_grew_begins_at_step_0(skips):
    tx = jaxmp.dynamic_loss_scale(optax.sgd(0.1), growth_interval=1)
    state, states = tx.init(jnp.zeros([])), []
    for is_bad in [*skips, False]:
        state = tx.update(jnp.where(is_bad, jnp.inf, 1.0), state)[1]
        states.append(state)
    ax = jaxmp.plots.loss_scale(states[-2:])
    (scale,) = ax.lines
    assert scale.get_xdata().tolist() == [0, 1]
    assert np.diff(np.log2(scale.get_ydata())).tolist() == [1]
    assert ax.get_title() == "The loss scale over 1 steps"


def test_a_run_without_skips_has_no_marks():
    ax = jaxmp.plots.loss_scale(history([])[:1])
    assert labels(ax) == ["loss scale"]
    assert ax.lines[0].get_marker() == "."  # a line of one point would not show
    chained = [(optax.EmptyState(), state) for state in history([False, False])]
    assert len(jaxmp.plots.loss_scale(chained).lines[0].get_xdata()) == 3


def test_axes_can_be_given_and_nothing_is_shown():
    left, right = Figure().subplots(1, 2)
    assert jaxmp.plots.exponents(VALUES, ax=left) is left
    assert jaxmp.plots.loss_scale(history([True]), ax=right) is right
    assert left.get_legend()
    assert right.get_legend()
    assert not pyplot.get_fignums()


def test_a_title_that_is_there_stays():
    left, right = Figure().subplots(1, 2)
    left.set_title("mine", loc="left")
    jaxmp.plots.exponents(VALUES, ax=left)
    assert (left.get_title(), left.get_title("left")) == ("", "mine")
    jaxmp.plots.exponents(VALUES, ax=right)
    assert right.get_title() == "8 values in the range of float16"


def test_a_picture_is_the_current_figure_of_pyplot(tmp_path):
    pictures = {
        "exponents": lambda **ax: jaxmp.plots.exponents(VALUES, **ax),
        "loss_scale": lambda **ax: jaxmp.plots.loss_scale(history([True]), **ax),
        "overflow": lambda **ax: jaxmp.plots.overflow(a_report("overflow"), **ax),
        "sensitivity": lambda **ax: jaxmp.plots.sensitivity(
            a_report("sensitivity"), **ax
        ),
    }
    for name, draw in pictures.items():
        pyplot.close("all")
        ax = draw()
        assert pyplot.get_fignums() == [ax.figure.number]
        pyplot.savefig(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 8000
        own = ax.figure.axes  # drawn on, and no figure is made
        draw(ax=own if len(own) == 2 else own[0])
        assert len(pyplot.get_fignums()) == 1


def test_importing_the_module_looks_for_no_screen():
    code = "import jaxmp.plots, sys; print('matplotlib.pyplot' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == "False"


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "jaxmp.plots")
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pip install 'jaxmp\[plot\]'"):
        importlib.import_module("jaxmp.plots")


# Overflows


def test_overflow_draws_each_module_forward_and_backward():
    def loss(w, x):
        for name in ("first", "second"):
            with jax.named_scope(name):
                x = x @ w
        return (x.astype(jnp.float32) ** 2).sum()

    w = jnp.eye(2, dtype=jnp.float16) * 2.0
    report = jaxmp.find_overflow(jax.grad(loss))(w, w * 2.0**8)
    assert report.first.backward
    left = jaxmp.plots.overflow(report)
    right = left.figure.axes[1]
    assert {"first", "second"} <= set(rows(left))
    (legend,) = left.figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert sorted(names) == ["Inf or NaN", "backward", "forward"]
    finite = {x.module: x.headroom for x in report.operations if not x.backward}
    widths = [bar.get_width() for bar in left.containers[0]]  # the forward pass
    for module, width in zip(rows(left), widths, strict=True):
        assert np.isnan(width) or width == pytest.approx(finite[module])
    assert (left.get_xlabel(), right.get_xlabel()) == (
        "least headroom (powers of two)",
        "% lost to zero",
    )
    own = Figure().subplots(1, 2)
    assert jaxmp.plots.overflow(report, ax=own) is own[0]


def rows(ax):
    return [x.get_text() for x in ax.get_yticklabels()]


def in_bold(ax):
    return [x.get_text() for x in ax.get_yticklabels() if x.get_fontweight() == "bold"]


@pytest.mark.parametrize(
    ("size", "number"), [(2.0**10, 0), (2.0**-14, 1)], ids=["Inf", "zeros"]
)
def test_overflow_points_at_the_first_fault(size, number):
    def loss(x):
        with jax.named_scope("before"):
            x = x * 1.5
        with jax.named_scope("square"):
            return x * x

    report = jaxmp.find_overflow(loss)(jnp.full(4, size, jnp.float16))
    axes = jaxmp.plots.overflow(report).figure.axes
    assert [len(ax.texts) for ax in axes] == [1 - number, number]
    (text,) = axes[number].texts
    assert text.get_text() == "first fault"
    assert rows(axes[0])[round(text.xy[1] + 0.2)] == "square"
    assert in_bold(axes[0]) == ["square"]


def test_overflow_needs_16_bits():
    report = jaxmp.find_overflow(jnp.exp)(1.0)
    with pytest.raises(ValueError, match="nothing in the report does"):
        jaxmp.plots.overflow(report)


def layers(names, scales):
    """A loss through matmuls in named scopes, each scaled by a number."""

    def loss(w, x):
        with jax.named_scope("net"):
            for name, scale in zip(names, scales, strict=True):
                with jax.named_scope(name):
                    x = jnp.tanh(x @ w) * scale
        return (x.astype(jnp.float32) ** 2).mean()

    return loss


@functools.cache
def a_report(kind):
    if kind == "overflow":
        return jaxmp.find_overflow(lambda x: x * x)(jnp.full(4, 2.0**10, jnp.float16))
    return jaxmp.sensitivity(layers(NAMES[:2], [1.0] * 2), "bfloat16")(W, X)


NAMES = [f"layer_{i}" for i in range(14)]
W = jnp.eye(16, dtype=jnp.float32) * 0.9
X = jnp.linspace(-1, 1, 64).reshape(4, 16)


def test_of_many_modules_ten_are_drawn_and_the_fault_is_among_them():
    # Inf from layer 9 on, and so in the loss and in all of the backward pass.
    loss = layers(NAMES, [1.0] * 9 + [1e5] * 5)
    step = jaxmp.autocast(jax.value_and_grad(loss), "mixed_float16")
    report = jaxmp.find_overflow(step)(W, X)
    left = jaxmp.plots.overflow(report)
    total = {x.module for x in report.operations if x.dtype == "float16"}
    assert len(total) > 10
    assert len(rows(left)) == 10
    assert left.get_title().endswith(f"by module, 10 of {len(total)}")
    assert in_bold(left) == [report.first.module.removeprefix("net/")]
    assert left.get_ylabel() == "modules of net"
    order = [row for row in rows(left) if row.startswith("layer_")]
    assert order == sorted(order, key=NAMES.index)


def test_errors_are_dots_the_worst_ten_and_those_that_need_more(tmp_path):
    report = a_report("sensitivity")
    row = report.modules[0]
    many = tuple(
        dataclasses.replace(row, path=f"net/layer_{i}", loss_alone=row.alone / 2**i)
        for i in range(14)
    )
    report = dataclasses.replace(report, modules=many, tolerance=0.05)
    left = jaxmp.plots.sensitivity(report)
    right = left.figure.axes[1]
    assert rows(left) == [x.path.removeprefix("net/") for x in report.modules[:10]]
    assert left.get_title().endswith(f"in {report.narrow}, 10 of 14")
    only, others = left.lines[:2]
    assert only.get_xdata() == pytest.approx([x.alone for x in report.modules[:10]])
    assert others.get_xdata() == pytest.approx([x.without for x in report.modules[:10]])
    assert left.get_xlabel() == "relative error of loss or gradients, the larger"
    assert right.get_xlabel() == "% of the FLOPs"
    (legend,) = left.figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == [
        f"only this in {report.narrow}",
        f"all but this in {report.narrow}",
        "tolerance (0.05)",
    ]
    render(left, tmp_path)

    worst = report.modules[-1].path
    wanted = dataclasses.replace(report, float32_paths=(worst,))
    left = jaxmp.plots.sensitivity(wanted)
    assert len(rows(left)) == 11
    assert in_bold(left) == [worst.removeprefix("net/")]


def test_errors_of_zero_and_inf_lie_at_the_edges():
    report = a_report("sensitivity")
    row = report.modules[0]
    extreme = [
        dataclasses.replace(row, path=f"m{i}", loss_alone=x, gradients_alone=x)
        for i, x in enumerate((0.0, np.inf, 1e-3))
    ]
    left = jaxmp.plots.sensitivity(dataclasses.replace(report, modules=tuple(extreme)))
    zero, inf, small = left.lines[0].get_xdata()
    low, high = left.get_xlim()
    assert low < zero < small == 1e-3 < inf < high


def test_labels_of_errors_near_one_another_do_not_overlap():
    report = a_report("sensitivity")
    row = dataclasses.replace(report.modules[0], loss_alone=2e-3, gradients_alone=2e-3)
    row = dataclasses.replace(row, loss_without=4e-3, gradients_without=4e-3)
    report = dataclasses.replace(report, modules=(row,), tolerance=5e-3)
    figure, axes = pyplot.subplots(1, 2, figsize=(4, 2.5))
    left = jaxmp.plots.sensitivity(report, ax=axes)
    figure.canvas.draw()
    texts = [*left.get_xticklabels(), *left.get_xticklabels(minor=True)]
    boxes = [x.get_window_extent() for x in texts if x.get_visible() and x.get_text()]
    boxes = [x for x in boxes if left.bbox.x0 <= (x.x0 + x.x1) / 2 <= left.bbox.x1]
    assert len(boxes) == 2
    assert not any(x.overlaps(y) for x, y in itertools.combinations(boxes, 2))
