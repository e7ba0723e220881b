"""Functions with derivative rules of their own, and scans with rounded weights.

JAX traces the rules later, where somebody differentiates. They are planned then.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import FLOAT32, Equation, is_inexact
from .._ops.precision import own_precisions, with_default_precision
from .facts import Facts
from .graph import Demand
from .plan import Step, replaced

if TYPE_CHECKING:
    from .emit import Emitter


def custom_jvp(emitter: "Emitter", step: Step, arrays: Sequence[Any]) -> list[Any]:
    """Applies a function as planned, with its derivative rule as planned then.

    Results and tangents of the rule have the dtypes of the function that is called.
    """
    eqn, within = step.eqn, step.inside
    assert within is not None
    ((jaxpr, plan),) = within.bodies
    body = emitter.body(jaxpr, plan)
    function = jax.custom_jvp(_jaxpr.jaxpr_as_fun(body))
    moved = [i for i, var in enumerate(eqn.outvars) if is_inexact(var)]
    needs, like = within.demand.needs, _jaxpr.out_avals(body)
    demand = Demand((*needs, *(needs[i] for i in moved)), within.demand.summed)
    like = [*like, *(like[i] for i in moved)]

    def rule(primals, tangents):
        moving = places_of_moving(eqn, tangents)
        arrays = [*primals, *(tangents[i] for i in moving)]
        known = [*plan.ins, *(Facts(plan.ins[i].dtype, tangent=True) for i in moving)]
        with noted_as_rule():
            derivative = _derivative(eqn, moving, moved)
            planner = emitter.planner.marked(derivative, within.scopes)
            ends = ("free",) * len(like)
            planned = planner.plan(derivative, known, demand, ends, within.scopes)

            def emitted(*arrays):
                outs = emitter.emit(derivative, planned, arrays)
                return [*map(_jaxpr.with_type_of, outs, like)]

            outs = with_default_precision(emitted, arrays)
        results = len(eqn.outvars)
        zeros = [_jaxpr.zero_tangent(var.aval) for var in eqn.outvars]
        found = [
            _jaxpr.zero_tangent(jax.typeof(x)) if facts.is_zero() else x
            for x, facts in zip(outs, planned.outs, strict=True)
        ]
        return outs[:results], replaced(zeros, moved, found[results:])

    function.defjvp(rule, symbolic_zeros=True)
    return function(*arrays)


def custom_vjp(emitter: "Emitter", step: Step, arrays: Sequence[Any]) -> list[Any]:
    """Applies a function with a backward rule, in float32 at its boundary."""
    eqn, within = step.eqn, step.inside
    assert within is not None
    closed_over, scopes = eqn.params["num_consts"], within.scopes
    count = len(arrays)  # and no tracer: the rule lives as long as its jaxpr
    ((jaxpr, plan),) = within.bodies

    @jax.custom_vjp
    def function(*arrays):
        return emitter.as_written(jaxpr, plan, *arrays)

    def forward(*primals):
        # The rule is asked for what is differentiated, and for nothing else.
        moving = [i for i, primal in enumerate(primals) if primal.perturbed]
        if any(i < closed_over for i in moving):
            raise TypeError(
                "A `jax.custom_vjp` function closes over a value that is "
                "differentiated. Its rule has no gradient for it: pass the value "
                "as an argument."
            )

        def linearized(*arrays):
            return jax.vjp(
                lambda *args: _jaxpr.bind(eqn, replaced(arrays, moving, args)),
                *(arrays[i] for i in moving),
            )

        with noted_as_rule():
            outs, pull = emitter.wrap(linearized, scopes)(*(p.value for p in primals))
        return outs, (pull, dict.fromkeys(moving))

    def backward(residuals, cotangents):
        pull, moving = residuals
        cotangents = [
            _jaxpr.zero_cotangent(x) if isinstance(x, SymbolicZero) else x
            for x in cotangents
        ]
        with noted_as_rule():
            pulled = emitter.wrap(lambda pull, x: pull(x), scopes)(pull, cotangents)
        return tuple(replaced([None] * count, moving, pulled))

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function(*arrays)


RULES = {"custom_jvp": custom_jvp, "custom_vjp": custom_vjp}


def scan(
    eqn: Equation, arrays: Sequence[Any], wide: Mapping[int, Any], body: Any
) -> list[Any]:
    """Applies a scan whose weights were rounded before its first iteration.

    JAX adds up the cotangents of a constant, one of each iteration, in its
    dtype, and a sum in bfloat16 stalls after some hundreds of them. So where the scan
    is differentiated, it is given the float32 weights, and each iteration rounds them.

    Args:
        eqn: The scan.
        arrays: What it is given.
        wide: By place, the float32 array of what was rounded.
        body: Its body in mixed precision.
    """
    places = sorted(wide)  # and no tracer: the rule lives as long as its jaxpr

    def iteration(*args):
        in_16_bits = [
            lax.convert_element_type(args[i], _jaxpr.in_avals(body)[i].dtype)
            for i in places
        ]
        return _jaxpr.jaxpr_as_fun(body)(*replaced(args, places, in_16_bits))

    def rounding_in_the_body(*args):
        avals = [
            aval.update(dtype=FLOAT32) if i in places else aval
            for i, aval in enumerate(_jaxpr.in_avals(body))
        ]
        return _jaxpr.bind_bodies(eqn, args, [_jaxpr.trace(iteration, avals)])

    @jax.custom_jvp
    def scanned(arrays, wide):
        return _jaxpr.bind_bodies(eqn, arrays, [body])

    def rule(primals, tangents):
        args, moved = (replaced(x, places, y) for x, y in (primals, tangents))
        moving = places_of_moving(eqn, moved)

        def differentiated(*xs):
            outs, tangents = jax.jvp(
                lambda *xs: rounding_in_the_body(*replaced(args, moving, xs)),
                xs[: len(moving)],
                xs[len(moving) :],
            )
            return [*outs, *tangents]

        pairs = [*(args[i] for i in moving), *(moved[i] for i in moving)]
        outs, count = with_default_precision(differentiated, pairs), len(eqn.outvars)
        return outs[:count], outs[count:]

    scanned.defjvp(rule, symbolic_zeros=True)
    return scanned(list(arrays), [wide[i] for i in places])


def _derivative(eqn: Equation, moving: Sequence[int], moved: Sequence[int]) -> Any:
    """Returns a jaxpr of the results of a function with a rule, and of tangents."""
    count, avals = len(eqn.invars), [var.aval for var in eqn.invars]

    def differentiated(*args):
        args, tangents = args[:count], args[count:]
        primals_out, tangents_out = jax.jvp(
            lambda *xs: _jaxpr.bind(eqn, replaced(args, moving, xs)),
            [args[i] for i in moving],
            list(tangents),
        )
        return [*primals_out, *(tangents_out[i] for i in moved)]

    with own_precisions():
        return _jaxpr.trace(differentiated, [*avals, *(avals[i] for i in moving)])


@contextlib.contextmanager
def noted_as_rule() -> Iterator[None]:
    """Adds to the errors of a derivative's rule where autocast should be."""
    try:
        yield
    except Exception as error:
        error.add_note(
            "This is the rule of a custom derivative, inside `autocast` inside a "
            "gradient. If it works without `autocast`, put `autocast` outside: "
            "`autocast(jax.value_and_grad(loss))`."
        )
        raise


def places_of_moving(eqn: Equation, tangents: Iterable[Any]) -> list[int]:
    """Returns which inputs of ``eqn`` are differentiated.

    A rule is asked for these, and for nothing else.
    """
    return [
        i
        for i, (var, x) in enumerate(zip(eqn.invars, tangents, strict=True))
        if is_inexact(var) and not isinstance(x, SymbolicZero)
    ]
