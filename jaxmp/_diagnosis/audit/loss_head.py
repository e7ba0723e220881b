"""Loss heads that a program writes out, with an array of logits.

Such a head is found part by part, as an attention is: a matmul by more words than a row
has numbers, at most a bias, a scale and a cap, and the logarithm of a sum of
exponentials.
"""

import math
from collections.abc import Sequence
from typing import Any

from ..._jaxprs.places import Place
from ..._jaxprs.sizes import as_number
from ..._ops import table
from ..._ops.products import sizes
from .attention import Part, is_of_attention
from .report import WrittenHead


class Heads:
    """The loss heads of a program that are written out, by line."""

    def __init__(self):
        self.rows: dict[Any, WrittenHead] = {}

    def look(self, eqn: Any, ins: Sequence[Part | None], place: Place) -> None:
        """Notes a head that an equation completes."""
        if not table.is_logarithm(eqn):
            return
        (part,) = ins
        if part is None or part.stage != "sum" or is_of_attention(part):
            return
        found, logits = sizes(part.scores), part.scores.outvars[0].aval.shape
        if found is None or as_number(found[2]) <= as_number(found[1]):
            return  # its logits are no larger than what they are made of
        row = self.rows.get(place.where) or WrittenHead(0, place.module, place.where)
        size = row.bytes + 4 * int(as_number(math.prod(logits)))
        self.rows[place.where] = WrittenHead(size, row.module, row.where)
