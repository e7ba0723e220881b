"""What a loop adds up in float32 beside the 16 bits of it that its iterations read.

A scan over layers carries a stream ``h`` to which each layer adds. Where the backward
pass computes the layers again, the scan stacks ``h`` for it, the largest array of the
program. So all read ``h`` as it is stacked, in 16 bits, and the loop adds up beside it.
An iteration of two layers, ``y = h + f(h); return y + g(y), h``, becomes::

    seen = bfloat16(h)
    y, seen_y = h + f(seen), seen + f(seen)
    return y + g(seen_y), seen

What all others read has the sum beside it in ``sum32``: of :class:`.facts.Facts` while
the plan is made, of a value while it is emitted. A :class:`.plan.Step` that adds to
both is written twice.
"""

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation
from . import needs
from .analysis import Consumers
from .facts import Facts
from .graph import Demand, Ways, joined

# What has a sum in `sum32` or None: facts, or a value.
T = TypeVar("T", bound=Any)


def stacked(
    loop: Equation,
    ahead: Collection[Any],
    body: _jaxpr.Body,
    demand: Demand,
    carried: Sequence[Facts],
    within: Consumers,
) -> dict[int, int]:
    """Returns which of its sums a scan stacks for the backward pass alone.

    Args:
        loop: The scan.
        ahead: What the forward pass reads behind it.
        body: What each iteration runs.
        demand: What is needed of what an iteration returns.
        carried: The facts of what it carries.
        within: Who reads the values of the body.

    Returns:
        For the place of each such stack the place of what is carried.
    """
    if any(_jaxpr.call_kind(x.eqn) and x.demand.summed for x in within.rows):
        return {}
    summed = joined(ends for _, ends in demand.summed)
    inner, layout = _jaxpr.open_jaxpr(body.jaxpr), _jaxpr.call_layout(loop)
    found: dict[int, int] = {}
    for place, out in zip(layout.fixed_in, layout.fixed_out, strict=True):
        known, var = carried[out], inner.invars[place]
        outs = [i for i, x in enumerate(inner.outvars) if x is var]
        stacks = set(outs).difference(layout.fixed_out)
        is_sum = summed >> out & 1 and not (known.given or known.tangent)
        again = all(
            loop.outvars[i] not in ahead
            and needs.is_computed_with_again(demand.needs[i])
            for i in stacks
        )
        if is_sum and again and not _needs_digits(within, var):
            found |= dict.fromkeys(stacks, out)
    return found


def _needs_digits(consumers: Consumers, var: Any) -> bool:
    """Whether an equation needs the last digits of ``var``, beside the loop's sum."""
    return any(
        x is var and needs.needs_digits(need) and not starts >> i & 1
        for row in consumers.rows
        for starts in [joined(start for start, _ in row.demand.summed)]
        for i, (x, need) in enumerate(zip(row.eqn.invars, row.input_needs, strict=True))
    )


def of_sum(summed: Ways, ins: Sequence[T]) -> list[T] | None:
    """Returns what an equation takes that is written once more, for the sum.

    None where nothing that it takes on its ways has a sum.
    """
    if not summed:  # as of most
        return None
    starts = joined(start for start, _ in summed)
    sums = [x.sum32 if starts >> i & 1 else None for i, x in enumerate(ins)]
    if not any(x is not None for x in sums):
        return None
    return [x if one is None else one for x, one in zip(ins, sums, strict=True)]


def returned(x: T, end: str) -> T:
    """Returns what a jaxpr hands on of a value: the sum, unless 16 bits are asked."""
    in_16_bits = end in ("half", "stacked")
    return x if in_16_bits or x.sum32 is None else x.sum32
