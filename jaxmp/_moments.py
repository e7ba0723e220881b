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

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import _jaxpr
from ._jaxpr import Equation, Literal, is_inexact
from ._op_lists import FACTORS, JOINS, VIEWS, is_square
from ._products import PRODUCTS, has_number, is_batch
from ._scopes import KEPT_FOR_MOMENTS, Scopes, in_region, is_backward
from ._twins import same_constants, twins


def with_moments(
    eqns: Sequence[Equation], jaxpr: Any, scopes: Scopes
) -> Sequence[Equation]:
    """Returns the equations, those that take moments in a float32 region.

    Args:
        eqns: The equations of the jaxpr.
        jaxpr: The jaxpr, open or closed.
        scopes: Named scopes around it.
    """
    made = {var: eqn for eqn in eqns for var in eqn.outvars}
    means = {id(eqn): [*_means(eqn, made)] for eqn in eqns if _multiplies(eqn)}
    pairs = [
        (x, window, eqn)
        for eqn in eqns
        if id(eqn) in means and not is_backward(eqn, scopes + _jaxpr.scope_names(eqn))
        for x, window in means[id(eqn)]
    ]
    if not any(_factors(x, made) for x, *_ in pairs):
        return eqns
    # A window may be written anew for each mean, and is, by JAX 0.8, to go back.
    same = twins(eqns, same_constants(jaxpr))

    def alike(atom: Any) -> Any:
        return str(atom) if isinstance(atom, Literal) else same.get(atom, atom)

    averaged = {(alike(x), alike(window)): eqn for x, window, eqn in pairs}
    windows: set[Any] = set()
    second: dict[Any, list[Any]] = {}  # What is averaged twice, by rows and columns.
    for x, window, eqn in pairs:
        factors = second.get(alike(x)) or _factors(x, made)
        first = [averaged.get((alike(x), alike(window))) for x in factors]
        if factors and all(first):
            windows.add(alike(window))
            second[alike(eqn.outvars[0])] = [e.outvars[0] for e in first if e]

    def is_moment(eqn: Equation) -> bool:
        return any(alike(window) in windows for _, window in means.get(id(eqn), ()))

    return [in_region(e, KEPT_FOR_MOMENTS) if is_moment(e) else e for e in eqns]


def _multiplies(eqn: Equation) -> bool:
    """Whether ``eqn`` is a product, or holds one and is given three arrays at most."""
    if eqn.primitive.name in PRODUCTS:
        return True
    if _jaxpr.call_kind(eqn) in (None, "while") or not eqn.outvars:
        return False
    if len(_arrays(eqn)) > 3:
        return False
    bodies = map(_jaxpr.open_jaxpr, _jaxpr.sub_jaxprs(eqn))
    return any(_multiplies(inner) for body in bodies for inner in body.eqns)


def _means(eqn: Equation, made: Mapping[Any, Equation]) -> Iterator[tuple[Any, Any]]:
    """Yields what ``eqn`` may average, and the window or the weights that it takes.

    A function that has its window in it stands for that.
    """
    arrays = _arrays(eqn)
    if len(arrays) == 1 and eqn.primitive.name not in PRODUCTS:
        function = _jaxpr.function_of(next(_jaxpr.sub_jaxprs(eqn)))
        yield from ((x, function) for x in _parts(arrays[0], eqn, made))
    for x, window in itertools.permutations(arrays, 2):
        yield from ((part, _unmoved(window, made)) for part in _parts(x, eqn, made))


def _parts(atom: Any, reader: Equation, made: Mapping[Any, Equation]) -> Iterator[Any]:
    """Yields what ``reader`` averages of ``atom``, which may be a batch, or a sum."""
    eqn = _made(atom, made)
    if eqn is not None and is_batch(eqn, reader):
        yield from (_unmoved(x, made) for x in eqn.invars)
        return
    rest = [_unmoved(atom, made)]
    while rest:
        atom = rest.pop()
        eqn = _made(atom, made)
        if eqn is not None and eqn.primitive.name in JOINS:
            rest += [_unmoved(x, made) for x in eqn.invars]
        yield atom


def _factors(atom: Any, made: Mapping[Any, Equation]) -> list[Any]:
    """Returns the factors of which ``atom`` is made, entry by entry."""
    eqn = _made(atom, made)
    if eqn is None:
        return []
    if is_square(eqn):
        return [_unmoved(eqn.invars[0], made)]
    if eqn.primitive.name not in FACTORS or has_number(eqn):
        return []
    return [_unmoved(x, made) for x in eqn.invars]


def _arrays(eqn: Equation) -> list[Any]:
    return [x for x in eqn.invars if is_inexact(x)]


def _unmoved(atom: Any, made: Mapping[Any, Equation]) -> Any:
    """Returns what ``atom`` is, before it was moved or cast."""
    while (eqn := _made(atom, made)) is not None and len(eqn.invars) == 1:
        if eqn.primitive.name not in VIEWS and not _jaxpr.is_cast(eqn):
            break
        (atom,) = eqn.invars
    return atom


def _made(atom: Any, made: Mapping[Any, Equation]) -> Equation | None:
    """Returns the equation that computes ``atom``, None if there is none."""
    return None if isinstance(atom, Literal) else made.get(atom)
