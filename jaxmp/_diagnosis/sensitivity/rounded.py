"""An autocast program in float32, with an operation wherever the plan rounds.

Each of these operations names the modules that decide it. Which they are, the plan is
asked: with one module more in float32, some roundings are gone.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._autocast import classes, customs, emit, needs
from ..._autocast.analysis import Analysis
from ..._autocast.emit import Emitter
from ..._autocast.facts import GIVEN
from ..._autocast.graph import Demand
from ..._autocast.plan import Plan, Planner, Step
from ..._base.dtypes import FLOAT8
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation, is_float32, is_inexact
from ..._jaxprs.scopes import Scopes, all_scopes, module_of
from ..._ops.fp8 import scaled
from ..._ops.precision import at_precision, with_default_precision
from ..._ops.products import is_convolution, with_precision
from ..._ops.table import ROUNDINGS, joins, one_of
from ..._residuals.eight_bits import DTYPES, How, Stored, narrowed, widened

# These return what they are given. Their parameters say how `Program` rounds it.
rounded_p, rounded_product_p = map(_jaxpr.mark, ROUNDINGS)
is_marked = one_of(ROUNDINGS)

# What is rounded, by the numbers of an equation and of those that hold it; and by the
# identity of the plan or the step that says so, whose field it is.
Path = tuple[Any, ...]
Site = tuple[Any, ...]
Parts = tuple[str, ...]
IsKept = Callable[[Scopes], bool]
_HIGHEST = (lax.Precision.HIGHEST,) * 2
# What is rounded to 16 bits, and what of that stays finite; an operand of a product in
# float8, which has a scale; and the two formats of what is stored in eight bits.
Form = Literal["plain", "clipped", "scaled", "int8", "fp8"]
IN_16_BITS = ("plain", "clipped")


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


class RoundedValue(emit.Value):
    """A value of the program: float32, where the plan has 16 bits."""

    def __post_init__(self):
        """Has nothing to check."""

    def wide(self) -> Any:
        """Returns the array as float32 work reads it."""
        if self.facts.stored:
            return self.array / jnp.sum(self.array, self.facts.stored, keepdims=True)
        return self.array


def _written_out(emitter: Emitter, step: Step, arrays: Sequence[Any]) -> list[Any]:
    """Applies a function with a derivative of its own, which nobody asks for."""
    assert step.inside is not None
    return emitter.as_written(*step.inside.bodies[0], *arrays)


class RoundingEmitter(Emitter):
    """Emits plans in float32, with an operation wherever they round."""

    value, rules = RoundedValue, dict.fromkeys(customs.RULES, _written_out)

    def __init__(
        self, planner: Planner, narrowed: Callable | None, depth: int | None = None
    ):
        """Starts with nothing emitted; ``depth`` is how much of a path names a part."""
        around = _jaxpr.current_scopes()

        @functools.cache
        def named(scopes: Scopes) -> str:
            return part_of(around + scopes, depth)

        if narrowed is not None:
            narrowed = functools.partial(narrowed, store_of=self._store_of)
        super().__init__(planner, narrowed)
        self.brings_gradient = True
        self.part_of = named
        self.parts: dict[Site, Parts] = {}  # of the program that is emitted
        self.rounded: dict[int, tuple[Any, Any, Parts]] = {}  # what, to which dtype

    def run(
        self, jaxpr: Any, arrays: Sequence[Any], scopes: Scopes | None = None
    ) -> list[jax.Array]:
        """Runs a whole program, a jaxpr, in float32 with the roundings of its plan."""
        assert scopes is None, "the rules of derivatives are not planned here"
        planner = self.planner.marked(jaxpr, ())
        ends: Any = ("wide",) * len(_jaxpr.out_avals(jaxpr))
        demand = Demand((needs.FULL | needs.DIGITS,) * len(ends))
        ins = (GIVEN,) * len(_jaxpr.in_avals(jaxpr))

        def planned(is_kept: IsKept) -> Plan:
            return _Trial(planner, is_kept).plan(jaxpr, ins, demand, ends, ())

        plan = planned(lambda scopes: False)
        trials = {x: dict(_sites(planned(is_in))) for x, is_in in self._parts(jaxpr)}
        self.parts = {
            site: tuple(x for x, left in trials.items() if path not in left)
            for path, site in _sites(plan)
        }
        self.rounded.clear()
        emitted = functools.partial(self.as_written, jaxpr, plan)
        return with_default_precision(emitted, arrays)

    def _parts(self, jaxpr: Any) -> Iterator[tuple[str, IsKept]]:
        """Yields the parts of a program, each with what says whether scopes are it."""
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

    def narrow_here(self, value: emit.Value, dtype: np.dtype, *site: Any) -> Any:
        return self.round(value.array, dtype, (id(site[0]), *site[1:]))

    def round(
        self,
        x: Any,
        dtype: np.dtype,
        site: Site,
        form: Form = "plain",
        rounding: Any = rounded_p,
    ) -> Any:
        """Returns an array with an operation that rounds it."""
        is_number = np.ndim(x) == 0 and not isinstance(x, jax.Array)
        if is_number and x == np.asarray(x, dtype):
            return x  # a number that the dtype has
        x, by = _jaxpr.as_array(x), self.parts[site]
        _, before, known = self.rounded.get(id(x), (x, None, by))
        if before == dtype and set(known) <= set(by) and form in IN_16_BITS:
            return x  # it has been, wherever this rounds
        out = rounding.bind(x, dtype=dtype, by=by, form=form)
        self.rounded[id(out)] = out, dtype, by
        return out

    def body(self, jaxpr: Any, plan: Plan) -> Any:
        """Returns a jaxpr as its plan says, with its own types."""
        emitted = functools.partial(self.as_written, jaxpr, plan)
        new = _jaxpr.trace(emitted, _jaxpr.in_avals(jaxpr))
        return _jaxpr.written_in(new, jaxpr)

    def apply(self, step: Step, ins: list[emit.Value]) -> Sequence[Any]:
        eqn, dtype = step.eqn, step.dtype
        is_product = step.kind == "product" or step.float8
        arrays = [x.array if step.how == "half" else x.wide() for x in ins]
        operands = id(step), "operands"
        if _rounds_operands(step):
            takes = classes.rounds(eqn) if is_product else [True] * len(ins)
            clips = joins(eqn) and dtype == np.float16
            for i, (x, var) in enumerate(zip(ins, eqn.invars, strict=True)):
                rounds = is_inexact(var) if is_product else is_float32(var)
                if takes[i] and rounds:
                    form = "clipped" if clips else "plain"
                    arrays[i] = self.round(x.array, dtype, operands, form)
                    if step.float8:
                        few = arrays[i], FLOAT8, operands, "scaled"
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
                x = self.round(x, dtype, (id(step), "out", i), form, rounding)
            elif firmly:
                x = self.round(x, dtype, operands, "plain", rounding)
            results.append(x)
        return results


def part_of(scopes: Scopes, depth: int | None = None) -> str:
    """Returns the module path in ``scopes``, so many names of it."""
    return "/".join(module_of(scopes).split("/")[:depth])


# Which modules decide a rounding.


class _Trial(Planner):
    """A planner that keeps more in float32, of the same equations.

    It plans each jaxpr anew wherever it is held, so that no two share a step.
    """

    def __init__(self, planner: Planner, is_kept: IsKept):
        vars(self).update(vars(planner))
        self.analysis = _Keeping(planner.analysis, is_kept)

    def plan(
        self, jaxpr: Any, ins: Any, demand: Demand, ends: Any, scopes: Scopes
    ) -> Plan:
        return self._plan(jaxpr, tuple(ins), demand, ends, scopes)


class _Keeping(Analysis):
    """The analysis of a planner, with more kept in float32."""

    def __init__(self, analysis: Analysis, is_kept: IsKept):
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
        return scopes

    def _program(self, jaxpr: Any, scopes: Scopes) -> Any:
        return self.plain._program(jaxpr, scopes)


def _sites(plan: Plan, at: Path = ()) -> Iterator[tuple[Path, Site]]:
    """Yields all that a plan rounds, by where it is in the program and in the plan."""
    for i, x in enumerate(plan.ins):
        if x.sum32 is not None:
            yield (*at, "in", i), (id(plan), "in", i)
    for i, end in enumerate(plan.ends):
        if end in ("half", "stacked"):
            yield (*at, "end", i), (id(plan), "end", i)
    for number, step in enumerate(plan.steps):
        for which, one in ("sum", step.sum32 or step), (None, step):
            here = *at, number, which
            if _rounds_operands(one):
                yield (*here, "operands"), (id(one), "operands")
            for i, x in enumerate(one.outs):
                if x.half:
                    yield (*here, "out", i), (id(one), "out", i)
        for one in (step, step.sum32):
            if one is None or one.inside is None:
                continue
            for i, how in enumerate(one.inside.passed):
                if isinstance(how, np.dtype):
                    yield (*at, number, "passed", i), (id(one), "passed", i)
            for i, (_, inner) in enumerate(one.inside.bodies):
                yield from _sites(inner, (*at, number, "body", i))


def _rounds_operands(step: Step) -> bool:
    """Whether an equation rounds what it takes, if that has not been rounded yet."""
    if step.kind == "product" or step.float8 or step.how == "half":
        return True
    return step.how == "stored" and step.kind == "exact"
