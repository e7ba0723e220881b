"""Replaying equations that hold jaxprs: calls, choices and loops."""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import FLOAT32, Equation, Literal, is_float32
from .._jaxprs.scopes import BACKWARD, DIFFERENTIATED, STACKED, Scopes, inside
from .._ops.lists import Definition
from .._ops.precision import with_default_precision
from . import needs, storage
from .analysis import Analysis, Plan
from .customs import Customs, End, places_of_moving, replaced
from .decisions import Step
from .graph import GIVEN, Trip, definitions_of, joined
from .passes.apart import read_by_pass
from .values import Known, Value, streamed


class Rewritten(NamedTuple):
    """A jaxpr in mixed precision, and what is known of its outputs."""

    jaxpr: Any
    known: tuple[Known, ...]


class Calls(Customs):
    """What the caster does with an equation that holds jaxprs."""

    analysis: Analysis
    rewritten_by: Any  # by jaxpr, so that what JAX shares stays shared

    def dtype_in(self, back: bool) -> np.dtype:
        """Returns the 16-bit dtype of the backward pass, or of the forward pass."""
        return self.backward_dtype if back else self.dtype

    @abc.abstractmethod
    def relevant(self, scopes: Scopes) -> Scopes:
        """Returns that of ``scopes`` on which the replay of a jaxpr depends."""

    def enters(self, step: Step, ins: list[Value]) -> bool:
        """Whether something is to be decided in the jaxprs that an equation holds."""
        bodies = [*_jaxpr.sub_jaxprs(step.eqn)]
        matters = any(map(self.analysis.matters, bodies))
        matters |= any([value.known.half for value in ins])
        if any(map(needs.is_half, step.read.wanted)):
            matters |= any(map(self.analysis.rounds, bodies))
        return matters or any(map(needs.is_kept, step.read.wanted))

    def call(self, step: Step, ins: list[Value]) -> list[Value]:
        """Replays an equation that holds jaxprs by going inside."""
        eqn, scopes = step.eqn, inside(step.eqn, step.around)
        trip = self.analysis.inside(eqn, step.read, scopes)
        match _jaxpr.call_kind(eqn):
            case "custom_jvp":
                return self.custom_jvp(eqn, ins, trip, scopes)
            case "custom_vjp":
                return self.results(eqn, self.custom_vjp(eqn, ins, trip, scopes))
            case "shard_map":
                return self.results(eqn, self.shard_map(eqn, ins, trip, scopes))
            case "scan" | "while":
                return self.loop(step, ins, trip, scopes)
            case _:
                return self.bodies(eqn, ins, trip, scopes)

    def untouched(self, eqn: Any, ins: list[Value]) -> list[Value]:
        """Applies an equation in which there is nothing to do."""
        outs = self.results(eqn, _jaxpr.bind(eqn, [x.array for x in ins]))
        given = all([value.known.given for value in ins])
        linear = any([value.known.linear for value in ins])
        for out in outs:
            out.note(given=given, linear=linear)
        return outs

    def bodies(
        self, eqn: Any, ins: list[Value], trip: Trip, scopes: Scopes
    ) -> list[Value]:
        """Replays a call or a choice by giving it rewritten bodies."""
        if _jaxpr.is_remat(eqn):
            ins = self.rounded_before(eqn, ins, trip, scopes, range(len(ins)))
        layout = _jaxpr.call_layout(eqn)
        ends: tuple[End, ...] = ("free",) * len(trip.wanted)
        while True:
            new = [
                self.rewritten(body, ins, trip, ends, scopes) for body in layout.bodies
            ]
            outs = zip(*(body.known for body in new), strict=True)
            halves = [{known.half for known in branches} for branches in outs]
            if all(len(half) == 1 for half in halves):
                break
            # Branches must agree, so one that returns float32 decides.
            ends = tuple(
                "wide" if len(half) > 1 else end
                for half, end in zip(halves, ends, strict=True)
            )
        arrays = _jaxpr.bind_bodies(eqn, [x.array for x in ins], [b.jaxpr for b in new])
        if len(new) > 1:
            return self.results(eqn, arrays)
        return [k.of(x) for k, x in zip(new[0].known, arrays, strict=True)]

    def loop(
        self, step: Step, ins: list[Value], trip: Trip, scopes: Scopes
    ) -> list[Value]:
        """Replays a loop: what it carries is 16 bits where all of its trips agree."""
        eqn = step.eqn
        layout, kind = _jaxpr.call_layout(eqn), _jaxpr.call_kind(eqn)
        first = layout.fixed_in.start
        carried = self.carried(step, ins, trip)
        again = any([x.known.linear for x in ins])  # it will be transposed
        written = DIFFERENTIATED in scopes or _jaxpr.is_differentiated(eqn)
        written = written or _jaxpr.holds_backward(eqn)
        wide: dict[int, Any] = {}
        if kind == "while" or (written and not again):
            # A slice of an argument is rounded in its trip, as that needs no memory.
            stacked = range(layout.fixed_in.stop, len(ins)) if kind == "scan" else ()
            made = [i for i in stacked if step.definition(eqn.invars[i])]
            before = ins
            ins = self.rounded_before(eqn, ins, trip, scopes, [*range(first), *made])
            new = (i for i in range(first) if ins[i].known.half)
            wide = {i: before[i].wide() for i in new}
        else:  # what each trip sends back to it adds up in float32
            ins = [x.widened() if i < first else x for i, x in enumerate(ins)]
        *tests, body = layout.bodies
        while True:
            streams = self.streams(step, trip, carried, scopes)
            ends = self.ends(step, trip, carried, scopes)
            ends = tuple(replaced(ends, streams, ["half"] * len(streams)))
            given = [self.in_trip(step, *x, carried) for x in enumerate(ins)]
            for i in streams.values():
                given[layout.fixed_in[i]].note(stream=True)
            trips = self.rewritten(body, given, trip, ends, scopes)
            before = carried  # a trip that returns float32, or has computed, decides
            carried = [
                k._replace(half=k.half and x.half, given=k.given and x.given)
                for k, x in zip(before, trips.known, strict=False)
            ]
            if carried == before:
                break
        new = [trips]
        for body in tests:
            test = self.analysis.test_of(body)
            fixed: tuple[End, ...] = ("wide",) * len(test.wanted)
            new.insert(0, self.rewritten(body, given, test, fixed, scopes))
        arrays, jaxprs = [x.array for x in given], [b.jaxpr for b in new]
        if kind == "scan":
            arrays = scanned(eqn, arrays, wide, *jaxprs)
        else:
            arrays = _jaxpr.bind_bodies(eqn, arrays, jaxprs)
        outs = self.results(eqn, arrays)
        for i, out in enumerate(outs):
            out.note(linear=again)
            stacked = kind == "scan" and i not in layout.fixed_out and out.known.half
            if stacked and needs.has_backward(trip.wanted[i]):
                out.note(kept=storage.stacks(new[0].known[i].kept))
        return outs

    def ends(
        self, step: Step, trip: Trip, carried: Sequence[Known], scopes: Scopes
    ) -> tuple[End, ...]:
        """Returns the dtypes of what each trip of a loop returns (rules 7 and 8)."""
        layout = _jaxpr.call_layout(step.eqn)
        *_, (body, plan) = self.analysis.plans(step.eqn, trip, scopes)
        # Gradients are sums, and float16 may not have the range of what is stacked.
        stacks = not step.back and self.dtype != np.float16

        def end(i: int, var: Any) -> End:
            if i in layout.fixed_out:
                if not carried[i].half:
                    return "wide"
                products = needs.is_rounded_for_products(trip.wanted[i])
                return "half" if products else "free"
            if needs.is_kept(trip.wanted[i]):
                return "half"
            if not stacks or isinstance(var, Literal):
                return "free"
            entry = plan.needs.get(var, needs.NOTHING)
            return "stacked" if needs.is_stacked(trip.wanted[i], entry) else "free"

        outs = enumerate(_jaxpr.open_jaxpr(body.jaxpr).outvars)
        return tuple([end(i, var) for i, var in outs])

    def carried(self, step: Step, ins: list[Value], trip: Trip) -> list[Known]:
        """Returns what a loop may carry, going by what it starts from (rule 8)."""
        layout, dtype = _jaxpr.call_layout(step.eqn), self.dtype_in(step.back)
        given = GIVEN.around(step.eqn, [value.known.given for value in ins], ())
        starts = ins[layout.fixed_in.start : layout.fixed_in.stop]

        def known(out: int, start: Value) -> Known:
            need, linear = trip.wanted[out], start.known.linear
            is_number = start.known.scalar is not None and start.fits(dtype)
            half = start.known.half or is_number or needs.is_rounded_for_products(need)
            half &= is_float32(step.eqn.outvars[out]) and not linear
            half &= needs.is_carried(step.read.wanted[out], need)
            return Known(half, start.known.given and given[out], linear=linear)

        return [known(*pair) for pair in zip(layout.fixed_out, starts, strict=True)]

    def streams(
        self,
        step: Step,
        trip: Trip,
        carried: Sequence[Known],
        scopes: Scopes,
    ) -> dict[int, int]:
        """Returns what a scan stacks of its sums for the backward pass alone (rule 7).

        As where it is to compute a layer again. The layer then reads the sum as it is
        stacked, in 16 bits, in both passes.

        Returns:
            For the place of each such stack the place of what is carried.
        """
        is_scan = _jaxpr.call_kind(step.eqn) == "scan"
        if not is_scan or step.back or self.dtype == np.float16:
            return {}
        *_, (body, plan) = self.analysis.plans(step.eqn, trip, scopes)
        if any(
            _jaxpr.call_kind(x) and y.summed
            for x, y in zip(plan.eqns, plan.outs, strict=True)
        ):
            return {}
        summed = joined(ends for _, ends in trip.summed)
        inner, layout = _jaxpr.open_jaxpr(body.jaxpr), _jaxpr.call_layout(step.eqn)
        found: dict[int, int] = {}
        for place, out in zip(layout.fixed_in, layout.fixed_out, strict=True):
            known, var = carried[out], inner.invars[place]
            outs = [i for i, x in enumerate(inner.outvars) if x is var]
            stacks = set(outs).difference(layout.fixed_out)
            is_sum = summed >> out & 1 and not (known.given or known.linear)
            again = all(
                step.eqn.outvars[i] not in step.forward
                and needs.is_computed_with_again(trip.wanted[i])
                for i in stacks
            )
            if is_sum and again and not _needs_digits(plan, var):
                found |= dict.fromkeys(stacks, out)
        return found

    def in_trip(
        self, step: Step, i: int, value: Value, carried: Sequence[Known]
    ) -> Value:
        """Returns an input of a loop as each of its trips has it."""
        layout, dtype = _jaxpr.call_layout(step.eqn), self.dtype_in(step.back)
        start, stop = layout.fixed_in.start, layout.fixed_in.stop
        if i >= stop:
            value = value.known._replace(scalar=None).of(value.array)
            value.note(kept=storage.slices(value.known.kept))
        elif i >= start:  # of which only the first value is there
            known = carried[i - start]
            value = known.of(value.narrow(dtype) if known.half else value.wide())
        return value

    def rounded_before(
        self,
        eqn: Any,
        ins: list[Value],
        trip: Trip,
        scopes: Scopes,
        places: Sequence[int],
    ) -> list[Value]:
        """Rounds before a loop or a remat what only products in it take."""
        dtypes = [self.dtype] * len(ins)
        if self.backward_dtype != self.dtype:
            dtypes = self._dtypes_inside(eqn, scopes)
        need = self.analysis.asked(eqn, trip, scopes)
        ins = list(ins)
        for i in places:
            rounds = is_float32(eqn.invars[i]) and ins[i].known.scalar is None
            rounds &= not ins[i].known.linear and needs.is_rounded_for_products(need[i])
            if rounds and (dtype := dtypes[i]) is not None:
                ins[i] = ins[i].rounded(dtype)
        return ins

    def _dtypes_inside(self, eqn: Any, scopes: Scopes) -> list[np.dtype | None]:
        """Returns the 16-bit dtype of the pass that reads each input, None for both."""
        found: list[np.dtype | None] = [self.dtype] * len(eqn.invars)
        for body in _jaxpr.call_layout(eqn).bodies:
            inner = _jaxpr.open_jaxpr(body.jaxpr)
            back, ahead = (read_by_pass(inner, scopes, back=x) for x in (True, False))
            for i, x in zip(body.operands, _jaxpr.in_vars(body.jaxpr), strict=True):
                if x in back:
                    found[i] = None if x in ahead else self.backward_dtype
        return found

    def rewritten(
        self,
        body: _jaxpr.Body,
        ins: Sequence[Value],
        trip: Trip,
        ends: tuple[End, ...],
        scopes: Scopes,
    ) -> Rewritten:
        """Returns a body of an equation in mixed precision.

        Args:
            body: The body.
            ins: The inputs of the equation.
            trip: What its outputs are needed for.
            ends: For each output, which dtype it must have: its original one, 16 bits
                (if it was computed, where a scan stacks it), or any of the two.
            scopes: Named scopes around the body.
        """
        jaxpr = body.jaxpr
        known = [ins[i].known for i in body.operands]
        numbers = any([k.scalar is not None for k in known])
        casts = _jaxpr.cast_to_float32(jaxpr) if numbers else ()
        known = tuple(
            [
                k.in_body(is_cast=var in casts)
                for k, var in zip(known, _jaxpr.in_vars(jaxpr), strict=True)
            ]
        )
        dtypes = tuple([ins[i].array.dtype for i in body.operands if ins[i].known.half])
        key = known, dtypes, trip, ends, self.relevant(scopes)
        memo = self.rewritten_by.setdefault(jaxpr, {})
        if key not in memo:
            definition = definitions_of(_jaxpr.open_jaxpr(jaxpr).eqns)
            dtype, halves = self.dtype_in(BACKWARD in scopes), iter(dtypes)
            known_outs = []

            def replayed(*arrays):
                values = [k.of(x) for k, x in zip(known, arrays, strict=True)]
                values = [
                    streamed(x, self.dtype) if x.known.stream else x for x in values
                ]
                outs = self.replay(jaxpr, values, trip, scopes)
                places = zip(outs, _jaxpr.open_jaxpr(jaxpr).outvars, ends, strict=True)
                outs = [self.as_end(*place, definition, dtype) for place in places]
                known_outs.extend(out.known for out in outs)
                return [out.array for out in outs]

            avals = [
                aval.update(dtype=next(halves), weak_type=False) if k.half else aval
                for aval, k in zip(_jaxpr.in_avals(jaxpr), known, strict=True)
            ]
            new = _jaxpr.written_in(_jaxpr.trace(replayed, avals), jaxpr)
            memo[key] = Rewritten(new, tuple(known_outs))
        return memo[key]

    @staticmethod
    def as_end(
        out: Value, var: Any, end: End, definition: Definition, dtype: np.dtype
    ) -> Value:
        """Returns ``var``, an output of a body, in the dtype that it must have."""
        if end in ("wide", "free"):
            out = out.exact or out
        if end == "wide":
            return out.widened()
        if out.known.half and out.array.dtype != dtype:  # of the other pass
            return out.known.of(out.narrow(dtype))
        if out.known.half or out.array.dtype != FLOAT32:
            return out
        if end == "stacked" and not out.known.given:
            with jax.named_scope(STACKED):  # for `explain` to read
                stacked = out.rounded(dtype)
            return storage.noted(stacked, definition(var), definition)
        return out.rounded(dtype) if end == "half" else out


def _needs_digits(plan: Plan, var: Any) -> bool:
    """Whether an equation needs the last digits of ``var``, beside the sum of trips."""
    return any(
        x is var and needs.is_exact(need) and not way >> i & 1
        for eqn, read, asks in zip(plan.eqns, plan.outs, plan.ins, strict=True)
        for way in [joined(starts for starts, _ in read.summed)]
        for i, (x, need) in enumerate(zip(eqn.invars, asks, strict=True))
    )


def scanned(
    eqn: Equation, arrays: Sequence[Any], wide: Mapping[int, Any], body: Any
) -> list[Any]:
    """Applies a scan whose weights were rounded before its first trip.

    JAX adds up what the trips send back to a constant in the dtype of that constant,
    and a sum in bfloat16 stalls after some hundreds of them. So where the scan is
    differentiated, it is given the float32 weights, and rounds them in each trip.

    Args:
        eqn: The scan.
        arrays: What it is given.
        wide: By place, the float32 array of what was rounded.
        body: Its body in mixed precision.
    """
    if not wide:
        return _jaxpr.bind_bodies(eqn, arrays, [body])
    places = sorted(wide)  # and no tracer: the rule lives as long as its jaxpr

    def trip(*args):
        in_16_bits = [
            lax.convert_element_type(args[i], _jaxpr.in_avals(body)[i].dtype)
            for i in places
        ]
        return _jaxpr.jaxpr_as_fun(body)(*replaced(args, places, in_16_bits))

    def rounding_in_each_trip(*args):
        avals = [
            aval.update(dtype=FLOAT32) if i in places else aval
            for i, aval in enumerate(_jaxpr.in_avals(body))
        ]
        return _jaxpr.bind_bodies(eqn, args, [_jaxpr.trace(trip, avals)])

    @jax.custom_jvp
    def scan(arrays, wide):
        return _jaxpr.bind_bodies(eqn, arrays, [body])

    def rule(primals, tangents):
        args, moved = (replaced(x, places, y) for x, y in (primals, tangents))
        moving = places_of_moving(eqn, moved)

        def differentiated(*xs):
            outs, tangents = jax.jvp(
                lambda *xs: rounding_in_each_trip(*replaced(args, moving, xs)),
                xs[: len(moving)],
                xs[len(moving) :],
            )
            return [*outs, *tangents]

        pairs = [*(args[i] for i in moving), *(moved[i] for i in moving)]
        outs, count = with_default_precision(differentiated, pairs), len(eqn.outvars)
        return outs[:count], outs[count:]

    scan.defjvp(rule, symbolic_zeros=True)
    return scan(list(arrays), [wide[i] for i in places])
