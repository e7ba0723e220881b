"""How autocast runs each operation of many programs is what the file says."""

import re

import jax
import pytest

from benchmarks import golden
from conftest import rest_is_evidence

pytestmark = pytest.mark.skipif(
    jax.__version__ not in (golden.NEWEST, golden.OLDER),
    reason=f"the files are of JAX {golden.NEWEST} and {golden.OLDER}",
)
BEFORE = golden.read()


@pytest.fixture(scope="session")
def programs():
    """What builds each program; skips without the libraries of ``tests/programs``."""
    return golden.programs()


def test_the_file_has_all_programs(programs):
    assert [*programs] == [*BEFORE], f"type `{golden.COMMAND}`"


# Of the generated programs every second one, and all networks and programs.
USUAL = [x for x in BEFORE if not re.fullmatch(r"generated \d*[13579]", x)]


@pytest.mark.needs_no_scale
@pytest.mark.keeps_float32  # some of the programs
@pytest.mark.parametrize("name", rest_is_evidence({x: x for x in BEFORE}, *USUAL))
def test_autocast_decides_as_the_file_says(programs, name):
    now = golden.rows(programs[name]) if name in programs else []
    if changed := golden.changes(BEFORE[name], now):
        pytest.fail(
            f"Autocast runs these operations of `{name}` otherwise:\n"
            + "\n".join(changed)
            + f"\nIf that is meant, type `{golden.COMMAND}`, and say in the commit "
            "message what changed and why.",
            pytrace=False,
        )


@pytest.mark.parametrize("version", [golden.NEWEST, golden.OLDER])
def test_what_is_written_is_read(version, tmp_path, monkeypatch):
    for name in "FILE", "DIFFERENCES":
        monkeypatch.setattr(golden, name, tmp_path / name)
    newest = {"a": ["add 16 (2) x 2", "mul 16 (2) x 1"], "b": ["sub 16 (2) x 1"]}
    older = newest | {"a": ["add 32 (3) x 2", "mul 16 (2) x 1"]}
    for now, there in ((newest, golden.NEWEST), (older, golden.OLDER)):
        monkeypatch.setattr(golden, "programs", lambda now=now: now)
        monkeypatch.setattr(golden, "rows", lambda build: build)
        monkeypatch.setattr(golden.results, "is_saving", lambda: True)
        monkeypatch.setattr(jax, "__version__", there)
        golden.main()
    found = golden.read(version)
    expected = newest if version == golden.NEWEST else older
    assert {x: sorted(rows) for x, rows in found.items()} == expected


def test_a_difference_is_named():
    before = ["add 16 (2) x 2", "mul 16 (2) x 1"]
    now = ["add 32 (3) x 2", "mul 16 (2) x 1"]
    assert golden.changes(before, now) == ["- add 16 (2) x 2", "+ add 32 (3) x 2"]
    assert golden.changes(now, now) == []
