"""What is known of single arrays, for as long as they live."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import jax


class Marked:
    """Arrays of JAX that something is known of: gradients, say, that were divided.

    By their identity, as an array takes no attributes, and users are returned nothing
    but arrays. They are held weakly: none lives longer for it, and no id is used again.
    Threads may add and ask at once.
    """

    def __init__(self) -> None:
        self._by_id = weakref.WeakValueDictionary[int, Any]()

    def add(self, arrays: Iterable[Any]) -> None:
        """Adds the arrays of JAX among some values."""
        for x in arrays:
            if isinstance(x, jax.Array):
                self._by_id[id(x)] = x

    def __contains__(self, x: Any) -> bool:
        return isinstance(x, jax.Array) and self._by_id.get(id(x)) is x
