"""Canvases with digits, the anchors of a detector on them, and what it finds there.

Boxes are float32 ``[..., 4]``: center y, center x, height, width, in pixels.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CANVAS, CELL, OBJECTS = 40, 4, 8  # pixels a side, pixels a cell, digits at most
SIDES = (8, 12, 16)  # of anchors, in pixels: all nine pairs in each cell
CLASSES = 11  # background and ten digits

_centers = (np.arange(CANVAS // CELL) + 0.5) * CELL
_grid = np.meshgrid(_centers, _centers, SIDES, SIDES, indexing="ij")
ANCHORS = np.stack(_grid, -1).reshape(-1, 4).astype(np.float32)


class Canvases(NamedTuple):
    images: np.ndarray  # float32[N, 40, 40, 1]
    boxes: np.ndarray  # float32[N, 8, 4]
    labels: np.ndarray  # int32[N, 8], -1 where there is no digit


def paste_digits(digits: Any, labels: Any, count: int, seed: int) -> Canvases:
    rng = np.random.default_rng(seed)
    canvases = Canvases(
        np.zeros((count, CANVAS, CANVAS, 1), np.float32),
        np.zeros((count, OBJECTS, 4), np.float32),
        np.full((count, OBJECTS), -1, np.int32),
    )
    for image, boxes, classes in zip(*canvases, strict=True):
        for n in range(OBJECTS):
            height, width = rng.integers(8, 17, 2)
            top = rng.integers(CANVAS - height + 1)
            left = rng.integers(CANVAS - width + 1)
            place = image[top : top + height, left : left + width]
            if place.any():
                continue
            i = rng.integers(len(digits))
            rows = np.arange(height) * 8 // height
            columns = np.arange(width) * 8 // width
            place[:] = digits[i][rows[:, None], columns] / 16
            boxes[n] = top + height / 2, left + width / 2, height, width
            classes[n] = labels[i]
    return canvases


def cells(images: Any) -> Any:
    """Cuts images into cells, whose pixels are their features."""
    n = CANVAS // CELL
    return (
        images.reshape(-1, n, CELL, n, CELL).swapaxes(2, 3).reshape(-1, n, n, CELL**2)
    )


def with_neighbours(x: jax.Array) -> jax.Array:
    """Sets each cell's neighbours beside it, so that a 3 x 3 convolution is a product.

    In the loop over micro-batches, XLA's CPU takes 20 times as long for the gradients
    of what is written as a convolution.
    """
    _, height, width, _ = x.shape
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    places = np.ndindex(3, 3)
    return jnp.concatenate([x[:, i : i + height, j : j + width] for i, j in places], -1)


def intersection_over_union(a: Any, b: Any) -> Any:
    """Compares boxes ``[m, 4]`` with boxes ``[n, 4]``, of NumPy or JAX."""
    a, b = a[:, None], b[None]
    top = (a[..., :2] - a[..., 2:] / 2).clip(b[..., :2] - b[..., 2:] / 2)
    bottom = (a[..., :2] + a[..., 2:] / 2).clip(max=b[..., :2] + b[..., 2:] / 2)
    shared = (bottom - top).clip(0).prod(-1)
    return shared / (a[..., 2:].prod(-1) + b[..., 2:].prod(-1) - shared)


def match(
    anchors: Any, boxes: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gives each anchor of a canvas its class, 0 for background, and its offsets.

    Third comes how much of it agrees with the nearest digit.
    """
    iou = intersection_over_union(jnp.asarray(anchors), boxes)
    iou = jnp.where(labels >= 0, iou, 0)
    best = iou.argmax(1)
    target = jnp.where(iou.max(1) > 0.5, labels[best] + 1, 0)
    box = jnp.where(target[:, None] > 0, boxes[best], anchors)
    shift = (box[:, :2] - anchors[:, :2]) / anchors[:, 2:]
    offsets = jnp.concatenate([shift, jnp.log(box[:, 2:] / anchors[:, 2:])], 1)
    return target, offsets, iou.max(1)


def moved(anchors: Any, offsets: Any) -> Any:
    """Returns the boxes that lie so far from ``anchors``, of NumPy or JAX."""
    center = anchors[..., :2] + offsets[..., :2] * anchors[..., 2:]
    size = anchors[..., 2:] * jnp.exp(offsets[..., 2:].clip(-2, 2))
    return jnp.concatenate([center, size], -1)


def detect(logits: np.ndarray, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns a canvas's boxes and digits, without those that overlap a better one."""
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    scores, digits = probabilities[:, 1:].max(1), probabilities[:, 1:].argmax(1)
    found: list[int] = []
    for i in np.argsort(-scores):
        if scores[i] < 0.5:
            break
        overlap = intersection_over_union(boxes[found], boxes[i : i + 1])
        if not (overlap > 0.3).any():
            found.append(int(i))
    return boxes[found], digits[found]


def f1_score(outputs: tuple[Any, Any], canvases: Canvases) -> float:
    """Counts a digit as found where the class is right and half of the area agrees.

    Args:
        outputs: Logits ``[N, n, 11]`` and boxes ``[N, n, 4]``.
        canvases: What there is to be found.
    """
    right = detected = 0
    all_found = zip(*map(np.asarray, outputs), *canvases[1:], strict=True)
    for logits, found_boxes, boxes, labels in all_found:
        found, digits = detect(logits, found_boxes)
        hit = (intersection_over_union(found, boxes) > 0.5) & (
            digits[:, None] == labels
        )
        right += hit.any(0).sum()
        detected += len(found)
    return float(2 * right / (detected + (canvases.labels >= 0).sum()))
