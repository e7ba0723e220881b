"""Autocast on models as users write them, against float32 and Flax's own 16 bits."""

import functools
from pydoc_data.topics import topics

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
import jaxmp.nnx
from benchmarks.counting.measure import (
    denied_of,
    product_dtypes,
    product_dtypes_of,
    relative_error,
    run,
)
from benchmarks.networks import models
from conftest import rest_is_evidence

TOLERANCE = {jnp.float16: 1e-3, jnp.bfloat16: 1e-2}
USUAL = [("mlp", jnp.bfloat16)]
LINEN = ["mlp", "cnn", "transformer remat", "lstm", "gpt"]


@functools.cache
def linen(name):
    family = models.LINEN[name]
    return models.linen_loss(family), models.linen_params(family)


def check_16_bit(jaxpr, dtype):
    found = product_dtypes_of(jaxpr)
    assert found
    assert all(dtypes == {jnp.dtype(dtype).name} for dtypes in found)


def in_float32(loss, params):
    """Returns the loss and the gradients of a model as it was written."""
    return run(jax.value_and_grad(loss), params)[0]


@functools.cache
def linen_in_float32(name):
    return in_float32(*linen(name))


def check_as_good_as(native, loss, params, dtype, expected):
    """Compares losses and gradients under autocast with those of float32."""
    value, grads = expected
    cast = jaxmp.autocast(jax.value_and_grad(loss), dtype)
    (got, cast_grads), jaxpr = run(cast, params)
    check_16_bit(jaxpr, dtype)
    assert denied_of(dtype, jaxpr) == []
    assert abs(got - value) < TOLERANCE[dtype] * value
    native_grads, _ = run(jax.grad(native), params)
    limit = 1.05 * relative_error(native_grads, grads)
    assert relative_error(cast_grads, grads) < limit


# The dtypes go one way, and so do the models; NNX has a convolutional one by default.
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
    loss, params = linen(name)
    native = models.linen_loss(models.LINEN[name], dtype)
    check_as_good_as(native, loss, params, dtype, linen_in_float32(name))


# JAX's own attention does not run natively in float16 on a CPU.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("cnn", jnp.float16),
        pytest.param("transformer", jnp.bfloat16, marks=pytest.mark.evidence),
    ],
)
def test_nnx_models_are_16_bit_and_as_good_as_native_ones(name, dtype):
    native, _ = models.nnx_loss(models.NNX[name], dtype)
    ours = models.nnx_loss(models.NNX[name])
    check_as_good_as(native, *ours, dtype, in_float32(*ours))


@pytest.mark.parametrize(
    "name",
    rest_is_evidence(
        {name: name for name in (*LINEN, "transformer dropout")},
        "lstm",
        "transformer remat",
    ),
)
def test_linen_models_are_16_bit_when_differentiated_afterwards(name):
    loss, params = linen(name)
    grad = jax.grad(jaxmp.autocast(loss, jnp.float16))
    check_16_bit(jax.make_jaxpr(grad)(params), jnp.float16)


@functools.cache
def trained(policy):
    """Trains a small transformer on English text, and returns its loss at the end."""
    text = np.frombuffer("".join(topics.values()).encode("ascii", "replace"), np.uint8)
    common = np.argsort(-np.bincount(text))[: models.VOCABULARY - 1]
    number = np.zeros(256, np.int32)
    number[common] = np.arange(1, models.VOCABULARY)
    starts = np.random.default_rng(0).integers(0, len(text) - 17, (200, 16, 1))
    batches = jnp.asarray(number[text[starts + np.arange(17)]])
    model = models.Transformer(layers=2)
    params = jax.jit(model.init)(models.KEY, batches[0, :, :-1])
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


# By default the steps of tests/programs/test_nnx_programs.py do.
@pytest.mark.evidence
def test_nnx_state_is_kept_on_either_side_of_differentiation():
    family = models.NNX["cnn"]

    def loss_fn(model, x):
        return family.loss(model(x))

    def after(grad):
        model = family.model(rngs=nnx.Rngs(0))
        grad(model, family.inputs)
        return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

    plain = after(nnx.grad(loss_fn))
    for grad in (
        nnx.jit(jaxmp.nnx.autocast(nnx.grad(loss_fn), "float16")),
        nnx.grad(jaxmp.nnx.autocast(loss_fn, "float16")),
    ):
        state = after(grad)
        chex.assert_trees_all_equal_shapes_and_dtypes(state, plain)
        norm = state["norm"]["mean"], plain["norm"]["mean"]
        np.testing.assert_allclose(*norm, atol=1e-3)
        assert state["drop"]["rngs"]["count"] == plain["drop"]["rngs"]["count"] == 1


def test_an_nnx_step_keeps_every_update():
    family = models.NNX["cnn"]

    def loss_fn(model, x):
        return family.loss(model(x))

    models_after = []
    for wrap in (lambda f: f, lambda f: jaxmp.nnx.autocast(f, "bfloat16")):
        model = family.model(rngs=nnx.Rngs(0))
        loss = nnx.jit(wrap(loss_fn))
        for _ in range(2):
            loss(model, family.inputs)
        models_after.append(model)
    plain, cast = models_after
    assert cast.norm.mean[...].dtype == jnp.float32
    assert (cast.norm.mean[...] != 0).all()
    np.testing.assert_allclose(cast.norm.mean[...], plain.norm.mean[...], atol=1e-2)
    assert cast.drop.rngs.count[...] == plain.drop.rngs.count[...] == 2


def test_an_nnx_module_with_state_as_a_plain_argument_is_refused():
    family = models.NNX["cnn"]
    model = family.model(rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"`NnxCNN`.*`jaxmp\.nnx\.autocast`"):
        jaxmp.autocast(lambda model, x: model(x))(model, family.inputs)
    with pytest.raises(Exception, match="different trace level") as error:
        jaxmp.autocast(model)(family.inputs)
    assert any("`jaxmp.nnx.autocast`" in note for note in error.value.__notes__)


def test_an_nnx_module_of_parameters_alone_is_an_ordinary_argument():
    family = models.NNX["mlp"]
    model = family.model(rngs=nnx.Rngs(0))
    for cast, args in [
        (jaxmp.autocast(lambda m, x: m(x)), (model, family.inputs)),
        (jaxmp.autocast(model), (family.inputs,)),
    ]:
        out = cast(*args)
        assert out.dtype == jnp.float32
        np.testing.assert_allclose(out, model(family.inputs), atol=0.05)


@pytest.mark.parametrize("wrapped", ["module", "function", "creates", "statistics"])
def test_a_linen_module_wrapped_inside_another_is_refused_where_it_would_leak(wrapped):
    nn = models.nn

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
            init(models.KEY, jnp.ones((2, 4)))
    jaxmp.autocast(nn.Dense(4).init)(models.KEY, jnp.ones((2, 4)))


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: lambda x: f(x), jax.grad])
def test_a_bound_linen_module_is_refused_where_it_would_leak(wrap):
    net = models.nn.BatchNorm(use_running_average=False)
    x = jnp.ones((2, 4))
    bound = net.bind(net.init(models.KEY, x), mutable=["batch_stats"])

    def loss(x):
        return bound(x).sum()

    fun = bound if wrap is not jax.grad else loss
    with pytest.raises(TypeError, match="Wrap the outermost call"):
        jaxmp.autocast(wrap(fun))(x)


def test_a_linen_path_stays_float32_forward_and_backward_also_under_remat():
    loss, params = linen("transformer remat")
    paths = {"float32_paths": ["Dense_0"]}  # the head, not the layers' own Dense_0
    for fun in (
        jaxmp.autocast(jax.value_and_grad(loss), **paths),
        jax.value_and_grad(jaxmp.autocast(loss, **paths)),
    ):
        found = product_dtypes(fun, params)
        assert found.count({"float32"}) == 3


def test_an_equinox_model_is_a_pytree_like_any_other():
    keys = jax.random.split(models.KEY, 3)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(3, 8, 3, key=keys[0]),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.MLP(8 * 14 * 14, 10, 32, 1, key=keys[1]),
        ]
    )
    images = jnp.moveaxis(models.LINEN["cnn"].inputs, -1, 1)
    arrays, static = eqx.partition(model, eqx.is_array)

    def loss(arrays):
        model = eqx.combine(arrays, static)
        return jnp.square(jax.vmap(model)(images)).mean()

    (value, grads), _ = run(jax.value_and_grad(loss), arrays)
    cast = jaxmp.autocast(jax.value_and_grad(loss), jnp.float16)
    (got, cast_grads), jaxpr = run(cast, arrays)
    check_16_bit(jaxpr, jnp.float16)
    assert abs(got - value) < 1e-3 * value
    assert relative_error(cast_grads, grads) < 2e-3

    # The module itself is a pytree too, its functions and sizes static.
    def apply(model, x):
        return jax.vmap(model)(x)

    out, expected = (
        eqx.filter_jit(f)(model, images) for f in (jaxmp.autocast(apply), apply)
    )
    np.testing.assert_allclose(out, expected, atol=0.05)
