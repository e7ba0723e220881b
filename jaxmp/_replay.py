"""Replaying a jaxpr in mixed precision: the inside of autocast.

The equations are applied one by one under the ambient trace, each in the dtype that
:mod:`jaxmp._op_lists` gives it. One invariant keeps that safe: a value has its
original dtype or, if that was float32, the 16-bit one, and whoever is not known to
accept the latter gets the former back.
"""

import contextlib
import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from . import _jaxpr
from ._jaxpr import (
    ClosedJaxpr,
    Equation,
    Literal,
    ShapedArray,
    is_float32,
    is_inexact,
)
from ._op_lists import (
    CALLS,
    COPIES,
    DEFAULT_OPS,
    EXACT,
    FOLDS,
    HANDS_ON,
    JOINS,
    LEAVES_RANGE,
    STARTS,
    STEEP,
    STRETCHES,
    VIEWS,
    OpLists,
    divisor,
    is_square,
    looks_up_rows,
    scales_far,
)
from ._products import PRODUCTS, has_default_precision, is_matrix_product
from ._scopes import (
    KEPT_BY_OPS,
    KEPT_BY_PATHS,
    KEPT_BY_REFERENCE,
    check_paths,
    is_decided,
    is_under,
)

# Functions with rules of their own, and a mesh: float32 at their boundary.
_BOUNDARIES = {"custom_vjp", "shard_map"}

_FLOAT32 = np.dtype(np.float32)  # compares faster than `jnp.float32`
_HALVES = {np.dtype(jnp.float16), np.dtype(jnp.bfloat16)}


@dataclasses.dataclass(slots=True)
class Value:
    """A value during the replay, and what is known of it."""

    array: Any  # array, tracer or literal: the original dtype, 16-bit if `narrow`
    narrow: bool = False
    scalar: Any = None  # what every entry equals, where that is known while tracing
    # Size of the float32 input of which this is a view; 0 where narrowing is always
    # right: vectors (biases, scales), scalars and what was boolean.
    source: int | None = None
    linear: bool = False  # comes from the tangents of a rule, to be transposed
    outside: bool = False  # given, or computed from what was given alone
    # A float32 value that belongs with 16-bit ones: an embedding, which was looked up,
    # or what was made of 16-bit values and others, or of 16-bit values out of range.
    follows: bool = False
    _wide: Any = None
    _half: Any = None

    def facts(self) -> tuple:
        """Returns what matters to those who are given the array, hashable."""
        # A layer that is called with its number is the same layer for each number. Zero
        # fills what was dropped, also the integer that `jnp.where` is often given.
        known = getattr(self.scalar, "dtype", None) == _FLOAT32 or self.is_zero()
        scalar = self.scalar if known else None
        return (
            self.narrow,
            scalar,
            self.source,
            self.linear,
            self.outside,
            self.follows,
        )

    def on(self, array: Any) -> "Value":
        """Returns the same knowledge of what stands for the array inside a body."""
        return Value(array, *self.facts())

    def widened(self) -> "Value":
        """Returns the value in its original dtype."""
        narrow, *known = self.facts()
        return Value(self.wide(), False, *known) if narrow else self

    def is_zero(self) -> bool:
        """Whether every entry is known to be zero."""
        return self.scalar is not None and self.scalar == 0

    def wide(self) -> Any:
        """Returns the array in its original dtype."""
        if not self.narrow:
            return self.array
        if self._wide is None:  # Shared, so that its cotangents add up in float32.
            self._wide = lax.convert_element_type(self.array, jnp.float32)
        return self._wide

    def half(self, dtype: np.dtype) -> Any:
        """Returns the array in ``dtype``, which has 16 bits."""
        if self.narrow or self.array.dtype == dtype:
            return self.array
        if not isinstance(self.array, jax.Array):  # a literal
            return np.asarray(self.array, dtype)
        if self._half is None or self.source is not None:
            # A weight is rounded anew for each use, so that its gradients are widened
            # before they add up over the steps of a loop. An activation, as in Flax,
            # is rounded once, so that it is also kept once for the backward pass.
            self._half = lax.convert_element_type(self.array, dtype)
        return self._half


class Demand(NamedTuple):
    """What the users of a jaxpr's variables do with them."""

    narrow: frozenset  # Somebody would take it in 16 bits.
    other: frozenset  # Somebody reads it who is no contraction.
    steep: frozenset  # Somebody needs its last digits: it is not rounded.
    rules: Sequence[str]  # of the equations, see :meth:`Caster.rule`

    def wants(self, eqn: Equation) -> tuple[bool | None, ...]:
        """Tells of each output whether it is wanted in 16 bits; None if in no case."""
        return _wants(eqn, self.narrow, self.steep)


class Caster:
    """Replays jaxprs with one 16-bit dtype, one set of lists and one of paths."""

    def __init__(self, dtype: np.dtype, ops: OpLists, paths: Sequence[str] = ()):
        """Starts with nothing rewritten."""
        self.dtype = dtype
        self.ops = ops
        usual = DEFAULT_OPS.allow | DEFAULT_OPS.infer
        dropped = usual - ops.allow - ops.infer
        self.denied_by_user = dropped | ops.deny - DEFAULT_OPS.deny
        self.paths = {path: tuple(path.split("/")) for path in paths}
        # By jaxpr, so that what JAX shares between calls and layers stays shared.
        self._demands: Any = weakref.WeakKeyDictionary()
        self._rewritten: Any = weakref.WeakKeyDictionary()
        self._contracts: Any = weakref.WeakKeyDictionary()

    def wrap(self, fun: Callable, scope: tuple | None = None) -> Callable:
        """Returns ``fun``, a function of pytrees, in mixed precision.

        Args:
            fun: Function that JAX can trace.
            scope: Named scopes around it, None for a function of the user.
        """

        def wrapped(*args, **kwargs):
            leaves, in_tree = jax.tree.flatten((args, kwargs))
            results: Any = None

            @functools.wraps(fun, updated=())
            def flat(*arrays):
                nonlocal results
                args, kwargs = in_tree.unflatten(_merge(leaves, arrays))
                outs, out_tree = jax.tree.flatten(fun(*args, **kwargs))
                # Nothing holds a tracer when its trace is over.
                known = [_ARRAY if isinstance(x, jax.Array) else x for x in outs]
                results = known, out_tree
                return _arrays(outs)

            arrays = _arrays(leaves)
            jaxpr = _jaxpr.trace(flat, arrays)
            if scope is None:
                check_paths(self.paths, jaxpr)
            values = [_given(array) for array in arrays]
            outs = self.replay_wide(jaxpr, values, scope or ())
            leaves, out_tree = results
            return out_tree.unflatten(_merge(leaves, outs))

        return wrapped

    def replay_wide(
        self, jaxpr: Any, values: Sequence[Value], scope: tuple = ()
    ) -> list[jax.Array]:
        """Replays ``jaxpr`` and returns its outputs in their original types."""
        avals = _jaxpr.out_avals(jaxpr)
        outs = self.replay(jaxpr, values, (False,) * len(avals), scope)
        return [
            _jaxpr.with_type_of(out.wide(), aval)
            for out, aval in zip(outs, avals, strict=True)
        ]

    def replay(
        self, jaxpr: Any, values: Sequence[Value], wanted: tuple, scope: tuple
    ) -> list[Value]:
        """Replays ``jaxpr`` under the ambient trace.

        Args:
            jaxpr: Open or closed jaxpr.
            values: Its inputs.
            wanted: For each output, whether somebody would take it in 16 bits, and
                None where somebody needs its last digits.
            scope: Named scopes around ``jaxpr``.
        """
        body = _jaxpr.open_jaxpr(jaxpr)
        demand = self.demand(jaxpr, wanted, scope)
        consts = [_given(const) for const in _jaxpr.closed_consts(jaxpr)]
        inputs = zip([*body.constvars, *body.invars], [*consts, *values], strict=True)
        env = dict(inputs)

        def read(atom):
            return _literal(atom) if isinstance(atom, Literal) else env[atom]

        for eqn, rule in zip(body.eqns, demand.rules, strict=True):
            ins = [read(atom) for atom in eqn.invars]
            wants = demand.wants(eqn)
            with _jaxpr.located_at(eqn), _jaxpr.context_of(eqn):
                outs = self.apply(eqn, rule, ins, wants, scope)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(atom) for atom in body.outvars]

    def rule(self, eqn: Equation, scope: tuple) -> str:
        """Returns how to treat ``eqn``: allow, infer, retype, call or deny."""
        name, ops = eqn.primitive.name, self.ops
        kept = is_decided(scope)
        if kept or any(is_under(path, scope) for path in self.paths.values()):
            return "deny"
        if name in ops.allow and _is_contraction(eqn, self.dtype):
            return "allow"
        # From 0.10 on `mul` may be told the dtype of its result.
        if (
            name in ops.infer
            and not is_square(eqn)
            and eqn.params.get("out_dtype") is None
        ):
            return "infer"
        if name == "convert_element_type" and _keeps_float32(eqn):
            return "retype"  # Only a weak type becomes a strong one.
        if name in CALLS and name not in ops.deny and not _takes_reference(eqn):
            return "call"
        return "deny"

    def apply(
        self, eqn: Equation, rule: str, ins: list[Value], wanted: tuple, scope: tuple
    ) -> list[Value]:
        """Replays one equation of a jaxpr inside ``scope`` by its rule."""
        if rule == "call":
            scope = scope + _jaxpr.scope_names(eqn)
            outs = self.call(eqn, ins, wanted, scope)
        elif rule == "retype" and ins[0].narrow:
            return ins
        else:
            match rule:
                case "allow":
                    arrays = self.contract(eqn, ins, wanted[0])
                case "infer":
                    arrays = self.follow(eqn, ins, wanted[0])
                case _:
                    with self.explained(eqn, scope):
                        arrays = _bind_wide(eqn, ins)
            outs = self.values(eqn, arrays)
            scalar, source = _known_scalar(eqn, ins), _known_source(eqn, ins)
            for out in outs:
                out.scalar, out.source = scalar, source
            if rule != "allow":
                self.note_origin(eqn, ins, outs)
        if any(value.linear for value in ins):
            for out in outs:
                out.linear = True
        return outs

    def explained(
        self, eqn: Equation, scope: tuple
    ) -> contextlib.AbstractContextManager:
        """Writes into the program why ``eqn`` is denied, where only we know."""
        name, here = eqn.primitive.name, scope + _jaxpr.scope_names(eqn)
        reason = None
        if any(is_under(path, here) for path in self.paths.values()):
            reason = KEPT_BY_PATHS
        elif name in self.denied_by_user:
            reason = KEPT_BY_OPS
        elif name in CALLS and _takes_reference(eqn):
            reason = KEPT_BY_REFERENCE
        if reason is None or is_decided(here):
            return contextlib.nullcontext()
        return jax.named_scope(reason)

    def note_origin(self, eqn: Equation, ins: list[Value], outs: list[Value]) -> None:
        """Notes which of ``outs`` have all digits of what was given, or follow."""
        name, floats, fits = eqn.primitive.name, [], True
        exact = name in EXACT
        mixes = exact or (name in LEAVES_RANGE and not is_square(eqn))
        for value, var in zip(ins, eqn.invars, strict=True):
            if is_inexact(var) and value.scalar is None:
                floats.append(value)
            elif is_float32(var):
                fits &= not exact or self.survives(value)  # not a mask of -1e9
        outside = all(value.outside for value in floats)
        if mixes and any(value.narrow for value in floats):
            follows = all(v.narrow or v.outside or v.follows for v in floats)
        else:
            follows = all(value.outside or value.follows for value in floats)
            follows &= any(value.follows for value in floats) or looks_up_rows(eqn)
        follows &= fits
        for out, var in zip(outs, eqn.outvars, strict=True):
            if is_inexact(var) and not out.narrow:
                out.outside, out.follows = outside, follows

    def values(self, eqn: Equation, arrays: Sequence[Any]) -> list[Value]:
        """Returns the outputs of ``eqn``, of which only the dtype is known."""
        return [
            Value(array, narrow=is_float32(var) and array.dtype == self.dtype)
            for array, var in zip(arrays, eqn.outvars, strict=True)
        ]

    # Contractions.

    def contract(self, eqn: Equation, ins: list[Value], wanted: bool) -> list[Any]:
        """Applies an operation of the allow list to 16-bit operands.

        The result is the float32 accumulator unless somebody takes it in 16 bits.
        """
        operands = [
            value.half(self.dtype) if is_inexact(var) else value.array
            for value, var in zip(ins, eqn.invars, strict=True)
        ]
        if "preferred_element_type" not in eqn.params or not is_float32(eqn.outvars[0]):
            outs = zip(_jaxpr.bind(eqn, operands), eqn.outvars, strict=True)
            return [self.held(array, var) for array, var in outs]
        if wanted:
            return _jaxpr.bind(eqn, operands, preferred_element_type=self.dtype)
        linear = any(value.linear for value in ins)
        return [_accumulated(eqn, operands, self.dtype, linear)]

    def held(self, array: Any, var: Any) -> Any:
        """Holds the invariant for an operation that the user allowed."""
        fits = array.dtype == var.aval.dtype
        fits |= is_float32(var) and array.dtype == self.dtype
        return array if fits else lax.convert_element_type(array, var.aval.dtype)

    # What follows its inputs.

    def follow(self, eqn: Equation, ins: list[Value], wanted: bool) -> list[Any]:
        """Applies an operation of the infer list in the dtype of its inputs."""
        name, operands = eqn.primitive.name, zip(ins, eqn.invars, strict=True)
        floats = [value for value, var in operands if is_float32(var)]
        size = max((v.array.size for v in floats if self.begins(name, v)), default=0)
        exact = name in EXACT and all(value.narrow for value in floats)
        narrow = size and (wanted or exact) and name != "integer_pow"
        if narrow and all(self.yields(name, value, size) for value in floats):
            if name in COPIES:
                outs = _bind_wide(eqn, ins)
                return [lax.convert_element_type(out, self.dtype) for out in outs]
            shape = eqn.outvars[0].aval.shape
            return _jaxpr.bind(
                eqn,
                [
                    self.operand(name, value, shape) if is_float32(var) else value.array
                    for value, var in zip(ins, eqn.invars, strict=True)
                ],
            )
        return _bind_wide(eqn, ins)

    def begins(self, name: str, value: Value) -> bool:
        """Whether ``value`` lets an operation be narrow that others may follow."""
        made = value.follows and not value.outside  # of 16-bit values and a scale
        return value.narrow or (made and name in JOINS)

    def yields(self, name: str, value: Value, size: int) -> bool:
        """Whether ``value`` lets an operation on ``size`` 16-bit numbers be narrow."""
        if value.narrow or value.scalar is not None:
            return self.survives(value)
        smaller = value.source is not None and value.source < size
        return (smaller or value.follows) and name in JOINS

    def survives(self, value: Value) -> bool:
        """Whether ``value``, if it is a number, is one in 16 bits too."""
        return value.scalar is None or _survives(value.scalar, self.dtype)

    def operand(self, name: str, value: Value, shape: tuple) -> Any:
        """Returns a value in 16 bits, ready for an operation that gives ``shape``."""
        array = value.array
        stretched = name in STRETCHES and value.scalar is None and array.shape != shape
        if value.scalar is not None or (value.narrow and not stretched):
            return value.half(self.dtype)
        if value.outside:
            # A mask of -1e9 must not become -inf.
            array = _saturated(array, self.dtype)
        if stretched:
            # The transpose of stretching is a sum, which is to run in float32.
            aligned = range(len(shape) - array.ndim, len(shape))
            array = value.wide() if value.narrow else array
            array = lax.broadcast_in_dim(array, shape, aligned)
        return lax.convert_element_type(array, self.dtype)

    # Primitives that hold jaxprs.

    def call(
        self, eqn: Equation, ins: list[Value], wanted: tuple, scope: tuple
    ) -> list[Value]:
        """Replays an equation that holds jaxprs, going inside."""
        contracts = any(map(self.contracts, _jaxpr.sub_jaxprs(eqn)))
        if not contracts and not any(value.narrow for value in ins):
            outs = self.values(eqn, _bind_wide(eqn, ins))
            self.note_origin(eqn, ins, outs)
            return outs
        match eqn.primitive.name:
            case "custom_jvp_call":
                return self.custom_jvp(eqn, ins, wanted, scope)
            case "custom_vjp_call" | "custom_vjp_call_jaxpr":
                return self.values(eqn, self.custom_vjp(eqn, ins, scope))
            case "shard_map":
                return self.values(eqn, self.shard_map(eqn, ins, scope))
            case _:
                return self.bodies(eqn, ins, wanted, scope)

    def contracts(self, jaxpr: Any) -> bool:
        """Whether ``jaxpr`` has something in it to decide or to know.

        16-bit values may begin there, or embeddings, or be kept from it by the user.
        """
        if jaxpr not in self._contracts:
            starts = self.ops.allow | self.denied_by_user | STARTS
            self._contracts[jaxpr] = any(
                eqn.primitive.name in starts
                or any(map(self.contracts, _jaxpr.sub_jaxprs(eqn)))
                for eqn in _jaxpr.open_jaxpr(jaxpr).eqns
            )
        return self._contracts[jaxpr]

    def bodies(
        self, eqn: Equation, ins: list[Value], wanted: tuple, scope: tuple
    ) -> list[Value]:
        """Replays a call, a loop or a choice by giving it rewritten bodies."""
        name, layout = eqn.primitive.name, _jaxpr.call_layout(eqn)
        keep = tuple(i in layout.fixed_out for i in range(len(wanted)))
        wanted = self.wanted_inside(layout, wanted, scope)
        # Of what a loop carries only the first value is here.
        ins = [
            Value(value.wide(), linear=value.linear) if i in layout.fixed_in else value
            for i, value in enumerate(ins)
        ]
        if name == "scan":
            ins = self.hoisted(layout, ins, wanted, scope)

        def rewritten(keep):
            return [
                self.rewritten(
                    body.jaxpr, [ins[i] for i in body.operands], wanted, keep, scope
                )
                for body in layout.bodies
            ]

        new = rewritten(keep)
        if name == "cond":
            narrow = list(
                zip(*([known[0] for known in facts] for _, facts in new), strict=True)
            )
            if any(any(n) and not all(n) for n in narrow):
                # Branches must agree, so one that returns float32 decides.
                new = rewritten(tuple(not all(n) for n in narrow))
        arrays = _jaxpr.bind_bodies(eqn, [x.array for x in ins], [j for j, _ in new])
        if name in ("scan", "while", "cond"):
            return self.values(eqn, arrays)
        return [Value(x, *known) for x, known in zip(arrays, new[0][1], strict=True)]

    def hoisted(
        self, layout: _jaxpr.CallLayout, ins: list[Value], wanted: tuple, scope: tuple
    ) -> list[Value]:
        """Narrows the weights of a scan before it, where that costs no precision.

        Gradients that come back through a scan would be added in 16 bits, so only a
        scan that has been differentiated already qualifies: an accumulation.
        """
        jaxpr = layout.bodies[0].jaxpr
        body, demand = _jaxpr.open_jaxpr(jaxpr), self.demand(jaxpr, wanted, scope)
        if not any(map(_jaxpr.is_differentiated, body.eqns)):
            return ins
        weights = demand.narrow - demand.other
        return [
            dataclasses.replace(value, array=value.half(self.dtype), narrow=True)
            if var in weights and i < layout.fixed_in.start
            else value
            for i, (value, var) in enumerate(zip(ins, body.invars, strict=True))
        ]

    def rewritten(
        self, jaxpr: Any, ins: Sequence[Value], wanted: tuple, keep: tuple, scope: tuple
    ) -> tuple[ClosedJaxpr, tuple]:
        """Returns ``jaxpr`` in mixed precision, and what is known of its outputs.

        Args:
            jaxpr: Body of an equation.
            ins: What it is given.
            wanted: For each output, whether somebody would take it in 16 bits.
            keep: For each output, whether it must have its original dtype.
            scope: Named scopes around ``jaxpr``.
        """
        key = tuple(x.facts() for x in ins), wanted, keep, self.prefix(scope)
        memo = self._rewritten.setdefault(jaxpr, {})
        if key not in memo:
            facts = []

            def body(*arrays):
                values = [x.on(array) for x, array in zip(ins, arrays, strict=True)]
                outs = self.replay(jaxpr, values, wanted, scope)
                # The test of a loop has one output, and its body has others.
                for i, kept in zip(range(len(outs)), keep, strict=False):
                    if kept:
                        outs[i] = outs[i].widened()
                facts.extend(out.facts() for out in outs)
                return [out.array for out in outs]

            avals = [
                aval.update(dtype=self.dtype, weak_type=False) if value.narrow else aval
                for aval, value in zip(_jaxpr.in_avals(jaxpr), ins, strict=True)
            ]
            memo[key] = _jaxpr.trace(body, avals), tuple(facts)
        return memo[key]

    def prefix(self, scope: tuple) -> tuple:
        """Returns that of the scopes around a jaxpr on which its treatment depends."""
        return scope if self.paths else ()

    def custom_jvp(
        self, eqn: Equation, ins: list[Value], wanted: tuple, scope: tuple
    ) -> list[Value]:
        """Replays a function together with the derivative rule of its own."""
        avals = [var.aval for var in eqn.invars]
        known = [value.on(None) for value in ins]  # keeps no tracer alive
        moved = [i for i, var in enumerate(eqn.outvars) if is_inexact(var)]
        free = (False,) * len(wanted)
        new, facts = self.rewritten(eqn.params["call_jaxpr"], ins, wanted, free, scope)
        function = jax.custom_jvp(_jaxpr.jaxpr_as_fun(new))

        def rule(primals, tangents):
            # The rule is asked for what is differentiated, and for nothing else.
            moving = [
                i
                for i, (var, x) in enumerate(zip(eqn.invars, tangents, strict=True))
                if is_inexact(var) and not isinstance(x, SymbolicZero)
            ]

            def differentiated(*args):
                args, tangents = args[: len(avals)], args[len(avals) :]
                primals_out, tangents_out = jax.jvp(
                    lambda *xs: _jaxpr.bind(eqn, _replaced(args, moving, xs)),
                    [args[i] for i in moving],
                    list(tangents),
                )
                return [*primals_out, *(tangents_out[i] for i in moved)]

            with _explained_rule():
                jaxpr = _jaxpr.trace(
                    differentiated, [*avals, *(avals[i] for i in moving)]
                )
                values = [x.on(p) for x, p in zip(known, primals, strict=True)]
                values += [
                    Value(tangents[i], narrow=known[i].narrow, linear=True)
                    for i in moving
                ]
                wants = (*wanted, *(wanted[i] for i in moved))
                outs = self.replay(jaxpr, values, wants, scope)
            # Both must have the dtypes that the function has when it is only called.
            like = [*new.out_avals, *(new.out_avals[i] for i in moved)]
            arrays = [
                _jaxpr.with_type_of(out.array, aval)
                for out, aval in zip(outs, like, strict=True)
            ]
            tangents_out = [
                _jaxpr.zero_tangent(x) if out.is_zero() else x
                for x, out in zip(arrays, outs, strict=True)
            ]
            nothing = [_float0(var.aval) for var in eqn.outvars]
            return arrays[: len(facts)], _replaced(
                nothing, moved, tangents_out[len(facts) :]
            )

        function.defjvp(rule, symbolic_zeros=True)
        arrays = function(*(x.array for x in ins))
        return [Value(x, *known) for x, known in zip(arrays, facts, strict=True)]

    def custom_vjp(self, eqn: Equation, ins: list[Value], scope: tuple) -> list[Any]:
        """Replays a function with a backward rule, in float32 at its boundary."""
        closed_over = eqn.params["num_consts"]
        known = [value.widened().on(None) for value in ins]

        @jax.custom_vjp
        def function(*arrays):
            values = [x.on(array) for x, array in zip(known, arrays, strict=True)]
            return self.replay_wide(eqn.params["call_jaxpr"], values, scope)

        def forward(*primals):
            # The rule is asked for what is differentiated, and for nothing else.
            moving = [i for i, primal in enumerate(primals) if primal.perturbed]
            if any(i < closed_over for i in moving):
                raise TypeError(
                    "A `jax.custom_vjp` function closes over a value that is "
                    "differentiated. Its rule has no gradient for it: pass the value "
                    "as an argument."
                )

            def linearized(*arrays):
                return jax.vjp(
                    lambda *args: _jaxpr.bind(eqn, _replaced(arrays, moving, args)),
                    *(arrays[i] for i in moving),
                )

            with _explained_rule():
                outs, pull = self.wrap(linearized, scope)(*(p.value for p in primals))
            return outs, (pull, dict.fromkeys(moving))

        def backward(kept, cotangents):
            pull, moving = kept
            cotangents = [
                _jaxpr.zero_cotangent(x, symbolic=eqn.params["symbolic_zeros"])
                if isinstance(x, SymbolicZero)
                else x
                for x in cotangents
            ]
            with _explained_rule():
                pulled = self.wrap(lambda pull, x: pull(x), scope)(pull, cotangents)
            return tuple(_replaced([None] * len(ins), moving, pulled))

        function.defvjp(forward, backward, symbolic_zeros=True)
        return function(*(value.wide() for value in ins))

    def shard_map(self, eqn: Equation, ins: list[Value], scope: tuple) -> list[Any]:
        """Replays a function of shards, in float32 at its boundary."""
        known = [value.widened().on(None) for value in ins]

        def body(*shards):
            values = [x.on(shard) for x, shard in zip(known, shards, strict=True)]
            return self.replay_wide(eqn.params["jaxpr"], values, scope)

        return _jaxpr.bind_shard_map(eqn, [value.wide() for value in ins], body)

    # Looking ahead.

    def demand(self, jaxpr: Any, wanted: tuple, scope: tuple) -> Demand:
        """Looks backward through ``jaxpr`` for what its values are used for.

        What no contraction takes, neither directly nor through operations of the
        infer list, is computed in float32: softmax logits, variances, gradients. And
        so is what a steep function or a divisor is computed from elementwise: a
        probability next to its logarithm. Contractions then round it for themselves.
        """
        key = wanted, self.prefix(scope)
        memo = self._demands.setdefault(jaxpr, {})
        if key not in memo:
            body = _jaxpr.open_jaxpr(jaxpr)
            narrow, other, steep, rules = set(), set(), set(), []

            def note(uses):
                for var, take, read, digits in uses:
                    if not isinstance(var, Literal):
                        narrow.update([var] if take and is_float32(var) else ())
                        other.update([var] if read else ())
                        steep.update([var] if digits and is_inexact(var) else ())

            note(
                (var, want, True, want is None)
                for var, want in zip(body.outvars, wanted, strict=False)
            )
            for eqn in reversed(body.eqns):
                here = scope + _jaxpr.scope_names(eqn)
                rules.append(self.rule(eqn, here))
                wants = _wants(eqn, narrow, steep)
                note(self.uses(eqn, rules[-1], wants, other, here))
            sets = frozenset(narrow), frozenset(other), frozenset(steep)
            memo[key] = Demand(*sets, rules[::-1])
        return memo[key]

    def wanted_inside(
        self, layout: _jaxpr.CallLayout, wanted: tuple, scope: tuple
    ) -> tuple:
        """Returns what is wanted of the bodies of an equation.

        A loop reads what it carries once more, and so does its test.
        """
        wanted = tuple(w and i not in layout.fixed_out for i, w in enumerate(wanted))
        steep = True
        while steep:
            steep = {
                layout.fixed_out[i - layout.fixed_in.start]
                for body in layout.bodies
                for i, var in zip(
                    body.operands, _jaxpr.open_jaxpr(body.jaxpr).invars, strict=True
                )
                if i in layout.fixed_in
                and var in self.demand(body.jaxpr, wanted, scope).steep
            }
            steep = {i for i in steep if wanted[i] is not None}
            wanted = tuple(None if i in steep else w for i, w in enumerate(wanted))
        return wanted

    def uses(
        self, eqn: Equation, rule: str, wanted: tuple, other: set, scope: tuple
    ) -> Iterator[tuple[Any, bool, bool, bool]]:
        """Yields, for each input of ``eqn``, which of the three sets it belongs to."""
        name = eqn.primitive.name
        if rule == "call" and _jaxpr.call_kind(eqn) not in _BOUNDARIES:
            layout = _jaxpr.call_layout(eqn)
            wanted = self.wanted_inside(layout, wanted, scope)
            for body in layout.bodies:
                demand = self.demand(body.jaxpr, wanted, scope)
                inner = _jaxpr.open_jaxpr(body.jaxpr).invars
                for i, var in zip(body.operands, inner, strict=True):
                    fixed = i in layout.fixed_in
                    yield (
                        eqn.invars[i],
                        var in demand.narrow and not fixed,
                        var in demand.other or fixed,
                        var in demand.steep,
                    )
            return
        take = rule == "allow" or (rule in ("infer", "retype") and any(wanted))
        take &= not scales_far(eqn)
        viewed = rule in ("infer", "retype") and name in VIEWS
        read = rule != "allow" and not (viewed and other.isdisjoint(eqn.outvars))
        # Sums even out what was rounded; elementwise work hands it on.
        handed = name in self.ops.infer or name in HANDS_ON or rule == "retype"
        digits = name in STEEP or (None in wanted and handed)
        inside = (
            self.steep_inside(eqn, scope)
            if _jaxpr.call_kind(eqn) in _BOUNDARIES
            else ()
        )
        for i, var in enumerate(eqn.invars):
            yield var, take, read, digits or i == divisor(eqn) or i in inside

    def steep_inside(self, eqn: Equation, scope: tuple) -> set[int]:
        """Returns the inputs of which the body of ``eqn`` needs the last digits."""
        jaxpr = next(_jaxpr.sub_jaxprs(eqn))
        steep = self.demand(jaxpr, (False,) * len(eqn.outvars), scope).steep
        inner = _jaxpr.open_jaxpr(jaxpr).invars
        return {i for i, var in enumerate(inner) if var in steep}


# What an equation is.


def _takes_reference(eqn: Equation) -> bool:
    return not all(isinstance(v.aval, ShapedArray) for v in eqn.invars)


def _keeps_float32(eqn: Equation) -> bool:
    return is_float32(eqn.invars[0]) and is_float32(eqn.outvars[0])


def _is_contraction(eqn: Equation, dtype: np.dtype) -> bool:
    """Whether ``eqn`` is a float32 product with sums in it, at default precision.

    Of a float32 and a 16-bit operand, or of two kinds of 16 bits, it is one as well:
    JAX promotes them. A product that was written in one kind of 16 bits is not.
    """
    ins = {atom.aval.dtype for atom in eqn.invars if is_inexact(atom)}
    outs = {atom.aval.dtype for atom in eqn.outvars if is_inexact(atom)}
    if not ins <= {_FLOAT32, *_HALVES} or not outs <= {_FLOAT32, dtype}:
        return False
    if len(ins) == 1 and _FLOAT32 not in ins:
        return False
    if not has_default_precision(eqn):
        return False
    return eqn.primitive.name not in PRODUCTS or is_matrix_product(eqn)


def _wants(eqn: Equation, narrow: Any, steep: Any) -> tuple[bool | None, ...]:
    return tuple(None if var in steep else var in narrow for var in eqn.outvars)


# What is known of a value.


def _given(array: Any) -> Value:
    """Returns a value that comes from outside: an argument or a constant."""
    if getattr(array, "dtype", None) != jnp.float32:
        return Value(array, outside=True)
    source = 0 if array.ndim <= 1 else array.size
    return Value(array, source=source, outside=True)


def _literal(atom: Any) -> Value:
    if atom.aval.shape or not jnp.issubdtype(atom.aval.dtype, np.number):
        return Value(atom.val)
    return Value(atom.val, scalar=np.asarray(atom.val, atom.aval.dtype)[()])


def _known_scalar(eqn: Equation, ins: list[Value]) -> Any:
    """Returns what every entry of the result equals, or None."""
    name, scalars = eqn.primitive.name, [value.scalar for value in ins]
    if not scalars or any(scalar is None for scalar in scalars):
        return None
    if name in FOLDS:
        with np.errstate(all="ignore"):
            return FOLDS[name](*scalars)
    if name == "convert_element_type" and is_float32(eqn.outvars[0]):
        return np.float32(scalars[0])
    return scalars[0] if name in VIEWS and len(ins) == 1 else None


def _known_source(eqn: Equation, ins: list[Value]) -> int | None:
    """Returns the size of the float32 input that the result is a view of, or None."""
    name = eqn.primitive.name
    if name == "convert_element_type":
        boolean = eqn.invars[0].aval.dtype == jnp.bool_
        return 0 if boolean else ins[0].source
    alone = not any(map(is_float32, eqn.invars[1:]))
    if name not in VIEWS or not alone or ins[0].source is None:
        return None
    return min(ins[0].source, eqn.outvars[0].aval.size)


def _survives(scalar: Any, dtype: np.dtype) -> bool:
    """Whether a number is neither lost nor infinite in ``dtype``."""
    size, limits = float(abs(scalar)), jnp.finfo(dtype)
    return (
        size == 0
        or not math.isfinite(size)
        or float(limits.tiny) <= size <= float(limits.max)
    )


# Emitting equations.


def _float0(aval: Any) -> Any:
    """Returns the tangent of what has none."""
    return np.zeros(aval.shape, jax.dtypes.float0)


@contextlib.contextmanager
def _explained_rule() -> Iterator[None]:
    """Adds to the errors of a derivative's rule where autocast should be."""
    try:
        yield
    except Exception as error:
        error.add_note(
            "This is the rule of a custom derivative, inside `autocast` inside a "
            "gradient. If it works without `autocast`, put `autocast` outside: "
            "`autocast(jax.value_and_grad(loss))`."
        )
        raise


def _replaced(items: Sequence[Any], places: Iterable[int], new: Iterable[Any]) -> list:
    """Returns ``items`` with those at ``places`` replaced."""
    changed = dict(zip(places, new, strict=True))
    return [changed.get(i, item) for i, item in enumerate(items)]


def _bind_wide(eqn: Equation, ins: list[Value]) -> list[Any]:
    return _jaxpr.bind(eqn, [value.wide() for value in ins])


def _saturated(array: Any, dtype: np.dtype) -> Any:
    """Clips what is finite to the range of ``dtype``."""
    limit = np.float32(jnp.finfo(dtype).max)
    clipped = lax.clamp(-limit, array, limit)
    return lax.select(lax.is_finite(array), clipped, array)


def _accumulated(
    eqn: Equation, operands: list[Any], dtype: np.dtype, linear: bool
) -> Any:
    """Returns the float32 sums of a product of 16-bit operands.

    JAX would differentiate it into products of 16-bit by float32, so it gets a rule by
    which the products of its derivatives are 16-bit too. What is ``linear`` is part of
    such a rule, and is rounded on the way like those.
    """

    moving = [is_inexact(var) for var in eqn.invars]
    args = [x for x, m in zip(operands, moving, strict=True) if m]
    # The rule lives as long as its jaxpr, and so holds no tracer that it is given.
    fixed = [None if m else x for x, m in zip(operands, moving, strict=True)]

    def complete(args):
        rest = iter(args)
        return [next(rest) if m else x for x, m in zip(fixed, moving, strict=True)]

    def product(args, out_dtype):
        args = complete(args)
        return _jaxpr.bind(eqn, args, preferred_element_type=out_dtype)[0]

    def rule(primals, tangents):
        terms = [
            product((*primals[:i], tangent, *primals[i + 1 :]), dtype)
            for i, tangent in enumerate(tangents)
            if not isinstance(tangent, SymbolicZero)
        ]
        terms = [lax.convert_element_type(term, jnp.float32) for term in terms]
        out = accumulate(*primals)
        return out, functools.reduce(lax.add, terms) if terms else lax.full_like(out, 0)

    @jax.custom_jvp
    def accumulate(*args):
        if dtype == jnp.float16:
            return product(args, jnp.float32)
        return _jaxpr.summed_by_platform(eqn, complete(args))

    # cuDNN has no 16-bit convolution with a float32 result: XLA widens the operands and
    # convolves in float32.
    if linear or eqn.primitive.name == "conv_general_dilated":
        return lax.convert_element_type(product(args, dtype), jnp.float32)
    accumulate.defjvp(rule, symbolic_zeros=True)
    return accumulate(*args)


# Pytrees and paths.


_ARRAY = object()  # stands for an array in what a function has returned


def _arrays(leaves: Sequence[Any]) -> list[jax.Array]:
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]


def _merge(leaves: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Puts ``arrays`` where ``leaves`` has JAX arrays."""
    rest = iter(arrays)
    return [
        next(rest) if leaf is _ARRAY or isinstance(leaf, jax.Array) else leaf
        for leaf in leaves
    ]
