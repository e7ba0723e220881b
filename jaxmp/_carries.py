"""What a loop carries: float32, or 16 bits as between layers that are written out.

A running sum and the cell of an LSTM stay float32, because what is rounded in each trip
adds up. What a product stands behind in each trip is rounded there anyway: what one
dense layer hands to the next, or the state of a plain recurrent layer. A residual
stream of a few layers is rounded as it is where they are written out, see
:mod:`jaxmp._layers`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from . import _jaxpr
from ._jaxpr import Equation, is_float32
from ._plan import Plan
from ._trips import bounds
from ._uses import (
    IN_16BIT,
    RETURNED,
    USES,
    Use,
    Want,
    as_written,
    read_again,
    wanted_for,
)

# Who does this with a value takes what the loop would have carried in float32.
_EXACTING = Use.EXACT | Use.OFFSETS | Use.RESULT | Use.REGION | Use.BOUNDED | Use.TERMS

# Plans a body whose outputs are wanted for something.
_Plans = Callable[[Any, tuple[Want, ...]], Plan]


def bounded(eqn: Equation, wanted: Sequence[Want], dtype: np.dtype) -> Sequence[Want]:
    """Returns what is wanted where a scan stacks nothing that becomes infinite.

    In float16, what the backward pass multiplies by must not.
    """
    stacks = "factor" in wanted and _jaxpr.call_kind(eqn) == "scan"
    if not stacks or dtype != jnp.float16:
        return wanted
    limits = bounds(_jaxpr.call_layout(eqn).bodies[0].jaxpr)
    return tuple(
        "16-bit" if want == "factor" and not limit < 2**15 else want
        for want, limit in zip(wanted, limits, strict=True)
    )


def wanted_inside(
    eqn: Equation, wanted: Sequence[Want], narrow: frozenset[int], plan: _Plans
) -> tuple[Want, ...]:
    """Returns what is wanted of the bodies of an equation.

    A loop reads what it carries once more, and so does its test.

    Args:
        eqn: A call, a loop or a choice.
        wanted: What is wanted of its outputs.
        narrow: Which of its outputs it carries in 16 bits.
        plan: Plans its bodies.
    """
    carried = _jaxpr.call_layout(eqn).fixed_out
    inside: list[Want] = [
        as_written([want])[0] if want in RETURNED and i in carried else want
        for i, want in enumerate(wanted)
    ]
    uses = {i: _use_after(eqn, wanted, i) for i in narrow}
    for i, use in uses.items():
        inside[i] = wanted_for(use)
    while True:
        before = (*inside,)
        for i, use in _uses_of_carried(eqn, before, plan).items():
            if i in narrow:
                uses[i] |= use
                inside[i] = wanted_for(uses[i])
            else:
                inside[i] = read_again(inside[i], use)
        if (*inside,) == before:
            return before


def carried_in_16bit(
    eqn: Equation, wanted: Sequence[Want], handed_on: frozenset[int], plan: _Plans
) -> frozenset[int]:
    """Returns which outputs of a loop it may carry in 16 bits.

    Args:
        eqn: A ``scan`` or a ``while``.
        wanted: What is wanted of its outputs.
        handed_on: Which of them one trip hands to the next without a product.
        plan: Plans its bodies.
    """
    after = {
        i: _use_after(eqn, wanted, i)
        for i in _jaxpr.call_layout(eqn).fixed_out
        if i not in handed_on and is_float32(eqn.outvars[i])
    }
    # Nobody reads the last one, or who does takes 16 bits.
    found = frozenset(i for i, use in after.items() if not use or use & Use.IN_16BIT)
    while found:
        inside = wanted_inside(eqn, wanted, found, plan)
        uses = _uses_of_carried(eqn, inside, plan)
        fit = frozenset(
            i
            for i in found
            if inside[i] in IN_16BIT and not (uses[i] | after[i]) & _EXACTING
        )
        if fit == found:
            break
        found = fit
    return found


def _use_after(eqn: Equation, wanted: Sequence[Want], i: int) -> int:
    """Tells what is done with an output of a loop when it is over."""
    is_read = type(eqn.outvars[i]) is _jaxpr.Var  # and no `DropVar`
    return USES[wanted[i]] if is_read else Use.NOTHING


def _uses_of_carried(
    eqn: Equation, wanted: tuple[Want, ...], plan: _Plans
) -> dict[int, int]:
    """Tells what the next trip, and the test, do with each value that is carried."""
    layout = _jaxpr.call_layout(eqn)
    uses = dict.fromkeys(layout.fixed_out, Use.NOTHING)
    for body in layout.bodies:
        planned = plan(body.jaxpr, wanted)
        inner = _jaxpr.in_vars(body.jaxpr)
        for i, var in zip(body.operands, inner, strict=True):
            if i in layout.fixed_in:
                uses[layout.fixed_out[i - layout.fixed_in.start]] |= planned.use(var)
    return uses
