"""What is computed in the same way, in code that was written or traced twice."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ._jaxpr import Equation, Literal, closed_consts, open_jaxpr

# Entries of the largest constants that are compared.
_LARGEST = 4096


def same_constants(jaxpr: Any) -> dict[Any, Any]:
    """Returns for each small NumPy array that ``jaxpr`` carries the first such array.

    Args:
        jaxpr: The jaxpr, open or closed.
    """
    found: dict[Any, Any] = {}
    seen: dict[Any, Any] = {}
    consts = zip(open_jaxpr(jaxpr).constvars, closed_consts(jaxpr), strict=False)
    for var, x in consts:
        is_numpy = hasattr(x, "__array__") and not isinstance(x, jax.Array)
        if is_numpy and np.size(x) <= _LARGEST:
            x = np.asarray(x)
            found[var] = seen.setdefault((x.shape, x.dtype, x.tobytes()), var)
    return found


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


def twins(
    eqns: Sequence[Equation], same: Mapping[Any, Any] | None = None
) -> dict[Any, Any]:
    """Returns for each computed variable the first that is computed in the same way.

    Args:
        eqns: The equations of a jaxpr.
        same: The first of equal ones among other variables.
    """
    found: dict[Any, Any] = {**(same or {})}
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
