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
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from . import _jaxpr
from ._jaxpr import Equation, is_float32, is_inexact
from ._op_lists import (
    CALLS,
    DEFAULT_OPS,
    HANDS_ON,
    STARTS,
    STEEP,
    VIEWS,
    OpLists,
    divisor,
    is_square,
    scales_far,
)
from ._products import PRODUCTS, has_default_precision, is_matrix_product
from ._scopes import (
    KEPT_BY_OPS,
    KEPT_BY_PATHS,
    KEPT_BY_REFERENCE,
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

_FLOAT32 = np.dtype(np.float32)
_16BIT = {np.dtype(jnp.float16), np.dtype(jnp.bfloat16)}


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to treat the equations of a jaxpr, and what its variables are used for.

    Attributes:
        jaxpr: The open jaxpr.
        rules: For each of its equations, how to treat it.
        narrow: Variables that somebody would take in 16 bits.
        other: Variables that somebody reads who is no product.
        steep: Variables of which somebody needs the last digits.
    """

    jaxpr: Any
    rules: Sequence[Rule]
    narrow: frozenset[Any]
    other: frozenset[Any]
    steep: frozenset[Any]

    def wanted(self, eqn: Equation) -> tuple[Want, ...]:
        """Tells what each output of ``eqn`` is wanted for."""
        return _wanted(eqn.outvars, self.narrow, self.steep)

    def __str__(self) -> str:
        """Writes a line for each equation: its rule, its results, what they are for."""
        return "\n".join(
            f"{rule:<6}  {eqn.primitive.name:<24}"
            + ", ".join(
                f"{var.aval} {want}"
                for var, want in zip(eqn.outvars, self.wanted(eqn), strict=True)
            )
            for eqn, rule in zip(self.jaxpr.eqns, self.rules, strict=True)
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

    def plan(
        self, jaxpr: Any, wanted: Sequence[Want], scope: tuple[str, ...] = ()
    ) -> Plan:
        """Plans a jaxpr, open or closed.

        Args:
            jaxpr: The jaxpr.
            wanted: What its outputs are wanted for. The test of a loop has one output,
                and is given what is wanted of the body.
            scope: Named scopes around it.
        """
        key = wanted, self.relevant(scope)
        memo = self._plans.setdefault(jaxpr, {})
        if key not in memo:
            memo[key] = self._planned(_jaxpr.open_jaxpr(jaxpr), wanted, scope)
        return memo[key]

    def rule(self, eqn: Equation, scope: tuple[str, ...]) -> Rule:
        """Returns how to treat ``eqn``, which is in ``scope``."""
        name, ops = eqn.primitive.name, self.ops
        if is_decided(scope) or self._is_in_paths(scope):
            return "deny"
        if name in ops.allow and _gains_from_16bit(eqn, self.dtype):
            return "allow"
        # From 0.10 on `mul` may be told the dtype of its result.
        told = eqn.params.get("out_dtype") is not None
        if name in ops.infer and not is_square(eqn) and not told:
            return "infer"
        if _jaxpr.is_cast(eqn) and _stays_float32(eqn):
            return "retype"  # Only a weak type becomes a strong one.
        if name in CALLS and name not in ops.deny and not _jaxpr.takes_reference(eqn):
            return "call"
        return "deny"

    def reason(self, eqn: Equation, scope: tuple[str, ...]) -> str | None:
        """Returns why ``eqn``, which is in ``scope``, is denied, where only we know.

        The reason is the name of a scope, see :mod:`jaxmp._scopes`.
        """
        if is_decided(scope):
            return None
        if self._is_in_paths(scope):
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

    def relevant(self, scope: tuple[str, ...]) -> tuple[str, ...]:
        """Returns that of the scopes around a jaxpr on which its plan depends."""
        return scope if self.paths else ()

    def wanted_inside(
        self,
        layout: _jaxpr.CallLayout,
        wanted: Sequence[Want],
        scope: tuple[str, ...],
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
            steep = {
                carried[i - layout.fixed_in.start]
                for body in layout.bodies
                for i, var in zip(
                    body.operands, _jaxpr.open_jaxpr(body.jaxpr).invars, strict=True
                )
                if i in layout.fixed_in
                and var in self.plan(body.jaxpr, inside, scope).steep
            }
            if all(inside[i] == "digits" for i in steep):
                return inside
            inside = tuple(
                "digits" if i in steep else want for i, want in enumerate(inside)
            )

    def _planned(
        self, jaxpr: Any, wanted: Sequence[Want], scope: tuple[str, ...]
    ) -> Plan:
        narrow, other, steep, rules = set(), set(), set(), []

        def note(uses):
            for var, take, read, digits in uses:
                if not isinstance(var, _jaxpr.Literal):
                    narrow.update([var] if take and is_float32(var) else ())
                    other.update([var] if read else ())
                    steep.update([var] if digits and is_inexact(var) else ())

        note(
            (var, want == "16-bit", True, want == "digits")
            for var, want in zip(jaxpr.outvars, wanted, strict=False)
        )
        for eqn in reversed(jaxpr.eqns):
            here = scope + _jaxpr.scope_names(eqn)
            rules.append(self.rule(eqn, here))
            wants = _wanted(eqn.outvars, narrow, steep)
            note(self._uses(eqn, rules[-1], wants, other, here))
        sets = frozenset(narrow), frozenset(other), frozenset(steep)
        return Plan(jaxpr, rules[::-1], *sets)

    def _uses(
        self,
        eqn: Equation,
        rule: Rule,
        wanted: tuple[Want, ...],
        other: set[Any],
        scope: tuple[str, ...],
    ) -> Iterator[tuple[Any, bool, bool, bool]]:
        """Yields, for each input of ``eqn``, which of the three sets it belongs to."""
        name, kind = eqn.primitive.name, _jaxpr.call_kind(eqn)
        if rule == "call" and kind not in _BOUNDARIES:
            yield from self._uses_inside(eqn, wanted, scope)
            return
        passed = rule in ("infer", "retype")
        take = rule == "allow" or (passed and "16-bit" in wanted)
        take &= not scales_far(eqn)
        viewed = passed and name in VIEWS
        read = rule != "allow" and not (viewed and other.isdisjoint(eqn.outvars))
        # Sums even out what was rounded; elementwise work hands it on.
        handed = name in self.ops.infer or name in HANDS_ON or rule == "retype"
        digits = name in STEEP or ("digits" in wanted and handed)
        inside = self._steep_inside(eqn, scope) if kind in _BOUNDARIES else ()
        for i, var in enumerate(eqn.invars):
            yield var, take, read, digits or i == divisor(eqn) or i in inside

    def _uses_inside(
        self, eqn: Equation, wanted: tuple[Want, ...], scope: tuple[str, ...]
    ) -> Iterator[tuple[Any, bool, bool, bool]]:
        """Yields the same of what the jaxprs in ``eqn`` do with its inputs."""
        layout = _jaxpr.call_layout(eqn)
        wanted = self.wanted_inside(layout, wanted, scope)
        for body in layout.bodies:
            plan = self.plan(body.jaxpr, wanted, scope)
            inner = _jaxpr.open_jaxpr(body.jaxpr).invars
            for i, var in zip(body.operands, inner, strict=True):
                fixed = i in layout.fixed_in
                yield (
                    eqn.invars[i],
                    var in plan.narrow and not fixed,
                    var in plan.other or fixed,
                    var in plan.steep,
                )

    def _steep_inside(self, eqn: Equation, scope: tuple[str, ...]) -> set[int]:
        """Returns the inputs of which the body of ``eqn`` needs the last digits."""
        jaxpr = next(_jaxpr.sub_jaxprs(eqn))
        steep = self.plan(jaxpr, ("original",) * len(eqn.outvars), scope).steep
        inner = _jaxpr.open_jaxpr(jaxpr).invars
        return {i for i, var in enumerate(inner) if var in steep}

    def _is_in_paths(self, scope: tuple[str, ...]) -> bool:
        return any(is_under(path, scope) for path in self.paths.values())


def _wanted(outs: Sequence[Any], narrow: Any, steep: Any) -> tuple[Want, ...]:
    return tuple(
        "digits" if var in steep else "16-bit" if var in narrow else "original"
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
    if not ins <= {_FLOAT32, *_16BIT} or not outs <= {_FLOAT32, dtype}:
        return False
    if len(ins) == 1 and _FLOAT32 not in ins:
        return False
    is_product = eqn.primitive.name not in PRODUCTS or is_matrix_product(eqn)
    return is_product and has_default_precision(eqn)
