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

from collections.abc import Callable, Mapping, Sequence, Set
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
    slope: Equation  # from which the slope is computed
    parts: Sequence[Equation]  # the last of them returns the gradient
    times: Equation  # that of the parts that multiplies the gradient that comes in


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
    if not any(eqn.primitive.name in TANHS for eqn in eqns):
        return eqns, []
    made = {var: eqn for eqn in eqns for var in eqn.outvars}
    gradients = [found for eqn in eqns if (found := _gradient(eqn, made))]
    if not gradients:
        return eqns, []
    readers = _readers(eqns, returned)
    inside = {id(eqn) for found in gradients for eqn in (found.slope, *found.parts)}
    instead: dict[int, list[Equation]] = {}
    slopes: dict[Any, Equation | None] = {}
    for tanh, _, parts, times in gradients:
        (y,), *between = (part.outvars for part in (tanh, *parts[:-1]))
        read = {id(reader) for (var,) in between for reader in readers[var]}
        if not read <= {*map(id, parts)} or not is_float32(y) or not is_free(tanh):
            continue
        if y not in slopes:
            capped = _is_under_softmax(y, readers, inside)
            slopes[y] = _slope(tanh) if capped else None
        slope = slopes[y]
        if slope is None:
            continue
        instead[id(tanh)] = [tanh, slope]
        instead |= {id(part): [] for part in parts}
        factors = [times.invars[0], *slope.outvars]
        last = times.replace(invars=factors, outvars=parts[-1].outvars)
        instead[id(parts[-1])] = [last]
    new = [other for eqn in eqns for other in instead.get(id(eqn), [eqn])]
    return new, [slope for slope in slopes.values() if slope is not None]


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
        parts, times, (y,) = [eqn], eqn, slope.invars
    elif name in ADDS_UP:
        times, rest = ins
        if times is None or rest is None or rest.invars[0] is not eqn.invars[0]:
            return None
        parts = [times, rest, eqn]
        if times.primitive.name not in FACTORS or rest.primitive.name not in FACTORS:
            return None
        y, slope = rest.invars[1], _made(times.invars[1], made)
        if slope is None or not _is_one_minus(y, slope):
            return None
    else:
        return None
    tanh = _made(y, made)
    if tanh is None or tanh.primitive.name not in TANHS:
        return None
    return _Gradient(tanh, slope, parts, times)


def _made(atom: Any, made: Mapping[Any, Equation]) -> Equation | None:
    return None if isinstance(atom, Literal) else made.get(atom)


def _is_one_minus(y: Any, eqn: Equation) -> bool:
    if eqn.primitive.name not in SHIFTS - JOINS:
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


def _is_under_softmax(
    var: Any, readers: Mapping[Any, Sequence[Any]], gradients: Set[int]
) -> bool:
    """Whether only a softmax and gradients take ``var``, scaled or masked.

    What is also carried on may come back through many slopes, as in a recurrence: a
    slope that is rounded the same way in each of them would be far off.
    """
    rest, found = {var: None}, False
    for _ in range(_STEPS):
        eqns = [eqn for var in rest for eqn in readers.get(var, ())]
        eqns = [eqn for eqn in eqns if id(eqn) not in gradients]
        if not eqns:
            return found
        rest = {}
        for eqn in eqns:
            if eqn is None:  # returned
                return False
            if _jaxpr.call_kind(eqn) == "custom_jvp" and _is_steep(eqn):
                found = True
            elif _moves(eqn):
                rest |= dict.fromkeys(eqn.outvars)
            else:
                return False
    return False


def _moves(eqn: Equation) -> bool:
    """Whether ``eqn`` may be between a cap and its softmax, such as `jnp.where`."""
    if _jaxpr.call_kind(eqn) == "jit":
        (jaxpr,) = _jaxpr.sub_jaxprs(eqn)
        return all(map(_moves, _jaxpr.open_jaxpr(jaxpr).eqns))
    return eqn.primitive.name in _BETWEEN or _jaxpr.is_cast(eqn)


def _is_steep(eqn: Equation) -> bool:
    return any(
        inner.primitive.name in STEEP or _is_steep(inner)
        for jaxpr in _jaxpr.sub_jaxprs(eqn)
        for inner in _jaxpr.open_jaxpr(jaxpr).eqns
    )


def _slope(tanh: Equation) -> Equation | None:
    """Returns the equation that computes the slope of ``tanh``.

    None where it would not have its type: where a mesh gives types more than a shape.
    """
    (x,), (y,) = tanh.invars, tanh.outvars
    with _jaxpr.context_of(tanh), jax.disable_jit(False):
        (eqn,) = _jaxpr.trace(jax.jit(slope_of_tanh), [x.aval]).eqns
    if eqn.outvars[0].aval != y.aval:
        return None
    place = {"source_info": tanh.source_info, "ctx": tanh.ctx}
    return eqn.replace(invars=[x], outvars=[Var(y.aval)], **place)


def slope_of_tanh(x: jax.Array) -> jax.Array:
    """Computes one less the square of ``tanh(x)``, also where that is small."""
    return 4 * lax.logistic(2 * x) * lax.logistic(-2 * x)
