"""Flax Linen under a policy, without the leak of float32 parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jmp

from ._grad import with_policy as _with_policy
from ._policy import get_policy
from ._tree import cast_tree, is_floating_array


def with_policy(model: nn.Module, policy: str | jmp.Policy) -> Callable[..., Any]:
    """Puts a Linen model under a policy that keeps some parameters in float32.

    Like :func:`jaxmp.with_policy` of ``model.apply``, and the results of submodules
    come back to compute dtype. In Linen a module without a ``dtype`` of its own
    promotes to its widest input or parameter, so that one float32 norm scale makes
    every product after it a float32 one. Here the norm itself is computed in float32
    and nothing after it.

    A submodule's result is cast where all floating arrays it was called with are in
    compute dtype, and where the module has no ``dtype`` of its own: a head built with
    ``dtype=jnp.float32`` returns float32.

    Args:
        model: A Linen module, not bound to variables.
        policy: A policy, or its string, such as ``"O2"``.

    Returns:
        A function ``apply(variables, *args, **kwargs)`` with the signature of
        ``model.apply``, to be differentiated, jitted, or given to a Flax
        ``TrainState`` as its ``apply_fn``.

    Examples:
        >>> import flax.linen as nn
        >>> model = nn.Sequential([nn.LayerNorm(), nn.Dense(2)])
        >>> variables = model.init(jax.random.key(0), jnp.ones((1, 3)))
        >>> def product_dtype(apply):
        ...     jaxpr = jax.make_jaxpr(apply)(variables, jnp.ones((1, 3)))
        ...     (line,) = [x for x in str(jaxpr).splitlines() if "dot_general" in x]
        ...     return line.split(":")[1].split("[")[0]
        >>> product_dtype(jaxmp.with_policy(model.apply, "O2"))
        'f32'
        >>> product_dtype(with_policy(model, "O2"))
        'f16'
    """
    policy = get_policy(policy)
    compute_dtype = policy.compute_dtype

    def bring_back(next_fun, args, kwargs, context):
        result = next_fun(*args, **kwargs)
        if not context.module.path or getattr(context.module, "dtype", None):
            return result
        arrays = [x for x in jax.tree.leaves((args, kwargs)) if is_floating_array(x)]
        if arrays and all(x.dtype == compute_dtype for x in arrays):
            return cast_tree(result, compute_dtype)
        return result

    @functools.wraps(model.apply, updated=())
    def apply(*args, **kwargs):
        with nn.intercept_methods(bring_back):
            return model.apply(*args, **kwargs)

    return _with_policy(apply, policy)
