"""Checks the program of the user's function.

A warning where no matmul runs in 16 bits, a note on an error that the cast of arguments
has led to, and a refusal of a loss that reads a shard as if it were all of it.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.core

from .._base.around import knowing
from .._base.checks import warn
from .._base.dtypes import is_wide
from .._base.policy import Policy
from .._base.tree import is_inexact, path_name
from .._gradients.differentiate import Options
from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.flatten import flatten, traced
from .._jaxprs.places import is_users, short_line
from .._jaxprs.scopes import BACKWARD
from .._jaxprs.walk import At, Forward
from .._ops.products import flops


def warns_if_promoted(
    policy: Policy, fun: Callable[..., Any], user: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns ``fun``, whose first call warns if no product of it runs in 16 bits.

    The parameters among its arguments have been cast by the policy. Their names are
    those of ``user``, the function that the user gave. The call is traced, looked at,
    and replayed. ``with_policy`` and ``autocast`` see to their inputs themselves.
    """
    seen = False

    def looked_at(state, *args, **kwargs):
        nonlocal seen
        if seen:
            return fun(state, *args, **kwargs)
        seen = True

        @functools.wraps(user, updated=())
        def loss(*args, **kwargs):
            return fun(state, *args, **kwargs)

        flat = flatten(loss, args, kwargs)
        pairs = zip(flat.names, flat.leaves, strict=True)
        names = [name for name, x in pairs if is_tracer(x)]
        casting: list[bool] = []
        with knowing(casting=casting):
            jaxpr, arrays, rebuilt = traced(loss, args, kwargs, takes=is_tracer)
        products = [] if casting else _products(jaxpr, names)
        if products and None not in products:
            _warn_promoted(policy, next(filter(None, products), ""))
        return rebuilt(_jaxpr.jaxpr_as_fun(jaxpr)(*arrays))

    return looked_at


def is_tracer(x: Any) -> bool:
    """Whether an argument has no value that the function may ask for."""
    return isinstance(x, jax.core.Tracer)


def _warn_promoted(policy: Policy, why: str) -> None:
    warn(
        "No matmul runs in 16 bits. `policy=` casts only the differentiated "
        "arguments, and other float32 arrays promote every matmul to float32."
        f"{why} To run them in {policy.compute_dtype}, leave `policy=` out and put "
        "autocast around the gradient function, `autocast(grad_fn, policy)`; or "
        "cast the inputs in the loss too, `jaxmp.with_policy(model.apply, policy)`."
    )


# What makes a product wide: its rank among others, its name, and its dtype.
Cause = tuple[int, str, str]


def _products(jaxpr: Any, names: Sequence[str]) -> list[str | None]:
    """Returns in words what makes each product of a program wide.

    Arguments come before constants. None stands for a product in 16 bits.
    """
    found: list[str | None] = []

    def causes(rank: int, name: str, aval: Any) -> frozenset[Cause]:
        is_cause = is_wide(aval) and not aval.weak_type
        return frozenset([(rank, name, str(aval.dtype))] if is_cause else [])

    def known(x: Any, at: At) -> frozenset[Cause]:
        aval: Any = x.aval if isinstance(x, _jaxpr.Literal) else jax.typeof(x)
        return causes(len(names), f"a constant {aval.dtype}{[*aval.shape]}", aval)

    def reached(eqn: _jaxpr.Equation, ins: list[Any], at: At) -> list[Any]:
        made = frozenset[Cause]().union(*ins)
        if flops(eqn, back=BACKWARD in at.scopes):
            is_half = not any(is_wide(x.aval) for x in eqn.invars[:2])
            found.append(None if is_half else why(eqn, made))
        return [made if is_wide(x.aval) else frozenset() for x in eqn.outvars]

    def why(eqn: _jaxpr.Equation, made: frozenset[Cause]) -> str:
        _, name, dtype = min(made, default=(0, "", ""))
        if not name:
            return ""
        lines = (f"{x[0]}:{x[1]}" for x in _jaxpr.frames(eqn) if is_users(x[0]))
        where = f" at {short_line(line)}" if (line := next(lines, "")) else ""
        cure = " Cast it to float32 first, `x.astype(jnp.float32)`."
        text = f" The matmul{where} is {dtype} because {name} is."
        return text + cure * (dtype == "float64")

    pairs = zip(names, _jaxpr.in_avals(jaxpr), strict=True)
    given = [causes(i, f"`{name}`", aval) for i, (name, aval) in enumerate(pairs)]
    walk = Forward(reached, lambda xs: frozenset().union(*xs), known)
    walk.through(jaxpr, given)
    return found


def note_cast(
    error: Exception,
    name: str,
    fun: Callable,
    policy: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    positions: Collection[int | str] | None = None,
) -> None:
    """Adds a note to ``error`` if the cast of its arguments has made ``fun`` fail.

    That is so if JAX takes ``fun`` with the arguments as they were given, and not with
    those that ``name``, a function of jaxmp, has cast: at some positions, or all.
    """

    def cast(place: int | str, x: Any) -> Any:
        is_cast = positions is None or place in positions
        return policy.cast_to_compute(x) if is_cast else x

    cast_args = [cast(i, x) for i, x in enumerate(args)]
    cast_kwargs = {key: cast(key, x) for key, x in kwargs.items()}
    if _works(fun, cast_args, cast_kwargs) or not _works(fun, args, kwargs):
        return
    # Importing it here, because it takes long.
    from .._autocast.autocast import autocast

    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{x.filename}:{x.lineno}" for x in frames if is_users(x.filename)]
    where = f" at {lines[-1]}" if lines else ""
    dtype = policy.compute_dtype
    cure = "Compute that in float32, of `x.astype(jnp.float32)`"
    if _works(autocast(fun, dtype), args, kwargs):
        cure += (
            f', or use `jaxmp.autocast(fun, "{dtype}")` without the policy of `{name}`:'
            " it runs this program"
        )
    error.add_note(
        f"{cure}. `{name}` has cast arguments to {dtype}, which JAX does not take"
        f"{where}; as they were given it takes them."
    )
    # Before what JAX says of its frames.
    error.__notes__.insert(0, error.__notes__.pop())


def _works(fun: Callable, args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Whether JAX takes ``fun`` with some arguments, without running it."""
    flat = flatten(fun, tuple(args), kwargs)
    try:
        jax.eval_shape(flat.fun, *flat.leaves)
        # An operation that the device lacks in 16 bits shows when it is lowered.
        if not any(map(is_tracer, flat.leaves)):
            jax.jit(flat.fun).lower(*flat.leaves)
    except Exception:
        return False
    return True


_GATHER = (
    "Where its layer begins, pass it through `jaxmp.gather(params, specs, policy)`, "
    "with the PartitionSpecs of what is there. Or leave `gather=False` out: the "
    "function then sees whole parameters."
)
# Of a value: the shards that it was computed from and has not met the other parts of,
# each as its number and a mesh axis.
Alone = frozenset[tuple[int, Any]]
_WHOLE: Alone = frozenset()


def refuses_ungathered(
    options: Options, fun: Callable[..., Any], axes: Sequence[frozenset[Any]]
) -> Callable[..., Any]:
    """Returns ``fun``, raising where its loss reads a shard that it never gathers.

    Args:
        options: Of ``value_and_grad``, which know the parameters.
        fun: Called as ``fun(state, *args, **kwargs)``, returns the loss and more.
        axes: For each parameter, the mesh axes that it is sharded over.
    """

    def followed(eqn: _jaxpr.Equation, ins: list[Alone], at: At) -> list[Alone]:
        met = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        met = met if isinstance(met, (tuple, list)) else (met,)
        alone = frozenset(x for x in _WHOLE.union(*ins) if x[1] not in met)
        return [alone] * len(eqn.outvars)

    def checked(state, *args, **kwargs):
        entries, structure = jax.tree.flatten_with_path(options.params(args))
        leaves = [x for _, x in entries]
        own = [i for i, x in enumerate(leaves) if is_inexact(x) and axes[i]]
        names = {i: path_name(entries[i][0]) or "the parameter" for i in own}

        def loss(*shards):
            given = leaves.copy()
            for i, shard in zip(own, shards, strict=True):
                given[i] = shard
            whole = options.with_params(args, structure.unflatten(given))
            return [fun(state, *whole, **kwargs)[0]]

        try:
            jaxpr = _jaxpr.trace(loss, [leaves[i] for i in own])
        except (TypeError, ValueError) as error:
            some = ", ".join(f"`{name}`" for name in [*names.values()][:3])
            error.add_note(
                "Under `gather=False` of `jaxmp.value_and_grad` the function sees "
                f"shards, such as those of {some}. {_GATHER}"
            )
            raise
        given = [frozenset((i, axis) for axis in axes[i]) for i in own]
        walk = Forward(followed, lambda xs: _WHOLE.union(*xs), lambda *_: _WHOLE)
        (alone,) = walk.through(jaxpr, given)
        if alone:
            number, axis = min(alone, key=str)
            raise ValueError(
                f"`{names[number]}` is sharded over {axis!r}, and the loss reads the "
                f"shard of each device as if it were all of it. {_GATHER}"
            )
        return fun(state, *args, **kwargs)

    return checked
