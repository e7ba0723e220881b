"""Haiku: networks of pure functions, with state and without."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from laws import DTYPES, KEY, Program, drawn, hold, in_16_bits, near, normal, programs

import jaxmp
from benchmarks.counting.measure import run

hk = pytest.importorskip("haiku", reason="dm-haiku is in the extra `programs`")


def residual(x, is_training):
    """A convolutional net with a block that norms by statistics."""
    x = hk.Conv2D(8, 3, stride=2)(x)
    norm = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)
    h = jax.nn.relu(norm(x, is_training))
    x = x + hk.Conv2D(8, 3)(h)
    x = hk.Linear(16)(hk.Flatten()(jax.nn.relu(x)))
    return hk.Linear(5)(hk.LayerNorm(-1, create_scale=True, create_offset=True)(x))


def net_with_state():
    net = hk.without_apply_rng(hk.transform_with_state(residual))
    images, labels = normal(1, 8, 8, 8, 3), jnp.arange(8) % 5
    shapes = jax.eval_shape(lambda key: net.init(key, images, True), KEY)
    params, state = drawn(shapes)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)

    def loss(params, state, images, labels):
        logits, state = net.apply(params, state, images, True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses.mean(), state

    return Program(loss, (params, state, images, labels), has_aux=True, tolerance=16)


def language_model(tokens):
    """Predicts each character by recurrent cores, unrolled over time."""
    x = hk.Embed(vocab_size=11, embed_dim=12)(tokens)
    core = hk.DeepRNN([hk.LSTM(16), jnp.tanh])
    start = core.initial_state(batch_size=tokens.shape[0])
    # In the dtype of the net where it is cast; Haiku makes zeros in float32.
    start = jax.tree.map(lambda zeros: zeros.astype(x.dtype), start)
    outs, _ = hk.dynamic_unroll(core, x, start, time_major=False)
    return hk.BatchApply(hk.Linear(11))(outs)


def rnn():
    net = hk.without_apply_rng(hk.transform(language_model))
    tokens = (jnp.arange(4)[:, None] + jnp.arange(9) ** 2) % 11
    params = drawn(jax.eval_shape(net.init, KEY, tokens))

    def loss(params, tokens):
        logits = net.apply(params, tokens[:, :-1])
        labels = tokens[:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return Program(loss, (params, tokens))


@programs(net_with_state, rnn)
def test_haiku_programs_are_what_they_were(program, policy, order):
    hold(program, policy, order)


@in_16_bits
def test_a_haiku_net_is_cast(policy):
    net = hk.without_apply_rng(hk.transform(language_model))
    program = rnn()
    params, tokens = program.args
    apply = jaxmp.with_policy(net.apply, policy)
    got, _ = run(apply, params, tokens)
    expected, _ = run(net.apply, params, tokens)
    near([got], [expected], DTYPES[policy], 8)
    assert jaxmp.audit(apply)(params, tokens).fraction_16bit == 1


def test_a_step_of_haiku_trains_in_16_bits():
    program = net_with_state()
    params, state, images, labels = program.args
    tx = jaxmp.loss_scaling(optax.adam(3e-3), "mixed_float16")

    def step(carry, _):
        params, state, opt_state = carry
        scale = jaxmp.get_loss_scale(opt_state)
        grad_fn = jaxmp.value_and_grad(program.loss, loss_scale=scale, has_aux=True)
        grad_fn = jaxmp.autocast(grad_fn, "mixed_float16")
        (loss, state), grads = grad_fn(params, state, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), state, opt_state), loss

    def train(carry):
        return jax.lax.scan(step, carry, None, 20)

    (_, state, opt_state), losses = run(train, (params, state, tx.init(params)))[0]
    assert losses[-1] < 0.2 * losses[0]
    counters = [x for x in jax.tree.leaves(state) if x.dtype == jnp.int32]
    assert counters
    np.testing.assert_array_equal(counters, 20)
    assert jaxmp.get_loss_scale_state(opt_state).skipped == 0
