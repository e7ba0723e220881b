"""States in 8 and 16 bits train as float32 ones, and are left alone as these are."""

import json
import re
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from updates import skips_without_a_trace, step_of, train

import jaxmp
from conftest import answered, bits
from jaxmp._optimizers.blocks import decode, is_blocks

PARAMS = {
    "w": jnp.asarray(np.linspace(-1, 1, 16 * 512, dtype="f4").reshape(16, 512)),
    "b": jnp.ones(512),
}
GRADS = jax.tree.map(jnp.sin, jax.tree.map(lambda p: 37 * p, PARAMS))
MOMENTUM = optax.sgd(1e-3, momentum=0.75)
GROWING = optax.chain(
    MOMENTUM,
    optax.GradientTransformation(lambda p: (), lambda u, s, p=None: (u, (*s, 1.0))),
)
INT8 = partial(jaxmp.with_state_dtype, state_dtype="int8")
FORMS = {
    "float32": (INT8, jnp.float32),
    "stochastic": (
        partial(jaxmp.stochastic_rounding, state_dtype="int8"),
        jnp.bfloat16,
    ),
    "Kahan": (
        partial(jaxmp.kahan_summation, state_dtype="int8", compensation="int8"),
        jnp.bfloat16,
    ),
}
each_form = pytest.mark.parametrize(("wrap", "dtype"), FORMS.values(), ids=FORMS)


def stored(state):
    """Returns how many arrays are stored in 8 bits."""
    return sum(map(is_blocks, jax.tree.leaves(state, is_leaf=is_blocks)))


# What is stored


def test_moments_alone_are_stored_in_8_bits():
    params = PARAMS | {"short": jnp.ones(4095), "n": jnp.arange(3), "none": None}
    params["least"] = jnp.ones((8, 512))
    state = jax.eval_shape(INT8(optax.adamw(1e-3)).init, params)
    mu = optax.tree.get(state, "mu")
    assert mu["w"].codes.shape == (16, 512)
    assert mu["w"].units.shape == (16, 2)
    assert mu["b"].dtype == mu["short"].dtype == jnp.float32
    assert stored(state) == 4
    # Another shape than a parameter's, and copies of parameters.
    big = {"w": jnp.ones((256, 256))}
    assert stored(jax.eval_shape(INT8(optax.adafactor(1e-3)).init, big)) == 0
    adafactor = optax.adafactor(1e-3, momentum=0.9)
    assert stored(jax.eval_shape(INT8(adafactor).init, big)) == 1
    free = optax.contrib.schedule_free(optax.sgd(1e-3, momentum=0.9), 1e-3)
    found = jax.eval_shape(INT8(free).init, big)
    assert found.inner_state.z["w"].dtype == jnp.float32
    assert stored(found) == 1
    assert stored(jax.eval_shape(INT8(optax.contrib.muon(1e-3)).init, big)) == 1


# What it trains


def test_a_first_state_is_compiled_at_once():
    """XLA computes with constants while it compiles, a million numbers in 40 s."""
    tx = jaxmp.with_state_dtype(optax.adam(1e-3), "int8")
    params = {"w": jax.ShapeDtypeStruct((2048, 768), jnp.float32)}
    start = time.process_time()
    jax.jit(tx.init).lower(params).compile()
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    "wrap",
    [
        INT8,
        partial(jaxmp.with_state_dtype, state_dtype="bfloat16"),
        partial(jaxmp.kahan_summation, state_dtype="bfloat16"),
    ],
    ids=["int8", "bfloat16", "Kahan"],
)
def test_the_mean_of_a_moment_is_right(wrap):
    # 1000 gradients of 1 and 2000 of 0, beside numbers that stay large.
    truth = (1 - 0.999**1000) * 0.999**2000
    params = jnp.ones((16, 256))
    tx = wrap(optax.scale_by_rms(0.999))
    large = jnp.arange(256) % 64 == 0

    def step(state, grad):
        return tx.update(jnp.where(large, 2, grad) * params, state, params)[1], None

    grads = jnp.repeat(jnp.array([1.0, 0.0]), jnp.array([1000, 2000]))
    state = jax.lax.scan(step, tx.init(params), grads)[0]
    (nu,) = jax.tree.leaves(optax.tree.get(state, "nu"), is_leaf=is_blocks)
    nu = np.asarray(decode(nu) if is_blocks(nu) else nu, float)
    assert abs(nu[:, ~large].mean() / truth - 1) < 0.02


@pytest.mark.parametrize("optimizer", [optax.adam, optax.yogi])
def test_small_gradients_beside_large_ones_make_no_large_updates(optimizer):
    # Rounded to zero, a second moment would make updates of a million learning rates,
    # also where gradients are a millionth of others in their block.
    size = 10.0 ** np.linspace(-6, 0, 256)
    rng = np.random.default_rng(0)
    grads = jnp.asarray(rng.normal(size=(100, 32, 256)) * size, jnp.float32)
    params = jnp.zeros((32, 256))

    def largest(tx):
        def step(state, grad):
            updates, state = tx.update(grad, state, params)
            return state, jnp.abs(updates).max()

        return jax.lax.scan(step, tx.init(params), grads)[1].max()

    tx = optimizer(1.0)
    assert largest(INT8(tx)) < 10 * largest(tx)


# Transformations of JAX, skipped steps, checkpoints


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="JAX fails where XLA divides unevenly"
)
@pytest.mark.parametrize("state_dtype", ["int8", "bfloat16"])
def test_each_array_of_a_state_is_rounded_by_noise_of_its_own(state_dtype):
    tx = jaxmp.with_state_dtype(MOMENTUM, state_dtype)
    params, grads = ({"a": x["w"], "b": x["w"]} for x in (PARAMS, GRADS))
    _, state = tx.update(grads, tx.init(params), params)
    found = jaxmp.cast_state(state, jaxmp.with_state_dtype(MOMENTUM, None).init(params))
    a, b = (optax.tree.get(found, "trace")[name] for name in "ab")
    assert 0.1 < jnp.mean(a != b) < 0.9
    np.testing.assert_allclose(a, b, atol=0.02)


def test_units_of_rows_that_are_too_short_for_their_devices_are_whole():
    mesh = Mesh(jax.devices(), ("x",))
    params = jax.device_put(PARAMS["w"], NamedSharding(mesh, P(None, "x")))
    tx = INT8(MOMENTUM)
    shardings = jaxmp.init_shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=shardings)(params)
    _, state = jax.jit(step_of(tx))(params, state, GRADS["w"])
    trace = optax.tree.get(state, "trace")
    assert trace.codes.sharding.is_equivalent_to(params.sharding, 2)


@each_form
def test_a_skipped_step_leaves_every_bit(wrap, dtype):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    tx = jaxmp.loss_scaling(wrap(inner), "bfloat16")
    state = skips_without_a_trace(tx, jaxmp.cast_tree(PARAMS, dtype), GRADS)
    assert stored(state) == 2


def test_a_state_changes_its_dtype_there_and_back():
    txs = {
        dtype: jaxmp.loss_scaling(
            jaxmp.with_state_dtype(optax.adam(1e-2), dtype), "mixed_bfloat16"
        )
        for dtype in (None, "bfloat16", "int8")
    }
    params, wide = train(txs[None], PARAMS, GRADS, 5)
    for dtype in ("bfloat16", "int8"):
        like = jax.eval_shape(txs[dtype].init, PARAMS)
        narrow = jaxmp.cast_state(wide, like)
        assert jax.tree.map(jnp.shape, narrow) == jax.tree.map(jnp.shape, like)
        back = jaxmp.cast_state(narrow, jax.eval_shape(txs[None].init, PARAMS))
        assert back.inner_state.steps == 5
        for name in ("mu", "nu"):
            ours, theirs = (optax.tree.get(x, name)["w"] for x in (back, wide))
            np.testing.assert_allclose(ours, theirs, atol=0.01 * abs(theirs).max())
        # What is stored in the same way is the same.
        assert bits(jaxmp.cast_state(narrow, narrow)) == bits(narrow)
        _, again = jax.jit(step_of(txs[dtype]))(params, narrow, GRADS)
        assert jax.tree.structure(again) == jax.tree.structure(like)


def test_derivatives_are_finite():
    def moved(learning_rate):
        tx = INT8(optax.sgd(learning_rate, momentum=0.5))
        updates, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
        params = optax.apply_updates(PARAMS, updates)
        updates, _ = tx.update(GRADS, state, params)
        return optax.apply_updates(params, updates)["w"].sum()

    assert np.isfinite(jax.jit(jax.grad(moved))(0.125))


@pytest.mark.evidence
@pytest.mark.parametrize("wrap", [INT8, FORMS["stochastic"][0]])
@pytest.mark.parametrize(
    "inner",
    [
        optax.lion(1e-3),
        optax.adafactor(1e-2, momentum=0.9),
        optax.contrib.muon(1e-3),
        optax.amsgrad(1e-3),
        optax.contrib.prodigy(),
        optax.contrib.schedule_free(optax.adam(1e-3), 1e-3),
        optax.MultiSteps(optax.adam(1e-3), 2),
        optax.inject_hyperparams(optax.adamw)(1e-3),
        optax.masked(optax.adam(1e-3), {"w": True, "b": False}),
    ],
)
def test_every_optimizer_trains(wrap, inner):
    params, _ = train(wrap(inner), PARAMS, GRADS, 4)
    assert jaxmp.all_finite(params)
    moved = np.abs(np.asarray(params["w"] - PARAMS["w"]))
    assert 0 < moved.max() < 1


# The page

ROOT = Path(jaxmp.__file__).parent.parent
PAGE = (ROOT / "docs" / "narrow_params.md").read_text()
# The rows of the first table, by what was counted.
COUNTED = {
    "float32 parameters": "float32 masters",
    "float32 parameters, bfloat16 state": "float32 parameters, bfloat16 state",
    "float32 parameters, int8 state": "float32 parameters, int8 state",
    "`bfloat16`, optax alone": "bfloat16, optax alone",
    "`stochastic_rounding`, float32 state": "stochastic",
    "`stochastic_rounding`, bfloat16 state": "stochastic, bfloat16 state",
    "`stochastic_rounding`, int8 state": "stochastic, int8 state",
    "`kahan_summation`, float32 state": "Kahan",
    "`kahan_summation`, bfloat16 state": "Kahan, bfloat16 state",
    "`kahan_summation`, int8 state": "Kahan, int8 state",
    "`kahan_summation`, int8 state and compensation": "Kahan in int8, int8 state",
    "`kahan_summation`, float16 (`O3`), float32 state": "Kahan, float16",
}


def table(first):
    """Returns the cells of a table by its first column."""
    rows = PAGE[PAGE.index(first) :].split("\n\n")[0].splitlines()[2:]
    cells = ([x.strip(" *") for x in row.strip("|").split("|")] for row in rows)
    return {name: values for name, *values in cells}


def results(name):
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text())


def test_the_page_says_the_bytes_that_were_counted():
    counted = {
        x["update"]: x
        for x in results("memory")["gpt-12m, bytes of each parameter"]["rows"]
    }
    rows = table("| Adam, bytes per parameter")
    assert set(rows) == set(COUNTED)
    for name, (stored, moved, _) in rows.items():
        found = counted[COUNTED[name]]
        assert float(stored) == round(found["bytes stored"], 1), name
        assert float(moved) == round(found["bytes moved"], 1), name


def test_eight_bits_of_a_large_model_are_updated_in_few_kernels():
    rows = {
        x["update"]: x
        for x in results("memory")["gpt-160m, bytes of each parameter"]["rows"]
    }
    ours = rows["stochastic, int8 state"]
    bf16 = rows["stochastic, bfloat16 state"]
    assert ours["bytes moved"] <= 14.3
    assert ours["kernels"] <= 2 * bf16["kernels"]
    page = " ".join((ROOT / "docs" / "narrow_params.md").read_text().split())
    for row in (ours, bf16):
        counted = f"{row['bytes moved']:g} bytes"
        assert re.search(rf"{counted}( a parameter)? in {row['kernels']}\b", page)


def test_the_page_says_the_losses_that_were_measured():
    experiments = (ROOT / "examples" / "README.md").read_text()
    for *_, loss in table("| Adam, bytes per parameter").values():
        assert loss in experiments


# Mistakes

F32 = jaxmp.with_state_dtype(MOMENTUM, None)
MISTAKES = r"""
INT8(MOMENTUM).init(jaxmp.cast_tree(PARAMS, jnp.bfloat16))
    `b` is bfloat16.*jaxmp\.stochastic_rounding\(
INT8(MOMENTUM).init(jaxmp.cast_tree(PARAMS, jnp.float16))
    `b` is float16.*jaxmp\.kahan_summation\(
jaxmp.stochastic_rounding(INT8(MOMENTUM), state_dtype="int8").init(PARAMS)
    Leave one of them out
INT8(MOMENTUM).update(GRADS, F32.init(PARAMS), PARAMS)
    is int8, but the state is not stored so.*jaxmp\.cast_state\(
F32.update(GRADS, INT8(MOMENTUM).init(PARAMS), PARAMS)
    stored in 8 bits, but `state_dtype` is None.*jaxmp\.cast_state\(
INT8(MOMENTUM).update(GRADS, MOMENTUM.init(PARAMS), PARAMS)
    a `StateDtypeState`, but got
jaxmp.with_state_dtype(MOMENTUM, "float16")
    must be int8, bfloat16 or None
jaxmp.with_state_dtype("int8", MOMENTUM)
    It comes first
INT8(GROWING).update(GRADS, INT8(GROWING).init(PARAMS), PARAMS)
    changes the structure of the inner optimizer's state
jaxmp.cast_state(F32.init(PARAMS), MOMENTUM.init(PARAMS))
    two states of one optimizer
jaxmp.cast_state(F32.init(PARAMS), F32.init(PARAMS | {"w": PARAMS["b"]}))
    `inner_state/0/trace/w` has the shape \[16, 512\]
"""


@answered(MISTAKES)
def test_a_mistake_is_answered(typed, answer):
    with pytest.raises((TypeError, ValueError), match=answer):
        eval(typed, globals())


def test_a_part_of_a_model_may_be_stored_in_8_bits_inside_a_wrapper():
    parts = {"w": INT8(MOMENTUM), "b": MOMENTUM}
    tx = jaxmp.kahan_summation(optax.multi_transform(parts, {"w": "w", "b": "b"}))
    params, state = train(tx, jaxmp.cast_tree(PARAMS, jnp.bfloat16), GRADS, 2)
    assert stored(state) == 1
    assert jaxmp.all_finite(params)
