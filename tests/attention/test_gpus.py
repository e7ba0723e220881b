"""Attention is cuDNN's on the GPUs that have its kernel, and XLA's on all others."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import jaxmp
import jaxmp.linen
import jaxmp.nnx
from benchmarks.counting import targets
from jaxmp._attention import by_cudnn
from jaxmp._attention.form import Form
from jaxmp._base.gpus import Gpu

UNAVAILABLE = targets.unavailable()
compiles = pytest.mark.skipif(bool(UNAVAILABLE), reason=str(UNAVAILABLE))
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

WIDTH, HEADS = 128, 2


def shape(*sizes, dtype=jnp.float32, gpu=None):
    sharding = SingleDeviceSharding(targets.devices(gpu)[0]) if gpu else None
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def gradient(attention=jaxmp.dot_product_attention, **options):
    def total(*args):
        return jnp.sum(attention(*args, **options).astype(jnp.float32) ** 2)

    return jax.grad(total, (0, 1, 2))


def kernels(text):
    """Returns how many of its attentions a program gives to cuDNN."""
    return text.count('custom_call_target="__cudnn$fmha')


def products(text):
    """Returns the dtypes of the operands of all products that a program calls."""
    dtypes = dict(re.findall(r"%([\w.-]+) = (\w+)\[", text))
    calls = re.findall(r'custom-call\((.*?)\), custom_call_target="__cublas', text)
    return {dtypes[x] for call in calls for x in re.findall(r"%([\w.-]+)", call)[:2]}


@compiles
@pytest.mark.parametrize(
    ("gpu", "size", "count"),
    [
        ("t4", 64, 0),
        ("a100", 128, 2),
        ("a100", 136, 0),
        ("rtx4090", 256, 0),
        ("h200", 256, 2),
        ("b200", 128, 2),
        ("b200", 136, 0),
    ],
)
def test_a_program_calls_the_kernels_that_the_gpu_has(gpu, size, count):
    x = shape(2, 64, HEADS, size, dtype=jnp.float16)
    text = targets.compiled(gradient(is_causal=True), x, x, x, gpu=gpu).as_text()
    assert (kernels(text), products(text)) == (count, set() if count else {"f16"})


@compiles
def test_one_trace_serves_every_gpu():
    traced = jax.jit(gradient(is_causal=True))
    counts = []
    for gpu in ("h200", "t4", "h200"):
        x = shape(2, 64, HEADS, 64, dtype=jnp.float16, gpu=gpu)
        counts.append(traced.lower(x, x, x).as_text().count("__cudnn$fmha"))
    assert counts == [2, 0, 2]


def of_linen():
    layer = nn.MultiHeadDotProductAttention(
        HEADS, attention_fn=jaxmp.linen.dot_product_attention
    )
    params = jax.eval_shape(layer.init, jax.random.key(0), shape(2, 64, WIDTH))
    return layer.apply, params


def of_nnx():
    def make():
        return nnx.MultiHeadAttention(
            HEADS,
            WIDTH,
            decode=False,
            attention_fn=jaxmp.nnx.dot_product_attention,
            rngs=nnx.Rngs(0),
        )

    graph, params = nnx.split(nnx.eval_shape(make))
    return lambda params, x: nnx.merge(graph, params)(x), params


def attend(w, x):
    query, key, value = ((x @ w[i]).reshape(*x.shape[:2], HEADS, -1) for i in range(3))
    out = jaxmp.dot_product_attention(query, key, value, is_causal=True)
    return x + out.reshape(x.shape) @ w[3]


def scanned(body):
    def apply(w, x):
        return jax.lax.scan(lambda x, w: (body(w, x), None), x, w)[0]

    return apply, shape(2, 4, WIDTH, WIDTH)


def on_two(w, x):
    mesh = Mesh(np.array(targets.devices("t4", 2)), "data")
    spec = P("data")
    return jax.shard_map(attend, mesh=mesh, in_specs=(P(), spec), out_specs=spec)(w, x)


ONE = shape(4, WIDTH, WIDTH)
PROGRAMS = {
    "plain": lambda: (attend, ONE),
    "Linen": of_linen,
    "NNX": of_nnx,
    "scan": lambda: scanned(attend),
    "checkpoint": lambda: (jax.checkpoint(attend), ONE),
    "scan of checkpoint": lambda: scanned(jax.checkpoint(attend)),
    "shard_map": lambda: (on_two, ONE),
}


@compiles
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_float16_runs_on_a_t4_forward_and_backward(program):
    apply, params = program()
    several = program is PROGRAMS["shard_map"]
    devices = targets.devices("t4", 2 if several else 1)
    sharding = NamedSharding(Mesh(np.array(devices), "data"), P())
    x = shape(2, 64, WIDTH)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), (params, x)
    )
    grad = jax.value_and_grad(lambda *args: jnp.mean(apply(*args) ** 2))
    lowered = jax.jit(jaxmp.autocast(grad, "mixed_float16")).lower(*args)
    text = lowered.compile(compiler_options=targets.OPTIONS).as_text()
    assert kernels(text) == 0
    assert products(text) == {"f16"}


def written(query, key, value):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * query.shape[-1] ** -0.5
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30))
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


@compiles
@pytest.mark.parametrize(("layers", "share"), [(1, 1.001), (3, 0.8)])
def test_it_takes_no_more_memory_on_a_t4_than_attention_that_is_written_out(
    layers, share
):
    def step(attention, w, x):
        for _ in range(layers):
            query = (x @ w).reshape(2, 512, 8, 64)
            x = x + attention(query, query + 1, query * 2).reshape(x.shape)
        return jnp.mean(x**2)

    causal = functools.partial(jaxmp.dot_product_attention, is_causal=True)
    ours, theirs = (
        targets.compiled(
            jaxmp.autocast(jax.grad(functools.partial(step, x)), "mixed_float16"),
            shape(512, 512),
            shape(2, 512, 512),
            gpu="t4",
        ).memory_analysis()
        for x in (causal, written)
    )
    assert ours.temp_size_in_bytes <= share * theirs.temp_size_in_bytes


@compiles
@pytest.mark.parametrize(
    ("gpu", "size", "why"),
    [
        ("t4", 64, r"Tesla T4 \(compute capability 7\.5\) has no .* needs 8\.0"),
        (
            "a100",
            192,
            r"size 192; .* 128 on NVIDIA A100.*8\.0\), and up to 256 at 9\.0",
        ),
        ("b200", 256, r"size 256; .* to 128 on NVIDIA B200.*10\.0\), .* 256 at 9\.0"),
    ],
)
def test_who_asks_for_the_kernel_is_told_the_device_its_capability_and_the_cure(
    gpu, size, why
):
    x = shape(2, 64, HEADS, size, dtype=jnp.float16)
    asks = gradient(implementation="cudnn")
    with pytest.raises(NotImplementedError, match=why) as error:
        targets.lowered(asks, x, x, x, gpu=gpu)
    assert "Leave `implementation` out" in str(error.value)


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")])
def test_a_program_that_is_exported_runs_on_every_gpu(platforms):
    x = shape(2, 8, HEADS, 8, dtype=jnp.bfloat16)
    exported = jax.export.export(jax.jit(gradient()), platforms=platforms)(x, x, x)
    assert "fmha" not in exported.mlir_module()
    asks = jax.jit(gradient(implementation="cudnn"))
    with pytest.raises(ValueError, match="fmha"):  # and JAX says how to allow it
        jax.export.export(asks, platforms=("cuda",))(x, x, x)


@compiles
def test_the_audit_says_by_which_device_it_judged():
    large = functools.partial(shape, 2, 16, HEADS, 192, dtype=jnp.bfloat16)
    audit = jaxmp.audit(gradient())
    assert not audit(*[large()] * 3).attention
    assert not audit(*[large(gpu="h200")] * 3).attention
    report = audit(*[large(gpu="a100")] * 3)
    assert {x.device for x in report.attention} == {
        "NVIDIA A100-SXM4-80GB (compute capability 8.0)"
    }
    assert "not cuDNN's kernel on NVIDIA A100-SXM4-80GB" in str(report)
    (row,) = {x.why for x in audit(*[large(gpu="t4")] * 3).attention}
    assert "which needs 8.0" in row


def test_it_is_judged_by_the_default_device_where_no_argument_has_one(monkeypatch):
    x = shape(2, 16, HEADS, 64, dtype=jnp.bfloat16)
    audit = jaxmp.audit(gradient())
    assert not audit(x, x, x).attention

    class Device:
        device_kind, compute_capability = "Tesla T4", "7.5"

    monkeypatch.setattr(jax, "local_devices", lambda **_: [Device()])
    assert {x.device for x in audit(x, x, x).attention} == {
        "Tesla T4 (compute capability 7.5)"
    }


@pytest.mark.parametrize(
    ("version", "why"),
    [((9, 10), "needs cuDNN 9.11, and 9.10 is here"), ((9, 11), None), (None, None)],
)
def test_a_b300_asks_for_a_version_of_cudnn(monkeypatch, version, why):
    monkeypatch.setattr(by_cudnn, "cudnn_version", lambda: version)
    x = jnp.ones((1, 8, 1, 8), jnp.bfloat16)
    form, gpu = Form(1.0, False, None, (), None), Gpu("NVIDIA B300", (10, 3))
    found = by_cudnn.why_not(form, [x, x, x], (), gpu)
    assert (found is None) == (why is None)
    assert why is None or why in found
