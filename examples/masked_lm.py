"""What mixed precision saves in memory: a masked language model in the way of BERT.

A transformer encoder fills in words that were masked, trained on 256 rows of text an
update, as 32 micro-batches of 8. The same step runs in float32 and in mixed precision.
It learns the same; what a micro-batch leaves for its backward pass takes little more
than half of the bytes.

    python examples/masked_lm.py            # trains a small one, minutes on a CPU
    python examples/masked_lm.py --full     # longer, and counts the bytes of BERT-base

The bytes are residuals: what JAX keeps from the forward pass for the backward pass,
which can be counted anywhere.

References:
    Devlin et al., "BERT", NAACL 2019, https://arxiv.org/abs/1810.04805.
"""

import dataclasses
import itertools
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import _text
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from _bert import (
    BERT_BASE,
    MASKED,
    SMALL,
    VOCABULARY,
    Batch,
    MaskedLM,
    init_small,
    mask,
)
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jaxmp

MICRO_BATCHES, ROWS = 32, 8  # of an update, and the rows of each
LENGTH = 64  # words in a row of the text that the small model learns


@dataclasses.dataclass
class Config:
    """Trains a masked language model, and counts its bytes in each precision."""

    policy: tuple[str, ...] = ("float32", "mixed_bfloat16", "mixed_float16")
    """The policies to compare. The others are compared with the first."""
    seeds: int = 1
    """Runs of each policy."""
    full: bool = False
    """Train five times as long, and count the bytes of BERT-base."""
    updates: int = 60
    """The updates of a run without `--full`."""
    learning_rate: float = 3e-3
    figure: Path | None = None
    """Where to save the picture, as PNG."""


def make_step(model: MaskedLM, policy: str, learning_rate: float, accum_steps: int):
    """Returns the optimizer, the loss and the training step."""
    tx = jaxmp.loss_scaling(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate)), policy
    )

    # A batch is of integers, which no policy casts.
    @partial(jaxmp.with_policy, policy=policy)
    def loss_fn(params, batch):
        returned: Any = model.apply(params, batch.tokens, batch.positions)
        hidden, embedding = returned
        # The mean is of as many words in every micro-batch.
        return jaxmp.linear_cross_entropy(
            hidden, embedding, batch.targets, transposed=True
        )

    def train_step(params, opt_state, batch):
        loss, grads = jaxmp.value_and_grad(
            loss_fn,
            policy=policy,
            loss_scale=opt_state,
            accum_steps=accum_steps,
            batch_argnums=1,
        )(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return tx, loss_fn, train_step


class Result(NamedTuple):
    """One training run. The losses are nats per masked word that was held out."""

    policy: str
    seed: int
    losses: list[tuple[int, float]]  # after how many updates, and how much
    opt_state: optax.OptState


def train(policy: str, seed: int, config: Config, text, updates, progress) -> Result:
    training, held_out = text
    tx, loss_fn, train_step = make_step(
        SMALL, policy, config.learning_rate, MICRO_BATCHES
    )
    # Without the option XLA's CPU keeps some 16-bit results in float32.
    step = jax.jit(
        train_step,
        donate_argnums=(0, 1),
        compiler_options={"xla_allow_excess_precision": False},
    )
    evaluate = jax.jit(loss_fn)
    test = mask(np.random.default_rng(0), held_out[:512])
    params = init_small(jax.random.key(seed), test.tokens, test.positions)
    opt_state = tx.init(params)

    rng = np.random.default_rng(seed)
    bar = progress.add_task(f"{policy}, seed {seed}", total=updates)
    losses = [(0, float(evaluate(params, test)))]
    for update in range(1, updates + 1):
        chosen = rng.choice(len(training), MICRO_BATCHES * ROWS, replace=False)
        batch = mask(rng, training[chosen])
        params, opt_state, loss = step(params, opt_state, batch)
        if update % 20 == 0 or update == updates:
            losses.append((update, float(evaluate(params, test))))
            jaxmp.check_loss_scale(opt_state, loss=loss)
        progress.update(bar, completed=update)
    if not progress.console.is_terminal:
        progress.console.print(f"{policy}, seed {seed}: loss {losses[-1][1]:.3f}")
    return Result(policy, seed, losses, opt_state)


def shapes(model: MaskedLM, rows: int, length: int) -> tuple[Any, Batch]:
    """Returns the shapes of the parameters and of a batch; nothing is allocated."""
    masked = round(MASKED * length)
    batch = Batch(
        tokens=jax.ShapeDtypeStruct((rows, length), jnp.int32),
        positions=jax.ShapeDtypeStruct((rows, masked), jnp.int32),
        targets=jax.ShapeDtypeStruct((rows, masked), jnp.int32),
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    return jax.eval_shape(model.init, key, batch.tokens, batch.positions), batch


def residual_bytes(model: MaskedLM, policy: str, rows: int, length: int) -> int:
    """Counts what the forward pass leaves for the backward pass, by JAX's account.

    XLA keeps less where it can compute again.
    """
    _, loss_fn, _ = make_step(model, policy, 1e-3, 1)
    params, batch = shapes(model, rows, length)
    compute = jax.eval_shape(jaxmp.get_policy(policy).cast_to_compute, params)
    report = jaxmp.audit(jax.grad(loss_fn))(compute, batch)
    return sum((report.residual_bytes or {}).values())


def make_table(title: str, columns) -> Table:
    table = Table("", *columns, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def training_table(results: list[Result], policies, updates: int) -> Table:
    table = make_table(
        f"{updates} updates of {MICRO_BATCHES} micro-batches of {ROWS} rows", policies
    )
    runs = [[r for r in results if r.policy == policy] for policy in policies]
    for name, which in ("Loss at the start", 0), ("Loss at the end", -1):
        losses = [[r.losses[which][1] for r in same] for same in runs]
        table.add_row(name, *map(mean_and_spread, losses))
    logged = [[jaxmp.scalars(r.opt_state, prefix="") for r in same] for same in runs]
    scales = [f"2^{math.log2(same[0]['loss_scale']):.0f}" for same in logged]
    table.add_row("Loss scale at the end", *scales)
    table.add_row(
        "Skipped", *(str(sum(int(x["skipped"]) for x in same)) for same in logged)
    )
    return table


def mean_and_spread(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


def add_bytes(table: Table, name: str, sizes: list[int]) -> None:
    """Adds a row of sizes, each with its share of the first."""
    unit, power = ("GB", 1e9) if sizes[0] >= 1e9 else ("MB", 1e6)
    first, *others = [f"{size / power:.2f} {unit}" for size in sizes]
    shares = [f" ({size / sizes[0]:.2f})" for size in sizes[1:]]
    table.add_row(name, first, *map(str.__add__, others, shares))


def memory_table(model: MaskedLM, length: int, policies, title: str) -> Table:
    """Counts the residuals of an update, in micro-batches and at once."""
    table = make_table(title, policies)
    for rows in ROWS, MICRO_BATCHES * ROWS:
        sizes = [residual_bytes(model, policy, rows, length) for policy in policies]
        add_bytes(table, f"Residuals of {rows} rows", sizes)
    return table


def draw(results: list[Result], path: Path) -> None:
    """Draws the losses of the first seed."""
    figure = Figure(figsize=(4.5, 3.8), layout="constrained")
    ax = figure.subplots()
    lines = (("0.75", "-", 5), ("black", "--", 1.5), ("black", ":", 2.5))
    seed = [result for result in results if result.seed == 0]
    for result, (color, style, width) in zip(seed, itertools.cycle(lines)):
        updates, losses = zip(*result.losses, strict=True)
        look = {"color": color, "linestyle": style, "linewidth": width}
        ax.plot(updates, losses, label=result.policy, **look)
    ax.set(title="Loss on held-out text", xlabel="update", ylabel="nats per word")
    ax.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main(config: Config, console: Console | None = None) -> list[Result]:
    console = console or Console()
    updates = config.updates * (5 if config.full else 1)
    text = _text.split(_text.as_words(_text.read(), VOCABULARY), LENGTH)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        results = [
            train(policy, seed, config, text, updates, progress)
            for policy in config.policy
            for seed in range(config.seeds)
        ]
    console.print(training_table(results, config.policy, updates))

    # Of the 16-bit policies one is enough: the other needs the same bytes.
    policies = tuple(dict.fromkeys((config.policy[0], config.policy[-1])))
    name, model, length = (
        ("BERT-base", BERT_BASE, 128)
        if config.full
        else ("The small model", SMALL, LENGTH)
    )
    title = f"{name}, {MICRO_BATCHES} x {ROWS} rows of {length} words"
    console.print(memory_table(model, length, policies, title))
    if config.figure:
        draw(results, config.figure)
    return results


if __name__ == "__main__":
    main(tyro.cli(Config))
