"""A slice of a matmul's result has the dtype that a matmul of its own would give it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import relative_error
from conftest import at_once, in_both_dtypes, normal

WIDE, NARROW = 24, 8


def split(y):
    return jnp.split(y, [WIDE], axis=-1)


def sliced(y):
    return y[..., :WIDE], y[..., WIDE:]


def sliced_by_a_number(y):
    start = jnp.argmin(jnp.abs(jnp.arange(3)))  # a zero that tracing does not know
    return lax.dynamic_slice_in_dim(y, start, WIDE, -1), y[..., WIDE:]


def reshaped(y):
    y = y.reshape(*y.shape[:-1], 4, NARROW)
    return y[..., :3, :].reshape(*y.shape[:-2], WIDE), y[..., 3, :]


def moved(y):
    a, dt = jnp.split(jnp.moveaxis(y, -1, 0), [WIDE])
    return jnp.moveaxis(a, 0, -1), jnp.moveaxis(dt, 0, -1)


def in_a_jit(y):
    return jax.jit(split)(y)


def sliced_twice(y):
    first, rest = jnp.split(y, [NARROW], -1)
    second, dt = jnp.split(rest, [WIDE - NARROW], -1)
    return jnp.concatenate([first, second], -1), dt


CUTS = [split, sliced, sliced_by_a_number, reshaped, moved, in_a_jit, sliced_twice]
# What the narrow part goes to, for which all of the result would be float32.
CONSUMERS = {
    "softplus": lambda dt: jax.nn.softplus(dt + 1),
    "softmax": lambda dt: NARROW * jax.nn.softmax(dt),
    "exponential": lambda dt: jnp.exp(-jnp.abs(dt)),
    "divisor": lambda dt: 1 / (2 + jnp.tanh(dt)),
    "running sum": lambda dt: jnp.cumsum(dt, 0) / 9,
}
BETWEEN = {
    "at once": lambda y, b: y,
    "with a bias": lambda y, b: y + b,
    "doubled": lambda y, b: 2 * y,
}


def loss(cut, consumer, between):
    """A projection that is cut in two, or is two if ``cut`` is None."""

    def fun(p, x):
        for _ in range(2):
            if cut is None:
                a, dt = (
                    between(x @ w, b)
                    for w, b in zip(split(p["w"]), split(p["b"]), strict=True)
                )
            else:
                a, dt = cut(between(x @ p["w"], p["b"]))
            x = (jax.nn.silu(a) * jnp.repeat(consumer(dt), 3, -1)) @ p["o"]
        return jnp.mean(x**2)

    return jax.value_and_grad(fun)


PARAMS = {
    "w": normal(0, 16, WIDE + NARROW) / 4,
    "b": normal(1, WIDE + NARROW) / 4,
    "o": normal(2, WIDE, 16) / 4,
}
X = normal(3, 32, 16)
CASES = {f"{fun.__name__}, softplus": (fun, "softplus", "at once") for fun in CUTS}
CASES |= {f"split, {name}": (split, name, "at once") for name in CONSUMERS}
CASES |= {f"sliced, {name}": (sliced, "softplus", name) for name in BETWEEN}


@pytest.mark.parametrize(("case", "dtype"), in_both_dtypes(CASES, "split, softplus"))
def test_a_fused_projection_keeps_what_two_matmuls_keep(case, dtype):
    cut, consumer, between = case
    fused, apart = (
        jaxmp.autocast(loss(x, CONSUMERS[consumer], BETWEEN[between]), dtype)
        for x in (cut, None)
    )
    in_float32 = [
        jaxmp.audit(fun)(PARAMS, X).as_dict()["residual_bytes"].get("float32", 0)
        for fun in (fused, apart)
    ]
    assert in_float32[0] <= 1.3 * in_float32[1]
    written = loss(cut, CONSUMERS[consumer], BETWEEN[between])
    exact, found, other = at_once(written, fused, apart)(PARAMS, X)
    assert relative_error(found, exact) <= 1.25 * relative_error(other, exact) + 1e-4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_slice_that_a_softmax_reads_has_all_digits(dtype):
    def fun(w, x):
        values, scores = split(x @ w)
        return jax.nn.softmax(1000 + scores) @ values[:NARROW]

    def apart(w, x):
        values, scores = (x @ w for w in split(w))
        return jax.nn.softmax(1000 + scores) @ values[:NARROW]

    exact, found, other = at_once(
        fun, jaxmp.autocast(fun, dtype), jaxmp.autocast(apart, dtype)
    )(PARAMS["w"], X)
    assert relative_error(found, exact) <= 1.1 * relative_error(other, exact) + 1e-6
