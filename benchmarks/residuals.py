"""What storing residuals in eight bits saves, costs, and does to gradients and losses.

Training steps of networks of many families, compiled for an H200 (extra ``aot``;
nothing runs): temporary memory, bytes and kernels in float32, under autocast, with
residuals in eight bits, with ``nn.remat`` around each layer, and with both. Beside
them, computed on this machine on small networks of the same families, how far gradients
are from float32. With ``--train`` small models that learn instead, three seeds each.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import optax

import jaxmp
from jaxmp._residuals import eight_bits

from .counting import named, results, steps, targets
from .counting.results import Table, by_form, ratio
from .counting.steps import AUTOCAST, BOTH, CHECKPOINT, INT8, contestant
from .machinery import count
from .networks import learning
from .networks.families import FAMILIES, NAMES, SMALL

COUNTED = "float32", AUTOCAST, INT8, CHECKPOINT, BOTH
STORED = {"bfloat16": None, "int8": "int8", "fp8": "fp8"}
SEEDS = 3
LAST = 50  # updates whose loss is taken


class Trained(NamedTuple):
    """A model that learns, how fast and how long."""

    task: Callable[[int, int], learning.Task]  # of a seed and the count of updates
    learning_rate: float
    updates: int


TRAINED = {
    "cnn": Trained(learning.digits, 2e-3, 300),
    "language_model.py": Trained(learning.characters, 3e-2, 120),
    "masked_lm.py": Trained(learning.masked_words, 3e-3, 120),
}

SAVED = """\
## What storing residuals in 8 bits saves

The temporary memory and the memory traffic of a training step with `residuals="int8"`,
with `nn.remat` around each layer, and with both, relative to autocast in bfloat16. And,
on small networks of the same families, the error of the gradients, which is that of
autocast times this.
"""

LOSSES = """\
The loss of small models with three seeds, over the last 50 updates:
"""


def main(*, networks: tuple[str, ...] = NAMES, train: bool = False) -> None:
    """Counts what residuals in eight bits save.

    Args:
        networks: Which.
        train: Train the small models instead.
    """
    named.check("network", networks, FAMILIES)
    if train:
        hardware = results.hardware()
        results.update("residuals", "trained", hardware, losses(), "model")
        return
    targets.require("residuals")
    away = ({"network": name} | errors(name) for name in networks)
    results.update("residuals", "errors", results.hardware(), away, "network")
    new, by = (row for name in networks for row in counts(name)), ("network", "form")
    results.update("residuals", "counted", targets.hardware(), new, *by)


def counts(name: str) -> Iterator[dict[str, Any]]:
    """Compiles the training steps of a network and yields what was counted in each."""
    for form in COUNTED:
        made = contestant(form, FAMILIES[name], dtype=jnp.bfloat16)
        yield {"network": name, "form": form} | count(made, FAMILIES[name])


def errors(name: str) -> dict[str, float]:
    """Returns how far gradients of a small network are from float32, in each form."""
    network = SMALL[name]
    exact, again = (
        jax.value_and_grad(steps.loss_of(model.apply), has_aux=True)
        for model in (network.model, network.model.clone(again=True))
    )
    forms = {
        AUTOCAST: jaxmp.autocast(exact, "mixed_bfloat16"),
        INT8: jaxmp.autocast(exact, "mixed_bfloat16", residuals="int8"),
        CHECKPOINT: jaxmp.autocast(again, "mixed_bfloat16"),
        BOTH: jaxmp.autocast(again, "mixed_bfloat16", residuals="int8"),
    }
    # In a small network all arrays are small.
    with mock.patch.object(eight_bits, "FEW", 16):
        found = steps.errors_of(network, exact, forms, SEEDS)
    return {form: found[f"gradient, {form}"] for form in forms}


def losses() -> Iterator[dict[str, str]]:
    """Trains small models in each form, and yields their losses."""
    for name, (task, rate, updates) in TRAINED.items():
        tasks = [task(seed, updates) for seed in range(SEEDS)]
        yield {"model": name} | {
            form: f"{statistics.mean(x):.3f} ± {statistics.stdev(x):.3f}"
            for form, residuals in STORED.items()
            for x in [train(tasks, rate, residuals)]
        }


def train(tasks: list[learning.Task], rate: float, residuals: Any) -> list[float]:
    """Returns the mean loss of the last updates of each seed."""
    tx, loss_fn = optax.adamw(rate), tasks[0].loss
    grad_fn = jax.value_and_grad(loss_fn)
    grad_fn = jaxmp.autocast(grad_fn, "mixed_bfloat16", residuals=residuals)

    def run(params, batches):
        def step(carry, batch):
            params, state = carry
            loss, grads = grad_fn(params, batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        return jax.lax.scan(step, (params, tx.init(params)), batches)[1]

    found = [jax.jit(run)(task.params, task.batches) for task in tasks]
    return [float(values[-LAST:].mean()) for values in found]


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yields what is saved in each network, and what models learn with it."""
    if counted := found.get("counted"):
        away = found.get("errors", {"rows": []})
        rows = sorted(saved(counted["rows"], away["rows"]), key=lambda x: x["memory"])
        yield Table(SAVED, rows, [counted])
    if trained := found.get("trained"):
        yield Table(
            LOSSES,
            [{"": x["model"]} | {y: x[y] for y in STORED} for x in trained["rows"]],
            [trained],
        )


def saved(
    counted: list[dict[str, Any]], away: list[dict[str, Any]]
) -> Iterator[dict[str, str]]:
    """Yields memory, bytes and errors of each network as shares of autocast's."""
    errors = {row["network"]: row for row in away}
    for name, forms in by_form(counted).items():
        plain = forms[AUTOCAST]
        cells = {"": name}
        for part, word in (("temp", "memory"), ("bytes", "traffic")):
            for form, column in (
                (INT8, word),
                (CHECKPOINT, f"{word}, `nn.remat`"),
                (BOTH, f"{word}, both"),
            ):
                cells[column] = ratio(forms[form][part], plain[part])
        cells["memory relative to float32"] = ratio(
            forms[INT8]["temp"], forms["float32"]["temp"]
        )
        off = errors.get(name, {})
        for form, column in ((INT8, "error"), (BOTH, "error, both")):
            cells[column] = ratio(off.get(form), off.get(AUTOCAST))
        yield cells
