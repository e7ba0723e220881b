"""The trails of all values of a jaxpr while it is replayed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._devices.varying import vary
from ..._jaxprs import jaxpr as _jaxpr
from ..wide_replay import wide_literal, widened
from . import trails as _trails
from .trails import INF_WRITTEN, NAN_WRITTEN, NEVER, Operation, Rows, bits_of, look

_LARGEST = float(jnp.finfo(jnp.float16).max)
_LOST = float(jnp.finfo(jnp.float16).smallest_subnormal) / 2  # and below

# Rows that every table of trails begins with.
FINITE, INF, NAN = range(3)


class Value(NamedTuple):
    """An array, and the row of its trail. Of booleans, those of what they have tested.

    The rows are of the table of the frame.
    """

    array: Any
    trails: tuple[int, ...]
    # Magnitudes of numbers in the code that it may hold as they stand, and that are Inf
    # or zero in float16.
    numbers: frozenset[float] = frozenset()
    given: int | None = None  # which of what the program is given it is

    @property
    def trail(self) -> int:
        """The row of a floating array."""
        return self.trails[0]


class Trails:
    """A table of the trails of all values of a jaxpr, in their order.

    What operations do to them is put off until somebody asks, and then done at once.
    """

    def __init__(
        self,
        depth: int,
        clock: Sequence[Any] = (),
        axes: tuple[Any, ...] = (),
        *,
        wide: bool = False,
        looking: bool = True,
    ):
        """Starts with nothing seen.

        Args:
            depth: How long a moment is.
            clock: What precedes the numbers of operations in a moment.
            axes: The mesh axes of the shard_maps around.
            wide: Whether 16-bit arrays are float32 in the replay.
            looking: Whether to look at the values.
        """
        self.depth, self.clock, self.axes = depth, clock, axes
        self.wide, self.looking = wide, looking
        finite = _trails.trail(depth, NEVER)
        inf = _trails.trail(depth, INF_WRITTEN)
        self._fixed = np.stack(
            [finite, inf, _trails.trail(depth, NAN_WRITTEN, nan=True)]
        )
        self._tables: list[Any] = [self._fixed]
        self._length = len(self._fixed)
        self._rows: list[Rows] = []
        # Operations that are still to be followed, and what was seen of them.
        self._pending: list[Operation] = []
        self._looks: list[Any] = []
        self._literals: dict[int, int] = {}  # rows of numbers in the code
        self._tested: set[int] = set()
        self._failed: list[Any] = []

    def grow(self, table: Any) -> int:
        """Adds trails to the table, and returns the row of the first."""
        self.follow()
        first = self._length
        self._tables.append(table)
        self._length += table.shape[0]
        return first

    def follow(self) -> None:
        """Follows Inf and NaN through the operations since the last time."""
        if not self._pending:
            return
        table = self.table()
        operations, self._pending = self._pending, []
        looks, self._looks = self._looks, []
        table, rows = _trails.followed(
            self.mark(table), self.mark(tuple(self.clock)), operations, looks, self.mark
        )
        self._tables = [table]
        self._rows.append(rows)

    def table(self) -> jax.Array:
        """Returns the trails of all values whose operations have been followed."""
        self._tables = [
            jnp.concatenate([self.mark(jnp.asarray(x)) for x in self._tables])
        ]
        return self._tables[0]

    def trails_of(self, values: Sequence[Value], atoms: Sequence[Any]) -> jax.Array:
        """Returns the trails of values; those that are not floating are finite."""
        self.follow()
        rows = [
            x.trail if is_inexact(atom) else FINITE
            for x, atom in zip(values, atoms, strict=True)
        ]
        return self.table()[np.array(rows, np.int32)]

    def first_failed(self) -> jax.Array:
        """Returns the first moment that made a test of finiteness fail."""
        self.follow()
        tested = self.table()[np.array(sorted(self._tested), np.int32), :-2]
        failed = [self.mark(x)[None] for x in self._failed]
        return _trails.first(jnp.concatenate([tested, *failed]))

    def rows(self) -> Rows:
        """Returns what was seen in this frame, in the order of its sites."""
        self.follow()
        rows = self._rows or [self.no_rows(0)]
        return Rows(*map(jnp.concatenate, zip(*rows, strict=True)))

    def no_rows(self, count: int) -> Rows:
        """Returns the rows of operations that have not run."""
        return self.mark(_trails.no_rows(self.depth, count))

    def mark(self, tree: Any) -> Any:
        """Marks scalars as what differs between the devices of a shard_map around."""
        return vary(tree, self.axes) if self.axes else tree

    def constant(self, array: Any) -> Value:
        """Returns an array that a jaxpr inside carries."""
        if not is_inexact_array(array) or not self.looking:
            return Value(array, (FINITE,))
        array = widened(jnp.asarray(array)) if self.wide else jnp.asarray(array)
        seen, (finite, inf, nan) = look(array), self._fixed
        trail = jnp.where(seen[2] > 0, nan, jnp.where(seen[3] > 0, inf, finite))
        return Value(array, (self.grow(trail[None]),))

    def literal(self, literal: Any) -> Value:
        """Returns a number in the code."""
        value = wide_literal(literal) if self.wide else literal.val
        number = np.asarray(value)
        if not is_inexact(literal) or np.iscomplexobj(number) or not self.looking:
            return Value(value, (FINITE,))
        with np.errstate(over="ignore"):
            size = float(np.abs(np.float32(literal.val)))
        is_outside = size > _LARGEST or 0 < size <= _LOST
        numbers = frozenset({size} if is_outside else ())
        if not np.isfinite(number):
            return Value(value, (NAN if np.isnan(number) else INF,), numbers)
        top = bits_of(number, np.float32)
        if top not in self._literals:
            self._literals[top] = self._length
            look = np.array([top, *[0] * 7], np.int32)
            self.append(Operation(None, (), np.dtype(np.float32)), look)
        return Value(value, (self._literals[top],), numbers)

    def append(self, operation: Operation, look: Any) -> int:
        """Adds an operation, and returns the row of its trail."""
        self._pending.append(operation)
        self._looks.append(self.mark(look))
        self._length += 1
        return self._length - 1

    def start(self, count: int, trails: Any) -> Any:
        """Returns what a loop carries along before its first trip."""
        never = jnp.asarray(_trails.trail(self.depth, NEVER)[:-2])
        return self.mark((jnp.int32(0), self.no_rows(count), never, trails))

    def after(
        self, arrays: Sequence[Any], table: Any, rows: Rows, failed: Any
    ) -> list[Value]:
        """Returns the results of an equation, and adds what was seen inside of it."""
        first = self.grow(table)
        self._rows.append(rows)
        self._failed.append(failed)
        return [Value(x, (first + i,)) for i, x in enumerate(arrays)]


def is_inexact(atom: Any) -> bool:
    """Whether a variable or literal is a floating or complex array."""
    return isinstance(atom.aval, _jaxpr.ShapedArray) and jnp.issubdtype(
        atom.aval.dtype, jnp.inexact
    )


def is_inexact_array(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
