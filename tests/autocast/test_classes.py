"""The class of an operation, by hand-made tables of small programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

import jaxmp
from jaxmp._autocast import classes

W, X, V = jnp.ones((8, 8)), jnp.ones((4, 8)), jnp.ones(8)
FLOAT16 = np.dtype("float16")

CLASSES = {
    "a matrix product": (lambda: X @ W, "product"),
    "a matrix times a vector": (lambda: W @ V, "product"),
    "a convolution": (lambda: lax.conv(X[None, None], W[None, None], (1, 1), "SAME"),
                      "product"),
    "a product of two vectors": (lambda: V @ V, "keep"),
    "an outer product": (lambda: jnp.einsum("i,j->ij", V, V), "keep"),
    "a product of high precision": (lambda: jnp.dot(X, W, precision="highest"), "keep"),
    "a product with integers": (lambda: lax.dot(W.astype(int), W), "product"),
    "a product with a mask": (lambda: lax.dot(W, W > 0), "product"),
    "a product by groups": (lambda: lax.ragged_dot(X, W[None], jnp.array([4])),
                            "product"),
    "an outer product by groups": (
        lambda: lax.ragged_dot(X[:, :1], W[None, :1], jnp.array([4])), "keep"),
    "a transpose": (lambda: lax.transpose(W, (1, 0)), "exact"),
    "a choice": (lambda: lax.select(W > 0, W, W), "exact"),
    "the largest": (lambda: lax.reduce_max(W, (0,)), "exact"),
    "a sum of two": (lambda: lax.add(W, W), "smooth"),
    "a cube": (lambda: lax.integer_pow(W, 3), "keep"),
    "times a thousand": (lambda: W * 1000, "keep"),
    "times a tenth": (lambda: W * 0.1, "smooth"),
    "a tanh": (lambda: lax.tanh(W), "smooth"),
    "a square": (lambda: lax.square(W), "keep"),
    "a square, multiplied": (lambda: lax.mul(W, W), "keep"),
    "an exponential": (lambda: lax.exp(W), "keep"),
    "a sum over an axis": (lambda: lax.reduce_sum(W, (0,)), "keep"),
    "a transform": (lambda: jnp.fft.rfft(V), "call"),
    "a loop": (lambda: lax.fori_loop(0, 3, lambda i, x: x, W), "call"),
    "a call": (lambda: jax.jit(lax.tanh)(W), "call"),
}  # fmt: skip


def last(fun, *args):
    return jax.make_jaxpr(fun)(*args).eqns[-1]


@pytest.mark.parametrize(("fun", "expected"), CLASSES.values(), ids=CLASSES)
def test_each_operation_has_its_class(fun, expected):
    eqn = last(fun)
    assert classes.classify(eqn, jaxmp.DEFAULT_OPS, FLOAT16) == expected


def test_the_lists_of_the_user_go_first():
    tanh, product = last(lax.tanh, W), last(jnp.matmul, X, W)
    ops = jaxmp.DEFAULT_OPS.with_deny("tanh", "dot_general")
    assert {classes.classify(e, ops, FLOAT16) for e in (tanh, product)} == {"keep"}
    denied = classes.denied_by_user(ops)
    assert denied == {"tanh", "dot_general"}
    exp = last(lax.exp, W)
    assert classes.classify(exp, ops.with_infer("exp"), FLOAT16) == "smooth"
    assert classes.classify(exp, ops.with_allow("exp"), FLOAT16) == "product"


def test_what_is_not_known_needs_all_digits():
    new = Primitive("something_new")
    new.def_impl(lambda x: x)
    new.def_abstract_eval(lambda aval: aval)
    eqn = last(new.bind, W)
    assert classes.classify(eqn, jaxmp.DEFAULT_OPS, FLOAT16) == "keep"
    assert classes.is_steep(eqn)


def test_a_product_that_was_written_in_16_bits_is_left_alone():
    half = W.astype(jnp.bfloat16)
    for dtype in (FLOAT16, np.dtype(jnp.bfloat16)):
        found = classes.classify(last(jnp.matmul, half, half), jaxmp.DEFAULT_OPS, dtype)
        assert found == "keep"


def test_numbers_are_folded_as_jax_computes_them():
    for fun in (lax.add, lax.mul, lax.div, lax.max, lax.sub):
        numbers = [np.float32(3), np.float32(7)]
        found = classes.folded(last(fun, 3.0, 7.0), numbers)
        assert found == fun(*numbers)
    assert classes.folded(last(lax.exp, 3.0), [np.float32(3)]) is None
