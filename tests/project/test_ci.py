"""What the legs of CI rely on."""

import os
import subprocess
import types
from pathlib import Path

from benchmarks.counting import targets
from conftest import failed_if_skipped

CI = Path(__file__).parents[2] / ".ci"


def test_a_leg_is_pinned_to_the_compiler_of_the_gate():
    pinned = (CI / "gate.txt").read_text().splitlines()
    for name in ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt"):
        assert f"{name}=={targets.JAXLIB}" in pinned


def test_the_script_of_the_newest_jax_says_why_it_does_nothing(tmp_path):
    # `id` is the first thing that it asks.
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    found = subprocess.run(CI / "newest", env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.endswith("because only root can make a Debian\n")


def test_a_skip_is_a_failure_where_nothing_may_be_skipped():
    where = ("tests/project/test_gate.py", 1, "Skipped: no compiler")
    skip = types.SimpleNamespace(skipped=True, outcome="skipped", longrepr=where)
    report = failed_if_skipped(skip)
    assert report.outcome == "failed"
    assert "Skipped: no compiler" in report.longrepr
    xfail = types.SimpleNamespace(
        skipped=True, outcome="skipped", longrepr="", wasxfail=""
    )
    assert failed_if_skipped(xfail).outcome == "skipped"
    assert failed_if_skipped(types.SimpleNamespace(skipped=False)).skipped is False
