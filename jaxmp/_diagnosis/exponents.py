"""Values counted by binary exponent, on the device and within a training step."""

from __future__ import annotations

import collections
import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .._base.checks import as_axes, as_count, check_axes_are_bound, short
from .._base.tree import AxisName, alike, is_floating_array, path_name, varying_axes

# Rows of counters that the elements of an array take turns in; a power of two. With
# one row the atomic additions of a GPU would all meet in the few busy buckets.
_LANES = 64


def exponent_histogram(
    tree: Any, *, low: int = -40, high: int = 16, per_leaf: bool = False
) -> Any:
    """Counts the entries of a pytree by binary exponent.

    A finite nonzero ``x`` counts under ``floor(log2(abs(x)))``, clipped to
    ``[low, high]``; exactly, also where ``x`` is subnormal. Zeros, Inf and NaN are
    not counted. Works under ``jit``; the counts of sharded arrays are global.

    Args:
        tree: Pytree of floating arrays of any shapes; dtypes may differ. A complex
            value counts as two, its real and its imaginary part.
        low: Exponent of the first bucket.
        high: Exponent of the last bucket.
        per_leaf: Whether to count each leaf for itself.

    Returns:
        An int32 array of shape ``[high - low + 1]``; with ``per_leaf`` a pytree of
        the structure of ``tree`` with such an array for each leaf.

    Raises:
        TypeError: If a leaf is neither floating nor complex.
        ValueError: If ``low`` is not below ``high``, or there are more entries to
            count together than an int32 holds.

    Examples:
        >>> grads = {"w": jnp.array([1.0, 3.0, 2.0**-30, 0.0])}
        >>> jaxmp.exponent_histogram(grads, low=-2, high=2).tolist()
        [1, 0, 1, 1, 0]

    References:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, figure 3,
        https://arxiv.org/abs/1710.03740.
    """
    _check_buckets(low, high)
    length = high - low + 1
    leaves = [x for _, x in floating_leaves("exponent_histogram", tree)]
    sizes = [math.prod(jnp.shape(x)) for x in leaves]
    together = max(sizes, default=0) if per_leaf else sum(sizes)
    if together > np.iinfo(np.int32).max:
        raise ValueError(
            f"`exponent_histogram` counts in int32, but was given {together} entries "
            "to count together. Pass `per_leaf=True` and add on the host, or pass a "
            "part of the tree at a time."
        )
    counts = [
        _count(_exact_buckets(x, low, length), length).sum(0, dtype=jnp.int32)[:-2]
        for x in leaves
    ]
    if per_leaf:
        return jax.tree.structure(tree).unflatten(counts)
    return sum(counts, jnp.zeros(length, jnp.int32))


class RecordRangesState(NamedTuple):
    """State of :func:`record_ranges`: counts of the values of the counted steps."""

    steps: jax.Array  # int32[], updates since init
    low: jax.Array  # int32[], exponent of the first bucket
    exponents: jax.Array  # float32[buckets], finite nonzero values by binary exponent
    zeros: jax.Array  # float32[], values that were zero
    nonfinite: jax.Array  # float32[], values that were Inf or NaN
    max: jax.Array  # float32[], largest finite magnitude in all steps


def record_ranges(
    *,
    every: int = 10,
    low: int = -40,
    high: int = 16,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Records the exponents of the updates that pass through, and changes nothing.

    For the gradients, put it first in a chain. Before :func:`jaxmp.loss_scaling` it
    also sees overflows; inside its wrapper it sees finite steps only. Find the state
    with ``optax.tree.get(opt_state, "RecordRangesState")``, and pass it to
    :func:`suggest_loss_scale` or to :func:`jaxmp.plots.exponents`.

    Where Adam moves 28 bytes for each parameter in a step, this adds 1.2 on a GPU, and
    3.3 with ``every=1``.

    Args:
        every: Count the first step and every ``every``-th after it. The largest
            magnitude is that of all steps.
        low: Exponent of the first bucket, which also counts what is below. A state
            that was restored keeps the buckets that it has.
        high: Exponent of the last bucket, which also counts what is above.
        axis_name: Mesh axes over which the updates differ, inside ``shard_map`` or
            ``pmap``. Under ``jit`` the counts of sharded arrays are global anyway.
            Updates that are the same on all devices count once, except where nothing
            tells that they are: ``pmap``, and ``shard_map(check_vma=False)``.

    Returns:
        A :class:`optax.GradientTransformationExtraArgs` whose state is a
        :class:`RecordRangesState`. The counts are float32. They do not overflow, are
        exact up to 2^24, and beyond it each addition rounds to 24 bits: after a
        thousand counted steps a bucket is wrong by less than 1 in 10,000, and what
        adds less than 1 in 2^25 to its bucket is not seen. Real and
        imaginary parts count each; leaves that have no floating values do not.

    Raises:
        ValueError: If ``every`` is below 1 or ``low`` not below ``high``; in an
            update, if the updates differ over mesh axes that are not in
            ``axis_name``, or one of those does not exist.
        TypeError: If ``every``, ``low`` or ``high`` is not an integer.

    Examples:
        >>> ranges = jaxmp.record_ranges(every=1, low=-2, high=2)
        >>> tx = optax.chain(ranges, optax.sgd(0.1))
        >>> opt_state = tx.init(jnp.zeros(3))
        >>> for grads in ([1.0, 3.0, 0.0], [0.25, 1.0, jnp.inf]):
        ...     _, opt_state = tx.update(jnp.array(grads), opt_state)
        >>> ranges = optax.tree.get(opt_state, "RecordRangesState")
        >>> ranges.exponents.tolist(), ranges.zeros.item(), ranges.max.item()
        ([1.0, 0.0, 2.0, 1.0, 0.0], 1.0, 3.0)

    References:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, figure 3,
        https://arxiv.org/abs/1710.03740.
    """
    every = as_count("every", every)
    _check_buckets(low, high)

    def init_fn(params):
        del params
        return RecordRangesState(
            steps=jnp.zeros([], jnp.int32),
            low=jnp.array(low, jnp.int32),
            exponents=jnp.zeros(high - low + 1, jnp.float32),
            zeros=jnp.zeros([], jnp.float32),
            nonfinite=jnp.zeros([], jnp.float32),
            max=jnp.zeros([], jnp.float32),
        )

    axes = as_axes(axis_name)

    def update_fn(updates, state, params=None, **extra_args):
        del params, extra_args
        check_axes_are_bound(axes)
        length = state.exponents.shape[-1]
        maxima = [float32_bits(state.max)]
        entries = []
        for path, x in jax.tree.leaves_with_path(updates):
            x = real_parts(x)
            if is_floating_array(x):
                apart = varying_axes(x) - varying_axes(state.exponents) - set(axes)
                if apart:
                    raise ValueError(
                        "The updates differ over the mesh axes "
                        f"{sorted(map(str, apart))}, but the counts of `record_ranges` "
                        "are one for all. Pass these axes as `axis_name`."
                    )
                maxima.append(_largest(x))
                # What a cond reads has to be in memory. That is one byte for each
                # value here; the updates might exist only within a fusion.
                entries.append((path, _buckets(x, state.low, length)))
        largest = jnp.stack(maxima).max()
        if axes:
            largest = jax.lax.pmax(largest, axes)
        old = (state.exponents, state.zeros, state.nonfinite)
        exponents, zeros, nonfinite = jax.lax.cond(
            state.steps % every == 0,
            lambda old, buckets: _add_counts(old, buckets, length, axes),
            lambda old, buckets: old,
            old,
            alike(entries),  # XLA's compilers are slow with hundreds of scatters
        )
        return updates, RecordRangesState(
            steps=jnp.asarray(optax.safe_increment(state.steps)),
            low=state.low,
            exponents=exponents,
            zeros=zeros,
            nonfinite=nonfinite,
            max=jax.lax.bitcast_convert_type(largest, jnp.float32),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _exact_buckets(x: Any, low: int, length: int) -> jax.Array:
    """Returns the buckets of an array or Python float, in the precision it has."""
    if getattr(x, "dtype", np.float64) == np.float64:
        with jax.enable_x64(True):  # or JAX would make a float32 of it
            return _buckets(jnp.asarray(x), low, length)
    return _buckets(jnp.asarray(x), low, length)


@functools.partial(jax.jit, static_argnames="length")
def _buckets(x: jax.Array, low: Any, length: int) -> jax.Array:
    """Returns each element's bucket; two more are for zeros and for Inf or NaN."""
    bits, info = magnitude_bits(x), jnp.finfo(x.dtype)
    # Integers, because XLA may flush subnormals to zero in arithmetic.
    field = (bits >> info.nmant).astype(jnp.int32)
    highest_bit = jnp.iinfo(bits.dtype).bits - 1 - jax.lax.clz(bits).astype(jnp.int32)
    exponent = info.minexp + jnp.where(field > 0, field - 1, highest_bit - info.nmant)
    bucket = jnp.clip(exponent - low, 0, length - 1)
    # If nothing else used the bits, LLVM would compare floats here, and the CPU's
    # takes subnormals for zeros. The exponent uses them, as there are two buckets.
    bucket = jnp.where(bits == 0, length, bucket)
    bucket = jnp.where(jnp.isfinite(x), bucket, length + 1)
    return bucket.astype(np.min_scalar_type(length + 1))


@functools.partial(jax.jit, static_argnames="length")
def _count(buckets: jax.Array, length: int) -> jax.Array:
    """Counts elements into an int32 array of shape ``[_LANES, length + 2]``.

    A scatter, because it reads the array once. Comparing each element with each
    bucket reads it as often as there are buckets.
    """
    # No ravel: that would gather an array which is sharded along a later axis.
    places = [
        jax.lax.broadcasted_iota(jnp.int32, buckets.shape, i)
        for i in range(buckets.ndim)
    ]
    lane = sum(places, jnp.zeros(buckets.shape, jnp.int32)) % _LANES
    index = lane * (length + 2) + buckets.astype(jnp.int32)
    mesh, out_sharding = jax.typeof(buckets).sharding.mesh, None
    if AxisType.Explicit in mesh.axis_types:  # JAX wants to know where the sum lies
        out_sharding = NamedSharding(mesh, P(None))
    counts = jnp.zeros(_LANES * (length + 2), jnp.int32)
    counts = counts.at[index].add(1, out_sharding=out_sharding)
    return counts.reshape(_LANES, length + 2)


def _add_counts(
    old: tuple[jax.Array, jax.Array, jax.Array],
    groups: list[list[jax.Array]],
    length: int,
    axes: tuple[Any, ...],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds the counts of all devices to those of exponents, zeros, and Inf or NaN."""
    counts = collections.defaultdict(lambda: jnp.zeros(length + 2, jnp.float32))
    is_tracked = axes and varying_axes(jax.lax.axis_index(axes))  # what differs where
    for group in groups:
        buckets = jnp.stack(group)
        # Each lane is exact; their sum may be more than an int32 holds.
        lanes = _count(buckets, length).astype(jnp.float32)
        apart = varying_axes(buckets) if is_tracked else axes
        counts[tuple(x for x in axes if x in apart)] += lanes.sum(0)
    total = jnp.zeros(length + 2, jnp.float32)
    for apart, part in counts.items():
        total += jax.lax.psum(part, apart) if apart else part
    exponents, zeros, nonfinite = old
    return exponents + total[:-2], zeros + total[-2], nonfinite + total[-1]


@jax.jit
def _largest(x: jax.Array) -> jax.Array:
    """Returns the largest finite magnitude as the bits of a float32."""
    return jnp.max(jnp.where(jnp.isfinite(x), float32_bits(x), 0), initial=0)


def float32_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of all magnitudes in float32, which are ordered as these are.

    A CPU takes subnormal numbers for zeros. What is beyond float32 is its largest.
    """
    if x.dtype == jnp.float64:
        limit = float(jnp.finfo(jnp.float32).max)
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x)
    return magnitude_bits(x.astype(jnp.float32))


def magnitude_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of ``abs(x)`` as an integer of at least 32 bits."""
    width = jnp.finfo(x.dtype).bits
    bits = jax.lax.bitcast_convert_type(x, f"uint{width}")
    bits = bits.astype(f"uint{max(width, 32)}")
    return bits & (2 ** (width - 1) - 1)


def floating_leaves(
    function: str,
    tree: Any,
    hint: str = "Pass the parameters or gradients only.",
    *,
    on_host: bool = False,
) -> list[tuple[str, Any]]:
    """Returns the leaves with their paths, refusing those that are not floating.

    A complex one is returned as its real and imaginary parts.
    """
    leaves = jax.tree.leaves_with_path(tree)
    leaves = [(path_name(path) or "(root)", real_parts(x)) for path, x in leaves]
    for path, x in leaves:
        if not (isinstance(x, float) or is_floating_array(x)):
            kind = getattr(x, "dtype", type(x).__name__)
            raise TypeError(
                f"`{function}` needs floating leaves, but `{path}` is {kind}. {hint}"
            )
        if on_host and isinstance(x, jax.core.Tracer):
            raise TypeError(
                f"`{function}` reads values on the host, but `{path}` is traced, by "
                "`jax.jit` for one. Return it and call `jaxmp."
                f"{function}` outside; `jaxmp.exponent_histogram` and "
                "`jaxmp.record_ranges` count inside."
            )
    return leaves


def real_parts(x: Any) -> Any:
    """Returns the real and imaginary parts of a complex ``x``, all else as it is."""
    if not jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.complexfloating):
        return x
    stack = jnp.stack if isinstance(x, jax.Array) else np.stack
    return stack([x.real, x.imag])


def _check_buckets(low: int, high: int) -> None:
    for name, value in (("low", low), ("high", high)):
        try:
            operator.index(value)
        except TypeError:
            raise TypeError(
                f"`{name}` must be an integer, but is {short(value)}. The usual "
                "buckets are those from `low=-40` to `high=16`."
            ) from None
    if not -(2**30) <= low < high <= 2**30:  # far beyond every exponent
        raise ValueError(
            f"`low` must be below `high`, but they are {short(low)} and {short(high)}. "
            "The usual ones are -40 and 16."
        )
