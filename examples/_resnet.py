"""The ResNets of the examples, which know of no precision, and their training state."""

from functools import partial
from typing import Any

import flax.linen as nn
import flax.struct
import jax.numpy as jnp
from flax.training.train_state import TrainState

import jaxmp


class ResNet(nn.Module):
    """The ResNet of He et al. (2015), section 4.2, with 6 * blocks + 2 layers."""

    blocks: int
    widths: tuple[int, ...] = (16, 32, 64)

    @nn.compact
    def __call__(self, x, train: bool):
        conv = partial(nn.Conv, use_bias=False)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        x = nn.relu(norm()(conv(self.widths[0], (3, 3))(x)))
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks):
                strides = 2 if stage > 0 and block == 0 else 1
                y = nn.relu(norm()(conv(width, (3, 3), strides)(x)))
                y = norm()(conv(width, (3, 3))(y))
                x = x[:, ::strides, ::strides]  # their shortcut without parameters
                x = jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])])
                x = nn.relu(x + y)
        return nn.Dense(10)(x.mean((1, 2)))


class ResNet50(nn.Module):
    """The ResNet-50 of He et al. (2015), table 1, with CIFAR-10's small first layer."""

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64

    @nn.compact
    def __call__(self, x, train: bool):
        conv = partial(nn.Conv, use_bias=False)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        x = nn.relu(norm()(conv(self.width, (3, 3))(x)))
        for stage, blocks in enumerate(self.blocks):
            width = self.width * 2**stage
            for block in range(blocks):
                strides = 2 if stage > 0 and block == 0 else 1
                y = nn.relu(norm()(conv(width, (1, 1))(x)))
                y = nn.relu(norm()(conv(width, (3, 3), strides)(y)))
                y = norm()(conv(4 * width, (1, 1))(y))
                if block == 0:
                    x = norm()(conv(4 * width, (1, 1), strides)(x))
                x = nn.relu(x + y)
        return nn.Dense(10)(x.mean((1, 2)))


class State(TrainState):
    """Flax's training state, and the running statistics of BatchNorm."""

    batch_stats: Any = None
    # The policy to autocast under, where the model is not cast.
    autocast: jaxmp.Policy | None = flax.struct.field(pytree_node=False, default=None)
