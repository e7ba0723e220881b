"""GPT in PyTorch, trained with ``torch.amp`` under ``torch.compile`` in bfloat16.

That of :mod:`benchmarks.networks.basic`, with fused Adam, as PyTorch recommends.
"fused" attention is PyTorch's own kernel, which does not write the matrix of weights to
memory; "written" attention does the same arithmetic as the JAX model.

    python -m benchmarks.networks.in_torch

prints a row of JSON for each. ``python -m benchmarks gpu`` starts it.
"""

import gc
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

from ..counting import timing
from . import basic

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def written_attention(q, k, v):
    """Computes causal attention over ``[batch, heads, length, size]``."""
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    weights = scores.float().masked_fill(~seen, -math.inf).softmax(-1)
    return weights.to(q.dtype) @ v


def fused_attention(q, k, v):
    """Computes the same in one kernel."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """A transformer layer with its norms first."""

    def __init__(self, width, heads, attention):
        """Takes the width, the number of heads and the function of attention."""
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        """Maps ``[batch, length, width]`` to the same."""
        y = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = y.permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))
        y = F.gelu(self.up(self.norms[1](x)), approximate="tanh")
        return x + self.down(y)


class GPT(nn.Module):
    """A decoder in the shape of GPT-2, its head not tied to its embedding."""

    def __init__(self, model: basic.GPT, attention):
        """Takes the sizes from the model in JAX."""
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.width)
        self.places = nn.Embedding(model.length, model.width)
        self.blocks = nn.Sequential(
            *(Block(model.width, model.heads, attention) for _ in range(model.layers))
        )
        self.norm = nn.LayerNorm(model.width, eps=1e-6)
        self.head = nn.Linear(model.width, model.vocabulary, bias=False)

    def forward(self, tokens):
        """Maps ``[batch, length]`` tokens to logits."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        return self.head(self.norm(self.blocks(x)))


def training_step(attention: Callable, tiny: bool) -> Callable[[], None]:
    """Returns a function that trains on the same batch whenever it is called."""
    network = basic.TINY["gpt"] if tiny else basic.NETWORKS["gpt-160m"]
    x, y = (torch.from_numpy(part).to(DEVICE) for part in network.batch())
    assert isinstance(network.model, basic.GPT)
    with DEVICE:
        model = GPT(network.model, attention)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=CUDA)

    def loss_of(x, y):
        return F.cross_entropy(model(x).flatten(0, -2).float(), y.long().flatten())

    if not tiny:  # to compile takes a C++ compiler on a CPU
        loss_of = torch.compile(loss_of)

    def step():
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, torch.bfloat16):
            loss = loss_of(x, y)
        loss.backward()
        optimizer.step()

    return step


def measure(attention: Callable, tiny: bool) -> dict[str, Any]:
    """Times a training step."""
    torch.compiler.reset()
    gc.collect()  # the model before
    step = training_step(attention, tiny)

    def wait(_):
        if CUDA:
            torch.cuda.synchronize()

    for _ in range(1 if tiny else 3):
        step()
    if CUDA:  # without what it has tried out
        torch.cuda.reset_peak_memory_stats()
    effort = {"seconds": 0.0, "rounds": 2} if tiny else {"seconds": 0.2, "rounds": 7}
    times = 1e3 * timing.of_calls(step, wait, **effort)
    return {
        "network": "gpt-160m",
        "fused": attention is fused_attention,
        "ms": timing.spread(times),
        "peak MiB": torch.cuda.max_memory_allocated() / 2**20 if CUDA else None,
    }


if __name__ == "__main__":
    if not (CUDA or "--tiny" in sys.argv):
        raise SystemExit("PyTorch finds no NVIDIA GPU.")
    for attention in (fused_attention, written_attention):
        print(json.dumps(measure(attention, "--tiny" in sys.argv)), flush=True)
