"""Means of squares that products take: they stay float32, with what they are of.

A variance is the mean of the squares less the square of the mean. What is left of the
two is small, and a product in 16 bits rounds each of them in its own way: the
structural similarity of two images (Wang et al., 2004), whose means are convolutions
with a window, comes out negative. So do the moments of a local norm, or of a pooling
by weights.

Where a number and its square are multiplied by the same window, or by the same weights,
these are such means. All products with that window stay float32, and so does what they
send back.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import _jaxpr
from ._jaxpr import Equation, Literal, is_inexact
from ._op_lists import FACTORS, VIEWS, is_square
from ._products import PRODUCTS
from ._scopes import FLOAT32, KEPT_FOR_MOMENTS
from ._twins import twins


def with_moments(eqns: Sequence[Equation]) -> Sequence[Equation]:
    """Returns the equations, those that take moments in a float32 region.

    Args:
        eqns: The equations of a jaxpr.
    """
    made = {var: eqn for eqn in eqns for var in eqn.outvars}
    means = {id(eqn): [*_means(eqn, made)] for eqn in eqns if _multiplies(eqn)}
    forward = (e for e in eqns if id(e) in means and not _jaxpr.is_transposed(e))
    pairs = [pair for eqn in forward for pair in means[id(eqn)]]
    squares = [(root, w) for x, w in pairs if (root := _squared(x, made)) is not None]
    if not squares:
        return eqns
    same = twins(eqns)  # A window may be written anew for each mean.

    def alike(*atoms: Any) -> tuple[Any, ...]:
        return tuple(
            str(x) if isinstance(x, Literal) else same.get(x, x) for x in atoms
        )

    averaged = {alike(*pair) for pair in pairs}
    windows = {alike(w) for x, w in squares if alike(x, w) in averaged}

    def in_region(eqn: Equation) -> Equation:
        if not any(alike(w) in windows for _, w in means.get(id(eqn), ())):
            return eqn
        return _jaxpr.in_scope(_jaxpr.in_scope(eqn, KEPT_FOR_MOMENTS), FLOAT32)

    return [*map(in_region, eqns)]


def _multiplies(eqn: Equation) -> bool:
    """Whether ``eqn`` is a product, or calls one and is given two arrays at most."""
    if eqn.primitive.name in PRODUCTS:
        return True
    if _jaxpr.call_kind(eqn) != "jit" or len(_arrays(eqn)) > 2:
        return False
    body = _jaxpr.open_jaxpr(next(_jaxpr.sub_jaxprs(eqn)))
    return any(map(_multiplies, body.eqns))


def _means(eqn: Equation, made: Mapping[Any, Equation]) -> Iterator[tuple[Any, Any]]:
    """Yields what ``eqn`` may average, and the window or the weights that it takes.

    A function that has its window in it stands for that, by its name.
    """
    arrays = _arrays(eqn)
    if len(arrays) == 1 and eqn.primitive.name not in PRODUCTS:
        name, *_ = _jaxpr.function_of(next(_jaxpr.sub_jaxprs(eqn)))
        yield from ((x, name) for x in _parts(arrays[0], made))
    if len(arrays) == 2:
        for x, window in (arrays, arrays[::-1]):
            yield from ((part, _unmoved(window, made)) for part in _parts(x, made))


def _parts(atom: Any, made: Mapping[Any, Equation]) -> Iterator[Any]:
    """Yields what ``atom`` is put together from."""
    atom = _unmoved(atom, made)
    eqn = None if isinstance(atom, Literal) else made.get(atom)
    if eqn is None or eqn.primitive.name not in VIEWS:
        yield atom
    else:
        for x in _arrays(eqn):
            yield from _parts(x, made)


def _arrays(eqn: Equation) -> list[Any]:
    return [x for x in eqn.invars if is_inexact(x)]


def _squared(atom: Any, made: Mapping[Any, Equation]) -> Any:
    """Returns of what ``atom`` is the square, None if of nothing."""
    eqn = None if isinstance(atom, Literal) else made.get(atom)
    if eqn is None:
        return None
    ins = [_unmoved(x, made) for x in eqn.invars]
    twice = eqn.primitive.name in FACTORS and ins[0] is ins[1]
    return ins[0] if twice or is_square(eqn) else None


def _unmoved(atom: Any, made: Mapping[Any, Equation]) -> Any:
    """Returns what ``atom`` is, before it was moved or cast."""
    while not isinstance(atom, Literal) and (eqn := made.get(atom)) is not None:
        if len(eqn.invars) != 1 or not (
            eqn.primitive.name in VIEWS or _jaxpr.is_cast(eqn)
        ):
            break
        (atom,) = eqn.invars
    return atom
