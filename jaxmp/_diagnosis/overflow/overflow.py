"""Which operation made the first Inf, NaN or fatal zero, on which line, in which layer.

The function is traced, and its jaxpr is run as a program that follows every Inf and NaN
(:mod:`~.probe`). Where that does not say what was wrong first, the limits of float16
are put back one after the other (:mod:`~.limits`). Here what was seen becomes a report.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from ..._base.checks import check_function, explains, uncalled
from ..._base.dtypes import is_narrow
from ..._jaxprs import scopes as _scopes
from ..._jaxprs.flatten import Flat, check_values, flatten, traced_in_float32
from ..._jaxprs.places import Place, caller, equations
from ..numbers import Eaten, Numbers
from .advice import Case, advice
from .limits import Limit, Limits, Line, line_of
from .probe import Probe, Seen, Site
from .report import TESTED, Fault, OperationRange, OverflowReport
from .trails import (
    BIRTHS,
    GIVEN,
    INF,
    INF_WRITTEN,
    KIND,
    LOST,
    LOW,
    NAN,
    NEVER,
    NOTHING,
    OPERANDS,
    OVER,
    RUNS,
    TOP,
    float32_of,
)

P = ParamSpec("P")


@explains("jaxmp.find_overflow(fun)(*args)")
def find_overflow(fun: Callable[P, Any]) -> Callable[P, OverflowReport]:
    """Finds the operation that made the first Inf or NaN of ``fun``, and its line.

    Pass the loss, the gradient function or the whole training step that failed, and
    call the result with the arguments of the failed step: keep the batch of a skipped
    step. The function runs once, compiled, on the devices of its arguments. A few
    numbers are recorded for each operation, and no array is returned.

    An operation is the ``first`` fault if its inputs are finite and its result is not,
    and if this reaches a result of the function or a test of finiteness such as that of
    :func:`jaxmp.loss_scaling`. An operation that turns the Inf of a mask into NaN
    counts too. Underflow is a fault as well: numbers may become zero or subnormal in
    float16, so that a result is Inf, NaN or off by more than 1% (a gradient by half).
    Then the operation that made the zeros is the ``first``. Anything that changes no
    result is no fault; an Inf that a softmax or a ``where`` removes is listed
    separately. The search looks into scans, while loops, branches, ``jax.checkpoint``,
    custom derivatives and ``shard_map``; ``report.notes`` says where it could not.

    To find out whether float32 has the fault too, the function is traced again with
    float32 arguments and without the casts of jaxmp, so that 1e-8 is 1e-8 there. If the
    function casts by itself, to a ``dtype=`` of its own, this is not always possible;
    the advice says so.

    Every value counts as the jaxpr has it, rounded to its dtype. XLA may leave out a
    rounding between two operations, and so avoid an overflow.

    Args:
        fun: Function that JAX can trace.

    Returns:
        A function of the arguments of ``fun`` that returns an :class:`OverflowReport`.

    Raises:
        TypeError: If ``fun`` is not callable, or an argument has no values.
        ValueError: If an argument was donated to a step that has run.

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
        return _Search(flat, jaxpr, Place(user=caller())).report()

    return uncalled("find_overflow", fun, searched)


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
            **_line_of(site)._asdict(),
            kind="NaN" if bits[KIND] == 2 else "Inf",
            trips=trips,
            inputs=tuple((str(x.dtype), x.shape, float32_of(top)) for x, top in shown),
            largest=float(jnp.finfo(site.dtype).max),
        )

    def sites_of(self, limit: Limit) -> list[int]:
        """Returns the sites of an operation, in the order of the program."""
        sites = self.probe.sites
        same = [i for i, x in enumerate(sites) if _line_of(x) == limit.line]
        return [i for i in same if sites[i].eqn == limit.eqn] or same

    def lost(self, number: int) -> float:
        """Returns the fraction of a site's values that 16 bits lose."""
        counts, size = self.seen.rows.counts[number], self.probe.sites[number].size
        return float(counts[LOST] / max(counts[RUNS] * size, 1))


class _Search:
    """A program that is searched, and what was asked about it."""

    def __init__(self, flat: Flat, jaxpr: Any, around: Place):
        """Runs the program, and asks what the first fault calls for."""
        self.flat, self.jaxpr, self.around = flat, jaxpr, around
        self.dtypes = {  # of at most 16 bits
            str(atom.aval.dtype)
            for eqn, _ in equations(jaxpr, around)
            for atom in (*eqn.invars, *eqn.outvars)
            if is_narrow(atom.aval)
        }
        self.found = _run(flat, jaxpr, around, wide=False)
        self.moment = self.found.first()
        self.first: Fault | None = None
        self.number: int | None = None  # the site of the fault
        self.limit: Limit | None = None
        self.finite_in_float32: bool | None = None
        self.fault_in_float32: Fault | None = None  # if that is at another line
        self.swallowed: Fault | None = None
        if self.moment is not None:
            number, trips = self.found.site(self.moment)
            self.number, self.first = number, self.found.fault(number, trips)
            self._explain(number)
        elif self._may_be_wrong():
            self._look_for_wrong_results()

    @functools.cached_property
    def twin(self) -> Any:
        """The same function, traced in float32; None if that cannot be."""
        return traced_in_float32(self.flat.fun, self.flat.leaves)

    @functools.cached_property
    def numbers(self) -> Numbers:
        """What 16 bits have eaten of the numbers in the code."""
        return Numbers(self.jaxpr, lambda: self.twin, self.around)

    @functools.cached_property
    def limits(self) -> Limits:
        """The program with the limits of float16 put back one after the other."""
        return Limits(self.flat, self.jaxpr, self.numbers, self.around)

    def _explain(self, number: int) -> None:
        """Asks whether float32 has the fault of a site, and what has led to it."""
        self.finite_in_float32 = False
        if not self.dtypes:
            return
        jaxpr = self.jaxpr if self.twin is None else self.twin
        wide = _run(self.flat, jaxpr, self.around, wide=True)
        moment = wide.first()
        if moment is None:
            self.finite_in_float32 = True
        elif "float16" in self.dtypes and not self.numbers.are_known:
            self.finite_in_float32 = None if self.limits.may_be_finite() else False
        if moment is not None and self.finite_in_float32 is False:
            fault = wide.fault(*wide.site(moment))
            if self.first is not None and fault.where != self.first.where:
                self.fault_in_float32 = fault
        if self.finite_in_float32 is False or "float16" not in self.dtypes:
            return
        counts = self.found.seen.rows.counts
        limit: Limit | None = None
        if not counts[number, OVER]:  # what came in was wrong already
            limit = self.limits.first_bad()
        elif counts[:number, LOST].any():  # perhaps that, too
            limit = self.limits.first_wrong()
        if limit is not None and self._is_zero(limit):
            self.limit, self.first = limit, self._fault_of(limit)
        elif limit is not None and limit.number is not None:
            self.limit = limit

    def _may_be_wrong(self) -> bool:
        """Whether numbers have left float16, or those of the code may have."""
        if "float16" not in self.dtypes:
            return False
        counts = self.found.seen.rows.counts
        return bool((counts[:, LOST] + counts[:, INF]).any()) or any(self.numbers)

    def _look_for_wrong_results(self) -> None:
        self.limit = self.limits.first_wrong()
        if self.limit is None:
            return
        fault = self._fault_of(self.limit)
        if fault.kind == "zeros":
            self.first = fault
        else:
            self.swallowed = fault

    def _is_zero(self, limit: Limit) -> bool:
        """Whether the limits of an operation make zeros, and not Inf."""
        if limit.number is not None:
            return limit.number.left == 0
        counts = self.found.seen.rows.counts[self.found.sites_of(limit)]
        return not (counts[:, OVER] + counts[:, BIRTHS]).any()

    def _fault_of(self, limit: Limit) -> Fault:
        """Returns what happened at an operation that its limits have made wrong."""
        numbers, line = self.found.sites_of(limit), limit.line
        kind = "zeros" if self._is_zero(limit) else "Inf"
        if not numbers:  # a number in the code that a call is given
            self.number = None
            largest = float(jnp.finfo(line.dtype).max)
            return Fault(
                **line._asdict(), kind=kind, trips=(), inputs=(), largest=largest
            )
        counts = self.found.seen.rows.counts[numbers]
        column = LOST if kind == "zeros" else INF
        self.number = numbers[int(np.argmax(counts[:, column] > 0))]
        return dataclasses.replace(self.found.fault(self.number, ()), kind=kind)

    def report(self) -> OverflowReport:
        """Returns what was found."""
        found, first = self.found, self.first
        given, reached = _given(found)
        leading = self._leading(given)
        operations = tuple(_ranges(found))
        return OverflowReport(
            first=first,
            advice=advice(self._case(operations, {**reached, **leading}, leading)),
            reached=self._reached(),
            reached_modules=_reached_modules(found, self.moment),
            given=given,
            others=tuple(_others(found, self.number if first else None)),
            finite_in_float32=self.finite_in_float32,
            operations=operations,
            notes=tuple(found.probe.notes),
        )

    def _case(
        self, operations: Sequence[OperationRange], given: dict, leading: dict
    ) -> Case:
        sites, number = self.found.probe.sites, self.number
        site = None if number is None else sites[number]
        backward = [i for i, x in enumerate(sites) if x.place.backward or x.place.again]
        narrow = [x for x in operations if is_narrow(jnp.dtype(x.dtype))]
        return Case(
            first=self.first,
            given=given,
            is_given=bool(leading),
            written=any(x[0] == INF_WRITTEN for x in self.found.moments()),
            finite_in_float32=self.finite_in_float32,
            fault_in_float32=self.fault_in_float32,
            overflows=number is not None
            and bool(self.found.seen.rows.counts[number, OVER]),
            number=self._number(),
            argument=self._argument(site),
            zeros="" if leading else self._zeros(),
            after_backward=bool(backward)
            and number is not None
            and number > backward[-1],
            cast_by=self._cast_by(site),
            override=self._override(site),
            lost=0.0 if number is None else self.found.lost(number),
            # A mask of `finfo(dtype).min` has none, and is meant.
            nearest=min(
                (x for x in narrow if x.headroom > 0),
                key=lambda x: x.headroom,
                default=None,
            ),
            swallowed=self.swallowed,
            is_seen=not self.found.probe.notes,
        )

    def _number(self) -> Eaten | None:
        """Returns the number in the code that is the fault, such as -1e9 in a mask."""
        if self.limit is not None and self.limit.number is not None:
            return self.limit.number
        if self.first is None or self.number is None:
            return None
        site, fault = self.found.probe.sites[self.number], self.first
        left = 0.0 if fault.kind == "zeros" else math.inf
        eaten = Eaten(left, None, site.dtype, site.operation, site.place)
        if site.is_cast and fault.inputs[0][2] in site.numbers:
            return eaten._replace(written=fault.inputs[0][2])
        is_inf = math.inf in site.numbers and is_narrow(site.dtype) and left
        return eaten if is_inf and self.finite_in_float32 is not False else None

    def _argument(self, site: Site | None) -> str:
        """Returns the name of the argument that the faulty operation casts."""
        names = self.found.probe.names
        return "" if site is None or site.given is None else names[site.given]

    def _cast_by(self, site: Site | None) -> str:
        """Returns what has brought the faulty operation into 16 bits.

        It is ``autocast``, ``optax``, a ``module`` of Flax, ``with_policy``, or the
        ``code`` of the user.
        """
        place = Place() if site is None else site.place
        if self.limit is not None:
            place = self.limit.place
        if _scopes.AUTOCAST in place.scopes:
            return "autocast"
        if place.library == "optax":
            return "optax"
        is_given = site is not None and site.given is not None
        if is_given and place.library == "jaxmp":
            return "with_policy"
        is_module = place.library == "flax" and not self._has_policy()
        return "module" if is_module else "code"

    def _has_policy(self) -> bool:
        """Whether a policy casts in the program."""
        return any(
            x.is_cast and x.place.library == "jaxmp" and is_narrow(x.dtype)
            for x in self.found.probe.sites
        )

    def _override(self, site: Site | None) -> str:
        """Returns the override for the module of the fault, if it has parameters."""
        inner = "" if site is None else "/".join(site.place.module.split("/")[1:])
        names = self.flat.names
        has = inner and any(re.search(re.escape(f"{inner}/"), x) for x in names)
        return f"{inner}/" if has and self._has_policy() else ""

    def _leading(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns what came in with Inf or NaN and led to the first fault."""
        if self.moment is None or self.finite_in_float32 is True:
            return {}
        names = enumerate(self.flat.names)
        return {x: given[x] for i, x in names if x in given and self._leads(i)}

    def _leads(self, i: int) -> bool:
        """Whether the first fault is gone with ones for what an argument has wrong.

        Wrong are Inf and NaN, and the zeros of an array of zeros.
        """
        leaves = list(self.flat.leaves)
        x = jnp.asarray(leaves[i])
        leaves[i] = jnp.where(jnp.isfinite(x) & (x != 0), x, jnp.ones((), x.dtype))
        again = _Found(self.found.probe, self.found.probe.run(self.around, leaves))
        return again.first() != self.moment

    def _zeros(self) -> str:
        """Returns the name of a float16 argument that is all zeros and led to a fault.

        It may have been more in float32.
        """
        if self.moment is None or self.finite_in_float32 is True:
            return ""
        for i, (name, x) in enumerate(
            zip(self.flat.names, self.flat.leaves, strict=True)
        ):
            is_zero = x.dtype == jnp.float16 and x.size and not np.asarray(x).any()
            if is_zero and self._leads(i):
                return name
        return ""

    def _reached(self) -> tuple[str, ...]:
        """Returns the names of the results that the fault reached."""
        if self.moment is None:
            wrong = self.limit.wrong if self.limit else ()
            return tuple(self.flat.out_names[i] for i in wrong) if self.first else ()
        names = zip(self.flat.out_names, self.found.seen.outs[:, :-2], strict=True)
        reached = [name for name, x in names if tuple(map(int, x)) == self.moment]
        if tuple(map(int, self.found.seen.failed)) == self.moment:
            reached.append(TESTED)
        return tuple(reached)


def _run(flat: Flat, jaxpr: Any, around: Place, *, wide: bool) -> _Found:
    probe = Probe(jaxpr, flat.names, wide=wide)
    return _Found(probe, probe.run(around, flat.leaves))


def _given(found: _Found) -> tuple[dict[str, tuple[int, int]], dict]:
    """Returns what came in with Inf or NaN: all of it, and what is in a result."""
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


def _reached_modules(found: _Found, moment: Any) -> tuple[str, ...]:
    if moment is None:
        return ()
    born = found.seen.rows.bits[:, KIND + 1 : -OPERANDS]
    modules = {
        site.place.module: None
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
    rows: dict[Line, list[int]] = {}
    for number, site in enumerate(found.probe.sites):
        is_looked_at = site.computes and not _is_scaled(site)
        if is_looked_at and found.seen.rows.counts[number, RUNS]:
            rows.setdefault(_line_of(site), []).append(number)
    for line, numbers in rows.items():
        yield _range(found, line, numbers)


def _line_of(site: Site) -> Line:
    return line_of(site.operation, site.dtype, site.place)


def _is_scaled(site: Site) -> bool:
    """Whether a site makes numbers that are scaled to fill float8."""
    return _scopes.FLOAT8_SCALED in site.place.scopes


def _range(found: _Found, line: Line, numbers: list[int]) -> OperationRange:
    bits = found.seen.rows.bits[numbers]
    counts = found.seen.rows.counts[numbers].astype(np.float64)
    sizes = np.array([found.probe.sites[i].size for i in numbers], np.float64)
    size = float(sizes @ counts[:, RUNS])
    low = bits[:, LOW].min()
    top = float32_of(bits[:, TOP].max())
    return OperationRange(
        **line._asdict(),
        size=int(size),
        max=top,
        min=0.0 if low == NOTHING else float32_of(low),
        headroom=math.log2(float(jnp.finfo(line.dtype).max) / top) if top else math.inf,
        lost=float(counts[:, LOST].sum() / size) if size else 0.0,
        nonfinite=float(counts[:, [NAN, INF]].sum() / size) if size else 0.0,
    )
