"""Autocast on models as users write them, against float32 and Flax's own 16 bits."""

import functools
from pydoc_data.topics import topics

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
import jaxmp.nnx
from benchmarks.counting import steps
from benchmarks.counting.measure import (
    denied_of,
    product_dtypes,
    product_dtypes_of,
    relative_error,
    run,
)
from benchmarks.networks.basic import GPT
from benchmarks.networks.families import SMALL
from conftest import normal, rest_is_evidence

KEY = jax.random.key(0)
VOCABULARY = 50
TOLERANCE = {jnp.float16: 1e-3, jnp.bfloat16: 1e-2}
USUAL = [("mlp", jnp.bfloat16)]
LINEN = ["mlp", "resnet", "gpt, scanned", "lstm", "gpt"]


@functools.cache
def linen(name, dtype=None):
    """Returns the loss of a small network, and its parameters in float32."""
    network = SMALL[name]
    x, y = network.batch()
    variables = jax.jit(network.model.init)(KEY, x)
    loss_fn = steps.loss_of(network.with_dtype(dtype).apply)
    stats = variables.get("batch_stats", {})
    return lambda params: loss_fn(params, stats, x, y)[0], variables["params"]


def check_16_bit(jaxpr, dtype):
    found = product_dtypes_of(jaxpr)
    assert found
    assert all(dtypes == {jnp.dtype(dtype).name} for dtypes in found)


def check_as_good_as(native, loss, params, dtype):
    """Compares losses and gradients under autocast with those of float32."""
    (value, grads), _ = run(jax.value_and_grad(loss), params)
    cast = jaxmp.autocast(jax.value_and_grad(loss), dtype)
    (got, cast_grads), jaxpr = run(cast, params)
    check_16_bit(jaxpr, dtype)
    assert denied_of(dtype, jaxpr) == []
    assert abs(got - value) < TOLERANCE[dtype] * value
    native_grads, _ = run(jax.grad(native), params)
    limit = 1.05 * relative_error(native_grads, grads)
    assert relative_error(cast_grads, grads) < limit


# The dtypes go one way, and so do the models; NNX has a convolutional one.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *USUAL,
        *(
            pytest.param(name, dtype, marks=pytest.mark.evidence)
            for name in LINEN
            for dtype in TOLERANCE
            if (name, dtype) not in USUAL
        ),
    ],
)
def test_linen_models_are_16_bit_and_as_good_as_native_ones(name, dtype):
    native, _ = linen(name, dtype)
    check_as_good_as(native, *linen(name), dtype)


@pytest.mark.parametrize(
    "name", rest_is_evidence({name: name for name in LINEN}, "lstm", "gpt, scanned")
)
def test_linen_models_are_16_bit_when_differentiated_afterwards(name):
    loss, params = linen(name)
    grad = jax.grad(jaxmp.autocast(loss, jnp.float16))
    check_16_bit(jax.make_jaxpr(grad)(params), jnp.float16)


@functools.cache
def trained(policy):
    """Trains a small transformer on English text, and returns its loss at the end."""
    text = np.frombuffer("".join(topics.values()).encode("ascii", "replace"), np.uint8)
    common = np.argsort(-np.bincount(text))[: VOCABULARY - 1]
    number = np.zeros(256, np.int32)
    number[common] = np.arange(1, VOCABULARY)
    starts = np.random.default_rng(0).integers(0, len(text) - 17, (200, 16, 1))
    batches = jnp.asarray(number[text[starts + np.arange(17)]])
    model = GPT(2, 32, 4, VOCABULARY, 16)
    params = jax.jit(model.init)(KEY, batches[0, :, :-1])
    tx = jaxmp.loss_scaling(optax.adam(3e-3), policy)

    def loss_fn(params, tokens):
        logits = model.apply(params, tokens[:, :-1])
        labels = tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(carry, tokens):
        params, state = carry
        grad_fn = jaxmp.value_and_grad(loss_fn, loss_scale=jaxmp.get_loss_scale(state))
        loss, grads = jaxmp.autocast(grad_fn, policy)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    train = jax.jit(lambda carry, xs: jax.lax.scan(step, carry, xs))
    (_, state), losses = train((params, tx.init(params)), batches)
    return losses[-50:].mean(), jaxmp.get_loss_scale_state(state).skipped


@pytest.mark.evidence
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_transformer_trains_to_the_loss_of_float32(policy):
    expected, _ = trained("float32")
    loss, skipped = trained(policy)
    assert expected < 2.7  # the frequencies of the characters alone give 3.2
    assert abs(loss - expected) < 0.005 * expected
    assert skipped < 20


def test_an_nnx_module_of_parameters_alone_is_an_ordinary_argument():
    model, x = nnx.Linear(8, 10, rngs=nnx.Rngs(0)), normal(2, 4, 8)
    for cast, args in [
        (jaxmp.autocast(lambda m, x: m(x)), (model, x)),
        (jaxmp.autocast(model), (x,)),
    ]:
        out = cast(*args)
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, model(x), atol=0.05)


@pytest.mark.keeps_float32
@pytest.mark.parametrize("wrapped", ["module", "function", "creates", "statistics"])
def test_a_linen_module_wrapped_inside_another_is_refused_where_it_would_leak(wrapped):
    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = nn.Dense(4)
            inner = {
                "module": dense,
                "function": lambda x: dense(x),
                "creates": lambda x: nn.Dense(4)(x),
                "statistics": nn.BatchNorm(use_running_average=False),
            }
            return jaxmp.autocast(inner[wrapped])(x)

    for init in (Outer().init, jax.jit(Outer().init)):
        with pytest.raises(TypeError, match="Wrap the outermost call"):
            init(KEY, jnp.ones((2, 4)))
    jaxmp.autocast(nn.Dense(4).init)(KEY, jnp.ones((2, 4)))


@pytest.mark.keeps_float32
@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: lambda x: f(x), jax.grad])
def test_a_bound_linen_module_is_refused_where_it_would_leak(wrap):
    net = nn.BatchNorm(use_running_average=False)
    x = jnp.ones((2, 4))
    bound = net.bind(net.init(KEY, x), mutable=["batch_stats"])

    def loss(x):
        return bound(x).sum()

    fun = bound if wrap is not jax.grad else loss
    with pytest.raises(TypeError, match="Wrap the outermost call"):
        jaxmp.autocast(wrap(fun))(x)


class Layer(nn.Module):
    """A dense layer inside of a layer."""

    @nn.compact
    def __call__(self, x):
        return jnp.tanh(nn.Dense(8)(x))


class Net(nn.Module):
    """Two of them, recomputed for the gradients, and a head."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.remat(Layer)()(x)
        return nn.Dense(4)(x)


def test_a_linen_path_stays_float32_forward_and_backward_also_under_remat():
    x = normal(2, 4, 8)
    params = Net().init(KEY, x)

    def loss(params):
        return jnp.square(Net().apply(params, x)).mean()

    paths = {"float32_paths": ["Dense_0"]}  # the head, not the layers' own Dense_0
    for fun in (
        jaxmp.autocast(jax.value_and_grad(loss), **paths),
        jax.value_and_grad(jaxmp.autocast(loss, **paths)),
    ):
        found = product_dtypes(fun, params)
        assert found.count({"float32"}) == 3
        assert {"bfloat16"} in found
