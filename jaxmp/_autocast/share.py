"""How much of a program is float32 because loops decide by comparing."""

from collections.abc import Sequence
from typing import Any

from .._base.checks import warn
from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation
from .._jaxprs.scopes import BACKWARD
from .._ops.products import flops
from . import rules
from .plan import Plan


def warn_if_most_is_kept(plan: Plan) -> None:
    """Warns where such loops leave less than half of the FLOPs in 16 bits."""
    half, kept = _flops(plan)
    if not kept > half:
        return
    warn(
        f"Of the FLOPs that autocast decides about, {kept / (half + kept):.0%} stay in "
        "float32, because a loop decides by comparing what they compute: it ends at a "
        "tolerance, or takes a step or leaves it. `jaxmp.audit` names the lines "
        f"(guard: {rules.COMPARING}). For 16 bits put `autocast` around what the "
        "loop calls, so that it compares numbers of one kind, as in `optax.lbfgs` with "
        "`value_fn=loss` and `loss = jaxmp.autocast(loss_fn, policy)`; or leave the "
        "solver out of `autocast`, or in `jaxmp.float32_region`, where float32 is what "
        "you want."
    )


def _flops(plan: Plan) -> tuple[float, float]:
    """Returns FLOPs of products in 16 bits, and of those that loops keep in float32."""
    half = kept = 0.0
    for step in plan.steps:
        back = BACKWARD in step.around
        if step.kind == "product":
            half += _number(flops(step.eqn, back=back))
        elif step.inside:
            found = [_flops(inner) for _, inner in step.inside.bodies]
            half += _iterations(step.eqn) * sum(x for x, _ in found)
            kept += _iterations(step.eqn) * sum(x for _, x in found)
        elif step.rule == rules.COMPARING:
            kept += _held([step.eqn], back=back)
    return half, kept


def _held(eqns: Sequence[Equation], *, back: bool) -> float:
    """Returns the FLOPs of some equations with all that they hold.

    Args:
        eqns: The equations.
        back: Whether what holds them belongs to the backward pass.
    """
    total = 0.0
    for eqn in eqns:
        total += _number(flops(eqn, back=back))
        in_back = back or _jaxpr.is_transposed(eqn)
        for body in _jaxpr.sub_jaxprs(eqn):
            held = _held(_jaxpr.open_jaxpr(body).eqns, back=in_back)
            total += _iterations(eqn) * held
    return total


def _iterations(eqn: Equation) -> float:
    """Returns how often an equation runs what it holds, as far as that is known."""
    is_scan = _jaxpr.call_kind(eqn) == "scan"
    return _number(eqn.params["length"]) if is_scan else 1.0


def _number(count: Any) -> float:
    """Returns a count of FLOPs or iterations, and 1 where it has symbolic sizes."""
    return float(count) if isinstance(count, (int, float)) else 1.0
