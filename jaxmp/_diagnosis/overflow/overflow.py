"""Which operation made the first Inf, NaN or fatal zero, on which line, in which layer.

The function is traced, and its jaxpr is run as a program that looks at what each
operation gives (:mod:`~.watch`). From that the origin of every Inf and NaN is found
(:mod:`~.origins`). Where that does not say what was wrong first, the limits of float16
are put back one after the other (:mod:`~.limits`). Here what was seen becomes a report,
and :mod:`~.advice` says what it means.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from ..._base.checks import check_function, explains
from ..._base.dtypes import is_narrow
from ..._base.tree import is_ref
from ..._jaxprs.flatten import Flat, check_values, flatten, traced_in_float32
from ..._jaxprs.jaxpr import is_cast
from ..._jaxprs.places import Place, caller
from ..._jaxprs.scopes import FLOAT8_SCALED
from ..._ops.table import is_exact
from ..numbers import LostNumber, Numbers
from ..text import PASS_THE_LOSS, uncalled
from ..wide_replay import platform_of
from .advice import advice
from .limits import Limit, Limits
from .origins import GIVEN, Run, Site, added
from .report import CHECKED, Fault, Line, OperationRange, OverflowReport
from .watch import Watched

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
    check_function("find_overflow", fun, "find_overflow(fun)", PASS_THE_LOSS)

    @functools.wraps(fun, updated=())
    def searched(*args: P.args, **kwargs: P.kwargs) -> OverflowReport:
        flat = flatten(fun, args, kwargs)
        check_values("find_overflow", flat, "the arrays of the step that broke")
        jaxpr = jax.make_jaxpr(flat.fun)(*flat.leaves)
        return FaultSearch(flat, jaxpr, Place(user=caller())).report()

    return uncalled("find_overflow", fun, searched)


class FaultSearch:
    """A program that is searched, and what is known of its first fault.

    Attributes:
        run: What a run of the program has seen.
        origin: Where the first Inf or NaN began that reached a result, if one did.
        first: The first fault, None if there is none.
        site: What was seen at its operation.
        limit: The operation whose limits make a result wrong, if these were tried.
        finite_in_float32: Whether float32 has no fault; None if nobody can tell.
        elsewhere: The fault of float32, if that is at another line.
        hidden: An overflow of 16 bits that made a result wrong, and not Inf or NaN.
    """

    def __init__(self, flat: Flat, jaxpr: Any, around: Place):
        """Runs the program, and asks what was wrong first."""
        self.flat, self.jaxpr, self.around = flat, jaxpr, around
        platform = platform_of(flat.leaves)
        self.run = Run(Watched(jaxpr, flat.names, around, platform), flat.leaves)
        self.origin = self.run.first
        self.first: Fault | None = None
        self.site: Site | None = None
        self.limit: Limit | None = None
        self.finite_in_float32: bool | None = None
        self.elsewhere: Fault | None = None
        self.hidden: Fault | None = None
        if self.origin is not None:
            self.site = self.run.at(self.origin)
            self.first = self.site.fault(self.origin.iterations)
            self.finite_in_float32 = bool(self.dtypes) and self._is_finite_in_float32()
            if "float16" in self.dtypes and self.finite_in_float32 is not False:
                self._ask_what_was_before(self.site)
        elif "float16" in self.dtypes and (
            any(x.look.lost or x.look.bad for x in self.run.sites) or any(self.numbers)
        ):
            self.limit = self.limits.first_wrong()
            if self.limit is not None:
                self.site, fault = self.limit.site, _fault_of(self.limit)
                is_zero = fault.kind == "zeros"
                self.first, self.hidden = (fault, None) if is_zero else (None, fault)

    def _is_finite_in_float32(self) -> bool | None:
        jaxpr, names = self.twin or self.jaxpr, self.flat.names
        platform = self.run.program.platform
        program = Watched(jaxpr, names, self.around, platform, wide=True)
        wide = Run(program, self.flat.leaves)
        if wide.first is None:
            return True
        read = (x.aval for site in self.run.sites for x in site.eqn.invars)
        if any(is_ref(x) and is_narrow(x) for x in read):  # which keeps its 16 bits
            return None
        is_unknown = "float16" in self.dtypes and not self.numbers.are_known
        if is_unknown and self.limits.may_be_finite():
            return None
        fault = wide.at(wide.first).fault(wide.first.iterations)
        if self.first is not None and fault.where != self.first.where:
            self.elsewhere = fault
        return False

    def _ask_what_was_before(self, site: Site) -> None:
        """Asks whether zeros, or a number in the code, have led to the first Inf."""
        limit: Limit | None = None
        if not site.look.over:  # what came in was wrong already
            limit = self.limits.first_bad()
        elif any(x.look.lost for x in self.run.sites[: site.number]):  # perhaps that
            limit = self.limits.first_wrong()
        fault = limit and _fault_of(limit)
        # An Inf that stands in the code, as a mask, may become NaN far from its line.
        if limit and fault and (limit.number is not None or fault.kind == "zeros"):
            self.limit, self.site, self.first = limit, limit.site, fault

    @functools.cached_property
    def dtypes(self) -> set[str]:
        """Names of the dtypes of at most 16 bits."""
        eqns = (x.eqn for x in self.run.sites)
        atoms = (x for eqn in eqns for x in (*eqn.invars, *eqn.outvars))
        return {str(x.aval.dtype) for x in atoms if is_narrow(x.aval)}

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
        return Limits(self.flat, self.run, self.numbers)

    # What the advice asks.

    @functools.cached_property
    def number(self) -> LostNumber | None:
        """The number in the code that is the fault, such as -1e9 in a mask."""
        if self.limit is not None and self.limit.number is not None:
            return self.limit.number
        fault, site = self.first, self.site
        if fault is None or site is None or not is_cast(site.eqn):
            return None
        left = 0.0 if fault.kind == "zeros" else math.inf
        for x in site.holds:
            if isinstance(x, float) and abs(x) == fault.inputs[0][2]:
                return LostNumber(left, x, site.type.dtype, site.place)
        return None

    @functools.cached_property
    def has_policy(self) -> bool:
        """Whether a policy casts in the program."""
        casts = (x for x in self.run.sites if is_cast(x.eqn) and is_narrow(x.type))
        return any(x.place.library == "jaxmp" for x in casts)

    @functools.cached_property
    def leading(self) -> set[int]:
        """The arguments with NaNs and Infs that led to the first fault."""
        return {*filter(self._leads, self.run.given)}

    @property
    def given(self) -> dict[str, tuple[int, int]]:
        """Those of them, or of what is closed over, that reached a result too."""
        reached = self.leading | {x.time[0] - GIVEN for x in self.run.origins}
        return self._named(sorted(reached & self.run.given.keys()))

    def _named(self, given: Iterable[int]) -> dict[str, tuple[int, int]]:
        return {self.run.program.names[i]: self.run.given[i] for i in given}

    @functools.cached_property
    def zeros(self) -> str:
        """The name of a float16 argument that is all zeros and led to a fault.

        It may have been more in float32.
        """
        for i, x in enumerate(self.flat.leaves):
            is_zero = x.dtype == jnp.float16 and x.size and not np.asarray(x).any()
            if is_zero and self._leads(i):
                return self.flat.names[i]
        return ""

    def _leads(self, i: int) -> bool:
        """Whether the first fault is gone with ones for what an argument has wrong.

        Wrong are Inf and NaN, and the zeros of an array of zeros.
        """
        leaves = list(self.flat.leaves)
        if self.origin is None or self.finite_in_float32 is True or i >= len(leaves):
            return False
        x = jnp.asarray(leaves[i])
        leaves[i] = jnp.where(jnp.isfinite(x) & (x != 0), x, jnp.ones((), x.dtype))
        return Run(self.run.program, leaves).first != self.origin

    # What the report has.

    def report(self) -> OverflowReport:
        run = self.run
        reached = (x for x in run.sites if x.kind and x.origin == self.origin)
        modules = (x.place.module for x in reached)
        return OverflowReport(
            first=self.first,
            advice=advice(self),
            reached=self._reached(),
            reached_modules=tuple(dict.fromkeys(filter(None, modules))),
            given=self._named(run.given),
            others=tuple(self._others()),
            finite_in_float32=self.finite_in_float32,
            operations=tuple(_ranges(run)),
            notes=tuple(run.program.notes),
        )

    def _reached(self) -> tuple[str, ...]:
        """Returns the names of the results that the fault reached."""
        if self.origin is None:
            wrong = self.limit.wrong if self.limit else ()
            return tuple(self.flat.out_names[i] for i in wrong) if self.first else ()
        outs, failed, limit = self.run.outs, self.run.failed, self.limit
        # What zeros have made wrong may begin at any operation behind them.
        wrong = {failed, *(outs[i] for i in limit.wrong)} if limit else set()
        behind = wrong.intersection(self.run.origins) | {self.origin}
        names = zip(self.flat.out_names, outs, strict=True)
        reached = [name for name, origin in names if origin in behind]
        return (*reached, *[CHECKED] * (failed in behind))

    def _others(self) -> Iterator[Fault]:
        """Yields the other operations that have made Inf or NaN, each line once."""
        known = [self.site, self.origin and self.run.at(self.origin)]
        known = known if self.first else []
        lines = set[Line]()
        for x in self.run.sites:
            if x.births and x not in known and FLOAT8_SCALED not in x.place.scopes:
                is_own = x.origin.time[-1] == x.number
                line = dataclasses.replace(x.line, dtype="", code="")
                if line not in lines:
                    lines.add(line)
                    yield x.fault(x.origin.iterations if is_own else ())


def _fault_of(limit: Limit) -> Fault:
    """Returns what happened at an operation that its limits have made wrong."""
    site, number = limit.site, limit.number
    fault, is_zero = site.fault(), not (site.look.over or site.births)
    if number is not None:
        is_zero = number.left == 0
        if not site.looked and number.written is not None:  # it is only moved
            inputs = (("float32", (), abs(number.written)),)
            fault = dataclasses.replace(fault, inputs=inputs)
    return dataclasses.replace(fault, kind="zeros") if is_zero else fault


def _ranges(run: Run) -> Iterator[OperationRange]:
    """Yields what each line computed in each module, by operation."""
    rows: dict[Line, list[Site]] = {}
    for x in run.sites:
        computes = x.looked and x.operands and not is_exact(x.eqn)  # and does not move
        if computes and x.runs and FLOAT8_SCALED not in x.place.scopes:
            rows.setdefault(x.line, []).append(x)
    for line, sites in rows.items():
        size = sum(x.size * x.runs for x in sites)
        look = functools.reduce(added, (x.look for x in sites))
        largest = float(jnp.finfo(line.dtype).max)
        yield OperationRange(
            **vars(line),
            size=size,
            max=look.top,
            min=look.low,
            headroom=math.log2(largest / look.top) if look.top else math.inf,
            lost=look.lost / max(size, 1),
            nonfinite=look.bad / max(size, 1),
        )
