"""Refuses a loss that reads a shard as if it were the whole parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._base.tree import is_inexact, path_name
from .._gradients.differentiate import Options
from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.walk import At, Forward

_CURE = (
    "Where its layer begins, pass it through `jaxmp.gather(params, specs, policy)`, "
    "with the PartitionSpecs of what is there. Or leave `gather=False` out: the "
    "function then sees whole parameters."
)
# Of a value: the shards that it was computed from and has not met the other parts of,
# each as its number and a mesh axis.
Alone = frozenset[tuple[int, Any]]
_NOTHING: Alone = frozenset()


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
        alone = frozenset(x for x in _NOTHING.union(*ins) if x[1] not in met)
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
                f"shards, such as those of {some}. {_CURE}"
            )
            raise
        given = [frozenset((i, axis) for axis in axes[i]) for i in own]
        walk = Forward(followed, lambda xs: _NOTHING.union(*xs), lambda *_: _NOTHING)
        (alone,) = walk.through(jaxpr, given)
        if alone:
            number, axis = min(alone, key=str)
            raise ValueError(
                f"`{names[number]}` is sharded over {axis!r}, and the loss reads the "
                f"shard of each device as if it were all of it. {_CURE}"
            )
        return fun(state, *args, **kwargs)

    return checked
