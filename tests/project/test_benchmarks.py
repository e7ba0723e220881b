"""The programs that measure the host and the GPU run from end to end, in small."""

import math
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from benchmarks import __main__, gpu, host, sharded
from benchmarks.counting import collectives, results, steps, targets, timing
from benchmarks.networks.families import FAMILIES, SMALL, in_chunks

ROOT = pathlib.Path(__file__).parents[2]
UNAVAILABLE = targets.unavailable()
needs_compiler = pytest.mark.skipif(bool(UNAVAILABLE), reason=str(UNAVAILABLE))


def numbers(rows):
    """Yields every number in the rows, but counts of what there is not."""
    for row in rows:
        for value in row.values():
            for x in value.values() if isinstance(value, dict) else (value,):
                if isinstance(x, (int, float)) and not isinstance(x, bool):
                    yield x


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where a benchmark that a test runs leaves its results."""
    monkeypatch.setattr(results, "SCRATCH", tmp_path)


def saved(name, command, title="cpu"):
    """Returns what a benchmark has saved, whose rows are positive numbers."""
    found = results.read(name)[title]
    assert found["command"].startswith(f"python -m benchmarks {command}")
    assert found["date"][:2] == "20"
    assert found["hardware"]
    assert {"python", "jax", "flax", "optax", "jaxmp", "jmp"} <= set(found["versions"])
    sections = {k: v for k, v in found["rows"].items() if k != "left out"}
    for rows in sections.values():
        values = list(numbers(rows))
        assert values
        assert all(math.isfinite(x) and x > 0 for x in values)
    return sections, found["rows"].get("left out", [])


def test_what_compiles_for_a_gpu_asks_for_no_device_when_it_is_imported():
    """It chooses the CPU first: JAX's plugin for CUDA is lost where none is found."""
    folder = pathlib.Path(targets.__file__).parents[1]
    names = [
        path.stem
        for path in folder.glob("*.py")
        if "targets.require(" in path.read_text()
    ]
    assert {"gate", "machinery", "price"} <= set(names)
    program = "".join(f"import benchmarks.{name}\n" for name in names)
    env = os.environ | {"JAX_PLATFORMS": "nowhere"}
    run = [sys.executable, "-c", program]
    found = subprocess.run(run, env=env, cwd=folder.parent, capture_output=True)
    assert found.returncode == 0, found.stderr.decode()


@pytest.mark.usefixtures("scratch")
def test_gpu_times_every_form_of_a_network_and_saves_its_rows(capsys):
    forms = ["highest", "float32", "by hand", steps.AUTOCAST, "flax DynamicScale"]
    arguments = ["--networks", "mlp", "--dtypes", "bfloat16", "float16", "--forms"]
    __main__.main(["gpu", "--tiny", "--no-torch", *arguments, *forms])
    sections, left_out = saved("gpu", "gpu --tiny")
    assert len(sections["ceilings"]) == 5
    assert len(left_out) == 1
    assert "scales float16 alone" in left_out[0]
    rows = sections["steps"]
    assert [(row["form"], row["dtype"]) for row in rows] == [
        ("highest", "bfloat16"),
        ("float32", "bfloat16"),
        ("by hand", "bfloat16"),
        (steps.AUTOCAST, "bfloat16"),
        ("by hand", "float16"),
        (steps.AUTOCAST, "float16"),
        ("flax DynamicScale", "float16"),
    ]
    (gained,) = gpu.gains(rows)
    assert {"TF32", "autocast", "speedup", "memory", "pure bfloat16"} < gained.keys()
    assert "speedup" in capsys.readouterr().out


@pytest.mark.evidence
@pytest.mark.usefixtures("scratch")
def test_gpu_runs_from_end_to_end_in_small():
    __main__.main(["gpu", "--tiny"])
    sections, _ = saved("gpu", "gpu --tiny")
    measured = {(x["network"], x["form"], x["dtype"]) for x in sections["steps"]}
    assert {name for name, _, _ in measured} == {*gpu.NAMES}
    for name in gpu.NAMES:
        assert {(name, form, "bfloat16") for form in gpu.FORMS} <= measured


@pytest.mark.evidence
@pytest.mark.usefixtures("scratch")
def test_gpu_times_what_saves_memory_beside_what_was_timed_before():
    __main__.main(["gpu", "--tiny", "--no-torch", "--networks", "mlp"])
    forms = [steps.AUTOCAST, steps.BOTH, "int8 state"]
    arguments = ["--title", "memory", "--networks", "gpt-160m, fused", "--forms"]
    __main__.main(["gpu", "--tiny", "--no-torch", *arguments, *forms])
    assert [*results.read("gpu")] == ["cpu", "cpu, memory"]
    sections, left_out = saved("gpu", "gpu --tiny", "cpu, memory")
    assert left_out == []
    assert [row["form"] for row in sections["steps"]] == forms
    memory = {row["form"]: row["temporary MiB"] for row in sections["steps"]}
    assert memory[steps.BOTH] < memory[steps.AUTOCAST]


@pytest.mark.usefixtures("scratch")
def test_gpu_leaves_out_what_no_time_is_left_for():
    __main__.main(["gpu", "--tiny", "--no-torch", "--seconds=0"])
    (found,) = results.read("gpu").values()
    assert found["rows"]["steps"] == []
    assert len(found["rows"]["left out"]) == len(gpu.NAMES)


def test_gpu_says_where_there_is_no_gpu():
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        __main__.main(["gpu", "--no-torch"])
    with pytest.raises(SystemExit, match="no network `gtp`"):
        __main__.main(["gpu", "--networks", "gtp"])


@pytest.mark.parametrize("ends", [0, -6, None])  # None: killed when the time is over
def test_what_pytorch_has_measured_is_kept_however_it_ends(monkeypatch, ends):
    def process(command, timeout, **options):
        assert command[-2:] == ["benchmarks.networks.in_torch", "--tiny"]
        assert timeout == 20
        printed = b'{"network": "gpt-160m", "ms": 1}\n{"netw'
        if ends is None:
            raise subprocess.TimeoutExpired(command, timeout, output=printed)
        return subprocess.CompletedProcess(command, ends, printed)

    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu.subprocess, "run", process)
    lines: list[str] = []
    rows = gpu.in_torch(60, True, lines.append)
    assert rows == [{"network": "gpt-160m", "ms": 1}]
    assert len(lines) == (ends != 0)
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    assert gpu.in_torch(60, True, lines.append) == []
    assert lines[-1] == "PyTorch is left out: it is not installed"


def test_what_a_gpu_starts_and_waits_for_is_counted_once():
    program = """
HloModule jit_step, num_partitions=8

ENTRY %main (p: bf16[2,3], q: bf16[2]) -> bf16[16,3] {
  %p = bf16[2,3]{1,0} parameter(0)
  %q = bf16[2]{0} parameter(1)
  %s = ((bf16[2,3]{1,0}, bf16[2]{0}), (bf16[16,3]{1,0}, bf16[16]{0})) \
all-gather-start(%p, %q), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  %d = (bf16[16,3]{1,0}, bf16[16]{0}) all-gather-done(%s)
  ROOT %r = bf16[16,3]{1,0} get-tuple-element(%d), index=0
}
""".replace("\\\n", "")
    found = collectives.collectives(program)
    assert [(c.kind, c.size, c.devices) for c in found] == [
        ("all-gather", 48, 4),
        ("all-gather", 16, 4),
    ]
    assert collectives.sent_bytes(program) == {"all-gather bf16": 2 * 64 * 3 / 4}
    assert collectives.launches(program) == {"all-gather": 1}


def test_the_large_model_has_six_point_seven_billion_parameters():
    parameters = jax.tree.leaves(sharded.shapes(sharded.Llama()))
    assert sum(x.size for x in parameters) == 6_738_415_616  # of LLaMA's table 2


@pytest.mark.evidence
@needs_compiler
@pytest.mark.parametrize(
    ("form", "accum_steps", "gathers", "sums"),
    [
        ("ZeRO-2, r=bf16", 2, {"layers": 1, "head": 1, "embedding": 1}, "bf16"),
        ("ZeRO-3", 2, {"layers": 4, "head": 4, "embedding": 2}, "f32"),
    ],
)
def test_a_gpu_sends_what_a_form_of_sharding_says(form, accum_steps, gathers, sums):
    sizes = sharded.Llama(
        width=512, layers=4, heads=4, hidden=1024, vocabulary=4096, tokens=256
    )
    text = sharded.compile_step(sizes, form, 8, accum_steps).as_text()
    sent = collectives.sent_bytes(text)
    shapes = sharded.shapes(sizes)
    size = {
        name: sum(x.size for x in jax.tree.leaves(shapes[name])) for name in gathers
    }
    gathered = sum(times * size[name] for name, times in gathers.items())
    assert sent["all-gather bf16"] == pytest.approx(2 * gathered * 7 / 8, rel=1e-3)
    times = 1 if "ZeRO-2" in form else accum_steps
    wide = {"bf16": 2, "f32": 4}[sums]
    total = wide * times * sum(size.values()) * 7 / 8
    assert sent[f"reduce-scatter {sums}"] == pytest.approx(total, rel=1e-3)


def test_samples_of_a_round_are_paired():
    clock = iter(range(100))
    times = timing.interleaved({"a": lambda: next(clock), "b": lambda: next(clock)}, 3)
    assert times == {"a": [0, 3, 4], "b": [1, 2, 5]}
    assert timing.ratio([2.0, 4, 6], [1.0, 1, 6])["median"] == 2


def test_every_family_is_there_in_small():
    assert list(FAMILIES) == list(SMALL)
    for name, network in SMALL.items():
        assert type(network.model) is type(FAMILIES[name].model)


def test_chunks_of_a_state_space_are_its_recurrence():
    random = np.random.default_rng(0)
    x, entry, out = (
        random.normal(size=(2, 12, *shape)).astype(np.float32)
        for shape in ((3, 4), (5,), (5,))
    )
    decays = -random.uniform(size=(2, 12, 3)).astype(np.float32)
    state, expected = np.zeros((2, 3, 4, 5)), np.zeros_like(x)
    for step in range(12):
        state = np.exp(decays[:, step, :, None, None]) * state
        state += np.einsum("bhp,bn->bhpn", x[:, step], entry[:, step])
        expected[:, step] = np.einsum("bhpn,bn->bhp", state, out[:, step])
    for chunk in (4, 12):
        found = jax.jit(in_chunks, static_argnums=0)(chunk, x, decays, entry, out)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_commands_are_listed_with_a_line_each():
    run = [sys.executable, "-m", "benchmarks"]
    found = subprocess.run(run, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 1
    listed = dict(line.split(maxsplit=1) for line in found.stderr.splitlines()[5:])
    assert {"price", "machinery", "evidence"} <= set(listed)
    assert all(len(line) > 20 and line[0].isupper() for line in listed.values())


@pytest.mark.parametrize("saves", [False, True])
def test_results_that_the_documentation_quotes_are_replaced_by_save_alone(
    saves, monkeypatch, tmp_path
):
    monkeypatch.setattr(results, "FOLDER", tmp_path / "quoted")
    monkeypatch.setattr(results, "SCRATCH", tmp_path / "scratch")

    def measured(*, rounds: int = 9):
        results.save("host", "a table", "here", [])

    monkeypatch.setattr(host, "main", measured)
    __main__.main(["host", "--rounds", "1", *["--save"] * saves])
    written = "quoted" if saves else "scratch"
    assert [x.parent.name for x in tmp_path.rglob("host.json")] == [written]


@pytest.mark.usefixtures("scratch")
def test_a_run_that_is_broken_off_leaves_what_it_has_counted():
    results.begin(["price"])

    def run(counts):
        def counted():
            for name, count in counts.items():
                if count is None:
                    raise KeyboardInterrupt
                yield {"network": name, "bytes": count}

        results.update("price", "a table", "here", counted(), "network")
        return results.read("price")["a table"]["rows"]

    with pytest.raises(KeyboardInterrupt):
        run({"mlp": 1, "gpt": 2, "vit": None})
    rows = run({"gpt": 3, "vit": 4})
    assert {x["network"]: x["bytes"] for x in rows} == {"mlp": 1, "gpt": 3, "vit": 4}
