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


def neural_ode(adjoint):
    """Fits where a vector field carries points to."""
    make = partial(eqx.nn.MLP, 4, 4, 16, 1, jax.nn.softplus, jnp.tanh)
    field = drawn(eqx.filter_eval_shape(make, key=KEY))
    params, static = eqx.partition(field, eqx.is_inexact_array)
    start, targets = normal(1, 3, 4), normal(2, 3, 4)

    def loss(params, start, targets):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, field: jax.vmap(field)(y)),
            diffrax.Euler(),
            t0=0.0,
            t1=1.0,
            dt0=0.25,
            y0=start,
            args=eqx.combine(params, static),
            adjoint=adjoint,
            max_steps=8,
        )
        return jnp.mean((solution.ys[0] - targets) ** 2)

    return Program(loss, (params, start, targets))


def default_adjoint():
    return neural_ode(diffrax.RecursiveCheckpointAdjoint())


def backsolve_adjoint():
    return neural_ode(diffrax.BacksolveAdjoint())


@programs(default_adjoint, backsolve_adjoint)
def test_neural_odes_are_what_they_were(program, policy, order):
    hold(program, policy, order)
