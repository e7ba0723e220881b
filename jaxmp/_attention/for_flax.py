"""Attention as Flax's layers call it: any batch, and what Flax alone can do its way."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jaxprs.scopes import ATTENTION
from .form import Form, Operands, seen
from .function import dot_product_attention

# What asks for products of a kind of their own.
_ASKS = {
    "precision",
    "einsum_dot_general",
    "qk_attn_weights_einsum",
    "attn_weights_value_einsum",
}


def attend_as_flax(
    written: Callable[..., Any],
    arrays: Sequence[Any],
    bias: Any,
    mask: Any,
    ours: dict[str, Any],
    **theirs: Any,
) -> Any:
    """Attends to arrays ``[batch..., length, heads, size]``.

    Args:
        written: Flax's attention, of query, key, value, a bias and a mask. It does what
            needs the weights, and the audit names why.
        arrays: Query, key and value.
        bias: Broadcasts to ``[batch..., heads, length, keys]``.
        mask: The same, and true where a query sees a key.
        ours: Options that Flax's attention does not know.
        **theirs: Its own.
    """
    query, key, value = arrays
    reason = None
    if theirs["dropout_rate"] > 0 and not theirs["deterministic"]:
        reason = "dropout"
    elif theirs["module"] is not None:
        reason = "sown"
    elif any(theirs.get(name) is not None for name in _ASKS):
        reason = "asked"
    elif key.shape != value.shape:
        reason = "sizes"
    elif query.shape[-3] == 1 != key.shape[-3]:
        reason = "decoding"
    if reason is not None:
        with jax.named_scope(f"{ATTENTION}{reason}"):
            return written(*arrays, bias, _with_options(arrays, mask, ours), **theirs)
    batch = query.shape[:-3]
    given = {"bias": bias, "mask": None if mask is None else jnp.asarray(mask, bool)}
    given = {name: _like_batch(x, batch) for name, x in given.items() if x is not None}
    args = [x.reshape(-1, *x.shape[-3:]) for x in arrays]
    return dot_product_attention(*args, **given, **ours).reshape(query.shape)


def _like_batch(x: Any, batch: tuple[int, ...]) -> Any:
    """Returns what broadcasts over several axes of a batch, for all in one axis."""
    x = jnp.asarray(x)
    x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
    axes, others = x.shape[:-3], x.shape[-3:]
    if math.prod(axes) == 1:
        return x.reshape(1, *others)
    return jnp.broadcast_to(x, (*batch, *others)).reshape(-1, *others)


def _with_options(arrays: Sequence[Any], mask: Any, options: dict[str, Any]) -> Any:
    """Returns a mask of all that Flax's attention does not know."""
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in arrays)
    window = options.get("local_window_size")
    window = (window, window) if isinstance(window, int) else window
    form = Form(1.0, bool(options.get("is_causal")), window, (), None)
    lengths = options.get("key_value_seq_lengths")
    found = seen(form, Operands(query, key, value, None, None, None, lengths))
    if found is None:
        return mask
    batch = arrays[0].shape[:-3]
    if found.shape[0] > 1:
        found = found.reshape(*batch, *found.shape[1:])
    else:
        found = found.reshape((1,) * len(batch) + found.shape[1:])
    return found if mask is None else jnp.logical_and(mask, found)
