"""The house: who may import whom, and what importing jaxmp loads."""

import ast
import functools
import inspect
import itertools
import os
import pydoc
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmp

PACKAGE = Path(jaxmp.__file__).parent

# Each file may import from those before its own row, and nothing else of jaxmp.
ROWS = [
    {"_version", "_checks", "_explaining", "_other_names", "_text"},
    {
        "_dtypes",
        "_equinox",
        "_jaxpr",
        "_rounding",
        "_sizes",
        "_varying",
    },
    {"_custom_rules", "_in_float32"},
    {
        "_around",
        "_blocks",
        "_handed_back",
        "_products",
        "_report",
        "_residuals",
        "_scopes",
        "_tree",
    },
    {"_kept_state", "_modules", "_objects"},
    {
        "_state_dtype",
        "_op_lists",
        "_places",
        "_flatten",
        "_overflow_report",
        "_sensitivity_report",
        "_explain_report",
    },
    {"_sums", "_columns", "_fp8", "_precision"},
    {
        "_product_rules",
    },
    {
        "_policy",
        "_batch",
        "_reducers",
        "_lookups",
        "_reasons",
        "_exponents",
        "_narrow_params",
        "_wide",
        "_loss_scale_state",
    },
    {"_numbers"},
    {
        "_masters",
        "_mesh",
        "_leaks",
        "_loss_scale",
        "_ranges",
        "_look",
        "_scalars",
        "_advice",
        "_hazards",
        "_wide_replay",
    },
    {"_gather", "_promoted", "_ungathered"},
    {"_differentiate", "_trails", "_limits", "_readers"},
    {"_switches"},
    {"_table", "_flow"},
    {"_probe"},
    {"_autocast", "_audit", "_activations", "_overflow"},
    {"_cast_notes", "_explain"},
    {"_grad"},
    {"_sensitivity"},
    {"linen", "nnx", "plots"},
    {"__init__"},
]
FRONT_ENDS = {"linen", "nnx", "plots"}
# The same for the rooms of a package, each of which may import what the package may.
ROOMS = {
    "_autocast": [
        {"needs", "rules", "twins"},
        {"classes", "loops", "scans", "values"},
        {"definitions"},
        {"steps"},
        {"endings", "gates", "hoisting", "moments", "order"},
        {"passes"},
        {"decisions", "float8", "storage", "transfer"},
        {"analysis"},
        {"customs"},
        {"calls"},
        {"replay"},
        {"autocast"},
        {"_autocast"},
    ]
}


def named(path):
    """Returns how ROWS and ROOMS name a file: a package's own is its ``__init__``."""
    is_own = path.stem == "__init__" and path.parent != PACKAGE
    return path.parent.name if is_own else path.stem


def imports(path):
    """Yields the modules that a file imports, relative ones with their dot."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is None:
            yield from ("." + alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + node.module


def test_imports_go_one_way():
    files = {path.stem: path for path in PACKAGE.glob("*.py")}
    assert set(files) | set(ROOMS) == set().union(*ROWS)
    earlier = set()
    for row in ROWS:
        for name in row & set(files):
            ours = {m[1:].split(".")[0] for m in imports(files[name]) if m[0] == "."}
            assert ours <= earlier - FRONT_ENDS, name
        earlier |= row


@pytest.mark.parametrize("package", ROOMS)
def test_imports_go_one_way_in_a_package(package):
    files = {named(path): path for path in (PACKAGE / package).rglob("*.py")}
    assert set(files) == set().union(*ROOMS[package])
    before = itertools.takewhile(lambda row: package not in row, ROWS)
    earlier = set().union(*before) - FRONT_ENDS
    for row in ROOMS[package]:
        for name in row:
            ours = {m.lstrip(".") for m in imports(files[name]) if m.startswith(".")}
            assert ours <= earlier, name
        earlier |= row


def doc(node):
    """Returns the docstring of a function, which is not counted as code."""
    return ast.get_docstring(node) or ""


def test_the_rooms_of_autocast_stay_small():
    sizes = {}
    for path in (PACKAGE / "_autocast").rglob("*.py"):
        text = path.read_text()
        sizes[path] = len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                lines = node.end_lineno - node.lineno - len(str(doc(node)).splitlines())
                assert lines < 60, (path.name, node.name)
            if isinstance(node, ast.ClassDef) and node.bases != []:
                fields = [x for x in node.body if isinstance(x, ast.AnnAssign)]
                assert len(fields) <= 8, (path.name, node.name)
    assert max(sizes.values()) <= 350
    inside = [n for path, n in sizes.items() if path.stem != "autocast"]
    assert sum(inside) <= 3500  # without the public function, its options and docstring


def test_what_is_not_public_in_jax_stays_in_one_file():
    for path in PACKAGE.rglob("*.py"):
        private = [m for m in imports(path) if m.startswith(("jax._src", "jax.extend"))]
        assert not private or path.stem == "_jaxpr", (path.name, private)
        text = path.read_text()
        assert "jax.__version" not in text or path.stem == "_jaxpr", path.name


def test_names_of_primitives_stay_with_the_lists_of_them():
    from jaxmp._jaxpr import CALL_KINDS

    ops = jaxmp.DEFAULT_OPS
    names = ops.allow | ops.deny | ops.infer | CALL_KINDS.keys()
    lists = {"_jaxpr", "_op_lists", "_products"}
    readers = {
        path
        for path in PACKAGE.rglob("*.py")
        if not {"._jaxpr", ".._jaxpr", "..._jaxpr"}.isdisjoint(imports(path))
    }
    assert {"_leaks", "classes", "replay"} <= {p.stem for p in readers}
    for path in readers:
        nodes = ast.walk(ast.parse(path.read_text()))
        strings = {node.value for node in nodes if isinstance(node, ast.Constant)}
        found = strings & (names - set(CALL_KINDS.values()))
        assert not found or path.stem in lists, (path.name, found)


def test_the_files_that_trace_what_is_audited_are_there():
    from jaxmp._places import _REPLAYS, _TRACING

    assert all(map(os.path.exists, (*_TRACING, *_REPLAYS)))


# What a user may do one after the other. All in one interpreter, which takes seconds to
# import JAX.
SESSION = f"""
import jaxmp, sys
print(*sys.modules)
print("audit" in dir(jaxmp), jaxmp.audit.__name__)
from jaxmp import *
print(*sys.modules)

# `jax.distributed.initialize` must come first, and may come after the imports.
import jax, optax
jaxmp.value_and_grad(lambda w: w, policy="mixed_float16", loss_scale=2**15)
jaxmp.loss_scaling(optax.adam(1e-3), "mixed_float16")
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend has started
print(jax.device_count("cpu"))

for name in {sorted(FRONT_ENDS)}:
    assert name in dir(jaxmp)
    front_end = getattr(jaxmp, name)
    print(front_end.__name__, front_end is sys.modules["jaxmp." + name], end=" ")
"""


@functools.cache
def printed():
    """Returns the words of each line that a fresh interpreter prints."""
    run = subprocess.run(
        [sys.executable, "-c", SESSION], capture_output=True, text=True, check=True
    )
    names = ("imported", "later", "everything", "devices", "front ends")
    return dict(zip(names, map(str.split, run.stdout.splitlines()), strict=True))


def test_importing_jaxmp_loads_no_front_end_and_nothing_slow():
    loaded = printed()["imported"]
    assert "optax" in loaded
    slow = {"flax.linen", "flax.nnx", "matplotlib", "jax.extend", "jaxmp._jaxpr"}
    assert not slow & set(loaded)


def test_all_names_everything_public_and_nothing_else():
    # Written out, because type checkers read it, and sorted, because people do.
    public = {
        name
        for name in dir(jaxmp)
        if not name.startswith("_") and not isinstance(getattr(jaxmp, name), type(sys))
    }
    assert set(jaxmp.__all__) == public
    assert jaxmp.__all__ == sorted(jaxmp.__all__)
    names = {}
    exec("from jaxmp import *", names)
    assert set(names) >= public
    assert names["autocast"] is jaxmp.autocast


@pytest.mark.parametrize("name", sorted(FRONT_ENDS))
def test_all_of_a_front_end_names_what_it_defines(name):
    front_end = getattr(jaxmp, name)
    defined = [
        key
        for key, value in inspect.getmembers(front_end)
        if inspect.isroutine(value) or inspect.isclass(value)
        if value.__module__ == front_end.__name__ and not key.startswith("_")
    ]
    assert front_end.__all__ == defined


def test_dir_names_the_front_ends_that_can_be_imported(monkeypatch):
    assert {*jaxmp.__all__, *FRONT_ENDS} <= set(dir(jaxmp))
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "matplotlib" else name
    )
    assert {"linen", "nnx"} <= set(dir(jaxmp))
    assert "plots" not in dir(jaxmp)


def test_importing_everything_loads_no_front_end():
    loaded = printed()["everything"]
    assert "jaxmp._autocast" in loaded
    assert not {"jaxmp.linen", "jaxmp.nnx", "flax.nnx", "matplotlib"} & set(loaded)


def test_a_front_end_is_imported_by_its_use():
    expected = [(f"jaxmp.{name}", "True") for name in sorted(FRONT_ENDS)]
    assert printed()["front ends"] == [word for pair in expected for word in pair]


def test_help_is_a_page_with_a_program_and_every_public_name():
    text = pydoc.plain(pydoc.render_doc(jaxmp))
    page, listed = text.split("PACKAGE CONTENTS")
    assert len(page.splitlines()) < 45
    # What follows is one line for each file.
    assert len(listed.splitlines()) < len([*PACKAGE.glob("*.py")]) + 15
    assert max(map(len, page.splitlines())) <= 88
    words = re.findall(r"[\w.]+", page)
    assert set(jaxmp.__all__) <= set(words)
    assert {f"jaxmp.{name}" for name in FRONT_ENDS} <= set(words)
    assert not set(jaxmp.__all__) & set(re.findall(r"\w+", listed)) - {"DEFAULT_OPS"}


def test_the_program_of_help_trains():
    program = jaxmp.__doc__.split("::\n")[1].split("\n`help`")[0]
    params = {"w": jnp.ones((4, 2))}
    names = {"jax": jax, "jaxmp": jaxmp, "optax": optax, "params": params}
    names["loss_fn"] = lambda p, x, y: jnp.mean((x @ p["w"] - y) ** 2)
    exec(textwrap.dedent(program), names)
    step, state = names["train_step"], names["opt_state"]
    x, y = jnp.ones((8, 4)), jnp.zeros((8, 2))
    _, _, before = step(params, state, x, y)
    for _ in range(9):
        params, state, after = step(params, state, x, y)
    assert jaxmp.last_step_finite(state)
    assert after < before


@pytest.mark.parametrize("name", ["autocast", "with_policy", "audit", "grad"])
def test_help_of_a_function_fits_a_screen(name):
    text = pydoc.plain(pydoc.render_doc(getattr(jaxmp, name)))
    rows = sum(max(1, -(-len(row) // 88)) for row in text.splitlines())
    assert rows <= 56
    assert len(str(inspect.signature(getattr(jaxmp, name)))) < 250


def test_a_name_that_is_imported_later_is_there_and_a_wrong_one_is_not():
    assert printed()["later"] == ["True", "audit"]
    with pytest.raises(AttributeError, match="no attribute 'autocats'"):
        jaxmp.autocats  # noqa: B018


def test_building_functions_starts_no_backend():
    assert printed()["devices"] == ["3"]


def test_every_public_name_is_documented_with_an_example():
    for name in dir(jaxmp):
        thing = getattr(jaxmp, name)
        if name.startswith("_") or isinstance(thing, type(sys)):
            continue
        assert thing.__doc__, name
        if not isinstance(thing, type):
            assert ">>> " in (thing.__doc__ if callable(thing) else type(thing).__doc__)
