"""A planted fault is named, and the advice that names it cures it."""

import json
import pathlib

import pytest

from benchmarks.counting import results
from benchmarks.networks import planted

# For each kind a program that is faulty, with other casts and places.
SAMPLE = [(kind, seed) for seed, kind in enumerate(planted.KINDS, start=1)]
# NumPy says it of a -1e9 in the code.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast")
DOCS = pathlib.Path(__file__).parents[2] / "docs"


def check(program):
    report = program.search()
    told = f"{planted.verdict(report)} {report.advice}\n\n{program}"
    assert planted.names_it(program, report), told
    if program.kind != planted.NOTHING:
        assert planted.is_cured(program, report), told


@pytest.mark.parametrize(("kind", "seed"), SAMPLE, ids=[x for x, _ in SAMPLE])
def test_a_planted_fault_is_named_and_cured(kind, seed):
    check(planted.program(kind, seed))


@pytest.mark.evidence
@pytest.mark.parametrize("kind", planted.KINDS)
def test_planted_faults_are_named_and_cured(kind):
    programs = [planted.program(kind, seed) for seed in range(24)]
    # Where 16 bits do not feel a fault there is none.
    is_sound = kind == planted.NOTHING
    programs = [x for x in programs if planted.is_faulty(x) != is_sound]
    assert len(programs) >= 8
    for program in programs:
        check(program)


def test_the_results_have_each_kind_of_fault_and_their_command():
    (found,) = json.loads((results.FOLDER / "faults.json").read_text()).values()
    assert [x["planted"] for x in found["rows"]] == [*planted.KINDS]
    text = (DOCS / "performance.md").read_text()
    assert found["command"] in text
    assert found["date"] in text
