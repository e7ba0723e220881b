"""Gives the two passes in a loop an argument each, where both read one that is fixed.

Where the backward pass has a dtype of its own, a weight is rounded twice, before a loop
over micro-batches and not in each of its iterations.
"""

from collections.abc import Sequence
from typing import Any

from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation, Var, is_float32
from ..._jaxprs.scopes import Scopes, is_backward, scopes_inside
from ..graph import is_in


def apart(eqn: Equation, scopes: Scopes) -> Equation:
    """Returns a scan that holds both passes with such arguments, others as they are.

    Args:
        eqn: An equation.
        scopes: Named scopes around it.
    """
    if _jaxpr.call_kind(eqn) != "scan" or not _jaxpr.holds_backward(eqn):
        return eqn
    within = scopes_inside(eqn, scopes + _jaxpr.scope_names(eqn))
    body = _jaxpr.open_jaxpr(eqn.params["jaxpr"])
    consts, carries = _jaxpr.scan_counts(eqn)
    back, ahead = (read_by_pass(body, within, back=back) for back in (True, False))
    both = [
        i
        for i, x in enumerate(body.invars[:consts])
        if is_float32(x) and getattr(x.aval, "shape", ()) and x in back and x in ahead
    ]
    if not both:
        return eqn
    copies: dict[Any, Any] = {body.invars[i]: Var(body.invars[i].aval) for i in both}
    eqns = [
        inner.replace(
            invars=[copies[x] if is_in(x, copies) else x for x in inner.invars]
        )
        if is_backward(inner, within) and not _jaxpr.computes_again(inner)
        else inner
        for inner in body.eqns
    ]
    new = body.replace(
        eqns=eqns,
        invars=[*body.invars[:consts], *copies.values(), *body.invars[consts:]],
        debug_info=body.debug_info.with_unknown_names(),
    )
    fixed, others = eqn.invars[:consts], eqn.invars[consts:]
    invars = [*fixed, *(eqn.invars[i] for i in both), *others]
    return _jaxpr.scan_with(
        eqn, new, carries, invars, eqn.outvars, consts=consts + len(both)
    )


def read_by_pass(body: Any, scopes: Scopes, *, back: bool) -> set[Any]:
    """Returns the variables that one of the passes in a jaxpr reads.

    An equation may hold both: a loop over micro-batches, or a remat of a backward pass.

    Args:
        body: The jaxpr, open.
        scopes: Named scopes around it.
        back: Whether that is the backward pass.
    """
    other = _jaxpr.holds_backward if back else _jaxpr.computes_again
    eqns: Sequence[Equation] = body.eqns
    return {
        x
        for eqn in eqns
        if is_backward(eqn, scopes) == back or other(eqn)
        for x in _jaxpr.variables(eqn.invars)
    }
