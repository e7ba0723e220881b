"""Stores what the modules of a small GPT in PyTorch compute, for `test_parity.py`.

    python tests/diagnosis/stored/gpt.py

It takes PyTorch, which the tests do not: 2.13.0 wrote the file beside this one.
"""

import math
import pathlib

import numpy as np
import torch
from torch import nn

SIZE, HEADS, WORDS, LENGTH, BLOCKS = 16, 2, 20, 8, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x):
        shape = (*x.shape[:2], HEADS, SIZE // HEADS)
        q, k, v = (y.view(shape).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(SIZE // HEADS)
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return self.c_proj((weights @ v).transpose(1, 2).reshape(x.shape))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.act = nn.Linear(SIZE, 4 * SIZE), nn.GELU()
        self.c_proj = nn.Linear(4 * SIZE, SIZE)

    def forward(self, x):
        return self.c_proj(self.act(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.attn, self.mlp = Attention(), Mlp()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, SIZE), nn.Embedding(LENGTH, SIZE)
        self.h = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.ln_f = nn.LayerNorm(SIZE)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(LENGTH))
        for block in self.h:
            x = block(x)
        return self.ln_f(x) @ self.wte.weight.T


def main() -> None:
    """Runs the model with a hook on each module, and stores what it saw."""
    torch.manual_seed(0)
    model = Gpt()
    for x in model.parameters():
        nn.init.normal_(x, 0.2, 0.5) if x.ndim == 1 else nn.init.normal_(x, 0, 0.4)
    tokens, stored = torch.randint(0, WORDS, (3, LENGTH)), {}

    def hook(name):
        def store(module, inputs, output):
            stored[f"{name}:in"], stored[name] = inputs[0], output

        return store

    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(hook(name))
    stored["result"] = model(tokens)
    stored |= {f"weights/{name}": x for name, x in model.state_dict().items()}
    arrays = {name: x.detach().numpy() for name, x in stored.items()}
    file = pathlib.Path(__file__).with_suffix(".npz")
    np.savez_compressed(file, tokens=tokens.numpy(), **arrays)


if __name__ == "__main__":
    main()
