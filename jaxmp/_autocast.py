"""Mixed precision for a function as it stands."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._op_lists import DEFAULT_OPS, OpLists
from ._replay import AUTOCAST_SCOPE, FLOAT32_SCOPE, Caster


def autocast(
    fun: Callable,
    policy: Any = None,
    *,
    ops: OpLists = DEFAULT_OPS,
    float32_paths: Iterable[str] = (),
) -> Callable:
    """Runs the matrix products and convolutions of ``fun`` in 16 bits.

    ``fun`` is any function that JAX can trace, as it stands: a model's ``apply``, a
    loss, or a whole ``value_and_grad``. Products take their operands in 16 bits; sums,
    exponentials and whatever autocast does not know see the dtypes they were written
    for; elementwise work follows its inputs. Put it around the differentiated
    function where you can: in ``autocast(value_and_grad(loss))`` the backward pass
    adds in float32, and gradients come out in float32 unrounded.

    Args:
        fun: Function of any pytrees. Leaves that are not JAX arrays (Python numbers,
            strings, NumPy arrays) reach it as they are.
        policy: A policy, its name or a 16-bit dtype, of which the compute dtype is
            used; bfloat16 by default. Under a float32 policy nothing changes.
        ops: Which primitives to allow, to deny and to let follow.
        float32_paths: Named scopes, such as those that Linen gives its modules, to
            keep in float32 forward and backward. ``"head"``, or ``"Net/head"``, is a
            module of the Linen model ``Net`` with all that is below it.

    Returns:
        A function with the signature of ``fun``. Its outputs have the structure and
        the dtypes of those of ``fun``.

    Raises:
        ValueError: If the policy has overrides, or a path matches no named scope.
        TypeError: If a Flax module is used in a way that would lose its state.

    Examples:
        >>> def loss(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> grad = jaxmp.autocast(jax.grad(loss), jnp.float16)
        >>> grad(jnp.ones((4, 2)), jnp.ones((8, 4))).dtype
        dtype('float32')

    References:
        Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3,
        https://arxiv.org/abs/1710.03740.
    """
    if not callable(fun):
        raise TypeError(
            f"`autocast` needs a function, but got {type(fun).__name__}. "
            "Write `autocast(model.apply)`, and call the result."
        )
    dtype = _compute_dtype(policy)
    if dtype == jnp.float32:
        return float32_region(fun)
    paths = (float32_paths,) if isinstance(float32_paths, str) else float32_paths
    cast = Caster(dtype, ops, tuple(paths)).wrap(fun)

    @functools.wraps(fun)
    def autocast_fun(*args, **kwargs):
        _refuse_nnx_state((args, kwargs))
        with jax.named_scope(AUTOCAST_SCOPE), _explained():
            return cast(*args, **kwargs)

    return autocast_fun


def float32_region(fun: Callable) -> Callable:
    """Keeps ``fun`` in the dtypes that it was written in, inside an autocast function.

    Its inputs are brought back to float32. For a few lines,
    ``with jax.named_scope("jaxmp.float32"):`` does the same.

    Args:
        fun: Function that JAX can trace.

    Returns:
        The same function, in the named scope ``jaxmp.float32``.

    Examples:
        >>> def f(x):
        ...     return jaxmp.float32_region(jnp.matmul)(x, x)
        >>> x = jnp.full((2, 2), 1 / 3)
        >>> bool((jaxmp.autocast(f)(x) == f(x)).all())
        True
    """

    @functools.wraps(fun)
    def in_float32(*args, **kwargs):
        with jax.named_scope(FLOAT32_SCOPE):
            return fun(*args, **kwargs)

    return in_float32


def _compute_dtype(policy: Any) -> np.dtype:
    return np.dtype(jnp.bfloat16 if policy is None else policy)


def _refuse_nnx_state(args: Any) -> None:
    pass


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    yield
