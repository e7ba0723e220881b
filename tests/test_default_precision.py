"""What JAX is told of all products is no request of one of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp

W = jax.random.normal(jax.random.key(0), (16, 16)) / 4
X = jax.random.normal(jax.random.key(1), (8, 16))
IMAGE = jax.random.normal(jax.random.key(2), (2, 3, 8, 8))
KERNEL = jax.random.normal(jax.random.key(3), (3, 3, 3, 3))

# What JAX writes into a product for each of them.
DEFAULTS = {
    name: jax.make_jaxpr(lambda x, name=name: jnp.dot(x, x, precision=name))(W)
    .eqns[0]
    .params["precision"]
    for name in ("high", "tensorfloat32", "highest", "float32", "BF16_BF16_F32_X3")
}
LOWEST = "default", "bfloat16"
each_default = pytest.mark.parametrize("default", DEFAULTS)


def sub_jaxprs(param):
    params = param if isinstance(param, (tuple, list)) else [param]
    return [x for x in params if hasattr(x, "eqns") or hasattr(x, "jaxpr")]


def products(fun, *args):
    """Returns dtype of the operands and precision of each product, wherever it is."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
                yield str(eqn.invars[0].aval.dtype), eqn.params["precision"]
            for param in eqn.params.values():
                for inner in sub_jaxprs(param):
                    yield from walk(getattr(inner, "jaxpr", inner))

    return [*walk(jax.make_jaxpr(fun)(*args).jaxpr)]


def float32_precisions(fun, *args):
    # Of 16-bit operands XLA:CPU takes wide copies; autocast has said how.
    lowest = (lax.Precision.DEFAULT,) * 2
    return {p for dtype, p in products(fun, *args) if dtype == "float32"} - {lowest}


def wide(w, x):
    return jnp.mean(jnp.tanh(jaxmp.float32_region(jnp.matmul)(x, w) @ w) ** 2)


def in_scan(w, x):
    def trip(x, b):
        return jaxmp.float32_region(jnp.matmul)(x @ w, w) + b, x.sum()

    return jnp.mean(lax.scan(trip, x, jnp.ones((3, 16)))[0] ** 2)


def in_counting_scan(w, x):
    def trip(carry, _):
        i, x = carry
        return (i + 1, jaxmp.float32_region(jnp.matmul)(x @ w, w)), i

    (_, x), _ = lax.scan(trip, (0, x), length=3)
    return jnp.mean(x**2)


def in_while(w, x):
    return lax.fori_loop(0, 3, lambda i, x: x + wide(w, x), x).sum()


def in_cond(w, x):
    return lax.cond(x.sum() > 0, wide, lambda w, x: wide(w.T, x), w, x)


@jax.custom_jvp
def ruled(w, x):
    return wide(w, x)


@ruled.defjvp
def ruled_jvp(primals, tangents):
    w, x = primals
    out, (dw, _) = ruled(w, x), tangents
    slope = jaxmp.float32_region(jnp.matmul)(x.T, x) @ w
    return out, jnp.sum(slope * dw)


@jax.custom_vjp
def pulled(w, x):
    return wide(w, x)


def pulled_backward(residuals, cotangent):
    w, x = residuals
    return cotangent * jaxmp.float32_region(jnp.matmul)(x.T, x) @ w, None


pulled.defvjp(lambda w, x: (pulled(w, x), (w, x)), pulled_backward)

WIDE = {
    "flat": wide,
    "jit": jax.jit(wide),
    "scan": in_scan,
    "a scan that counts": in_counting_scan,
    "cond": in_cond,
    "remat": jax.checkpoint(wide),
    "remat of a scan": jax.checkpoint(in_scan),
    "custom_jvp": ruled,
    "custom_jvp in jit": jax.jit(lambda w, x: ruled(w, x)),
    "custom_vjp": pulled,
}
ORDERS = {
    "called": lambda fun: jaxmp.autocast(fun),
    "autocast of grad": lambda fun: jaxmp.autocast(jax.grad(fun)),
    "grad of autocast": lambda fun: jax.grad(jaxmp.autocast(fun)),
}


@each_default
def test_autocast_runs_whatever_the_default_precision(default):
    grad = jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))
    for fun in (jaxmp.autocast(grad), jaxmp.autocast(grad, "mixed_fp8")):
        want = fun(W, X)
        with jax.default_matmul_precision(default):
            report = jaxmp.audit(fun)(W, X)
            np.testing.assert_array_equal(fun(W, X), want)
            np.testing.assert_array_equal(jax.jit(fun)(W, X), jax.jit(fun)(W, X))
        assert set(report.flops) == {"bfloat16"}

    def conv(x, k):
        return lax.conv(x, k, (1, 1), "SAME").sum()

    with jax.default_matmul_precision(default):
        fun = jaxmp.autocast(jax.grad(conv))
        assert set(jaxmp.audit(fun)(IMAGE, KERNEL).flops) == {"bfloat16"}


@each_default
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("fun", WIDE.values(), ids=WIDE.keys())
def test_products_left_in_float32_have_the_default_precision(fun, order, default):
    cast = order(fun)
    assert float32_precisions(cast, W, X) == {None}  # and nothing of it is kept
    with jax.default_matmul_precision(default):
        assert float32_precisions(cast, W, X) == {DEFAULTS[default]}
        np.testing.assert_allclose(cast(W, X), jax.jit(cast)(W, X), rtol=0.05, atol=0.1)
    assert float32_precisions(cast, W, X) == {None}


@each_default
@pytest.mark.parametrize("fun", WIDE.values(), ids=WIDE.keys())
def test_16_bit_products_ask_for_nothing(fun, default):
    with jax.default_matmul_precision(default):
        found = products(jax.grad(jaxmp.autocast(fun)), W, X)
    asked = {p for dtype, p in found if dtype == "bfloat16"}
    assert asked <= {(lax.Precision.DEFAULT,) * 2}
