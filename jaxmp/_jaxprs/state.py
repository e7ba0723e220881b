"""State in a trace: what Linen and Haiku would leak, and what comes back as it was."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from .._base.tree import path_name
from . import jaxpr as _jaxpr
from .jaxpr import Tracer
from .walk import At, Forward, the_one


@contextlib.contextmanager
def linen_state_kept(fun: Callable) -> Iterator[None]:
    """Raises where variables of a Linen module outside were created or changed inside.

    They would hold tracers of a trace that is over.
    """
    linen = sys.modules.get("flax.linen")  # who has a module has imported it
    if linen is None or not _is_in_linen(linen, fun):
        yield
        return
    tracers = importlib.import_module("flax.core.tracers")
    outside, variables = tracers.current_trace(), {}

    def watch(next_fun, args, kwargs, context):
        scope = context.module.scope
        if scope is not None and scope.root.trace_level == outside:
            before = jax.tree.leaves(scope.root.variables())
            variables.setdefault(scope.root, set(map(id, before)))
        return next_fun(*args, **kwargs)

    with linen.intercept_methods(watch):
        yield
    for scope, before in variables.items():
        for path, leaf in jax.tree.leaves_with_path(scope.variables()):
            if isinstance(leaf, Tracer) and id(leaf) not in before:
                name = path_name(path)
                raise TypeError(
                    f"`autocast` wraps a Linen module inside another, and `{name}` was "
                    "created or changed in it, which would leak a tracer. Wrap the "
                    "outermost call: `autocast(model.apply, ...)`, and initialise "
                    "without autocast."
                )


@contextlib.contextmanager
def haiku_state_kept() -> Iterator[None]:
    """Raises where what a Haiku transform holds was created or changed inside.

    It would hold tracers of a trace that is over.
    """
    before = set(map(id, _held_by_haiku()))
    yield
    for leaf in _held_by_haiku():
        if isinstance(leaf, Tracer) and id(leaf) not in before:
            raise TypeError(
                "`autocast` was called inside of `hk.transform`, and a parameter, a "
                "state or the random stream of the transform was created or changed "
                "in it, which would leak a tracer. Wrap what Haiku returns: "
                "`autocast(transformed.apply, ...)`, and initialise without autocast."
            )


def _held_by_haiku() -> list[Any]:
    """Returns the arrays of the Haiku transform that runs, if one does."""
    haiku = sys.modules.get("haiku")  # who is in a transform has imported it
    if haiku is None:
        return []
    try:
        haiku.running_init()
    except ValueError:  # not in a transform
        return []
    held = haiku.get_params(), haiku.get_initial_state(), haiku.get_current_state()
    return jax.tree.leaves((held, haiku.maybe_get_rng_sequence_state()))


def _is_in_linen(linen: Any, fun: Callable) -> bool:
    """Whether ``fun`` is a Linen module or is called inside one.

    Watching methods lengthens every call stack, which JAX records for each operation:
    an eighth of the tracing time of a transformer.
    """
    context = getattr(linen.module, "_context", None)
    stack = getattr(context, "module_stack", [fun])  # ends with None outside modules
    inner: Any = inspect.unwrap(fun)  # of `value_and_grad`, the loss
    cells = getattr(inner, "__closure__", None) or ()
    # A cell to which nothing has been assigned yet is equal to an empty one.
    held = (cell.cell_contents for cell in cells if cell != types.CellType())
    known = [inner, getattr(inner, "__self__", None), *held]
    bound = any(isinstance(x, linen.Module) and x.scope is not None for x in known)
    return bound or stack[-1] is not None


def sources(fun: Callable[..., Any], arrays: Sequence[Any]) -> list[int | None]:
    """Returns the number of the input that each output is, None if it is computed."""
    return _SOURCES.through(_jaxpr.trace(fun, arrays), range(len(arrays)))


def handed_back(fun: Callable[[dict], dict], given: dict[Any, Any]) -> set[Any]:
    """Returns under which keys a function returns the array that it was given there."""
    if not given:
        return set()

    def flat(*arrays):
        found = fun(dict(zip(given, arrays, strict=True)))
        return [found[key] for key in given]

    found = sources(flat, [*given.values()])
    return {key for i, key in enumerate(given) if found[i] == i}


class _Slice(NamedTuple):
    """What the steps of a scan see of an array: its slices, one after the other."""

    of: Any
    scan: int  # the id of the equation


def _through(eqn: Any, ins: list[Any], at: At) -> list[Any]:
    """Follows an equation into the jaxprs that it holds."""
    if _jaxpr.call_kind(eqn) == "shard_map":
        return [None] * len(eqn.outvars)
    layout = _jaxpr.call_layout(eqn)
    carries, is_scan = layout.fixed_in, _jaxpr.call_kind(eqn) == "scan"
    if is_scan:
        slices = [_Slice(x, id(eqn)) for x in ins[carries.stop :]]
        ins = [*ins[: carries.stop], *slices]
    outs = _SOURCES.around(eqn, ins, at)
    if is_scan:
        for i, out in zip(carries, layout.fixed_out, strict=True):  # if it runs at all
            outs[out] = the_one((ins[i], outs[out]))
        outs[len(carries) :] = [
            x.of if isinstance(x, _Slice) and x.scan == id(eqn) else None
            for x in outs[len(carries) :]
        ]
    return outs


_SOURCES = Forward(
    lambda eqn, ins, at: [None] * len(eqn.outvars),
    the_one,
    known=lambda x, at: None,
    enter=_through,
)
