"""Writes down how autocast runs each operation of many programs, to compare later.

The file is read in a diff: a change of a rule, or of the code that follows them,
shows which operations of which programs run otherwise. The programs are the networks of
``price`` in small, those of ``tests/programs``, and generated ones, each as a loss and
its gradients.
"""

import collections
import functools
import importlib
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
from jaxmp._autocast import needs
from jaxmp._autocast.plan import Planner
from jaxmp._jaxprs.jaxpr import is_float32
from jaxmp._ops.precision import own_precisions

from .counting import results
from .counting.steps import loss_of
from .counting.targets import JAXLIB as NEWEST
from .generated import drawn
from .generated import loss_of as generated_loss_of
from .networks.families import SMALL
from .networks.generated_layers import Asked, batch_of

ROOT = pathlib.Path(__file__).parents[1]
FILE = ROOT / "tests" / "autocast" / "golden.txt"
# The last JAX for Python 3.11, and what it runs otherwise.
OLDER = "0.10.2"
DIFFERENCES = FILE.with_name(f"golden_on_{OLDER}.txt")
PROGRAMS = ROOT / "tests" / "programs"
COMMAND = "python -m benchmarks golden --save"
DTYPES = "bfloat16", "float16"
GENERATED = 100  # programs, of at most so many layers
LAYERS = 2

HEAD = f"""\
How autocast runs each operation of the loss and the gradients of many programs: the
operation, the dtype of its result, the rule or the guard that says so (see
docs/rules.md), and how many there are of them. `16` is computed in 16 bits, `16
rounded` in float32 and rounded once, `16 stored` in float32 and stored in 16 bits, `32`
in float32. Where bfloat16 and float16 differ there is a number for each. A layer that
JAX shares is counted once.

Written by `{COMMAND}` with JAX {NEWEST}.
"""
DIFFERENCES_HEAD = f"""\
What `{FILE.name}` says of JAX {NEWEST} (-), and what JAX {OLDER} does in its place (+).
JAX writes some derivatives in other operations there.

Written by `{COMMAND}` with JAX {OLDER}, after the other file.
"""

# A function and what it is called with.
Call = tuple[Callable, tuple]
HOW = {
    "float32": "32",
    "half": "16",
    "rounded": "16 rounded",
    "stored": "16 stored",
}


def programs() -> dict[str, Callable[[], Call]]:
    """Returns what builds each program, by its name."""
    found = {f"network {name}": functools.partial(_network, name) for name in SMALL}
    found |= {f"program {name}": x for name, x in _libraries()}
    found |= {
        f"generated {seed}": functools.partial(_generated, seed)
        for seed in range(GENERATED)
    }
    return found


def _network(name: str) -> Call:
    """Returns the step of a small network."""
    network, key = SMALL[name], jax.random.key(0)
    x, y = network.shapes()
    variables = jax.eval_shape(network.model.init, key, x)
    args = variables["params"], variables.get("batch_stats", {}), x, y
    return jax.value_and_grad(loss_of(network.model.apply), has_aux=True), args


def _libraries() -> Iterator[tuple[str, Callable[[], Call]]]:
    """Yields the steps of the programs in ``tests/programs``."""
    if str(PROGRAMS) not in sys.path:
        sys.path.insert(0, str(PROGRAMS))
    for path in sorted(PROGRAMS.glob("test_*_programs.py")):
        importlib.import_module(path.stem)
    builders = importlib.import_module("laws").BUILDERS
    # In the order of their files, whoever imported them before.
    for build in sorted(builders, key=lambda build: build.__module__):
        library = build.__module__.removeprefix("test_").removesuffix("_programs")
        yield f"{library}, {build.__name__}", functools.partial(_program, build)


def _program(build: Callable[[], Any]) -> Call:
    program = build()
    grad_fn = jax.value_and_grad(program.loss, has_aux=program.has_aux)
    return grad_fn, program.args


def _generated(seed: int) -> Call:
    """Returns a training step that was drawn."""
    program, asked = drawn(seed, LAYERS), dict[str, Asked]()
    batch = batch_of(np.random.default_rng(seed))
    jax.eval_shape(generated_loss_of(program, lambda x: x, asked), {}, batch)
    weights = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, (shape, _, _) in asked.items()
    }
    return jax.value_and_grad(generated_loss_of(program, lambda x: x)), (weights, batch)


def rows(build: Callable[[], Call]) -> list[str]:
    """Returns what autocast decides of a program, equal decisions counted."""
    fun, args = build()
    leaves, tree = jax.tree.flatten(args)
    # Traced once, as autocast does it.
    with jax.softmax_custom_jvp(True), own_precisions():
        jaxpr = jax.make_jaxpr(lambda *xs: fun(*tree.unflatten(xs)))(*leaves)
    found: dict[str, collections.Counter[str]] = {}
    for dtype in DTYPES:
        planner = Planner(jnp.dtype(dtype), jaxmp.DEFAULT_OPS)
        plan = planner.program(jaxpr, needs.FULL | needs.DIGITS)
        # What is not float32 leaves nothing to decide.
        found[dtype] = collections.Counter(
            f"{step.eqn.primitive.name} {HOW[step.how]} ({step.rule})"
            for step in plan.all_steps()
            if step.inside is None and any(map(is_float32, step.eqn.outvars))
        )
    return [
        f"{row} x {_times([found[dtype][row] for dtype in DTYPES])}"
        for row in sorted(set().union(*found.values()))
    ]


def _times(counts: list[int]) -> str:
    if len(set(counts)) == 1:
        return str(counts[0])
    named = (f"{count} in {x}" for x, count in zip(DTYPES, counts, strict=True))
    return ", ".join(named)


def text_of(head: str, found: dict[str, list[str]]) -> str:
    """Returns a file of the rows of each program."""
    blocks = ("\n".join((f"# {name}", *lines)) for name, lines in found.items())
    return "\n\n".join((head.strip(), *blocks)) + "\n"


def read(version: str = jax.__version__) -> dict[str, list[str]]:
    """Returns the rows of each program that the files say of a version of JAX.

    Args:
        version: That of JAX. One of which they say nothing is taken for the newest.
    """
    found = _blocks(FILE)
    if version == OLDER:
        for name, lines in _blocks(DIFFERENCES).items():
            gone = {line[2:] for line in lines if line.startswith("-")}
            kept = [row for row in found.get(name, ()) if row not in gone]
            new = [line[2:] for line in lines if line.startswith("+")]
            found[name] = kept + new
    return found


def _blocks(file: pathlib.Path) -> dict[str, list[str]]:
    _, *blocks = file.read_text().split("\n\n# ") if file.exists() else [""]
    found = (block.strip().splitlines() for block in blocks)
    return {name: lines for name, *lines in found}


def changes(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Returns the rows that differ, with a minus or a plus."""
    gone = [f"- {row}" for row in before if row not in now]
    return gone + [f"+ {row}" for row in now if row not in before]


def differences(
    before: dict[str, list[str]], now: dict[str, list[str]]
) -> dict[str, list[str]]:
    """Returns what differs in each program in which something does."""
    found = {x: changes(before.get(x, ()), now.get(x, ())) for x in before | now}
    return {name: changed for name, changed in found.items() if changed}


def main() -> None:
    """Prints what differs from the files, and with ``--save`` writes that of this JAX.

    Where a decision changes, both are to be written, that of the newest JAX first.
    """
    if jax.__version__ not in (NEWEST, OLDER):
        raise SystemExit(
            f"The files are of JAX {NEWEST} and {OLDER}, and here is "
            f"{jax.__version__}: `pip install jax=={NEWEST}`."
        )
    now = {name: rows(build) for name, build in programs().items()}
    for name, changed in differences(read(), now).items():
        print("\n".join((f"# {name}", *changed, "")))
    if results.is_saving():
        if jax.__version__ == NEWEST:
            file, text = FILE, text_of(HEAD, now)
        else:
            changed = differences(read(NEWEST), now)
            file, text = DIFFERENCES, text_of(DIFFERENCES_HEAD, changed)
        file.write_text(text)
        print(f"{len(now)} programs are in {file}")
