"""Updates of an optimizer as users write them, for the tests of optimizer memory."""

import jax
import jax.numpy as jnp
import numpy as np
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


def bits(tree):
    """Returns the leaves as dtypes and bytes, which tell -0.0 from 0.0."""
    return jax.tree.map(lambda x: (x.dtype, np.asarray(x).tobytes()), tree)
