"""Which operation made the first Inf or NaN, on which line, in which layer.

The function is traced, and its jaxpr is run as a program that follows every Inf and NaN
(:mod:`jaxmp._probe`). Here what was seen becomes a report.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from . import _jaxpr, _scopes
from ._advice import Case, advice
from ._checks import check_function
from ._dtypes import is_narrow
from ._flatten import Flat, check_values, flatten
from ._look import NOTHING, float32_of
from ._overflow_report import Fault, OperationRange, OverflowReport
from ._places import Place, caller
from ._probe import Probe, Seen, Site
from ._trails import (
    BIRTHS,
    GIVEN,
    INF,
    INF_WRITTEN,
    KIND,
    LOST,
    LOW,
    NAN,
    NEVER,
    OPERANDS,
    RUNS,
    TOP,
)

P = ParamSpec("P")

# Numbers that stand for infinity in masks, as float32 has them.
_MASKS = {float(np.float32(10.0**i)) for i in range(5, 39)} | {
    float(jnp.finfo(dtype).max) for dtype in (jnp.bfloat16, jnp.float32)
}


def find_overflow(fun: Callable[P, Any]) -> Callable[P, OverflowReport]:
    """Finds the operation that made the first Inf or NaN of ``fun``, and its line.

    Give it the loss, the gradient function or the whole training step that broke, and
    the arguments with which it did: where a step is skipped, keep its batch. The
    function runs once, compiled, with its arguments and on their devices; beside each
    operation a few numbers are taken, and no array comes back.

    An operation is the ``first`` if its result is not finite although its inputs are,
    or are Inf as a mask is and its result is NaN, and if that reaches a result or makes
    a test of finiteness fail, such as that of :func:`jaxmp.loss_scaling`. What a
    softmax or a ``where`` swallows is listed apart. It looks into scans, while loops,
    branches, ``jax.checkpoint``, rules of derivatives and ``shard_map``;
    ``report.notes`` says where it could not.

    Every value counts as it stands in the jaxpr, rounded to its dtype. XLA may leave
    out a rounding between two operations, and so survive an overflow.

    Args:
        fun: Function that JAX can trace.

    Returns:
        A function of the arguments of ``fun`` that returns an :class:`OverflowReport`.

    Raises:
        TypeError: If ``fun`` is not callable, or an argument has no values.

    Examples:
        >>> def loss(w, x):
        ...     return jnp.mean((x @ w) ** 2)
        >>> w, x = jnp.full((4, 2), 100.0), jnp.full((8, 4), 10.0)
        >>> report = jaxmp.find_overflow(loss)(*jaxmp.cast_tree((w, x), "float16"))
        >>> report.first.operation, report.finite_in_float32
        ('integer_pow', True)
        >>> jaxmp.find_overflow(loss)(w, x).first is None
        True
    """
    check_function(
        "find_overflow",
        fun,
        "find_overflow(fun)",
        "Pass the loss, a function that calls `model.apply(params, x)`.",
    )

    @functools.wraps(fun, updated=())
    def searched(*args: P.args, **kwargs: P.kwargs) -> OverflowReport:
        flat = flatten(fun, args, kwargs)
        check_values("find_overflow", flat, "the arrays of the step that broke")
        jaxpr = jax.make_jaxpr(flat.fun)(*flat.leaves)
        return _search(flat, jaxpr, Place(user=caller()))

    return searched


class _Found(NamedTuple):
    """A run of the program, on the host."""

    probe: Probe
    seen: Seen

    def site(self, moment: Any) -> tuple[int, tuple[int, ...]]:
        """Returns the site of a moment, and the trip of each loop around it."""
        trips: list[int] = []
        for i in range(0, len(moment), 2):
            number = int(moment[i])
            loops = self.probe.sites[number].loops
            if len(loops) == i // 2:
                trips = [
                    loop.slice_of(int(trip))
                    for loop, trip in zip(loops, moment[1::2], strict=False)
                ]
                return number, tuple(trips)
        raise AssertionError("every moment ends with an operation")

    def moments(self) -> list[tuple[int, ...]]:
        """Returns the moments of what is not finite in the results and tests."""
        rows = [*self.seen.outs[:, :-2], self.seen.failed]
        return [tuple(map(int, row)) for row in rows if row[0] != NEVER]

    def first(self) -> tuple[int, ...] | None:
        """Returns the moment of the first operation among them."""
        return min((x for x in self.moments() if x[0] < GIVEN), default=None)

    def fault(self, number: int, trips: tuple[int, ...]) -> Fault:
        """Returns what happened at a site."""
        site, bits = self.probe.sites[number], self.seen.rows.bits[number]
        shown = zip(site.operands, bits[-OPERANDS:], strict=False)
        return Fault(
            operation=site.operation,
            dtype=str(site.dtype),
            kind="NaN" if bits[KIND] == 2 else "Inf",
            where=site.place.where,
            module=_module(site.place),
            backward=site.place.backward,
            trips=trips,
            inputs=tuple((str(x.dtype), x.shape, float32_of(top)) for x, top in shown),
            largest=float(jnp.finfo(site.dtype).max),
        )


def _search(flat: Flat, jaxpr: Any, around: Place) -> OverflowReport:
    found = _run(flat, jaxpr, around, wide=False)
    probe = found.probe
    moment = found.first()
    first = number = wide = swallowed = None
    is_number = by_autocast = after_backward = False
    if moment is not None:
        number, trips = found.site(moment)
        first = found.fault(number, trips)
        wide = False
        if _is_16bit(jaxpr):
            wide = _run(flat, jaxpr, around, wide=True).first() is None
        is_number = wide and _is_number(probe.sites[number], first)
        backward = [i for i, x in enumerate(probe.sites) if x.place.backward]
        after_backward = bool(backward) and number > backward[-1]
    elif hidden := _swallowed(found, flat, jaxpr, around):
        number = hidden[0]
        swallowed = found.fault(number, ())
    if number is not None:
        by_autocast = _scopes.AUTOCAST in probe.sites[number].place.scopes
    given, reaching = _given(found)
    operations = tuple(_ranges(found))
    narrow = [x for x in operations if is_narrow(jnp.dtype(x.dtype))]
    case = Case(
        first=first,
        given=reaching,
        written=any(x[0] == INF_WRITTEN for x in found.moments()),
        finite_in_float32=wide,
        is_number=is_number,
        after_backward=after_backward,
        by_autocast=by_autocast,
        # A mask of `finfo(dtype).min` has none, and is meant.
        nearest=min(
            (x for x in narrow if x.headroom > 0),
            key=lambda x: x.headroom,
            default=None,
        ),
        losing=max(
            (x for x in narrow if x.backward), key=lambda x: x.lost, default=None
        ),
        swallowed=swallowed,
        is_seen=not probe.notes,
    )
    return OverflowReport(
        first=first,
        advice=advice(case),
        reached=_reached(flat, found, moment),
        reached_modules=_reached_modules(found, moment),
        given=given,
        others=tuple(_others(found, number if first else None)),
        finite_in_float32=wide,
        operations=operations,
        notes=tuple(probe.notes),
    )


def _is_number(site: Site, fault: Fault) -> bool:
    """Whether the fault is a number in the code, such as -1e9 in a mask."""
    return site.is_number or (site.is_cast and fault.inputs[0][2] in _MASKS)


def _run(flat: Flat, jaxpr: Any, around: Place, *, wide: bool) -> _Found:
    probe = Probe(jaxpr, flat.names, wide=wide)
    return _Found(probe, probe.run(around, flat.leaves))


def _is_16bit(jaxpr: Any) -> bool:
    """Whether there is anything in a jaxpr that has at most 16 bits."""
    body = _jaxpr.open_jaxpr(jaxpr)
    atoms = [*body.invars, *(var for eqn in body.eqns for var in eqn.outvars)]
    if any(is_narrow(atom.aval) for atom in atoms):
        return True
    return any(_is_16bit(sub) for eqn in body.eqns for sub in _jaxpr.sub_jaxprs(eqn))


def _swallowed(found: _Found, flat: Flat, jaxpr: Any, around: Place) -> list[int]:
    """Returns the sites of Inf that are none in float32 and reached no result.

    Of numbers in the code, such as masks of -1e9, that is as it should be.
    """
    numbers = [
        number
        for number, (site, counts) in enumerate(
            zip(found.probe.sites, found.seen.rows.counts, strict=True)
        )
        if counts[BIRTHS] and counts[INF] and is_narrow(site.dtype)
        if not _is_number(site, found.fault(number, ()))
    ]
    if not numbers:
        return []
    wide = _run(flat, jaxpr, around, wide=True).seen.rows.counts
    return [i for i in numbers if not wide[i, BIRTHS]]


def _given(found: _Found) -> tuple[dict[str, tuple[int, int]], dict]:
    """Returns what came in with Inf or NaN: all of it, and what reached a result."""
    counts = {
        i: (int(look[2]), int(look[3]))
        for i, look in enumerate(found.seen.given)
        if look[2] or look[3]
    }
    names = found.probe.names
    reached = {x[0] - GIVEN for x in found.moments() if GIVEN <= x[0] < INF_WRITTEN}
    return (
        {names[i]: count for i, count in counts.items()},
        {names[i]: count for i, count in counts.items() if i in reached},
    )


def _reached(flat: Flat, found: _Found, moment: Any) -> tuple[str, ...]:
    names = zip(flat.out_names, found.seen.outs[:, :-2], strict=True)
    reached = [name for name, x in names if tuple(map(int, x)) == moment]
    if moment is not None and tuple(map(int, found.seen.failed)) == moment:
        reached.append("a test of finiteness")
    return tuple(reached)


def _reached_modules(found: _Found, moment: Any) -> tuple[str, ...]:
    if moment is None:
        return ()
    born = found.seen.rows.bits[:, KIND + 1 : -OPERANDS]
    modules = {
        _module(site.place): None
        for site, x in zip(found.probe.sites, born, strict=True)
        if tuple(map(int, x)) == moment
    }
    return tuple(filter(None, modules))


def _others(found: _Found, first: int | None) -> Iterator[Fault]:
    """Yields the other operations that have made Inf or NaN, each line once."""
    told, probe = set(), found.probe
    for number, counts in enumerate(found.seen.rows.counts):
        if counts[BIRTHS] and number != first and not _is_scaled(probe.sites[number]):
            moment = found.seen.rows.bits[number, KIND + 1 : -OPERANDS]
            trips = ()
            if moment[0] < GIVEN:
                site, trips = found.site(moment)
                trips = trips if site == number else ()
            fault = found.fault(number, trips)
            key = fault.operation, fault.where, fault.module, fault.backward
            if key not in told:
                told.add(key)
                yield fault


def _ranges(found: _Found) -> Iterator[OperationRange]:
    """Yields what each line computed in each module, by operation."""
    rows: dict[Any, list[int]] = {}
    for number, site in enumerate(found.probe.sites):
        if _is_looked_at(site) and found.seen.rows.counts[number, RUNS]:
            key = site.operation, site.dtype, site.place.where, _module(site.place)
            rows.setdefault((*key, site.place.backward), []).append(number)
    for key, numbers in rows.items():
        yield _range(found, key, numbers)


def _is_looked_at(site: Site) -> bool:
    """Whether a site makes numbers, and none that are scaled to fill float8."""
    return site.computes and not _is_scaled(site)


def _is_scaled(site: Site) -> bool:
    return _scopes.FLOAT8_SCALED in site.place.scopes


def _range(found: _Found, key: Any, numbers: list[int]) -> OperationRange:
    operation, dtype, where, module, backward = key
    bits = found.seen.rows.bits[numbers]
    counts = found.seen.rows.counts[numbers].astype(np.float64)
    sizes = np.array([found.probe.sites[i].size for i in numbers], np.float64)
    size = float(sizes @ counts[:, RUNS])
    low = bits[:, LOW].min()
    top = float32_of(bits[:, TOP].max())
    return OperationRange(
        operation=operation,
        dtype=str(dtype),
        where=where,
        module=module,
        backward=backward,
        size=int(size),
        max=top,
        min=0.0 if low == NOTHING else float32_of(low),
        headroom=math.log2(float(jnp.finfo(dtype).max) / top) if top else math.inf,
        lost=float(counts[:, LOST].sum() / size) if size else 0.0,
        nonfinite=float(counts[:, [NAN, INF]].sum() / size) if size else 0.0,
    )


def _module(place: Place) -> str:
    """Returns the module path of a place, which differentiation may have repeated."""
    return place.module
