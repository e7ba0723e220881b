"""What the consumers of a value need of it: a set of kinds of consumer.

This is the whole lattice: sets, which join by union. Others put them together with
``|`` and hand them on. What several of them mean together is said by the predicates
below, and nowhere else, so that no rule can depend on a consumer that the others do not
see.
"""

Need = int  # an ``enum.Flag`` takes ten times as long

NOTHING: Need = 0
PRODUCT: Need = 1  # a product takes it, perhaps moved or chosen from
HALF: Need = 2  # elementwise work that runs in 16 bits, in the forward pass
HALF_BACK: Need = 4  # the same, in the backward pass
FULL: Need = 8  # float32 work, in the forward pass: a sum, a norm, a loss
FULL_BACK: Need = 16  # the same, in the backward pass
DIGITS: Need = 32  # its last digits matter: a result, a divisor, what a logarithm reads
GATE: Need = 64  # so do those of what it becomes: it multiplies what a loop carries
REGION: Need = 128  # the user keeps in float32 what reads it
COMPARED: Need = 256  # a loop compares it, or what comes of it, with its own numbers
LATER: Need = 512  # float32 work reads what 16-bit work of the forward pass makes of it
# Beside GATE or DIGITS: many factors multiply one another, and that is the reason.
MANY: Need = 1024
# Beside PRODUCT: a number or a mask multiplies it before, which 16 bits in its place
# would round once more.
SCALED: Need = 2048

_NAMES = {
    PRODUCT: "matmul",
    HALF: "16-bit work",
    HALF_BACK: "16-bit work of the backward pass",
    FULL: "float32 work",
    FULL_BACK: "float32 work of the backward pass",
    DIGITS: "digits",
    GATE: "gate",
    REGION: "float32 region",
    COMPARED: "comparison",
    LATER: "float32 work later",
    MANY: "many factors",
    SCALED: "scaled",
}

_FORWARD = PRODUCT | HALF  # what takes 16 bits in the forward pass
_TAKES_HALF = _FORWARD | HALF_BACK
BACK = HALF_BACK | FULL_BACK
_IN_FULL = DIGITS | GATE | COMPARED
# What a float32 region reads: all that is needed at all.
EVERYTHING: Need = DIGITS | GATE | REGION


def consumer(half: bool, back: bool) -> Need:
    """Returns what kind of consumer an operation is.

    Args:
        half: Whether it runs in 16 bits.
        back: Whether it belongs to the backward pass.
    """
    return (HALF_BACK if back else HALF) if half else (FULL_BACK if back else FULL)


def is_half(need: Need) -> bool:
    """Whether a value is in 16 bits if 16-bit work computes it.

    Not what the forward pass reads in float32 alone: that the gradient of a loss
    multiplies by it is no reason to round it.
    """
    if need & _IN_FULL or (need & FULL and not need & _FORWARD):
        return False
    return bool(need & _TAKES_HALF)


def is_stored(need: Need) -> bool:
    """Whether a float32 value is stored in 16 bits.

    A product takes it, and nobody else reads it but the backward pass.
    """
    return bool(need & PRODUCT) and not need & ~(PRODUCT | SCALED | BACK)


def is_for_backward_alone(need: Need) -> bool:
    """Whether work of the backward pass reads a value, and nobody else."""
    return bool(need & BACK) and not need & ~BACK


def is_summed_and_handed_on(need: Need) -> bool:
    """Whether the backward pass sums a value up, and takes it in 16 bits as well."""
    return need | PRODUCT | SCALED == BACK | PRODUCT | SCALED


def is_rounded_for_products(need: Need) -> bool:
    """Whether products take a value, and nobody else reads it at all."""
    return need == PRODUCT


def is_for_products(need: Need) -> bool:
    """Whether products take a value, perhaps scaled, and nobody else reads it."""
    return need | SCALED == PRODUCT | SCALED


def is_carried(last: Need, each: Need) -> bool:
    """Whether a loop carries 16 bits.

    Args:
        last: Needs of the value after the last iteration.
        each: Needs of the value after any iteration.
    """
    return is_half(each) and (is_half(last) or not last)


def is_for_backward(need: Need) -> bool:
    """Whether the backward pass alone reads a value, such as a slope."""
    return bool(need & BACK) and not need & ~(BACK | DIGITS | MANY)


def is_computed_with_again(need: Need) -> bool:
    """Whether elementwise work of the forward pass reads a value, but not its digits.

    Of what the backward pass alone reads it says whether that computes a layer again.
    """
    return bool(need & (HALF | FULL)) and not needs_digits(need)


def needs_digits(need: Need) -> bool:
    """Whether somebody needs the last digits of a value, or of what it becomes."""
    return bool(need & (EVERYTHING | COMPARED))


def has_several(need: Need) -> bool:
    """Whether consumers of several kinds read a value."""
    need &= ~(LATER | MANY | SCALED)
    return bool(need & (need - 1))


def is_squashed_for_products(need: Need, *, behind: bool) -> bool:
    """Whether a value that comes close to one is rounded.

    16-bit work of the forward pass takes it. The backward pass alone makes the slope of
    it, one less the value, and needs full precision.

    Args:
        need: What its consumers need.
        behind: Whether it is made of a matmul entry by entry. If not, no float32 work
            may read what comes of it.
    """
    return bool(need & _FORWARD) and (behind or not need & (FULL | LATER))


def handed_on(need: Need, *, squashed: bool = False) -> Need:
    """Returns what of ``need`` is needed of that from which a value is computed.

    Args:
        need: What its consumers need.
        squashed: Whether it comes close to one only where it hardly changes, such as a
            sigmoid, so that a gate is no steeper than what it is computed from.
    """
    return need & (DIGITS if squashed else EVERYTHING | MANY)


def in_float32(need: Need) -> Need:
    """Returns the needs of a value that has to be float32 where it is handed over."""
    return need & ~_TAKES_HALF | FULL


def in_words(need: Need) -> str:
    """Returns the names of the consumers in a set, for the table of a plan."""
    return ", ".join(name for kind, name in _NAMES.items() if need & kind) or "nobody"
