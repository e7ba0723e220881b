"""What the readers of a value do with it, and what it is wanted for because of that."""

from collections.abc import Sequence
from typing import Literal


class Use:
    """What the readers of a value do with it: bits, of which it has those that apply.

    They are plain integers, because planning puts uses together for every variable of
    every equation, and an ``enum.Flag`` takes ten times as long for that.
    """

    NOTHING = 0
    PRODUCT = 1 << 0  # one is a product, or moves it or chooses from it for one
    IN_16BIT = 1 << 1  # one takes it in 16 bits
    OTHERWISE = 1 << 2  # one reads it and is no product
    COMPUTES = 1 << 3  # one computes with it, before the backward pass or there
    ADDS = 1 << 4  # one adds to it
    MULTIPLIES = 1 << 5  # one multiplies by it in the backward pass
    TOTALS = 1 << 6  # one sums it up in the backward pass: a bias's gradient
    DIGITS = 1 << 7  # one needs its last digits
    REGION = 1 << 8  # one is what the user keeps in float32
    # One is a loop that may yet be differentiated, and takes it in every trip.
    TRIPS = 1 << 9
    # One multiplies by it in the backward pass, for who takes no 16 bits.
    WIDE = 1 << 10
    GATE = 1 << 11  # it multiplies a number many times, or what is made of it does
    TERMS = 1 << 12  # one adds it up as the gradient of a lookup, or moves it there
    # One is an exponential that makes no more of what rounding loses. A difference is
    # not rounded for it: what is left of larger numbers may be the digits lost.
    BOUNDED = 1 << 13
    RESULT = 1 << 14  # a result is computed from it, and no product is in between
    # A difference is made of it, or it is returned: what was given keeps its digits
    # where it is added to make this, or to make a part of that sum.
    OFFSET = 1 << 15
    PART = 1 << 16
    EXACT = DIGITS | GATE
    OFFSETS = OFFSET | PART


# What a value is wanted for, by whoever decides in which dtype it is computed.
Want = Literal[
    "stored",  # in 16 bits: a product takes it, and nobody computes with it
    "summed",  # in 16 bits: so it is, and summed up in the backward pass
    "kept",  # in 16 bits: so it is, and the backward pass multiplies by it
    "added",  # in 16 bits, by a product; others add to it
    "product",  # in 16 bits, by a product; others compute with it
    "16-bit",  # in 16 bits, by others than products
    "factor",  # in 16 bits: the backward pass multiplies by it for 16 bits alone
    "multiplied",  # in 16 bits: multiplied by and summed up in the backward pass
    "terms",  # in 16 bits, if products send it back: a lookup's gradient adds it up
    "original",  # nobody would take it in 16 bits
    "result",  # the same, and a result is computed from it without a product
    "offset",  # the same, and what was given and is added to it keeps its digits
    "predicted",  # so it does, but somebody takes the sum in 16 bits
    "digits",  # somebody needs its last digits, so that it is not rounded
    "gate",  # the same, because what multiplies a number many times is made of it
    "rounded",  # somebody needs its digits, or nobody 16 bits; the user wants them
]
USES: dict[Want, int] = {
    "stored": Use.PRODUCT | Use.IN_16BIT,
    "summed": Use.PRODUCT | Use.IN_16BIT | Use.TOTALS,
    "kept": Use.PRODUCT | Use.IN_16BIT | Use.MULTIPLIES,
    "added": Use.PRODUCT | Use.IN_16BIT | Use.ADDS,
    "product": Use.PRODUCT | Use.IN_16BIT | Use.COMPUTES,
    "16-bit": Use.IN_16BIT | Use.COMPUTES,
    "factor": Use.IN_16BIT | Use.MULTIPLIES,
    "multiplied": Use.IN_16BIT | Use.MULTIPLIES | Use.TOTALS,
    "terms": Use.TERMS | Use.TOTALS,
    "original": Use.COMPUTES,
    "result": Use.COMPUTES | Use.RESULT,
    "offset": Use.COMPUTES | Use.RESULT | Use.OFFSET,
    "predicted": Use.IN_16BIT | Use.COMPUTES | Use.RESULT | Use.OFFSET,
    "digits": Use.DIGITS | Use.COMPUTES,
    "gate": Use.GATE | Use.COMPUTES,
    "rounded": Use.COMPUTES,
}
IN_16BIT: frozenset[Want] = frozenset(
    want for want, use in USES.items() if use & Use.IN_16BIT
)
FOR_PRODUCT: frozenset[Want] = frozenset(
    want for want, use in USES.items() if use & Use.PRODUCT
)
# What products alone take, or the backward pass multiplies by for 16 bits.
FOR_BACKWARD: frozenset[Want] = frozenset(
    {"stored", "summed", "kept", "factor", "multiplied"}
)
# What a scan stacks for readers who need no more than 16 bits.
STACKED: frozenset[Want] = frozenset({"stored", "summed", "kept", "factor"})
# In which products return 16 bits, as do those who add up what they returned.
RETURNED: frozenset[Want] = frozenset({*IN_16BIT, "terms"})
# In which nothing is rounded.
EXACT: frozenset[Want] = frozenset(
    want for want, use in USES.items() if use & Use.EXACT
)
# What may be stored in 16 bits: nobody who reads it needs more.
STORED: frozenset[Want] = frozenset({"stored", "summed", "kept", "added", "multiplied"})


def wanted_for(use: int) -> Want:
    """Returns what a value is wanted for whose readers do this with it."""
    if use & Use.DIGITS:
        return "digits"
    if use & Use.GATE:
        return "gate"
    if use & ~(Use.OTHERWISE | Use.WIDE) == USES["multiplied"]:
        return "multiplied"
    if use & ~Use.OTHERWISE == USES["factor"]:
        return "factor"
    if use & ~Use.OTHERWISE == USES["terms"]:
        return "terms"
    if use & Use.OFFSET:
        return "predicted" if use & Use.IN_16BIT else "offset"
    if not use & Use.PRODUCT:
        if use & Use.IN_16BIT:
            return "16-bit"
        return "result" if use & Use.RESULT else "original"
    if use & Use.COMPUTES or (use & Use.ADDS and use & Use.MULTIPLIES):
        return "product"
    if use & Use.ADDS:
        return "added"
    if use & Use.TOTALS:
        return "summed"
    return "kept" if use & Use.MULTIPLIES else "stored"


def as_written(wanted: Sequence[Want]) -> tuple[Want, ...]:
    """Returns what is wanted of a body that returns its original types."""
    float32: dict[Want, Want] = {
        "result": "result",
        "offset": "offset",
        "predicted": "offset",
    }
    return tuple(float32.get(want, "original") for want in wanted)


def read_again(want: Want, use: int) -> Want:
    """Returns what is wanted of what a loop carries, which its next trip reads.

    Args:
        want: What is wanted of it otherwise.
        use: What the next trip does with it.
    """
    if use & Use.EXACT:
        return "digits"
    return "offset" if use & Use.OFFSET and want not in EXACT else want
