"""The first operation that makes a result wrong because its numbers leave float16.

A jaxpr is replayed with the digits of 16 bits, but without their limits: nothing becomes
zero, subnormal or Inf. Then the limits are put back, one operation after the other in
the order of the program, and the first that changes a result is the cause. What rounding
alone does to the results is in both, and so no zero counts that does not matter.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _jaxpr
from ._dtypes import is_narrow
from ._jaxpr import Equation
from ._numbers import Eaten, Numbers
from ._op_lists import EXACT
from ._places import Place
from ._scopes import FLOAT8_SCALED, module_of, without_repeats
from ._wide import bind_wide, platform_of
from ._wide_replay import Value, WideReplay, compiled, given

# A result is wrong that is off by more than this, and by more than twice of what
# rounding does. A gradient that has lost half of itself may train as well.
_TOLERANCE, _OF_GRADIENTS = 0.01, 0.5

# Numbers that may have been meant where 16 bits have left 0 and Inf.
_SMALL, _LARGE = 1e-8, 2.0**100


class Line(NamedTuple):
    """What a line of the user computes in a module, by operation."""

    operation: str
    dtype: np.dtype
    where: str
    module: str
    backward: bool


class Limit(NamedTuple):
    """An operation whose limits make a result wrong."""

    line: Line
    eqn: int  # the equation's `id`
    place: Place
    number: Eaten | None  # that it reads
    wrong: tuple[int, ...]  # the results


def line_of(operation: str, dtype: Any, place: Place) -> Line:
    """Returns the line that an operation belongs to."""
    module = module_of(without_repeats(place.scopes))
    return Line(operation, np.dtype(dtype), place.where, module, place.backward)


class Limits:
    """A program in which the limits of 16 bits hold for its first operations alone."""

    def __init__(
        self, jaxpr: Any, numbers: Numbers, around: Place, arrays: Sequence[Any]
    ):
        """Compiles it.

        Args:
            jaxpr: The jaxpr, closed.
            numbers: Those in the code that 16 bits have eaten.
            around: What is around its operations.
            arrays: Its arguments.
        """
        self.jaxpr, self.numbers, self.around = jaxpr, numbers, around
        self.platform, self._arrays = platform_of(arrays), arrays
        # The operations in their order, with their places and the numbers they read.
        self._found: dict[tuple[Line, int], tuple[Place, Eaten | None]] = {}
        self._order: dict[tuple[Line, int], int] = {}
        self._compiled = compiled(self._replay, *_settings(0), *arrays)

    def first(self, *, is_bad: bool) -> Limit | None:
        """Returns the first operation whose limits make a result wrong.

        Args:
            is_bad: Whether to look for what makes Inf or NaN of a result, else for what
                makes it wrong.
        """
        free = self._run(0)
        limit = self._first(free, self._wrong(free, is_bad=is_bad, small=0.0), 0.0)
        if limit is None and is_bad and not self.numbers.are_known:
            free = self._run(0, small=_SMALL)
            wrong = self._wrong(free, is_bad=True, small=_SMALL)
            return self._first(free, wrong, _SMALL)
        if limit is not None and limit.line.backward and not is_bad:
            # Tiny gradients may be none of a user's concern, unless most is lost.
            wrong = self._wrong(free, is_bad=False, small=0.0, tolerance=_OF_GRADIENTS)
            return self._first(free, wrong, 0.0)
        return limit

    def may_be_finite(self) -> bool:
        """Whether all is finite if numbers that nobody knows were small or large."""
        outs = self._run(0, small=_SMALL)
        return all(np.isfinite(x).all() for x in jax.device_get(outs) if _is_float(x))

    def is_on(
        self,
        count: Any,
        eqn: Equation,
        dtype: Any,
        place: Place,
        number: Eaten | None = None,
    ) -> Any:
        """Whether an operation is among the first ``count``; it is remembered."""
        key = line_of(eqn.primitive.name, dtype, place), id(eqn)
        _, known = self._found.get(key, (place, None))
        self._found[key] = place, known or number
        return jnp.int32(self._order.setdefault(key, len(self._order))) < count

    def _wrong(
        self, free: Any, *, is_bad: bool, small: float, tolerance: float = _TOLERANCE
    ) -> Any:
        """Returns a function of a number of operations: which results are wrong."""
        allowed = np.inf
        if not is_bad:
            exact = self._run(0, exact=True)
            by_rounding = np.array(_differences(free, exact))
            allowed = np.maximum(tolerance, 2 * by_rounding)
        limit = np.float32(np.finfo(np.float32).max) if is_bad else allowed

        def wrong(count):
            found = np.array(_differences(self._run(count, small=small), free))
            return tuple(map(int, np.flatnonzero(found > limit)))

        return wrong

    def _first(self, free: Any, wrong: Any, small: float) -> Limit | None:
        good, bad = 0, len(self._found)
        found = wrong(bad)
        if not found:
            return None
        while bad - good > 1:
            middle = (good + bad) // 2
            now = wrong(middle)
            good, bad = (good, middle) if now else (middle, bad)
        (line, eqn), (place, number) = [*self._found.items()][bad - 1]
        return Limit(line, eqn, place, number, found)

    def _run(self, count: int, *, exact: bool = False, small: float = 0.0) -> Any:
        return self._compiled(*_settings(count, exact, small), *self._arrays)

    def _replay(self, count: Any, exact: Any, small: Any, *arrays: Any) -> list[Any]:
        replay = _Replay(self, (count, exact, small))
        values = [given(x) for x in arrays]
        return [x.array for x in replay.run(self.jaxpr, values, self.around)]


class _Replay(WideReplay):
    """The replay, with the settings as they are here."""

    def __init__(self, limits: Limits, settings: Any, axes: tuple[Any, ...] = ()):
        super().__init__(limits.platform, settings, axes)
        self.limits, (self.count, self.exact, self.small) = limits, settings

    def among(self, scalars: Any, axes: tuple[Any, ...]) -> _Replay:
        """Returns the same replay on the shards of a shard_map."""
        return _Replay(self.limits, scalars, axes)

    def operands(self, eqn: Equation, ins: list[Value], place: Place) -> list[Value]:
        """Returns what an equation reads, with the numbers that 16 bits have eaten."""
        eaten = [self.limits.numbers.read_by(eqn, i) for i in range(len(ins))]
        return [
            x if number is None else Value(self._number(eqn, number))
            for x, number in zip(ins, eaten, strict=True)
        ]

    def constant(self, array: Any) -> Value:
        """Returns an array that the code has made, whose zeros may have been more."""
        value = given(array)
        if not is_narrow(array):
            return value
        return Value(jnp.where(value.array == 0, self.small, value.array))

    def _number(self, eqn: Equation, number: Eaten) -> Any:
        written = number.written
        if written is None:
            written = self.small if number.left == 0 else np.copysign(_LARGE, number.left)
        on = self.limits.is_on(self.count, eqn, number.dtype, number.place, number)
        return jnp.where(on, np.float32(number.left), jnp.float32(written))

    def operation(self, eqn: Equation, ins: list[Value], place: Place) -> list[Value]:
        """Applies an equation, and rounds what it gives."""
        outs = bind_wide(eqn, [x.array for x in ins])
        name = eqn.primitive.name
        if name in EXACT or FLOAT8_SCALED in place.scopes:
            return [Value(x) for x in outs]
        values = []
        for x, var in zip(outs, eqn.outvars, strict=True):
            if is_narrow(var.aval) and var.aval.dtype.itemsize == 2:
                on = self.limits.is_on(self.count, eqn, var.aval.dtype, place)
                x = _rounded(jnp.asarray(x), on, self.exact, var.aval.dtype)
            values.append(Value(x))
        return values


def _settings(count: int, exact: bool = False, small: float = 0.0) -> tuple[Any, ...]:
    return jnp.int32(count), jnp.bool_(exact), jnp.float32(small)


@functools.partial(jax.jit, static_argnums=3)  # traced once for all arrays of one type
def _rounded(x: jax.Array, on: Any, exact: Any, dtype: np.dtype) -> jax.Array:
    """Rounds float32 to the digits of a dtype, and where ``on`` to its limits."""
    digits = lax.reduce_precision(x, 8, jnp.finfo(dtype).nmant)
    narrow = lax.convert_element_type(lax.convert_element_type(x, dtype), x.dtype)
    return jnp.where(exact, x, jnp.where(on, narrow, digits))


@jax.jit
def _differences(outs: Sequence[Any], reference: Sequence[Any]) -> list[jax.Array]:
    """Returns the relative difference of each result.

    Inf where one is finite and the other is not, and where truth values differ.
    """
    return [_difference(x, y) for x, y in zip(outs, reference, strict=True)]


def _difference(x: jax.Array, y: jax.Array) -> jax.Array:
    if x.dtype == bool:
        return jnp.where(jnp.any(x != y), jnp.inf, 0.0)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return jnp.float32(0)
    finite = jnp.isfinite(x) & jnp.isfinite(y)
    differ = jnp.any(jnp.isfinite(x) != jnp.isfinite(y))
    x, y = jnp.where(finite, x, 0), jnp.where(finite, y, 0)
    unit = jnp.maximum(jnp.max(jnp.abs(y), initial=0), jnp.max(jnp.abs(x), initial=0))
    unit = jnp.where(unit > 0, unit, 1)
    away = jnp.sum(jnp.abs((x - y) / unit) ** 2)
    size = jnp.sum(jnp.abs(y / unit) ** 2)
    # As large as this where the other has nothing.
    error = jnp.sqrt(away) / jnp.maximum(jnp.sqrt(size), 1e-6)
    return jnp.where(differ, jnp.inf, error)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
