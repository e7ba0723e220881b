"""The GPU memory of BERT in mixed precision, and that of optimizers without masters.

Compiled for an H200 (extra ``aot``) and not run. Of BERT, whose models and step are
those of ``examples/masked_lm.py``: the peak of an update of 256 rows of text, in 32
micro-batches and at once, and the largest batch that fits, for rows of 64 to 512 words.
Of optimizers: the bytes that Adam stores and moves for a parameter, whose gradients
have 16 bits. (The memory of a program compiled for a CPU says nothing: the CPU has no
16-bit arithmetic, and XLA adds float32 copies.)

References:
    Devlin et al., "BERT", NAACL 2019, https://arxiv.org/abs/1810.04805; the section
    "Out-of-memory issues" of https://github.com/google-research/bert.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro
from jax.typing import DTypeLike

import jaxmp

from .counting import h200, hlo, results, tables
from .counting.compiled import largest_batch, peak
from .networks.basic import NETWORKS, Network

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))

import _bert
import masked_lm

# Of the 16-bit policies one is enough: the other needs the same bytes.
POLICIES = ("float32", "mixed_float16")
# The models, and the words in a row of their updates.
MODELS = {
    "BERT-base": (_bert.BERT_BASE, 128),
    "BERT-large": (_bert.BERT_LARGE, 128),
    "the small model": (masked_lm.SMALL, masked_lm.LENGTH),
}
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


def stochastic(state_dtype: Any = None) -> Any:
    """Returns what makes an update that rounds at random."""
    return partial(jaxmp.stochastic_rounding, state_dtype=state_dtype)


def kahan(state_dtype: Any = None, **options: Any) -> Any:
    """Returns what makes an update with compensation."""
    return partial(jaxmp.kahan_summation, state_dtype=state_dtype, **options)


def stored_in(state_dtype: Any) -> Any:
    """Returns what makes an update of float32 parameters."""
    return partial(jaxmp.with_state_dtype, state_dtype=state_dtype)


VARIANTS = {
    "float32 masters": Variant(with_masters, 12, 28, params=jnp.float32),
    "bfloat16, optax alone": Variant(lambda adam: adam, 6, 14),
    "stochastic": Variant(stochastic(), 10, 22),
    "stochastic, bfloat16 state": Variant(stochastic("bfloat16"), 6, 14),
    "stochastic, int8 state": Variant(stochastic("int8"), 4.02, 14.2),
    "Kahan": Variant(kahan(), 12, 26),
    "Kahan, bfloat16 state": Variant(kahan("bfloat16"), 8, 18),
    "Kahan, int8 state": Variant(kahan("int8"), 6.02, 18.2),
    "Kahan in int8, int8 state": Variant(
        kahan("int8", compensation="int8"), 5.02, 16.2
    ),
    "Kahan, float16": Variant(kahan(), 12, 26, jnp.float16, jnp.float16),
    "stochastic, bfloat16 state, skipping": Variant(
        partial(skipping, state_dtype="bfloat16"), 6, 16
    ),
    "stochastic, int8 state, skipping": Variant(
        partial(skipping, state_dtype="int8"), 4.02, 16.3
    ),
    "float32 parameters, bfloat16 state": Variant(
        stored_in("bfloat16"), 8, 18, jnp.float32
    ),
    "float32 parameters, int8 state": Variant(
        stored_in("int8"), 6.02, 18.2, jnp.float32
    ),
}


@dataclasses.dataclass
class Options:
    """What to compile, and where to save the bytes."""

    sections: tuple[Literal["updates", "batches", "optimizers"], ...] = (
        "updates",
        "batches",
        "optimizers",
    )
    """Which tables to make."""
    lengths: tuple[int, ...] = (64, 128, 256, 384, 512)
    """Words in a row of the largest batches of BERT-base."""
    gigabytes: float = 12.0
    """What the largest batch must fit into."""
    network: str = "gpt-12m"
    """Whose parameters an optimizer updates."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    output: pathlib.Path | None = None


def main(arguments: list[str]) -> None:
    """Prints the tables and saves them."""
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks memory")
    h200.require("memory")
    sections = {
        "updates": (updates, "peak of an update (GB)"),
        "batches": (batches, f"largest batch of BERT-base in {options.gigabytes:g} GB"),
        "optimizers": (optimizers, f"{options.network}, bytes of each parameter"),
    }
    path = options.output or results.target("memory")
    for name in options.sections:
        section, title = sections[name]
        rows = list(section(options))
        tables.show(title, rows)
        results.save(path, title, h200.HARDWARE, ["memory", *arguments], rows)


def updates(options: Options) -> Iterator[dict[str, Any]]:
    """Yields the peak of an update of 256 rows, in micro-batches and at once."""
    rows = masked_lm.MICRO_BATCHES * masked_lm.ROWS
    for name, (model, length) in MODELS.items():
        for steps in (masked_lm.MICRO_BATCHES, 1):
            sizes = {x: peak_bytes(model, x, rows, length, steps) for x in POLICIES}
            yield {
                "model": name,
                "words in a row": length,
                "micro-batches": steps,
                **{policy: size / 1e9 for policy, size in sizes.items()},
                "share": sizes["mixed_float16"] / sizes["float32"],
            }


def batches(options: Options) -> Iterator[dict[str, Any]]:
    """Yields the rows of BERT-base that fit, by the words in a row."""
    for length in options.lengths:
        row = {"words in a row": length}
        for policy in POLICIES:
            needed = partial(peak_bytes, _bert.BERT_BASE, policy, length=length)
            row[policy] = largest_batch(needed, options.gigabytes * 1e9)
        yield row


def peak_bytes(
    model: Any, policy: str, rows: int, length: int, accum_steps: int = 1
) -> int:
    """Returns what an update, compiled for an H200, allocates there."""
    tx, _, step = masked_lm.make_step(model, policy, 1e-4, accum_steps)
    params, batch = masked_lm.shapes(model, rows, length)
    state = jax.eval_shape(tx.init, params)
    return peak(h200.compiled(step, params, state, batch, donated=2))


def optimizers(options: Options) -> Iterator[dict[str, Any]]:
    """Yields the bytes of each parameter by how it is stored."""
    for name in options.variants:
        yield {"update": name} | count(VARIANTS[name], NETWORKS[options.network])


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

    text = h200.compiled(update, params, state, grads, donated=2).as_text()
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
    return sum(
        len({computation.behind(operand).name for operand in x.operands}) == 1
        for computation in computations.values()
        for x in computation.instructions.values()
        if x.opcode == "subtract"
    )
