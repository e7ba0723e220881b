"""What mixed precision saves in memory: a masked language model in the way of BERT.

A transformer encoder fills in words that were masked, trained on 256 rows of text an
update, as 32 micro-batches of 8. The same step runs in float32 and in mixed precision.
It learns the same; what a micro-batch leaves for its backward pass takes little more
than half of the bytes.

    python examples/masked_lm.py            # trains a small one, minutes on a CPU
    python examples/masked_lm.py --full     # longer, and counts the memory of BERT-base

The bytes come in two kinds. Residuals are what JAX keeps from the forward pass for the
backward pass; they can be counted anywhere. Peak memory is what the program compiled
for a GPU allocates; it needs a GPU, or its compiler alone (the extra `aot`, on Linux),
with which the step is compiled for an H200. (The memory of a program compiled for a CPU
says nothing: the CPU has no 16-bit arithmetic, and XLA adds float32 copies.)

With `--full`, the table that BERT's users know: the largest batch that fits in
`--gigabytes`, for sequences of 64 to 512 words.

References:
    Devlin et al., "BERT", NAACL 2019, https://arxiv.org/abs/1810.04805; the section
    "Out-of-memory issues" of https://github.com/google-research/bert.
"""

import dataclasses
import itertools
import math
import statistics
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import _text
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

import jaxmp

MICRO_BATCHES, ROWS = 32, 8  # of an update, and the rows of each
LENGTH = 64  # words in a row of the text that the small model learns
LENGTHS = 64, 128, 256, 384, 512  # for which the largest batch is looked for
MASKED = 0.15  # share of the words to fill in
H200 = Path(__file__).parents[1] / "benchmarks" / "h200.txtpb"


@dataclasses.dataclass
class Config:
    """Trains a masked language model, and counts bytes in float32 and mixed."""

    policy: tuple[str, ...] = ("float32", "mixed_bfloat16", "mixed_float16")
    """The policies to compare; the first is what the others are measured against."""
    seeds: int = 1
    """Runs of each policy."""
    full: bool = False
    """Train five times as long, and count the memory of BERT-base."""
    updates: int = 60
    """Of the quick form."""
    learning_rate: float = 3e-3
    gigabytes: float = 12.0
    """The memory that the largest batch must fit into."""
    figure: Path | None = None
    """Where to save the picture, as PNG."""


class Block(nn.Module):
    """Attention and a feed-forward network, each with its norm in front."""

    heads: int

    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x))
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y), None


class MaskedLM(nn.Module):
    """An encoder that tells which words stood at some positions."""

    vocabulary: int
    features: int
    heads: int
    layers: int

    @nn.compact
    def __call__(self, tokens, positions):
        words = nn.Embed(self.vocabulary, self.features)
        places = nn.Embed(512, self.features)
        x = words(tokens) + places(jnp.arange(tokens.shape[1]))
        # One block with stacked parameters: a twelfth of the compilation.
        blocks = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.layers,
        )
        x, _ = blocks(self.heads)(x, None)
        x = jnp.take_along_axis(x, positions[..., None], axis=1)
        return words.attend(nn.LayerNorm()(x))


VOCABULARY = 2000
SMALL = MaskedLM(VOCABULARY + 1, features=64, heads=4, layers=2)
init_small = jax.jit(SMALL.init)  # compiled once for all runs
BERT_BASE = MaskedLM(30522, features=768, heads=12, layers=12)


class Batch(NamedTuple):
    """Rows of text and what is to be filled in."""

    tokens: Any  # int32[rows, length], some of them masked
    positions: Any  # int32[rows, masked]
    targets: Any  # int32[rows, masked]


def mask(rng: np.random.Generator, rows: np.ndarray) -> Batch:
    """Masks 15% of each row: 80% of these by a token, 10% by a random word."""
    count = round(MASKED * rows.shape[1])
    positions = rng.random(rows.shape).argsort(axis=1)[:, :count].astype(np.int32)
    targets = np.take_along_axis(rows, positions, axis=1)
    lot = rng.random(targets.shape)
    shown = np.where(lot < 0.8, VOCABULARY, targets)
    shown = np.where(lot > 0.9, rng.integers(VOCABULARY, size=lot.shape), shown)
    tokens = rows.copy()
    np.put_along_axis(tokens, positions, shown, axis=1)
    return Batch(tokens, positions, targets)


def make_step(model: MaskedLM, policy: str, learning_rate: float, accum_steps: int):
    """Returns the optimizer, the loss and the training step."""
    tx = jaxmp.loss_scaling(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate)), policy
    )
    apply: Any = jaxmp.with_policy(model.apply, policy)

    def loss_fn(params, batch):
        logits = apply(params, batch.tokens, batch.positions)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        return losses.mean()  # of as many words in every micro-batch

    def train_step(params, opt_state, batch):
        loss, grads = jaxmp.value_and_grad(
            loss_fn,
            policy,
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
        params, opt_state, _ = step(params, opt_state, batch)
        if update % 20 == 0 or update == updates:
            losses.append((update, float(evaluate(params, test))))
            jaxmp.check_loss_scale(opt_state)
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
    report = jaxmp.audit(loss_fn)(compute, batch)
    return sum((report.residual_bytes or {}).values())


def find_gpu() -> tuple[Any, dict[str, Any]] | str:
    """Returns a GPU, or an H200 to compile for, with options; or why there is none."""
    try:
        return jax.devices("gpu")[0], {}
    except RuntimeError:
        pass
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=H200.read_text(), topology="1x1x1"
        )
    except Exception as error:  # what it raises is another thing in each JAX
        return f"no GPU, and no compiler for one ({str(error).splitlines()[0]})"
    # Without a GPU, no kernels can be timed.
    options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    return topology.devices[0], options


def peak_bytes(
    gpu: tuple[Any, dict[str, Any]],
    model: MaskedLM,
    policy: str,
    rows: int,
    length: int,
    accum_steps: int = 1,
) -> int:
    """Returns what the training step, compiled for a GPU, allocates there."""
    device, options = gpu
    tx, _, train_step = make_step(model, policy, 1e-4, accum_steps)
    params, batch = shapes(model, rows, length)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=SingleDeviceSharding(device)
        ),
        (params, jax.eval_shape(tx.init, params), batch),
    )
    lowered = jax.jit(train_step, donate_argnums=(0, 1)).lower(*args)
    memory: Any = lowered.compile(compiler_options=options).memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def largest_batch(peak, limit: float) -> int:
    """Returns the largest number of rows for which ``peak(rows) <= limit``."""
    known = {rows: peak(rows) for rows in (4, 8)}
    while True:
        fits = max((n for n in known if known[n] <= limit), default=0)
        breaks = min((n for n in known if known[n] > limit), default=math.inf)
        if breaks == fits + 1:
            return fits
        # Memory is nearly a line, so the two nearest points tell where to look.
        a, b = sorted(known, key=lambda n: abs(known[n] - limit))[:2]
        guess = a + int((limit - known[a]) * (b - a) / (known[b] - known[a]))
        rows = int(min(max(guess, fits + 1), breaks - 1))
        known[rows] = peak(rows)


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
    states = [[jaxmp.get_loss_scale_state(r.opt_state) for r in same] for same in runs]
    scales = [f"2^{math.log2(same[0].loss_scale):.0f}" for same in states]
    table.add_row("Loss scale at the end", *scales)
    table.add_row(
        "Skipped", *(str(sum(int(s.skipped) for s in same)) for same in states)
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


def memory_table(model: MaskedLM, length: int, policies, gpu, title: str) -> Table:
    """Counts the bytes of an update, in micro-batches and at once."""
    table = make_table(title, policies)
    whole = MICRO_BATCHES * ROWS
    for name, rows in (f"{ROWS} rows", ROWS), (f"{whole} rows", whole):
        sizes = [residual_bytes(model, policy, rows, length) for policy in policies]
        add_bytes(table, f"Residuals of {name}", sizes)
    if gpu:
        for name, steps in ("in micro-batches", MICRO_BATCHES), ("at once", 1):
            sizes = [peak_bytes(gpu, model, p, whole, length, steps) for p in policies]
            add_bytes(table, f"Peak of the update, {name}", sizes)
    return table


def largest_batches(policies, gpu, limit: float, show) -> dict[str, list[int]]:
    """Returns for each policy the largest batches of BERT-base, by length."""
    batches = {policy: [] for policy in policies}
    for length in show(LENGTHS):
        for policy in policies:
            peak = partial(peak_bytes, gpu, BERT_BASE, policy, length=length)
            batches[policy].append(largest_batch(peak, limit))
    return batches


def draw(results: list[Result], batches, gigabytes: float, path: Path) -> None:
    """Draws the losses of the first seed, and the largest batches where counted."""
    figure = Figure(figsize=(9 if batches else 5, 3.8), layout="constrained")
    left, *right = np.ravel(figure.subplots(1, 2 if batches else 1))
    lines = (("0.75", "-", 5), ("black", "--", 1.5), ("black", ":", 2.5))
    seed = [result for result in results if result.seed == 0]
    for result, (color, style, width) in zip(seed, itertools.cycle(lines)):
        updates, losses = zip(*result.losses, strict=True)
        look = {"color": color, "linestyle": style, "linewidth": width}
        left.plot(updates, losses, label=result.policy, **look)
    left.set(title="Loss on held-out text", xlabel="update", ylabel="nats per word")
    left.legend(frameon=False)
    for ax in right:
        for i, (policy, rows) in enumerate(batches.items()):
            places = np.arange(len(LENGTHS)) + (i - 0.5) * 0.4
            look = {"color": ("0.75", "#4878a8")[i], "hatch": ("", "//")[i]}
            ax.bar_label(ax.bar(places, rows, 0.4, label=policy, **look), fontsize=8)
        ax.set_xticks(range(len(LENGTHS)), map(str, LENGTHS))
        ax.set(title=f"Largest batch of BERT-base in {gigabytes:g} GB")
        ax.set(xlabel="words in a row", ylabel="rows")
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
    gpu = find_gpu()
    if isinstance(gpu, str):
        console.print(f"The memory of a GPU is not counted: {gpu}.")
        gpu = None
    else:
        console.print(f"Memory as compiled for: {gpu[0].device_kind}")
    if config.full:
        title = "BERT-base, 32 x 8 rows of 128 words"
        console.print(memory_table(BERT_BASE, 128, policies, gpu, title))
    else:
        title = f"The small model, 32 x 8 rows of {LENGTH} words"
        console.print(memory_table(SMALL, LENGTH, policies, gpu, title))
    batches = {}
    if config.full and gpu:
        show = partial(track, console=console, disable=not console.is_terminal)
        batches = largest_batches(policies, gpu, config.gigabytes * 1e9, show)
        title = f"The largest batch of BERT-base in {config.gigabytes:g} GB"
        table = make_table(title, policies)
        for length, *rows in zip(LENGTHS, *batches.values(), strict=True):
            table.add_row(f"{length} words", *map(str, rows))
        console.print(table)
    if config.figure:
        draw(results, batches, config.gigabytes, config.figure)
    return results


if __name__ == "__main__":
    main(tyro.cli(Config))
