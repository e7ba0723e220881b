"""An autocast program in float32, with an operation wherever the plan rounds.

Each of these operations names the modules that decide it. Which they are, the plan is
asked: with one module more in float32, some roundings are gone.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._autocast import classes, facts, needs
from ..._autocast.analysis import BY_PATHS, Analysis
from ..._autocast.emit import Emitter
from ..._autocast.facts import GIVEN, Facts
from ..._autocast.graph import Trip, joined
from ..._autocast.plan import Plan, Planner, Step
from ..._base.dtypes import FLOAT8
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation, is_float32, is_inexact
from ..._jaxprs.scopes import FLOAT32_PATHS, Scopes, all_scopes, module_of
from ..._ops.fp8 import scaled
from ..._ops.precision import at_precision, with_default_precision
from ..._ops.products import is_convolution, with_precision
from ..._ops.table import ROUNDINGS, one_of
from ..._residuals.eight_bits import DTYPES, How, Stored, narrowed, widened

# These return what they are given. Their parameters say how `Program` rounds it.
rounded_p, rounded_product_p = map(_jaxpr.mark, ROUNDINGS)
is_marked = one_of(ROUNDINGS)

# An equation of a plan by its number, and by those of what holds it; and what is
# rounded there.
Site = tuple[Any, ...]
Parts = tuple[str, ...]
_HIGHEST = (lax.Precision.HIGHEST,) * 2
# What is rounded to 16 bits, and what of that stays finite; an operand of a product in
# float8, which has a scale; and the two formats of what is stored in eight bits.
Form = Literal["plain", "clipped", "scaled", "int8", "fp8"]


def rounded(x: Any, dtype: np.dtype, form: Form) -> jax.Array:
    """Returns a float32 array with the digits and the limits of a dtype."""
    if form in DTYPES:
        few, scale = narrowed(x, form)
        return widened(few, scale, x.dtype)
    if form == "scaled":
        few, unit = scaled(lax.convert_element_type(x, jnp.bfloat16))
        return few.astype(x.dtype) * unit.astype(x.dtype)
    if form == "clipped":
        limit = np.float32(jnp.finfo(dtype).max)
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x)
    return lax.convert_element_type(lax.convert_element_type(x, dtype), x.dtype)


class Value(NamedTuple):
    """A value of the program: float32, where the plan has 16 bits."""

    array: Any
    facts: Facts
    exact: Value | None = None  # what the trips add up, where others read it rounded

    def wide(self) -> Any:
        """Returns the array as float32 work reads it."""
        if self.facts.half and self.facts.kept:
            return self.array / jnp.sum(self.array, self.facts.kept, keepdims=True)
        return self.array


class RoundingEmitter(Emitter):
    """Emits plans in float32, with an operation wherever they round."""

    # Where it is differentiated, the plan is of both passes, and none of a rule.
    brings_gradient = True

    def __init__(self, planner: Planner, narrowed: Callable, depth: int | None = None):
        """Starts with nothing emitted; ``depth`` is how much of a path names a part."""
        around = _jaxpr.current_scopes()

        @functools.cache
        def named(scopes: Scopes) -> str:
            return part_of(around + scopes, depth)

        super().__init__(planner, functools.partial(narrowed, store_of=self._store_of))
        self.part_of = named

    def run(
        self, jaxpr: Any, arrays: Sequence[Any], scopes: Scopes | None = None
    ) -> list[jax.Array]:
        """Runs a whole program, a jaxpr, in float32 with the roundings of its plan."""
        assert scopes is None, "the rules of derivatives are not planned here"
        planner, count = self.planner, len(_jaxpr.out_avals(jaxpr))
        planner.mark(jaxpr, ())
        ins = [GIVEN] * len(_jaxpr.in_avals(jaxpr))
        trip = Trip((needs.FULL | needs.DIGITS,) * count)
        wanted: Any = jaxpr, ins, trip, ("wide",) * count, ()
        plan, sites = planner.plan(*wanted), dict[Site, Parts]()
        sites.update((x, ()) for x in _sites(plan))
        for part, is_in in self._parts(jaxpr):
            left = {*_sites(keeping(planner, is_in).plan(*wanted))}
            sites.update((x, (*sites[x], part)) for x in sites.keys() - left)
        emission = _Emission(sites)
        return with_default_precision(
            lambda *arrays: emission.program(jaxpr, plan, arrays), arrays
        )

    def _parts(self, jaxpr: Any) -> Iterator[tuple[str, Callable[[Scopes], bool]]]:
        """Yields the parts of a program, each with what tells whether scopes are it."""
        for part in dict.fromkeys(map(self.part_of, all_scopes(jaxpr))):
            yield part, lambda scopes, part=part: self.part_of(scopes) == part

    def _store_of(self, decided: Callable, jaxpr: Any, kind: str) -> Callable:
        """Returns what stores values whole, rounded where they are to be in 8 bits."""
        eight = {part: decided(is_in) for part, is_in in self._parts(jaxpr)}

        def store(var: Any, x: Any, how: How, maker: Equation | None) -> Stored:
            if how == "eight":
                by = tuple(part for part in eight if var not in eight[part])
                x = rounded_p.bind(x, dtype=DTYPES[kind], by=by, form=kind)
                if maker is not None and is_marked(maker):
                    x = rounded_p.bind(x, **maker.params)  # it is read in 16 bits
            return Stored("whole", jax.typeof(x), (x,))

        return store


def part_of(scopes: Scopes, depth: int | None = None) -> str:
    """Returns the module path in ``scopes``, so many names of it."""
    return "/".join(module_of(scopes).split("/")[:depth])


# Which modules decide a rounding.


class _Keeping(Analysis):
    """The analysis of a planner, with more kept in float32."""

    def __init__(self, analysis: Analysis, is_kept: Callable[[Scopes], bool]):
        """Starts with nothing analysed; the rewritten equations are shared."""
        vars(self).update(vars(analysis))
        self.plain, self.also = analysis, is_kept
        self._consumers = weakref.WeakKeyDictionary()

    def is_kept(self, scopes: Scopes) -> bool:
        """Whether the user keeps what is in ``scopes``, or that is tried."""
        return self.plain.is_kept(scopes) or self.also(scopes)

    def kind(self, eqn: Equation, scopes: Scopes) -> classes.Class:
        """Returns the class of an equation. What a call holds has parts of its own."""
        analysis = self.plain if _jaxpr.call_kind(eqn) else super()
        return analysis.kind(eqn, scopes)

    def relevant(self, scopes: Scopes) -> Scopes:
        """Returns that of ``scopes`` on which the analysis depends."""
        return scopes

    def _program(self, jaxpr: Any, scopes: Scopes) -> Any:
        return self.plain._program(jaxpr, scopes)


def keeping(planner: Planner, is_kept: Callable[[Scopes], bool]) -> Planner:
    """Returns what plans the same with more kept in float32, in the same equations."""
    return planner.with_analysis(_Keeping(planner.analysis, is_kept))


def _sites(plan: Plan, at: Site = ()) -> Iterator[Site]:
    """Yields all that a plan rounds."""
    for i, x in enumerate(plan.ins):
        if x.half:
            yield *at, "in", i
    for i, end in enumerate(plan.ends):
        if end in ("half", "stacked"):
            yield *at, "end", i
    for i, step in enumerate(plan.steps):
        here = (*at, i)
        for exact, one in (None, step), ("exact", step.exact or step):
            if _rounds_operands(one):
                yield *here, exact, "operands"
            for k, x in enumerate(one.outs):
                if x.half:
                    yield *here, exact, k
        if step.inside is not None:
            for k, how in enumerate(step.inside.passed):
                if isinstance(how, np.dtype):
                    yield *here, "passed", k
            for k, (_, inner) in enumerate(step.inside.bodies):
                yield from _sites(inner, (*here, "body", k))


def _rounds_operands(step: Step) -> bool:
    """Whether an equation rounds what it takes, if that has not been rounded yet."""
    if step.kind == "product" or step.float8 or step.how == "half":
        return True
    return step.how == "stored" and step.kind == "exact"


# The program.


class _Emission:
    """One program as it is emitted."""

    def __init__(self, sites: dict[Site, Parts]):
        """Starts with the parts that decide each rounding."""
        self.sites = sites
        self.rounded: dict[int, tuple[Any, Any, Parts]] = {}  # what, to which dtype

    def round(
        self,
        x: Any,
        dtype: np.dtype,
        at: Site,
        form: Form = "plain",
        rounding: Any = rounded_p,
    ) -> Any:
        """Returns an array with an operation that rounds it."""
        is_number = np.ndim(x) == 0 and not isinstance(x, jax.Array)
        if is_number and x == np.asarray(x, dtype):
            return x  # a number that the dtype has
        x, by = jnp.asarray(x), self.sites[at]
        _, before, known = self.rounded.get(id(x), (x, None, by))
        if before == dtype and set(known) <= set(by) and form in ("plain", "clipped"):
            return x  # it has been, wherever this rounds
        out = rounding.bind(x, dtype=dtype, by=by, form=form)
        self.rounded[id(out)] = out, dtype, by
        return out

    def program(self, jaxpr: Any, plan: Plan, arrays: Sequence[Any], at: Site = ()):
        """Emits a jaxpr under the ambient trace, which returns what it returned."""
        outs = self.emit(jaxpr, plan, arrays, at)
        return [*map(_jaxpr.with_type_of, outs, _jaxpr.out_avals(jaxpr))]

    def emit(self, jaxpr: Any, plan: Plan, arrays: Sequence[Any], at: Site) -> list:
        """Emits a jaxpr, and returns its outputs as planned, in float32."""
        steps, scopes = enumerate(plan.steps), dict[tuple[int, int], Any]()

        def apply(eqn: Equation, ins: list[Value]) -> list[Value]:
            i, step = next(steps)
            left = FLOAT32_PATHS if step.why == BY_PATHS else ""
            left = jax.named_scope(left) if left else contextlib.nullcontext()
            with _jaxpr.located_at(eqn, scopes), _jaxpr.context_of(eqn), left:
                return self.step(step, ins, (*at, i))

        def arrived(i: int, array: Any, known: Facts) -> Value:
            if known.exact is None:
                return Value(array, known)
            assert known.dtype is not None
            seen = self.round(array, known.dtype, (*at, "in", i))
            return Value(seen, known, Value(array, known.exact))

        pairs = zip(arrays, plan.ins, strict=True)
        outs = _jaxpr.interpret(
            jaxpr,
            [arrived(i, *pair) for i, pair in enumerate(pairs)],
            apply,
            eqns=[step.eqn for step in plan.steps],
            const=lambda array: Value(array, GIVEN),
            literal=lambda atom: Value(atom.val, facts.of_literal(atom)),
        )
        results = []
        for i, (out, end) in enumerate(zip(outs, plan.ends, strict=True)):
            if end in ("half", "stacked"):
                array = self.round(out.array, plan.dtype, (*at, "end", i))
            else:
                out = out.exact or out
                array = out.wide() if end == "wide" else out.array
            results.append(array)
        return results

    def step(self, step: Step, ins: list[Value], at: Site) -> list[Value]:
        """Emits an equation, and once more for what the trips add up."""
        arrays = self.applied(step, ins, (*at, None))
        outs = [*map(Value, arrays, step.outs)]
        if step.exact is not None:
            way = joined(starts for starts, _ in step.read.summed)
            ins = [x.exact or x if way >> i & 1 else x for i, x in enumerate(ins)]
            arrays = self.applied(step.exact, ins, (*at, "exact"))
            pairs = zip(outs, map(Value, arrays, step.exact.outs), strict=True)
            outs = [out._replace(exact=one) for out, one in pairs]
        return outs

    def applied(self, step: Step, ins: list[Value], at: Site) -> Sequence[Any]:
        """Emits an equation."""
        if step.inside is not None:
            return self.call(step, ins, at[:-1])
        eqn, dtype = step.eqn, step.dtype
        if step.kind == "call":
            return _jaxpr.bind(eqn, [x.array for x in ins])
        is_product = step.kind == "product" or step.float8
        arrays = [x.array if step.how == "half" else x.wide() for x in ins]
        if _rounds_operands(step):
            takes = classes.rounds(eqn) if is_product else [True] * len(ins)
            clips = step.kind != "product" and dtype == np.float16
            for i, (x, var) in enumerate(zip(ins, eqn.invars, strict=True)):
                rounds = is_inexact(var) if is_product else is_float32(var)
                if takes[i] and rounds:
                    form = "clipped" if clips else "plain"
                    arrays[i] = self.round(x.array, dtype, (*at, "operands"), form)
                    if step.float8:
                        few = arrays[i], FLOAT8, (*at, "operands"), "scaled"
                        arrays[i] = self.round(*few)
        if is_product:
            eqn = with_precision(eqn, _HIGHEST)
        outs = _jaxpr.bind(at_precision(eqn, step.precision), arrays)
        # cuDNN has no convolution of 16 bits that returns float32.
        firmly = is_product and not step.float8 and is_convolution(eqn)
        moves = step.kind == "exact" and step.how == "half"
        clips = dtype == np.float16 and step.how == "float32" and not step.back
        form = "clipped" if clips and is_product else "plain"
        rounding = rounded_product_p if is_product else rounded_p
        results = []
        for i, (x, known) in enumerate(zip(outs, step.outs, strict=True)):
            if known.half and not moves:
                x = self.round(x, dtype, (*at, i), form, rounding)
            elif firmly:
                x = self.round(x, dtype, (*at, "operands"), "plain", rounding)
            results.append(x)
        return results

    def call(self, step: Step, ins: list[Value], at: Site) -> Sequence[Any]:
        """Emits an equation that holds jaxprs."""
        eqn, within = step.eqn, step.inside
        assert within is not None
        arrays = [
            self.round(x.array, how, (*at, "passed", i))
            if isinstance(how, np.dtype)
            else x.wide()
            if how == "wide"
            else x.array
            for i, (x, how) in enumerate(zip(ins, within.passed, strict=True))
        ]
        kind = _jaxpr.call_kind(eqn)
        if kind in ("custom_jvp", "custom_vjp", "shard_map"):
            ((jaxpr, plan),) = within.bodies
            site = (*at, "body", 0)
            if kind == "shard_map":
                run = lambda *xs: self.program(jaxpr, plan, xs, site)  # noqa: E731
                return _jaxpr.bind_shard_map(eqn, arrays, run)
            return self.program(jaxpr, plan, arrays, site)
        bodies = []
        for i, (jaxpr, plan) in enumerate(within.bodies):
            site = (*at, "body", i)
            run = functools.partial(self.program, jaxpr, plan, at=site)
            new = _jaxpr.trace(lambda *xs, run=run: run(xs), _jaxpr.in_avals(jaxpr))
            bodies.append(_jaxpr.written_in(new, jaxpr))
        return _jaxpr.bind_bodies(eqn, arrays, bodies)
