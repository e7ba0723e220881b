"""Float32 arrays in 8 bits a number, with a scale for each block of a row."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Of a row that is no multiple of it, the blocks are shorter. Updates read the numbers
# twice, to find the units and to use them, and with so many in a block the units are
# next to nothing of it. torchao and bitsandbytes have 256, too.
_LONGEST = 256
_TOP, _TOP_OF_POSITIVE = 127, 255  # the largest codes
# The smallest of a positive number, among positive ones. Of the largest it is 2.5e-4
# squared, where the code 1 of others is 6e-5: an average that is rounded up to it and
# divided by such a root stays in the size of other updates.
_LEAST = 2
_TINY = np.float32(2.0**-126)  # the smallest normal number


class Int8Blocks(NamedTuple):
    """A float32 array in 8 bits a number, as ``state_dtype="int8"`` stores moments.

    Every block of at most 256 numbers along the last axis has a unit. A quantised
    value ``c`` stands for ``c * |c|`` units, from -127 to 127, so that the numbers are
    dense near zero. In a block without negative numbers, as second moments have them,
    values from 0 to 255 stand for ``c**4`` units: the root of such a number is as dense
    as the others are, and none that is positive becomes zero, by which an optimizer
    would divide. :func:`jaxmp.cast_state` makes float32 of them.

    Attributes:
        codes: The quantised values, int8, of the shape of the array. Those from 0 to
            255 are 128 less here.
        units: bfloat16 ``[..., blocks]``, negative where no number of a block is.
    """

    codes: jax.Array
    units: jax.Array


def is_blocks(x: Any) -> bool:
    return isinstance(x, Int8Blocks)


@jax.jit
def decode(blocks: Int8Blocks) -> jax.Array:
    """Returns the float32 array that codes stand for."""
    unit = _of_each(blocks.units.astype(jnp.float32), blocks.codes.shape)
    codes = blocks.codes.astype(jnp.float32)
    squares = jnp.square(codes + 128)
    return unit * jnp.where(unit < 0, -squares * squares, codes * jnp.abs(codes))


@jax.jit
def extents(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns how far the blocks of a float32 array reach.

    That is the bits of the largest size of each block, and 1 where a number of the
    block is negative, both uint32.
    """
    sizes = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.uint32)
    # Two maxima, for a GPU has instructions for them and the libraries of many devices
    # know no other reduction; of bits, because they order NaN above Inf.
    return _most(sizes), _most((~(x >= 0)).astype(jnp.uint32))


@jax.jit
def units_from(sizes: jax.Array, signs: jax.Array) -> jax.Array:
    """Returns the bfloat16 units with which codes reach the :func:`extents` of blocks.

    They are rounded up. That of a block with an Inf or NaN in it is NaN, so that none
    is hidden, and that of zeros is zero.
    """
    largest = jax.lax.bitcast_convert_type(sizes, jnp.float32)
    is_positive = signs == 0
    unit = largest / jnp.where(is_positive, float(_TOP_OF_POSITIVE) ** 4, _TOP**2)
    unit = jnp.where(largest > 0, jnp.maximum(unit, _TINY), unit)
    # The bits of bfloat16 are the upper half of those of float32.
    bits = jax.lax.bitcast_convert_type(unit, jnp.uint32)
    upper = (bits + np.uint32(0xFFFF)) >> 16
    upper = jnp.where(upper >= 0x7F80, 0x7FC0, upper)  # Inf and NaN are NaN
    unit = jax.lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(is_positive, -unit, unit)


@jax.jit
def encode(x: jax.Array, units: jax.Array, draw: Any) -> jax.Array:
    """Returns the int8 codes of a float32 array, and keeps what a code stands for.

    Rounds up where the number has come further than ``draw`` of the way to the next
    code. With random :func:`~jaxmp._base.rounding.draws` the mean is the number.
    """
    unit = _of_each(units.astype(jnp.float32), x.shape)
    is_positive = unit < 0

    def power(code):
        square = code * code
        return jnp.where(is_positive, square * square, square)

    size = jnp.where(unit == 0, 0, jnp.abs(x / unit))
    root = jnp.sqrt(size)
    root = jnp.where(is_positive, jnp.sqrt(root), root)
    top = jnp.where(is_positive, _TOP_OF_POSITIVE, _TOP)
    low = jnp.clip(jnp.floor(root), 0, top - 1)
    step = power(low + 1) - power(low)
    code = low + (size - power(low) > draw * step)
    code = jnp.where(x < 0, -code, code)
    positive = jnp.maximum(code, jnp.where(x > 0, _LEAST, 0)) - 128
    return jnp.where(is_positive, positive, code).astype(jnp.int8)


@jax.jit
def nearest(x: jax.Array) -> Int8Blocks:
    """Stores a float32 array in 8 bits, with the codes that are nearest to it."""
    units = units_from(*extents(x))
    return Int8Blocks(encode(x, units, 0.5), units)


def _most(x: jax.Array) -> jax.Array:
    """Returns the largest number of each block of uint32 numbers."""
    count, length = _blocks(x.shape[-1])
    missing = count * length - x.shape[-1]
    if missing:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x.reshape(*x.shape[:-1], count, length).max(-1)


def _of_each(units: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the unit of each number of an array."""
    count, length = _blocks(shape[-1])
    each = jnp.broadcast_to(units[..., None], (*units.shape, length))
    return each.reshape(*shape[:-1], count * length)[..., : shape[-1]]


def _blocks(size: int) -> tuple[int, int]:
    """Returns how many blocks a row has, and how long they are."""
    count = -(-size // _LONGEST)
    return count, -(-size // count)
