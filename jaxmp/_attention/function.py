"""``jaxmp.dot_product_attention``: the signature of ``jax.nn``'s, as one operation."""

import numbers
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from .._base.checks import short
from .._base.tree import is_array, varying_axes
from .._devices.varying import vary
from .._jaxprs.scopes import ATTENTION
from .._ops.products import default_precision
from .form import OPTIONAL, Form
from .operation import attended

Implementation = Literal["xla", "cudnn"]


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Attends by scaled dot products, with cuDNN's fused kernel where there is one.

    It takes what :func:`jax.nn.dot_product_attention` takes. In float32 it is that
    function: the same numbers, and every derivative. In 16 bits, in a half-precision
    model or under :func:`autocast`, it is one operation: it takes 16-bit queries, keys
    and values, computes scores, softmax and sums in float32, and returns 16 bits. The
    backward pass keeps queries, keys, values, the result, and one float32 number for
    each query, and no weights.

    On an NVIDIA GPU that operation is cuDNN's kernel, forward and backward, if that GPU
    has it: from compute capability 8.0 on for heads up to 128, at 9.0 up to 256;
    :func:`audit` says why where it is not. Elsewhere it is XLA's attention, and so are
    tangents (:func:`jax.jvp`), second derivatives, and what ``jax.export`` exports,
    which runs on every device.

    Args:
        query: ``[batch, length, heads, size]``, or without ``batch``.
        key: ``[batch, keys, key heads, size]``. There are as many heads as in
            ``query``, or they divide those, and a group of queries shares a key.
        value: Of the shape of ``key``.
        bias: Added to the scores, in float32. Broadcasts to
            ``[batch, heads, length, keys]``. cuDNN has a gradient of it only where it
            has the dtype of ``query``.
        mask: True where a query sees a key. Broadcasts to the same shape. The kernel
            reads it as an array of ``length`` times ``keys``: prefer ``is_causal`` and
            the lengths.
        scale: Multiplies the scores. None is one over the root of ``size``.
        is_causal: Whether a query sees no key behind it.
        query_seq_lengths: ``int32[batch]``, how many queries are not padding.
        key_value_seq_lengths: ``int32[batch]``, how many keys are not padding.
        local_window_size: How many keys a query sees before it and behind it, or one
            number for both.
        implementation: None takes the kernel where it can; ``"cudnn"`` raises where it
            cannot; ``"xla"`` is XLA's attention.

    Returns:
        An array of the shape and dtype of ``query``.

    Raises:
        ValueError: If shapes or dtypes do not fit.
        NotImplementedError: If ``implementation="cudnn"`` and the kernel cannot.

    Examples:
        >>> x = jnp.ones((2, 16, 4, 8))
        >>> jaxmp.dot_product_attention(x, x, x, is_causal=True).shape
        (2, 16, 4, 8)

    References:
        Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with
        IO-Awareness", NeurIPS 2022, https://arxiv.org/abs/2205.14135.
    """
    optional = bias, mask, query_seq_lengths, key_value_seq_lengths
    pairs = zip(OPTIONAL, optional, strict=True)
    given = {name: x for name, x in pairs if x is not None}
    given = as_arrays("dot_product_attention", **given)
    arrays = as_arrays("dot_product_attention", query=query, key=key, value=value)
    _check_shapes(arrays, given)
    arrays = [*arrays.values()]
    if implementation not in (None, "xla", "cudnn"):
        raise ValueError(
            f"`implementation` must be None, 'xla' or 'cudnn', but is "
            f"{short(implementation)}."
        )
    if isinstance(scale, Tracer):  # no number yet: attention as JAX writes it out
        with jax.named_scope(f"{ATTENTION}scale"):
            return jax.nn.dot_product_attention(
                *arrays,
                **given,
                scale=scale,
                is_causal=is_causal,
                local_window_size=local_window_size,
                implementation="xla",
            )
    window: Any = local_window_size
    if isinstance(window, numbers.Integral):
        window = window, window
    is_pair = isinstance(window, (tuple, list)) and len(window) == 2
    if window is not None and not (
        is_pair and all(isinstance(x, numbers.Integral) for x in window)
    ):
        raise ValueError(
            "`local_window_size` must be an integer or two, of keys before a query and "
            f"behind it, but is {short(local_window_size)}."
        )
    shape = arrays[0].shape
    args = [_in_4d(x) for x in arrays]
    args += [x if "length" in name else _in_4d(x) for name, x in given.items()]
    form = Form(
        scale=float(1 / np.sqrt(shape[-1]) if scale is None else scale),
        is_causal=bool(is_causal),
        window=None if window is None else (window[0], window[1]),
        has=tuple(given),
        implementation=implementation,
    )
    # Inside `shard_map`, an operation takes what differs over the same devices.
    axes = frozenset().union(*map(varying_axes, args))
    args = vary(args, tuple(axes)) if axes else args
    return attended(form, default_precision(), args).reshape(shape)


def as_arrays(function: str, **named: Any) -> dict[str, jax.Array]:
    """Returns the arguments of a function as arrays, by name."""
    for name, x in named.items():
        if not is_array(x):
            raise TypeError(
                f"`{name}` of `{function}` must be an array, but is {short(x)}."
            )
    return {name: jnp.asarray(x) for name, x in named.items()}


def _check_shapes(arrays: dict[str, jax.Array], given: dict[str, jax.Array]) -> None:
    """Raises where an argument has too many axes, or does not fit the scores."""
    for name, x in arrays.items():
        if x.ndim > 4:
            raise ValueError(
                f"`{name}` must be [batch, length, heads, size], or without `batch`, "
                f"but has the shape {list(x.shape)}. Put the leading axes into one, or "
                "use `jax.vmap`."
            )
    query, key = (_in_4d(arrays[name]).shape for name in ("query", "key"))
    scores = [query[0], query[2], query[1], key[1]]
    for name in {"bias", "mask"} & given.keys():
        shape = given[name].shape
        pairs = zip(reversed(shape), reversed(scores), strict=False)
        if len(shape) > 4 or not all(n in (1, m) for n, m in pairs):
            raise ValueError(
                f"`{name}` must broadcast to [batch, heads, length, keys], here "
                f"{scores}, but has the shape {list(shape)}. An axis that it lacks, or "
                f"has once for all, has the size 1: `{name}[:, None]` is for all heads."
            )


def _in_4d(x: jax.Array) -> jax.Array:
    return x.reshape((1,) * (4 - x.ndim) + x.shape)
