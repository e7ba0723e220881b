"""What the engine makes of programs: laws of dtypes and values, by sentences."""

import cProfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import product_dtypes, relative_error, traced
from conftest import at_once, normal
from jaxmp import autocast
from jaxmp._autocast import rules
from jaxmp._autocast.emit import Emitter
from jaxmp._autocast.plan import Planner

W, X = normal(0, 8, 8, scale=0.3), normal(1, 4, 8)
HALVES = (jnp.float16, jnp.bfloat16)
both_dtypes = pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])


@jaxmp.float32_region
@jax.jit
def several(x):
    """Its derivative is a call of several results, of which a product takes one."""
    return jnp.logaddexp(x, 0.0)


@pytest.mark.needs_no_scale
@both_dtypes
def test_a_region_may_call_what_has_several_results(dtype):
    def loss(w, x):
        return (several(x @ w) @ w).sum()

    found = autocast(jax.grad(loss), dtype)(W, X)
    assert relative_error(found, jax.jit(jax.grad(loss))(W, X)) < float(
        jnp.finfo(dtype).eps
    )


# Each sentence, in a program that needs it.


REARRANGED = {
    "sorted": jnp.sort,
    "the largest few": lambda h: lax.top_k(h, 3)[0],
    "in whole numbers": lambda h: jnp.round(h * 64),
    "the largest so far": lambda h: lax.cummax(h, axis=1),
}


@pytest.mark.parametrize("change", REARRANGED.values(), ids=REARRANGED)
def test_sentence_3_what_is_put_into_another_order_and_returned_keeps_its_digits(
    change,
):
    def fun(w, x):
        h = x @ w
        return change(h), jnp.tanh(h) @ w

    rounded = [jnp.float32(jnp.bfloat16(x)) for x in (W, X)]
    found = autocast(fun)(W, X)[0]
    np.testing.assert_allclose(found, fun(*rounded)[0], rtol=1e-6)


def plain(w, x):
    h = jnp.tanh(x @ w + w[0])
    return jax.nn.softmax(h @ w) @ w


# All of it.


def test_every_decision_has_a_sentence_or_a_safeguard_that_fits_its_dtype():
    def loss(w, x):
        h = jax.nn.standardize(jnp.tanh(x @ w + w[0]) @ w)
        c = lax.scan(lambda c, y: (0.9 * c + y @ w, c @ w), h, jnp.stack([x, x]))
        return jnp.square(plain(w, c[0]) + c[1].mean(0)).mean()

    planner, found = Planner(np.dtype(jnp.bfloat16), jaxmp.DEFAULT_OPS), []
    jax.make_jaxpr(Emitter(planner, record=found).wrap(jax.grad(loss)))(W, X)
    allowed = {
        "half": {rules.AS_WRITTEN, rules.BETWEEN, rules.STORED},
        "rounded": {rules.BETWEEN},
        "stored": {rules.STORED},
        "float32": {rules.AS_WRITTEN, rules.FLOAT32, rules.LOOPS, *rules.SAFEGUARDS},
        "inside": {rules.FLOAT32},
    }
    assert all(x.rule in allowed[x.how] for x in found)
    assert {x.rule for x in found} >= set(rules.SENTENCES) - {rules.AS_WRITTEN}


FLOAT8 = jaxmp.DEFAULT_OPS.with_fp8(min_size=16)
LARGE, ROWS = normal(2, 32, 32, scale=0.2), normal(3, 4, 16, 32)


def written_by_hand(w, x):
    """Products that the user wrote in bfloat16, with results in both dtypes."""
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    return jnp.tanh(x @ w) @ w + jnp.dot(x, w, preferred_element_type=jnp.float32)


IN_FLOAT8 = {
    "plain": lambda w, x: plain(w, x).sum(),
    "hand": lambda w, x: written_by_hand(w, x).sum(),
    "scan": lambda w, x: lax.scan(
        lambda h, x: (jnp.tanh(h @ w + x @ w), h.sum()), x[0], x
    )[0].sum(),
}


@pytest.mark.parametrize("name", IN_FLOAT8)
def test_with_float8_each_value_has_the_dtype_that_it_has_without(name):
    fun = jax.grad(IN_FLOAT8[name], (0, 1))

    def found(float8):
        steps = []
        planner = Planner(np.dtype(jnp.bfloat16), FLOAT8, float8=float8)
        emitter = Emitter(planner, record=steps)
        jaxpr = jax.make_jaxpr(emitter.wrap(fun))(LARGE, ROWS)
        products = product_dtypes(emitter.wrap(fun), LARGE, ROWS)
        told = [(str(x.eqn), x.how, x.rule) for x in steps]
        return told, jaxpr.out_avals, products

    (with_float8, without) = found(True), found(False)
    assert with_float8[:2] == without[:2]
    assert "float8_e4m3fn" in str(with_float8[2])
    assert "float8_e4m3fn" not in str(without[2])


def test_a_product_that_is_written_in_bfloat16_returns_what_it_was_written_to():
    for dtype in (jnp.bfloat16, jnp.float32):

        def fun(w, x, dtype=dtype):
            x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
            return jnp.tanh(jnp.dot(x, w, preferred_element_type=dtype)) @ LARGE

        eqns = traced(autocast(fun, "mixed_fp8", ops=FLOAT8), LARGE, ROWS)
        in_8 = [
            eqn.outvars[0].aval.dtype
            for eqn in eqns
            if eqn.primitive.name == "dot_general"
            and eqn.invars[0].aval.dtype == jnp.float8_e4m3fn
        ]
        assert in_8 == [dtype, jnp.float32]


@pytest.mark.needs_no_scale
@both_dtypes
def test_of_what_returns_several_values_the_first_may_be_stored(dtype):
    def fun(w, x):
        values, places = lax.sort([jnp.cumsum(x @ w, 0), jnp.cumsum(x, 0)])
        mixed = jax.jit(lambda x: (jax.nn.standardize(x), x.sum()))
        with jax.named_scope("norm"):
            y, total = mixed(x)
        return jnp.tanh(values @ w).sum() + (y @ w + places).sum() + total

    grad = jax.grad(fun, (0, 1))
    casts = [autocast(grad, dtype, float32_paths=paths) for paths in ((), ("norm",))]
    exact, *found = at_once(grad, *casts)(W, X)
    assert all(relative_error(one, exact) < 0.02 for one in found)


def test_tracing_takes_as_long_as_the_program_is():
    def model(n):
        def fun(w):
            h, outs = X, []
            for _ in range(n):
                h = h + jnp.tanh(h @ w)
                outs.append(h)
            return jnp.mean(sum(outs) @ w)

        return jax.value_and_grad(fun)

    def calls(n):
        with cProfile.Profile() as profile:
            jax.make_jaxpr(autocast(model(n)))(W)
        return sum(entry.callcount for entry in profile.getstats())

    short, long, longer = (calls(n) for n in (10, 20, 40))
    assert (longer - long) < 2.1 * (long - short)


def test_a_sum_is_not_rounded_before_it_is_divided():
    def fun(w, x):
        return (x @ w).mean(0) @ w

    x = jnp.full((128, 8), 1000.0)
    for program in (fun, lambda w, x: jnp.sum(x @ w, 0) * (1 / 128) @ w):
        assert jnp.isfinite(autocast(program, "float16")(jnp.eye(8), x)).all()
