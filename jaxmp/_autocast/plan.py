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
import math
import operator
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import FLOAT32, Equation, is_float32, is_inexact
from .._jaxprs.scopes import (
    BACKWARD,
    DIFFERENTIATED,
    Scopes,
    inside,
    is_under,
)
from .._jaxprs.sizes import as_number
from .._jaxprs.walk import At
from .._ops import products, table
from .._ops.fp8 import why_16bit
from .._ops.lists import DEFAULT_OPS, OpLists
from .._ops.narrow import bind_narrow
from .._ops.table import Definition, axes_of_softmax
from . import classes, facts, needs, rules
from .analysis import NO_PATHS, Analysis, Consumers, Row
from .classes import Class
from .facts import GIVEN, Facts
from .graph import GIVEN as GIVEN_WITHOUT_PRODUCT
from .graph import Demand, joined
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
    read: Demand
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
    exact: "Step | None" = None  # the same for what the iterations add up

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
                if step.exact is not None:
                    yield step.exact


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
            step = self._step(row, ins, consumers)
            if row.read.summed:
                step = self._with_exact(step, row, ins, consumers)
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
        outs, done = [], []
        for x, var, end in zip(found, atoms, ends, strict=True):
            if end in ("wide", "free", "ranged"):
                x = x.exact or x
            read = consumers.of(var)
            x = x._replace(exact=None, digits=x.digits or needs.is_exact(read))
            if end == "wide":
                x = x.widened()
            elif x.half:
                if x.dtype != dtype:  # of the other pass
                    x, end = x._replace(dtype=dtype), "half"
                end = "free" if end in ("free", "ranged") else "half"
            elif not is_float32(var) or (
                end in ("stacked", "ranged") and (x.given or x.digits)
            ):
                end = "free"
            elif end == "stacked":
                axes = _stored_axes(var, consumers.definition)
                x = x.rounded(dtype)._replace(stored=axes)
            elif end == "half":
                x = x.rounded(dtype)
            outs.append(x)
            done.append(end)
        return Plan(steps, ins, tuple(outs), tuple(done), dtype)

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
        why, precision = self._why_16bit(row, ins), "default"
        float8 = why is None
        if kind == "keep" and not float8:
            precision = analysis.precision(eqn, around)
            why = analysis.reason(eqn, around) or why
        outs = self._outs(row, how, float8, ins, tangent, consumers.definition)
        repeats = how == "float32" and kind != "product" and not (float8 or why)
        repeats = repeats and precision == "default"
        repeats = repeats and not (table.adds_at(eqn) or table.puts(eqn))
        repeats = repeats and not any([x.half for x in ins])
        options = why or "", precision, float8, tangent, repeats
        return Step(*row, how, by, dtype, outs, *options)

    def _with_exact(
        self, step: Step, row: Row, ins: Sequence[Facts], consumers: Consumers
    ) -> Step:
        """Returns a step with that of what a loop adds up and others read rounded."""
        way = joined(starts for starts, _ in row.read.summed)
        sums = [x.exact if way >> i & 1 else None for i, x in enumerate(ins)]
        if not any(sums):
            return step
        pairs = zip(ins, sums, strict=True)
        exact = self._step(row, [one or x for x, one in pairs], consumers)
        pairs = zip(step.outs, exact.outs, strict=True)
        outs = tuple([out._replace(exact=one) for out, one in pairs])
        return step._replace(outs=outs, exact=exact, repeats=False)

    def _outs(
        self,
        row: Row,
        how: How,
        float8: bool,
        ins: Sequence[Facts],
        tangent: bool,
        definition: Definition,
    ) -> tuple[Facts, ...]:
        """Returns the facts of the outputs of an equation that is not gone into."""
        eqn, kind, back, dtype = row.eqn, row.kind, row.back, self.dtype_in(row.back)
        if ins and ins[0].half and (table.retypes(eqn) or table.is_saved(eqn)):
            return (ins[0]._replace(exact=None),)
        floats = [is_float32(var) for var in eqn.outvars]
        wanted, stored = row.read.wanted, None
        firmly = self.ops.rounds_matmuls and not row.need & needs.REGION
        by_name = eqn.primitive.name in DEFAULT_OPS.infer
        if float8 or (kind == "product" and "preferred_element_type" in eqn.params):
            is_half = kind == "product" and (how == "half" or firmly)
            half = [is_half] * len(floats)
        elif kind == "product" or (how == "half" and not by_name):
            avals = [
                x.aval.update(dtype=dtype) if rounds and is_inexact(x) else x.aval
                for x, rounds in zip(eqn.invars, classes.rounds(eqn), strict=True)
            ]  # the name alone does not tell
            made = _jaxpr.trace(lambda *xs: bind_narrow(eqn, xs, dtype), avals)
            half = [x.dtype == dtype for x in _jaxpr.out_avals(made)]
            if products.is_fused(eqn):
                half = list(map(operator.and_, half, map(needs.is_half, wanted)))
        elif how == "half":
            half = floats
        elif how == "rounded":
            half = [needs.is_half(need) for need in wanted]
        elif how == "stored" and kind != "exact":
            half = floats
            if not needs.is_for_products(row.need):
                stored = _stored_axes(eqn.outvars[0], definition)
        else:
            half = [False] * len(floats)
        cotangent = broadcast = False
        if back:
            # Sent to many alike.
            computed = [x for x in ins if x.scalar is None]
            broadcast = table.copies(eqn) or (
                any([x.broadcast or x.scalar is not None for x in ins])
                if kind == "product"
                else bool(computed) and all([x.broadcast for x in computed])
            )
            cotangent = kind == "product" or is_of_cotangent(eqn, ins)
            cotangent |= kind == "exact" and any([x.cotangent for x in ins])
        product = _of_product(eqn, kind, ins)
        given, scalar, repeated = False, None, ()
        joined = kind == "exact" and len(ins) == 1 and ins[0].joined
        if table.joins(eqn) and any([x.half or x.joined for x in ins]):
            joined = all([x.half or x.joined or x.given for x in ins])
        if kind != "product":
            given = _all_given(ins)
            repeated = _repeated(eqn, ins) if given and floats else ()
            numbers = [x.scalar for x in ins if x.scalar is not None]
            if numbers and len(numbers) == len(ins):
                scalar = table.folded(eqn, numbers)
            if kind == "exact" and any([x.stored is not None for x in ins]):
                stored = ()
        known = facts.shared if scalar is None else Facts
        return tuple(
            [
                known(
                    dtype if is_half and is_float else None,
                    given,
                    cotangent,
                    0 if is_half or not is_float else product,
                    broadcast,
                    tangent,
                    scalar,
                    stored if is_half and is_float else None,
                    joined=joined and not is_half,
                    repeated=repeated,
                )
                for is_half, is_float in zip(half, floats, strict=True)
            ]
        )

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
        eqn, ins = row.eqn, [x._replace(exact=None) for x in ins]
        scopes = inside(eqn, row.around)
        demand = self.analysis.inside(eqn, row.read, scopes)
        layout, kind = _jaxpr.call_layout(eqn), _jaxpr.call_kind(eqn)
        passed: Any = ("as is",) * len(ins)
        ends: Any = ("free",) * len(eqn.outvars)
        if kind in ("scan", "while"):
            return self._loop(row, ins, demand, scopes, consumers)
        if kind in ("custom_vjp", "shard_map"):  # float32 at their boundary
            passed = ("wide",) * len(ins)
            ends, ins = ("wide",) * len(ends), [x.widened() for x in ins]
        if _jaxpr.is_remat(eqn):
            places = self._rounded_before(eqn, ins, demand, scopes, range(len(ins)))
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

    def _rounded_before(
        self,
        eqn: Equation,
        ins: Sequence[Facts],
        demand: Demand,
        scopes: Scopes,
        places: Iterable[int],
    ) -> dict[int, np.dtype]:
        """Returns which inputs are rounded before a loop or a remat, each to its dtype.

        Those that only products in it take, of one of the two passes.
        """
        dtypes: list[np.dtype | None] = [self.dtype] * len(ins)
        if self.backward_dtype != self.dtype:
            for body in _jaxpr.call_layout(eqn).bodies:
                inner = _jaxpr.open_jaxpr(body.jaxpr)
                back = read_by_pass(inner, scopes, back=True)
                ahead = read_by_pass(inner, scopes, back=False)
                for i, x in zip(body.operands, inner.invars, strict=True):
                    if x in back:
                        dtypes[i] = None if x in ahead else self.backward_dtype
        need = self.analysis.needs_in(eqn, demand, scopes)
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

    def _loop(
        self,
        row: Row,
        ins: Sequence[Facts],
        demand: Demand,
        scopes: Scopes,
        consumers: Consumers,
    ) -> tuple[Inside, tuple[Facts, ...]]:
        """Plans a loop: it carries 16 bits where all iterations agree."""
        eqn, dtype = row.eqn, self.dtype_in(row.back)
        layout, kind = _jaxpr.call_layout(eqn), _jaxpr.call_kind(eqn)
        start, stop = layout.fixed_in.start, layout.fixed_in.stop
        passed: list[Any] = ["as is"] * len(ins)
        weights: tuple[int, ...] = ()
        again = any([x.tangent for x in ins])  # it will be transposed
        written = DIFFERENTIATED in scopes or _jaxpr.is_differentiated(eqn)
        written = written or _jaxpr.holds_backward(eqn)
        given = list(ins)
        if kind == "while" or (written and not again):
            # A slice of an argument is rounded in the body, as that needs no memory.
            stacked = range(stop, len(ins)) if kind == "scan" else ()
            made = [i for i in stacked if consumers.definition(eqn.invars[i])]
            places = [*range(start), *made]
            before = self._rounded_before(eqn, ins, demand, scopes, places)
            for i, one in before.items():
                given[i], passed[i] = ins[i].rounded(one), one
            weights = tuple(i for i in range(start) if given[i].half)
        else:  # what each iteration sends back to it adds up in float32
            given[:start] = [
                x.widened()._replace(constant=x.half or x.constant) for x in ins[:start]
            ]
            passed[:start] = ["wide"] * start
        for i, x in enumerate(given[stop:], stop):  # a slice of each in an iteration
            axes = x.stored and tuple([n - 1 for n in x.stored if 0 not in x.stored])
            repeated = tuple([n - 1 for n in x.repeated if n])
            given[i] = x._replace(scalar=None, stored=axes, repeated=repeated)
        *tests, body = layout.bodies
        within = self.analysis.consumers(body.jaxpr, demand, scopes)
        carried = self._carried(row, ins, demand)
        # Gradients are sums, and float16 may not have the range of what is stacked.
        stores = not row.back and self.dtype != np.float16
        stacks: End = "free" if row.back else "stacked" if stores else "ranged"
        while True:
            given[start:stop] = carried
            streams = {}
            if kind == "scan" and not row.back:
                ahead = consumers.forward
                streams = _streams(eqn, ahead, body, demand, carried, within)
            ends = _ends(eqn, demand, carried, stacks)
            if stores:
                for i in streams.values():
                    given[start + i] = Facts(dtype, exact=carried[i])
                ends = tuple(replaced(ends, streams, ["half"] * len(streams)))
            inner = self._body(body, given, demand, ends, scopes)
            before = carried  # a body that returns float32, or has computed, decides
            pairs = zip(before, inner[1].outs, strict=False)
            carried = [facts.one_of(pair) for pair in pairs]
            if carried == before:
                break
        if stacks == "ranged":
            done = replaced(inner[1].ends, streams, ["ranged"] * len(streams))
            inner = inner[0], dataclasses.replace(inner[1], ends=tuple(done))
        passed[start:stop] = [x.dtype or "wide" for x in carried]
        bodies = [inner]
        for body in tests:
            test = self.analysis.test_of(body)
            fixed: tuple[End, ...] = ("wide",) * len(test.wanted)
            bodies.insert(0, self._body(body, given, test, fixed, scopes))
        outs = []
        for i, (var, out) in enumerate(zip(eqn.outvars, inner[1].outs, strict=True)):
            half = out.half and is_float32(var)
            stored = out.stored
            if i in layout.fixed_out:
                stored = carried[i].stored
            elif stored is not None or demand.wanted[i] & needs.BACK:
                stored = tuple([axis + 1 for axis in stored or ()])
            known = Facts(given=out.given, tangent=again, digits=out.digits)
            if half:
                known = known._replace(dtype=out.dtype, stored=stored)
            outs.append(known)
        planned = Inside(tuple(passed), tuple(bodies), demand, scopes, weights)
        return planned, tuple(outs)

    def _carried(self, row: Row, ins: Sequence[Facts], demand: Demand) -> list[Facts]:
        """Returns what a loop may carry, going by what it starts from."""
        eqn, dtype = row.eqn, self.dtype_in(row.back)
        layout = _jaxpr.call_layout(eqn)
        given = GIVEN_WITHOUT_PRODUCT.around(eqn, [x.given for x in ins], At())
        starts = ins[layout.fixed_in.start : layout.fixed_in.stop]

        def known(out: int, start: Facts) -> Facts:
            need = demand.wanted[out]
            is_number = start.scalar is not None and start.fits(dtype)
            half = start.half or is_number or needs.is_rounded_for_products(need)
            half = half and is_float32(eqn.outvars[out]) and not start.tangent
            half = half and needs.is_carried(row.read.wanted[out], need)
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

    return tuple([end(i, need) for i, need in enumerate(demand.wanted)])


def _streams(
    loop: Equation,
    ahead: Collection[Any],
    body: _jaxpr.Body,
    demand: Demand,
    carried: Sequence[Facts],
    within: Consumers,
) -> dict[int, int]:
    """Returns what a scan stacks of its sums for the backward pass alone.

    As where it is to compute a layer again. The layer then reads the sum as it is
    stacked, in 16 bits, in both passes. The arguments are those of :func:`_ends`, the
    body and who reads its values, and ``ahead``, what the forward pass reads behind the
    loop.

    Returns:
        For the place of each such stack the place of what is carried.
    """
    if any(_jaxpr.call_kind(x.eqn) and x.read.summed for x in within.rows):
        return {}
    summed = joined(ends for _, ends in demand.summed)
    inner, layout = _jaxpr.open_jaxpr(body.jaxpr), _jaxpr.call_layout(loop)
    found: dict[int, int] = {}
    for place, out in zip(layout.fixed_in, layout.fixed_out, strict=True):
        known, var = carried[out], inner.invars[place]
        outs = [i for i, x in enumerate(inner.outvars) if x is var]
        stacks = set(outs).difference(layout.fixed_out)
        is_sum = summed >> out & 1 and not (known.given or known.tangent)
        again = all(
            loop.outvars[i] not in ahead
            and needs.is_computed_with_again(demand.wanted[i])
            for i in stacks
        )
        if is_sum and again and not _needs_digits(within, var):
            found |= dict.fromkeys(stacks, out)
    return found


def _needs_digits(consumers: Consumers, var: Any) -> bool:
    """Whether an equation needs the last digits of ``var``, beside the loop's sum."""
    return any(
        x is var and needs.is_exact(need) and not way >> i & 1
        for row in consumers.rows
        for way in [joined(starts for starts, _ in row.read.summed)]
        for i, (x, need) in enumerate(zip(row.eqn.invars, row.input_needs, strict=True))
    )


def _stored_axes(var: Any, definition: Definition) -> tuple[int, ...]:
    """Returns the axes over which what is stored in 16 bits sums to one."""
    eqn = definition(var)
    axes = axes_of_softmax(eqn, definition) if eqn else ()
    # Of more than 2^14 weights the largest may round to zero, and so may the sum.
    few = as_number(math.prod(var.aval.shape[i] for i in axes)) <= 2**14
    return axes if few else ()


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
        if any(map(needs.is_half, row.read.wanted)):
            return "half", rules.BETWEEN
        return "float32", _of_float32(row)
    if kind in ("exact", "smooth") and _follows(eqn, kind, ins, half, dtype):
        # All that a number is applied to would be off alike, were it rounded.
        holds = kind == "exact" or all([x.holds(dtype) for x in ins])
        stored = kind == "exact" and any([x.stored is not None for x in ins])
        rule = rules.STORED if stored else rules.BETWEEN
        return "half" if holds else "rounded", rule
    cuts = kind == "exact" and table.cuts(eqn) and ins[0].product == 2
    if cuts and any(map(needs.is_half, row.read.wanted)):
        if row.back and dtype == np.float16:  # a sum that was kept in its range
            return "float32", rules.RANGE
        return "rounded", rules.BETWEEN  # as if a product returned it alone
    usual = rules.FLOAT32
    if half and kind in ("exact", "smooth") and any([x.constant for x in ins]):
        usual = rules.CONSTANTS
    if kind == "smooth" and half and table.joins(eqn) and any([x.half for x in ins]):
        if _all_given([x for x in ins if not x.half]):
            if _adds_bias(eqn, ins):
                return "half", rules.BETWEEN  # a bias is rounded as weights are
        elif dtype != np.float16 or all([x.half or x.joined or x.given for x in ins]):
            return "rounded", rules.BETWEEN
        else:
            usual = rules.RANGE
    sums = kind == "smooth" and needs.is_summed_and_handed_on(need)
    if sums and row.back and is_of_cotangent(eqn, ins):
        return "stored", rules.FLOAT32
    # What was given is rounded where it is used.
    if kind != "exact" and needs.is_stored(need) and not _all_given(ins):
        return "stored", kept or usual
    if half and table.squashes(eqn) and not _all_given(ins):
        behind = any([x.product for x in ins])
        if needs.is_squashed_for_products(need, behind=behind):
            return "rounded", rules.BETWEEN
    if kind == "exact" and needs.is_stored(need) and _all_given(ins):
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


def is_of_cotangent(eqn: Equation, ins: Sequence[Facts]) -> bool:
    """Whether what ``eqn`` of a backward pass returns is made of a product's cotangent.

    It is made of that elementwise, so each of its entries has been rounded, and
    may be once more. Not behind a factor that was given, which may bring them out
    of range. And not copies: these were rounded alike, and their errors add up.
    """
    makes = table.multiplies(eqn) or table.adds_terms(eqn)
    if not makes or any([table.is_far(x.scalar) for x in ins]):
        return False
    if any(x.stored or (x.given and x.scalar is None) for x in ins):
        return False
    return any(x.cotangent and not x.broadcast for x in ins)


def _of_product(eqn: Equation, kind: Class, ins: Sequence[Facts]) -> int:
    """Returns how what ``eqn`` returns in float32 is made of a product, see `Facts`."""
    if kind == "product":
        return 2
    if kind not in ("exact", "smooth") and not table.is_power(eqn):
        return 0
    has_bias = table.joins(eqn) and _adds_bias(eqn, ins)
    made = [
        2 if x.half and x.stored is None else x.product
        for x, var in zip(ins, eqn.invars, strict=True)
        if is_float32(var) and x.scalar is None and not (has_bias and x.given)
    ]
    return min([*made, 1 if table.is_power(eqn) else 2]) if made else 0


def _adds_bias(eqn: Equation, ins: Sequence[Facts]) -> bool:
    """Whether the inputs of the program that a sum adds are biases, or numbers.

    A bias varies along one axis, and the sum repeats it along one before. What has
    an entry for each row, such as positions, may cancel behind the sum.
    """
    shape = eqn.outvars[0].aval.shape
    for x, var in zip(ins, eqn.invars, strict=True):
        if x.half or not x.given or x.scalar is not None:
            continue
        own = var.aval.shape or (1,) * len(shape)
        alike = [own[i] != n or i in x.repeated for i, n in enumerate(shape) if n != 1]
        if alike.count(False) != 1 or not alike[0]:
            return False
    return True


def _repeated(eqn: Equation, ins: Sequence[Facts]) -> tuple[int, ...]:
    """Returns the axes along which what ``eqn`` makes of inputs repeats entries."""
    shape = eqn.outvars[0].aval.shape
    if table.broadcasts(eqn):
        old = eqn.invars[0].aval.shape
        varies = [
            axis
            for i, axis in enumerate(eqn.params["broadcast_dimensions"])
            if old[i] == shape[axis] and i not in ins[0].repeated
        ]
        return tuple([i for i, n in enumerate(shape) if n != 1 and i not in varies])
    if table.transposes(eqn):
        old = eqn.params["permutation"]
        return tuple([i for i, axis in enumerate(old) if axis in ins[0].repeated])
    arrays = [x for x in zip(ins, eqn.invars, strict=True) if x[0].scalar is None]
    same = all([x.aval.shape == shape for _, x in arrays])
    keeps = table.is_elementwise(eqn) or table.keeps_magnitudes(eqn)
    if not (arrays and same and keeps):
        return ()
    return facts.repeated_by_all([x for x, _ in arrays])


def _of_float32(row: Row, usual: Rule = rules.FLOAT32) -> Rule:
    """Returns by what something is float32, if its consumers decide that."""
    need = row.need
    if need & needs.REGION:
        return usual  # what the user keeps, or nobody knows, reads it as it is
    if row.read.summed:
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


def _all_given(ins: Sequence[Facts]) -> bool:
    return all([x.given for x in ins])
