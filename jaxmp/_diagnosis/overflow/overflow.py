"""Which operation made the first Inf, NaN or fatal zero, on which line, in which layer.

The function is traced, and its jaxpr is run as a program that looks at what each
operation gives (:mod:`~.watch`). From that the origin of every Inf and NaN is found
(:mod:`~.origins`). Where that does not say what was wrong first, the limits of float16
are put back one after the other (:mod:`~.limits`). Here what was seen becomes a report.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from ..._base.checks import check_function, explains, uncalled
from ..._base.dtypes import is_narrow
from ..._jaxprs import scopes as _scopes
from ..._jaxprs.flatten import Flat, check_values, flatten, traced_in_float32
from ..._jaxprs.places import Place, caller, equations
from ..numbers import LostNumber, Numbers
from .advice import advice
from .limits import Limit, Limits
from .origins import Run, Seen
from .report import CHECKED, Fault, Line, OperationRange, OverflowReport
from .watch import GIVEN, INF_WRITTEN, Program, Site

P = ParamSpec("P")


@explains("jaxmp.find_overflow(fun)(*args)")
def find_overflow(fun: Callable[P, Any]) -> Callable[P, OverflowReport]:
    """Finds the operation that made the first Inf or NaN in ``fun``, and its line.

    Pass the loss, the gradient function or the whole training step that failed, and
    call the result with the arguments of the failed step: keep the batch of a skipped
    step. The function runs once, compiled, on the devices of its arguments. A few
    numbers are recorded for each operation, and no array is returned.

    An operation is the ``first`` fault if its inputs are finite and its result is not,
    and if this reaches a result of the function or an ``isfinite`` check, as that of
    :func:`jaxmp.loss_scaling`. An operation that turns the Inf of a mask into NaN
    counts too. Underflow is a fault as well: numbers may become zero or subnormal in
    float16, so that a result is Inf, NaN or off by more than 1% (a gradient by half).
    Then the operation that made the zeros is the ``first``. Anything that changes no
    result is not a fault; an Inf that a softmax or a ``where`` removes is listed
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
        return Search(flat, jaxpr, Place(user=caller())).report()

    return uncalled("find_overflow", fun, searched)


class Search:
    """A program that is searched, and what is known of its first fault.

    Attributes:
        found: What a run of the program has seen.
        first: The first fault, None if there is none.
        seen: What was seen at its operation.
        limit: The operation whose limits make a result wrong, if these were tried.
        finite_in_float32: Whether float32 has no fault; None if nobody can tell.
        fault_in_float32: Its fault there, if that is at another line.
        hidden: An overflow of 16 bits that made a result wrong, and not Inf or NaN.
    """

    def __init__(self, flat: Flat, jaxpr: Any, around: Place):
        """Runs the program, and asks what the first fault calls for."""
        self.flat, self.jaxpr, self.around = flat, jaxpr, around
        self.dtypes = {  # of at most 16 bits
            str(atom.aval.dtype)
            for eqn, _ in equations(jaxpr, around)
            for atom in (*eqn.invars, *eqn.outvars)
            if is_narrow(atom.aval)
        }
        self.found = Run(Program(jaxpr, flat.names, around), flat.leaves)
        self.origin = self.found.first
        self.first: Fault | None = None
        self.seen: Seen | None = None
        self.limit: Limit | None = None
        self.finite_in_float32: bool | None = None
        self.fault_in_float32: Fault | None = None
        self.hidden: Fault | None = None
        if self.origin is not None:
            self.seen = self.found.at(self.origin)
            self.first = _fault(self.seen, self.origin.trips)
            self._explain(self.seen)
        elif self._may_be_wrong():
            self.limit = self.limits.first_wrong()
            if self.limit is not None:
                fault = self._fault_of(self.limit)
                is_zero = fault.kind == "zeros"
                self.first, self.hidden = (fault, None) if is_zero else (None, fault)

    @functools.cached_property
    def twin(self) -> Any:
        """The same function, traced in float32; None if that cannot be."""
        return traced_in_float32(self.flat.fun, self.flat.leaves)

    @functools.cached_property
    def numbers(self) -> Numbers:
        """The numbers in the code that 16 bits have lost."""
        return Numbers(self.jaxpr, lambda: self.twin, self.around)

    @functools.cached_property
    def limits(self) -> Limits:
        """The program with the limits of float16 put back one after the other."""
        return Limits(self.flat, self.jaxpr, self.numbers, self.around)

    def _explain(self, seen: Seen) -> None:
        """Asks whether float32 has the fault, and what has led to it."""
        self.finite_in_float32 = False
        if not self.dtypes:
            return
        jaxpr = self.jaxpr if self.twin is None else self.twin
        program = Program(jaxpr, self.flat.names, self.around, wide=True)
        wide = Run(program, self.flat.leaves)
        if wide.first is None:
            self.finite_in_float32 = True
        elif "float16" in self.dtypes and not self.numbers.are_known:
            self.finite_in_float32 = None if self.limits.may_be_finite() else False
        if wide.first is not None and self.finite_in_float32 is False:
            fault = _fault(wide.at(wide.first), wide.first.trips)
            if self.first is not None and fault.where != self.first.where:
                self.fault_in_float32 = fault
        if self.finite_in_float32 is False or "float16" not in self.dtypes:
            return
        limit: Limit | None = None
        if not seen.over:  # what came in was wrong already
            limit = self.limits.first_bad()
        elif any(x.lost for x in self.found.seen[: seen.number]):  # perhaps that, too
            limit = self.limits.first_wrong()
        # An Inf that stands in the code, as a mask, may become NaN far from its line.
        if limit is not None and (limit.number is not None or self._is_zero(limit)):
            self.limit, self.first = limit, self._fault_of(limit)

    def _may_be_wrong(self) -> bool:
        """Whether numbers have left float16, or those of the code may have."""
        if "float16" not in self.dtypes:
            return False
        return any(x.lost or x.bad for x in self.found.seen) or any(self.numbers)

    def _is_zero(self, limit: Limit) -> bool:
        """Whether the limits of an operation make zeros, and not Inf."""
        if limit.number is not None:
            return limit.number.left == 0
        return not any(x.over or x.origins for x in self._seen_of(limit))

    def _seen_of(self, limit: Limit) -> list[Seen]:
        """Returns what was seen at an operation, where it ran first."""
        same = [x for x in self.found.seen if x.site.line == limit.line]
        same = [x for x in same if id(x.site.eqn) == limit.eqn] or same
        return sorted(same, key=lambda x: not x.runs)  # one branch of several runs

    def _fault_of(self, limit: Limit) -> Fault:
        """Returns what happened at an operation that its limits have made wrong."""
        seen, is_zero = self._seen_of(limit), self._is_zero(limit)
        guilty = [x for x in seen if (x.lost if is_zero else x.bad)]
        self.seen = next(iter([*guilty, *seen]), None)
        if self.seen is None:  # a number in the code that is only moved
            number, largest = limit.number, float(jnp.finfo(limit.line.dtype).max)
            written = None if number is None else number.written
            inputs = () if written is None else (("float32", (), abs(written)),)
            fault = Fault(
                **limit.line._asdict(),
                kind="Inf",
                trips=(),
                inputs=inputs,
                largest=largest,
            )
        else:
            fault = _fault(self.seen, ())
        return dataclasses.replace(fault, kind="zeros") if is_zero else fault

    def report(self) -> OverflowReport:
        found = self.found
        told = [self.seen, found.at(self.origin) if self.origin else None]
        return OverflowReport(
            first=self.first,
            advice=advice(self),
            reached=self._reached(),
            reached_modules=tuple(self._reached_modules()),
            given=self._given,
            others=tuple(_others(found, told if self.first else [])),
            finite_in_float32=self.finite_in_float32,
            operations=self.operations,
            notes=tuple(found.program.notes),
        )

    # What the advice asks.

    @functools.cached_property
    def operations(self) -> tuple[OperationRange, ...]:
        return tuple(_ranges(self.found))

    @property
    def nearest(self) -> OperationRange | None:
        """The 16-bit operation with the least headroom."""
        # A mask of `finfo(dtype).min` has none, and is meant.
        near = [x for x in self.operations if x.headroom > 0]
        near = [x for x in near if is_narrow(jnp.dtype(x.dtype))]
        return min(near, key=lambda x: x.headroom, default=None)

    @property
    def overflows(self) -> bool:
        """Whether float32 holds the result of the faulty operation."""
        return bool(self.seen and self.seen.over)

    @property
    def lost(self) -> float:
        """Which fraction of its values the faulty operation loses."""
        if self.seen is None:
            return 0.0
        return self.seen.lost / max(self.seen.runs * self.seen.site.size, 1)

    @property
    def argument(self) -> str:
        """The argument that the faulty operation casts."""
        return self.seen.site.argument if self.seen else ""

    @property
    def is_written(self) -> bool:
        """Whether an Inf that stands in the code reached a result."""
        return any(x.time[0] == INF_WRITTEN for x in self.found.origins)

    @property
    def number(self) -> LostNumber | None:
        """The number in the code that is the fault, such as -1e9 in a mask."""
        if self.limit is not None and self.limit.number is not None:
            return self.limit.number
        if self.first is None or self.seen is None:
            return None
        site, fault = self.seen.site, self.first
        left = 0.0 if fault.kind == "zeros" else math.inf
        lost = LostNumber(left, None, site.dtype, site.line.operation, site.place)
        written = [x for x in site.numbers if abs(x) == fault.inputs[0][2]]
        if site.is_cast and written:
            return lost._replace(written=written[0])
        is_inf = any(map(math.isinf, site.numbers)) and is_narrow(site.dtype) and left
        return lost if is_inf and self.finite_in_float32 is not False else None

    @property
    def in_optimizer(self) -> bool:
        """Whether the faulty operation is the optimizer's."""
        if self._place.library == "optax" and self.cast_by != "autocast":
            return True
        places = [x.site.place for x in self.found.seen]
        is_back = [x.backward or x.again for x in places]
        return bool(self.seen) and any(is_back) and not any(is_back[self.seen.number :])

    @property
    def _place(self) -> Place:
        """The place of the faulty operation."""
        if self.limit is not None:
            return self.limit.place
        return self.seen.site.place if self.seen else Place()

    @property
    def cast_by(self) -> str:
        """What has brought the faulty operation into 16 bits.

        It is ``autocast``, a ``module`` of Flax, ``with_policy``, or the ``code`` of
        the user.
        """
        place = self._place
        if _scopes.AUTOCAST in place.scopes:
            return "autocast"
        if self.argument and place.library == "jaxmp":
            return "with_policy"
        is_module = place.library == "flax" and not self._has_policy
        return "module" if is_module else "code"

    @functools.cached_property
    def _has_policy(self) -> bool:
        """Whether a policy casts in the program."""
        return any(
            site.is_cast and site.place.library == "jaxmp" and is_narrow(site.dtype)
            for site in (x.site for x in self.found.seen)
        )

    @property
    def override(self) -> str:
        """The override for the module of the fault, if it has parameters."""
        module = self.seen.site.place.module if self.seen else ""
        inner = f"{module.partition('/')[2]}/"
        has = inner != "/" and any(
            re.search(re.escape(inner), x) for x in self.flat.names
        )
        return inner if has and self._has_policy else ""

    @functools.cached_property
    def _given(self) -> dict[str, tuple[int, int]]:
        """The arguments with NaNs and Infs, and how many."""
        names = self.found.program.names
        return {names[i]: counts for i, counts in self.found.given.items()}

    @functools.cached_property
    def leading(self) -> dict[str, tuple[int, int]]:
        """Those of them that led to the first fault."""
        names = enumerate(self.flat.names)
        return {
            x: self._given[x] for i, x in names if x in self._given and self._leads(i)
        }

    @property
    def given(self) -> dict[str, tuple[int, int]]:
        """Those of them that reached a result, or led to the fault."""
        reached = {x.time[0] - GIVEN for x in self.found.origins}
        names = self.found.program.names
        found = {names[i]: x for i, x in self.found.given.items() if i in reached}
        return {**found, **self.leading}

    @functools.cached_property
    def zeros(self) -> str:
        """The name of a float16 argument that is all zeros and led to a fault.

        It may have been more in float32.
        """
        if self.leading:
            return ""
        for i, (name, x) in enumerate(
            zip(self.flat.names, self.flat.leaves, strict=True)
        ):
            is_zero = x.dtype == jnp.float16 and x.size and not np.asarray(x).any()
            if is_zero and self._leads(i):
                return name
        return ""

    def _leads(self, i: int) -> bool:
        """Whether the first fault is gone with ones for what an argument has wrong.

        Wrong are Inf and NaN, and the zeros of an array of zeros.
        """
        if self.origin is None or self.finite_in_float32 is True:
            return False
        leaves = list(self.flat.leaves)
        x = jnp.asarray(leaves[i])
        leaves[i] = jnp.where(jnp.isfinite(x) & (x != 0), x, jnp.ones((), x.dtype))
        return Run(self.found.program, leaves).first != self.origin

    def _reached(self) -> tuple[str, ...]:
        """Returns the names of the results that the fault reached."""
        if self.origin is None:
            wrong = self.limit.wrong if self.limit else ()
            return tuple(self.flat.out_names[i] for i in wrong) if self.first else ()
        outs, failed, limit = self.found.outs, self.found.failed, self.limit
        # What zeros have made wrong may begin at any operation behind them.
        wrong = {failed, *(outs[i] for i in limit.wrong)} if limit else set()
        behind = wrong.intersection(self.found.origins) | {self.origin}
        names = zip(self.flat.out_names, outs, strict=True)
        reached = [name for name, origin in names if origin in behind]
        return (*reached, *[CHECKED] * (failed in behind))

    def _reached_modules(self) -> dict[str, None]:
        """Returns the modules that the fault reached, an ordered set."""
        reached = [x for x in self.found.seen if x.origin == self.origin and x.kind]
        return dict.fromkeys(filter(None, (x.site.place.module for x in reached)))


def _others(found: Run, told_of: Sequence[Seen | None]) -> Iterator[Fault]:
    """Yields the other operations that have made Inf or NaN, each line once."""
    told = set()
    for x in found.seen:
        if x.origins and x not in told_of and not _is_scaled(x.site):
            is_own = x.origin.time[-1] == x.number
            fault = _fault(x, x.origin.trips if is_own else ())
            key = fault.operation, fault.where, fault.module, fault.backward
            if key not in told:
                told.add(key)
                yield fault


def _fault(seen: Seen, trips: tuple[int, ...]) -> Fault:
    """Returns what happened at an operation."""
    shown = zip(seen.site.operands, seen.inputs, strict=False)
    return Fault(
        **seen.site.line._asdict(),
        kind=seen.kind or "Inf",
        trips=trips,
        inputs=tuple((str(x.dtype), x.shape, top) for x, top in shown),
        largest=float(jnp.finfo(seen.site.dtype).max),
    )


def _ranges(found: Run) -> Iterator[OperationRange]:
    """Yields what each line computed in each module, by operation."""
    rows: dict[Line, list[Seen]] = {}
    for x in found.seen:
        if x.site.computes and x.runs and not _is_scaled(x.site):
            rows.setdefault(x.site.line, []).append(x)
    for line, seen in rows.items():
        size = sum(x.site.size * x.runs for x in seen)
        top = max(x.top for x in seen)
        largest = float(jnp.finfo(line.dtype).max)
        yield OperationRange(
            **line._asdict(),
            size=size,
            max=top,
            min=min((x.low for x in seen if x.low), default=0.0),
            headroom=math.log2(largest / top) if top else math.inf,
            lost=sum(x.lost for x in seen) / max(size, 1),
            nonfinite=sum(x.bad for x in seen) / max(size, 1),
        )


def _is_scaled(site: Site) -> bool:
    """Whether a site makes numbers that are scaled to fill float8."""
    return _scopes.FLOAT8_SCALED in site.place.scopes
