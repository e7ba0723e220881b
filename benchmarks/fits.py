"""The largest batch whose training step fits the memory of a GPU.

From the memory of programs compiled for an H200 (extra ``aot``; nothing runs), of a
small batch and of one that about fills the largest memory: what lies on the line
between the two fits, within 2%.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .counting import measure, results, targets, worth
from .counting.results import Table, by_form
from .counting.steps import (
    AUTOCAST,
    CHECKPOINT,
    HEAD,
    HEAD_AGAIN,
    contestant,
)
from .networks.basic import NETWORKS, Network, sequence_model
from .networks.families import BERT, Llama
from .networks.fused import ATTENTION

SIZES = 16, 24, 80  # GB
FLOAT32, FUSED = "float32", "and cuDNN's attention"
# Each form with the step, and whether the attention is cuDNN's.
FORMS = {
    FLOAT32: ("float32", False),
    "autocast": (AUTOCAST, False),
    FUSED: (AUTOCAST, True),
    "and no logits": (HEAD, True),
    "and checkpoint": (HEAD_AGAIN, True),
}
LARGE = {
    "GPT, 163M parameters": ("gpt-160m", NETWORKS["gpt-160m"]),
    "Llama, 268M parameters": (
        "llama",
        sequence_model(
            Llama(layers=16, width=1024, heads=16, vocabulary=32000, length=1024), 8
        ),
    ),
    "BERT-base": (
        "bert, no attention dropout",
        sequence_model(
            BERT(
                layers=12,
                width=768,
                heads=12,
                vocabulary=30592,
                length=512,
                attention_dropout=0.0,
            ),
            16,
        ),
    ),
    "ResNet-50": ("", NETWORKS["resnet-50"]),
}

FITS = """\
## The largest batch that fits

Examples in a batch whose step, with float32 parameters and Adam, fits 16, 24 and 80 GB
of memory. Each row adds something to the one above it.
"""


def main(
    *, networks: tuple[str, ...] = tuple(LARGE), forms: tuple[str, ...] = tuple(FORMS)
) -> None:
    """Counts each form of each network.

    Args:
        networks: Which.
        forms: Which.
    """
    worth.check("network", networks, LARGE)
    worth.check("form", forms, FORMS)
    targets.require("fits")
    new = (row for name in networks for row in counted(forms, name, *LARGE[name]))
    results.update("fits", "bfloat16", targets.hardware(), new, "network", "form")


def counted(
    forms: tuple[str, ...], name: str, fused: str, network: Network
) -> Iterator[dict[str, Any]]:
    """Yields what forms of a network need, in bytes."""
    for form in forms:
        (step, has_kernel), one = FORMS[form], network
        if not fused:  # no attention, and few logits
            if form in (FUSED, "and no logits"):
                continue
            step = CHECKPOINT if step == HEAD_AGAIN else step
        elif has_kernel:
            one = one._replace(model=one.model.clone(**ATTENTION[fused]))
        few = one.batch_size
        state, least = needed(step, one)
        # About as many as fit the largest memory.
        many = few + int((SIZES[-1] * 1e9 - least) / (least - state) * few)
        _, most = needed(step, one._replace(batch_size=many))
        each = (most - least) / (many - few)
        yield {
            "network": name,
            "form": form,
            "batches": [few, many],
            "each": each,
            "all": least - each * few,
        }


def needed(step: str, network: Network) -> tuple[int, int]:
    """Returns the bytes of a state, and those that its step needs.

    The latter are by the account of its program.
    """
    made = contestant(step, network, dtype=jnp.bfloat16)
    args = jax.eval_shape(made.init), network.shapes()
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[0]))
    return state, measure.peak(targets.compiled(made.step, *args, donated=1))


def largest(row: Mapping[str, Any], size: float) -> int:
    """Returns how many examples fit so many GB."""
    return max(0, int((size * 1e9 - row["all"]) // row["each"]))


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yields the table of all networks."""
    yield Table(FITS, ())
    for result in found.values():
        rows = [
            {"": f"{network}, {form}" if form == FLOAT32 else form}
            | {f"{size} GB": largest(row, size) for size in SIZES}
            for network, forms in by_form(result["rows"]).items()
            for form, row in forms.items()
        ]
        yield Table("", rows, [result])
