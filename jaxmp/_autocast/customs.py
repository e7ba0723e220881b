"""Replaying functions with derivative rules of their own, and functions of shards."""

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation, is_inexact
from .._jaxprs.scopes import Scopes
from .._ops.precision import own_precisions, with_default_precision
from .analysis import Analysis
from .graph import Trip
from .values import Known, Value

# Which dtype an output of a body must have.
End = Literal["wide", "half", "stacked", "free"]


class Customs(abc.ABC):
    """What the caster does with rules, and with shards."""

    analysis: Analysis
    dtype: np.dtype  # of 16 bits, in the forward pass
    backward_dtype: np.dtype  # in the backward pass
    first_by: Any  # by spelling, the first jaxpr of each

    @abc.abstractmethod
    def wrap(self, fun: Callable, scopes: Scopes | None = None) -> Callable:
        """Returns a function of pytrees in mixed precision."""

    @abc.abstractmethod
    def mark(self, jaxpr: Any, scopes: Scopes) -> None:
        """Lets the markers go through a program."""

    @abc.abstractmethod
    def as_written(
        self, jaxpr: Any, values: Sequence[Value], trip: Trip, scopes: Scopes
    ) -> list[jax.Array]:
        """Replays a jaxpr and returns its outputs in their original types."""

    @abc.abstractmethod
    def replay(
        self, jaxpr: Any, values: Sequence[Value], trip: Trip, scopes: Scopes
    ) -> list[Value]:
        """Replays a jaxpr."""

    @abc.abstractmethod
    def results(self, eqn: Equation, arrays: Sequence[Any]) -> list[Value]:
        """Returns the outputs of an equation."""

    @abc.abstractmethod
    def rewritten(
        self,
        body: _jaxpr.Body,
        ins: Sequence[Value],
        trip: Trip,
        ends: tuple[End, ...],
        scopes: Scopes,
    ) -> Any:
        """Returns a body of an equation in mixed precision."""

    def custom_jvp(
        self, eqn: Equation, ins: list[Value], trip: Trip, scopes: Scopes
    ) -> list[Value]:
        """Replays a function together with the derivative rule of its own."""
        body = _jaxpr.call_layout(eqn).bodies[0]
        body = body._replace(jaxpr=self.first_of(body.jaxpr))
        new = self.rewritten(body, ins, trip, ("free",) * len(trip.wanted), scopes)
        function = jax.custom_jvp(_jaxpr.jaxpr_as_fun(new.jaxpr))
        known = [value.known.in_body() for value in ins]  # keeps no tracer alive

        def rule(primals, tangents):
            moving = places_of_moving(eqn, tangents)
            arrays = [*primals, *(tangents[i] for i in moving)]
            facts = [*known, *(Known(known[i].half, linear=True) for i in moving)]
            return self.differentiated(eqn, facts, arrays, moving, trip, new, scopes)

        function.defjvp(rule, symbolic_zeros=True)
        arrays = function(*(x.array for x in ins))
        return [k.of(x) for k, x in zip(new.known, arrays, strict=True)]

    def differentiated(
        self,
        eqn: Equation,
        facts: Sequence[Known],
        arrays: Sequence[Any],
        moving: list[int],
        trip: Trip,
        new: Any,
        scopes: Scopes,
    ) -> tuple[list[Any], list[Any]]:
        """Returns results and tangents of a function with a rule.

        Args:
            eqn: The call of the function.
            facts: What is known of its inputs, and of the tangents of those that move.
            arrays: These.
            moving: Which these are.
            trip: What its outputs are needed for.
            new: The function in mixed precision: results and tangents have the dtypes
                that it has when it is only called.
            scopes: Named scopes around it.
        """
        moved = [i for i, var in enumerate(eqn.outvars) if is_inexact(var)]
        trip = Trip((*trip.wanted, *(trip.wanted[i] for i in moved)), trip.summed)
        avals_out = _jaxpr.out_avals(new.jaxpr)
        like = [*avals_out, *(avals_out[i] for i in moved)]
        zeros: list[bool] = []

        def replayed(*arrays):
            values = [k.of(x) for k, x in zip(facts, arrays, strict=True)]
            outs = self.replay(jaxpr, values, trip, scopes)
            zeros[:] = [out.is_zero() for out in outs]
            return [
                _jaxpr.with_type_of(out.array, aval)
                for out, aval in zip(outs, like, strict=True)
            ]

        with noted_as_rule():
            jaxpr = _derivative(eqn, moving, moved)
            self.mark(jaxpr, scopes)
            arrays = with_default_precision(replayed, arrays)
        tangents = [
            _jaxpr.zero_tangent(jax.typeof(x)) if is_zero else x
            for x, is_zero in zip(arrays, zeros, strict=True)
        ]
        nothing = [_jaxpr.zero_tangent(var.aval) for var in eqn.outvars]
        results = len(eqn.outvars)
        return arrays[:results], replaced(nothing, moved, tangents[results:])

    def first_of(self, jaxpr: Any) -> Any:
        """Returns the first jaxpr that is the same as ``jaxpr``, from the same lines.

        JAX traces a function with a derivative rule anew for each call, as in layers.
        """
        key = None if self.analysis.is_marked(jaxpr) else spelled(jaxpr)
        return jaxpr if key is None else self.first_by.setdefault(key, jaxpr)

    def custom_vjp(
        self, eqn: Equation, ins: list[Value], trip: Trip, scopes: Scopes
    ) -> list[Any]:
        """Replays a function with a backward rule, in float32 at its boundary."""
        closed_over = eqn.params["num_consts"]
        known = [value.widened().known.in_body() for value in ins]

        @jax.custom_vjp
        def function(*arrays):
            values = [k.of(x) for k, x in zip(known, arrays, strict=True)]
            return self.as_written(eqn.params["call_jaxpr"], values, trip, scopes)

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
                outs, pull = self.wrap(linearized, scopes)(*(p.value for p in primals))
            return outs, (pull, dict.fromkeys(moving))

        def backward(residuals, cotangents):
            pull, moving = residuals
            cotangents = [
                _jaxpr.zero_cotangent(x) if isinstance(x, SymbolicZero) else x
                for x in cotangents
            ]
            with noted_as_rule():
                pulled = self.wrap(lambda pull, x: pull(x), scopes)(pull, cotangents)
            return tuple(replaced([None] * len(ins), moving, pulled))

        function.defvjp(forward, backward, symbolic_zeros=True)
        return function(*(value.wide() for value in ins))

    def shard_map(
        self, eqn: Equation, ins: list[Value], trip: Trip, scopes: Scopes
    ) -> list[Any]:
        """Replays a function of shards, in float32 at its boundary."""
        known = [value.widened().known.in_body() for value in ins]

        def on_shards(*shards):
            values = [k.of(x) for k, x in zip(known, shards, strict=True)]
            return self.as_written(eqn.params["jaxpr"], values, trip, scopes)

        return _jaxpr.bind_shard_map(eqn, [value.wide() for value in ins], on_shards)


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


def spelled(jaxpr: Any) -> Any:
    """Returns what ``jaxpr`` computes, and which lines wrote it, as one thing to hash.

    None if that cannot be told.

    Args:
        jaxpr: The jaxpr, open or closed.
    """
    body = _jaxpr.open_jaxpr(jaxpr)
    numbers: dict[Any, Any] = {}

    def named(atom: Any) -> Any:
        if isinstance(atom, _jaxpr.Literal):
            return str(atom.val), atom.aval
        return numbers.setdefault(atom, (len(numbers), atom.aval))

    def named_all(atoms: Sequence[Any]) -> tuple:
        return tuple(map(named, atoms))

    ins = named_all(body.invars)
    eqns = tuple(
        (
            eqn.primitive,
            tuple(sorted(eqn.params.items())),
            named_all(eqn.invars),
            named_all(eqn.outvars),
            eqn.source_info.traceback,
            str(eqn.source_info.name_stack),
            eqn.ctx,
        )
        for eqn in body.eqns
    )
    key = ins, eqns, named_all(body.outvars)
    try:
        hash(key)
    except TypeError:  # a parameter that cannot be compared
        return None
    return None if body.constvars or body.effects else key


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


def replaced(items: Sequence[Any], places: Iterable[int], new: Iterable[Any]) -> list:
    """Returns ``items`` with those at ``places`` replaced."""
    changed = dict(zip(places, new, strict=True))
    return [changed.get(i, item) for i, item in enumerate(items)]


def places_of_moving(eqn: Equation, tangents: Iterable[Any]) -> list[int]:
    """Returns which inputs of ``eqn`` are differentiated.

    A rule is asked for these, and for nothing else.
    """
    return [
        i
        for i, (var, x) in enumerate(zip(eqn.invars, tangents, strict=True))
        if is_inexact(var) and not isinstance(x, SymbolicZero)
    ]
