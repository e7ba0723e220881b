"""Slopes of functions that the backward pass multiplies by, and that have a bound.

That of ``erf`` is found, see :meth:`jaxmp._plan.Plan.is_slope_of_erf`. That of a `tanh`
under a softmax, which caps attention scores, is written anew.

What JAX writes for the gradient reads the result of the `tanh` once more. A softmax
needs all its digits, so that it would be kept in float32 for the backward pass. The
slope is read by the backward pass alone, which may have it in 16 bits. It is computed
from what the `tanh` is computed from, so that XLA can fuse the `tanh` into the softmax.

Only where forward and backward pass are in one jaxpr, which they are unless the scores
are computed in a `jit` of their own, or in a `scan` without `jax.checkpoint` in it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from . import _jaxpr
from ._jaxpr import Equation, Literal, Var, is_float32
from ._op_lists import (
    ADDS_UP,
    EXPONENTIALS,
    FACTORS,
    JOINS,
    NEGATES,
    ONE_MINUS_SQUARE,
    SCALES,
    SELECTS,
    SHIFTS,
    STEEP,
    TANHS,
    VIEWS,
    Definition,
    is_square,
)

# What may be between a cap and its softmax: a scale, a mask, another shape.
_BETWEEN = VIEWS | SCALES | SHIFTS | SELECTS
_STEPS = 8


def exponent_of_bell(eqn: Equation, definition: Definition) -> Any:
    """Returns the ``x`` of which ``eqn`` computes ``exp(-x**2)``, None if of none.

    Args:
        eqn: The equation.
        definition: Returns the equation that computes a variable, None for an input.
    """
    if _jaxpr.call_kind(eqn) == "custom_jvp":  # JAX's own, from 0.12 on
        name, _ = _jaxpr.function_of(next(_jaxpr.sub_jaxprs(eqn)))
        return eqn.invars[0] if name == "exp_neg_sq" else None
    minus = definition(eqn.invars[0]) if eqn.primitive.name in EXPONENTIALS else None
    if minus is None or minus.primitive.name not in NEGATES:
        return None
    square = definition(minus.invars[0])
    return square.invars[0] if square is not None and is_square(square) else None


class _Gradient(NamedTuple):
    """What JAX has written for the gradient of a `tanh`."""

    tanh: Equation
    times: Equation  # multiplies the gradient that comes in by something
    parts: Sequence[Equation]  # what only the last equation reads


def with_slopes(
    eqns: Sequence[Equation],
    returned: Sequence[Any],
    is_free: Callable[[Equation], bool],
) -> tuple[Sequence[Equation], list[Equation]]:
    """Returns equations in which the gradient of such a `tanh` is times its slope.

    Args:
        eqns: The equations of a jaxpr.
        returned: What it returns.
        is_free: Tells whether an equation may run in 16 bits.

    Returns:
        All equations, and those that compute a slope.
    """
    slopes: dict[Any, Equation] = {}
    if not any(eqn.primitive.name in TANHS for eqn in eqns):
        return eqns, []
    made = {var: eqn for eqn in eqns for var in eqn.outvars}
    readers = _readers(eqns, returned)
    instead: dict[int, list[Equation]] = {}
    for eqn in eqns:
        found = _gradient(eqn, made)
        if found is None:
            continue
        tanh, times, parts = found
        (y,) = tanh.outvars
        read = [x for part in parts for x in readers[part.outvars[0]]]
        if not {*map(id, read)} <= {id(eqn), *map(id, parts)}:
            continue
        if not (is_float32(y) and is_free(tanh) and _is_under_softmax(y, readers)):
            continue
        if y not in slopes:
            slopes[y] = _slope(tanh)
            instead[id(tanh)] = [tanh, slopes[y]]
        factors = [times.invars[0], *slopes[y].outvars]
        instead |= {id(part): [] for part in parts}
        instead[id(eqn)] = [times.replace(invars=factors, outvars=eqn.outvars)]
    new = [other for eqn in eqns for other in instead.get(id(eqn), [eqn])]
    return new, [*slopes.values()]


def _gradient(eqn: Equation, made: Mapping[Any, Equation]) -> _Gradient | None:
    """Returns the gradient of a `tanh` that ``eqn`` ends, None if it ends none.

    Of ``y`` and for ``g`` that is ``s = g * (1 - y)`` and then ``s + s * y``, or in
    newer JAX ``g * one_minus_square(y)``.
    """
    name, ins = eqn.primitive.name, [_made(x, made) for x in eqn.invars]
    if name in FACTORS:
        slope = ins[1]
        if slope is None or slope.primitive.name not in ONE_MINUS_SQUARE:
            return None
        times, parts, (y,) = eqn, [], slope.invars
    elif name in ADDS_UP:
        times, rest = ins
        if times is None or rest is None or rest.invars[0] is not eqn.invars[0]:
            return None
        parts = [times, rest]
        if any(part.primitive.name not in FACTORS for part in parts):
            return None
        y = rest.invars[1]
        if not _is_one_minus(y, _made(times.invars[1], made)):
            return None
    else:
        return None
    tanh = _made(y, made)
    if tanh is None or tanh.primitive.name not in TANHS:
        return None
    return _Gradient(tanh, times, parts)


def _made(atom: Any, made: Mapping[Any, Equation]) -> Equation | None:
    return None if isinstance(atom, Literal) else made.get(atom)


def _is_one_minus(y: Any, eqn: Equation | None) -> bool:
    if eqn is None or eqn.primitive.name not in SHIFTS - JOINS:
        return False
    one, other = eqn.invars
    return isinstance(one, Literal) and one.val == 1 and other is y


def _readers(
    eqns: Sequence[Equation], returned: Sequence[Any]
) -> dict[Any, list[Equation | None]]:
    """Returns by which equations each variable is read; by None if it is returned."""
    readers: dict[Any, list[Equation | None]] = {}
    for eqn, ins in [*((eqn, eqn.invars) for eqn in eqns), (None, returned)]:
        for atom in ins:
            if not isinstance(atom, Literal):
                readers.setdefault(atom, []).append(eqn)
    return readers


def _is_under_softmax(var: Any, readers: Mapping[Any, Sequence[Any]]) -> bool:
    """Whether ``var``, scaled or masked, is given to a softmax."""
    rest = [var]
    for _ in range(_STEPS):
        found = [eqn for var in rest for eqn in readers.get(var, ()) if eqn is not None]
        kinds = [_jaxpr.call_kind(eqn) for eqn in found]
        if any(
            kind == "custom_jvp" and _is_steep(eqn)
            for kind, eqn in zip(kinds, found, strict=True)
        ):
            return True
        rest = [
            out
            for kind, eqn in zip(kinds, found, strict=True)
            if kind == "jit" or eqn.primitive.name in _BETWEEN
            for out in eqn.outvars
        ]
    return False


def _is_steep(eqn: Equation) -> bool:
    return any(
        inner.primitive.name in STEEP or _is_steep(inner)
        for jaxpr in _jaxpr.sub_jaxprs(eqn)
        for inner in _jaxpr.open_jaxpr(jaxpr).eqns
    )


def _slope(tanh: Equation) -> Equation:
    """Returns the equation that computes the slope of ``tanh``."""
    (x,), (y,) = tanh.invars, tanh.outvars
    (eqn,) = _jaxpr.trace(jax.jit(slope_of_tanh), [x.aval]).eqns
    return eqn.replace(invars=[x], outvars=[Var(y.aval)], source_info=tanh.source_info)


def slope_of_tanh(x: jax.Array) -> jax.Array:
    """Computes one less the square of ``tanh(x)``, also where that is small."""
    return 4 * lax.logistic(2 * x) * lax.logistic(-2 * x)
