"""Writes the page with all results.

``benchmarks/tables.md`` is made from the files in ``benchmarks/results`` and nothing
else, so that no number in it is typed by hand.
"""

import importlib
import pathlib

from .counting import results

PAGE = pathlib.Path(__file__).with_name("tables.md")
SECTIONS = (
    "gpu",
    "machinery",
    "every_gpu",
    "fits",
    "attention",
    "price",
    "residuals",
    "host",
)

INTRODUCTION = """\
# All tables

`python -m benchmarks evidence` writes this page from the files in `benchmarks/results`.
[Performance](../docs/performance.md) says what follows from it.

*By hand* is a training step that casts the whole model with `astype`, has no loss scale
and skips no step. *N* is the number of parameters. All but the first section was
counted in code that was compiled for an H200 and not run, or measured on a CPU.
"""


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page())
    print(f"wrote {PAGE}")


def page() -> str:
    """Returns the page as Markdown."""
    sections = [INTRODUCTION]
    for name in SECTIONS:
        benchmark = importlib.import_module(f"benchmarks.{name}")
        sections += results.page(benchmark.tables(results.read(name, kept=True)))
    return "\n".join(sections)
