"""The README's programs run as they stand, in their order."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_readme_runs_as_it_stands(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.M | re.S)
    assert len(blocks) >= 9
    names = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)
    assert names["accuracy"] > 0.85
    assert "accuracy 0.9" in capsys.readouterr().out


def test_the_first_program_is_on_the_first_screen():
    lines = README.read_text().splitlines()
    assert lines.index("```") < 50
