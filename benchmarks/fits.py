"""The largest batch whose training step fits the memory of a GPU.

From the memory of programs compiled for an H200 (extra ``aot``; nothing runs): of one
example, of a small batch, and of one that about fills the largest memory. What lies on
the line between each two fits, within 2%.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .counting import measure, named, results, targets
from .counting.results import Table, by_form
from .counting.steps import (
    AUTOCAST,
    CHECKPOINT,
    HEAD,
    HEAD_AGAIN,
    HEAD_INT8,
    contestant,
)
from .networks.basic import NETWORKS, Network, sequence_model
from .networks.families import BERT, LARGE_LLAMA, Llama
from .networks.fused import ATTENTION

SIZES = 12, 16, 24, 80  # GB
FLOAT32, FUSED, NO_LOGITS = "float32", "and cuDNN's attention", "and no logits"
INT8 = "and int8 moments"
# Each form with the step, and whether the attention is cuDNN's.
FORMS = {
    FLOAT32: ("float32", False),
    "autocast": (AUTOCAST, False),
    FUSED: (AUTOCAST, True),
    NO_LOGITS: (HEAD, True),
    "and checkpoint": (HEAD_AGAIN, True),
    INT8: (HEAD_INT8, True),
}
# Where a form of BERT-large is accumulated, too.
MICRO_BATCHES, ROWS, LENGTHS = 32, 8, (128, 320, 384, 512)
ACCUMULATED = f"BERT-large, {LENGTHS[0]} tokens"


def bert(length: int, batch_size: int, **sizes: Any) -> tuple[str, Network]:
    """Returns a BERT, and where its attention by cuDNN is."""
    model = BERT(**sizes, vocabulary=30592, length=length, attention_dropout=0.0)
    return "bert, no attention dropout", sequence_model(model, batch_size)


LLAMA = Llama(layers=16, width=1024, heads=16, vocabulary=32000, length=1024)
LARGE = {
    "GPT, 163M parameters": ("gpt-160m", NETWORKS["gpt-160m"]),
    "Llama, 268M parameters": ("llama", sequence_model(LLAMA, 8)),
    "Llama, 1.6B parameters": ("llama", LARGE_LLAMA),
    "ResNet-50": ("", NETWORKS["resnet-50"]),
    "BERT-base": bert(512, 16, layers=12, width=768, heads=12),
}
LARGE |= {
    f"BERT-large, {length} tokens": bert(
        length, ROWS, layers=24, width=1024, heads=16, scanned=True
    )
    for length in LENGTHS
}

FITS = """\
## The largest batch that fits

Examples in a batch whose step, with float32 parameters and Adam, fits 12, 16, 24 and 80
GB of memory. Each column adds something to the one before it. The layers of
BERT-large and of the larger Llama are one scan; the latter are computed again for the
gradients in every column.
"""
MICRO = f"""\
### BERT-large, {MICRO_BATCHES} micro-batches of {ROWS} sequences of {LENGTHS[0]} tokens
"""


def main(
    *, networks: tuple[str, ...] = tuple(LARGE), forms: tuple[str, ...] = tuple(FORMS)
) -> None:
    """Counts each form of each network.

    Args:
        networks: Which.
        forms: Which.
    """
    named.check("network", networks, LARGE)
    named.check("form", forms, FORMS)
    targets.require("fits")
    new = (row for name in networks for row in counted(forms, name, *LARGE[name]))
    results.update("fits", "bfloat16", targets.hardware(), new, "network", "form")
    if ACCUMULATED in networks:
        new = accumulated(forms)
        results.update("fits", MICRO.strip("# \n"), targets.hardware(), new, "form")


def counted(
    forms: tuple[str, ...], name: str, fused: str, network: Network
) -> Iterator[dict[str, Any]]:
    """Yields what forms of a network need, in bytes."""
    for form in forms:
        (step, has_kernel), one = FORMS[form], network
        if not fused:  # no attention, and few logits
            if form in (FUSED, NO_LOGITS, INT8):
                continue
            step = CHECKPOINT if step == HEAD_AGAIN else step
        elif has_kernel:
            one = one._replace(model=one.model.clone(**ATTENTION[fused]))
        few = one.batch_size
        state, least = needed(step, one)
        # About as many as fit the largest memory. XLA pads the rows of a matmul to a
        # multiple of eight, which costs other batches a copy.
        more = (SIZES[-1] * 1e9 - least) / (least - state) * few
        many = few + 8 * (1 + int(more / 8))
        _, most = needed(step, one._replace(batch_size=many))
        each = (most - least) / (many - few)
        yield {
            "network": name,
            "form": form,
            "batches": [few, many],
            "each": each,
            "all": least - each * few,
            "one": needed(step, one._replace(batch_size=1))[1],
        }


def accumulated(forms: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yields what forms of BERT-large need in micro-batches, in bytes."""
    fused, network = LARGE[ACCUMULATED]
    for form in forms:
        step, has_kernel = FORMS[form]
        one = network._replace(batch_size=MICRO_BATCHES * ROWS)
        if has_kernel:
            one = one._replace(model=one.model.clone(**ATTENTION[fused]))
        yield {"form": form, "bytes": needed(step, one, MICRO_BATCHES)[1]}


def needed(step: str, network: Network, accum_steps: int = 1) -> tuple[int, int]:
    """Returns the bytes of a state, and those that its step needs.

    The latter are by the account of its program.
    """
    made = contestant(step, network, dtype=jnp.bfloat16, accum_steps=accum_steps)
    args = jax.eval_shape(made.init), network.shapes()
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[0]))
    return state, measure.peak(targets.compiled(made.step, *args, donated=1))


def largest(row: Mapping[str, Any], size: float) -> int:
    """Returns how many examples fit so many GB."""
    few, room = row["batches"][0], size * 1e9
    at_few = row["all"] + few * row["each"]
    if room >= at_few:
        return int((room - row["all"]) // row["each"])
    # Where the activations of one are few, other arrays are most of its memory.
    each = (at_few - row["one"]) / (few - 1)
    return max(0, 1 + int((room - row["one"]) // each))


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yields the table of all networks, and that of micro-batches."""
    yield Table(FITS, ())
    if result := found.get("bfloat16"):
        networks = by_form(result["rows"])
        yield Table(
            "", [_line(x, networks[x]) for x in LARGE if x in networks], [result]
        )
    if result := found.get(MICRO.strip("# \n")):
        sizes = {x["form"]: f"{x['bytes'] / 1e9:.1f} GB" for x in result["rows"]}
        yield Table(MICRO, [sizes], [result])


def _line(network: str, forms: Mapping[str, Any]) -> dict[str, str]:
    """Returns how many examples fit each memory, in each form."""
    fit = {
        form: "/".join(str(largest(forms[form], size)) for size in SIZES)
        for form in FORMS
        if form in forms
    }
    return {"": network} | {form: fit.get(form, "") for form in FORMS}
