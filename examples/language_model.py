"""Where float16 needs a loss scale: a loss divided by half a million characters.

A two-layer LSTM learns to predict the next character of English text. Its loss is the
mean over a global batch of 524,288 characters, so that what one character contributes
to a gradient is at most 2^-19, mostly far less, and float16 turns into zero what is at
or below 2^-25. Unscaled, it learns less than how frequent each character is, a loss of
3.3. With a loss scale it learns as float32 does; so does bfloat16, unscaled, and so
does float16 whose backward pass is bfloat16.

    python examples/language_model.py            # one worker's share, a minute
    python examples/language_model.py --full     # the whole global batch
    python examples/language_model.py --level word --features 128 --full

`--full` accumulates the gradients of all 524,288 characters of an update, in 64
micro-batches. The quick form computes the share of one of 128 data-parallel workers,
4,096 characters divided by the count of the global batch as on every such worker, and
updates with this share alone: what is lost to float16 is lost before workers add up.
Adam divides the smaller sum out again, and the price is a noisier gradient.

The last layer and its loss are written out, for what float16 loses there is the
subject. In a model of your own, write `jaxmp.linear_cross_entropy`, which has no array
of logits and divides behind the matmuls.

The text comes with Python: the language reference in `pydoc_data` and the docstrings
of the standard library. `--level word` takes the 8,000 most frequent words instead,
in batches of 131,072 words.

References:
    Micikevicius et al., "Mixed Precision Training", ICLR 2018, sections 3.2 and 4.5,
    https://arxiv.org/abs/1710.03740.
"""

import dataclasses
import math
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import _text
import jax
import numpy as np
import optax
import tyro
from _lstm import make_model
from jax.flatten_util import ravel_pytree
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jaxmp
import jaxmp.plots

# The name of a run: its policy, and the wrapper that owns the loss scale. The dynamic
# one starts too high on purpose and grows after 10 good updates instead of 2000, so
# that a short run shows both directions.
SETTINGS = {
    "float32": ("float32", jaxmp.static_loss_scale),
    "bfloat16": ("mixed_bfloat16", jaxmp.static_loss_scale),
    "float16": ("mixed_float16", jaxmp.static_loss_scale),
    "float16-static": ("mixed_float16", partial(jaxmp.static_loss_scale, scale=2**15)),
    "float16-dynamic": (
        "mixed_float16",
        partial(
            jaxmp.dynamic_loss_scale,
            init_scale=2.0**30,
            max_scale=2.0**30,
            growth_interval=10,
        ),
    ),
    "float16-bfloat16": ("mixed_float16_bfloat16", jaxmp.static_loss_scale),
}
# Lines that overlap, and that black and white tells apart.
LINES: dict[str, dict[str, Any]] = {
    "float32": {"color": "0.75", "linewidth": 5},
    "bfloat16": {"color": "black", "linestyle": "--"},
    "float16": {"color": "#c03020", "marker": "x"},
    "float16-static": {"color": "black", "linestyle": ":", "linewidth": 2.5},
    "float16-dynamic": {"color": "#4878a8", "marker": "o", "markersize": 3},
    "float16-bfloat16": {"color": "#589050", "linestyle": "-."},
}
LENGTH = 32  # tokens to predict in a row of text
ROWS = {"character": 16384, "word": 4096}  # of the global batch
MICRO_BATCHES = 64  # of --full
WORKERS = 128  # the quick form is one of them


@dataclasses.dataclass
class Config:
    """Trains a model whose loss is a mean over half a million characters."""

    policy: tuple[str, ...] = tuple(SETTINGS)
    """Any of float32, bfloat16, float16, float16-static, float16-dynamic,
    float16-bfloat16."""
    seeds: int = 1
    """Runs of each setting."""
    full: bool = False
    """Accumulate the whole global batch instead of one worker's share."""
    level: Literal["character", "word"] = "character"
    updates: int = 60
    features: int = 32
    learning_rate: float = 3e-2
    figure: Path | None = None
    """Where to save the curves, as PNG."""


class Result(NamedTuple):
    """One run. The losses are nats per token on text that was held out."""

    setting: str
    seed: int
    losses: list[tuple[int, float]]  # after how many updates, and how much
    history: list[jaxmp.LossScaleState]  # after each update
    logged: dict[str, Any]  # after the last
    zeros: float  # share of exact zeros in the last gradient


def train(setting: str, seed: int, config: Config, tokens, progress) -> Result:
    policy, wrapper = SETTINGS[setting]
    training, held_out = _text.split(tokens, LENGTH + 1)
    held_out = held_out[:512]
    global_rows = ROWS[config.level]
    rows = global_rows if config.full else global_rows // WORKERS

    model, init = make_model(int(tokens.max()) + 1, config.features)
    params = init(jax.random.key(seed), training[:1, :-1])
    # A cast model has one dtype in both passes, and autocast may have two.
    casts = jaxmp.get_policy(policy).backward_dtype is None
    apply: Any = jaxmp.with_policy(model.apply, policy) if casts else model.apply
    # The gradient of one worker's share is small, and this epsilon is smaller.
    tx = wrapper(optax.adam(config.learning_rate, eps=1e-12))
    opt_state = tx.init(params)

    def loss_fn(params, batch, count):
        logits = apply(params, batch[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return losses.sum() / count

    if not casts:
        loss_fn = jaxmp.autocast(loss_fn, policy)

    # Without the option XLA's CPU keeps some 16-bit results in float32.
    @partial(
        jax.jit,
        donate_argnums=(0, 1),
        compiler_options={"xla_allow_excess_precision": False},
    )
    def train_step(params, opt_state, batch):
        grad_fn = jaxmp.value_and_grad(
            loss_fn,
            policy=policy if casts else None,
            loss_scale=opt_state,
            accum_steps=MICRO_BATCHES if config.full else 1,
            batch_argnums=1,
            reduction="sum",  # each micro-batch divides by the count of the whole
        )
        _, grads = grad_fn(params, batch, global_rows * LENGTH)
        updates, opt_state = tx.update(grads, opt_state, params)
        flat = ravel_pytree(grads)[0]
        return optax.apply_updates(params, updates), opt_state, (flat == 0).mean()

    evaluate = jax.jit(lambda params, rows: loss_fn(params, rows, rows[:, 1:].size))

    rng = np.random.default_rng(seed)
    bar = progress.add_task(f"{setting}, seed {seed}", total=config.updates)
    losses, history, zeros = [(0, float(evaluate(params, held_out)))], [], math.nan
    for update in range(1, config.updates + 1):
        batch = training[rng.choice(len(training), rows, replace=False)]
        params, opt_state, zeros = train_step(params, opt_state, batch)
        state = jaxmp.get_loss_scale_state(opt_state)._replace(inner_state=None)
        history.append(jax.device_get(state))  # a copy, because the next step donates
        if update % 5 == 0 or update == config.updates:
            losses.append((update, float(evaluate(params, held_out))))
        progress.update(bar, completed=update)
    if not progress.console.is_terminal:
        loss = losses[-1][1]
        progress.console.print(f"{setting}, seed {seed}: loss {loss:.3f}")
    logged = jax.device_get(jaxmp.scalars(opt_state, prefix=""))
    return Result(setting, seed, losses, history, logged, float(zeros))


def results_table(results: list[Result], title: str) -> Table:
    columns = "Setting", "Loss", "Loss scale, at last", "Skipped", "Zeros in gradients"
    table = Table(*columns, title=title)
    for setting in dict.fromkeys(r.setting for r in results):
        runs = [r for r in results if r.setting == setting]
        losses = [r.losses[-1][1] for r in runs]
        loss = f"{statistics.mean(losses):.2f}"
        if len(losses) > 1:
            loss += f" ± {statistics.stdev(losses):.2f}"
        table.add_row(
            setting,
            loss,
            f"2^{math.log2(runs[0].logged['loss_scale']):.0f}",
            f"{statistics.mean(int(r.logged['skipped']) for r in runs):.3g}",
            f"{np.mean([r.zeros for r in runs]):.1%}",
        )
    return table


def draw(results: list[Result], path: Path) -> None:
    """Draws the losses of the first seed, and the scale of the dynamic run."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for result in results:
        if result.seed == 0:
            updates, losses = zip(*result.losses, strict=True)
            left.plot(updates, losses, label=result.setting, **LINES[result.setting])
        if result.setting == "float16-dynamic" and result.seed == 0:
            jaxmp.plots.loss_scale(result.history, ax=right)
            right.set(title="The scale of float16-dynamic", xlabel="update")
    left.set(title="Loss on held-out text", xlabel="update", ylabel="nats per token")
    left.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main(config: Config, console: Console | None = None) -> list[Result]:
    console = console or Console()
    if unknown := set(config.policy) - set(SETTINGS):
        sys.exit(f"No setting {min(unknown)!r}. There are: {', '.join(SETTINGS)}.")
    text = _text.read()
    is_words = config.level == "word"
    tokens = _text.as_words(text, 8000) if is_words else _text.as_characters(text)
    count = ROWS[config.level] * LENGTH
    if config.full:
        title = f"The whole global batch of {count:,} {config.level}s"
    else:
        title = (
            f"One worker's share: {count // WORKERS:,} {config.level}s an update, "
            f"each divided by the global count, {count:,}"
        )
    with Progress(console=console, disable=not console.is_terminal) as progress:
        results = [
            train(setting, seed, config, tokens, progress)
            for setting in config.policy
            for seed in range(config.seeds)
        ]
    console.print(results_table(results, title))
    if config.figure:
        draw(results, config.figure)
    return results


if __name__ == "__main__":
    main(tyro.cli(Config))
