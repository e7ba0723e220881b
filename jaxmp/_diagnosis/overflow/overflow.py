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
from typing import Any, ParamSpec

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
from .births import Run, Seen
from .limits import Limit, Limits
from .report import TESTED, Fault, Line, OperationRange, OverflowReport
from .watch import GIVEN, INF_WRITTEN, Program, Site

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
        self.found = Run(Program(jaxpr, flat.names, around), flat.leaves)
        self.birth = self.found.first
        self.first: Fault | None = None
        self.seen: Seen | None = None  # at the operation of the fault
        self.limit: Limit | None = None
        self.finite_in_float32: bool | None = None
        self.fault_in_float32: Fault | None = None  # if that is at another line
        self.swallowed: Fault | None = None
        if self.birth is not None:
            self.seen = self.found.at(self.birth)
            self.first = _fault(self.seen, self.birth[1])
            self._explain(self.seen)
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
            fault = _fault(wide.at(wide.first), wide.first[1])
            if self.first is not None and fault.where != self.first.where:
                self.fault_in_float32 = fault
        if self.finite_in_float32 is False or "float16" not in self.dtypes:
            return
        limit: Limit | None = None
        if not seen.over:  # what came in was wrong already
            limit = self.limits.first_bad()
        elif any(x.lost for x in self.found.seen[: seen.number]):  # perhaps that, too
            limit = self.limits.first_wrong()
        if limit is not None and self._is_zero(limit):
            self.limit, self.first = limit, self._fault_of(limit)
        elif limit is not None and limit.number is not None:
            self.limit = limit

    def _may_be_wrong(self) -> bool:
        """Whether numbers have left float16, or those of the code may have."""
        if "float16" not in self.dtypes:
            return False
        return any(x.lost or x.bad for x in self.found.seen) or any(self.numbers)

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
        return not any(x.over or x.births for x in self._seen_of(limit))

    def _seen_of(self, limit: Limit) -> list[Seen]:
        """Returns what was seen at an operation, where it ran first."""
        same = [x for x in self.found.seen if x.site.line == limit.line]
        same = [x for x in same if id(x.site.eqn) == limit.eqn] or same
        return sorted(same, key=lambda x: not x.runs)  # one branch of several runs

    def _fault_of(self, limit: Limit) -> Fault:
        """Returns what happened at an operation that its limits have made wrong."""
        seen, line = self._seen_of(limit), limit.line
        kind = "zeros" if self._is_zero(limit) else "Inf"
        if not seen:  # a number in the code that a call is given
            self.seen = None
            largest = float(jnp.finfo(line.dtype).max)
            return Fault(
                **line._asdict(), kind=kind, trips=(), inputs=(), largest=largest
            )
        guilty = [x for x in seen if (x.lost if kind == "zeros" else x.bad)]
        self.seen = [*guilty, *seen][0]
        return dataclasses.replace(_fault(self.seen, ()), kind=kind)

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
            reached_modules=tuple(self._reached_modules()),
            given=given,
            others=tuple(_others(found, self.seen if first else None)),
            finite_in_float32=self.finite_in_float32,
            operations=operations,
            notes=tuple(found.program.notes),
        )

    def _case(
        self, operations: Sequence[OperationRange], given: dict, leading: dict
    ) -> Case:
        seen, site = self.seen, self.seen and self.seen.site
        places = [x.site.place for x in self.found.seen]
        is_back = [x.backward or x.again for x in places]
        is_last = bool(seen) and any(is_back) and not any(is_back[seen.number :])
        narrow = [x for x in operations if is_narrow(jnp.dtype(x.dtype))]
        cast_by = self._cast_by(site)
        return Case(
            first=self.first,
            given=given,
            is_given=bool(leading),
            written=any(x[0][0] == INF_WRITTEN for x in self.found.births),
            finite_in_float32=self.finite_in_float32,
            fault_in_float32=self.fault_in_float32,
            overflows=bool(seen and seen.over),
            number=self._number(),
            argument=site.argument if site else "",
            zeros="" if leading else self._zeros(),
            in_optimizer=is_last or cast_by == "optax",
            cast_by="code" if cast_by == "optax" else cast_by,
            override=self._override(site),
            lost=seen.lost / max(seen.runs * seen.site.size, 1) if seen else 0.0,
            # A mask of `finfo(dtype).min` has none, and is meant.
            nearest=min(
                (x for x in narrow if x.headroom > 0),
                key=lambda x: x.headroom,
                default=None,
            ),
            swallowed=self.swallowed,
            is_seen=not self.found.program.notes,
        )

    def _number(self) -> Eaten | None:
        """Returns the number in the code that is the fault, such as -1e9 in a mask."""
        if self.limit is not None and self.limit.number is not None:
            return self.limit.number
        if self.first is None or self.seen is None:
            return None
        site, fault = self.seen.site, self.first
        left = 0.0 if fault.kind == "zeros" else math.inf
        eaten = Eaten(left, None, site.dtype, site.line.operation, site.place)
        if site.is_cast and fault.inputs[0][2] in site.numbers:
            return eaten._replace(written=fault.inputs[0][2])
        is_inf = math.inf in site.numbers and is_narrow(site.dtype) and left
        return eaten if is_inf and self.finite_in_float32 is not False else None

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
        if site is not None and site.argument and place.library == "jaxmp":
            return "with_policy"
        is_module = place.library == "flax" and not self._has_policy()
        return "module" if is_module else "code"

    def _has_policy(self) -> bool:
        """Whether a policy casts in the program."""
        return any(
            site.is_cast and site.place.library == "jaxmp" and is_narrow(site.dtype)
            for site in (x.site for x in self.found.seen)
        )

    def _override(self, site: Site | None) -> str:
        """Returns the override for the module of the fault, if it has parameters."""
        inner = "" if site is None else "/".join(site.place.module.split("/")[1:])
        names = self.flat.names
        has = inner and any(re.search(re.escape(f"{inner}/"), x) for x in names)
        return f"{inner}/" if has and self._has_policy() else ""

    def _leading(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns what came in with Inf or NaN and led to the first fault."""
        if self.birth is None or self.finite_in_float32 is True:
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
        return Run(self.found.program, leaves).first != self.birth

    def _zeros(self) -> str:
        """Returns the name of a float16 argument that is all zeros and led to a fault.

        It may have been more in float32.
        """
        if self.birth is None or self.finite_in_float32 is True:
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
        if self.birth is None:
            wrong = self.limit.wrong if self.limit else ()
            return tuple(self.flat.out_names[i] for i in wrong) if self.first else ()
        names = zip(self.flat.out_names, self.found.outs, strict=True)
        reached = [name for name, born in names if born == self.birth]
        return (*reached, *[TESTED] * (self.found.failed == self.birth))

    def _reached_modules(self) -> dict[str, None]:
        """Returns the modules that the fault reached, an ordered set."""
        reached = [x for x in self.found.seen if x.born == self.birth and x.kind]
        return dict.fromkeys(filter(None, (x.site.place.module for x in reached)))


def _given(found: Run) -> tuple[dict[str, tuple[int, int]], dict]:
    """Returns what came in with Inf or NaN: all of it, and what is in a result."""
    names, reached = found.program.names, {x[0][0] - GIVEN for x in found.births}
    given = {names[i]: counts for i, counts in found.given.items()}
    return given, {names[i]: x for i, x in found.given.items() if i in reached}


def _others(found: Run, first: Seen | None) -> Iterator[Fault]:
    """Yields the other operations that have made Inf or NaN, each line once."""
    told = set()
    for x in found.seen:
        if x.births and x is not first and not _is_scaled(x.site):
            is_own = x.born[0][-1] == x.number
            fault = _fault(x, x.born[1] if is_own else ())
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
