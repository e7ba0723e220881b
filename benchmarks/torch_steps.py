"""The five models in PyTorch, trained with ``torch.amp``, eager and compiled.

Those of :mod:`benchmarks.networks.basic`, with what PyTorch recommends: fused Adam,
channels last for images, and ``GradScaler`` for float16. "fused" attention is PyTorch's
own kernel, which does not write the matrix of weights to memory; "written" attention
does the same arithmetic as the JAX models.
"""

import dataclasses
import gc
import itertools
import math
import pathlib
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
import tyro
from torch import nn  # pyright: ignore[reportMissingImports]

from .counting import results, timing
from .counting.compiled import MIB, first_line
from .counting.tables import show
from .counting.timing import spread
from .networks import basic as networks

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


class MLP(nn.Sequential):
    """Dense layers of one width."""

    def __init__(self, model: networks.MLP, features: int):
        """Takes the sizes from the model in JAX, and that of the vectors."""
        widths = [features] + [model.width] * model.layers
        pairs = itertools.pairwise(widths)
        layers = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())]
        super().__init__(*layers, nn.Linear(widths[-1], model.classes))


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


@dataclasses.dataclass
class Options:
    """How long to measure, and where to save it."""

    tiny: bool = False
    """Try it out, on a CPU too."""
    seconds: float = 150.0
    """When to stop."""
    output: pathlib.Path | None = None
    """A file of JSON."""


def main(arguments: list[str]) -> None:
    """Times the training steps, prints a table and saves it."""
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks torch_steps")
    if not (CUDA or options.tiny):
        raise SystemExit("torch_steps needs an NVIDIA GPU, or try `--tiny`.")
    until = time.monotonic() + options.seconds
    rows: dict[str, list] = {"torch": [], "left out": []}
    hardware = torch.cuda.get_device_name() if CUDA else "CPU"
    command = ["torch_steps", *arguments]
    for setting in settings(options.tiny):
        over = time.monotonic() > until
        if over:
            line = f"torch, {setting} and those after it: left out, the time is over"
            rows["left out"].append(line)
        else:
            try:
                rows["torch"].append(measure(setting, options.tiny))
            except Exception as error:  # out of memory, or no compiler
                traceback.print_exc()
                rows["left out"].append(f"torch, {setting}: {first_line(error)}")
        results.save(
            options.output or results.target("torch"), hardware, hardware, command, rows
        )
        if over:
            break
    show("torch", rows["torch"])
    print(*rows["left out"], sep="\n")


class Setting(NamedTuple):
    """What is trained, and how."""

    network: str
    dtype: str
    compiled: bool
    fused: bool = False  # attention
    tf32: bool = False


def settings(tiny: bool) -> Iterator[Setting]:
    """Yields settings, the eager ones first: to compile a model takes a minute."""
    names = ("gpt-160m", "resnet-50", "mlp", "gpt-12m", "resnet-18")
    dtypes = (("float16", False), ("float32", False), ("float32", True))
    # On a CPU, compiling takes a C++ compiler too.
    for compiled in (False,) if tiny else (False, True):
        for dtype, tf32 in (*dtypes, ("bfloat16", False)):
            for network in networks.TINY if tiny else names:
                yield Setting(network, dtype, compiled, tf32=tf32)
                if network.startswith("gpt") and dtype == "float16":
                    yield Setting(network, dtype, compiled, fused=True)


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
    return setting._asdict() | {"ms": spread(times), "peak MiB": peak}


def training_step(setting: Setting, tiny: bool) -> Callable[[], None]:
    """Returns a function that trains on the same batch whenever it is called."""
    network = (networks.TINY if tiny else networks.NETWORKS)[setting.network]
    x, y = (torch.from_numpy(part).to(DEVICE) for part in network.batch())
    with DEVICE:
        if isinstance(network.model, networks.GPT):
            attention = fused_attention if setting.fused else written_attention
            model = GPT(network.model, attention)
        elif isinstance(network.model, networks.MLP):
            model = MLP(network.model, x.shape[-1])
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
