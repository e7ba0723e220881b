"""Random programs under autocast agree with themselves in float32."""

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import IN_A_HURRY, relative_error
from conftest import normal

SIZE = 4
AS_WRITTEN = IN_A_HURRY | {"xla_allow_excess_precision": False}
W = normal(0, SIZE, SIZE, scale=SIZE**-0.5)
X = normal(1, SIZE, SIZE)


def normalised(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1.0)


# Each is continuous and keeps values near 1, so that rounding cannot grow much.
UNARY = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "softmax": jax.nn.softmax,
    "logsumexp": lambda x: x - jax.nn.logsumexp(x, axis=-1, keepdims=True),
    "normalised": normalised,
    "transposed": jnp.transpose,
    "bias": lambda x: x + W[0],
    "scale": lambda x: x * W[:1],
    "rows": lambda x: x[jnp.array([3, 0, 0, 2])],
    "sorted": lambda x: jnp.sort(x, axis=0),
    "sum": lambda x: x / SIZE + x.sum(0, keepdims=True) / SIZE,
    "cumsum": lambda x: jnp.cumsum(x, axis=1) / SIZE,
    "masked": lambda x: jnp.where(jnp.tri(SIZE, dtype=bool), x, -1e4) / 1e4,
    "halves": lambda x: jnp.concatenate([x[:2] * 0.5, -x[2:]]),
    "bfloat16": lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
    "product": lambda x: x @ W,
    "squares": lambda x: jnp.sqrt(x * x + 1),
    "region": jaxmp.float32_region(lambda x: x @ W.T),
}
BINARY = {
    "add": lambda x, y: 0.5 * (x + y),
    "matmul": lambda x, y: jnp.tanh(x @ y / SIZE),
    "max": jnp.maximum,
    "gate": lambda x, y: x * jax.nn.sigmoid(y),
    "outer": lambda x, y: jnp.einsum("i,j->ij", x[0], y[0]) / SIZE,
}
WRAPPERS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "vmap": lambda f: jax.vmap(lambda x: f(x[None].repeat(SIZE, 0))[0]),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), c), x, None, length=2)[0],
    "loop": lambda f: lambda x: lax.fori_loop(0, 2, lambda _, c: f(c), x),
    "cond": lambda f: lambda x: lax.cond(x[0, 0] * 0 == 0, f, lambda x: x, x),
    "shared": lambda f: lambda x: f(x) - 0.5 * x,
}

instructions = st.one_of(
    st.tuples(st.sampled_from(sorted(UNARY)), st.sampled_from(sorted(WRAPPERS))),
    st.tuples(st.sampled_from(sorted(BINARY)), st.integers(0, 7)),
)


def program(steps):
    def run(x):
        values = [x, x @ W]
        for name, how in steps:
            if name in UNARY:
                values.append(WRAPPERS[how](UNARY[name])(values[-1]))
            else:
                values.append(BINARY[name](values[-1], values[how % len(values)]))
        return {"last": values[-1], "sum": values[-1].sum(), "step": len(values)}

    return run


def run_all(*funs):
    """Returns what each function gives, as one program that rounds where it says."""
    program = jax.jit(lambda x: [fun(x) for fun in funs]).lower(X)
    return program.compile(compiler_options=AS_WRITTEN)(X)


some_steps = hypothesis.given(st.lists(instructions, min_size=1, max_size=6))
few_steps = hypothesis.given(st.lists(instructions, min_size=1, max_size=4))


@hypothesis.settings(max_examples=8)
@some_steps
def test_a_composition_agrees_with_float32_and_keeps_its_types(steps):
    agree_with_float32_and_keep_types(steps)


@pytest.mark.evidence
@hypothesis.settings(max_examples=25)
@some_steps
def test_any_composition_agrees_with_float32_and_keeps_its_types(steps):
    agree_with_float32_and_keep_types(steps)


def agree_with_float32_and_keep_types(steps):
    fun = program(steps)
    dtypes = {jnp.float16: 0.02, jnp.bfloat16: 0.15}
    expected, *outs = run_all(fun, *(jaxmp.autocast(fun, dtype) for dtype in dtypes))
    for out, tolerance in zip(outs, dtypes.values(), strict=True):
        chex.assert_trees_all_equal_structs(out, expected)
        assert out["step"] == expected["step"]
        chex.assert_equal_shape([out["last"], expected["last"]])
        assert {out["last"].dtype, out["sum"].dtype} == {jnp.dtype("float32")}
        distance = jnp.abs(out["last"] - expected["last"]).max()
        assert distance <= tolerance * (1 + jnp.abs(expected["last"]).max())


@hypothesis.settings(max_examples=5)
@few_steps
def test_a_gradient_can_be_taken_in_either_order(steps):
    agree_in_either_order(steps)


@pytest.mark.evidence
@hypothesis.settings(max_examples=10)
@few_steps
def test_any_gradient_can_be_taken_in_either_order(steps):
    agree_in_either_order(steps)


def agree_in_either_order(steps):
    def loss(x):
        return jnp.tanh(program(steps)(x)["last"]).mean()

    steps = [s for s in steps if s[1] not in ("loop",)]  # fori_loop is a scan here
    grads = [
        jaxmp.autocast(jax.grad(loss), jnp.float16),
        jax.grad(jaxmp.autocast(loss, jnp.float16)),
    ]
    expected, *grads = run_all(jax.grad(loss), *grads)
    if jnp.abs(expected).max() < 1e-4:
        return
    for got in grads:
        chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
        assert relative_error(got, expected) < 0.1
