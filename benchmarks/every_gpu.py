"""What autocast saves of a float32 step on five GPUs, by the best policy of each.

Six networks, compiled for each GPU (extra ``aot``; nothing runs): the bytes that a
training step moves, and its temporary memory. The networks are small enough to compile
fast, and for float32 to fit on the smallest GPU.
"""

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from .counting import named, results, targets
from .counting.results import Table, by_form, ratio
from .counting.steps import AUTOCAST, contestant
from .machinery import count
from .networks.basic import Network, gpt, mlp, resnet
from .networks.families import FAMILIES


def _shallow(name: str) -> Network:
    """Returns a network with two layers in the place of four."""
    network = FAMILIES[name]
    return network._replace(model=network.model.clone(layers=2))


GPUS: tuple[str, ...] = get_args(targets.Named)
TITLES = {
    "t4": "T4",
    "a100": "A100",
    "rtx4090": "RTX 4090",
    "h200": "H200",
    "b200": "B200",
}
NETWORKS = {
    "GPT, 4 x 1024 tokens": gpt(4, layers=2),
    "ResNet-18, 32 images": resnet(
        32, image=224, stages=(2, 2, 2, 2), bottleneck=False
    ),
    "Llama, 16 x 512 tokens": _shallow("llama"),
    "ViT, 64 images": _shallow("vit"),
    "BERT, 32 x 256 tokens": _shallow("bert"),
    "MLP, 27M parameters": mlp(256, features=2048),
}

SAVED = """\
## What autocast saves on each GPU

The memory traffic and the temporary memory of a training step, relative to float32, by
the best policy of the GPU: `mixed_float16` where it multiplies no bfloat16, and else
`mixed_bfloat16`. Transformers have two layers, and attention that is written out.
"""


def main(
    *, networks: tuple[str, ...] = tuple(NETWORKS), gpus: tuple[str, ...] = GPUS
) -> None:
    """Counts each network for each GPU, in float32 and under autocast.

    Args:
        networks: Which.
        gpus: Which.
    """
    named.check("network", networks, NETWORKS)
    named.check("GPU", gpus, targets.GPUS)
    targets.require("every_gpu")
    for gpu in gpus:
        new, hardware = counts(networks, gpu), targets.hardware(gpu)
        results.update("every_gpu", gpu, hardware, new, "network", "form")


def dtype_of(gpu: str) -> str:
    """Returns the 16-bit dtype that a GPU multiplies, bfloat16 if it has both."""
    return "bfloat16" if targets.GPUS[gpu].capability >= (8, 0) else "float16"


def counts(networks: tuple[str, ...], gpu: str) -> Iterator[dict[str, Any]]:
    """Yields what was counted in each network, in float32 and under autocast."""
    for name in networks:
        for form in ("float32", AUTOCAST):
            network, dtype = NETWORKS[name], dtype_of(gpu)
            found = count(contestant(form, network, dtype=dtype), network, gpu)
            kept = {key: found[key] for key in ("bytes", "temp", "products")}
            yield {"network": name, "form": form} | kept


def tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Yields the shares that are left, with a column for each GPU."""
    by_gpu = {gpu: by_form(found[gpu]["rows"]) for gpu in GPUS if gpu in found}
    rows = []
    for name in NETWORKS:
        row = {"": name}
        for gpu, networks in by_gpu.items():
            forms = networks.get(name, {})
            ours, wide = forms.get(AUTOCAST, {}), forms.get("float32", {})
            shares = (ratio(ours.get(x), wide.get(x)) for x in ("bytes", "temp"))
            row[f"{TITLES[gpu]}, {dtype_of(gpu)}"] = "/".join(shares)
        rows.append(row)
    if by_gpu:
        yield Table(SAVED, rows, [found[gpu] for gpu in by_gpu])
