"""The README's program runs as it stands, and is what its first lines say."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def blocks(language):
    found = re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.M | re.S)
    assert found
    return found


def run(block):
    names = {"__name__": "readme"}
    exec(compile(block, str(README), "exec"), names)
    return names


def test_the_program_runs_as_it_stands(capsys):
    assert run(blocks("python")[0])["accuracy"] > 0.85
    assert "accuracy 0.9" in capsys.readouterr().out


def test_the_second_program_stands_alone_and_prints_what_it_says(capsys):
    program = blocks("python")[1]
    run(program)
    said = program.rpartition("  # ")[2]
    assert capsys.readouterr().out == said == "loss 1.0, gradients in float32\n"


def test_the_diff_makes_the_program():
    (diff,), (program, _) = blocks("diff"), blocks("python")
    lines, code = diff.splitlines(), program.splitlines()
    assert len(lines) <= 8
    for line in filter(None, lines):
        kept = [x for x in code if x.split("  #")[0] == line[1:]]
        assert bool(kept) == (line[0] != "-"), line


def test_the_front_door_is_narrow():
    lines = README.read_text().splitlines()
    assert len(lines) <= 180
    assert lines.index("```python") < 20
