"""What chooses numbers rounds none: the gradient goes to those that were chosen.

JAX differentiates a maximum by asking which number equals it. Where one of the two had
been rounded, nearly none would.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.counting.measure import traced
from conftest import assert_gradients_near, in_both_dtypes, normal
from jaxmp import autocast

X, W = normal(20, 8, 16), normal(21, 16, 16, scale=0.25)
V = normal(22, 16, 4, scale=0.25)
ROWS = jnp.array([0, 0, 1, 1, 2, 2, 3, 3])
ZEROS = jnp.zeros((4, 16))


def maximum_of_two(h):
    return h.at[0].max(h[1])


CHOICES = {
    "a maximum in place": maximum_of_two,
    "after a relu": lambda h: maximum_of_two(jax.nn.relu(h)),
    "after an exponential": lambda h: maximum_of_two(jnp.exp(h / 2)),
    "of a sum and an exponential": lambda h: jnp.exp(h).at[0].max(h[1]),
    "of a norm": lambda h: jax.nn.standardize(h).at[0].max(h[1]),
    "set in place": lambda h: h.at[0].set(2 * h[1]),
    "into zeros": lambda h: ZEROS.at[ROWS].max(h),
    "of segments": lambda h: jax.ops.segment_max(jnp.exp(h), ROWS, 4),
    "of a row": lambda h: jnp.exp(h).max(0, keepdims=True),
    "so far": lambda h: lax.cummax(jnp.exp(h)),
    "of windows": lambda h: lax.reduce_window(
        jnp.exp(h), -jnp.inf, lax.max, (2, 1), (2, 1), "VALID"
    ),
    "by a function": lambda h: lax.reduce(h, -jnp.inf, jnp.maximum, (0,))[None],
    "in a scan": lambda h: lax.scan(
        lambda c, row: (c.at[row[0]].max(row[1]), None), ZEROS, (ROWS, h)
    )[0],
}


@pytest.mark.needs_no_scale
@pytest.mark.parametrize(
    ("choose", "dtype"), in_both_dtypes(CHOICES, "a maximum in place", "of segments")
)
def test_a_gradient_goes_to_what_was_chosen(choose, dtype):
    def loss(w):
        return jnp.mean((choose(X @ w) @ V) ** 2)

    assert_gradients_near(loss, dtype, 4, W)


def test_a_choice_in_place_keeps_the_dtype_of_its_arguments():
    def dtype_of(fun):
        eqns = traced(autocast(fun, "bfloat16"), W)
        (found,) = (e for e in eqns if e.primitive.name.startswith("scatter"))
        return found.outvars[0].aval.dtype

    assert dtype_of(lambda w: maximum_of_two(X @ w) @ V) == jnp.bfloat16
    assert dtype_of(lambda w: maximum_of_two(X @ w).sum()) == jnp.float32
    assert dtype_of(lambda w: (X @ w).at[0].max(X[0]) @ V) == jnp.float32
