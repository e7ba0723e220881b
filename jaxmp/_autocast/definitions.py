"""Who computes a value, and what it was before it was moved."""

from collections.abc import Iterable
from typing import Any

from .._jaxprs.jaxpr import Equation, Literal, is_cast
from .._ops.lists import Definition
from . import classes


def definitions_of(eqns: Iterable[Equation]) -> Definition:
    """Returns what tells which of the equations computes a variable, None if none."""
    made = {var: eqn for eqn in eqns for var in eqn.outvars}
    return lambda atom: None if isinstance(atom, Literal) else made.get(atom)


def unmoved(atom: Any, definition: Definition) -> Any:
    """Returns what ``atom`` is, before it was moved or cast."""
    while (eqn := definition(atom)) is not None and len(eqn.invars) == 1:
        if not classes.is_view(eqn) and not is_cast(eqn):
            break
        (atom,) = eqn.invars
    return atom
