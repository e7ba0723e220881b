"""The bits that autocast gives to each value of a program, from its plan."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from values import PASSES, Value, live

import jaxmp
from jaxmp._autocast import needs, rules
from jaxmp._autocast.plan import Plan, Planner
from jaxmp._jaxprs import jaxpr as _jaxpr
from jaxmp._jaxprs.scopes import Scopes, is_backward, is_decided, scopes_inside
from jaxmp._ops import products, table
from jaxmp._ops.precision import own_precisions

# Safeguards that keep whole operations as they were written.
_REGIONS = rules.COMPARING, rules.MOMENTS


def values_of(
    fun: Callable, args: Sequence[Any], dtype: Any = jnp.bfloat16
) -> list[Value]:
    """Returns the values of a program in its order, with what autocast makes of them.

    Args:
        fun: A function of pytrees.
        args: What it is called with; shapes and dtypes are enough.
        dtype: The 16-bit dtype.
    """
    leaves, tree = jax.tree.flatten(args)
    # Traced as autocast does it.
    with jax.softmax_custom_jvp(True), own_precisions():
        jaxpr = jax.make_jaxpr(lambda *xs: fun(*tree.unflatten(xs)))(*leaves)
    planner = Planner(np.dtype(dtype), jaxmp.DEFAULT_OPS)
    plan = planner.program(jaxpr, needs.FULL | needs.DIGITS)
    program = _Program()
    given = [program.new("argument", [], v, None) for v in jaxpr.jaxpr.invars]
    for out in program.through(jaxpr, given, plan, ()):
        if isinstance(out, Value):
            out.returned = True
    _link(program.values)
    return program.values


def _link(values: Sequence[Value]) -> None:
    """Tells each value who reads it."""
    for value in values:
        for i, x in enumerate(value.of):
            if isinstance(x, Value):
                x.consumers.append((value, i))
    for value in values:
        for x, _ in value.consumers:
            if x.safeguard in _REGIONS and not value.half:
                value.safeguard = value.safeguard or x.safeguard


class _Program:
    """Goes through a jaxpr and its plan."""

    def __init__(self):
        self.values: list[Value] = []

    def new(
        self,
        op: str,
        of: Sequence[Any],
        var: Any,
        facts: Any,
        *,
        params: Any = None,
        back: bool = False,
        kept: bool = False,
        rule: rules.Rule | None = None,
        place: int = 0,
        known: bool = True,
    ) -> Value:
        half = (facts is not None and facts.half) if known else None
        value = Value(
            len(self.values),
            op,
            [*of],
            np.dtype(var.aval.dtype) if _has_dtype(var) else np.dtype(bool),
            tuple(var.aval.shape),
            dict(params or {}),
            back,
            kept,
            place,
            half=half,
            rule=rule,
        )
        self.values.append(value)
        return value

    def through(
        self,
        jaxpr: Any,
        ins: Sequence[Any],
        plan: Plan | None,
        scopes: Scopes,
        holder: rules.Rule | None = None,
    ) -> list[Any]:
        """Returns what a jaxpr returns, given such values.

        Without a plan, its operations are as the plan says of what holds them.
        """
        body = _jaxpr.open_jaxpr(jaxpr)
        steps = {x: s for s in plan.steps for x in s.eqn.outvars} if plan else {}
        env: dict[Any, Any] = dict(zip(_jaxpr.in_vars(jaxpr), ins, strict=True))
        for var in body.constvars:
            if var not in env:
                env[var] = self.new("constant", [], var, None)

        def read(atom):
            if not isinstance(atom, _jaxpr.Literal):
                return env[atom]
            number = _jaxpr.number_of(atom)
            if number is None:
                return self.new("constant", [], atom, None)
            return float(number) if np.isrealobj(number) else complex(number)

        for eqn in body.eqns:
            given = [read(x) for x in eqn.invars]
            if _jaxpr.has_effects(eqn) and not _jaxpr.call_kind(eqn):
                _decides(*given)
            found = [steps[x] for x in eqn.outvars if x in steps]
            # Autocast may write a loop and what comes after it for one loop.
            found.sort(key=lambda step: step.inside is None)
            known = bool(found) or plan is None
            facts = {
                x: y for s in found for x, y in zip(s.eqn.outvars, s.outs, strict=True)
            }
            step = found[0] if found else None
            told = (step, facts, scopes, holder)
            outs = self.of(eqn, given, *told, known=known)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(x) for x in body.outvars]

    def of(
        self,
        eqn: Any,
        ins: list[Any],
        step: Any,
        facts: dict[Any, Any],
        scopes: Scopes,
        holder: rules.Rule | None,
        *,
        known: bool,
    ) -> list[Any]:
        """Returns what an equation returns."""
        around = scopes + _jaxpr.scope_names(eqn)
        back = is_backward(eqn, scopes)
        kept, params = is_decided(around), eqn.params
        role = "move" if table.picks(eqn) or table.retypes(eqn) else ""
        # Autocast has written products of a loop as one behind it, with these operands.
        behind = not known and products.sums_over_iterations(eqn)
        is_product = step.kind == "product" if step else behind
        role = "matmul" if is_product else role
        within = scopes_inside(eqn, around)
        kind = _jaxpr.call_kind(eqn)
        rule = step.rule if step else holder
        common = {"back": back, "kept": kept, "rule": rule}

        by = step.by if step else rule
        safeguard = by if by in rules.SAFEGUARDS else None

        def new(op, of, var, facts=None, *, known=known, **more):
            value = self.new(op, of, var, facts, known=known, **common, **more)
            value.safeguard = safeguard
            value.role = "move" if op in PASSES and "custom" not in op else role
            return value

        if not kind or safeguard in _REGIONS or not _jaxpr.is_call(eqn):
            return [
                new(
                    eqn.primitive.name,
                    ins,
                    var,
                    facts.get(var),
                    params=params,
                    place=i,
                    known=known and (not step or var in facts),
                )
                for i, var in enumerate(eqn.outvars)
            ]
        layout = _jaxpr.call_layout(eqn)
        bodies = step.inside.bodies if step and step.inside else ()
        if kind in ("scan", "while"):
            return self.loop(eqn, ins, bodies, facts, within, new)
        plans = [plan for _, plan in bodies] or [None] * len(layout.bodies)
        results = []
        for i, (body, plan) in enumerate(zip(layout.bodies, plans, strict=True)):
            # Of equal rules the first is planned.
            jaxpr = bodies[i][0] if kind == "custom_jvp" and bodies else body.jaxpr
            given = [ins[j] for j in body.operands]
            variables = _jaxpr.in_vars(jaxpr)
            told = plan.ins if plan else [None] * len(given)
            passes = {
                "remat": "into checkpoint",
                "custom_vjp": "into custom",
                "shard_map": "into custom",
            }
            if kind in passes:
                given = [
                    new(passes[kind], [x], var, f, known=True)
                    for x, var, f in zip(given, variables, told, strict=True)
                ]
            results.append(self.through(jaxpr, given, plan, within, rule))
        if kind == "cond":
            if eqn.outvars:
                _decides(ins[0])
            return [
                new("branches", [x[i] for x in results], var, facts.get(var))
                for i, var in enumerate(eqn.outvars)
            ]
        (outs,) = results
        if kind in ("custom_vjp", "shard_map"):
            pairs = zip(outs, eqn.outvars, strict=True)
            return [new("out of custom", [x], var, facts.get(var)) for x, var in pairs]
        return outs

    def loop(
        self,
        eqn: Any,
        ins: list[Any],
        bodies: Sequence[Any],
        facts: dict[Any, Any],
        scopes: Scopes,
        new: Callable,
    ) -> list[Any]:
        """Returns what a loop returns."""
        layout = _jaxpr.call_layout(eqn)
        plans = {id(jaxpr): plan for jaxpr, plan in bodies}
        ends = bodies[-1][1].ends if bodies else ()
        start = layout.fixed_in.start
        given = self._of_iteration(eqn, ins, layout.bodies[-1], bodies, new)
        for x in given:
            is_wide = x.op == "constant of loop" and not x.half
            if is_wide and isinstance(x.of[0], Value) and x.of[0].half:
                x.safeguard = x.safeguard or rules.CONSTANTS
            if x.op == "slice of scan" and not x.half and _is_ranged(x):
                x.safeguard = x.safeguard or rules.RANGE
        *tests, body = layout.bodies
        plan = plans.get(id(body.jaxpr)) or (bodies[-1][1] if bodies else None)
        outs = self.through(body.jaxpr, given, plan, scopes)
        carried = range(len(layout.fixed_out))
        first = start - (len(ins) - len(body.operands))
        for i in carried:
            given[first + i].of.append(outs[i])
        results = []
        for i, var in enumerate(eqn.outvars):
            if i in carried:
                of = [ins[start + i], outs[i]]
                results.append(
                    new("last", of, var, facts.get(var), params=eqn.params, place=i)
                )
            else:
                results.append(new("stack of scan", [outs[i]], var, facts.get(var)))
                if i < len(ends) and ends[i] == "ranged":
                    results[-1].safeguard = rules.RANGE
                    if outs[i] in given:  # what it carries is stacked
                        outs[i].safeguard = rules.RANGE
        for test in tests:
            variables = _jaxpr.in_vars(test.jaxpr)
            seen = [
                new(
                    "test", [ins[j], outs[j - start]], var, known=False, place=j - start
                )
                if j >= start
                else new("constant of loop", [ins[j]], var, known=False)
                for j, var in zip(test.operands, variables, strict=True)
            ]
            plan = bodies[0][1] if bodies else None
            _decides(*self.through(test.jaxpr, seen, plan, scopes))
        return results

    @staticmethod
    def _of_iteration(
        eqn: Any, ins: list[Any], body: Any, bodies: Sequence[Any], new: Callable
    ) -> list[Any]:
        """Returns what the body of a loop is given."""
        layout = _jaxpr.call_layout(eqn)
        start, stop = layout.fixed_in.start, layout.fixed_in.stop
        variables = _jaxpr.in_vars(body.jaxpr)
        told: dict[Any, Any] = {}
        for jaxpr, plan in bodies[-1:]:
            told = dict(zip(_jaxpr.in_vars(jaxpr), plan.ins, strict=True))
        given = []
        for j, var in zip(body.operands, variables, strict=True):
            op = "carry" if start <= j < stop else "constant of loop"
            op = "slice of scan" if j >= stop else op
            known = not bodies or var in told
            place = max(j - start, 0)
            given.append(
                new(op, [ins[j]], var, told.get(var), known=known, place=place)
            )
        return given


def _decides(*found: Any) -> None:
    for value in found:
        if isinstance(value, Value):
            value.returned = True


def _is_ranged(value: Any) -> bool:
    """Whether it is moved from what a scan has stacked in the range of float32."""
    if not isinstance(value, Value) or value.half:
        return False
    if value.op == "stack of scan":
        return value.safeguard == rules.RANGE
    return value.role == "move" and any(map(_is_ranged, value.of))


def _has_dtype(var: Any) -> bool:
    try:
        np.dtype(var.aval.dtype)
    except TypeError:  # a key
        return False
    return True


class Comparison(NamedTuple):
    """What the sentences allow of a program, and what autocast does of it."""

    beyond: list[Value]  # in 16 bits, and not allowed
    allowed: list[Value]
    float32: list[Value]  # allowed, and not in 16 bits
    unnamed: list[Value]  # of these, not for the sake of a safeguard


def compared(values: Sequence[Value], allowed: Callable) -> Comparison:
    """Compares what the sentences allow with what autocast does.

    A value that only matmuls in 16 bits read is in 16 bits, wherever it is rounded.

    Args:
        values: Of a program.
        allowed: Returns of which values the sentences allow that they are 16 bits,
            given values, and which of them a safeguard keeps in float32.
    """
    safe = frozenset(x for x in values if x.safeguard and not x.half)
    bound = allowed(values, frozenset())
    within = allowed(values, safe) if safe else bound
    narrow, read = seen_in_16_bits(values), live(values)
    found = Comparison([], [], [], [])
    for x in values:
        if x.op in ("argument", "constant") or x.dtype != np.float32:
            continue
        if x.half is None or x not in read:
            continue
        if x.half and not bound[x.number]:
            found.beyond.append(x)
        if bound[x.number]:
            found.allowed.append(x)
            if x not in narrow:
                found.float32.append(x)
                if within[x.number] and x not in safe:
                    found.unnamed.append(x)
    return found


def seen_in_16_bits(values: Sequence[Value]) -> set[Value]:
    """Returns what has 16 bits, or is given in 16 bits to all that read it."""
    found: set[Value] = set()
    read = live(values)
    for x in reversed(values):
        takes = (
            (r.role == "matmul" and place < 2) or (r.role == "move" and r in found)
            for r, place in x.consumers
            if r in read
        )
        if x.half or (not x.returned and all(takes)):
            found.add(x)
    return found
