"""What storing residuals in eight bits saves, costs, and does to gradients and losses.

Training steps of networks of many families, compiled for an H200 (extra ``aot``;
nothing runs): temporary memory, bytes and kernels in float32, under autocast, and with
residuals in eight bits. Beside them, computed on this machine on small networks of the
same families, how far gradients are from float32. With ``--train`` small models that
learn instead, three seeds each; two are those of ``examples/language_model.py`` and
``examples/masked_lm.py``.

    python -m benchmarks residuals --networks gpt     # added to what is saved
    python -m benchmarks residuals --train
"""

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import jaxmp
from jaxmp._residuals import eight_bits

from .counting import h200, results, steps, worth
from .counting.tables import show
from .machinery import count
from .networks import basic, learning
from .networks.families import FAMILIES, NAMES, SMALL

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))
import _bert
import _lstm
import _text

FORMS = {"bfloat16": None, "int8": "int8", "fp8": "fp8"}
# Beside what users do instead: `nn.remat` around each layer, and both.
CHECKPOINTED = {"checkpoint": "bfloat16", "checkpoint and int8": "int8"}
COUNTED = ("float32", "bfloat16", "int8", *CHECKPOINTED)


class Trained(NamedTuple):
    """A model that learns, and how fast."""

    task: Callable[[int, int], learning.Task]  # of a seed and the count of updates
    learning_rate: float


def characters(seed: int, updates: int) -> learning.Task:
    """Returns the LSTM of ``language_model.py``, with one worker's share of a batch."""
    rows, _ = _text.split(_text.as_characters(_text.read()), 33)
    chosen = np.random.default_rng(seed).integers(len(rows), size=(updates, 128))
    model, init = _lstm.make_model(len(_text.CHARACTERS), 32)

    def loss(params, _, rows):
        return learning.cross_entropy(model.apply(params, rows[:, :-1]), rows[:, 1:])

    params = init(jax.random.key(seed), rows[:1, :-1])
    return learning.Task(params, (), loss, rows[chosen])


def masked_words(seed: int, updates: int) -> learning.Task:
    """Returns the encoder of ``masked_lm.py``, with batches of 16 rows."""
    words = _text.as_words(_text.read(), _bert.VOCABULARY)
    rows, _ = _text.split(words, 64)
    rng = np.random.default_rng(seed)
    masked = [_bert.mask(rng, rng.choice(rows, 16)) for _ in range(updates)]
    batches = jax.tree.map(lambda *leaves: np.stack(leaves), *masked)

    def loss(params, _, batch):
        logits = _bert.SMALL.apply(params, batch.tokens, batch.positions)
        return learning.cross_entropy(logits, batch.targets)

    first = masked[0]
    params = _bert.init_small(jax.random.key(seed), first.tokens, first.positions)
    return learning.Task(params, (), loss, batches)


# The last two with the learning rates of the examples.
TRAINED = {
    "language model": Trained(learning.language_model, 2e-3),
    "cnn": Trained(learning.cnn, 2e-3),
    "language_model.py": Trained(characters, 3e-2),
    "masked_lm.py": Trained(masked_words, 3e-3),
}


@dataclasses.dataclass
class Options:
    """What to compile or to train, and where to save what is found."""

    networks: tuple[str, ...] = NAMES
    forms: tuple[str, ...] = COUNTED
    """Of the compiled steps. What is saved of the others stays."""
    seeds: int = 3
    bound: bool = False
    """Count what eight bits would cost if no maximum of a row had to be found."""
    train: bool = False
    models: tuple[str, ...] = tuple(TRAINED)
    """With ``--train``."""
    updates: int = 300
    output: pathlib.Path | None = None


def main(arguments: list[str]) -> None:
    """Prints a table for each network or model, and saves it."""
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks residuals")
    path = options.output or results.target("residuals")
    command = ["residuals", *arguments]
    if options.train:
        worth.check("model", options.models, TRAINED)
        for name in options.models:
            row = losses(name, options.updates, options.seeds)
            show(f"{name}, loss of the last updates", [row])
            title = f"{name}, trained"
            results.save(path, title, results.hardware(), command, [row])
        return
    h200.require("residuals")
    if options.bound:
        rows = list(without_maxima())
        show("one layer of a GPT", rows)
        title = "one layer of a GPT, without a maximum"
        results.save(path, title, h200.HARDWARE, command, rows)
        return
    worth.check("network", options.networks, FAMILIES)
    worth.check("form", options.forms, COUNTED)
    for name in options.networks:
        new = counts(name, options.forms)
        rows = results.update(path, name, h200.HARDWARE, command, new, "form")
        away = errors(name, options.seeds)
        show(name, table(rows, away))
        title = f"{name}, errors"
        results.save(path, title, results.hardware(), command, [away])


def counts(name: str, forms: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Compiles the training steps of a network and yields what was counted in each."""
    network = FAMILIES[name]
    for form in forms:
        with checkpointed(form in CHECKPOINTED):
            made = contestant(network, CHECKPOINTED.get(form, form))
            yield {"form": form} | count(made, network)


def without_maxima() -> Iterator[dict[str, Any]]:
    """Yields the counts of one layer, also with a scale that no maximum is read for."""

    def narrowed(x, kind):
        rows = jax.lax.round(x * 127, jax.lax.RoundingMethod.TO_NEAREST_EVEN)
        scale = jnp.full((1,) * x.ndim, 1 / 127, jnp.float32)
        return jax.lax.optimization_barrier((rows.astype(jnp.int8), scale))

    network = basic.gpt(16, layers=1, width=512, heads=8, vocabulary=512, length=512)
    parts = ("bytes", "kernels", "seconds", "temp")
    for form in ("bfloat16", "int8", "int8, without a maximum"):
        made = contestant(network, form.split(",")[0])
        with contextlib.ExitStack() as stack:
            if form not in FORMS:
                stack.enter_context(mock.patch.object(eight_bits, "narrowed", narrowed))
            counted = count(made, network)
        yield {"form": form} | {part: counted[part] for part in parts}


@contextlib.contextmanager
def checkpointed(is_on: bool) -> Iterator[None]:
    """Puts ``nn.remat`` around each layer of what is traced, or does nothing."""

    def again(self, layer, x, *rest):
        return nn.remat(lambda self, x: layer(self, x, *rest))(self, x)

    with mock.patch.object(basic.Model, "layer", again if is_on else basic.Model.layer):
        yield


def contestant(network: Any, form: str) -> steps.Contestant:
    """Returns a training step with Adam, in a form."""
    if form == "float32":
        return steps.contestant(form, network)
    dtype = jnp.dtype(jnp.bfloat16)
    made = steps.jaxmp_autocast(network, dtype, 1, residuals=FORMS[form])
    return steps.made(form, network, made)


def errors(name: str, seeds: int) -> dict[str, float]:
    """Returns how far gradients of a small network are from float32, in each form."""
    network = SMALL[name]
    grad = jax.value_and_grad(steps.loss_of(network.model.apply), has_aux=True)
    forms = {
        form: jaxmp.autocast(grad, "mixed_bfloat16", residuals=residuals)
        for form, residuals in FORMS.items()
    }
    for form, once in CHECKPOINTED.items():
        forms[form] = checkpointed(True)(forms[once])
    few, eight_bits.FEW = eight_bits.FEW, 16  # in a small network all arrays are small
    try:
        found = steps.errors_of(network, grad, forms, seeds)
    finally:
        eight_bits.FEW = few
    return {form: gradient for form, (_, gradient) in found.items()}


def table(rows: list[dict[str, Any]], away: dict[str, float]) -> list[dict[str, Any]]:
    """Returns the rows as shares of those of bfloat16 and of float32."""
    by_form = {row["form"]: row for row in rows}

    def share(row: dict[str, Any], of: str, what: str) -> str:
        return f"{row[what] / by_form[of][what]:.2f}" if of in by_form else ""

    return [
        {
            "form": row["form"],
            "temporary MiB": round(row["temp"] / 2**20),
            "of float32": share(row, "float32", "temp"),
            "of bfloat16": share(row, "bfloat16", "temp"),
            "bytes, of bfloat16": share(row, "bfloat16", "bytes"),
            "time, of bfloat16 (estimate)": share(row, "bfloat16", "seconds"),
            "gradient error": f"{away.get(row['form'], 0):.4f}",
            "of bfloat16's": f"{away.get(row['form'], 0) / away['bfloat16']:.2f}",
        }
        for row in rows
    ]


def losses(name: str, updates: int, seeds: int) -> dict[str, str]:
    """Trains a small model in each form, and returns its losses."""
    tasks = [TRAINED[name].task(seed, updates) for seed in range(seeds)]
    rate = TRAINED[name].learning_rate
    return {
        form: learning.spread(train(tasks, rate, residuals))
        for form, residuals in FORMS.items()
    }


def train(tasks: list[learning.Task], rate: float, residuals: Any) -> list[float]:
    """Returns the mean loss of the last updates of each seed."""
    tx, loss_fn = optax.adamw(rate), tasks[0].loss
    grad_fn = jaxmp.autocast(
        jax.value_and_grad(loss_fn), "mixed_bfloat16", residuals=residuals
    )

    def run(params, fixed, batches):
        def step(carry, batch):
            params, state = carry
            loss, grads = grad_fn(params, fixed, batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        return jax.lax.scan(step, (params, tx.init(params)), batches)[1]

    found = [jax.jit(run)(task.params, task.fixed, task.batches) for task in tasks]
    return [float(values[-learning.LAST :].mean()) for values in found]
