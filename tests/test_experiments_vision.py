"""The experiments on images teach what they say, in a short form."""

import io
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jaxmp

sys.path.append(str(Path(__file__).parent.parent / "examples"))

import cnn_zoo
import detector


@pytest.fixture(autouse=True)
def keys_that_compile_fast():
    with jax.default_prng_impl("rbg"):
        yield


def run(main, config):
    """Returns the results of a program, and what an 80-column terminal showed."""
    console = Console(record=True, width=80, file=io.StringIO())
    return main(config, console), console.export_text()


@pytest.mark.evidence
def test_the_detector_runs_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(detector, "SHARE", 2)
    monkeypatch.setattr(detector, "TEST_CANVASES", 2)
    figure = tmp_path / "detector.png"
    name = "float16 dynamic"
    results, shown = run(
        detector.main, detector.Config(policy=(name,), steps=10, figure=figure)
    )
    assert len(results[name][0].losses) == 10
    assert np.isfinite(results[name][0].losses).all()
    assert f"{name}, seed 0: loss" in shown
    assert 0 < figure.stat().st_size < 200_000


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


def test_the_whole_batch_is_the_sum_of_the_shares(monkeypatch):
    """`--full` and the quick form are one computation: equal shares, equal updates."""
    monkeypatch.setattr(detector, "WORKERS", 2)
    monkeypatch.setattr(detector, "SHARE", 4)
    monkeypatch.setattr(detector, "GLOBAL_ANCHORS", 8 * len(detector.ANCHORS))
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
    outputs = np.full((20, len(detector.ANCHORS), 15), 0, np.float32)
    for output, boxes, labels in zip(outputs, *canvases[1:], strict=True):
        target, offsets = detector.match(boxes, labels)
        output[np.arange(len(target)), np.asarray(target)] = 9
        output[:, 11:] = offsets
    assert detector.f1_score(outputs, canvases) > 0.95
    assert detector.f1_score(0 * outputs, canvases) == 0


# By default each of its networks is traced, below.
@pytest.mark.evidence
def test_the_zoo_runs_from_end_to_end(tmp_path):
    network, figure = "VGG-like", tmp_path / "cnn_zoo.png"
    config = cnn_zoo.Config(
        policy=("mixed_float16",),
        network=(network,),
        seeds=2,
        epochs=1,
        batch_size=500,
        figure=figure,
    )
    results, shown = run(cnn_zoo.main, config)
    accuracies = results[network]["mixed_float16"].accuracies
    assert len(accuracies) == 2
    assert f"{np.mean(accuracies):.1%} ±" in shown
    assert 0 < figure.stat().st_size < 200_000


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
        (cnn_zoo.main, cnn_zoo.Config(network=("AlexNet",)), "VGG-like"),
        (cnn_zoo.main, cnn_zoo.Config(policy=("float61",)), "float16"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_ones(main, config, message):
    with pytest.raises(SystemExit, match=message):
        main(config)
