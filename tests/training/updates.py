"""Updates of an optimizer as users write them, for the tests of optimizer memory."""

import jax
import jax.numpy as jnp
import optax


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
