"""A function and its arguments as flat arrays: each with a name, or traced."""

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.core
import jax.numpy as jnp

from .._base.around import is_staged, knowing
from .._base.dtypes import is_narrow, without_casts
from .._base.tree import is_array, path_name, taken_out
from .jaxpr import FLOAT32, stage, trace
from .modules import module_scopes

T = TypeVar("T")


class Flat(NamedTuple):
    """A function of arrays that returns a list of arrays."""

    fun: Callable
    leaves: list[Any]  # its arguments: arrays, or what has a shape and a dtype
    names: list[str]  # of the leaves
    out_names: list[str]  # of what it returns, once it has been traced


def flatten(fun: Callable, args: tuple, kwargs: dict) -> Flat:
    """Returns ``fun`` on its array leaves. Other leaves reach it as they are."""

    def is_traced(x):  # also an abstract one
        return hasattr(x, "shape") and hasattr(x, "dtype")

    leaves, with_arrays = taken_out((args, kwargs), is_traced)
    parameters = _parameters(fun, len(args))
    names, out_names = [], []
    run = traced_by_us(fun)
    for (part, first, *rest), leaf in jax.tree.leaves_with_path((args, kwargs)):
        if is_traced(leaf):
            name = first.key if part.idx else parameters[first.idx]
            names.append(_named(name, tuple(rest)))

    def flat(*arrays):
        args, kwargs = with_arrays(arrays)
        outs = jax.tree.leaves_with_path(run(*args, **kwargs))
        outs = [(path, x) for path, x in outs if is_array(x)]
        out_names[:] = [_named("result", path) for path, _ in outs]
        return [x for _, x in outs]

    return Flat(flat, leaves, names, out_names)


def traced_by_us(fun: Callable[..., T]) -> Callable[..., T]:
    """Returns a function that we trace, with scopes for the modules that it is given.

    In it, ``is_staged`` says what it says here.
    """
    staged = is_staged()

    @functools.wraps(fun, updated=())
    def traced(*args, **kwargs):
        own, given = stage(), (inspect.unwrap(fun), args, kwargs)
        with knowing(own=own, staged=staged), module_scopes(given):
            return fun(*args, **kwargs)

    return traced


def _named(name: str, path: tuple[Any, ...]) -> str:
    """Returns a path, with a name in front if it begins with a number."""
    if not path or isinstance(path[0], jax.tree_util.SequenceKey):
        return f"{name}/{path_name(path)}".rstrip("/")  # a number alone says nothing
    return path_name(path)


def check_values(function: str, flat: Flat, when: str) -> None:
    """Refuses arguments without values, and such as have been given away.

    The message says ``when`` to call ``function``, with what arguments.
    """
    for name, x in zip(flat.names, flat.leaves, strict=True):
        if isinstance(x, (jax.ShapeDtypeStruct, jax.core.Tracer)):
            kind = "traced" if isinstance(x, jax.core.Tracer) else "abstract"
            raise TypeError(
                f"`{function}` needs values, but `{name}` is {kind}. Call it outside "
                f"of `jax.jit` and `jax.grad`, with {when}; `fun` itself may be jitted."
            )
        if isinstance(x, jax.Array) and x.is_deleted():
            raise ValueError(
                f"`{function}` needs values, but `{name}` has been deleted: a step "
                "that was jitted with `donate_argnums` has used up its memory. Call "
                f"`{function}` before that step, or keep a copy of what it is given, "
                "`before = jax.tree.map(jnp.copy, args)`. After a step that "
                "`jaxmp.loss_scaling` has skipped, what the step returned is as good: "
                "only the loss scale differs."
            )


def _parameters(fun: Callable, count: int) -> list[str]:
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        parameters = []
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    names = [p.name for p in parameters if p.kind in positional]
    return names + [f"argument {i}" for i in range(len(names), count)]


def traced_in_float32(fun: Callable, leaves: Sequence[Any]) -> Any:
    """Traces ``fun`` as if it had been written in float32.

    While JAX traces, a number in the code takes the dtype of what it meets: beside a
    float16 array 1e-8 is 0. Replaying in float32 what was traced in 16 bits comes too
    late for it. So the function is traced again, with float32 arguments, while the
    casts of jaxmp to 16 bits do nothing. What it casts by itself stays in 16 bits.

    Args:
        fun: Function of arrays.
        leaves: Its arguments, arrays or types; those of 16 bits become float32.

    Returns:
        A closed jaxpr, or None where ``fun`` does not take float32 arguments.
    """
    leaves = [
        jax.ShapeDtypeStruct(jnp.shape(x), FLOAT32) if is_narrow(x) else x
        for x in leaves
    ]
    with warnings.catch_warnings(), without_casts():
        warnings.simplefilter("ignore")  # they have been given once
        try:
            return jax.make_jaxpr(fun)(*leaves)
        except Exception:  # of any kind: the code is the user's
            return None


def is_jax_array(x: Any) -> bool:
    """Whether ``x`` is an array of JAX, or a tracer."""
    return isinstance(x, jax.Array)


def traced(
    fun: Callable,
    args: tuple,
    kwargs: dict,
    takes: Callable[[Any], bool] = is_jax_array,
) -> tuple[Any, list[jax.Array], Callable[[Sequence[Any]], Any]]:
    """Traces ``fun``. Leaves that are no JAX arrays stay as they are, on both sides.

    Args:
        fun: Function of any pytrees.
        args: Its arguments.
        kwargs: Its keyword arguments.
        takes: Which leaves of both are the inputs of the program.

    Returns:
        A jaxpr, its inputs, and what makes of its outputs what ``fun`` returns.
    """
    arrays, with_arrays = taken_out((args, kwargs), takes)
    rebuilt: Any = None

    @functools.wraps(fun, updated=())
    def flat(*arrays):
        nonlocal rebuilt
        args, kwargs = with_arrays(arrays)
        outs, rebuilt = taken_out(fun(*args, **kwargs), is_jax_array)
        return outs

    jaxpr = trace(flat, arrays)
    return jaxpr, arrays, rebuilt
