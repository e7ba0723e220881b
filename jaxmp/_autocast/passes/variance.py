"""Means of a number and of its square, of which a variance is made, stay float32.

A variance is the mean of the squares less the square of the mean. What is left of the
two is small, and a product in 16 bits rounds each of them in its own way: the
structural similarity of two images (Wang et al., 2004), whose means are convolutions
with a window, comes out negative. So do the moments of a local norm, or of a pooling
by weights.

Where a number and its square are multiplied by the same window, or by the same weights,
and the square of one result is taken away from the other, these are such means. All
products with that window stay float32, and so do their cotangents.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation, Literal, is_cast, is_inexact
from ..._jaxprs.scopes import Asked, Scopes, in_region, is_backward
from ..._ops import products, table
from ..._ops.table import Definition
from .. import rules
from ..graph import definitions_of, twins

# What is averaged, and the window or the weights that it is averaged by.
Mean = tuple[Any, Any]


def variance(
    eqns: Sequence[Equation], jaxpr: Any, scopes: Scopes, asked: Asked
) -> Sequence[Equation]:
    """Returns the equations, those that take moments in a float32 region.

    A rewrite, see :mod:`jaxmp._autocast.passes`.
    """
    definition = definitions_of(eqns)
    read = [eqn for eqn in eqns if not asked.is_unread(eqn)]
    means = {eqn: [*_means(eqn, definition)] for eqn in read if _multiplies(eqn)}
    forward = {
        eqn: found
        for eqn, found in means.items()
        if not is_backward(eqn, scopes + _jaxpr.scope_names(eqn))
    }
    averaged = {x for found in forward.values() for x, _ in found}
    squares = {
        eqn.outvars[0]: factors
        for eqn in read
        if (factors := _factors(eqn, definition)) and averaged.issuperset(factors)
    }
    if not squares:  # as in most networks
        return eqns
    # A window may be written anew for each mean.
    same = twins(eqns)
    windows = _windows(read, forward, squares, same)
    return [
        in_region(eqn, rules.MOMENTS)
        if any(same.get(window, window) in windows for _, window in means.get(eqn, ()))
        else eqn
        for eqn in eqns
    ]


def _windows(
    eqns: Sequence[Equation],
    means: dict[Equation, list[Mean]],
    squares: dict[Any, tuple[Any, ...]],
    same: dict[Any, Any],
) -> set[Any]:
    """Returns the windows by which means of a number and of its square are taken."""
    mean_of = {
        (x, same.get(window, window)): eqn.outvars[0]
        for eqn, found in means.items()
        for x, window in found
    }
    # Of what each variable is a sum: squares, by their factors; means of squares, by
    # the means of the factors and the window; and squares of means. Each with its sign.
    #
    #     a = x * x         a: squared (x, x)
    #     m1 = x @ window
    #     m2 = a @ window   m2: mean (m1, m1) by this window
    #     b = m1 * m1       b: of means (m1, m1)
    #     v = m2 - b        v: both, with opposite signs, so they cancel
    terms: dict[Any, set[_Term]] = {}
    definition, windows = definitions_of(eqns), set[Any]()
    for eqn in eqns:
        made = set[_Term]()
        if factors := _factors(eqn, definition):
            if eqn.outvars[0] in squares:
                made.add(_Term("squared", squares[eqn.outvars[0]], frozenset(), 1))
            factors = tuple(_unscaled(x, definition) for x in factors)
            made.add(_Term("of means", factors, frozenset(), 1))
        for x, sign in _addends(eqn):
            made |= {x._replace(sign=sign * x.sign) for x in terms.get(x, ())}
        for x, window in means.get(eqn, ()):
            window = same.get(window, window)
            for term in terms.get(x, ()):
                # What is averaged by columns, after rows, is a square as well.
                found = tuple(mean_of.get((f, window)) for f in term.factors)
                if term.kind != "of means" and all(found):
                    by = term.windows | {window}
                    made.add(_Term("mean", found, by, term.sign))
        if made:
            terms.update(dict.fromkeys(eqn.outvars, made))
        windows.update(_cancelled(made))
    return windows


class _Term(NamedTuple):
    """What a variable is a sum of."""

    kind: str  # "squared", "mean" of what is squared, or "of means": a squared mean
    factors: tuple[Any, ...]  # two, or one twice
    windows: frozenset[Any]  # by which a mean was taken
    sign: int


def _cancelled(terms: Collection[_Term]) -> Iterator[Any]:
    """Yields the windows of means of squares of which squares of means are taken."""
    taken = {(frozenset(x.factors), -x.sign) for x in terms if x.kind == "of means"}
    for term in terms:
        if term.kind == "mean" and (frozenset(term.factors), term.sign) in taken:
            yield from term.windows


def _addends(eqn: Equation) -> Iterator[tuple[Any, int]]:
    """Yields what an equation adds up, moves or scales, each with its sign."""
    scaled = _scaled(eqn)
    for x in (scaled,) if scaled is not None else eqn.invars:
        if not isinstance(x, Literal) and (scaled or table.is_linear(eqn)):
            taken = table.subtracts(eqn) and x is eqn.invars[1]
            yield x, -1 if taken or table.negates(eqn) else 1


def _scaled(eqn: Equation) -> Any:
    """Returns what an equation divides, or multiplies by one number; None if nothing.

    A mean is a sum that is divided, before it is squared or after.
    """
    if not table.multiplies(eqn):
        return None
    if table.divisor(eqn) is not None:
        return None if isinstance(eqn.invars[0], Literal) else eqn.invars[0]
    arrays = [x for x in eqn.invars if x.aval.size != 1]
    return arrays[0] if len(arrays) == 1 else None


def _unscaled(atom: Any, definition: Definition) -> Any:
    """Returns the variable that was moved, cast or scaled to ``atom``."""
    while True:
        atom = _whole(atom, definition)
        eqn = None if isinstance(atom, str) else definition(atom)
        scaled = None if eqn is None else _scaled(eqn)
        if scaled is None:
            return atom
        atom = scaled


def _multiplies(eqn: Equation) -> bool:
    """Whether ``eqn`` is a product, or holds one and is given three arrays at most."""
    if table.is_product_of_any_kind(eqn):
        return True
    if table.is_elementwise(eqn):  # as most are, and holds nothing
        return False
    bodies = [*map(_jaxpr.open_jaxpr, _jaxpr.sub_jaxprs(eqn))]
    if not bodies or _jaxpr.call_kind(eqn) == "while" or not eqn.outvars:
        return False
    if len(_arrays(eqn)) > 3:
        return False
    return any(_multiplies(inner) for body in bodies for inner in body.eqns)


def _means(eqn: Equation, definition: Definition) -> Iterator[Mean]:
    """Yields what a product may average, also in a batch of several.

    A function that has its window in it stands for that.
    """
    arrays = _arrays(eqn)
    if len(arrays) == 1 and not table.is_product_of_any_kind(eqn):
        yield (
            _whole(arrays[0], definition),
            _jaxpr.function_of(next(_jaxpr.sub_jaxprs(eqn))),
        )
    for x, window in itertools.permutations(arrays, 2):
        made = definition(x)
        parts = (x,)
        if made is not None and products.is_batch(made, eqn):
            parts = made.invars
        for part in parts:
            yield _whole(part, definition), _whole(window, definition)


def _factors(eqn: Equation, definition: Definition) -> tuple[Any, ...]:
    """Returns what ``eqn`` multiplies entry by entry, which may be one array twice."""
    if not table.is_arithmetic(eqn):
        return ()
    if table.is_square(eqn):
        return (_whole(eqn.invars[0], definition),)
    if not table.multiplies_entries(eqn) or products.has_number(eqn):
        return ()
    return tuple(_whole(x, definition) for x in eqn.invars)


def _arrays(eqn: Equation) -> list[Any]:
    return [x for x in eqn.invars if is_inexact(x)]


def _whole(atom: Any, definition: Definition) -> Any:
    """Returns the variable that was moved or cast to ``atom``, or a number's digits."""
    while (eqn := definition(atom)) is not None and len(eqn.invars) == 1:
        if not table.is_view(eqn) and not is_cast(eqn):
            break
        (atom,) = eqn.invars
    return str(atom) if isinstance(atom, Literal) else atom
