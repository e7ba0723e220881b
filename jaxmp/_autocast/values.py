"""A value during the replay: its array, and the few facts that decisions stand on.

One invariant keeps the replay safe: a value has its original dtype or, if that was
float32, the 16-bit one, and whoever is not known to accept the latter gets the former.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import FLOAT32, Equation
from .._jaxprs.scopes import SATURATED
from .._ops.lists import is_far
from .._ops.narrow import firmly_rounded


class Known(NamedTuple):
    """What is known of a value beside its array; hashable."""

    half: bool = False  # it has 16 bits, and was float32
    given: bool = False  # an argument or a constant, or computed from such alone
    sent: bool = False  # a product has sent it back, or what it is made of
    # In float32, for some reader, and made elementwise of what a product returned.
    product: bool = False
    # The trips of a loop add it up in float32, and whatever else reads it reads what
    # the backward pass does: the same, rounded.
    stream: bool = False
    copied: bool = False  # sent back to many entries alike, as a mean does
    linear: bool = False  # it comes from the tangents of a rule, to be transposed
    scalar: Any = None  # what every entry equals, where that is known while tracing
    # Rounded for a product, and read from there by the backward pass, in float32: the
    # axes over which it sums to one, if any.
    kept: tuple[int, ...] | None = None

    def of(self, array: Any) -> "Value":
        """Returns a value of which this is known."""
        return Value(array, self)

    def in_body(self, *, is_cast: bool = False) -> "Known":
        """Returns what is told to a jaxpr that is rewritten for such values.

        A layer that is called with its number is the same layer for each number.

        Args:
            is_cast: Whether an integer is made a float there, as a zero in a `where`.
        """
        told = is_cast or getattr(self.scalar, "dtype", None) == FLOAT32
        return self if told else self._replace(scalar=None)


_NOTHING = Known()


@dataclasses.dataclass(slots=True)
class Value:
    """A value during the replay."""

    # Array, tracer or literal: of the original dtype; or 16-bit if `half`, in the dtype
    # of the pass that has computed it.
    array: Any
    known: Known = _NOTHING
    exact: "Value | None" = None  # what the trips add up, where others read it rounded
    _wide: Any = None
    _half: Any = None

    def note(self, **facts: Any) -> None:
        """Notes some facts."""
        self.known = self.known._replace(**facts)

    def is_float32(self) -> bool:
        """Whether the value is a float32 array, and no number in the code."""
        if self.known.half or self.known.scalar is not None:
            return False
        return getattr(self.array, "dtype", None) == FLOAT32

    def is_zero(self) -> bool:
        """Whether every entry is known to be zero."""
        return self.known.scalar is not None and self.known.scalar == 0

    def is_far(self) -> bool:
        """Whether the value is a number that brings others into range, or out of it."""
        return is_far(self.known.scalar)

    def fits(self, dtype: np.dtype) -> bool:
        """Whether the value, if it is a number, is neither lost nor infinite."""
        if self.known.scalar is None:
            return True
        size, limits = float(abs(self.known.scalar)), jnp.finfo(dtype)
        if size == 0 or not math.isfinite(size):
            return True
        return float(limits.tiny) <= size <= float(limits.max)

    def holds(self, dtype: np.dtype) -> bool:
        """Whether ``dtype`` has the very number that the value is, if it is one."""
        number = self.known.scalar
        return number is None or number == np.asarray(number, dtype)

    def wide(self) -> Any:
        """Returns the array in its original dtype."""
        if not self.known.half:
            return self.array
        if self._wide is None:  # shared, so that its cotangents add up in float32
            wide = cast(self.array, FLOAT32)
            if self.known.kept:  # what rounding has left of the sums is taken out
                wide = wide / jnp.sum(wide, self.known.kept, keepdims=True)
            self._wide = wide
        return self._wide

    def widened(self) -> "Value":
        """Returns the value in its original dtype."""
        if not self.known.half:
            return self
        return self.known._replace(half=False, kept=None).of(self.wide())

    def narrow(self, dtype: np.dtype) -> Any:
        """Returns the array in ``dtype``, which has 16 bits."""
        if self.array.dtype == dtype:
            return self.array
        if not isinstance(self.array, jax.Array):  # a literal
            return np.asarray(self.array, dtype)
        if self.known.given:
            # A weight is rounded anew for each use, so that its gradients are widened
            # before they add up.
            return cast(self.array, dtype)
        if self._half is None or self._half.dtype != dtype:
            self._half = cast(self.array, dtype)
        return self._half

    def rounded(self, dtype: np.dtype) -> "Value":
        """Returns the value rounded, for all who read it."""
        return Value(self.narrow(dtype), Known(half=True, linear=self.known.linear))


def streamed(value: Value, dtype: np.dtype) -> Value:
    """Returns a sum over trips as its readers see it, and beside it as it adds up."""
    seen = value.rounded(dtype)
    seen.array = firmly_rounded(seen.array)  # or else XLA may take the sum itself
    seen.exact = value.known._replace(stream=False).of(value.array)
    return seen


def given(array: Any) -> Value:
    """Returns a value that comes from outside: an argument or a constant."""
    return Value(array, Known(given=True))


def literal(atom: Any) -> Value:
    """Returns the value of a literal."""
    number = _jaxpr.number_of(atom)
    if number is None:
        return given(atom.val)
    scalar = np.asarray(number, atom.aval.dtype)[()]
    return Value(atom.val, Known(given=True, scalar=scalar))


def cast(array: Any, dtype: np.dtype) -> Any:
    """Returns an array in another dtype.

    It is ``lax.convert_element_type`` without its checks, traced once for each type:
    there are hundreds in a step.
    """
    return _jaxpr.bind(_cast_of(jax.typeof(array), dtype), [array])[0]


@functools.lru_cache(maxsize=4096)
def _cast_of(aval: Any, dtype: np.dtype) -> Equation:
    def cast(x):
        return lax.convert_element_type_p.bind(
            x, new_dtype=dtype, weak_type=False, sharding=None
        )

    (eqn,) = _jaxpr.trace(cast, [aval]).eqns
    return eqn


def saturated(array: Any, dtype: np.dtype) -> Any:
    """Clips what is finite to the range of ``dtype``: a mask of -1e9 is no -inf."""
    limit = np.float32(jnp.finfo(dtype).max)
    with jax.named_scope(SATURATED):
        clipped = lax.clamp(-limit, array, limit)
        return lax.select(lax.is_finite(array), clipped, array)
