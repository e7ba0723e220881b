"""Training in Linen and NNX: what stays float32, what is 16-bit, what is skipped."""

from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jaxmp
import jaxmp.linen
import jaxmp.nnx
from benchmarks.counting.measure import equations, product_dtypes
from conftest import normal

F32 = np.dtype(jnp.float32)
X = normal(0, 8, 6, 6, 3)
Y = jnp.asarray(np.arange(8) % 4)
TOLERANCE = 0.02  # of float16; the error grows with the depth


class Net(nn.Module):
    """A convolution, BatchNorm, Dropout and a product, the usual suspects."""

    dtype: Any = None
    param_dtype: Any = jnp.float32
    rate: float = 0.25

    @nn.compact
    def __call__(self, x, train=True):
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        x = nn.Conv(8, (3, 3), **types)(x)
        x = nn.relu(nn.BatchNorm(not train, momentum=0.5, **types)(x))
        x = nn.Dropout(self.rate, deterministic=not train)(x)
        return nn.Dense(4, **types)(x.mean((1, 2)))


pytestmark = pytest.mark.usefixtures("keys_that_compile_fast")


class State(TrainState):
    batch_stats: Any = None


@cache  # and so one compilation for each policy, not for each test
def make_parts(policy, model, options):
    policy = jaxmp.get_policy(policy)
    tx = jaxmp.loss_scaling(optax.sgd(0.125, momentum=0.5), policy, **dict(options))
    return jaxmp.with_policy(model.apply, policy), tx


@cache
def make_variables(model):
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return jax.device_get(jax.jit(model.init)(rngs, X[:1]))


def make_state(policy, model=None, apply_fn=None, **options):
    model = model or Net()
    with_policy, tx = make_parts(policy, model, tuple(options.items()))
    variables = jax.tree.map(jnp.array, make_variables(model))
    state = State.create(
        apply_fn=apply_fn or with_policy,
        params=variables["params"],
        batch_stats=variables.get("batch_stats", {}),
        tx=tx,
    )
    return state.replace(step=jnp.zeros([], jnp.int32))


def loss_fn(params, state, x, y, key):
    logits, updates = state.apply_fn(
        {"params": params, "batch_stats": state.batch_stats},
        x,
        rngs={"dropout": key},
        mutable=["batch_stats"],
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return loss, (updates.get("batch_stats", {}), logits)


@partial(jax.jit, donate_argnames="state")
def train_step(state, x, y, key):
    grad_fn = jaxmp.value_and_grad(
        loss_fn, loss_scale=jaxmp.get_loss_scale(state.opt_state), has_aux=True
    )
    (loss, (batch_stats, logits)), grads = grad_fn(state.params, state, x, y, key)
    new_state = state.apply_gradients(grads=grads)
    batch_stats = jaxmp.keep_if_skipped(new_state, batch_stats, state.batch_stats)
    return new_state.replace(batch_stats=batch_stats), (loss, grads, logits)


def dtypes(tree):
    return {x.dtype for x in jax.tree.leaves(tree)}


# Linen


def test_a_train_state_trains_as_it_stands():
    policy = "mixed_float16"
    state = make_state(policy)
    reference = make_state("float32")
    for i in range(3):
        key = jax.random.key(i)
        state, (loss, grads, logits) = train_step(state, X, Y, key)
        reference, (expected, _, _) = train_step(reference, X, Y, key)
        np.testing.assert_allclose(loss, expected, rtol=TOLERANCE)
        assert dtypes((grads, loss, logits)) == {F32}
    assert dtypes((state.params, state.batch_stats)) == {F32}
    assert state.step == 3
    jax.tree.map(
        partial(np.testing.assert_allclose, atol=TOLERANCE),
        state.batch_stats,
        reference.batch_stats,
    )


def test_modules_with_dtypes_of_their_own_need_no_other_step():
    policy = "mixed_float16"
    # Flax's own way; the cast of the policy then finds nothing to do in the modules.
    types = jaxmp.get_policy(policy)
    model = Net(types.compute_dtype, types.param_dtype)
    returns = jaxmp.Policy(F32, F32, F32)
    own = make_state(policy, model, jaxmp.with_policy(model.apply, returns))
    ours = make_state(policy)
    for i in range(2):
        own, (_, grads, logits) = train_step(own, X, Y, jax.random.key(i))
        ours, (_, expected, expected_logits) = train_step(ours, X, Y, jax.random.key(i))
    assert dtypes((own.params, own.batch_stats, grads, logits)) == {F32}
    np.testing.assert_allclose(logits, expected_logits, atol=TOLERANCE)
    jax.tree.map(partial(np.testing.assert_allclose, atol=TOLERANCE), grads, expected)
    found = product_dtypes(
        jax.grad(loss_fn, has_aux=True), own.params, own, X, Y, jax.random.key(0)
    )
    assert found
    assert all(dtypes == {types.compute_dtype.name} for dtypes in found)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Dense(6)(nn.LayerNorm()(x)))


class Layers(nn.Module):
    """Two blocks: plain, rematerialised, or scanned over."""

    kind: str

    @nn.compact
    def __call__(self, x):
        x = x.reshape(len(x), -1)[:, :6]
        if self.kind == "scan":
            scan = nn.scan(
                lambda block, x, _: (block(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=2,
            )
            x, _ = scan(Block(), x, None)
        else:
            block = nn.remat(Block) if self.kind == "remat" else Block
            for i in range(2):
                x = block(name=f"block{i}")(x)
        return nn.Dense(4)(x)


# The leak under O2


def all_contractions(apply, model):
    state = make_state("O2", model, apply)
    grad_fn = jaxmp.grad(loss_fn, loss_scale=2.0**15, has_aux=True)
    return product_dtypes(grad_fn, state.params, state, X, Y, jax.random.key(0))


@pytest.mark.parametrize("model", [Net(), Layers("remat"), Layers("scan")])
def test_under_o2_every_product_is_16_bit(model):
    ours = all_contractions(jaxmp.linen.with_policy(model, "O2"), model)
    assert ours
    assert all(dtypes == {"float16"} for dtypes in ours)
    # As many as under a policy without float32 parameters, where nothing can leak.
    full = all_contractions(jaxmp.with_policy(model.apply, "O1"), model)
    assert ours == full
    leaking = jaxmp.with_policy(model.apply, "O2")
    if model == Layers("scan"):  # its carry would turn float32 on the way
        with pytest.raises(TypeError, match="carry"):
            all_contractions(leaking, model)
    else:  # a float32 norm scale, and all that comes after it
        leaked = all_contractions(leaking, model)
        assert {"float32"} in leaked
        assert len(leaked) == len(ours)


def test_under_o2_norms_compute_in_float32():
    apply = jaxmp.linen.with_policy(Net(), "O2")
    state = make_state("O2")
    jaxpr = jax.make_jaxpr(loss_fn)(state.params, state, X, Y, jax.random.key(0))
    own = jax.make_jaxpr(loss_fn)(
        state.params, state.replace(apply_fn=apply), X, Y, jax.random.key(0)
    )

    def float32_images(jaxpr):
        return {
            eqn.primitive.name
            for eqn in equations(jaxpr)
            for x in eqn.outvars
            if getattr(x.aval, "shape", ()) == (8, 6, 6, 8) and x.aval.dtype == F32
        }

    # Dropout, which comes after the norm, is the last to show the difference.
    assert {"sub", "mul"} <= float32_images(own)
    assert "select_n" in float32_images(jaxpr)
    assert "select_n" not in float32_images(own)


# Numerics


def tiny_problem():
    """A loss normalised by so large a count that its float16 gradients underflow."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((64, 8)), jnp.float32)
    y = x @ jnp.asarray(rng.standard_normal(8), jnp.float32)
    return x, y, 2.0**30  # the loss per example is 2^24 times as large


def regression(policy, steps, scaled):
    """Trains a linear model; returns its loss per example and its first gradients."""
    x, y, count = tiny_problem()
    apply = jaxmp.with_policy(lambda w, x: x @ w, policy)

    def loss_fn(w):
        return ((apply(w, x) - y) ** 2).sum() / count

    # Adam, so that the size of the gradients does not matter unless they are zero.
    inner = optax.adam(0.0625, eps=1e-30)
    tx = jaxmp.loss_scaling(inner, policy) if scaled else jaxmp.static_loss_scale(inner)

    @jax.jit
    def train(w):
        def step(carry, _):
            w, state = carry
            scale = jaxmp.get_loss_scale(state)
            grads = jaxmp.grad(loss_fn, loss_scale=scale)(w)
            updates, state = tx.update(grads, state, w)
            return (optax.apply_updates(w, updates), state), grads

        (w, state), grads = jax.lax.scan(step, (w, tx.init(w)), length=steps)
        return loss_fn(w) * count / len(x), grads[0], state

    return train(jnp.zeros(8))


def test_gradients_that_underflow_unscaled_train_as_in_float32_scaled():
    loss, grads, _ = regression("float32", 100, scaled=False)
    lost, zeros, _ = regression("mixed_float16", 100, scaled=False)
    found, scaled, state = regression("mixed_float16", 100, scaled=True)
    _, y, _ = tiny_problem()
    start = float((y**2).mean())
    assert not zeros.any()
    assert lost == start  # it has not learnt a thing
    np.testing.assert_allclose(scaled, grads, atol=2**-8 * float(jnp.abs(grads).max()))
    assert loss < start / 100
    assert found < start / 100
    assert state.skipped == 0
