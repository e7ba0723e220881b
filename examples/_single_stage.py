"""A detector in one stage, whose loss is divided by all anchors of the batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from _canvases import ANCHORS, CLASSES, SIDES, cells, match, moved, with_neighbours

SHARE, WORKERS = 35, 28  # canvases of one worker, and the workers of one update
GLOBAL_ANCHORS = WORKERS * SHARE * len(ANCHORS)


class Detector(nn.Module):
    """A class and a box for every anchor, from patches that see their neighbours."""

    @nn.compact
    def __call__(self, x):
        x = cells(x)
        for width in (32, 48, 48):
            x = nn.relu(nn.Dense(width)(with_neighbours(x)))
        x = nn.Dense(len(SIDES) ** 2 * (CLASSES + 4))(x)
        return x.reshape(len(x), len(ANCHORS), CLASSES + 4)


def multibox_loss(
    apply: Callable, params: Any, images: Any, boxes: Any, labels: Any, key: Any
) -> jax.Array:
    """Sums over the digits' anchors and the hardest others; divides by all anchors."""
    del key  # nothing is drawn
    outputs = apply(params, images)
    target, offsets, _ = jax.vmap(partial(match, ANCHORS))(boxes, labels)
    positive = target > 0
    logits, predicted_offsets = outputs[..., :CLASSES], outputs[..., CLASSES:]
    class_loss = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    box_loss = jnp.where(
        positive, optax.huber_loss(predicted_offsets, offsets).sum(-1), 0
    )
    # Three background anchors for each positive one: those with the largest loss.
    background = jnp.where(positive, -1, jax.lax.stop_gradient(class_loss))
    last = len(ANCHORS) - 1 - 3 * positive.sum(1, keepdims=True)
    threshold = jnp.take_along_axis(jnp.sort(background, 1), last, 1)
    chosen = positive | (background > threshold)
    return (jnp.where(chosen, class_loss, 0).sum() + box_loss.sum()) / GLOBAL_ANCHORS


def find(apply: Callable, params: Any, images: Any) -> tuple[Any, Any]:
    """Returns logits and boxes of all anchors."""
    outputs = apply(params, images)
    return outputs[..., :CLASSES], moved(jnp.asarray(ANCHORS), outputs[..., CLASSES:])
