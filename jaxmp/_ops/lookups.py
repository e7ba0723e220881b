"""Adding one number to each row of zeros: the gradient of a lookup in each row.

The loss of a language model looks up the logit of each label. Its gradient is a
scatter, which a GPU does in memory: the gradient of all logits is stored in float32 on
its way to the 16 bits that the products take. As a choice it is the same number, and
fuses.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._jaxprs.jaxpr import Equation
from .lists import ADDS_AT

_CLIPS = lax.GatherScatterMode.CLIP
# Whoever promises that all places are in bounds has no use for others.
_DROPS = lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS


def row_axis(eqn: Equation) -> int | None:
    """Returns along which axis ``eqn`` adds at most one number to each row.

    None if it does anything else.
    """
    if eqn.primitive.name not in ADDS_AT:
        return None
    if eqn.params["mode"] not in (_CLIPS, *_DROPS):
        return None
    numbers = eqn.params["dimension_numbers"]
    operand, _, updates = (atom.aval for atom in eqn.invars)
    axes = numbers.scatter_dims_to_operand_dims
    others = [i for i in range(operand.ndim) if i not in axes]
    batch = list(numbers.scatter_indices_batching_dims)
    aligned = list(numbers.operand_batching_dims) == others and batch == sorted(batch)
    alone = updates.size == math.prod(operand.shape[i] for i in others)
    return axes[0] if len(axes) == 1 and aligned and alone else None


def added_to_zeros(eqn: Equation, zeros: Any, indices: Any, updates: Any) -> Any:
    """Returns what ``eqn``, which has a :func:`row_axis`, makes of ``zeros``."""
    axis, shape = row_axis(eqn), zeros.shape
    assert axis is not None
    row = [n if i == axis else 1 for i, n in enumerate(shape)]
    rows = [1 if i == axis else n for i, n in enumerate(shape)]
    if indices.dtype.itemsize < 4:  # it may end before the axis does
        indices = indices.astype(jnp.int32)
    places = lax.broadcasted_iota(indices.dtype, row, axis)
    if eqn.params["mode"] == _CLIPS:
        indices = jnp.clip(indices, 0, places.size - 1)
    indices, updates = jnp.reshape(indices, rows), jnp.reshape(updates, rows)
    # Of the zeros come the dtype and the sharding: what is added may be a number.
    return jnp.where(places == indices, updates, zeros)
