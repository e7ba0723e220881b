"""What the reports of audits share: FLOPs by dtype, their shares, data and text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from ..._base.checks import as_html
from ..._base.dtypes import is_wide
from ..text import as_lists, unit

PRODUCTS = "matmul and convolution FLOPs"


@dataclasses.dataclass(frozen=True)
class FlopsReport:
    """FLOPs by dtype, and what makes a report of them; a subclass has its lines."""

    flops: dict[str, float]

    @property
    def fraction_16bit(self) -> float:
        """Share of the FLOPs in at most 16 bits, 1 if there are no products."""
        return self._fraction(lambda dtype: not is_wide(dtype))

    @property
    def fraction_8bit(self) -> float:
        """Share of the FLOPs in 8 bits, 1 if there are no products."""
        return self._fraction(lambda dtype: dtype.itemsize == 1)

    def _fraction(self, counts: Callable[[Any], bool]) -> float:
        total = sum(self.flops.values())
        some = sum(n for name, n in self.flops.items() if counts(jnp.dtype(name)))
        return some / total if total else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as dicts, lists, strings and numbers, for JSON.

        Examples:
            >>> w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
            >>> jaxmp.audit(jnp.matmul)(w, w).as_dict()["flops"]
            {'float32': 1024.0}
        """
        return {
            "fraction_16bit": self.fraction_16bit,
            "fraction_8bit": self.fraction_8bit,
            **as_lists(dataclasses.asdict(self)),
        }

    def lines(self) -> Iterator[str]:
        """Yields the lines of the text of the report."""
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(self.lines())

    _repr_html_ = as_html


def verdict(report: FlopsReport, is_for_8bit: bool = False) -> Iterator[str]:
    """Yields the shares of the FLOPs in 16 bits, and in 8 where somebody asked."""
    total = sum(report.flops.values())
    share = f"{report.fraction_16bit:.1%} of {PRODUCTS} in 16 bits"
    yield share if total else f"no {PRODUCTS}"
    if is_for_8bit or (report.fraction_8bit and total):
        yield f"{report.fraction_8bit:.1%} of them in 8 bits"


def by_dtype(flops: dict[str, float]) -> Iterator[str]:
    """Yields a line for each dtype."""
    total = sum(flops.values())
    width = max(map(len, ("bfloat16", *flops))) + 2
    for dtype, some in flops.items():
        yield f"  {dtype:<{width}}{some / total:>7.1%}  {unit(some, 1000)}FLOP"
