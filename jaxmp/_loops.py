"""What a loop is given: its weights, which are rounded before the first trip."""

import dataclasses
from collections.abc import Sequence

from . import _jaxpr
from ._jaxpr import Equation
from ._plan import Planner, Use, Want, is_written
from ._scopes import Scopes
from ._values import Value


def rounded_weights(
    eqn: Equation,
    ins: list[Value],
    wanted: Sequence[Want],
    scopes: Scopes,
    planner: Planner,
) -> list[Value]:
    """Rounds the weights of a loop before it, where that costs no precision.

    XLA would round them again in each trip. But gradients that come back through a scan
    add up in the dtype of what it was given. So of scans only one that has been
    differentiated already qualifies, such as an accumulation, or the two of a recurrent
    layer in ``autocast(value_and_grad(loss))``. A ``while`` has no such gradients.

    Args:
        eqn: The loop.
        ins: What it is given.
        wanted: What the outputs of its body are wanted for.
        scopes: Named scopes around its body.
        planner: Plans its bodies.
    """
    layout, ins = _jaxpr.call_layout(eqn), list(ins)
    for body in layout.bodies:
        plan = planner.plan(body.jaxpr, wanted, scopes)
        if _jaxpr.call_kind(eqn) == "scan" and not is_written(plan, scopes):
            continue
        for i, var in zip(body.operands, _jaxpr.in_vars(body.jaxpr), strict=True):
            read = plan.use(var) & (Use.IN_16BIT | Use.OTHERWISE)
            is_given = i < layout.fixed_in.start and not ins[i].linear
            if is_given and read == Use.IN_16BIT:
                array = ins[i].in_16bit(planner.dtype)
                ins[i] = dataclasses.replace(ins[i], array=array, narrow=True)
    return ins
