"""Gates in a row: what multiplies a number many times without a loop."""

from collections.abc import Iterator
from typing import Any

from ..._gates import gates_in_row
from ..._scopes import Scopes
from .. import needs
from ..needs import Need


def gates(jaxpr: Any, scopes: Scopes) -> Iterator[tuple[Any, Any, Need]]:
    """Yields the gates of which many multiply one another's results.

    As the trips of a loop do that is written out, or an ``associative_scan``.

    Args:
        jaxpr: The program.
        scopes: Named scopes around it.
    """
    for owner, var in gates_in_row(jaxpr, scopes):
        yield owner, var, needs.GATE
