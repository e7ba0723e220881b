"""The pages of the documentation: their programs run, and nothing is left out."""

import ast
import importlib.util
import inspect
import re
from pathlib import Path

import jax
import pytest

import jaxmp
import jaxmp.linen
import jaxmp.nnx
import jaxmp.plots

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path for path in DOCS.rglob("*.md")}
OPTIONAL = {"equinox", "haiku"}  # in the extra `programs`


def blocks(path):
    """Returns the Python programs of a page, each at its line."""
    text = path.read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)
    return ["\n" * text[: m.start(1)].count("\n") + m[1] for m in found]


WITH_CODE = {name: blocks(path) for name, path in PAGES.items() if blocks(path)}


def imported(code):
    """Returns the top packages that a program imports."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("name", WITH_CODE)
def test_the_programs_of_a_page_run_in_their_order(name):
    for module in OPTIONAL & {m for code in WITH_CODE[name] for m in imported(code)}:
        if not importlib.util.find_spec(module):
            pytest.skip(f"{module} is in the extra `programs`")
    names = {"__name__": "page"}
    before = jax.config.values.copy()
    for code in WITH_CODE[name]:
        exec(compile(code, str(PAGES[name]), "exec"), names)
    assert jax.config.values == before
