"""What `jaxmp.find_overflow` costs, in code compiled for an H200.

The step is compiled as it is and as `jaxmp.find_overflow` runs it. Needs no GPU (extra
`aot`); nothing runs.
"""

import dataclasses
from typing import Any

import jax
import optax
import tyro

import jaxmp
from jaxmp._diagnosis.overflow.watch import Program
from jaxmp._jaxprs.flatten import flatten
from jaxmp._jaxprs.places import Place, equations

from .counting import h200, hlo, results
from .counting.compiled import peak
from .counting.tables import show
from .networks.basic import Network, gpt, mlp, resnet

NETWORKS = {
    "MLP": mlp(256, features=2048),
    "GPT, 1 layer": gpt(32, layers=1, width=384, heads=6, vocabulary=2048, length=256),
    "ResNet, 1 block": resnet(64, image=64, stages=(1,), bottleneck=False),
}


@dataclasses.dataclass
class Options:
    """Which networks to compile."""

    networks: tuple[str, ...] = tuple(NETWORKS)


def gradient(network: Network) -> tuple[Any, tuple[Any, ...]]:
    """Returns the gradient function in mixed float16 and the shapes it takes."""
    x, y = network.shapes()
    variables = jax.eval_shape(network.model.init, jax.random.key(0), x)
    params = {"params": variables.pop("params")}

    def loss(params, others, x, y):
        variables = params | others
        logits, _ = network.model.apply(variables, x, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    fun = jaxmp.value_and_grad(loss, loss_scale=2.0**15)
    return jaxmp.autocast(fun, "mixed_float16"), (params, variables, x, y)


def count(name: str) -> dict[str, Any]:
    """Compiles a gradient as it is and as it is searched."""
    fun, shapes = gradient(NETWORKS[name])
    flat = flatten(fun, shapes, {})
    program = Program(jax.make_jaxpr(flat.fun)(*flat.leaves), flat.names, Place())
    program.platform = "gpu"
    plain = h200.compiled(fun, *shapes)
    searched = h200.compiled(program.replay, *flat.leaves)
    work = [hlo.work(x.as_text()) for x in (plain, searched)]
    return {
        "gradient": name,
        "operations": len(list(equations(program.jaxpr, Place()))),
        "bytes moved": work[1].bytes / work[0].bytes,
        "kernels": work[1].kernels / work[0].kernels,
        "peak memory": peak(searched) / peak(plain),
    }


def main(arguments: list[str]) -> None:
    """Prints a table of ratios to the plain gradient, and saves it."""
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks fault")
    h200.require("fault")
    rows = [count(name) for name in options.networks]
    show("a search, relative to the gradient alone", rows)
    results.save(
        results.target("fault"),
        "over plain",
        h200.HARDWARE,
        ["fault", *arguments],
        rows,
    )
