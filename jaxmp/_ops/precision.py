"""The precision of float32 products: JAX's default, and what the user keeps in float32.

A float32 product is TF32 on an NVIDIA GPU from A100 on, and one pass of bfloat16 on a
TPU, as long as nobody names a precision. What the user keeps in float32 has one.

JAX writes ``jax_default_matmul_precision`` into each product that it traces, as if the
line had asked for it. So autocast traces without a default, and then gives it to the
products that it leaves as they were written.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from .._jaxprs import jaxpr as _jaxpr
from .products import (
    default_precision,
    is_of_float32,
    with_precision,
)

# JAX keeps what it has traced by its contexts. The rule of a derivative, which runs
# where there is a default, would otherwise be kept with the one of the first call.
_APART = jax.make_user_context(None)
# JAX asks for the highest precision where it factorises and inverts, and in the
# derivatives of that, but forgets it in that of a QR decomposition.
_jaxpr.make_qr_precise(lambda: _APART.value is not None)

# What a user may name: full float32 precision, or the default of the device.
Precision = Literal["highest", "default"]
PRECISIONS = get_args(Precision)

# What a device may make of the operands of a product that names none, with the bits of
# the fraction that it leaves.
Float32Products = Literal["tf32", "bfloat16"]
FLOAT32_PRODUCTS = get_args(Float32Products)
_FRACTIONS = {"tf32": 10, "bfloat16": 7}

# By jaxpr, so that what JAX shares between calls and layers stays shared.
_changed: Any = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def own_precisions() -> Iterator[None]:
    """Traces products with the precision that their lines ask for, and no other."""
    apart = _APART((default_precision(),))
    with jax.default_matmul_precision(None), apart:
        yield


def with_default_precision(fun: Callable, arrays: Sequence[Any]) -> list[Any]:
    """Calls ``fun`` apart from the default, which its products without one then get."""
    default = default_precision()
    if default is None:
        return fun(*arrays)
    with own_precisions():
        jaxpr = _jaxpr.trace(fun, arrays)
    return _jaxpr.jaxpr_as_fun(_throughout(jaxpr, _at_default, default))(*arrays)


def _at_default(eqn: _jaxpr.Equation, default: Any) -> _jaxpr.Equation:
    """Returns ``eqn``, the products without a precision that it is or holds at one."""
    eqn = with_precision(eqn, default)
    return _jaxpr.with_jaxprs(eqn, lambda x: _throughout(x, _at_default, default))


def at_precision(eqn: _jaxpr.Equation, precision: str) -> _jaxpr.Equation:
    """Returns ``eqn``, the float32 products that it is or holds at a precision.

    Args:
        eqn: The equation.
        precision: One of :data:`PRECISIONS`. Products whose own line names one keep it.
    """
    if precision == "default":
        return eqn
    if is_of_float32(eqn):
        return with_precision(eqn, (lax.Precision.HIGHEST,) * 2)
    return _jaxpr.with_jaxprs(eqn, lambda x: _throughout(x, at_precision, precision))


def _throughout(jaxpr: Any, change: Callable, precision: Any) -> Any:
    """Returns ``jaxpr``, each of its equations as ``change(equation, precision)``."""
    memo, key = _changed.setdefault(jaxpr, {}), (change, precision)
    if key not in memo:
        eqns = _jaxpr.open_jaxpr(jaxpr).eqns
        memo[key] = _jaxpr.with_fields(
            jaxpr, eqns=[change(eqn, precision) for eqn in eqns]
        )
    return memo[key]


def rounded_by_device(x: jax.Array, kind: Float32Products) -> jax.Array:
    """Returns a float32 operand of a product as a device takes it, to nearest."""
    if jnp.iscomplexobj(x):
        return lax.complex(
            *(rounded_by_device(part, kind) for part in (x.real, x.imag))
        )
    return lax.reduce_precision(x, 8, _FRACTIONS[kind])
