"""What the rules of custom derivatives need inside autocast."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


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
