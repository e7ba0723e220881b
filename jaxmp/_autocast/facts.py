"""What is known of a value while the plan is made, and no array is there."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._jaxprs import jaxpr as _jaxpr


class Facts(NamedTuple):
    """What is known of a value; hashable.

    ``plan._outs`` sets them, and those that a loop adds `plan._loop`. Who reads each is
    beside it. A new one needs both, and a row in ``test_special_cases.py``.
    """

    # The 16-bit dtype that it has instead of float32, None if it has its own. Read by
    # everybody: `emit` keeps to it.
    dtype: np.dtype | None = None
    # An argument or a constant, or computed from such alone. Read by `decide`: inputs
    # are rounded where they are used, and biases are inputs.
    given: bool = False
    # Of a backward pass: what a matmul returned, or computed from such. Read by
    # `is_of_cotangent`: it may be rounded once more.
    cotangent: bool = False
    # Float32, and computed from what a matmul returned: 2 if elementwise, 1 if by
    # powers too. Read by `decide`: of sigmoids, and of parts of a product.
    product: int = 0
    # A cotangent of entries alike, as that of a mean is. Read by
    # `is_of_cotangent`: this one is not, as errors of copies add up.
    broadcast: bool = False
    # A tangent of a derivative rule, to be transposed. Read by `_loop` and by `emit`,
    # whose products then add up in float32.
    tangent: bool = False
    # What every entry equals, where that is known while tracing. Read by `holds` and
    # `fits`, and wherever a number may join 16 bits.
    scalar: Any = None
    # Stored in 16 bits for a matmul, and read from there by the backward pass in
    # float32: the axes over which it sums to one, if any. Read by `decide` and `emit`.
    stored: tuple[int, ...] | None = None
    # Read in float32 by the iterations of a scan that somebody may differentiate
    # outside of autocast, so that its gradients add up in float32. Read by `decide`.
    constant: bool = False
    # The iterations of a loop add it up, in float32: the facts of that sum. All others
    # read it in 16 bits, as the backward pass does. Read by `_with_exact` and `emit`.
    exact: "Facts | None" = None
    # Read exactly where it was computed, in a call or a loop. Read by `_plan`, which
    # then does not stack it in 16 bits.
    digits: bool = False
    # A sum of 16 bits and of an input, which is in range if these are. Read by `decide`
    # in float16.
    joined: bool = False
    # If given: the axes along which it repeats what it was broadcast from. Read by
    # `_adds_bias`.
    repeated: tuple[int, ...] = ()

    @property
    def half(self) -> bool:
        """Whether the value has 16 bits, and was float32."""
        return self.dtype is not None

    def rounded(self, dtype: np.dtype) -> "Facts":
        """Returns the facts of the value in 16 bits."""
        return Facts(dtype, self.given, tangent=self.tangent)

    def widened(self) -> "Facts":
        """Returns the facts of the value in its own dtype."""
        if self.dtype is None:
            return self
        return self._replace(dtype=None, stored=None, exact=None)

    def is_zero(self) -> bool:
        """Whether every entry is known to be zero."""
        return self.scalar is not None and self.scalar == 0

    def fits(self, dtype: np.dtype) -> bool:
        """Whether the value, if it is a number, is neither lost nor infinite."""
        if self.scalar is None:
            return True
        size, limits = float(abs(self.scalar)), jnp.finfo(dtype)
        if size == 0 or not math.isfinite(size):
            return True
        return float(limits.tiny) <= size <= float(limits.max)

    def holds(self, dtype: np.dtype) -> bool:
        """Whether ``dtype`` has the very number that the value is, if it is one."""
        number = self.scalar
        return number is None or number == np.asarray(number, dtype)


# Few differ that know no number, and one for each equation would be what the garbage
# collector goes through. Numbers are not shared: 0 is -0.
shared = functools.lru_cache(maxsize=4096)(Facts)
NOTHING = Facts()
GIVEN = Facts(given=True)


def of_literal(atom: Any) -> Facts:
    """Returns the facts of a literal."""
    number = _jaxpr.number_of(atom)
    if number is None:
        return GIVEN
    return Facts(given=True, scalar=np.asarray(number, atom.aval.dtype)[()])


def one_of(several: Sequence[Facts]) -> Facts:
    """Returns the facts of a value that is moved from one of several."""
    first, *others = several
    if not others:
        return first
    dtype = first.dtype if all([x.dtype == first.dtype for x in others]) else None
    is_stored = dtype is not None and any([x.stored is not None for x in several])
    return Facts(
        dtype,
        all([x.given for x in several]),
        tangent=any([x.tangent for x in several]),
        stored=() if is_stored else None,
        digits=any([x.digits for x in several]),
        repeated=repeated_by_all(several),
    )


def repeated_by_all(several: Sequence[Facts]) -> tuple[int, ...]:
    """Returns the axes along which each of several values repeats its entries."""
    first, *others = [x.repeated for x in several]
    return tuple([i for i in first if all([i in axes for axes in others])])
