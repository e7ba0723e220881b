"""A training loop that somebody else owns: float16 in it, without a loss scale."""

import sys
from pathlib import Path

from rich.console import Console

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import trainer


def test_a_trainer_that_knows_no_scale_follows_float32():
    console = Console(record=True, width=80)
    found = trainer.main(trainer.Config(steps=60), console)
    exact, ours = found["float32"], found["mixed_float16_bfloat16"]
    assert abs(ours.loss - exact.loss) < 0.03
    assert abs(ours.accuracy - exact.accuracy) < 0.02
    assert found["mixed_float16"].loss > 2 > exact.loss + 0.5
    assert f"{ours.loss:.3f}" in console.export_text()
