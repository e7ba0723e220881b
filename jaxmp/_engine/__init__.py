"""A new inside of autocast, which is built beside the one that is in use.

It decides the dtype of every value by the ten rules of :mod:`jaxmp._engine.rules`.
`jaxmp.autocast` does not use it yet; `pytest --engine` runs all tests against it.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from .. import _scopes
from .._autocast import _as_paths, _dtypes, _explained, float32_region
from .._checks import refuse_lost_updates
from .._op_lists import DEFAULT_OPS, OpLists
from .._policy import PolicyLike
from .replay import Caster


def autocast(
    fun: Callable,
    policy: PolicyLike | None = None,
    *,
    ops: OpLists = DEFAULT_OPS,
    float32_paths: Iterable[str] = (),
    bfloat16_paths: Iterable[str] = (),
) -> Callable:
    """Runs ``fun`` as :func:`jaxmp.autocast` does, by the rules of this engine.

    Args:
        fun: Function that JAX can trace.
        policy: A policy, its string, or a dtype; None is bfloat16.
        ops: Which primitives to allow, to deny and to let follow.
        float32_paths: Named scopes to keep in float32.
        bfloat16_paths: Named scopes to keep out of float8.

    Returns:
        A function with the signature of ``fun``.

    Raises:
        NotImplementedError: If the policy asks for float8, which is to come.
    """
    dtype, float8 = _dtypes(policy)
    if dtype == jnp.float32:
        return float32_region(fun)
    cure = "Use `jaxmp.nnx.autocast`, which takes the same arguments."
    caster = Caster(
        dtype,
        ops,
        _as_paths(float32_paths),
        float8=float8,
        bfloat16_paths=_as_paths(bfloat16_paths),
    )
    cast = caster.wrap(refuse_lost_updates("autocast", cure, fun))

    @functools.wraps(fun, updated=())
    def autocast_fun(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(_scopes.AUTOCAST), _explained(fun):
            return cast(*args, **kwargs)

    return autocast_fun
