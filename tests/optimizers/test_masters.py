"""What 16-bit parameters and their compensation stand for can be read, and set."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxmp
from conftest import answered, bits, usually_bfloat16
from jaxmp._optimizers import rounding as _rounding

KAHAN = {
    dtype: lambda tx, dtype=dtype: jaxmp.kahan_summation(tx, compensation=dtype)
    for dtype in ("int16", "int8")
}
PARAMS = {"w": jnp.linspace(-2, 2, 64, dtype=jnp.bfloat16), "b": jnp.ones(3)}
FLOATS = {"w": jnp.linspace(-2, 2, 64) + 2.0**-14, "b": jnp.arange(3.0)}


def apply(tx, params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_masters_are_what_a_float32_optimizer_has(dtype):
    tx = optax.chain(optax.clip(1.0), KAHAN["int16"](optax.sgd(1.0)))
    tx = jaxmp.loss_scaling(tx, dtype)
    params = {"w": jnp.ones(64, dtype), "b": jnp.ones(3)}
    state, wide = tx.init(params), {"w": jnp.ones(64), "b": jnp.ones(3)}
    rng = np.random.default_rng(0)
    for _ in range(20):
        grads = {"w": np.float32(rng.normal(size=64)) / 512, "b": jnp.ones(3)}
        params, state = apply(tx, params, state, grads)
        wide = jax.tree.map(lambda p, g: p - jnp.float32(g), wide, grads)
    found = jax.jit(jaxmp.masters)(params, state)
    assert bits(found) == bits(wide)
    assert np.any(found["w"] != params["w"].astype(jnp.float32))


@pytest.mark.parametrize("compensation", KAHAN)
def test_masters_go_there_and_back(compensation):
    tx = KAHAN[compensation](optax.adam(1e-3))
    params, state = jaxmp.set_masters(FLOATS, PARAMS, tx.init(PARAMS))
    found = jaxmp.masters(params, state)
    if compensation == "int16":
        assert bits(params["w"]) == bits(FLOATS["w"].astype(jnp.bfloat16))
        assert bits(found) == bits(FLOATS)
    np.testing.assert_allclose(found["w"], FLOATS["w"], rtol=2.0**-16)
    again = jaxmp.set_masters(found, params, state)
    assert bits(again) == bits((params, state))
    _, after = apply(tx, params, state, FLOATS)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


def test_with_a_compensation_of_8_bits_a_binade_is_exact_to_two_to_the_minus_16():
    # Some of each 256 that share what is stored, with any last digits.
    binade = np.arange(0, 2**23, 17, np.uint32) + np.float32(1).view(np.uint32)
    x = binade.view(np.float32)
    for sign in (1, -1):
        stored, rest = _rounding.split(jnp.asarray(sign * x), jnp.bfloat16, jnp.int8)
        assert rest.dtype == jnp.int8
        joined = np.asarray(_rounding.join(stored.astype(jnp.bfloat16), rest))
        assert np.all(abs(joined.astype(float) - sign * x) <= 2.0**-16 * x)
        # The digits that there are, are all used.
        assert len(np.unique(joined)) == 2**15 + 1


@usually_bfloat16
def test_no_small_update_is_lost_with_a_compensation_of_8_bits(dtype):
    # 2^-20, of which a bfloat16 number and 8 bits know 2^-15, and a float16 one 2^-17.
    tx = KAHAN["int8"](optax.sgd(2.0**-20))
    params = jnp.ones(4096, dtype)

    def step(carry, _):
        return apply(tx, *carry, -jnp.ones(4096)), None

    (params, state), _ = jax.lax.scan(step, (params, tx.init(params)), length=2000)
    found = np.asarray(jaxmp.masters(params, state), float) - 1
    error = np.sqrt(2000 * 2.0**-20 * 2.0**-15 / 4096)
    assert abs(found.mean() - 2000 * 2.0**-20) < 4 * error


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_a_compensation_of_8_bits_rounds_to_a_neighbour_and_never_to_inf(dtype):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2**32, 2**18, np.uint32).view(np.float32)
    x = x[np.isfinite(x)]
    seeds = _rounding.noise_seeds(0, jnp.uint32(0))
    stored, rest = _rounding.split_stochastically(x, dtype, seeds, np.uint32(0))
    joined = np.asarray(_rounding.join(stored.astype(dtype), rest))
    limit = float(ml_dtypes.finfo(dtype).max)
    normal = (abs(x) < limit) & (abs(x) > 2.0**-14)
    relative = 2.0**-15 if dtype == ml_dtypes.bfloat16 else 2.0**-17
    assert np.all(abs(joined - x)[normal] <= relative * abs(x)[normal])


def test_without_a_compensation_it_says_what_it_returns():
    for tx in (jaxmp.stochastic_rounding(optax.adam(1e-3)), optax.adam(1e-3)):
        with pytest.warns(UserWarning, match=r"1 of 2 parameters.*kahan_summation"):
            found = jaxmp.masters(PARAMS, tx.init(PARAMS))
        assert bits(found) == bits(jaxmp.cast_tree(PARAMS, jnp.float32))
        params, _ = jaxmp.set_masters(FLOATS, PARAMS, tx.init(PARAMS))
        assert bits(params) == bits({**FLOATS, "w": FLOATS["w"].astype(jnp.bfloat16)})
    # Float32 parameters are masters.
    assert bits(jaxmp.masters(FLOATS, optax.adam(1e-3).init(FLOATS))) == bits(FLOATS)


def test_parts_of_a_model_may_have_it_alone():
    parts = {"kahan": KAHAN["int8"](optax.sgd(1.0)), "plain": optax.sgd(1.0)}
    tx = optax.multi_transform(parts, {"w": "kahan", "b": "plain"})
    params, state = jaxmp.set_masters(FLOATS, PARAMS, tx.init(PARAMS))
    found = jaxmp.masters(params, state)
    np.testing.assert_allclose(found["w"], FLOATS["w"], rtol=2.0**-16)
    assert bits(found["b"]) == bits(FLOATS["b"])


def test_an_nnx_optimizer_has_masters():
    from flax import nnx

    net = nnx.Linear(3, 2, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    optimizer = nnx.Optimizer(net, KAHAN["int16"](optax.sgd(1e-3)), wrt=nnx.Param)
    params = nnx.state(net, nnx.Param)
    start = np.asarray(net.kernel[...], np.float32)
    optimizer.update(net, jax.tree.map(jnp.ones_like, params))
    found = jaxmp.masters(nnx.state(net, nnx.Param), optimizer.opt_state)
    moved = np.asarray(nnx.to_pure_dict(found)["kernel"]) - start
    np.testing.assert_allclose(moved, -1e-3, rtol=1e-3)


STATE = KAHAN["int16"](optax.sgd(1.0)).init(PARAMS)
MISTAKES = r"""
jaxmp.masters({"v": PARAMS["w"]}, STATE)
    compensation \[64\] of `w`, and there is no such
jaxmp.masters({"w": PARAMS["w"][:8]}, STATE)
    compensation \[64\] of `w`, and there is no such
jaxmp.masters(FLOATS, STATE)
    no such 16-bit parameter
jaxmp.set_masters({"w": FLOATS["w"]}, PARAMS, STATE)
    one structure
KAHAN["int8"](optax.sgd(1.0)).update(FLOATS, STATE, PARAMS)
    is int16, but `compensation` is int8.*set_masters
jaxmp.kahan_summation(optax.sgd(1.0), compensation="bfloat16")
    must be int16 or int8, but is 'bfloat16'
"""


@answered(MISTAKES)
def test_a_mistake_is_answered(typed, answer):
    with pytest.raises(ValueError, match=answer):
        eval(typed, globals())
