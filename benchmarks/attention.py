"""What attention by cuDNN's kernel saves in a training step, and then a loss head.

Transformers under autocast with their attention written out and with
:func:`jaxmp.dot_product_attention`, and language models with
:func:`jaxmp.linear_cross_entropy` as well, compiled for a GPU (extra ``aot``; nothing
runs): the bytes that a training step moves, its temporary memory, and its kernels.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from .counting import results, targets
from .counting.results import Table, by_form, ratio
from .counting.steps import AUTOCAST, HEAD, contestant
from .machinery import count
from .networks.basic import NETWORKS, Network
from .networks.families import FAMILIES
from .networks.fused import FUSED, fused

COMPARED = {
    "gpt-160m": "GPT, 163M parameters",
    "gpt, scanned": "GPT, scanned and computed again",
    "llama": "Llama",
    "llama, grouped queries": "Llama, grouped queries",
    "vit": "ViT",
    "bert, no attention dropout": "BERT, no dropout in attention",
}

JOINT = "one product"  # for queries, keys and values
SAVED = """\
## What attention by cuDNN saves, and a loss head without logits

Training steps under autocast with attention written out, with
`jaxmp.dot_product_attention`, which is cuDNN's kernel in the compiled code, and then
with `jaxmp.linear_cross_entropy` as well. Last, queries, keys and values are those of
one product.
"""


def main(
    *,
    networks: tuple[str, ...] = tuple(COMPARED),
    dtypes: tuple[str, ...] = ("bfloat16",),
    gpu: targets.Named = targets.H200,
) -> None:
    """Counts each network, written out and fused.

    Args:
        networks: Which.
        dtypes: Of 16 bits.
        gpu: Count in code for this one.
    """
    targets.require("attention")
    written = {name: (NETWORKS | FAMILIES)[name] for name in networks}
    for dtype in dtypes:
        new, hardware = compared(written, dtype, gpu), targets.hardware(gpu)
        title = dtype if gpu == targets.H200 else f"{dtype}, {gpu}"
        results.update("attention", title, hardware, new, "network", "form")


def compared(
    networks: dict[str, Network], dtype: str, gpu: str = targets.H200
) -> Iterator[dict[str, Any]]:
    """Yields what was counted in each network, in form after form."""
    others = fused(networks)
    for name, network in networks.items():
        other = others[f"{name}{FUSED}"]
        forms = [("written", AUTOCAST, network), ("fused", AUTOCAST, other)]
        if hasattr(network.model, "vocabulary"):
            forms.append((HEAD, HEAD, other))
        if hasattr(network.model, "joint"):
            joint = other._replace(model=other.model.clone(joint=True))
            forms.append((JOINT, HEAD, joint))
        for form, step, one in forms:
            found = count(contestant(step, one, dtype=dtype), one, gpu)
            kept = {key: found[key] for key in ("bytes", "temp", "kernels")}
            yield {"network": name, "form": form} | kept


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yields what is left in each dtype."""
    yield Table(SAVED, ())
    for dtype, result in found.items():
        rows = [
            {"": COMPARED.get(name, name), **_left(forms)}
            for name, forms in by_form(result["rows"]).items()
        ]
        yield Table(f"### {dtype}\n", rows, [result])


def _left(forms: Mapping[str, Any]) -> dict[str, str]:
    """Returns a step as written, and the shares of it that the others need."""
    written = forms["written"]
    cells = {
        "GB moved": f"{written['bytes'] / 1e9:.1f}",
        "temporary MiB": f"{written['temp'] / 2**20:,.0f}",
    }
    for form, said in (
        ("fused", "cuDNN's attention"),
        (HEAD, "and no logits"),
        (JOINT, "and one product"),
    ):
        parts = (
            ratio(forms.get(form, {}).get(key), written[key])
            for key in ("bytes", "temp")
        )
        cells[said] = " / ".join(filter(None, parts))
    return cells
