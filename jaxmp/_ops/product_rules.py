"""Products of 16-bit operands, as those who read them take them; and their weights."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation
from .._jaxprs.scopes import SATURATED
from .products import is_convolution
from .sums import Product, product_of


def accumulated(
    eqn: Equation, operands: list[Any], dtype: np.dtype, linear: bool, backward: bool
) -> Any:
    """Returns the float32 sums of a product of 16-bit operands.

    JAX would differentiate it into products of 16-bit by float32, so it gets a rule by
    which the products of its derivatives are 16-bit too. What is ``linear`` is part of
    such a rule, and is rounded on the way like those.
    """

    # cuDNN has no 16-bit convolution with a float32 result: XLA widens the operands and
    # convolves in float32.
    if linear or is_convolution(eqn):
        (out,) = _jaxpr.bind(eqn, operands, preferred_element_type=dtype)
        return lax.convert_element_type(out, jnp.float32)
    product, avals = product_of(eqn, backward=backward), map(jax.typeof, operands)
    call = _jaxpr.written_as(_accumulated(product, tuple(avals), dtype), eqn)
    return _jaxpr.bind(call, operands)[0]


@functools.lru_cache(maxsize=4096)  # A function with a rule takes long to trace.
def _accumulated(product: Product, avals: tuple, dtype: np.dtype) -> Equation:
    """Returns an equation that calls such a product, of operands of these types."""

    def rule(primals, tangents):
        terms = [
            product.bind((*primals[:i], tangent, *primals[i + 1 :]), dtype)
            for i, tangent in enumerate(tangents)
            if not isinstance(tangent, SymbolicZero)
        ]
        terms = [lax.convert_element_type(term, jnp.float32) for term in terms]
        out = accumulate(*primals)
        return out, functools.reduce(lax.add, terms) if terms else lax.full_like(out, 0)

    @jax.custom_jvp
    def accumulate(*args):
        return product.summed(args)

    accumulate.defjvp(rule, symbolic_zeros=True)
    (call,) = _jaxpr.trace(accumulate, avals).eqns
    return call


def rounded(eqn: Equation, operands: list[Any], dtype: np.dtype, backward: bool) -> Any:
    """Returns a product in 16 bits that is not taken in them.

    A score beyond the range of float16 has its softmax in float32, where it is finite.
    In the backward pass such a number says that the step is to be skipped.
    """
    (out,) = _jaxpr.bind(eqn, operands, preferred_element_type=dtype)
    if dtype == jnp.bfloat16 or backward:
        return out
    limit = np.asarray(jnp.finfo(dtype).max, dtype)
    with jax.named_scope(SATURATED):
        return lax.clamp(-limit, out, limit)


def moved(
    eqn: Equation, array: Any, dtype: np.dtype, places: Sequence[Any] = ()
) -> Any:
    """Gathers, reverses or looks up in 16 bits; the gradient adds up in float32.

    Args:
        eqn: The equation.
        array: What is moved.
        dtype: The 16-bit dtype.
        places: Where it is looked up, in integers.
    """

    @jax.custom_jvp
    def move(x, *places):
        return _jaxpr.bind(eqn, [lax.convert_element_type(x, dtype), *places])[0]

    @move.defjvp
    def rule(primals, tangents):
        wide = lax.convert_element_type(tangents[0], eqn.invars[0].aval.dtype)
        # What fills places out of bounds is a number, and its tangent zero.
        filled = {"fill_value": 0} if "fill_value" in eqn.params else {}
        (out,) = _jaxpr.bind(eqn, [wide, *primals[1:]], **filled)
        return move(*primals), lax.convert_element_type(out, dtype)

    return move(array, *places)
