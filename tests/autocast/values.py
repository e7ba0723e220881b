"""A program as a list of values, each with the operation that computes it.

A jaxpr holds others, for a loop or a function, and JAX shares these between calls. Here
what is called is there once for each call, and what passes into a loop and out of it is
a value of its own. So whoever says what a value may be needs to know operations, and no
jaxprs.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

# Operations that no primitive is, each of which moves what it takes.
PASSES = {
    # Made of the first value, and of what an iteration returns, in this order. A value
    # that is computed later may be the second. Their place is among what is carried.
    "carry": "what an iteration is given of what a loop carries",
    "last": "what a loop returns of what it carries: made of the same two",
    "test": "what the test of a `while` is given: made of the same two",
    "slice of scan": "what an iteration of a scan takes of an array",
    "stack of scan": "what a scan returns of what each iteration does",
    "constant of loop": "what each iteration is given alike",
    "into checkpoint": "what a `jax.checkpoint` is given",
    "branches": "what a `lax.cond` returns: what each of its branches does",
    "into custom": "what enters a `custom_vjp` or a `shard_map`",
    "out of custom": "what leaves it",
}


@dataclasses.dataclass(eq=False)
class Value:
    """A value of a program."""

    number: int  # its place among the values
    op: str  # the primitive that computes it, "argument", "constant", or of `PASSES`
    of: list[Any]  # what it is computed from: values, and numbers in the code
    dtype: np.dtype
    shape: tuple[int, ...]
    params: dict[str, Any]  # of the primitive
    back: bool  # whether JAX wrote it to transpose
    kept: bool  # whether the user keeps it in float32
    place: int = 0  # among what its primitive returns
    # By the program; or a loop or a branch is decided by it, or an effect reads it.
    returned: bool = False
    consumers: list[tuple["Value", int]] = dataclasses.field(default_factory=list)
    # What autocast does, for whoever compares, and no business of the oracle: whether
    # the value has 16 bits, None where autocast has written other operations; what
    # the plan says of it: a sentence's number or a safeguard's name; the safeguard that
    # keeps it in float32; and whether it is computed by a "matmul" or a "move".
    half: bool | None = None
    rule: int | str | None = None
    safeguard: str | None = None
    role: str = ""

    def __repr__(self) -> str:
        """Spells it in a line."""
        of = ", ".join(
            f"{x.number}" if isinstance(x, Value) else repr(x) for x in self.of
        )
        marks = " back" * self.back + " returned" * self.returned
        bits = {True: "16", False: "32", None: "?"}[self.half]
        bits += f" {self.safeguard}" * bool(self.safeguard)
        return (
            f"{self.number} = {self.op}({of}) {self.dtype}{list(self.shape)}"
            f"{marks}: {bits} ({self.rule})"
        )


def live(values: Iterable[Value]) -> set[Value]:
    """Returns the values that are returned, or that such are computed from."""
    found: set[Value] = set()
    left = [v for v in values if v.returned]
    while left:
        v = left.pop()
        if v not in found:
            found.add(v)
            left += [x for x in v.of if isinstance(x, Value)]
    return found
