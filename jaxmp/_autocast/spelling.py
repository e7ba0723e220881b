"""What tells two jaxprs apart that JAX has traced of the same lines."""

from collections.abc import Sequence
from typing import Any

from .._jaxprs import jaxpr as _jaxpr


def spelled(jaxpr: Any) -> Any:
    """Returns what ``jaxpr`` computes, and which lines wrote it, as one thing to hash.

    None if that cannot be told.

    Args:
        jaxpr: The jaxpr, open or closed.
    """
    body = _jaxpr.open_jaxpr(jaxpr)
    numbers: dict[Any, Any] = {}

    def named(atom: Any) -> Any:
        if isinstance(atom, _jaxpr.Literal):
            return str(atom.val), atom.aval
        return numbers.setdefault(atom, (len(numbers), atom.aval))

    def named_all(atoms: Sequence[Any]) -> tuple:
        return tuple(map(named, atoms))

    ins = named_all(body.invars)
    eqns = tuple(
        (
            eqn.primitive,
            tuple(sorted(eqn.params.items())),
            named_all(eqn.invars),
            named_all(eqn.outvars),
            eqn.source_info.traceback,
            str(eqn.source_info.name_stack),
            eqn.ctx,
        )
        for eqn in body.eqns
    )
    key = ins, eqns, named_all(body.outvars)
    try:
        hash(key)
    except TypeError:  # a parameter that cannot be compared
        return None
    return None if body.constvars or body.effects else key
