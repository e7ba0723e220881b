"""Linen under a policy with float32 parameters: what comes back to 16 bits, or not."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
import jaxmp.linen
from conftest import checking_leaks

F16, F32 = np.dtype(jnp.float16), np.dtype(jnp.float32)
TOKENS = jnp.arange(6).reshape(2, 3)
KEEP = jaxmp.get_policy("mixed_float16").with_overrides(
    ("emb/|embedding$|pos|norm", "float32")
)


class Position(nn.Module):
    """A learned table that is called with nothing."""

    @nn.compact
    def __call__(self):
        return self.param("pos", nn.initializers.normal(), (3, 8))


class Waves(nn.Module):
    """A table without parameters, from integers."""

    def __call__(self, positions):
        return jnp.sin(positions[:, None] * jnp.float32(2.0) ** -jnp.arange(8))


class Noise(nn.Module):
    """Called with a PRNG key alone."""

    def __call__(self, key):
        return jax.random.normal(key, (3, 8))


class Setup(nn.Module):
    """An embedding from `setup` that is used at both ends."""

    def setup(self):
        self.emb = nn.Embed(10, 8)
        self.dense = nn.Dense(8)

    def __call__(self, tokens):
        x = self.dense(self.emb(tokens))
        return nn.softmax(self.dense(x) + self.emb.attend(x).sum())


class Shared(nn.Module):
    """An embedding whose parameters lie in the module around it."""

    def setup(self):
        self.emb = nn.Embed(10, 8)
        nn.share_scope(self, self.emb)
        self.dense = nn.Dense(8)

    def __call__(self, tokens):
        return self.dense(self.emb(tokens))


class Inputs(nn.Module):
    """Everything that has no floating input, as one sum."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(10, 8, name="emb")(tokens) + Position()()
        return x + Waves()(jnp.arange(3)) + Noise()(jax.random.key(0))


class Net(nn.Module):
    """An embedding of some kind, and products that follow it."""

    kind: str

    @nn.compact
    def __call__(self, tokens):
        if self.kind == "Inputs":
            x = Inputs()(tokens)
        elif self.kind == "remat":
            x = nn.remat(Inputs)()(tokens)
        elif self.kind == "jit":
            x = nn.jit(Inputs)()(tokens)
        elif self.kind == "vmap":
            x = nn.vmap(
                Inputs, variable_axes={"params": None}, split_rngs={"params": False}
            )()(tokens)
        elif self.kind == "shared":
            x = Shared()(tokens)
        else:
            x = nn.Embed(10, 8, name="emb")(tokens)
        x = nn.Dense(8)(nn.LayerNorm(name="norm")(x))
        if self.kind == "scan":
            layers = nn.scan(
                lambda layer, x, _: (layer(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            x, _ = layers(nn.Dense(8), x, None)
        return nn.Dense(4)(x)


def fraction(model, policy=KEEP):
    """Returns what part of a model's products is in 16 bits under a policy."""
    variables = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    apply = jaxmp.linen.with_policy(model, policy)
    results = jax.tree.leaves(jax.eval_shape(apply, variables, TOKENS))
    assert {x.dtype for x in results} == {F32}
    return jaxmp.audit(apply)(variables, TOKENS).fraction_16bit


@pytest.mark.parametrize(
    "kind", ["embedding", "Inputs", "remat", "jit", "vmap", "shared", "scan"]
)
def test_what_is_called_without_floats_comes_back_too(kind):
    assert fraction(Net(kind)) == 1


def test_a_scope_that_is_shared_with_the_model_is_a_submodule_too():
    assert fraction(Shared(), jaxmp.get_policy('c=f16,o=f32,"embedding"=f32')) == 1


def test_other_methods_than_call_come_back_and_compute_in_their_own_dtype():
    model = Setup()
    variables = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    apply = jaxmp.linen.with_policy(model, KEEP)
    report = jaxmp.audit(apply)(variables, TOKENS)
    attend = 2 * 6 * 8 * 10  # the product with the float32 table itself
    assert report.flops == {"float16": 2 * (2 * 6 * 8 * 8), "float32": attend}


def seen_dtypes(model, policy="O2"):
    """Returns the dtypes of the results of all modules, by path."""
    seen = {}

    def watch(next_fun, args, kwargs, context):
        result = next_fun(*args, **kwargs)
        seen["/".join(context.module.path)] = jax.tree.map(lambda x: x.dtype, result)
        return result

    variables = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    apply = jaxmp.linen.with_policy(model, policy)
    with nn.intercept_methods(watch):  # the outer one sees what came back
        jax.eval_shape(apply, variables, TOKENS)
    return seen


class Head(nn.Module):
    """A head that is in float32 on purpose, and something after it."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(10, 8, name="emb")(tokens)
        x = nn.Dense(4, dtype=jnp.float32, name="head")(x)
        return nn.LayerNorm(use_scale=False, use_bias=False, name="after")(x)


class HandsOn(nn.Module):
    """A tail of two modules, the last of which is in float32 on purpose."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(10, 8, name="emb")(tokens)
        tail = [nn.Dense(8), nn.Dense(4, dtype=jnp.float32)]
        return {"logits": nn.Sequential(tail, name="tail")(x), "tokens": tokens}


def test_what_is_in_float32_on_purpose_stays_so():
    seen = seen_dtypes(Head())
    assert (seen["head"], seen["after"], seen["emb"]) == (F32, F32, F16)
    seen = seen_dtypes(HandsOn())
    assert seen["tail"] == F32
    assert seen[""] == {"logits": F32, "tokens": TOKENS.dtype}


class Counter(nn.Module):
    """Returns integers and keys beside floats."""

    @nn.compact
    def __call__(self, tokens):
        return tokens + 1, jax.random.key(0), None, jnp.ones(2), 2.5


def test_only_floats_come_back():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            n, key, none, x, number = Counter()(tokens)
            assert (n.dtype, none, number) == (TOKENS.dtype, None, 2.5)
            assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
            assert x.dtype == expected
            return nn.Dense(2)(x)

    model, expected = Model(), F32
    variables = model.init(jax.random.key(0), TOKENS)
    expected = F16
    jaxmp.linen.with_policy(model, "O2")(variables, TOKENS)


def test_a_carry_keeps_its_dtype():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(10, 8, name="emb")(tokens)
            return nn.Dense(2)(nn.RNN(nn.LSTMCell(8), name="rnn")(x))

    model = Model()
    variables = jax.jit(model.init)(jax.random.key(0), TOKENS)
    expected = jax.jit(model.apply)(variables, TOKENS)
    result = jax.jit(jaxmp.linen.with_policy(model, KEEP))(variables, TOKENS)
    np.testing.assert_allclose(result, expected, atol=2.0**-6)


def test_no_tracer_outlives_its_trace():
    model = HandsOn()
    variables = model.init(jax.random.key(0), TOKENS)
    apply = jax.jit(jaxmp.linen.with_policy(nn.remat(HandsOn)(), "O2"))
    with checking_leaks():
        assert apply(variables, TOKENS)["logits"].dtype == F32


def test_where_jax_refuses_what_was_cast_a_note_names_the_line():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.fft.rfft(nn.Dense(8)(x))

    model, x = Net(), jnp.ones((2, 4))
    params = model.init(jax.random.key(0), x)
    with pytest.raises((TypeError, NotImplementedError, ValueError)) as caught:
        jaxmp.linen.with_policy(model, "mixed_bfloat16")(params, x)
    (note,) = [x for x in caught.value.__notes__ if "has cast" in x]
    assert "test_linen.py:" in note
    assert "jaxmp.linen.with_policy" in note


def test_modules_that_a_policy_keeps_in_float32_have_all_digits():
    model = nn.Sequential([nn.Dense(4), nn.LayerNorm(), nn.Dense(4), nn.Dense(2)])
    x = jnp.ones((3, 5))
    variables = model.init(jax.random.key(0), x)
    policy = jaxmp.get_policy("mixed_bfloat16").with_overrides(("layers_2/", "float32"))
    apply = jaxmp.linen.with_policy(model, policy)
    grad = jax.grad(lambda variables, x: apply(variables, x).sum(), argnums=(0, 1))
    found = [
        (str(eqn.invars[0].aval.dtype), eqn.params["precision"])
        for eqn in jax.make_jaxpr(grad)(variables, x).eqns
        if eqn.primitive.name == "dot_general"
    ]
    highest = (jax.lax.Precision.HIGHEST,) * 2
    assert found.count(("float32", highest)) == 3  # forward, and both gradients
    assert set(found) == {("float32", highest), ("bfloat16", None)}
