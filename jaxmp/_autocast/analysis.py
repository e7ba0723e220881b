"""What the consumers of each value need, from the end of a jaxpr to its beginning.

The analysis is pure: it sees equations and no arrays, and is remembered for each jaxpr,
so that layers that share one are analysed once.
"""

import collections
import copy
import functools
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation, Literal
from .._jaxprs.scopes import (
    AUTOCAST,
    BACKWARD,
    FLOAT32,
    PRECISION,
    SAFEGUARD,
    Scopes,
    in_region,
    is_backward,
    is_decided,
    is_under,
    marks,
    named_in,
    scopes_inside,
)
from .._ops import table
from .._ops.lists import DEFAULT_OPS, OpLists
from .._ops.products import has_default_precision
from .._ops.table import Definition
from . import classes, needs, rules
from .classes import Class
from .graph import Demand, accumulated, definitions_of, joined, on_ways, through
from .needs import Need
from .passes import MARKERS, REWRITES
from .passes.apart import apart
from .passes.unread import unread
from .transfer import Spotted, masks_in, needs_of_inputs, powers_in

BY_PATHS = "`float32_paths`"


class Row(NamedTuple):
    """An equation, and what its consumers need."""

    eqn: Equation
    kind: Class
    back: bool  # whether it belongs to the backward pass
    around: Scopes  # with its own
    demand: Demand  # what is needed of what it returns
    need: Need  # the same, of any of that
    input_needs: Sequence[Need]  # what it needs of each input


class Consumers(NamedTuple):
    """Who reads the values of a jaxpr."""

    rows: Sequence[Row]  # one for each equation
    needs: dict[Any, Need]  # of every variable that somebody reads
    forward: set[Any]  # variables that the forward pass reads, or the jaxpr returns
    definition: Definition

    def of(self, atom: Any) -> Need:
        """Returns what is needed of a value, nothing of a number."""
        return needs.NOTHING if isinstance(atom, Literal) else self.needs.get(atom, 0)


# Few differ. One for each equation is what the garbage collector would go through.
_demand = functools.lru_cache(maxsize=4096)(Demand)
NO_PATHS: Mapping[str, str] = MappingProxyType({})


class Analysis:
    """Finds classes and needs for one dtype, one set of lists and one of paths."""

    def __init__(
        self,
        dtype: np.dtype,
        ops: OpLists,
        paths: Mapping[str, str] = NO_PATHS,
        *,
        apart: bool = False,
        says_scopes: bool = False,
    ):
        """Starts with nothing analysed.

        Args:
            dtype: The 16-bit dtype.
            ops: The lists.
            paths: Scopes that stay float32, each with the precision of its products.
            apart: Whether the two passes have a dtype each.
            says_scopes: Whether the plan depends on the scopes in any case.
        """
        self.dtype, self.ops, self.apart = dtype, ops, apart
        self._says_scopes = says_scopes or bool(paths)
        self.paths = {path: tuple(path.split("/")) for path in paths}
        self._precisions = paths
        # What would run in 16 bits by the default lists only.
        usual = DEFAULT_OPS.allow | DEFAULT_OPS.infer
        own = ops.deny - DEFAULT_OPS.deny
        self._denied = (usual - ops.allow - ops.infer) | own
        self._start()

    def _start(self) -> None:
        # By jaxpr, so that what JAX shares between calls and layers stays shared.
        self._consumers: Any = weakref.WeakKeyDictionary()
        self._programs: Any = weakref.WeakKeyDictionary()
        self._marks: Any = weakref.WeakKeyDictionary()
        # What equations return that are consumers of nothing.
        self._unread: set[Any] = set()

    # Classes, as the user has them.

    def kind(self, eqn: Equation, scopes: Scopes) -> Class:
        """Returns the class of an equation in ``scopes``, with its own."""
        if self.is_kept(scopes):
            return "keep"
        return classes.classify(eqn, self.ops, self.dtype, back=BACKWARD in scopes)

    def is_product(self, eqn: Equation, scopes: Scopes = ()) -> bool:
        """Whether ``eqn`` is a product in 16 bits."""
        return self.kind(eqn, scopes) == "product"

    def is_kept(self, scopes: Scopes) -> bool:
        """Whether the user, or an inner autocast, keeps what is in ``scopes``."""
        if not self.paths:
            return is_decided(scopes)
        paths = self.paths.values()
        return is_decided(scopes) or any(is_under(path, scopes) for path in paths)

    def precision(self, eqn: Equation, scopes: Scopes) -> str:
        """Returns the precision of the float32 products that ``eqn`` is or holds."""
        if AUTOCAST in scopes:  # and has been decided there
            return "default"
        if FLOAT32 in scopes:
            named = [x for x in scopes if x.startswith(PRECISION)]
            return named[-1].removeprefix(PRECISION) if named else "highest"
        for path, names in self.paths.items():
            if is_under(names, scopes):
                return self._precisions[path]
        is_small = classes.is_small(eqn, back=BACKWARD in scopes)
        is_denied = eqn.primitive.name in self._denied
        return "highest" if is_denied or is_small else "default"

    def reason(self, eqn: Equation, scopes: Scopes) -> str:
        """Returns by what the user keeps ``eqn``, in words; empty if by nothing."""
        if AUTOCAST in scopes:
            return ""
        if FLOAT32 in scopes:
            return "float32 region"
        if self.is_kept(scopes):
            return BY_PATHS
        if eqn.primitive.name in self._denied:
            return "the lists in `ops`"
        refers = _jaxpr.call_kind(eqn) and not _jaxpr.is_call(eqn)
        return "in a call that takes references" if refers else ""

    def keeps(self, eqn: Equation, scopes: Scopes) -> rules.Rule | None:
        """Returns by what ``scopes`` or the user keep ``eqn``, None if they do not."""
        if guard := named_in(scopes, SAFEGUARD):
            return guard
        if self.is_kept(scopes) or eqn.primitive.name in self._denied:
            return rules.AS_WRITTEN
        is_product = table.is_product_of_any_kind(eqn)
        is_own = is_product and not has_default_precision(eqn)
        return rules.AS_WRITTEN if is_own else None

    def relevant(self, scopes: Scopes) -> Scopes:
        """Returns that of ``scopes`` on which the analysis and the plan depend."""
        if self.is_kept(scopes):
            return (FLOAT32, *marks(scopes))
        return scopes if self._says_scopes else marks(scopes)

    # Plans.

    def marked(self, jaxpr: Any, scopes: Scopes) -> "Analysis":
        """Lets the markers go through a whole program, before it is planned.

        Args:
            jaxpr: The program, of which all that it holds is part.
            scopes: Named scopes around it.

        Returns:
            This analysis; another one if something is marked, which other programs may
            share, also those that another thread plans now.
        """
        idle = unread(jaxpr, scopes)
        found = [x for find in MARKERS.values() for x in find(jaxpr, scopes, idle)]
        if not (idle or found):
            return self
        new = copy.copy(self)
        new._start()
        new._unread = {var for eqn in idle for var in eqn.outvars}
        for owner, var, need in found:
            marks = new._marks.setdefault(owner, {})
            marks[var] = marks.get(var, needs.NOTHING) | need
        return new

    def is_unread(self, eqn: Equation) -> bool:
        """Whether ``eqn`` is a consumer of nothing."""
        return bool(eqn.outvars) and self._unread.issuperset(eqn.outvars)

    def consumers(self, jaxpr: Any, demand: Demand, scopes: Scopes = ()) -> Consumers:
        """Returns who reads the values of a jaxpr.

        Args:
            jaxpr: Open or closed.
            demand: What its outputs are needed for.
            scopes: Named scopes around it.
        """
        memo = self._consumers.setdefault(jaxpr, {})
        key = demand, self.relevant(scopes)
        if key not in memo:
            memo[key] = self._consumers_of(jaxpr, demand, scopes)
        return memo[key]

    def _consumers_of(self, jaxpr: Any, demand: Demand, scopes: Scopes) -> Consumers:
        body = _jaxpr.open_jaxpr(jaxpr)
        eqns, spotted = self._program(jaxpr, scopes)
        ways = on_ways(body, eqns, demand.summed, scopes)
        need: dict[Any, Need] = collections.defaultdict(int)
        need.update(self._marks.get(body, {}))
        for var, one in zip(body.outvars, demand.needs, strict=True):
            if not isinstance(var, Literal):
                need[var] |= one
        forward, rows = set(_jaxpr.variables(body.outvars)), []
        for eqn in reversed(eqns):
            outs = tuple([need[var] for var in eqn.outvars])
            read, out = _demand(outs, through(eqn, ways)), joined(outs)
            here, back = scopes + _jaxpr.scope_names(eqn), is_backward(eqn, scopes)
            kind = self.kind(eqn, here)
            if out & needs.COMPARED and kind != "call":
                eqn, kind = in_region(eqn, rules.COMPARING), "keep"
                here = scopes + _jaxpr.scope_names(eqn)  # as the region is in it
            is_unread = self.is_unread(eqn)
            if is_unread:
                found = [needs.NOTHING] * len(eqn.invars)
            elif kind == "call":
                within = scopes_inside(eqn, here)
                inner = self.demand_inside(eqn, read, within)
                found = self.needs_in(eqn, inner, within)
            else:
                found = needs_of_inputs(
                    eqn,
                    kind,
                    out,
                    back=back,
                    kept=kind == "keep" and self.is_kept(here),
                    summed=read.summed,
                    spotted=spotted,
                )
                if out & needs.COMPARED:
                    found = [x | needs.COMPARED for x in found]
            rows.append(Row(eqn, kind, back, here, read, out, tuple(found)))
            for var, one in zip(eqn.invars, found, strict=True):
                if not isinstance(var, Literal):
                    if not (back or is_unread):
                        forward.add(var)
                    if one:
                        need[var] |= one
        rows.reverse()
        definition = definitions_of([row.eqn for row in rows])
        return Consumers(rows, need, forward, definition)

    def _program(
        self, jaxpr: Any, scopes: Scopes
    ) -> tuple[Sequence[Equation], Spotted]:
        """Returns the equations of a jaxpr as rewritten, and what they alone say."""
        memo, key = self._programs.setdefault(jaxpr, {}), self.relevant(scopes)
        if key not in memo:
            eqns: Sequence[Equation] = _jaxpr.open_jaxpr(jaxpr).eqns
            if not self.is_kept(scopes):
                for rewrite in REWRITES.values():
                    eqns = rewrite(eqns, jaxpr, scopes, self)
                if self.apart:
                    eqns = [self._apart(eqn, scopes) for eqn in eqns]
            memo[key] = eqns, Spotted(masks_in(eqns), powers_in(eqns))
        return memo[key]

    def _apart(self, eqn: Equation, scopes: Scopes) -> Equation:
        """Returns ``eqn`` with an argument for each pass in it, and what is marked."""
        new = apart(eqn, scopes)
        if new is not eqn:
            before, after = (_jaxpr.open_jaxpr(x.params["jaxpr"]) for x in (eqn, new))
            self._marks[after] = self._marks.get(before, {})
        return new

    # What equations hold.

    def needs_in(self, eqn: Equation, demand: Demand, scopes: Scopes) -> Sequence[Need]:
        """Returns what the jaxprs in ``eqn`` need of each of its inputs.

        Args:
            eqn: The equation.
            demand: What is needed of what they return.
            scopes: Named scopes around them.
        """
        found, layout = [needs.NOTHING] * len(eqn.invars), _jaxpr.call_layout(eqn)
        is_loop = _jaxpr.call_kind(eqn) == "while"
        for i, body in enumerate(layout.bodies):
            asked = self.test_of(body) if is_loop and i == 0 else demand
            read = self.consumers(body.jaxpr, asked, scopes).needs
            inner = _jaxpr.in_vars(body.jaxpr)
            for place, var in zip(body.operands, inner, strict=True):
                found[place] |= read.get(var, needs.NOTHING)
        for i, out in zip(layout.fixed_in, layout.fixed_out, strict=True):
            found[i] |= demand.needs[out]  # what a loop starts from, it may return
        return found

    @staticmethod
    def test_of(body: Any) -> Demand:
        """Returns what is needed of the test of a ``while``: one truth value."""
        return Demand((needs.FULL,) * len(_jaxpr.out_avals(body.jaxpr)))

    def demand_inside(self, eqn: Equation, outer: Demand, scopes: Scopes) -> Demand:
        """Returns what is needed of what the body of ``eqn`` returns, given of ``eqn``.

        What a loop carries is read by the next iteration too.
        """
        kind, layout = _jaxpr.call_kind(eqn), _jaxpr.call_layout(eqn)
        body = layout.bodies[-1]
        first = len(eqn.invars) - len(body.operands)
        demand = Demand(outer.needs, tuple([(x >> first, y) for x, y in outer.summed]))
        if kind in ("custom_vjp", "shard_map"):  # float32 at their boundary
            return demand._replace(needs=tuple(map(needs.in_float32, outer.needs)))
        if kind not in ("scan", "while"):
            return demand
        pairs = zip(layout.fixed_in, layout.fixed_out, strict=True)
        carried = [(place - first, out) for place, out in pairs]
        summed = accumulated(body.jaxpr, carried, scopes)
        demand = demand._replace(summed=summed + demand.summed)
        sums = joined(outs for _, outs in summed)
        each = [x | needs.DIGITS * (sums >> i & 1) for i, x in enumerate(outer.needs)]
        while True:
            demand, before = demand._replace(needs=tuple(each)), list(each)
            read = self.consumers(body.jaxpr, demand, scopes).needs
            for place, out in carried:
                var = _jaxpr.in_vars(body.jaxpr)[place]
                each[out] |= read.get(var, needs.NOTHING)
                if not needs.is_carried(outer.needs[out], each[out]):
                    each[out] = needs.in_float32(each[out])
            if each == before:
                return demand
