"""Which format a GPU multiplies: the policy `mixed`, a warning, and compiled code."""

import warnings

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmp
import jaxmp.linen
import jaxmp.nnx
from benchmarks import gpus
from benchmarks.counting import results, targets
from jaxmp._base import gpus as facts

UNAVAILABLE = targets.unavailable()
compiles = pytest.mark.skipif(bool(UNAVAILABLE), reason=str(UNAVAILABLE))
HALF, BFLOAT16 = map(jaxmp.get_policy, ("mixed_float16", "mixed_bfloat16"))


class Device:
    """What is read of a device."""

    def __init__(self, kind, capability=None):
        self.device_kind = kind
        if capability is not None:
            self.compute_capability = capability


V100, T4 = Device("Tesla V100-SXM2-16GB", "7.0"), Device("Tesla T4", "7.5")
A100, H100 = Device("NVIDIA A100", "8.0"), Device("NVIDIA H100", "9.0")
CPU, TPU, AMD = Device("cpu"), Device("TPU v4"), Device("AMD MI250", "gfx90a")


@pytest.fixture
def on(monkeypatch):
    """Returns a function that makes a device the default device."""
    facts._warn_once.cache_clear()
    yield lambda device: monkeypatch.setattr(facts, "default_device", lambda: device)
    facts._warn_once.cache_clear()


@pytest.mark.parametrize(
    ("device", "policy"),
    [
        (V100, HALF),
        (T4, HALF),
        *[(x, BFLOAT16) for x in (A100, H100, CPU, TPU, AMD)],
    ],
)
def test_mixed_is_the_format_of_the_default_device(on, device, policy):
    on(device)
    assert jaxmp.get_policy("mixed") == jaxmp.get_policy(" mixed ") == policy


def test_the_default_device_is_that_of_jax():
    with jax.default_device(jax.devices()[3]):
        assert facts.default_device() == jax.devices()[3]
    with jax.default_device("cpu"):
        assert facts.default_device() == jax.devices()[0]


@compiles
@pytest.mark.parametrize(("gpu", "policy"), [("t4", HALF), ("h200", BFLOAT16)])
def test_mixed_takes_a_device_of_a_topology(gpu, policy):
    assert jaxmp.get_policy("mixed", device=targets.devices(gpu)[0]) == policy


def test_what_is_no_device_is_refused():
    with pytest.raises(TypeError, match=r"`jax.Device`, but is 'gpu'.*jax\.devices"):
        jaxmp.get_policy("mixed", device="gpu")


def test_other_names_ask_for_no_device(monkeypatch):
    def fail():
        raise AssertionError("a backend was started")

    monkeypatch.setattr(facts, "default_device", fail)
    for name in ("mixed_float16", "mixed_bfloat16", "mixed_fp8", "O2", "float32"):
        policy = jaxmp.get_policy(name)
        jaxmp.autocast(jnp.matmul, name if name != "O2" else "O1")
        jaxmp.loss_scaling(optax.sgd(1.0), policy)


def train(policy, state, steps):
    """Trains on from a checkpoint, and returns the next one."""
    tx = jaxmp.loss_scaling(optax.adam(1e-2), policy)
    params = {"w": jnp.full((8, 8), 0.1)}
    start = params, tx.init(params)
    params, opt_state = flax.serialization.from_bytes(start, state) if state else start
    x = jax.random.normal(jax.random.key(0), (16, 8))

    @jax.jit
    def step(params, opt_state):
        def loss_fn(params):
            return jnp.mean((jnp.tanh(x @ params["w"]) - x) ** 2)

        grad_fn = jaxmp.value_and_grad(loss_fn, loss_scale=opt_state)
        loss, grads = jaxmp.autocast(grad_fn, policy)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    losses = []
    for _ in range(steps):
        params, opt_state, loss = step(params, opt_state)
        losses.append(float(loss))
    return flax.serialization.to_bytes((params, opt_state)), losses


@pytest.mark.parametrize(("first", "then"), [(T4, A100), (A100, T4)])
def test_a_run_goes_on_on_another_gpu(on, first, then):
    on(first)
    saved, before = train(jaxmp.get_policy("mixed"), None, 5)
    on(then)
    again, after = train(jaxmp.get_policy("mixed"), saved, 5)
    assert len(again) == len(saved)
    assert before[0] > before[-1] > after[0] > after[-1]


def double(x):
    return x * 2


def call(policy):
    return jaxmp.autocast(double, policy)(jnp.ones(8))


CALLS = {
    "autocast": call,
    "with_policy": lambda policy: jaxmp.with_policy(double, policy)(jnp.ones(8)),
    "audit": lambda policy: jaxmp.audit(jaxmp.autocast(double, policy))(jnp.ones(8)),
    "value_and_grad": lambda policy: jaxmp.value_and_grad(
        lambda x: jnp.sum(double(x)), policy=policy
    )(jnp.ones(8)),
}


def linen_model(policy):
    model = nn.Dense(1)
    params = model.init(jax.random.key(0), jnp.ones((1, 8)))
    return jaxmp.linen.with_policy(model, policy)(params, jnp.ones((1, 8)))


def nnx_gradient(policy):
    model = nnx.Linear(8, 1, rngs=nnx.Rngs(0))
    grad_fn = jaxmp.nnx.value_and_grad(lambda model, x: model(x).sum(), policy=policy)
    return grad_fn(model, jnp.ones((1, 8)))


CALLS |= {
    "linen.with_policy": linen_model,
    "nnx.value_and_grad": nnx_gradient,
    "linen's attention": lambda policy: jaxmp.autocast(attend_in_linen, policy)(),
    "nnx's attention": lambda policy: jaxmp.autocast(attend_in_nnx, policy)(),
}


def attend_in_linen():
    layer = nn.MultiHeadDotProductAttention(
        2, attention_fn=jaxmp.linen.dot_product_attention
    )
    return layer.init_with_output(jax.random.key(0), jnp.ones((1, 4, 8)))[0]


def attend_in_nnx():
    layer = nnx.MultiHeadAttention(
        2,
        8,
        decode=False,
        attention_fn=jaxmp.nnx.dot_product_attention,
        rngs=nnx.Rngs(0),
    )
    return layer(jnp.ones((1, 4, 8)))


def said(call, policy):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call(policy)
        call(policy)
    return [x for x in found if "tensor cores" in str(x.message)]


@pytest.mark.parametrize("name", CALLS)
def test_bfloat16_on_a_t4_is_said_once_at_the_users_line(on, name):
    on(T4)
    (warning,) = said(CALLS[name], "mixed_bfloat16")
    text = str(warning.message)
    assert "Tesla T4 (compute capability 7.5) has no tensor cores for bfloat16" in text
    assert "matmuls run in float32" in text
    assert 'Use the policy "mixed_float16" with its loss scale' in text
    assert 'jaxmp.get_policy("mixed")' in text
    assert warning.filename == __file__


@pytest.mark.parametrize(
    ("device", "policy", "words"),
    [
        (
            T4,
            "mixed_float16_bfloat16",
            ["backward pass run in float32", "mixed_float16"],
        ),
        (A100, "mixed_fp8", ["for float8", "in 16 bits", '"mixed_bfloat16"']),
        (T4, "mixed_fp8", ["for float8", '"mixed_float16" with its loss scale']),
        (Device("NVIDIA L4", "8.9"), "mixed_fp8", None),
        (A100, "mixed_bfloat16", None),
        (A100, "mixed_float16_bfloat16", None),
        (T4, "mixed_float16", None),
        (T4, "float32", None),
        (CPU, "mixed_bfloat16", None),
        (CPU, "mixed_fp8", None),
        (AMD, "mixed_bfloat16", None),
    ],
)
def test_what_runs_instead_is_said_where_a_format_is_missing(on, device, policy, words):
    on(device)
    found = said(call, policy)
    assert len(found) == (words is not None)
    assert all(word in str(found[0].message) for word in words or ())


# The first table of the documentation: GPU, policy, dtypes of both passes.
MIXED = "mixed_float16_bfloat16"
CELLS = {
    ("t4", "mixed_bfloat16"): ("float32", "float32"),
    ("t4", "mixed_float16"): ("float16", "float16"),
    ("t4", MIXED): ("float16", "float32"),
    ("t4", "mixed_fp8"): ("float16", "float16"),
    ("a100", "mixed_bfloat16"): ("bfloat16", "bfloat16"),
    ("a100", "mixed_float16"): ("float16", "float16"),
    ("a100", MIXED): ("float16", "bfloat16"),
    ("a100", "mixed_fp8"): ("bfloat16, float16", "bfloat16, float16"),
    ("h200", "mixed_bfloat16"): ("bfloat16", "bfloat16"),
    ("h200", "mixed_float16"): ("float16", "float16"),
    ("h200", MIXED): ("float16", "bfloat16"),
    ("h200", "mixed_fp8"): ("float8", "float8"),
    ("rtx4090", "mixed_fp8"): ("float8", "float8"),
    ("b200", "mixed_bfloat16"): ("bfloat16", "bfloat16"),
}


@compiles
@pytest.mark.parametrize(("cell", "expected"), CELLS.items(), ids=map("-".join, CELLS))
def test_a_cell_of_the_table_is_what_compiled_code_multiplies(cell, expected):
    found = gpus.products(*cell)
    assert (found["forward"], found["backward"]) == expected


@compiles
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_only_the_policy_of_a_t4_saves_memory_there(policy):
    def loss(w, x):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def memory(policy):
        grad = jaxmp.autocast(jaxmp.grad(loss, loss_scale=1.0), policy)
        x = jax.ShapeDtypeStruct((2048, 512), jnp.float32)
        w = jax.ShapeDtypeStruct((512, 512), jnp.float32)
        made = targets.compiled(grad, w, x, gpu="t4")
        return made.memory_analysis().temp_size_in_bytes

    share = memory(policy) / memory("float32")
    assert share < 0.85 if policy == "mixed_float16" else share > 0.9


def test_the_page_has_the_table_that_was_compiled():
    found = results.read("gpus", kept=True)
    page = (results.FOLDER.parents[1] / "docs/formats.md").read_text()
    (table,) = gpus.tables(found)
    assert table.markdown() in page
