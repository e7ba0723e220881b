"""Replaying a jaxpr in mixed precision: the inside of autocast.

The equations are applied one by one under the ambient trace, each as
:mod:`jaxmp._plan` says. One invariant keeps that safe: a value has its original dtype
or, if that was float32, the 16-bit one, and whoever is not known to accept the latter
gets the former back.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from . import _jaxpr
from ._custom_rules import noted_as_rule, replaced
from ._flatten import ARRAY, arrays_of, with_arrays
from ._jaxpr import ClosedJaxpr, Equation, is_float32, is_inexact
from ._loops import (
    as_carried,
    known_in_trip,
    note_kept,
    rounded_weights,
    scanned,
    stacked,
)
from ._op_lists import (
    ADDS_UP,
    EXACT,
    GATHERS_ROWS,
    JOINS,
    MOVES_WEIGHTS,
    POOLS,
    OpLists,
)
from ._operations import (
    allowed,
    bind_as_written,
    for_reason,
    inferred,
    row_summed,
)
from ._plan import Plan, Rule, wanted_of_results
from ._planner import Planner
from ._precision import own_precisions, with_default_precision
from ._product_rules import moved
from ._products import is_resize
from ._scopes import Scopes, check_paths, inside, is_backward
from ._twins import spelled
from ._uses import IN_16BIT, STORED, Want, as_written
from ._values import (
    Known,
    Value,
    given,
    literal,
    note_number,
    note_origin,
    note_product,
    note_sent_back,
    pooled,
    rounded_by_xla,
)


class Rewritten(NamedTuple):
    """A jaxpr in mixed precision, and what is known of its outputs."""

    jaxpr: ClosedJaxpr
    known: tuple[Known, ...]


class Caster:
    """Replays jaxprs with one 16-bit dtype, one set of lists and one of paths."""

    def __init__(self, dtype: np.dtype, ops: OpLists, paths: Any = (), **float8: Any):
        """Starts with nothing rewritten, and takes what :class:`Planner` takes."""
        self.dtype = dtype
        self.planner = Planner(dtype, ops, paths, **float8)
        # By jaxpr, so that what JAX shares between calls and layers stays shared.
        self._rewritten: Any = weakref.WeakKeyDictionary()
        self._first: Any = weakref.WeakValueDictionary()

    def wrap(self, fun: Callable, scopes: Scopes | None = None) -> Callable:
        """Returns ``fun``, a function of pytrees, in mixed precision.

        Args:
            fun: Function that JAX can trace.
            scopes: Named scopes around it, None for a function of the user.
        """

        def wrapped(*args, **kwargs):
            leaves, in_tree = jax.tree.flatten((args, kwargs))
            results: Any = None

            @functools.wraps(fun, updated=())
            def flat(*arrays):
                nonlocal results
                args, kwargs = in_tree.unflatten(with_arrays(leaves, arrays))
                outs, out_tree = jax.tree.flatten(fun(*args, **kwargs))
                # Nothing holds a tracer when its trace is over.
                known = [ARRAY if isinstance(x, jax.Array) else x for x in outs]
                results = known, out_tree
                return arrays_of(outs)

            arrays = arrays_of(leaves)
            # With a rule that reads the weights, which are kept in 16 bits, and not the
            # scores, which are not.
            with jax.softmax_custom_jvp(True), own_precisions():
                jaxpr = _jaxpr.trace(flat, arrays)
            if scopes is None:
                check_paths("float32_paths", self.planner.paths, jaxpr)
                check_paths("bfloat16_paths", self.planner.bfloat16_paths, jaxpr)
            self.planner.find_factors(jaxpr, scopes or ())
            wanted = wanted_of_results(jaxpr)
            if scopes is not None:
                wanted = ("original",) * len(wanted)

            def replayed(*arrays):
                values = [given(array) for array in arrays]
                return self.replay_as_written(jaxpr, values, wanted, scopes or ())

            outs = with_default_precision(replayed, arrays)
            leaves, out_tree = results
            return out_tree.unflatten(with_arrays(leaves, outs))

        return wrapped

    def replay_as_written(
        self,
        jaxpr: Any,
        values: Sequence[Value],
        wanted: Sequence[Want],
        scopes: Scopes = (),
    ) -> list[jax.Array]:
        """Replays ``jaxpr`` and returns its outputs in their original types."""
        avals = _jaxpr.out_avals(jaxpr)
        outs = self.replay(jaxpr, values, wanted, scopes)
        return [
            _jaxpr.with_type_of(out.original(), aval)
            for out, aval in zip(outs, avals, strict=True)
        ]

    def replay(
        self,
        jaxpr: Any,
        values: Sequence[Value],
        wanted: Sequence[Want],
        scopes: Scopes,
    ) -> list[Value]:
        """Replays ``jaxpr`` under the ambient trace.

        Args:
            jaxpr: Open or closed jaxpr.
            values: Its inputs.
            wanted: What its outputs are wanted for.
            scopes: Named scopes around ``jaxpr``.
        """
        plan = self.planner.plan(jaxpr, wanted, scopes)
        planned = zip(plan.rules, plan.wants, strict=True)
        stacks: dict[tuple[int, int], Any] = {}
        # Most jaxprs have one context, to be entered once.
        nothing, shared = contextlib.nullcontext(), _jaxpr.shared_context(plan.eqns)

        def apply(eqn, ins):
            rule, wants = next(planned)
            context = nothing if shared else _jaxpr.context_of(eqn)
            with _jaxpr.located_at(eqn, stacks), context:
                name = eqn.primitive.name
                moves = name in MOVES_WEIGHTS and ins[0].outside
                if moves and plan.moves_in_16bit(eqn, rule, scopes):
                    array = moved(eqn, ins[0].array, self.dtype)
                    return [Value(array, narrow=True, outside=True)]
                if name in POOLS and ins[0].narrow and plan.pools_shared(eqn):
                    ins[0].array = rounded_by_xla(ins[0].array)
                rows = name in GATHERS_ROWS and rule == "infer"
                if rows and ins[0].is_computed() and plan.multiplies_rows(eqn):
                    ins = replaced(ins, [0], [ins[0].rounded(self.dtype)])
                drops = rule == "infer" and wants == ("stored",)
                if drops and (i := plan.drops_out(eqn)) is not None:
                    # In float32: the share that is kept, 0.9, is no 16-bit number.
                    array, linear = ins[i].unrounded(), ins[i].linear
                    ins = replaced(ins, [i], [Value(array, linear=linear)])
                adds = rule == "infer" and name in JOINS
                fixed = (x.outside or x.scalar is not None for x in ins)
                if adds and any(fixed) and plan.keeps_offset(eqn):
                    rule = "deny"  # what was given may be most of it
                outs = self.apply(eqn, rule, ins, wants, scopes)
                joins = bool(wants) and wants[0] in IN_16BIT and outs[0].is_computed()
                if joins and not is_backward(eqn, scopes):
                    if rule == "infer":
                        outs[0].normed = plan.is_normed(eqn, ins)
                    if plan.evens_out(eqn, outs[0].normed, scopes):
                        outs = [outs[0].firmly_stored(self.dtype), *outs[1:]]
                if name in POOLS and wants != ("stored",):  # others read it too
                    outs = [pooled(outs[0], wants[0], self.dtype)]
                return self.as_read(eqn, ins, outs, wants, plan)

        with shared or nothing:
            return _jaxpr.interpret(
                jaxpr, values, apply, eqns=plan.eqns, const=given, literal=literal
            )

    def apply(
        self,
        eqn: Equation,
        rule: Rule,
        ins: list[Value],
        wanted: tuple[Want, ...],
        scopes: Scopes,
    ) -> list[Value]:
        """Replays one equation of a jaxpr inside ``scopes`` by its rule."""
        if rule == "allow" and all([value.outside for value in ins]) and is_resize(eqn):
            rule = "deny"  # of what was given, others may take the digits
        if rule == "call":
            around = inside(eqn, scopes + _jaxpr.scope_names(eqn))
            outs = self.call(eqn, ins, wanted, around)
        elif rule == "retype" and ins[0].narrow:
            return ins
        elif rule == "row_sum":
            return self.results(eqn, row_summed(eqn, ins, self.dtype))
        else:
            match rule:
                case "allow":
                    around = scopes + _jaxpr.scope_names(eqn)
                    arrays = allowed(eqn, ins, wanted[0], around, self.planner)
                case "infer":
                    arrays = inferred(eqn, ins, wanted[0], self.dtype)
                case _:
                    around = scopes + _jaxpr.scope_names(eqn)
                    with for_reason(self.planner.reason(eqn, around)):
                        arrays = bind_as_written(eqn, ins, wanted)
            outs = self.results(eqn, arrays)
            note_number(eqn, ins, outs)
            if rule == "allow":
                note_product(ins, outs, is_backward(eqn, scopes))
            else:
                note_origin(eqn, ins, outs, self.dtype)
                note_sent_back(eqn, ins, outs, rule == "deny")
            if eqn.primitive.name in EXACT and any([x.kept is not None for x in ins]):
                for out in outs:
                    out.kept = () if out.narrow else None
        if any([value.linear for value in ins]):
            for out in outs:
                out.linear = True
        return outs

    def results(self, eqn: Equation, arrays: Sequence[Any]) -> list[Value]:
        """Returns the outputs of ``eqn``, of which only the dtype is known."""
        return [
            Value(array, narrow=is_float32(var) and array.dtype == self.dtype)
            for array, var in zip(arrays, eqn.outvars, strict=True)
        ]

    def as_read(
        self,
        eqn: Equation,
        ins: list[Value],
        outs: list[Value],
        wanted: tuple[Want, ...],
        plan: Plan,
    ) -> list[Value]:
        """Returns what ``eqn`` computed as those who read it take it.

        All of them read the same number, so what is chosen from it is found in it. That
        which moves or chooses is given rounded values, or is left alone. What a norm
        sends back to several is stored for them: XLA would compute it again for each.
        """
        slope = wanted == ("factor",) and self.planner.is_slope(eqn)
        if slope and outs[0].is_computed():
            return [outs[0].kept_for_backward(self.dtype, (), False)]
        adds_up = eqn.primitive.name in ADDS_UP
        means = adds_up and any(x.summed and not x.sent_back for x in ins)
        by_norm = means and outs[0].sent_back
        if STORED.isdisjoint(wanted) and not by_norm:
            return outs
        if eqn.primitive.name in EXACT or _jaxpr.call_kind(eqn):
            return outs
        read = []
        for out, want in zip(outs, wanted, strict=True):
            sums = adds_up and (want == "added" or (by_norm and plan.is_shared(eqn)))
            firmly = want == "summed" or (want == "multiplied" and out.rounds_again())
            if out.is_computed() and want == "stored":
                out = out.stored(self.dtype)
            elif out.is_computed() and (want == "kept" or firmly or sums):
                axes = plan.axes_of_softmax(eqn)
                out = out.kept_for_backward(self.dtype, axes, firmly)
            read.append(out)
        return read

    # Primitives that hold jaxprs.

    def call(
        self, eqn: Equation, ins: list[Value], wanted: tuple[Want, ...], scopes: Scopes
    ) -> list[Value]:
        """Replays an equation that holds jaxprs, going inside where that matters."""
        matters = any(map(self.planner.matters, _jaxpr.sub_jaxprs(eqn)))
        if not STORED.isdisjoint(wanted):
            matters |= any(value.is_computed() for value in ins)
        if not matters and not any(value.is_noted() for value in ins):
            outs = self.results(eqn, bind_as_written(eqn, ins))
            note_origin(eqn, ins, outs, self.dtype)
            return outs
        match _jaxpr.call_kind(eqn):
            case "custom_jvp":
                return self.custom_jvp(eqn, ins, wanted, scopes)
            case "custom_vjp":
                return self.results(eqn, self.custom_vjp(eqn, ins, wanted, scopes))
            case "shard_map":
                return self.results(eqn, self.shard_map(eqn, ins, wanted, scopes))
            case "scan" | "while":
                return self.loop(eqn, ins, wanted, scopes)
            case _:
                return self.bodies(eqn, ins, wanted, scopes)

    def bodies(
        self, eqn: Equation, ins: list[Value], wanted: tuple[Want, ...], scopes: Scopes
    ) -> list[Value]:
        """Replays a call or a choice by giving it rewritten bodies."""
        wanted = self.planner.wanted_inside(eqn, wanted, scopes, frozenset())
        ins = rounded_weights(eqn, ins, wanted, scopes, self.planner)
        free = (False,) * len(wanted)
        new = self.rewritten_bodies(eqn, ins, wanted, free, scopes)
        if _jaxpr.call_kind(eqn) == "cond":
            by_output = zip(*(body.known for body in new), strict=True)
            narrow = [[known.narrow for known in branches] for branches in by_output]
            if any(any(n) and not all(n) for n in narrow):
                # Branches must agree, so one that returns float32 decides.
                fixed = tuple(not all(n) for n in narrow)
                new = self.rewritten_bodies(eqn, ins, wanted, fixed, scopes)
        jaxprs = [body.jaxpr for body in new]
        arrays = _jaxpr.bind_bodies(eqn, [x.array for x in ins], jaxprs)
        if _jaxpr.call_kind(eqn) == "cond":
            outs = self.results(eqn, arrays)
            note_kept(eqn, [body.known for body in new], outs)
            return outs
        return [k.of(x) for k, x in zip(new[0].known, arrays, strict=True)]

    def loop(
        self, eqn: Equation, ins: list[Value], wanted: tuple[Want, ...], scopes: Scopes
    ) -> list[Value]:
        """Replays a loop, which carries 16 bits where each trip would round anyway."""
        planner, outs = self.planner, range(len(wanted))
        carried = _jaxpr.call_layout(eqn).fixed_out
        narrow = planner.carried_in_16bit(eqn, wanted, scopes)
        streams = planner.weights_of_streams(eqn, scopes)
        # What was computed is no weight: the loop may be one through time.
        narrow -= {i for i, x in streams.items() if not any(ins[j].outside for j in x)}
        while True:
            inside = planner.wanted_inside(eqn, wanted, scopes, narrow)
            fit = as_carried(eqn, ins, inside, narrow, self.dtype)
            if fit == narrow:
                given = rounded_weights(eqn, ins, inside, scopes, planner)
                given = known_in_trip(eqn, given, narrow, self.dtype)
                fixed = tuple(i in carried and i not in narrow for i in outs)
                new = self.rewritten_bodies(eqn, given, inside, fixed, scopes)
                fit = frozenset(i for i in narrow if new[-1].known[i].narrow)
                if fit == narrow:
                    break
            narrow = fit
        jaxprs = [body.jaxpr for body in new]
        if _jaxpr.call_kind(eqn) == "scan":
            arrays = scanned(eqn, given, jaxprs[0], late=planner.is_split(eqn))
        else:
            arrays = _jaxpr.bind_bodies(eqn, [x.array for x in given], jaxprs)
        results = self.results(eqn, arrays)
        note_kept(eqn, [body.known for body in new], results)
        return results

    def rewritten_bodies(
        self,
        eqn: Equation,
        ins: Sequence[Value],
        wanted: tuple[Want, ...],
        fixed: tuple[bool, ...],
        scopes: Scopes,
    ) -> list[Rewritten]:
        """Returns the bodies of ``eqn`` in mixed precision, see :meth:`rewritten`."""
        stacks = _jaxpr.call_kind(eqn) == "scan"
        return [
            self.rewritten(
                body.jaxpr,
                [ins[i] for i in body.operands],
                wanted,
                fixed,
                scopes,
                stacks=stacks,
            )
            for body in _jaxpr.call_layout(eqn).bodies
        ]

    def rewritten(
        self,
        jaxpr: Any,
        ins: Sequence[Value],
        wanted: tuple[Want, ...],
        fixed: tuple[bool, ...],
        scopes: Scopes,
        *,
        stacks: bool = False,
    ) -> Rewritten:
        """Returns ``jaxpr`` in mixed precision.

        Args:
            jaxpr: Body of an equation.
            ins: What it is given.
            wanted: What its outputs are wanted for.
            fixed: For each output, whether it must have its original dtype.
            scopes: Named scopes around ``jaxpr``.
            stacks: Whether what is not fixed is stacked, trip by trip.
        """
        known = tuple(x.known() for x in ins)
        key = known, wanted, fixed, stacks, self.planner.relevant(scopes)
        memo = self._rewritten.setdefault(jaxpr, {})
        if key not in memo:
            known_outs = []

            def body(*arrays):
                values = [k.of(x) for k, x in zip(known, arrays, strict=True)]
                outs = self.replay(jaxpr, values, wanted, scopes)
                # The test of a loop has one output, and its body has others.
                for i, is_fixed in zip(range(len(outs)), fixed, strict=False):
                    if is_fixed:
                        outs[i] = outs[i].widened()
                    elif stacks:
                        outs[i] = stacked(outs[i], wanted[i], self.dtype)
                known_outs.extend(out.known() for out in outs)
                return [out.array for out in outs]

            avals = [
                aval.update(dtype=self.dtype, weak_type=False) if value.narrow else aval
                for aval, value in zip(_jaxpr.in_avals(jaxpr), ins, strict=True)
            ]
            memo[key] = Rewritten(_jaxpr.trace(body, avals), tuple(known_outs))
        return memo[key]

    def first_of(self, jaxpr: Any) -> Any:
        """Returns the first jaxpr that is the same as ``jaxpr``, from the same lines.

        JAX traces a function with a derivative rule anew for each call, as in layers.
        """
        key = None if self.planner.has_factors(jaxpr) else spelled(jaxpr)
        return jaxpr if key is None else self._first.setdefault(key, jaxpr)

    def custom_jvp(
        self, eqn: Equation, ins: list[Value], wanted: tuple[Want, ...], scopes: Scopes
    ) -> list[Value]:
        """Replays a function together with the derivative rule of its own."""
        avals = [var.aval for var in eqn.invars]
        known = [value.known() for value in ins]  # keeps no tracer alive
        moved = [i for i, var in enumerate(eqn.outvars) if is_inexact(var)]
        free = (False,) * len(wanted)
        body = self.first_of(eqn.params["call_jaxpr"])
        new = self.rewritten(body, ins, wanted, free, scopes)
        function = jax.custom_jvp(_jaxpr.jaxpr_as_fun(new.jaxpr))

        def rule(primals, tangents):
            # The rule is asked for what is differentiated, and for nothing else.
            moving = [
                i
                for i, (var, x) in enumerate(zip(eqn.invars, tangents, strict=True))
                if is_inexact(var) and not isinstance(x, SymbolicZero)
            ]

            def differentiated(*args):
                args, tangents = args[: len(avals)], args[len(avals) :]
                primals_out, tangents_out = jax.jvp(
                    lambda *xs: _jaxpr.bind(eqn, replaced(args, moving, xs)),
                    [args[i] for i in moving],
                    list(tangents),
                )
                return [*primals_out, *(tangents_out[i] for i in moved)]

            # Nobody reads a tangent twice, so that none is kept.
            wants: tuple[Want, ...] = (
                *wanted,
                *("16-bit" if wanted[i] in IN_16BIT else wanted[i] for i in moved),
            )
            # Both must have the dtypes that the function has when it is only called.
            avals_out = _jaxpr.out_avals(new.jaxpr)
            like = [*avals_out, *(avals_out[i] for i in moved)]
            zeros: list[bool] = []

            def replayed(*arrays):
                count = len(avals)
                values = [k.of(x) for k, x in zip(known, arrays[:count], strict=True)]
                values += [
                    Value(x, narrow=known[i].narrow, linear=True)
                    for i, x in zip(moving, arrays[count:], strict=True)
                ]
                outs = self.replay(jaxpr, values, wants, scopes)
                zeros[:] = [out.is_zero() for out in outs]
                return [
                    _jaxpr.with_type_of(out.array, aval)
                    for out, aval in zip(outs, like, strict=True)
                ]

            with noted_as_rule():
                with own_precisions():
                    jaxpr = _jaxpr.trace(
                        differentiated, [*avals, *(avals[i] for i in moving)]
                    )
                self.planner.find_factors(jaxpr, scopes)
                moves = (tangents[i] for i in moving)
                arrays = with_default_precision(replayed, [*primals, *moves])
            tangents_out = [
                _jaxpr.zero_tangent(jax.typeof(x)) if is_zero else x
                for x, is_zero in zip(arrays, zeros, strict=True)
            ]
            nothing = [_jaxpr.zero_tangent(var.aval) for var in eqn.outvars]
            results = len(new.known)
            return arrays[:results], replaced(nothing, moved, tangents_out[results:])

        function.defjvp(rule, symbolic_zeros=True)
        arrays = function(*(x.array for x in ins))
        return [k.of(x) for k, x in zip(new.known, arrays, strict=True)]

    def custom_vjp(
        self, eqn: Equation, ins: list[Value], wanted: Sequence[Want], scopes: Scopes
    ) -> list[Any]:
        """Replays a function with a backward rule, in float32 at its boundary."""
        closed_over = eqn.params["num_consts"]
        known = [value.widened().known() for value in ins]

        @jax.custom_vjp
        def function(*arrays):
            values = [k.of(x) for k, x in zip(known, arrays, strict=True)]
            body = eqn.params["call_jaxpr"]
            return self.replay_as_written(body, values, as_written(wanted), scopes)

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
                _jaxpr.zero_cotangent(x, symbolic=eqn.params["symbolic_zeros"])
                if isinstance(x, SymbolicZero)
                else x
                for x in cotangents
            ]
            with noted_as_rule():
                pulled = self.wrap(lambda pull, x: pull(x), scopes)(pull, cotangents)
            return tuple(replaced([None] * len(ins), moving, pulled))

        function.defvjp(forward, backward, symbolic_zeros=True)
        return function(*(value.original() for value in ins))

    def shard_map(
        self, eqn: Equation, ins: list[Value], wanted: Sequence[Want], scopes: Scopes
    ) -> list[Any]:
        """Replays a function of shards, in float32 at its boundary."""
        known = [value.widened().known() for value in ins]

        def on_shards(*shards):
            values = [k.of(x) for k, x in zip(known, shards, strict=True)]
            body = eqn.params["jaxpr"]
            return self.replay_as_written(body, values, as_written(wanted), scopes)

        return _jaxpr.bind_shard_map(
            eqn, [value.original() for value in ins], on_shards
        )
