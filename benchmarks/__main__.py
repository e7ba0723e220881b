"""Runs one benchmark: ``python -m benchmarks price``."""

import ast
import importlib
import pathlib
import sys

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


def main() -> None:
    """Runs the benchmark that the command line names."""
    name, *arguments = sys.argv[1:] or [""]
    if name not in commands():
        listed = (f"  {name:12} {line}" for name, line in commands().items())
        raise SystemExit("\n".join((USAGE, *listed)))
    try:
        from .counting import results

        if "--save" in arguments:
            arguments.remove("--save")
            results.write_to(results.FOLDER)
        benchmark = importlib.import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        raise SystemExit(f"{name} is short of a library: {error}") from None
    benchmark.main(arguments)


if __name__ == "__main__":
    main()
