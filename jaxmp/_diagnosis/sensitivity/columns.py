"""Which columns of the data lose in 16 bits what tells their rows apart.

A year is 2016 on average and differs by 4 from one row to another; in bfloat16 the
numbers there are 8 apart. That cannot be seen in a program, but in its data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..._base.dtypes import is_narrow, is_wide
from ..._jaxprs import jaxpr as _jaxpr
from ..._ops.lists import VIEWS
from .report import RoundedColumn

# Of fewer rows some columns of any table have nearly the same value in all.
_ROWS = 8

# Which of the arguments of a program a value holds, all of them, only moved.
Held = frozenset[int]


def rounded_columns(
    jaxpr: Any,
    arrays: Sequence[Any],
    names: Sequence[str],
    first: int,
    tolerance: float,
) -> tuple[RoundedColumn, ...]:
    """Returns the columns that 16 bits round away from what float32 holds of them.

    These are the columns, along the last axis of an argument that is cast to 16 bits as
    it came, of which rounding moves the values by more than ``tolerance`` of their
    standard deviation, and float32 does not. An array with one axis is one column.

    Args:
        jaxpr: The program.
        arrays: Its arguments.
        names: Of its arguments.
        first: The number of the first argument that is data, and no parameter, which
            training moves to where it serves.
        tolerance: As a share of the standard deviation.
    """
    found = []
    for number, dtype in sorted(_casts(jaxpr, len(arrays))):
        if number >= first:
            found += _columns(names[number], arrays[number], dtype, tolerance)
    return tuple(found)


def _casts(jaxpr: Any, count: int) -> set[tuple[int, str]]:
    """Returns which arguments are cast to which 16-bit dtypes, as they came."""
    casts: set[tuple[int, str]] = set()

    def apply(eqn: _jaxpr.Equation, ins: list[Held]) -> list[Held]:
        nothing = [Held()] * len(eqn.outvars)
        if _jaxpr.call_kind(eqn):
            bodies = _jaxpr.call_layout(eqn).bodies
            outs = [run(x.jaxpr, [ins[i] for i in x.operands]) for x in bodies]
            is_call = len(outs) == 1 and _jaxpr.call_kind(eqn) != "scan"
            return outs[0] if is_call else nothing
        held = Held().union(*ins)
        if not held or len(nothing) != 1:
            return nothing
        out = eqn.outvars[0].aval
        if _jaxpr.is_cast(eqn):
            if is_narrow(out) and out.dtype.itemsize == 2:
                casts.update((i, out.dtype.name) for i in held)
            return [held] if is_wide(out) else nothing
        sizes = [var.aval.size for var, x in zip(eqn.invars, ins, strict=True) if x]
        is_whole = out.size >= max(sizes)  # no slice, of which nobody may read the rest
        return [held] if is_whole and eqn.primitive.name in VIEWS else nothing

    def run(body: Any, ins: Sequence[Held]) -> list[Held]:
        return _jaxpr.interpret(
            body, ins, apply, const=lambda _: Held(), literal=lambda _: Held()
        )

    run(jaxpr, [Held([i]) for i in range(count)])
    return casts


def _columns(
    name: str, x: Any, dtype: str, tolerance: float
) -> Iterator[RoundedColumn]:
    """Yields the columns of one argument."""
    x = jnp.asarray(x)
    is_number = any(jnp.issubdtype(x.dtype, kind) for kind in (np.floating, np.integer))
    if not is_number or is_narrow(x) or not x.ndim or not x.size:
        return
    rows = x.astype(jnp.float32).reshape(-1, x.shape[-1] if x.ndim > 1 else 1)
    if len(rows) < _ROWS:
        return
    # Not compiled as one, in which XLA may leave out both casts.
    left = rows.astype(dtype).astype(jnp.float32)
    narrow, wide = jax.device_get(_errors(rows, left))
    for i in np.flatnonzero((narrow > tolerance) & (wide <= tolerance)):
        counts = int(_distinct(rows[:, i])), int(_distinct(left[:, i]))
        column = None if x.ndim == 1 else int(i)
        yield RoundedColumn(name, column, dtype, *counts, float(narrow[i]))


@jax.jit
def _errors(x: jax.Array, left: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns what rounding moves each column by, over its standard deviation.

    That of 16 bits, and at most that of float32; NaN if the column is constant, or not
    finite.

    Args:
        x: float32[rows, columns].
        left: What 16 bits have left of it.
    """
    # Squares of the numbers themselves might leave float32.
    away = x - x[0]
    unit = jnp.max(jnp.abs(away), axis=0)
    spread = jnp.std(away / unit, axis=0)
    moved = jnp.std((left - x) / unit, axis=0)
    spacing = jnp.finfo(jnp.float32).eps * jnp.max(jnp.abs(x), axis=0) / unit
    return moved / spread, spacing / spread


@jax.jit
def _distinct(x: jax.Array) -> jax.Array:
    """Returns how many different values there are."""
    return 1 + jnp.sum(jnp.diff(jnp.sort(x)) != 0)
