"""A run that goes on after a process has died, on fewer or on more devices."""

import signal
import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # before an installed `multiprocess`

import multiprocess  # noqa: E402
import resume  # noqa: E402

CPUS = jax.devices("cpu")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Returns a function that trains on some devices of this process."""
    monkeypatch.setattr(multiprocess, "join", lambda config: None)

    def train(folder, devices, steps, policy="mixed_bfloat16"):
        monkeypatch.setattr(jax, "devices", lambda: CPUS[:devices])
        return resume.work(
            resume.Config(tmp_path / folder, policy=policy, steps=steps, batch_size=16)
        )

    return train


# The state of a float16 run has a scale.
@pytest.mark.parametrize(
    "policy",
    ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.evidence)],
)
def test_a_run_goes_on_bit_for_bit_and_on_other_devices(run, policy):
    run = partial(run, policy=policy)
    whole = run("whole", 2, 4)
    assert run("run", 2, 3)["First step"] == 0
    assert run("run", 2, 4) == whole | {"First step": 3}
    on_more = run("run", 4, 4)  # where the sums have another order
    assert (on_more["Devices"], on_more["First step"]) == (4, 3)
    np.testing.assert_allclose(on_more["Last loss"], whole["Last loss"], rtol=1e-2)


@pytest.mark.evidence
def test_who_is_left_says_who_was_killed_and_the_rest_goes_on(tmp_path, capsys):
    def config(folder, **options):
        return resume.Config(tmp_path / folder, steps=9, heartbeat=5, **options)

    survivor, killed = resume.main(config("run", kill_at=7))
    assert killed.returncode == -signal.SIGKILL
    assert survivor.returncode not in (0, -signal.SIGKILL)  # ended by itself
    assert (
        "Process 0 ended, because process 1 sent no heartbeat"
        in capsys.readouterr().out
    )
    (alone,) = resume.main(config("run", processes=1, devices=4))
    assert alone.returncode == 0, alone.stderr
    assert '"Devices": 4, "First step": 6' in alone.stdout


@pytest.mark.parametrize(
    ("errors", "died"),
    [
        ("tasks are unhealthy (stopped sending heartbeats):\n1\nThe", "1"),
        ("are unhealthy (stopped sending heartbeats):\n1, 3\nThe tasks", "1 3"),
        ("Task 1 heartbeat timeout. This indicates. Barrier Id: 6::0, Task: 1", "1"),
        ("some other error", ""),
    ],
)
def test_the_name_is_found_in_what_jax_says(errors, died):
    assert resume.who_died(errors) == died


def test_a_batch_that_the_devices_do_not_divide_is_named(run, monkeypatch):
    with pytest.raises(SystemExit, match="multiple of the 3 devices, but is 16"):
        run("run", 3, 1)
