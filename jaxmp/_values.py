"""What autocast knows of a value while it replays a jaxpr."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _jaxpr
from ._jaxpr import FLOAT32, Equation, is_float32, is_inexact
from ._op_lists import (
    ADDS_UP,
    COPIES,
    EXACT,
    EXPS,
    FOLDS,
    JOINS,
    JOINS_TERMS,
    LEAVES_RANGE,
    SCALES,
    STRETCHES,
    TOTALS,
    VIEWS,
    divisor,
    is_far,
    is_power,
    is_steep_power,
    looks_up_rows,
    only_compared,
)
from ._scopes import SATURATED
from ._sizes import as_number, size_of
from ._sums import firmly_rounded
from ._uses import IN_16BIT, RETURNED, Want


class Known(NamedTuple):
    """What is known of a value beside its array, hashable."""

    narrow: bool
    scalar: Any
    source_size: int | None
    linear: bool
    outside: bool
    follows: bool
    sent_back: bool
    copied: bool
    summed: bool
    normed: bool
    kept: tuple[int, ...] | None

    def of(self, array: Any) -> "Value":
        """Returns a value of which this is known: what stands for it elsewhere."""
        return Value(array, **self._asdict())


@dataclasses.dataclass(slots=True)
class Value:
    """A value during the replay, and what is known of it."""

    array: Any  # array, tracer or literal: the original dtype, 16-bit if `narrow`
    narrow: bool = False
    scalar: Any = None  # what every entry equals, where that is known while tracing
    # Size of the float32 input of which this is a view; 0 where narrowing is always
    # right: vectors (biases, scales), scalars and what was boolean.
    source_size: int | None = None
    linear: bool = False  # comes from the tangents of a rule, to be transposed
    outside: bool = False  # given, or computed from what was given alone
    # A float32 value that belongs with 16-bit ones: an embedding, which was looked up,
    # or what was made of 16-bit values and others, or of 16-bit values out of range.
    follows: bool = False
    # Sent back by a product in the backward pass, or made of what was, elementwise; and
    # whether entries of it are copies: a mean sends back the same to all.
    sent_back: bool = False
    copied: bool = False
    # A sum of what was sent back, or made of one. A norm sends back what it was sent,
    # less such sums.
    summed: bool = False
    normed: bool = False  # float32, what a norm returns: of order one
    # Rounded for a product, and read from there by the backward pass, in float32: the
    # axes over which it sums to one, if any.
    kept: tuple[int, ...] | None = None
    _original: Any = None
    _in_16bit: Any = None

    def known(self) -> Known:
        """Returns what matters to those who are given the array."""
        # A layer that is called with its number is the same layer for each number. Zero
        # fills what was dropped, also the integer that `jnp.where` is often given.
        told = getattr(self.scalar, "dtype", None) == FLOAT32 or self.is_zero()
        return Known(
            self.narrow,
            self.scalar if told else None,
            self.source_size,
            self.linear,
            self.outside,
            self.follows,
            self.sent_back,
            self.copied,
            self.summed,
            self.normed,
            self.kept,
        )

    def widened(self) -> "Value":
        """Returns the value in its original dtype."""
        if not self.narrow:
            return self
        return self.known()._replace(narrow=False, kept=None).of(self.original())

    def is_zero(self) -> bool:
        """Whether every entry is known to be zero."""
        return self.scalar is not None and self.scalar == 0

    def is_computed(self) -> bool:
        """Whether the value is float32 and was computed: neither given nor a number."""
        if self.narrow or self.outside or self.scalar is not None:
            return False
        return getattr(self.array, "dtype", None) == FLOAT32

    def rounds_again(self) -> bool:
        """Whether a product sent back each entry, rounded, or what it was made of."""
        return self.sent_back and not self.copied

    def is_noted(self) -> bool:
        """Whether something is known of the value that elementwise work hands on."""
        notes = self.narrow, self.follows, self.normed, self.sent_back, self.summed
        return any(notes)

    def leads(self, name: str, dtype: np.dtype) -> bool:
        """Whether the value lets the operation ``name`` run in 16 bits."""
        made = self.follows and not self.outside  # of 16-bit values and a scale
        # As in the sum of an embedding, which in float16 may be out of range.
        made |= self.normed and dtype == jnp.bfloat16
        return self.narrow or (made and name in JOINS)

    def may_join(self, name: str, size: int, dtype: np.dtype) -> bool:
        """Whether the value lets ``name``, of ``size`` 16-bit numbers, be narrow."""
        if self.narrow or self.scalar is not None:
            return self.fits(dtype)
        smaller = self.source_size is not None and self.source_size < size
        return (smaller or self.follows or self.normed) and name in JOINS

    def fits(self, dtype: np.dtype) -> bool:
        """Whether the value, if it is a number, is one in ``dtype`` too."""
        return self.scalar is None or _fits(self.scalar, dtype)

    def original(self) -> Any:
        """Returns the array in its original dtype."""
        if not self.narrow:
            return self.array
        if self._original is None:  # Shared, so that its cotangents add up in float32.
            wide = cast(self.array, FLOAT32)
            if self.kept:
                # What rounding has left of the sums is taken out again. Divided by its
                # sums, a softmax is also what XLA has a kernel for.
                wide = wide / jnp.sum(wide, self.kept, keepdims=True)
            self._original = wide
        return self._original

    def stored(self, dtype: np.dtype) -> "Value":
        """Returns the value rounded, for all who read it."""
        return Value(
            cast(self.array, dtype),
            narrow=True,
            linear=self.linear,
            sent_back=self.sent_back,
            copied=self.copied,
            summed=self.summed,
        )

    def firmly_stored(self, dtype: np.dtype) -> "Value":
        """Returns the value rounded, for all who read it, whatever XLA makes of it."""
        value = self.stored(dtype)
        value.array = firmly_rounded(value.array)
        return value

    def rounded(self, dtype: np.dtype) -> "Value":
        """Returns the value in 16 bits for those who read it so, see `unrounded`."""
        array = self.in_16bit(dtype)
        return dataclasses.replace(
            self, array=array, narrow=True, _original=self.unrounded()
        )

    def unrounded(self) -> Any:
        """Returns in float32 what rounds to the array, with all digits there are."""
        if self.kept:  # of which the original is no more
            return cast(self.array, FLOAT32)
        return self.original()

    def kept_for_backward(
        self, dtype: np.dtype, axes: tuple[int, ...], summed: bool
    ) -> "Value":
        """Returns the value rounded, and read from there by the backward pass.

        Args:
            dtype: Its dtype.
            axes: Those over which it sums to one.
            summed: Whether it is summed up there.
        """
        if summed and not axes:
            value = self.firmly_stored(dtype)
        else:
            # XLA would keep what the value was computed from, and compute it anew.
            value = self.stored(dtype)
            value.array = lax.optimization_barrier(value.array)
        # Of more than 2^14 weights the largest may round to zero, and so may the sum.
        few = as_number(math.prod(value.array.shape[i] for i in axes)) <= 2**14
        value.kept = axes if few else ()
        return value

    def in_16bit(self, dtype: np.dtype) -> Any:
        """Returns the array in ``dtype``, which has 16 bits."""
        if self.narrow or self.array.dtype == dtype:
            return self.array
        if not isinstance(self.array, jax.Array):  # a literal
            return np.asarray(self.array, dtype)
        if self._in_16bit is None or self.source_size is not None:
            # A weight is rounded anew for each use, so that its gradients are widened
            # before they add up over the steps of a loop. An activation, as in Flax,
            # is rounded once, so that it is also kept once for the backward pass.
            self._in_16bit = cast(self.array, dtype)
        return self._in_16bit

    def joining(self, name: str, shape: tuple, dtype: np.dtype) -> Any:
        """Returns the array in ``dtype``, for a ``name`` that returns ``shape``."""
        if self.scalar is not None:
            return self.in_16bit(dtype)
        stretched = name in STRETCHES and self.array.shape != shape
        if self.narrow and not stretched:
            return self.in_16bit(dtype)
        # A mask of -1e9 must not become -inf.
        array = saturated(self.array, dtype) if self.outside else self.array
        if stretched:
            # The transpose of stretching is a sum, which is to run in float32.
            aligned = range(len(shape) - array.ndim, len(shape))
            array = self.original() if self.narrow else array
            array = lax.broadcast_in_dim(array, shape, aligned)
        return cast(array, dtype)


def cast(array: Any, dtype: np.dtype) -> Any:
    """Returns an array in another dtype.

    It is ``lax.convert_element_type`` without its checks, traced once for each type:
    there are hundreds in a step.
    """
    return _jaxpr.bind(_cast_of(jax.typeof(array), dtype), [array])[0]


@functools.lru_cache(maxsize=4096)
def _cast_of(aval: Any, dtype: np.dtype) -> Equation:
    def cast(x):
        return lax.convert_element_type_p.bind(
            x, new_dtype=dtype, weak_type=False, sharding=None
        )

    (eqn,) = _jaxpr.trace(cast, [aval]).eqns
    return eqn


def given(array: Any) -> Value:
    """Returns a value that comes from outside: an argument or a constant."""
    if getattr(array, "dtype", None) != jnp.float32:
        return Value(array, outside=True)
    size = 0 if array.ndim <= 1 else size_of(array)
    return Value(array, source_size=size, outside=True)


def literal(atom: Any) -> Value:
    """Returns the value of a literal."""
    if atom.aval.shape or not jnp.issubdtype(atom.aval.dtype, np.number):
        return Value(atom.val)
    return Value(atom.val, scalar=np.asarray(atom.val, atom.aval.dtype)[()])


def saturated(array: Any, dtype: np.dtype) -> Any:
    """Clips what is finite to the range of ``dtype``."""
    limit = np.float32(jnp.finfo(dtype).max)
    with jax.named_scope(SATURATED):
        clipped = lax.clamp(-limit, array, limit)
        return lax.select(lax.is_finite(array), clipped, array)


def runs_in_16bit(
    eqn: Equation, ins: Sequence[Value], want: Want, dtype: np.dtype
) -> bool:
    """Whether an operation of the infer list runs in 16 bits.

    Args:
        eqn: The operation.
        ins: What it is given.
        want: What its result is wanted for.
        dtype: The 16-bit dtype.
    """
    if not any([value.narrow or value.follows for value in ins]) or is_power(eqn):
        return False
    name, compared = eqn.primitive.name, only_compared(eqn)
    operands = zip(ins, eqn.invars, strict=True)
    # The largest of a window is looked for in 16 bits, too, but within range.
    floats = [
        value
        for i, (value, var) in enumerate(operands)
        if is_float32(var) and not (i == compared and value.normed)
    ]
    leading = [x.array for x in floats if x.leads(name, dtype)]
    size = max(map(size_of, leading), default=0)
    if not size:
        return False
    kept = any(value.kept is not None for value in floats)
    exact = (name in EXACT or compared is not None) and all(
        value.narrow or (kept and value.scalar is not None) for value in floats
    )
    enough = RETURNED if name in ADDS_UP else IN_16BIT
    if (want not in enough or kept) and not exact:
        return False
    # Not to a step of weights that are normed in between: it would be lost.
    if any(x.sent_back for x in floats) and any(x.normed for x in floats):
        return False
    return all(value.may_join(name, size, dtype) for value in floats)


def rounded_by_xla(array: Any) -> Any:
    """Returns a 16-bit array that XLA computes in float32, as it is to be stored.

    XLA pools no bfloat16 numbers. It widens them, leaves out the rounding before and
    behind, and then stores float32 numbers for all who read.
    """
    return firmly_rounded(array) if array.dtype == jnp.bfloat16 else array


def pooled(out: Value, want: Want, dtype: np.dtype) -> Value:
    """Returns what was pooled and is handed on as it is to be stored.

    Args:
        out: What was pooled.
        want: What it is wanted for.
        dtype: The 16-bit dtype.
    """
    if out.narrow:
        out.array = rounded_by_xla(out.array)
    elif out.normed and want in IN_16BIT:
        return out.firmly_stored(dtype)
    return out


def note_number(eqn: Equation, ins: list[Value], outs: list[Value]) -> None:
    """Notes what every entry of ``outs`` equals, and of which inputs they are views."""
    scalar, source_size = _scalar_of(eqn, ins), _source_size_of(eqn, ins)
    for out in outs:
        out.scalar, out.source_size = scalar, source_size


def note_origin(
    eqn: Equation, ins: list[Value], outs: list[Value], dtype: np.dtype
) -> None:
    """Notes which of ``outs`` have all digits of what was given, or follow."""
    wide = [
        out
        for out, var in zip(outs, eqn.outvars, strict=True)
        if not out.narrow and is_inexact(var)
    ]
    if not wide:
        return
    floats, fit = [], True
    exact = eqn.primitive.name in EXACT
    for value, var in zip(ins, eqn.invars, strict=True):
        if value.scalar is None and is_inexact(var):
            if not (value.narrow or value.outside or value.follows):
                return
            floats.append(value)
        elif exact and is_float32(var):
            fit &= value.fits(dtype)  # not a mask of -1e9
    # What is added to an exponential, as one to that of an ELU, may leave little of it.
    fit &= eqn.primitive.name not in EXPS
    outside = all([value.outside for value in floats])
    if not fit:
        follows = False
    elif any([value.narrow for value in floats]) and (
        exact or (eqn.primitive.name in LEAVES_RANGE and not is_steep_power(eqn))
    ):
        follows = all([v.narrow or v.outside or v.follows for v in floats])
    else:
        follows = all([value.outside or value.follows for value in floats])
        follows &= any([value.follows for value in floats]) or looks_up_rows(eqn)
    for out in wide:
        out.outside, out.follows = outside, follows


def note_product(ins: list[Value], outs: list[Value], backward: bool) -> None:
    """Notes that a product, if ``backward``, sends ``outs`` back."""
    copied = any(value.copied or value.scalar is not None for value in ins)
    for out in outs:
        out.sent_back, out.copied = backward, copied


def note_sent_back(
    eqn: Equation, ins: list[Value], outs: list[Value], denied: bool
) -> None:
    """Notes whether ``outs``, made elementwise, were made of what a product sent back.

    Each of its entries has been rounded, and may be once more. Not where a factor that
    was given, which may be 1e6, takes it out of range. Sums of such values may be added
    to them, as norms do in the backward pass, but no other float32 terms. And not
    copies: these were rounded alike, and of what they share a norm leaves nothing.
    """
    name, compared = eqn.primitive.name, only_compared(eqn)
    # A sum over axes of size one sums nothing: of a mean that has kept its axes.
    same = name in TOTALS and eqn.outvars[0].aval.size == eqn.invars[0].aval.size
    if denied and not same:
        if name in TOTALS:
            outs[0].summed = ins[0].sent_back or ins[0].summed
        return
    computed = [
        value
        for i, (value, var) in enumerate(zip(ins, eqn.invars, strict=True))
        if value.scalar is None and i != compared and is_float32(var)
    ]
    if not computed:
        return
    sent = [value for value in computed if value.sent_back]
    made = [value for value in computed if value.sent_back or value.summed]
    if not made:
        sent_back = summed = False
    elif name in SCALES:
        given = any(x.outside for x in computed)
        far = any(is_far(value.scalar) for value in ins)
        sent_back = bool(sent) and not far and not given
        # Divided by how many there are, copies of a mean may be added to all of them.
        averages = divisor(eqn) is not None and abs(ins[1].scalar or 0) > 1
        summed = not far or averages
    else:
        summed = len(made) == len(computed)
        adds = name in JOINS_TERMS and summed and bool(sent)
        sent_back = adds or len(sent) == len(computed)
    # What is multiplied by other numbers has been rounded alike all the same.
    leading = (name in SCALES and sent) or computed
    copied = all([value.copied for value in leading])
    copies = name in COPIES or name in STRETCHES
    size = max(size_of(value.array) for value in leading) if copies else 0
    for out in outs:
        out.sent_back, out.summed = sent_back, summed
        out.copied = copied or (copies and size_of(out.array) > size)


def _scalar_of(eqn: Equation, ins: list[Value]) -> Any:
    """Returns what every entry of the result equals, or None."""
    if not ins or any([value.scalar is None for value in ins]):
        return None
    name, scalars = eqn.primitive.name, [value.scalar for value in ins]
    if name in FOLDS:
        with np.errstate(all="ignore"):
            return FOLDS[name](*scalars)
    if _jaxpr.is_cast(eqn) and is_float32(eqn.outvars[0]):
        return np.float32(scalars[0])
    return scalars[0] if name in VIEWS and len(ins) == 1 else None


def _source_size_of(eqn: Equation, ins: list[Value]) -> int | None:
    """Returns the size of the float32 input that the result is a view of, or None."""
    if _jaxpr.is_cast(eqn):
        boolean = eqn.invars[0].aval.dtype == jnp.bool_
        return 0 if boolean else ins[0].source_size
    if eqn.primitive.name not in VIEWS or ins[0].source_size is None:
        return None
    if any(map(is_float32, eqn.invars[1:])):
        return None
    return min(ins[0].source_size, size_of(eqn.outvars[0].aval))


def _fits(scalar: Any, dtype: np.dtype) -> bool:
    """Whether a number is neither lost nor infinite in ``dtype``."""
    size, limits = float(abs(scalar)), jnp.finfo(dtype)
    return (
        size == 0
        or not math.isfinite(size)
        or float(limits.tiny) <= size <= float(limits.max)
    )
