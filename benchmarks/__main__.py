"""Runs one benchmark: ``python -m benchmarks price``."""

import ast
import importlib
import pathlib
import sys
from collections.abc import Sequence

USAGE = """usage: python -m benchmarks COMMAND [--save] [options]

Prints tables. What was measured is written to a scratch folder, with --save to
benchmarks/results. COMMAND --help lists the options.
"""


def commands() -> dict[str, str]:
    """Returns the first line of each benchmark that can be run, by its name."""
    found = {}
    for path in sorted(pathlib.Path(__file__).parent.glob("[!_]*.py")):
        code = ast.parse(path.read_text())
        if any(isinstance(x, ast.FunctionDef) and x.name == "main" for x in code.body):
            found[path.stem] = (ast.get_docstring(code) or "").splitlines()[0]
    return found


def main(arguments: Sequence[str]) -> None:
    """Runs the benchmark that a command line names, and shows what it has measured.

    A benchmark is a module with a function ``main``, whose parameters are the options
    on the command line. It may have another, ``tables``, of what is saved.
    """
    name, *options = arguments or [""]
    if name not in commands():
        listed = (f"  {name:12} {line}" for name, line in commands().items())
        raise SystemExit("\n".join((USAGE, *listed)))
    try:
        import tyro

        from .counting import results

        benchmark = importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        raise SystemExit(f"{name} is short of a library: {error}") from None
    saves = "--save" in options
    options = [x for x in options if x != "--save"]
    results.begin([name, *options], saves=saves)
    tyro.cli(
        benchmark.main,
        args=options,
        prog=f"python -m benchmarks {name}",
        description=benchmark.__doc__,
    )
    if hasattr(benchmark, "tables"):
        results.show(benchmark.tables(results.read(name)))
        print(f"saved to {results.target(name)}")


if __name__ == "__main__":
    main(sys.argv[1:])
