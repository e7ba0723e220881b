"""Which operation of a program reads what which other has computed, and what is saved.

The program is one that was traced while autocast recorded its plan: each equation is
then in a named scope with the number of a step. Casts that autocast adds are no
operations of the user's: what they return is the same value, in another dtype.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .._autocast.plan import Step
from .._base.dtypes import FLOAT8, is_narrow, is_wide
from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs import scopes as _scopes
from .._jaxprs.jaxpr import Equation
from .._jaxprs.places import Frame, Place, frames_below_users, library_function
from .._jaxprs.walk import At, Forward
from .._ops.products import PRODUCTS, is_convolution
from .._ops.table import in_words, is_view

_COMPREHENSIONS = re.compile(r"((^|\.)(<locals>\.)?<((list|set|dict)comp|genexpr)>)+$")


@dataclasses.dataclass(eq=False)
class Operation:
    """An operation as the user wrote it: one equation, or several that stand for it."""

    eqn: Equation
    step: Step | None  # what autocast has decided about it
    here: Holder
    carried: str = ""  # of a loop, which computes nothing itself: a dtype
    ins: dict[Operation, None] = dataclasses.field(default_factory=dict)
    consumers: dict[Operation, None] = dataclasses.field(default_factory=dict)
    moved: Operation | None = None  # what has computed or moved what this one moves
    is_stacked: bool = False  # whether a scan stacks its float32 results in 16 bits
    is_returned: bool = False
    is_saved: bool = False  # whether the backward pass reads a result
    is_forward: bool = False  # whether the forward pass needs it

    @property
    def frame(self) -> Frame | None:
        """The user's line."""
        return self.here.place.user

    @property
    def line(self) -> tuple[str, str, int]:
        """File, function and line."""
        assert self.frame is not None
        file, number, *_, function = self.frame
        # Newer versions of Python have no functions for some of these either.
        function = _COMPREHENSIONS.sub("", function).rpartition("<locals>.")[2]
        return file, "" if function == "<module>" else function, number

    @functools.cached_property
    def call(self) -> Any:
        """Tells the operations of a line apart, and not the times that it runs."""
        below, author = frames_below_users(self.eqn), self.here.place.author
        return self.frame, author, below, self.eqn.primitive.name, self.carried

    @functools.cached_property
    def library(self) -> str:
        """The function of a library that the user has called, if any."""
        return self.here.function or library_function(self.eqn)

    @property
    def name(self) -> str:
        return self.library or in_words(self.eqn)

    @property
    def moves(self) -> bool:
        """Whether it only moves what it is given."""
        return is_view(self.eqn)

    @property
    def how(self) -> str:
        """How autocast runs it, empty outside of autocast."""
        return self.step.how if self.step else ""

    @functools.cached_property
    def dtype(self) -> str:
        """That of the floating numbers that it computes, empty if there are none."""
        step = self.step if self.step and self.step.eqn is self.eqn else None
        known = step.outs if step and step.how != "stored" else ()
        for i, var in enumerate([] if self.carried else self.eqn.outvars):
            if _jaxpr.is_inexact(var):
                return str((known and known[i].dtype) or var.aval.dtype)
        return self.carried

    @functools.cached_property
    def takes(self) -> str:
        """The dtype of what a product takes, empty if it is none."""
        if (step := self.step) is not None:
            is_product = step.kind == "product"
            return str(FLOAT8) if step.float8 else str(step.dtype) * is_product
        floats = (x.aval.dtype for x in self.eqn.invars if _jaxpr.is_inexact(x))
        return str(next(floats, "")) if self.eqn.primitive.name in PRODUCTS else ""

    @property
    def rounded(self) -> str:
        """The dtype of the numbers that a product returns in a wider one."""
        # No convolution of cuDNN takes 16 bits and returns float32.
        is_wider = is_convolution(self.eqn) and self.dtype != self.takes
        return self.takes if self.step and is_wider else ""


class Array(NamedTuple):
    """The facts of an array."""

    by: tuple[Operation, ...] = ()  # what may compute it, and what moves it since
    value: Any = None  # tells it from others, and not from its casts
    stored: Any = None  # the narrowest dtype that it has had, as a compiler stores it
    given: bool = True  # or computed by a backward pass, which saves nothing of it


class Holder(NamedTuple):
    """What is known of an equation by its place, and by what holds it."""

    place: Place
    times: int = 1  # 0 until what a loop carries has settled: see `Forward`
    path: tuple[Equation, ...] = ()  # the equations that hold it
    function: str = ""  # the function of JAX that it is in

    def of(self, eqn: Equation, before: Holder) -> Holder:
        """Returns where an equation is in these surroundings."""
        return self._replace(place=self.place.of(eqn, before.place))

    def inside(self, eqn: Equation, jaxpr: Any) -> Holder:
        """Returns the surroundings of what is inside ``eqn``, which is here."""
        before = self.place
        place, function = before.inside(eqn, jaxpr), self.function
        if _jaxpr.call_kind(eqn) == "custom_jvp":  # which JAX traces anew for each call
            place = place._replace(shared=before.shared)
        if place.shared and not before.shared:
            name = _jaxpr.function_of(jaxpr)[0].strip("_")
            function = library_function(eqn) or name
        return Holder(place, self.times, (*self.path, eqn), function)


class Flow:
    """Follows the values of a program, and builds the graph of its operations."""

    def __init__(self, jaxpr: Any, place: Place):
        """Follows a whole program.

        Args:
            jaxpr: The program.
            place: What is around its operations, with the steps that are recorded.
        """
        self._made: dict[Any, Operation] = {}
        # Of each value that a backward pass reads the bytes and the dtype of the widest
        # form, and what computes it.
        self.saved: dict[Any, tuple[int, str, Operation | None]] = {}
        walk = Forward(self._equation, _either, _given, enter=self._equation)
        self._walk, self._has_backward = walk, _jaxpr.has_backward(jaxpr)
        ins = [*map(_given, _jaxpr.in_avals(jaxpr), _jaxpr.in_vars(jaxpr))]
        for out in walk.through(jaxpr, ins, (), Holder(place)):
            for operation in out.by:
                operation.is_returned = True
        self.operations = [*self._made.values()]
        # What does not serve the backward pass alone is forward. Differentiation writes
        # slopes into the forward pass, but no matmuls.
        left = [
            x
            for x in self.operations
            if x.is_returned or x.takes or not (x.consumers or x.is_saved or x.carried)
        ]
        while left:
            operation = left.pop()
            operation.is_forward = True
            left += [x for x in operation.ins if not x.is_forward]

    def residual_bytes(self) -> dict[str, int] | None:
        """Returns the bytes that are saved by dtype, None without a backward pass."""
        sizes = Counter[str]()
        for size, dtype, _ in self.saved.values():
            sizes[dtype] += size
        return dict(sizes.most_common()) if self._has_backward else None

    def _equation(self, eqn: Equation, ins: list[Array], at: At) -> Sequence[Array]:
        """Follows an equation, which may be a part of a step."""
        names, here = _jaxpr.names_of(eqn), at.place
        if names.transposed or names.computed_again:
            return self._backward(eqn, ins)
        step = here.place.planned
        # What JAX holds in an equation that is not gone into has no steps of its own.
        whole = None if step and _jaxpr.call_kind(step.eqn) else step
        if _scopes.EIGHT_BITS in names.scopes:
            return _results(eqn, here, _all_of(ins))
        in_autocast = _scopes.AUTOCAST in here.place.scopes and step is None
        if _jaxpr.is_cast(eqn) and (
            not _jaxpr.is_cast(whole.eqn) if whole else in_autocast
        ):
            if _scopes.STACKED in names.scopes and ins[0].by:
                ins[0].by[-1].is_stacked = True
            return [_cast(ins[0], eqn)]
        if _jaxpr.call_kind(eqn) and whole is None:
            return self._call(eqn, ins, at)
        # Of several equations that stand for one, the first begins it.
        operation = self._operation(whole.eqn if whole else eqn, step, at)
        arrays = zip(eqn.invars, ins, strict=True)
        read = [x for atom, x in arrays if not isinstance(atom, _jaxpr.Literal)]
        for x in read:
            before = [one for one in x.by if one is not operation]
            operation.ins |= dict.fromkeys(before)
            if operation.moves:
                operation.moved = operation.moved or next(reversed(before), None)
                continue
            for one in before:
                one.consumers[operation] = None
        by = (*_all_of(read), operation) if operation.moves else (operation,)
        outs = _results(eqn, here, tuple(dict.fromkeys(by)))
        if len(read) == len(outs) == 1 and _keeps(eqn):
            same = _cast(read[0], eqn) if _jaxpr.is_cast(eqn) else read[0]
            return [same._replace(by=outs[0].by)]
        return outs

    def _operation(
        self, eqn: Equation, step: Step | None, at: At, carried: str = ""
    ) -> Operation:
        """Returns the operation that an equation, as the user wrote it, stands for."""
        here = at.place
        key = here.path, here.place.step, eqn, carried
        return self._made.setdefault(key, Operation(eqn, step, here, carried))

    def _backward(self, eqn: Equation, ins: list[Array]) -> Sequence[Array]:
        """Notes what the backward pass reads, which is saved for it."""
        if _jaxpr.is_cast(eqn):
            return [_narrowest(ins[0], eqn)]
        for x, atom in zip(ins, eqn.invars, strict=True):
            if x.given or getattr(atom.aval, "size", 1) == 1:
                continue
            computes = [one for one in x.by if not one.moves] or x.by[:1]
            size = int(atom.aval.size) * x.stored.itemsize
            one = size, str(x.stored), next(reversed(computes), None)
            self.saved[x.value] = max(
                self.saved.get(x.value, one), one, key=lambda x: x[0]
            )
            for operation in x.by:
                operation.is_saved = True
        return [_given(var.aval) for var in eqn.outvars]

    def _call(self, eqn: Equation, ins: list[Array], at: At) -> Sequence[Array]:
        """Follows the jaxprs that an equation holds."""
        carried, results = _jaxpr.call_layout(eqn)[1:]
        # A value of its own, whatever it starts from, and so is the last one.
        for i in carried:
            ins[i] = ins[i]._replace(value=(at.place.path, eqn, i))
        outs = [*self._walk.around(eqn, ins, at)]
        for i in results:
            outs[i] = outs[i]._replace(value=(at.place.path, eqn.outvars[i]))
        for i in carried:
            if _jaxpr.is_inexact(var := eqn.invars[i]):
                loop = self._operation(eqn, None, at, str(var.aval.dtype))
                loop.is_forward = True
        return outs


def _given(x: Any, at: Any = None) -> Array:
    """Returns an argument, a number in the code, or what a backward pass computes."""
    value = at if isinstance(at, _jaxpr.Var) else id(x)
    return Array((), value, getattr(getattr(x, "aval", x), "dtype", None))


def _all_of(ins: Sequence[Array]) -> tuple[Operation, ...]:
    """Returns what computes and moves some arrays."""
    return tuple(dict.fromkeys(one for x in ins for one in x.by))


def _either(arrays: Sequence[Array]) -> Array:
    """Returns what is one of some arrays, as a branch has been taken."""
    stored = max((x.stored for x in arrays), key=lambda x: getattr(x, "itemsize", 0))
    given = all(x.given for x in arrays)
    return Array(_all_of(arrays), arrays[0].value, stored, given)


def _results(eqn: Equation, here: Holder, by: tuple[Operation, ...]) -> list[Array]:
    """Returns the results of an equation, as values of their own."""
    return [
        Array(by, (here.path, var), getattr(var.aval, "dtype", None), given=False)
        for var in eqn.outvars
    ]


def _keeps(eqn: Equation) -> bool:
    """Whether an equation returns the very numbers that it is given."""
    old, new = eqn.invars[0].aval, eqn.outvars[0].aval
    if _jaxpr.is_cast(eqn):
        return old.dtype.itemsize < new.dtype.itemsize
    return is_view(eqn) and getattr(old, "size", 0) == getattr(new, "size", 1)


def _cast(x: Array, eqn: Equation) -> Array:
    """Returns what a cast of the forward pass makes of an array."""
    old, new = eqn.invars[0].aval, eqn.outvars[0].aval
    if is_wide(old) and is_narrow(new) and x.stored == old.dtype:
        # Rounded: a value of its own beside that which was rounded.
        return x._replace(value=(x.value, new.dtype), stored=new.dtype, given=False)
    return _narrowest(x, eqn)


def _narrowest(x: Array, eqn: Equation) -> Array:
    """Returns an array as a cast leaves it: a compiler saves the narrower one."""
    dtypes = x.stored, eqn.outvars[0].aval.dtype
    return x._replace(stored=min(dtypes, key=lambda x: np.dtype(x).itemsize))
