"""Numbers in the code that 16 bits lose: 1e-8 is 0 in float16, and 1e9 is Inf.

The jaxpr in 16 bits has only what is left of them. What they were is read from the same
function traced in float32, where that has the same equation at the same place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._base.dtypes import is_narrow
from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.places import Place, equations
from .._ops.table import guards


class LostNumber(NamedTuple):
    """A number in the code that is 0 or Inf in 16 bits."""

    left: float  # what is left of it
    written: float | None  # what it was, None if nobody knows
    dtype: np.dtype
    place: Place  # of what reads it


class Numbers:
    """The numbers of a jaxpr that 16 bits may have lost, by who reads them."""

    def __init__(self, jaxpr: Any, twin: Callable[[], Any], around: Place):
        """Looks for them.

        Args:
            jaxpr: What is traced in 16 bits.
            twin: Traces the same function in float32, or returns None if that cannot
                be. It is called where a number of the jaxpr is 0 or Inf.
            around: What is around their operations.
        """
        # By the `id` of the equation that reads it, and as which operand.
        self.found: dict[tuple[int, int], LostNumber] = {}
        # Arrays that the code has made in 16 bits have lost their small numbers, too.
        consts = _jaxpr.closed_consts(jaxpr)
        self.has_zeros = any(
            is_narrow(x) and (np.asarray(x) == 0).any() for x in consts
        )
        ours = _by_place(jaxpr, around)
        if not any(_is_left(x) for group in ours.values() for _, _, x, _ in group):
            return
        in_float32 = twin()
        theirs = {} if in_float32 is None else _by_place(in_float32, around)
        for key, group in ours.items():
            others = [x for _, _, x, _ in theirs.get(key, [])]
            if len(others) != len(group):
                # One number, written or read again?
                is_one = len({float(x.val) for x in others}) == 1
                others = (others[:1] if is_one else [None]) * len(group)
            for (eqn, i, x, place), other in zip(group, others, strict=True):
                left, written = float(x.val), None
                if other is not None and not is_narrow(other.aval):
                    written = float(other.val)
                # Most zeros are meant, and so is what was written so.
                is_meant = left == 0 and not guards(eqn)
                if written is not None:
                    is_meant = left == written
                if _is_left(x) and not is_meant:
                    lost = LostNumber(left, written, x.aval.dtype, place)
                    self.found[id(eqn), i] = lost

    def __iter__(self) -> Iterator[LostNumber]:
        return iter(self.found.values())

    @property
    def are_known(self) -> bool:
        """Whether it is known of all of them what they were."""
        return not self.has_zeros and all(x.written is not None for x in self)


def _by_place(jaxpr: Any, around: Place) -> dict[Any, list[Any]]:
    """Returns the floating numbers in a jaxpr, by the operations that read them."""
    groups: dict[Any, list[Any]] = {}
    for eqn, place in equations(jaxpr, around):
        for i, x in enumerate(eqn.invars):
            number = _jaxpr.number_of(x)
            if number is not None and jnp.issubdtype(x.aval.dtype, jnp.floating):
                key = eqn.primitive.name, i, place.user, place.author, place.module
                groups.setdefault((*key, place.backward), []).append((eqn, i, x, place))
    return groups


def _is_left(literal: Any) -> bool:
    """Whether a number may be what is left of another."""
    value = literal.val
    return is_narrow(literal.aval) and bool(value == 0 or np.isinf(value))
