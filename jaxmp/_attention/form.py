"""The options of an attention operation, and what it masks."""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

# Operands that may be left out, in the order in which the others have them.
BIAS, MASK, QUERIES, KEYS = OPTIONAL = (
    "bias",
    "mask",
    "query_seq_lengths",
    "key_value_seq_lengths",
)


class Form(NamedTuple):
    """An attention without its arrays; hashable."""

    scale: float
    is_causal: bool
    window: tuple[int, int] | None  # keys before and behind the query that it sees
    has: tuple[str, ...]  # those of OPTIONAL that it is given
    implementation: str | None

    def operands(self, args: Sequence[Any]) -> "Operands":
        """Returns what each of its operands is."""
        return Operands(*args[:3], **dict(zip(self.has, args[3:], strict=True)))

    def place(self, name: str) -> int | None:
        """Returns the place of one of OPTIONAL among the operands."""
        return 3 + self.has.index(name) if name in self.has else None

    @property
    def arity(self) -> int:
        """How many operands it has."""
        return 3 + len(self.has)


class Operands(NamedTuple):
    """The arrays of an attention: B examples, N heads of queries, K of keys, size H."""

    query: Any  # [B, T, N, H]
    key: Any  # [B, S, K, H]
    value: Any  # [B, S, K, H]
    bias: Any = None  # broadcasts to [B, N, T, S]
    mask: Any = None  # bool, broadcasts to [B, N, T, S]
    query_seq_lengths: Any = None  # int32[B]
    key_value_seq_lengths: Any = None  # int32[B]

    @property
    def lengths(self) -> tuple[int, int]:
        """T and S."""
        return self.query.shape[1], self.key.shape[1]


def seen(form: Form, ops: Operands) -> Any:
    """Returns which key each query sees, ``bool[B or 1, N or 1, T, S]``.

    None if all see all.
    """
    queries, keys = (jnp.arange(n) for n in ops.lengths)
    queries, keys = queries[:, None], keys[None, :]
    found = []
    if form.is_causal:
        found.append(queries >= keys)
    if form.window is not None:
        before, behind = form.window
        found.append((queries <= keys + before) & (queries >= keys - behind))
    for at, lengths in ((queries, ops.query_seq_lengths), (keys, ops[6])):
        if lengths is not None:
            found.append(at < lengths[:, None, None, None])
    if ops.mask is not None:
        found.append(ops.mask)
    if not found:
        return None
    together = functools.reduce(operator.and_, found)
    together = together.reshape((1,) * (4 - together.ndim) + together.shape)
    return jnp.broadcast_to(together, (*together.shape[:2], *ops.lengths))


def row_is_real(ops: Operands) -> Any:
    """Returns which queries are no padding, ``bool[B, T, 1, 1]``; None if all."""
    if ops.query_seq_lengths is None:
        return None
    rows = jnp.arange(ops.query.shape[1])[:, None, None]
    return rows < ops.query_seq_lengths[:, None, None, None]


def summed_like(bias: Any, cotangent: Any) -> Any:
    """Returns the cotangent of a bias, for that of all scores ``[B, N, T, S]``."""
    axes = [i for i in range(4) if bias.shape[i] != cotangent.shape[i]]
    summed = jnp.sum(cotangent, axes, dtype=jnp.float32, keepdims=True)
    return summed.astype(bias.dtype)
