"""Products that add up fewer than eight numbers are arithmetic: rotations and poses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import product_dtypes, relative_error, traced
from conftest import at_once, crossed, in_both_orders, normal

# It is about what stays float32.
pytestmark = pytest.mark.keeps_float32

DTYPES = "bfloat16", "float16"
POINTS = normal(0, 64, 3)
TURN = jnp.linalg.qr(normal(1, 3, 3))[0]
CAMERA = jnp.array([[500.0, 0, 320], [0, 500, 240], [0, 0, 1]])
AWAY = jnp.array([0.0, 0, 6])


def pixels(turn, points=POINTS):
    h = (points @ turn.T + AWAY) @ CAMERA.T
    return h[:, :2] / h[:, 2:]


SEEN = pixels(TURN) + normal(2, 64, 2)


def off(found):
    return jnp.mean((found - SEEN) ** 2)


def turned_often(turn):
    return lax.scan(lambda p, _: (p @ turn.T, None), POINTS, None, length=4)[0]


# What is near only in float32: a fit of a camera, however it is written.
FITS = {
    "plain": lambda r: off(pixels(r)),
    "checkpoint": lambda r: off(jax.checkpoint(pixels)(r)),
    "vmap": lambda r: off(jax.vmap(lambda p: pixels(r, p[None])[0])(POINTS)),
    "map": lambda r: off(lax.map(lambda p: pixels(r, p[None])[0], POINTS)),
    "in a loop": lambda r: off(pixels(TURN, turned_often(r))),
    "in a while": lambda r: off(
        pixels(lax.fori_loop(0, 3, lambda i, c: c @ r, r), POINTS)
    ),
}


@crossed("name dtype", [*FITS], DTYPES)
def test_the_gradient_of_a_pose_is_that_of_float32(name, dtype):
    forms = in_both_orders(FITS[name], dtype, grad=jax.grad)
    first, *found = at_once(*forms)(TURN)
    for one in found:
        assert relative_error(one, first) < 1e-5


# A Hessian times a vector. By two reverse passes it is no law: which of the sizes of a
# product the forward pass has added up is then not written anywhere.
ORDERS = {
    "forward over reverse": lambda f, x, v: jax.jvp(jax.grad(f), (x,), (v,))[1],
    "reverse over forward": lambda f, x, v: jax.grad(
        lambda x: jax.jvp(f, (x,), (v,))[1]
    )(x),
}


@crossed("name order", ["plain", "checkpoint", "vmap", "map", "in a loop"], [*ORDERS])
def test_the_second_derivative_of_a_pose_is_that_of_float32(name, order):
    def exact(turn):
        return ORDERS[order](FITS[name], turn, TURN.T)

    found = jaxmp.autocast(exact)
    first, second = at_once(exact, found)(TURN)
    assert relative_error(second, first) < 1e-5
    assert jaxmp.audit(found)(TURN).flops == {}


@pytest.mark.parametrize("order", ORDERS)
def test_second_derivatives_of_a_matmul_are_matmuls(order):
    def step(w, x):
        return ORDERS[order](lambda w: jnp.tanh(jnp.tanh(x @ w) @ w).sum(), w, w)

    found = product_dtypes(jaxmp.autocast(step), jnp.ones((16, 16)), jnp.ones((8, 16)))
    assert len(found) >= 8
    assert all(x == {"bfloat16"} for x in found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_they_have_full_float32_precision_on_every_device(dtype):
    def exact(turn):
        return jax.value_and_grad(lambda r: off(pixels(r)))(turn)

    eqns = traced(jaxmp.autocast(exact, dtype), TURN)
    products = [e for e in eqns if e.primitive.name == "dot_general"]
    assert len(products) == 4
    highest = (lax.Precision.HIGHEST,) * 2
    assert {e.params["precision"] for e in products} == {highest}
    assert {e.outvars[0].aval.dtype for e in products} == {jnp.dtype("float32")}


def matmuls(size, batch=16, columns=16):
    def loss(w, x):
        return jnp.tanh(x @ w).sum()

    shapes = (size, columns), (batch, size)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    grad = jaxmp.autocast(jax.grad(loss, (0, 1)))
    return product_dtypes(grad, *args), jaxmp.audit(grad)(*args)


@pytest.mark.parametrize("size", [2, 4, 7, 8, 9])
def test_eight_numbers_are_a_matmul_and_its_gradients_follow_it(size):
    found, report = matmuls(size)
    assert found == [{"bfloat16" if size >= 8 else "float32"}] * 3
    assert report.fraction_16bit == 1
    assert report.leaks == ()
    assert report.flops == ({"bfloat16": 3 * 2.0 * 16 * 16 * size} if size >= 8 else {})


@pytest.mark.parametrize(("batch", "columns"), [(2, 16), (16, 2), (7, 7)])
def test_gradients_of_small_batches_and_of_few_outputs_follow_their_matmul(
    batch, columns
):
    found, report = matmuls(64, batch, columns)
    assert found == [{"bfloat16"}] * 3
    assert report.flops == {"bfloat16": 3 * 2.0 * batch * columns * 64}


@crossed("size wrap", [4, 16], [jax.checkpoint, jax.jit, lambda layer: layer])
def test_an_audit_counts_the_gradients_of_a_loop_as_those_of_a_row(size, wrap):
    """Batches of 4 and weights of 4 rows, of which only a loop's equation tells."""

    def layer(h, ws):
        first, last = ws
        return jnp.tanh(jnp.tanh(h @ first) @ last), None

    def loss(by_loop, ws, x):
        if by_loop:
            return lax.scan(wrap(layer), x, ws)[0].sum()
        rows = [jax.tree.map(lambda w, i=i: w[i], ws) for i in range(3)]
        return functools.reduce(lambda h, w: wrap(layer)(h, w)[0], rows, x).sum()

    args = (jnp.ones((3, size, 16)), jnp.ones((3, 16, size))), jnp.ones((4, size))
    rows, loop = (
        jaxmp.audit(
            jaxmp.autocast(jax.grad(functools.partial(loss, x), (0, 1)), "float16")
        )(*args)
        for x in (False, True)
    )
    assert rows.flops == loop.flops
    assert set(loop.flops) == {"float16"}
    assert loop.leaks == ()


def test_a_convolution_is_a_matmul_however_small_its_kernel():
    def loss(w, x):
        return jnp.tanh(lax.conv(x, w, (1,), "SAME")).sum()

    grad = jaxmp.autocast(jax.grad(loss, (0, 1)))
    found = product_dtypes(grad, jnp.ones((4, 1, 3)), jnp.ones((2, 1, 8)))
    assert found == [{"bfloat16"}] * 3


def test_a_small_product_keeps_the_digits_that_it_is_given():
    """What a matmul returns for one is float32, as for a norm."""

    def fun(x, w, turn):
        return (x @ w) @ turn @ jnp.ones((3, 8))

    x, w = normal(3, 16, 16), normal(4, 16, 3)
    found, exact = at_once(jaxmp.autocast(fun), fun)(x, w, TURN)
    rounded = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype("float32")
    limit = relative_error(np.asarray(rounded) @ TURN @ jnp.ones((3, 8)), exact)
    assert relative_error(found, exact) < limit


def test_explain_calls_it_a_product_in_float32():
    def fun(x, w, turn):
        h = x @ w
        turned = h @ turn
        return jnp.tanh(turned) @ w.T

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 16), (16, 3), (3, 3))]
    first, second, third = jaxmp.explain(jaxmp.autocast(fun))(*shapes).lines
    assert (first.dtype, first.rule) == ("float32", 3)
    assert first.reason.startswith("feeds a product")
    assert (second.dtype, second.rule, second.matmuls) == ("float32", 3, ())
    assert second.reason == "computed by a product"
    assert (third.dtype, third.matmuls) == ("float32", ())


def test_what_a_cast_rounds_in_a_small_product_is_still_a_hazard():
    def phases(x, w):
        return jnp.sin(x @ w)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 2), (2, 6))]
    assert jaxmp.audit(jaxmp.autocast(phases))(*shapes).hazards == ()
    cast = jaxmp.with_policy(phases, "mixed_bfloat16")
    (hazard,) = jaxmp.audit(cast)(*shapes).hazards
    assert hazard.kind == "phase"
    # And on a device that rounds float32, where nobody asks for its digits.
    (hazard,) = jaxmp.audit(phases)(*shapes).hazards
    assert hazard.at_default_precision
