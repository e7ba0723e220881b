"""Means of a number and of its square, of which a variance is made, stay float32."""

from collections.abc import Sequence
from typing import Any

from ..._jaxpr import Equation
from ..._moments import with_moments
from ..._scopes import IsProduct, Scopes


def moments(
    eqns: Sequence[Equation], jaxpr: Any, scopes: Scopes, is_product: IsProduct
) -> Sequence[Equation]:
    """Returns the equations, those that take moments in a float32 region.

    Args:
        eqns: The equations of a jaxpr.
        jaxpr: The jaxpr.
        scopes: Named scopes around it.
        is_product: Tells whether an equation, in its scopes, is a product in 16 bits.
    """
    return with_moments(eqns, jaxpr, scopes)
