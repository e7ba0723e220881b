"""The default precision that JAX is told, apart from what a product's line asks for.

JAX writes ``jax_default_matmul_precision`` into each product that it traces, as if the
line had asked for it. So autocast traces without a default, and then gives it to the
products that it leaves as they were written.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from . import _jaxpr
from ._products import default_precision, with_precision

# JAX keeps what it has traced by its contexts. The rule of a derivative, which runs
# where there is a default, would otherwise be kept with the one of the first call.
_APART = jax.make_user_context(None)

# By jaxpr, so that what JAX shares between calls and layers stays shared.
_given: Any = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def own_precisions() -> Iterator[None]:
    """Traces products with the precision that their lines ask for, and no other."""
    default = default_precision()
    if default is None:
        yield
        return
    with jax.default_matmul_precision(None), _APART(default):
        yield


def with_default_precision(fun: Callable, arrays: Sequence[Any]) -> list[Any]:
    """Calls ``fun`` apart from the default, which its products without one then get.

    Args:
        fun: Function of arrays that returns a list of arrays.
        arrays: Its arguments.
    """
    default = default_precision()
    if default is None:
        return fun(*arrays)
    with own_precisions():
        jaxpr = _jaxpr.trace(fun, arrays)
    return _jaxpr.jaxpr_as_fun(_with_default(jaxpr, default))(*arrays)


def _with_default(jaxpr: Any, default: Any) -> Any:
    """Returns ``jaxpr`` with a precision for each product that has none."""
    memo = _given.setdefault(jaxpr, {})
    if default not in memo:
        memo[default] = _jaxpr.with_eqns(
            jaxpr,
            [
                _jaxpr.with_jaxprs(
                    with_precision(eqn, default), lambda x: _with_default(x, default)
                )
                for eqn in _jaxpr.open_jaxpr(jaxpr).eqns
            ],
        )
    return memo[default]
