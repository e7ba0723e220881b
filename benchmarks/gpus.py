"""What each generation of NVIDIA GPUs runs under each policy, and its attention.

Small training steps, compiled for ten GPUs (extra ``aot``; nothing runs): the dtypes
in which the code multiplies matrices, and whether its attention is cuDNN's kernel. The
table is in docs/formats.md.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import jaxmp

from .counting import hlo, results, targets
from .counting.results import Table

POLICIES = "mixed_bfloat16", "mixed_float16", "mixed_float16_bfloat16", "mixed_fp8"
HEADS = 128, 256
FULL = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
SIZE, LENGTH = 2048, 64


def main(*, gpus: tuple[str, ...] = tuple(targets.GPUS)) -> None:
    """Compiles for each GPU, and says for which it cannot.

    Args:
        gpus: Which.
    """
    targets.require("gpus")
    reasons = {gpu: targets.unavailable(gpu) for gpu in gpus}
    for gpu, reason in reasons.items():
        if reason:
            print(f"{gpu} is left out: {reason}")
    rows = (row(gpu) for gpu, reason in reasons.items() if not reason)
    results.update("gpus", "code", "compiled for and not run", rows, "gpu")


def row(gpu: str) -> dict[str, Any]:
    """Returns what a GPU runs."""
    found = targets.GPUS[gpu]
    return {
        "gpu": gpu,
        "name": found.name,
        "capability": ".".join(map(str, found.capability)),
        "multiplies": {policy: products(gpu, policy) for policy in POLICIES},
        "cuDNN's attention": [size for size in HEADS if has_kernel(gpu, size)],
    }


def products(gpu: str, policy: str) -> dict[str, str]:
    """Returns the dtypes that matmuls take, in the forward and in the backward pass."""

    def loss(w, x):
        return jnp.mean((jnp.tanh(x @ w) @ w) ** 2)

    x = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    forward, both = (
        operands(targets.compiled(jaxmp.autocast(fun, policy), x, x, gpu=gpu).as_text())
        for fun in (loss, jaxmp.value_and_grad(loss, loss_scale=1.0))
    )
    return {
        "forward": ", ".join(sorted(forward)),
        "backward": ", ".join(sorted(both - forward or forward)),
    }


def operands(text: str) -> set[str]:
    """Returns the dtypes of the operands of all products in compiled code."""
    pairs = (re.search(r"(\w+) x (\w+) ->", name) for name in hlo.work(text).products)
    return {FULL.get(x, "float8") for pair in pairs if pair for x in pair.groups()}


def spelled(forward: str, backward: str) -> str:
    """Spells the dtypes of both passes."""
    return forward if forward == backward else f"{forward}, backward {backward}"


def has_kernel(gpu: str, size: int, dtype: Any = jnp.float16) -> bool:
    """Whether an attention is cuDNN's, forward and backward."""

    def total(x):
        out = jaxmp.dot_product_attention(x, x, x, is_causal=True)
        return jnp.sum(out.astype(jnp.float32))

    x = jax.ShapeDtypeStruct((1, LENGTH, 2, size), dtype)
    text = targets.compiled(jax.grad(total), x, gpu=gpu).as_text()
    return text.count('custom_call_target="__cudnn$fmha') == 2


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yields the table."""
    for result in found.values():
        order = [*targets.GPUS]
        rows = sorted(result["rows"], key=lambda row: order.index(row["gpu"]))
        yield Table("", [*lines(rows)], [result])


def lines(rows: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """Yields the lines of the table: GPUs that run the same are one."""
    same: dict[str, list[dict[str, Any]]] = {}
    for x in rows:
        same.setdefault(str([x["multiplies"], x["cuDNN's attention"]]), []).append(x)
    for group in same.values():
        heads = group[0]["cuDNN's attention"]
        multiplies = group[0]["multiplies"]
        cells = {f"`{policy}`": spelled(**multiplies[policy]) for policy in POLICIES}
        yield {
            "GPU (compute capability)": ", ".join(
                f"{x['name']} ({x['capability']})" for x in group
            ),
            **cells,
            "attention": f"cuDNN, heads to {max(heads)}" if heads else "XLA",
        }
