"""Diffrax: neural differential equations, through its solvers and adjoints."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from laws import KEY, Program, drawn, hold, normal, programs

eqx = pytest.importorskip("equinox", reason="Equinox is in the extra `programs`")
diffrax = pytest.importorskip(
    "diffrax", reason="diffrax is in the extra `programs`", exc_type=ImportError
)


def neural_ode(solver, controller, adjoint):
    """Fits where a vector field carries points to."""
    make = partial(eqx.nn.MLP, 4, 4, 16, 1, jax.nn.softplus, jnp.tanh)
    field = drawn(eqx.filter_eval_shape(make, key=KEY))
    params, static = eqx.partition(field, eqx.is_inexact_array)
    times = jnp.linspace(0, 1, 4)
    starts, targets = normal(1, 3, 4), normal(2, 3, 4, 4)

    def loss(params, starts, targets):
        def solved(start):
            solution = diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, field: field(y)),
                solver,
                t0=times[0],
                t1=times[-1],
                dt0=0.25,
                y0=start,
                args=eqx.combine(params, static),
                stepsize_controller=controller,
                saveat=diffrax.SaveAt(ts=times),
                adjoint=adjoint,
                max_steps=64,
            )
            return solution.ys

        return jnp.mean((jax.vmap(solved)(starts) - targets) ** 2)

    return Program(loss, (params, starts, targets))


def default_adjoint():
    adjoint = diffrax.RecursiveCheckpointAdjoint()
    return neural_ode(diffrax.Euler(), diffrax.ConstantStepSize(), adjoint)


def adaptive_steps():
    """Steps of a length that the error decides, by a solver of fifth order."""
    controller = diffrax.PIDController(rtol=1e-3, atol=1e-4)
    adjoint = diffrax.RecursiveCheckpointAdjoint()
    return neural_ode(diffrax.Tsit5(), controller, adjoint)


def direct_adjoint():
    adjoint = diffrax.DirectAdjoint()
    return neural_ode(diffrax.Heun(), diffrax.ConstantStepSize(), adjoint)


def backsolve_adjoint():
    adjoint = diffrax.BacksolveAdjoint()
    return neural_ode(diffrax.Euler(), diffrax.ConstantStepSize(), adjoint)


@programs(default_adjoint, adaptive_steps, direct_adjoint, backsolve_adjoint)
def test_neural_odes_are_what_they_were(program, policy, order):
    hold(program, policy, order)
