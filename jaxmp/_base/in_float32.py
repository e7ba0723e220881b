"""A function traced as if it had been written in float32.

While JAX traces, a number in the code takes the dtype of what it meets: beside a
float16 array 1e-8 is 0. Replaying in float32 what was traced in 16 bits comes too late
for it. So the function is traced again, with float32 arguments, while the casts of
jaxmp to 16 bits do nothing. What it casts by itself stays in 16 bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .dtypes import is_narrow

_FLOAT32 = np.dtype(np.float32)

# JAX keeps what it has traced by its contexts, so that the two share nothing.
_IS_ON = jax.make_user_context(False)


def traced_in_float32(fun: Callable, leaves: Sequence[Any]) -> Any:
    """Traces ``fun`` as it would be in float32.

    Args:
        fun: Function of arrays.
        leaves: Its arguments, arrays or types; those of 16 bits become float32.

    Returns:
        A closed jaxpr, or None where ``fun`` does not take float32 arguments.
    """
    with warnings.catch_warnings(), _IS_ON(True):
        warnings.simplefilter("ignore")  # they have been given once
        try:
            return jax.make_jaxpr(fun)(*map(_float32_type, leaves))
        except Exception:  # of any kind: the code is the user's
            return None


def casts_do_nothing() -> bool:
    """Whether the casts of jaxmp are to leave float32 as it is."""
    return bool(_IS_ON.value)


def dtype_of_cast(dtype: np.dtype) -> np.dtype:
    """Returns the dtype that a cast of jaxmp to ``dtype`` gives here."""
    return _FLOAT32 if casts_do_nothing() and is_narrow(dtype) else dtype


def _float32_type(x: Any) -> Any:
    if not is_narrow(x):
        return x
    return jax.ShapeDtypeStruct(jnp.shape(x), _FLOAT32)
