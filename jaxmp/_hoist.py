"""Weight gradients of recurrent layers: one product after the loop, not one a trip.

The backward pass of a recurrent layer adds up, trip by trip, what its products send
back to the weights: ``total + dot(dz_t, h_t)``. The sum of these products is one
product that contracts over the trips too, of all ``dz_t`` and all ``h_t``. The forward
pass has stacked ``h_t``, and ``dz_t`` is smaller than the weights, unless the batch is
large.

References:
    Appleyard et al., "Optimizing Performance of Recurrent Neural Networks on GPUs",
    2016, https://arxiv.org/abs/1604.01946: the weight gradients of all steps are one
    product.
"""

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import _jaxpr
from ._jaxpr import Equation, Var, is_float32
from ._op_lists import ADDS_UP, CALLS, JOINS, VIEWS
from ._products import is_matrix_product, over_trips, sums_over_trips
from ._scopes import IsProduct, Scopes, inside, is_backward
from ._sizes import as_number, size_of

# Bytes that a trip no longer moves: it reads and writes the sum in float32.
_SAVED = 8
# Bytes that it moves instead: what it stacks is written and read in 16 bits.
_STACKED = 4


def hoisted(
    eqns: Sequence[Equation],
    scopes: Scopes,
    is_product: IsProduct,
) -> tuple[Sequence[Equation], Sequence[Equation]]:
    """Returns equations in which no backward scan adds up products that may wait.

    And those of them that are what is left of such a scan.

    Args:
        eqns: The equations of a jaxpr.
        scopes: Named scopes around it.
        is_product: Tells whether an equation, in its scopes, is a product in 16 bits.
    """

    def waits(loop: Equation) -> Callable[[Equation], bool]:
        around = inside(loop, scopes + _jaxpr.scope_names(loop))
        return lambda eqn: is_product(eqn, around + _jaxpr.scope_names(eqn))

    found: list[Equation] = []
    split: list[Equation] = []
    for eqn in eqns:
        parts: Sequence[Equation] = [eqn]
        loops = eqn.primitive.name in CALLS and _jaxpr.call_kind(eqn) == "scan"
        runs = loops and as_number(eqn.params["length"]) > 0 and not eqn.effects
        if runs and is_backward(eqn, scopes):
            parts = _Loop(eqn, waits(eqn)).in_parts()
        found += parts
        if len(parts) > 1:
            split.append(parts[0])
    return found, split


class _Loop:
    """A backward scan, and what of its trips may come after it."""

    def __init__(self, loop: Equation, is_product: Callable[[Equation], bool]):
        """Reads who reads what in a trip.

        Args:
            loop: The scan.
            is_product: Tells whether an equation of its body is a product in 16 bits.
        """
        layout = _jaxpr.call_layout(loop)
        self.loop, self.is_product = loop, is_product
        self.body = _jaxpr.open_jaxpr(layout.bodies[0].jaxpr)
        self.start, self.stop = layout.fixed_in.start, layout.fixed_in.stop
        carries = len(layout.fixed_in)
        self.carried = self.body.invars[self.start : self.stop]
        self.summed = self.body.outvars[:carries]
        # What all trips have of a variable of theirs, where that is there already.
        slices = self.body.outvars[carries:], self.body.invars[self.stop :]
        stacks = loop.outvars[carries:], loop.invars[self.stop :]
        self.stacks: dict[Any, Any] = {
            var: stack
            for few, all_of_them in zip(slices, stacks, strict=True)
            for var, stack in zip(few, all_of_them, strict=True)
            if _is_var(var) and type(stack) is Var  # and no `DropVar`
        }
        self.definitions = {var: eqn for eqn in self.body.eqns for var in eqn.outvars}
        self.readers: dict[Any, list[Equation | None]] = collections.defaultdict(list)
        for eqn in [*self.body.eqns, None]:
            for var in self.body.outvars if eqn is None else eqn.invars:
                if _is_var(var):
                    self.readers[var].append(eqn)
        self.recurrent = self._recurrent()

    def in_parts(self) -> Sequence[Equation]:
        """Returns the scan without the sums that may wait, and what makes them."""
        chosen = {i for i in range(len(self.carried)) if self._adds_up(i)}
        while chosen:
            later, failed = self._later(chosen)
            failed |= set() if failed else self._too_dear(later)
            if not failed:
                return self._split(chosen, [eqn for eqn, _ in later])
            chosen -= failed
        return [self.loop]

    def _recurrent(self) -> set[Any]:
        """Returns the variables of a trip that come of a product of the trip before.

        Other trips may have been made to save memory, such as those of an accumulation
        or of a loss in chunks, which carry a count, a maximum, or the gradient of their
        sum. To stack what they compute would undo that.
        """
        carried = self._reached(self.carried)
        multiplied = self._reached(
            out
            for eqn in self.body.eqns
            if not carried.isdisjoint(filter(_is_var, eqn.invars)) and _has_product(eqn)
            for out in eqn.outvars
        )
        ends = zip(self.carried, self.summed, strict=True)
        return self._reached(x for x, end in ends if _is_var(end) and end in multiplied)

    def _reached(self, start: Iterable[Any]) -> set[Any]:
        """Returns ``start``, and the variables of a trip that are computed from it."""
        found = set(start)
        for eqn in self.body.eqns:
            if not found.isdisjoint(filter(_is_var, eqn.invars)):
                found.update(eqn.outvars)
        return found

    def _adds_up(self, i: int) -> bool:
        """Tells whether a trip does nothing with a carried value but add to it."""
        var, out = self.carried[i], self.summed[i]
        if not is_float32(var) or var is out:
            return False
        while var is not out:
            if len(self.readers[var]) != 1:
                return False
            (eqn,) = self.readers[var]
            if eqn is None or eqn.primitive.name not in ADDS_UP | JOINS:
                return False
            (var,) = eqn.outvars
        return len(self.readers[var]) == 1

    def _later(
        self, chosen: set[int]
    ) -> tuple[list[tuple[Equation, set[int]]], set[int]]:
        """Returns what makes some of the carried sums, and which of them cannot wait.

        With each equation, the sums for which it is needed.
        """
        needed: dict[Any, set[int]] = collections.defaultdict(set)
        seen: collections.Counter[Any] = collections.Counter()
        for i in chosen:
            needed[self.summed[i]].add(i)
            seen[self.summed[i]] += 1
        later, failed = [], set[int]()
        for eqn in reversed(self.body.eqns):
            sums = set[int]().union(*(needed.get(var, ()) for var in eqn.outvars))
            if not sums:
                continue
            alone = all(seen[var] == len(self.readers[var]) for var in eqn.outvars)
            if alone and _is_linear(eqn):
                for var in eqn.invars:
                    if _is_var(var):
                        needed[var] |= sums
                        seen[var] += 1
            elif not (alone and self._may_wait(eqn)):
                failed |= sums
            later.append((eqn, sums))
        begun = {self.carried[i] for i in chosen}
        for var, sums in needed.items():
            if var not in self.definitions and var not in begun:
                failed |= sums
        return later[::-1], failed

    def _may_wait(self, eqn: Equation) -> bool:
        """Tells whether ``eqn`` is a product of what is, or may be, stacked."""
        if not (sums_over_trips(eqn) and self.is_product(eqn)):
            return False
        new = [var for var in eqn.invars if var not in self.stacks]
        return len(new) < 2 and self.recurrent.issuperset(new)

    def _too_dear(self, later: Sequence[tuple[Equation, set[int]]]) -> set[int]:
        """Returns the sums for which too much would have to be stacked."""
        saved: collections.Counter[Any] = collections.Counter()
        needed: dict[Any, set[int]] = collections.defaultdict(set)
        for eqn, sums in later:
            for var in self._new(eqn):
                saved[var] += _SAVED * size_of(eqn.outvars[0].aval)
                needed[var] |= sums
        dear = [x for x, n in saved.items() if n <= _STACKED * size_of(x.aval)]
        return set[int]().union(*(needed[var] for var in dear))

    def _new(self, eqn: Equation) -> list[Any]:
        """Returns the operands of a product that are to be stacked for it."""
        if not sums_over_trips(eqn):
            return []
        return [self._first(x) for x in eqn.invars if x not in self.stacks]

    def _first(self, var: Any) -> Any:
        """Returns the first variable of the trip that is the same view of the same."""
        eqn = self.definitions.get(var)
        if eqn is None or eqn.primitive.name not in VIEWS:
            return var
        (place,) = (i for i, out in enumerate(eqn.outvars) if out is var)
        for other in self.body.eqns:
            same = other.primitive is eqn.primitive and other.invars == eqn.invars
            if same and other.params == eqn.params:
                return other.outvars[place]
        return var

    def _split(self, chosen: set[int], later: Sequence[Equation]) -> list[Equation]:
        """Returns the scan without some carried sums, and the equations after it."""
        loop, body, start, stop = self.loop, self.body, self.start, self.stop
        kept = [i for i in range(stop - start) if i not in chosen]
        length, moved = loop.params["length"], set(later)
        new = {
            var: Var(_jaxpr.unmapped_aval(length, 0, var.aval))
            for eqn in later
            for var in self._new(eqn)
        }

        def inputs(given):
            return [*given[:start], *(given[start + i] for i in kept), *given[stop:]]

        def outputs(made, more):
            return [*(made[i] for i in kept), *made[stop - start :], *more]

        trip = body.replace(
            invars=inputs(body.invars),
            outvars=outputs(body.outvars, new),
            eqns=[eqn for eqn in body.eqns if eqn not in moved],
        )
        ins, outs = inputs(loop.invars), outputs(loop.outvars, new.values())
        parts = [_jaxpr.scan_with(loop, trip, len(kept), ins, outs)]
        # The first term of a sum is what the loop was given for it.
        env: dict[Any, Any] = {self.carried[i]: loop.invars[start + i] for i in chosen}
        ends = {self.summed[i]: loop.outvars[i] for i in chosen}
        for eqn in later:
            if sums_over_trips(eqn):
                ins = [self.stacks.get(x) or new[self._first(x)] for x in eqn.invars]
                changed = over_trips(eqn)
            else:
                # A literal, which may have no hash, is its own.
                ins = [env[x] if _is_var(x) else x for x in eqn.invars]
                changed = {}
            outs = [ends.get(var) or Var(var.aval) for var in eqn.outvars]
            env.update(zip(eqn.outvars, outs, strict=True))
            parts.append(_jaxpr.after_loop(eqn, loop, ins, outs, **changed))
        return parts


def _is_linear(eqn: Equation) -> bool:
    """Whether ``eqn`` adds its operands up, or moves them."""
    if not any(map(_is_var, eqn.invars)):
        return False
    if eqn.primitive.name in ADDS_UP | JOINS:
        return all(map(_is_var, eqn.invars))
    # What is put between them, or around them, is zero.
    others = (x for x in eqn.invars if not _is_var(x))
    return eqn.primitive.name in VIEWS and not any(x.val for x in others)


def _has_product(eqn: Equation) -> bool:
    """Whether ``eqn`` is a matrix product, or a call of something with one in it."""
    return is_matrix_product(eqn) or any(
        _has_product(inner)
        for body in _jaxpr.sub_jaxprs(eqn)
        for inner in _jaxpr.open_jaxpr(body).eqns
    )


def _is_var(atom: Any) -> bool:
    return isinstance(atom, Var)
