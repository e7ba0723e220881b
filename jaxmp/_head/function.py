"""``jaxmp.linear_cross_entropy``: a loss head as a function of arrays."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._attention.function import as_arrays
from .._base.checks import short
from .._base.tree import varying_axes
from .._devices.varying import vary
from .._ops.products import default_precision
from .operation import FORWARD
from .tiles import LABELS, WEIGHTS, HeadForm

_OF_ROWS = "where", "weights"
_NAME, _REDUCTIONS = "linear_cross_entropy", ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: ArrayLike,
    kernel: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    where: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    return_z_loss: bool = False,
    soft_cap: float | None = None,
    transposed: bool = False,
    tile_rows: int | None = None,
    vocab_axis_name: Any = None,
) -> Any:
    """Returns the cross-entropy of ``hidden @ kernel``, without an array of logits.

    It equals the mean of :func:`optax.softmax_cross_entropy_with_integer_labels` of the
    logits, within rounding. A tile of rows at a time has logits. For ``"mean"`` and
    ``"sum"`` the gradients of a tile are computed with its loss, where the function is
    differentiated; for ``"none"`` the backward pass computes its logits again. In
    16 bits, under :func:`autocast` or in a half-precision model, the products take
    16 bits. Logits, softmax and sums are float32, and so is the gradient of a float32
    kernel.

    Args:
        hidden: ``[..., D]``, what the last layer returns.
        kernel: ``[D, V]``, or ``[V, D]`` if ``transposed``.
        labels: Integers of the shape ``[...]``. One that counts and is not below ``V``,
            or is negative, makes the loss NaN.
        bias: ``[V]``, added to the logits.
        where: Which rows count, a boolean of the shape of ``labels``, or one that
            broadcasts. The labels of all others may be anything.
        weights: Of the rows, of such a shape too. ``"mean"`` divides by their sum.
        reduction: ``"mean"``, 0 if no row counts; ``"sum"``; or ``"none"``, a loss for
            each row, which is 0 where it does not count.
        label_smoothing: The share of the labels that goes to all words alike.
        z_loss: Multiplies the square of the logarithm of the softmax's denominator,
            which is added to the loss.
        return_z_loss: Whether to return that part of the loss beside it, too. It has no
            gradient.
        soft_cap: Makes the logits ``soft_cap * tanh(logits / soft_cap)``.
        transposed: Whether ``kernel`` is ``[V, D]``, as an embedding is. Nothing is
            copied.
        tile_rows: The rows of a tile. None is the largest power of two whose float32
            logits take at most 512 MiB.
        vocab_axis_name: Inside :func:`jax.shard_map`, the mesh axis over which kernel
            and bias are sharded by words. ``labels`` are those of all words.

    Returns:
        The loss in float32: a scalar, or an array of the shape of ``labels``. With
        ``return_z_loss`` a pair.

    Raises:
        ValueError: If shapes do not fit, or an option has no such value.
        TypeError: If dtypes do not fit.

    Examples:
        >>> hidden, embedding = jnp.ones((2, 16, 8)), jnp.ones((100, 8))
        >>> labels = jnp.zeros((2, 16), jnp.int32)
        >>> loss = jaxmp.linear_cross_entropy(
        ...     hidden, embedding, labels, transposed=True
        ... )
        >>> print(f"{loss:.3f}")
        4.605

    References:
        Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", 2024,
        section 3.2, https://arxiv.org/abs/2410.10989, for the order. Chowdhery et al.,
        "PaLM", 2022, section 5, https://arxiv.org/abs/2204.02311, for the z-loss.
    """
    arrays = as_arrays(_NAME, hidden=hidden, kernel=kernel, labels=labels)
    rows = dict(zip(_OF_ROWS, (where, weights), strict=True))
    rows = as_arrays(_NAME, **{name: x for name, x in rows.items() if x is not None})
    given = as_arrays(_NAME, bias=bias) if bias is not None else {}
    form = HeadForm(
        is_transposed=bool(transposed),
        has_bias=bool(given),
        label_smoothing=float(label_smoothing),
        z_loss=float(z_loss),
        soft_cap=None if soft_cap is None else float(soft_cap),
        tile=tile_rows,
        axis=() if vocab_axis_name is None else vocab_axis_name,
    )
    _check(form, reduction, arrays | given | rows)
    hidden, kernel, labels = arrays.values()
    words = kernel.shape[form.words]
    words *= lax.axis_size(form.axis) if form.axis else 1
    dtype = jnp.promote_types(jnp.result_type(hidden, kernel), jnp.float32)
    counts = jnp.ones(labels.shape, dtype)
    counts = counts * rows["weights"] if "weights" in rows else counts
    counts = jnp.where(rows["where"], counts, 0) if "where" in rows else counts
    is_word = (labels >= 0) & (labels < words)
    # A label that is no word must not be taken for a loss.
    each = jnp.where(is_word | (counts == 0), counts, jnp.nan).astype(dtype)
    args = [hidden, kernel, labels.astype(jnp.int32), each, *given.values()]
    # Inside `shard_map`, an operation takes what differs over the same devices.
    axes = tuple(frozenset().union(*map(varying_axes, args)))
    of_rows = tuple(x for x in axes if x != form.axis)
    for i, x in enumerate(args):
        args[i] = vary(x, of_rows if i in (LABELS, WEIGHTS) else axes)
    params = {"form": form, "precision": default_precision()}
    with jax.named_scope(_NAME):  # so that a report has a path for it
        found = FORWARD.bind(*args, **params, summed=reduction != "none")
    if reduction == "mean":
        count = jnp.sum(counts)
        found = [x / jnp.where(count == 0, 1, count) for x in found]
    return tuple(found) if return_z_loss else found[0]


def _check(form: HeadForm, reduction: Any, arrays: dict[str, Any]) -> None:
    """Checks options, dtypes and shapes."""
    smooth, z_loss, cap, tile = form[2:6]
    is_count = isinstance(tile, int) and tile > 0
    for name, value, is_good, expected in (
        ("reduction", reduction, reduction in _REDUCTIONS, "'mean', 'sum' or 'none'"),
        ("label_smoothing", smooth, 0 <= smooth <= 1, "from 0 to 1"),
        ("z_loss", z_loss, 0 <= z_loss < np.inf, "0 or positive"),
        ("soft_cap", cap, cap is None or 0 < cap < np.inf, "positive, or None"),
        ("tile_rows", tile, tile is None or is_count, "a positive integer, or None"),
    ):
        if not is_good:
            raise ValueError(f"`{name}` must be {expected}, but is {short(value)}.")
    for name, x in arrays.items():
        kind = {"labels": jnp.integer, "where": jnp.bool_}.get(name, jnp.floating)
        if not jnp.issubdtype(x.dtype, kind):
            raise TypeError(
                f"`{name}` of `{_NAME}` must be {kind.__name__}, but is {x.dtype}."
            )
    hidden, kernel = arrays["hidden"], arrays["kernel"]
    if hidden.ndim < 1 or kernel.ndim != 2:
        raise ValueError("`hidden` must be `[..., D]` and `kernel` a matrix.")
    (*rows, size), words = hidden.shape, kernel.shape[form.words]
    layout = (words, size) if form.is_transposed else (size, words)
    expected = {"kernel": layout, "labels": (*rows,), "bias": (words,)}
    for name, x in arrays.items():
        fits = jnp.broadcast_shapes(x.shape, rows) if name in _OF_ROWS else x.shape
        if fits != expected.get(name, tuple(rows) if name in _OF_ROWS else x.shape):
            raise ValueError(
                f"`{name}` has the shape {[*x.shape]}, where `hidden` has "
                f"{[*hidden.shape]} and `kernel` {[*kernel.shape]}. A kernel is "
                "`[D, V]`, and `[V, D]` with `transposed=True`."
            )
