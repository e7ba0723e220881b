"""A jaxpr that was written for 16 bits, replayed in float32.

What calls, repeats or chooses between jaxprs is replayed here; what an operation does,
a class says that inherits from this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.dtypes import is_narrow
from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation
from .._jaxprs.places import Place, placed
from .._ops.lists import ARITHMETIC, AS_WRITTEN, DEFAULT_OPS
from .._ops.narrow import summed_by_platform
from .._ops.products import PRODUCTS, is_attention
from .numbers import Eaten, Numbers

# Which part of a program has rounded a value, where it is none.
NONE = -1


class Value(NamedTuple):
    """An array, float32 where it was written for 16 bits, and what is known of it."""

    array: Any
    # Whether it has been rounded, bool[] or True; None leaves that to its readers.
    narrow: Any = None
    part: int = NONE  # whose switch alone has decided that


class WideReplay:
    """The replay of jaxprs under the ambient trace."""

    def __init__(
        self, platform: str, numbers: Numbers, scalars: Any, axes: tuple[Any, ...]
    ):
        """Starts a replay: operations may read the scalars; the axes are around it."""
        self.platform, self.numbers = platform, numbers
        self.scalars, self.axes = scalars, axes

    def operation(self, eqn: Equation, ins: list[Value], place: Place) -> list[Value]:
        """Applies an equation that computes."""
        raise NotImplementedError

    def number(self, eqn: Equation, eaten: Eaten) -> Value | None:
        """Returns a number that 16 bits have eaten; None leaves it as it is."""
        raise NotImplementedError

    def constant(self, array: Any) -> Value:
        """Returns an array that the code has made."""
        return given(array)

    def among(self, scalars: Any, axes: tuple[Any, ...]) -> WideReplay:
        """Returns the same replay on the shards of a shard_map."""
        raise NotImplementedError

    def run(self, jaxpr: Any, values: Sequence[Value], around: Place) -> list[Value]:
        """Replays a jaxpr, open or closed."""

        def apply(eqn, ins, place):
            eaten = [self.numbers.read_by(eqn, i) for i in range(len(ins))]
            ins = [
                x if number is None else self.number(eqn, number) or x
                for x, number in zip(ins, eaten, strict=True)
            ]
            with _jaxpr.context_of(eqn):
                return (self.call if is_call(eqn) else self.operation)(eqn, ins, place)

        at_places = placed(apply, around)
        return _jaxpr.interpret(
            jaxpr, values, at_places, const=self.constant, literal=_literal
        )

    def call(self, eqn: Equation, ins: list[Value], place: Place) -> list[Value]:
        """Replays an equation that calls, repeats or chooses between jaxprs."""
        jaxprs = bodies_of(eqn, self.platform)
        bodies = [self.body(x, place.replayed(eqn, x)) for x in jaxprs]
        match _jaxpr.call_kind(eqn):
            case "scan":
                arrays = _scan(eqn, ins, bodies[0])
            case "while":
                arrays = _while_loop(eqn, ins, *bodies)
            case "shard_map":
                arrays = self.shard_map(eqn, ins, place)
            case "cond" if not _jaxpr.chooses_platform(eqn):
                index, *ins = ins
                branches = [_of_arrays(x, ins) for x in bodies]
                arrays = lax.switch(index.array, branches, [x.array for x in ins])
            case kind:
                ins = ins[1:] if kind == "cond" else ins  # without the platform
                return self.run(jaxprs[0], ins, place.replayed(eqn, jaxprs[0]))
        return [Value(x) for x in arrays]

    def body(self, jaxpr: Any, around: Place) -> Callable[[list[Value]], list[Any]]:
        """Returns the replay of a jaxpr that is traced on its own."""
        return lambda values: [x.array for x in self.run(jaxpr, values, around)]

    def shard_map(self, eqn: Equation, ins: list[Value], place: Place) -> list[Any]:
        """Replays a function of shards."""
        (jaxpr,) = bodies_of(eqn, self.platform)
        axes = (*self.axes, *_jaxpr.manual_axes(eqn))

        def body(shards, scalars):
            replay = self.among(scalars, axes)
            values = [
                Value(x, narrow=True if value.narrow is True else None)
                for x, value in zip(shards, ins, strict=True)
            ]
            return replay.body(jaxpr, place.inside(eqn, jaxpr))(values), ()

        arrays = [x.array for x in ins]
        outs, _ = _jaxpr.map_shards(eqn, arrays, self.scalars, body)
        return outs


def given(array: Any) -> Value:
    """Returns what comes from outside. A 16-bit array stays what it is."""
    return Value(widened(array), narrow=True)


def is_call(eqn: Equation) -> bool:
    """Whether an equation calls, repeats or chooses between jaxprs."""
    return bool(_jaxpr.call_kind(eqn)) and not _jaxpr.takes_reference(eqn)


def bodies_of(eqn: Equation, platform: str) -> list[Any]:
    """Returns the jaxprs in an equation that run on a platform."""
    bodies = [body.jaxpr for body in _jaxpr.call_layout(eqn).bodies]
    if not _jaxpr.chooses_platform(eqn):
        return bodies
    # A product of 16-bit operands is widened first on a CPU, which gives the same
    # numbers. The other branch says what is rounded.
    for body in bodies:
        first, *rest = _jaxpr.open_jaxpr(body).eqns or [None]
        if first is None or rest or first.primitive.name not in PRODUCTS:
            continue
        if any(is_narrow(x.aval) for x in first.invars):
            return [body]
    return [_jaxpr.chosen_branch(eqn, platform)]


def after_trip(goes_on: Any, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """Returns what a ``while`` carries after a trip.

    Under ``vmap`` its test is an array, whose axes are the first of all that is
    carried. The loop goes on while any example does, and those that have ended wait for
    the others. ``lax.while_loop`` takes no such test.
    """
    if not jnp.ndim(goes_on):
        return list(new)
    return [
        jnp.where(jnp.expand_dims(goes_on, range(goes_on.ndim, x.ndim)), x, y)
        for x, y in zip(new, old, strict=True)
    ]


def jitted(fun: Callable, platform: str) -> Any:
    """Jits a function for a platform, with every rounding that is in its jaxpr."""
    options: Any = {"xla_allow_excess_precision": False}
    if platform == "cpu":  # where compiling takes longer than running
        options["xla_backend_optimization_level"] = 0
    return jax.jit(fun, compiler_options=options)


def compiled(fun: Callable, *args: Any) -> Callable[..., Any]:
    """Compiles a function for some arguments, see :func:`jitted`."""
    platform = platform_of(jax.tree.leaves(args))
    return jitted(fun, platform).lower(*args).compile()


def _literal(literal: Any) -> Value:
    return Value(wide_literal(literal), narrow=True)


def _scan(eqn: Equation, ins: list[Value], body: Callable) -> list[Any]:
    n_consts, n_carry = _jaxpr.scan_counts(eqn)
    n_fixed = n_consts + n_carry
    consts, rest = ins[:n_consts], ins[n_fixed:]

    def step(carry, slices):
        carry = [Value(x) for x in carry]
        slices = [x._replace(array=y) for x, y in zip(rest, slices, strict=True)]
        outs = body([*consts, *carry, *slices])
        return outs[:n_carry], outs[n_carry:]

    carry, ys = lax.scan(
        step,
        [jnp.asarray(x.array) for x in ins[n_consts:n_fixed]],
        [jnp.asarray(x.array) for x in rest],
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params.get("unroll", 1),
    )
    return [*carry, *ys]


def _while_loop(
    eqn: Equation, ins: list[Value], test: Callable, body: Callable
) -> list[Any]:
    layout = _jaxpr.call_layout(eqn)
    first = layout.fixed_in.start

    def values(i, carry):
        closed_over = [ins[j] for j in layout.bodies[i].operands if j < first]
        return [*closed_over, *(Value(x) for x in carry)]

    def goes_on(carry):
        return test(values(0, carry))[0]

    # The primitive would take a test of many bools, but no bodies that close over
    # the scalars.
    return lax.while_loop(
        lambda carry: jnp.any(goes_on(carry)),
        lambda carry: after_trip(goes_on(carry), body(values(1, carry)), carry),
        [jnp.asarray(x.array) for x in ins[first:]],
    )


def _of_arrays(body: Callable, ins: list[Value]) -> Callable[..., list[Any]]:
    """Returns a body as a function of other arrays, of which the same is known."""

    def branch(arrays: Sequence[Any]) -> list[Any]:
        return body([x._replace(array=y) for x, y in zip(ins, arrays, strict=True)])

    return branch


_FLOAT32 = np.dtype(np.float32)
_HUGE = np.finfo(np.float32).max
_KNOWN = DEFAULT_OPS.allow | DEFAULT_OPS.infer | DEFAULT_OPS.deny


def widened(x: Any) -> Any:
    """Returns a 16-bit array, or the type of one, in float32."""
    if not is_narrow(x):
        return x
    if isinstance(x, _jaxpr.ShapedArray):
        return x.update(dtype=_FLOAT32)
    return lax.convert_element_type(x, jnp.float32)


def before_rounding(eqn: Equation, arrays: Sequence[Any]) -> Any:
    """Returns the 16-bit result of ``eqn`` as float32 has it, None if it is the same.

    Only for what rounds: casts, arithmetic and products.
    """
    if len(eqn.outvars) != 1 or not is_narrow(eqn.outvars[0].aval):
        return None
    name = eqn.primitive.name
    if _jaxpr.is_cast(eqn):
        wide = jnp.issubdtype(arrays[0].dtype, jnp.floating)
        return widened(arrays[0]) if wide and arrays[0].dtype.itemsize > 2 else None
    is_sum = name in ARITHMETIC or is_attention(eqn)
    if not is_sum and name in PRODUCTS and all(is_narrow(x) for x in arrays[:2]):
        return summed_by_platform(eqn, arrays)
    if is_sum:
        return bind_wide(eqn, [*map(widened, arrays)])[0]
    return None


def bind_wide(eqn: Equation, arrays: Sequence[Any]) -> list[Any]:
    """Applies ``eqn`` to arrays that are float32 where it was written for 16 bits.

    Its results are float32 there too. What means nothing but what it was written for
    gets its 16 bits back.
    """
    if not any(is_narrow(x.aval) for x in (*eqn.invars, *eqn.outvars)):
        return _jaxpr.bind(eqn, arrays)
    if _jaxpr.is_cast(eqn):
        (var,), (x,) = eqn.outvars, arrays
        dtype = _FLOAT32 if is_narrow(var.aval) else var.aval.dtype
        return [lax.convert_element_type(x, dtype)]
    name = eqn.primitive.name
    if name in AS_WRITTEN or name not in _KNOWN:
        arrays = [
            lax.convert_element_type(x, var.aval.dtype) if is_narrow(var.aval) else x
            for x, var in zip(arrays, eqn.invars, strict=True)
        ]
        return [*map(widened, _jaxpr.bind(eqn, arrays))]
    changed = {}
    for key, param in eqn.params.items():
        if isinstance(param, (np.dtype, type)) and is_narrow(np.dtype(param)):
            changed[key] = _FLOAT32
        elif _jaxpr.is_jaxpr(param):
            changed[key] = _in_float32(param)
    return _jaxpr.bind(eqn, arrays, **changed)


def _in_float32(jaxpr: Any) -> Any:
    """Returns a jaxpr, of the scalars of a reduction for one, in float32."""

    def wide(*arrays):
        return _jaxpr.interpret(
            jaxpr, arrays, bind_wide, literal=lambda x: wide_literal(x)
        )

    closed = _jaxpr.trace(wide, [*map(widened, _jaxpr.in_avals(jaxpr))])
    return closed if isinstance(jaxpr, _jaxpr.ClosedJaxpr) else closed.jaxpr


def wide_literal(literal: Any) -> Any:
    """Returns a number in the code, in float32 if it is one of 16 bits.

    An Inf there was a number such as -1e9, or may as well be one.
    """
    if not is_narrow(literal.aval):
        return literal.val
    number = np.asarray(literal.val).astype(np.float32)
    return np.clip(number, -_HUGE, _HUGE)


def platform_of(arrays: Sequence[Any]) -> str:
    """Returns the platform that a function of these arrays runs on."""
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, _jaxpr.Tracer):
            return next(iter(x.sharding.device_set)).platform
    return jax.default_backend()
