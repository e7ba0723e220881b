"""In code compiled for an H200 attention is cuDNN's, forward and backward."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from benchmarks.counting import targets
from benchmarks.networks.basic import gpt
from benchmarks.networks.fused import fused
from conftest import crossed

UNAVAILABLE = targets.unavailable()
pytestmark = pytest.mark.skipif(bool(UNAVAILABLE), reason=str(UNAVAILABLE))

FORWARD, BACKWARD = "Softmax", "SoftmaxBackward"
BATCH, HEADS, GROUPS, SIZE = 2, 4, 2, 64


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def program(length, dtype, given, moving, **options):
    """Returns the code of a gradient of attention."""

    def total(*args):
        named = dict(zip(given, args[3:], strict=True))
        out = jaxmp.dot_product_attention(*args[:3], **named, **options)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    args = [
        shape(BATCH, length, heads, SIZE, dtype=dtype)
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    grad = jax.grad(total, moving)
    return targets.compiled(grad, *args, *given.values()).as_text()


def calls(text):
    """Returns which of cuDNN's attentions a program calls."""
    found = re.findall(r'custom_call_target="__cudnn\$fmha(\w+)"', text)
    return [name.replace("ScaleBias", "") for name in found]


def squares(text, length):
    """Returns the arrays of length by length in a program, by their first axes."""
    even = length + length % 2
    pattern = rf"(\w+)\[([0-9,]*),(?:{length},{length}|{even},{even})\]"
    return {(dtype, axes) for dtype, axes in re.findall(pattern, text)}


LENGTHS = shape(BATCH, dtype=jnp.int32)


@pytest.mark.parametrize(
    ("length", "dtype", "given", "options"),
    [
        (128, jnp.float16, {}, {}),
        (128, jnp.bfloat16, {}, {"is_causal": True}),
        (128, jnp.bfloat16, {}, {"is_causal": True, "local_window_size": 16}),
        (128, jnp.bfloat16, {}, {"local_window_size": (16, 0)}),
        (197, jnp.bfloat16, {}, {}),
        (128, jnp.bfloat16, {"key_value_seq_lengths": LENGTHS}, {}),
        (
            128,
            jnp.bfloat16,
            {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
            {"is_causal": True},
        ),
    ],
)
def test_both_passes_are_those_of_cudnn(length, dtype, given, options):
    text = program(length, dtype, given, (0, 1, 2), **options)
    assert calls(text) == [FORWARD, BACKWARD]
    assert not squares(text, length)


@pytest.mark.parametrize(("keys", "is_array"), [(112, False), (48, True)])
def test_a_window_is_an_array_where_a_query_may_see_no_key(keys, is_array):
    """The last of 128 queries sees key 111 of 112, and none of 48."""
    args = [shape(BATCH, n, GROUPS, SIZE) for n in (128, keys, keys)]
    attend = functools.partial(jaxmp.dot_product_attention, local_window_size=(16, 0))
    text = targets.compiled(attend, *args).as_text()
    assert calls(text) == [FORWARD]
    assert bool(re.search(rf"\[[0-9,]*,128,{keys}\]", text)) == is_array


@pytest.mark.parametrize("length", [128, 197])
@pytest.mark.parametrize("axes", [(1, 1), (BATCH, 1), (1, HEADS)])
def test_a_mask_is_one_array(length, axes):
    given = {"mask": shape(*axes, length, length, dtype=bool)}
    text = program(length, jnp.bfloat16, given, (0, 1, 2), is_causal=True)
    assert calls(text) == [FORWARD, BACKWARD]
    found = squares(text, length)
    # Neither has an array for each head of each example.
    assert not any(axes == f"{BATCH},{HEADS}" for _, axes in found), found


@crossed("length dtype", [128, 197], [jnp.float32, jnp.bfloat16])
def test_a_bias_that_is_trained_has_its_own_dtype(length, dtype):
    given = {"bias": shape(1, HEADS, length, length, dtype=dtype)}
    text = program(length, jnp.bfloat16, given, (0, 1, 2))
    assert calls(text) == [FORWARD, BACKWARD]
    # cuDNN writes the gradient of a bias in the dtype of the queries.
    text = program(length, jnp.bfloat16, given, (0, 3))
    has_gradient = dtype == jnp.bfloat16
    assert calls(text) == [FORWARD, *[BACKWARD] * has_gradient]


def test_float32_and_tangents_are_those_of_xla():
    assert calls(program(128, jnp.float32, {}, (0, 1, 2))) == []
    args = [shape(BATCH, 128, HEADS, SIZE)] * 3

    def tangent(*args):
        return jax.jvp(jaxmp.dot_product_attention, args, args)[1]

    assert BACKWARD not in calls(targets.compiled(tangent, *args).as_text())
    asks = functools.partial(jaxmp.dot_product_attention, implementation="cudnn")
    with pytest.raises(NotImplementedError, match="tangent"):
        targets.lowered(lambda *args: jax.jvp(asks, args, args)[1], *args)


@crossed("dtype inside", ["bfloat16", "float16"], [False, True])
def test_a_decoder_under_autocast_is_cudnns_in_every_layer(dtype, inside):
    layers, length = 2, 128
    network = gpt(2, layers=layers, width=192, heads=2, vocabulary=256, length=length)
    (network,) = fused({"gpt": network}).values()
    tokens, labels = network.shapes()
    params = jax.eval_shape(network.model.init, jax.random.key(0), tokens)

    def loss(params, tokens, labels):
        logits = network.model.apply(params, tokens)
        return jnp.mean(
            jax.nn.logsumexp(logits, -1)
            - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        )

    if inside:
        step = jax.value_and_grad(jaxmp.autocast(loss, dtype))
    else:
        step = jaxmp.autocast(jax.value_and_grad(loss), dtype)
    text = targets.compiled(step, params, tokens, labels).as_text()
    assert sorted(calls(text)) == [FORWARD] * layers + [BACKWARD] * layers
    assert not squares(text, length)


@functools.cache
def mesh():
    devices = targets.devices(count=8)
    return Mesh(np.array(devices).reshape(4, 2), ("data", "model"))


@crossed("spec by", [P("data"), P("data", None, "model")], ["shard_map", "jit"])
def test_examples_and_heads_on_many_devices(spec, by):
    def total(*args):
        # The gradient of a sum is one number, which JAX would not shard.
        out = jaxmp.dot_product_attention(*args, is_causal=True)
        return jnp.sum(out.astype(jnp.float32))

    grad = jax.grad(total, (0, 1, 2))
    if by == "shard_map":
        grad = jax.shard_map(grad, mesh=mesh(), in_specs=spec, out_specs=spec)
    args = [
        jax.ShapeDtypeStruct(
            (8, 128, heads, SIZE), jnp.bfloat16, sharding=NamedSharding(mesh(), spec)
        )
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    text = (
        jax.jit(grad).lower(*args).compile(compiler_options=targets.OPTIONS).as_text()
    )
    assert calls(text) == [FORWARD, BACKWARD]
    heads = HEADS // (2 if "model" in spec else 1)
    assert f"bf16[2,{heads},128,{SIZE}]" in text
    assert not re.search("all-gather|all-to-all|collective-permute", text)
