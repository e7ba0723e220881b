"""Which packages import which, and what importing jaxmp loads."""

import ast
import functools
import inspect
import itertools
import os
import pickle
import pydoc
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmp

PACKAGE = Path(jaxmp.__file__).parent

# Each package may import those before it. What one asks of those after it goes through
# `_base/later`.
PACKAGES = (
    "_base",
    "_training",
    "_gradients",
    "_optimizers",
    "_devices",
    "_jaxprs",
    "_ops",
    "_attention",
    "_head",
    "_residuals",
    "_autocast",
    "_compiled",
    "_diagnosis",
)
# Each house with its packages and the lines that it may have, docstrings and comments
# too: more of them need a reason.
HOUSES = {
    "core": ("_base _training _gradients", 4_000),
    "optimizers": ("_optimizers", 1_150),
    "devices": ("_devices", 860),
    "engine": ("_jaxprs _ops _attention _head _autocast", 10_466),
    "residuals": ("_residuals", 790),
    "tools": ("_compiled _diagnosis", 9_601),
}
CORE = {"_base", "_training", "_gradients"}
LATER = "_base.later"
# What the tools read of autocast: the record of a plan, its rules, and what to call.
RECORD = {
    "_autocast.autocast",
    "_autocast.emit",
    "_autocast.graph",
    "_autocast.needs",
    "_autocast.plan",
    "_autocast.rules",
}
FRONT_ENDS = {"linen", "nnx", "plots"}


@functools.cache
def sources():
    """Returns the file of each module of jaxmp by its dotted name."""
    files = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        files[".".join(parts).removesuffix(".__init__")] = path
    return files


def imported(source, path):
    """Yields each module of jaxmp that a module imports, and what it takes from it."""
    around = path.relative_to(PACKAGE).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = around[: len(around) - node.level + 1]
            module = ".".join((*parts, *filter(None, [node.module])))
            for alias in node.names:
                whole = f"{module}.{alias.name}".lstrip(".")
                yield (whole, None) if whole in sources() else (module, alias.name)


def imports(path):
    """Yields the modules that a file imports, relative ones with their dot."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is None:
            yield from ("." + alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + node.module


@pytest.mark.parametrize("house", HOUSES)
def test_a_house_does_not_grow(house):
    packages, most = HOUSES[house]
    inside = packages.split()
    paths = (x for name, x in sources().items() if name.split(".")[0] in inside)
    assert sum(len(path.read_text().splitlines()) for path in paths) <= most


def test_each_module_is_in_a_package():
    others = {*FRONT_ENDS, "_names", "_on_demand", "_version", "__init__", "__main__"}
    assert {source.split(".")[0] for source in sources()} == {*PACKAGES} | others


def test_each_package_is_in_a_house():
    assert sorted(" ".join(x for x, _ in HOUSES.values()).split()) == sorted(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_those_before_it(package):
    allowed = {*itertools.takewhile(lambda other: other != package, PACKAGES)}
    allowed |= {package, "_version"}
    for source, path in sources().items():
        if source.split(".")[0] == package and source != LATER:
            packages = {module.split(".")[0] for module, _ in imported(source, path)}
            assert packages <= allowed, source


def test_what_is_asked_of_later_packages_is_imported_by_the_call():
    tree = ast.parse(sources()[LATER].read_text())
    assert all(
        node.module == "typing" or node.module == "__future__"
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom))
    )


def test_the_core_stands_on_public_jax_alone():
    for source, path in sources().items():
        if source.split(".")[0] in CORE:
            private = ("jax._src", "jax.extend")
            assert not [x for x in imports(path) if x.startswith(private)], source


def test_tools_inherit_nothing_of_the_engine():
    for source, path in sources().items():
        if source.split(".")[0] == "_diagnosis":
            of_engine = {m for m, _ in imported(source, path) if m[:9] == "_autocast"}
            assert of_engine <= RECORD, source


def test_the_public_function_alone_knows_of_residuals_in_eight_bits():
    engine = HOUSES["engine"][0].split()
    readers = {
        source
        for source, path in sources().items()
        if source.split(".")[0] in engine
        and any(x.startswith("_residuals") for x, _ in imported(source, path))
    }
    assert readers == {"_autocast.autocast"}


def test_no_two_classes_have_one_name():
    names = [
        node.name
        for path in sources().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert len(names) > 100
    assert len(names) == len(set(names)), sorted(x for x in names if names.count(x) > 1)


def test_no_private_name_is_imported():
    for source, path in sources().items():
        for module, name in imported(source, path):
            is_private = (name or "").startswith("_") and not name.startswith("__")
            assert not is_private, (source, module, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_says_what_it_is_for(package):
    path = sources()[package]
    assert 3 <= len(path.read_text().splitlines()) <= 10
    assert not list(imports(path))


def test_the_page_on_how_jaxmp_is_built_names_what_there_is():
    page = (PACKAGE.parent / "docs" / "internals.md").read_text()
    assert re.findall(r"^\| [a-z]* ?\| `(_\w+)` \|", page, re.M) == [*PACKAGES]
    named = set(re.findall(r"`(_[a-z]+/[a-z_0-9/]+)`", page))
    assert len(named) > 10
    for place in named:
        path = PACKAGE / place
        assert path.is_dir() or path.with_suffix(".py").exists(), place
    listed = page.split("## The modules of autocast")[1].split("## What each")[0]
    rows = re.findall(r"^\| (`.*?) \|", listed, re.M)
    modules = set(re.findall(r"`(\w+)`", " ".join(rows)))
    inside = (source.split(".") for source in sources())
    assert modules == {x[1] for x in inside if x[0] == "_autocast" and x[1:]}


def test_what_is_not_public_in_jax_stays_in_one_file():
    for path in PACKAGE.rglob("*.py"):
        private = [m for m in imports(path) if m.startswith(("jax._src", "jax.extend"))]
        assert not private or path.stem == "jaxpr", (path.name, private)
        text = path.read_text()
        assert "jax.__version" not in text or path.stem == "jaxpr", path.name


def test_names_of_primitives_stay_in_the_table_of_them():
    from jaxmp._jaxprs.jaxpr import CALL_KINDS

    ops = jaxmp.DEFAULT_OPS
    names = ops.allow | ops.deny | ops.infer | CALL_KINDS.keys()
    lists = {"jaxpr", "table", "products"}
    readers = {
        path
        for source, path in sources().items()
        if "_jaxprs.jaxpr" in {module for module, _ in imported(source, path)}
    }
    assert {"leaks", "classes", "replay"} <= {p.stem for p in readers}
    for path in readers:
        nodes = ast.walk(ast.parse(path.read_text()))
        strings = {node.value for node in nodes if isinstance(node, ast.Constant)}
        found = strings & (names - set(CALL_KINDS.values()))
        assert not found or path.stem in lists, (path.name, found)


def test_the_files_that_trace_what_is_audited_are_there():
    from jaxmp._jaxprs.places import _REPLAYS, _TRACING

    assert all(map(os.path.exists, (*_TRACING, *_REPLAYS)))


# What a user may do one after the other. All in one interpreter, which takes seconds to
# import JAX.
SESSION = f"""
import jaxmp, sys
jaxmp.loss_scaling, jaxmp.value_and_grad
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


def test_who_asks_for_a_loss_scale_loads_the_core_alone():
    loaded = printed()["imported"]
    assert "optax" in loaded
    slow = {"flax.linen", "flax.nnx", "matplotlib", "jax.extend"}
    assert not slow & set(loaded)
    inside = {x.split(".")[1] for x in loaded if x.startswith("jaxmp.")}
    assert inside == CORE | {"_version"}


def test_all_names_everything_public_and_nothing_else():
    # Sorted, because people read it.
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


def test_public_classes_are_pickled_by_their_public_names():
    classes = [x for x in map(jaxmp.__dict__.get, jaxmp.__all__) if isinstance(x, type)]
    assert len(classes) > 15
    for public in (*classes, jaxmp.OpLists):
        assert public.__module__ == "jaxmp", public
        assert pickle.loads(pickle.dumps(public)) is public
    ops = jaxmp.DEFAULT_OPS.with_deny("tanh")
    assert pickle.loads(pickle.dumps(ops)) == ops
    policy = jaxmp.get_policy("mixed_float16")
    pickled = pickle.dumps((policy, jaxmp.OpLists))
    assert pickle.loads(pickled) == (policy, jaxmp.OpLists)
    assert b"jaxmp._" not in pickled


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


# The core, and what the front ends say, where their libraries are not installed.
WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("flax", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import jax, jax.numpy as jnp, optax, jaxmp

tx = jaxmp.loss_scaling(optax.adam(0.1), "mixed_float16")
params = {"w": jnp.ones((16, 16))}
state, x = tx.init(params), jnp.ones((16, 16))

@jax.jit
def step(params, state, x):
    grad_fn = jaxmp.value_and_grad(
        lambda p, x: jnp.mean((x @ p["w"]) ** 2),
        loss_scale=state, accum_steps=2, batch_argnums=1,
    )
    loss, grads = jaxmp.autocast(grad_fn, "mixed_float16")(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

params, state, loss = step(params, state, x)
assert loss == 256 and jaxmp.last_step_finite(state)
assert jaxmp.audit(step)(params, state, x).fraction_16bit == 1
str(jaxmp.explain(step)(params, state, x))
assert jaxmp.find_overflow(step)(params, state, x).first is None
jaxmp.sensitivity(lambda p, x: jnp.sum(x @ p["w"]), "mixed_float16")(params, x)
jaxmp.scalars(state), jaxmp.range_report(params), jaxmp.stochastic_rounding(tx)
assert not [x for x in sys.modules if x.split(".")[0] == "flax"]
for name in ("linen", "nnx", "plots"):
    try:
        getattr(jaxmp, name)
    except ModuleNotFoundError as error:
        print(error)
"""


def test_the_core_runs_without_flax_and_the_front_ends_say_what_to_install():
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True
    )
    assert run.stdout.splitlines() == [
        f"`jaxmp.{name}` needs {library}, which the rest of jaxmp does not. Install "
        f"it: pip install 'jaxmp[{extra}]'"
        for name, library, extra in [
            ("linen", "Flax", "flax"),
            ("nnx", "Flax", "flax"),
            ("plots", "matplotlib", "plot"),
        ]
    ], run.stderr
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    assert {"flax", "plot"} <= project["optional-dependencies"].keys()
    assert not [x for x in project["dependencies"] if x.startswith("flax")]


def test_help_is_a_page_with_a_program_and_every_public_name():
    text = pydoc.plain(pydoc.render_doc(jaxmp))
    page, listed = text.partition("\nFILE")[0].split("PACKAGE CONTENTS")
    assert len(page.splitlines()) < 45
    # What follows is one line for each package and each file beside them.
    assert len(listed.splitlines()) < len([*PACKAGES, *PACKAGE.glob("*.py")]) + 15
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


# What somebody sees of a slip, and what it has loaded by then.
SLIP = """
import atexit, sys, jaxmp
atexit.register(lambda: print(*sys.modules))
print(len(dir(jaxmp)), len(jaxmp.__all__))
jaxmp.{name}
"""


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("autocats", "no attribute 'autocats'. Did you mean: 'autocast'?"),
        ("GradScaler", "jaxmp has no `GradScaler`: the loss scale is in the state"),
    ],
)
def test_a_wrong_name_is_answered_by_the_core_alone(name, says):
    run = subprocess.run(
        [sys.executable, "-c", SLIP.format(name=name)], capture_output=True, text=True
    )
    assert says in run.stderr.splitlines()[-1]
    counts, loaded = map(str.split, run.stdout.splitlines())
    assert counts == [str(len(dir(jaxmp))), str(len(jaxmp.__all__))]
    inside = {x.split(".")[1] for x in loaded if x.startswith("jaxmp.")}
    assert inside == CORE | {"_version", "_names"}


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
