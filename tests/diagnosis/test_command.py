"""``python -m jaxmp``: what it prints, how it ends, and what it says of slips."""

import operator
import runpy
import subprocess
import sys
import textwrap
import types

import pytest

import jaxmp
from jaxmp.__main__ import main

TRAIN = """
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from {helper} import WIDTH

CALLS = []


@dataclasses.dataclass
class Trainer:
    scale: float | np.float32

    def step(self, params, x):
        CALLS.append("step")
        h = jnp.tanh(x @ params["w1"]) * self.scale
        return jnp.mean((h @ params["w2"]).astype(jnp.float32))


trainer, leaky = Trainer(2.0), Trainer(np.float32(2))
step = jax.jit(leaky.step)
WEIGHT = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)


def example():
    return {{"w1": WEIGHT, "w2": WEIGHT}}, WEIGHT


def by_name():
    return dict(zip(("params", "x"), example()))


def identity(x):
    return x


def waves(x):
    return jnp.sin((x @ x).astype(jnp.float32))


def wrong(x):
    raise KeyError("a mistake of the program's own")


if __name__ == "__main__":
    raise SystemExit("trains")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a program that imports a module beside it."""
    helper = f"sizes_{tmp_path.name}".replace("-", "_")
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN.format(helper=helper)))
    (tmp_path / f"{helper}.py").write_text("WIDTH = 64")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    return tmp_path


# The words of a command, and the name of what it audits.
REPORTS = {
    "report": ("train.py:step --args train.py:example", "step"),
    "enough": ("train.py:step --args train.py:example --at-least 50", "step"),
    "no hazard": ("train.py:step --args train.py:example --fail-on-hazards", "step"),
    "all": (
        "train.py:trainer.step --args train.py:example --at-least 100",
        "trainer.step",
    ),
    "by keyword": ("train.py:step --args train.py:by_name --at-least 50", "step"),
    "modules": ("train:step --args train:example --at-least 50", "step"),
}


@pytest.mark.parametrize(("words", "name"), REPORTS.values(), ids=REPORTS)
def test_a_command_prints_the_report_of_audit_and_ends_with_0(
    folder, capsys, words, name
):
    assert main(["audit", *words.split()]) == 0
    program = runpy.run_path("train.py")
    fun = operator.attrgetter(name)(types.SimpleNamespace(**program))
    report = jaxmp.audit(fun)(*program["example"]())
    assert capsys.readouterr().out == f"{report}\n"
    assert report.fraction_16bit == (1 if name == "trainer.step" else 0.5)


def test_a_command_prints_what_explain_says(folder, capsys):
    assert main(["explain", *REPORTS["report"][0].split()]) == 0
    program = runpy.run_path("train.py")
    report = jaxmp.explain(program["step"])(*program["example"]())
    assert capsys.readouterr().out == f"{report}\n"
    assert [x.function for x in report.lines] == ["Trainer.step"] * 2


# The words of a command whose answer is no, and what it prints last.
REFUSALS = {
    "too little": (
        "train.py:step --args train.py:example --at-least 95",
        "50.00% of the FLOPs are in 16 bits, and at least 95% were asked for.",
    ),
    "nothing": (
        "train.py:identity --args train.py:WEIGHT --at-least 0",
        "`train.py:identity` has no matmul, and nothing to count.",
    ),
    "hazard": (
        "train.py:waves --args train.py:WEIGHT --at-least 95 --fail-on-hazards",
        "The audit found numerical risks (phase), and none were allowed.",
    ),
}


@pytest.mark.parametrize(("words", "last"), REFUSALS.values(), ids=REFUSALS)
def test_a_command_ends_with_1_for_what_it_is_told_to_fail_on(
    folder, capsys, words, last
):
    assert main(["audit", *words.split()]) == 1
    first, *_, end = capsys.readouterr().out.splitlines()
    assert "matmul and convolution FLOPs" in first
    assert end == last


SLIPS = {
    "": "the following arguments are required",
    "audit train.py": "`train.py` must name a file and what is in it",
    "audit trian.py:step": r"There is no file `trian.py` in ",
    "audit trian:step": "There is no module `trian`. Name a file",
    "audit train.py:stepp": "`train.py` has no `stepp`. Did you mean step?",
    "audit train.py:trainer.stepp": "has no `trainer.stepp`. Did you mean step?",
    "audit train.py:WEIGHT": "`train.py:WEIGHT` must be a function, but is ",
    "explain train.py:stepp": "`train.py` has no `stepp`. Did you mean step?",
    "explain train.py:step --at-least 95": "unrecognized arguments: --at-least 95",
    "explain train.py:step --fail-on-hazards": "unrecognized arguments: --fail-on",
    "audit train.py:step": "`--args train.py:example`",
    "audit train.py:step --args train.py:WEIGHT": "`train.py:WEIGHT` gives others.",
    "audit train.py:identity --args train.py:by_name": "unexpected keyword argument",
    "audit train.py:step --at-least most": "invalid float value: 'most'",
}


@pytest.mark.parametrize("words", SLIPS)
def test_a_command_that_is_wrong_ends_with_2_and_says_what_to_type(
    folder, capsys, words
):
    with pytest.raises(SystemExit) as end:
        main(words.split())
    assert end.value.code == 2
    assert SLIPS[words] in " ".join(capsys.readouterr().err.split())


def test_an_error_of_the_program_is_the_programs(folder):
    with pytest.raises(KeyError, match=r"a mistake"):
        main(["audit", "train.py:wrong", "--args", "train.py:WEIGHT"])
    (folder / "broken.py").write_text("import a_module_that_is_not_there")
    for name in ("broken", "broken.py"):
        with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
            main(["audit", f"{name}:step"])


def test_it_is_a_command(folder):
    words = ["audit", "train.py:step", "--args", "train.py:example", "--at-least", "95"]
    command = [sys.executable, "-m", "jaxmp", *words]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stderr
    assert "50.0%  float32(2) meets 16-bit" in run.stdout
    assert "train.py:21" in run.stdout
