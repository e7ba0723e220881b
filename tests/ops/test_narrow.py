"""Float32 sums of 16-bit products by a vector.

A GPU has no such product: XLA would write the matrix once more, in float32.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import jaxmp
from benchmarks.counting.measure import relative_error, traced
from conftest import normal
from jaxmp._jaxprs import jaxpr as _jaxpr
from jaxmp._ops.narrow import product_of
from jaxmp._ops.products import is_matrix_product, vector_of

W = normal(0, 64, 64, scale=1 / 8)
V = normal(1, 64, 1, scale=1 / 8)
X = normal(2, 32, 64)
Q = normal(3, 32, 64)
SPECS = (
    "mk,k->m mk,kx->mx bmk,bk->bm bl,blm->bm bhxk,bhmk->bhxm kmb,kb->bm "
    "hmbk,kh->mb mhkl,lhx->mkx mk,xky->mxy xk,yk->xy"
)
SIZES = {"b": 3, "h": 2, "m": 5, "k": 7, "l": 4, "x": 1, "y": 1}


def equation(spec):
    """Returns one ``dot_general`` of two arrays with these axes, and the arrays."""
    ins, out = spec.split("->")
    lhs, rhs = ins.split(",")
    shared = [axis for axis in lhs if axis in rhs]
    axes = [[a for a in shared if (a in out) == batch] for batch in (False, True)]
    numbers = [[tuple(map(x.index, some)) for x in (lhs, rhs)] for some in axes]
    arrays = [normal(i, *map(SIZES.get, x)) for i, x in enumerate((lhs, rhs))]
    (eqn,) = jax.make_jaxpr(lambda *xy: lax.dot_general(*xy, numbers))(*arrays).eqns
    return eqn, arrays


def lowered(fun, *args, platform="cuda"):
    text = jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    return [line for line in text.splitlines() if "stablehlo.dot_general" in line]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("spec", SPECS.split())
def test_what_is_summed_elementwise_is_the_product(spec, turned):
    if turned:
        (lhs, rhs), out = spec.split("->")[0].split(","), spec.split("->")[1]
        spec = f"{rhs},{lhs}->{out}"
    eqn, arrays = equation(spec)
    vector = vector_of(eqn)
    assert vector is not None
    arrays = [np.asarray(x, np.float16) for x in arrays]
    jaxpr = jax.make_jaxpr(lambda *xy: product_of(eqn).summed(xy))(*arrays)
    (cond,) = (e for e in jaxpr.eqns if _jaxpr.chooses_platform(e))
    wide = [x.astype(np.float32) for x in arrays]
    expected = lax.dot_general(*wide, eqn.params["dimension_numbers"])
    for branch in cond.params["branches"]:  # not compiled: XLA leaves out roundings
        (sums,) = _jaxpr.jaxpr_as_fun(branch)(*arrays)
        assert (sums.shape, sums.dtype) == (expected.shape, jnp.float32)
        np.testing.assert_allclose(sums, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_gpu_multiplies_and_sums_and_others_have_a_product(dtype):
    def score(x, v):
        return jnp.exp(x @ v)

    cast = jaxmp.autocast(score, dtype)
    assert not lowered(cast, X, V, platform="cuda")
    assert not lowered(cast, X, V[:, 0], platform="cuda")
    assert len(lowered(cast, X, V, platform="cpu")) == 1
    assert len(lowered(cast, X, V, platform="tpu")) == 1
    assert len(lowered(cast, X, W, platform="cuda")) == 1
    assert lowered(score, X, V)
    rounded = (x.astype(dtype).astype(jnp.float32) for x in (X, V))
    np.testing.assert_allclose(cast(X, V), score(*rounded), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_what_is_sent_back_by_a_vector_is_as_near_as_in_16_bits(dtype):
    """An outer product in the backward pass, and the activation's slope."""

    def loss(w, v, x):
        return jnp.square(jnp.tanh(x @ w) @ v).mean()

    grad = jax.grad(loss, (0, 1))
    found = jaxmp.autocast(grad, dtype)(W, V, X)
    cast = jax.tree.map(lambda x: x.astype(dtype), (W, V, X))
    assert {x.dtype for x in found} == {np.dtype(np.float32)}
    exact = jax.jit(grad)(W, V, X)
    assert relative_error(found, exact) <= relative_error(grad(*cast), exact)


def test_an_outer_product_in_the_forward_pass_keeps_its_digits():
    """The angles of a rotary embedding are off by whole turns in 16 bits."""

    def rotated(x, w):
        angles = jnp.einsum("i,j->ij", jnp.arange(32.0) + x[:, 0], x[0])
        return (jnp.sin(angles) @ w).sum()

    eqns = traced(jaxmp.autocast(jax.grad(rotated), jnp.bfloat16), X, W)
    products = [e for e in eqns if e.primitive.name == "dot_general"]
    kinds = {str(e.invars[0].aval.dtype) for e in products if not is_matrix_product(e)}
    assert kinds == {"float32"}


def test_a_product_by_a_vector_is_one_for_the_audit():
    report = jaxmp.audit(jaxmp.autocast(jax.grad(lambda v: jnp.exp(X @ v).sum())))(V)
    assert report.flops == {"bfloat16": 2.0 * 2 * X.size}
    assert not report.kept


@pytest.mark.parametrize("axes", [(None, 0), (0, None), (0, 0)])
def test_so_is_a_batch_of_them_made_by_vmap(axes):
    """A batch of vectors is a matrix, and so a product by it that a GPU has."""

    def score(x, v):
        return jnp.exp(x @ v)

    many = jax.vmap(jaxmp.autocast(score, jnp.bfloat16), axes)
    args = [normal(0, 5, 32, 64), normal(1, 5, 64)]
    args = [x if axis == 0 else x[0] for x, axis in zip(args, axes, strict=True)]
    report = jaxmp.audit(many)(*args)
    assert report.flops == {"bfloat16": 2.0 * 5 * 32 * 64}
    assert len(lowered(many, *args)) == 1


def test_integers_in_a_product_are_no_leaked_tracers():
    fun = jaxmp.autocast(lambda v: jnp.exp(v @ jnp.arange(8)).sum(), jnp.bfloat16)
    v = normal(4, 4, 8, scale=0.1)
    found = jax.grad(jax.checkpoint(fun))(v)
    np.testing.assert_array_equal(found, jax.grad(fun)(v))


def test_a_mesh_that_gives_types_keeps_the_product():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec("d", None)
    with jax.sharding.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, spec))
        score = jaxmp.autocast(lambda x, v: jnp.exp(x @ v), jnp.bfloat16)
        out = jax.jit(score)(x, V[:, 0])
    np.testing.assert_allclose(out, score(X, V[:, 0]), rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_batches_of_vectors_and_their_derivatives(axis):
    """Attention to one query, under ``vmap`` and in forward mode."""

    def attend(q, x, w):
        scores = jax.nn.softmax(jnp.tanh(x @ w) @ q)
        return scores @ x

    many = jax.vmap(jaxmp.autocast(attend, jnp.bfloat16), (axis, None, None))
    queries = Q if axis == 0 else Q.T
    found, moved = jax.jvp(lambda w: many(queries, X, w), [W], [W])
    both = jax.jvp(
        lambda w: jax.vmap(attend, (axis, None, None))(queries, X, w), [W], [W]
    )
    assert relative_error(found, both[0]) < 0.02
    assert relative_error(moved, both[1]) < 0.05
