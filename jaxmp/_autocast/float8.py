"""Which products round what they take to float8, beside the ten rules.

The rules give the dtypes of values. With float8 no value has another one, and whatever
is rounded to it stays inside of a product.
"""

from collections.abc import Sequence

import numpy as np

from .._jaxprs.jaxpr import Equation
from .._jaxprs.scopes import KEPT_BY_BFLOAT16_PATHS, KEPT_IN_RULE, Scopes, is_under
from .._ops.fp8 import why_16bit
from .._ops.lists import OpLists
from . import classes
from .classes import Class


class Float8:
    """Knows for one dtype, one set of lists and one of paths."""

    def __init__(
        self, dtype: np.dtype, ops: OpLists, paths: Sequence[str], *, is_on: bool
    ):
        """Takes what the user asks for."""
        self.dtype, self.ops, self.is_on = dtype, ops, is_on
        self.paths = {path: tuple(path.split("/")) for path in paths}

    def why_16bit(
        self, eqn: Equation, kind: Class, scopes: Scopes, *, linear: bool
    ) -> str | None:
        """Returns why an equation rounds nothing to float8; None if it does.

        The reason is the name of a scope, and empty for what is no product in 16 bits.
        """
        if kind != "product" and not classes.is_written_in(eqn, self.ops, self.dtype):
            return ""
        reason = why_16bit(eqn, self.ops.min_size)
        if reason is None and any(is_under(p, scopes) for p in self.paths.values()):
            return KEPT_BY_BFLOAT16_PATHS
        return KEPT_IN_RULE if reason is None and linear else reason
