"""Which outputs of a function are inputs of it, handed back as they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import jaxpr as _jaxpr


def sources(fun: Callable[..., Any], arrays: Sequence[Any]) -> list[int | None]:
    """Returns the number of the input that each output is, None if it is computed.

    Args:
        fun: Function of the arrays that returns a list of arrays.
        arrays: What to trace it with.
    """
    return _sources(_jaxpr.trace(fun, arrays), range(len(arrays)))


class _Slice(NamedTuple):
    """What the steps of a scan see of an array: its slices, one after the other."""

    of: Any
    scan: int  # the id of the equation


def _sources(jaxpr: Any, given: Sequence[Any]) -> list[Any]:
    """Returns which of ``given`` each output of a jaxpr is."""

    def apply(eqn, ins):
        if _jaxpr.call_kind(eqn) in ("", "shard_map"):
            return [None] * len(eqn.outvars)
        return _through(eqn, ins)

    def nothing(_):
        return None

    return _jaxpr.interpret(jaxpr, given, apply, const=nothing, literal=nothing)


def _through(eqn: Any, ins: list[Any]) -> list[Any]:
    """Follows an equation into the jaxprs that it holds."""
    layout = _jaxpr.call_layout(eqn)
    bodies = [b for b in layout.bodies if b.param != "cond_jaxpr"]  # of a `while`
    is_scan, carries = _jaxpr.call_kind(eqn) == "scan", layout.fixed_in
    if is_scan:
        slices = [_Slice(x, id(eqn)) for x in ins[carries.stop :]]
        ins = [*ins[: carries.stop], *slices]
    while True:
        found = [_sources(b.jaxpr, [ins[i] for i in b.operands]) for b in bodies]
        outs = [xs[0] if len({*xs}) == 1 else None for xs in zip(*found, strict=True)]
        pairs = zip(carries, layout.fixed_out, strict=True)
        away = [i for i, out in pairs if ins[i] not in (None, outs[out])]
        if not away:
            break
        for i in away:
            ins[i] = None
    others = outs[len(carries) :]
    if is_scan:
        others = [_whole(x, id(eqn)) for x in others]
    return [*(ins[i] for i in carries), *others]


def _whole(x: Any, scan: int) -> Any:
    """Returns of what ``x`` is each slice in a scan, None if of nothing."""
    return x.of if isinstance(x, _Slice) and x.scan == scan else None
