"""The text of reports: wrapped to 80 columns, in tables, and as Jupyter shows it."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator
from typing import Any

WIDTH = 80


def as_html(report: Any) -> str:
    """Returns the text of a report as Jupyter shows it at the end of a cell."""
    return f"<pre>{html.escape(str(report))}</pre>"


def table(cells: list[tuple[str, ...]]) -> Iterator[str]:
    """Aligns columns; where they find no room, the last two have lines of their own.

    The columns are a number, a text, a module and a line of code.
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    fits = sum(widths) + 2 * len(widths) <= WIDTH
    for row in cells:
        first, *rest = map(str.ljust, row, widths)
        first = first.strip().rjust(widths[0])
        if fits:
            yield f"  {'  '.join([first, *filter(str.strip, rest)])}".rstrip()
            continue
        indent = " " * (widths[0] + 4)
        yield from wrapped(row[1], f"  {first}  ", indent)
        yield from wrapped("  ".join(filter(None, row[2:])), indent, indent)


def wrapped(
    text: str, first: str = "", rest: str = "", *, is_code: bool = False
) -> list[str]:
    """Returns the lines of a text, each behind its indent; no word of code is cut."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=not is_code,
        break_on_hyphens=False,
    )
