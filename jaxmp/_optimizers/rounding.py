"""Float32 numbers in 16 bits: rounded stochastically, or with what rounding loses."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The two halves of a float32 number: the upper one is a bfloat16 number.
_UPPER, _LOWER = np.uint32(0xFFFF0000), np.uint32(0x0000FFFF)
_LOWEST_BYTE = np.uint32(0x000000FF)
# Float16 numbers have 10 bits of fraction, and exponents from -14 to 15.
_FRACTION, _LOWEST, _HIGHEST = 10, -14, 15
# The compensation of a float16 number counts in 2^-15 of the number's spacing, or in
# 2^-7 where it has 8 bits. With the 11 bits of the number these are 26, two more than
# those of float32, or 18.
_PARTS = {np.dtype(jnp.int16): 2.0**15, np.dtype(jnp.int8): 2.0**7}

# JAX traces the jitted functions once for all arrays of one shape. There is no cast to
# 16 bits and back in them: XLA leaves it out on a GPU, and with it the rounding.


def noise_seeds(seed: Any, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the two random numbers, uint32[], from which a step's noise is made."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
    first, second = jax.random.bits(key, (2,), jnp.uint32)
    # Else XLA may compute them again for every element. Two scalars, because it merges
    # the kernels of several parameters that read one array, and splits others for it.
    return jax.lax.optimization_barrier((first, second))


@functools.partial(jax.jit, static_argnums=(1, 2))
def split(
    x: jax.Array, dtype: Any, rest_dtype: Any = jnp.int16
) -> tuple[jax.Array, jax.Array]:
    """Rounds a float32 array to 16-bit numbers, and returns what is left over.

    That is a float32 array of numbers of ``dtype``, the nearest ones, and an array of
    ``rest_dtype``, from which :func:`join` makes ``x`` again: exactly if they are
    bfloat16 and int16, and for float16 where ``x`` lies in the range of its normal
    numbers. With int8 it makes the nearest number that has so many digits, which is
    off by 2^-16 of ``x`` at the most.
    """
    is_short = rest_dtype == jnp.int8
    if dtype == jnp.bfloat16:
        bits = _bits(x)
        if is_short:
            bits = (bits + np.uint32(0x80)) & ~_LOWEST_BYTE
        nearest = (bits + np.uint32(0x8000)) & _UPPER
        stored = jnp.where(jnp.isfinite(x), _float(nearest), x)
        rest = jax.lax.bitcast_convert_type(bits - nearest, jnp.int32)
        rest = jnp.where(jnp.isfinite(stored), rest >> 8 if is_short else rest, 0)
    else:
        spacing = _float16_spacing(x)
        stored = jnp.round(x / spacing) * spacing
        rest = (x - stored) / _float16_spacing(stored) * _PARTS[np.dtype(rest_dtype)]
        in_range = jnp.abs(stored) <= np.float32(np.finfo(np.float16).max)
        rest = jnp.where(in_range, jnp.round(rest), 0)
    return _derived(x, stored), rest.astype(rest_dtype)


@functools.partial(jax.jit, static_argnums=1)
def split_stochastically(
    x: jax.Array, dtype: Any, seeds: tuple[jax.Array, jax.Array], number: Any
) -> tuple[jax.Array, jax.Array]:
    """Splits a float32 array into 16-bit numbers and an int8 array, as :func:`split`.

    What the two have no digits for is rounded stochastically, see :func:`draws`.
    """
    if dtype == jnp.bfloat16:
        x = round_stochastically(x, seeds, number, ~_LOWEST_BYTE)
    else:  # to multiples of 2^-7 of the spacing of float16 numbers
        spacing = _float16_spacing(x)
        nearest = jnp.round(x / spacing) * spacing  # 2^k below which x may lie
        grid = _float16_spacing(nearest) / _PARTS[np.dtype(jnp.int8)]
        parts = x / grid
        down = jnp.floor(parts)
        up = down + (parts - down > draws(x.shape, seeds, number))
        x = _derived(x, jnp.where(jnp.isfinite(x), up * grid, x))
    return split(x, dtype, jnp.int8)


@jax.jit
def join(stored: jax.Array, rest: jax.Array) -> jax.Array:
    """Returns the float32 array that :func:`split` took apart.

    Where the 16-bit number has been changed since, the result is nearer to it than to
    any other number of its dtype, or half way.
    """
    is_bfloat16, stored = stored.dtype == jnp.bfloat16, stored.astype(jnp.float32)
    if not is_bfloat16:
        parts = rest.astype(jnp.float32) / _PARTS[rest.dtype]
        return stored + parts * _float16_spacing(stored)
    # Next to zero on one side, and to Inf on the other, there is NaN. No number has
    # such a rest, but a parameter may have been set to zero or Inf since. The bits tell
    # zero from subnormal numbers on every machine.
    is_zero, is_short = (_bits(stored) << 1) == 0, rest.dtype == jnp.int8
    rest = jnp.where(is_zero, jnp.maximum(rest, 0), rest).astype(jnp.int32)
    rest = rest << 8 if is_short else rest
    joined = _bits(stored) + jax.lax.bitcast_convert_type(rest, jnp.uint32)
    return _derived(stored, jnp.where(jnp.isfinite(stored), _float(joined), stored))


@functools.partial(jax.jit, static_argnums=0)
def draws(shape: tuple[int, ...], seeds: Any, number: Any) -> jax.Array:
    """Returns random float32 numbers between 0 and 1, of which they are neither.

    The seeds are those of :func:`noise_seeds`; ``number`` is a uint32, another one for
    each array of a step.
    """
    return (_noise(shape, seeds, number).astype(jnp.float32) + 0.5) / 2.0**16


@functools.partial(jax.jit, static_argnums=3)
def round_stochastically(
    x: jax.Array,
    seeds: tuple[jax.Array, jax.Array],
    number: Any,
    kept: np.uint32 = _UPPER,
) -> jax.Array:
    """Rounds a float32 array to bfloat16 numbers, stochastically.

    Of the two neighbours of a number the nearer one is the likelier, so that the mean
    is the number. Bfloat16 numbers, Inf and NaN stay what they are, and nothing finite
    becomes Inf: what lies beyond the largest bfloat16 number becomes that one. A cast
    to bfloat16 does not change the result any more. The noise is that of :func:`draws`.
    With other ``kept`` bits than the upper half, it is to numbers of which only those
    are set.
    """
    bits, noise = _bits(x), _noise(x.shape, seeds, number) & ~kept
    down, up = bits & kept, (bits + noise) & kept
    up = jnp.where(jnp.isfinite(_float(up)), up, down)
    return _derived(x, jnp.where(jnp.isfinite(x), _float(up), x))


@jax.custom_jvp
def _derived(x: jax.Array, rounded: jax.Array) -> jax.Array:
    """Returns the second, with the derivative of the first, as that of a cast is.

    Bits and integers have none, and a derivative through an update would be zero.
    """
    return rounded


_derived.defjvp(lambda primals, tangents: (_derived(*primals), tangents[0]))


def _float16_spacing(x: jax.Array) -> jax.Array:
    """Returns how far apart float16 numbers of the size of a float32 number lie."""
    exponent = (_bits(x) >> 23) & np.uint32(0xFF)  # and 127
    exponent = jnp.clip(exponent, np.uint32(127 + _LOWEST), np.uint32(127 + _HIGHEST))
    return _float((exponent - np.uint32(_FRACTION)) << 23)


def _noise(shape: tuple[int, ...], seeds: Any, number: Any) -> jax.Array:
    """Returns random numbers from 0 to 0xFFFF, as a function of seeds and position.

    Whoever holds a part of a sharded array computes that part. Threefry for every
    element would take longer than an optimizer's reading and writing: some 80 integer
    operations, of which an H200 does 3.5 in the time of a byte.
    """
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        position = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        index = index * np.uint32(size & 0xFFFFFFFF) + position
    # Constants are added to arrays and not to the seeds: a kernel for each such scalar
    # would take as long as one for an array.
    index = index + number * np.uint32(0x9E3779B9)  # 2^32 by the golden ratio
    return _hash(_hash(index + seeds[0]) ^ (seeds[1] + number)) & _LOWER


def _hash(x: jax.Array) -> jax.Array:
    """Mixes the bits of uint32 numbers, one to one.

    References:
        Wellons, "Prospecting for Hash Functions", 2018, with the constants of its
        issue 19, https://github.com/skeeto/hash-prospector.
    """
    x = (x ^ (x >> 16)) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> 15)) * np.uint32(0xD35A2D97)
    return x ^ (x >> 15)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
