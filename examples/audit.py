"""Find out why a bfloat16 model multiplies in float32, fix it, and prove it.

    python examples/audit.py

Norm parameters are often kept in float32, and rightly so. But a LayerNorm without a
dtype of its own then returns float32, and so does everything after it. Nothing fails;
the model is just slow. The audit traces the training loss and its gradient, runs
nothing, and names the culprit and its line.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.text import Text

import jaxmp


@dataclasses.dataclass
class Args:
    """Audits a small network with a float32 leak, and again without the leak."""

    width: int = 512
    blocks: int = 4
    batch: int = 64


class MLP(nn.Module):
    blocks: int
    norm_dtype: jax.typing.DTypeLike | None

    @nn.compact
    def __call__(self, x):
        for _ in range(self.blocks):
            h = nn.LayerNorm(dtype=self.norm_dtype)(x)
            h = nn.gelu(nn.Dense(4 * x.shape[-1])(h))
            x = x + nn.Dense(x.shape[-1])(h)
        return x


def audit(args: Args, norm_dtype: jax.typing.DTypeLike | None) -> jaxmp.DtypeReport:
    policy = jaxmp.get_policy("mixed_bfloat16").with_overrides(("LayerNorm", "float32"))
    model = MLP(args.blocks, norm_dtype)
    x = jax.ShapeDtypeStruct((args.batch, args.width), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    apply: Any = jaxmp.with_policy(model.apply, policy)

    def loss(variables, x):
        return jnp.mean(apply(variables, x) ** 2)

    return jaxmp.audit(jax.grad(loss))(variables, x)


def main(args: Args) -> None:
    console = Console()

    console.rule("[bold]nn.LayerNorm()")
    console.print(Text(str(audit(args, norm_dtype=None))), soft_wrap=True)

    console.print()
    console.rule("[bold]nn.LayerNorm(dtype=jnp.bfloat16)")
    console.print("The scale and the statistics stay float32, the result does not.\n")
    report = audit(args, norm_dtype=jnp.bfloat16)
    console.print(Text(str(report)), soft_wrap=True)

    console.print("\nKeep it so, in a test:")
    console.print("    jaxmp.assert_16bit(jax.grad(loss), variables, x)")
    assert report.fraction_16bit == 1
    assert not report.leaks


if __name__ == "__main__":
    main(tyro.cli(Args))
