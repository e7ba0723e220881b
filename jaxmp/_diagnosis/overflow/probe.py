"""A program that tells where its numbers stop being finite, and how large they are.

A jaxpr is replayed as it stands, and of every floating array a trail is kept: the
moment at which the first Inf or NaN in it was born. So what reaches a result is told
from what a mask swallows, also through loops, branches and shards. Nothing but scalars
is kept of an array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..._base.dtypes import is_narrow
from ..._devices.varying import vary
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation
from ..._jaxprs.places import Place, placed
from ..._jaxprs.replay import is_call
from ..._ops.lists import EXACT, KEEPS_MAGNITUDES, SUMS, reduces_tests, tests_finite
from ..wide_replay import (
    before_rounding,
    bind_wide,
    jitted,
    platform_of,
    widened,
)
from . import trails as _trails
from .table import FINITE, Trails, Value, is_inexact, is_inexact_array
from .trails import GIVEN, NEVER, Operation, Rows, glance, look, seen_as


class Loop(NamedTuple):
    """A loop around an operation."""

    length: int | None  # None of a while loop
    reverse: bool

    def slice_of(self, trip: int) -> int:
        """Returns which slice the loop reads in a trip."""
        return self.length - 1 - trip if self.reverse and self.length else trip


class Site(NamedTuple):
    """A floating result of an operation of the program."""

    operation: str
    eqn: int  # the equation's `id`
    place: Place
    dtype: np.dtype
    size: int
    operands: tuple[Any, ...]  # types of its floating inputs
    loops: tuple[Loop, ...]
    computes: bool  # and does not only move or choose between values
    is_cast: bool
    numbers: frozenset[float]  # in the code, outside float16, that it may read
    given: int | None  # which of what the program is given it casts


class Seen(NamedTuple):
    """What a probed program returns."""

    given: Any  # int32[given, 8], looks at what it was given
    outs: Any  # int32[outs, moment + 2], the trails of its results
    failed: Any  # int32[moment], the first that made a test of finiteness fail
    rows: Rows


class Probe:
    """What is known of a program while it is replayed, and after it."""

    def __init__(self, jaxpr: Any, names: Sequence[str], *, wide: bool = False):
        """Prepares to replay a jaxpr with named inputs; ``wide`` is in float32."""
        self.jaxpr, self.wide, self.names = jaxpr, wide, [*names]
        self.depth = 1 + 2 * _depth(jaxpr)  # of a moment
        self.sites: list[Site] = []
        self.notes: dict[str, None] = {}  # an ordered set
        self.platform = "cpu"
        self._compiled: Any = None

    def program(self, around: Place) -> Callable[..., Seen]:
        """Returns the program as a function of its arrays, to be jitted."""
        return functools.partial(self._replay, around)

    def run(self, around: Place, arrays: Sequence[Any]) -> Seen:
        """Runs the program, compiled once, and returns what was seen."""
        if self._compiled is None:
            self.platform = platform_of(arrays)
            self._compiled = jitted(self.program(around), self.platform)
        with np.errstate(over="ignore"):  # of numbers in the code, said once already
            return jax.device_get(self._compiled(*arrays))

    def _replay(self, around: Place, *arrays: Any) -> Seen:
        del self.sites[:], self.names[len(arrays) :]
        arrays = tuple(map(self.in_dtype, arrays))
        consts = [self.in_dtype(x) for x in _jaxpr.closed_consts(self.jaxpr)]
        consts = _unfolded(consts)
        for x in consts:
            self.names.append(f"closed-over {jnp.result_type(x)}{[*jnp.shape(x)]}")
        given = [*arrays, *consts]
        looks = [
            look(jnp.asarray(x)) if is_inexact_array(x) else jnp.zeros(8, jnp.int32)
            for x in given
        ]
        table = [
            self.given_trail(i, x, seen)
            for i, (x, seen) in enumerate(zip(given, looks, strict=True))
        ]
        frame = Frame(self)
        first = frame.grow(jnp.stack(table)) if table else 0
        values = [Value(x, (first + i,), given=i) for i, x in enumerate(given)]
        outs = frame.run(
            self.jaxpr, values[: len(arrays)], around, values[len(arrays) :]
        )
        outs = frame.trails_of(outs, _jaxpr.open_jaxpr(self.jaxpr).outvars)
        nothing = jnp.zeros((0, 8), jnp.int32)
        seen = jnp.stack(looks) if looks else nothing
        return Seen(seen, outs, frame.first_failed(), frame.rows())

    def in_dtype(self, x: Any) -> Any:
        """Returns an array in the dtype that the replay has for it."""
        return widened(x) if self.wide else x

    def given_trail(self, number: int, x: Any, seen: Any) -> jax.Array:
        """Returns the trail of an array that the program is given."""
        if not is_inexact_array(x):
            return jnp.asarray(_trails.trail(self.depth, NEVER))
        born = _trails.trail(self.depth, GIVEN + number)[:-2]
        return _trails.trail_of(seen, jnp.result_type(x), born)

    def note(self, text: str, place: Place) -> None:
        """Remembers where nothing could be seen."""
        self.notes[f"{place.line or 'somewhere'}: {text}"] = None


class Frame(Trails):
    """The replay of a jaxpr that runs as one, with what is called in it."""

    def __init__(
        self,
        probe: Probe,
        clock: Sequence[Any] = (),
        loops: tuple[Loop, ...] = (),
        axes: tuple[Any, ...] = (),
        *,
        looking: bool = True,
    ):
        """Starts with nothing seen, inside of some loops; see :class:`Trails`."""
        super().__init__(probe.depth, clock, axes, wide=probe.wide, looking=looking)
        self.probe, self.loops = probe, loops

    def run(
        self,
        jaxpr: Any,
        values: Sequence[Value],
        around: Place,
        consts: Sequence[Value] | None = None,
    ) -> list[Value]:
        """Replays a jaxpr, open or closed, whose constants may be values too."""
        given = iter(consts or ())

        def apply(eqn, ins, place):
            with _jaxpr.context_of(eqn):
                return (self.call if is_call(eqn) else self.operation)(eqn, ins, place)

        def const(array):
            return self.constant(array) if consts is None else next(given)

        at_places = placed(apply, around)
        return _jaxpr.interpret(
            jaxpr, values, at_places, const=const, literal=self.literal
        )

    # Operations

    def operation(self, eqn: Equation, ins: list[Value], place: Place) -> list[Value]:
        """Applies an equation and looks at what it gives."""
        arrays = [x.array for x in ins]
        name, probe = eqn.primitive.name, self.probe
        if any(_jaxpr.sub_jaxprs(eqn)) and name not in SUMS:
            probe.note(f"nothing is seen inside of `{name}`", place)
        made = _is_made(eqn)
        if made:
            arrays = _unfolded(arrays)
        outs = bind_wide(eqn, arrays) if probe.wide else _jaxpr.bind(eqn, arrays)
        if made and not arrays:
            outs = _unfolded(outs)
        floating = [is_inexact(var) for var in eqn.outvars]
        if not self.looking:
            return [Value(x, (FINITE,)) for x in outs]
        if not any(floating):
            tested = self.tested(eqn, ins)
            return [Value(x, tested) for x in outs]
        if self.keeps_magnitudes(eqn):
            return [ins[i]._replace(array=x) for i, x in enumerate(outs)]
        numbers: frozenset[float] = frozenset().union(*(x.numbers for x in ins))
        is_exact, is_cast = name in EXACT, _jaxpr.is_cast(eqn)
        wide = None
        if not (is_exact or probe.wide):
            wide = before_rounding(eqn, arrays)
        if over := _jaxpr.collective_axes(eqn, self.axes):
            ins = self.of_all_devices(ins, eqn.invars, over)
        inputs = [
            (x.trail, atom.aval)
            for x, atom in zip(ins, eqn.invars, strict=True)
            if is_inexact(atom)
        ]
        values = []
        for x, is_float in zip(outs, floating, strict=True):
            if not is_float:
                values.append(Value(x, (FINITE,)))
                continue
            operation = Operation(
                len(probe.sites), tuple(t for t, _ in inputs), seen_as(x.dtype)
            )
            seen = glance(x) if is_exact else look(x, wide)
            kept = numbers if is_exact or is_cast else frozenset()
            values.append(Value(x, (self.append(operation, seen),), kept))
            probe.sites.append(
                Site(
                    operation=name,
                    eqn=id(eqn),
                    place=place,
                    dtype=x.dtype,
                    size=int(x.size),
                    operands=tuple(aval for _, aval in inputs),
                    loops=self.loops,
                    computes=bool(inputs) and not is_exact,
                    is_cast=is_cast,
                    numbers=numbers,
                    given=ins[0].given if is_cast else None,
                )
            )
        return values

    def keeps_magnitudes(self, eqn: Equation) -> bool:
        """Whether each result has the magnitudes of the input in its place."""
        pairs = [*zip(eqn.invars, eqn.outvars, strict=False)]
        if len(pairs) < len(eqn.outvars):
            return False
        same = all(x.aval.dtype == y.aval.dtype for x, y in pairs)
        if eqn.primitive.name in KEEPS_MAGNITUDES:
            return same
        return _jaxpr.is_cast(eqn) and (
            same or (is_narrow(pairs[0][0].aval) and _jaxpr.is_float32(pairs[0][1]))
        )

    def of_all_devices(
        self, ins: list[Value], atoms: Sequence[Any], axes: tuple[Any, ...]
    ) -> list[Value]:
        """Returns values with the trails that they have on any device."""
        table = _trails.table_over(self.mark(self.trails_of(ins, atoms)), axes)
        first = self.grow(self.mark(table))
        return [x._replace(trails=(first + i,)) for i, x in enumerate(ins)]

    def tested(self, eqn: Equation, ins: list[Value]) -> tuple[int, ...]:
        """Returns what booleans have tested, and remembers a test of all of it."""
        tests = tests_finite(eqn)
        trails = {
            trail
            for x, atom in zip(ins, eqn.invars, strict=True)
            if tests or not is_inexact(atom)
            for trail in x.trails
        }
        if reduces_tests(eqn):
            self._tested |= trails
        return tuple(trails)

    # What holds jaxprs

    def call(self, eqn: Equation, ins: list[Value], place: Place) -> list[Value]:
        """Replays an equation that calls, repeats or chooses between jaxprs."""
        layout = _jaxpr.call_layout(eqn)
        match _jaxpr.call_kind(eqn):
            case "scan":
                return self.scan(eqn, ins, place, layout.bodies[0].jaxpr)
            case "while":
                return self.while_loop(eqn, ins, place, layout.bodies)
            case "cond" if _jaxpr.chooses_platform(eqn):
                branch = _jaxpr.chosen_branch(eqn, self.probe.platform)
                return self.run(branch, ins[1:], place.inside(eqn, branch))
            case "cond":
                return self.cond(eqn, ins, place, [x.jaxpr for x in layout.bodies])
            case "shard_map":
                return self.shard_map(eqn, ins, place)
            case "remat" if _jaxpr.is_remat(eqn):
                return self.remat(eqn, ins, place)
            case _:
                jaxpr = layout.bodies[0].jaxpr
                return self.run(jaxpr, ins, place.inside(eqn, jaxpr))

    def enclosed(
        self,
        jaxpr: Any,
        place: Place,
        loop: Loop | None,
        ins: Any,
        outside: Sequence[Value],
        slices: int = 0,
    ) -> tuple[Any, int]:
        """Traces the replay of a body.

        Args:
            jaxpr: The body.
            place: What is around its operations.
            loop: The loop that it is the body of.
            ins: Its inputs, arrays or types of them, and a table of their trails.
            outside: What these inputs are, or begin with, outside.
            slices: How many of them, at the end, are slices of what the trails are of.

        Returns:
            A function of a clock, arrays and a table, which returns arrays, a table,
            rows, and the moment of a failed test; and the number of its sites.
        """
        sites = self.probe.sites
        number = len(sites)
        loops = self.loops if loop is None else (*self.loops, loop)

        def body(clock, arrays, table):
            del sites[number:]
            frame = Frame(self.probe, clock, loops, self.axes, looking=self.looking)
            if slices:
                table = frame.of_slices(arrays, table, slices)
            outs, seen = frame.seen_in(jaxpr, arrays, table, outside, place)
            return outs, *frame.mark(seen)

        clock = self.clock
        if loop is not None:
            clock = (*clock, np.int32(number), np.int32(0))
        return _closed(body, self.mark(tuple(clock)), *ins), len(sites) - number

    def seen_in(
        self,
        jaxpr: Any,
        arrays: Sequence[Any],
        table: Any,
        outside: Sequence[Value],
        place: Place,
    ) -> tuple[list[Any], tuple[Any, Rows, Any]]:
        """Replays a body, all that is in this frame.

        Returns:
            Its results; their trails, the rows, and the moment of a failed test.
        """
        first = self.grow(table)
        values = [
            Value(x, (first + i,), outside[i].numbers) for i, x in enumerate(arrays)
        ]
        outs = self.run(jaxpr, values, place)
        trails = self.trails_of(outs, _jaxpr.open_jaxpr(jaxpr).outvars)
        return [x.array for x in outs], (trails, self.rows(), self.first_failed())

    def of_slices(self, arrays: Sequence[Any], table: Any, slices: int) -> jax.Array:
        """Returns the trails of slices, of which those of the whole are known."""
        never = _trails.trail(self.probe.depth, NEVER)
        rows = [table[: len(arrays) - slices]]
        for i, x in list(enumerate(arrays))[len(arrays) - slices :]:
            row = jnp.asarray(never)
            if is_inexact_array(x) and self.looking:
                row = _trails.trail_of(glance(x), x.dtype, table[i, :-2])
            rows.append(self.mark(row[None]))
        return jnp.concatenate([self.mark(x) for x in rows])

    def scan(
        self, eqn: Equation, ins: list[Value], place: Place, jaxpr: Any
    ) -> list[Value]:
        """Replays a scan."""
        n_consts, n_carry = _jaxpr.scan_counts(eqn)
        n_fixed = n_consts + n_carry
        length, reverse = eqn.params["length"], eqn.params["reverse"]
        table = self.mark(self.trails_of(ins, eqn.invars))
        arrays = [x.array for x in ins]
        consts, carry = arrays[:n_consts], arrays[n_consts:n_fixed]
        xs = arrays[n_fixed:]
        types = map(self.probe.in_dtype, _jaxpr.in_avals(jaxpr)[n_fixed:])
        number = np.int32(len(self.probe.sites))
        body, count = self.enclosed(
            jaxpr,
            place.inside(eqn, jaxpr),
            Loop(length, reverse),
            ([*consts, *carry, *types], table),
            ins,
            len(xs),
        )

        def step(state, slices):
            (trip, rows, failed, trails), carry = state
            trails = [table[:n_consts], trails, table[n_fixed:]]
            clock = self.mark((*self.clock, number, trip))
            outs, trails, new, now = body(
                clock, [*consts, *carry, *slices], jnp.concatenate(trails)
            )
            failed = _trails.first(jnp.stack([failed, now]))
            seen = (trip + 1, _trails.merged(rows, new), failed, trails[:n_carry])
            return (self.mark(seen), outs[:n_carry]), (outs[n_carry:], trails[n_carry:])

        state = self.start(count, table[n_consts:n_fixed]), carry
        ((_, rows, failed, trails), carry), (ys, of_ys) = lax.scan(
            step,
            state,
            xs,
            length=length,
            reverse=reverse,
            unroll=eqn.params.get("unroll", 1),
        )
        trails = jnp.concatenate([trails, _trails.stacked(of_ys)])
        return self.after([*carry, *ys], trails, rows, failed)

    def while_loop(
        self, eqn: Equation, ins: list[Value], place: Place, bodies: Sequence[Any]
    ) -> list[Value]:
        """Replays a while loop. Its test is not looked at."""
        tested, repeated = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test, jaxpr = (x.jaxpr for x in bodies)
        table = self.mark(self.trails_of(ins, eqn.invars)[tested:])
        test_consts, inside = [x.array for x in ins[:tested]], ins[tested:]
        arrays = [x.array for x in inside]
        consts, carry = arrays[:repeated], arrays[repeated:]
        number = np.int32(len(self.probe.sites))
        body, count = self.enclosed(
            jaxpr, place.inside(eqn, jaxpr), Loop(None, False), (arrays, table), inside
        )
        quiet = Frame(self.probe, looking=False)
        eqns = _jaxpr.open_jaxpr(test).eqns
        if any(is_inexact(var) for eqn in eqns for var in eqn.outvars):
            self.probe.note("the test of a while loop is not looked at", place)

        def goes_on(carry):
            values = [Value(x, (FINITE,)) for x in [*test_consts, *carry]]
            return quiet.run(test, values, place)[0].array

        def step(state):
            (trip, rows, failed, before), carry = state
            clock = self.mark((*self.clock, number, trip))
            trails = jnp.concatenate([table[:repeated], before])
            outs, trails, new, now = body(clock, [*consts, *carry], trails)
            goes = goes_on(carry)
            outs = after_trip(goes, outs, carry)
            if jnp.ndim(goes):  # what the trip made of those that have ended is gone
                trails = _trails.stacked(jnp.stack([before, trails]))
                trails = self.of_slices(outs, trails, len(outs))
            failed = _trails.first(jnp.stack([failed, now]))
            seen = (trip + 1, _trails.merged(rows, new), failed, trails)
            return self.mark(seen), outs

        (_, rows, failed, trails), carry = lax.while_loop(
            lambda state: jnp.any(goes_on(state[1])),
            step,
            (self.start(count, table[repeated:]), carry),
        )
        return self.after(carry, trails, rows, failed)

    def cond(
        self, eqn: Equation, ins: list[Value], place: Place, branches: Sequence[Any]
    ) -> list[Value]:
        """Replays a choice. Where a branch does not run nothing is seen."""
        index, *ins = ins
        table = self.mark(self.trails_of(ins, eqn.invars[1:]))
        arrays = [x.array for x in ins]
        bodies = [
            self.enclosed(branch, place.inside(eqn, branch), None, (arrays, table), ins)
            for branch in branches
        ]
        counts = [count for _, count in bodies]

        def padded(i, body):
            def branch(clock, arrays, table):
                outs, trails, rows, failed = body(clock, arrays, table)
                before, after = sum(counts[:i]), sum(counts[i + 1 :])
                parts = [self.no_rows(before), rows, self.no_rows(after)]
                rows = Rows(*map(jnp.concatenate, zip(*parts, strict=True)))
                return outs, *self.mark((trails, rows, failed))

            return branch

        seen = lax.switch(
            index.array,
            [padded(i, body) for i, (body, _) in enumerate(bodies)],
            self.mark(tuple(self.clock)),
            arrays,
            table,
        )
        return self.after(*seen)

    def remat(self, eqn: Equation, ins: list[Value], place: Place) -> list[Value]:
        """Replays what a backward pass computes again, so that nothing is kept."""
        jaxpr = eqn.params["jaxpr"]
        table = self.mark(self.trails_of(ins, eqn.invars))
        inside = place.replayed(eqn, jaxpr)
        args = self.mark(tuple(self.clock)), [x.array for x in ins], table
        body, _ = self.enclosed(jaxpr, inside, None, args[1:], ins)
        outs = _jaxpr.bind_remat(eqn, jax.tree.leaves(args), body.jaxpr)
        return self.after(*body.tree.unflatten(outs))

    def shard_map(self, eqn: Equation, ins: list[Value], place: Place) -> list[Value]:
        """Replays a function of shards, and puts together what the devices see."""
        jaxpr = eqn.params["jaxpr"]
        new = tuple(_jaxpr.manual_axes(eqn))
        axes, sites = (*self.axes, *new), self.probe.sites
        number = len(sites)
        table = self.trails_of(ins, eqn.invars)

        def body(shards, scalars):
            del sites[number:]
            table, clock = vary(scalars, new)
            frame = Frame(self.probe, clock, self.loops, axes, looking=self.looking)
            inside = place.inside(eqn, jaxpr)
            outs, seen = frame.seen_in(jaxpr, shards, table, ins, inside)
            trails, rows, failed = vary(seen, axes)
            return outs, (
                _trails.table_over(trails, new),
                _trails.rows_over(rows, new),
                _trails.moment_over(failed, new),
            )

        arrays = [x.array for x in ins]
        scalars = table, tuple(map(jnp.int32, self.clock))
        outs, seen = _jaxpr.map_shards(eqn, arrays, scalars, body)
        return self.after(outs, *seen)


def after_trip(goes_on: Any, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
    """Returns what a ``while`` carries after a trip.

    Under ``vmap`` its test is an array, whose axes are the first of all that is
    carried. The loop goes on while any example does, and those that have ended wait for
    the others. ``lax.while_loop`` takes no such test.
    """
    if not jnp.ndim(goes_on):
        return list(new)
    return [
        jnp.where(jnp.expand_dims(goes_on, range(goes_on.ndim, x.ndim)), x, y)
        for x, y in zip(new, old, strict=True)
    ]


class _Closed:
    """A function that was traced, as a function of pytrees."""

    def __init__(self, jaxpr: Any, tree: Any):
        self.jaxpr, self.tree = jaxpr, tree

    def __call__(self, *args: Any) -> Any:
        call = _jaxpr.jaxpr_as_fun(self.jaxpr)
        return self.tree.unflatten(call(*jax.tree.leaves(args)))


def _closed(fun: Callable, *args: Any) -> _Closed:
    """Traces a function of pytrees of arrays or types, once."""
    jaxpr, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    return _Closed(jaxpr, jax.tree.structure(shapes))


def _depth(jaxpr: Any) -> int:
    """Returns how many loops of a jaxpr lie in each other."""
    return max(
        (
            (_jaxpr.call_kind(eqn) in ("scan", "while")) + _depth(body)
            for eqn in _jaxpr.open_jaxpr(jaxpr).eqns
            for body in _jaxpr.sub_jaxprs(eqn)
        ),
        default=0,
    )


def _is_made(eqn: Equation) -> bool:
    """Whether ``eqn`` gives the same whatever the program is given."""
    return all(isinstance(x, _jaxpr.Literal) for x in eqn.invars)


def _unfolded(arrays: Sequence[Any]) -> list[Any]:
    """Returns arrays that XLA does not know to be constant.

    It would find what is seen of constants while it compiles, number by number, which
    takes minutes for a whole program.
    """
    return [lax.optimization_barrier(jnp.asarray(x)) for x in arrays]
