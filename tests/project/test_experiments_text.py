"""The experiments on text teach what they say, in their quick form."""

import functools
import io
import re
import sys
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import pytest
from rich.console import Console

import jaxmp
from benchmarks.counting.measure import product_dtypes

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

import _lstm  # noqa: E402
import _text  # noqa: E402
import language_model  # noqa: E402
import masked_lm  # noqa: E402
import narrow  # noqa: E402

_text.read = functools.cache(_text.read)  # which parses the standard library


pytestmark = pytest.mark.usefixtures("keys_that_compile_fast")


def terminal():
    return Console(record=True, width=80, file=io.StringIO())


# The text


@pytest.mark.evidence
def test_the_text_is_english_and_long_enough_for_a_global_batch():
    text = _text.read()
    tokens = _text.as_characters(text)
    assert len(tokens) == len(text) > 1_000_000
    assert tokens.dtype == np.int32
    assert set(np.unique(tokens)) <= set(range(96))
    start = "".join(_text.CHARACTERS[i] for i in tokens[:1000])
    assert start == re.sub("[^\n -~]", " ", text[:1000])
    words = _text.as_words("The cat and the dog\nand THE 7 cats.", 4)
    assert words.tolist() == [1, 0, 2, 1, 0, 2, 1, 0, 0, 3]


def test_every_tenth_row_is_held_out():
    training, held_out = _text.split(np.arange(1003), 10)
    np.testing.assert_array_equal(held_out, np.arange(1000).reshape(10, 10, 10)[:, 9])
    assert len(training) == 90


# The language model


@pytest.mark.evidence
@pytest.mark.usefixtures("optimized")
def test_float16_learns_from_half_a_million_characters_only_with_a_scale(tmp_path):
    console = terminal()
    config = language_model.Config(
        policy=("float32", "float16", "float16-dynamic"),
        updates=45,
        figure=tmp_path / "curves.png",
    )
    results = language_model.main(config, console)
    full, unscaled, dynamic = (r.losses[-1][1] for r in results)
    assert full < 2.8
    assert unscaled > full + 0.5
    assert abs(dynamic - full) < 0.1
    scale = results[2].history[-1]
    assert 0 < scale.skipped < 20
    assert scale.loss_scale > 2**15
    printed = console.export_text()
    assert "each divided by the global count, 524,288" in " ".join(printed.split())
    assert f"{unscaled:.2f}" in printed
    assert "…" not in printed
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_all_products_of_the_lstm_are_in_16_bits():
    model = _lstm.LanguageModel(96, 8)
    tokens = np.zeros((2, 3), np.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    apply = jaxmp.with_policy(model.apply, "mixed_float16")
    found = product_dtypes(apply, params, tokens)
    assert found == [{"float16"}] * 5  # two in each layer, and the output


def test_an_unknown_setting_ends_in_one_sentence():
    with pytest.raises(SystemExit, match=r"'float61'.*float16-dynamic"):
        language_model.main(language_model.Config(policy=("float61",)))


# The masked model


@pytest.mark.evidence
@pytest.mark.usefixtures("optimized")
def test_the_masked_model_learns_the_same_in_mixed_precision():
    console = terminal()
    config = masked_lm.Config(
        policy=("float32", "mixed_float16"), updates=6, learning_rate=6e-3
    )
    results = masked_lm.main(config, console)
    for result in results:
        assert result.losses[-1][1] < result.losses[0][1] - 1
    full, mixed = (r.losses[-1][1] for r in results)
    assert abs(mixed - full) < 0.1
    printed = console.export_text()
    assert "Loss at the end" in printed
    assert "Residuals of 8 rows" in printed
    assert "…" not in printed


@pytest.mark.evidence
def test_residuals_take_little_more_than_half_of_the_bytes():
    full, bfloat16, float16 = (
        masked_lm.residual_bytes(masked_lm.BERT_BASE, policy, 8, 128)
        for policy in ("float32", "mixed_bfloat16", "mixed_float16")
    )
    assert bfloat16 == float16
    assert 0.5 < float16 / full < 0.75


def test_masking_shows_what_bert_shows():
    rows = np.arange(40 * 100).reshape(40, 100) % 1000
    batch = masked_lm.mask(np.random.default_rng(0), rows)
    assert batch.positions.shape == batch.targets.shape == (40, 15)
    assert all(len(set(row)) == 15 for row in batch.positions)
    shown = np.take_along_axis(batch.tokens, batch.positions, 1)
    assert abs((shown == masked_lm.VOCABULARY).mean() - 0.8) < 0.1
    assert abs((shown == batch.targets).mean() - 0.1) < 0.05
    np.put_along_axis(batch.tokens, batch.positions, batch.targets, 1)
    np.testing.assert_array_equal(batch.tokens, rows)


# Without masters


@pytest.mark.evidence
def test_training_without_masters_runs_from_end_to_end(tmp_path, monkeypatch):
    for name, value in {"LENGTH": 8, "ROWS": 2, "AT_ONCE": 2}.items():
        monkeypatch.setattr(narrow, name, value)

    def small_model(features, dot):
        words = len(_text.CHARACTERS)
        model = nn.Sequential([nn.Embed(words, features), nn.Dense(words)])
        return model, jax.jit(model.init)

    monkeypatch.setattr(narrow, "make_model", small_model)  # compiles fast
    console = terminal()
    config = narrow.Config(
        setting=("masters", "kahan-narrow"),
        updates=4,
        features=4,
        figure=tmp_path / "curves.png",
    )
    masters, kahan = narrow.main(config, console)
    assert len(masters.losses) == 2
    np.testing.assert_allclose(kahan.losses, masters.losses, atol=0.05)
    assert round(kahan.stored / kahan.parameters) == 8
    printed = console.export_text()
    assert "bytes of a parameter with its moments" in " ".join(printed.split())
    assert f"{kahan.held_out:.3f}" in printed
    assert "…" not in printed
    assert (tmp_path / "curves.png").stat().st_size > 5_000


@pytest.mark.evidence
@pytest.mark.usefixtures("optimized")
def test_16_bit_parameters_stall_unless_what_they_lose_is_kept():
    results = {r.setting: r for r in narrow.main(narrow.Config(), terminal())}
    each = [round(r.stored / r.parameters) for r in results.values()]
    assert each == [12, 6, 10, 6, 4, 12, 8, 5, 6, 12, 12, 6, 12]
    masters = results.pop("masters").losses
    for setting in ("bfloat16", "fp8-unscaled"):
        assert results.pop(setting).losses[-1] > masters[-1] + 0.2, setting
    assert np.max(np.abs(np.subtract(results.pop("O3").losses, masters))) > 0.1
    for setting, result in results.items():
        assert np.max(np.abs(np.subtract(result.losses, masters))) < 0.02, setting
