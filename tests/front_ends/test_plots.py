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


def series(ax):
    """Returns what is drawn, by its name in the legend."""
    return dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))


def shares(ax, name="values"):
    """Returns the shares of the values that are drawn, by exponent."""
    drawn = series(ax)[name].get_data()
    return {e: y for e, y in zip(drawn.edges, drawn.values, strict=False) if y}


def legend(ax):
    ax.figure.canvas.draw()
    (found,) = ax.figure.legends
    return [text.get_text() for text in found.get_texts()]


def rows(ax, *, bold=False):
    texts = ax.get_yticklabels()
    return [x.get_text() for x in texts if not bold or x.get_fontweight() == "bold"]


def test_the_exponents_are_shares_of_all_values_beside_the_range_of_float16():
    ax = jaxmp.plots.exponents({"w": VALUES})
    assert shares(ax) == {-30: 12.5, -12: 12.5, -11: 12.5, 0: 25.0}
    for name, share in (("zeros", 25.0), ("Inf or NaN", 12.5)):
        (bar,) = series(ax)[name]
        assert bar.get_height() == share
        assert ax.get_xlim()[0] < bar.get_x() < ax.get_xlim()[1]
        assert bar.get_x() > 16 if name != "zeros" else bar.get_x() < -32
    spans = {
        name: (span.get_x(), span.get_x() + span.get_width())
        for name, span in series(ax).items()
        if name.startswith("float16")
    }
    assert spans == {"float16 subnormal": (-25, -14), "float16 normal": (-14, 16)}
    assert ax.get_xlabel() == "log2 of the magnitude"
    assert ax.get_ylabel() == "% of the values"
    assert ax.get_yscale() == "log"
    assert ax.get_title() == "8 values in the range of float16"
    assert legend(ax) == list(series(ax))
    assert "Inf or NaN" not in series(jaxmp.plots.exponents(VALUES[:5]))


@pytest.mark.parametrize(
    ("scale", "shift", "label"),
    [
        (None, 12, "times the suggested loss scale, 2^12"),
        (jnp.float32(8), 3, "times the loss scale, 2^3"),
        (12.0, np.log2(12.0), "times the loss scale, 12"),
    ],
)
def test_the_outline_is_moved_by_the_loss_scale(scale, shift, label):
    ax = jaxmp.plots.exponents(VALUES, loss_scale=scale)
    moved = {exponent + shift: share for exponent, share in shares(ax).items()}
    assert shares(ax, label) == moved


def test_other_formats_show_the_values_and_no_outline():
    x = np.array([2.0**-1000, 2.0**-990])
    for values, bars in (
        (VALUES, {-30: 12.5, -12: 12.5, -11: 12.5, 0: 25.0}),
        (jnp.array([2.0**-149, 1.0]), {-149: 50.0, 0: 50.0}),
        (x, {-1000: 50.0, -990: 50.0}),
    ):
        ax = jaxmp.plots.exponents(values, "bfloat16")
        assert shares(ax) == bars
        assert not any(name.startswith("times") for name in series(ax))
        low, high = ax.get_xlim()  # as wide as the values, not as the format
        assert (
            min(bars) - 120 < low < min(bars) < max(bars) + 1 < high < max(bars) + 120
        )
    span = series(ax)["bfloat16 subnormal"]
    assert (span.get_x(), span.get_x() + span.get_width()) == (-134, -126)


def test_what_was_recorded_can_be_drawn():
    tx = jaxmp.record_ranges(low=-20)
    _, state = tx.update(VALUES, tx.init(VALUES))
    ax = jaxmp.plots.exponents(state)
    assert shares(ax) == {-20: 12.5, -12: 12.5, -11: 12.5, 0: 25.0}
    assert "times the suggested loss scale, 2^12" in series(ax)
    tx = jaxmp.record_ranges()
    states = jax.vmap(lambda x: tx.update(x, tx.init(x))[1])(VALUES.reshape(2, 4))
    assert shares(jaxmp.plots.exponents(states)) == shares(
        jaxmp.plots.exponents(VALUES)
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_zeros_alone_can_be_drawn(dtype):
    ax = jaxmp.plots.exponents(jnp.zeros(3), dtype)
    assert shares(ax) == {}
    assert series(ax)["zeros"][0].get_height() == 100
    assert legend(ax)


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


def test_the_scale_is_drawn_with_the_skipped_steps():
    states = history([False, True, False, False, True, True])
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
    chained = [(optax.EmptyState(), state) for state in states]
    for given in (states, stacked, chained):
        ax = jaxmp.plots.loss_scale(given)
        scale, skipped = ax.lines
        assert scale.get_drawstyle() == "steps-post"
        assert list(scale.get_xdata()) == [0, 1, 2, 3, 4, 5, 6]
        assert np.log2(scale.get_ydata()).tolist() == [15, 15, 14, 14, 15, 14, 13]
        assert skipped.get_xdata().tolist() == [2, 5, 6]
        assert np.log2(skipped.get_ydata()).tolist() == [15, 15, 14]  # where it broke
        assert legend(ax) == ["loss scale", "skipped (3)"]
        assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "loss scale")
        assert ax.get_title() == "The loss scale over 6 steps"
    scale, skipped = jaxmp.plots.loss_scale(states[2:]).lines  # a step that was skipped
    assert skipped.get_xdata().tolist() == [0, 3, 4]


def test_a_line_of_one_point_shows():
    ax = jaxmp.plots.loss_scale(history([]))
    assert legend(ax) == ["loss scale"]
    assert ax.lines[0].get_marker() == "."


def test_axes_that_are_given_are_drawn_on_and_nothing_is_shown():
    left, right = Figure().subplots(1, 2)
    assert jaxmp.plots.exponents(VALUES, ax=left) is left
    assert jaxmp.plots.loss_scale(history([True]), ax=right) is right
    assert left.get_legend()
    assert right.get_legend()
    assert not pyplot.get_fignums()


def test_a_picture_is_the_current_figure_of_pyplot(tmp_path):
    for draw in (
        lambda: jaxmp.plots.exponents(VALUES),
        lambda: jaxmp.plots.loss_scale(history([True])),
        lambda: jaxmp.plots.overflow(of_an_overflow()),
        lambda: jaxmp.plots.parity(of_a_difference()),
        lambda: jaxmp.plots.sensitivity(of_two_layers()),
    ):
        pyplot.close("all")
        assert draw().figure is pyplot.gcf()
        pyplot.savefig(tmp_path / "picture.png")
        assert (tmp_path / "picture.png").stat().st_size > 8000


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

NAMES = [f"layer_{i}" for i in range(14)]
W = jnp.eye(16, dtype=jnp.float32) * 0.9
X = jnp.linspace(-1, 1, 64).reshape(4, 16)


def layers(scales):
    """A loss through matmuls in named scopes, each scaled by a number."""

    def loss(w, x):
        with jax.named_scope("net"):
            for name, scale in zip(NAMES, scales, strict=False):
                with jax.named_scope(name):
                    x = jnp.tanh(x @ w) * scale
        return (x.astype(jnp.float32) ** 2).mean()

    return loss


@functools.cache
def of_an_overflow():
    # Inf from layer 9 on, and so in the loss and in all of the backward pass.
    loss = layers([1.0] * 9 + [1e5] * 5)
    step = jaxmp.autocast(jax.value_and_grad(loss), "mixed_float16")
    return jaxmp.find_overflow(step)(W, X)


@functools.cache
def of_two_layers():
    return jaxmp.sensitivity(layers([1.0] * 2), "bfloat16")(W, X)


@functools.cache
def of_a_difference():
    def model(x, slope):
        for i in range(3):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(slope * x if i == 1 else x)
        return x

    f, g = (functools.partial(model, slope=slope) for slope in (1.0, 1.1))
    return jaxmp.parity(f, g)(X)


def test_parity_draws_errors_along_depth_with_the_first_that_differs():
    report = of_a_difference()
    ax = jaxmp.plots.parity(report)
    assert ax.get_title() == "layer_1 is the first that differs"
    names = [x.get_text() for x in ax.get_xticklabels()]
    assert names == [x.path for x in report.modules] == [f"layer_{i}" for i in range(3)]
    drawn = {x.get_label(): x for x in ax.lines}
    (added,) = drawn["added, more than rounding"].get_ydata()
    assert added == report.first.added
    errors = drawn["as the programs run"].get_ydata()
    np.testing.assert_array_equal(errors[1:], [x.error for x in report.modules[1:]])
    assert ax.get_yscale() == "log"
    (_, where), _ = drawn.popitem()[1].get_data()
    assert where == 1
    equal = jaxmp.parity(jnp.sin, jnp.sin)(X)
    title = "No module adds more than rounding explains"
    assert jaxmp.plots.parity(equal).get_title() == title


def test_overflow_draws_ten_modules_forward_and_backward_with_the_fault():
    report = of_an_overflow()
    left = jaxmp.plots.overflow(report)
    right = left.figure.axes[1]
    assert legend(left) == ["forward", "backward"]
    assert left.get_xlabel() == "fewest bits below overflow"
    assert right.get_xlabel() == "% lost to zero"

    narrow = [x for x in report.operations if x.dtype == "float16"]
    modules = {x.module for x in narrow}
    assert left.get_title().endswith(f"by module, 10 of {len(modules)}")
    assert left.get_ylabel() == "modules of net"
    assert rows(left, bold=True) == [report.first.module.removeprefix("net/")]
    least = [
        min(-np.inf if x.nonfinite else x.headroom for x in narrow if x.module == name)
        for name in (f"net/{row}" for row in rows(left))
    ]
    assert rows(left, bold=True) == rows(left)[:1]
    assert least[1:] == sorted(least[1:])  # the worst first
    forward, backward = left.containers
    shown = [x.get_text() for x in left.texts]
    for i, row in enumerate(rows(left)):
        for bars, texts in ((forward, shown[:10]), (backward, shown[10:])):
            found = [
                x
                for x in narrow
                if (x.module, x.backward) == (f"net/{row}", bars is backward)
            ]
            is_bad = any(x.nonfinite for x in found)
            assert texts[i] == ("Inf or NaN" if is_bad else "")
            room = 0 if is_bad else min(x.headroom for x in found)
            assert bars[i].get_width() == pytest.approx(room)


def test_overflow_shows_what_is_lost():
    def loss(x):
        with jax.named_scope("before"):
            x = x * 1.5
        with jax.named_scope("square"):
            return x * x

    report = jaxmp.find_overflow(loss)(jnp.full(4, 2.0**-14, jnp.float16))
    left = jaxmp.plots.overflow(report)
    forward, _ = left.figure.axes[1].containers
    assert rows(left, bold=True) == ["square"]
    assert [x.get_width() for x in forward] == [100, 0]


def test_overflow_needs_16_bits():
    report = jaxmp.find_overflow(jnp.exp)(1.0)
    with pytest.raises(ValueError, match="nothing in the report does"):
        jaxmp.plots.overflow(report)


# Errors


def test_errors_are_dots_of_the_worst_ten_and_of_those_that_need_more():
    report = of_two_layers()
    row = report.modules[0]
    many = tuple(
        dataclasses.replace(row, path=f"net/layer_{i}", loss_alone=row.alone / 2**i)
        for i in range(14)
    )
    report = dataclasses.replace(report, modules=many, tolerance=0.05)
    left = jaxmp.plots.sensitivity(report)
    assert rows(left) == NAMES[:10]
    assert left.get_title().endswith(f"in {report.narrow}, 10 of 14")
    only, others = left.lines[:2]
    assert only.get_xdata() == pytest.approx([x.alone for x in many[:10]])
    assert others.get_xdata() == pytest.approx([x.without for x in many[:10]])
    assert left.get_xlabel() == "relative error of loss or gradients, the larger"
    assert left.figure.axes[1].get_xlabel() == "% of the FLOPs"
    assert legend(left) == [
        f"only this in {report.narrow}",
        f"all but this in {report.narrow}",
        "tolerance (0.05)",
    ]
    wanted = dataclasses.replace(report, float32_paths=("net/layer_13",))
    left = jaxmp.plots.sensitivity(wanted)
    assert rows(left) == [*NAMES[:10], "layer_13"]
    assert rows(left, bold=True) == ["layer_13"]


def test_errors_of_zero_and_inf_lie_at_the_edges():
    report = of_two_layers()
    extreme = [
        dataclasses.replace(report.modules[0], loss_alone=x, gradients_alone=x)
        for x in (0.0, np.inf, 1e-3)
    ]
    left = jaxmp.plots.sensitivity(dataclasses.replace(report, modules=tuple(extreme)))
    zero, inf, small = left.lines[0].get_xdata()
    low, high = left.get_xlim()
    assert low <= zero < small == 1e-3 < inf <= high


def test_labels_of_errors_near_one_another_do_not_overlap():
    report = of_two_layers()
    row = dataclasses.replace(report.modules[0], loss_alone=2e-3, gradients_alone=2e-3)
    row = dataclasses.replace(row, loss_without=4e-3, gradients_without=4e-3)
    left = jaxmp.plots.sensitivity(
        dataclasses.replace(report, modules=(row,), tolerance=5e-3)
    )
    left.figure.set_size_inches(4, 2.5)
    left.figure.canvas.draw()
    texts = [*left.get_xticklabels(), *left.get_xticklabels(minor=True)]
    boxes = [x.get_window_extent() for x in texts if x.get_visible() and x.get_text()]
    boxes = [x for x in boxes if left.bbox.x0 <= (x.x0 + x.x1) / 2 <= left.bbox.x1]
    assert len(boxes) == 2
    assert not any(x.overlaps(y) for x, y in itertools.combinations(boxes, 2))
