"""The gradients of activations against those of ordinary arguments."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmp
import jaxmp.linen


def test_they_are_the_gradients_of_added_zeros():
    w, x = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([0.5, -2.0])

    def loss_fn(w, x, added=(0, 0)):
        first = checkpoint_name(w @ x, "first") + added[0]
        second = checkpoint_name(first**2, "second") + added[1]
        return second @ x

    expected = jax.grad(lambda *z: loss_fn(w, x, z), (0, 1))(jnp.zeros(2), jnp.zeros(2))
    grads = jax.jit(jaxmp.activation_gradients(loss_fn))(w, x)
    assert list(grads) == ["first", "second"]
    np.testing.assert_array_equal(list(grads.values()), expected)


def test_they_are_scaled_and_in_the_dtype_of_the_activation():
    def loss_fn(x):
        return checkpoint_name(x.astype(jnp.float16), "h").astype(jnp.float32).mean()

    x = jnp.ones(2**15)
    grads = {
        scale: jaxmp.activation_gradients(loss_fn, loss_scale=scale)(x)["h"]
        for scale in (1.0, 2.0**-10, 2.0**20, 2.0**31)
    }
    assert {g.dtype for g in grads.values()} == {np.dtype(jnp.float16)}
    assert {s: g[0].item() for s, g in grads.items()} == {
        1.0: 2.0**-15,
        2.0**-10: 0.0,  # 2^-25 flushes in the backward pass
        2.0**20: 32.0,
        2.0**31: np.inf,
    }
    assert jaxmp.range_report(grads[2.0**-10]).total.zero == 1.0
    traced = jax.jit(lambda s: jaxmp.activation_gradients(loss_fn, loss_scale=s)(x))
    assert traced(2.0**20)["h"][0] == 32


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, jax.vmap])
def test_names_are_found_inside_transformations(transform):
    def loss_fn(x):
        inner = transform(lambda x: checkpoint_name(2 * x, "h") ** 2)
        return jax.jit(lambda x: inner(inner(x)).sum())(x)

    x = jnp.array([1.0, 2.0])
    grads = jaxmp.activation_gradients(loss_fn)(x)
    assert list(grads) == ["h", "h#1"]
    assert grads["h#1"].tolist() == [16.0, 64.0]  # d h^2 / dh at h = 2 (2 x)^2


def with_rule(f):
    """Gives a function its own derivative rule."""
    g = jax.custom_vjp(f)
    g.defvjp(lambda x: (f(x), None), lambda _, ct: (2 * ct,))
    return g


@pytest.mark.parametrize(
    "loop",
    [
        lambda f, x: jax.lax.scan(lambda c, _: (f(c), None), x, None, 2)[0],
        lambda f, x: jax.lax.cond(True, f, lambda x: x, x),
        lambda f, x: with_rule(f)(x),
    ],
)
def test_what_is_inside_loops_and_branches_is_refused_not_wrong(loop):
    def loss_fn(x):
        return loop(lambda x: checkpoint_name(2 * x, "h"), x).sum()

    with pytest.raises(ValueError, match="found no floating value with a name"):
        jaxmp.activation_gradients(loss_fn)(jnp.ones(2))


def test_other_arguments_and_values_pass():
    def loss_fn(params, *, train, mode):
        assert (train, mode) == (True, "fast")
        checkpoint_name(jnp.arange(3), "integers")
        unused = checkpoint_name(params["w"] * 2, "unused")
        return checkpoint_name(-params["w"], "h").sum(), {"aux": unused}

    grads = jaxmp.activation_gradients(loss_fn, has_aux=True)(
        {"w": jnp.ones(2)}, train=True, mode="fast"
    )
    assert {name: g.tolist() for name, g in grads.items()} == {
        "unused": [0.0, 0.0],
        "h": [1.0, 1.0],
    }


def test_names_that_collide_with_numbered_ones_are_all_there():
    def loss_fn(x):
        return sum(checkpoint_name(i * x, n) for i, n in enumerate(["h", "h#1", "h"]))

    grads = jax.jit(jaxmp.activation_gradients(loss_fn))(1.0)
    assert sorted(grads) == ["h", "h#1", "h#2"]


def test_aux_can_be_anything():
    def loss_fn(x):
        return checkpoint_name(2 * x, "h"), "text"

    assert jaxmp.activation_gradients(loss_fn, has_aux=True)(1.0)["h"] == 1


def test_the_forward_pass_keeps_the_sign_of_zero():
    def loss_fn(x):
        is_negative = jnp.signbit(checkpoint_name(-x, "h"))
        return checkpoint_name(x, "i") * jnp.where(is_negative, 3.0, 5.0)

    assert jaxmp.activation_gradients(loss_fn)(jnp.array(0.0))["i"] == 3


def test_the_loss_must_be_a_scalar():
    with pytest.raises(TypeError, match="must return a real floating scalar"):
        jaxmp.activation_gradients(lambda x: checkpoint_name(x, "h"))(jnp.ones(2))
    with pytest.raises(ValueError, match="`loss_scale`"):
        jaxmp.activation_gradients(jnp.sum, loss_scale=0.0)


# Linen


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(4)
        return dense(nn.relu(dense(x)))  # the block returns what its submodule does


class Model(nn.Module):
    block: type = Block

    @nn.compact
    def __call__(self, tokens, train=False):
        embed = nn.Embed(5, 4)
        x = self.block()(embed(tokens))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return embed.attend(x) + 0.0


def model_loss(apply, variables, tokens):
    return jnp.mean(apply(variables, tokens, train=False).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("block", [Block, nn.remat(Block), nn.jit(Block)])
def test_modules_are_named_by_their_paths(block):
    model, tokens = Model(block), jnp.array([[0, 1, 2]])
    variables = jax.jit(model.init)(jax.random.key(0), tokens)
    apply = jaxmp.with_policy(model.apply, "mixed_float16")
    name = next(name for name in variables["params"] if "Block" in name)
    grads = jax.jit(
        jaxmp.linen.activation_gradients(
            lambda v: model_loss(apply, v, tokens), loss_scale=2.0**10
        )
    )(variables)
    # The block returns what its submodule does. So does the dropout that is off, but
    # that does not show behind a transformed block.
    grads.pop("Dropout_0", None)
    assert {path: g.shape for path, g in grads.items()} == {
        "Embed_0": (1, 3, 4),
        f"{name}/Dense_0": (1, 3, 4),
        f"{name}/Dense_0#1": (1, 3, 4),
        "Embed_0.attend": (1, 3, 5),
        "Model": (1, 3, 5),
    }
    assert {g.dtype for g in grads.values()} == {np.dtype(jnp.float16)}
    logits = apply(variables, tokens)
    expected = (2.0**10 * 2 / 15 * logits).astype(jnp.float16)
    np.testing.assert_allclose(grads["Model"], expected, rtol=2e-3)


def test_every_array_of_a_result_has_a_name():
    class Recurrent(nn.Module):
        @nn.compact
        def __call__(self, x):
            cell = nn.LSTMCell(3)
            carry = cell.initialize_carry(jax.random.key(0), x.shape)
            carry, _ = cell(carry, x)
            (c, _), y = cell(carry, x)
            return c.sum() + y.sum()

    x = jnp.ones((2, 3))
    variables = jax.jit(Recurrent().init)(jax.random.key(0), x)
    grads = jax.jit(
        jaxmp.linen.activation_gradients(
            lambda v: Recurrent().apply(v, x).astype(jnp.float32)
        )
    )(variables)
    assert {"LSTMCell_0/0/0", "LSTMCell_0/0/1", "LSTMCell_0/0/0#1"} <= set(grads)


def test_a_policy_that_brings_results_back_is_seen_through():
    model = nn.Sequential([nn.Dense(4), nn.LayerNorm(), nn.Dense(2)])
    x = jnp.ones((2, 3))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    apply = jaxmp.linen.with_policy(model, "O2")
    grads = jax.jit(jaxmp.linen.activation_gradients(lambda v: apply(v, x).sum()))(
        variables
    )
    assert {name: str(g.dtype) for name, g in grads.items()} == {
        "layers_0": "float16",
        "layers_1": "float16",
        "layers_2": "float16",
    }


def test_an_older_trace_is_refused_not_wrong():
    model, x = nn.Dense(2), jnp.ones((1, 3))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    loss_fn = jax.jit(lambda v: model.apply(v, x).sum())
    loss_fn(variables)
    with pytest.raises(ValueError, match=r"before `jax\.jit`"):
        jaxmp.linen.activation_gradients(loss_fn)(variables)


def test_autocast_works_inside_and_outside():
    w = jnp.full((8, 8), 0.125)

    def loss_fn(w, x):
        return (checkpoint_name(x @ w, "h") @ w).sum() * 2.0**-12

    inside = jaxmp.activation_gradients(jaxmp.autocast(loss_fn, "mixed_float16"))
    outside = jaxmp.autocast(jaxmp.activation_gradients(loss_fn), "mixed_float16")
    for grads in (inside, outside):
        np.testing.assert_array_equal(jax.jit(grads)(w, w)["h"], 2.0**-12)
    assert inside(w, w)["h"].dtype == jnp.float16
