"""The pages of the documentation: their programs run, and nothing is left out."""

import ast
import doctest
import importlib.util
import inspect
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmp
import jaxmp.linen
import jaxmp.nnx
import jaxmp.plots

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path for path in DOCS.rglob("*.md")}
OPTIONAL = {"equinox", "haiku"}  # in the extra `programs`


def blocks(path):
    """Returns the Python programs of a page, each at its line."""
    text = path.read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S)
    return ["\n" * text[: m.start(1)].count("\n") + m[1] for m in found]


def shown(path):
    """Returns what a page shows below each program, empty below most."""
    text = path.read_text()
    below = r"^```python\n.*?^```(?:\s*^```text\n(.*?)^```)?"
    return [m[1] or "" for m in re.finditer(below, text, re.M | re.S)]


def without_numbers(text):
    """Returns words, since the last digits differ between machines."""
    return re.sub(r"\d[\d.,]*(e[+-]\d+)?", "0", text).split()


WITH_CODE = {name: blocks(path) for name, path in PAGES.items() if blocks(path)}


def imported(code):
    """Returns the top packages that a program imports."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


@pytest.mark.usefixtures("keys_that_compile_fast")
@pytest.mark.parametrize("name", WITH_CODE)
def test_the_programs_of_a_page_run_in_their_order(name, capsys):
    for module in OPTIONAL & {m for code in WITH_CODE[name] for m in imported(code)}:
        if not importlib.util.find_spec(module):
            pytest.skip(f"{module} is in the extra `programs`")
    names = {"__name__": "page"}
    before = jax.config.values.copy()
    for code, below in zip(WITH_CODE[name], shown(PAGES[name]), strict=True):
        capsys.readouterr()
        exec(compile(code, str(PAGES[name]), "exec"), names)
        if below:
            printed = capsys.readouterr().out
            assert without_numbers(printed) == without_numbers(below)
    assert jax.config.values == before


def test_the_reference_has_every_public_name():
    found = {}
    for path in (DOCS / "api").glob("*.md"):
        module = None
        for line in path.read_text().splitlines():
            if line.startswith(".. currentmodule:: "):
                module = line.split(":: ")[1]
            elif match := re.match(r"\.\. auto(?:function|class|data):: (\w+)$", line):
                found.setdefault(f"{module}.{match[1]}", []).append(path.name)
    public = {f"jaxmp.{name}" for name in jaxmp.__all__}
    for module in (jaxmp.linen, jaxmp.nnx, jaxmp.plots):
        public |= {
            f"{module.__name__}.{name}"
            for name, thing in inspect.getmembers(module, callable)
            if not name.startswith("_") and thing.__module__ == module.__name__
        }
    cure = "Add `.. autofunction:: NAME` to a page of docs/api, and NAME to its index."
    assert public - set(found) == set(), cure
    assert set(found) - public == set()
    assert [name for name, pages in found.items() if len(pages) > 1] == []


def test_the_index_of_the_reference_has_every_name():
    index = (DOCS / "api/index.md").read_text()
    for path in (DOCS / "api").glob("*.md"):
        for name in re.findall(r"^\.\. auto\w+:: (\w+)$", path.read_text(), re.M):
            assert re.search(rf"^   {name}$", index, re.M), (path.name, name)


MARKDOWN = [*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *PAGES.values()]


def anchors(path):
    """Returns the headings of a page as links spell them."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    included = re.search(r"^```{include} (\S+)", path.read_text(), re.M)
    more = anchors(path.parent / included[1]) if included else set()
    words = (re.sub(r"[^\w\- ]", "", x.lower()) for x in headings)
    return more | {x.replace(" ", "-") for x in words}


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda x: str(x.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        name, _, anchor = target.partition("#")
        there = path.parent / name if name else path
        assert there.exists(), target
        if anchor:
            assert anchor in anchors(there), target


def test_the_notebooks_hold_what_they_show():
    notebooks = list(DOCS.glob("*.ipynb"))
    assert len(notebooks) == 2
    cure = "Type `python .ci/notebooks.py`."
    for path in notebooks:
        cells = json.loads(path.read_text())["cells"]
        cells = [c for c in cells if c["cell_type"] == "code"]
        for cell in cells:
            for output in cell.get("outputs", ()):
                assert output["output_type"] != "error", cure
                assert output.get("name") != "stderr", cure
        printing = [c for c in cells if "print(" in "".join(c["source"])]
        shown = [c for c in cells if c.get("outputs")]
        assert len(shown) >= len(printing) > 3, (path.name, cure)
        assert not any(c["metadata"] for c in shown), cure  # such as times
        assert path.stat().st_size < 200_000


def command(name):
    """Returns a file of `.ci` as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f".ci/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_documentation_can_be_read_in_an_afternoon(capsys):
    words = command("words")
    words.main()
    found = words.counts()
    cure = "Say a thing once, and link to it. `python .ci/words.py` counts."
    assert len(found) <= 32, cure
    assert sum(found.values()) <= 26_304, cure
    assert f"words on {len(found)} pages" in capsys.readouterr().out


def test_every_benchmark_and_every_example_is_listed():
    for folder in ("benchmarks", "examples"):
        table = (ROOT / folder / "README.md").read_text()
        for path in (ROOT / folder).glob("[!_]*.py"):
            if "def main(" in path.read_text():
                name = path.stem if folder == "benchmarks" else path.name
                assert f"`{name}`" in table.split("\n## ")[0], path.name


@pytest.mark.parametrize("name", [x for x in jaxmp.__all__ if x[0].isupper()])
def test_the_examples_of_a_public_class_and_its_methods_run(name):
    # Pytest looks for those of methods where `__module__` says that the class is.
    names = {"jax": jax, "jnp": jnp, "optax": optax, "jaxmp": jaxmp}
    finder = doctest.DocTestFinder(exclude_empty=True)
    for example in finder.find(getattr(jaxmp, name), name, module=False, globs=names):
        found = doctest.DocTestRunner().run(example)
        assert found.failed == 0, example.name


EXAMPLES = [x for x in (ROOT / "examples").glob("*.py") if "tyro.cli" in x.read_text()]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda x: x.stem)
def test_the_help_of_an_example_begins_with_what_it_does(path):
    text = path.read_text()
    (name,) = re.findall(r"tyro\.cli\((\w+)\)", text)
    (options,) = [
        x
        for x in ast.parse(text).body
        if isinstance(x, ast.ClassDef) and x.name == name
    ]
    verb = ast.get_docstring(options).split()[0]
    assert re.fullmatch(r"[A-Z][a-z]+s", verb), verb


@pytest.mark.parametrize(
    "path", [DOCS / "index.md", *(DOCS / "api").glob("*.md")], ids=lambda x: x.stem
)
def test_a_page_that_only_the_site_can_show_says_where_the_site_is(path):
    begins = path.read_text().partition("\n\n")[0]
    assert all(line.startswith("% ") for line in begins.splitlines())
    assert "README" in begins
    assert "Documentation" in begins
