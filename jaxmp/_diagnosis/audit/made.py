"""What a value in a jaxpr is made of, as far as hazards ask for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._jaxprs import jaxpr as _jaxpr
from ..._ops.lists import FOLDS

_LARGEST = 2**16  # of the constants of which the numbers are looked at

Products = frozenset[int]
NONE: Products = frozenset()


class Made(NamedTuple):
    """What a value is made of."""

    products: Products = NONE  # it is a sum of these, scaled
    twice: Products = NONE  # those that are in it twice, as 2xy is
    chosen: Products = NONE  # it is an index that was chosen by these
    rank: int = 0  # of the index, when it was chosen
    compared: Products = NONE  # it says where these are above something
    given: bool = False  # from arguments and numbers alone
    number: Any = None  # what every entry is, where that is known
    cancels: bool = False  # its numbers add up to zero, as those of a difference do
    doubled: bool = False  # it is twice something
    squared: bool = False  # a square
    squares: bool = False  # a sum with sums of squares in it
    norm: bool = False  # the root of such a sum
    total: bool = False  # a sum over an axis, scaled
    of_totals: bool = False  # one sum times another
    entries: Products = NONE  # each entry is made of the same entry of these
    counts: bool = False  # 0, 1, 2...
    random: bool = False  # with random numbers in it


def constant(array: Any) -> Made:
    """Returns what is known of an array that a jaxpr carries."""
    number, cancels = None, False
    is_known = not isinstance(array, _jaxpr.Tracer) and 0 < np.size(array) <= _LARGEST
    if is_known and isinstance(array.dtype, np.dtype):  # and no key
        numbers = np.asarray(array)
        if (numbers == numbers.flat[0]).all():
            number = _real(numbers.flat[0].item())
        else:
            cancels = bool(numbers.astype(complex).sum() == 0)
    return Made(given=True, number=number, cancels=cancels)


def literal(literal: Any) -> Made:
    """Returns what is known of a number in a jaxpr."""
    number = _real(literal.val) if np.ndim(literal.val) == 0 else None
    return Made(given=True, number=number)


def _real(number: Any) -> Any:
    return None if np.iscomplexobj(number) else number


def number_of(name: str, ins: Sequence[Made]) -> Any:
    """Returns what every entry of a result is, if that is known."""
    numbers = [x.number for x in ins]
    if name not in FOLDS or not numbers or any(x is None for x in numbers):
        return None
    with np.errstate(all="ignore"):
        return FOLDS[name](*(np.float64(x) for x in numbers))


def union(sets: Iterable[Products]) -> Products:
    return NONE.union(*sets)


def either(values: Sequence[Made]) -> Made:
    """Returns what is known of a value that is one of these."""
    first = values[0]
    if all(x == first for x in values):
        return first
    return Made(
        products=union(x.products for x in values),
        twice=union(x.twice for x in values),
        chosen=union(x.chosen for x in values),
        rank=max(x.rank for x in values),
        compared=union(x.compared for x in values),
        given=all(x.given for x in values),
        squares=any(x.squares for x in values),
        entries=union(x.entries for x in values),
        random=any(x.random for x in values),
    )
