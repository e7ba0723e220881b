"""The report names the line of each fault that people really have."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))

import fault  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast")


def line_of(text):
    """Returns ``file:line`` of the one line of the example that has a text."""
    lines = (EXAMPLES / "fault.py").read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if text in line]
    return f"{EXAMPLES / 'fault.py'}:{number}"


@pytest.mark.evidence
@pytest.mark.parametrize(
    ("name", "text", "module", "words"),
    [
        ("mask", "row 0 sees nothing", "Transformer/attention", "jnp.finfo(x.dtype)"),
        ("logits", "no 1/sqrt(width)", "Transformer/attention", "x.astype(jnp.float32"),
    ],
)
def test_an_overflow_of_the_forward_pass_is_named(name, text, module, words):
    report = fault.report(fault.Config(width=8, length=4, rows=2), name)
    assert report.first.where == line_of(text)
    assert report.first.module == module
    assert not report.first.backward
    assert report.finite_in_float32
    assert words in report.advice


@pytest.mark.evidence
def test_an_overflow_that_becomes_a_zero_is_named():
    report = fault.report(fault.Config(width=8, length=4, rows=2), "norm")
    assert report.first is None  # the norm of what is too large is 0
    overflow = report.others[0]
    assert overflow.where == line_of("in 16 bits, if faulty")
    assert overflow.module == "Transformer/RMSNorm_0"
    assert "the results may be wrong" in report.advice
    line = line_of("in 16 bits, if faulty").rpartition("/")[2]
    assert f"Compute {line} in float32" in report.advice


@pytest.mark.evidence
def test_bad_data_and_a_large_count_and_a_sound_program_are_told_apart():
    small = fault.Config(width=8, length=4, rows=2)
    report = fault.report(small, "data")
    assert report.given == {"weights": (1, 0)}
    assert "`weights` contains 1 NaN" in report.advice
    report = fault.report(small, "count")
    assert (report.first.kind, report.first.backward) == ("zeros", True)
    assert "the loss scale is too small" in report.advice
    console = Console(file=io.StringIO(), width=80, record=True)
    fault.main(fault.Config(("none",), width=8, length=4, rows=2), console)
    printed = console.export_text()
    assert "All results are finite." in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert "no operation made an Inf or NaN" in printed
