"""Fine-tunes by reinforcement in float16, where sampler and trainer agree.

    python examples/reinforce.py

A small transformer writes rows of tokens and is rewarded for each that counts on from
the one before. The loss divides the probability of a token by the one that the sampler
gave it. The two are different programs, which round differently even in one precision,
so that the ratio is not 1 before anything has been learned. In bfloat16 it is some
seven times as far from 1 as in float16: see Qi et al., "Defeating the
Training-Inference Mismatch via FP16", 2025, https://arxiv.org/abs/2510.26788. With the
last matmul in float32 it is 1 here. `jaxmp.parity` measures that for any two functions.

Only probabilities need the digits of float16. Their gradients are computed in bfloat16,
which has the range of float32, so that there is no loss scale and no skipped step.
"""

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import tyro
from rich.console import Console
from rich.table import Table

import jaxmp

TOKENS = 32
HEAD = ("LM/head",)  # one matmul, whose digits are those of the probabilities
PRECISIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bfloat16": ("mixed_bfloat16", ()),
    "bfloat16, float32 head": ("mixed_bfloat16", HEAD),
    "float16": ("mixed_float16_bfloat16", ()),
    "float16, float32 head": ("mixed_float16_bfloat16", HEAD),
}


@dataclasses.dataclass
class Config:
    """Measures the precisions against float32, and trains in float16."""

    updates: int = 40
    rows: int = 64
    length: int = 16
    width: int = 64
    learning_rate: float = 3e-3
    band: float = 0.01
    """Ratios of probabilities between 1 - band and 1 + band are inside."""


class LM(nn.Module):
    """A causal transformer of two blocks."""

    width: int

    @nn.compact
    def __call__(self, tokens):
        mask = nn.make_causal_mask(tokens)
        shape = (tokens.shape[1], self.width)
        position = self.param("position", nn.initializers.normal(0.5), shape)
        x = nn.Embed(TOKENS, self.width)(tokens) + position
        for _ in range(2):
            x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=mask)
            h = nn.Dense(4 * self.width)(nn.LayerNorm()(x))
            x = x + nn.Dense(self.width)(nn.gelu(h))
        return nn.Dense(TOKENS, name="head")(nn.LayerNorm()(x))


def log_probs(model: LM, params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the log-probability of each token but the first, in nats."""
    logits: Any = model.apply(params, tokens[:, :-1])
    logits = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]


def sample(model: LM, rows: int, length: int, params: Any, key: jax.Array):
    """Returns rows of tokens, and the log-probability that each was drawn with."""

    def draw(tokens, step):
        place, key = step
        logits: Any = model.apply(params, tokens[:, :-1])
        logits = jax.nn.log_softmax(logits[:, place])
        drawn = jax.random.categorical(key, logits)
        chosen = jnp.take_along_axis(logits, drawn[:, None], axis=-1)[:, 0]
        return tokens.at[:, place + 1].set(drawn), chosen

    first = jnp.zeros((rows, length + 1), jnp.int32).at[:, 0].set(jnp.arange(rows) % 7)
    steps = jnp.arange(length), jax.random.split(key, length)
    tokens, chosen = jax.lax.scan(draw, first, steps)
    return tokens, chosen.T


def reward_of(tokens: jax.Array) -> jax.Array:
    """Returns 1 for each token that is one more than the token before."""
    return (tokens[:, 1:] == (tokens[:, :-1] + 1) % TOKENS).astype(jnp.float32)


def train(model: LM, params: Any, config: Config):
    """Yields the reward of each update."""
    policy, paths = PRECISIONS["float16, float32 head"]
    narrow = partial(jaxmp.autocast, policy=policy, float32_paths=paths)
    tx = optax.adam(config.learning_rate)
    draw = jax.jit(narrow(partial(sample, model, config.rows, config.length)))

    def loss_fn(params, tokens, old, advantage):
        ratio = jnp.exp(log_probs(model, params, tokens) - old)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        return -jnp.minimum(ratio * advantage, clipped * advantage).mean()

    @jax.jit
    def update(params, opt_state, tokens, old):
        reward = reward_of(tokens)
        advantage = reward - reward.mean(0)
        for _ in range(2):
            grad_fn = narrow(jaxmp.grad(loss_fn, loss_scale=1.0))
            grads = grad_fn(params, tokens, old, advantage)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        return params, opt_state, reward.mean()

    opt_state = tx.init(params)
    for key in jax.random.split(jax.random.key(2), config.updates):
        tokens, old = draw(params, key)
        params, opt_state, reward = update(params, opt_state, tokens, old)
        yield float(reward)


def main(config: Config, console: Console | None = None) -> tuple[dict, list[float]]:
    """Prints a table of precisions and what training has brought, and returns both."""
    console = console or Console()
    model = LM(config.width)
    tokens = jnp.zeros((config.rows, config.length + 1), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), tokens[:, :-1])
    draw = jax.jit(partial(sample, model, config.rows, config.length))
    tokens, _ = draw(params, jax.random.key(1))
    exact = partial(log_probs, model)
    options: Any = {"log_probs": True, "band": config.band}
    outside = f"outside {config.band:.0%}"
    table = Table("against float32", "RMS", "largest", outside, "sampler, RMS")
    found = {}
    for name, (policy, paths) in PRECISIONS.items():
        rounded = jaxmp.autocast(exact, policy, float32_paths=paths)
        report = jaxmp.parity(exact, rounded, **options)(params, tokens)
        (found[name],) = report.outputs
        # The sampler's own log-probabilities, against the trainer's in one precision.
        drawing = partial(sample, model, config.rows, config.length)
        drawn = jax.jit(jaxmp.autocast(drawing, policy, float32_paths=paths))
        own, old = drawn(params, jax.random.key(1))
        report = jaxmp.parity({"result": old}, rounded, **options)(params, own)
        (sampler,) = report.outputs
        x = found[name]
        shown = f"{x.rms:.1e}", f"{x.largest:.1e}", f"{x.outside:.1%}"
        table.add_row(name, *shown, f"{sampler.rms:.1e}")
    console.print(table)
    rewards = list(train(model, params, config))
    console.print(
        f"Reward in float16: {rewards[0]:.2f} at first, {rewards[-1]:.2f} now, after "
        f"{2 * config.updates} steps without a loss scale."
    )
    return found, rewards


if __name__ == "__main__":
    main(tyro.cli(Config))
