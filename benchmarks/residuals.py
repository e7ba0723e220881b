"""What storing residuals in eight bits saves, costs, and does to gradients and losses.

Training steps of networks of many families, compiled for an H200 (extra ``aot``;
nothing runs): temporary memory, bytes and kernels in float32, under autocast, and with
residuals in eight bits. Beside them, computed on this machine on small networks of the
same families, how far gradients are from float32. With ``--train`` small models that
learn instead, three seeds each.

    python -m benchmarks residuals --networks gpt     # added to what is saved
    python -m benchmarks residuals --train
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro

import jaxmp
from jaxmp._residuals import eight_bits

from . import moments
from .counting import h200, results, steps, worth
from .counting.tables import show
from .machinery import count
from .networks.families import FAMILIES, SMALL

FORMS = {"bfloat16": None, "int8": "int8", "fp8": "fp8"}
TRAINED = ("language model", "cnn")


@dataclasses.dataclass
class Options:
    """What to compile or to train, and where to save what is found."""

    networks: tuple[str, ...] = tuple(FAMILIES)
    forms: tuple[str, ...] = ("float32", "bfloat16", "int8")
    """Of the compiled steps."""
    seeds: int = 3
    train: bool = False
    updates: int = 400
    output: pathlib.Path | None = None


def main(arguments: list[str]) -> None:
    """Prints a table for each network or model, and saves it."""
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks residuals")
    path = options.output or results.target("residuals")
    command = ["residuals", *arguments]
    if options.train:
        rows = list(losses(options.updates, options.seeds))
        show("Loss of the last updates", rows)
        results.save(path, "training", results.hardware(), command, rows)
        return
    h200.require("residuals")
    worth.check("network", options.networks, FAMILIES)
    for name in options.networks:
        rows = list(counts(name, options.forms))
        away = errors(name, options.seeds)
        show(name, table(rows, away))
        results.save(path, name, h200.HARDWARE, command, rows)
        title = f"{name}, errors"
        results.save(path, title, results.hardware(), command, [away])


def counts(name: str, forms: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Compiles the training steps of a network and yields what was counted in each."""
    network = FAMILIES[name]
    for form in forms:
        yield {"form": form} | count(contestant(network, form), network)


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


def losses(updates: int, seeds: int) -> Iterator[dict[str, Any]]:
    """Trains small models and yields their losses, a row for each."""
    for name in TRAINED:
        tasks = [moments.MODELS[name](seed, updates) for seed in range(seeds)]
        row = {"model": name}
        for form, residuals in FORMS.items():
            row[form] = moments.spread(train(tasks, residuals))
            print(name, form, row[form], flush=True)
        yield row


def train(tasks: list[moments.Task], residuals: Any) -> list[float]:
    """Returns the mean loss of the last updates of each seed."""
    tx, loss_fn = optax.adamw(2e-3), tasks[0].loss
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
    return [float(values[-moments.LAST :].mean()) for values in found]
