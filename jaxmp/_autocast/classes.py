"""The class of an operation: what autocast may do with it.

What is known of each primitive is in :mod:`jaxmp._ops.table`. No module of the engine
looks at a name.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from .._attention.operation import takes_16_bits
from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation
from .._ops import products, table
from .._ops.lists import OpLists

Class = Literal[
    "product",  # takes 16 bits and adds up in float32
    "exact",  # moves or chooses, and rounds nothing
    "smooth",  # elementwise, and follows its operands
    "call",  # holds jaxprs, and is gone into
    "keep",  # everything else: sees the dtypes that it was written for
]


def classify(
    eqn: Equation, ops: OpLists, dtype: np.dtype, *, back: bool = False
) -> Class:
    """Returns the class of an equation that no user keeps in float32.

    Args:
        eqn: The equation.
        ops: The lists.
        dtype: The 16-bit dtype.
        back: Whether what holds it belongs to the backward pass.
    """
    name = eqn.primitive.name
    if name in ops.allow and products.has_float32(eqn, dtype):
        if not table.is_product_of_any_kind(eqn):
            return "product"
        is_product = products.is_matrix_product(eqn, back=back)
        if is_product and products.has_default_precision(eqn):
            return "product"
    # `mul` may have a dtype for its result, from JAX 0.10 on.
    follows = name in ops.infer and eqn.params.get("out_dtype") is None
    if follows and not table.multiplies_itself(eqn) and not table.scales_far(eqn):
        return "exact" if table.is_exact(eqn) else "smooth"
    if table.retypes(eqn) or table.is_saved(eqn):
        return "exact"
    return "call" if _jaxpr.is_call(eqn) and name not in ops.deny else "keep"


def rounds(eqn: Equation) -> Sequence[bool]:
    """Returns which of its operands a product takes in 16 bits."""
    if products.is_attention(eqn):
        return takes_16_bits(eqn)
    if products.is_loss_head(eqn):
        return [i < 2 for i in range(len(eqn.invars))]
    return [True] * len(eqn.invars)


def is_written_in(eqn: Equation, ops: OpLists, dtype: np.dtype) -> bool:
    """Whether an equation is a matrix product that the user wrote in ``dtype``."""
    is_product = eqn.primitive.name in ops.allow and products.multiplies_matrices(eqn)
    if not is_product or not products.has_default_precision(eqn):
        return False
    return all(atom.aval.dtype == dtype for atom in eqn.invars[:2])


def is_small(eqn: Equation, *, back: bool = False) -> bool:
    """Whether a product is arithmetic, such as a rotation.

    The arguments are those of :func:`jaxmp._ops.products.is_matrix_product`.
    """
    is_product = products.is_matrix_product(eqn, back=back)
    return table.is_product_of_any_kind(eqn) and not is_product
