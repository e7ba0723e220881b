"""Which operation of a program reads what which other has computed.

The program is one that was traced while autocast recorded its plan: each equation is
then in a named scope with the number of a step. Casts that autocast adds are no
operations of the user's. What they return is the same value, in another dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..._autocast.plan import Step
from ..._base.dtypes import FLOAT8
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs import scopes as _scopes
from ..._jaxprs.places import Frame, Place, frames_below_users, library_function
from ..._jaxprs.walk import At, Forward
from ..._ops.products import PRODUCTS, is_convolution
from ..._ops.table import in_words, is_view


@dataclasses.dataclass(eq=False)
class Operation:
    """An operation as the user wrote it: one equation, or several that stand for it."""

    name: str  # in words
    library: str  # the function of a library that the user has called, if any
    frame: Frame | None  # the user's line
    call: Any  # tells the calls of a line apart, and the operations in them
    step: Step | None  # what autocast has decided about it
    times: int  # how often it runs, 0 if nobody knows
    for_leaves: bool  # whether a library computes it for each leaf of a tree
    moves: bool  # only moves what it is given
    dtype: str  # of the floating numbers that it returns, empty if of none
    takes: str  # dtype of what a product takes, empty if it is none
    rounded: str  # dtype of the numbers that a product returns in a wider one
    ins: list[Value] = dataclasses.field(default_factory=list)
    outs: list[Value] = dataclasses.field(default_factory=list)
    is_stacked: bool = False  # whether a scan stacks its float32 results in 16 bits
    carries: bool = False  # whether it is a loop, which computes nothing itself
    is_forward: bool = False  # whether the forward pass needs it

    def results(self) -> Iterator[Value]:
        """Yields what it returns, and all that this becomes."""
        for out in self.outs:
            yield from out.all_forms()

    @property
    def is_stored(self) -> bool:
        """Whether it is computed in float32, and stored in 16 bits."""
        return self.step is not None and self.step.how == "stored"

    @property
    def line(self) -> tuple[str, str, int]:
        """File, function and line."""
        assert self.frame is not None
        file, number, *_, function = self.frame
        function = function.rpartition("<locals>.")[2]
        return file, "" if function == "<module>" else function, number


@dataclasses.dataclass(eq=False)
class Value:
    """What an operation has computed, or what comes from outside."""

    operation: Operation | None = None
    readers: list[Operation] = dataclasses.field(default_factory=list)
    becomes: list[Value] = dataclasses.field(default_factory=list)
    comes_from: list[Value] = dataclasses.field(default_factory=list)
    saved: dict[str, int] = dataclasses.field(default_factory=dict)  # bytes, by dtype
    is_returned: bool = False

    def turn_into(self, other: Value) -> None:
        """Notes that ``other`` may be this value, as what a loop carries is."""
        if other is not self:
            self.becomes.append(other)
            other.comes_from.append(self)

    def all_forms(self) -> Iterator[Value]:
        """Yields this value and all that it becomes."""
        return _reached([self], lambda value: value.becomes)


class Array(NamedTuple):
    """A value, and how a compiler stores it."""

    value: Value
    stored: np.dtype  # the narrowest dtype that it has had


class Around(NamedTuple):
    """What is known of an equation by its place, and by what holds it."""

    place: Place
    function: str = ""  # the function of JAX that it is in
    for_leaves: bool = False  # whether a library calls that for each leaf of a tree
    made: Any = None  # of its jaxpr the operations of steps, by number

    def of(self, eqn: _jaxpr.Equation, before: Around) -> Around:
        """Returns where an equation is in these surroundings."""
        return self._replace(place=self.place.of(eqn, before.place))

    def inside(self, eqn: _jaxpr.Equation, jaxpr: Any) -> Around:
        """Returns the surroundings of what is inside ``eqn``, which is here."""
        kind, before = _jaxpr.call_kind(eqn), self.place
        place = before.inside(eqn, jaxpr)
        if kind == "custom_jvp":  # which JAX traces anew for each call
            place = place._replace(shared=before.shared)
        trips = {"scan": before.trips * eqn.params.get("length", 1), "while": 0}
        place = place._replace(trips=trips.get(kind, before.trips))
        function = self.function
        if place.shared and not before.shared:
            name = _jaxpr.function_of(jaxpr)[0].strip("_")
            function = library_function(eqn) or name
        for_leaves = self.for_leaves or _maps_over_leaves(frames_below_users(eqn))
        return Around(place, function, for_leaves, {})


class Flow:
    """Follows the values of a program, and builds the graph of its operations."""

    def __init__(self, steps: Sequence[Step]):
        self.steps = steps
        self.operations: list[Operation] = []
        self.values: list[Value] = []
        # What is built of a loop is a graph with a cycle: it is gone through once.
        self.walk = Forward(self.equation, self.either, self.known, enter=self.equation)

    def follow(self, jaxpr: Any, place: Place) -> list[Operation]:
        """Follows a whole program, and returns its operations in order."""
        ins = [self.given(aval) for aval in _jaxpr.in_avals(jaxpr)]
        for out in self.walk.through(jaxpr, ins, (), Around(place, made={})):
            out.value.is_returned = True
        self.find_forward()
        return self.operations

    def known(self, x: Any, at: At) -> Array:
        """Returns a number in the code, or an array that a jaxpr carries."""
        return self.given(getattr(x, "aval", x))

    def equation(
        self, eqn: _jaxpr.Equation, ins: list[Array], at: At
    ) -> Sequence[Array]:
        """Follows an equation, which may be a part of a step."""
        names, here = _jaxpr.names_of(eqn), at.place
        number = _scopes.named_in(names.scopes, _scopes.STEP)
        own = None if number is None else self.steps[int(number)]
        if names.transposed or names.computed_again:
            return self.backward(eqn, ins)
        if _scopes.EIGHT_BITS in names.scopes:
            return self.narrowed(eqn, ins)
        if _jaxpr.is_cast(eqn) and self.is_added(own, here):
            if _scopes.STACKED in names.scopes and ins[0].value.operation:
                ins[0].value.operation.is_stacked = True
            return [_retyped(ins[0], eqn)]
        if _jaxpr.call_kind(eqn) and (own is None or _jaxpr.call_kind(own.eqn)):
            return self.call(eqn, ins, at)
        # Of several equations that stand for one, the first begins it.
        operation = here.made.get(number)
        if operation is None:
            operation = self.operation(own.eqn if own else eqn, here)
        if own:
            here.made[number] = operation
        return self.outputs(eqn, ins, operation)

    def is_added(self, own: Step | None, here: Around) -> bool:
        """Whether autocast has added a cast."""
        if own is not None:
            return not _jaxpr.is_cast(own.eqn)
        return _scopes.AUTOCAST in here.place.scopes and here.place.step is None

    def narrowed(self, eqn: _jaxpr.Equation, ins: list[Array]) -> list[Array]:
        """Returns what is stored of a value in eight bits, beside its scales."""
        outs = [self.given(var.aval) for var in eqn.outvars]
        pairs = zip(ins, eqn.invars, eqn.outvars, strict=False)
        for i, (array, atom, var) in enumerate(pairs):
            if atom.aval.shape == var.aval.shape:
                outs[i] = outs[i]._replace(value=array.value)
        return outs

    def given(self, aval: Any, operation: Operation | None = None) -> Array:
        """Returns an array that nobody has read yet."""
        value = Value(operation)
        self.values.append(value)
        return Array(value, getattr(aval, "dtype", None))  # pyright: ignore

    def operation(self, eqn: _jaxpr.Equation, here: Around) -> Operation:
        """Returns the operation that an equation, as the user wrote it, stands for."""
        place = here.place
        step = place.step_among(self.steps)
        dtype, takes = _returned(eqn, step), _taken(eqn, step)
        name, library = eqn.primitive.name, here.function or library_function(eqn)
        below = frames_below_users(eqn)
        operation = Operation(
            name=library or in_words(eqn),
            library=library,
            frame=place.user,
            call=(place.user, place.author, below, name),
            step=step,
            times=place.trips,
            for_leaves=here.for_leaves or _maps_over_leaves(below),
            moves=is_view(eqn),
            dtype=dtype,
            takes=takes,
            # No convolution of cuDNN takes 16 bits and returns float32.
            rounded=takes if step and is_convolution(eqn) and dtype != takes else "",
        )
        self.operations.append(operation)
        return operation

    def outputs(
        self, eqn: _jaxpr.Equation, ins: list[Array], operation: Operation
    ) -> list[Array]:
        """Notes what an equation reads, and returns what it computes."""
        outs = [self.given(var.aval, operation) for var in eqn.outvars]
        for array, atom in zip(ins, eqn.invars, strict=True):
            if isinstance(atom, _jaxpr.Literal):
                continue
            value = array.value
            if value.operation is operation:  # one equation of several
                for out in outs:
                    value.turn_into(out.value)
            else:
                value.readers.append(operation)
                operation.ins.append(value)
        operation.outs += [out.value for out in outs]
        return outs

    def backward(self, eqn: _jaxpr.Equation, ins: list[Array]) -> list[Array]:
        """Notes what the backward pass reads, which is stored for it."""
        if _jaxpr.is_cast(eqn):
            return [_retyped(ins[0], eqn)]
        for array, atom in zip(ins, eqn.invars, strict=True):
            if getattr(atom.aval, "size", 1) != 1:
                size = atom.aval.size * array.stored.itemsize
                saved, dtype = array.value.saved, str(array.stored)
                saved[dtype] = max(saved.get(dtype, 0), size)
        return [self.given(var.aval) for var in eqn.outvars]

    # What equations hold.

    def call(self, eqn: _jaxpr.Equation, ins: list[Array], at: At) -> list[Array]:
        """Follows the jaxprs that an equation holds."""
        layout, ins = _jaxpr.call_layout(eqn), list(ins)
        carried = [self.given(eqn.invars[i].aval) for i in layout.fixed_in]
        for i, array in zip(layout.fixed_in, carried, strict=True):
            ins[i].value.turn_into(array.value)
            ins[i] = array
        outs = self.walk.once(eqn, ins, at)
        for i, array in zip(layout.fixed_out, carried, strict=True):
            outs[i].value.turn_into(array.value)
        floating = [i for i in layout.fixed_in if _jaxpr.is_inexact(eqn.invars[i])]
        for dtype in dict.fromkeys(str(eqn.invars[i].aval.dtype) for i in floating):
            loop = self.operation(eqn, at.place)
            loop.step, loop.dtype = None, dtype
            loop.carries = loop.is_forward = True
            loop.call = loop.call, dtype
        return outs

    def either(self, arrays: Sequence[Array]) -> Array:
        """Returns what is one of some arrays, as a branch has been taken."""
        out = Value()
        self.values.append(out)
        for array in arrays:
            array.value.turn_into(out)
        return arrays[0]._replace(value=out)

    # What the forward pass needs.

    def find_forward(self) -> None:
        """Finds the operations that do not serve the backward pass alone.

        Differentiation writes slopes into the forward pass, but no matmuls.
        """

        def before(value: Value) -> list[Value]:
            return value.comes_from + (value.operation.ins if value.operation else [])

        for value in _reached(filter(_ends, self.values), before):
            if value.operation is not None:
                value.operation.is_forward = True


def _maps_over_leaves(below: Iterable[Any]) -> bool:
    return any(function == "tree_map" for *_, function in below)


def _reached(
    starts: Iterable[Value], step: Callable[[Value], Iterable[Value]]
) -> Iterator[Value]:
    """Yields some values and all that steps lead to, each once."""
    left = list(starts)
    seen = set(left)
    while left:
        value = left.pop()
        yield value
        new = [x for x in step(value) if x not in seen]
        seen.update(new)
        left += new


def _ends(value: Value) -> bool:
    """Whether a value is a result, one that nobody reads, or computed by a matmul."""
    ends = value.is_returned or (value.operation and value.operation.takes)
    return bool(ends) or not (value.readers or value.becomes or value.saved)


def _returned(eqn: _jaxpr.Equation, step: Step | None) -> str:
    """Returns the dtype of the first floating result, as it is computed."""
    known = step.outs if step and step.eqn is eqn and step.how != "stored" else ()
    for i, var in enumerate(eqn.outvars):
        if _jaxpr.is_inexact(var):
            return str((known and known[i].dtype) or var.aval.dtype)
    return ""


def _taken(eqn: _jaxpr.Equation, step: Step | None) -> str:
    """Returns the dtype of what a product takes, empty if it is none."""
    if step is not None:
        is_product = step.kind == "product"
        return str(FLOAT8) if step.float8 else str(step.dtype) if is_product else ""
    floats = (x.aval.dtype for x in eqn.invars if _jaxpr.is_inexact(x))
    return str(next(floats, "")) if eqn.primitive.name in PRODUCTS else ""


def _retyped(array: Array, eqn: _jaxpr.Equation) -> Array:
    """Returns an array as a cast leaves it."""
    dtypes = array.stored, eqn.outvars[0].aval.dtype
    return array._replace(stored=min(dtypes, key=lambda x: np.dtype(x).itemsize))
