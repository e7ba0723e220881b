"""Applying one equation that holds no jaxpr: in 16 bits, or as its inputs are."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from . import _jaxpr
from ._fp8 import multiplied
from ._jaxpr import Equation, is_float32, is_inexact
from ._lookups import added_to_zeros, row_axis
from ._op_lists import COPIES, GATHERS_ROWS
from ._planner import Planner
from ._product_rules import accumulated, moved, rounded
from ._products import vector_of, with_precision
from ._reducers import bind_narrow
from ._scopes import Scopes, is_backward
from ._sums import firmly_applied, firmly_rounded, times_vector
from ._uses import IN_16BIT, RETURNED, Want
from ._values import Value, cast, runs_in_16bit


def allowed(
    eqn: Equation, ins: Sequence[Value], want: Want, scopes: Scopes, planner: Planner
) -> list[Any]:
    """Applies an operation of the allow list.

    Its operands have 16 bits, or have them rounded to 8.

    Args:
        eqn: The operation.
        ins: Its inputs.
        want: What its result is wanted for.
        scopes: Named scopes around it, with its own.
        planner: Knows which products have 8-bit operands.
    """
    # The default is for float32, and JAX would give it to the derivatives.
    eqn = with_precision(eqn)
    operands = [
        value.in_16bit(planner.dtype) if is_inexact(var) else value.array
        for value, var in zip(ins, eqn.invars, strict=True)
    ]
    linear = any(value.linear for value in ins)
    reason = planner.why_16bit(eqn, scopes, linear)
    backward = is_backward(eqn, scopes)
    if reason is None:
        rounds = want in RETURNED or want == "rounded"
        dtype = planner.dtype if rounds else eqn.outvars[0].aval.dtype
        return [multiplied(eqn, operands, dtype, backward)]
    with for_reason(reason):
        return _in_16bit(eqn, operands, want, planner.dtype, linear, backward)


def inferred(
    eqn: Equation, ins: Sequence[Value], want: Want, dtype: np.dtype
) -> list[Any]:
    """Applies an operation of the infer list in the dtype of its inputs.

    Args:
        eqn: The operation.
        ins: Its inputs.
        want: What its result is wanted for.
        dtype: The 16-bit one.
    """
    if not runs_in_16bit(eqn, ins, want, dtype):
        return bind_as_written(eqn, ins)
    name = eqn.primitive.name
    if name in GATHERS_ROWS and not ins[0].linear:
        places = [value.array for value in ins[1:]]
        return [moved(eqn, ins[0].in_16bit(dtype), dtype, places)]
    if name in COPIES:
        return [cast(out, dtype) for out in bind_as_written(eqn, ins)]
    shape = eqn.outvars[0].aval.shape
    operands = [
        value.joining(name, shape, dtype) if is_float32(var) else value.array
        for value, var in zip(ins, eqn.invars, strict=True)
    ]
    if (activated := firmly_applied(eqn, operands[0])) is not None:
        return [activated]
    return bind_narrow(eqn, operands, dtype)


def row_summed(eqn: Equation, ins: Sequence[Value], dtype: np.dtype) -> list[Any]:
    """Applies a product of a sum over rows, in float32, and a matrix in 16 bits.

    Args:
        eqn: The product, see :mod:`jaxmp._row_sums`.
        ins: Its inputs.
        dtype: The 16-bit one.
    """
    place = vector_of(eqn)
    assert place is not None
    # Others read the matrix in 16 bits too: XLA is not to read it in float32 for this.
    matrix = firmly_rounded(ins[1 - place].in_16bit(dtype))
    total, numbers = ins[place].original(), eqn.params["dimension_numbers"]
    return [times_vector(matrix, total, place, *numbers)]


def for_reason(reason: str | None) -> contextlib.AbstractContextManager:
    """Writes into the program why an operation has its dtype, for the audit to read."""
    return jax.named_scope(reason) if reason else contextlib.nullcontext()


def _in_16bit(
    eqn: Equation,
    operands: list[Any],
    want: Want,
    dtype: np.dtype,
    linear: bool,
    backward: bool,
) -> list[Any]:
    """Applies an operation of the allow list to 16-bit operands.

    The result of a product is the float32 accumulator unless somebody takes it in 16
    bits.
    """
    accumulates = "preferred_element_type" in eqn.params
    if not accumulates or not is_float32(eqn.outvars[0]):
        outs = bind_narrow(eqn, operands, dtype)
        return [
            _with_known_dtype(array, var, dtype)
            for array, var in zip(outs, eqn.outvars, strict=True)
        ]
    if want in RETURNED:
        return _jaxpr.bind(eqn, operands, preferred_element_type=dtype)
    if want == "rounded":
        return [rounded(eqn, operands, dtype, backward)]
    return [accumulated(eqn, operands, dtype, linear, backward)]


def _with_known_dtype(array: Any, var: Any, dtype: np.dtype) -> Any:
    """Returns what an operation that the user allowed computed, with a dtype of two."""
    holds = array.dtype == var.aval.dtype
    holds |= is_float32(var) and array.dtype == dtype
    return array if holds else lax.convert_element_type(array, var.aval.dtype)


def bind_as_written(eqn: Equation, ins: Sequence[Any], wanted: Any = ()) -> list[Any]:
    """Applies ``eqn`` in the original dtypes of its inputs.

    Args:
        eqn: The equation.
        ins: Its inputs, each a :class:`jaxmp._values.Value`.
        wanted: What its outputs are wanted for.
    """
    arrays = [value.original() for value in ins]
    # What is wanted in float32 may be added up over a loop, in place.
    in_16bit = not IN_16BIT.isdisjoint(wanted)
    if in_16bit and row_axis(eqn) is not None and ins[0].is_zero():
        return [added_to_zeros(eqn, *arrays)]
    return _jaxpr.bind(eqn, arrays)
