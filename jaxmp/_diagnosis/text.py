"""The text of reports: wrapped to 80 columns, and in tables."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from .._jaxprs.places import short_line

F = TypeVar("F", bound=Callable)
WIDTH = 80
# For those who pass a model in the place of a function.
PASS_THE_LOSS = "Pass the loss, a function that calls `model.apply(params, x)`."


def as_lists(x: Any) -> Any:
    """Returns data of dicts and tuples with lists for the tuples, as JSON has them."""
    if isinstance(x, dict):
        return {key: as_lists(value) for key, value in x.items()}
    x = "inf" if x == float("inf") else x  # which JSON does not know
    return [*map(as_lists, x)] if isinstance(x, (tuple, list)) else x


def paragraphs(*parts: Iterable[str]) -> Iterator[str]:
    """Yields the lines of the parts that have any, an empty line between two parts."""
    is_first = True
    for lines in filter(None, map(list, parts)):
        yield from lines if is_first else ["", *lines]
        is_first = False


def notes(report: Any) -> Iterator[str]:
    for note in report.notes:
        yield from wrapped(f"note: {note}", "", "  ")


def more(rows: Sequence[Any], shown: int, name: str) -> list[str]:
    """Returns the line that says where the rows are that are not shown, if any."""
    left = len(rows) - shown
    return [f"  and {left} more in `report.{name}`"] if left > 0 else []


def table(
    rows: Sequence[tuple[str, str, Any]], shown: int, name: str = ""
) -> Iterator[str]:
    """Aligns columns; where they find no room, the last two have lines of their own.

    A row is a number, a text, and something with a module and a line of code, two more
    columns. Of rows that are not ``shown`` it says the field ``name`` of the report.
    """
    cells = [(n, text, x.module, short_line(x.where)) for n, text, x in rows[:shown]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if sum(widths) + 2 * len(widths) <= WIDTH:
        widths[:1] = [-width for width in widths[:1]]
        yield from map(str.rstrip, aligned(cells, widths, first="  "))
        cells = []
    for number, text, *place in cells:
        indent = " " * (widths[0] + 4)
        yield from wrapped(text, f"  {number:>{widths[0]}}  ", indent)
        yield from wrapped("  ".join(filter(None, place)), indent, indent)
    yield from more(rows, shown, name) if name else ()


def aligned(
    rows: Iterable[Sequence[str]],
    widths: Sequence[int],
    gap: str = "  ",
    first: str = "",
) -> Iterator[str]:
    """Yields rows in columns, behind ``first``; a column of no width is left out.

    A negative width aligns to the right. A name at the beginning of a row that is
    longer than its column has lines of its own: it is not cut.
    """
    for name, *rest in rows:
        if len(name) > abs(widths[0]):
            yield from wrapped(name, first, first)
            name = ""
        cells = zip((name, *rest), widths, strict=True)
        yield first + gap.join(f"{x:{'<>'[n < 0]}{abs(n)}}" for x, n in cells if n)


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


def numbered(names: Iterable[str]) -> list[str]:
    """Gives a number to each name that comes again: ``h``, ``h#1``."""
    given = {}  # a dict keeps the order
    for name in names:
        choices = itertools.chain([name], (f"{name}#{i}" for i in itertools.count(1)))
        given[next(choice for choice in choices if choice not in given)] = None
    return list(given)


def unit(number: float, base: int) -> str:
    """Spells a number with a prefix for its power of 1000 or 1024."""
    binary = base == 1024
    prefixes = ["", "Ki", "Mi", "Gi", "Ti"] if binary else ["", "k", "M", "G", "T"]
    power = 0
    while number >= base and power < len(prefixes) - 1:
        number, power = number / base, power + 1
    return f"{number:.4g} {prefixes[power]}"


def uncalled(name: str, fun: Callable, reports: F) -> F:
    """Returns ``reports``; printed before it is called, it says what is missing."""
    of = getattr(fun, "__name__", type(fun).__name__)
    # What Python prints of a function.
    reports.__qualname__ = (
        f"jaxmp.{name}({of}), to be called with the arguments of {of},"
    )
    return reports
