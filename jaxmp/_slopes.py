"""Slopes of functions that the backward pass multiplies by, and that have a bound.

That of ``erf`` is found, see :meth:`jaxmp._plan.Plan.is_slope_of_erf`, and so is that
of an ELU. Those of a softplus and of a `tanh` under a softmax, which caps attention
scores, are written anew.

For a softplus ``y`` of ``x`` JAX writes ``exp(x - y)``, which is far off if only one of
the two is rounded. As ``logistic(x)`` it is the same number, and an activation.

What JAX writes for the gradient of a cap reads the result of the `tanh` once more. A
softmax needs all its digits, so that it would be kept in float32 for the backward pass.
The slope is read by the backward pass alone, which may have it in 16 bits. It is
computed from what the `tanh` is computed from, so that XLA can fuse the `tanh` into the
softmax.

Only where forward and backward pass are in one jaxpr, which they are unless the scores
are computed in a `jit` of their own, or in a `scan` without `jax.checkpoint` in it.
"""

import collections
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from . import _jaxpr
from ._definitions import definitions_of
from ._jaxpr import Equation, Literal, Var, is_float32
from ._op_lists import (
    ABOVE,
    ADDS_UP,
    DIFFERENCES,
    EXPONENTIALS,
    EXPS,
    FACTORS,
    MINIMA,
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
    tests_equal,
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
    if _is_call(eqn, "custom_jvp", "exp_neg_sq"):  # JAX's own, from 0.12 on
        return eqn.invars[0]
    minus = definition(eqn.invars[0]) if eqn.primitive.name in EXPONENTIALS else None
    if minus is None or minus.primitive.name not in NEGATES:
        return None
    square = definition(minus.invars[0])
    return square.invars[0] if square is not None and is_square(square) else None


def bounded_input(eqn: Equation, definition: Definition) -> Any:
    """Returns the ``x`` of which ``eqn`` computes a softplus or a bounded exponential.

    The latter is one of ``min(x, 0)`` or ``where(x > 0, 0, x)``, as in an ELU. If ``x``
    is off by a relative ``eps``, it is off by 0.37 ``eps`` at most.

    Args:
        eqn: The equation.
        definition: Returns the equation that computes a variable, None for an input.

    Returns:
        The variable, or None if ``eqn`` computes anything else.
    """
    if eqn.primitive.name not in EXPS:
        return eqn.invars[0] if _is_softplus(eqn) else None
    cut = definition(eqn.invars[0])
    if cut is None:
        return None
    if cut.primitive.name in MINIMA:
        x, *zeros = cut.invars
    elif _is_call(cut, "jit", "_where") and len(cut.invars) == 3:
        where, zero, x = cut.invars
        test = definition(where)
        if test is None or test.primitive.name not in ABOVE or test.invars[0] is not x:
            return None
        zeros = [zero, test.invars[1]]
    else:
        return None
    return x if all(_is_number(zero, 0) for zero in zeros) else None


def is_difference(atom: Any, definition: Definition) -> bool:
    """Whether ``atom`` is a difference, also one that a `jit` returns.

    Args:
        atom: A variable or a literal.
        definition: Returns the equation that computes a variable, None for an input.
    """
    eqn = definition(atom)
    if eqn is None or _jaxpr.call_kind(eqn) != "jit":
        return eqn is not None and eqn.primitive.name in DIFFERENCES
    body = _jaxpr.open_jaxpr(next(_jaxpr.sub_jaxprs(eqn)))
    result = body.outvars[eqn.outvars.index(atom)]
    return is_difference(result, definitions_of(body.eqns))


def _is_softplus(eqn: Equation) -> bool:
    named = _is_call(eqn, "custom_jvp", "logaddexp") and len(eqn.invars) == 2
    return named and _is_number(eqn.invars[1], 0)


def _is_call(eqn: Equation, kind: str, name: str) -> bool:
    """Whether ``eqn`` calls a function of JAX of that name."""
    if _jaxpr.call_kind(eqn) != kind:
        return False
    return _jaxpr.function_of(next(_jaxpr.sub_jaxprs(eqn)))[0] == name


def _is_number(atom: Any, number: float) -> bool:
    return isinstance(atom, Literal) and np.ndim(atom.val) == 0 and atom.val == number


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
    """Returns equations in which gradients of a softplus or such a `tanh` have slopes.

    Args:
        eqns: The equations of a jaxpr.
        returned: What it returns.
        is_free: Tells whether an equation may run in 16 bits.

    Returns:
        All equations, and those that compute a slope of a `tanh`.
    """
    eqns = _with_sigmoids(eqns, returned, is_free)
    if not any(eqn.primitive.name in TANHS for eqn in eqns):
        return eqns, []
    definition = definitions_of(eqns)
    gradients = [found for eqn in eqns if (found := _gradient(eqn, definition))]
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
            place = tanh.invars[0], Var(y.aval), tanh
            slopes[y] = _computed(slope_of_tanh, *place) if capped else None
        slope = slopes[y]
        if slope is None:
            continue
        instead[id(tanh)] = [tanh, slope]
        instead |= {id(part): [] for part in parts}
        factors = [times.invars[0], *slope.outvars]
        last = times.replace(invars=factors, outvars=parts[-1].outvars)
        instead[id(parts[-1])] = [last]
    if not instead:
        return eqns, []
    new = [other for eqn in eqns for other in instead.get(id(eqn), [eqn])]
    return new, [slope for slope in slopes.values() if slope is not None]


def _with_sigmoids(
    eqns: Sequence[Equation],
    returned: Sequence[Any],
    is_free: Callable[[Equation], bool],
) -> Sequence[Equation]:
    """Returns equations in which the slope of a softplus is a logistic function."""
    found = [eqn for eqn in eqns if _is_softplus(eqn) and is_free(eqn)]
    if not found:
        return eqns
    definition, softplus_of = definitions_of(eqns), definitions_of(found)
    # What the exponentials were computed from would pass for readers of the softplus.
    read, live = {id(atom) for atom in returned}, []
    written = [_sigmoid(eqn, definition, softplus_of) or eqn for eqn in eqns]
    for eqn in reversed(written):
        if eqn.effects or not read.isdisjoint(map(id, eqn.outvars)):
            live.append(eqn)
            read.update(map(id, eqn.invars))
    return live[::-1]


def _sigmoid(
    eqn: Equation, definition: Definition, softplus_of: Definition
) -> Equation | None:
    """Returns what computes the slope that ``eqn`` does, by ``x`` or by the zero."""
    less = definition(eqn.invars[0]) if eqn.primitive.name in EXPONENTIALS else None
    if less is None or less.primitive.name not in DIFFERENCES:
        return None
    x, y = (_finite(atom, definition) for atom in less.invars)
    softplus = softplus_of(y)
    zero = _is_number(x, 0)
    if softplus is None or not (zero or x is softplus.invars[0]):
        return None
    fun = slope_by_zero if zero else lax.logistic
    return _computed(fun, softplus.invars[0], eqn.outvars[0], eqn)


def _finite(atom: Any, definition: Definition) -> Any:
    """Returns ``atom``, or that of which JAX takes zero in its place if infinite."""
    chosen = definition(atom)
    if chosen is None or chosen.primitive.name not in SELECTS:
        return atom
    where, finite, _ = chosen.invars
    test = definition(where)
    if test is None or not tests_equal(test) or not _is_number(test.invars[1], np.inf):
        return atom
    tested = test.invars[0]
    return finite if tested is finite or isinstance(tested, Literal) else atom


def _gradient(eqn: Equation, definition: Definition) -> _Gradient | None:
    """Returns the gradient of a `tanh` that ``eqn`` ends, None if it ends none.

    Of ``y`` and for ``g`` that is ``s = g * (1 - y)`` and then ``s + s * y``, or in
    newer JAX ``g * one_minus_square(y)``.
    """
    name = eqn.primitive.name
    if name not in FACTORS and name not in ADDS_UP:
        return None
    ins = [definition(x) for x in eqn.invars]
    if name in FACTORS:
        slope = ins[1]
        if slope is None or slope.primitive.name not in ONE_MINUS_SQUARE:
            return None
        parts, times, (y,) = [eqn], eqn, slope.invars
    else:
        times, rest = ins
        if times is None or rest is None or rest.invars[0] is not eqn.invars[0]:
            return None
        parts = [times, rest, eqn]
        if times.primitive.name not in FACTORS or rest.primitive.name not in FACTORS:
            return None
        y, slope = rest.invars[1], definition(times.invars[1])
        if slope is None or not _is_one_minus(y, slope):
            return None
    tanh = definition(y)
    if tanh is None or tanh.primitive.name not in TANHS:
        return None
    return _Gradient(tanh, slope, parts, times)


def _is_one_minus(y: Any, eqn: Equation) -> bool:
    if eqn.primitive.name not in DIFFERENCES:
        return False
    one, other = eqn.invars
    return isinstance(one, Literal) and one.val == 1 and other is y


def _readers(
    eqns: Sequence[Equation], returned: Sequence[Any]
) -> dict[Any, list[Equation | None]]:
    """Returns by which equations each variable is read; by None if it is returned."""
    readers: dict[Any, list[Equation | None]] = collections.defaultdict(list)
    for eqn, ins in [*((eqn, eqn.invars) for eqn in eqns), (None, returned)]:
        for atom in ins:
            if not isinstance(atom, Literal):
                readers[atom].append(eqn)
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


def _computed(fun: Callable, x: Any, out: Any, eqn: Equation) -> Equation | None:
    """Returns an equation, from where ``eqn`` is, that computes ``out`` of ``x``.

    None where it would not have its type: where a mesh gives types more than a shape.
    """
    with _jaxpr.context_of(eqn), jax.disable_jit(False):
        (new,) = _jaxpr.trace(jax.jit(fun), [x.aval]).eqns
    if new.outvars[0].aval != out.aval:
        return None
    place = {"source_info": eqn.source_info, "ctx": eqn.ctx}
    return new.replace(invars=[x], outvars=[out], **place)


def slope_of_tanh(x: jax.Array) -> jax.Array:
    """Computes one less the square of ``tanh(x)``, also where that is small."""
    return 4 * lax.logistic(2 * x) * lax.logistic(-2 * x)


def slope_by_zero(x: jax.Array) -> jax.Array:
    """Computes the derivative of ``logaddexp(x, 0)`` by the zero."""
    return lax.logistic(-x)
