"""A program whose values are seen where they go into a module, and come out of it.

A jaxpr is replayed as it stands. Where an equation reads a value in other named scopes
than those in which it was computed, the value leaves some modules and enters others:
each is a *crossing*. There a value may be replaced by that of another program, so that
what follows computes from the same numbers. What rounding makes of it is measured in a
run of its own, in which all that is rounded moves by one unit in its last place.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._base.gpus import BFLOAT16, gpu_of
from ..._base.tree import is_inexact
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.flatten import check_values, flatten
from ..._jaxprs.jaxpr import Equation
from ..._jaxprs.places import Place, caller, equations
from ..._jaxprs.replay import Replay, TracedBody
from ..._jaxprs.sizes import size_of
from ..._ops.precision import Float32Products, rounded_by_device
from ..._ops.products import has_default_precision, is_of_float32
from ..._ops.table import given_name, is_moved, is_sum, rounds
from ..wide_replay import jitted, platform_of

IN, OUT, NAMED, RESULT = "in", "out", "named", "result"
ITERATION = "[]"  # in a path: one of a loop


class Call(NamedTuple):
    """A call of a module; in a loop, one for all iterations.

    It ends where the module is given what depends on what it has returned.
    """

    path: tuple[str, ...]
    visit: int = 1  # the number of the call
    bit: int = 0  # of those whose results a value depends on


BACKWARD = Call(("(the backward pass)",))


class Crossing(NamedTuple):
    """A value that goes into a module, or comes out of it."""

    number: int
    kind: str
    call: Call  # what is entered or left, or names the value
    name: str  # of a result
    blamed: Call  # whose lines have made this of the values that crossed before
    uid: int  # of the value, which several modules may hand on
    before: Crossing | None  # the last crossing of the same value
    type: Any  # of one iteration
    where: str  # the line that computed it
    loops: tuple[int, ...]  # how many iterations the loops around have
    order: tuple[int, ...]  # of when it was computed; loops first


class Seen(NamedTuple):
    """What was at a crossing, or is given for it. Iterations are leading axes."""

    array: Any
    is_there: Any  # bool: whether it was computed, or is given

    def at(self, iteration: tuple[int, ...]) -> Any:
        """Returns the value of an iteration, None where there is none."""
        return self.array[iteration] if self.is_there[iteration] else None


class Found(NamedTuple):
    """An array, and where it was computed."""

    array: Any
    uid: int = -1
    chain: tuple[Call, ...] = ()  # of calls, one in the other
    after: int = 0  # bits of the calls whose results it depends on
    given: bool = False  # an argument, at most moved elsewhere or cast
    moved: bool = False  # by a unit in its last place
    last: Crossing | None = None
    where: str = ""


# What a run is told: whether to replace what is given, and whether to move what is
# rounded, in a draw of that number.
FREE, FORCED = np.array([0, 0]), np.array([1, 0])
DRAWS = [np.array([1, draw]) for draw in (1, 2, 3)]


class Compared:
    """A function of some arguments, as a jaxpr.

    Attributes:
        names: Of its results.
        crossings: All of them, by number.
        notes: Where nothing was seen, an ordered set.
    """

    def __init__(self, fun: Callable, args: tuple, kwargs: dict, device: Any = None):
        flat = flatten(fun, args, kwargs)
        check_values("parity", flat, "the arguments to compare with")
        closed = jax.make_jaxpr(flat.fun)(*flat.leaves)
        self.names, self.jaxpr = flat.out_names, _jaxpr.without_constants(closed)
        self.arrays = [*closed.consts, *flat.leaves]
        if device is not None:
            self.arrays = jax.device_put(self.arrays, device)
        self.around, self.notes = Place(user=caller()), dict[str, None]()
        self.platform = platform_of(self.arrays)
        self.products = _products_on(device or jax.devices(self.platform)[0])
        self.crossings: dict[int, Crossing] = {}
        _jaxpr.trace(lambda *arrays: self._replayed(FREE, {}, arrays), self.arrays)

    def results(self) -> dict[str, np.ndarray]:
        """Returns the results as ``jax.jit`` computes them, by name."""
        outs = jax.jit(_jaxpr.jaxpr_as_fun(self.jaxpr))(*self.arrays)
        named = zip(self.names, outs, strict=True)
        return {name: np.asarray(x) for name, x in named if _is_number(x)}

    def compiled(self, dtypes: Mapping[int, Any]) -> Callable[..., dict[int, Seen]]:
        """Compiles the program for some crossings: the dtypes given there, by number.

        Returns:
            A function of what the run is told and of what is given at each crossing. It
            returns what was there.
        """
        fun, nothing = jitted(self._replayed, self.platform), {}
        for i in sorted(dtypes):
            loops, type = self.crossings[i].loops, self.crossings[i].type
            zeros = np.zeros((*loops, *type.shape), dtypes[i])
            nothing[i] = Seen(zeros, np.zeros(loops, bool))

        def run(told: Any, given: Mapping[int, Seen] = {}) -> dict[int, Seen]:
            seen = fun(
                told, {i: given.get(i, x) for i, x in nothing.items()}, self.arrays
            )
            return jax.tree.map(np.asarray, seen)

        return run

    def _replayed(self, told: Any, given: Any, arrays: Sequence[Any]) -> Any:
        trace = _Trace(self)
        named = Named(trace, given, told, (), _Outside())
        outs = named.run(self.jaxpr, [*map(named.constant, arrays)], self.around)
        for name, x in zip(self.names, outs, strict=True):
            named.step(RESULT, Call(()), named.crossed(x, ()), name)
        self.crossings = trace.crossings
        return named.found


def _products_on(device: Any) -> Float32Products | None:
    """Returns what a device makes of the operands of float32 products by default."""
    if device.platform == "tpu":
        return "bfloat16"
    gpu = gpu_of(device)
    return "tf32" if gpu is not None and gpu.capability >= BFLOAT16 else None


class _Trace:
    """What all replays of one trace have in common."""

    def __init__(self, program: Compared):
        self.program, self.crossings = program, dict[int, Crossing]()
        self.uids, self.bits = itertools.count(), itertools.count()
        self.visits: collections.Counter[tuple[str, ...]] = collections.Counter()

    def call(self, path: tuple[str, ...]) -> Call:
        self.visits[path] += 1
        return Call(path, self.visits[path], 1 << next(self.bits))


class _Outside(NamedTuple):
    """What is around a body that is traced on its own."""

    names: tuple[str, ...] = ()  # of the scopes
    chain: tuple[Call, ...] = ()
    carries: int = 0  # how many of its results its next iteration gets
    results: bool = True  # whether others are returned, and not for a backward pass
    loops: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    is_quiet: bool = False  # whether nothing is seen in it


class Named(Replay):
    """The replay of a body, which knows in which module each value was computed."""

    keeps_remat = False

    def __init__(
        self, trace: _Trace, given: Any, told: Any, axes: Any, around: _Outside
    ):
        super().__init__(trace.program.platform, told, axes)
        self.trace, self.given, self.around = trace, given, around
        self.found: dict[int, Seen] = {}  # in the bodies inside, too
        self.next = around  # around the next body
        self._open: dict[Any, Call] = {}  # the last call by its path and what is around
        self._steps: dict[Any, Found] = {}
        self._is_new = True

    # What the replay asks for.

    def value(self, array: Any) -> Found:  # pyright: ignore
        return Found(array, next(self.trace.uids), self.around.chain)

    def constant(self, array: Any) -> Found:
        return Found(array, next(self.trace.uids), given=True)

    def literal(self, literal: Any) -> Found:
        return self.constant(literal.val)._replace(moved=True)

    def inside(self, scalars: Any, axes: tuple[Any, ...]) -> Named:
        given = {} if self.next.is_quiet else self.given
        return Named(self.trace, given, scalars, axes, self.next)

    def beside(self) -> dict[int, Seen]:
        order, known = self.around.order, self.trace.program.crossings
        here = (i for i in self.given if known[i].order[: len(order)] == order)
        return {i: self.given[i] for i in here}

    def take(self, beside: Any) -> None:
        if isinstance(beside, dict):
            self.given = beside

    def seen(self) -> dict[int, Seen]:
        return self.found

    def results(
        self, eqn: Equation, arrays: list[Any], bodies: list[TracedBody]
    ) -> list[Found]:
        for body in bodies:
            if not body.replay.around.is_quiet:
                is_loop = _jaxpr.call_kind(eqn) == "scan"
                self.found |= body.seen[1] if is_loop else body.seen
        return super().results(eqn, arrays, bodies)

    # The replay.

    def run(self, jaxpr: Any, values: Sequence[Any], around: Place) -> list[Any]:
        is_body, self._is_new = self._is_new, False
        outs = super().run(jaxpr, values, around)
        if not is_body:
            return outs
        chain, carries = self.around.chain, self.around.carries
        carried = [self.crossed(x, chain[:-1]) for x in outs[:carries]]
        if self.around.results:
            outs = [self.crossed(x, chain) for x in outs]
        return [*carried, *outs[carries:]]

    def call(self, eqn: Equation, ins: list[Found], place: Place) -> list[Found]:
        if self.apart(eqn) is None:
            return super().call(eqn, ins, place)
        kind, around = _jaxpr.call_kind(eqn), self.around
        chain = outside = self._chain(place, ins)
        results = not _jaxpr.is_differentiated(eqn)
        self.next = around._replace(
            names=_names(place), chain=chain, carries=0, results=results
        )
        if (
            around.is_quiet
            or chain[:1] == (BACKWARD,)
            or kind in ("while", "shard_map")
        ):
            self.next = self.next._replace(is_quiet=True)
            self._note(eqn, place)
        elif kind == "scan":
            names = _shared(_names_inside(eqn, place))
            carries = _jaxpr.scan_counts(eqn)[1]
            outside = self._chain_of(names, ins)
            loop = self._call((*_path(outside), ITERATION), outside, ins)
            chain = (*outside, loop)
            loops = *around.loops, eqn.params["length"]
            order = *around.order, next(self.trace.uids)
            self.next = _Outside(names, chain, carries, results, loops, order)
        ins = [self.crossed(x, chain) for x in ins]
        outs = super().call(eqn, ins, place)
        known = {"chain": outside, "after": _after(ins), "where": place.where}
        return [x._replace(**known) for x in outs]

    def operation(self, eqn: Equation, ins: list[Found], place: Place) -> list[Found]:
        chain, name = self._chain(place, ins), given_name(eqn)
        ins = [self.crossed(x, chain) for x in ins]
        if name is not None and not (self._is_unseen(chain) or ins[0].given):
            return [self.step(NAMED, self.trace.call((*_path(chain), name)), ins[0])]
        arrays = _jaxpr.bind(eqn, self._operands(eqn, ins))
        is_rounded, is_given = _is_rounded(eqn), is_moved(eqn) and bool(ins)
        is_given = is_given and all(x.given for x in ins)
        if all(isinstance(x, _jaxpr.Literal) for x in eqn.invars) and is_given:
            chain = ()  # a number in the code, which JAX may write elsewhere
        moved = is_rounded or all(x.moved for x in ins)
        known = chain, _after(ins), is_given, moved, None, place.where
        if is_rounded:
            arrays = [
                _moved(x, self.scalars[1]) if is_inexact(x) else x for x in arrays
            ]
        return [Found(x, next(self.trace.uids), *known) for x in arrays]

    def _operands(self, eqn: Equation, ins: list[Found]) -> list[Any]:
        """Returns the operands of an equation, moved where it is one that rounds."""
        if not rounds(eqn):
            return [x.array for x in ins]
        # An argument is the same in both programs. Where there is nothing else, its sum
        # is rounded all the same.
        exact, terms = not all(x.given for x in ins), 1
        if is_sum(eqn) and eqn.invars:
            # Each addition may be rounded, as if each term were further off.
            sizes = (max(size_of(x.aval), 1) for x in (eqn.invars[0], eqn.outvars[0]))
            terms = max(operator.floordiv(*sizes), 1)
        arrays = [
            x.array
            if (x.moved and terms == 1)
            or (x.given and exact)
            or not is_inexact(x.array)
            else _moved(x.array, self.scalars[1], math.isqrt(terms))
            for x in ins
        ]
        kind: Any = self.trace.program.products
        if kind and is_of_float32(eqn) and has_default_precision(eqn):
            arrays[:2] = [
                jnp.where(self.scalars[1] > 0, rounded_by_device(x, kind), x)
                for x in arrays[:2]
            ]
        return arrays

    def _note(self, eqn: Equation, place: Place) -> None:
        """Remembers what modules of a forward pass are not looked into."""
        is_seen = not (self.around.is_quiet or place.backward or place.again)
        names = map(len, _names_inside(eqn, place))
        if is_seen and max(names) > len(_names(place)):
            what = f"modules inside a `{_jaxpr.call_kind(eqn)}` are not seen"
            self.trace.program.notes[f"{place.line or 'somewhere'}: {what}"] = None

    # Modules, and values that go into them or come out.

    def _chain(self, place: Place, ins: Sequence[Found]) -> tuple[Call, ...]:
        """Returns the calls around an equation that reads some values."""
        if self.around.is_quiet:
            return self.around.chain
        if place.backward or place.again:
            return (BACKWARD,)
        return self._chain_of(_names(place), ins)

    def _chain_of(self, names: Sequence[str], ins: Sequence[Found]) -> tuple[Call, ...]:
        chain, start = self.around.chain, len(self.around.names)
        for name in names[start:] if names[:start] == self.around.names else ():
            chain = (*chain, self._call((*_path(chain), name), chain, ins))
        return chain

    def _call(self, path: Any, chain: Any, ins: Sequence[Found]) -> Call:
        """Returns the call of a module, a new one if it reads what the last gave."""
        key = path, chain
        if key not in self._open or self._open[key].bit & _after(ins):
            self._open[key] = self.trace.call(path)
        return self._open[key]

    def _is_unseen(self, chain: tuple[Call, ...]) -> bool:
        return self.around.is_quiet or chain[:1] == (BACKWARD,)

    def crossed(self, x: Found, chain: tuple[Call, ...]) -> Found:
        """Returns a value as it is read by lines in the modules of a chain."""
        if self._is_unseen(chain) or self._is_unseen(x.chain):
            return x
        pairs = enumerate(zip(x.chain, chain, strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), None)
        shared = min(len(x.chain), len(chain)) if shared is None else shared
        while len(x.chain) > shared:
            x = self.step(OUT, x.chain[-1], x)
        for call in chain[shared:]:
            if not x.given:  # weights have layouts of their own
                x = self.step(IN, call, x)
        return x

    def step(self, kind: str, call: Call, x: Found, name: str = "") -> Found:
        """Takes a value over one boundary, at which it may be replaced."""
        key = x.uid, kind, call, name
        if key in self._steps:
            return self._steps[key]
        around, crossings = self.around, self.trace.crossings
        chain = x.chain[:-1] if kind == OUT else x.chain
        chain = (*chain, call) if kind == IN else chain
        y = x._replace(chain=chain, given=False)
        if kind == OUT:
            y = y._replace(after=x.after | call.bit)
        array = _jaxpr.as_array(x.array)
        if _is_number(array):
            blamed = call if kind == NAMED else (*(Call(()),), *x.chain)[-1]
            number, type = len(crossings), jax.typeof(array)
            order = *around.order, x.uid, number
            known = x.uid, x.last, type, x.where, around.loops, order
            here = Crossing(number, kind, call, name, blamed, *known)
            crossings[number], y = here, y._replace(last=here)
            if number in self.given:
                self.found[number] = Seen(array, jnp.array(True))
                given, is_there = self.given[number]
                cast = given.astype(array.dtype)
                if given.dtype.itemsize > array.dtype.itemsize:
                    cast = _moved(cast, self.scalars[1])
                array = jnp.where((self.scalars[0] > 0) & is_there, cast, array)
                array = _jaxpr.with_type_of(array, type)
                y = y._replace(array=array, moved=False)
        self._steps[key] = y
        return y


def _is_number(x: Any) -> bool:
    """Whether an array can be compared, unlike a random key."""
    return x.dtype == bool or jnp.issubdtype(x.dtype, np.number)


def _after(values: Iterable[Found]) -> int:
    return functools.reduce(operator.or_, (x.after for x in values), 0)


def _path(chain: tuple[Call, ...]) -> tuple[str, ...]:
    return chain[-1].path if chain else ()


def _names(place: Place) -> tuple[str, ...]:
    return tuple(filter(None, place.module.split("/")))


def _names_inside(eqn: Equation, place: Place) -> list[tuple[str, ...]]:
    """Returns the names of what computes in an equation; they begin with its own.

    A call in it, such as a remat, may have fewer names than all that it holds.
    """
    around, bodies = _names(place), _jaxpr.sub_jaxprs(eqn)
    inside = (equations(body, place.inside(eqn, body)) for body in bodies)
    inner = itertools.chain.from_iterable(inside)
    found = [_names(here) for x, here in inner if not _jaxpr.is_call(x)]
    return [x for x in found if x[: len(around)] == around] or [around]


def _shared(names: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Returns what all begin with."""
    columns = itertools.takewhile(lambda x: len({*x}) == 1, zip(*names, strict=False))
    return tuple(x[0] for x in columns)


def _is_rounded(eqn: Equation) -> bool:
    """Whether the results of an equation are rounded, or those of a cast."""
    if not _jaxpr.is_cast(eqn):
        return rounds(eqn)
    (x,), (y,) = eqn.invars, eqn.outvars
    both = is_inexact(x.aval) and is_inexact(y.aval)
    return both and y.aval.dtype.itemsize < x.aval.dtype.itemsize


@functools.partial(jax.jit, static_argnums=2)  # traced once for each type
def _moved(x: Any, draw: Any, units: int = 1) -> Any:
    """Moves numbers by units in their last place, up or down by chance; not zeros.

    Those of 16 bits move by one unit: their sums are rounded once, at the end.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(_moved(x.real, draw, units), _moved(x.imag, draw, units))
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        return x
    size = 8 * x.dtype.itemsize
    whole = np.dtype(f"uint{size}")
    bits = lax.bitcast_convert_type(x, whole)
    # The first digit of a multiple of the golden ratio is as good as a coin.
    ratio = np.array(int(0.6180339887498949 * 2**size) | 1, whole)
    draw = draw.astype(whole)
    coin = ((bits + (draw << (size - 5))) * ratio) >> (size - 1)
    units = units if size > 16 else 1
    way = (coin + coin - np.array(1, whole)) * np.array(units, whole)
    y, info = lax.bitcast_convert_type(bits + way, x.dtype), jnp.finfo(x.dtype)
    size = jnp.abs(x)
    is_moved = (draw > 0) & (size >= info.tiny) & (size < info.max / 2)
    return jnp.where(is_moved, y, x)
