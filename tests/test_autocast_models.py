"""Autocast on models as users write them, against float32 and Flax's own 16 bits."""

import functools

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from benchmarks import models
from flax import nnx
from jaxprs import contractions, contractions_of, denied_of, relative_error

import jaxmp
import jaxmp.nnx

TOLERANCE = {jnp.float16: 1e-3, jnp.bfloat16: 1e-2}
LINEN = [
    "mlp",
    "cnn",
    "transformer",
    "transformer remat",
    "transformer dropout",
    "lstm",
    "gpt",
]
# JAX has no float16 product with a float32 result in every layout on a CPU, which its
# attention asks for. Autocast does not.
NO_NATIVE_FLOAT16 = ["transformer", "transformer dropout"]
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=["float16", "bfloat16"])


@functools.cache
def linen(name):
    family = models.LINEN[name]
    params, loss = models.linen_params(family), models.linen_loss(family)
    return params, loss, jax.jit(jax.value_and_grad(loss))(params)


def check_16_bit(jaxpr, dtype):
    found = contractions_of(jaxpr)
    assert found
    assert all(dtypes == {jnp.dtype(dtype).name} for dtypes in found)


@dtypes
@pytest.mark.parametrize("name", LINEN)
def test_linen_models_are_16_bit_and_as_good_as_native_ones(name, dtype):
    params, loss, (value, grads) = linen(name)
    cast = jax.jit(jaxmp.autocast(jax.value_and_grad(loss), dtype)).trace(params)
    check_16_bit(cast.jaxpr, dtype)
    assert denied_of(dtype, cast.jaxpr) == []
    got, cast_grads = cast.lower().compile()(params)
    assert abs(got - value) < TOLERANCE[dtype] * value
    if name in NO_NATIVE_FLOAT16 and dtype == jnp.float16:
        assert relative_error(cast_grads, grads) < 2e-3
    else:
        native = jax.jit(jax.grad(models.linen_loss(models.LINEN[name], dtype)))
        limit = 1.05 * relative_error(native(params), grads)
        assert relative_error(cast_grads, grads) < limit


@pytest.mark.parametrize("name", LINEN)
def test_linen_models_are_16_bit_when_differentiated_afterwards(name):
    params, loss, _ = linen(name)
    grad = jax.grad(jaxmp.autocast(loss, jnp.float16))
    check_16_bit(jax.make_jaxpr(grad)(params), jnp.float16)


@dtypes
@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_nnx_models_are_as_good_as_native_ones(name, dtype):
    family = models.NNX[name]

    def loss_fn(model, x):
        return family.loss(model(x))

    def loss_and_grads(dtype, wrap):
        model = family.model(dtype, rngs=nnx.Rngs(0))
        loss, grads = nnx.jit(wrap(nnx.value_and_grad(loss_fn)))(model, family.inputs)
        rest = nnx.state(model, nnx.Not(nnx.Param))
        return loss, nnx.to_pure_dict(grads), nnx.to_pure_dict(rest)

    value, grads, rest = loss_and_grads(None, lambda f: f)
    if name in NO_NATIVE_FLOAT16 and dtype == jnp.float16:
        limit = 2e-3
    else:
        native = loss_and_grads(dtype, lambda f: f)
        limit = 1.05 * relative_error(native[1], grads)
    for wrap in (
        lambda f: jaxmp.nnx.autocast(f, dtype),
        lambda f: nnx.value_and_grad(jaxmp.nnx.autocast(loss_fn, dtype)),
    ):
        got, cast_grads, cast_rest = loss_and_grads(None, wrap)
        assert abs(got - value) < TOLERANCE[dtype] * value
        assert relative_error(cast_grads, grads) < limit
        chex.assert_trees_all_equal_shapes_and_dtypes(cast_rest, rest)


def test_an_nnx_step_keeps_every_update():
    family = models.NNX["cnn"]

    def loss_fn(model, x):
        return family.loss(model(x))

    models_after = []
    for wrap in (lambda f: f, lambda f: jaxmp.nnx.autocast(f, "bfloat16")):
        model = family.model(rngs=nnx.Rngs(0))
        loss = wrap(loss_fn)
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


def test_a_linen_path_stays_float32_forward_and_backward_also_under_remat():
    params, loss, _ = linen("transformer remat")
    paths = {"float32_paths": ["Dense_0"]}  # the head, not the layers' own Dense_0
    for fun in (
        jaxmp.autocast(jax.value_and_grad(loss), **paths),
        jax.value_and_grad(jaxmp.autocast(loss, **paths)),
    ):
        found = contractions(fun, params)
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

    def loss(model, images):
        return jnp.square(jax.vmap(model)(images)).mean()

    plain = eqx.filter_value_and_grad(loss)
    value, grads = eqx.filter_jit(plain)(model, images)
    cast = jaxmp.autocast(plain, jnp.float16)
    got, cast_grads = eqx.filter_jit(lambda m, x: cast(m, x))(model, images)
    assert abs(got - value) < 1e-3 * value
    assert relative_error(cast_grads, grads) < 2e-3
    found = contractions(lambda x: cast(model, x), images)
    assert len(found) == 8
    assert all(dtypes == {"float16"} for dtypes in found)
