"""Which variables are computed in the same way, in code that was written twice."""

from collections.abc import Sequence
from typing import Any

from ._jaxpr import Equation, Literal


def twins(eqns: Sequence[Equation]) -> dict[Any, Any]:
    """Returns for each computed variable the first that is computed in the same way.

    Args:
        eqns: The equations of a jaxpr.
    """
    found: dict[Any, Any] = {}
    seen: dict[Any, Any] = {}
    for eqn in eqns:
        ins = (
            (str(x.val), x.aval) if isinstance(x, Literal) else found.get(x, x)
            for x in eqn.invars
        )
        key = eqn.primitive, tuple(sorted(eqn.params.items())), tuple(ins)
        try:
            first = seen.setdefault(key, eqn.outvars)
        except TypeError:  # a parameter that cannot be compared
            first = eqn.outvars
        found.update(zip(eqn.outvars, first, strict=True))
    return found
