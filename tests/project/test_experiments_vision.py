"""The experiments on images teach what they say, in a short form."""

import io
import re
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jaxmp

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import _canvases
import _single_stage
import _two_stage
import cnn_zoo
import detector

pytestmark = pytest.mark.usefixtures("keys_that_compile_fast")


def run(main, config):
    """Returns the results of a program, and what an 80-column terminal showed."""
    console = Console(record=True, width=80, file=io.StringIO())
    return main(config, console), console.export_text()


@pytest.mark.evidence
@pytest.mark.usefixtures("optimized")
def test_the_detector_learns_in_float16_only_with_a_loss_scale(tmp_path, monkeypatch):
    # As many anchors, shared by more workers: each has less to do.
    monkeypatch.setattr(detector, "SHARE", 14)
    monkeypatch.setattr(detector, "WORKERS", 70)
    monkeypatch.setattr(detector, "TEST_CANVASES", 20)
    names = ("float32", "float16 unscaled", "float16 dynamic")
    figure = tmp_path / "detector.png"
    config = detector.Config(
        policy=names, steps=250, learning_rate=1.2e-2, figure=figure
    )
    results, shown = run(detector.main, config)
    full, unscaled, dynamic = (r[0].losses[125:].mean() for r in results.values())
    assert unscaled > 1.6 * full
    assert dynamic == pytest.approx(full, rel=0.1)
    assert results["float16 unscaled"][0].skipped == 0  # it underflows, not overflows
    assert "one worker's 14 canvases of 980" in shown
    assert "divided by 882,000 anchors" in " ".join(shown.split())
    assert 0 < figure.stat().st_size < 200_000


@pytest.mark.evidence
def test_the_whole_batch_is_the_sum_of_the_shares(monkeypatch):
    """`--full` and the quick form are one computation: equal shares, equal updates."""
    monkeypatch.setattr(detector, "WORKERS", 2)
    monkeypatch.setattr(detector, "SHARE", 4)
    monkeypatch.setattr(_single_stage, "GLOBAL_ANCHORS", 8 * len(_canvases.ANCHORS))
    data = detector.load_digits()
    canvases = detector.paste_digits(data.train_images, data.train_labels, 1, seed=0)
    losses = []
    for full in (False, True):
        config = detector.Config(steps=2, full=full)
        (result,) = detector.train(
            "float32", config, canvases, canvases, Console(file=io.StringIO())
        )
        losses.append(result.losses)
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_the_detector_finds_what_it_is_told():
    """Targets turned back into outputs give an F1 of 1, so the metric can reach it."""
    data = detector.load_digits()
    canvases = detector.paste_digits(data.test_images, data.test_labels, 20, seed=1)
    logits = np.zeros((20, len(_canvases.ANCHORS), 11), np.float32)
    found = []
    for output, boxes, labels in zip(logits, *canvases[1:], strict=True):
        target, offsets, _ = _canvases.match(_canvases.ANCHORS, boxes, labels)
        output[np.arange(len(target)), np.asarray(target)] = 9
        found.append(_canvases.moved(_canvases.ANCHORS, offsets))
    assert detector.f1_score((logits, found), canvases) > 0.95
    assert detector.f1_score((0 * logits, found), canvases) == 0


def test_a_region_is_sampled_where_it_lies():
    cells = _canvases.CANVAS // _canvases.CELL
    places = (np.arange(cells) + 0.5) * _canvases.CELL
    features = jnp.stack(jnp.meshgrid(places, places, indexing="ij"), -1)
    regions = jnp.array([[20.0, 14.0, 8.0, 16.0]])  # from 16 to 24, and from 6 to 22
    samples = _two_stage.pooled(features, regions).reshape(4, 4, 2)
    np.testing.assert_allclose(samples[:, 0, 0], [17, 19, 21, 23], rtol=1e-6)
    np.testing.assert_allclose(samples[0, :, 1], [8, 12, 16, 20], rtol=1e-6)


def test_proposals_overlap_little_and_the_best_come_first():
    anchors = jnp.asarray(_canvases.ANCHORS)
    scores = jax.random.normal(jax.random.key(0), (len(anchors),))
    regions = jax.jit(_two_stage.best_regions)(scores, jnp.zeros_like(anchors))
    np.testing.assert_array_equal(regions[0], anchors[scores.argmax()])
    overlap = _canvases.intersection_over_union(regions, regions)
    assert (overlap - jnp.eye(len(regions))).max() <= 0.7


def test_the_first_stage_takes_a_mean_over_half_and_half():
    data = detector.load_digits()
    canvases = detector.paste_digits(data.train_images, data.train_labels, 1, seed=0)
    boxes, labels = canvases.boxes[0], canvases.labels[0]
    target, offsets, _ = _canvases.match(_canvases.ANCHORS, boxes, labels)
    loss = jax.jit(_two_stage.first_stage_loss)
    right = jnp.where(target > 0, 9.0, -9.0)
    key = jax.random.key(0)
    assert loss(right, offsets, boxes, labels, key) < 1e-3
    # All say that there is nothing: half of the sampled anchors are wrong by 9.
    nothing = jnp.full_like(right, -9.0)
    expected = 9 * min(32, int((target > 0).sum())) / 64
    np.testing.assert_allclose(
        loss(nothing, offsets, boxes, labels, key), expected, rtol=1e-3
    )


@pytest.mark.evidence
@pytest.mark.usefixtures("optimized")
def test_in_two_stages_less_is_lost_without_a_scale(monkeypatch):
    monkeypatch.setattr(detector, "TEST_CANVASES", 20)
    names = ("float32", "float16 unscaled")
    config = detector.Config(policy=names, steps=150, two_stage=True)
    results, shown = run(detector.main, config)
    full, unscaled = (r[0].losses[100:].mean() for r in results.values())
    assert unscaled == pytest.approx(full, rel=0.1)
    lost = [int(x) for x in re.findall(r"float16\s+turns\s+(\d+)%", shown)]
    one_stage, _, two_stages, _ = lost  # times 1 and times 8
    assert two_stages < one_stage


@pytest.mark.evidence
@pytest.mark.usefixtures("optimized")
def test_float16_reaches_what_float32_reaches_in_the_zoo(tmp_path):
    network, figure = "residual, BatchNorm", tmp_path / "cnn_zoo.png"
    config = cnn_zoo.Config(
        policy=("float32", "mixed_float16"),
        network=(network,),
        seeds=2,
        epochs=3,
        figure=figure,
    )
    results, shown = run(cnn_zoo.main, config)
    full, mixed = (np.mean(cell.accuracies) for cell in results[network].values())
    assert full > 0.8
    assert mixed == pytest.approx(full, abs=0.06)
    assert f"{full:.1%} ±" in shown
    assert 0 < figure.stat().st_size < 200_000


@pytest.mark.parametrize("network", cnn_zoo.NETWORKS)
def test_every_network_of_the_zoo_computes_in_the_policy(network):
    model, x = cnn_zoo.NETWORKS[network], jnp.ones((2, 8, 8, 1))
    init = partial(model.init, train=False)
    variables = jax.eval_shape(init, jax.random.key(0), x)
    apply = partial(jaxmp.with_policy(model.apply, "mixed_float16"), train=False)
    text = str(jax.make_jaxpr(apply)(variables, x))
    products = [line for line in text.splitlines() if "conv_general_dilated[" in line]
    assert products
    assert all(":f16[" in line for line in products), products


@pytest.mark.parametrize(
    ("main", "config", "message"),
    [
        (detector.main, detector.Config(policy=("float8",)), "float16 dynamic"),
        (detector.main, detector.Config(two_stage=True, full=True), "Drop `--full`"),
        (cnn_zoo.main, cnn_zoo.Config(network=("AlexNet",)), "VGG-like"),
        (cnn_zoo.main, cnn_zoo.Config(policy=("float61",)), "float16"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_ones(main, config, message):
    with pytest.raises(SystemExit, match=message):
        main(config)
