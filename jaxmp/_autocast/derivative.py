"""The derivative of an autocast function that has a say in its backward pass.

In JAX the gradient of a float16 value is float16, what is saved for it is as it was
computed, and the gradient of a cast to float8 has no scale. So a function whose
backward pass has another dtype, or that works with eight bits, brings its gradient
itself where it is differentiated from outside: the program of both passes in mixed
precision, cut in two between them. It is the program that autocast around the gradient
runs.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation, Run, is_inexact
from .._ops.precision import own_precisions
from .graph import reached
from .plan import replaced


def differentiable(run: Run) -> Run:
    """Returns ``run``, whose results may be differentiated from outside.

    Args:
        run: Runs a program in mixed precision.
    """

    def differentiated(jaxpr, arrays):
        # What it closes over may be differentiated as well.
        arrays = [*_jaxpr.closed_consts(jaxpr), *arrays]
        jaxpr = _jaxpr.without_constants(jaxpr)

        def compute(_, arrays):
            return (run(jaxpr, arrays),)

        return _differentiable(run, jaxpr, compute)((), *arrays)[0]

    return differentiated


def _differentiable(
    run: Run, jaxpr: Any, compute: Callable, *, saves: bool = False
) -> Callable:
    """Returns ``compute``, with the derivative of a program.

    A second derivative differentiates the program anew. The arrays of 16 bits in
    between are constants to it: what was saved, and what is returned for that.

    Args:
        run: Runs a program in mixed precision.
        jaxpr: The program.
        compute: Takes what an earlier pass has saved and the inputs of the program,
            and returns its results, and what is to be saved.
        saves: Whether it returns the latter.
    """
    programs: dict[tuple[int, ...], _Passes] = {}

    @jax.custom_vjp
    def function(saved, *arrays):
        return compute(saved, arrays)

    def forward(*primals):
        saved, *arrays = jax.tree.map(lambda x: x.value, primals)
        # The rule is asked for what is differentiated, and for nothing else.
        moving = tuple(i for i, x in enumerate(primals[1:]) if x.perturbed)
        if moving not in programs:
            programs[moving] = _Passes(run, jaxpr, moving)
        passes = programs[moving]
        ahead = _differentiable(run, jaxpr, passes.forward, saves=True)
        outs, residuals = ahead((), *arrays)
        residuals = lax.stop_gradient(residuals)
        results = [outs]
        if saves:
            results.append(compute(*lax.stop_gradient((saved, arrays)))[1])
        return tuple(results), (residuals, arrays, dict.fromkeys(moving))

    def backward(stored, results):
        residuals, arrays, moving = stored
        passes = programs[tuple(moving)]
        cotangents = [x for x in results[0] if x.dtype != jax.dtypes.float0]
        zeros = {i for i, x in enumerate(cotangents) if isinstance(x, SymbolicZero)}
        cotangents = [
            _jaxpr.zeros(x.aval) if i in zeros else x for i, x in enumerate(cotangents)
        ]

        def compute(saved, arrays):
            return (passes.backward(saved, arrays, zeros),)

        gradients = _differentiable(run, passes.gradients, compute)
        found = gradients(residuals, *arrays, *cotangents)[0]
        return None, *replaced([None] * len(arrays), moving, found)

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function


class _Passes:
    """A program and its backward pass in mixed precision, cut between the two."""

    def __init__(self, run: Run, jaxpr: Any, moving: Sequence[int]):
        """Runs the program with its backward pass.

        Args:
            run: Runs a program in mixed precision.
            jaxpr: The program.
            moving: The places of the inputs that are differentiated.
        """
        outs = len(_jaxpr.out_avals(jaxpr))
        both = _both(jaxpr, moving)
        given = _jaxpr.in_vars(both)
        # What a second derivative differentiates.
        self.gradients = _jaxpr.part(both, both.eqns, given, both.jaxpr.outvars[outs:])
        mixed = _jaxpr.trace(lambda *xs: run(both, xs), _jaxpr.in_avals(both))
        self.mixed, self.inputs = mixed, len(_jaxpr.in_vars(jaxpr))
        self.outs, self.found = mixed.jaxpr.outvars[:outs], mixed.jaxpr.outvars[outs:]
        self.cotangents = mixed.jaxpr.invars[self.inputs :]
        self.linear = reached(mixed.eqns, self.cotangents)
        self.back, self.residuals = self._back()

    def _back(self) -> tuple[list[Equation], list[Any]]:
        """Returns the equations of the backward pass, and what it reads of the other.

        A value is widened there, or cast to the dtype of that pass, and saved once.
        """
        body = self.mixed.jaxpr
        given = {*body.constvars, *body.invars}
        needed = set(_jaxpr.variables(self.found))
        back: list[Equation] = []
        for eqn in reversed(body.eqns):
            made = [x for x in eqn.outvars if x in needed]
            acts = made or eqn.effects  # a print of a gradient makes nothing
            if (acts and self._is_linear(eqn)) or (made and _is_repeated(eqn, given)):
                needed.update(_jaxpr.variables(eqn.invars))
                needed.difference_update(made)
                back.append(eqn)
        return back[::-1], [x for eqn in body.eqns for x in eqn.outvars if x in needed]

    def _is_linear(self, eqn: Equation) -> bool:
        """Whether an equation reads what is computed from cotangents."""
        return not self.linear.isdisjoint(_jaxpr.variables(eqn.invars))

    def forward(self, _, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the results of the program, and what the backward pass reads."""
        body, wanted = self.mixed.jaxpr, [*self.outs, *self.residuals]
        eqns = [x for x in body.eqns if not self._is_linear(x)]
        part = _jaxpr.part(self.mixed, eqns, body.invars[: self.inputs], wanted)
        results = _jaxpr.jaxpr_as_fun(part)(*arrays)
        return results[: len(self.outs)], results[len(self.outs) :]

    def backward(
        self, residuals: Sequence[Any], arrays: Sequence[Any], zeros: Collection[int]
    ) -> list[Any]:
        """Returns the gradients.

        Args:
            residuals: What the forward pass has saved.
            arrays: The inputs of the program, and the cotangents of its results.
            zeros: Which of these are zero. So is all that is made of them alone.
        """
        zero = {self.cotangents[i] for i in zeros}
        eqns = []
        for eqn in self.back:
            ins = [x for x in _jaxpr.variables(eqn.invars) if x in self.linear]
            if ins and zero.issuperset(ins):
                zero.update(eqn.outvars)
            else:
                eqns.append(eqn)
        given = self.mixed.jaxpr.invars
        made = [x for x in zero if x not in given]
        known = [*self.residuals, *given, *made]
        part = _jaxpr.part(self.mixed, eqns, known, self.found)
        zeros_made = [_jaxpr.zeros(x.aval) for x in made]
        return _jaxpr.jaxpr_as_fun(part)(*residuals, *arrays, *zeros_made)


def _is_repeated(eqn: Equation, given: Collection[Any]) -> bool:
    """Whether what an equation returns is cheaper to compute again than to save."""
    atoms = list(_jaxpr.variables(eqn.invars))
    if not atoms or not _jaxpr.is_cast(eqn):
        return not atoms
    before, after = (x.aval.dtype.itemsize for x in (atoms[0], eqn.outvars[0]))
    return before <= after or atoms[0] in given


def _both(jaxpr: Any, moving: Sequence[int]) -> Any:
    """Returns a jaxpr of the results of a program and of its gradients.

    It takes the inputs of the program, and the cotangents of its inexact results.
    """
    avals, outs = _jaxpr.in_avals(jaxpr), _jaxpr.out_avals(jaxpr)
    moved = [i for i, x in enumerate(_jaxpr.open_jaxpr(jaxpr).outvars) if is_inexact(x)]

    def both(*args):
        arrays, cotangents = args[: len(avals)], args[len(avals) :]

        def program(*xs):
            outs = _jaxpr.jaxpr_as_fun(jaxpr)(*replaced(arrays, moving, xs))
            return [outs[i] for i in moved], outs

        _, pull, outs = jax.vjp(program, *(arrays[i] for i in moving), has_aux=True)
        return [*outs, *pull(list(cotangents))]

    with jax.softmax_custom_jvp(True), own_precisions():
        return _jaxpr.trace(both, [*avals, *(outs[i].strip_weak_type() for i in moved)])
