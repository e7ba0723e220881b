"""Looking ahead: how autocast treats each equation, and what its results are for.

A plan is made of a jaxpr alone, from its end to its beginning, before anything is
emitted. What no product takes, neither directly nor through operations of the infer
list, is computed in float32: softmax logits, variances, gradients. And so is what a
steep function or a divisor is computed from elementwise: a probability next to its
logarithm. Products then round it for themselves.
"""

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from . import _jaxpr
from ._jaxpr import FLOAT32, Equation, is_float32, is_inexact
from ._op_lists import (
    CALLS,
    DEFAULT_OPS,
    HANDS_ON,
    STARTS,
    STEEP,
    VIEWS,
    OpLists,
    divisor,
    is_steep_power,
    scales_far,
)
from ._products import PRODUCTS, has_default_precision, is_matrix_product
from ._scopes import (
    KEPT_BY_OPS,
    KEPT_BY_PATHS,
    KEPT_BY_REFERENCE,
    Scopes,
    is_decided,
    is_under,
)

# How to treat an equation: give it 16-bit operands, let it follow its inputs, pass a
# value on whose type alone changes, go inside, or leave it in its original dtypes.
Rule = Literal["allow", "infer", "retype", "call", "deny"]

# What a value is wanted for: somebody would take it in 16 bits; nobody would; or
# somebody needs its last digits, so that it is not rounded.
Want = Literal["16-bit", "original", "digits"]

# Functions with backward rules of their own, and a mesh: float32 at their boundary.
_BOUNDARIES = {"custom_vjp", "shard_map"}

_16BIT = {np.dtype(jnp.float16), np.dtype(jnp.bfloat16)}


class Use(NamedTuple):
    """A variable, and what one of its readers does with it."""

    var: Any
    in_16bit: bool  # takes it in 16 bits
    otherwise: bool  # reads it, and is no product
    digits: bool  # needs its last digits


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to treat the equations of a jaxpr, and what its variables are used for.

    Attributes:
        eqns: The equations. Not the jaxpr: the plan must not keep it alive.
        rules: For each of them, how to treat it.
        in_16bit: Variables that somebody would take in 16 bits.
        otherwise: Variables that somebody reads who is no product.
        digits: Variables of which somebody needs the last digits.
    """

    eqns: Sequence[Equation]
    rules: Sequence[Rule]
    in_16bit: frozenset[Any]
    otherwise: frozenset[Any]
    digits: frozenset[Any]

    def wanted(self, eqn: Equation) -> tuple[Want, ...]:
        """Tells what each output of ``eqn`` is wanted for."""
        return _wanted(eqn.outvars, self.in_16bit, self.digits)

    def __str__(self) -> str:
        """Writes a line for each equation: its rule, its results, what they are for."""
        return "\n".join(
            f"{rule:<6}  {eqn.primitive.name:<24}"
            + ", ".join(
                f"{var.aval} {want}"
                for var, want in zip(eqn.outvars, self.wanted(eqn), strict=True)
            )
            for eqn, rule in zip(self.eqns, self.rules, strict=True)
        )


class Planner:
    """Plans jaxprs for one 16-bit dtype, one set of lists and one of paths."""

    def __init__(self, dtype: np.dtype, ops: OpLists, paths: Sequence[str] = ()):
        """Starts with nothing planned."""
        self.dtype = dtype
        self.ops = ops
        self.paths = {path: tuple(path.split("/")) for path in paths}
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
        if is_decided(scopes) or self._is_in_paths(scopes):
            return "deny"
        if name in ops.allow and _gains_from_16bit(eqn, self.dtype):
            return "allow"
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
        if self._is_in_paths(scopes):
            return KEPT_BY_PATHS
        if eqn.primitive.name in self._denied_by_user:
            return KEPT_BY_OPS
        if eqn.primitive.name in CALLS and _jaxpr.takes_reference(eqn):
            return KEPT_BY_REFERENCE
        return None

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
        return scopes if self.paths else ()

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
            "original" if want == "16-bit" and i in carried else want
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
                and var in self.plan(body.jaxpr, inside, scopes).digits
            }
            if all(inside[i] == "digits" for i in digits):
                return inside
            inside = tuple(
                "digits" if i in digits else want for i, want in enumerate(inside)
            )

    def _planned(self, jaxpr: Any, wanted: Sequence[Want], scopes: Scopes) -> Plan:
        in_16bit, otherwise, digits, rules = set(), set(), set(), []

        def note(uses):
            for use in uses:
                if isinstance(use.var, _jaxpr.Literal):
                    continue
                if use.in_16bit and is_float32(use.var):
                    in_16bit.add(use.var)
                if use.otherwise:
                    otherwise.add(use.var)
                if use.digits and is_inexact(use.var):
                    digits.add(use.var)

        note(
            Use(var, want == "16-bit", True, want == "digits")
            for var, want in zip(jaxpr.outvars, wanted, strict=False)
        )
        for eqn in reversed(jaxpr.eqns):
            here = scopes + _jaxpr.scope_names(eqn)
            rules.append(self.rule(eqn, here))
            wants = _wanted(eqn.outvars, in_16bit, digits)
            note(self._uses(eqn, rules[-1], wants, otherwise, here))
        sets = map(frozenset, (in_16bit, otherwise, digits))
        return Plan(jaxpr.eqns, rules[::-1], *sets)

    def _uses(
        self,
        eqn: Equation,
        rule: Rule,
        wanted: tuple[Want, ...],
        otherwise: set[Any],
        scopes: Scopes,
    ) -> Iterator[Use]:
        """Yields what ``eqn`` does with each of its inputs.

        Args:
            eqn: The equation.
            rule: How it is treated.
            wanted: What its outputs are wanted for.
            otherwise: Variables after it that somebody reads who is no product.
            scopes: Named scopes around it.
        """
        name, kind = eqn.primitive.name, _jaxpr.call_kind(eqn)
        if rule == "call" and kind not in _BOUNDARIES:
            yield from self._uses_inside(eqn, wanted, scopes)
            return
        passed = rule in ("infer", "retype")
        in_16bit = rule == "allow" or (passed and "16-bit" in wanted)
        in_16bit &= not scales_far(eqn)
        viewed = passed and name in VIEWS
        read = rule != "allow" and not (viewed and otherwise.isdisjoint(eqn.outvars))
        # Sums even out what was rounded; elementwise work hands it on.
        handed = name in self.ops.infer or name in HANDS_ON or rule == "retype"
        digits = name in STEEP or ("digits" in wanted and handed)
        inside = self._digits_inside(eqn, scopes) if kind in _BOUNDARIES else ()
        for i, var in enumerate(eqn.invars):
            exact = digits or i == divisor(eqn) or i in inside
            yield Use(var, in_16bit, read, exact)

    def _uses_inside(
        self, eqn: Equation, wanted: tuple[Want, ...], scopes: Scopes
    ) -> Iterator[Use]:
        """Yields what the jaxprs in ``eqn`` do with its inputs."""
        layout = _jaxpr.call_layout(eqn)
        wanted = self.wanted_inside(layout, wanted, scopes)
        for body in layout.bodies:
            plan = self.plan(body.jaxpr, wanted, scopes)
            inner = _jaxpr.in_vars(body.jaxpr)
            for i, var in zip(body.operands, inner, strict=True):
                fixed = i in layout.fixed_in
                yield Use(
                    eqn.invars[i],
                    in_16bit=var in plan.in_16bit and not fixed,
                    otherwise=var in plan.otherwise or fixed,
                    digits=var in plan.digits,
                )

    def _digits_inside(self, eqn: Equation, scopes: Scopes) -> set[int]:
        """Returns the inputs of which the body of ``eqn`` needs the last digits."""
        jaxpr = next(_jaxpr.sub_jaxprs(eqn))
        digits = self.plan(jaxpr, ("original",) * len(eqn.outvars), scopes).digits
        inner = _jaxpr.in_vars(jaxpr)
        return {i for i, var in enumerate(inner) if var in digits}

    def _is_in_paths(self, scopes: Scopes) -> bool:
        return any(is_under(path, scopes) for path in self.paths.values())


def _wanted(outs: Sequence[Any], in_16bit: Any, digits: Any) -> tuple[Want, ...]:
    return tuple(
        "digits" if var in digits else "16-bit" if var in in_16bit else "original"
        for var in outs
    )


def _stays_float32(eqn: Equation) -> bool:
    return is_float32(eqn.invars[0]) and is_float32(eqn.outvars[0])


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
