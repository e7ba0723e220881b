"""The five sentences give the dtypes of programs for which the engine was not built.

Each is `y = ...` and what reads `y`, of arguments `x`, `w` and `b`, with the dtype that
somebody who reads the sentences expects `y` to have, and the sentence or the safeguard
that says so.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxmp
from jaxmp._autocast import needs
from jaxmp._autocast.plan import Planner

# In bfloat16, and in float16 where that is not the same.
PROGRAMS = [
    ('jnp.matmul(x, w, precision="highest")', "jnp.tanh(y) @ w", "32 1"),
    ("x.astype(jnp.float16) * 2", "y @ w", "16 1"),
    ("x @ w", "y @ w", "16 2"),
    ("x @ w", "jnp.maximum(y, 0) @ w", "16 2"),
    ("x @ w", "((y > 1.0) * y / 0.9) @ w", "16 2"),
    ("x @ w", "(y - y.mean(-1, keepdims=True)) @ w", "16 2"),
    ("x @ w", "y.sum()", "32 3"),
    ("x @ w", "jax.nn.softmax(y) @ w", "32 3"),
    ("x @ w", "jnp.log(jax.nn.sigmoid(y))", "32 3"),
    ("x @ w", "(x / y) @ w", "32 3"),
    ("x @ w", "x / y + y @ w", "32 3"),
    ("x @ w", "jax.nn.softmax(y) @ w + y @ w", "32 3"),
    ("x @ w", "jnp.log(jax.nn.softplus(y)) + y @ w", "32 3"),
    ("x @ w", "jnp.exp(-jax.nn.softplus(y) * 8) + y @ w", "32 3"),
    ("x @ w", "jnp.logaddexp(y, y[::-1]) + y @ w", "32 3"),
    ("x @ w", "jax.nn.elu(y - y[::-1]) + y @ w", "32 3"),
    ("x @ w", "(y == y[::-1]).sum()", "32 3"),
    ("x @ w", "(1e6 * y) @ w", "32 3", "32 3"),
    ("x @ w", "jaxmp.float32_region(jnp.matmul)(y, w)", "32 3"),
    ("x @ w", "jax.pure_callback(lambda x: x, y, y) @ w", "32 3"),
    ("x @ w", "(y.var(), jnp.tanh(y) @ w)", "16 2"),
    ("jnp.sin(x @ w) * jnp.cos(x @ w)", "y @ w", "16 2"),
    ("x @ w * 300", "jnp.tanh(y) @ w", "32 3"),
    ("x @ w * 200", "jnp.tanh(y) @ w", "16 2"),
    ("x @ w * b", "jnp.tanh(y) @ w", "32 3"),
    ("(x @ w).T", "y @ w", "16 2"),
    ("jnp.where(x > 0, x @ w, 0)", "y @ w", "16 2"),
    ("jnp.concatenate([x @ w, x])", "jnp.tanh(y) @ w", "32 3"),
    ("x @ w", "(y > 0) * (jnp.tanh(y) @ w)", "16 2"),
    ("jax.jit(lambda x: jnp.tanh(x @ w))(x)", "y @ w", "16 2"),
    ("jnp.abs(x @ w)", "y @ w", "16 2"),
    ("lax.max(x @ w, b[None] + 0*x)", "jnp.tanh(y) @ w", "32 3"),
    ("jnp.tanh(x)", "y @ w", "32 3"),
    ("x[jnp.array([0,1])]", "y @ w", "32 3"),
    ("(x @ w)[jnp.array([0,1])]", "y @ w", "16 2"),
    ("jnp.arctan2(x @ w, x @ w)", "y @ w", "16 2"),
    ("x @ w - b", "jnp.tanh(y) @ w", "32 3"),
    ("x @ w + jnp.exp(x @ w)", "jnp.tanh(y) @ w", "16 2", "32 float16 range"),
    (
        "x @ w + jax.nn.standardize(x @ w)",
        "jnp.tanh(y) @ w",
        "16 2",
        "32 float16 range",
    ),
    ("x @ w + jnp.exp(b)", "jnp.tanh(y) @ w", "16 2"),
    ("x @ w + b", "(-y + b) @ w", "16 2"),
    ("x @ w + b", "(y / b) @ w", "16 2"),
    ("x @ w + b", "jnp.tanh(y - (y @ w)) @ w", "16 2"),
    ("x @ w + b", "(jax.nn.sigmoid(y) - 1) @ w", "16 2"),
    ("x @ w + b", "(y * lax.erfc(-y)) @ w", "16 2"),
    ("jax.scipy.special.erfc(x @ w + jnp.exp(x @ w))", "y @ w", "16 2", "16 5"),
    ("(x @ w)**3", "jnp.tanh(y) @ w", "32 3"),
    ("jnp.sort(x @ w)", "y @ w", "32 3"),
    ("jnp.tanh(x @ w)", "(y, y @ w)", "32 3"),
    ("jnp.tanh(x @ w)", "(1/(2+y)) @ w", "32 3"),
    ("jnp.tanh(x @ w)", "jnp.sqrt(y + 2) @ w", "32 3"),
    ("jnp.tanh(x @ w)", "jnp.log(y.sum()) * (y @ w)", "16 2"),
    ("x @ w", "(y == y.max()) * (jnp.tanh(y) @ w)", "32 3"),
    ("jnp.exp(x @ w)", "y @ w", "16 5"),
    ("jnp.exp(x @ w)", "y.sum() + (y @ w).sum()", "32 3"),
    ("jnp.cumsum(x @ w, 0)", "y @ w", "16 2"),
    ("lax.scan(lambda c, r: (jnp.tanh(c @ w + r), c), b, x)[1]", "y @ w", "16 2"),
    ('jnp.einsum("i,j->ij", (x @ w)[0], (x @ w)[1])', "y @ w", "16 5"),
    ("jnp.concatenate([x @ w, x])", "y @ w", "32 3"),
    ("lax.fori_loop(0, 3, lambda i, c: c + jnp.tanh(c @ w), x)", "y @ w", "32 3"),
    ("lax.scan(lambda c, r: (jnp.tanh(c @ w + r), c), b, x)[0]", "y @ w", "16 2"),
    ("x @ w", "lax.scan(lambda c, r: (c * r, 0), b, y)[0] @ w", "32 4"),
    ("x @ w", "(y[0] * y[1] * y[2] * y[3] * (y[0] + y[1])) @ w", "32 gates"),
    ("x @ w", "(y[0] * y[1] * y[2] * y[3]) @ w", "16 2"),
    (
        "lax.fori_loop(0, jnp.int32(x.shape[0]), lambda i, c: jnp.tanh(c @ w), x)",
        "y @ w",
        "16 2",
    ),
    (
        "x @ w",
        "lax.while_loop(lambda c: (c > y).all(), lambda c: c @ w, x)",
        "32 data-dependent loop",
    ),
    ("x @ w", "y @ w - (x @ w) ** 2", "16 2"),
]
# What has a bound is rounded on its way to a product, and for nobody else.
BOUNDED = "jnp.tanh", "jax.nn.sigmoid", "lax.erf"
PROGRAMS += [
    row
    for f in BOUNDED
    for row in (
        (f"{f}(x @ w + (x @ w) ** 3)", "((x @ w) * (1 + y)) @ w", "16 2"),
        (f"{f}(x @ w + (x @ w) ** 3)", "((x @ w) * (1 + y)).mean()", "32 3"),
        (f"{f}(jax.nn.standardize(x @ w))", "y.mean() + (y * (x @ w)) @ w", "32 3"),
        (f"{f}(jax.nn.standardize(x @ w))", "jnp.log(2 - y) + (y * b) @ w", "32 3"),
    )
]
# A number that 16 bits cannot hold forces float32.
PROGRAMS += [
    ("jnp.where(x > 0, x @ w, -1e9)", "y @ w", "16 2", "32 3"),
    ("jnp.where(x > 0, x @ w, 1e-6)", "y @ w", "16 2", "32 3"),
    ("jnp.where(x > 0, x @ w, float(jnp.finfo(x.dtype).min))", "y @ w", "32 3"),
    ("jnp.where(x > 0, x @ w, -1e4)", "y @ w", "16 2"),
    ("jnp.where(x > 0, x @ w, -jnp.inf)", "y @ w", "16 2"),
]


@pytest.mark.keeps_float32  # some of the examples
@pytest.mark.parametrize(
    ("first", "then", "expected", "in_float16"),
    [(*program, program[-1])[:4] for program in PROGRAMS],
)
def test_a_value_has_the_dtype_that_the_sentences_give(
    first, then, expected, in_float16
):
    known = {"jax": jax, "jaxmp": jaxmp, "jnp": jnp, "lax": lax}

    def fun(x, w, b):
        here = {**known, "x": x, "w": w, "b": b}
        y = checkpoint_name(eval(first, here), "y")
        return eval(then, {**here, "y": y})

    jaxpr = jax.make_jaxpr(fun)(jnp.ones((8, 8)), jnp.ones((8, 8)), jnp.ones(8))
    for dtype, said in {"bfloat16": expected, "float16": in_float16}.items():
        planner = Planner(np.dtype(dtype), jaxmp.DEFAULT_OPS)
        plan = planner.program(jaxpr, needs.FULL | needs.DIGITS)
        (name,) = [x for x in plan.steps if x.eqn.primitive.name == "name"]
        (y,) = name.eqn.invars
        step = next((x for x in plan.steps if y in x.eqn.outvars), name)
        step = name if step.inside else step
        assert (said[:2], said[3:]) == (
            "16" if name.outs[0].half or y.aval.dtype.itemsize == 2 else "32",
            str(step.rule),
        )
