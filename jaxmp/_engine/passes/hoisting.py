"""The weight gradients of a recurrent layer: one product after its scan."""

from collections.abc import Sequence
from typing import Any

from ..._hoist import hoisted
from ..._jaxpr import Equation
from ..._scopes import IsProduct, Scopes


def hoisting(
    eqns: Sequence[Equation], jaxpr: Any, scopes: Scopes, is_product: IsProduct
) -> Sequence[Equation]:
    """Returns the equations, sums of products over trips as products after the loop.

    Args:
        eqns: The equations of a jaxpr.
        jaxpr: The jaxpr.
        scopes: Named scopes around it.
        is_product: Tells whether an equation, in its scopes, is a product in 16 bits.
    """
    return hoisted(eqns, scopes, is_product)[0]
