"""The first operation that makes a result wrong because its numbers leave float16.

A jaxpr is replayed with the digits of 16 bits, but without their limits: nothing
becomes zero, subnormal or Inf. Then the limits are put back, one operation after the
other in the order of the program, and the first that changes a result is the cause.
What rounding alone does is in all of these runs, and a zero that changes no result does
not count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._base.dtypes import is_narrow
from ..._base.tree import is_inexact, is_ref
from ..._devices.varying import in_mesh_here
from ..._jaxprs.flatten import Flat
from ..._jaxprs.jaxpr import Equation, as_array
from ..._jaxprs.places import Place
from ..._jaxprs.scopes import FLOAT8_SCALED
from ..._ops.table import is_exact
from ..numbers import LostNumber, Numbers
from ..wide_replay import (
    Wide,
    WideReplay,
    bind_wide,
    compared,
    given,
    jitted,
)
from .origins import Run, Site
from .report import OF_GRADIENTS, TOLERANCE

_FRACTION = 2.0**-14  # from 1 to the smallest normal number of float16

# Numbers that may have been meant where 16 bits have left 0 and Inf.
_SMALL, _LARGE = 1e-8, 2.0**100


class Limit(NamedTuple):
    """An operation whose limits make a result wrong."""

    site: Site
    number: LostNumber | None  # that it reads
    wrong: tuple[int, ...]  # the results


class Limits:
    """A program in which the limits of 16 bits hold for its first operations alone."""

    def __init__(self, flat: Flat, run: Run, numbers: Numbers):
        """Prepares to replay a program that has run."""
        program = run.program
        self.jaxpr, self.around = program.closed, program.around
        self.platform, self._arrays = program.platform, flat.leaves
        self.numbers, self.sites = numbers, run.sites
        self._groups = [_tree_of(name, flat.names) for name in flat.out_names]
        self.next = 0  # the number of the next operation, while it is replayed
        # Those that have limits, and the numbers that they read.
        self._found: dict[int, LostNumber | None] = {}
        self._compiled = jitted(self._replay, self.platform)

    def first_bad(self) -> Limit | None:
        """Returns the first operation whose limits make Inf or NaN of a result."""
        for small in (0.0, _SMALL):
            free = self._run(0, small=small)

            def bad(count, free=free, small=small):
                return compared(self._run(count, small=small), free)[0]

            limit = self._first(bad)
            if limit is not None or self.numbers.are_known:
                return limit
        return None

    def first_wrong(self) -> Limit | None:
        """Returns the first operation whose limits make a result wrong."""
        free = self._run(0)
        by_rounding = 2 * self._errors(free, self._run(0, exact=True))

        def first(tolerance):
            allowed = np.maximum(tolerance, by_rounding)
            return self._first(lambda x: self._errors(self._run(x), free) > allowed)

        limit = first(TOLERANCE)
        if limit is not None and limit.site.place.backward:
            return first(OF_GRADIENTS)
        return limit

    def may_be_finite(self) -> bool:
        """Whether all is finite if numbers that nobody knows were small or large."""
        outs = self._run(0, small=_SMALL)
        return all(np.isfinite(x).all() for x in jax.device_get(outs) if is_inexact(x))

    def is_on(self, count: Any, number: LostNumber | None = None) -> Any:
        """Whether the operation is among the first ``count``; it is remembered."""
        site = self.next - 1
        self._found[site] = self._found.get(site) or number
        return jnp.int32(site) < count

    def _errors(self, outs: Any, reference: Any) -> np.ndarray:
        """Returns the relative error of each result; Inf where one is not finite.

        Of a tree of results, such as gradients, a leaf counts as no smaller than a
        fraction of the largest: what is below it makes no difference.
        """
        bad, away, size = map(np.array, compared(outs, reference))
        groups = np.array(self._groups)
        least = [_FRACTION * size[groups == group].max() for group in groups]
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.nan_to_num(away / np.maximum(size, least), posinf=np.inf)
        is_float = np.array([*map(is_inexact, outs)], bool)
        return np.where(bad & is_float, np.inf, errors)

    def _first(self, wrong: Callable[[int], Any]) -> Limit | None:
        """Returns the first operation with whose limits a result is wrong.

        ``wrong`` tells which results are, from the number of operations with limits.
        """
        sites = sorted(self._found)
        good, bad = -1, len(sites) - 1
        found = np.flatnonzero(wrong(sites[bad] + 1)) if sites else np.zeros(0)
        if not found.size:
            return None
        while bad - good > 1:
            middle = (good + bad) // 2
            is_wrong = np.any(wrong(sites[middle] + 1))
            good, bad = (good, middle) if is_wrong else (middle, bad)
        site = sites[bad]
        return Limit(self.sites[site], self._found[site], tuple(map(int, found)))

    def _run(self, count: int, *, exact: bool = False, small: float = 0.0) -> Any:
        settings = jnp.int32(count), jnp.bool_(exact), jnp.float32(small)
        return self._compiled(settings, *self._arrays)

    def _replay(self, settings: Any, *arrays: Any) -> list[Any]:
        self.next = 0
        outs = _LimitReplay(self, settings).outputs(arrays)
        assert self.next == len(self.sites), "both go through the same operations"
        return outs


class _LimitReplay(WideReplay):
    """The replay. The scalars are how many operations have limits, and two more.

    These are whether nothing is rounded at all, and what numbers may have been that
    are zero in the code.
    """

    def read(self, eqn: Equation, ins: list[Wide]) -> list[Wide]:
        self.program.next += 1
        return super().read(eqn, ins)

    def constant(self, array: Any) -> Wide:
        """Returns an array that the code has made, whose zeros may have been more."""
        value = given(array)
        if not is_narrow(array):
            return value
        _, _, small = map(in_mesh_here, self.scalars)
        return Wide(jnp.where(value.array == 0, small, value.array))

    def number(self, eqn: Equation, lost: LostNumber) -> Wide:
        """Returns what 16 bits have left of a number if ``eqn`` has their limits."""
        count, _, small = map(in_mesh_here, self.scalars)
        written = lost.written
        if written is None:
            large = np.copysign(_LARGE, lost.left)
            written = small if lost.left == 0 else large
        on = self.program.is_on(count, lost)
        return Wide(jnp.where(on, np.float32(lost.left), jnp.float32(written)))

    def operation(self, eqn: Equation, ins: list[Wide], place: Place) -> list[Wide]:
        outs = bind_wide(eqn, [x.array for x in ins])
        if is_exact(eqn) or FLOAT8_SCALED in place.scopes:
            return [Wide(x) for x in outs]
        count, exact, _ = map(in_mesh_here, self.scalars)
        for i, var in enumerate(eqn.outvars):
            rounds = is_narrow(var.aval) and var.aval.dtype.itemsize == 2
            if rounds and not is_ref(outs[i]):
                on = self.program.is_on(count)
                outs[i] = _rounded(as_array(outs[i]), on, exact, var.aval.dtype)
        return [*map(Wide, outs)]


@functools.partial(jax.jit, static_argnums=3)  # traced once for all arrays of one type
def _rounded(x: jax.Array, on: Any, exact: Any, dtype: np.dtype) -> jax.Array:
    """Rounds float32 to the digits of a dtype, and where ``on`` to its limits."""
    digits = lax.reduce_precision(x, 8, jnp.finfo(dtype).nmant)
    narrow = lax.convert_element_type(lax.convert_element_type(x, dtype), x.dtype)
    return jnp.where(exact, x, jnp.where(on, narrow, digits))


def _tree_of(name: str, arguments: Sequence[str]) -> str:
    """Returns the tree that a result is a leaf of, itself if that is not known.

    Gradients, moments and new parameters have the paths of the parameters.
    """
    found = [x for x in arguments if name == x or name.endswith(f"/{x}")]
    return name.removesuffix(max(found, key=len)) if found else f"{name} alone"
