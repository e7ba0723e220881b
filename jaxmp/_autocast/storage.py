"""The ways in which a value that was computed in float32 is stored in 16 bits.

They depend on who reads the value, so they cannot be rewrites of a jaxpr.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.sizes import as_number
from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation
from .._ops.lists import Definition, axes_of_softmax
from .._ops.narrow import added_to_zeros, firmly_rounded, row_axis
from . import classes, needs
from .needs import Need
from .values import Value


def kept(
    out: Value,
    eqn: Equation,
    dtype: np.dtype,
    *,
    need: Need,
    back: bool,
    definition: Definition,
) -> Value:
    """Returns a value that a product takes and the backward pass reads (rule 7).

    XLA would keep what it was computed from, and compute it anew, if there were nothing
    between the rounding and those who widen the value again.

    Args:
        out: The value, in float32.
        eqn: What computed it.
        dtype: The 16-bit dtype.
        need: What its readers need.
        back: Whether that belongs to the backward pass.
        definition: Returns the equation that computes a variable, None for an input.
    """
    value = out.rounded(dtype)
    if needs.is_rounded_for_products(need):
        return value
    if back:  # a barrier would keep its sum from fusing with what is before
        value.array = firmly_rounded(value.array)
    else:
        value.array = lax.optimization_barrier(value.array)
    return noted(value, eqn, definition)


def noted(value: Value, eqn: Equation | None, definition: Definition) -> Value:
    """Returns what is stored in 16 bits, with the axes over which it sums to one."""
    axes = axes_of_softmax(eqn, definition) if eqn else ()
    # Of more than 2^14 weights the largest may round to zero, and so may the sum.
    few = as_number(math.prod(value.array.shape[i] for i in axes)) <= 2**14
    value.note(kept=axes if few else ())
    return value


def as_choice(eqn: Equation, ins: Sequence[Value], need: Need) -> list[Any] | None:
    """Applies the gradient of a lookup in each row as a choice, None if it is none.

    The loss of a language model looks up the logit of each label. A scatter would store
    the gradient of all logits in float32 on its way to the products. A choice is the
    same number, and fuses.
    """
    if not needs.is_half(need) or row_axis(eqn) is None or not ins[0].is_zero():
        return None
    return [added_to_zeros(eqn, *(value.wide() for value in ins))]


def joined(out: Value, dtype: np.dtype, *, firmly: bool) -> Value:
    """Returns a sum (rule 4), or a part of a result (rule 3), that is rounded once.

    Args:
        out: The value, in float32.
        dtype: The 16-bit dtype.
        firmly: Whether somebody widens it again, for whom XLA would store float32.
    """
    value = out.rounded(dtype)
    if firmly:
        value.array = firmly_rounded(value.array)
    return value


def same(eqn: Equation, ins: Sequence[Value]) -> list[Any] | None:
    """Returns what a comparison or a choice is given, each the number that others read.

    XLA may take what it has not rounded yet. What was chosen from an array would not be
    found in it again. None for all other equations, and beside a number in the code.
    """
    finds = classes.tests(eqn) or classes.picks(eqn)
    if not finds or any([x.known.scalar is not None for x in ins]):
        return None
    return [
        _with_digits_of_bfloat16(x.wide())
        if x.known.half and x.array.dtype == jnp.bfloat16
        else x.wide()
        for x in ins
    ]


def sorted_alike(array: Any) -> Any:
    """Returns what is sorted or searched in 16 bits, the numbers that others read."""
    if array.dtype != jnp.bfloat16:
        return array
    wide = lax.convert_element_type(array, np.float32)
    return lax.convert_element_type(_with_digits_of_bfloat16(wide), array.dtype)


def _with_digits_of_bfloat16(wide: Any) -> Any:
    return lax.reduce_precision(wide, 8, 7)  # which XLA never leaves out


def sent(eqn: Equation, array: Any, dtype: np.dtype) -> Any:
    """Gathers a weight in 16 bits, for products to take (rule 7).

    It is widened behind, and rounded by each reader to the same number, so that the
    gradients of all readers, and of all devices, add up in float32.
    """

    @jax.custom_jvp
    def gather(x):
        (out,) = _jaxpr.bind(eqn, [lax.convert_element_type(x, dtype)])
        return lax.convert_element_type(out, x.dtype)

    @gather.defjvp
    def rule(primals, tangents):
        return gather(*primals), _jaxpr.bind(eqn, tangents)[0]

    return gather(array)


def stacks(known: tuple[int, ...] | None) -> tuple[int, ...]:
    """Returns what is known of what a scan stacks, of each of which this is known."""
    return tuple(axis + 1 for axis in known or ())


def slices(known: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Returns what is known of the slices of what is kept, as a scan takes them."""
    return known and (() if 0 in known else tuple(axis - 1 for axis in known))
