"""The networks of `cnn_zoo.py`, which halve the image twice."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        for width, strides in ((16, 1), (32, 2), (64, 2)):
            x = nn.relu(nn.Conv(width, (3, 3), strides)(x))
        return nn.Dense(10)(x.mean((1, 2)))


class VGG(nn.Module):
    """Pairs of 3 x 3 convolutions, max pooling, and a hidden layer (2014)."""

    @nn.compact
    def __call__(self, x, train: bool):
        for width in (16, 32):
            x = nn.relu(nn.Conv(width, (3, 3))(x))
            x = nn.relu(nn.Conv(width, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(128)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


class Inception(nn.Module):
    """Four branches side by side, with two 3 x 3 for the 5 x 5 (2015)."""

    norm: Callable[..., Any]

    @nn.compact
    def __call__(self, x, train: bool):
        def conv(x, width, side, strides=1):
            x = nn.Conv(width, (side, side), strides, use_bias=False)(x)
            return nn.relu(self.norm(train)(x))

        x = conv(x, 16, 3)
        for width in (8, 16):
            branches = [
                conv(x, width, 1, 2),
                conv(conv(x, width, 1), width, 3, 2),
                conv(conv(conv(x, width, 1), width, 3), width, 3, 2),
                conv(nn.avg_pool(x, (2, 2), (2, 2)), width, 1),
            ]
            x = jnp.concatenate(branches, -1)
        return nn.Dense(10)(x.mean((1, 2)))


class Residual(nn.Module):
    """Blocks of two convolutions around which the input is added (2015)."""

    norm: Callable[..., Any]

    @nn.compact
    def __call__(self, x, train: bool):
        conv = partial(nn.Conv, use_bias=False)
        x = nn.relu(self.norm(train)(conv(16, (3, 3))(x)))
        for width, strides in ((16, 1), (32, 2), (64, 2)):
            y = nn.relu(self.norm(train)(conv(width, (3, 3), strides)(x)))
            y = self.norm(train)(conv(width, (3, 3))(y))
            x = x[:, ::strides, ::strides]  # a shortcut without parameters
            x = jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])])
            x = nn.relu(x + y)
        return nn.Dense(10)(x.mean((1, 2)))


def batch_norm(train: bool) -> nn.Module:
    return nn.BatchNorm(use_running_average=not train, momentum=0.9)


def group_norm(train: bool) -> nn.Module:
    return nn.GroupNorm(num_groups=4)


NETWORKS: dict[str, nn.Module] = {
    "plain": Plain(),
    "VGG-like": VGG(),
    "Inception-like, BatchNorm": Inception(batch_norm),
    "Inception-like, GroupNorm": Inception(group_norm),
    "residual, BatchNorm": Residual(batch_norm),
    "residual, GroupNorm": Residual(group_norm),
}


@cache
def initializer(network: str) -> Callable[..., Any]:
    """Returns what makes a network's variables; compiled once for all policies."""
    return jax.jit(partial(NETWORKS[network].init, train=False))
