"""Scores of attention are computed in the order of axes in which they are read."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmp
from benchmarks.counting.measure import relative_error, traced
from conftest import at_once, crossed, normal, usually_bfloat16

B, T, K, G, S, D = 2, 6, 2, 3, 9, 8
Q, KEYS, V = normal(0, B, T, K, G, D), normal(1, B, S, K, D), normal(2, B, S, K, D)

# How scores are written, and the weights times the values.
FORMS = {
    "keys last": ("btkgd,bskd->bkgts", "bkgts,bskd->btkgd"),
    "batch and time first": ("btkgd,bskd->btkgs", "btkgs,bskd->btkgd"),
    "queries first": ("bskd,btkgd->bkgts", "bskd,bkgts->btkgd"),
}


def attention(scores, values):
    def attend(q, k, v):
        operands = (k, q) if scores.startswith("bskd") else (q, k)
        weights = jax.nn.softmax(jnp.einsum(scores, *operands))
        operands = (v, weights) if values.startswith("bskd") else (weights, v)
        return jnp.einsum(values, *operands)

    return attend


def scored(fun, *args):
    """Returns the shapes of the scores that a function computes."""
    return [
        eqn.outvars[0].aval.shape
        for eqn in traced(fun, *args)
        if eqn.primitive.name == "dot_general"
        and sorted(eqn.outvars[0].aval.shape) == sorted((B, T, K, G, S))
    ]


@crossed("name wrap", [*FORMS], [lambda f: f, jax.jit, jax.checkpoint])
def test_scores_end_with_the_axis_that_is_read_last(name, wrap):
    fun = wrap(attention(*FORMS[name]))
    cast = jaxmp.autocast(fun, "bfloat16")
    (shape, *_) = scored(cast, Q, KEYS, V)
    assert shape[-1] == S
    assert relative_error(cast(Q, KEYS, V), fun(Q, KEYS, V)) < 0.01


@usually_bfloat16
@crossed("name order", [*FORMS], ["outside", "inside", "vmap"])
def test_gradients_of_what_was_swapped_are_those_of_float32(name, dtype, order):
    def loss(*args):
        return (attention(*FORMS[name])(*args) ** 2).sum()

    grad = jax.grad(loss, (0, 1, 2))
    if order == "outside":
        cast = jaxmp.autocast(grad, dtype)
    elif order == "inside":
        cast = jax.grad(jaxmp.autocast(loss, dtype), (0, 1, 2))
    else:
        alone = jax.vmap(jax.grad(lambda *xs: loss(*(x[None] for x in xs)), (0, 1, 2)))
        cast = jaxmp.autocast(alone, dtype)
    found, exact = at_once(cast, grad)(Q, KEYS, V)
    limit = 0.02 if dtype == "bfloat16" else 0.003
    assert relative_error(found, exact) < limit


@pytest.mark.parametrize("sizes", ["b, 6, 9", "2, t, t", "b, t, s"])
def test_scores_of_symbolic_sizes_can_be_exported(sizes):
    b, t, s = jax.export.symbolic_shape(sizes)
    shapes = [(b, t, K, G, D), (b, s, K, D)]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    keys = KEYS[:, :T] if s == t else KEYS

    def fun(q, k):
        return jax.nn.softmax(jnp.einsum(FORMS["keys last"][0], q, k))

    exported = jax.export.export(jax.jit(jaxmp.autocast(fun, "bfloat16")))(*args)
    assert relative_error(exported.call(Q, keys), fun(Q, keys)) < 0.02


def test_scores_that_lie_on_a_mesh_stay_as_they_were_written():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        q = jax.device_put(Q, NamedSharding(mesh, PartitionSpec(None, "x")))
        fun = jax.grad(
            lambda q: (jnp.einsum(FORMS["keys last"][0], q, KEYS) ** 2).sum()
        )
        found = jax.jit(jaxmp.autocast(fun, "bfloat16"))(q)
        expected = jax.jit(fun)(q)
    assert found.sharding == expected.sharding
    assert relative_error(np.asarray(found), np.asarray(expected)) < 0.01
