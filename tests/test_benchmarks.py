"""The programs that measure the host and the GPU run from end to end, in small."""

import json
import math

import pytest

from benchmarks import compiled, gpu, host, timing
from benchmarks.steps import CONTESTANTS


def numbers(rows):
    """Yields every number in the rows, but counts of what there is not."""
    for row in rows:
        for value in row.values():
            for x in value.values() if isinstance(value, dict) else (value,):
                if isinstance(x, (int, float)) and not isinstance(x, bool):
                    yield x


def saved(path, command):
    """Returns what a benchmark has saved, whose rows are positive numbers."""
    (found,) = json.loads(path.read_text()).values()
    assert found["command"].startswith(f"python -m benchmarks {command}")
    assert found["date"][:2] == "20"
    assert found["hardware"]
    assert {"python", "jax", "flax", "optax", "jmp"} <= set(found["versions"])
    sections = {k: v for k, v in found["rows"].items() if k != "left out"}
    for rows in sections.values():
        values = list(numbers(rows))
        assert values
        assert all(math.isfinite(x) and x > 0 for x in values)
    return sections, found["rows"].get("left out", [])


def test_gpu_runs_from_end_to_end_in_small(tmp_path):
    path = tmp_path / "gpu.json"
    gpu.main(["--tiny", f"--output={path}"])
    sections, left_out = saved(path, "gpu --tiny")
    assert len(sections["ceilings"]) == 5
    for name in gpu.TINY.plan:
        assert name in sections or any(line.startswith(name) for line in left_out)
        if name.split()[0] not in ("step", "optimizer"):
            continue
        measured = {row["step"] for row in sections[name]}
        for contestant in CONTESTANTS:
            line = f"{name}: {contestant} is left out"
            assert contestant in measured or any(x.startswith(line) for x in left_out)
        assert {"by hand", "jaxmp cast", "jaxmp autocast", "jmp", "float32"} <= measured
    for row in sections["batches gpt"]:
        assert row["has run"]
        assert row["peak MiB, compiled"] <= gpu.TINY.budget_mib


def test_gpu_says_where_there_is_no_gpu():
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        gpu.main(["--here", "--only=ceilings"])


def test_host_runs_from_end_to_end_in_small(tmp_path):
    path = tmp_path / "host.json"
    traced = ["float32", host.NATIVE, "by hand", "jaxmp cast", "jmp"]
    arguments = f"--output {path} --layers 1 --rounds 1 --calls 2 --traced".split()
    host.main([*arguments, *traced])
    sections = json.loads(path.read_text())
    assert set(sections) == {"dispatch", "tracing", "importing"}
    arrays = {row["step"]: row["arrays"] for row in sections["dispatch"]["rows"]}
    assert arrays["by hand"] == 3 * 77 + 1
    assert [row["step"] for row in sections["tracing"]["rows"]] == traced


@pytest.mark.parametrize("fixed", [0, 100, 990])
@pytest.mark.parametrize("slope", [1, 7, 500])
def test_the_largest_batch_is_found(fixed, slope):
    def needed(size):
        return fixed + slope * size

    best = (1000 - fixed) // slope
    assert compiled.largest_batch(needed, 1000) == (best, needed(best) if best else 0)


def test_samples_of_a_round_are_paired():
    clock = iter(range(100))
    times = timing.interleaved({"a": lambda: next(clock), "b": lambda: next(clock)}, 3)
    assert times == {"a": [0, 3, 4], "b": [1, 2, 5]}
    assert timing.ratio([2.0, 4, 6], [1.0, 1, 6])["median"] == 2
