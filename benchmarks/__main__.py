"""Runs one benchmark: ``python -m benchmarks autocast``."""

import importlib
import pathlib
import sys


def main() -> None:
    """Runs the benchmark that the command line names."""
    folder = pathlib.Path(__file__).parent
    names = [p.stem for p in folder.glob("*.py") if "def main(" in p.read_text()]
    names = sorted(set(names) - {"__main__"})
    arguments = sys.argv[1:]
    if arguments[:1] not in [[name] for name in names]:
        raise SystemExit(f"usage: python -m benchmarks {{{','.join(names)}}} [options]")
    try:
        benchmark = importlib.import_module(f"benchmarks.{arguments[0]}")
    except ModuleNotFoundError as error:
        raise SystemExit(f"{arguments[0]} is short of a library: {error}") from None
    benchmark.main(arguments[1:])


if __name__ == "__main__":
    main()
