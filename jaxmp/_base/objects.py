"""NNX objects that a function gets as copies, where its updates would be lost.

What is given as an object (a module, an optimizer, a stream, a variable) is the
caller's, and what a function changes in it should be there afterwards. An ``nnx.State``
holds values: what a function makes of them is its own, as under ``jax.jit``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from . import later
from .tree import is_inexact, path_name

_Path = tuple[Any, ...]


def refuse_lost_updates(function: str, cure: str, fun: Callable) -> Callable:
    """Returns ``fun``, raising where it changes an NNX object that it got as a copy.

    An object that crosses a JAX transformation as a pytree arrives as a copy, and what
    ``fun`` changes in it would be lost. One that is only read may pass. A function that
    raises already, in the name of another of ours, comes back as it is.
    """
    if hasattr(fun, "refuses_lost_updates"):
        return fun

    @functools.wraps(fun, updated=())
    def checked(*args, **kwargs):
        if not _leaves((args, kwargs), and_states=True):
            return fun(*args, **kwargs)
        # `jax.grad` hands on what it does not differentiate as it is.
        copies = jax.tree.map(lambda x: x, (args, kwargs))
        before = _leaves(copies)
        result = fun(*copies[0], **copies[1])
        after = _leaves(copies)
        written = [
            path
            for path in before | after
            if before.get(path, _NOTHING)[1] is not after.get(path, _NOTHING)[1]
        ]
        if not written:
            return result
        # A remat writes every variable back, as another tracer.
        written_back = _written_back(fun, args, kwargs, before, after, written)
        for path in written:
            if path not in written_back:
                owner, _ = before.get(path) or after[path]
                raise TypeError(
                    f"`jaxmp.{function}` was given the NNX object `{owner}`, and the "
                    f"function changed its variable `{_name(path[2:])}`: in a copy, so "
                    f"that the update would be lost. {cure}"
                )
        return result

    vars(checked)["refuses_lost_updates"] = function, cure  # for others to say
    return checked


def refuse_integers(function: str, cure: str | None, params: Any) -> None:
    """Raises where parameters to differentiate hold integers of an NNX object or state.

    Those are the counts and the keys of random streams, which have no gradient.

    Args:
        function: Our function, for the message.
        cure: What to type for an object; None where objects may have integers.
        params: List of the arguments to differentiate.
    """
    for path, (owner, leaf) in _leaves(params, and_states=True).items():
        own_cure = cure
        if owner in ("State", "FlatState"):
            own_cure = (
                "Split the parameters off, and pass the rest in another argument: "
                "`graph, params, rest = nnx.split(model, nnx.Param, ...)`."
            )
        if own_cure and hasattr(leaf, "shape") and not is_inexact(leaf):
            raise TypeError(
                f"`jaxmp.{function}` was given the NNX object `{owner}`, whose "
                f"variable `{_name(path[1:])}` has no gradient: its dtype is "
                f"{leaf.dtype}. {own_cure}"
            )


class _Leaf(NamedTuple):
    """A leaf of an NNX object."""

    owner: str  # the class of the object
    value: Any


_NOTHING = _Leaf("", None)


def _leaves(tree: Any, *, and_states: bool = False) -> dict[_Path, _Leaf]:
    nnx = sys.modules.get("flax.nnx")  # who has an object has imported it
    if nnx is None:
        return {}
    objects, states = (nnx.Pytree, nnx.Variable), (nnx.State, nnx.statelib.FlatState)
    wanted = (*objects, *states) if and_states else objects
    entries = jax.tree.leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, (*objects, *states))
    )
    return {
        path + inner: _Leaf(type(x).__name__, leaf)
        for path, x in entries
        if isinstance(x, wanted)
        for inner, leaf in jax.tree.leaves_with_path(x)
    }


def _name(path: _Path) -> str:
    return path_name(path).removesuffix("/value") or "value"


def _written_back(
    fun: Callable,
    args: Any,
    kwargs: Any,
    before: dict[_Path, _Leaf],
    after: dict[_Path, _Leaf],
    written: Sequence[_Path],
) -> set[_Path]:
    """Returns which variables that have been written have the value that they had."""

    def is_array(leaf):
        return leaf is not None and isinstance(leaf.value, jax.Array)

    entries, structure = jax.tree.flatten_with_path((args, kwargs))

    def run(values):
        copies = structure.unflatten(values.get(path, x) for path, x in entries)
        fun(*copies[0], **copies[1])
        return {path: leaf.value for path, leaf in _leaves(copies).items()}

    arrays = [x for x in written if is_array(before.get(x)) and is_array(after.get(x))]
    values = {path: before[path].value for path in arrays}
    return later.handed_back()(run, values)
