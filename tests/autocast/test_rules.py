"""The nine rules give the dtypes of programs for which the engine was not built.

Each is `y = ...` and what reads `y`, of arguments `x`, `w` and `b`, with the dtype that
somebody who reads the rule expects `y` to have.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from benchmarks.counting.measure import traced
from jaxmp import autocast

HALF = {jnp.bfloat16: jnp.bfloat16, jnp.float16: jnp.float16}
FLOAT32 = {jnp.bfloat16: jnp.float32, jnp.float16: jnp.float32}
ONLY_BFLOAT16 = {jnp.bfloat16: jnp.bfloat16, jnp.float16: jnp.float32}

PROGRAMS = [
    (1, 'jnp.matmul(x, w, precision="highest")', "jnp.tanh(y) @ w", FLOAT32),
    (2, "x @ w", "(y.var(), jnp.tanh(y) @ w)", HALF),
    (3, "jnp.sin(x @ w) * jnp.cos(x @ w)", "y @ w", HALF),
    (3, "x @ w * 300", "jnp.tanh(y) @ w", FLOAT32),
    (3, "x @ w * 200", "jnp.tanh(y) @ w", HALF),
    (3, "x @ w * b", "jnp.tanh(y) @ w", FLOAT32),
    (3, "(x @ w).T", "y @ w", HALF),
    (3, "jnp.where(x > 0, x @ w, 0)", "y @ w", HALF),
    (3, "jnp.concatenate([x @ w, x])", "jnp.tanh(y) @ w", FLOAT32),
    (3, "x @ w", "(y > 0) * (jnp.tanh(y) @ w)", HALF),
    (3, "jax.jit(lambda x: jnp.tanh(x @ w))(x)", "y @ w", HALF),
    (3, "jnp.abs(x @ w)", "y @ w", HALF),
    (3, "lax.max(x @ w, b[None] + 0*x)", "jnp.tanh(y) @ w", FLOAT32),
    (3, "jnp.tanh(x)", "y @ w", FLOAT32),
    (3, "x[jnp.array([0,1])]", "y @ w", FLOAT32),
    (3, "(x @ w)[jnp.array([0,1])]", "y @ w", HALF),
    (3, "jnp.arctan2(x @ w, x @ w)", "y @ w", HALF),
    (4, "x @ w - b", "jnp.tanh(y) @ w", FLOAT32),
    (4, "x @ w + jnp.exp(x @ w)", "jnp.tanh(y) @ w", ONLY_BFLOAT16),
    (4, "x @ w + jax.nn.standardize(x @ w)", "jnp.tanh(y) @ w", ONLY_BFLOAT16),
    (4, "x @ w + jnp.exp(b)", "jnp.tanh(y) @ w", HALF),
    (4, "x @ w + b", "(-y + b) @ w", HALF),
    (4, "x @ w + b", "(y / b) @ w", HALF),
    (4, "x @ w + b", "jnp.tanh(y - (y @ w)) @ w", HALF),
    (4, "x @ w + b", "(jax.nn.sigmoid(y) - 1) @ w", HALF),
    (4, "x @ w + b", "(y * lax.erfc(-y)) @ w", HALF),
    (4, "jax.scipy.special.erfc(x @ w + jnp.exp(x @ w))", "y @ w", HALF),
    (5, "(x @ w)**3", "jnp.tanh(y) @ w", FLOAT32),
    (5, "jnp.sort(x @ w)", "y @ w", FLOAT32),
    (6, "jnp.tanh(x @ w)", "(y, y @ w)", FLOAT32),
    (6, "jnp.tanh(x @ w)", "(1/(2+y)) @ w", FLOAT32),
    (6, "jnp.tanh(x @ w)", "jnp.sqrt(y + 2) @ w", FLOAT32),
    (6, "jnp.tanh(x @ w)", "jnp.log(y.sum()) * (y @ w)", HALF),
    (6, "x @ w", "(y == y.max()) * (jnp.tanh(y) @ w)", FLOAT32),
    (7, "jnp.exp(x @ w)", "y @ w", HALF),
    (7, "jnp.exp(x @ w)", "y.sum() + (y @ w).sum()", FLOAT32),
    (7, "jnp.cumsum(x @ w, 0)", "y @ w", HALF),
    (7, "lax.scan(lambda c, r: (jnp.tanh(c @ w + r), c), b, x)[1]", "y @ w", HALF),
    (7, 'jnp.einsum("i,j->ij", (x @ w)[0], (x @ w)[1])', "y @ w", HALF),
    (7, "jnp.concatenate([x @ w, x])", "y @ w", FLOAT32),
    (8, "lax.fori_loop(0, 3, lambda i, c: c + jnp.tanh(c @ w), x)", "y @ w", FLOAT32),
    (8, "lax.scan(lambda c, r: (jnp.tanh(c @ w + r), c), b, x)[0]", "y @ w", HALF),
    (8, "x @ w", "(y[0] * y[1] * y[2] * y[3] * (y[0] + y[1])) @ w", FLOAT32),
    (8, "x @ w", "(y[0] * y[1] * y[2] * y[3]) @ w", HALF),
    (
        9,
        "lax.fori_loop(0, jnp.int32(x.shape[0]), lambda i, c: jnp.tanh(c @ w), x)",
        "y @ w",
        HALF,
    ),
]


@pytest.mark.parametrize(("rule", "first", "then", "expected"), PROGRAMS)
def test_a_value_has_the_dtype_that_the_rule_gives(rule, first, then, expected):
    known = {"jax": jax, "jnp": jnp, "lax": lax}

    def fun(x, w, b):
        here = {**known, "x": x, "w": w, "b": b}
        y = checkpoint_name(eval(first, here), "y")
        return eval(then, {**here, "y": y})

    args = jnp.ones((8, 8)), jnp.ones((8, 8)), jnp.ones(8)
    for dtype in expected:
        eqns = traced(autocast(fun, dtype), *args)
        named = [x for x in eqns if x.primitive.name == "name"]
        avals: list[Any] = [x.outvars[0].aval for x in named]
        assert {x.dtype for x in avals} == {jnp.dtype(expected[dtype])}
