"""Whether a program has gradients in float16 that nobody has scaled."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._base.around import GRADIENT
from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation
from .._jaxprs.scopes import is_backward, is_decided
from .._jaxprs.walk import At, Forward
from .._ops import table
from .._ops.products import is_matrix_product
from .plan import Plan

# What a value may be. Of several that meet, the larger.
_OTHER = 0
_OUTSIDE = 1  # a scalar that the program is given, or computes of such
_NUMBER, _LARGE = 2, 3  # a number in the code, and one above 1
_UNSCALED = 4  # comes of the number with which a backward pass begins
_SCALED = 5  # and has been multiplied by a scale


def has_unscaled_gradients(plan: Plan, jaxpr: Any) -> bool:
    """Returns whether a product of a backward pass has a cotangent without a scale.

    A loss may be scaled by hand: its cotangent is multiplied by a scalar from outside,
    or by a number above 1. The gradients of ``jaxmp.value_and_grad`` speak for
    themselves.

    Args:
        plan: The plan of a program, whose products are in 16 bits.
        jaxpr: The program.
    """
    products = (step for step in plan.all_steps() if step.kind == "product")
    if not any(step.back and GRADIENT not in step.around for step in products):
        return False
    found = False

    def known(x: Any, at: At | None = None) -> int:
        if not isinstance(x, _jaxpr.Literal):
            return _OTHER if jnp.shape(x) else _OUTSIDE
        if not jnp.issubdtype(jnp.result_type(x.val), np.floating) or not x.val:
            return _OUTSIDE  # a zero begins no backward pass
        return _LARGE if abs(x.val) > 1 else _NUMBER

    def reached(eqn: Equation, ins: list[int], at: At) -> Sequence[int]:
        nonlocal found
        back = is_backward(eqn, at.scopes)
        is_scalar = not any([x.aval.shape for x in eqn.outvars])  # a print has none
        made = max(ins, default=_OTHER)
        is_product = back and is_matrix_product(eqn, back=True)
        if is_product and made == _UNSCALED:
            found |= not (GRADIENT in at.scopes or is_decided(at.scopes))
        begins = back and made in (_NUMBER, _LARGE)
        begins = begins and (is_scalar or _OTHER not in ins)
        if table.divides(eqn):  # by a count, which may be from outside
            begins, made = begins and ins[0] >= _NUMBER, ins[0]
        scales = table.multiplies_entries(eqn) and is_scalar and _OTHER not in ins
        if scales and (begins or made == _UNSCALED) and {_OUTSIDE, _LARGE} & {*ins}:
            return [_SCALED]
        if begins:
            made = _SCALED if made == _LARGE else _UNSCALED
        elif made < _UNSCALED:
            made = _OUTSIDE if is_scalar and _OTHER not in ins else _OTHER
        return [made] * len(eqn.outvars)

    walk = Forward(reached, max, known)
    walk.through(jaxpr, [known(aval) for aval in _jaxpr.in_avals(jaxpr)])
    return found
