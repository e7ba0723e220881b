"""The arithmetic of a loss head, a tile of rows at a time, in plain JAX."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .._base.tree import varying_axes
from .._devices.varying import vary

# Operands of the operation.
HIDDEN, KERNEL, LABELS, WEIGHTS, BIAS = range(5)
# A tile has as many rows as have this much of float32 logits: a power of two.
BYTES = 2**29


class HeadForm(NamedTuple):
    """What a loss head is beside its operands; hashable."""

    is_transposed: bool = False  # whether the kernel is [V, D]
    has_bias: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float | None = None
    tile: int | None = None  # rows of a tile
    axis: Any = ()  # of the mesh, over which the vocabulary is sharded

    @property
    def arity(self) -> int:
        return BIAS + self.has_bias

    @property
    def words(self) -> int:
        """The axis of the kernel that is the vocabulary."""
        return 1 - self.is_transposed


def rows_of(vocabulary: int) -> int:
    """Returns how many rows a tile has, if nobody says it."""
    rows = max(BYTES // (4 * max(vocabulary, 1)), 1)
    return 1 << (rows.bit_length() - 1)


def computed(
    form: HeadForm, precision: Any, moving: Sequence[int], args: Sequence[Any]
) -> list[Any]:
    """Returns the losses of all rows, and gradients.

    Args:
        form: What the head is.
        precision: Of its products.
        moving: The operands of which gradients are computed.
        args: The operands.

    Returns:
        The loss of each row, and the part of it that is the z-loss. Then the gradients:
        of a row of ``hidden`` that of the loss of the row, in the dtype of the
        products; of all others that of the sum of all losses, by their weights.
    """
    hidden, kernel, labels, weights = args[:BIAS]
    dtype = jnp.result_type(hidden, kernel)
    wide = jnp.promote_types(dtype, jnp.float32)
    axes = tuple(frozenset().union(*map(varying_axes, args)))
    kernel, size = kernel.astype(dtype), kernel.shape[form.words]
    shards = lax.axis_size(form.axis) if form.axis else 1
    first = lax.axis_index(form.axis) * size if form.axis else 0

    def total(x):
        return lax.psum(x, form.axis) if form.axis else x

    def step(sums, row):
        x, label, weight = row
        logits = _product(x, kernel, (1, 1 - form.words), precision)
        logits += args[BIAS].astype(wide) if form.has_bias else 0
        z, cap = logits, form.soft_cap
        z = z if cap is None else cap * jnp.tanh(z / cap)
        top = lax.stop_gradient(jnp.max(z, 1))
        top = lax.pmax(top, form.axis) if form.axis else top
        exps = jnp.exp(z - top[:, None])
        mass = total(jnp.sum(exps, 1))
        log = jnp.log(mass) + top
        is_label = lax.broadcasted_iota(label.dtype, z.shape, 1) == label[:, None]
        likely = 1 - form.label_smoothing
        z_loss = form.z_loss * log**2
        loss = log - likely * total(jnp.sum(jnp.where(is_label, z, 0), 1)) + z_loss
        each = form.label_smoothing / (size * shards)
        loss -= each * total(jnp.sum(z, 1)) if each else 0
        found = [loss, z_loss]
        if not moving:
            return sums, found
        slope = exps * ((1 + 2 * form.z_loss * log) / mass)[:, None]
        slope -= jnp.where(is_label, likely + each, each)
        slope *= 1 if cap is None else 1 - (z / cap) ** 2
        rounded = slope.astype(dtype)
        if HIDDEN in moving:
            of_row = _product(rounded, kernel, (1, form.words), precision)
            found.append(of_row.astype(dtype))
        sums = dict(sums)
        if BIAS in moving:
            sums[BIAS] += jnp.sum(slope * weight[:, None], 0)
        if KERNEL in moving:
            x = (x * weight[:, None]).astype(dtype)
            pair = (rounded, x) if form.is_transposed else (x, rounded)
            sums[KERNEL] += _product(*pair, (0, 0), precision)
        return sums, found

    rows = labels.size
    tile = form.tile or rows_of(size)
    if not isinstance(rows, int):  # as `jax.export` leaves open
        count, tile = 1, rows
    else:
        count = -(-rows // tile)
        tile = rows if count < 2 else -(-rows // count)  # of even size, and aligned
        tile += -tile % 8 if count > 1 else 0

    def tiled(x):
        x = x.reshape(rows, *x.shape[labels.ndim :])
        if count * tile > rows:
            x = jnp.pad(x, [(0, count * tile - rows), *[(0, 0)] * (x.ndim - 1)])
        return x.reshape(count, tile, *x.shape[1:])

    def whole(x):
        return x.reshape(count * tile, *x.shape[2:])[:rows].reshape(
            *labels.shape, *x.shape[2:]
        )

    # Small weights would be lost in float16, so the largest is one.
    unit = lax.stop_gradient(jnp.max(jnp.abs(weights), initial=0))
    unit = jnp.where(unit == 0, 1, unit)
    sums = {i: jnp.zeros(args[i].shape, wide) for i in moving if i != HIDDEN}
    row = hidden.astype(dtype), labels - first, weights / unit
    sums, found = lax.scan(step, vary(sums, axes), tuple(map(tiled, row)))
    losses, z_losses, *of_rows = map(whole, found)
    return [
        losses,
        z_losses,
        *(of_rows.pop() if i == HIDDEN else unit * sums[i] for i in moving),
    ]


def _product(x: Any, y: Any, contracted: tuple[int, int], precision: Any) -> Any:
    """Returns a product with sums in float32, at least."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    numbers: Any = [[axis] for axis in contracted], [(), ()]

    def summed(x, y):
        return lax.dot_general(
            x, y, numbers, precision=precision, preferred_element_type=wide
        )

    if x.dtype != jnp.bfloat16:
        return summed(x, y)
    # XLA:CPU has no such product of bfloat16 in every layout.
    return lax.platform_dependent(
        x, y, cpu=lambda *xs: summed(*(x.astype(wide) for x in xs)), default=summed
    )
