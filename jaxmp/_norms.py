"""Norms, found in a jaxpr: a value divided by a statistic of itself."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ._jaxpr import (
    Equation,
    Jaxpr,
    Literal,
    call_kind,
    is_cast,
    is_float32,
    open_jaxpr,
    sub_jaxprs,
)
from ._op_lists import (
    BOUNDED,
    CALLS,
    CLAMPS,
    EXACT,
    EXTREMES,
    ROOTS,
    SCALES,
    SHIFTS,
    STRETCHED,
    SUMS,
    Definition,
    divisor,
    is_far,
)
from ._products import PRODUCTS
from ._sizes import size_of

_LINEAR = EXACT | SHIFTS | SCALES
# A statistic is near: in a program of a thousand steps, to look further takes time.
_STEPS = 20


def is_normed(eqn: Equation, definition: Definition, ins: Sequence[Any]) -> bool:
    """Whether ``eqn`` returns what a norm does: of order one, in the range of float16.

    That is a value divided by a statistic of itself, or times one over the root of one;
    and such a value moved, chosen from, scaled or shifted, but by no number that may
    take it out of range, or times what is bounded, such as a sigmoid. Not a value less
    its mean: it is as large as it was.

    Args:
        eqn: The equation.
        definition: Returns the equation that computes a variable, None for an input.
        ins: What is known of its inputs, see :class:`jaxmp._values.Value`.
    """
    name = eqn.primitive.name
    of_normed = any(value.normed for value in ins)
    if name not in SCALES and not (of_normed and (name in EXACT or name in SHIFTS)):
        return False
    floats = [x for x, var in zip(ins, eqn.invars, strict=True) if is_float32(var)]
    if any(is_far(value.scalar) for value in floats):
        return False
    if name in SHIFTS and any(abs(value.scalar or 0) > 1 for value in floats):
        return False  # by 100, the norm would lose its digits
    if name in EXACT:  # chosen from such values alone, and 16-bit ones, and zeros
        return all(
            value.normed or value.narrow or value.follows or value.scalar is not None
            for value in floats
        )

    size = size_of(eqn.outvars[0].aval)
    whole = [i for i, x in enumerate(eqn.invars) if _size(x, definition) == size]
    if len(whole) == 2:  # an activation, such as SiLU, is a value times a gate
        whole = [
            i
            for i in whole
            if i == divisor(eqn) or not is_bounded(eqn.invars[i], definition)
        ]
    if len(whole) != 1 or whole[0] == divisor(eqn):
        return False
    (i,) = whole
    if ins[i].normed or name not in SCALES:
        return ins[i].normed
    own = set(_made_of(eqn.invars[i], definition, of_its_order=True))
    return any(
        not own.isdisjoint(_made_of(total, definition))
        for atom in eqn.invars
        if atom is not eqn.invars[i]
        for total in _summed(atom, definition, divisor(eqn) is not None)
    )


def is_bounded(atom: Any, definition: Definition) -> bool:
    """Whether ``atom`` is near zero whatever it is made of.

    As a sigmoid is, and what is clipped between two numbers, as `hard_sigmoid` does.

    Args:
        atom: A variable or a literal.
        definition: Returns the equation that computes a variable, None for an input.
    """
    eqn = definition(atom)
    if eqn is None:
        return False
    name, ins = eqn.primitive.name, eqn.invars
    if call_kind(eqn) in ("jit", "custom_jvp"):
        body = open_jaxpr(next(sub_jaxprs(eqn)))
        if len(body.eqns) > _STEPS:
            return False
        result = body.outvars[eqn.outvars.index(atom)]
        return is_bounded(result, _inlined(eqn, body, definition))
    others = [x for x in ins if not _is_near(x, definition)]
    if name in EXTREMES and len(others) == 1:  # a clip, if the other limit comes before
        before = definition(others[0])
        if before is not None and before.primitive.name in EXTREMES - {name}:
            return any(_is_near(x, definition) for x in before.invars)
    if name in CLAMPS:
        return all(_is_near(limit, definition) for limit in (ins[0], ins[2]))
    if name in SCALES and len(others) == 1 and divisor(eqn) != ins.index(others[0]):
        before = definition(others[0])
        once = before is not None and before.primitive.name not in SCALES
        return once and is_bounded(others[0], definition)
    return name in BOUNDED


def _inlined(call: Equation, body: Jaxpr, definition: Definition) -> Definition:
    """Returns what defines variables in the body of ``call``, or outside of it."""
    given = dict(zip(body.invars, call.invars, strict=True))
    made: dict[Any, Equation] = {}
    for eqn in body.eqns:
        ins = [x if isinstance(x, Literal) else given.get(x, x) for x in eqn.invars]
        made |= dict.fromkeys(eqn.outvars, eqn.replace(invars=ins))

    def defined(atom):
        return None if isinstance(atom, Literal) else made.get(atom) or definition(atom)

    return defined


def _is_near(atom: Any, definition: Definition) -> bool:
    """Whether ``atom`` is a number of order one, or zero, or is given as one."""
    if isinstance(atom, Literal):
        return np.ndim(atom.val) == 0 and 1 / 8 <= abs(atom.val or 1) <= 8
    eqn = definition(atom)
    return eqn is not None and is_cast(eqn) and _is_near(eqn.invars[0], definition)


def _size(atom: Any, definition: Definition) -> int:
    """Returns the size of ``atom``, or of that which was stretched to it."""
    eqn = definition(atom)
    if eqn is None or eqn.primitive.name not in SHIFTS | SCALES | STRETCHED:
        return size_of(atom.aval)
    return min(size_of(atom.aval), max(size_of(x.aval) for x in eqn.invars))


def _made_of(
    atom: Any, definition: Definition, *, of_its_order: bool = False
) -> Iterator[Any]:
    """Yields a variable, and of what it is made that has its size.

    Args:
        atom: The variable.
        definition: Returns the equation that computes a variable, None for an input.
        of_its_order: Whether to stop at what was squared or is an exponential.
    """
    for _ in range(_STEPS):
        if isinstance(atom, Literal):
            return
        yield atom
        eqn = definition(atom)
        if eqn is None or eqn.primitive.name in PRODUCTS | CALLS:
            return
        if of_its_order and eqn.primitive.name not in _LINEAR:
            return
        same = {
            x
            for x in eqn.invars
            if not isinstance(x, Literal) and x.aval.size == atom.aval.size
        }
        if len(same) != 1:
            return
        (atom,) = same


def _summed(atom: Any, definition: Definition, divides: bool) -> Iterator[Any]:
    """Yields what was summed up for ``atom``, which may be a mean or a variance.

    Args:
        atom: What a value is multiplied by, or divided by.
        definition: Returns the equation that computes a variable, None for an input.
        divides: Whether a value is divided by it. If not, a root is to be on the way.
    """
    seen, rest = set(), [(atom, divides)]
    while rest and len(seen) < 2 * _STEPS:
        atom, rooted = item = rest.pop()
        if isinstance(atom, Literal) or item in seen or not is_float32(atom):
            continue
        seen.add(item)
        eqn = definition(atom)
        if eqn is None or eqn.primitive.name in PRODUCTS:
            continue
        rooted = rooted or eqn.primitive.name in ROOTS
        # A variance may be a function of its own.
        sums = eqn.primitive.name in SUMS | CALLS
        size = size_of(atom.aval)
        smaller = [x for x in eqn.invars if size_of(x.aval) <= size]
        rest.extend((x, rooted) for x in smaller)
        if sums and rooted:
            yield from (x for x in eqn.invars if x not in smaller)
