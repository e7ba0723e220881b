"""What autocast knows of an operation by its name: its class, and what it does.

The names themselves are with the lists, in :mod:`jaxmp._ops.lists`. No other module of
the engine looks at one.
"""

import functools
from typing import Any, Literal, NamedTuple

import numpy as np

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation, is_float32
from .._ops import products as _products
from .._ops.lists import (
    ADDS_UP,
    ARITHMETIC,
    BOUNDED,
    CALLS,
    COMPARES,
    COPIES,
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
    ORDERS,
    PICKS,
    REMAINDERS,
    SCALES,
    SQUASHES,
    STARTS,
    STEEP,
    STRETCHES,
    TRANSPOSES,
    VIEWS,
    OpLists,
    is_power,
    is_steep_power,
)
from .._ops.lists import divisor as divisor
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


class Does(NamedTuple):
    """What an operation does with the numbers that it is given."""

    picks: bool  # returns numbers that it was given
    hands_on: bool  # elementwise: what is lost before is lost behind
    is_steep: bool  # makes much of the last digits, or is not known
    squashes: bool  # comes close to one only where it hardly changes
    multiplies: bool  # multiplies or divides entry by entry
    joins: bool  # adds two arrays entry by entry
    subtracts: bool  # a remainder is a difference too
    compares: bool


@functools.cache
def _does(name: str) -> Does:
    return Does(
        picks=name in PICKS,
        hands_on=name in ARITHMETIC or name in HANDS_ON,
        is_steep=name in STEEP or name not in _FOLLOWED,
        squashes=name in SQUASHES,
        multiplies=name in SCALES,
        joins=name in JOINS,
        subtracts=name in DIFFERENCES | REMAINDERS,
        compares=name in COMPARES,
    )


def does(eqn: Equation) -> Does:
    """Returns what an equation does."""
    return _does(eqn.primitive.name)


def classify(eqn: Equation, ops: OpLists, dtype: np.dtype) -> Class:
    """Returns the class of an equation that no user keeps in float32."""
    name = eqn.primitive.name
    if name in ops.allow and has_float32(eqn, dtype):
        if name not in PRODUCTS:
            return "product"
        if is_matrix_product(eqn) and has_default_precision(eqn):
            return "product"
    leaves_range = is_power(eqn) or is_steep_power(eqn) or scales_far(eqn)
    if name in ops.infer and not leaves_range and not _jaxpr.is_told_dtype(eqn):
        return "exact" if name in EXACT else "smooth"
    if retypes(eqn):
        return "exact"
    if name in CALLS and name not in ops.deny and not _jaxpr.takes_reference(eqn):
        return "call"
    return "keep"


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


def is_product_of_any_kind(eqn: Equation) -> bool:
    """Whether an equation is a product in whatever dtype, with or without sums."""
    return eqn.primitive.name in PRODUCTS


def is_told(eqn: Equation) -> bool:
    """Whether an equation is a product that asks for a precision of its own."""
    return is_product_of_any_kind(eqn) and not has_default_precision(eqn)


def is_outer(eqn: Equation) -> bool:
    """Whether a product multiplies entries and sums none up."""
    return is_product_of_any_kind(eqn) and not is_matrix_product(eqn)


def is_view(eqn: Equation) -> bool:
    """Whether an equation returns what it was given in another shape or place."""
    return eqn.primitive.name in VIEWS


def negates(eqn: Equation) -> bool:
    """Whether an equation changes the sign of what it is given."""
    if does(eqn).multiplies:
        literals = (x for x in eqn.invars if isinstance(x, _jaxpr.Literal))
        return any(np.all(np.real(x.val) < 0) for x in literals)
    return eqn.primitive.name in NEGATES


def is_extreme(eqn: Equation) -> bool:
    """Whether an equation returns the larger, or the smaller, of two numbers."""
    return eqn.primitive.name in EXTREMES


def tests(eqn: Equation) -> bool:
    """Whether an equation tells how two numbers compare."""
    return eqn.primitive.name in ORDERS | EQUALITIES


def tests_equal(eqn: Equation) -> bool:
    """Whether an equation tells where two numbers are equal, or are not."""
    return eqn.primitive.name in EQUALITIES


def copies(eqn: Equation) -> bool:
    """Whether the transpose of an equation adds up what it has copied."""
    return eqn.primitive.name in COPIES


def stretches(eqn: Equation) -> bool:
    """Whether an equation stretches operands of size one along an axis."""
    return eqn.primitive.name in STRETCHES


def adds_terms(eqn: Equation) -> bool:
    """Whether an equation adds up, or takes away, entry by entry."""
    return eqn.primitive.name in JOINS_TERMS


def folded(eqn: Equation, numbers: list[Any]) -> Any:
    """Returns what ``eqn`` makes of arrays of one number each, or None."""
    name = eqn.primitive.name
    if name in FOLDS:
        with np.errstate(all="ignore"):
            return FOLDS[name](*numbers)
    if _jaxpr.is_cast(eqn) and is_float32(eqn.outvars[0]):
        return np.float32(numbers[0])
    return numbers[0] if name in VIEWS and len(numbers) == 1 else None


def gathers(eqn: Equation) -> bool:
    """Whether an equation brings the shards of an array to every device."""
    return eqn.primitive.name in GATHERS


def sums_entries(eqn: Equation) -> bool:
    """Whether an equation adds two arrays entry by entry, in either pass."""
    return eqn.primitive.name in ADDS_UP | JOINS


def transposes(eqn: Equation) -> bool:
    """Whether an equation puts the axes of an array in another order."""
    return eqn.primitive.name in TRANSPOSES


def is_bounded(eqn: Equation) -> bool:
    """Whether an equation returns no more than one, whatever it is given."""
    return eqn.primitive.name in BOUNDED


def multiplies_entries(eqn: Equation) -> bool:
    """Whether an equation multiplies two arrays entry by entry."""
    return eqn.primitive.name in FACTORS


def is_linear(eqn: Equation) -> bool:
    """Whether an equation adds up, chooses or moves, or casts."""
    return eqn.primitive.name in LINEAR or _jaxpr.is_cast(eqn)


def is_exponential(eqn: Equation) -> bool:
    """Whether an equation is an exponential, less one or not."""
    return eqn.primitive.name in EXPS


def retypes(eqn: Equation) -> bool:
    """Whether an equation casts float32 to float32, of another weak type."""
    return _jaxpr.is_cast(eqn) and all(map(is_float32, (*eqn.invars, *eqn.outvars)))
