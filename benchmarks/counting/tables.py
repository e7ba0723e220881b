"""Tables of results on the terminal."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def show(title: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Prints rows that have the same keys, their columns."""
    rows = list(rows)
    if not rows:
        return
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*(text(value) for value in row.values()))
    Console(width=132).print(table)


def text(value: Any) -> str:
    """Spells a cell: numbers in short, and the quartiles behind their median."""
    if isinstance(value, Mapping):
        return f"{value['median']:.3g} ({value['low']:.3g} to {value['high']:.3g})"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 0.01 else f"{value:.4g}"
    return "-" if value is None else str(value)
