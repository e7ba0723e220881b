"""Shows where float16 needs a loss scale: a detector with 900 anchors an image.

    python examples/detector.py --figure detector.png
    python examples/detector.py --full --seeds 3

The loss of a single-shot detector is a sum over few objects, divided by the number of
all anchors in the global batch: 882,000 here. Every gradient is tiny, and the better
the detector, the tinier. Unscaled float16 learns at first; then, as half of the
activations' gradients turn into zero, its loss rises again. A static scale of 8, which
was all that SSD needed in the paper, or a dynamic one brings back what float32 reaches.
bfloat16 has float32's range and needs none. The images are canvases with some real
scanned digits, stretched to sides of 8 to 16 pixels.

`--full` computes the whole batch of 980 canvases for each update, in 28 micro-batches.
The quick form computes one of 28 data-parallel workers: 35 canvases an update, with the
loss divided by the anchors of all 980, as each worker of the large job has it. Nothing
but the sum over the workers is stood in for, by 28 times this worker's gradients, in
float32 and unscaled.

References:
    Micikevicius et al., "Mixed Precision Training", ICLR 2018, sections 3.2 and 4.2,
    https://arxiv.org/abs/1710.03740. Liu et al., "SSD: Single Shot MultiBox Detector",
    ECCV 2016, https://arxiv.org/abs/1512.02325.
"""

import dataclasses
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _data import load_digits
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jaxmp
import jaxmp.linen
import jaxmp.plots

# Policy and loss scale; None stands for what `jaxmp.loss_scaling` chooses.
SETTINGS: dict[str, tuple[str, float | None]] = {
    "float32": ("float32", None),
    "float16 unscaled": ("mixed_float16", 1.0),
    "float16 static 8": ("mixed_float16", 8.0),
    "float16 dynamic": ("mixed_float16", None),
    "bfloat16": ("mixed_bfloat16", None),
}

# Lines that overlap, and that black and white tells apart.
LINES: dict[str, dict[str, Any]] = {
    "float32": {"color": "0.75", "linewidth": 5},
    "float16 unscaled": {"color": "#c03020"},
    "float16 static 8": {"color": "#4878a8", "linestyle": "-.", "linewidth": 2},
    "float16 dynamic": {"color": "black", "linestyle": "--"},
    "bfloat16": {"color": "black", "linestyle": ":", "linewidth": 2.5},
}

CANVAS, CELL, OBJECTS = 40, 4, 8  # pixels a side, pixels a cell, digits at most
SIDES = (8, 12, 16)  # of anchors, in pixels: all nine pairs in each cell
CLASSES = 11  # background and ten digits
SHARE, WORKERS = 35, 28  # canvases of one worker, and the workers of one update
TRAIN_CANVASES, TEST_CANVASES = 4000, 200

_centers = (np.arange(CANVAS // CELL) + 0.5) * CELL
_grid = np.meshgrid(_centers, _centers, SIDES, SIDES, indexing="ij")
ANCHORS = np.stack(_grid, -1).reshape(-1, 4).astype(np.float32)  # y, x, height, width
GLOBAL_ANCHORS = WORKERS * SHARE * len(ANCHORS)


@dataclasses.dataclass
class Config:
    """Trains a detector in float32, float16 with three loss scales, and bfloat16."""

    policy: tuple[str, ...] = tuple(SETTINGS)
    """Which of the settings to train, by the names in the table."""
    seeds: int = 1
    steps: int = 400
    """Updates of the parameters."""
    learning_rate: float = 8e-3
    full: bool = False
    """Compute the whole global batch, not one worker's share: 28 times the work."""
    figure: Path | None = None
    """Where to save the picture."""


class Canvases(NamedTuple):
    images: np.ndarray  # float32[N, 40, 40, 1]
    boxes: np.ndarray  # float32[N, 8, 4]: center y, center x, height, width
    labels: np.ndarray  # int32[N, 8], -1 where there is no digit


class Result(NamedTuple):
    f1: float  # on the test canvases
    losses: np.ndarray  # float32[steps]
    loss_scale: float
    skipped: int
    params: Any


class Detector(nn.Module):
    """A class and a box for every anchor, from patches that see their neighbours."""

    @nn.compact
    def __call__(self, x):
        cells = CANVAS // CELL
        x = x.reshape(-1, cells, CELL, cells, CELL).swapaxes(2, 3)
        x = x.reshape(-1, cells, cells, CELL**2)
        for width in (32, 48, 48):
            x = nn.relu(nn.Dense(width)(with_neighbours(x)))
        x = nn.Dense(len(SIDES) ** 2 * (CLASSES + 4))(x)
        return x.reshape(len(x), len(ANCHORS), CLASSES + 4)


def with_neighbours(x: jax.Array) -> jax.Array:
    """Sets each cell's neighbours beside it, so that a 3 x 3 convolution is a product.

    In the loop over micro-batches, XLA's CPU takes 20 times as long for the gradients
    of what is written as a convolution.
    """
    _, height, width, _ = x.shape
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    places = np.ndindex(3, 3)
    return jnp.concatenate([x[:, i : i + height, j : j + width] for i, j in places], -1)


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


def intersection_over_union(a: Any, b: Any) -> Any:
    """Compares boxes ``[m, 4]`` with boxes ``[n, 4]``, of NumPy or JAX."""
    a, b = a[:, None], b[None]
    top = (a[..., :2] - a[..., 2:] / 2).clip(b[..., :2] - b[..., 2:] / 2)
    bottom = (a[..., :2] + a[..., 2:] / 2).clip(max=b[..., :2] + b[..., 2:] / 2)
    shared = (bottom - top).clip(0).prod(-1)
    return shared / (a[..., 2:].prod(-1) + b[..., 2:].prod(-1) - shared)


def match(boxes: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gives each anchor of a canvas its class, 0 for background, and its offsets."""
    iou = intersection_over_union(jnp.asarray(ANCHORS), boxes)
    iou = jnp.where(labels >= 0, iou, 0)
    best = iou.argmax(1)
    target = jnp.where(iou.max(1) > 0.5, labels[best] + 1, 0)
    box = jnp.where(target[:, None] > 0, boxes[best], ANCHORS)
    shift = (box[:, :2] - ANCHORS[:, :2]) / ANCHORS[:, 2:]
    return target, jnp.concatenate([shift, jnp.log(box[:, 2:] / ANCHORS[:, 2:])], 1)


def multibox_loss(outputs: jax.Array, boxes: jax.Array, labels: jax.Array) -> jax.Array:
    """Sums over the digits' anchors and the hardest others; divides by all anchors."""
    target, offsets = jax.vmap(match)(boxes, labels)
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


def detect(outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns a canvas's boxes and digits, without those that overlap a better one."""
    logits, offsets = outputs[:, :CLASSES], outputs[:, CLASSES:]
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    scores, digits = probabilities[:, 1:].max(1), probabilities[:, 1:].argmax(1)
    center = ANCHORS[:, :2] + offsets[:, :2] * ANCHORS[:, 2:]
    size = ANCHORS[:, 2:] * np.exp(offsets[:, 2:].clip(-2, 2))
    boxes, found = np.concatenate([center, size], 1), []
    for i in np.argsort(-scores):
        if scores[i] < 0.5:
            break
        overlap = intersection_over_union(boxes[found], boxes[i : i + 1])
        if not (overlap > 0.3).any():
            found.append(i)
    return boxes[found], digits[found]


def f1_score(outputs: np.ndarray, canvases: Canvases) -> float:
    """Counts a digit as found where the class is right and half of the area agrees."""
    right = detected = 0
    for output, boxes, labels in zip(outputs, *canvases[1:], strict=True):
        found, digits = detect(output)
        hit = (intersection_over_union(found, boxes) > 0.5) & (
            digits[:, None] == labels
        )
        right += hit.any(0).sum()
        detected += len(found)
    return float(2 * right / (detected + (canvases.labels >= 0).sum()))


def train(
    setting: str, config: Config, data: Canvases, test: Canvases, console: Console
) -> Iterator[Result]:
    """Trains one detector for each seed."""
    policy, scale = SETTINGS[setting]
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.steps // 10, config.steps
    )
    adam = optax.adam(schedule)
    if scale is None:
        tx = jaxmp.loss_scaling(adam, policy)
    else:
        tx = jaxmp.static_loss_scale(adam, scale)
    model = Detector()
    apply: Any = jaxmp.with_policy(model.apply, policy)
    workers = WORKERS if config.full else 1  # whose gradients are computed

    def loss_fn(params, images, boxes, labels):
        return multibox_loss(apply(params, images), boxes, labels)

    # Without the option XLA's CPU keeps some 16-bit results in float32.
    @partial(
        jax.jit,
        donate_argnums=(0, 1),
        compiler_options={"xla_allow_excess_precision": False},
    )
    def train_step(params, opt_state, *batch):
        loss, grads = jaxmp.value_and_grad(
            loss_fn,
            loss_scale=opt_state,
            accum_steps=workers,
            batch_argnums=(1, 2, 3),
            reduction="sum",  # because the loss divides by all anchors itself
        )(params, *batch)
        # The other workers' share, if they are not computed: as much as this one's.
        loss, grads = jax.tree.map(lambda x: x * (WORKERS // workers), (loss, grads))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    init, predict = jax.jit(model.init), jax.jit(apply)
    for seed in range(config.seeds):
        params = init(jax.random.key(seed), data.images[:1])
        opt_state, losses = tx.init(params), []
        rng = np.random.default_rng(seed)
        name = f"{setting}, seed {seed}"
        hidden = not console.is_terminal
        for _ in track(range(config.steps), name, console=console, disable=hidden):
            chosen = rng.integers(len(data.images), size=workers * SHARE)
            params, opt_state, loss = train_step(
                params, opt_state, *(x[chosen] for x in data)
            )
            losses.append(float(loss))
        f1 = f1_score(np.asarray(predict(params, test.images)), test)
        logged = jaxmp.scalars(opt_state, prefix="")
        console.print(f"{name}: loss {losses[-1]:.3f}, F1 {f1:.2f}", highlight=False)
        yield Result(
            f1=f1,
            losses=np.array(losses),
            loss_scale=float(logged["loss_scale"]),
            skipped=int(logged["skipped"]),
            params=params,
        )


def activation_gradients(params: Any, batch: Canvases) -> dict[str, jax.Array]:
    """Returns the float32 gradients of all activations, as one worker has them."""
    apply: Any = jaxmp.with_policy(Detector().apply, "float32")

    def loss_fn(params, images, boxes, labels):
        return multibox_loss(apply(params, images), boxes, labels)

    grads = jax.jit(jaxmp.linen.activation_gradients(loss_fn))(params, *batch)
    # What the model itself returns is only its last convolution's output, reshaped.
    return {path: grad for path, grad in grads.items() if path != "Detector"}


def results_table(results: dict[str, list[Result]]) -> Table:
    table = Table(title="Digits found on the test canvases")
    table.add_column("Setting")
    for name in ("F1", "± over seeds", "Loss at the end", "Scale", "Skipped"):
        table.add_column(name, justify="right")
    for setting, runs in results.items():
        f1 = [run.f1 for run in runs]
        table.add_row(
            setting,
            f"{np.mean(f1):.2f}",
            f"{np.std(f1, ddof=1):.2f}" if len(f1) > 1 else "",
            f"{np.mean([run.losses[-20:].mean() for run in runs]):.3f}",
            f"{runs[-1].loss_scale:.0f}",
            f"{np.mean([run.skipped for run in runs]):.0f}",
        )
    return table


def draw(results: dict[str, list[Result]], grads: Any, path: Path) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    jaxmp.plots.exponents(grads, "float16", loss_scale=8.0, ax=left)
    left.set_title("Gradients of the activations, and 8 times them")
    for setting, runs in results.items():
        losses = np.mean([run.losses for run in runs], 0)
        window = max(1, len(losses) // 40)
        smooth = np.convolve(losses, np.ones(window) / window, "valid")
        right.plot(smooth, label=setting, **LINES[setting])
    right.set(title="Training", xlabel="update", ylabel="loss, running mean")
    right.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=3, frameon=False
    )
    figure.savefig(path, dpi=90)


def main(config: Config, console: Console | None = None) -> dict[str, list[Result]]:
    console = console or Console()
    if unknown := sorted(set(config.policy) - set(SETTINGS)):
        sys.exit(
            f"`--policy` knows no {unknown[0]!r}. Expected: {', '.join(SETTINGS)}."
        )
    digits = load_digits()
    data = paste_digits(digits.train_images, digits.train_labels, TRAIN_CANVASES, 0)
    test = paste_digits(digits.test_images, digits.test_labels, TEST_CANVASES, 1)
    if config.full:
        batch = f"all {WORKERS * SHARE} canvases, in {WORKERS} micro-batches"
    else:
        batch = f"one worker's {SHARE} canvases of {WORKERS * SHARE}, standing for all"
    console.print(
        f"An update is {batch}; the loss is divided by {GLOBAL_ANCHORS:,} anchors."
    )
    results = {
        setting: list(train(setting, config, data, test, console))
        for setting in config.policy
    }
    console.print(results_table(results))

    params = next(iter(results.values()))[0].params
    grads = activation_gradients(params, Canvases(*(x[:SHARE] for x in data)))
    for scale in (1, 8):
        scaled = jax.tree.map(partial(jnp.multiply, scale), grads)
        share = jaxmp.range_report(scaled, "float16").total
        console.print(
            f"Of the activations' gradients that are not zero, times {scale}, float16 "
            f"turns {share.flushed / (1 - share.zero):.0%} into zero."
        )
    if config.figure:
        draw(results, grads, config.figure)
    return results


if __name__ == "__main__":
    main(tyro.cli(Config))
