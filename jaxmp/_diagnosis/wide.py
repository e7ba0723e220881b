"""An operation in float32 where it was written for 16 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.dtypes import is_narrow
from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation
from .._ops.lists import ARITHMETIC, AS_WRITTEN, DEFAULT_OPS
from .._ops.products import PRODUCTS
from .._ops.sums import summed_by_platform

_FLOAT32 = np.dtype(np.float32)
_HUGE = np.finfo(np.float32).max
_KNOWN = DEFAULT_OPS.allow | DEFAULT_OPS.infer | DEFAULT_OPS.deny


def widened(x: Any) -> Any:
    """Returns a 16-bit array, or the type of one, in float32."""
    if not is_narrow(x):
        return x
    if isinstance(x, _jaxpr.ShapedArray):
        return x.update(dtype=_FLOAT32)
    return lax.convert_element_type(x, jnp.float32)


def before_rounding(eqn: Equation, arrays: Sequence[Any]) -> Any:
    """Returns the 16-bit result of ``eqn`` as float32 has it, None if it is the same.

    Only for what rounds: casts, arithmetic and products.
    """
    if len(eqn.outvars) != 1 or not is_narrow(eqn.outvars[0].aval):
        return None
    name = eqn.primitive.name
    if _jaxpr.is_cast(eqn):
        wide = jnp.issubdtype(arrays[0].dtype, jnp.floating)
        return widened(arrays[0]) if wide and arrays[0].dtype.itemsize > 2 else None
    if name in PRODUCTS and all(is_narrow(x) for x in arrays[:2]):
        return summed_by_platform(eqn, arrays)
    if name in ARITHMETIC:
        return bind_wide(eqn, [*map(widened, arrays)])[0]
    return None


def bind_wide(eqn: Equation, arrays: Sequence[Any]) -> list[Any]:
    """Applies ``eqn`` to arrays that are float32 where it was written for 16 bits.

    Its results are float32 there too. What means nothing but what it was written for
    gets its 16 bits back.
    """
    if not any(is_narrow(x.aval) for x in (*eqn.invars, *eqn.outvars)):
        return _jaxpr.bind(eqn, arrays)
    if _jaxpr.is_cast(eqn):
        (var,), (x,) = eqn.outvars, arrays
        dtype = _FLOAT32 if is_narrow(var.aval) else var.aval.dtype
        return [lax.convert_element_type(x, dtype)]
    name = eqn.primitive.name
    if name in AS_WRITTEN or name not in _KNOWN:
        arrays = [
            lax.convert_element_type(x, var.aval.dtype) if is_narrow(var.aval) else x
            for x, var in zip(arrays, eqn.invars, strict=True)
        ]
        return [*map(widened, _jaxpr.bind(eqn, arrays))]
    changed = {}
    for key, param in eqn.params.items():
        if isinstance(param, (np.dtype, type)) and is_narrow(np.dtype(param)):
            changed[key] = _FLOAT32
        elif _jaxpr.is_jaxpr(param):
            changed[key] = _in_float32(param)
    return _jaxpr.bind(eqn, arrays, **changed)


def _in_float32(jaxpr: Any) -> Any:
    """Returns a jaxpr, of the scalars of a reduction for one, in float32."""

    def wide(*arrays):
        return _jaxpr.interpret(
            jaxpr, arrays, bind_wide, literal=lambda x: wide_literal(x)
        )

    closed = _jaxpr.trace(wide, [*map(widened, _jaxpr.in_avals(jaxpr))])
    return closed if isinstance(jaxpr, _jaxpr.ClosedJaxpr) else closed.jaxpr


def wide_literal(literal: Any) -> Any:
    """Returns a number in the code, in float32 if it is one of 16 bits.

    An Inf there was a number such as -1e9, or may as well be one.
    """
    if not is_narrow(literal.aval):
        return literal.val
    number = np.asarray(literal.val).astype(np.float32)
    return np.clip(number, -_HUGE, _HUGE)


def platform_of(arrays: Sequence[Any]) -> str:
    """Returns the platform that a function of these arrays runs on."""
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, _jaxpr.Tracer):
            return next(iter(x.sharding.device_set)).platform
    return jax.default_backend()
