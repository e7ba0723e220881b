"""What goes into loops and comes out of them: rounded weights, and what is known."""

import dataclasses
from collections.abc import Sequence

from . import _jaxpr
from ._jaxpr import Equation
from ._plan import Planner, Use, Want, is_written
from ._scopes import Scopes
from ._values import Known, Value


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


def known_in_trip(eqn: Equation, ins: list[Value]) -> list[Value]:
    """Returns what is known of the inputs of a loop in every trip.

    Of what it carries only the first value is there, and of what it goes through one
    slice at a time.
    """
    layout = _jaxpr.call_layout(eqn)
    known = []
    for i, value in enumerate(ins):
        if i in layout.fixed_in:
            value = Value(value.original(), linear=value.linear)
        elif i >= layout.fixed_in.stop and value.kept is not None:
            axes = () if 0 in value.kept else tuple(axis - 1 for axis in value.kept)
            value = dataclasses.replace(value, kept=axes)
        known.append(value)
    return known


def note_kept(
    eqn: Equation, known: Sequence[Sequence[Known]], outs: Sequence[Value]
) -> None:
    """Notes what the backward pass is to read in 16 bits of what ``eqn`` returns.

    Args:
        eqn: A loop or a choice.
        known: For each of its bodies, what is known of its outputs.
        outs: The outputs of ``eqn``.
    """
    # The slices that a scan puts together have one axis less.
    more = int(_jaxpr.call_kind(eqn) == "scan")
    for i, out in enumerate(outs):
        kept = {body[i].kept for body in known if i < len(body)}
        if out.narrow and kept != {None}:
            (axes,) = kept if len(kept) == 1 else ((),)
            out.kept = tuple(axis + more for axis in axes or ())
