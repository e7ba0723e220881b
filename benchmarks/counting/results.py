"""How benchmarks keep what they measured, and show it.

A benchmark saves rows, with all that is needed to make them again. What it shows are
tables of what is saved: on the terminal, and on ``benchmarks/tables.md``.
"""

import datetime
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from rich import console, table

import jaxmp

# Those that the documentation quotes. Without `--save`, a run leaves them as they are.
FOLDER = pathlib.Path(__file__).parents[1] / "results"
SCRATCH = pathlib.Path(tempfile.gettempdir()) / "jaxmp_benchmarks"
LIBRARIES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "jmp",
    "mixed-precision-for-JAX",
    "equinox",
    "torch",
)

_command, _folder = "", SCRATCH


def begin(arguments: Sequence[str], *, saves: bool = False) -> None:
    """Says which command measures from now on, and whether its results are kept."""
    global _command, _folder
    _command = shlex.join(["python", "-m", "benchmarks", *arguments])
    _folder = FOLDER if saves else SCRATCH


def is_saving() -> bool:
    """Whether what is measured is to be kept, as `--save` says."""
    return _folder == FOLDER


def target(name: str) -> pathlib.Path:
    """Returns the file that the results of a benchmark are written to."""
    return _folder / f"{name}.json"


def read(name: str, *, kept: bool = False) -> dict[str, Any]:
    """Returns the results of a benchmark by their titles: the last, or those kept."""
    path = FOLDER / f"{name}.json" if kept else target(name)
    return json.loads(path.read_text()) if path.exists() else {}


def save(name: str, title: str, hardware: str, rows: Any) -> None:
    """Puts results into a JSON file, with all that is needed to make them again.

    Args:
        name: The file. What it holds under other titles stays.
        title: That of the results in it.
        hardware: What was measured on.
        rows: The results.
    """
    found = read(name) | {
        title: {
            "command": _command,
            "date": datetime.date.today().isoformat(),
            "hardware": hardware,
            "versions": {"python": platform.python_version()} | _versions(),
            "rows": rows,
        }
    }
    path = target(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Put in place as a whole, because a program may be killed while it writes.
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(found, indent=1) + "\n")
    new.replace(path)


def update(
    name: str, title: str, hardware: str, new: Iterable[dict[str, Any]], *by: str
) -> None:
    """Saves rows one at a time, each in the place of the one that it counts anew.

    So a run that is broken off goes on with what it had not come to.

    Args:
        name: As for :func:`save`.
        title: The same.
        hardware: The same.
        new: The rows, which may be counted while they are asked for.
        *by: The fields by which rows are told apart.
    """

    def key(row):
        return tuple(row[field] for field in by)

    rows = {key(row): row for row in read(name).get(title, {"rows": []})["rows"]}
    for row in new:
        rows[key(row)] = row
        save(name, title, hardware, [*rows.values()])
        print(f"{title}: {', '.join(map(str, key(row)))}", flush=True)


def hardware() -> str:
    """Describes the processor, and the GPU if there is one."""
    name = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        models = [x.partition(":")[2].strip() for x in lines if "model name" in x]
        name = next(iter(models), name)
    devices = [d.device_kind for d in jax.devices() if d.platform != "cpu"]
    return ", ".join([f"{name}, {os.cpu_count()} cores", *devices])


def _versions() -> dict[str, str]:
    found = {"jaxmp": jaxmp.__version__}  # which need not be installed
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


class Table(NamedTuple):
    """Rows that have the same columns, and what they were made of."""

    heading: str  # as Markdown, with what is said before the table; may be empty
    rows: Sequence[Mapping[str, Any]]
    source: Sequence[Mapping[str, Any]] = ()  # results, of which the rows were made

    def markdown(self) -> str:
        """Returns the table as Markdown, under its heading."""
        if not self.rows:
            return self.heading
        cells = [[*map(spelled, row.values())] for row in self.rows]
        lines = [[*self.rows[0]], ["---"] * len(cells[0]), *cells]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{self.heading}\n{table}\n".removeprefix("\n")

    def show(self) -> None:
        """Prints the table."""
        title = self.heading.strip("# \n").partition("\n")[0]
        shown = table.Table(title=title, title_justify="left")
        for i, name in enumerate(self.rows[0] if self.rows else ()):
            shown.add_column(name, justify="right" if i else "left")
        for row in self.rows:
            shown.add_row(*map(spelled, row.values()))
        console.Console(width=132).print(shown)


def show(tables: Iterable[Table]) -> None:
    """Prints the tables of what the command has measured."""
    for one in tables:
        if one.rows and any(x["command"] == _command for x in one.source):
            one.show()


def page(tables: Iterable[Table]) -> Iterator[str]:
    """Yields tables as Markdown, and the commands behind those that they have made."""
    for one, after in itertools.pairwise([*tables, None]):
        assert one
        yield one.markdown()
        if one.source and not (after and after.source == one.source):
            yield _told(one.source)


def by_form(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the rows of each network by their form."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["network"], {})[row["form"]] = row
    return found


def spelled(cell: Any) -> str:
    """Spells a cell: numbers in short, and the quartiles behind their median."""
    if isinstance(cell, Mapping):
        return f"{cell['median']:.2f} ({cell['low']:.2f} to {cell['high']:.2f})"
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return "" if cell is None else str(cell)


def ratio(x: float | None, of: float | None) -> str:
    """Spells a ratio, if both numbers are there."""
    return "" if x is None or of is None else f"{x / of:.2f}"


def _told(found: Sequence[Mapping[str, Any]]) -> str:
    """Says which commands made a table, when, on what and with which versions."""
    commands = dict.fromkeys(x["command"] for x in found)
    dates = sorted({x["date"] for x in found})
    versions = found[0]["versions"]
    names = [f"{x} {versions[x]}" for x in ("jax", "flax", "optax") if x in versions]
    made = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    lines = "\n".join(f"    {x}" for x in commands)
    hardware = "; ".join(dict.fromkeys(x["hardware"] for x in found))
    return f"{lines}\n\n({hardware}; {', '.join(names)}; {made}.)\n"
