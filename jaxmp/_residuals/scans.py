"""Scans of a forward pass whose stacked outputs the scan of its backward pass reads.

Each iteration stores its own values, so that nothing is stacked in more bits.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation
from .._jaxprs.replay import scan, where_written
from .eight_bits import How, Stored
from .plan import IsLeft, Residuals

# Stores a value: its variable, it, in how many bits, and the equation that has computed
# it, if one has.
Store = Callable[[Any, Any, How, Equation | None], Stored]


class Stack:
    """A scan of a forward pass, and what its iterations store."""

    def __init__(
        self,
        eqn: Equation,
        read: Mapping[Any, bool],
        given: Collection[Any],
        exact: set[Any],
        is_left: IsLeft,
    ):
        """Decides what the iterations store.

        Args:
            eqn: The scan.
            read: Which of its outputs the backward pass reads, and whether others than
                its scan do.
            given: Variables that the backward pass can read anyway.
            exact: What the backward pass reads in full precision.
            is_left: See :func:`~.plan.leaves_out`.
        """
        self.eqn, self.jaxpr = eqn, eqn.params["jaxpr"]
        body = _jaxpr.open_jaxpr(self.jaxpr)
        self.consts, self.carries = _jaxpr.scan_counts(eqn)
        first = self.consts + self.carries
        known = [
            inner
            for i, inner in enumerate(body.invars)
            if not self.consts <= i < first
            and (isinstance(x := eqn.invars[i], _jaxpr.Literal) or x in given)
        ]
        # By the variable outside.
        pairs = zip(eqn.outvars, body.outvars, strict=True)
        self.inner = {out: x for out, x in pairs if out in read}
        eqns, wanted = _jaxpr.live(body), set(self.inner.values())
        self.residuals = Residuals(eqns, [*known, *body.constvars], is_left)
        self.residuals.decide(
            [x for x in (*body.invars, *self.residuals.makers) if x in wanted],
            {x for out, x in self.inner.items() if out in exact},
            [self.inner[out] for out, others in read.items() if others],
        )
        # What is computed from arguments is not stored.
        how = self.residuals.how
        self._read = {x for x in read if read[x] and self.inner[x] not in how}
        self.stored: Mapping[Any, Stored] = {}
        self._given = {x: eqn.invars[body.invars.index(x)] for x in known}

    def run(self, ins: Sequence[Any], wanted: set[Any], store: Store) -> list[Any]:
        """Applies the scan, and keeps what its iterations store.

        Args:
            ins: Its inputs.
            wanted: Those of its outputs that others than the backward pass read.
            store: Stores a value.

        Returns:
            Its outputs, None where nobody wants one.
        """
        whole = [
            i
            for i, out in enumerate(self.eqn.outvars)
            if i >= self.carries
            and (out not in self.inner or out in wanted or out in self._read)
        ]
        makers = self.residuals.makers

        def iteration(carry, xs):
            saved = OrderedDict[Any, Stored]()  # JAX would sort the keys of a dict

            def save(variables, values):
                for var, x in zip(variables, values, strict=True):
                    if (how := self.residuals.how.get(var)) is not None:
                        saved[var] = store(var, x, how, makers.get(var))

            def apply(eqn, ins):
                outs = _jaxpr.bind(eqn, ins)
                save(eqn.outvars, outs)
                return outs

            args = [*ins[: self.consts], *carry, *xs]
            save(_jaxpr.in_vars(self.jaxpr), args)
            outs = _jaxpr.interpret(self.jaxpr, args, where_written(apply))
            return outs[: self.carries], ([outs[i] for i in whole], saved)

        first = self.consts + self.carries
        carry, (ys, self.stored) = scan(
            self.eqn, iteration, list(ins[self.consts : first]), list(ins[first:])
        )
        outs: list[Any] = [*carry, *[None] * (len(self.eqn.outvars) - self.carries)]
        for i, y in zip(whole, ys, strict=True):
            outs[i] = y
        return outs

    def read(self, out: Any, lookup: Callable[[Any], Any]) -> Any:
        """Returns one of the outputs as the backward pass reads it beside the scan."""
        inner = self.inner[out]
        if inner not in self.stored:
            return lookup(out)
        return jax.vmap(Stored.restored)(self.stored[inner])

    def slices(self, lookup: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Returns what the scan of the backward pass takes slices of, by variables.

        What the iterations have stored, and what they were given.
        """
        first = self.consts + self.carries
        body = _jaxpr.in_vars(self.jaxpr)
        given = [x for x in body[first:] if x in self._given]
        return self.stored, OrderedDict((x, lookup(self._given[x])) for x in given)

    def consts_given(self, lookup: Callable[[Any], Any]) -> dict[Any, Any]:
        """Returns what all iterations share, and the backward pass may read."""
        body = _jaxpr.open_jaxpr(self.jaxpr)
        closed = zip(body.constvars, _jaxpr.closed_consts(self.jaxpr), strict=True)
        shared = body.invars[: self.consts]
        return dict(closed) | {
            x: lookup(self._given[x]) for x in shared if x in self._given
        }


def read_by_scan(
    eqn: Equation,
    ins: Sequence[Any],
    stacks: Mapping[int, Stack],
    lookup: Callable[[Any], Any],
) -> list[Any]:
    """Applies a scan of a backward pass to what the iterations have stored.

    Args:
        eqn: The scan.
        ins: Its inputs; nothing is read of those that were stored.
        stacks: The scan that has stored an input, by its place.
        lookup: Returns a value of the forward pass that is there anyway.
    """
    jaxpr = eqn.params["jaxpr"]
    consts, carries = _jaxpr.scan_counts(eqn)
    first = consts + carries
    others = [i for i in range(first, len(ins)) if i not in stacks]
    used = list(dict.fromkeys(stacks.values()))
    shared = [stack.consts_given(lookup) for stack in used]
    taken = [stack.slices(lookup) for stack in used]

    def iteration(carry, slices):
        rest, parts = slices
        again = {
            stack: stack.residuals.reader(stored, {**known, **given}.get)
            for stack, (stored, given), known in zip(used, parts, shared, strict=True)
        }
        values = dict(zip(others, rest, strict=True))
        for i, stack in stacks.items():
            values[i] = again[stack](stack.inner[eqn.invars[i]])
        args = [*ins[:consts], *carry, *(values[i] for i in range(first, len(ins)))]
        outs = _jaxpr.interpret(jaxpr, args, where_written(_jaxpr.bind))
        return outs[:carries], outs[carries:]

    xs = [ins[i] for i in others], taken
    carry, ys = scan(eqn, iteration, list(ins[consts:first]), xs)
    return [*carry, *ys]
