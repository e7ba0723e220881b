"""The transformers of the other files with attention as one operation.

They are the same models with :func:`jaxmp.dot_product_attention` in the place of the
attention that is written out.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jaxmp
import jaxmp.linen

from .basic import Network

CAUSAL = functools.partial(jaxmp.dot_product_attention, is_causal=True)
# What each has in the place of its attention, and what else changes.
ATTENTION: dict[str, dict[str, Any]] = {
    "gpt": {"attention": CAUSAL},
    "gpt-160m": {"attention": CAUSAL},
    "gpt, scanned": {"attention": CAUSAL},
    "llama": {"attention": CAUSAL},
    "llama, grouped queries": {"attention": CAUSAL},
    "llama-1.6b": {"attention": CAUSAL},
    "vit": {"attention": jaxmp.dot_product_attention},
    "bert, no attention dropout": {"attention": jaxmp.linen.dot_product_attention},
}
FUSED = ", fused"


def fused(networks: Mapping[str, Network]) -> dict[str, Network]:
    """Returns those of some networks whose attention can be fused, with it so."""
    return {
        f"{name}{FUSED}": networks[name]._replace(
            model=networks[name].model.clone(**changed)
        )
        for name, changed in ATTENTION.items()
        if name in networks
    }
