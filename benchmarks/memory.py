"""The GPU memory of BERT in float32 and in mixed precision.

The peak memory of an update of 256 rows of text, in 32 micro-batches and at once, and
the largest batch that fits, for rows of 64 to 512 words. The models and the training
step are those of ``examples/masked_lm.py``, compiled for an H200 (extra ``aot``) and
not run. And what the parameters of a ResNet-50 for CIFAR's images take, and an update
of them. (The memory of a program compiled for a CPU says nothing: the CPU has no 16-bit
arithmetic, and XLA adds float32 copies.)

References:
    Devlin et al., "BERT", NAACL 2019, https://arxiv.org/abs/1810.04805; the section
    "Out-of-memory issues" of https://github.com/google-research/bert. Krizhevsky,
    "Learning Multiple Layers of Features from Tiny Images", 2009 (CIFAR-10).
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any, Literal

import jax
import tyro

import jaxmp

from .counting import h200, results, tables
from .counting.compiled import largest_batch, peak
from .counting.steps import contestant
from .machinery import count
from .networks.basic import resnet

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
CIFAR = resnet(128, image=32, classes=10, small_images=True)
# The policies of its parameters, and who trains it so.
TRAINERS = {"float32": "float32", "mixed_float16": "jaxmp cast", "O2": None, "O3": None}


@dataclasses.dataclass
class Options:
    """What to compile, and where to save the bytes."""

    sections: tuple[Literal["updates", "batches", "cifar"], ...] = (
        "updates",
        "batches",
        "cifar",
    )
    """Which tables to make."""
    models: tuple[str, ...] = tuple(MODELS)
    """Whose updates to look at."""
    lengths: tuple[int, ...] = (64, 128, 256, 384, 512)
    """Words in a row of the largest batches of BERT-base."""
    gigabytes: float = 12.0
    """What the largest batch must fit into."""
    output: pathlib.Path | None = None


def main(arguments: list[str]) -> None:
    """Prints three tables and saves them."""
    options = tyro.cli(Options, args=arguments, prog="python -m benchmarks memory")
    h200.require("memory")
    sections = {
        "updates": (updates, "peak of an update (GB)"),
        "batches": (
            batches,
            f"largest batch of BERT-base in {options.gigabytes:g} GB",
        ),
        "cifar": (cifar, "ResNet-50 on CIFAR's images, 128 in a batch"),
    }
    for name in options.sections:
        section, title = sections[name]
        rows = list(section(options))
        tables.show(title, rows)
        command = ["memory", *arguments]
        results.save(
            options.output or results.target("memory"),
            title,
            h200.HARDWARE,
            command,
            rows,
        )


def updates(options: Options) -> Iterator[dict[str, Any]]:
    """Yields the peak of an update of 256 rows, in micro-batches and at once."""
    rows = masked_lm.MICRO_BATCHES * masked_lm.ROWS
    for name in options.models:
        model, length = MODELS[name]
        for accum_steps in (masked_lm.MICRO_BATCHES, 1):
            sizes = [
                peak_bytes(model, policy, rows, length, accum_steps)
                for policy in POLICIES
            ]
            yield {
                "model": name,
                "words in a row": length,
                "micro-batches": accum_steps,
                **dict(zip(POLICIES, (x / 1e9 for x in sizes), strict=True)),
                "share": sizes[1] / sizes[0],
            }


def batches(options: Options) -> Iterator[dict[str, Any]]:
    """Yields the rows of BERT-base that fit, by the words in a row."""
    for length in options.lengths:
        row = {"words in a row": length}
        for policy in POLICIES:
            peak_of = functools.partial(
                peak_bytes, _bert.BERT_BASE, policy, length=length
            )
            row[policy], _ = largest_batch(peak_of, options.gigabytes * 1e9)
        yield row


def cifar(options: Options) -> Iterator[dict[str, Any]]:
    """Yields what parameters take under each policy, and the peak of an update."""
    params = jax.eval_shape(contestant("float32", CIFAR).init).params
    for name, trainer in TRAINERS.items():
        policy = jaxmp.get_policy(name)
        stored = policy.cast_to_param(params)
        row = {
            "policy": name,
            "parameters": sum(x.size for x in jax.tree.leaves(params)),
            "stored (MB)": _bytes(stored) / 1e6,
            "copy to compute with (MB)": _bytes(policy.cast_to_compute(stored)) / 1e6,
        }
        if trainer:
            found = count(contestant(trainer, CIFAR), CIFAR)
            row["peak of an update (GB)"] = found["peak"] / 1e9
        yield row


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def peak_bytes(
    model: Any, policy: str, rows: int, length: int, accum_steps: int = 1
) -> int:
    """Returns what an update, compiled for an H200, allocates there."""
    tx, _, step = masked_lm.make_step(model, policy, 1e-4, accum_steps)
    params, batch = masked_lm.shapes(model, rows, length)
    state = jax.eval_shape(tx.init, params)
    return peak(h200.compiled(step, params, state, batch, donated=2))
