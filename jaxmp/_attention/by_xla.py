"""Attention by XLA: that of ``jax.nn``, and its derivatives."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .form import BIAS, Form, Operands, row_is_real, seen, summed_like


def forward(
    form: Form, precision: Any, args: Sequence[Any], residual: bool
) -> list[Any]:
    """Returns the result, and what stands for the sums of the rows if asked for."""
    out = attended(form, precision, args)
    return [out, sums(out)][: 1 + residual]


def sums(out: jax.Array) -> jax.Array:
    """Returns a float32 number for each row, ``[B, N, T]``.

    The gradient of XLA's form computes the weights again, and reads none.
    """
    return jnp.swapaxes(out[..., 0], 1, 2).astype(jnp.float32) * 0


def attended(form: Form, precision: Any, args: Sequence[Any]) -> Any:
    """Returns the attention of ``jax.nn``; in 16 bits with products that CPUs have."""
    ops = form.operands(args)
    if ops.query.dtype.itemsize == 2:
        return _InGroups(form, ops).attended()
    # Float32 products have the precision that the operation was traced with.
    one = precision[0] if isinstance(precision, tuple) else precision
    if one is None:
        return of_jax(form, args)
    named = one.name.lower() if isinstance(one, lax.Precision) else one.name
    with jax.default_matmul_precision(named):
        return of_jax(form, args)


def of_jax(form: Form, args: Sequence[Any]) -> Any:
    """Returns what ``jax.nn`` makes of the same operands, and raises what it raises."""
    ops = form.operands(args)
    return jax.nn.dot_product_attention(
        *ops[:5],
        scale=form.scale,
        is_causal=form.is_causal,
        query_seq_lengths=ops.query_seq_lengths,
        key_value_seq_lengths=ops.key_value_seq_lengths,
        local_window_size=form.window,
        implementation="xla",
    )


def tangent(
    form: Form, precision: Any, args: Sequence[Any], moving: Sequence[int]
) -> list[Any]:
    """Returns the tangent of the result, for tangents of the operands that move.

    These come last, behind the operands, the result and the sums of the rows.
    """
    fun, moved = _of_moving(form, precision, args, moving)
    return [jax.jvp(fun, moved, list(args[form.arity + 2 :]))[1]]


def gradient(
    form: Form, precision: Any, args: Sequence[Any], moving: Sequence[int]
) -> list[Any]:
    """Returns the cotangents of the operands that move.

    The cotangent of the result comes last.
    """
    if args[0].dtype.itemsize == 2:
        # Or XLA would see that the forward pass has computed the same weights, and keep
        # those of all layers.
        args = lax.optimization_barrier(tuple(args))
        operands = form.operands(args[: form.arity])
        found = _InGroups(form, operands).gradient(args[-1])
        return [found[i] for i in moving]
    fun, moved = _of_moving(form, precision, args, moving)
    return list(jax.vjp(fun, *moved)[1](args[-1]))


def _of_moving(form: Form, precision: Any, args: Sequence[Any], moving: Sequence[int]):
    """Returns the attention as a function of what moves, and that."""

    def fun(*moved):
        changed = dict(zip(moving, moved, strict=True))
        args_ = [changed.get(i, x) for i, x in enumerate(args[: form.arity])]
        return attended(form, precision, args_)

    return fun, [args[i] for i in moving]


class _InGroups:
    """An attention in 16 bits: its products are of 16 bits, all else is float32.

    The queries of a group are rows of one matrix. A product over two axes would make
    XLA write the weights once more, transposed.
    """

    def __init__(self, form: Form, ops: Operands):
        """Computes the weights, ``[B, K, N / K, T, S]`` in 16 bits."""
        self.form, self.ops = form, ops
        self.mask, self.real = seen(form, ops), row_is_real(ops)
        self.query = self.as_rows(ops.query)
        scores = self.scores(self.query, ops.key) * form.scale
        if ops.bias is not None:
            scores += self.over_groups(ops.bias)
        if self.mask is not None:
            self.mask = self.over_groups(self.mask)
            # What `jax.nn` gives to a key that is not seen.
            hidden = -0.7 * jnp.finfo(jnp.float32).max
            scores = jnp.where(self.mask, scores, hidden)
        largest = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
        total = jnp.sum(jnp.exp(scores - largest), axis=-1, keepdims=True)
        # Or XLA would write the exponentials in float32, beside the scores.
        largest, total = lax.optimization_barrier((largest, total))
        weights = jnp.exp(scores - largest) / total
        self.weights = weights.astype(ops.query.dtype)

    def as_rows(self, x: Any) -> Any:
        """Returns ``[B, T, N, H]`` as ``[B, K, N / K * T, H]``."""
        batch, length, _, size = x.shape
        x = x.reshape(batch, length, self.ops.key.shape[2], -1, size)
        return x.transpose(0, 2, 3, 1, 4).reshape(batch, x.shape[2], -1, size)

    def of_rows(self, x: Any) -> Any:
        """Returns what :meth:`as_rows` was given, for what it returned."""
        batch, length, _, size = self.ops.query.shape
        x = x.reshape(batch, x.shape[1], -1, length, size).transpose(0, 3, 1, 2, 4)
        return x.reshape(self.ops.query.shape)

    def scores(self, rows: Any, columns: Any) -> Any:
        """Returns the product of queries and keys, ``float32[B, K, N / K, T, S]``."""
        out = _product("bkxh,bskh->bkxs", rows, columns)
        return out.reshape(*out.shape[:2], -1, *self.ops.lengths)

    def over_groups(self, x: Any) -> Any:
        """Returns ``[B or 1, N or 1, T, S]`` as it broadcasts to the weights."""
        groups = self.ops.key.shape[2]
        if x.shape[1] == 1:
            return x[:, :, None]
        return x.reshape(x.shape[0], groups, -1, *x.shape[2:])

    def attended(self) -> Any:
        """Returns the result."""
        weights = self.weights.reshape(*self.query.shape[:3], -1)
        out = _product("bkxs,bskh->bkxh", weights, self.ops.value)
        out = self.of_rows(out.astype(weights.dtype))
        return out if self.real is None else jnp.where(self.real, out, 0)

    def gradient(self, cotangent: Any) -> dict[int, Any]:
        """Returns the cotangents of query, key, value and bias, by place.

        The derivative of ``jax.nn``'s would round those of the weights to 16 bits,
        before their mean is taken away. The weights themselves are rounded, so that
        no two float32 arrays of their size are there at once. This second rounding
        makes the errors of queries and keys 1.2 times as large.

        Dao et al., "FlashAttention", 2022, appendix B.2,
        https://arxiv.org/abs/2205.14135.
        """
        ops = self.ops
        if self.real is not None:
            cotangent = jnp.where(self.real, cotangent, 0)
        # The float32 scores are gone before those of the cotangent are there.
        rounded, cotangent = lax.optimization_barrier((self.weights, cotangent))
        weights = rounded.astype(jnp.float32)
        cotangent = self.as_rows(cotangent)
        sent = self.scores(cotangent, ops.value)
        # Of weights that were rounded, and do not quite add up to one.
        mean = jnp.sum(weights * sent, axis=-1, keepdims=True)
        mean /= jnp.sum(weights, axis=-1, keepdims=True)
        scores = weights * (sent - mean)
        if self.mask is not None:
            scores = jnp.where(self.mask, scores, 0)
        scaled = (scores * self.form.scale).astype(rounded.dtype)
        scaled, weights = (
            x.reshape(*self.query.shape[:3], -1) for x in (scaled, rounded)
        )
        found = [
            _product("bkxs,bskh->bkxh", scaled, ops.key),
            _product("bkxs,bkxh->bskh", scaled, self.query),
            _product("bkxs,bkxh->bskh", weights, cotangent),
        ]
        gradients = {i: x.astype(scaled.dtype) for i, x in enumerate(found)}
        gradients[0] = self.of_rows(gradients[0])
        if (place := self.form.place(BIAS)) is not None:
            scores = scores.reshape(scores.shape[0], -1, *scores.shape[3:])
            gradients[place] = summed_like(ops.bias, scores)
        return gradients


def _product(spec: str, *operands: Any) -> Any:
    return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32)
