"""Updates of an optimizer as users write them, for the tests of optimizer memory."""

import jax
import jax.numpy as jnp
import optax

import jaxmp
from conftest import bits


def step_of(tx):
    """Returns the training step that users write."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, value=jnp.float32(1))
        return optax.apply_updates(params, updates), state

    return step


def train(tx, params, grads, length):
    """Updates with the same gradients again and again."""

    def step(carry, _):
        return step_of(tx)(*carry, grads), None

    return jax.lax.scan(step, (params, tx.init(params)), length=length)[0]


def add_poison(grads, poison):
    """Adds to one entry of one leaf."""
    return {**grads, "b": grads["b"].at[1].add(poison)}


def skips_without_a_trace(tx, params, grads):
    """Skips, grows and backs off; a skipped step must change nothing but the scale."""
    step, state, start = jax.jit(step_of(tx)), tx.init(params), bits(params)
    kinds = jax.tree.map(jax.typeof, (params, state))
    for poison in (jnp.inf, -jnp.inf, jnp.nan, 0.0, 0.0, jnp.inf, 0.0):
        before = bits((params, state.inner_state))
        params, state = step(params, state, add_poison(grads, poison))
        after = bits((params, state.inner_state))
        assert (after == before) == (poison != 0)
        assert state.last_finite == (poison == 0)
        assert jax.tree.map(jax.typeof, (params, state)) == kinds
    assert state.skipped == 4
    assert bits(params) != start
    assert jaxmp.all_finite((params, state))
    # Nothing that a recompilation depends on has changed.
    assert step._cache_size() == 1
    return state
