"""A detector in two stages, whose losses are means over a few sampled regions.

Ren et al., "Faster R-CNN", NeurIPS 2015, https://arxiv.org/abs/1506.01497, section 3.1:
the first stage proposes regions, the second looks at each. He et al., "Mask R-CNN",
ICCV 2017, https://arxiv.org/abs/1703.06870, section 3, has the aligned pooling.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from _canvases import (
    ANCHORS,
    CANVAS,
    CELL,
    CLASSES,
    SIDES,
    cells,
    intersection_over_union,
    match,
    moved,
    with_neighbours,
)

PROPOSALS = 24  # regions of a canvas, to which the true boxes are added in training
SAMPLED = 64  # anchors of a canvas in the loss of the first stage
SIDE = 4  # of what is pooled from a region, in samples


class Proposed(NamedTuple):
    """What the first stage returns."""

    features: jax.Array  # [B, 10, 10, 48]
    scores: jax.Array  # [B, 900], logits
    offsets: jax.Array  # [B, 900, 4]


class TwoStage(nn.Module):
    """Proposes regions; and tells a class and a box for what is pooled from each."""

    def setup(self):
        self.features = [nn.Dense(32), nn.Dense(48)]
        self.proposals = [nn.Dense(48), nn.Dense(len(SIDES) ** 2 * 5)]
        self.head = [nn.Dense(64), nn.Dense(CLASSES + 4)]

    def __call__(self, images):
        """Runs both stages, the second on nothing: for `init`."""
        proposed = self.propose(images)
        width = SIDE * SIDE * proposed.features.shape[-1]
        return proposed, self.classify(jnp.zeros((1, width), images.dtype))

    def propose(self, images):
        x = cells(images)
        for layer in self.features:
            x = nn.relu(layer(with_neighbours(x)))
        hidden, last = self.proposals
        y = last(nn.relu(hidden(with_neighbours(x))))
        y = y.reshape(len(x), len(ANCHORS), 5)
        return Proposed(x, y[..., 0], y[..., 1:])

    def classify(self, pooled):
        hidden, last = self.head
        return last(nn.relu(hidden(pooled)))


def best_regions(scores: jax.Array, offsets: jax.Array) -> jax.Array:
    """Returns the proposals of a canvas that overlap no better one by 0.7."""
    boxes = moved(jnp.asarray(ANCHORS), offsets)

    def choose(scores, _):
        best = boxes[scores.argmax()]
        near = intersection_over_union(boxes, best[None])[:, 0] > 0.7
        return jnp.where(near, -jnp.inf, scores), best

    return jax.lax.scan(choose, scores, length=PROPOSALS)[1]


def pooled(features: jax.Array, regions: jax.Array) -> jax.Array:
    """Samples 4 x 4 points of each region of a canvas, between the cells' centers."""
    steps = (jnp.arange(SIDE) + 0.5) / SIDE - 0.5
    points = regions[:, :2, None] + regions[:, 2:, None] * steps  # [R, 2, SIDE], pixels
    places = (points / CELL - 0.5).clip(0, CANVAS // CELL - 1)
    distance = jnp.abs(places[..., None] - jnp.arange(CANVAS // CELL))
    rows, columns = jnp.unstack((1 - distance).clip(0), axis=1)
    samples = jnp.einsum("rih,rjw,hwc->rijc", rows, columns, features)
    return samples.reshape(len(regions), -1)


def second_stage(apply: Callable, params: Any, proposed: Proposed, regions: Any) -> Any:
    """Returns logits and offsets of the regions, ``[B, R, 11]`` and ``[B, R, 4]``."""
    samples = jax.vmap(pooled)(proposed.features, regions)
    outputs = apply(params, samples, method="classify")
    return outputs[..., :CLASSES], outputs[..., CLASSES:]


def loss_fn(
    apply: Callable, params: Any, images: Any, boxes: Any, labels: Any, key: Any
) -> jax.Array:
    """Returns the mean over sampled anchors, plus that over the regions."""
    proposed = apply(params, images, method="propose")
    keys = jax.random.split(key, len(images))
    _, scores, offsets = proposed
    first = jax.vmap(first_stage_loss)(scores, offsets, boxes, labels, keys)
    best = jax.vmap(best_regions)(*jax.lax.stop_gradient((scores, offsets)))
    regions = jnp.concatenate([best, boxes], 1)
    # Where there are fewer digits than boxes, a box of no size says nothing.
    counts = (regions[..., 2:] > 0).all(-1)
    regions = jnp.where(counts[..., None], regions, 1)
    target, wanted, _ = jax.vmap(match)(regions, boxes, labels)
    logits, found = second_stage(apply, params, proposed, regions)
    second = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    second += jnp.where(target > 0, optax.huber_loss(found, wanted).sum(-1), 0)
    return first.mean() + jnp.mean(second, where=counts)


def first_stage_loss(scores: Any, offsets: Any, boxes: Any, labels: Any, key: Any):
    """Returns the mean over a canvas's sampled anchors, half of them with a digit."""
    target, wanted, agrees = match(jnp.asarray(ANCHORS), boxes, labels)
    chance = jax.random.uniform(key, target.shape, minval=0.5)
    has_digit, i = jax.lax.top_k(jnp.where(target > 0, chance, 0), SAMPLED // 2)
    has_digit = has_digit > 0
    has_none, j = jax.lax.top_k(jnp.where(agrees < 0.3, chance, 0), SAMPLED)
    has_none = (has_none > 0) & (jnp.arange(SAMPLED) < SAMPLED - has_digit.sum())
    loss = optax.sigmoid_binary_cross_entropy(scores[i], 1.0)
    loss += optax.huber_loss(offsets[i], wanted[i]).sum(-1)
    background = optax.sigmoid_binary_cross_entropy(scores[j], 0.0)
    return (loss @ has_digit + background @ has_none) / SAMPLED


def find(apply: Callable, params: Any, images: Any) -> tuple[Any, Any]:
    """Returns logits and boxes of all regions."""
    proposed = apply(params, images, method="propose")
    regions = jax.vmap(best_regions)(proposed.scores, proposed.offsets)
    logits, offsets = second_stage(apply, params, proposed, regions)
    return logits, moved(regions, offsets)
