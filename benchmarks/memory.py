"""What optimizers without masters store and move, in code compiled for an H200.

The bytes that Adam stores and moves for a parameter, whose gradients have 16 bits.
Needs no GPU (extra ``aot``); nothing runs.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

import jaxmp
from jaxmp._compiled.text import parse

from .counting import hlo, results, targets
from .counting.results import Table
from .networks.basic import NETWORKS, Network

ADAM = optax.adam(1e-3)


class Variant(NamedTuple):
    """How parameters are stored and updated, and the bytes that it takes."""

    make: Callable[..., optax.GradientTransformation]  # of Adam
    stored: float  # a parameter with its moments and what else is beside it
    moved: float  # by an update, in bytes a parameter
    params: DTypeLike = jnp.bfloat16
    gradients: DTypeLike = jnp.bfloat16


def with_masters(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns Adam; :func:`count` adds the 16-bit copy that the next step reads."""
    return adam


def skipping(adam: Any, **options: Any) -> optax.GradientTransformation:
    """Returns what reads gradients once more, to check them."""
    return jaxmp.loss_scaling(jaxmp.stochastic_rounding(adam, **options), "bfloat16")


STOCHASTIC, KAHAN = jaxmp.stochastic_rounding, jaxmp.kahan_summation
BF16, INT8 = {"state_dtype": "bfloat16"}, {"state_dtype": "int8"}
VARIANTS = {
    "float32 masters": Variant(with_masters, 12, 28, params=jnp.float32),
    "bfloat16, optax alone": Variant(lambda adam: adam, 6, 14),
    "stochastic": Variant(STOCHASTIC, 10, 22),
    "stochastic, bfloat16 state": Variant(partial(STOCHASTIC, **BF16), 6, 14),
    "stochastic, int8 state": Variant(partial(STOCHASTIC, **INT8), 4.02, 14.2),
    "Kahan": Variant(KAHAN, 12, 26),
    "Kahan, bfloat16 state": Variant(partial(KAHAN, **BF16), 8, 18),
    "Kahan, int8 state": Variant(partial(KAHAN, **INT8), 6.02, 18.2),
    "Kahan in int8, int8 state": Variant(
        partial(KAHAN, compensation="int8", **INT8), 5.02, 16.2
    ),
    "Kahan, float16": Variant(KAHAN, 12, 26, jnp.float16, jnp.float16),
    "stochastic, bfloat16 state, skipping": Variant(partial(skipping, **BF16), 6, 16),
    "stochastic, int8 state, skipping": Variant(partial(skipping, **INT8), 4.02, 16.3),
    "float32 parameters, bfloat16 state": Variant(
        partial(jaxmp.with_state_dtype, **BF16), 8, 18, jnp.float32
    ),
    "float32 parameters, int8 state": Variant(
        partial(jaxmp.with_state_dtype, **INT8), 6.02, 18.2, jnp.float32
    ),
}


def main(
    *, network: str = "gpt-12m", variants: tuple[str, ...] = tuple(VARIANTS)
) -> None:
    """Counts the bytes of each parameter.

    Args:
        network: Whose parameters an optimizer updates.
        variants: How they are stored.
    """
    targets.require("memory")
    title = f"{network}, bytes of each parameter"
    new = (
        {"update": name} | count(VARIANTS[name], NETWORKS[network]) for name in variants
    )
    results.update("memory", title, targets.hardware(), new, "update")


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yields what was counted of each network."""
    for title, result in found.items():
        yield Table(f"## {title}\n", result["rows"], [result])


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
    tx = variant.make(ADAM)
    state = jax.eval_shape(tx.init, params)

    def update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        copy = jaxmp.cast_tree(params, variant.gradients)
        return params, state, copy if variant.make is with_masters else None

    text = targets.compiled(update, params, state, grads, donated=2).as_text()
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
    computations, _ = parse(text)
    return sum(
        len({computation.behind(operand).name for operand in x.operands}) == 1
        for computation in computations.values()
        for x in computation.instructions.values()
        if x.opcode == "subtract"
    )
