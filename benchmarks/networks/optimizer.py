"""A network whose gradients are given, so that its training step is all optimizer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .basic import Network


class GivenGradients:
    """Stands for a :class:`benchmarks.networks.basic.Network`, with its parameters.

    The gradients are the batch. Whatever a library does to a model and a loss, the
    derivative is what was given, and XLA drops the rest; casting, unscaling, checking,
    skipping and Adam remain.
    """

    def __init__(self, network: Network, dtype: DTypeLike):
        """Takes the parameters' shapes, and the dtype that gradients come in."""
        self.network, self.dtype = network, jnp.dtype(dtype)
        self.model = self

    def with_dtype(self, dtype: Any) -> "GivenGradients":
        """Returns the same, for there are no layers to compute in a dtype."""
        return self

    def init(self, key: jax.Array, x: Any) -> dict[str, Any]:
        """Returns the parameters of the network."""
        return {"params": self._params(key)}

    def apply(self, variables: Any, x: Any, mutable: Any) -> tuple[jax.Array, Any]:
        """Returns logits of one example, whatever the parameters are."""
        return _logits(variables["params"], x), {}

    def batch(self, size: int | None = None) -> tuple[Any, np.ndarray]:
        """Returns gradients and a label."""
        return self._gradients, np.zeros(1, np.int32)

    @functools.cached_property
    def _gradients(self):
        # Random, because a GPU is faster on zeros; repeated, because that is quick.
        block = np.random.default_rng(0).standard_normal(4099).astype(self.dtype)
        shapes = jax.eval_shape(self._params, jax.random.key(0))
        return jax.tree.map(lambda p: np.resize(block, p.shape), shapes)

    def _params(self, key):
        x, _ = self.network.batch(1)
        return self.network.model.init(key, x)["params"]


@jax.custom_vjp
def _logits(params, gradients):
    return jnp.zeros((1, 2), jnp.float32)


def _forward(params, gradients):
    # In the dtype of the parameters, as the gradients of a cast are.
    return _logits(params, gradients), jax.tree.map(
        lambda p, g: g.astype(p.dtype), params, gradients
    )


def _backward(gradients, _):
    return gradients, None


_logits.defvjp(_forward, _backward)
