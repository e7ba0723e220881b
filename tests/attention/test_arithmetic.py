"""What cuDNN's kernel is given is right, by a kernel of its arithmetic on a CPU.

The kernel keeps one float32 number for each row, the logarithm of its sum, and makes
the weights again from that. Where there is a GPU, ``test_operation`` is run on it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import at_once, crossed, normal
from jaxmp._attention import by_cudnn, by_xla
from jaxmp._attention.form import Form

BATCH, HEADS, SIZE = 2, 2, 8
HALVES = (jnp.bfloat16, jnp.float16)


def scores(given, arrays):
    query, key = (x.astype(jnp.float32) for x in arrays[:2])
    found = jnp.einsum("bqhd,bkhd->bhqk", query, key) * given.scale
    found = found if given.bias is None else found + given.bias.astype(jnp.float32)
    queries, keys = (jnp.arange(x.shape[1]) for x in arrays[:2])
    if given.is_causal:
        found = jnp.where(queries[:, None] >= keys, found, -jnp.inf)
    if given.window is not None:
        near = queries[:, None] < keys + given.window
        found = jnp.where(near, found, -jnp.inf)
    if given.lengths is not None:
        found = jnp.where(keys < given.lengths[1][:, None, None, None], found, -jnp.inf)
    return found


def forward(given, arrays, *, residual):
    found = scores(given, arrays)
    sums = jax.nn.logsumexp(found, -1)
    out = jnp.einsum(
        "bhqk,bkhd->bqhd", jax.nn.softmax(found), arrays[2].astype(jnp.float32)
    )
    return [out.astype(arrays[0].dtype), sums][: 1 + residual]


def backward(given, arrays, residuals, *, of_bias):
    query, key, value = (x.astype(jnp.float32) for x in arrays)
    out, sums, cotangent = (x.astype(jnp.float32) for x in residuals)
    found = scores(given, arrays)
    weights = jnp.exp(found - sums[..., None])
    of_weights = jnp.einsum("bqhd,bkhd->bhqk", cotangent, value)
    mean = jnp.einsum("bqhd,bqhd->bhq", out, cotangent)[..., None]
    of_scores = weights * (of_weights - mean)
    gradients = [
        given.scale * jnp.einsum("bhqk,bkhd->bqhd", of_scores, key),
        given.scale * jnp.einsum("bhqk,bqhd->bkhd", of_scores, query),
        jnp.einsum("bhqk,bqhd->bkhd", weights, cotangent),
    ]
    gradients = [x.astype(arrays[0].dtype) for x in gradients]
    return [*gradients, *[of_scores.astype(given.bias.dtype)] * of_bias]


def hidden(number, *, keys, dtype=jnp.float32):
    """A bias that hides some keys, in one row all."""
    seen = jnp.ones((BATCH, 1, keys, keys), bool).at[0, 0, 2].set(False)
    seen = seen.at[1, 0, :, 1].set(False)
    return jnp.where(seen, normal(3, *seen.shape), number).astype(dtype)


CASES = {
    "mask": lambda n: {"mask": hidden(-1e9, keys=n) > -1e8},
    "padding before, causal": lambda n: {
        "mask": jnp.ones((BATCH, 1, 1, n), bool).at[0, 0, 0, :3].set(False),
        "is_causal": True,
    },
    "bias of -1e9": lambda n: {"bias": hidden(-1e9, keys=n)},
    "lowest bias": lambda n: {"bias": hidden(jnp.finfo(jnp.float32).min, keys=n)},
    "bias in bfloat16": lambda n: {"bias": hidden(-1e9, keys=n, dtype=jnp.bfloat16)},
    "bias, causal": lambda n: {
        "bias": hidden(-1e9, keys=n).at[1, 0, :, :3].set(-1e9),
        "is_causal": True,
    },
    "bias and lengths": lambda n: {
        "bias": hidden(-1e9, keys=n),
        "key_value_seq_lengths": jnp.array([n - 3, 0]),
    },
}


def gradients_of(run, form, args):
    """Returns the result and the gradients, of the kernel or of XLA."""
    cotangent = normal(9, *args[0].shape).astype(args[0].dtype)
    if run is by_xla:
        out, sums = by_xla.forward(form, None, args, residual=True)
        found = by_xla.gradient(form, None, [*args, out, sums, cotangent], (0, 1, 2))
        return [out, *found]
    out, sums = by_cudnn.forward(form, args, residual=True)
    return [out, *by_cudnn.gradient(form, [*args, out, sums, cotangent], (0, 1, 2))]


@pytest.fixture(autouse=True)
def on_the_kernel(monkeypatch):
    monkeypatch.setattr(by_cudnn, "cudnn_attention", forward)
    monkeypatch.setattr(by_cudnn, "cudnn_attention_gradient", backward)


@crossed("case length dtype", CASES, [8, 9], HALVES)
def test_rows_that_see_no_key_have_the_gradients_of_xla(case, length, dtype):
    options = case(length)
    causal = options.pop("is_causal", False)
    form = Form(SIZE**-0.5, causal, None, tuple(options), None)
    args = [normal(i, BATCH, length, HEADS, SIZE).astype(dtype) for i in range(3)]
    args += options.values()
    near = 4 * float(jnp.finfo(dtype).eps)
    both = (functools.partial(gradients_of, run, form) for run in (by_cudnn, by_xla))
    found, expected = at_once(*both)(args)
    for x, y in zip(found, expected, strict=True):
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        assert jnp.linalg.norm(x - y) <= near * jnp.linalg.norm(y)


@pytest.mark.parametrize("dtype", HALVES)
def test_however_large_a_bias_is_that_hides_its_keys_hide_alike(dtype):
    form = Form(SIZE**-0.5, False, None, ("bias",), None)
    args = [normal(i, BATCH, 8, HEADS, SIZE).astype(dtype) for i in range(3)]
    gradients = jax.jit(functools.partial(gradients_of, by_cudnn, form))
    results = [
        gradients([*args, hidden(number, keys=8)])
        for number in (-2e5, -1e6, -1e9, -1e30)
    ]
    for one in results[1:]:
        for x, y in zip(one, results[0], strict=True):
            np.testing.assert_array_equal(x, y)
