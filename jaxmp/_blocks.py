"""Float32 arrays in 8 bits a number, with a scale for each block of a row."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._rounding import draws

# Of a row that is no multiple of it, the blocks are shorter. Updates read the numbers
# twice, to find the scales and to use them, and with so many in a block the scales are
# next to nothing of it. torchao and bitsandbytes have 256, too.
_LONGEST = 256
_LARGEST = 127  # code
_NAN, _TINY = np.uint16(0x7FC0), np.uint16(0x0080)  # as bits of bfloat16 numbers


class Int8Blocks(NamedTuple):
    """A float32 array in 8 bits a number, as ``state_dtype="int8"`` stores moments.

    A code ``c`` stands for ``c * |c| * unit``: the numbers are dense near zero, and the
    largest is 16,129 times the smallest. Every block of at most 256 numbers along the
    last axis has a unit of its own, so that both arrays can be sharded as the array is
    that they stand for. :func:`jaxmp.cast_state` makes float32 of them.

    Attributes:
        codes: int8, of the shape of the array, from -127 to 127.
        units: bfloat16 ``[..., blocks]``, what the code 1 stands for.
    """

    codes: jax.Array
    units: jax.Array


def is_blocks(x: Any) -> bool:
    """Tells whether something is an array in 8 bits a number."""
    return isinstance(x, Int8Blocks)


@jax.jit
def decode(blocks: Int8Blocks) -> jax.Array:
    """Returns the float32 array that codes stand for. No product is rounded."""
    codes = blocks.codes.astype(jnp.float32)
    return codes * jnp.abs(codes) * _of_each(blocks.units, blocks.codes.shape)


@jax.jit
def units_of(x: jax.Array) -> jax.Array:
    """Returns the units with which the codes of a float32 array reach its largest.

    They are rounded up. That of a block with an Inf or NaN in it is NaN, so that none
    is hidden; that of numbers below 2e-34 is zero.
    """
    bits = jax.lax.bitcast_convert_type(jnp.abs(x) / _LARGEST**2, jnp.uint32)
    # Integers, which are in the order of the numbers; NaN is the largest.
    upper = jnp.minimum((bits + np.uint32(0xFFFF)) >> 16, _NAN).astype(jnp.uint16)
    count, length = _blocks(x.shape[-1])
    missing = count * length - x.shape[-1]
    if missing:
        upper = jnp.pad(upper, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    upper = upper.reshape(*x.shape[:-1], count, length).max(-1)
    upper = jnp.where(upper >= np.uint16(0x7F80), _NAN, upper)
    upper = jnp.where(upper < _TINY, np.uint16(0), upper)
    return jax.lax.bitcast_convert_type(upper, jnp.bfloat16)


@jax.jit
def encode(
    x: jax.Array, units: jax.Array, seeds: tuple[jax.Array, jax.Array], number: Any
) -> jax.Array:
    """Returns the int8 codes of a float32 array, each rounded up or down at random.

    Of the two codes next to a number the nearer one is the likelier, so that the mean
    is the number. What a code stands for keeps it.

    Args:
        x: The array.
        units: Those of :func:`units_of`.
        seeds: What :func:`jaxmp._rounding.noise_seeds` returns.
        number: uint32[], another one for each array of a step.
    """
    return _codes(x, units, draws(x.shape, seeds, number))


@jax.jit
def nearest(x: jax.Array) -> Int8Blocks:
    """Stores a float32 array in 8 bits, with the codes that are nearest to it."""
    units = units_of(x)
    return Int8Blocks(_codes(x, units, 0.5), units)


def _codes(x: jax.Array, units: jax.Array, draw: Any) -> jax.Array:
    """Rounds up where the number has come further than ``draw`` of the way."""
    unit = _of_each(units, x.shape)
    size = jnp.where(unit > 0, jnp.abs(x) / unit, 0)  # not that of a NaN
    low = jnp.minimum(jnp.floor(jnp.sqrt(size)), _LARGEST - 1)
    # From low^2 to (low + 1)^2.
    code = low + (size - low * low > draw * (2 * low + 1))
    return jnp.where(x < 0, -code, code).astype(jnp.int8)


def _of_each(units: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the unit of each number of an array, in float32."""
    count, length = _blocks(shape[-1])
    each = jnp.broadcast_to(units.astype(jnp.float32)[..., None], (*units.shape, length))
    return each.reshape(*shape[:-1], count * length)[..., : shape[-1]]


def _blocks(size: int) -> tuple[int, int]:
    """Returns how many blocks a row has, and how long they are."""
    count = -(-size // _LONGEST)
    return count, -(-size // count)
