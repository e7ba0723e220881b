"""``python -m jaxmp audit file.py:step``: a report on the command line, and for CI."""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import jaxmp

from ._base.checks import short
from ._diagnosis.audit.compiled import NotForGpuError

_COMMANDS = {  # both trace the function, and run nothing of it
    "audit": "Reports the dtypes of the matmuls of a function, and why not 16-bit.",
    "explain": "Reports the dtype of each line of a function, and why it is that.",
}
_FUNCTION = "`file.py:name`, `file.py:object.name` or `package.module:name`"
_ARGS = (
    "its arguments: a function without arguments that returns them, or a constant. A "
    "tuple is the positional arguments, a dict the keyword arguments. Arrays may be "
    "`jax.ShapeDtypeStruct`"
)
_AT_LEAST = (
    "exit with status 1 if less than this share of the FLOPs of matmuls and "
    "convolutions is in 16 bits"
)
_FAIL_ON_HAZARDS = (
    "exit with status 1 if the report has numerical risks: matmuls that are wrong in "
    "16 bits, or may lose digits, and numbers that become 0 or Inf"
)
_COMPILED = (
    "compile the function for the default device, and report what the code of that GPU "
    "does"
)
_EXAMPLE = "python -m jaxmp %s train.py:step --args train.py:example"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, and returns what the process is to end with.

    Args:
        argv: The words of the command line; None for those of this process.

    Returns:
        0, or 1 if less than ``--at-least`` is in 16 bits, or there are numerical risks
        and ``--fail-on-hazards``. A command that cannot be understood ends with 2, as
        ``argparse`` has it.
    """
    parser = argparse.ArgumentParser("python -m jaxmp")
    commands = parser.add_subparsers(required=True, dest="command")
    for name, about in _COMMANDS.items():
        said: Any = {"help": about, "description": f"{about} Nothing of it runs."}
        command = commands.add_parser(name, **said, epilog=_EXAMPLE % name)
        command.add_argument("function", help=_FUNCTION)
        command.add_argument("--args", metavar="FILE:NAME", help=_ARGS)
    audit = commands.choices["audit"]
    audit.add_argument("--at-least", metavar="PERCENT", type=float, help=_AT_LEAST)
    audit.add_argument("--fail-on-hazards", action="store_true", help=_FAIL_ON_HAZARDS)
    audit.add_argument("--compiled", action="store_true", help=_COMPILED)
    given = parser.parse_args(argv)
    try:
        fun, args, kwargs = _call(given.function, given.args)
        if given.command == "audit" and given.compiled:
            report = _compiled(given, fun, args, kwargs)
        else:
            report = getattr(jaxmp, given.command)(fun)(*args, **kwargs)
    except _WrongError as error:
        commands.choices[given.command].error(str(error))
    print(report)
    problems = [*_problems(given, report)] if given.command == "audit" else []
    for problem in problems:
        print(f"\n{problem}")
    return int(bool(problems))


def _compiled(
    given: argparse.Namespace, fun: Any, args: Any, kwargs: Any
) -> jaxmp.CompiledReport:
    """Compiles a function, by its own options if it is jitted, and audits the code."""
    if given.fail_on_hazards:
        raise _WrongError(
            "`--fail-on-hazards` reads the function, and `--compiled` its code. Type "
            "two commands."
        )
    if not isinstance(fun, (jax.stages.Compiled, jax.stages.Lowered)):
        fun = fun if hasattr(fun, "lower") else jax.jit(fun)
        fun = fun.lower(*args, **kwargs)
    try:
        return jaxmp.audit(fun)
    except NotForGpuError as error:
        raise _WrongError(str(error)) from None


def _problems(given: argparse.Namespace, report: Any) -> Iterator[str]:
    """Yields what an audit has found that the command was told to fail on."""
    if given.at_least is not None:
        percent = 100 * report.fraction_16bit
        if not report.flops:
            yield f"`{given.function}` has no matmul, and nothing to count."
        elif percent < given.at_least:
            yield (
                f"{percent:.2f}% of the FLOPs are in 16 bits, and at least "
                f"{given.at_least:g}% were asked for."
            )
    if given.fail_on_hazards and report.hazards:
        kinds = ", ".join(dict.fromkeys(row.kind for row in report.hazards))
        yield f"The audit found numerical risks ({kinds}), and none were allowed."


class _WrongError(Exception):
    """Something on the command line that is not there, or not what is asked for."""


def _call(function: str, arguments: str | None) -> tuple[Callable[..., Any], Any, Any]:
    """Returns a function, and the positional and keyword arguments to call it with."""
    fun = _named(function)
    if not callable(fun):
        raise _WrongError(f"`{function}` must be a function, but is {short(fun)}.")
    found = () if arguments is None else _named(arguments)
    if callable(found) and not isinstance(found, (tuple, dict)):
        found = found()
    args = () if isinstance(found, dict) else found
    args = args if isinstance(args, tuple) else (args,)
    kwargs = found if isinstance(found, dict) else {}
    try:
        inspect.signature(fun).bind(*args, **kwargs)
    except TypeError as error:
        cure = f"`{arguments}` gives others."
        if arguments is None:
            cure = (
                "Name a function that returns its arguments: "
                f"`--args {function.partition(':')[0]}:example`."
            )
        raise _WrongError(
            f"`{function}` takes `{inspect.signature(fun)}`: {error}. {cure}"
        ) from None
    except ValueError:  # has no signature, and will say itself what is wrong
        pass
    return fun, args, kwargs


def _named(text: str) -> Any:
    """Imports a file or a module, and returns what has a name there."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise _WrongError(
            f"`{text}` must name a file and what is in it, such as `train.py:step`."
        )
    thing = _module(place)
    for part in name.split("."):
        if not hasattr(thing, part):
            there = [other for other in dir(thing) if not other.startswith("_")]
            near = difflib.get_close_matches(part, there, 3) or sorted(there)[:9]
            meant = f" Did you mean {', '.join(near)}?" if near else ""
            raise _WrongError(f"`{place}` has no `{name}`.{meant}")
        thing = getattr(thing, part)
    return thing


def _module(place: str) -> Any:
    """Imports ``train.py``, or a module by its dotted name, as Python itself would."""
    if not place.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if not f"{place}.".startswith(f"{error.name}."):
                raise  # the module is there, and one that it imports is not
            raise _WrongError(
                f"There is no module `{place}`. Name a file, such as `train.py:step`."
            ) from None
    path = os.path.abspath(place)
    if not os.path.exists(path):
        raise _WrongError(f"There is no file `{place}` in {os.getcwd()}.")
    for module in [*sys.modules.values()]:
        if getattr(module, "__file__", None) == path:
            return module
    name = os.path.basename(path).removesuffix(".py")
    name = f"{name}_" if name in sys.modules else name
    sys.path.insert(0, os.path.dirname(path))
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
