"""Five ways in which a float16 run breaks, and the report that names the line.

    python examples/fault.py

A small transformer reads English text in float16. It is sound; then it gets, one after
the other, a mask of -1e9, attention without its scale, an RMSNorm written by hand, a
loss that is divided by a large count, and a batch with NaN in it. `jaxmp.find_overflow`
is given each loss as it stands.
"""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import _text
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.text import Text

import jaxmp

Fault = Literal["none", "mask", "logits", "norm", "count", "data"]
FAULTS: tuple[Fault, ...] = ("none", "mask", "logits", "norm", "count", "data")
TOKENS_OF_AN_EPOCH = 2**26


@dataclasses.dataclass
class Config:
    """Breaks a float16 transformer in five ways, and prints the reports."""

    faults: tuple[Fault, ...] = FAULTS
    width: int = 32
    length: int = 16
    rows: int = 4
    figure: Path | None = None
    """Where to save a picture of the last report, as PNG."""


class Attention(nn.Module):
    """Causal attention with one head; of each row the first token is padding."""

    fault: Fault

    @nn.compact
    def __call__(self, x):
        q, k, v = (nn.Dense(x.shape[-1], name=name)(x) for name in "qkv")
        seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool)).at[:, 0].set(False)
        if self.fault == "logits":
            scores = (300 * q) @ (300 * k).mT  # no 1/sqrt(width), and grown weights
        else:
            scores = (q * x.shape[-1] ** -0.5) @ k.mT
        if self.fault == "mask":
            scores = jnp.where(seen, scores, -1e9)  # -Inf, and row 0 sees nothing
        else:
            scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
        return nn.softmax(scores) @ v


class RMSNorm(nn.Module):
    """Root mean square normalisation."""

    fault: Fault

    @nn.compact
    def __call__(self, x):
        wide = x if self.fault == "norm" else x.astype(jnp.float32)
        square = jnp.mean(wide * wide, axis=-1, keepdims=True)  # in 16 bits, if faulty
        return (wide * jax.lax.rsqrt(square + 1e-6)).astype(x.dtype)


class Transformer(nn.Module):
    """Predicts the next character. Its residual stream is large, as it often is."""

    width: int
    fault: Fault

    @nn.compact
    def __call__(self, tokens):
        x = 2000 * nn.Embed(len(_text.CHARACTERS), self.width)(tokens)
        x = x + Attention(self.fault, name="attention")(RMSNorm(self.fault)(x))
        return nn.Dense(len(_text.CHARACTERS), name="head")(RMSNorm(self.fault)(x))


def batch(config: Config, fault: Fault) -> dict[str, np.ndarray]:
    """Returns rows of text, and a weight for each."""
    tokens = _text.as_characters(_text.read())
    size = config.rows * (config.length + 1)
    weights = np.ones(config.rows, np.float32)
    if fault == "data":
        weights[-1] = np.nan
    return {"tokens": tokens[:size].reshape(config.rows, -1), "weights": weights}


def report(config: Config, fault: Fault) -> jaxmp.OverflowReport:
    """Searches the gradient of a loss where the fault is small, else the loss."""
    model, data = Transformer(config.width, fault), batch(config, fault)
    init = jax.jit(model.init)
    params = init(jax.random.key(0), data["tokens"][:, :-1])
    apply: Any = jaxmp.with_policy(model.apply, "mixed_float16")

    def loss(params, batch):
        logits = apply(params, batch["tokens"][:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["tokens"][:, 1:]
        )
        total = (losses * batch["weights"][:, None]).sum()
        return total / (TOKENS_OF_AN_EPOCH if fault == "count" else losses.size)

    fun = jax.grad(loss) if fault == "count" else loss
    return jaxmp.find_overflow(fun)(params, data)


def main(config: Config, console: Console | None = None) -> None:
    """Prints a report for each fault."""
    console = console or Console()
    found = None
    for fault in config.faults:
        found = report(config, fault)
        console.rule(f"[bold]{fault}")
        console.print(Text(str(found)), soft_wrap=True)
    if config.figure and found is not None:
        import jaxmp.plots

        figure: Any = jaxmp.plots.overflow(found).figure
        figure.savefig(config.figure, dpi=100)


if __name__ == "__main__":
    main(tyro.cli(Config))
