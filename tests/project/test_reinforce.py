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


@pytest.mark.evidence
def test_float16_is_nearer_than_bfloat16_and_learns():
    console = Console(record=True, width=80)
    config = reinforce.Config(updates=10, rows=32, length=6, width=32)
    found, rewards = reinforce.main(config, console)
    assert found["float16"].rms < found["bfloat16"].rms / 4
    assert len(found["float16"].by_token) == 6
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
    report = jaxmp.parity({"result": old}, trainer, log_probs=True)(params, tokens)
    assert report.outputs[0].rms < (1e-5 if head else MOST[name])
