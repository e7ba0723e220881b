"""How many planted faults `jaxmp.find_overflow` names, and its advice cures.

Random small programs with one fault each, and sound ones: see
`benchmarks.networks.planted`.
Needs no GPU. `docs/performance.md` has the table.
"""

import dataclasses
from collections import Counter
from typing import Any

import tyro

from .counting import results
from .counting.tables import show
from .networks import planted


@dataclasses.dataclass
class Options:
    """How many programs of each kind to try."""

    programs: int = 24


def count(kind: str, programs: int) -> dict[str, Any]:
    """Searches random programs of a kind.

    A fault that 16 bits do not feel is none, and its program is left out: autocast
    keeps most numbers in float32, for one.
    """
    found = Counter()
    for seed in range(programs):
        program = planted.program(kind, seed)
        if planted.is_faulty(program) == (kind == planted.NOTHING):
            continue
        report = program.search()
        found["programs"] += 1
        found["named"] += planted.names_it(program, report)
        if kind != planted.NOTHING:
            found["cured"] += planted.is_cured(program, report)
    cured = None if kind == planted.NOTHING else found["cured"]
    row = {"planted": kind, "programs": found["programs"], "named": found["named"]}
    return row | {"cured": cured}


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the table of the docs."""
    lines = ["| Planted | Programs | Named | Cured |", "|---|---|---|---|"]
    for row in rows:
        cells = [row["planted"], row["programs"], row["named"], row["cured"]]
        shown = ["-" if x is None else str(x) for x in cells]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    """Prints a table of counts, and saves it."""
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks faults")
    rows = [count(kind, options.programs) for kind in planted.KINDS]
    show("planted faults", rows)
    print(table(rows))
    command = ["faults", *arguments]
    results.save(
        results.target("faults"), "planted faults", results.hardware(), command, rows
    )
