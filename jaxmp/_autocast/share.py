"""How much of a program is float32 because loops decide by comparing (rule 9)."""

from collections.abc import Sequence
from typing import Any

from .._base.checks import warn
from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation
from .._jaxprs.scopes import BACKWARD, KEPT_TO_COMPARE, KEPT_TO_END, Scopes, inside
from .._ops.products import flops
from .analysis import Analysis
from .graph import Trip

# FLOPs of products in 16 bits, and of those that such loops keep in float32.
Flops = tuple[float, float]


def warn_if_most_is_kept(analysis: Analysis, jaxpr: Any, trip: Trip) -> None:
    """Warns where such loops leave less than half of the FLOPs in 16 bits.

    Args:
        analysis: Of the program.
        jaxpr: The program.
        trip: What its outputs are needed for.
    """
    half, kept = _flops(analysis, jaxpr, trip, ())
    if not kept > half:
        return
    warn(
        f"Of the FLOPs that autocast decides about, {kept / (half + kept):.0%} stay in "
        "float32, because a loop decides by comparing what they compute: it ends at a "
        "tolerance, or takes a step or leaves it (rule 9). `jaxmp.audit` names the "
        "lines. For 16 bits put `autocast` around what the loop calls, so that it "
        "compares numbers of one kind, as in `optax.lbfgs` with `value_fn=loss` and "
        "`loss = jaxmp.autocast(loss_fn, policy)`; or leave the solver out of "
        "`autocast`, or in `jaxmp.float32_region`, where float32 is what you want."
    )


def _flops(analysis: Analysis, jaxpr: Any, trip: Trip, scopes: Scopes) -> Flops:
    plan, half, kept = analysis.plan(jaxpr, trip, scopes), 0.0, 0.0
    for eqn, kind, read in zip(plan.eqns, plan.kinds, plan.outs, strict=True):
        here = scopes + _jaxpr.scope_names(eqn)
        if kind == "product":
            half += _number(flops(eqn, back=BACKWARD in scopes))
        elif kind == "call":
            more = _flops_inside(analysis, eqn, read, inside(eqn, here))
            half, kept = half + more[0], kept + more[1]
        elif KEPT_TO_END in here or KEPT_TO_COMPARE in here:
            kept += _held([eqn], back=BACKWARD in scopes)
    return half, kept


def _flops_inside(
    analysis: Analysis, eqn: Equation, read: Trip, scopes: Scopes
) -> Flops:
    trip = analysis.inside(eqn, read, scopes)
    found = [
        _flops(analysis, body.jaxpr, wanted, scopes)
        for body, wanted in analysis.wanted(eqn, trip)
    ]
    times = _trips(eqn)
    return times * sum(x for x, _ in found), times * sum(x for _, x in found)


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
            total += _trips(eqn) * held
    return total


def _trips(eqn: Equation) -> float:
    """Returns how often an equation runs what it holds, as far as that is known."""
    is_scan = _jaxpr.call_kind(eqn) == "scan"
    return _number(eqn.params["length"]) if is_scan else 1.0


def _number(count: Any) -> float:
    """Returns a count of FLOPs or trips, and 1 where it has symbolic sizes."""
    return float(count) if isinstance(count, (int, float)) else 1.0
