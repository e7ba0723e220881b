"""What attention by cuDNN's kernel saves in a training step.

Transformers under autocast with their attention written out and with
:func:`jaxmp.dot_product_attention`, compiled for a GPU (extra ``aot``; nothing runs):
the bytes that a training step moves, its temporary memory, and its kernels.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from .counting import results, targets
from .counting.results import Table, by_form, ratio
from .counting.steps import AUTOCAST, contestant
from .machinery import count
from .networks.basic import NETWORKS, Network
from .networks.families import FAMILIES
from .networks.fused import FUSED, fused

COMPARED = (
    "gpt-160m",
    "gpt, scanned",
    "llama",
    "llama, grouped queries",
    "vit",
    "bert, no attention dropout",
)

SAVED = """\
## What attention by cuDNN saves

Training steps under autocast with attention written out, and with
`jaxmp.dot_product_attention`, which is cuDNN's kernel in the compiled code.
"""


def main(
    *,
    networks: tuple[str, ...] = COMPARED,
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
    """Yields what was counted in each network, written out and fused."""
    others = fused(networks)
    for name, network in networks.items():
        for form, one in (("written", network), ("fused", others[f"{name}{FUSED}"])):
            found = count(contestant(AUTOCAST, one, dtype=dtype), one, gpu)
            kept = {key: found[key] for key in ("bytes", "temp", "kernels")}
            yield {"network": name, "form": form} | kept


def shares(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Returns which share of bytes and of temporary memory is left, by network."""
    return {
        name: tuple(x["fused"][key] / x["written"][key] for key in ("bytes", "temp"))
        for name, x in by_form(rows).items()
    }


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yields what is left in each dtype."""
    yield Table(SAVED, ())
    for dtype, result in found.items():
        rows = [
            {
                "": name,
                "GB": f"{old['bytes'] / 1e9:.1f}",
                "GB with cuDNN": f"{new['bytes'] / 1e9:.1f}",
                "share of GB": ratio(new["bytes"], old["bytes"]),
                "temporary MiB": f"{old['temp'] / 2**20:.0f}",
                "MiB with cuDNN": f"{new['temp'] / 2**20:.0f}",
                "share of MiB": ratio(new["temp"], old["temp"]),
            }
            for name, both in by_form(result["rows"]).items()
            for old, new in [(both["written"], both["fused"])]
        ]
        yield Table(f"### {dtype}\n", rows, [result])
