"""What a relu is given is positive where its result is.

JAX differentiates ``y = max(x, 0)`` by ``x > 0``. Where products take ``y`` in 16 bits,
XLA would store ``x`` as well, often in float32. ``y > 0`` is the same truth value.
"""

from collections.abc import Sequence
from typing import Any

from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation, Var
from ..._jaxprs.scopes import Asked, Scopes
from ..._ops import table


def relus(
    eqns: Sequence[Equation], jaxpr: Any, scopes: Scopes, asked: Asked
) -> Sequence[Equation]:
    """Returns the equations, those that ask where a relu is not zero asking its result.

    A rewrite, see :mod:`jaxmp._autocast.passes`.
    """
    found: list[Equation] = []
    results: dict[Var, Var] = {}
    for eqn in eqns:
        x = eqn.invars[0] if eqn.invars else None
        if isinstance(x, Var):  # and no number
            if _is_relu(eqn) and type(eqn.outvars[0]) is Var:  # and no `DropVar`
                results[x] = eqn.outvars[0]
            elif x in results and table.is_greater(eqn) and table.tests_sign(eqn):
                eqn = eqn.replace(invars=[results[x], eqn.invars[1]])
        found.append(eqn)
    return found


def _is_relu(eqn: Equation) -> bool:
    """Whether ``eqn`` is the maximum of a variable and 0, or a call of that alone."""
    if _jaxpr.call_kind(eqn) in ("jit", "custom_jvp"):
        body = _jaxpr.open_jaxpr(_jaxpr.call_layout(eqn).bodies[0].jaxpr)
        alone = len(body.eqns) == len(body.invars) == len(body.outvars) == 1
        if not alone or body.eqns[0].outvars != body.outvars:
            return False
        return body.eqns[0].invars[0] is body.invars[0] and _is_relu(body.eqns[0])
    return table.is_greatest(eqn) and _jaxpr.number_of(eqn.invars[1]) == 0
