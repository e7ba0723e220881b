"""A jaxpr that was written for 16 bits, replayed in float32.

What an operation does, a class says that inherits from this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._base.dtypes import is_narrow
from .._base.tree import is_inexact, is_ref, widen
from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation
from .._jaxprs.replay import Replay
from .._ops import table
from .._ops.narrow import product_of
from .._ops.products import is_attention
from .numbers import LostNumber


class Wide(NamedTuple):
    """An array, float32 where it was written for 16 bits."""

    array: Any


class WideReplay(Replay):
    """The replay in float32; a class that inherits says what an operation does."""

    value = Wide
    keeps_remat = False  # what is known of a value is known where it is read again

    def __init__(self, program: Any, scalars: Any, axes: tuple[Any, ...] = ()):
        """Starts the replay of a program; operations may read the scalars."""
        super().__init__(program.platform, scalars, axes)
        self.program, self.numbers = program, program.numbers

    def inside(self, scalars: Any, axes: tuple[Any, ...]) -> WideReplay:
        return type(self)(self.program, scalars, axes)

    def outputs(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns what the program gives for some arrays."""
        jaxpr, around = self.program.jaxpr, self.program.around
        return [x.array for x in self.run(jaxpr, [*map(given, arrays)], around)]

    def number(self, eqn: Equation, lost: LostNumber) -> Any:
        """Returns a number that 16 bits have lost; None leaves it as it is."""
        raise NotImplementedError

    def constant(self, array: Any) -> Any:
        return given(array)

    def literal(self, literal: Any) -> Any:
        return Wide(wide_literal(literal))

    def read(self, eqn: Equation, ins: list[Wide]) -> list[Wide]:
        """Returns the inputs of an equation, and numbers as they were."""
        lost = [self.numbers.found.get((id(eqn), i)) for i in range(len(ins))]
        return [
            x if number is None else self.number(eqn, number) or x
            for x, number in zip(ins, lost, strict=True)
        ]


def given(array: Any) -> Wide:
    """Returns what comes from outside. A 16-bit array stays what it is."""
    return Wide(widened(array))


def jitted(fun: Callable, platform: str) -> Any:
    """Jits a function for a platform, with every rounding that is in its jaxpr."""
    options: Any = {
        "xla_allow_excess_precision": False,
        # It would look at constants number by number, for minutes in a whole program.
        "xla_disable_hlo_passes": "constant_folding",
    }
    if platform == "cpu":  # where compiling takes longer than running
        options["xla_backend_optimization_level"] = 0
    return jax.jit(fun, compiler_options=options)


def compiled(fun: Callable, *args: Any) -> Callable[..., Any]:
    """Compiles a function for some arguments, see :func:`jitted`."""
    platform = platform_of(jax.tree.leaves(args))
    return jitted(fun, platform).lower(*args).compile()


_FLOAT32 = np.dtype(np.float32)
_HUGE = np.finfo(np.float32).max


def widened(x: Any) -> Any:
    """Returns a 16-bit array, or the type of one, in float32."""
    if not is_narrow(x) or is_ref(x):
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
    if _jaxpr.is_cast(eqn):
        wide = jnp.issubdtype(arrays[0].dtype, jnp.floating)
        return widened(arrays[0]) if wide and arrays[0].dtype.itemsize > 2 else None
    is_sum = table.is_arithmetic(eqn) or is_attention(eqn)
    is_product = not is_sum and table.is_product_of_any_kind(eqn)
    if is_product and all(is_narrow(x) for x in arrays[:2]):
        return product_of(eqn).summed(arrays)
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
    if table.is_as_written(eqn):
        arrays = [
            x
            if is_ref(x) or not is_narrow(var.aval)
            else lax.convert_element_type(x, var.aval.dtype)
            for x, var in zip(arrays, eqn.invars, strict=True)
        ]
        return [*map(widened, _jaxpr.bind(eqn, arrays))]
    changed = {}
    for key, param in eqn.params.items():
        if isinstance(param, (np.dtype, type)) and is_narrow(np.dtype(param)):
            changed[key] = _FLOAT32
        elif _jaxpr.is_jaxpr(param):  # of the scalars of a reduction

            def wide(*arrays, of=param):
                return _jaxpr.interpret(of, arrays, bind_wide, literal=wide_literal)

            closed = _jaxpr.trace(wide, [*map(widened, _jaxpr.in_avals(param))])
            is_closed = isinstance(param, _jaxpr.ClosedJaxpr)
            changed[key] = closed if is_closed else closed.jaxpr
    return _jaxpr.bind(eqn, arrays, **changed)


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


@jax.jit
def compared(outs: Sequence[Any], reference: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Compares results: which are bad, how far they are away, and how large they are.

    Bad are those that are not finite where the others are, or the other way round, and
    truth values that differ.
    """
    bad, away, size = [], [], []
    for x, y in zip(widen(list(outs)), widen(list(reference)), strict=True):
        if not is_inexact(x):
            bad.append(x.dtype == bool and jnp.any(x != y))
            x = y = jnp.zeros(0)
        else:
            bad.append(jnp.any(jnp.isfinite(x) != jnp.isfinite(y)))
            finite = jnp.isfinite(x) & jnp.isfinite(y)
            x, y = jnp.where(finite, x, 0), jnp.where(finite, y, 0)
        away.append(_norm(x - y))
        size.append(_norm(y))
    return jnp.array(bad, bool), jnp.array(away), jnp.array(size)


def _norm(x: jax.Array) -> jax.Array:
    """Returns the root of the sum of squares, which may be beyond float32."""
    top = jnp.max(jnp.abs(x), initial=0)
    unit = jnp.where(top > 0, top, 1)
    return (unit * jnp.sqrt(jnp.sum(jnp.abs(x / unit) ** 2))).astype(jnp.float32)
