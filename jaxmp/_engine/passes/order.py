"""The order of attention scores: queries first, as the softmax reads them."""

from collections.abc import Sequence
from typing import Any

from ..._jaxpr import Equation
from ..._layouts import in_order
from ..._scopes import IsProduct, Scopes


def order(
    eqns: Sequence[Equation], jaxpr: Any, scopes: Scopes, is_product: IsProduct
) -> Sequence[Equation]:
    """Returns the equations, scores computed in the order in which they are read.

    The first pass of all, since it reads the equations of the jaxpr itself.

    Args:
        eqns: The equations of a jaxpr.
        jaxpr: The jaxpr.
        scopes: Named scopes around it.
        is_product: Tells whether an equation, in its scopes, is a product in 16 bits.
    """
    return in_order(jaxpr, scopes, is_product)
