"""Matrix products in float8: which, and how their operands are scaled.

Each operand is multiplied by a power of two of its own, found from its largest
magnitude in this very step, so that it fills the range of float8, and the result is
divided by both. There is no state, and where a loss is multiplied by a power of two, so
are its gradients, bit for bit. The format has four bits of precision (E4M3), for
gradients too.

Micikevicius et al., "FP8 Formats for Deep Learning", 2022, sections 3 and 4,
https://arxiv.org/abs/2209.05433. Scales that are found from the numbers themselves, and
not from those of earlier steps, are called current scaling.
"""

import functools
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.dtypes import FLOAT8
from .._jaxprs import scopes as _scopes
from .._jaxprs.jaxpr import Equation, Primitive, is_inexact
from .products import is_batched, multiplies_matrices, sizes

_BFLOAT16 = np.dtype(jnp.bfloat16)
# Units for tensor products in float8 take sizes in multiples of 16; XLA pads others.
_MULTIPLE = 16
# As integers: bfloat16 has 7 bits of fraction, and exponents that count from -127 on.
_FRACTION, _BIAS, _INF, _NAN = 7, 127, 0x7F80, 0x7FC0
# The largest number of float8 is 448, 1.75 * 2^8. What is added to the bits of a number
# raises its exponent by one if its fraction is above 1.75.
_HIGHEST, _ABOVE = 8, (1 << _FRACTION) - 1 - 0b1100000


def why_16bit(eqn: Equation, min_size: int) -> str | None:
    """Returns why a product of 16-bit operands is none of float8; None if it is one.

    The reason is empty for anything that is not a matrix product.
    """
    if not multiplies_matrices(eqn):
        return ""
    if is_batched(eqn):
        return "batched"
    found = sizes(eqn)
    if found is None or not all(map(is_inexact, eqn.invars)):
        return "no matmul of two floating matrices"
    # A size that `jax.export` leaves open may turn out to be any.
    if any(not isinstance(n, numbers.Integral) or n % _MULTIPLE for n in found):
        return "a size that is not a multiple of 16"
    return "a size below `min_size`" if min(found) < min_size else None


def multiplied(
    eqn: Equation, operands: Sequence[Any], dtype: Any, backward: bool
) -> jax.Array:
    """Applies a matrix product to two bfloat16 operands, each rounded to float8.

    Where one of them has an Inf or a NaN, all of the result is NaN.
    """
    # The tensor cores of Hopper add up 14 bits unless they are told to be exact, which
    # is good enough forward. DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, 3.3.2.
    precision = lax.Precision.HIGHEST if backward else lax.Precision.DEFAULT
    changed = {"precision": precision, "preferred_element_type": np.dtype(dtype)}
    params = tuple(sorted({**eqn.params, **changed}.items()))
    product = _product(eqn.primitive, params)
    with jax.named_scope(_scopes.FLOAT8_PRODUCT):
        return product(*operands)


@functools.lru_cache(maxsize=4096)  # so that JAX traces it once for equal layers
def _product(primitive: Primitive, params: tuple) -> Any:
    options: Any = dict(params)
    dtype = options["preferred_element_type"]

    @jax.jit
    def float8_product(lhs, rhs):
        with jax.named_scope(_scopes.FLOAT8_SCALED):
            (lhs, lhs_unit), (rhs, rhs_unit) = scaled(lhs), scaled(rhs)
            out = primitive.bind(lhs, rhs, **options)
        # XLA hands one factor in the result's dtype on to the product. Both are powers
        # of two, and so is what they are multiplied to.
        return out * (lhs_unit * rhs_unit).astype(dtype)

    return float8_product


def scaled(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rounds a bfloat16 array to float8.

    All of it is computed as integers, which no device rounds or flushes to zero, and
    of which NaN is the largest.

    Returns:
        A float8 array, and its unit: what it is to be multiplied by, a power of two,
        bfloat16[]. The unit is NaN if there is an Inf or a NaN in ``x``: the array may
        have lost it, since float8 has no Inf.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint16) & np.uint16(0x7FFF)
    top = jnp.max(bits.astype(jnp.int32))
    # That of the largest number, rounded up above 1.75; neither the scale nor the unit
    # leaves the normal numbers.
    exponent = jnp.maximum((top + _ABOVE) >> _FRACTION, _HIGHEST + 1)
    scale = (2 * _BIAS + _HIGHEST - exponent) << _FRACTION
    unit = jnp.where(top < _INF, (exponent - _HIGHEST) << _FRACTION, _NAN)
    return (x * _as_bfloat16(scale)).astype(FLOAT8), _as_bfloat16(unit)


def _as_bfloat16(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
