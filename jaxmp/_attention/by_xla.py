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
    """An attention in 16 bits: its products are of 16 bits, all else is float32."""

    def __init__(self, form: Form, ops: Operands):
        """Computes the weights, ``float32[B, K, N / K, T, S]``."""
        self.form, self.ops = form, ops
        self.mask, self.real = seen(form, ops), row_is_real(ops)
        self.query = self.grouped(ops.query)
        scores = _product("btkgh,bskh->bkgts", self.query, ops.key) * form.scale
        if ops.bias is not None:
            scores += self.over_groups(ops.bias)
        if self.mask is not None:
            self.mask = self.over_groups(self.mask)
            # What `jax.nn` gives to a key that is not seen.
            hidden = -0.7 * jnp.finfo(jnp.float32).max
            scores = jnp.where(self.mask, scores, hidden)
        self.weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1)
        self.rounded = self.weights.astype(ops.query.dtype)

    def grouped(self, x: Any) -> Any:
        """Returns ``[B, T, N, H]`` as ``[B, T, K, N / K, H]``."""
        return x.reshape(*x.shape[:2], self.ops.key.shape[2], -1, x.shape[3])

    def over_groups(self, x: Any) -> Any:
        """Returns ``[B or 1, N or 1, T, S]`` as it broadcasts to the weights."""
        groups = self.ops.key.shape[2]
        if x.shape[1] == 1:
            return x[:, :, None]
        return x.reshape(x.shape[0], groups, -1, *x.shape[2:])

    def attended(self) -> Any:
        """Returns the result."""
        ops = self.ops
        out = _product("bkgts,bskh->btkgh", self.rounded, ops.value)
        out = out.astype(ops.query.dtype).reshape(ops.query.shape)
        return out if self.real is None else jnp.where(self.real, out, 0)

    def gradient(self, cotangent: Any) -> dict[int, Any]:
        """Returns the cotangents of query, key, value and bias, by place.

        The derivative of ``jax.nn``'s would round those of the weights to 16 bits,
        before their mean is taken away.

        Dao et al., "FlashAttention", 2022, appendix B.2,
        https://arxiv.org/abs/2205.14135.
        """
        ops = self.ops
        if self.real is not None:
            cotangent = jnp.where(self.real, cotangent, 0)
        cotangent = self.grouped(cotangent)
        sent = _product("btkgh,bskh->bkgts", cotangent, ops.value)
        mean = jnp.sum(self.weights * sent, axis=-1, keepdims=True)
        scores = self.weights * (sent - mean)
        if self.mask is not None:
            scores = jnp.where(self.mask, scores, 0)
        scaled = (scores * self.form.scale).astype(self.rounded.dtype)
        found = [
            _product("bkgts,bskh->btkgh", scaled, ops.key).reshape(ops.query.shape),
            _product("bkgts,btkgh->bskh", scaled, self.query),
            _product("bkgts,btkgh->bskh", self.rounded, cotangent),
        ]
        gradients = {i: x.astype(scaled.dtype) for i, x in enumerate(found)}
        if (place := self.form.place(BIAS)) is not None:
            scores = scores.reshape(scores.shape[0], -1, *scores.shape[3:])
            gradients[place] = summed_like(ops.bias, scores)
        return gradients


def _product(spec: str, *operands: Any) -> Any:
    return jnp.einsum(spec, *operands, preferred_element_type=jnp.float32)
