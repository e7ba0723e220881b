"""The weight gradients of a recurrent layer: one product after its scan.

The backward pass of a recurrent layer adds up the gradients of its weights, iteration
by iteration: ``total + dot(dz_t, h_t)``. The sum of these products is one product of
all ``dz_t`` and all ``h_t`` that contracts over the iterations too. The forward pass
has stacked ``h_t``, and ``dz_t`` is smaller than the weights, unless the batch is
large.

References:
    Appleyard et al., "Optimizing Performance of Recurrent Neural Networks on GPUs",
    2016, https://arxiv.org/abs/1604.01946: the weight gradients of all steps are one
    product.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation, Var, is_float32
from ..._jaxprs.scopes import Asked, Scopes, is_backward, scopes_inside
from ..._jaxprs.sizes import as_number, size_of
from ..._ops import products, table
from ..._ops.products import holds_product
from ..graph import reached, twins


def hoisting(
    eqns: Sequence[Equation], jaxpr: Any, scopes: Scopes, asked: Asked
) -> Sequence[Equation]:
    """Returns the equations, sums of products over iterations as products after it.

    A rewrite, see :mod:`jaxmp._autocast.passes`.
    """
    found: list[Equation] = []
    for eqn in eqns:
        scan = _jaxpr.call_kind(eqn) == "scan" and not eqn.effects
        if scan and as_number(eqn.params["length"]) and is_backward(eqn, scopes):
            around = scopes_inside(eqn, scopes + _jaxpr.scope_names(eqn))
            loop = _Loop(
                eqn, lambda e, s=around: asked.is_product(e, s + _jaxpr.scope_names(e))
            )
            found += loop.in_parts()
        else:
            found.append(eqn)
    return found


class _Loop:
    """A backward scan, and what of its iterations may come after it."""

    def __init__(self, loop: Equation, is_product: Callable[[Equation], bool]):
        """Reads who reads what in an iteration.

        Args:
            loop: The scan.
            is_product: Says whether an equation of its body is a product in 16 bits.
        """
        layout = _jaxpr.call_layout(loop)
        self.loop, self.is_product = loop, is_product
        self.body = body = _jaxpr.open_jaxpr(layout.bodies[0].jaxpr)
        self.start, self.stop = layout.fixed_in.start, layout.fixed_in.stop
        carries = len(layout.fixed_in)
        self.carried = body.invars[self.start : self.stop]
        self.summed = body.outvars[:carries]
        # What all iterations have of a variable, where that is there already.
        slices = body.outvars[carries:], body.invars[self.stop :]
        stacks = loop.outvars[carries:], loop.invars[self.stop :]
        self.stacks: dict[Any, Any] = {
            var: stack
            for few, all_of_them in zip(slices, stacks, strict=True)
            for var, stack in zip(few, all_of_them, strict=True)
            if _is_var(var) and type(stack) is Var  # and no `DropVar`
        }
        self.consumers: dict[Any, list[Equation | None]] = collections.defaultdict(list)
        for eqn in [*body.eqns, None]:
            for var in filter(_is_var, body.outvars if eqn is None else eqn.invars):
                self.consumers[var].append(eqn)
        self.same = twins(body.eqns)  # to stack a view once that two products take
        self.recurrent = self._recurrent()

    def in_parts(self) -> Sequence[Equation]:
        """Returns the scan without the sums that may wait, and what makes them."""
        chosen = {i for i in range(len(self.carried)) if self._adds_up(i)}
        while chosen:
            later, failed = self._later(chosen)
            if not failed:
                return [*self._split(chosen, later)]
            chosen -= failed
        return [self.loop]

    def _recurrent(self) -> set[Any]:
        """Returns the variables that come of a product of the iteration before.

        Other loops may be there to save memory, such as an accumulation or a loss in
        chunks, which carry a count, a maximum, or the gradient of their sum. To stack
        what they compute would undo that.
        """
        eqns = self.body.eqns
        carried = reached(eqns, self.carried)
        multiplied = reached(
            eqns,
            [
                out
                for eqn in eqns
                if not carried.isdisjoint(filter(_is_var, eqn.invars))
                and holds_product(eqn, back=True)
                for out in eqn.outvars
            ],
        )
        ends = zip(self.carried, self.summed, strict=True)
        return reached(eqns, [x for x, end in ends if end in multiplied])

    def _adds_up(self, i: int) -> bool:
        """Whether an iteration does nothing with a carried value but add to it."""
        var, out = self.carried[i], self.summed[i]
        if not is_float32(var) or var is out:
            return False
        while var is not out:
            eqn, *others = self.consumers[var] or [None]
            if others or eqn is None or not table.sums_entries(eqn):
                return False
            (var,) = eqn.outvars
        return len(self.consumers[var]) == 1

    def _later(self, chosen: set[int]) -> tuple[list[Equation], set[int]]:
        """Returns what makes some of the carried sums, and which of them cannot wait.

        All consumers of what waits must wait as well.
        """
        needed: dict[Any, set[int]] = collections.defaultdict(set)
        seen: collections.Counter[Any] = collections.Counter()
        for i in chosen:
            needed[self.summed[i]].add(i)
            seen[self.summed[i]] += 1
        later, failed, made = [], set[int](), set[Any]()
        for eqn in reversed(self.body.eqns):
            sums = set[int]().union(*(needed.get(var, ()) for var in eqn.outvars))
            if not sums:
                continue
            later.append(eqn)
            made.update(eqn.outvars)
            alone = all(seen[var] == len(self.consumers[var]) for var in eqn.outvars)
            if alone and _is_linear(eqn):
                for var in filter(_is_var, eqn.invars):
                    needed[var] |= sums
                    seen[var] += 1
            elif not (alone and self._may_wait(eqn)):
                failed |= sums
        begun = {self.carried[i] for i in chosen}
        failed.update(*(needed[var] for var in needed.keys() - made - begun))
        return later[::-1], failed

    def _may_wait(self, eqn: Equation) -> bool:
        """Whether ``eqn`` is a product of what is stacked, or may be at a small price.

        An iteration reads and writes its sum in float32. What is stacked instead is
        written and read in 16 bits.
        """
        if not (products.sums_over_iterations(eqn) and self.is_product(eqn)):
            return False
        new = [var for var in eqn.invars if var not in self.stacks]
        few = all(size_of(x.aval) < 2 * size_of(eqn.outvars[0].aval) for x in new)
        return len(new) < 2 and few and self.recurrent.issuperset(new)

    def _split(self, chosen: set[int], later: Sequence[Equation]) -> Iterator[Equation]:
        """Yields the scan without some carried sums, and the equations after it."""
        loop, body, start, stop = self.loop, self.body, self.start, self.stop
        kept = [i for i in range(stop - start) if i not in chosen]
        length, moved = loop.params["length"], set(later)
        summed = [eqn for eqn in later if products.sums_over_iterations(eqn)]
        taken = [x for eqn in summed for x in eqn.invars if x not in self.stacks]
        new = {
            self.same.get(x, x): Var(_jaxpr.unmapped_aval(length, 0, x.aval))
            for x in taken
        }

        def inputs(given):
            return [*given[:start], *(given[start + i] for i in kept), *given[stop:]]

        def outputs(made, more):
            return [*(made[i] for i in kept), *made[stop - start :], *more]

        left = body.replace(
            invars=inputs(body.invars),
            outvars=outputs(body.outvars, new),
            eqns=[eqn for eqn in body.eqns if eqn not in moved],
        )
        ins, outs = inputs(loop.invars), outputs(loop.outvars, new.values())
        yield _jaxpr.scan_with(loop, left, len(kept), ins, outs)
        # The first term of a sum is what the loop was given for it.
        env: dict[Any, Any] = {self.carried[i]: loop.invars[start + i] for i in chosen}
        ends = {self.summed[i]: loop.outvars[i] for i in chosen}
        for eqn in later:
            if eqn in summed:
                whole = [
                    self.stacks.get(x) or new[self.same.get(x, x)] for x in eqn.invars
                ]
                ins, changed = whole, products.over_iterations(eqn)
            else:  # a literal, which may have no hash, is its own
                ins, changed = [env[x] if _is_var(x) else x for x in eqn.invars], {}
            outs = [ends.get(var) or Var(var.aval) for var in eqn.outvars]
            env.update(zip(eqn.outvars, outs, strict=True))
            yield _jaxpr.after_loop(eqn, loop, ins, outs, **changed)


def _is_linear(eqn: Equation) -> bool:
    """Whether ``eqn`` adds its operands up, or moves them."""
    others = [x for x in eqn.invars if not _is_var(x)]
    if table.sums_entries(eqn):
        return not others
    # What is put between them, or around them, is zero.
    moves = table.is_view(eqn) and len(others) < len(eqn.invars)
    return moves and all(_jaxpr.number_of(x) == 0 for x in others)


def _is_var(atom: Any) -> bool:
    return isinstance(atom, Var)
