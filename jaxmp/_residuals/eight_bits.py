"""Arrays in eight bits with a scale for each row, and truth values in one bit."""

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.checks import short
from .._jaxprs.scopes import EIGHT_BITS

Format = Literal["int8", "fp8"]
FORMATS: tuple[str, ...] = get_args(Format)

# In eight bits, as truth values in one bit each, as it is, or so that the compiler
# does not rather store what it is made of.
How = Literal["eight", "bits", "whole", "firm"]

DTYPES = {"int8": np.dtype(np.int8), "fp8": np.dtype(jnp.float8_e4m3fn)}
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_STORED = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(jnp.bfloat16))
FEW = 2**12  # numbers that are not worth it
_SHORT = 16  # numbers, beside which a scale is no small price
_TINY = 2.0**-100  # under the largest of a row the scale would be no normal number


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
    """A value as it is stored; of a scan, what its iterations have stored."""

    how: How = dataclasses.field(metadata={"static": True})
    aval: Any = dataclasses.field(metadata={"static": True})  # of the value
    arrays: tuple[jax.Array, ...]

    def restored(self) -> jax.Array:
        """Returns the value as the backward pass reads it."""
        first, *scale = self.arrays
        if self.how == "eight":
            return dequantized(first, scale[0], self.aval.dtype)
        return unpacked(first, self.aval.shape) if self.how == "bits" else first


def check_format(residuals: Any) -> None:
    """Refuses a wrong ``residuals``, which may be None."""
    if residuals is not None and residuals not in FORMATS:
        raise ValueError(
            f"`residuals` must be one of {', '.join(map(repr, FORMATS))} or None, but "
            f'is {short(residuals)}. "int8" is nearer to what is stored.'
        )


def stored(x: jax.Array, how: How, kind: str) -> Stored:
    """Stores a value for the backward pass.

    Args:
        x: The value.
        how: In how many bits.
        kind: Which eight bits.
    """
    aval = jax.typeof(x)
    with jax.named_scope(EIGHT_BITS):
        if how == "eight":
            return Stored(how, aval, quantized(x, kind))
        if how == "bits":
            return Stored(how, aval, (packed(x),))
    return Stored(how, aval, (lax.optimization_barrier(x) if how == "firm" else x,))


def is_small(aval: Any) -> bool:
    """Whether an array is too small to be worth anything."""
    return math.prod(aval.shape) < FEW


def fits(aval: Any) -> bool:
    """Whether an array can be stored in eight bits, and is worth it."""
    return aval.dtype in _STORED and not is_small(aval)


def packs(aval: Any) -> bool:
    """Whether an array of truth values can be stored in bits, and is worth it."""
    return aval.dtype == bool and not is_small(aval) and _axis(aval.shape) is not None


def quantized(x: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """Returns ``x`` in eight bits, and the scale of each row.

    A row is the last axis, or as many of the last as have 16 numbers. An Inf or a NaN
    in it makes its scale one, so that whoever reads the row sees NaN.
    """
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=_row(x.shape), keepdims=True)
    scale = jnp.maximum(largest, _TINY) / _LARGEST[kind]
    rows = wide / scale
    if kind == "int8":
        rows = lax.round(rows, lax.RoundingMethod.TO_NEAREST_EVEN)
    # XLA would see what the bits were made of, and keep that.
    return lax.optimization_barrier((rows.astype(DTYPES[kind]), scale))


def dequantized(rows: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns what :func:`quantized` has stored, in the dtype that it had."""
    return (rows.astype(jnp.float32) * scale).astype(dtype)


def packed(x: jax.Array) -> jax.Array:
    """Returns truth values as bits, eight in a byte."""
    axis = _axis(x.shape)
    assert axis is not None
    # Those that share a byte are neighbours, so that a sharded axis stays sharded.
    eights = (*x.shape[:axis], x.shape[axis] // 8, 8, *x.shape[axis + 1 :])
    eights = x.reshape(eights).astype(jnp.uint8)
    place = lax.broadcasted_iota(jnp.uint8, eights.shape, axis + 1)
    summed = jnp.sum(eights << place, axis=axis + 1, dtype=jnp.uint8)
    return lax.optimization_barrier(summed)


def unpacked(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the truth values of ``shape`` that :func:`packed` has stored."""
    axis = _axis(shape)
    assert axis is not None
    eights = jnp.expand_dims(x, axis + 1)
    places = [8 if i == axis + 1 else 1 for i in range(eights.ndim)]
    place = lax.broadcasted_iota(jnp.uint8, places, axis + 1)
    return ((eights >> place) & 1).astype(bool).reshape(shape)


def _row(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the axes of a row, counted from the end."""
    size, axes = 1, []
    while size < _SHORT and len(axes) < len(shape):
        axes.append(-1 - len(axes))
        size *= shape[axes[-1]]
    return tuple(axes)


def _axis(shape: tuple[int, ...]) -> int | None:
    """Returns the axis along which eight go into a byte, None if there is none."""
    return next((i for i, size in enumerate(shape) if size % 8 == 0), None)
