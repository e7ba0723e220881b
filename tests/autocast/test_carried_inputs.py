"""A loop that carries its inputs: nobody rounds them, as nobody does without a loop.

The law: what a loop carries has at least the digits of the same program unrolled.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import relative_error
from conftest import at_once, normal, rest_is_evidence

both_dtypes = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])

ITERATIONS, SIZE = 6, 8
# Rows that differ by about one. Near 1000 the steps of bfloat16 are four, those of
# float16 a half.
ROWS = np.float32(1000) + normal(0, ITERATIONS, SIZE)
WEIGHTS = {"w": normal(1, SIZE, 4) / 3, "v": normal(2, 4, SIZE) / 2}
WEIGHTS["scale"] = np.float32(1) + normal(3, SIZE) / 9


def unrolled(step, carry, rows):
    outs = []
    for row in rows:
        carry, out = step(carry, row)
        outs.append(out)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *outs)


def by_index(loop):
    """Goes through the rows by their number, and writes what each iteration returns."""

    def scan(step, carry, rows):
        shape = jax.eval_shape(step, carry, rows[0])[1].shape

        def body(i, state):
            carry, outs = state
            carry, out = step(carry, rows[i])
            return carry, outs.at[i].set(out)

        return loop(body, (carry, jnp.zeros((len(rows), *shape))))

    return scan


def counted(body, state):
    def again(state):
        return state[0] + 1, body(*state)

    return lax.while_loop(lambda state: state[0] < ITERATIONS, again, (0, state))[1]


LOOPS = {
    "scan": lax.scan,
    "fori_loop": by_index(
        lambda body, state: lax.fori_loop(0, ITERATIONS, body, state)
    ),
    "while_loop": by_index(counted),
    "checkpointed": lambda step, *args: lax.scan(jax.checkpoint(step), *args),
    "jitted": lambda step, *args: lax.scan(jax.jit(step), *args),
    "in twos": lambda step, *args: lax.scan(step, *args, unroll=2),
}


def token_shift(scan, p, x):
    return scan(lambda c, r: (r, (r - c) @ p["w"]), x[0], x)[1]


def two_lags(scan, p, x):
    def step(lags, r):
        one, two = lags
        return (r, one), (r - 2 * one + two) @ p["w"]

    return scan(step, (x[0], x[0]), x)[1]


def lags_in_an_array(scan, p, x):
    def step(lags, r):
        lags = jnp.concatenate([r[None], lags[:-1]])
        return lags, (lags - lags.mean(0)) @ p["w"]

    return scan(step, jnp.broadcast_to(x[0], (3, SIZE)), x)[1]


def largest_so_far(scan, p, x):
    def step(most, r):
        most = jnp.maximum(most, r)
        return most, (most - r) @ p["w"]

    return scan(step, x[0], x)[1]


def from_a_given_start(scan, p, x):
    def step(h, r):
        return jnp.tanh((h - r) @ p["w"]) @ p["v"], h - r

    return scan(step, x[1], x)[1][0] @ p["w"]


PROGRAMS = {
    fun.__name__.replace("_", " "): fun
    for fun in (
        token_shift,
        two_lags,
        lags_in_an_array,
        largest_so_far,
        from_a_given_start,
    )
}
CASES = {
    f"{program}, {loop}, {dtype}": (PROGRAMS[program], LOOPS[loop], dtype)
    for program in PROGRAMS
    for loop in LOOPS
    for dtype in ("bfloat16", "float16")
}
# Each loop, each program and each dtype.
EACH = zip(LOOPS, [*PROGRAMS, "token shift"], ["float16", "bfloat16"] * 3, strict=True)
USUAL = [f"{program}, {loop}, {dtype}" for loop, program, dtype in EACH]


def losses(fun):
    return lambda p, x: jnp.sum(jnp.sin(fun(p, x)))


@pytest.mark.needs_no_scale
@pytest.mark.parametrize(("program", "loop", "dtype"), rest_is_evidence(CASES, *USUAL))
def test_a_loop_that_carries_inputs_has_the_digits_of_the_unrolled(
    program, loop, dtype
):
    looped, written_out = (
        functools.partial(program, scan) for scan in (loop, unrolled)
    )
    found = [written_out, *(jaxmp.autocast(f, dtype) for f in (looped, written_out))]
    if loop is not LOOPS["while_loop"]:  # which has no gradient
        around = [
            lambda f: jaxmp.autocast(jax.grad(losses(f), (0, 1)), dtype),
            lambda f: jax.grad(losses(jaxmp.autocast(f, dtype)), (0, 1)),
        ]
        for form in around:
            slope = jax.grad(losses(written_out), (0, 1))
            found += [slope, form(looped), form(written_out)]
    found = at_once(*found)(WEIGHTS, ROWS)
    for exact, loop, other in zip(*(found[i::3] for i in range(3)), strict=True):
        away = relative_error(loop, exact)
        assert away <= 1.25 * relative_error(other, exact) + 1e-5


@both_dtypes
def test_a_scan_in_parallel_that_hands_inputs_on_rounds_none(dtype):
    def fun(p, x):
        most = lax.associative_scan(jnp.maximum, x)
        before = lax.associative_scan(lambda one, two: two, jnp.roll(x, 1, 0))
        return jnp.stack([most - x, x - before]) @ p["w"]

    found, exact = at_once(jaxmp.autocast(fun, dtype), fun)(WEIGHTS, ROWS)
    assert relative_error(found, exact) < 4 * jnp.finfo(dtype).eps
