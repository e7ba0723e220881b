"""Reading, replaying and retracing jaxprs: all that JAX does not promise to keep.

Everything that leans on ``jax.extend.core``, on an attribute outside JAX's public
interface or on a JAX version lives in this file, so that a new release is met here.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

__all__ = ["ClosedJaxpr", "Jaxpr", "JaxprEqn", "Literal", "Primitive", "Var"]


def open_jaxpr(jaxpr: Any) -> Jaxpr:
    """Returns the equations of a jaxpr that may carry its constants."""
    # From 0.12 on `Jaxpr` and `ClosedJaxpr` are one class.
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def closed_consts(jaxpr: Any) -> Sequence[Any]:
    """Returns the constants that a jaxpr carries, none when it is open."""
    return jaxpr.consts if isinstance(jaxpr, ClosedJaxpr) else ()


def sub_jaxprs(eqn: JaxprEqn) -> Iterator[Any]:
    """Yields every jaxpr, open or closed, in the parameters of an equation."""
    for param in eqn.params.values():
        for item in param if isinstance(param, (tuple, list)) else (param,):
            if isinstance(item, (Jaxpr, ClosedJaxpr)):
                yield item


def trace(fun: Callable, avals: Sequence[Any]) -> ClosedJaxpr:
    """Traces a function of flat arguments.

    Args:
        fun: Function of ``len(avals)`` arrays that returns a list of arrays.
        avals: What to trace with: arrays, tracers or abstract values. Shape, dtype,
            weak type, sharding and varying mesh axes are kept.

    Returns:
        The closed jaxpr.
    """
    return jax.make_jaxpr(lambda *args: fun(*args))(*avals)


@contextlib.contextmanager
def located_at(eqn: JaxprEqn) -> Iterator[None]:
    """Emits with the named scopes, the source line and the context of ``eqn``."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    # `ctx` carries the mesh and the compute type under which the user's line ran.
    with (
        source_info_util.user_context(
            eqn.source_info.traceback, name_stack=name_stack
        ),
        eqn.ctx.manager,  # pyright: ignore[reportAttributeAccessIssue]
    ):
        yield


def bind(eqn: JaxprEqn, args: Sequence[Any], **changed: Any) -> list[Any]:
    """Applies the primitive of ``eqn`` to ``args``, with some parameters changed."""
    primitive, params = eqn.primitive, {**eqn.params, **changed}
    bound = primitive.get_bind_params(params)  # pyright: ignore
    # Up to 0.8 the functions of a call primitive came apart from its parameters.
    subfuns, params = bound if isinstance(bound, tuple) else ((), bound)
    out = primitive.bind(*subfuns, *args, **params)
    return list(out) if primitive.multiple_results else [out]


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns how many constants and carries a ``scan`` equation has."""
    if "ft_in" in eqn.params:  # from 0.12 on
        consts, carry, _ = eqn.params["ft_in"].elts
        return len(consts), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]


def scope_names(eqn: JaxprEqn) -> tuple[str, ...]:
    """Returns the named scopes around ``eqn``, outermost first.

    What differentiation and batching add to the stack is left out, so that the
    forward and the backward pass of a module have the same scopes.
    """
    # Scopes and transformations share a tuple; only the names of scopes are wanted.
    stack = eqn.source_info.name_stack.stack
    return tuple(
        name
        for entry in stack
        if type(entry).__name__ == "Scope"
        for name in entry.name.split("/")
        if name != "rematted_computation"
    )


def is_differentiated(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` was written by differentiation, forward or backward."""
    return any(
        type(entry).__name__ == "Transform" and entry.name in ("jvp", "transpose")
        for entry in eqn.source_info.name_stack.stack
    )


def live_primitives() -> dict[str, Primitive]:
    """Returns every primitive that exists in this process, by name."""
    # There is no registry: a primitive is known by having been created.
    found = (p for p in gc.get_objects() if isinstance(p, Primitive))
    return {primitive.name: primitive for primitive in found}
