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

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import _jaxpr
from ._definitions import definitions_of, unmoved
from ._jaxpr import Equation, Literal, is_inexact
from ._op_lists import FACTORS, JOINS, Definition, is_square
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
    definition = definitions_of(eqns)
    products = [eqn for eqn in eqns if _multiplies(eqn)]
    seen: dict[Any, set[int]] = collections.defaultdict(set)
    pairs = [
        (x, window, eqn)
        for eqn in products
        if not is_backward(eqn, scopes + _jaxpr.scope_names(eqn))
        for whole, window in _means(eqn, definition)
        for x in _parts(whole, eqn, definition, seen[_identity(window)])
    ]
    consts = frozenset(_jaxpr.open_jaxpr(jaxpr).constvars)

    def looks(atom: Any) -> Any:
        """Returns what two variables share if they are computed in the same way."""
        if isinstance(atom, Literal):
            return str(atom)
        made = definition(atom)
        if made is None and atom not in consts:
            return atom
        return made and made.primitive, atom.aval.shape

    if not _windows(pairs, looks, definition):  # as in most networks, and found fast
        return eqns
    # A window may be written anew for each mean, and is, by JAX 0.8, to go back.
    same = twins(eqns, same_constants(jaxpr))

    def alike(atom: Any) -> Any:
        return str(atom) if isinstance(atom, Literal) else same.get(atom, atom)

    windows = _windows(pairs, alike, definition)
    if not windows:
        return eqns
    moments = {
        id(eqn)
        for eqn in products
        if any(alike(window) in windows for _, window in _means(eqn, definition))
    }
    return [in_region(e, KEPT_FOR_MOMENTS) if id(e) in moments else e for e in eqns]


def _windows(
    pairs: Sequence[tuple[Any, Any, Equation]],
    alike: Callable[[Any], Any],
    definition: Definition,
) -> set[Any]:
    """Returns the windows by which means of a number and of its square are taken.

    Args:
        pairs: What is averaged, by which window, and by which product.
        alike: Returns what a variable shares with those that are taken for the same.
        definition: Returns the equation that computes a variable, None for an input.
    """
    averaged = {(alike(x), alike(window)): eqn for x, window, eqn in pairs}
    windows: set[Any] = set()
    second: dict[Any, list[Any]] = {}  # What is averaged twice, by rows and columns.
    for x, window, eqn in pairs:
        factors = second.get(alike(x)) or _factors(x, definition)
        first = [averaged.get((alike(x), alike(window))) for x in factors]
        if factors and all(first):
            windows.add(alike(window))
            second[alike(eqn.outvars[0])] = [e.outvars[0] for e in first if e]
    return windows


def _multiplies(eqn: Equation) -> bool:
    """Whether ``eqn`` is a product, or holds one and is given three arrays at most."""
    if eqn.primitive.name in PRODUCTS:
        return True
    bodies = [*map(_jaxpr.open_jaxpr, _jaxpr.sub_jaxprs(eqn))]
    if not bodies or _jaxpr.call_kind(eqn) == "while" or not eqn.outvars:
        return False
    if len(_arrays(eqn)) > 3:
        return False
    return any(_multiplies(inner) for body in bodies for inner in body.eqns)


def _means(eqn: Equation, definition: Definition) -> Iterator[tuple[Any, Any]]:
    """Yields what ``eqn`` may average, and the window or the weights that it takes.

    A function that has its window in it stands for that.
    """
    arrays = _arrays(eqn)
    if len(arrays) == 1 and eqn.primitive.name not in PRODUCTS:
        function = _jaxpr.function_of(next(_jaxpr.sub_jaxprs(eqn)))
        yield arrays[0], function
    for x, window in itertools.permutations(arrays, 2):
        yield x, unmoved(window, definition)


def _parts(
    atom: Any, reader: Equation, definition: Definition, seen: set[int]
) -> Iterator[Any]:
    """Yields what ``reader`` averages of ``atom``, which may be a batch, or a sum.

    The parts of a sum that were yielded before are left out, as a sum of hundreds of
    results is read by hundreds of products.

    Args:
        atom: What is averaged.
        reader: The product that averages it.
        definition: Returns the equation that computes a variable, None for an input.
        seen: The sums, and their parts, that were averaged by the same window before;
            others are added.
    """
    eqn = definition(atom)
    if eqn is not None and is_batch(eqn, reader):
        yield from (unmoved(x, definition) for x in eqn.invars)
        return
    whole = unmoved(atom, definition)
    yield whole
    rest = [whole]
    while rest:
        atom = rest.pop()
        if id(atom) in seen:
            continue
        seen.add(id(atom))
        if atom is not whole:
            yield atom
        eqn = definition(atom)
        if eqn is not None and eqn.primitive.name in JOINS:
            rest += [unmoved(x, definition) for x in eqn.invars]


def _factors(atom: Any, definition: Definition) -> list[Any]:
    """Returns the factors of which ``atom`` is made, entry by entry."""
    eqn = definition(atom)
    if eqn is None:
        return []
    if is_square(eqn):
        return [unmoved(eqn.invars[0], definition)]
    if eqn.primitive.name not in FACTORS or has_number(eqn):
        return []
    return [unmoved(x, definition) for x in eqn.invars]


def _identity(window: Any) -> Any:
    """Returns what tells a window apart, a variable or a literal or a function."""
    return window if isinstance(window, tuple) else id(window)


def _arrays(eqn: Equation) -> list[Any]:
    return [x for x in eqn.invars if is_inexact(x)]
