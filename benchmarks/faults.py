"""How many planted faults `jaxmp.find_overflow` names, and its advice fixes.

Random small programs with one fault each, and sound ones: see
`benchmarks.networks.planted`.
Needs no GPU. `docs/performance.md` has the table.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from .counting import results
from .counting.results import Table
from .networks import planted


def main(*, programs: int = 24) -> None:
    """Counts faults by their kind.

    Args:
        programs: How many of each kind to try.
    """
    new = (count(kind, programs) for kind in planted.KINDS)
    results.update("faults", "planted faults", results.hardware(), new, "planted")


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
            found["fixed"] += planted.is_cured(program, report)
    fixed = None if kind == planted.NOTHING else found["fixed"]
    row = {"planted": kind, "programs": found["programs"], "named": found["named"]}
    return row | {"fixed": fixed}


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yields the table of the docs."""
    for title, result in found.items():
        rows = [
            {k.capitalize(): "-" if x is None else x for k, x in row.items()}
            for row in result["rows"]
        ]
        yield Table(f"## {title}\n", rows, [result])
