"""What is computed in the same way, in code that was written or traced twice."""

from collections.abc import Sequence
from typing import Any

from .jaxpr import Equation, Literal, open_jaxpr


def spelled(jaxpr: Any) -> Any:
    """Returns what ``jaxpr`` computes, and which lines wrote it, as one thing to hash.

    None if that cannot be told.

    Args:
        jaxpr: The jaxpr, open or closed.
    """
    body = open_jaxpr(jaxpr)
    numbers: dict[Any, Any] = {}

    def named(atom: Any) -> Any:
        if isinstance(atom, Literal):
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


def twins(eqns: Sequence[Equation]) -> dict[Any, Any]:
    """Returns for each computed variable the first that is computed in the same way."""
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
