"""What is known of a value while the plan is made, and no array is there."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation, is_float32
from .._jaxprs.sizes import as_number
from .._ops import table
from .._ops.table import Definition
from . import needs
from .analysis import Row
from .needs import Need


class Facts(NamedTuple):
    """What is known of a value; hashable.

    :func:`of_outputs` sets them, a function below says each; those that a loop adds,
    ``plan._loop``. Who reads it is beside each. A new one needs both, and a row in
    ``test_special_cases.py``.
    """

    # The 16-bit dtype that it has instead of float32, None if it has its own. Decided
    # by `plan`. Read by everybody: `emit` keeps to it.
    dtype: np.dtype | None = None
    # An argument or a constant, or computed from such alone. Read by `decide`: inputs
    # are rounded where they are used, and biases are inputs.
    given: bool = False
    # Read by `is_of_cotangent`, and so by `decide`.
    cotangent: bool = False
    # Read by `decide`: of sigmoids, and of parts of a product.
    product: int = 0
    # Read by `is_of_cotangent`.
    broadcast: bool = False
    # A tangent of a derivative rule, to be transposed. Read by `plan._loop` and by
    # `emit`, whose products then add up in float32.
    tangent: bool = False
    # What every entry equals, where that is known while tracing. Read by `holds` and
    # `fits`, and wherever a number may join 16 bits.
    scalar: Any = None
    # Stored in 16 bits for a matmul, and read from there by the backward pass in
    # float32: the axes over which it sums to one, if any. Read by `decide` and `emit`.
    stored: tuple[int, ...] | None = None
    # Read in float32 by the iterations of a scan that somebody may differentiate
    # outside of autocast, so that its gradients add up in float32. Set by `plan._loop`,
    # read by `decide`.
    constant: bool = False
    # The facts of what a loop adds up beside it, see `streams`.
    sum32: "Facts | None" = None
    # Its digits are needed where it was computed, in a call or a loop. Set and read by
    # `plan._returned`, which then does not stack it in 16 bits.
    digits: bool = False
    # Read by `decide` in float16.
    joined: bool = False
    # Read by `adds_bias`.
    repeated: tuple[int, ...] = ()

    @property
    def half(self) -> bool:
        """Whether the value has 16 bits, and was float32."""
        return self.dtype is not None

    def rounded(self, dtype: np.dtype) -> "Facts":
        """Returns the facts of the value in 16 bits."""
        return Facts(dtype, self.given, tangent=self.tangent)

    def widened(self) -> "Facts":
        """Returns the facts of the value in its own dtype."""
        if self.dtype is None:
            return self
        return self._replace(dtype=None, stored=None, sum32=None)

    def seen(self) -> "Facts":
        """Returns the facts of what all read but the sum of a loop."""
        return self if self.sum32 is None else self._replace(sum32=None)

    def is_zero(self) -> bool:
        """Whether every entry is known to be zero."""
        return self.scalar is not None and self.scalar == 0

    def fits(self, dtype: np.dtype) -> bool:
        """Whether the value, if it is a number, is neither lost nor infinite."""
        if self.scalar is None:
            return True
        size, limits = float(abs(self.scalar)), jnp.finfo(dtype)
        if size == 0 or not math.isfinite(size):
            return True
        return float(limits.tiny) <= size <= float(limits.max)

    def holds(self, dtype: np.dtype) -> bool:
        """Whether ``dtype`` has the very number that the value is, if it is one."""
        number = self.scalar
        return number is None or number == np.asarray(number, dtype)


# Few differ that know no number, and one for each equation would be what the garbage
# collector goes through. Numbers are not shared: 0 is -0.
shared = functools.lru_cache(maxsize=4096)(Facts)
NOTHING = Facts()
GIVEN = Facts(given=True)


def of_literal(atom: Any) -> Facts:
    """Returns the facts of a literal."""
    number = _jaxpr.number_of(atom)
    if number is None:
        return GIVEN
    return Facts(given=True, scalar=np.asarray(number, atom.aval.dtype)[()])


def one_of(several: Sequence[Facts]) -> Facts:
    """Returns the facts of a value that is moved from one of several."""
    first, *others = several
    if not others:
        return first
    dtype = first.dtype if all([x.dtype == first.dtype for x in others]) else None
    is_stored = dtype is not None and any([x.stored is not None for x in several])
    return Facts(
        dtype,
        all([x.given for x in several]),
        tangent=any([x.tangent for x in several]),
        stored=() if is_stored else None,
        digits=any([x.digits for x in several]),
        repeated=repeated_by_all(several),
    )


def slice_of(x: Facts) -> Facts:
    """Returns the facts of what an iteration takes of a value that a scan is given."""
    axes = x.stored and tuple([n - 1 for n in x.stored if 0 not in x.stored])
    repeated = tuple([n - 1 for n in x.repeated if n])
    return x._replace(scalar=None, stored=axes, repeated=repeated)


def axes_of_stack(x: Facts, need: Need) -> tuple[int, ...] | None:
    """Returns the axes of ``stored`` where a scan stacks a value that is so needed."""
    is_stored = x.stored is not None or need & needs.BACK
    return tuple([axis + 1 for axis in x.stored or ()]) if is_stored else None


def repeated_by_all(several: Sequence[Facts]) -> tuple[int, ...]:
    """Returns the axes along which each of several values repeats its entries."""
    first, *others = [x.repeated for x in several]
    return tuple([i for i in first if all([i in axes for axes in others])])


# What an equation returns. Each fact has a function, but for the dtype.


def of_outputs(
    row: Row,
    ins: Sequence[Facts],
    halves: Sequence[bool],
    dtype: np.dtype,
    stored: tuple[int, ...] | None,
) -> tuple[Facts, ...]:
    """Returns the facts of the outputs of an equation that is not gone into.

    Args:
        row: The equation.
        ins: The facts of its inputs.
        halves: Which of its outputs have 16 bits.
        dtype: These.
        stored: Over which axes they sum to one, if they are stored.
    """
    eqn = row.eqn
    floats = [is_float32(var) for var in eqn.outvars]
    given = row.kind != "product" and all_given(ins)
    scalar = _number(row, ins)
    cotangent = row.back and _is_cotangent(row, ins)
    product = _way_from_product(row, ins)
    broadcast = row.back and _is_broadcast(row, ins)
    tangent = any([x.tangent for x in ins])
    joined = _is_joined(row, ins)
    repeated = _repeated(eqn, ins) if given and floats else ()
    known = shared if scalar is None else Facts
    return tuple(
        [
            known(
                dtype if is_half and is_float else None,
                given,
                cotangent,
                0 if is_half or not is_float else product,
                broadcast,
                tangent,
                scalar,
                stored if is_half and is_float else None,
                joined=joined and not is_half,
                repeated=repeated,
            )
            for is_half, is_float in zip(halves, floats, strict=True)
        ]
    )


def all_given(ins: Sequence[Facts]) -> bool:
    return all([x.given for x in ins])


def _number(row: Row, ins: Sequence[Facts]) -> Any:
    """What every entry equals, where numbers of the code alone make it."""
    numbers = [x.scalar for x in ins if x.scalar is not None]
    if row.kind == "product" or not numbers or len(numbers) < len(ins):
        return None
    return table.folded(row.eqn, numbers)


def _is_cotangent(row: Row, ins: Sequence[Facts]) -> bool:
    """Whether a product of the backward pass returned it, or it is computed from such.

    Elementwise, or moved: it may be rounded once more, as each entry has been.
    """
    if row.kind == "product" or is_of_cotangent(row.eqn, ins):
        return True
    return row.kind == "exact" and any([x.cotangent for x in ins])


def is_of_cotangent(eqn: Equation, ins: Sequence[Facts]) -> bool:
    """Whether what ``eqn`` of a backward pass returns is made of a product's cotangent.

    It is made of that elementwise, so each of its entries has been rounded, and
    may be once more. Not behind a factor that was given, which may bring them out
    of range. And not copies: these were rounded alike, and their errors add up.
    """
    makes = table.multiplies(eqn) or table.adds_terms(eqn)
    if not makes or any([table.is_far(x.scalar) for x in ins]):
        return False
    if any(x.stored or (x.given and x.scalar is None) for x in ins):
        return False
    return any(x.cotangent and not x.broadcast for x in ins)


def _is_broadcast(row: Row, ins: Sequence[Facts]) -> bool:
    """Whether entries of a cotangent are alike, as those of the mean are."""
    if table.copies(row.eqn):
        return True
    if row.kind == "product":
        return any([x.broadcast or x.scalar is not None for x in ins])
    computed = [x for x in ins if x.scalar is None]
    return bool(computed) and all([x.broadcast for x in computed])


def _way_from_product(row: Row, ins: Sequence[Facts]) -> int:
    """Whether float32 is computed from what a product returned, not counting biases.

    2 if elementwise, 1 if by powers too, and 0 if not.
    """
    eqn = row.eqn
    if row.kind == "product":
        return 2
    if row.kind not in ("exact", "smooth") and not table.is_power(eqn):
        return 0
    has_bias = table.joins(eqn) and adds_bias(eqn, ins)
    made = [
        2 if x.half and x.stored is None else x.product
        for x, var in zip(ins, eqn.invars, strict=True)
        if is_float32(var) and x.scalar is None and not (has_bias and x.given)
    ]
    return min([*made, 1 if table.is_power(eqn) else 2]) if made else 0


def _is_joined(row: Row, ins: Sequence[Facts]) -> bool:
    """Whether it is a sum of 16 bits and of an input, in range if these are."""
    if table.joins(row.eqn) and any([x.half or x.joined for x in ins]):
        return all([x.half or x.joined or x.given for x in ins])
    return row.kind == "exact" and len(ins) == 1 and ins[0].joined


def _repeated(eqn: Equation, ins: Sequence[Facts]) -> tuple[int, ...]:
    """Returns the axes along which what ``eqn`` makes of inputs repeats entries."""
    shape = eqn.outvars[0].aval.shape
    if table.broadcasts(eqn):
        old = eqn.invars[0].aval.shape
        varies = [
            axis
            for i, axis in enumerate(eqn.params["broadcast_dimensions"])
            if old[i] == shape[axis] and i not in ins[0].repeated
        ]
        return tuple([i for i, n in enumerate(shape) if n != 1 and i not in varies])
    if table.transposes(eqn):
        old = eqn.params["permutation"]
        return tuple([i for i, axis in enumerate(old) if axis in ins[0].repeated])
    arrays = [x for x in zip(ins, eqn.invars, strict=True) if x[0].scalar is None]
    same = all([x.aval.shape == shape for _, x in arrays])
    keeps = table.is_elementwise(eqn) or table.keeps_magnitudes(eqn)
    if not (arrays and same and keeps):
        return ()
    return repeated_by_all([x for x, _ in arrays])


def adds_bias(eqn: Equation, ins: Sequence[Facts]) -> bool:
    """Whether the inputs of the program that a sum adds are biases, or numbers.

    A bias varies along one axis, and the sum repeats it along one before. What has
    an entry for each row, such as positions, may cancel behind the sum.
    """
    shape = eqn.outvars[0].aval.shape
    for x, var in zip(ins, eqn.invars, strict=True):
        if x.half or not x.given or x.scalar is not None:
            continue
        own = var.aval.shape or (1,) * len(shape)
        alike = [own[i] != n or i in x.repeated for i, n in enumerate(shape) if n != 1]
        if alike.count(False) != 1 or not alike[0]:
            return False
    return True


def stored_axes(var: Any, definition: Definition) -> tuple[int, ...]:
    """Returns the axes over which what is stored in 16 bits sums to one."""
    eqn = definition(var)
    axes = table.axes_of_softmax(eqn, definition) if eqn else ()
    # Of more than 2^14 weights the largest may round to zero, and so may the sum.
    few = as_number(math.prod(var.aval.shape[i] for i in axes)) <= 2**14
    return axes if few else ()
