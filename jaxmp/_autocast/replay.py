"""Replaying a jaxpr in mixed precision, one equation after the other."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.flatten import traced
from .._jaxprs.jaxpr import FLOAT32, Equation, is_float32, is_inexact
from .._jaxprs.scopes import Scopes, check_paths
from .._ops.fp8 import multiplied
from .._ops.lists import OpLists
from .._ops.narrow import accumulated, bind_narrow, rounded
from .._ops.precision import at_precision, own_precisions, with_default_precision
from .._ops.products import with_precision
from . import classes, needs, rules, storage
from .analysis import NO_PATHS, Analysis
from .calls import Calls
from .decisions import (
    INSIDE,
    REASONS,
    Decision,
    Float8,
    Step,
    decide,
    is_copied,
    is_of_product,
    is_sent_back,
)
from .derivative import differentiable
from .graph import Trip, definitions_of, joined
from .share import warn_if_most_is_kept
from .values import Known, Value, cast, given, literal, saturated

# Told of every equation, in the order of the program, what was decided. What the
# equation becomes is emitted in the scope that it returns, if any.
Listener = Callable[[Step, Decision], str | None]


class Caster(Calls):
    """Replays jaxprs with a 16-bit dtype for each pass, and one set of options."""

    def __init__(
        self,
        dtype: np.dtype,
        ops: OpLists,
        paths: Mapping[str, str] = NO_PATHS,
        *,
        backward_dtype: np.dtype | None = None,
        float8: bool = False,
        bfloat16_paths: Sequence[str] = (),
        narrowed: Callable[[Callable], Callable] = lambda fun: fun,
        listener: Listener | None = None,
    ):
        """Starts with nothing rewritten.

        Args:
            dtype: The 16-bit dtype, of the forward pass.
            ops: The lists.
            paths: Scopes that stay float32, each with the precision of its products.
            backward_dtype: That of the backward pass, if it is another one.
            float8: Whether products take their operands in float8.
            bfloat16_paths: Scopes in which they take them in ``dtype``.
            narrowed: Changes how a program stores what its backward pass reads.
            listener: Is told what is decided.
        """
        self.dtype, self.rounds_products = dtype, ops.rounds_products
        self.backward_dtype = dtype if backward_dtype is None else backward_dtype
        two = self.backward_dtype != dtype
        self.analysis = Analysis(dtype, ops, paths, apart=two)
        self.float8 = Float8(dtype, ops, bfloat16_paths, is_on=float8)
        self.narrowed, self.listener = narrowed, listener
        self.rewritten_by: Any = weakref.WeakKeyDictionary()
        self.first_by: Any = weakref.WeakValueDictionary()
        self.keeps_loops = False  # some loop by rule 9, in this call

    def wrap(self, fun: Callable, scopes: Scopes | None = None) -> Callable:
        """Returns ``fun``, a function of pytrees, in mixed precision.

        Args:
            fun: Function that JAX can trace.
            scopes: Named scopes around it, None for a function of the user.
        """

        def wrapped(*args, **kwargs):
            # With a rule that reads the weights, which are kept in 16 bits, and not the
            # scores, which are not.
            with jax.softmax_custom_jvp(True), own_precisions():
                jaxpr, arrays, rebuilt = traced(fun, args, kwargs)
            if scopes is None:
                check_paths("float32_paths", self.analysis.paths, jaxpr)
                check_paths("bfloat16_paths", self.float8.paths, jaxpr)
            if scopes is not None:
                return rebuilt(self.run(jaxpr, arrays, scopes))
            if self.backward_dtype == self.dtype:
                return rebuilt(
                    self.narrowed(functools.partial(self.run, jaxpr))(arrays)
                )
            return rebuilt(differentiable(self.as_stored, jaxpr, arrays))

        return wrapped

    def as_stored(self, jaxpr: Any, arrays: Sequence[Any]) -> list[jax.Array]:
        """Runs a program that may have a backward pass, and stores what that reads."""
        run = functools.partial(self.run, jaxpr)
        return (self.narrowed(run) if _jaxpr.has_backward(jaxpr) else run)(arrays)

    def run(
        self, jaxpr: Any, arrays: Sequence[Any], scopes: Scopes | None = None
    ) -> list[jax.Array]:
        """Runs a whole program, a jaxpr, in mixed precision.

        Args:
            jaxpr: The jaxpr.
            arrays: Its inputs.
            scopes: As in :meth:`wrap`.
        """
        self.mark(jaxpr, scopes or ())
        outs = len(_jaxpr.out_avals(jaxpr))
        # What an inner rule returns is read by whoever called it.
        returned = needs.FULL | (needs.DIGITS if scopes is None else needs.NOTHING)
        trip = Trip((returned,) * outs)

        def replayed(*arrays):
            values = [given(array) for array in arrays]
            return self.as_written(jaxpr, values, trip, scopes or ())

        self.keeps_loops = False
        results = with_default_precision(replayed, arrays)
        if scopes is None and self.keeps_loops:  # as in few programs
            warn_if_most_is_kept(self.analysis, jaxpr, trip)
        return results

    def mark(self, jaxpr: Any, scopes: Scopes) -> None:
        """Lets the markers go through a program, before it is replayed."""
        if self.analysis.mark(jaxpr, scopes):
            self.rewritten_by.clear()

    def as_written(
        self, jaxpr: Any, values: Sequence[Value], trip: Trip, scopes: Scopes
    ) -> list[jax.Array]:
        """Replays ``jaxpr`` and returns its outputs in their original types."""
        outs = self.replay(jaxpr, values, trip, scopes)
        return [
            _jaxpr.with_type_of(out.wide(), aval)
            for out, aval in zip(outs, _jaxpr.out_avals(jaxpr), strict=True)
        ]

    def replay(
        self, jaxpr: Any, values: Sequence[Value], trip: Trip, scopes: Scopes
    ) -> list[Value]:
        """Replays ``jaxpr`` under the ambient trace."""
        plan = self.analysis.plan(jaxpr, trip, scopes)
        definition = definitions_of(plan.eqns)
        planned = zip(plan.kinds, plan.outs, plan.ins, strict=True)
        stacks: dict[tuple[int, int], Any] = {}
        # Most jaxprs have one context, to be entered once.
        nothing, shared = contextlib.nullcontext(), _jaxpr.shared_context(plan.eqns)

        def apply(eqn, ins):
            step = Step(eqn, *next(planned), scopes, definition, plan.forward)
            context = nothing if shared else _jaxpr.context_of(eqn)
            with _jaxpr.located_at(eqn, stacks), context:
                return self.streamed(step, ins)

        with shared or nothing:
            return _jaxpr.interpret(
                jaxpr, values, apply, eqns=plan.eqns, const=given, literal=literal
            )

    def streamed(self, step: Step, ins: list[Value]) -> list[Value]:
        """Replays one equation, and once more if the trips of a loop add up there.

        What they add up is not rounded, and what the others read is made of rounded
        numbers.
        """
        outs = self.apply(step, ins)
        if not step.read.summed:  # as nearly everywhere
            return outs
        way = joined(starts for starts, _ in step.read.summed)
        exact = [x.exact if way >> i & 1 else None for i, x in enumerate(ins)]
        if any(exact):
            ins = [y or x for x, y in zip(ins, exact, strict=True)]
            for out, one in zip(outs, self.apply(step, ins), strict=True):
                out.exact = one
        return outs

    def apply(self, step: Step, ins: list[Value]) -> list[Value]:
        """Replays one equation."""
        enters = step.kind == "call" and self.enters(step, ins)
        decision = INSIDE if enters else self.decide(step, ins)
        scope = None if self.listener is None else self.listener(step, decision)
        if enters:  # and each equation inside has a scope of its own
            return self.call(step, ins)
        with _in_scope(scope):
            return self.applied(step, ins, decision)

    def decide(self, step: Step, ins: list[Value]) -> Decision:
        """Decides how an equation runs that is not gone into."""
        kept = None
        if step.kind == "keep":
            kept = self.analysis.keeps(step.eqn, step.around)
            self.keeps_loops |= kept == rules.ENDS
        return decide(step, ins, self.dtype_in(step.back), kept=kept)

    def applied(self, step: Step, ins: list[Value], decision: Decision) -> list[Value]:
        """Replays one equation as it was decided."""
        if step.kind == "call":
            return self.untouched(step.eqn, ins)
        reason = self.why_16bit(step, ins)
        if step.kind == "product" or reason is None:
            outs = self.results(step.eqn, self.product(step, ins, decision, reason))
        elif decision.how == "half":
            outs = self.results(step.eqn, self.in_16_bits(step, ins))
        else:
            outs = self.in_float32(step, ins, decision, reason)
        _note(step, ins, outs)
        return outs

    def results(self, eqn: Equation, arrays: Sequence[Any]) -> list[Value]:
        """Returns the outputs of ``eqn``, of which only the dtype is known."""
        return [
            Known(half=is_float32(var) and x.dtype != FLOAT32).of(x)
            for x, var in zip(arrays, eqn.outvars, strict=True)
        ]

    def product(
        self, step: Step, ins: list[Value], decision: Decision, reason: str | None
    ) -> list[Any]:
        """Applies a product to operands in 16 bits, or rounded to 8 (rule 2).

        Args:
            step: The equation.
            ins: Its inputs.
            decision: What was decided.
            reason: Why it rounds nothing to float8, None if it does.
        """
        # The default is for float32, and JAX would give it to the derivatives.
        eqn, dtype = with_precision(step.eqn), self.dtype_in(step.back)
        operands = [
            value.narrow(dtype) if rounds and is_inexact(var) else value.wide()
            for value, var, rounds in zip(
                ins, eqn.invars, classes.rounds(eqn), strict=True
            )
        ]
        firmly = self.rounds_products and not needs.has_region(step.need)
        if reason is None:
            narrow = step.kind == "product" and (decision.how == "half" or firmly)
            out = dtype if narrow else eqn.outvars[0].aval.dtype
            return [multiplied(eqn, operands, out, step.back)]
        with _in_scope(reason):
            if classes.is_attention(eqn):
                return self.attention(step, operands)
            accumulates = "preferred_element_type" in eqn.params
            if not accumulates or not is_float32(eqn.outvars[0]):
                outs = bind_narrow(eqn, operands, dtype)
                return [
                    x if _may_be(x, var, dtype) else cast(x, var.aval.dtype)
                    for x, var in zip(outs, eqn.outvars, strict=True)
                ]
            if decision.how == "half":
                return _jaxpr.bind(eqn, operands, preferred_element_type=dtype)
            if firmly:
                return [rounded(eqn, operands, dtype, step.back)]
            linear = any([value.known.linear for value in ins])
            return [accumulated(eqn, operands, dtype, linear, step.back)]

    def attention(self, step: Step, operands: list[Any]) -> list[Any]:
        """Applies an attention, which returns 16 bits, widened for float32 readers."""
        outs = _jaxpr.bind(step.eqn, operands)
        return [
            cast(x, var.aval.dtype)
            if x.dtype != FLOAT32 and is_float32(var) and not needs.is_half(need)
            else x
            for x, var, need in zip(
                outs, step.eqn.outvars, step.read.wanted, strict=True
            )
        ]

    def why_16bit(self, step: Step, ins: list[Value]) -> str | None:
        """Returns why an equation rounds nothing to float8, see :class:`Float8`."""
        if not self.float8.is_on or self.analysis.is_kept(step.around):
            return ""
        linear = any([value.known.linear for value in ins])
        return self.float8.why_16bit(step.eqn, step.kind, step.around, linear=linear)

    def relevant(self, scopes: Scopes) -> Scopes:
        """Returns that of ``scopes`` on which the replay of a jaxpr depends."""
        by_path = self.float8.is_on and self.float8.paths
        return scopes if by_path else self.analysis.relevant(scopes)

    def in_16_bits(self, step: Step, ins: list[Value]) -> list[Any]:
        """Applies elementwise work, a choice or a move in 16 bits (rules 3 and 4)."""
        eqn, dtype = step.eqn, self.dtype_in(step.back)
        # The transpose of copying is a sum, which is to run in float32.
        sums = classes.copies(eqn) and not _jaxpr.is_differentiated(eqn)
        if sums or classes.is_of_several(eqn):
            wide = _jaxpr.bind(eqn, [value.wide() for value in ins])
            return [cast(x, dtype) for x in wide]
        shape = eqn.outvars[0].aval.shape if classes.stretches(eqn) else None
        operands = [
            _operand(value, shape, dtype) if is_float32(var) else value.array
            for value, var in zip(ins, eqn.invars, strict=True)
        ]
        if classes.sorts(eqn):
            operands = list(map(storage.sorted_alike, operands))
        return bind_narrow(eqn, operands, dtype)

    def in_float32(
        self, step: Step, ins: list[Value], decision: Decision, reason: str | None
    ) -> list[Value]:
        """Applies an equation as it was written, and stores what it returns.

        The arguments are those of :meth:`product`.
        """
        eqn, how, dtype = step.eqn, decision.how, self.dtype_in(step.back)
        if classes.retypes(eqn) and ins[0].known.half:
            return [ins[0]]
        if how == "stored" and step.kind == "exact":
            return self.results(eqn, [storage.sent(eqn, ins[0].array, dtype)])
        if step.kind == "keep":
            reason = self.analysis.reason(eqn, step.around) or reason
            eqn = at_precision(eqn, self.analysis.precision(eqn, step.around))
        else:
            reason = REASONS.get(decision.rule) if how == "float32" else None
        wide = storage.same(eqn, ins) or [value.wide() for value in ins]
        with _in_scope(reason):
            chosen = storage.as_choice(eqn, ins, step.need)
            outs = self.results(eqn, chosen or _jaxpr.bind(eqn, wide))
        if how == "rounded":
            firmly = classes.joins(eqn) or decision.rule == rules.FOLLOWS
            return [
                storage.joined(x, dtype, firmly=firmly and needs.has_several(need))
                if needs.is_half(need)
                else x
                for x, need in zip(outs, step.read.wanted, strict=True)
            ]
        if how == "stored":
            return [self.stored(step, out) if out.is_float32() else out for out in outs]
        return outs

    def stored(self, step: Step, out: Value) -> Value:
        """Returns a float32 result as it is stored in 16 bits (rule 7)."""
        return storage.kept(
            out,
            step.eqn,
            self.dtype_in(step.back),
            need=step.need,
            back=step.back,
            definition=step.definition,
        )


def _operand(value: Value, shape: tuple[int, ...] | None, dtype: np.dtype) -> Any:
    """Returns an operand in 16 bits, stretched to ``shape`` where that is told.

    The gradient of stretching is a sum, which is to run in float32.
    """
    if value.known.scalar is not None:
        return value.narrow(dtype)
    array, wide = value.array, not value.known.half
    if wide and dtype == np.float16:
        array = saturated(array, dtype)  # a mask of -1e9 must not become -inf
    if shape is not None and array.shape != shape:
        array = array if wide else value.wide()
        axes = range(len(shape) - array.ndim, len(shape))
        array = lax.broadcast_in_dim(array, shape, axes)
        return cast(array, dtype)
    return cast(array, dtype) if wide else value.narrow(dtype)


def _note(step: Step, ins: list[Value], outs: list[Value]) -> None:
    """Notes what is known of the outputs of an equation that holds no jaxpr."""
    if any([value.known.linear for value in ins]):
        for out in outs:
            out.note(linear=True)
    if step.back:
        copied = is_copied(step.eqn, step.kind, ins)
        sent = step.kind == "product" or is_sent_back(step.eqn, ins)
        sent |= step.kind == "exact" and any([value.known.sent for value in ins])
        for out in outs:
            out.note(sent=sent, copied=copied)
    if is_of_product(step.eqn, step.kind, ins):
        for out in filter(Value.is_float32, outs):
            out.note(product=True)
    if step.kind == "product":
        return
    if all([value.known.given for value in ins]):
        for out in outs:
            out.note(given=True)
    if ins and all([value.known.scalar is not None for value in ins]):
        number = classes.folded(step.eqn, [value.known.scalar for value in ins])
        for out in outs:
            out.note(scalar=number)
    if step.kind == "exact" and any([value.known.kept is not None for value in ins]):
        for out in outs:
            out.note(kept=() if out.known.half else None)


def _in_scope(reason: str | None) -> contextlib.AbstractContextManager:
    """Writes into the program why an equation has its dtype, for the audit to read."""
    return jax.named_scope(reason) if reason else contextlib.nullcontext()


def _may_be(x: Any, var: Any, dtype: np.dtype) -> bool:
    """Whether what the user has allowed has one of the two dtypes of a value."""
    return x.dtype == var.aval.dtype or (is_float32(var) and x.dtype == dtype)
