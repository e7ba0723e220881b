"""What becomes of each equation of a program: a table, made before anything runs.

The analysis has gone from the end of the program to its beginning, and knows what the
consumers of each value need. The plan goes forward, with facts of values and without
arrays, and decides. The rules are in :mod:`jaxmp._autocast.rules`. What obeys is
:mod:`jaxmp._autocast.emit`.

A plan is printed as a table of its equations: how each runs, the dtype of what it
returns, by which rule, and who reads that::

    >>> def loss(w, x):
    ...     h = x @ w["hidden"] + w["bias"]
    ...     return jnp.log(jnp.abs(jnp.tanh(h) @ w["out"])).sum()
    >>> w = {"hidden": jnp.ones((8, 8)), "bias": jnp.ones(8), "out": jnp.ones((8, 8))}
    >>> jaxpr = jax.make_jaxpr(loss)(w, jnp.ones((4, 8)))
    >>> planner = Planner(np.dtype(jnp.bfloat16), DEFAULT_OPS)
    >>> print(planner.program(jaxpr, needs.DIGITS | needs.FULL))
    dot_general       half     bfloat16   by 2, for 16-bit work
    broadcast_in_dim  float32  float32    by 3, for 16-bit work
    add               half     bfloat16   by 2, for 16-bit work
    tanh              half     bfloat16   by 2, for matmul
    dot_general       float32  float32    by 3, for float32 work, digits
    abs               float32  float32    by 3, for float32 work, digits
    log               float32  float32    by 3, for float32 work
    reduce_sum        float32  float32    by 3, for float32 work, digits
"""

import copy
import dataclasses
import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import FLOAT32, Equation, is_float32, is_inexact
from .._jaxprs.scopes import (
    BACKWARD,
    DIFFERENTIATED,
    Scopes,
    is_under,
    scopes_inside,
)
from .._jaxprs.walk import At
from .._ops import products, table
from .._ops.fp8 import why_16bit
from .._ops.lists import DEFAULT_OPS, OpLists
from .._ops.narrow import bind_narrow
from .._ops.table import Definition
from . import classes, facts, needs, rules, streams
from .analysis import NO_PATHS, Analysis, Consumers, Row
from .classes import Class
from .facts import GIVEN, Facts
from .graph import GIVEN as GIVEN_WITHOUT_PRODUCT
from .graph import Demand
from .needs import Need
from .passes.apart import read_by_pass
from .rules import Rule

How = Literal[
    "float32",  # as it was written
    "half",  # in 16 bits
    "rounded",  # in float32, rounded once
    "stored",  # in float32, stored in 16 bits for a product and the backward pass
    "inside",  # its jaxprs are gone into
]
# In which dtype a body is given a value: as it is there, its own, or one of 16 bits.
Passed = Literal["as is", "wide"] | np.dtype
# In which dtype it must return one: its own; 16 bits; 16 bits if it was computed, where
# a scan stacks it; any of the two; or so, as float16 has not the range to stack it.
End = Literal["wide", "half", "stacked", "free", "ranged"]

_BY_BFLOAT16_PATHS = "`bfloat16_paths`"


class Held(NamedTuple):
    """An equation that holds jaxprs, where the plan comes to it."""

    row: Row
    ins: Sequence[Facts]  # of what it is given
    consumers: Consumers  # of the values around it
    demand: Demand  # what is needed of what its jaxprs return
    scopes: Scopes  # around them


class Inside(NamedTuple):
    """What becomes of the jaxprs that an equation holds."""

    passed: tuple[Passed, ...]  # how each of its inputs is given to them
    bodies: tuple[tuple[Any, "Plan"], ...]  # each jaxpr with its plan
    demand: Demand  # what is needed of what they return
    scopes: Scopes  # around them
    # Inputs of a scan that are rounded before its first iteration; where it is
    # differentiated, in each iteration.
    weights: tuple[int, ...] = ()


class Step(NamedTuple):
    """An equation, and what becomes of it."""

    eqn: Equation  # from here to `input_needs` as in a `Row`
    kind: Class
    back: bool
    around: Scopes
    demand: Demand
    need: Need
    input_needs: Sequence[Need]
    how: How
    by: Rule  # the rule or the guard by which it is computed so
    dtype: np.dtype  # the 16 bits, where it has them
    outs: tuple[Facts, ...] = ()  # of what it returns
    why: str = ""  # by what the user keeps it, or why it is none in float8, in words
    precision: str = "default"  # of float32 products
    float8: bool = False  # whether it takes its operands in float8
    tangent: bool = False  # whether an input is a tangent of a rule
    # Whether it is written once more, of values none of which has 16 bits.
    repeats: bool = False
    inside: Inside | None = None
    sum32: "Step | None" = None  # the same for what a loop adds up, see `streams`

    @property
    def rule(self) -> Rule:
        """The rule or the guard that says how it comes out, maybe stored."""
        return rules.STORED if self.how == "stored" else self.by

    @property
    def is_read_exactly(self) -> bool:
        """Whether it is float32 because somebody reads what it returns exactly."""
        exactly = self.need & (needs.DIGITS | needs.REGION) == needs.DIGITS
        return self.rule == rules.FLOAT32 and exactly


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The table of a jaxpr: its equations as rewritten, and what becomes of them."""

    steps: Sequence[Step]
    ins: tuple[Facts, ...]  # as the jaxpr is given them
    outs: tuple[Facts, ...]  # as it returns them
    ends: tuple[End, ...]  # what is done to them for that
    dtype: np.dtype  # the 16 bits in which it returns them

    def __str__(self) -> str:
        """Returns the table, with what an equation holds below it."""
        return "\n".join(self._lines(""))

    def _lines(self, indent: str) -> Iterator[str]:
        for step in self.steps:
            name = indent + step.eqn.primitive.name
            if step.inside is not None:
                yield name
                for _, inner in step.inside.bodies:
                    yield from inner._lines(indent + "  ")
                continue
            pairs = zip(step.outs, step.eqn.outvars, strict=True)
            dtypes = ", ".join(str(x.dtype or var.aval.dtype) for x, var in pairs)
            read = needs.in_words(step.need)
            yield f"{name:17} {step.how:8} {dtypes:10} by {step.rule}, for {read}"

    def plans(self) -> Iterator["Plan"]:
        """Yields this plan and those in it, each once."""
        left: list[Plan] = [self]
        seen = set(left)
        while left:
            plan = left.pop()
            yield plan
            for step in plan.steps:
                for _, inner in step.inside.bodies if step.inside else ():
                    if inner not in seen:
                        seen.add(inner)
                        left.append(inner)

    def all_steps(self) -> Iterator[Step]:
        """Yields all steps, those of a jaxpr that is shared once."""
        for plan in self.plans():
            for step in plan.steps:
                yield step
                if step.sum32 is not None:
                    yield step.sum32


class Planner:
    """Plans jaxprs, with one set of lists and one of paths."""

    def __init__(
        self,
        dtype: np.dtype,
        ops: OpLists,
        paths: Mapping[str, str] = NO_PATHS,
        *,
        backward_dtype: np.dtype | None = None,
        float8: bool = False,
        bfloat16_paths: Sequence[str] = (),
    ):
        """Starts with nothing planned.

        Args:
            dtype: The 16-bit dtype, of the forward pass.
            ops: The lists.
            paths: Scopes that stay float32, each with the precision of its products.
            backward_dtype: That of the backward pass, if it is another one.
            float8: Whether products take their operands in float8.
            bfloat16_paths: Scopes in which they take them in ``dtype``.
        """
        self.dtype, self.ops, self.has_float8 = dtype, ops, float8
        self.backward_dtype = dtype if backward_dtype is None else backward_dtype
        two = self.backward_dtype != dtype
        by_path = float8 and bool(bfloat16_paths)
        self.analysis = Analysis(dtype, ops, paths, apart=two, says_scopes=by_path)
        self.bfloat16_paths = {x: tuple(x.split("/")) for x in bfloat16_paths}
        # Why products are not in float8, None with it if some are.
        self.reasons: set[str | None] = set()
        # By jaxpr, so that what JAX shares between calls and layers stays shared.
        self._plans: Any = weakref.WeakKeyDictionary()

    def dtype_in(self, back: bool) -> np.dtype:
        """Returns the 16-bit dtype of the backward pass, or of the forward pass."""
        return self.backward_dtype if back else self.dtype

    def program(self, jaxpr: Any, returned: Need, scopes: Scopes = ()) -> Plan:
        """Returns the plan of a whole program.

        Args:
            jaxpr: The program, of which all that it holds is part.
            returned: What is needed of what it returns.
            scopes: Named scopes around it.
        """
        planner = self.marked(jaxpr, scopes)
        ins = [GIVEN] * len(_jaxpr.in_avals(jaxpr))
        count = len(_jaxpr.out_avals(jaxpr))
        demand = Demand((returned,) * count)
        return planner.plan(jaxpr, ins, demand, ("wide",) * count, scopes)

    def marked(self, jaxpr: Any, scopes: Scopes) -> "Planner":
        """Returns what plans a program, see :meth:`Analysis.marked`."""
        analysis = self.analysis.marked(jaxpr, scopes)
        if analysis is self.analysis:
            return self
        new = copy.copy(self)
        new.analysis, new._plans = analysis, weakref.WeakKeyDictionary()
        return new

    def plan(
        self,
        jaxpr: Any,
        ins: Sequence[Facts],
        demand: Demand,
        ends: tuple[End, ...],
        scopes: Scopes,
    ) -> Plan:
        """Returns the plan of a jaxpr.

        Args:
            jaxpr: Open or closed.
            ins: The facts of its inputs.
            demand: What its outputs are needed for.
            ends: In which dtype each of them must be.
            scopes: Named scopes around it.
        """
        memo = self._plans.setdefault(jaxpr, {})
        key = (tuple(ins), demand, ends, self.analysis.relevant(scopes))
        if key not in memo:
            memo[key] = self._plan(jaxpr, key[0], demand, ends, scopes)
        return memo[key]

    def _plan(
        self,
        jaxpr: Any,
        ins: tuple[Facts, ...],
        demand: Demand,
        ends: tuple[End, ...],
        scopes: Scopes,
    ) -> Plan:
        consumers = self.analysis.consumers(jaxpr, demand, scopes)
        rows = iter(consumers.rows)
        steps: list[Step] = []

        def apply(eqn: Equation, ins: list[Facts]) -> Sequence[Facts]:
            row = next(rows)
            step = self._step(row, [x.seen() for x in ins], consumers)
            if sums := streams.of_sum(row.demand.summed, ins):
                one = self._step(row, [x.seen() for x in sums], consumers)
                pairs = zip(step.outs, one.outs, strict=True)
                outs = tuple([out._replace(sum32=known) for out, known in pairs])
                step = step._replace(outs=outs, sum32=one, repeats=False)
            steps.append(step)
            return step.outs

        found = _jaxpr.interpret(
            jaxpr,
            ins,
            apply,
            eqns=[row.eqn for row in consumers.rows],
            const=lambda _: GIVEN,
            literal=facts.of_literal,
        )
        atoms = _jaxpr.open_jaxpr(jaxpr).outvars
        dtype = self.dtype_in(BACKWARD in scopes)
        returned = [
            self._returned(x, var, end, dtype, consumers)
            for x, var, end in zip(found, atoms, ends, strict=True)
        ]
        outs, done = zip(*returned, strict=True) if returned else ((), ())
        return Plan(steps, ins, outs, done, dtype)

    @staticmethod
    def _returned(
        x: Facts, var: Any, end: End, dtype: np.dtype, consumers: Consumers
    ) -> tuple[Facts, End]:
        """Returns the facts of an output, and what is done to it for that."""
        digits = x.digits or needs.needs_digits(consumers.of(var))
        x = streams.returned(x, end)._replace(sum32=None, digits=digits)
        if end == "wide":
            return x.widened(), end
        if x.half and x.dtype != dtype:  # of the other pass
            return x._replace(dtype=dtype), "half"
        if x.half:
            return x, "free" if end in ("free", "ranged") else "half"
        keeps = end in ("stacked", "ranged") and (x.given or x.digits)
        if keeps or not is_float32(var):
            return x, "free"
        if end == "stacked":
            axes = facts.stored_axes(var, consumers.definition)
            return x.rounded(dtype)._replace(stored=axes), end
        return (x.rounded(dtype) if end == "half" else x), end

    # One equation.

    def _step(self, row: Row, ins: Sequence[Facts], consumers: Consumers) -> Step:
        eqn, kind, around = row.eqn, row.kind, row.around
        dtype, tangent = self.dtype_in(row.back), any([x.tangent for x in ins])
        if kind == "call":
            within, outs = self._inside(row, ins, consumers)
            step = Step(*row, "inside", rules.FLOAT32, dtype, outs, tangent=tangent)
            return step._replace(inside=within)
        analysis = self.analysis
        kept = analysis.keeps(eqn, around) if kind == "keep" else None
        how, by = decide(row, ins, dtype, kept=kept)
        if kind == "exact" and table.tests_sign(eqn):
            stored = needs.is_stored(consumers.of(eqn.invars[0]) & ~needs.HALF)
            how = "half" if stored or ins[0].half else how
        why, precision = self._why_16bit(row, ins), "default"
        float8 = why is None
        if kind == "keep" and not float8:
            precision = analysis.precision(eqn, around)
            why = analysis.reason(eqn, around) or why
        outs = self._outs(row, how, float8, ins, consumers.definition)
        repeats = how == "float32" and kind != "product" and not (float8 or why)
        repeats = repeats and precision == "default"
        repeats = repeats and not (table.adds_at(eqn) or table.puts(eqn))
        repeats = repeats and not any([x.half for x in ins])
        options = why or "", precision, float8, tangent, repeats
        return Step(*row, how, by, dtype, outs, *options)

    def _outs(
        self,
        row: Row,
        how: How,
        float8: bool,
        ins: Sequence[Facts],
        definition: Definition,
    ) -> tuple[Facts, ...]:
        """Returns the facts of the outputs of an equation that is not gone into."""
        eqn = row.eqn
        if ins and ins[0].half and (table.retypes(eqn) or table.is_saved(eqn)):
            return (ins[0],)
        stored = None
        if row.kind == "exact":
            if any([x.stored is not None for x in ins]):
                stored = ()
        elif how == "stored" and not needs.is_for_products(row.need):
            stored = facts.stored_axes(eqn.outvars[0], definition)
        halves = self._halves(row, how, float8)
        return facts.of_outputs(row, ins, halves, self.dtype_in(row.back), stored)

    def _halves(self, row: Row, how: How, float8: bool) -> list[bool]:
        """Returns which outputs of an equation have 16 bits."""
        eqn, kind, wanted = row.eqn, row.kind, row.demand.needs
        floats, dtype = [is_float32(x) for x in eqn.outvars], self.dtype_in(row.back)
        if float8 or (kind == "product" and "preferred_element_type" in eqn.params):
            firmly = self.ops.rounds_matmuls and not row.need & needs.REGION
            return [kind == "product" and (how == "half" or firmly)] * len(floats)
        by_name = eqn.primitive.name in DEFAULT_OPS.infer
        if kind == "product" or (how == "half" and not by_name):
            avals = [
                x.aval.update(dtype=dtype) if rounds and is_inexact(x) else x.aval
                for x, rounds in zip(eqn.invars, classes.rounds(eqn), strict=True)
            ]  # the name alone does not tell
            made = _jaxpr.trace(lambda *xs: bind_narrow(eqn, xs, dtype), avals)
            half = [x.dtype == dtype for x in _jaxpr.out_avals(made)]
            if products.is_fused(eqn):
                half = list(map(operator.and_, half, map(needs.is_half, wanted)))
            return half
        if how == "rounded":
            return [needs.is_half(need) for need in wanted]
        if how == "half" or (how == "stored" and kind != "exact"):
            return floats
        return [False] * len(floats)

    def _why_16bit(self, row: Row, ins: Sequence[Facts]) -> str | None:
        """Returns why an equation rounds nothing to float8; None if it does.

        The reason is empty for what is no product in 16 bits.
        """
        eqn, around = row.eqn, row.around
        if not self.has_float8 or self.analysis.is_kept(around):
            return ""
        written = classes.is_written_in(eqn, self.ops, self.dtype)
        if row.kind != "product" and not written:
            return ""
        reason = why_16bit(eqn, self.ops.min_size)
        paths = self.bfloat16_paths.values()
        if reason is None and any(is_under(path, around) for path in paths):
            reason = _BY_BFLOAT16_PATHS
        self.reasons.add(reason)
        return reason

    @property
    def float8_is_unused(self) -> bool:
        """Whether products were met, of which none is float8, and nobody asked that."""
        asked = {None, _BY_BFLOAT16_PATHS}
        return bool(self.reasons) and asked.isdisjoint(self.reasons)

    # Equations that hold jaxprs.

    def _inside(
        self, row: Row, ins: Sequence[Facts], consumers: Consumers
    ) -> tuple[Inside, tuple[Facts, ...]]:
        """Plans the jaxprs in an equation, and returns the facts of its outputs."""
        eqn = row.eqn
        scopes = scopes_inside(eqn, row.around)
        demand = self.analysis.demand_inside(eqn, row.demand, scopes)
        held = Held(row, ins, consumers, demand, scopes)
        layout, kind = _jaxpr.call_layout(eqn), _jaxpr.call_kind(eqn)
        passed: Any = ("as is",) * len(ins)
        ends: Any = ("free",) * len(eqn.outvars)
        if kind in ("scan", "while"):
            return self._loop(held)
        if kind in ("custom_vjp", "shard_map"):  # float32 at their boundary
            passed = ("wide",) * len(ins)
            ends, ins = ("wide",) * len(ends), [x.widened() for x in ins]
        if _jaxpr.is_remat(eqn):
            places = self._rounded_before(held, range(len(ins)))
            rounded = [ins[i].rounded(one) for i, one in places.items()]
            ins = replaced(ins, places, rounded)
            passed = replaced(passed, places, places.values())
        while True:
            bodies = tuple(
                [self._body(body, ins, demand, ends, scopes) for body in layout.bodies]
            )
            found = [*zip(*[plan.outs for _, plan in bodies], strict=True)]
            dtypes = [{x.dtype for x in several} for several in found]
            if all(len(several) == 1 for several in dtypes):
                break
            # Branches must agree, so one that returns float32 decides.
            ends = tuple(
                "wide" if len(several) > 1 else end
                for several, end in zip(dtypes, ends, strict=True)
            )
        outs = tuple([facts.one_of(several) for several in found])
        if kind in ("custom_vjp", "shard_map"):
            outs = (facts.NOTHING,) * len(outs)
        return Inside(tuple(passed), bodies, demand, scopes), outs

    def _body(
        self,
        body: _jaxpr.Body,
        ins: Sequence[Facts],
        demand: Demand,
        ends: tuple[End, ...],
        scopes: Scopes,
    ) -> tuple[Any, Plan]:
        """Returns a jaxpr that an equation with such inputs holds, and its plan."""
        jaxpr, known = body.jaxpr, [ins[i] for i in body.operands]
        numbers = any([x.scalar is not None for x in known])
        casts = {
            x
            for eqn in (_jaxpr.open_jaxpr(jaxpr).eqns if numbers else ())
            if _jaxpr.is_cast(eqn) and is_float32(eqn.outvars[0])
            for x in _jaxpr.variables(eqn.invars)
        }
        given = []
        for x, var in zip(known, _jaxpr.in_vars(jaxpr), strict=True):
            # A layer that is called with its number is the same for each number. An
            # integer may be made a float there, as a zero in a `where`.
            keeps = var in casts or getattr(x.scalar, "dtype", None) == FLOAT32
            scalar = x.scalar if keeps else None
            given.append(x._replace(scalar=scalar, digits=False))
        return jaxpr, self.plan(jaxpr, given, demand, ends, scopes)

    def _rounded_before(self, held: Held, places: Iterable[int]) -> dict[int, np.dtype]:
        """Returns which inputs are rounded before a loop or a remat, each to its dtype.

        Those that only products in it take, of one of the two passes.
        """
        eqn, ins, scopes = held.row.eqn, held.ins, held.scopes
        dtypes: list[np.dtype | None] = [self.dtype] * len(ins)
        if self.backward_dtype != self.dtype:
            for body in _jaxpr.call_layout(eqn).bodies:
                inner = _jaxpr.open_jaxpr(body.jaxpr)
                back = read_by_pass(inner, scopes, back=True)
                ahead = read_by_pass(inner, scopes, back=False)
                for i, x in zip(body.operands, inner.invars, strict=True):
                    if x in back:
                        dtypes[i] = None if x in ahead else self.backward_dtype
        need = self.analysis.needs_in(eqn, held.demand, scopes)
        return {
            i: dtype
            for i in places
            if is_float32(eqn.invars[i])
            and ins[i].scalar is None
            and not ins[i].tangent
            if needs.is_rounded_for_products(need[i])
            if (dtype := dtypes[i]) is not None
        }

    # Loops.

    def _loop(self, held: Held) -> tuple[Inside, tuple[Facts, ...]]:
        """Plans a loop: it carries 16 bits where all iterations agree."""
        row, ins, consumers, demand, scopes = held
        eqn, dtype = row.eqn, self.dtype_in(row.back)
        layout, is_scan = _jaxpr.call_layout(eqn), _jaxpr.call_kind(eqn) == "scan"
        again = any([x.tangent for x in ins])  # it will be transposed
        start, stop = layout.fixed_in.start, layout.fixed_in.stop
        given, passed, weights = self._entering(held)
        *tests, body = layout.bodies
        within = self.analysis.consumers(body.jaxpr, demand, scopes)
        carried = self._carried(held)
        # Gradients are sums, and float16 may not have the range of what is stacked.
        stores = not row.back and self.dtype != np.float16
        stacks: End = "free" if row.back else "stacked" if stores else "ranged"
        sums: dict[int, int] = {}
        while True:
            given[start:stop] = carried
            if is_scan and not row.back:
                ahead = consumers.forward
                sums = streams.stacked(eqn, ahead, body, demand, carried, within)
            ends = _ends(eqn, demand, carried, stacks)
            if stores:
                for i in sums.values():
                    given[start + i] = Facts(dtype, sum32=carried[i])
                ends = tuple(replaced(ends, sums, ["half"] * len(sums)))
            inner = self._body(body, given, demand, ends, scopes)
            before = carried  # a body that returns float32, or has computed, decides
            pairs = zip(before, inner[1].outs, strict=False)
            carried = [facts.one_of(pair) for pair in pairs]
            if carried == before:
                break
        if stacks == "ranged":
            done = replaced(inner[1].ends, sums, ["ranged"] * len(sums))
            inner = inner[0], dataclasses.replace(inner[1], ends=tuple(done))
        passed[start:stop] = [x.dtype or "wide" for x in carried]
        bodies = [inner]
        for body in tests:
            test = self.analysis.test_of(body)
            fixed: tuple[End, ...] = ("wide",) * len(test.needs)
            bodies.insert(0, self._body(body, given, test, fixed, scopes))
        outs = []
        for i, (var, x) in enumerate(zip(eqn.outvars, inner[1].outs, strict=True)):
            is_carried, half = i in layout.fixed_out, x.half and is_float32(var)
            stack = facts.axes_of_stack(x, demand.needs[i])
            stored = (carried[i].stored if is_carried else stack) if half else None
            dtype = x.dtype if half else None
            known = Facts(dtype, x.given, tangent=again, stored=stored, digits=x.digits)
            outs.append(known)
        bodies = tuple(bodies)
        return Inside(tuple(passed), bodies, demand, scopes, weights), tuple(outs)

    def _entering(self, held: Held) -> tuple[list[Facts], list[Any], tuple[int, ...]]:
        """Returns the facts of what the iterations of a loop are given.

        And how each is passed to them, and which are rounded before the first.
        """
        eqn, ins = held.row.eqn, held.ins
        kind = _jaxpr.call_kind(eqn)
        fixed = _jaxpr.call_layout(eqn).fixed_in
        given, passed = list(ins), list[Any](["as is"] * len(ins))
        weights: tuple[int, ...] = ()
        again = any([x.tangent for x in ins])
        written = DIFFERENTIATED in held.scopes or _jaxpr.is_differentiated(eqn)
        written = written or _jaxpr.holds_backward(eqn)
        if kind == "while" or (written and not again):
            # A slice of an argument is rounded in the body, as that needs no memory.
            stacked = range(fixed.stop, len(ins)) if kind == "scan" else ()
            made = [i for i in stacked if held.consumers.definition(eqn.invars[i])]
            places = [*range(fixed.start), *made]
            before = self._rounded_before(held, places)
            for i, one in before.items():
                given[i], passed[i] = ins[i].rounded(one), one
            weights = tuple(i for i in range(fixed.start) if given[i].half)
        else:  # what each iteration sends back to it adds up in float32
            for i, x in enumerate(ins[: fixed.start]):
                constant = x.half or x.constant
                given[i], passed[i] = x.widened()._replace(constant=constant), "wide"
        given[fixed.stop :] = map(facts.slice_of, given[fixed.stop :])
        return given, passed, weights

    def _carried(self, held: Held) -> list[Facts]:
        """Returns what a loop may carry, going by what it starts from."""
        row, ins, demand = held.row, held.ins, held.demand
        eqn, dtype = row.eqn, self.dtype_in(row.back)
        layout = _jaxpr.call_layout(eqn)
        given = GIVEN_WITHOUT_PRODUCT.around(eqn, [x.given for x in ins], At())
        starts = ins[layout.fixed_in.start : layout.fixed_in.stop]

        def known(out: int, start: Facts) -> Facts:
            need = demand.needs[out]
            is_number = start.scalar is not None and start.fits(dtype)
            half = start.half or is_number or needs.is_rounded_for_products(need)
            half = half and is_float32(eqn.outvars[out]) and not start.tangent
            half = half and needs.is_carried(row.demand.needs[out], need)
            return Facts(
                dtype if half else None,
                start.given and given[out],
                tangent=start.tangent,
                stored=() if half and start.stored is not None else None,
            )

        return [known(*pair) for pair in zip(layout.fixed_out, starts, strict=True)]


def _ends(
    loop: Equation, demand: Demand, carried: Sequence[Facts], stacks: End
) -> tuple[End, ...]:
    """Returns the dtypes of what each iteration of a loop returns.

    Args:
        loop: The loop.
        demand: What is needed of what an iteration returns.
        carried: The facts of what it carries.
        stacks: That of what it stacks for the backward pass alone.
    """
    carries = _jaxpr.call_layout(loop).fixed_out

    def end(i: int, need: Need) -> End:
        if i in carries:
            if not carried[i].half:
                return "wide"
            return "half" if needs.is_rounded_for_products(need) else "free"
        if needs.is_rounded_for_products(need):
            return "half"
        if needs.is_for_backward_alone(need):
            return stacks
        return "stacked" if needs.is_stored(need) else "free"

    return tuple([end(i, need) for i, need in enumerate(demand.needs)])


def replaced(items: Sequence[Any], places: Iterable[int], new: Iterable[Any]) -> list:
    """Returns ``items`` with those at ``places`` replaced."""
    changed = dict(zip(places, new, strict=True))
    return [changed.get(i, item) for i, item in enumerate(items)]


# The decision.


def decide(
    row: Row, ins: Sequence[Facts], dtype: np.dtype, *, kept: Rule | None
) -> tuple[How, Rule]:
    """Decides how an equation runs, and says by what.

    Args:
        row: The equation, its class, and what its consumers need.
        ins: The facts of its inputs.
        dtype: The 16-bit dtype.
        kept: By what its scopes keep it as it was written, None if they do not.
    """
    eqn, kind, need = row.eqn, row.kind, row.need

    if not any(map(is_float32, eqn.outvars)):
        return "float32", rules.AS_WRITTEN
    half = needs.is_half(need)
    if kind == "product":
        if any(map(needs.is_half, row.demand.needs)):
            return "half", rules.BETWEEN
        return "float32", _of_float32(row)
    if kind in ("exact", "smooth") and _follows(eqn, kind, ins, half, dtype):
        # All that a number is applied to would be off alike, were it rounded.
        holds = kind == "exact" or all([x.holds(dtype) for x in ins])
        stored = kind == "exact" and any([x.stored is not None for x in ins])
        rule = rules.STORED if stored else rules.BETWEEN
        return "half" if holds else "rounded", rule
    cuts = kind == "exact" and table.cuts(eqn) and ins[0].product == 2
    if cuts and any(map(needs.is_half, row.demand.needs)):
        if row.back and dtype == np.float16:  # a sum that was kept in its range
            return "float32", rules.RANGE
        return "rounded", rules.BETWEEN  # as if a product returned it alone
    usual = rules.FLOAT32
    if half and kind in ("exact", "smooth") and any([x.constant for x in ins]):
        usual = rules.CONSTANTS
    if kind == "smooth" and half and table.joins(eqn) and any([x.half for x in ins]):
        if facts.all_given([x for x in ins if not x.half]):
            if facts.adds_bias(eqn, ins):
                return "half", rules.BETWEEN  # a bias is rounded as weights are
        elif dtype != np.float16 or all([x.half or x.joined or x.given for x in ins]):
            return "rounded", rules.BETWEEN
        else:
            usual = rules.RANGE
    sums = kind == "smooth" and needs.is_summed_and_handed_on(need)
    if sums and row.back and facts.is_of_cotangent(eqn, ins):
        return "stored", rules.FLOAT32
    # What was given is rounded where it is used.
    if kind != "exact" and needs.is_stored(need) and not facts.all_given(ins):
        return "stored", kept or usual
    if half and table.squashes(eqn) and not facts.all_given(ins):
        behind = any([x.product for x in ins])
        if needs.is_squashed_for_products(need, behind=behind):
            return "rounded", rules.BETWEEN
    if kind == "exact" and needs.is_stored(need) and facts.all_given(ins):
        # XLA finds the gradient of a convolution where nothing stands between it and
        # the reversed kernel.
        if (
            row.back
            and needs.is_rounded_for_products(need)
            and is_float32(eqn.invars[0])
            and ins[0].dtype is None
            and ins[0].scalar is None
        ):
            return "half", rules.STORED
        if table.gathers(eqn):  # devices send one another 16 bits
            return "stored", rules.FLOAT32
    return "float32", kept or _of_float32(row, usual)


def _of_float32(row: Row, usual: Rule = rules.FLOAT32) -> Rule:
    """Returns by what something is float32, if its consumers decide that."""
    need = row.need
    if need & needs.REGION:
        return usual  # what the user keeps, or nobody knows, reads it as it is
    if row.demand.summed:
        return rules.LOOPS
    if need & needs.MANY:
        return rules.GATES
    if need & needs.GATE:
        return rules.LOOPS
    return rules.FLOAT32 if need & needs.DIGITS else usual


def _follows(
    eqn: Equation, kind: Class, ins: Sequence[Facts], half: bool, dtype: np.dtype
) -> bool:
    """Whether elementwise work, a choice or a move runs in 16 bits."""
    if not any([x.half for x in ins]) or (kind == "smooth" and not half):
        return False
    floats = [x for x, var in zip(ins, eqn.invars, strict=True) if is_float32(var)]
    # What is stored is multiplied in float32. To add or to move it makes no difference.
    stored = any([x.stored is not None for x in floats])
    if stored and kind == "smooth" and not table.joins(eqn):
        return False
    return all([x.half or (x.scalar is not None and x.fits(dtype)) for x in floats])
