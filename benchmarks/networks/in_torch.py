"""GPT and ResNet in PyTorch, trained with ``torch.amp`` under ``torch.compile``.

Those of :mod:`benchmarks.networks.basic`, with what PyTorch recommends: fused Adam,
channels last for images, and ``GradScaler`` for float16. "fused" attention is PyTorch's
own kernel, which does not write the matrix of weights to memory; "written" attention
does the same arithmetic as the JAX models.

    python -m benchmarks.networks.in_torch gpt-160m resnet-50

prints a row of JSON for each. ``python -m benchmarks gpu`` starts it.
"""

import gc
import itertools
import json
import math
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

from ..counting import timing
from ..counting.compiled import MIB, first_line
from . import basic as networks

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

    def __init__(self, model: networks.GPT, attention):
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


class Residual(nn.Module):
    """The block of ResNet-18, or with ``bottleneck`` that of ResNet-50."""

    def __init__(self, inputs, features, strides, bottleneck):
        """Takes the numbers of channels that come in and that it works with."""
        super().__init__()
        out = 4 * features if bottleneck else features
        shapes = [(inputs, out, 3, strides), (out, out, 3, 1)]
        if bottleneck:
            shapes = [(inputs, features, 1, 1), (features, features, 3, strides)]
            shapes.append((features, out, 1, 1))
        layers = [[*convolution(*shape), nn.ReLU()] for shape in shapes]
        self.body = nn.Sequential(*itertools.chain(*layers))[:-1]
        nn.init.zeros_(self.body[-1].weight)
        changes = inputs != out or strides != 1
        self.skip = (
            nn.Sequential(*convolution(inputs, out, 1, strides))
            if changes
            else nn.Identity()
        )

    def forward(self, x):
        """Maps images to images."""
        return F.relu(self.body(x) + self.skip(x))


class ResNet(nn.Sequential):
    """A residual network for images of ImageNet's kind, batch normalised."""

    def __init__(self, model: networks.ResNet):
        """Takes the sizes from the model in JAX."""
        layers = [*convolution(3, model.width, 7, 2), nn.ReLU()]
        layers.append(nn.MaxPool2d(3, 2, padding=1))
        channels = model.width
        for stage, blocks in enumerate(model.stages):
            for block in range(blocks):
                strides = 2 if stage > 0 and block == 0 else 1
                features = model.width * 2**stage
                layers.append(Residual(channels, features, strides, model.bottleneck))
                channels = 4 * features if model.bottleneck else features
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        super().__init__(*layers, nn.Linear(channels, model.classes))


def convolution(inputs, outputs, size, strides):
    """Returns a convolution and its normalisation."""
    conv = nn.Conv2d(inputs, outputs, size, strides, padding=size // 2, bias=False)
    return conv, nn.BatchNorm2d(outputs)


class Setting(NamedTuple):
    """What is trained, and how."""

    network: str
    dtype: str
    compiled: bool
    fused: bool = False  # attention
    tf32: bool = False


def settings(names: list[str], tiny: bool) -> list[Setting]:
    """Returns what to measure of the networks that are here."""
    # To compile takes a C++ compiler on a CPU.
    gpt = Setting("gpt-160m", "bfloat16", compiled=not tiny)
    resnet = gpt._replace(network="resnet-50")
    every = [gpt._replace(fused=True), gpt, resnet]
    every += [x._replace(dtype="float32", tf32=True) for x in (gpt, resnet)]
    return [x for x in every if x.network in names]


def measure(setting: Setting, tiny: bool) -> dict[str, Any]:
    """Times a training step."""
    torch.backends.cuda.matmul.allow_tf32 = setting.tf32
    torch.backends.cudnn.allow_tf32 = setting.tf32
    torch.backends.cudnn.benchmark = True
    torch.compiler.reset()  # or it gives up compiling after a few models
    gc.collect()  # the model before
    step = training_step(setting, tiny)

    for _ in range(1 if tiny else 3):
        step()
    if CUDA:  # without what cuDNN has tried out
        torch.cuda.reset_peak_memory_stats()

    def wait(_):
        if CUDA:
            torch.cuda.synchronize()

    effort = {"seconds": 0.0, "rounds": 2} if tiny else {"seconds": 0.2, "rounds": 7}
    times = 1e3 * timing.of_calls(step, wait, **effort)
    peak = torch.cuda.max_memory_allocated() / MIB if CUDA else None
    return setting._asdict() | {"ms": timing.spread(times), "peak MiB": peak}


def training_step(setting: Setting, tiny: bool) -> Callable[[], None]:
    """Returns a function that trains on the same batch whenever it is called."""
    name = setting.network
    network = networks.TINY[name.split("-")[0]] if tiny else networks.NETWORKS[name]
    x, y = (torch.from_numpy(part).to(DEVICE) for part in network.batch())
    with DEVICE:
        if isinstance(network.model, networks.GPT):
            attention = fused_attention if setting.fused else written_attention
            model = GPT(network.model, attention)
        else:
            assert isinstance(network.model, networks.ResNet)
            model = ResNet(network.model).to(memory_format=torch.channels_last)
            x = x.permute(0, 3, 1, 2)  # in memory still channels last
    y = y.long()
    dtype = getattr(torch, setting.dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=CUDA)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=dtype == torch.float16)

    def loss_of(x, y):
        logits = model(x)
        return F.cross_entropy(logits.flatten(0, -2).float(), y.flatten())

    if setting.compiled:
        loss_of = torch.compile(loss_of)

    def step():
        optimizer.zero_grad()
        enabled = dtype != torch.float32
        with torch.autocast(DEVICE.type, dtype if enabled else None, enabled=enabled):
            loss = loss_of(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


if __name__ == "__main__":
    names = [x for x in sys.argv[1:] if x != "--tiny"]
    tiny = "--tiny" in sys.argv
    if not (CUDA or tiny):
        raise SystemExit("PyTorch finds no NVIDIA GPU.")
    for setting in settings(names, tiny):
        try:
            print(json.dumps(measure(setting, tiny)), flush=True)
        except Exception as error:  # out of memory, or no compiler
            traceback.print_exc()
            print(f"{setting}: {first_line(error)}", file=sys.stderr)
