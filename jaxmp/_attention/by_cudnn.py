"""Attention by cuDNN's fused kernel: where it can be, and what the kernel is given."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.gpus import LARGEST_HEADS, NEEDS_CUDNN, Gpu, spelled
from .._jaxprs.jaxpr import (
    Cudnn,
    cudnn_attention,
    cudnn_attention_gradient,
    cudnn_version,
)
from .form import (
    BIAS,
    KEYS,
    MASK,
    QUERIES,
    Form,
    Operands,
    row_is_real,
    seen,
    summed_like,
)

# What hides a key: so large that the score beside it is lost, and all keys count alike
# where all are hidden. cuDNN subtracts such numbers, and the lowest float32 overflows.
_HIDDEN = np.float32(-(2.0**41))
# A bias below this hides its key as a mask does. The float32 sum of a row that has such
# numbers alone would have lost digits of how many they are.
_HIDES = np.float32(-(2.0**17))
_MULTIPLE = 8  # of which the sizes of heads are


def why_not(
    form: Form, operands: Sequence[Any], moving: Sequence[int], gpu: Gpu
) -> str | None:
    """Returns why a GPU has no kernel for an attention, and what to change.

    None if it has. Gradients are computed of the operands that are ``moving``.
    """
    if form.implementation == "xla":
        return '`implementation="xla"` selects XLA; leave it out'
    largest = gpu.largest_head
    if not largest:
        return f"{gpu} has no such kernel, which needs {spelled(min(LARGEST_HEADS))}"
    size = operands[0].shape[-1]
    if not isinstance(size, int) or size % _MULTIPLE or not 0 < size <= largest:
        larger = [
            f" on {gpu}, and up to {n} at {spelled(x)}"
            for x, n in LARGEST_HEADS.items()
            if n > largest
        ]
        return (
            f"heads have size {size}; the kernel takes multiples of {_MULTIPLE} up to "
            f"{largest}{''.join(larger)}"
        )
    needs = NEEDS_CUDNN.get(gpu.capability)
    installed = cudnn_version() if needs else None
    if needs and installed and installed < needs:
        return f"{gpu} needs cuDNN {spelled(needs)}, and {spelled(installed)} is here"
    dtype = operands[0].dtype
    if dtype not in (jnp.float16, jnp.bfloat16):
        return (
            f"query, key and value are {dtype}, and the kernel takes 16 bits; use "
            "`autocast`, or a half-precision model"
        )
    place = form.place(BIAS)
    if place is not None and place in moving:
        if operands[place].dtype != dtype:
            return (
                f"the bias is trained, and the kernel has no {operands[place].dtype} "
                f"gradient of it; pass `bias.astype({dtype})`"
            )
        if _hides_by_array(form, *(x.shape[1] for x in operands[:2])):
            return "the bias is trained, and there is a mask beside it"
    return None


def _hides_by_array(form: Form, queries: int, keys: int) -> bool:
    """Whether the kernel has to be given a bias that hides keys.

    It knows a window before the query, lengths of sequences, and who comes first. Where
    a row may see no key, it does not return what ``jax.nn`` does.
    """
    if MASK in form.has:
        return True
    if form.window is None:
        return False
    before, behind = form.window
    is_before = before >= 0 and (form.is_causal or behind == 0) and behind >= 0
    has_lengths = QUERIES in form.has or KEYS in form.has
    return not is_before or has_lengths or queries > keys + before


def forward(form: Form, args: Sequence[Any], residual: bool) -> list[Any]:
    """Returns the result, and the logarithm of the sum of each row if asked for it.

    The latter is ``float32[B, N, T]``.
    """
    given = _Given(form, form.operands(args))
    out, *sums = cudnn_attention(given.kernel, given.arrays, residual=residual)
    queries = args[0].shape[1]
    return [given.result(out), *(x[:, :, :queries] for x in sums)]


def gradient(form: Form, args: Sequence[Any], moving: Sequence[int]) -> list[Any]:
    """Returns the cotangents of the operands that move.

    Behind the operands come what the forward pass returned, and the cotangent of the
    first of that.
    """
    operands, (out, sums, cotangent) = args[: form.arity], args[form.arity :]
    given, place = _Given(form, form.operands(operands)), form.place(BIAS)
    query, *others = given.arrays
    if given.sees_any is not None:  # a row that is masked whole has a gradient of zero
        query = jnp.where(given.padded(given.sees_any, 1), query, 0)
    found = cudnn_attention_gradient(
        given.kernel,
        [query, *others],
        [given.padded(out, 1), given.padded(sums, 2), given.cotangent(cotangent, sums)],
        of_bias=place in moving,
    )
    gradients = given.gradients(found[:3], cotangent)
    if place is not None and place in moving:
        of_bias = found[3][..., : sums.shape[2], : args[1].shape[1]]
        gradients[place] = summed_like(args[place], of_bias)
    return [gradients[i] for i in moving]


class _Given:
    """What the kernel is given for an attention."""

    def __init__(self, form: Form, ops: Operands):
        """Finds a bias for what the kernel cannot mask, and pads."""
        self.ops = ops
        self.sees_any = None  # which queries see a key, where a mask may hide all
        self.counted = ops.lengths[1]  # how many keys the kernel has in each row
        self.empty = None  # which examples have no key
        bias, causal, window, lengths = ops.bias, form.is_causal, None, None
        if _hides_by_array(form, *ops.lengths):
            visible = seen(form, ops)
            shown = 0 if bias is None else bias.astype(jnp.float32)
            bias, causal = jnp.where(visible, shown, _HIDDEN), False
            self.sees_any = _of_rows(jnp.any(visible, -1))
        elif form.window is not None:
            causal, window = True, form.window[0] + 1
        elif QUERIES in form.has or KEYS in form.has:
            lengths = [
                jnp.full(ops.query.shape[:1], n, jnp.int32) if given is None else given
                for n, given in zip(ops.lengths, ops[5:], strict=True)
            ]
            if KEYS in form.has:  # the kernel wants one at least
                self.empty = (lengths[1] == 0)[:, None, None, None]
                lengths[1] = jnp.maximum(lengths[1], 1)
        if ops.bias is not None and self.sees_any is None:
            visible = seen(form, ops)
            if visible is not None:
                self.counted = _of_rows(jnp.maximum(jnp.sum(visible, -1), 1))
        self.has_bias = bias is not None
        bias = None if bias is None else self._whole(bias)
        self.kernel = Cudnn(form.scale, causal, window, bias, lengths)
        self.arrays = [self.padded(x, 1) for x in ops[:3]]

    def _whole(self, bias: Any) -> Any:
        """Returns a bias of all queries and keys, and of an even number of each.

        cuDNN has no gradients beside a bias of an odd length. The key that is added is
        hidden from rows that are masked whole, too.
        """
        bias = jnp.broadcast_to(bias, (*bias.shape[:2], *self.ops.lengths))
        if bias.dtype not in (jnp.float16, jnp.bfloat16):
            bias = bias.astype(jnp.float32)
        if bias.dtype != jnp.float16:  # which has no such numbers
            bias = jnp.where(bias < _HIDES, _HIDDEN.astype(bias.dtype), bias)
        hidden = max(float(2 * _HIDDEN), float(jnp.finfo(bias.dtype).min))
        return self.padded(self.padded(bias, 2), 3, hidden)

    def padded(self, x: Any, axis: int, number: float = 0) -> Any:
        """Returns ``x`` with an even length along an axis, if it has to be."""
        if not self.has_bias or not x.shape[axis] % 2:
            return x
        edges = [(0, int(i == axis), 0) for i in range(x.ndim)]
        return lax.pad(x, jnp.asarray(number, x.dtype), edges)

    def result(self, out: Any) -> Any:
        """Returns the result of the attention for what the kernel returns."""
        out = _first(out, self.ops.query.shape[1])
        if self.empty is None:
            return out
        # Weights of which each is hidden are alike.
        mean = jnp.mean(self.ops.value, 1, jnp.float32).astype(out.dtype)[:, None]
        mean = jnp.repeat(mean, out.shape[2] // mean.shape[2], axis=2)
        real = row_is_real(self.ops)
        mean = mean if real is None else jnp.where(real, mean, 0)
        return jnp.where(self.empty, mean, out)

    def cotangent(self, cotangent: Any, sums: Any) -> Any:
        """Returns the cotangent that the kernel is given, for that of the result.

        Args:
            cotangent: Of the result.
            sums: The logarithm of the sum of each row. It has no digit of the number of
                keys where all are hidden, and the kernel takes each weight for 1 then.
        """
        if self.empty is not None:
            cotangent = jnp.where(self.empty, 0, cotangent)
        if self.has_bias:
            share = (cotangent / self.counted).astype(cotangent.dtype)
            cotangent = jnp.where(_of_rows(sums) < _HIDDEN / 2, share, cotangent)
        return self.padded(cotangent, 1)

    def gradients(self, found: Sequence[Any], cotangent: Any) -> dict[int, Any]:
        """Returns the cotangents of query, key and value for those of the kernel."""
        query, key, value = (
            _first(x, like.shape[1])
            for x, like in zip(found, self.ops[:3], strict=True)
        )
        if self.sees_any is not None:
            query = jnp.where(self.sees_any, query, 0)
        if self.empty is not None:
            real = row_is_real(self.ops)
            sent = cotangent if real is None else jnp.where(real, cotangent, 0)
            batch, keys, groups, size = value.shape
            sent = jnp.sum(sent, 1, dtype=jnp.float32) / keys
            sent = jnp.sum(sent.reshape(batch, groups, -1, size), 2)[:, None]
            value = jnp.where(self.empty, sent.astype(value.dtype), value)
        return {0: query, 1: key, 2: value}


def _of_rows(x: Any) -> Any:
    """Returns ``[B, N, T]`` as it broadcasts to ``[B, T, N, H]``."""
    return jnp.swapaxes(x, 1, 2)[..., None]


def _first(x: Any, count: int) -> Any:
    """Returns the first rows of ``[B, T, N, H]``, without those that were padded."""
    return lax.slice_in_dim(x, 0, count, axis=1)
