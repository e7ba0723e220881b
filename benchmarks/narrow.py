"""The bytes of training without float32 masters, compiled for an H200.

Updates by Adam of given gradients, bfloat16 unless something else is said, so that all
that is counted is the optimizer. Needs no GPU (extra ``aot``); nothing runs.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.typing import DTypeLike

import jaxmp

from .counting import h200, hlo, results
from .counting.tables import show
from .networks.basic import NETWORKS, Network

ADAM = optax.adam(1e-3)
STOCHASTIC, KAHAN = jaxmp.stochastic_rounding, jaxmp.kahan_summation


class Variant(NamedTuple):
    """How parameters are stored and updated, and the bytes that it takes."""

    make: Callable[[], optax.GradientTransformation]
    stored: float  # a parameter with its moments and what else is beside it
    moved: float  # by an update, in bytes a parameter
    params: DTypeLike = jnp.bfloat16
    gradients: DTypeLike = jnp.bfloat16


def with_masters() -> optax.GradientTransformation:
    """Returns Adam; :func:`count` adds the 16-bit copy that the next step reads."""
    return ADAM


VARIANTS = {
    "float32 masters": Variant(with_masters, 12, 28, params=jnp.float32),
    "bfloat16, optax alone": Variant(lambda: ADAM, 6, 14),
    "stochastic": Variant(partial(STOCHASTIC, ADAM), 10, 22),
    "stochastic, bfloat16 state": Variant(
        partial(STOCHASTIC, ADAM, state_dtype="bfloat16"), 6, 14
    ),
    "stochastic, int8 state": Variant(
        partial(STOCHASTIC, ADAM, state_dtype="int8"), 4.02, 14.2
    ),
    "Kahan": Variant(partial(KAHAN, ADAM), 12, 26),
    "Kahan, bfloat16 state": Variant(
        partial(KAHAN, ADAM, state_dtype="bfloat16"), 8, 18
    ),
    "Kahan, int8 state": Variant(partial(KAHAN, ADAM, state_dtype="int8"), 6.02, 18.2),
    "Kahan in int8, int8 state": Variant(
        partial(KAHAN, ADAM, state_dtype="int8", compensation="int8"), 5.02, 16.2
    ),
    "Kahan, float16": Variant(
        partial(KAHAN, ADAM), 12, 26, params=jnp.float16, gradients=jnp.float16
    ),
    # Whose gradients are read once more, to be checked.
    "stochastic, bfloat16 state, skipping": Variant(
        lambda: jaxmp.loss_scaling(
            STOCHASTIC(ADAM, state_dtype="bfloat16"), "bfloat16"
        ),
        6,
        16,
    ),
    "stochastic, int8 state, skipping": Variant(
        lambda: jaxmp.loss_scaling(STOCHASTIC(ADAM, state_dtype="int8"), "bfloat16"),
        4.02,
        16.3,
    ),
    # As beside products in 16 bits, whose gradients these are.
    "float32 parameters, bfloat16 state": Variant(
        lambda: jaxmp.with_state_dtype(ADAM, "bfloat16"), 8, 18, jnp.float32
    ),
    "float32 parameters, int8 state": Variant(
        lambda: jaxmp.with_state_dtype(ADAM, "int8"), 6.02, 18.2, jnp.float32
    ),
}


@dataclasses.dataclass
class Options:
    """What to compile, and where to save the counts."""

    network: str = "gpt-12m"
    """Whose parameters to update."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    output: pathlib.Path | None = None


def main(arguments: list[str]) -> None:
    """Prints a table and saves it."""
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks narrow")
    h200.require("narrow")
    rows = [
        {"update": name} | count(VARIANTS[name], NETWORKS[options.network])
        for name in options.variants
    ]
    show(f"{options.network}, bytes of each parameter", rows)
    command = ["narrow", *arguments]
    results.save(
        options.output or results.target("narrow"),
        options.network,
        h200.HARDWARE,
        command,
        rows,
    )


def limits(variant: Variant) -> dict[str, float]:
    """Returns the most that may be counted of a variant."""
    return {
        "bytes stored": variant.stored + 0.01,
        "bytes moved": variant.moved + 0.1,
        "roundings left out": 0,
    }


def count(variant: Variant, network: Network) -> dict[str, Any]:
    """Compiles an update of a network's parameters and counts, bytes a parameter."""
    x, _ = network.batch(1)
    shapes = jax.eval_shape(network.model.init, jax.random.key(0), x)["params"]
    params, grads = (
        jaxmp.cast_tree(shapes, dtype) for dtype in (variant.params, variant.gradients)
    )
    tx = variant.make()
    state = jax.eval_shape(tx.init, params)

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        copy = jaxmp.cast_tree(params, variant.gradients)
        return params, state, copy if variant.make is with_masters else None

    compiled = h200.compiled(update, params, state, grads, donated=2)
    text = compiled.as_text()
    work = hlo.work(text)
    n = sum(x.size for x in jax.tree.leaves(params))
    stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, state)))
    return {
        "bytes stored": round(stored / n, 2),
        "bytes moved": round(work.bytes / n, 2),
        "kernels": work.kernels,
        "roundings left out": left_out(text),
    }


def left_out(text: str) -> int:
    """Counts the differences that are zero because XLA has left out a rounding.

    It leaves out a cast to 16 bits and back, and what such a rounding took away is then
    a difference of a number and itself.
    """
    computations, _ = hlo.parse(text)
    differences = (
        (computation, instruction)
        for computation in computations.values()
        for instruction in computation.instructions.values()
        if instruction.opcode == "subtract"
    )
    return sum(
        computation.behind(x.operands[0]).name == computation.behind(x.operands[1]).name
        for computation, x in differences
    )
