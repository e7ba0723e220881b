"""Runs one benchmark: ``python -m benchmarks autocast``."""

import importlib
import pathlib
import sys


def main() -> None:
    """Runs the benchmark that the command line names."""
    folder = pathlib.Path(__file__).parent
    names = [p.stem for p in folder.glob("*.py") if "def main(" in p.read_text()]
    names = sorted(set(names) - {"__main__"})
    if sys.argv[1:2] not in [[name] for name in names]:
        raise SystemExit(f"usage: python -m benchmarks {{{','.join(names)}}} [options]")
    try:
        benchmark = importlib.import_module(f"benchmarks.{sys.argv[1]}")
    except ModuleNotFoundError as error:
        raise SystemExit(f"{sys.argv[1]} is short of a library: {error}") from None
    benchmark.main(sys.argv[2:])


if __name__ == "__main__":
    main()
