"""Looking ahead: how autocast treats each equation, and what its results are for.

A plan is made of a jaxpr alone, from its end to its beginning, before anything is
emitted. What no product takes, neither directly nor through operations of the infer
list, is computed in float32: softmax logits, variances, gradients. And so is what a
steep function or a divisor is computed from elementwise: a probability next to its
logarithm. Products then round it for themselves.
"""

import dataclasses
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from . import _jaxpr
from ._fp8 import why_16bit
from ._jaxpr import FLOAT32, Equation, is_float32, is_inexact
from ._norms import is_normed
from ._op_lists import (
    ADDS_UP,
    CALLS,
    COMPARES,
    DEFAULT_OPS,
    EQUALITIES,
    EXACT,
    FACTORS,
    GATHERS,
    HANDS_ON,
    JOINS,
    PICKS,
    POOLS,
    REVERSES,
    STARTS,
    STEEP,
    TOTALS,
    VIEWS,
    OpLists,
    axes_of_softmax,
    divisor,
    is_steep_power,
    only_compared,
    scales_far,
)
from ._products import PRODUCTS, has_default_precision, is_matrix_product
from ._scopes import (
    DIFFERENTIATED,
    KEPT_BY_BFLOAT16_PATHS,
    KEPT_BY_OPS,
    KEPT_BY_PATHS,
    KEPT_BY_REFERENCE,
    KEPT_IN_RULE,
    Scopes,
    inside,
    is_backward,
    is_decided,
    is_under,
    marks,
)
from ._uses import FOR_PRODUCT, IN_16BIT, USES, Use, Want

# How to treat an equation: give it 16-bit operands, let it follow its inputs, pass a
# value on whose type alone changes, go inside, or leave it in its original dtypes.
Rule = Literal["allow", "infer", "retype", "call", "deny"]


# Functions with backward rules of their own, and a mesh: float32 at their boundary.
_BOUNDARIES = {"custom_vjp", "shard_map"}

_16BIT = {np.dtype(jnp.float16), np.dtype(jnp.bfloat16)}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to treat the equations of a jaxpr, and what its variables are used for.

    Attributes:
        eqns: The equations. Not the jaxpr: the plan must not keep it alive.
        rules: For each of them, how to treat it.
        wants: For each of them, what each of its outputs is wanted for.
        uses: For each variable that is read, what its readers do with it.
        rounds: Whether every product returns 16 bits.
    """

    eqns: Sequence[Equation]
    rules: Sequence[Rule]
    wants: Sequence[tuple[Want, ...]]
    uses: Mapping[Any, int]
    rounds: bool = False

    def use(self, var: Any) -> int:
        """Tells what the readers of ``var`` do with it."""
        return self.uses.get(var, Use.NOTHING)

    def wanted(self, eqn: Equation) -> tuple[Want, ...]:
        """Tells what each output of ``eqn`` is wanted for, after its readers' plans."""
        wanted: tuple[Want, ...] = tuple(self.want(var) for var in eqn.outvars)
        if self.rounds and eqn.primitive.name in PRODUCTS:
            (out,), (want,) = eqn.outvars, wanted
            if want not in IN_16BIT and not self.use(out) & Use.REGION:
                return ("rounded",)
        return wanted

    def want(self, var: Any) -> Want:
        """Tells what ``var`` is wanted for."""
        use = self.use(var)
        if use & Use.DIGITS:
            return "digits"
        if use & ~Use.OTHERWISE == USES["multiplied"]:
            return "multiplied"
        if not use & Use.PRODUCT:
            return "16-bit" if use & Use.IN_16BIT else "original"
        if use & Use.COMPUTES or (use & Use.ADDS and use & Use.MULTIPLIES):
            return "product"
        if use & Use.ADDS:
            return "added"
        if use & Use.TOTALS:
            return "summed"
        return "kept" if use & Use.MULTIPLIES else "stored"

    def moves_in_16bit(self, eqn: Equation, rule: Rule, scopes: Scopes) -> bool:
        """Tells whether ``eqn`` gathers or reverses weights for 16 bits alone.

        They are rounded before. Gathered, they then travel so; and XLA knows the
        gradient of a convolution by a kernel that is reversed where it is taken. Not
        where their own gradient would add up over a loop, nor what the user reverses:
        it may have many readers, whose gradients would add up in 16 bits.

        Args:
            eqn: The equation.
            rule: How it is treated.
            scopes: Named scopes around it.
        """
        reverses = eqn.primitive.name in REVERSES and is_backward(eqn, scopes)
        if rule != "infer" or not (reverses or eqn.primitive.name in GATHERS):
            return False
        (out,) = eqn.outvars
        read = self.use(out) & (Use.IN_16BIT | Use.OTHERWISE | Use.TRIPS)
        in_16bit = read == Use.IN_16BIT or self.want(out) == "stored"
        return in_16bit and is_float32(eqn.invars[0])

    def pools_shared(self, eqn: Equation) -> bool:
        """Tells whether ``eqn`` pools what others take too, and not to compare it."""
        if eqn.primitive.name not in POOLS:
            return False
        readers = [other for other in self.eqns if eqn.invars[0] in other.invars]
        compares = [only_compared(other) is not None for other in readers]
        compares += [other.primitive.name in COMPARES for other in readers]
        return len(readers) - sum(compares) > 1

    def hands_on_pooled(self, eqn: Equation) -> bool:
        """Tells whether what ``eqn`` pools has other readers than products."""
        return eqn.primitive.name in POOLS and self.want(*eqn.outvars) != "stored"

    def axes_of_softmax(self, eqn: Equation) -> tuple[int, ...]:
        """Returns the axes over which the result of ``eqn`` sums to one, if any."""
        return axes_of_softmax(eqn, self._definition)

    def is_normed(self, eqn: Equation, ins: Sequence[Any]) -> bool:
        """Tells whether ``eqn`` returns what a norm does, given ``ins``."""
        return is_normed(eqn, self._definition, ins)

    def compares_twins(self, eqn: Equation) -> bool:
        """Tells whether ``eqn`` tests if a number equals what was written once more.

        ``f(x) == f(x).max()`` for one: only with all digits are both the same.
        """
        if eqn.primitive.name not in EQUALITIES:
            return False
        lhs, rhs = (self._chosen_from(var) for var in eqn.invars)
        return any(self._are_twins(a, b) for a in lhs for b in rhs - {a})

    def _are_twins(self, a: Any, b: Any) -> bool:
        """Tells whether two variables are computed in the same way."""
        one, other = self._definition(a), self._definition(b)
        if one is None or other is None or one.primitive is not other.primitive:
            return False
        return self._twins[a] is self._twins[b]  # They are rare, and found slowly.

    def _chosen_from(self, var: Any) -> set[Any]:
        """Returns ``var`` and what it was moved or chosen from."""
        found, rest = set(), [var]
        while rest:
            var = rest.pop()
            if isinstance(var, _jaxpr.Literal) or var in found or not is_float32(var):
                continue
            found.add(var)
            eqn = self._definition(var)
            if eqn is not None and eqn.primitive.name in EXACT:
                rest.extend(eqn.invars)
        return found

    def _definition(self, atom: Any) -> Equation | None:
        """Returns the equation that computes ``atom``, if it is here."""
        if isinstance(atom, _jaxpr.Literal):
            return None
        return self._definitions.get(atom)

    @functools.cached_property
    def _definitions(self) -> dict[Any, Equation]:
        return {var: eqn for eqn in self.eqns for var in eqn.outvars}

    @functools.cached_property
    def _twins(self) -> dict[Any, Any]:
        """For each computed variable the first one that is computed in the same way."""
        twins: dict[Any, Any] = {}
        seen: dict[Any, Any] = {}
        for eqn in self.eqns:
            ins = (
                (str(x.val), x.aval)
                if isinstance(x, _jaxpr.Literal)
                else twins.get(x, x)
                for x in eqn.invars
            )
            key = eqn.primitive, tuple(sorted(eqn.params.items())), tuple(ins)
            try:
                first = seen.setdefault(key, eqn.outvars)
            except TypeError:  # a parameter that cannot be compared
                first = eqn.outvars
            twins.update(zip(eqn.outvars, first, strict=True))
        return twins

    def __str__(self) -> str:
        """Writes a line for each equation: its rule, its results, what they are for."""
        return "\n".join(
            f"{rule:<6}  {eqn.primitive.name:<24}"
            + ", ".join(
                f"{var.aval} {want}"
                for var, want in zip(eqn.outvars, wanted, strict=True)
            )
            for eqn, rule, wanted in zip(self.eqns, self.rules, self.wants, strict=True)
        )


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
            memo[key] = self._planned(_jaxpr.open_jaxpr(jaxpr), wanted, scopes)
        return memo[key]

    def rule(self, eqn: Equation, scopes: Scopes) -> Rule:
        """Returns how to treat ``eqn``, which is in ``scopes``."""
        name, ops = eqn.primitive.name, self.ops
        if self._is_kept(scopes):
            return "deny"
        if name in ops.allow and _gains_from_16bit(eqn, self.dtype):
            return "allow"
        if self.float8 and name in ops.allow and _is_written_in(self.dtype, eqn):
            return "deny" if self.why_16bit(eqn, scopes, False) else "allow"
        is_told = _jaxpr.is_told_dtype(eqn)
        if name in ops.infer and not is_steep_power(eqn) and not is_told:
            return "infer"
        if _jaxpr.is_cast(eqn) and _stays_float32(eqn):
            return "retype"  # Only a weak type becomes a strong one.
        if name in CALLS and name not in ops.deny and not _jaxpr.takes_reference(eqn):
            return "call"
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
        if self.float8 and _is_written_in(self.dtype, eqn):
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

    def relevant(self, scopes: Scopes) -> Scopes:
        """Returns that of the scopes around a jaxpr on which its plan depends."""
        return scopes if self.paths or self.bfloat16_paths else marks(scopes)

    def wanted_inside(
        self,
        layout: _jaxpr.CallLayout,
        wanted: Sequence[Want],
        scopes: Scopes,
    ) -> tuple[Want, ...]:
        """Returns what is wanted of the bodies of an equation.

        A loop reads what it carries once more, and so does its test.
        """
        carried = layout.fixed_out
        inside: tuple[Want, ...] = tuple(
            "original" if want in IN_16BIT and i in carried else want
            for i, want in enumerate(wanted)
        )
        while True:
            digits = {
                carried[i - layout.fixed_in.start]
                for body in layout.bodies
                for i, var in zip(
                    body.operands, _jaxpr.in_vars(body.jaxpr), strict=True
                )
                if i in layout.fixed_in
                and self.plan(body.jaxpr, inside, scopes).use(var) & Use.DIGITS
            }
            if all(inside[i] == "digits" for i in digits):
                return inside
            inside = tuple(
                "digits" if i in digits else want for i, want in enumerate(inside)
            )

    def _planned(self, jaxpr: Any, wanted: Sequence[Want], scopes: Scopes) -> Plan:
        rules: list[Rule] = []
        wants: list[tuple[Want, ...]] = []
        uses: dict[Any, int] = {}
        plan = Plan(jaxpr.eqns, rules, wants, uses, self.ops.rounds_products)

        def note(var, use):
            if isinstance(var, _jaxpr.Literal):
                return
            if not is_float32(var):
                use &= ~(Use.PRODUCT | Use.IN_16BIT)
            if not is_inexact(var):
                use &= ~Use.DIGITS
            uses[var] = uses.get(var, Use.NOTHING) | use

        for var, want in zip(jaxpr.outvars, wanted, strict=False):
            note(var, USES[want] | Use.OTHERWISE)
        for eqn in reversed(jaxpr.eqns):
            here = scopes + _jaxpr.scope_names(eqn)
            rules.append(self.rule(eqn, here))
            wants.append(plan.wanted(eqn))
            for var, use in self._uses(eqn, rules[-1], plan, here):
                note(var, use)
        rules.reverse()
        wants.reverse()
        return plan

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
        kind = _jaxpr.call_kind(eqn)
        if rule == "call" and kind not in _BOUNDARIES:
            around = inside(eqn, scopes)
            yield from self._uses_inside(eqn, after.wants[-1], around)
            return
        use = self._use(eqn, rule, after, scopes)
        digits: set[int] = set()
        if kind in _BOUNDARIES:
            digits = self._digits_inside(eqn, inside(eqn, scopes))
        elif after.compares_twins(eqn):
            digits = {0, 1}
        compared = only_compared(eqn) if rule == "infer" else None
        exact = {*digits, divisor(eqn)}
        for i, var in enumerate(eqn.invars):
            uses = use | Use.DIGITS if i in exact else use
            yield var, Use.OTHERWISE if i == compared else uses

    def _use(self, eqn: Equation, rule: Rule, after: Plan, scopes: Scopes) -> int:
        """Tells what ``eqn``, which is in ``scopes``, does with all of its inputs."""
        name, wanted = eqn.primitive.name, after.wants[-1]
        use = Use.DIGITS if name in STEEP else Use.NOTHING
        # Sums even out what was rounded; elementwise work hands it on.
        handed = name in self.ops.infer or name in HANDS_ON or rule == "retype"
        if handed and "digits" in wanted:
            use |= Use.DIGITS
        if rule == "allow":
            return use | Use.PRODUCT | Use.IN_16BIT
        total = name in TOTALS and is_backward(eqn, scopes)
        if total and "digits" not in wanted and not self._is_kept(scopes):
            return use | Use.OTHERWISE | Use.TOTALS
        if rule not in ("infer", "retype"):
            use |= Use.OTHERWISE | Use.COMPUTES
            return use | Use.REGION if self._is_kept(scopes) else use
        if not IN_16BIT.isdisjoint(wanted) and not scales_far(eqn):
            use |= Use.IN_16BIT
        views = name in VIEWS or name in GATHERS or rule == "retype"
        picks = name in PICKS or rule == "retype"
        for_product = picks and not FOR_PRODUCT.isdisjoint(wanted)
        use |= Use.PRODUCT if for_product else Use.NOTHING
        moved = Use.NOTHING
        for var in eqn.outvars:
            moved |= after.use(var)
        if views:
            return use | moved & ~(Use.PRODUCT | Use.IN_16BIT | Use.DIGITS)
        use |= Use.OTHERWISE
        if picks:
            if wanted == ("multiplied",):
                return use | moved & (Use.MULTIPLIES | Use.TOTALS)
            # Who computes with what is chosen needs all that it is chosen from. But
            # what a product takes may be added to, as in a residual network.
            if for_product:
                moved &= ~Use.ADDS
            if moved & (Use.COMPUTES | Use.ADDS | Use.MULTIPLIES | Use.TOTALS):
                use |= Use.COMPUTES
            return use | moved & Use.REGION
        if name in COMPARES and all(
            isinstance(x, _jaxpr.Literal) for x in eqn.invars[1:]
        ):
            return use  # with a number
        if name in JOINS or name in ADDS_UP:
            return use | Use.ADDS
        backward = name in FACTORS and is_backward(eqn, scopes)
        return use | (Use.MULTIPLIES if backward else Use.COMPUTES)

    def _uses_inside(
        self, eqn: Equation, wanted: tuple[Want, ...], scopes: Scopes
    ) -> Iterator[tuple[Any, int]]:
        """Yields each input of ``eqn``, and what the jaxprs in it do with it."""
        layout = _jaxpr.call_layout(eqn)
        wanted = self.wanted_inside(layout, wanted, scopes)
        loops = _jaxpr.call_kind(eqn) in ("scan", "while")
        for body in layout.bodies:
            plan = self.plan(body.jaxpr, wanted, scopes)
            inner = _jaxpr.in_vars(body.jaxpr)
            written = is_written(plan, scopes)
            for i, var in zip(body.operands, inner, strict=True):
                use = plan.use(var)
                if loops and i < layout.fixed_in.start:
                    # Its gradient would add up in 16 bits, over all trips.
                    use |= Use.COMPUTES | (Use.NOTHING if written else Use.TRIPS)
                if i in layout.fixed_in:
                    lasting = Use.DIGITS | Use.REGION
                    use = use & lasting | Use.OTHERWISE | Use.COMPUTES
                yield eqn.invars[i], use

    def _digits_inside(self, eqn: Equation, scopes: Scopes) -> set[int]:
        """Returns the inputs of which the body of ``eqn`` needs the last digits."""
        jaxpr = next(_jaxpr.sub_jaxprs(eqn))
        plan = self.plan(jaxpr, ("original",) * len(eqn.outvars), scopes)
        inner = _jaxpr.in_vars(jaxpr)
        return {i for i, var in enumerate(inner) if plan.use(var) & Use.DIGITS}

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


def _is_written_in(dtype: np.dtype, eqn: Equation) -> bool:
    """Whether ``eqn`` is a product of operands of ``dtype``, at default precision."""
    if not is_matrix_product(eqn) or not has_default_precision(eqn):
        return False
    return all(atom.aval.dtype == dtype for atom in eqn.invars[:2])


def _gains_from_16bit(eqn: Equation, dtype: np.dtype) -> bool:
    """Whether ``eqn`` is a float32 product with sums in it, at default precision.

    Of a float32 and a 16-bit operand, or of two kinds of 16 bits, it is one as well:
    JAX promotes them. A product that was written in one kind of 16 bits is not. What
    else the user allows has no shape to look at.
    """
    ins = {atom.aval.dtype for atom in eqn.invars if is_inexact(atom)}
    outs = {atom.aval.dtype for atom in eqn.outvars if is_inexact(atom)}
    if not ins <= {FLOAT32, *_16BIT} or not outs <= {FLOAT32, dtype}:
        return False
    if len(ins) == 1 and FLOAT32 not in ins:
        return False
    is_product = eqn.primitive.name not in PRODUCTS or is_matrix_product(eqn)
    return is_product and has_default_precision(eqn)
