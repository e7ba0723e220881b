"""Replaying a jaxpr under the ambient trace: its calls, branches, loops and shards.

What an operation does, a class says that inherits from :class:`Replay`. What stands for
a value is a tuple with the field ``array``, and with others for what is known of it.
What is seen inside of a body that is traced on its own leaves it as one more output, a
pytree that a loop stacks, or carries along.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import jaxpr as _jaxpr
from .jaxpr import Equation, is_call
from .places import Place


class Replay:
    """The replay of jaxprs on a platform, in the shards of some mesh axes."""

    value: Callable[[Any], Any]  # makes a value of an array of which nothing is known
    keeps_remat = True  # else what is computed again is written out as all else

    def __init__(self, platform: str, scalars: Any = (), axes: tuple[Any, ...] = ()):
        """Starts a replay; operations may read the scalars, a pytree of arrays."""
        self.platform, self.scalars, self.axes = platform, scalars, axes

    # What a class says that inherits from this one.

    def operation(self, eqn: Equation, ins: list[Any], place: Place) -> list[Any]:
        """Applies an equation that computes."""
        raise NotImplementedError

    def constant(self, array: Any) -> Any:
        """Returns the value of an array that a jaxpr carries."""
        return self.value(array)

    def literal(self, literal: Any) -> Any:
        """Returns the value of a number in the code."""
        return self.value(literal.val)

    def read(self, eqn: Equation, ins: list[Any]) -> list[Any]:
        """Returns the inputs of an equation as it reads them."""
        del eqn
        return ins

    def bodies(self, eqn: Equation) -> list[Any]:
        """Returns the jaxprs in an equation that run on the platform."""
        bodies = _jaxpr.call_layout(eqn).bodies
        return [x.jaxpr for x in _jaxpr.on_platform(eqn, bodies, self.platform)]

    def inside(self, scalars: Any, axes: tuple[Any, ...]) -> Replay:
        """Returns the replay of a body that is traced on its own."""
        raise NotImplementedError

    def part(self, array: Any, *values: Any) -> Any:
        """Returns the value of a slice of a value, or of a mixture of two."""
        is_slice = len(values) == 1
        return values[0]._replace(array=array) if is_slice else self.value(array)

    def seen(self) -> Any:
        """Returns what was seen in a body, of which this is the replay, at its end."""
        return ()

    def beside(self) -> Any:
        """Returns arrays, stacked, of which each iteration of a loop gets its own.

        Of the body of a scan, of which this is the replay; :meth:`take` gets them.
        """
        return ()

    def take(self, beside: Any) -> None:
        """Takes what an iteration gets beside its inputs."""

    def results(
        self, eqn: Equation, arrays: list[Any], bodies: list[TracedBody]
    ) -> list[Any]:
        """Returns the values of what an equation with bodies has returned."""
        del eqn, bodies
        return [self.value(x) for x in arrays]

    def first(self, seen: Any, length: int | None) -> Any:
        """Returns what a loop carries along of what iterations see, by its types.

        ``length`` is None for a while loop, which stacks nothing.
        """
        del seen, length
        return ()

    def after(self, state: Any, seen: Any) -> tuple[Any, Any]:
        """Returns what a loop carries along after an iteration, and what it stacks."""
        return state, seen

    def nothing(self, seen: Any) -> Any:
        """Returns what is seen of what does not run, given types of what would be."""
        return jax.tree.map(jnp.zeros_like, seen)

    def together(self, seen: Any, axes: tuple[Any, ...]) -> Any:
        """Returns what all devices along mesh axes have seen."""
        del axes
        return seen

    # The replay itself.

    def run(self, jaxpr: Any, values: Sequence[Any], around: Place) -> list[Any]:
        """Replays a jaxpr, open or closed."""
        place = around

        def apply(eqn, ins):
            nonlocal place
            place = around.of(eqn, before=place)
            replay = self.call if is_call(eqn) else self.operation
            with _jaxpr.context_of(eqn):
                return replay(eqn, self.read(eqn, ins), place)

        return _jaxpr.interpret(
            jaxpr, values, apply, const=self.constant, literal=self.literal
        )

    def call(self, eqn: Equation, ins: list[Any], place: Place) -> list[Any]:
        """Replays an equation that calls, repeats or chooses between jaxprs."""
        replayed = self.apart(eqn)
        if replayed is None:
            jaxpr, ins = self.written_out(eqn, ins)
            return self.run(jaxpr, ins, place.inside(eqn, jaxpr))
        bodies = [TracedBody(self, x, place.inside(eqn, x)) for x in self.bodies(eqn)]
        arrays = [_jaxpr.as_array(x.array) for x in ins]
        outs = replayed(eqn, ins, arrays, *bodies)
        return self.results(eqn, outs, bodies)

    def written_out(self, eqn: Equation, ins: list[Any]) -> tuple[Any, list[Any]]:
        """Returns the jaxpr of a call that is written out, and what goes into it."""
        jaxpr = self.bodies(eqn)[0]
        return jaxpr, ins[len(ins) - len(_jaxpr.in_vars(jaxpr)) :]  # no platform

    def apart(self, eqn: Equation) -> Callable[..., Any] | None:
        """Returns what replays a call whose bodies are traced on their own.

        None if its equations are written out.
        """
        apart = {
            "scan": self.scan,
            "while": self.while_loop,
            "cond": None if _jaxpr.chooses_platform(eqn) else self.cond,
            "remat": self.remat if self.keeps_remat and _jaxpr.is_remat(eqn) else None,
            "shard_map": self.shard_map,
        }
        return apart.get(_jaxpr.call_kind(eqn))

    def scan(self, eqn, ins, arrays, body):
        n_consts, n_carry = _jaxpr.scan_counts(eqn)
        first = n_consts + n_carry
        consts, carry, xs = arrays[:n_consts], arrays[n_consts:first], arrays[first:]
        pairs = zip(_jaxpr.in_avals(body.jaxpr)[first:], xs, strict=True)
        slices = [
            x if x.dtype == y.dtype else x.update(dtype=y.dtype) for x, y in pairs
        ]
        outside = [*ins[:n_consts], *[None] * n_carry, *ins[first:]]
        every = body.replay.beside()
        one = jax.tree.map(lambda x: jax.typeof(x).update(shape=x.shape[1:]), every)
        arrays = [*consts, *carry, *slices]
        run = Traced(body, arrays, outside, beside=one, slices=len(xs))

        def step(carried, given):
            (carry, state), (xs, beside) = carried, given
            outs, seen = run([*consts, *carry, *xs], beside)
            state, seen = self.after(state, seen)
            return (outs[:n_carry], state), (outs[n_carry:], seen)

        state = self.first(run.types, eqn.params["length"])
        (carry, state), (ys, seen) = scan(eqn, step, (carry, state), (xs, every))
        body.seen = state, seen
        return [*carry, *ys]

    def while_loop(self, eqn, ins, arrays, test, body):
        layout = _jaxpr.call_layout(eqn)
        first = layout.fixed_in.start
        carry = arrays[first:]

        def traced(body, operands, **options):
            """Returns a function of what is carried, and what it is traced to."""
            fixed = [i for i in operands if i < first]
            outside = [*(ins[i] for i in fixed), *[None] * len(carry)]
            fixed = [arrays[i] for i in fixed]
            fun = Traced(body, [*fixed, *carry], outside, **options)
            return lambda carry: fun([*fixed, *carry]), fun

        tested, _ = traced(test, layout.bodies[0].operands)

        def goes_on(carry):
            return tested(carry)[0][0]

        # Under `vmap` the test is an array, which `lax.while_loop` does not take.
        is_batch = bool(_jaxpr.out_avals(test.jaxpr)[0].shape)
        options = {"goes_on": goes_on} if is_batch else {}
        run, fun = traced(body, layout.bodies[1].operands, **options)

        def step(carried):
            outs, seen = run(carried[0])
            return outs, self.after(carried[1], seen)[0]

        # The primitive would take bodies that close over nothing.
        carry, state = lax.while_loop(
            lambda carried: jnp.any(goes_on(carried[0])),
            step,
            (carry, self.first(fun.types, None)),
        )
        body.seen = state, ()
        return carry

    def cond(self, eqn, ins, arrays, *bodies):
        del eqn
        index, *arrays = arrays
        branches = [Traced(body, arrays, ins[1:]) for body in bodies]

        def alone(arrays, i):
            """Runs one branch; of all others nothing is seen."""
            outs, seen = branches[i](arrays)
            every = [self.nothing(x.types) for x in branches]
            every[i] = seen
            return outs, every

        runs = [functools.partial(alone, i=i) for i in range(len(branches))]
        outs, seen = lax.switch(index, runs, arrays)
        for body, x in zip(bodies, seen, strict=True):
            body.seen = x
        return outs

    def remat(self, eqn, ins, arrays, body):
        fun = Traced(body, arrays, ins)
        outs, body.seen = fun.rebuilt(_jaxpr.bind_remat(eqn, arrays, fun.jaxpr))
        return outs

    def shard_map(self, eqn, ins, arrays, body):
        new = tuple(_jaxpr.manual_axes(eqn))

        def run(shards, scalars):
            body.enter(scalars, (*self.axes, *new))
            outs, seen = body.run(shards, ins)
            return outs, body.replay.together(seen, new)

        outs, body.seen = _jaxpr.map_shards(eqn, arrays, self.scalars, run)
        return outs


class TracedBody:
    """A jaxpr in an equation that is traced on its own.

    Attributes:
        replay: That of its equations.
        seen: What was seen in it. Of a loop, a pair: what was carried, and stacked.
    """

    replay: Any
    seen: Any = ()

    def __init__(self, around: Replay, jaxpr: Any, place: Place):
        self.around, self.jaxpr, self.place = around, jaxpr, place
        self.enter(around.scalars, around.axes)

    def enter(self, scalars: Any, axes: tuple[Any, ...]) -> None:
        self.replay = self.around.inside(scalars, axes)

    def run(
        self,
        arrays: Sequence[Any],
        outside: Sequence[Any],
        *,
        slices: int = 0,
        goes_on: Callable[[Sequence[Any]], Any] | None = None,
    ) -> tuple[list[Any], Any]:
        """Replays the jaxpr, and returns its results and what was seen.

        Args:
            arrays: Its inputs.
            outside: Their values outside, None for what a loop carries.
            slices: How many of them, at the end, are slices of what is outside.
            goes_on: Which examples of a batch go on, of what a loop carries. The loop
                goes on while any does, and those that have ended wait for the others.
        """
        replay = self.replay
        values = [
            replay.value(x) if y is None else y._replace(array=x)
            for x, y in zip(arrays, outside, strict=True)
        ]
        whole = len(values) - slices
        values[whole:] = [replay.part(x.array, x) for x in values[whole:]]
        outs = replay.run(self.jaxpr, values, self.place)
        if goes_on is not None:
            old = values[len(values) - len(outs) :]
            on = goes_on([x.array for x in old])
            outs = [
                replay.part(
                    jnp.where(
                        jnp.expand_dims(on, range(on.ndim, jnp.ndim(x.array))),
                        y.array,
                        x.array,
                    ),
                    x,
                    y,
                )
                for x, y in zip(old, outs, strict=True)
            ]
        return [x.array for x in outs], replay.seen()


class Traced:
    """The run of a body that was traced, once: JAX may trace that of a loop again.

    Attributes:
        jaxpr: What it was traced to.
        types: Of what is seen in it, its second result.
    """

    def __init__(
        self,
        body: TracedBody,
        arrays: Sequence[Any],
        outside: Sequence[Any],
        beside: Any = (),
        **options,
    ):
        def fun(arrays, beside):
            body.replay.take(beside)
            return body.run(arrays, outside, **options)

        traced = jax.make_jaxpr(fun, return_shape=True)
        self.jaxpr, shapes = traced([*arrays], beside)
        self.tree, self.types = jax.tree.structure(shapes), shapes[1]

    def __call__(self, arrays: Sequence[Any], beside: Any = ()) -> Any:
        arrays = [*arrays, *jax.tree.leaves(beside)]
        return self.rebuilt(_jaxpr.jaxpr_as_fun(self.jaxpr)(*arrays))

    def rebuilt(self, outs: Sequence[Any]) -> Any:
        """Returns the results of the function from those of its jaxpr."""
        return self.tree.unflatten(outs)


def scan(eqn: Equation, body: Callable, carry: Any, xs: Any) -> Any:
    """Applies a ``scan`` equation with another function of pytrees as its body."""
    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    return lax.scan(body, carry, xs, **options)


def where_written(
    apply: Callable[[Equation, list[Any]], Any],
) -> Callable[[Equation, list[Any]], Any]:
    """Returns ``apply`` under the scopes of each equation, for ``interpret``."""
    joined: dict[tuple[int, int], Any] = {}

    def applied(eqn, ins):
        with _jaxpr.located_at(eqn, joined), _jaxpr.context_of(eqn):
            return apply(eqn, ins)

    return applied
