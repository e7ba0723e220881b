"""What goes into loops and comes out of them: rounded weights, and what is known."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from . import _jaxpr
from ._jaxpr import FLOAT32, Equation, is_inexact
from ._planner import Planner, is_written
from ._precision import with_default_precision
from ._scopes import Scopes
from ._uses import FOR_BACKWARD, STACKED, Use, Want
from ._values import Known, Value


def rounded_weights(
    eqn: Equation,
    ins: list[Value],
    wanted: Sequence[Want],
    scopes: Scopes,
    planner: Planner,
) -> list[Value]:
    """Rounds weights before a loop or a remat, where that costs no precision.

    XLA would round them again in each trip, and once more where what they are given to
    is computed again. Of scans and remats only one that has been differentiated already
    qualifies, such as an accumulation, or the two of a recurrent layer in
    ``autocast(value_and_grad(loss))``: the gradient of another is to add up over all
    trips, see :func:`scanned`. A ``while`` has no such gradients.

    Args:
        eqn: A loop or a call.
        ins: What it is given.
        wanted: What the outputs of its body are wanted for.
        scopes: Named scopes around its body.
        planner: Plans its bodies.
    """
    kind, layout, ins = _jaxpr.call_kind(eqn), _jaxpr.call_layout(eqn), list(ins)
    if kind not in ("scan", "while") and not _jaxpr.is_remat(eqn):
        return ins
    for body in layout.bodies:
        plan = planner.plan(body.jaxpr, wanted, scopes)
        if kind == "scan" and not is_written(plan, scopes):
            continue
        for i, var in zip(body.operands, _jaxpr.in_vars(body.jaxpr), strict=True):
            read = plan.use(var) & (Use.IN_16BIT | Use.OTHERWISE)
            is_given = kind == "remat" or i < layout.fixed_in.start
            if is_given and not ins[i].linear and read == Use.IN_16BIT:
                ins[i] = ins[i].rounded(planner.dtype)
    return ins


def scanned(
    eqn: Equation, ins: Sequence[Value], body: Any, *, late: bool = False
) -> list[Any]:
    """Applies a scan whose gradients add up in float32, whatever it is given.

    JAX adds up what the trips send back to a constant in the dtype of that constant,
    and a sum in bfloat16 stalls after some hundreds of them. So where a scan is
    differentiated, it is given float32 constants and rounds them in each trip.

    Args:
        eqn: The scan.
        ins: What it is given.
        body: Its body in mixed precision.
        late: Whether what it stacks is to take memory from its first trip on only.
    """
    arrays = [x.array for x in ins]
    bind = _stacked_late if late else _bound
    consts = range(_jaxpr.call_layout(eqn).fixed_in.start)
    wide = {i: ins[i].unrounded() for i in consts if ins[i].narrow}
    if not wide:
        return bind(eqn, arrays, body)
    # The rule lives as long as its jaxpr, and so holds no tracer that it is given.
    rounded = frozenset(wide)

    def replaced(arrays, new):
        return [new.get(i, x) for i, x in enumerate(arrays)]

    def trip(*args):
        args = (
            lax.convert_element_type(x, aval.dtype) if i in rounded else x
            for i, (x, aval) in enumerate(zip(args, _jaxpr.in_avals(body), strict=True))
        )
        return _jaxpr.jaxpr_as_fun(body)(*args)

    def rounding_in_each_trip(*arrays):
        avals = [
            aval.update(dtype=FLOAT32) if i in rounded else aval
            for i, aval in enumerate(_jaxpr.in_avals(body))
        ]
        return _jaxpr.bind_bodies(eqn, arrays, [_jaxpr.trace(trip, avals)])

    if any(x.linear for x in ins):  # to be transposed, which a rule cannot be
        return rounding_in_each_trip(*replaced(arrays, wide))

    @jax.custom_jvp
    def scan(arrays, wide):
        return bind(eqn, arrays, body)

    def rule(primals, tangents):
        args, moved = replaced(*primals), replaced(*tangents)
        # The rule is asked for what is differentiated, and for nothing else.
        moving = [
            i
            for i, (var, x) in enumerate(zip(eqn.invars, moved, strict=True))
            if is_inexact(var) and not isinstance(x, SymbolicZero)
        ]

        def differentiated(*xs):
            changed = dict(zip(moving, xs, strict=True))
            return rounding_in_each_trip(*replaced(args, changed))

        def both(*xs):
            count = len(moving)
            outs, tangents_out = jax.jvp(differentiated, xs[:count], xs[count:])
            return [*outs, *tangents_out]

        arrays = [*(args[i] for i in moving), *(moved[i] for i in moving)]
        outs, count = with_default_precision(both, arrays), len(eqn.outvars)
        return outs[:count], outs[count:]

    scan.defjvp(rule, symbolic_zeros=True)
    return scan(arrays, wide)


def _bound(eqn: Equation, arrays: Sequence[Any], body: Any) -> list[Any]:
    return _jaxpr.bind_bodies(eqn, arrays, [body])


def _stacked_late(eqn: Equation, arrays: Sequence[Any], body: Any) -> list[Any]:
    """Applies a scan that carries what it stacks.

    What scans are to stack begins as zeros, which XLA writes for all scans of a program
    at once, before the first of them. These cannot be written before the scan is given
    what it goes through.
    """
    layout, length = _jaxpr.call_layout(eqn), eqn.params["length"]
    start, stop = layout.fixed_in.start, layout.fixed_in.stop
    consts, init, xs = arrays[:start], arrays[start:stop], arrays[stop:]
    types: list[Any] = [
        _jaxpr.unmapped_aval(length, 0, aval)
        for aval in _jaxpr.out_avals(body)[len(layout.fixed_out) :]
    ]
    zero, _ = lax.optimization_barrier((np.int32(0), xs))
    zeros = [
        lax.broadcast(lax.convert_element_type(zero, aval.dtype), aval.shape)
        for aval in types
    ]
    if any(jax.typeof(x) != aval for x, aval in zip(zeros, types, strict=True)):
        return _bound(eqn, arrays, body)  # in `shard_map` they differ over its mesh

    def trip(carry, x):
        carry, stacks = carry
        i, x = x
        outs = _jaxpr.jaxpr_as_fun(body)(*consts, *carry, *x)
        carry, slices = outs[: len(carry)], outs[len(carry) :]
        stacks = [
            lax.dynamic_update_index_in_dim(stack, x, i, 0)
            for stack, x in zip(stacks, slices, strict=True)
        ]
        return (carry, stacks), None

    (carry, stacks), _ = lax.scan(
        trip,
        (init, zeros),
        (lax.iota(np.uint32, length), xs),
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *stacks]


def as_carried(
    eqn: Equation,
    ins: Sequence[Value],
    wanted: Sequence[Want],
    narrow: frozenset[int],
    dtype: np.dtype,
) -> frozenset[int]:
    """Returns what a loop carries in 16 bits of what it may, because it begins so.

    What it begins with must not lose digits: it has 16 bits, is a number, would be
    rounded where it is added to 16 bits, or is read by products alone.

    Args:
        eqn: The loop.
        ins: What it is given.
        wanted: What the outputs of its body are wanted for.
        narrow: Which outputs it may carry in 16 bits.
        dtype: The 16-bit dtype.
    """
    start = _jaxpr.call_layout(eqn).fixed_in.start

    def fits(out: int) -> bool:
        value = ins[start + out]
        if value.linear:
            return False
        joins = value.narrow or value.follows or value.normed
        is_number = value.scalar is not None and value.fits(dtype)
        return joins or is_number or wanted[out] in FOR_BACKWARD

    return frozenset(filter(fits, narrow))


def known_in_trip(
    eqn: Equation, ins: list[Value], narrow: frozenset[int], dtype: np.dtype
) -> list[Value]:
    """Returns what is known of the inputs of a loop in every trip.

    Of what it carries only the first value is there, and of what it goes through one
    slice at a time.

    Args:
        eqn: The loop.
        ins: What it is given.
        narrow: Which of its outputs it carries in 16 bits.
        dtype: The 16-bit dtype.
    """
    layout = _jaxpr.call_layout(eqn)
    known = []
    for i, value in enumerate(ins):
        if i in layout.fixed_in and i - layout.fixed_in.start in narrow:
            value = Value(value.in_16bit(dtype), narrow=True, sent_back=value.sent_back)
        elif i in layout.fixed_in:
            value = Value(value.original(), linear=value.linear)
        elif i >= layout.fixed_in.stop and value.kept is not None:
            axes = () if 0 in value.kept else tuple(axis - 1 for axis in value.kept)
            value = dataclasses.replace(value, kept=axes)
        known.append(value)
    return known


def stacked(out: Value, want: Want, dtype: np.dtype) -> Value:
    """Returns an output of the body of a scan as it is put together with the others.

    What is computed outside of loops XLA may recompute where it is read. What a scan
    puts together is stored, so it is rounded if its readers take it so. In the trip,
    those who compute with it have all its digits.
    """
    if want not in STACKED or not out.is_computed():
        return out
    value = out.stored(dtype)
    value.kept = None if want == "stored" else ()
    return value


def note_kept(
    eqn: Equation, known: Sequence[Sequence[Known]], outs: Sequence[Value]
) -> None:
    """Notes what the backward pass is to read in 16 bits of what ``eqn`` returns.

    Args:
        eqn: A loop or a choice.
        known: For each of its bodies, what is known of its outputs.
        outs: The outputs of ``eqn``.
    """
    # The slices that a scan puts together have one axis less.
    more = int(_jaxpr.call_kind(eqn) == "scan")
    carried = _jaxpr.call_layout(eqn).fixed_out
    for i, out in enumerate(outs):
        if i in carried:
            continue
        kept = {body[i].kept for body in known if i < len(body)}
        if out.narrow and kept != {None}:
            (axes,) = kept if len(kept) == 1 else ((),)
            out.kept = tuple(axis + more for axis in axes or ())
