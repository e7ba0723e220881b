"""What the rules of custom derivatives need inside autocast."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.custom_derivatives import SymbolicZero

from .jaxpr import Equation, is_inexact


@contextlib.contextmanager
def noted_as_rule() -> Iterator[None]:
    """Adds to the errors of a derivative's rule where autocast should be."""
    try:
        yield
    except Exception as error:
        error.add_note(
            "This is the rule of a custom derivative, inside `autocast` inside a "
            "gradient. If it works without `autocast`, put `autocast` outside: "
            "`autocast(jax.value_and_grad(loss))`."
        )
        raise


def replaced(items: Sequence[Any], places: Iterable[int], new: Iterable[Any]) -> list:
    """Returns ``items`` with those at ``places`` replaced."""
    changed = dict(zip(places, new, strict=True))
    return [changed.get(i, item) for i, item in enumerate(items)]


def places_of_moving(eqn: Equation, tangents: Iterable[Any]) -> list[int]:
    """Returns which inputs of ``eqn`` are differentiated.

    A rule is asked for these, and for nothing else.
    """
    return [
        i
        for i, (var, x) in enumerate(zip(eqn.invars, tangents, strict=True))
        if is_inexact(var) and not isinstance(x, SymbolicZero)
    ]
