"""How XLA is made to store 16 bits, and to compare the numbers that it stores."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation
from .._ops import table
from .._ops.narrow import firmly_rounded
from .facts import Facts


def stored(array: Any, back: bool) -> Any:
    """Returns a 16-bit value that a product takes and the backward pass reads.

    XLA would store what it was computed from, and compute it anew, if nothing stood
    between the rounding and those who widen the value again.
    """
    if back:  # a barrier would keep its sum from fusing with what is before
        return firmly_rounded(array)
    return lax.optimization_barrier(array)


def alike(eqn: Equation, known: Sequence[Facts], wide: list[Any]) -> list[Any]:
    """Returns what a comparison or a choice is given, each the number that others read.

    XLA may take what it has not rounded yet. What was chosen from an array would not be
    found in it again. As it is for all other equations, and beside a number in the
    code.
    """
    finds = table.tests(eqn) or table.picks(eqn)
    if not finds or any([x.scalar is not None for x in known]):
        return wide
    return [
        _with_digits_of_bfloat16(x) if facts.dtype == jnp.bfloat16 else x
        for x, facts in zip(wide, known, strict=True)
    ]


def sorted_alike(array: Any) -> Any:
    """Returns what is sorted or searched in 16 bits, the numbers that others read."""
    if array.dtype != jnp.bfloat16:
        return array
    wide = lax.convert_element_type(array, np.float32)
    return lax.convert_element_type(_with_digits_of_bfloat16(wide), array.dtype)


def _with_digits_of_bfloat16(wide: Any) -> Any:
    return lax.reduce_precision(wide, 8, 7)  # which XLA never leaves out


def gathered(eqn: Equation, array: Any, dtype: np.dtype) -> Any:
    """Gathers a weight in 16 bits, for products to take.

    It is widened behind, and rounded by each consumer to the same number, so that the
    gradients of all consumers, and of all devices, add up in float32.
    """

    @jax.custom_jvp
    def gather(x):
        (out,) = _jaxpr.bind(eqn, [lax.convert_element_type(x, dtype)])
        return lax.convert_element_type(out, x.dtype)

    @gather.defjvp
    def rule(primals, tangents):
        return gather(*primals), _jaxpr.bind(eqn, tangents)[0]

    return gather(array)
