"""Shows where float16 needs a loss scale: a detector with 900 anchors an image.

    python examples/detector.py --figure detector.png
    python examples/detector.py --full --seeds 3
    python examples/detector.py --two-stage --seeds 3

The loss of a single-shot detector is a sum over few objects, divided by the number of
all anchors in the global batch: 882,000 here. Every gradient is tiny, and the better
the detector, the tinier. Unscaled float16 learns at first; then, as half of the
activations' gradients turn into zero, its loss rises again. A static scale of 8, which
was all that SSD needed in the paper, or a dynamic one brings back what float32 reaches.
bfloat16 has float32's range and needs none, not even for the backward pass alone,
behind a forward pass in float16. The images are canvases with some real
scanned digits, stretched to sides of 8 to 16 pixels.

`--two-stage` proposes regions first and then looks at each of them, as Faster R-CNN
does. Its losses are means over a few sampled regions and not over all anchors. It shows
the ranges of both detectors' gradients side by side.

`--full` computes the whole batch of 980 canvases for each update, in 28 micro-batches.
The quick form computes one of 28 data-parallel workers: 35 canvases an update, with the
loss divided by the anchors of all 980, as each worker of the large job has it. Nothing
but the sum over the workers is stood in for, by 28 times this worker's gradients, in
float32 and unscaled.

References:
    Micikevicius et al., "Mixed Precision Training", ICLR 2018, sections 3.2 and 4.2,
    https://arxiv.org/abs/1710.03740. Liu et al., "SSD: Single Shot MultiBox Detector",
    ECCV 2016, https://arxiv.org/abs/1512.02325. Ren et al., "Faster R-CNN", NeurIPS
    2015, https://arxiv.org/abs/1506.01497.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import _two_stage
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _canvases import Canvases, f1_score, paste_digits
from _data import load_digits
from _detections import Result, draw, results_table
from _single_stage import GLOBAL_ANCHORS, SHARE, WORKERS, Detector, find, multibox_loss
from rich.console import Console
from rich.progress import track

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
    "float16, bfloat16 backward": ("mixed_float16_bfloat16", None),
}
TRAIN_CANVASES, TEST_CANVASES = 4000, 200


@dataclasses.dataclass
class Config:
    """Trains a detector in float32, bfloat16, and float16 with and without a scale."""

    policy: tuple[str, ...] = tuple(SETTINGS)
    """Which of the settings to train, by the names in the table."""
    seeds: int = 1
    steps: int = 400
    """Updates of the parameters."""
    learning_rate: float = 8e-3
    full: bool = False
    """Compute the whole global batch, not one worker's share: 28 times the work."""
    two_stage: bool = False
    """Propose regions first. The loss is a mean over few, not over all anchors."""
    figure: Path | None = None
    """Where to save the picture."""

    def kind(self) -> "Kind":
        """Returns the detector that was asked for."""
        return TWO_STAGE if self.two_stage else SINGLE_STAGE


class Kind(NamedTuple):
    """A detector: its model, its loss, and how it finds digits."""

    name: str
    model: nn.Module
    loss_fn: Callable  # of apply, params, images, boxes, labels and a key
    find: Callable


SINGLE_STAGE = Kind("One stage", Detector(), multibox_loss, find)
TWO_STAGE = Kind(
    "Two stages", _two_stage.TwoStage(), _two_stage.loss_fn, _two_stage.find
)


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
    kind = config.kind()
    # A cast model has one dtype in both passes, and autocast may have two.
    casts = jaxmp.get_policy(policy).backward_dtype is None
    narrow = jaxmp.with_policy if casts else jaxmp.autocast
    apply: Any = narrow(kind.model.apply, policy)
    # The two-stage loss is a mean, and needs nobody else's share.
    all_workers = 1 if config.two_stage else WORKERS
    workers = all_workers if config.full else 1  # whose gradients are computed

    # Without the option XLA's CPU keeps some 16-bit results in float32.
    @partial(
        jax.jit,
        donate_argnums=(0, 1),
        compiler_options={"xla_allow_excess_precision": False},
    )
    def train_step(params, opt_state, *batch):
        loss, grads = jaxmp.value_and_grad(
            partial(kind.loss_fn, apply),
            loss_scale=opt_state,
            accum_steps=workers,
            batch_argnums=(1, 2, 3),
            reduction="sum",  # because the loss divides by all anchors itself
        )(params, *batch)
        # The other workers' share, if they are not computed: as much as this one's.
        times = all_workers // workers
        loss, grads = jax.tree.map(lambda x: x * times, (loss, grads))
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    init, predict = jax.jit(kind.model.init), jax.jit(partial(kind.find, apply))
    for seed in range(config.seeds):
        params = init(jax.random.key(seed), data.images[:1])
        opt_state, losses = tx.init(params), []
        rng = np.random.default_rng(seed)
        name = f"{setting}, seed {seed}"
        hidden = not console.is_terminal
        for step in track(range(config.steps), name, console=console, disable=hidden):
            chosen = rng.integers(len(data.images), size=workers * SHARE)
            params, opt_state, loss = train_step(
                params, opt_state, *(x[chosen] for x in data), jax.random.key(step)
            )
            losses.append(float(loss))
        f1 = f1_score(predict(params, test.images), test)
        logged = jaxmp.scalars(opt_state, prefix="")
        console.print(f"{name}: loss {losses[-1]:.3f}, F1 {f1:.2f}", highlight=False)
        yield Result(
            f1=f1,
            losses=np.array(losses),
            loss_scale=float(logged["loss_scale"]),
            skipped=int(logged["skipped"]),
            params=params,
        )


def activation_gradients(
    kind: Kind, params: Any, batch: Canvases
) -> dict[str, jax.Array]:
    """Returns the float32 gradients of all activations, as one worker has them."""
    loss_fn = partial(kind.loss_fn, jaxmp.with_policy(kind.model.apply, "float32"))
    grads_fn = jax.jit(jaxmp.linen.activation_gradients(loss_fn))
    grads = grads_fn(params, *batch, jax.random.key(0))
    # What the model itself returns is only its layers' outputs, reshaped.
    name = type(kind.model).__name__
    return {path: grad for path, grad in grads.items() if path.split(".")[0] != name}


def main(config: Config, console: Console | None = None) -> dict[str, list[Result]]:
    console = console or Console()
    if unknown := sorted(set(config.policy) - set(SETTINGS)):
        sys.exit(
            f"`--policy` knows no {unknown[0]!r}. Expected: {', '.join(SETTINGS)}."
        )
    if config.two_stage and config.full:
        sys.exit("`--two-stage` computes its whole batch as it is. Drop `--full`.")
    digits = load_digits()
    data = paste_digits(digits.train_images, digits.train_labels, TRAIN_CANVASES, 0)
    test = paste_digits(digits.test_images, digits.test_labels, TEST_CANVASES, 1)
    console.print(description(config))
    results = {
        setting: list(train(setting, config, data, test, console))
        for setting in config.policy
    }
    console.print(results_table(results))

    trained = {config.kind(): next(iter(results.values()))[0].params}
    if config.two_stage:
        console.print("And in one stage, whose loss is divided by all anchors:")
        alone = dataclasses.replace(config, two_stage=False, seeds=1)
        (result,) = train("float32", alone, data, test, console)
        trained = {SINGLE_STAGE: result.params} | trained
    batch = Canvases(*(x[:SHARE] for x in data))
    grads = {
        kind.name: activation_gradients(kind, params, batch)
        for kind, params in trained.items()
    }
    for name, tree in grads.items():
        for scale in (1, 8):
            scaled = jax.tree.map(partial(jnp.multiply, scale), tree)
            lost = jaxmp.range_report(scaled, "float16").total
            share = lost.underflow / (1 - lost.zero)
            console.print(
                f"{name}: of the activations' gradients that are not zero, times "
                f"{scale}, float16 turns {share:.0%} into zero."
            )
    if config.figure:
        draw(results, grads, config.figure)
    return results


def description(config: Config) -> str:
    """Says what one update is."""
    if config.two_stage:
        return (
            f"An update is {SHARE} canvases; the losses are means over "
            f"{_two_stage.SAMPLED} anchors and some 30 regions of each."
        )
    if config.full:
        batch = f"all {WORKERS * SHARE} canvases, in {WORKERS} micro-batches"
    else:
        batch = f"one worker's {SHARE} canvases of {WORKERS * SHARE}, standing for all"
    return f"An update is {batch}; the loss is divided by {GLOBAL_ANCHORS:,} anchors."


if __name__ == "__main__":
    main(tyro.cli(Config))
