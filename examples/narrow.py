"""Narrower training: 16-bit parameters, matmuls in float8, and what keeps both right.

A small transformer learns to predict the next character of English text, with updates
that are small beside its weights, as they are late in any training. Stored in bfloat16
and rounded to the nearest number, most updates are lost. Rounded at random, or with a
compensation, none are: the model learns what float32 masters learn, in 4 to 8 bytes a
parameter where masters and their moments take 12.

With float32 masters, the operands of products may be rounded to float8, four bits of
precision, if each is scaled to fill its range. Unscaled, most gradients are zero.

    python examples/narrow.py               # one seed, 300 updates
    python examples/narrow.py --full        # three seeds, 600 updates
    python examples/narrow.py --setting masters kahan

Nothing but the policy's string and the wrapper around the optimizer differs between the
settings, but for the unscaled one, which is there to fail. The text comes with Python:
the language reference in `pydoc_data` and the docstrings of the standard library.

References:
    Zamirai et al., "Revisiting BFloat16 Training", 2020, https://arxiv.org/abs/2010.06192.
    Micikevicius et al., "FP8 Formats for Deep Learning", 2022,
    https://arxiv.org/abs/2209.05433.
"""

import dataclasses
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import _text
import jax
import numpy as np
import optax
import tyro
from _character_model import LENGTH, make_model
from _unscaled import unscaled
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jaxmp


class Setting(NamedTuple):
    """How parameters are stored: the policy, and what is around the optimizer."""

    policy: str
    wrap: Callable[[optax.GradientTransformation], optax.GradientTransformation]
    line: dict[str, Any]  # lines that overlap, and that black and white tells apart
    dot: Any = jax.lax.dot_general  # of the model


def as_it_is(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    return tx


STOCHASTIC, KAHAN = jaxmp.stochastic_rounding, jaxmp.kahan_summation
SETTINGS = {
    "masters": Setting("mixed_bfloat16", as_it_is, {"color": "0.75", "linewidth": 5}),
    "bfloat16": Setting("bfloat16", as_it_is, {"color": "#c03020", "marker": "x"}),
    "stochastic": Setting("bfloat16", STOCHASTIC, {"color": "black", "ls": "--"}),
    "stochastic-narrow": Setting(
        "bfloat16",
        partial(STOCHASTIC, state_dtype="bfloat16"),
        {"color": "#4878a8", "marker": "o", "markersize": 4, "ls": ":"},
    ),
    "stochastic-int8": Setting(
        "bfloat16",
        partial(STOCHASTIC, state_dtype="int8"),
        {"color": "#4878a8", "ls": (0, (3, 3))},
    ),
    "kahan": Setting("bfloat16", KAHAN, {"color": "black", "ls": ":", "lw": 2.5}),
    "kahan-narrow": Setting(
        "bfloat16",
        partial(KAHAN, state_dtype="bfloat16"),
        {"color": "#5a9a5a", "ls": "-."},
    ),
    "kahan-int8": Setting(
        "bfloat16",
        partial(KAHAN, state_dtype="int8", compensation="int8"),
        {"color": "#5a9a5a", "ls": (0, (3, 3))},
    ),
    "masters-narrow": Setting(
        "mixed_bfloat16",
        partial(jaxmp.with_state_dtype, state_dtype="bfloat16"),
        {"color": "0.5", "ls": ":"},
    ),
    "masters-int8": Setting(
        "mixed_bfloat16",
        partial(jaxmp.with_state_dtype, state_dtype="int8"),
        {"color": "0.5", "ls": (0, (3, 3))},
    ),
    "fp8": Setting("mixed_fp8", as_it_is, {"color": "#a03080", "ls": (0, (5, 1))}),
    "fp8-unscaled": Setting(
        "mixed_bfloat16", as_it_is, {"color": "#a03080", "marker": "v"}, unscaled
    ),
    "O3": Setting("O3", as_it_is, {"color": "#d09030", "marker": "+"}),
    "O3-kahan": Setting("O3", KAHAN, {"color": "#8050a0", "ls": (0, (1, 4)), "lw": 3}),
}
# The model is small, and only its losses are looked at.
OPS = jaxmp.DEFAULT_OPS.with_fp8(min_size=16)
ROWS = 8  # of an update
AT_ONCE = 50  # updates of one call


@dataclasses.dataclass
class Config:
    """Trains a character model with 16-bit parameters, or matmuls in float8."""

    setting: tuple[str, ...] = tuple(SETTINGS)
    """Any of masters, bfloat16, stochastic, stochastic-narrow, stochastic-int8, kahan,
    kahan-narrow, kahan-int8, masters-narrow, masters-int8, fp8, fp8-unscaled, O3,
    O3-kahan."""
    full: bool = False
    """Three seeds and 600 updates."""
    seeds: int = 1
    updates: int = 300
    features: int = 64
    learning_rate: float = 1e-4
    figure: Path | None = None
    """Where to save the curves, as PNG."""


class Result(NamedTuple):
    """One run. The losses are nats per character."""

    setting: str
    seed: int
    losses: list[float]  # of the training text, each the mean of 50 updates
    held_out: float  # at the end
    stored: int  # bytes of parameters and optimizer state
    parameters: int


def train(setting: str, seed: int, config: Config, tokens, progress) -> Result:
    name, wrap, _, dot = SETTINGS[setting]
    policy = jaxmp.get_policy(name)
    training, held_out = _text.split(tokens, LENGTH + 1)
    model, init = make_model(config.features, dot)
    apply: Any = model.apply
    params = policy.cast_to_param(init(jax.random.key(seed), training[:1, :-1]))
    tx = jaxmp.loss_scaling(wrap(optax.adamw(config.learning_rate)), policy)
    opt_state = tx.init(params)

    def loss_fn(params, rows):
        logits = apply(params, rows[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])
        return losses.mean()

    def train_step(carry, rows):
        params, opt_state = carry
        grad_fn = jaxmp.value_and_grad(loss_fn, loss_scale=opt_state)
        loss, grads = jaxmp.autocast(grad_fn, policy, ops=OPS)(params, rows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    train_steps = jax.jit(partial(jax.lax.scan, train_step), donate_argnums=0)
    rng = np.random.default_rng(seed)
    bar = progress.add_task(f"{setting}, seed {seed}", total=config.updates)
    carry, losses = (params, opt_state), []
    for done in range(AT_ONCE, config.updates + 1, AT_ONCE):
        batches = training[rng.integers(len(training), size=(AT_ONCE, ROWS))]
        carry, found = train_steps(carry, batches)
        losses.append(float(found.mean()))
        progress.update(bar, completed=done)
    params, opt_state = carry
    if not progress.console.is_terminal:
        progress.console.print(f"{setting}, seed {seed}: loss {losses[-1]:.3f}")
    evaluate = jax.jit(jaxmp.autocast(loss_fn, policy, ops=OPS))
    return Result(
        setting,
        seed,
        losses,
        float(evaluate(params, held_out[:256])),
        sum(x.nbytes for x in jax.tree.leaves(carry)),
        sum(x.size for x in jax.tree.leaves(params)),
    )


def results_table(results: list[Result], config: Config) -> Table:
    columns = "Setting", "Policy", "Loss", "Held out", "Bytes"
    title = f"After {config.updates} updates; {config.seeds} seed"
    title += "s" * (config.seeds > 1) + "; bytes of a parameter with its moments"
    table = Table(*columns, title=title)
    for setting in dict.fromkeys(r.setting for r in results):
        runs = [r for r in results if r.setting == setting]
        table.add_row(
            setting,
            SETTINGS[setting].policy,
            mean([r.losses[-1] for r in runs]),
            mean([r.held_out for r in runs]),
            f"{runs[0].stored / runs[0].parameters:.1f}",
        )
    return table


def mean(values: list[float]) -> str:
    text = f"{statistics.mean(values):.3f}"
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.3f}"
    return text


def draw(results: list[Result], path: Path) -> None:
    """Draws the losses of the first seed."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for result in results:
        if result.seed == 0:
            updates = AT_ONCE * np.arange(1, len(result.losses) + 1)
            line = SETTINGS[result.setting].line
            axes.plot(updates, result.losses, label=result.setting, **line)
    axes.set(xlabel="updates", ylabel="nats per character")
    axes.set_title("Loss on the training text")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main(config: Config, console: Console | None = None) -> list[Result]:
    console = console or Console()
    if unknown := set(config.setting) - set(SETTINGS):
        sys.exit(f"No setting {min(unknown)!r}. There are: {', '.join(SETTINGS)}.")
    if config.full:
        config = dataclasses.replace(config, seeds=3, updates=600)
    tokens = _text.as_characters(_text.read())
    with Progress(console=console, disable=not console.is_terminal) as progress:
        results = [
            train(setting, seed, config, tokens, progress)
            for setting in config.setting
            for seed in range(config.seeds)
        ]
    console.print(results_table(results, config))
    if config.figure:
        draw(results, config.figure)
    return results


if __name__ == "__main__":
    main(tyro.cli(Config))
