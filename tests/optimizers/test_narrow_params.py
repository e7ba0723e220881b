"""Without float32 masters nothing is lost, or nothing on the average."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from updates import skips_without_a_trace, step_of, train

import jaxmp
from conftest import answered, bits, mapped
from jaxmp._optimizers import rounding as _rounding

WRAPPERS = {
    "stochastic": jaxmp.stochastic_rounding,
    "stochastic, 16-bit state": partial(
        jaxmp.stochastic_rounding, state_dtype="bfloat16"
    ),
    "Kahan": jaxmp.kahan_summation,
    "Kahan, 16-bit state": partial(jaxmp.kahan_summation, state_dtype=jnp.bfloat16),
}
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
PARAMS = {
    "w": jnp.asarray(np.arange(-8, 8).reshape(8, 2) / 8, jnp.bfloat16),
    "b": jnp.array([0.5, -0.0, 3.0]),  # float32
}
GRADS = jax.tree.map(lambda p: jnp.full(p.shape, 2.0**-6), PARAMS)


def full(params, state):
    """Returns the float32 parameters of Kahan's."""
    return jax.tree.map(_rounding.join, params, state.compensation)


# What is lost


def test_small_updates_stall_to_the_nearest_and_add_up_at_random():
    params, grads = jnp.ones(1024, jnp.bfloat16), jnp.full(1024, 1e-4)
    plain, _ = train(optax.sgd(1.0), params, grads, 1000)
    rounded, _ = train(jaxmp.stochastic_rounding(optax.sgd(1.0)), params, grads, 1000)
    assert np.all(plain == 1)
    rounded = np.asarray(rounded, float)
    # A walk of steps of one spacing, 2^-8, in a tenth of which it has moved.
    error = np.sqrt(0.1 * 2.0**-8 / 1024)
    assert abs(rounded.mean() - 0.9) < 4 * error


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_kahan_is_true_after_a_hundred_thousand_updates(dtype):
    rng = np.random.default_rng(0)
    updates = rng.normal(scale=1e-4, size=(100_000, 8)).astype(np.float32)
    tx = jaxmp.kahan_summation(optax.sgd(1.0))
    params = jnp.ones(8, dtype)

    def step(carry, update):
        return step_of(tx)(*carry, -update), None

    found, state = jax.lax.scan(step, (params, tx.init(params)), updates)[0]
    truth = 1 + updates.astype(float).sum(0)
    assert np.max(abs(full(found, state) - truth)) < 2.0**-15
    assert np.max(abs(truth - 1)) > 2.0**-7  # of which the parameters alone know little


def test_kahan_trains_as_float32_masters_bit_for_bit():
    # The gradient of what is stored, as under `mixed_bfloat16` that of a copy.
    start = jnp.linspace(-2, 2, 64, dtype=jnp.bfloat16).astype(jnp.float32)
    tx = optax.sgd(2.0**-7, momentum=0.5)  # a power of two: fused or not, the same
    kahan = jaxmp.kahan_summation(tx)

    def grad(copy):
        return jnp.sin(3 * copy.astype(jnp.float32))

    def both(carry, _):
        masters, state, params, kahan_state = carry
        copy = _rounding.split(masters, jnp.bfloat16)[0].astype(jnp.bfloat16)
        masters, state = step_of(optax.with_extra_args_support(tx))(
            masters, state, grad(copy)
        )
        params, kahan_state = step_of(kahan)(params, kahan_state, grad(params))
        return (masters, state, params, kahan_state), None

    params = start.astype(jnp.bfloat16)
    carry = start, tx.init(start), params, kahan.init(params)
    carry, _ = jax.lax.scan(both, carry, length=300)
    masters, _, params, state = carry
    assert bits(full(params, state)) == bits(masters)
    assert np.max(abs(masters - start)) > 1e-2


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_apply_updates_makes_what_was_rounded(dtype):
    # Of parameters of any size, updates of any size, and such as cancel.
    rng = np.random.default_rng(0)
    params = np.arange(2**16, dtype=np.uint16).view(dtype)
    params = params[np.isfinite(params.astype(np.float32))]
    if dtype != np.float16:  # whose largest sums overflow, and subnormal ones are zeros
        size = abs(params.astype(np.float32))
        params = params[(size > 2.0**-90) & (size < 2.0**110)]
    wide = params.astype(np.float32)
    size = 2.0 ** rng.integers(-30, 10, params.shape)
    tx = jaxmp.kahan_summation(optax.sgd(-1.0))
    step = jax.jit(step_of(tx))
    for updates in (
        np.float32(rng.normal(size=params.shape)),
        wide * np.float32(size),
        -wide * np.float32(1 + rng.normal(size=params.shape) / 2**20),
        -wide,
        np.nextafter(-wide, np.float32(0)),
    ):
        made, state = step(params, tx.init(params), updates)
        expected, rest = _rounding.split(wide + updates, dtype)
        expected = np.asarray(expected.astype(dtype), np.float32)
        np.testing.assert_array_equal(np.asarray(made, np.float32), expected)
        np.testing.assert_array_equal(state.compensation, rest)


def test_inf_and_nan_stay():
    params = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1, 1], jnp.bfloat16)
    grads = jnp.array([1, 1, 1, jnp.inf, jnp.nan])
    for wrapper in ("stochastic", "Kahan"):
        tx = WRAPPERS[wrapper](optax.sgd(1.0))
        made, _ = jax.jit(step_of(tx))(params, tx.init(params), grads)
        expected = [jnp.inf, -jnp.inf, jnp.nan, -jnp.inf, jnp.nan]
        np.testing.assert_array_equal(np.asarray(made, float), expected)


# What the optimizer sees, and what is stored


def test_inner_sees_float32_alone():
    seen = []

    def update(updates, state, params, **extra_args):
        seen.append((updates, state, params, sorted(extra_args)))
        return updates, state

    def init(params):
        seen.append(params)
        return {"moment": params, "scalar": jnp.float32(0), "count": jnp.arange(3)}

    inner = optax.GradientTransformationExtraArgs(init, update)
    params = {**PARAMS, "none": None, "count": jnp.arange(2)}
    grads = {**jaxmp.cast_tree(GRADS, "float16"), "none": None, "count": jnp.arange(2)}
    for wrap in WRAPPERS.values():
        tx = wrap(inner)
        state = tx.init(params)
        jax.eval_shape(partial(tx.update, value=1.0), grads, state, params)
    dtypes = {x.dtype for x in jax.tree.leaves([x[:3] for x in seen[1::2]])}
    assert dtypes == {np.dtype("float32"), np.dtype("int32")}
    assert all(x[3] == ["value"] for x in seen[1::2])
    narrow = state.inner_state
    assert narrow["moment"]["w"].dtype == narrow["moment"]["b"].dtype == jnp.bfloat16
    assert narrow["scalar"].dtype == jnp.float32
    assert narrow["count"].dtype == jnp.int32


INT8 = partial(jaxmp.with_state_dtype, state_dtype="int8")
KAHAN8 = partial(jaxmp.kahan_summation, state_dtype="int8")


@pytest.mark.parametrize(
    ("wrap", "dtype", "bytes_each"),
    [
        (WRAPPERS["stochastic"], "bfloat16", 10),
        (WRAPPERS["stochastic, 16-bit state"], "bfloat16", 6),
        (WRAPPERS["Kahan"], "bfloat16", 12),
        (WRAPPERS["Kahan, 16-bit state"], "bfloat16", 8),
        (WRAPPERS["Kahan"], "float16", 12),
        (WRAPPERS["stochastic, 16-bit state"], "float32", 8),
        (WRAPPERS["Kahan, 16-bit state"], "float32", 8),
        (WRAPPERS["Kahan"], "float32", 12),
        (INT8, "float32", 6.02),
        (partial(jaxmp.with_state_dtype, state_dtype="bfloat16"), "float32", 8),
        (partial(jaxmp.stochastic_rounding, state_dtype="int8"), "bfloat16", 4.02),
        (KAHAN8, "bfloat16", 6.02),
        (partial(KAHAN8, compensation="int8"), "bfloat16", 5.02),
    ],
)
def test_bytes_of_a_parameter_with_adam(wrap, dtype, bytes_each):
    params = jax.ShapeDtypeStruct((1024, 1024), dtype)
    state = jax.eval_shape(wrap(optax.adam(1e-3)).init, params)
    stored = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, state)))
    assert round(stored / 2**20, 2) == bytes_each


@pytest.mark.parametrize("wrapper", ["stochastic", "Kahan"])
def test_float32_parameters_are_those_of_inner_bit_for_bit(wrapper):
    params, inner = jaxmp.cast_tree(PARAMS, "float32"), optax.adamw(0.125)
    ours, state = train(WRAPPERS[wrapper](inner), params, GRADS, 5)
    alone, alone_state = train(optax.with_extra_args_support(inner), params, GRADS, 5)
    assert bits(ours) == bits(alone)
    assert bits(state.inner_state) == bits(alone_state)


@each_wrapper
def test_the_state_is_one_structure_for_every_dtype(wrap):
    tx = wrap(optax.adamw(1e-3))
    structures = {
        jax.tree.structure(jax.eval_shape(tx.init, jaxmp.cast_tree(PARAMS, dtype)))
        for dtype in ("float32", "bfloat16")
    }
    assert len(structures) == 1


def test_updates_have_the_derivatives_of_inner():
    # As whoever learns a learning rate needs them.
    def moved(learning_rate):
        total = 0.0
        for dtype in (jnp.bfloat16, jnp.float16):
            params = jnp.ones(2, dtype)
            for wrapper in ("stochastic", "Kahan")[dtype == jnp.float16 :]:
                tx = WRAPPERS[wrapper](optax.sgd(learning_rate))
                updates, state = tx.update(
                    jnp.array([1.0, 3.0]), tx.init(params), params
                )
                again = optax.apply_updates(params, updates)
                updates, _ = tx.update(jnp.array([1.0, 3.0]), state, again)
                total += optax.apply_updates(again, updates).astype(jnp.float32).sum()
        return total

    assert jax.jit(jax.grad(moved))(0.125) == 3 * 2 * -4


# Composition

INNERS = {
    "chain": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.linear_schedule(0.5, 0.125, 4), weight_decay=0.5),
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(0.25),
    "adafactor": optax.adafactor(0.25, min_dim_size_to_factor=2),
}
ALL_IN_ONE = optax.MultiSteps(
    optax.multi_transform(
        {
            "adam": optax.chain(optax.clip(1.0), INNERS["inject_hyperparams"]),
            "adafactor": INNERS["adafactor"],
        },
        {"w": "adafactor", "b": "adam"},
    ),
    2,
)


@pytest.mark.parametrize(
    "tx",
    [
        jaxmp.dynamic_loss_scale(WRAPPERS["Kahan, 16-bit state"](ALL_IN_ONE)),
        jaxmp.loss_scaling(
            WRAPPERS["stochastic, 16-bit state"](INNERS["chain"]), "bfloat16"
        ),
    ],
    ids=["Kahan", "stochastic"],
)
def test_a_skipped_step_leaves_no_trace(tx):
    skips_without_a_trace(tx, PARAMS, GRADS)


def test_the_loss_scale_may_be_inside_and_is_found():
    inner = jaxmp.loss_scaling(INNERS["chain"], "float16")
    tx = WRAPPERS["Kahan, 16-bit state"](inner)
    step = jax.jit(step_of(tx))
    params, state = step(PARAMS, tx.init(PARAMS), GRADS)
    bad = jax.tree.map(lambda g: g * jnp.nan, GRADS)
    after, skipped = step(params, state, bad)
    assert bits((after, skipped.compensation)) == bits((params, state.compensation))
    inner_states = [x.inner_state.inner_state for x in (skipped, state)]
    assert bits(inner_states[0]) == bits(inner_states[1])
    assert jaxmp.get_loss_scale(skipped) == 2.0**14


# Transformations of JAX

MOMENTUM = optax.sgd(1e-3, momentum=0.75)  # whose program is smaller than Adam's
TX = jaxmp.stochastic_rounding(MOMENTUM, state_dtype="bfloat16")
KAHAN = jaxmp.kahan_summation(MOMENTUM, state_dtype="bfloat16")
# All in one program, which compiles faster than several.
TXS = {
    "at random": TX,
    "Kahan": KAHAN,
    "at random, int8": jaxmp.stochastic_rounding(MOMENTUM, state_dtype="int8"),
    "Kahan, int8": jaxmp.kahan_summation(
        MOMENTUM, state_dtype="int8", compensation="int8"
    ),
}
MATRIX = jnp.asarray(np.linspace(-1, 1, 2**13).reshape(16, 512), jnp.bfloat16)
ALL = {name: {"w": MATRIX, "b": PARAMS["b"]} for name in TXS}


def update_all(grads, state, params, **extra_args):
    results = {
        name: tx.update(grads[name], state[name], params[name])
        for name, tx in TXS.items()
    }
    return tuple({name: r[i] for name, r in results.items()} for i in range(2))


TOGETHER = optax.GradientTransformationExtraArgs(
    lambda params: {name: tx.init(params[name]) for name, tx in TXS.items()}, update_all
)
ALL_GRADS = jax.tree.map(lambda p: jnp.sin(37.0 * p.astype(jnp.float32)), ALL)


def three(step, params, state, grads=ALL_GRADS):
    """Returns parameters and state after three steps."""
    for _ in range(3):
        params, state = step(params, state, grads)
    return params, state


@pytest.fixture(scope="module")
def trained():
    return three(jax.jit(step_of(TOGETHER)), ALL, TOGETHER.init(ALL))


def test_steps_scan_and_both_arguments_are_donated(trained):
    assert bits(train(TOGETHER, ALL, ALL_GRADS, 3)) == bits(trained)
    step = jax.jit(step_of(TOGETHER), donate_argnums=(0, 1))
    params, state = jax.tree.map(jnp.copy, (ALL, TOGETHER.init(ALL)))
    for _ in range(3):
        given = jax.tree.leaves((params, state))
        params, state = step(params, state, ALL_GRADS)
        assert all(x.is_deleted() for x in given)
    assert step._cache_size() == 1
    assert bits((params, state)) == bits(trained)


def test_replicas_of_vmap_are_the_same_as_one(trained):
    stacked = jax.tree.map(lambda x: jnp.stack([x] * 3), (ALL, TOGETHER.init(ALL)))
    step = jax.jit(jax.vmap(step_of(TOGETHER), (0, 0, None)))
    stacked = three(step, *stacked)
    first, *others = (jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(3))
    assert all(bits(other) == bits(first) for other in others)
    # Another program, with other fusions, by which codes of 8 bits may differ.
    for name in ("at random", "Kahan"):
        found, expected = ([x[name] for x in part] for part in (first, trained))
        chex.assert_trees_all_close(found, expected, rtol=2.0**-7, atol=1e-5)


def test_sharding_changes_no_bit(trained):
    mesh = jax.make_mesh((4, 2), ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)

    def sharding(x):
        return NamedSharding(mesh, P("rows", "columns") if x.ndim == 2 else P())

    params = jax.device_put(ALL, jax.tree.map(sharding, ALL))
    grads = jax.device_put(ALL_GRADS, jax.tree.map(sharding, ALL))
    with jax.set_mesh(mesh):
        shardings = {
            name: jaxmp.init_shardings(tx, params[name]) for name, tx in TXS.items()
        }
        state = jax.jit(TOGETHER.init, out_shardings=shardings)(params)
        params, state = three(jax.jit(step_of(TOGETHER)), params, state, grads)
    compensation = state["Kahan"].compensation
    for x in (params["Kahan"], compensation, optax.tree.get(state["Kahan"], "trace")):
        assert x["w"].sharding.is_equivalent_to(sharding(MATRIX), 2)
    for part in optax.tree.get(state["Kahan, int8"], "trace")["w"]:
        assert part.sharding.is_equivalent_to(sharding(MATRIX), 2)
    assert bits((params, state)) == bits(trained)


def test_replicas_of_shard_map_stay_the_same(trained):
    def step(params, state, rows):
        grads = jax.tree.map(lambda g: g * rows.sum(), ALL_GRADS)
        return train(TOGETHER, params, jax.lax.pmean(grads, "data"), 3)

    step = mapped(step, Mesh(jax.devices()[:4], "data"), (P(), P(), P("data")), P())
    found = jax.jit(step)(ALL, TOGETHER.init(ALL), jnp.ones(4))
    assert bits(found) == bits(trained)


def test_an_autocast_around_the_whole_step_leaves_it_alone(trained):
    step = jax.jit(jaxmp.autocast(step_of(TOGETHER), "bfloat16"))
    assert bits(three(step, ALL, TOGETHER.init(ALL))) == bits(trained)


@pytest.mark.parametrize("tx", [TX, KAHAN], ids=["stochastic", "Kahan"])
def test_tracing_takes_little_longer(tx):
    params = {str(i): jnp.zeros((8, 8), jnp.bfloat16) for i in range(32)}

    def lines(tx):
        lowered = jax.jit(step_of(tx)).lower(params, tx.init(params), params)
        return len(lowered.as_text().splitlines())

    assert lines(tx) < 3 * lines(optax.with_extra_args_support(optax.adam(1e-3)))


# Libraries


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_orbax_resumes_bit_for_bit_and_on_other_devices(trained, tmp_path):
    step = jax.jit(step_of(TOGETHER))
    saved = step(ALL, TOGETHER.init(ALL), ALL_GRADS)
    rows = Mesh(jax.devices()[:4], ("rows",))
    put = {"w": NamedSharding(rows, P("rows")), "b": NamedSharding(rows, P())}
    there = {name: jax.device_put(params, put) for name, params in ALL.items()}
    shardings = (
        dict.fromkeys(TXS, put),
        {name: jaxmp.init_shardings(tx, there[name]) for name, tx in TXS.items()},
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "1", saved)
        checkpointer.wait_until_finished()
        target = jax.eval_shape(lambda p: (p, TOGETHER.init(p)), ALL)
        here = checkpointer.restore(tmp_path / "1", target)
        target = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            target,
            shardings,
        )
        elsewhere = checkpointer.restore(tmp_path / "1", target)
    for _ in range(2):
        here = step(*here, ALL_GRADS)
        elsewhere = step(*elsewhere, jax.device_put(ALL_GRADS, shardings[0]))
    assert bits(here) == bits(trained)
    assert bits(elsewhere) == bits(trained)


def test_an_nnx_optimizer_trains_and_skips():
    tx = jaxmp.loss_scaling(TX, "bfloat16")
    net = nnx.Linear(3, 2, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
    grads = nnx.state(net, nnx.Param)
    before = bits(nnx.to_pure_dict(nnx.state(net)))
    step = nnx.jit(lambda net, optimizer, grads: optimizer.update(net, grads))
    step(net, optimizer, jax.tree.map(lambda g: g * jnp.nan, grads))
    assert bits(nnx.to_pure_dict(nnx.state(net))) == before
    step(net, optimizer, jax.tree.map(jnp.ones_like, grads))
    assert bits(nnx.to_pure_dict(nnx.state(net))) != before
    assert net.kernel[...].dtype == jnp.bfloat16
    assert jaxmp.get_loss_scale_state(optimizer).skipped == 1


def test_every_policy_trains_the_same_program():
    # Steps of 2^-13, of which float16 keeps half near 1 and bfloat16 none.
    target = jnp.linspace(0.75, 1.25, 32)
    results, structures = {}, set()
    for name in ("mixed_bfloat16", "bfloat16", "O3"):
        policy = jaxmp.get_policy(name)
        tx = jaxmp.loss_scaling(jaxmp.kahan_summation(optax.adam(2.0**-13)), policy)
        params = policy.cast_to_param({"w": jnp.ones(32)})

        def loss_fn(params):
            return jnp.square(params["w"].astype(jnp.float32) - target).sum()

        def step(carry, _, tx=tx, policy=policy, loss_fn=loss_fn):
            params, state = carry
            grad_fn = jaxmp.value_and_grad(loss_fn, loss_scale=state)
            _, grads = jaxmp.autocast(grad_fn, policy)(params)
            return step_of(tx)(params, state, grads), None

        carry = params, tx.init(params)
        (params, state), _ = jax.lax.scan(step, carry, length=1000)
        structures.add(jax.tree.structure(state))
        assert params["w"].dtype == policy.param_dtype
        results[name] = float(loss_fn(params))
    assert len(structures) == 1
    start = float(jnp.square(1 - target).sum())
    assert all(result < start / 4 for result in results.values()), results
    assert max(results.values()) < 1.1 * min(results.values()) + 1e-3, results


# Mistakes

F16 = {"layer": {"w": jnp.ones(3, jnp.float16)}}
F8 = {"w": jnp.ones(3, jnp.float8_e4m3fn)}
SGD = optax.sgd(1.0)
BEFORE_ANOTHER = optax.masked(optax.chain(TX, optax.scale(0.5)), {"w": True, "b": True})
MISTAKES = r"""
jaxmp.stochastic_rounding(SGD).init(F16)
    `layer/w` is float16\. Use `jaxmp\.kahan_summation`
jaxmp.kahan_summation(SGD).init(F8)
    `w` is float8_e4m3fn
TX.update(GRADS, TX.init(PARAMS))
    `tx.update\(grads, opt_state, params\)`
TX.update(GRADS, KAHAN.init(PARAMS), PARAMS)
    a `StochasticRoundingState`, but got
KAHAN.update(GRADS, KAHAN.init(jaxmp.cast_tree(PARAMS, "float32")), PARAMS)
    bfloat16\[8, 2\] has a compensation of the shape \[\].*cast_to_param
jaxmp.stochastic_rounding(SGD, state_dtype="mixed_bfloat16")
    `mixed_bfloat16` in `state_dtype`
jaxmp.kahan_summation(SGD, state_dtype="float16")
    must be int8, bfloat16 or None, but is float16
jaxmp.stochastic_rounding(SGD, seed=jax.random.key(0))
    `seed` must be an integer
jaxmp.stochastic_rounding(SGD, seed=0.5)
    `seed` must be an integer, but is 0.5
jaxmp.kahan_summation(optax.adam)
    Call it, with its options: `adam\(1e-3\)`
jaxmp.kahan_summation("bfloat16")
    It comes first: `jaxmp\.kahan_summation\(
jaxmp.stochastic_rounding(optax.chain(SGD, KAHAN)).init(PARAMS)
    Wrap the optimizer once
jaxmp.loss_scaling(BEFORE_ANOTHER, "bfloat16").init(PARAMS)
    `jaxmp\.kahan_summation\(optax\.chain\(\.\.\.\)\)`
jaxmp.loss_scaling(optax.contrib.schedule_free(TX, 0.5), "bfloat16").init(PARAMS)
    `optax\.contrib\.schedule_free` is around
"""


@answered(MISTAKES)
def test_a_mistake_is_answered(typed, answer):
    with pytest.raises((TypeError, ValueError), match=answer):
        eval(typed, globals())


def test_the_end_of_a_chain_is_the_right_place():
    tx = optax.chain(optax.clip(1.0), optax.chain(optax.clip(1.0), TX))
    jaxmp.loss_scaling(tx, "bfloat16").init(PARAMS)
