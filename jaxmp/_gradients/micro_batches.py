"""Taking a batch apart: into micro-batches, whose gradients add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._base.tree import (
    is_array,
    is_inexact,
    is_scalar_key,
    path_name,
    taken_out,
    wide_dtype,
)

# Takes positional and keyword arguments and a dict of state. Returns the loss, the
# gradients, aux and a dict of what has changed in the state.
GradFun = Callable[
    [Sequence[Any], dict[str, Any], dict[str, Any]],
    tuple[jax.Array, Any, Any, dict[str, Any]],
]


def over_micro_batches(
    fun: GradFun,
    params_of: Callable[[Sequence[Any]], Any],
    batched: Sequence[int],
    steps: int,
) -> GradFun:
    """Returns ``fun`` with its batch taken in ``steps`` parts, one after the other.

    The losses are added, the gradients with respect to ``params_of(args)`` are added
    in at least float32, and every ``aux`` is kept along a new leading axis. Each part
    sees the state as the one before has left it.
    """

    def accumulated(args, kwargs, state):
        batch = {i: args[i] for i in batched}
        for path, x in jax.tree.leaves_with_path(batch):
            check_leading_axis(path, x, steps, f"`accum_steps={steps}`")
        arrays, with_arrays = taken_out(batch, is_array)
        parts = [_split(x, steps) for x in arrays]
        changed, put_back = set(), None

        def add_micro_batch(carry, i):
            nonlocal put_back
            totals, state = carry
            micro = with_arrays([_part(part, i) for part in parts])
            loss, grads, aux, changes = fun(
                [micro.get(i, arg) for i, arg in enumerate(args)], kwargs, state
            )
            changed.update(changes)
            totals = jax.tree.map(lambda t, g: t + g.astype(t.dtype), totals, grads)
            aux, put_back = taken_out(aux)
            return (totals, state | changes), (loss, aux)

        totals = jax.tree.map(
            lambda x: jnp.zeros_like(x, wide_dtype(x)) if is_inexact(x) else None,
            params_of(args),
        )
        carry = totals, state
        carry, (losses, aux) = jax.lax.scan(add_micro_batch, carry, jnp.arange(steps))
        grads, state = carry
        assert put_back is not None
        changes = {name: state[name] for name in changed}
        return losses.sum(), grads, put_back(aux), changes

    return accumulated


def check_leading_axis(path: Any, x: Any, parts: int, by: str) -> None:
    """Raises unless a leaf of the batch can be split into equal parts."""
    if not is_array(x) or is_scalar_key(x):
        return
    name = f"argument {getattr(path[0], 'key', getattr(path[0], 'idx', 0))}"
    if len(path) > 1:
        name += f", leaf `{path_name(path[1:])}`,"
    if x.dtype == jnp.uint32 and x.shape == (2,):
        raise ValueError(
            f"In `batch_argnums`, {name} looks like a raw PRNG key, uint32[2], which "
            "would be split as if it were data. Make it with `jax.random.key`."
        )
    if x.ndim == 0 or x.shape[0] % parts:
        raise ValueError(
            f"{by} must divide the leading axis of every array in `batch_argnums`, "
            f"but {name} has the shape {list(x.shape)}. Change the batch size to a "
            f"multiple of {parts}, or pass what is not a batch in another argument."
        )


def check_batch_is_whole(
    args: Sequence[Any], batched: Sequence[int], differentiated: Sequence[int]
) -> None:
    """Raises where a part of the batch, such as its labels, is not to be split.

    Broadcasting would hide it: the loss would be wrong, and nothing would say so. An
    argument counts as such where all its arrays have as many rows as the batch.
    """
    leaves = jax.tree.leaves([args[i] for i in batched])
    rows = {x.shape[0] for x in leaves if is_array(x) and x.ndim}
    for i, arg in enumerate(args):
        if i in (*batched, *differentiated):
            continue
        # One level is looked at: a batch is an array or holds some, and what holds
        # dictionaries of arrays is the state of a model.
        parts = jax.tree.leaves(arg, is_leaf=lambda x, arg=arg: x is not arg)
        shapes = [x.shape if is_array(x) else (None,) for x in parts if x is not None]
        if (found := {shape[0] for shape in shapes if shape}) and found <= rows:
            raise ValueError(
                f"Argument {i} has {found.pop()} examples, like the batch, but is not "
                f"in `batch_argnums`, so it would not be split with it. Pass "
                f"`batch_argnums={(*sorted(batched), i)}` if it belongs to the batch. "
                "If it is the same for every example, pass it by keyword."
            )


def _split(x: Any, steps: int) -> jax.Array:
    """Splits an array of the batch into ``[rows, steps, ...]``, a key into as many."""
    if is_scalar_key(x):
        return jax.random.split(x, steps)
    x = jnp.asarray(x)
    # Every k-th row, not the first B/k: of a batch that is sharded over devices, each
    # micro-batch then has its part on each device, and no row has to move.
    return x.reshape(x.shape[0] // steps, steps, *x.shape[1:])


def _part(split: jax.Array, i: jax.Array) -> jax.Array:
    """Returns what :func:`_split` made for micro-batch ``i``, read where it lies."""
    axis = min(1, split.ndim - 1)  # a scalar key has no rows
    return jax.lax.dynamic_index_in_dim(split, i, axis, keepdims=False)
