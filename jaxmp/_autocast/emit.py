"""What the plan says of each equation, written as a program. Nothing is decided here.

One invariant keeps this safe: a value has its original dtype or, if that was float32,
the 16-bit one, and whoever is not planned to take the latter gets the former.
"""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.flatten import traced
from .._jaxprs.jaxpr import FLOAT32, Equation, Run, is_float32, is_inexact
from .._jaxprs.scopes import (
    FLOAT32_PATHS,
    SATURATED,
    STACKED,
    STEP,
    Scopes,
    check_paths,
)
from .._ops import table
from .._ops.fp8 import multiplied
from .._ops.narrow import (
    accumulated,
    added_to_zeros,
    bind_narrow,
    firmly_rounded,
    rounded,
    row_axis,
)
from .._ops.precision import at_precision, own_precisions, with_default_precision
from .._ops.products import takes_unrounded, with_precision
from . import classes, customs, facts, needs, rules, storage, streams
from .analysis import BY_PATHS
from .facts import GIVEN, Facts
from .forgotten import has_unscaled_gradients
from .plan import Plan, Planner, Step
from .share import warn_if_most_is_kept


@dataclasses.dataclass(slots=True)
class Value:
    """A value of the program that is emitted."""

    array: Any  # array, tracer or literal, in the dtype that the facts say
    facts: Facts
    sum32: "Value | None" = None  # what a loop adds up beside it, see `streams`
    # Where `device_put` has put it, and what it was before. It is rounded before, as
    # no kernel of a GPU computes in the memory of the host.
    put: "tuple[Any, Value] | None" = None
    _wide: Any = None
    _half: Any = None

    def __post_init__(self):
        planned = self.facts.dtype
        assert planned is None or self.array.dtype == planned, "not as planned"

    def wide(self) -> Any:
        """Returns the array in its original dtype."""
        if not self.facts.half:
            return self.array
        if self._wide is None:  # shared, so that its cotangents add up in float32
            wide = cast(self.array, FLOAT32)
            if self.facts.stored:  # what rounding has left of the sums is taken out
                wide = wide / jnp.sum(wide, self.facts.stored, keepdims=True)
            self._wide = wide
        return self._wide

    def narrow(self, dtype: np.dtype) -> Any:
        """Returns the array in ``dtype``, which has 16 bits."""
        if self.array.dtype == dtype:
            return self.array
        if not isinstance(self.array, jax.Array):  # a literal
            return np.asarray(self.array, dtype)
        if self.facts.given:
            # A weight is rounded anew for each use, so that its gradients are widened
            # before they add up.
            return cast(self.array, dtype)
        if self._half is None or self._half.dtype != dtype:
            self._half = cast(self.array, dtype)
        return self._half


class Emitter:
    """Plans functions with one :class:`Planner`, and emits what it says."""

    def __init__(
        self,
        planner: Planner,
        record: list[Step] | None = None,
        *,
        brings_gradient: bool = False,
    ):
        """Starts with nothing emitted.

        Args:
            planner: What decides.
            record: Is given each step, in the order of the program. What comes of it
                is emitted in a scope with its place in the list.
            brings_gradient: Whether JAX differentiates nothing that is emitted, see
                :mod:`~jaxmp._autocast.derivative`.
        """
        self.planner, self.record = planner, record
        self.brings_gradient = brings_gradient
        self.forgets_scale = False  # whether a gradient in what it emitted has none
        self._bodies: Any = weakref.WeakKeyDictionary()  # by plan, and by context

    def wrap(
        self,
        fun: Callable,
        scopes: Scopes | None = None,
        changed: Callable[[Run], Run] = lambda run: run,
    ) -> Callable:
        """Returns ``fun``, a function of pytrees, in mixed precision.

        Args:
            fun: Function that JAX can trace.
            scopes: Named scopes around it, None for a function of the user.
            changed: Transforms what runs its program.
        """
        planner, run = self.planner, functools.partial(self.run, scopes=scopes)

        def wrapped(*args, **kwargs):
            # With a rule that reads the weights, which are stored in 16 bits, and not
            # the scores, which are not.
            with jax.softmax_custom_jvp(True), own_precisions():
                jaxpr, arrays, rebuilt = traced(fun, args, kwargs)
            if scopes is None:
                check_paths("float32_paths", planner.analysis.paths, jaxpr)
                check_paths("bfloat16_paths", planner.bfloat16_paths, jaxpr)
            return rebuilt(changed(run)(jaxpr, arrays))

        return wrapped

    def run(
        self, jaxpr: Any, arrays: Sequence[Any], scopes: Scopes | None = None
    ) -> list[jax.Array]:
        """Runs a whole program, a jaxpr, in mixed precision.

        Args:
            jaxpr: The jaxpr.
            arrays: Its inputs.
            scopes: As in :meth:`wrap`.
        """
        # What an inner rule returns is read by whoever called it.
        returned = needs.FULL | (needs.DIGITS if scopes is None else needs.NOTHING)
        plan = self.planner.program(jaxpr, returned, scopes or ())
        emitted = functools.partial(self.as_written, jaxpr, plan)
        results = with_default_precision(emitted, arrays)
        if scopes is None and self.planner.backward_dtype == np.float16:
            self.forgets_scale |= has_unscaled_gradients(plan, jaxpr)
        if scopes is None and any(x.rule == rules.COMPARING for x in plan.all_steps()):
            warn_if_most_is_kept(plan)  # as in few programs
        return results

    def as_written(self, jaxpr: Any, plan: Plan, *arrays: Any) -> list[jax.Array]:
        """Emits a jaxpr that returns its outputs in their original types."""
        outs = zip(self.emit(jaxpr, plan, arrays), _jaxpr.out_avals(jaxpr), strict=True)
        return [_jaxpr.with_type_of(out, aval) for out, aval in outs]

    def body(self, jaxpr: Any, plan: Plan) -> Any:
        """Returns a jaxpr as its plan says."""
        memo, key = self._bodies.setdefault(plan, {}), _jaxpr.trace_context()
        if key not in memo:
            avals = [
                aval.update(dtype=x.dtype, weak_type=False)
                if x.half and x.sum32 is None
                else aval
                for aval, x in zip(_jaxpr.in_avals(jaxpr), plan.ins, strict=True)
            ]
            new = _jaxpr.trace(lambda *xs: self.emit(jaxpr, plan, xs), avals)
            memo[key] = _jaxpr.written_in(new, jaxpr)
        return memo[key]

    def emit(self, jaxpr: Any, plan: Plan, arrays: Sequence[Any]) -> list[Any]:
        """Emits a jaxpr under the ambient trace, and returns its outputs as planned."""
        steps, scopes = iter(plan.steps), dict[tuple[int, int], Any]()

        def apply(eqn: Equation, ins: list[Value]) -> list[Value]:
            step = next(steps)
            if step.repeats and self.record is None:  # as most are
                arrays = _jaxpr.repeated(eqn, [x.array for x in ins], scopes)
                if arrays is not None:
                    return list(map(Value, arrays, step.outs))
            with _jaxpr.located_at(eqn, scopes), _jaxpr.context_of(eqn):
                return self._step(step, ins)

        outs = _jaxpr.interpret(
            jaxpr,
            [self._arrived(plan, i, array) for i, array in enumerate(arrays)],
            apply,
            eqns=[step.eqn for step in plan.steps],
            const=lambda array: Value(array, GIVEN),
            literal=lambda atom: Value(atom.val, facts.of_literal(atom)),
        )
        return [self._returned(plan, i, out) for i, out in enumerate(outs)]

    def narrow(self, value: Value, dtype: np.dtype) -> Any:
        """Returns a value in 16 bits."""
        if value.put is None or value.facts.half:
            return value.narrow(dtype)
        device, before = value.put
        return jax.device_put(self.narrow(before, dtype), device)

    def _arrived(self, plan: Plan, i: int, array: Any) -> Value:
        """Returns an input; of the sum of a loop, what others read beside it."""
        known = plan.ins[i]
        if known.sum32 is None:
            return Value(array, known)
        assert known.dtype is not None
        sum32 = Value(array, known.sum32)
        # Firmly, or else XLA may take the sum itself.
        seen = firmly_rounded(self.narrow(sum32, known.dtype))
        return Value(seen, known, sum32)

    def _returned(self, plan: Plan, i: int, out: Value) -> Any:
        """Returns the array of an output."""
        end = plan.ends[i]
        out = streams.returned(out, end)
        if end in ("wide", "free", "ranged"):
            return out.wide() if end == "wide" else out.array
        with jax.named_scope(STACKED) if end == "stacked" else contextlib.nullcontext():
            return self.narrow(out, plan.dtype)

    # One equation.

    def _step(self, step: Step, ins: list[Value]) -> list[Value]:
        outs = [
            Value(array, known)
            for array, known in zip(self._applied(step, ins), step.outs, strict=True)
        ]
        if table.puts(step.eqn):
            devices = step.eqn.params["devices"]
            for device, before, after in zip(devices, ins, outs, strict=True):
                after.put = device, before
        if step.sum32 is not None:
            sums = streams.of_sum(step.demand.summed, ins) or ins
            arrays = self._applied(step.sum32, sums)
            for out, array, known in zip(outs, arrays, step.sum32.outs, strict=True):
                out.sum32 = Value(array, known)
        return outs

    def _applied(self, step: Step, ins: list[Value]) -> Sequence[Any]:
        scopes = []  # of one equation: to enter one takes as long as to write it
        if self.record is not None:
            self.record.append(step)
            scopes.append(f"{STEP}{len(self.record) - 1}")
        if step.inside is not None:  # each equation inside has a number of its own
            return self._call(step, ins)
        if step.why == BY_PATHS:
            scopes.append(FLOAT32_PATHS)
        if not scopes:
            return self.apply(step, ins)
        with jax.named_scope("/".join(scopes)):
            return self.apply(step, ins)

    def apply(self, step: Step, ins: list[Value]) -> Sequence[Any]:
        """Applies an equation that is not gone into to these, as planned."""
        if step.kind == "product" or step.float8:
            return self._product(step, ins)
        if table.retypes(step.eqn) and ins[0].facts.half:
            return [ins[0].array]
        if table.is_saved(step.eqn) and ins[0].facts.half:
            array = ins[0].array
            bits = jnp.finfo(array.dtype)  # the digits that all read of it
            return [lax.reduce_precision(array, bits.nexp, bits.nmant)]
        if step.how == "half":
            return in_16_bits(step, ins)
        return in_float32(step, ins)

    def _product(self, step: Step, ins: list[Value]) -> Sequence[Any]:
        """Applies a product to operands in 16 bits, or rounded to 8."""
        # The default is for float32, and JAX would give it to the derivatives.
        eqn, dtype = with_precision(step.eqn), step.dtype
        operands = [
            x.narrow(dtype) if rounds and is_inexact(var) else x.wide()
            for x, var, rounds in zip(ins, eqn.invars, classes.rounds(eqn), strict=True)
        ]
        half = step.outs[0].half
        if step.float8:
            out = dtype if half else eqn.outvars[0].aval.dtype
            return [multiplied(eqn, operands, out, step.back)]
        accumulates = "preferred_element_type" in eqn.params
        if not accumulates or not is_float32(eqn.outvars[0]):
            if takes_unrounded(eqn):
                operands += [x.array for x in ins[:2]]
            outs = bind_narrow(eqn, operands, dtype)
            return [
                x
                if known.half or x.dtype == var.aval.dtype
                else cast(x, var.aval.dtype)
                for x, var, known in zip(outs, eqn.outvars, step.outs, strict=True)
            ]
        if step.how == "half":
            return _jaxpr.bind(eqn, operands, preferred_element_type=dtype)
        if half:  # as the lists say that all products are rounded
            return [rounded(eqn, operands, dtype, step.back)]
        return [accumulated(eqn, operands, dtype, step.tangent, step.back)]

    def _call(self, step: Step, ins: list[Value]) -> Sequence[Any]:
        """Applies an equation that holds jaxprs to these, as planned."""
        eqn, within = step.eqn, step.inside
        assert within is not None
        arrays = [
            x.wide()
            if how == "wide"
            else x.array
            if how == "as is"
            else self.narrow(x, how)
            for x, how in zip(ins, within.passed, strict=True)
        ]
        kind = _jaxpr.call_kind(eqn)
        if kind in customs.RULES:
            return customs.RULES[kind](self, step, arrays)
        if kind == "shard_map":
            emitted = functools.partial(self.as_written, *within.bodies[0])
            return _jaxpr.bind_shard_map(eqn, arrays, emitted)
        bodies = [self.body(*body) for body in within.bodies]
        if within.weights and kind == "scan" and not self.brings_gradient:
            wide = {i: ins[i].wide() for i in within.weights}
            return customs.scan(eqn, arrays, wide, *bodies)
        return _jaxpr.bind_bodies(eqn, arrays, bodies)


# Returns where to record steps, None if nowhere. JAX keeps what it has traced by its
# contexts, so a program whose steps are recorded shares nothing with one that runs.
RECORD = jax.make_user_context(None)


@contextlib.contextmanager
def recording() -> Iterator[list[Step]]:
    """Has autocast functions that are called in here add the steps of their plans.

    What comes of a step is then in a named scope with its place in the list.
    """
    steps: list[Step] = []
    with RECORD(lambda: steps):  # a list has no hash
        yield steps


def in_16_bits(step: Step, ins: Sequence[Value]) -> Sequence[Any]:
    """Applies elementwise work, a choice or a move in 16 bits."""
    eqn, dtype = step.eqn, step.dtype
    if table.is_of_several(eqn):
        # Behind a barrier, or XLA would store float32 of it for the backward pass.
        x = lax.optimization_barrier(ins[0].narrow(dtype))
        return [cast(y, dtype) for y in _jaxpr.bind(eqn, [cast(x, np.float32)])]
    # The transpose of copying is a sum, which is to run in float32.
    if table.copies(eqn) and not _jaxpr.is_differentiated(eqn):
        return [cast(x, dtype) for x in _jaxpr.bind(eqn, [x.wide() for x in ins])]
    operands = [
        _operand(x, eqn, dtype) if is_float32(var) else x.array
        for x, var in zip(ins, eqn.invars, strict=True)
    ]
    if table.tests_sign(eqn):  # or XLA would read what is not rounded, and store that
        operands[0] = firmly_rounded(operands[0])
    if table.sorts(eqn):
        operands = list(map(storage.sorted_alike, operands))
    return bind_narrow(eqn, operands, dtype)


def _operand(value: Value, eqn: Equation, dtype: np.dtype) -> Any:
    """Returns an operand in 16 bits, stretched where ``eqn`` would stretch it.

    The gradient of stretching is a sum, which is to run in float32.
    """
    if value.facts.scalar is not None:
        return value.narrow(dtype)
    array, wide = value.array, not value.facts.half
    if wide and dtype == np.float16 and table.joins(eqn):
        limit = np.float32(jnp.finfo(dtype).max)  # a mask of -1e9 is no -inf
        with jax.named_scope(SATURATED):
            clipped = lax.clamp(-limit, array, limit)
            array = lax.select(lax.is_finite(array), clipped, array)
    shape = eqn.outvars[0].aval.shape
    if table.stretches(eqn) and array.shape != shape:
        array = array if wide else value.wide()
        axes = range(len(shape) - array.ndim, len(shape))
        return cast(lax.broadcast_in_dim(array, shape, axes), dtype)
    return cast(array, dtype) if wide else value.narrow(dtype)


def in_float32(step: Step, ins: Sequence[Value]) -> Sequence[Any]:
    """Applies an equation as it was written, and stores what it returns."""
    eqn, dtype, need = step.eqn, step.dtype, step.need
    if step.how == "stored" and step.kind == "exact":
        return [storage.gathered(eqn, ins[0].array, dtype)]
    known, wide = [x.facts for x in ins], [x.wide() for x in ins]
    if needs.is_half(need) and row_axis(eqn) is not None and known[0].is_zero():
        # The loss of a language model looks up the logit of each label. A scatter would
        # store the gradient of all logits in float32 on its way to the products. A
        # choice is the same number, and fuses.
        outs = [added_to_zeros(eqn, *wide)]
    else:
        wide = storage.alike(eqn, known, wide)
        outs = _jaxpr.bind(at_precision(eqn, step.precision), wide)
    results = []
    for x, out, one in zip(outs, step.outs, step.demand.needs, strict=True):
        if out.half:
            x = cast(x, dtype)
            if step.how == "stored" and not needs.is_for_products(need):
                x = storage.stored(x, step.back)
            # Where somebody widens it again, for whom XLA would store float32. Of a
            # sigmoid it stores nothing, and computes it again.
            firmly = step.how == "rounded" and not table.is_sigmoid(eqn)
            if firmly and needs.has_several(one):
                x = firmly_rounded(x)
        results.append(x)
    return results


def cast(array: Any, dtype: Any) -> Any:
    """Returns an array in another dtype.

    It is ``lax.convert_element_type`` without its checks, traced once for each type:
    there are hundreds in a step.
    """
    aval = jax.typeof(array)
    # Of another mesh than here, maybe: see `auto_axes`.
    with jax.sharding.use_abstract_mesh(aval.sharding.mesh):
        return _jaxpr.bind(_cast_of(aval, np.dtype(dtype)), [array])[0]


@_jaxpr.remembered
def _cast_of(aval: Any, dtype: np.dtype) -> Equation:
    options = {"new_dtype": dtype, "weak_type": False, "sharding": None}
    cast = functools.partial(lax.convert_element_type_p.bind, **options)
    return _jaxpr.trace(cast, [aval]).eqns[0]
