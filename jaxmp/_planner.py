"""Making plans: the rule of each equation, and what each value is wanted for."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from . import _jaxpr
from ._carries import bounded, carried_in_16bit, wanted_inside
from ._endings import with_endings
from ._fp8 import why_16bit
from ._gates import gates_in_row
from ._hoist import hoisted
from ._jaxpr import Equation, is_float32, is_inexact
from ._layers import residual_streams
from ._layouts import in_order
from ._moments import with_moments
from ._op_lists import (
    ADDS_AT,
    ADDS_UP,
    CALLS,
    COMPARES,
    DEFAULT_OPS,
    EQUALITIES,
    FACTORS,
    GATHERS,
    HANDS_ON,
    JOINS,
    PICKS,
    REDUCES,
    SQUASHES,
    STARTS,
    STEEP,
    TOTALS,
    VIEWS,
    OpLists,
    divisor,
    is_steep_power,
    only_compared,
    scales_far,
)
from ._plan import Plan, Rule
from ._products import (
    PRODUCTS,
    has_default_precision,
    has_float32,
    has_number,
    is_matrix_product,
    is_resize,
    is_sent_back_by_vector,
    is_written_in,
    vector_of,
)
from ._row_sums import with_row_sums
from ._scopes import (
    DIFFERENTIATED,
    KEPT_BY_BFLOAT16_PATHS,
    KEPT_BY_OPS,
    KEPT_BY_PATHS,
    KEPT_BY_REFERENCE,
    KEPT_IN_RULE,
    ROW_SUMS,
    Scopes,
    inside,
    is_backward,
    is_decided,
    is_under,
    marks,
)
from ._slopes import with_slopes
from ._trips import Factor, factors, handed_on
from ._uses import (
    EXACT,
    FOR_BACKWARD,
    FOR_PRODUCT,
    IN_16BIT,
    USES,
    Use,
    Want,
    as_written,
)

# Functions with backward rules of their own, and a mesh: float32 at their boundary.
_BOUNDARIES = {"custom_vjp", "shard_map"}


class Planner:
    """Plans jaxprs for one 16-bit dtype, one set of lists and one of paths."""

    def __init__(
        self,
        dtype: np.dtype,
        ops: OpLists,
        paths: Sequence[str] = (),
        *,
        float8: bool = False,
        bfloat16_paths: Sequence[str] = (),
    ):
        """Starts with nothing planned.

        Args:
            dtype: The 16-bit dtype.
            ops: The lists.
            paths: Scopes that stay float32.
            float8: Whether products are to take their operands in float8.
            bfloat16_paths: Scopes in which they take them in ``dtype``.
        """
        self.dtype = dtype
        self.ops = ops
        self.paths = _split(paths)
        self.float8 = float8
        self.bfloat16_paths = _split(bfloat16_paths)
        usual = DEFAULT_OPS.allow | DEFAULT_OPS.infer
        dropped = usual - ops.allow - ops.infer
        self._denied_by_user = dropped | ops.deny - DEFAULT_OPS.deny
        # By jaxpr, so that what JAX shares between calls and layers stays shared.
        self._plans: Any = weakref.WeakKeyDictionary()
        self._matters: Any = weakref.WeakKeyDictionary()
        self._eqns: Any = weakref.WeakKeyDictionary()
        self._split: Any = weakref.WeakSet()
        self._slopes: Any = weakref.WeakSet()
        # By open jaxpr, whether an image is resized there.
        self._resizing: Any = weakref.WeakKeyDictionary()
        # By open jaxpr, those of its variables that multiply a number many times.
        self._factors: Any = weakref.WeakKeyDictionary()
        # By the body of a loop, what its trips hand on without a product.
        self._handed_on: Any = weakref.WeakKeyDictionary()

    def find_factors(self, jaxpr: Any, scopes: Scopes) -> None:
        """Finds what multiplies a number many times in ``jaxpr``, loops or not.

        Before anything is planned: what a loop calls may be called elsewhere as well.

        Args:
            jaxpr: The jaxpr, open or closed.
            scopes: Named scopes around it.
        """
        self._find_in_loops(jaxpr, scopes)
        self._note_factors(gates_in_row(jaxpr, scopes))

    def _find_in_loops(self, jaxpr: Any, scopes: Scopes) -> None:
        for eqn in _jaxpr.open_jaxpr(jaxpr).eqns:
            if eqn.primitive.name not in CALLS:
                continue
            if _jaxpr.call_kind(eqn) in ("scan", "while"):
                self._find_factors_of(eqn, scopes)
            around = inside(eqn, scopes + _jaxpr.scope_names(eqn))
            for body in _jaxpr.sub_jaxprs(eqn):
                self._find_in_loops(body, around)

    def _note_factors(self, found: frozenset[Factor]) -> None:
        for owner, var in found:
            self._factors.setdefault(owner, set()).add(var)

    def _find_factors_of(self, loop: Equation, scopes: Scopes) -> None:
        around = inside(loop, scopes + _jaxpr.scope_names(loop))
        self._note_factors(factors(loop, self._is_product, around))

    def plan(self, jaxpr: Any, wanted: Sequence[Want], scopes: Scopes = ()) -> Plan:
        """Plans a jaxpr, open or closed.

        Args:
            jaxpr: The jaxpr.
            wanted: What its outputs are wanted for. The test of a loop has one output,
                and is given what is wanted of the body.
            scopes: Named scopes around it.
        """
        key = wanted, self.relevant(scopes)
        memo = self._plans.setdefault(jaxpr, {})
        if key not in memo:
            memo[key] = self._planned(jaxpr, wanted, scopes)
        return memo[key]

    def rule(
        self, eqn: Equation, scopes: Scopes, wanted: tuple[Want, ...] = ("original",)
    ) -> Rule:
        """Returns how to treat ``eqn``, which is in ``scopes``.

        Args:
            eqn: The equation.
            scopes: Named scopes around it.
            wanted: What its results are wanted for; float32 where it is not known.
        """
        name, ops = eqn.primitive.name, self.ops
        if self._is_kept(scopes):
            return "deny"
        if ROW_SUMS in scopes:
            return "row_sum" if name in PRODUCTS else "deny"
        allowed = name in ops.allow and has_float32(eqn, self.dtype)
        if allowed and (_has_sums(eqn) or _is_sent_or_resized(eqn, scopes, wanted)):
            return "allow"
        if self.float8 and name in ops.allow and is_written_in(self.dtype, eqn):
            return "deny" if self.why_16bit(eqn, scopes, False) else "allow"
        follows = name in ops.infer and not is_steep_power(eqn)
        if follows and not _jaxpr.is_told_dtype(eqn):
            return "infer"
        if _jaxpr.is_cast(eqn) and _stays_float32(eqn):
            return "retype"  # Only a weak type becomes a strong one.
        if name in CALLS and name not in ops.deny and not _jaxpr.takes_reference(eqn):
            return "deny" if self.is_slope(eqn) else "call"
        return "deny"

    def reason(self, eqn: Equation, scopes: Scopes) -> str | None:
        """Returns why ``eqn``, which is in ``scopes``, is denied, where only we know.

        The reason is the name of a scope, see :mod:`jaxmp._scopes`.
        """
        if is_decided(scopes):
            return None
        if _is_in(self.paths, scopes):
            return KEPT_BY_PATHS
        if eqn.primitive.name in self._denied_by_user:
            return KEPT_BY_OPS
        if eqn.primitive.name in CALLS and _jaxpr.takes_reference(eqn):
            return KEPT_BY_REFERENCE
        if self.float8 and is_written_in(self.dtype, eqn):
            return self.why_16bit(eqn, scopes, False)
        return None

    def why_16bit(self, eqn: Equation, scopes: Scopes, linear: bool) -> str | None:
        """Returns why an allowed ``eqn``, in ``scopes``, does not run in float8.

        None if it does. The reason is the name of a scope, empty where there is none.
        What is ``linear`` is to be transposed, which finding a scale cannot be.
        """
        if not self.float8:
            return ""
        reason = why_16bit(eqn, self.ops.min_size)
        if reason is None and _is_in(self.bfloat16_paths, scopes):
            return KEPT_BY_BFLOAT16_PATHS
        return KEPT_IN_RULE if reason is None and linear else reason

    def has_factors(self, jaxpr: Any) -> bool:
        """Whether :meth:`find_factors` has found something in ``jaxpr``."""
        return _jaxpr.open_jaxpr(jaxpr) in self._factors

    def matters(self, jaxpr: Any) -> bool:
        """Whether there is something in ``jaxpr`` to decide or to know.

        16-bit values may begin there, or embeddings, or be kept from it by the user.
        """
        if jaxpr not in self._matters:
            starts = self.ops.allow | self._denied_by_user | STARTS
            self._matters[jaxpr] = any(
                eqn.primitive.name in starts
                or any(map(self.matters, _jaxpr.sub_jaxprs(eqn)))
                for eqn in _jaxpr.open_jaxpr(jaxpr).eqns
            )
        return self._matters[jaxpr]

    def _resizes(self, eqn: Equation) -> bool:
        """Whether ``eqn`` resizes an image, also in a function that it calls."""
        if _jaxpr.call_kind(eqn) != "jit":
            return is_resize(eqn)
        body = _jaxpr.open_jaxpr(next(_jaxpr.sub_jaxprs(eqn)))
        if body not in self._resizing:
            self._resizing[body] = any(map(self._resizes, body.eqns))
        return self._resizing[body]

    def relevant(self, scopes: Scopes) -> Scopes:
        """Returns that of the scopes around a jaxpr on which its plan depends."""
        return scopes if self.paths or self.bfloat16_paths else marks(scopes)

    def is_split(self, loop: Equation) -> bool:
        """Whether ``loop`` is what is left of one with products that now follow it."""
        return loop.params["jaxpr"] in self._split

    def is_slope(self, eqn: Equation) -> bool:
        """Whether ``eqn`` computes a slope that the backward pass alone reads."""
        return eqn.params.get("jaxpr") in self._slopes

    def carried_in_16bit(
        self, eqn: Equation, wanted: Sequence[Want], scopes: Scopes
    ) -> frozenset[int]:
        """Returns which outputs of an equation are carried in 16 bits, as a loop may.

        Args:
            eqn: A call, a loop or a choice.
            wanted: What is wanted of its outputs.
            scopes: Named scopes around its bodies.
        """
        if _jaxpr.call_kind(eqn) not in ("scan", "while"):
            return frozenset()
        growing, streams = self._handed_on_by(eqn, scopes)
        wanted = bounded(eqn, wanted, self.dtype)
        return carried_in_16bit(
            eqn, wanted, growing - streams.keys(), self._in_scopes(scopes)
        )

    def weights_of_streams(
        self, eqn: Equation, scopes: Scopes
    ) -> dict[int, frozenset[int]]:
        """Returns which inputs of a loop are weights, by output they add to.

        See :func:`jaxmp._layers.residual_streams`.
        """
        return self._handed_on_by(eqn, scopes)[1]

    def _handed_on_by(
        self, loop: Equation, scopes: Scopes
    ) -> tuple[frozenset[int], dict[int, frozenset[int]]]:
        """Returns what a loop hands on without a product, and its residual streams."""
        layout = _jaxpr.call_layout(loop)
        memo = self._handed_on.setdefault(layout.bodies[-1].jaxpr, {})
        # JAX may share a body between loops of different lengths.
        key = layout.fixed_in, loop.params.get("length"), self.relevant(scopes)
        if key not in memo:
            growing = handed_on(loop, self._is_product, scopes)
            memo[key] = growing, residual_streams(loop, self._is_product, scopes)
        return memo[key]

    def wanted_inside(
        self,
        eqn: Equation,
        wanted: Sequence[Want],
        scopes: Scopes,
        narrow: frozenset[int],
    ) -> tuple[Want, ...]:
        """Returns what is wanted of the bodies of an equation.

        Args:
            eqn: A call, a loop or a choice.
            wanted: What is wanted of its outputs.
            scopes: Named scopes around its bodies.
            narrow: Which of its outputs it carries in 16 bits.
        """
        wanted = bounded(eqn, wanted, self.dtype)
        return wanted_inside(eqn, wanted, narrow, self._in_scopes(scopes))

    def _in_scopes(self, scopes: Scopes) -> Callable[[Any, Sequence[Want]], Plan]:
        return lambda jaxpr, wanted: self.plan(jaxpr, wanted, scopes)

    def _planned(self, jaxpr: Any, wanted: Sequence[Want], scopes: Scopes) -> Plan:
        rules: list[Rule] = []
        wants: list[tuple[Want, ...]] = []
        uses: dict[Any, int] = {}
        eqns = self._hoisted(jaxpr, scopes)
        returned = frozenset(
            var
            for var, want in zip(_jaxpr.open_jaxpr(jaxpr).outvars, wanted, strict=False)
            if want not in FOR_BACKWARD and not isinstance(var, _jaxpr.Literal)
        )
        rounds = self.ops.rounds_products
        plan = Plan(eqns, rules, wants, uses, rounds, returned)

        def note(var, use):
            if isinstance(var, _jaxpr.Literal):
                return
            if var in multiply:
                use |= Use.GATE
            if not is_float32(var):
                use &= ~(Use.PRODUCT | Use.IN_16BIT)
                if not is_inexact(var):
                    use &= ~(Use.EXACT | Use.RESULT | Use.OFFSET | Use.PART)
            uses[var] = uses.get(var, Use.NOTHING) | use

        body = _jaxpr.open_jaxpr(jaxpr)
        multiply = self._factors.get(body, ())
        for var, want in zip(body.outvars, wanted, strict=False):
            note(var, USES[want] | Use.OTHERWISE)
        for eqn in reversed(eqns):
            here = scopes + _jaxpr.scope_names(eqn)
            wants.append(plan.wanted(eqn))
            if self._resizes(eqn) and plan.is_subtracted(eqn):
                wants[-1] = ("digits",) * len(wants[-1])
            rules.append(self.rule(eqn, here, wants[-1]))
            for var, use in self._uses(eqn, rules[-1], plan, here):
                note(var, use)
        rules.reverse()
        wants.reverse()
        return plan

    def _hoisted(self, jaxpr: Any, scopes: Scopes) -> Sequence[Equation]:
        """Returns the equations of ``jaxpr`` as they are planned."""
        memo, key = self._eqns.setdefault(jaxpr, {}), self.relevant(scopes)
        if key not in memo:
            eqns = in_order(jaxpr, scopes, self._is_product)
            eqns = with_moments(eqns, jaxpr, scopes)
            eqns = with_endings(eqns, scopes, self._is_product)
            eqns, slopes = with_slopes(
                eqns,
                _jaxpr.open_jaxpr(jaxpr).outvars,
                lambda eqn: self.rule(eqn, scopes + _jaxpr.scope_names(eqn)) != "deny",
            )
            self._slopes.update(slope.params["jaxpr"] for slope in slopes)
            eqns = with_row_sums(eqns, scopes, self._is_product, self._is_kept)
            memo[key], split = hoisted(eqns, scopes, self._is_product)
            self._split.update(loop.params["jaxpr"] for loop in split)
            for loop in split:
                self._find_factors_of(loop, scopes)
        return memo[key]

    def _uses(
        self, eqn: Equation, rule: Rule, after: Plan, scopes: Scopes
    ) -> Iterator[tuple[Any, int]]:
        """Yields each input of ``eqn``, and what ``eqn`` does with it.

        Args:
            eqn: The equation.
            rule: How it is treated.
            after: The plan from the end to here; the last of its wants are of ``eqn``.
            scopes: Named scopes around it.
        """
        holds = eqn.primitive.name in CALLS
        boundary = holds and _jaxpr.call_kind(eqn) in _BOUNDARIES
        around = inside(eqn, scopes) if holds else scopes
        if rule == "call" and not boundary:
            rounds = self._rounds_slope(eqn, after, scopes)
            for var, use in self._uses_inside(eqn, after.wants[-1], around):
                yield var, use & ~(Use.DIGITS | Use.OFFSETS) if rounds else use
            if rounds and (x := after.bounded_input(eqn)) is not None:
                yield x, Use.BOUNDED
            return
        if rule == "row_sum":
            total = vector_of(eqn)
            for i, var in enumerate(eqn.invars):
                yield var, Use.OTHERWISE | USES["original" if i == total else "stored"]
            return
        use = self._use(eqn, rule, after, scopes)
        rounds = eqn.primitive.name in STEEP and not use & Use.DIGITS
        if rounds and (x := after.bounded_input(eqn)) is not None:
            yield x, Use.BOUNDED
        digits: set[int] = set()
        if boundary:
            digits = self._digits_inside(eqn, after.wants[-1], around)
        elif holds and not _jaxpr.takes_reference(eqn):
            # What is kept in float32 reads the digits that it would read elsewhere.
            for var, inner in self._uses_inside(eqn, after.wants[-1], around):
                yield var, inner & Use.EXACT
        elif eqn.primitive.name in EQUALITIES and after.compares_twins(eqn):
            digits = {0, 1}
        compared = only_compared(eqn) if rule == "infer" else None
        exact = {*digits, divisor(eqn)}
        dropped = None
        if rule == "infer" and after.wants[-1] == ("stored",):
            dropped = after.drops_out(eqn)
        # A scatter takes what it adds to, the places, and the terms.
        adds_at = rule == "deny" and self._sums_up(eqn, ADDS_AT, after, scopes)
        terms = 2 if adds_at else None
        for i, var in enumerate(eqn.invars):
            uses = use | Use.DIGITS if i in exact else use
            if i == terms:
                uses = Use.OTHERWISE | USES["terms"]
            if i == dropped:
                uses = uses & ~Use.COMPUTES | Use.PRODUCT
            yield var, Use.OTHERWISE if i == compared else uses

    def _use(self, eqn: Equation, rule: Rule, after: Plan, scopes: Scopes) -> int:
        """Tells what ``eqn``, which is in ``scopes``, does with all of its inputs."""
        name, wanted = eqn.primitive.name, after.wants[-1]
        steep = name in STEEP and not self._rounds_slope(eqn, after, scopes)
        use = Use.DIGITS if steep else Use.NOTHING
        # Sums even out what was rounded; elementwise work hands it on.
        handed = name in self.ops.infer or name in HANDS_ON or rule == "retype"
        if handed and "digits" in wanted:
            use |= Use.DIGITS
        # A sigmoid hardly changes near one, so that its input may be rounded.
        if handed and "gate" in wanted and name not in SQUASHES:
            use |= Use.GATE
        if rule == "allow":
            return use | Use.PRODUCT | Use.IN_16BIT
        if not is_backward(eqn, scopes):
            use |= self._use_for_results(eqn, after, handed)
        if self._sums_up(eqn, TOTALS, after, scopes):
            return use | Use.OTHERWISE | Use.TOTALS
        if rule not in ("infer", "retype"):
            use |= Use.OTHERWISE | Use.COMPUTES
            return use | Use.REGION if self._is_kept(scopes) else use
        if not IN_16BIT.isdisjoint(wanted) and not scales_far(eqn):
            use |= Use.IN_16BIT
        views = name in VIEWS or name in GATHERS or rule == "retype"
        multiplied = wanted == ("multiplied",)
        pools = multiplied and only_compared(eqn) is not None
        picks = name in PICKS or rule == "retype" or pools
        for_product = picks and not FOR_PRODUCT.isdisjoint(wanted)
        use |= Use.PRODUCT if for_product else Use.NOTHING
        moved = after.read(eqn)
        if views:
            return use | moved & ~(Use.PRODUCT | Use.IN_16BIT | Use.EXACT)
        use |= Use.OTHERWISE
        if picks:
            if multiplied:
                return use | moved & (Use.MULTIPLIES | Use.TOTALS)
            # Who computes with what is chosen needs all that it is chosen from. But
            # what a product takes may be added to, as in a residual network.
            if for_product:
                moved &= ~Use.ADDS
            computes = Use.COMPUTES | Use.ADDS | Use.MULTIPLIES | Use.TERMS
            use |= Use.COMPUTES if moved & computes else Use.NOTHING
            return use | moved & (Use.TOTALS | Use.REGION)
        if name in COMPARES and all(
            isinstance(x, _jaxpr.Literal) for x in eqn.invars[1:]
        ):
            return use  # with a number
        if name in ADDS_UP and wanted == ("terms",):
            return use | USES["terms"]
        if name in JOINS or name in ADDS_UP:
            return use | Use.ADDS
        backward = name in FACTORS and is_backward(eqn, scopes)
        if not backward:
            return use | Use.COMPUTES
        if wanted == ("terms",) and not scales_far(eqn):
            use |= Use.IN_16BIT  # before they are added up, each of them is rounded
        wide = Use.NOTHING if use & Use.IN_16BIT else Use.WIDE
        return use | Use.MULTIPLIES | wide

    def _use_for_results(self, eqn: Equation, after: Plan, handed: bool) -> int:
        """Tells what ``eqn`` does for who subtracts or returns what is made of it.

        Args:
            eqn: An equation of the forward pass, no product.
            after: The plan from the end to here.
            handed: Whether it hands on what it is given, elementwise.
        """
        read = after.read(eqn)
        result, name = read & Use.RESULT, eqn.primitive.name
        if after.subtracts(eqn):
            return result | Use.OFFSET
        # A large offset is squashed. Many factors, or neighbours, make others of it.
        mixes = name in REDUCES or (name in FACTORS and not has_number(eqn))
        if not handed or name in SQUASHES or (mixes and not result):
            return result
        moved = read & Use.OFFSETS
        if name in JOINS:
            moved = Use.PART if moved & Use.OFFSET else Use.NOTHING
        return result | moved

    def _sums_up(
        self, eqn: Equation, names: Set[str], after: Plan, scopes: Scopes
    ) -> bool:
        """Tells whether ``eqn``, one of ``names``, sums up what may have been rounded.

        In the backward pass, and for who needs no digits of the sum.
        """
        named = eqn.primitive.name in names and is_backward(eqn, scopes)
        return named and EXACT.isdisjoint(after.wants[-1]) and not self._is_kept(scopes)

    def _rounds_slope(self, eqn: Equation, after: Plan, scopes: Scopes) -> bool:
        """Tells whether what ``eqn`` is computed from may be rounded, as for `erf`."""
        wanted = after.wants[-1]
        free = EXACT.isdisjoint(wanted) and not self._is_kept(scopes)
        # Of what a loss is made of, nobody wants 16 bits.
        in_16bit = free and IN_16BIT.issuperset(wanted)
        if in_16bit and after.bounded_input(eqn) is not None:
            return True
        return free and after.is_slope_of_erf(eqn)

    def _uses_inside(
        self, eqn: Equation, wanted: tuple[Want, ...], scopes: Scopes
    ) -> Iterator[tuple[Any, int]]:
        """Yields each input of ``eqn``, and what the jaxprs in it do with it."""
        layout = _jaxpr.call_layout(eqn)
        narrow = self.carried_in_16bit(eqn, wanted, scopes)
        wanted = self.wanted_inside(eqn, wanted, scopes, narrow)
        kind = _jaxpr.call_kind(eqn)
        loops = kind in ("scan", "while")
        for body in layout.bodies:
            plan = self.plan(body.jaxpr, wanted, scopes)
            inner = _jaxpr.in_vars(body.jaxpr)
            written = is_written(plan, scopes)
            for i, var in zip(body.operands, inner, strict=True):
                use = plan.use(var)
                if loops and i < layout.fixed_in.start:
                    # Its gradient would add up in 16 bits, over all trips.
                    use |= Use.COMPUTES | (Use.NOTHING if written else Use.TRIPS)
                carried = i - layout.fixed_in.start
                if i in layout.fixed_in and layout.fixed_out[carried] not in narrow:
                    lasting = Use.EXACT | Use.REGION | Use.RESULT | Use.OFFSET
                    use = use & lasting | Use.OTHERWISE | Use.COMPUTES
                yield eqn.invars[i], use

    def _digits_inside(
        self, eqn: Equation, wanted: Sequence[Want], scopes: Scopes
    ) -> set[int]:
        """Returns the inputs of which the body of ``eqn`` needs the last digits."""
        jaxpr = next(_jaxpr.sub_jaxprs(eqn))
        plan = self.plan(jaxpr, as_written(wanted), scopes)
        inner = _jaxpr.in_vars(jaxpr)
        return {i for i, var in enumerate(inner) if plan.use(var) & Use.EXACT}

    def _is_product(self, eqn: Equation, scopes: Scopes) -> bool:
        return self.rule(eqn, scopes) == "allow"

    def _is_kept(self, scopes: Scopes) -> bool:
        return is_decided(scopes) or _is_in(self.paths, scopes)


def is_written(plan: Plan, scopes: Scopes) -> bool:
    """Whether differentiation has written what is planned, which is in ``scopes``."""
    return DIFFERENTIATED in scopes or any(map(_jaxpr.is_differentiated, plan.eqns))


def _split(paths: Sequence[str]) -> dict[str, Scopes]:
    return {path: tuple(path.split("/")) for path in paths}


def _is_in(paths: Mapping[str, Scopes], scopes: Scopes) -> bool:
    return bool(paths) and any(is_under(path, scopes) for path in paths.values())


def _stays_float32(eqn: Equation) -> bool:
    return is_float32(eqn.invars[0]) and is_float32(eqn.outvars[0])


def _has_sums(eqn: Equation) -> bool:
    """Whether ``eqn`` is a product with sums in it, at default precision.

    What else the user allows has no shape to look at.
    """
    is_product = eqn.primitive.name not in PRODUCTS or is_matrix_product(eqn)
    return is_product and has_default_precision(eqn)


def _is_sent_or_resized(eqn: Equation, scopes: Scopes, wanted: Sequence[Want]) -> bool:
    """Whether ``eqn`` is a product for those who want its result in 16 bits.

    That is what resizes an image, whose precision no user asks for, and the outer
    product that a product by a vector sends back. Not if others compute with what
    products take.
    """
    if IN_16BIT.isdisjoint(wanted) or "product" in wanted:
        return False
    if is_resize(eqn):
        return True
    sent_back = is_backward(eqn, scopes) and is_sent_back_by_vector(eqn)
    return sent_back and has_default_precision(eqn)
