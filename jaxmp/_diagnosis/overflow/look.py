"""What there is to see in an array, as a few numbers on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..._base.dtypes import is_narrow
from ..._training.exponents import magnitude_bits

# Magnitudes are compared as their bits, which are ordered in the same way: a CPU takes
# subnormal numbers for zeros. These are beyond all of them.
NOTHING = np.int32(2**31 - 1)


class Look(NamedTuple):
    """What one array holds. Magnitudes are their bits."""

    top: Any  # int32[], the largest finite magnitude
    low: Any  # int32[], the smallest that is not zero, `NOTHING` if there is none
    nan: Any  # int32[], how many are NaN
    inf: Any  # int32[], how many are Inf
    zero: Any  # int32[], how many are zero
    subnormal: Any  # int32[], how many are subnormal
    lost: Any  # int32[], how many of those are normal numbers in float32
    over: Any  # int32[], how many are not finite and are in float32


@jax.jit  # JAX traces it once for all arrays of one type
def look(x: jax.Array, wide: jax.Array | None = None) -> jax.Array:
    """Looks at an array once, and returns a :class:`Look` as int32[8].

    Args:
        x: Floating or complex array; of a complex one the real and imaginary parts.
        wide: The same in float32, before it was rounded.
    """
    bits, first_normal, infinite = _bits(x)
    zero, is_subnormal = bits == 0, (bits > 0) & (bits < first_normal)
    finite = bits < infinite
    arrays = [
        jnp.where(finite, bits, 0),
        jnp.where(finite & ~zero, bits, NOTHING),
        *_counted(bits > infinite, bits == infinite, zero, is_subnormal),
    ]
    if wide is not None:
        wide_bits, *_ = _bits(wide)
        lost = (zero | is_subnormal) & (wide_bits > 0)
        over = ~finite & (wide_bits < bits_of(np.inf, wide.dtype))
        arrays += _counted(lost, over)
    return jnp.stack([*_reduced(arrays), *[jnp.int32(0)] * (8 - len(arrays))])


@jax.jit
def glance(x: jax.Array) -> jax.Array:
    """Looks at an array for its NaN, its Inf and its largest magnitude alone."""
    bits, _, infinite = _bits(x)
    top = jnp.where(bits < infinite, bits, 0)
    none = jnp.full_like(bits, NOTHING)
    top, low, nan, inf = _reduced(
        [top, none, *_counted(bits > infinite, bits == infinite)]
    )
    return jnp.stack([top, low, nan, inf, *[jnp.int32(0)] * 4])


def bits_of(number: Any, dtype: Any) -> int:
    """Returns the bits of the magnitude of a number as those of a 16-bit or float32."""
    width = 8 * np.dtype(dtype).itemsize
    bits = np.asarray(number).astype(dtype).reshape(1).view(f"uint{width}")[0]
    return int(bits) & (2 ** (width - 1) - 1)


def float32_of(bits: Any) -> float:
    """Returns the magnitude that bits of float32 stand for."""
    return float(np.array([bits], np.int32).view(np.float32)[0])


def seen_as(dtype: Any) -> np.dtype:
    """Returns the dtype that arrays of a dtype are looked at in."""
    dtype = np.dtype(dtype)
    is_16bit = is_narrow(dtype) and dtype.itemsize == 2
    return dtype if is_16bit else np.dtype(np.float32)


def _counted(*conditions: jax.Array) -> list[jax.Array]:
    return [condition.astype(jnp.int32) for condition in conditions]


def _reduced(arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Returns the maximum, the minimum and sums, in one reduction."""

    def both(xs, ys):
        (a, b, *xs), (c, d, *ys) = xs, ys
        sums = map(jax.lax.add, xs, ys)
        return [jax.lax.max(a, c), jax.lax.min(b, d), *sums]

    starts = [np.int32(0), NOTHING, *[np.int32(0)] * (len(arrays) - 2)]
    return jax.lax.reduce(arrays, starts, both, tuple(range(arrays[0].ndim)))


def _bits(x: jax.Array) -> tuple[jax.Array, int, int]:
    """Returns the bits of all magnitudes, of the smallest normal number, and of Inf."""
    dtype = x.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag])
    seen = seen_as(x.dtype)
    tiny = bits_of(jnp.finfo(x.dtype).tiny, seen)
    if x.dtype == jnp.float64:
        # What is beyond float32 is as good as its largest number here.
        limit = float(jnp.finfo(jnp.float32).max)
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x)
    x = x.astype(seen)
    return magnitude_bits(x).astype(jnp.int32), tiny, bits_of(np.inf, seen)
