"""Reductions and scatters in 16 bits, where the user wants them so.

They hold a function of two numbers, which was written for float32.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import FLOAT32, Equation, is_float32


def bind_narrow(eqn: Equation, arrays: Sequence[Any], dtype: np.dtype) -> list[Any]:
    """Applies ``eqn`` to arrays of ``dtype`` where it was written for float32."""
    changed: dict[str, Any] = {}
    for key, param in eqn.params.items():
        if _jaxpr.is_jaxpr(param):
            changed[key] = _narrowed(param, dtype)
    return _jaxpr.bind(eqn, arrays, **changed)


def _narrowed(jaxpr: Any, dtype: np.dtype) -> Any:
    """Returns a function of numbers, a jaxpr, in ``dtype``."""

    def apply(eqn: Equation, ins: list[Any]) -> list[Any]:
        if eqn.params.get("new_dtype") == FLOAT32:
            return _jaxpr.bind(eqn, ins, new_dtype=dtype)
        return bind_narrow(eqn, ins, dtype)

    def narrow(*numbers):
        return _jaxpr.interpret(
            jaxpr,
            numbers,
            apply,
            const=lambda x: np.asarray(x, dtype) if x.dtype == FLOAT32 else x,
            literal=lambda x: np.asarray(x.val, dtype) if is_float32(x) else x.val,
        )

    avals = _jaxpr.in_avals(jaxpr)
    avals = [x.update(dtype=dtype) if x.dtype == FLOAT32 else x for x in avals]
    closed = _jaxpr.trace(narrow, avals)
    return closed if isinstance(jaxpr, _jaxpr.ClosedJaxpr) else closed.jaxpr
