"""Reinforcement in float16: what is measured, and that it learns."""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jaxmp
from conftest import crossed

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import reinforce


def test_the_distance_of_log_probabilities_is_that_of_numpy():
    one = jnp.log(jnp.array([[0.5, 0.25], [0.5, 0.25]]))
    other = jnp.log(jnp.array([[0.5, 0.25], [0.5 / 1.5, 0.25 / 1.005]]))
    found = reinforce.agreement(lambda x: one, lambda x: other, 0.0, band=0.01)
    apart = np.log([1, 1, 1.5, 1.005])
    assert found.rms == pytest.approx(np.sqrt(np.mean(apart**2)), rel=1e-5)
    assert found.largest == pytest.approx(np.log(1.5), rel=1e-5)
    assert found.outside == 0.25
    expected = np.sqrt(np.mean(apart.reshape(2, 2) ** 2, axis=0))
    np.testing.assert_allclose(found.by_token, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.evidence
def test_float16_is_nearer_than_bfloat16_and_learns():
    console = Console(record=True, width=80)
    config = reinforce.Config(updates=10, rows=32, length=6, width=32)
    found, rewards = reinforce.main(config, console)
    assert found["float16"].rms < found["bfloat16"].rms / 4
    assert found["float16"].by_token.shape == (6,)
    head = "float16, float32 head"
    assert found[head].rms < found["float16"].rms
    assert np.mean(rewards[-3:]) > 2 * np.mean(rewards[:3])
    text = console.export_text()
    assert f"{rewards[-1]:.2f} now" in text
    assert "20 steps without a loss scale" in " ".join(text.split())


MOST = {"float16": 0.0025, "bfloat16": 0.02}


@crossed("name head", [*MOST], ["", ", float32 head"])
def test_sampler_and_trainer_are_near_and_agree_with_a_head_in_float32(name, head):
    policy, paths = reinforce.PRECISIONS[name + head]
    narrow = partial(jaxmp.autocast, policy=policy, float32_paths=paths)
    model = reinforce.LM(32)
    params = model.init(jax.random.key(0), jnp.zeros((8, 6), jnp.int32))
    draw = narrow(partial(reinforce.sample, model, 8, 6))
    tokens, old = jax.jit(draw)(params, jax.random.key(1))
    trainer = narrow(partial(reinforce.log_probs, model))
    found = reinforce.agreement(trainer, lambda *_: old, params, tokens)
    assert found.rms < (1e-5 if head else MOST[name])
