"""What autocast knows of an operation by its name: its class, and what it does.

The names themselves are with the lists, in :mod:`jaxmp._ops.lists`. No other module of
the engine looks at one.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from .._attention.operation import takes_16_bits
from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation, is_float32
from .._ops import products as _products
from .._ops.lists import (
    ADDS_UP,
    ARITHMETIC,
    BOUNDED,
    CALLS,
    CHOOSES,
    COMPARES,
    COPIES,
    CUTS,
    DEFAULT_OPS,
    DIFFERENCES,
    EQUALITIES,
    EXACT,
    EXPS,
    EXTREMES,
    FACTORS,
    FOLDS,
    GATHERS,
    HANDS_ON,
    JOINS,
    JOINS_TERMS,
    LINEAR,
    NEGATES,
    OF_SEVERAL,
    ORDERS,
    PICKS,
    SCALES,
    SELECTS,
    SQUASHES,
    STARTS,
    STEEP,
    STRETCHES,
    TRANSPOSES,
    VIEWS,
    OpLists,
    is_steep_power,
    one_of,
)
from .._ops.lists import divisor as divisor
from .._ops.lists import is_power as is_power
from .._ops.lists import is_square as is_square
from .._ops.lists import scales_down as scales_down
from .._ops.lists import scales_far as scales_far
from .._ops.products import (
    PRODUCTS,
    has_default_precision,
    has_float32,
    is_matrix_product,
)
from .._ops.products import has_number as has_number
from .._ops.products import is_attention as is_attention
from .._ops.products import is_batch as is_batch
from .._ops.products import is_batched as is_batched
from .._ops.products import over_trips as over_trips
from .._ops.products import sums_over_trips as sums_over_trips

# All others are not understood, or hold something that is not gone into.
_FOLLOWED = DEFAULT_OPS.allow | DEFAULT_OPS.deny | DEFAULT_OPS.infer

Class = Literal[
    "product",  # takes 16 bits and adds up in float32
    "exact",  # moves or chooses, and rounds nothing
    "smooth",  # elementwise, and follows its operands
    "call",  # holds jaxprs, and is gone into
    "keep",  # everything else: sees the dtypes that it was written for
]


# What an operation does with the numbers that it is given.
picks = one_of(PICKS)  # returns numbers that it was given
is_view = one_of(VIEWS)  # returns what it was given in another shape or place
transposes = one_of(TRANSPOSES)  # puts the axes of an array in another order
cuts = one_of(CUTS)  # returns parts of what it was given
copies = one_of(COPIES)  # its transpose adds up what it has copied
is_of_several = one_of(OF_SEVERAL)  # stands for several operations, to round once
stretches = one_of(STRETCHES)  # stretches operands of size one along an axis
gathers = one_of(GATHERS)  # brings the shards of an array to every device
selects = one_of(SELECTS)  # chooses by a truth value
is_extreme = one_of(EXTREMES)  # returns the larger, or the smaller, of two numbers
compares = one_of(COMPARES)
sorts = one_of(CHOOSES)  # returns some of the numbers it was given, or their places
tests = one_of(ORDERS | EQUALITIES)  # tells how two numbers compare
tests_equal = one_of(EQUALITIES)  # tells where two numbers are equal, or are not
hands_on = one_of(ARITHMETIC | HANDS_ON)  # what is lost before is lost behind, too
multiplies = one_of(SCALES)  # multiplies or divides entry by entry
multiplies_entries = one_of(FACTORS)  # multiplies two arrays entry by entry
joins = one_of(JOINS)  # adds two arrays entry by entry
sums_entries = one_of(ADDS_UP | JOINS)  # the same, in either pass
adds_terms = one_of(JOINS_TERMS)  # adds up, or takes away, entry by entry
subtracts = one_of(DIFFERENCES)  # takes away entry by entry
squashes = one_of(SQUASHES)  # comes close to one only where it hardly changes
is_bounded = one_of(BOUNDED)  # returns no more than one, whatever it is given
is_exponential = one_of(EXPS)  # less one, or not
is_product_of_any_kind = one_of(PRODUCTS)  # in whatever dtype, with or without sums


def is_steep(eqn: Equation) -> bool:
    """Whether an equation makes much of the last digits, or is not known."""
    return eqn.primitive.name in STEEP or eqn.primitive.name not in _FOLLOWED


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
    if name in ops.allow and has_float32(eqn, dtype):
        if name not in PRODUCTS:
            return "product"
        if is_matrix_product(eqn, back=back) and has_default_precision(eqn):
            return "product"
    leaves_range = is_power(eqn) or is_steep_power(eqn) or scales_far(eqn)
    if name in ops.infer and not leaves_range and not _jaxpr.is_told_dtype(eqn):
        return "exact" if name in EXACT else "smooth"
    if retypes(eqn) or is_saved(eqn):
        return "exact"
    if name in CALLS and name not in ops.deny and not _jaxpr.takes_reference(eqn):
        return "call"
    return "keep"


def rounds(eqn: Equation) -> Sequence[bool]:
    """Returns which of its operands a product takes in 16 bits."""
    if is_attention(eqn):
        return takes_16_bits(eqn)
    return [True] * len(eqn.invars)


def is_written_in(eqn: Equation, ops: OpLists, dtype: np.dtype) -> bool:
    """Whether an equation is a matrix product that the user wrote in ``dtype``."""
    return eqn.primitive.name in ops.allow and _products.is_written_in(dtype, eqn)


def denied_by_user(ops: OpLists) -> frozenset[str]:
    """Returns the operations that would run in 16 bits by the default lists only."""
    usual = DEFAULT_OPS.allow | DEFAULT_OPS.infer
    return (usual - ops.allow - ops.infer) | (ops.deny - DEFAULT_OPS.deny)


def is_denied(eqn: Equation, denied: frozenset[str]) -> bool:
    """Whether the user denies an equation."""
    return eqn.primitive.name in denied


def may_matter(eqn: Equation, ops: OpLists) -> bool:
    """Whether 16 bits may come from an equation, jaxprs in it left aside."""
    name = eqn.primitive.name
    return name in ops.allow or name in STARTS or _jaxpr.call_kind(eqn) == "custom_vjp"


def is_told(eqn: Equation) -> bool:
    """Whether an equation is a product that asks for a precision of its own."""
    return is_product_of_any_kind(eqn) and not has_default_precision(eqn)


def is_small(eqn: Equation, *, back: bool = False) -> bool:
    """Whether a product is arithmetic, such as a rotation.

    The arguments are those of :func:`jaxmp._ops.products.is_matrix_product`.
    """
    return is_product_of_any_kind(eqn) and not is_matrix_product(eqn, back=back)


def negates(eqn: Equation) -> bool:
    """Whether an equation changes the sign of what it is given."""
    if multiplies(eqn):
        numbers = (_jaxpr.number_of(x) for x in eqn.invars)
        return any(x is not None and np.real(x) < 0 for x in numbers)
    return eqn.primitive.name in NEGATES


def folded(eqn: Equation, numbers: list[Any]) -> Any:
    """Returns what ``eqn`` makes of arrays of one number each, or None."""
    name = eqn.primitive.name
    if name in FOLDS:
        with np.errstate(all="ignore"):
            return FOLDS[name](*numbers)
    if _jaxpr.is_cast(eqn) and is_float32(eqn.outvars[0]):
        return np.float32(numbers[0])
    return numbers[0] if name in VIEWS and len(numbers) == 1 else None


def is_linear(eqn: Equation) -> bool:
    """Whether an equation adds up, chooses or moves, or casts."""
    return eqn.primitive.name in LINEAR or _jaxpr.is_cast(eqn)


def is_saved(eqn: Equation) -> bool:
    """Whether an equation returns the float32 that it is given, with all digits.

    A ``jax.checkpoint`` whose policy saves a value puts that behind it, so that XLA
    keeps no more digits of it in the forward pass.
    """
    bits = eqn.params.get("exponent_bits", 0), eqn.params.get("mantissa_bits", 0)
    return bits == (8, 23) and all(map(is_float32, eqn.invars))


def retypes(eqn: Equation) -> bool:
    """Whether an equation casts float32 to float32, of another weak type."""
    return _jaxpr.is_cast(eqn) and all(map(is_float32, (*eqn.invars, *eqn.outvars)))
