"""Equinox models among the parameters: arrays beside functions, numbers and flags."""

import sys
from typing import Any

import jax


def arrays_of_models(params: Any) -> Any:
    """Returns parameters with None for what no gradient of an Equinox model is of.

    What is left are its floating arrays, as for ``eqx.filter_grad``. What is in no
    Equinox model stays.
    """
    eqx = sys.modules.get("equinox")  # who has a model has imported it
    if eqx is None:
        return params

    def is_model(x):
        return isinstance(x, eqx.Module)

    def arrays(x):
        return eqx.filter(x, eqx.is_inexact_array) if is_model(x) else x

    return jax.tree.map(arrays, params, is_leaf=is_model)


def with_rest(arrays: Any, params: Any) -> Any:
    """Puts back what :func:`arrays_of_models` has taken out of ``params``."""
    return jax.tree.map(
        lambda array, old: old if array is None else array,
        arrays,
        params,
        is_leaf=lambda x: x is None,
    )
