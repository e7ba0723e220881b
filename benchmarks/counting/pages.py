"""Pages of the documentation that a benchmark writes."""

import dataclasses
import pathlib
from collections.abc import Callable

import tyro


@dataclasses.dataclass
class Options:
    """Where to write the page."""

    output: pathlib.Path


def write(
    arguments: list[str], name: str, path: pathlib.Path, page: Callable[[], str]
) -> None:
    """Writes a page.

    Args:
        arguments: The command line after the name of the benchmark.
        name: That name.
        path: Where the page is, if the command line names no other file.
        page: Returns the page, as Markdown.
    """
    prog = f"python -m benchmarks {name}"
    options = tyro.cli(Options, args=arguments, prog=prog, default=Options(path))
    options.output.write_text(page())
    print(f"wrote {options.output}")
