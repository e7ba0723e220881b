"""Loss scales: their numbers, their options, their state, and where it is found."""

import re
from functools import partial
from typing import NamedTuple

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxmp
import jaxmp.nnx
from conftest import bits, crossed

MAX = float(jnp.finfo(jnp.float32).max)
TINY = float(jnp.finfo(jnp.float32).tiny)
RANGE_IS_WIDE = ["mixed_bfloat16", "mixed_float16_bfloat16", "mixed_fp8", "float32"]
POLICIES = ["mixed_float16", *RANGE_IS_WIDE, "O2", "O3"]


def run(tx, finite, state=None):
    """Scans over good and bad steps, and returns the stacked states."""
    poison = np.resize(np.float32([np.nan, np.inf, -np.inf]), len(finite))
    grads = np.where(np.asarray(finite, bool), np.float32(1), poison)

    def step(state, grad):
        _, state = tx.update(grad, state)
        return state, state

    start = tx.init(jnp.zeros([])) if state is None else state
    return jax.lax.scan(step, start, grads)[1]


def scales(tx, finite):
    return run(tx, finite).loss_scale.tolist()


dynamic = partial(jaxmp.dynamic_loss_scale, optax.sgd(1.0))


# The numbers


def reference(finite, good, bad, **rules):
    """The rules in plain Python; only the products are rounded to float32."""
    rules = {name: np.float32(value) for name, value in rules.items()}
    scale, skipped = rules["init_scale"], 0
    for ok in finite:
        if ok:
            good, bad = good + 1, 0
            if good >= rules["growth_interval"]:
                scale = min(scale * rules["growth_factor"], rules["max_scale"])
                good = 0
        else:
            good, bad, skipped = 0, bad + 1, skipped + 1
            if bad >= rules["hysteresis"]:
                scale = max(scale * rules["backoff_factor"], rules["min_scale"])
        yield scale, good, bad, skipped, ok


any_rules = given(
    finite=st.lists(st.booleans(), min_size=1, max_size=40),
    restored=st.tuples(st.integers(0, 9), st.integers(0, 4)),
    bounds=st.tuples(*[st.sampled_from([TINY, 1e-3, 1, 3, 2**15, 1e9, MAX])] * 3),
    growth=st.sampled_from([2.0, 1.5, 4, 1e6, 1e38]),
    backoff=st.sampled_from([0.5, 0.25, 0.7, 1e-6, 1e-30]),
    interval=st.integers(1, 5),
    wait=st.integers(1, 3),
)


@settings(max_examples=12)
@any_rules
def test_every_step_follows_the_rules(**drawn):
    follow_the_rules(**drawn)


def follow_the_rules(finite, restored, bounds, growth, backoff, interval, wait):
    low, init, high = sorted(bounds)
    rules = {
        "init_scale": init,
        "min_scale": low,
        "max_scale": high,
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
        "hysteresis": wait,
    }
    good, bad = restored
    tx = dynamic(**rules)
    state = tx.init(jnp.zeros([]))
    state = state._replace(good_steps=jnp.int32(good), bad_steps=jnp.int32(bad))
    update = jax.jit(tx.update)
    with np.errstate(over="ignore", under="ignore"):
        for expected in reference(finite, good, bad, **rules):
            _, state = update(jnp.float32(1 if expected[-1] else np.nan), state)
            assert tuple(x.item() for x in state[:-1]) == expected
            assert np.float32(low) <= state.loss_scale <= np.float32(high)


def test_the_defaults_grow_on_the_2000th_finite_step():
    # As PyTorch; Flax's DynamicScale grows on the 2001st.
    states = run(dynamic(), [True] * 4000)
    grown = np.flatnonzero(np.diff(states.loss_scale, prepend=2.0**15))
    assert grown.tolist() == [1999, 3999]
    assert states.loss_scale[-1] == 2.0**17
    assert states.good_steps[1998:2001].tolist() == [1999, 0, 1]


def test_the_default_bounds_keep_gradients():
    # Flax's default minimum is 1e-38, where gradients become 0.
    assert scales(dynamic(), [False] * 40)[-1] == 2.0**-5
    assert scales(dynamic(growth_interval=1), [True] * 40)[-1] == 2.0**24


def test_counters_do_not_wrap_around():
    tx = dynamic(growth_interval=2**31 - 1)
    full = jnp.int32(2**31 - 1)
    state = tx.init(jnp.zeros([]))._replace(bad_steps=full, skipped=full)
    states = run(tx, [False, False], state)
    assert states.bad_steps.tolist() == states.skipped.tolist() == [full, full]


class Target(NamedTuple):
    """All that a step may compute outside the optimizer, in the dtypes there are."""

    mean: jax.Array
    narrow: jax.Array
    queue: tuple
    key: jax.Array
    nothing: None
    activation: object  # of an Equinox module


def targets():
    old = Target(
        mean=jnp.array([0.5, -0.0]),
        narrow=jnp.array(0.5, jnp.bfloat16),
        queue=(jnp.arange(3), jnp.array(True)),
        key=jax.random.key(0),
        nothing=None,
        activation=jax.nn.relu,
    )
    new = old._replace(
        mean=jnp.array([jnp.inf, jnp.nan]),
        narrow=jnp.array(jnp.inf, jnp.bfloat16),
        queue=(jnp.arange(3) + 1, jnp.array(False)),
        key=jax.random.key(1),
    )
    return new, old


# A finite step and a skipped one, of each kind of wrapper.
@crossed(
    "where policy grad",
    ["state", "chain", "train state", "donated"],
    ["float16", "bfloat16", "float32"],
    [1.0, jnp.inf, jnp.nan],
)
def test_what_is_kept_is_the_new_or_the_old_bit_for_bit(policy, grad, where):
    tx = jaxmp.loss_scaling(optax.adam(0.1), policy)
    new, old = targets()
    params, grads = {"w": jnp.ones(2)}, {"w": jnp.array([1.0, grad])}
    if where == "chain":
        tx = optax.chain(optax.identity(), tx)
    opt_state = tx.update(grads, tx.init(params), params)[1]
    if where == "train state":
        opt_state = TrainState.create(
            apply_fn=None, params=params, tx=tx
        ).apply_gradients(grads=grads)
    kept = jaxmp.keep_if_skipped(opt_state, new, old)
    if where == "donated":
        arrays = lambda t: t._replace(activation=None)  # noqa: E731
        keep = jax.jit(jaxmp.keep_if_skipped, donate_argnums=2)
        kept = keep(opt_state, arrays(new), arrays(old))
        kept = kept._replace(activation=jax.nn.relu)
    new, old = targets()
    assert bits(kept) == bits(new if jnp.isfinite(grad) else old)


def test_in_a_scan_and_on_many_devices_what_is_kept_has_one_type():
    tx = dynamic(axis_name="data")
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
    spec = jax.sharding.PartitionSpec

    def step(carry, x):
        mean, state = carry
        _, state = tx.update(jax.lax.pmean(x.mean(), "data"), state)
        new = 0.5 * mean + 0.5 * jax.lax.pmean(x.mean(), "data")
        mean = jaxmp.keep_if_skipped(state, new, mean)
        return (mean, state), mean

    def run(x):
        return jax.lax.scan(step, (jnp.float32(1), tx.init(jnp.zeros([]))), x)[1]

    x = jnp.stack([jnp.full(4, x) for x in (3.0, 0.0, 3.0)]).at[1, 2].set(jnp.nan)
    run = jax.shard_map(run, mesh=mesh, in_specs=spec(None, "data"), out_specs=spec())
    assert jax.jit(run)(x).tolist() == [2.0, 2.0, 2.5]


def test_what_cannot_be_kept_is_explained():
    tx = dynamic()
    state, stats = tx.init(jnp.zeros([])), {"bn": {"mean": jnp.ones(2)}}

    def keep(new, state=state):
        return jaxmp.keep_if_skipped(state, new, stats)

    with pytest.raises(ValueError, match=r"must hold a loss scale.*`jaxmp.loss"):
        keep(stats, optax.adam(0.1).init(jnp.zeros([])))
    with pytest.raises(ValueError, match="one loss scale, but holds 2"):
        keep(stats, (state, state))
    with pytest.raises(ValueError, match="is the optimizer"):
        keep(stats, tx)
    with pytest.raises(ValueError, match="`keep_if_skipped` needs two trees of the sa"):
        keep({"bn": {}})
    with pytest.raises(
        ValueError,
        match=r"`bn/mean` is float16\[2\] in `new` and float32\[2\] in `old`",
    ):
        keep(jaxmp.cast_tree(stats, "float16"))
    with pytest.raises(TypeError, match=r"`bn/mean` is .a. in `new`.*eqx.filter"):
        keep({"bn": {"mean": "a"}})


# Static scales, and one call for every policy


@pytest.mark.parametrize("scale", [1, 8.0, np.float32(2.0**15), TINY, MAX])
def test_a_static_scale_stays_and_still_skips(scale):
    tx = jaxmp.static_loss_scale(optax.sgd(1.0), scale)
    states = run(tx, [1, 0, 0, 1])
    assert states.loss_scale.tolist() == [scale] * 4
    assert states.last_finite.tolist() == [True, False, False, True]
    assert states.bad_steps.tolist() == [0, 1, 2, 0]
    assert states.skipped.tolist() == [0, 1, 2, 2]


def test_every_policy_has_the_same_state():
    params = {"w": jnp.ones(2)}
    states = [jaxmp.loss_scaling(optax.adam(1.0), p).init(params) for p in POLICIES]
    for state in states:
        chex.assert_trees_all_equal_shapes_and_dtypes(state, states[0])
        dtypes = [x.dtype for x in state[:-1]]
        assert dtypes == [jnp.float32, *[jnp.int32] * 3, jnp.bool_]
        assert not any(x.weak_type or x.shape for x in state[:-1])


@pytest.mark.parametrize("policy", POLICIES)
def test_one_call_with_options_serves_every_policy(policy):
    options = {"init_scale": 8, "growth_interval": 2, "hysteresis": 2}
    expected = [1.0] * 4 if policy in RANGE_IS_WIDE else [8.0, 16.0, 16.0, 8.0]
    tx = jaxmp.loss_scaling(optax.sgd(1.0), policy, **options)
    assert scales(tx, [1, 1, 0, 0]) == expected


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("policy", RANGE_IS_WIDE)
def test_a_float16_checkpoint_is_at_one_after_a_step(policy, finite):
    before = jaxmp.loss_scaling(optax.sgd(1.0), "mixed_float16").init(jnp.zeros([]))
    state = run(jaxmp.loss_scaling(optax.sgd(1.0), policy), [finite], before)
    assert state.loss_scale == 1


def test_a_bfloat16_checkpoint_continues_at_the_scale_it_is_set_to():
    old = jaxmp.loss_scaling(optax.adam(1.0), "mixed_bfloat16").init(jnp.zeros([]))
    state = optax.tree.set(old, loss_scale=jnp.float32(2.0**15))
    tx = jaxmp.loss_scaling(optax.adam(1.0), "mixed_float16", growth_interval=1)
    assert run(tx, [1, 0, 0], state).loss_scale.tolist() == [2.0**16, 2.0**15, 2.0**14]


def test_flax_serialization_round_trips():
    tx = jaxmp.loss_scaling(optax.adam(0.5), "mixed_float16", growth_interval=1)
    params = {"w": jnp.ones(2), "loss_scale": jnp.ones(1)}
    update = jax.jit(tx.update)
    _, state = update(params, tx.init(params), params)
    _, state = update({**params, "w": jnp.full(2, jnp.inf)}, state, params)
    target = jaxmp.loss_scaling(optax.adam(0.5), "mixed_bfloat16").init(params)
    restored = [
        flax.serialization.from_bytes(target, flax.serialization.to_bytes(state)),
        flax.serialization.from_state_dict(
            target, flax.serialization.to_state_dict(state)
        ),
    ]
    for copy in restored:
        assert isinstance(copy, jaxmp.LossScaleState)
        chex.assert_trees_all_equal_shapes_and_dtypes(copy, state)
        chex.assert_trees_all_equal(copy, state)
        jaxmp.check_loss_scale(copy)
        assert jaxmp.get_loss_scale(copy) == 2.0**15
        expected = update(params, state, params)
        chex.assert_trees_all_equal(update(params, copy, params), expected)


# Where the state is found

GETTERS = [
    jaxmp.get_loss_scale,
    jaxmp.get_loss_scale_state,
    jaxmp.last_step_finite,
    jaxmp.check_loss_scale,
]
ADAM = jaxmp.loss_scaling(optax.adam(1.0), "mixed_float16", init_scale=8)
PARAMS = {"w": jnp.ones(2), "loss_scale": jnp.full(3, 5.0)}


def train_state():
    return TrainState.create(apply_fn=None, params=PARAMS, tx=ADAM)


def nnx_optimizer():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    model.loss_scale = nnx.Param(jnp.full(3, 5.0))
    return nnx.Optimizer(model, ADAM, wrt=nnx.Param)


HOLDERS = {
    "itself": lambda: ADAM.init(PARAMS),
    "chain": lambda: optax.chain(optax.clip(1.0), ADAM).init(PARAMS),
    "masked": lambda: optax.masked(ADAM, {"w": True, "loss_scale": False}).init(PARAMS),
    "dict": lambda: {"generator": ADAM.init(PARAMS), "other": None},
    "TrainState": train_state,
    "TrainState.opt_state": lambda: train_state().opt_state,
    "nnx.Optimizer": nnx_optimizer,
    "nnx.Optimizer.opt_state": lambda: nnx_optimizer().opt_state,
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_the_state_is_found_and_its_arrays_are_plain(holder):
    # optax.tree.get finds the parameter and Adam's moments of that name as well.
    opt_state = holder()
    scale = jaxmp.get_loss_scale(opt_state)
    state = jaxmp.get_loss_scale_state(opt_state)
    assert scale == state.loss_scale == 8
    assert jaxmp.last_step_finite(opt_state)
    assert all(isinstance(x, jax.Array) for x in (scale, *state[:-1]))
    assert jaxmp.check_loss_scale(opt_state) is None


@pytest.mark.parametrize("get", GETTERS)
@pytest.mark.parametrize(
    ("opt_state", "message"),
    [
        (None, "no `LossScaleState` in the NoneType given.*jaxmp.loss_scaling"),
        (optax.adam(1.0).init(PARAMS), "in the tuple given"),
        (PARAMS, "in the dict given"),
        (
            flax.serialization.to_state_dict(ADAM.init(PARAMS)),
            r"in the dict given.*`tx.init\(params\)` as the target",
        ),
        ([ADAM.init(PARAMS)] * 2, "must hold one loss scale, but holds 2"),
        (
            jaxmp.static_loss_scale(optax.chain(ADAM, ADAM)).init(PARAMS),
            "must hold one loss scale, but holds 3. Wrap an optimizer once",
        ),
    ],
    ids=["None", "plain", "params", "state dict", "two", "nested"],
)  # fmt: skip
def test_no_state_or_several_are_refused(get, opt_state, message):
    with pytest.raises(ValueError, match=message):
        get(opt_state)


INNER_MASK = {"w": True, "loss_scale": False}


def every_other(step, **_):
    return step % 2 == 0


SKIPPING = {
    "optax.apply_if_finite": partial(optax.apply_if_finite, max_consecutive_errors=9),
    "optax.MultiSteps": partial(optax.MultiSteps, every_k_schedule=2),
    "optax.conditionally_mask": lambda tx: optax.conditionally_mask(tx, every_other),
    "optax.conditionally_transform": lambda tx: optax.conditionally_transform(
        tx, every_other
    ),
    "optax.contrib.sam": lambda tx: optax.contrib.sam(tx, optax.sgd(0.1)),
}
AROUND = {
    "itself": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.scale(1.0), tx),
    "named_chain": lambda tx: optax.named_chain(("z", optax.scale(1.0)), ("a", tx)),
    "masked": lambda tx: optax.masked(tx, INNER_MASK),
    "partition": lambda tx: optax.partition(
        {"a": tx, "b": optax.sgd(1.0)}, {"w": "a", "loss_scale": "b"}
    ),
    "lookahead": lambda tx: optax.lookahead(tx, 2, 0.5),
}


def params_in(around):
    is_lookahead = around is AROUND["lookahead"]
    return optax.LookaheadParams(PARAMS, PARAMS) if is_lookahead else PARAMS


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize(("name", "skipping"), SKIPPING.items(), ids=SKIPPING)
def test_a_wrapper_that_skips_for_itself_is_refused_by_name(name, skipping, around):
    tx = around(skipping(AROUND["chain"](ADAM)))
    state = jax.eval_shape(tx.init, params_in(around))
    message = rf"{name}.*Put it inside: `jaxmp.loss_scaling\({name}\(\.\.\.\), policy"
    for get in GETTERS:
        with pytest.raises(ValueError, match=message):
            get(state)


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_what_withholds_nothing_is_welcome_around(around):
    params = params_in(around)
    state = around(ADAM).init(params)
    assert jaxmp.get_loss_scale(state) == 8
    grads = jax.tree.map(lambda x: x.at[0].set(jnp.inf), PARAMS)
    _, state = jax.jit(around(ADAM).update)(grads, state, params)
    assert jaxmp.get_loss_scale(state) == 4
    assert not jaxmp.last_step_finite(state)


@pytest.mark.parametrize("skipping", SKIPPING.values(), ids=SKIPPING)
def test_inside_it_a_wrapper_that_skips_is_welcome(skipping):
    tx = jaxmp.loss_scaling(skipping(optax.adam(1.0)), "O1", init_scale=8)
    grads = jax.tree.map(lambda x: x.at[0].set(jnp.inf), PARAMS)
    _, state = jax.jit(tx.update)(grads, tx.init(PARAMS), PARAMS)
    assert jaxmp.get_loss_scale(state) == 4
    assert not jaxmp.last_step_finite(state)
    assert jaxmp.get_loss_scale_state(state).skipped == 1


def test_an_opaque_sam_withholds_nothing():
    tx = optax.contrib.sam(ADAM, optax.sgd(0.1), opaque_mode=True)
    assert jaxmp.get_loss_scale(tx.init(PARAMS)) == 8


HIDING = {
    "optax.zero_nans": optax.zero_nans(),
    "optax.apply_every": optax.apply_every(2),
    "optax.apply_if_finite": optax.apply_if_finite(optax.clip(1.0), 9),
    "optax.MultiSteps": optax.MultiSteps(optax.identity(), 2),
    "optax.conditionally_mask": optax.conditionally_mask(optax.clip(1.0), every_other),
}


@pytest.mark.parametrize(("name", "hiding"), HIDING.items(), ids=HIDING)
def test_what_zeroes_gradients_before_the_wrapper_in_a_chain_is_refused(name, hiding):
    for before in (hiding, optax.chain(optax.clip(1.0), hiding)):
        state = optax.chain(before, ADAM).init(PARAMS)
        # With the optimizer, which would be lost if only `name` were wrapped.
        cure = rf"loss_scaling\(optax\.chain\({name}\(\.\.\.\), optimizer\), pol"
        with pytest.raises(ValueError, match=f"{name}.*Put it inside: `jaxmp.{cure}"):
            jaxmp.get_loss_scale(state)
    assert jaxmp.get_loss_scale(optax.chain(ADAM, hiding).init(PARAMS)) == 8
    inside = jaxmp.dynamic_loss_scale(optax.chain(hiding, optax.sgd(1.0)), init_scale=8)
    assert jaxmp.get_loss_scale(inside.init(PARAMS)) == 8


def test_what_holds_a_hidden_loss_scale_is_looked_into():
    tx = optax.MultiSteps(ADAM, 2)
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.chain(tx), wrt=nnx.Param)
    restored = flax.serialization.from_bytes(
        tx.init(PARAMS), flax.serialization.to_bytes(tx.init(PARAMS))
    )
    for holder in (state, state.opt_state, optimizer, {"a": restored}):
        with pytest.raises(ValueError, match=r"optax\.MultiSteps"):
            jaxmp.get_loss_scale(holder)
    with pytest.raises(ValueError, match=r"optax\.MultiSteps"):
        jax.jit(jaxmp.last_step_finite)(tx.init(PARAMS))


# Abstract states


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_an_abstract_state_gives_abstract_fields(holder):
    state = jax.eval_shape(holder)
    scale = jaxmp.get_loss_scale(state)
    finite = jaxmp.last_step_finite(state)
    assert scale == jax.ShapeDtypeStruct((), jnp.float32)
    assert finite == jax.ShapeDtypeStruct((), jnp.bool_)
    fields = jaxmp.get_loss_scale_state(state)[:-1]
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in fields)
    with pytest.raises(TypeError, match=r"`check_loss_scale` needs .* values"):
        jaxmp.check_loss_scale(state)


# A stuck run


def test_a_stuck_run_says_so_with_its_numbers():
    tx = dynamic(init_scale=8, hysteresis=3)
    states = run(tx, [0, 1, 0, 0, 0, 0])
    at = [jax.tree.map(lambda x, i=i: x[i], states) for i in range(6)]
    for state in at[:5]:
        jaxmp.check_loss_scale(state, max_skipped_in_a_row=4)
    message = r"last 4 steps .* \(loss_scale 2.0, 5 skipped since init\)"
    with pytest.raises(FloatingPointError, match=message):
        jaxmp.check_loss_scale(at[5], max_skipped_in_a_row=4)


def test_the_default_limit_is_where_the_scale_reaches_the_bottom():
    tx = dynamic(init_scale=2.0**24)
    states = run(tx, [False] * 30)
    assert states.loss_scale[28] == 2.0**-5 < states.loss_scale[27]
    jaxmp.check_loss_scale(jax.tree.map(lambda x: x[28], states))
    with pytest.raises(FloatingPointError, match="last 30 steps"):
        jaxmp.check_loss_scale(jax.tree.map(lambda x: x[29], states))


def test_one_stuck_replica_is_enough():
    state = jax.vmap(ADAM.init)(jax.tree.map(lambda x: jnp.stack([x] * 2), PARAMS))
    assert jaxmp.get_loss_scale(state).tolist() == [8, 8]
    state = state._replace(bad_steps=jnp.array([0, 7]), skipped=jnp.array([1, 9]))
    jaxmp.check_loss_scale(state)
    message = re.escape("last 7 steps") + r".*\[8. 8.\], \[1 9\] skipped"
    with pytest.raises(FloatingPointError, match=message):
        jaxmp.check_loss_scale(state, max_skipped_in_a_row=7)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_scale_at_its_maximum_that_never_skipped_is_asked_about(policy):
    tx = jaxmp.loss_scaling(optax.sgd(1.0), policy, growth_interval=1, max_scale=2**17)
    never, once = run(tx, [1] * 6), run(tx, [1, 1, 0, 1, 1, 1])
    for states in (never, once):
        last = jax.tree.map(lambda x: x[-1], states)
        unused = states is never and policy == "mixed_float16"
        assert jaxmp.scalars(last, max_scale=2**17, prefix="")["looks_unused"] == unused
        jaxmp.check_loss_scale(last)  # of another maximum
        if not unused:
            jaxmp.check_loss_scale(last, max_scale=2**17)
            continue
        with pytest.warns(UserWarning, match="Is `loss_scale=opt_state` passed to"):
            jaxmp.check_loss_scale(last, max_scale=2**17)
    # Of several optimizers that share a loss, one that skips says that a scale is used.
    if policy == "mixed_float16":
        both = [jax.tree.map(lambda x: x[-1], states) for states in (never, once)]
        jaxmp.check_loss_scale(tuple(both), max_scale=2**17)
    default = jaxmp.loss_scaling(optax.sgd(1.0), "f16", growth_interval=1)
    state = jax.tree.map(lambda x: x[-1], run(default, [1] * 9))
    with pytest.warns(UserWarning, match="without a skipped step"):
        jaxmp.check_loss_scale(state)


def test_a_stuck_run_names_the_gradients_that_are_not_finite():
    grads = {"frozen": jnp.array([1.0, jnp.nan]), "w": jnp.ones(2), "n": np.arange(2)}
    tx = jaxmp.loss_scaling(optax.sgd(1.0), "float32")
    _, state = tx.update(grads, tx.init(grads))
    message = r"(?s)Not finite in `grads`: frozen\. .*inside `optax.partition`"
    with pytest.raises(FloatingPointError, match=message):
        jaxmp.check_loss_scale(state, max_skipped_in_a_row=1, grads=grads)
    many = {f"layer_{i}/" + "kernel" * 99: jnp.full(2, jnp.inf) for i in range(500)}
    with pytest.raises(FloatingPointError, match="and 497 more") as caught:
        jaxmp.check_loss_scale(state, max_skipped_in_a_row=1, grads=many)
    assert len(str(caught.value)) < 1200


@pytest.mark.parametrize("scale", [jnp.nan, 0.0, -1.0, jnp.inf, 2.0**-140])
@pytest.mark.parametrize("holder", ["alone", "chain", "TrainState", "vmap", "two"])
def test_a_scale_that_is_none_is_refused(scale, holder):
    tx = jaxmp.loss_scaling(optax.adam(0.1), "mixed_float16")
    if holder == "chain":
        tx = optax.chain(optax.identity(), tx)
    params = {"w": jnp.ones(2)}
    opt_state = tx.init(params)
    if holder == "TrainState":
        opt_state = TrainState.create(apply_fn=None, params=params, tx=tx)
    if holder == "vmap":
        opt_state = jax.tree.map(lambda x: jnp.stack([x, x]), opt_state)
        scale = jnp.array([2.0**15, scale])
    restore = partial(optax.tree.set, opt_state)
    broken = restore(loss_scale=jnp.asarray(scale, jnp.float32))
    wrong = (opt_state, broken) if holder == "two" else broken
    jaxmp.check_loss_scale((opt_state, opt_state) if holder == "two" else opt_state)
    with pytest.raises(ValueError, match="must be finite and positive, but is") as no:
        jaxmp.check_loss_scale(wrong)
    # What the message says to type.
    names = {"optax": optax, "jnp": jnp, "opt_state": broken}
    exec(re.search("`(opt_state = .*)`", str(no.value))[1], names)
    jaxmp.check_loss_scale(names["opt_state"])
    assert bits(names["opt_state"]) == bits(opt_state) or holder == "vmap"


def poisoned(bad, **shape):
    return {"a": jnp.ones(2), "w": jnp.full((2, 2), bad)}


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
def test_gradients_that_the_scale_has_not_seen_are_named(bad):
    def wrapped(inner):
        return jaxmp.loss_scaling(inner, "mixed_float16")

    grads = poisoned(bad)
    hiding = optax.stateless(lambda grads, _: jax.tree.map(jnp.nan_to_num, grads))
    tx = optax.chain(hiding, wrapped(optax.sgd(0.1)))
    _, state = tx.update(grads, tx.init(grads), grads)
    assert jaxmp.last_step_finite(state)
    jaxmp.check_loss_scale(state)
    jaxmp.check_loss_scale(state, grads=poisoned(1.0))
    with pytest.raises(FloatingPointError, match="Not finite in `grads`: w; but") as no:
        jaxmp.check_loss_scale(state, grads=grads)
    inside = re.search("`jaxmp.(loss_scaling[^`]*)`", str(no.value))[1]
    assert inside == "loss_scaling(optax.chain(optax.clip(1.0), optimizer), policy)"
    names = {"optimizer": optax.sgd(0.1), "policy": "O1", "optax": optax}
    right = eval(inside, vars(jaxmp) | names)
    _, state = right.update(grads, right.init(grads), grads)
    assert not jaxmp.last_step_finite(state)
    jaxmp.check_loss_scale(state, grads=grads)  # a skipped step


def test_gradients_of_several_runs_are_looked_at_run_by_run():
    tx = jaxmp.loss_scaling(optax.sgd(0.1), "mixed_float16")
    grads = jax.tree.map(lambda *x: jnp.stack(x), poisoned(1.0), poisoned(jnp.inf))
    _, state = jax.vmap(tx.update)(grads, jax.vmap(tx.init)(grads))
    jaxmp.check_loss_scale(state, grads=grads)
    other = jax.tree.map(lambda x: x[::-1], grads)
    with pytest.raises(FloatingPointError, match="Not finite in `grads`: w; but"):
        jaxmp.check_loss_scale(state, grads=other)
    # Of two optimizers that share a loss, one has skipped it.
    states = [jax.tree.map(lambda x, i=i: x[i], state) for i in range(2)]
    jaxmp.check_loss_scale(tuple(states), grads=poisoned(jnp.inf))


def test_gradients_that_are_all_0_are_asked_about():
    tx = jaxmp.loss_scaling(optax.sgd(0.1), "mixed_float16")
    state, count = tx.init(jnp.ones(2)), np.arange(2)
    for right in ({}, {"w": jnp.array([0, 1e-30]), "a": jnp.zeros(2)}, {"n": count}):
        jaxmp.check_loss_scale(state, grads=right)
    jaxmp.check_loss_scale(state, grads=None)
    with pytest.warns(UserWarning, match="All gradients are 0, at a loss .*32768"):
        jaxmp.check_loss_scale(state, grads={"w": jnp.zeros(2), "n": count})


ADAPTED = {
    "adam": optax.adam(0.1),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
    "momentum": optax.sgd(0.1, 0.9),
}


@pytest.mark.parametrize("inner", ADAPTED.values(), ids=ADAPTED.keys())
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
@pytest.mark.parametrize(
    "other",
    [
        {"w": (3, 2)},
        {"w": (1, 4)},
        {"w": (1,)},
        {"v": (4, 4)},
        {"b": (4,), "w": (4, 4)},
    ],
)
def test_the_state_of_another_model_is_refused_by_name(inner, wrap, other):
    tx = jaxmp.loss_scaling(inner, "mixed_float16")
    params = {"w": jnp.ones((4, 4))}
    state = tx.init({name: jnp.ones(shape) for name, shape in other.items()})
    with pytest.raises(ValueError, match=r"is that of another model: at `.*/[wvb]` of"):
        wrap(tx.update)(params, state, params)
    wrap(tx.update)(params, tx.init(params), params)


def test_a_state_that_grows_is_no_other_model():
    def update(updates, state, params=None):
        return updates, jnp.append(state, updates)

    grows = optax.GradientTransformation(lambda _: jnp.zeros(0), update)
    tx, params = jaxmp.loss_scaling(grows, "mixed_float16"), jnp.ones(2)
    state = tx.init(params)
    for _ in range(3):
        _, state = tx.update(params, state, params)
    assert state.inner_state.shape == (6,)


@pytest.mark.parametrize("make", [jaxmp.dynamic_loss_scale, jaxmp.static_loss_scale])
def test_a_state_and_parameters_that_are_swapped_are_not_taken_for_a_checkpoint(make):
    tx, params = make(optax.adam(1e-3)), {"w": jnp.ones(2)}
    with pytest.raises(TypeError, match="other way round") as error:
        tx.update(params, params, tx.init(params))
    assert "tx.update(grads, opt_state, params)" in str(error.value)
    assert "inner_state" not in str(error.value)


def test_a_state_from_before_the_wrapper_is_told_where_it_goes():
    adam = optax.adam(0.1)
    tx = jaxmp.loss_scaling(adam, "mixed_float16")
    params, grads = {"w": jnp.ones(3)}, {"w": jnp.arange(3.0)}
    _, opt_state = adam.update(grads, adam.init(params))  # as restored
    advice = "opt_state = tx.init(params)._replace(inner_state=opt_state)"
    for error, call in (
        (TypeError, lambda: tx.update(grads, opt_state, params)),
        (ValueError, lambda: jaxmp.grad(lambda w: w, loss_scale=opt_state)),
    ):
        with pytest.raises(error, match=re.escape(advice)):
            call()
    names = {"tx": tx, "params": params, "opt_state": opt_state}
    exec(advice, names)
    expected, _ = jax.jit(adam.update)(grads, opt_state, params)
    got, state = jax.jit(tx.update)(grads, names["opt_state"], params)
    np.testing.assert_array_equal(got["w"], expected["w"])
    assert jaxmp.get_loss_scale(state) == 2**15


def test_checking_while_jax_traces_is_refused():
    @jax.jit
    def step(state):
        jaxmp.check_loss_scale(state)
        return state

    with pytest.raises(TypeError, match=r"concrete values.*outside `jax.jit`"):
        step(ADAM.init(PARAMS))


@pytest.mark.parametrize(("limit", "error"), [(0, ValueError), (2.5, TypeError)])
def test_a_wrong_limit_is_named(limit, error):
    with pytest.raises(error, match=f"`max_skipped_in_a_row` must be .* is {limit}"):
        jaxmp.check_loss_scale(ADAM.init(PARAMS), max_skipped_in_a_row=limit)


# Wrong options

WRONG = [
    ({"init_scale": 2.0**25}, "16777216.* Move the scale", ValueError),
    ({"min_scale": 8, "max_scale": 4}, r"is not in \[8, 4\]", ValueError),
    ({"init_scale": 0}, "`init_scale` must be finite and positive.* is 0", ValueError),
    ({"init_scale": float("nan")}, "but is nan", ValueError),
    ({"min_scale": 0.0}, "`min_scale` must be finite and positive", ValueError),
    ({"max_scale": float("inf")}, "`max_scale` must .* is inf", ValueError),
    ({"init_scale": "large"}, "`init_scale` must be a number.*'large'", TypeError),
    ({"max_scale": None}, "`max_scale` must be a number.*None", TypeError),
    ({"growth_factor": "2"}, "`growth_factor` must be a number.*'2'", TypeError),
    ({"growth_factor": 1.0}, "`growth_factor` must be above 1.* is 1.0", ValueError),
    ({"growth_factor": float("inf")}, "above 1 and finite.* is inf", ValueError),
    ({"growth_factor": 1 + 1e-12}, "above 1 and finite in float32", ValueError),
    ({"backoff_factor": 1}, "`backoff_factor` must lie between.* is 1", ValueError),
    ({"backoff_factor": 0}, "between 0 and 1.* is 0", ValueError),
    ({"backoff_factor": 1 - 1e-12}, "between 0 and 1 in float32", ValueError),
    ({"growth_interval": 0}, "`growth_interval` must be at least 1.* 0", ValueError),
    ({"growth_interval": 2**31}, "must .* fit into int32", ValueError),
    ({"growth_interval": 10.0}, "`growth_interval` must be an integer", TypeError),
    ({"hysteresis": 0}, "`hysteresis` must be at least 1", ValueError),
    ({"hysteresis": "2"}, "`hysteresis` must be an integer, but is '2'", TypeError),
]  # fmt: skip


@pytest.mark.parametrize("policy", [None, "float32"])
@pytest.mark.parametrize(("options", "message", "error"), WRONG)
def test_a_wrong_option_is_named_under_every_policy(options, message, error, policy):
    make = partial(jaxmp.loss_scaling, optax.sgd(1.0), policy) if policy else dynamic
    with pytest.raises(error, match=message):
        make(**options)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("option", ["growth", "scale", "inner"])
def test_an_unknown_option_is_a_type_error(option, policy):
    message = f"no option `{option}`. Expected one of init_scale, .* axis_name"
    if option == "inner":
        message = "multiple values for argument 'inner'"
    with pytest.raises(TypeError, match=message):
        jaxmp.loss_scaling(optax.sgd(1.0), policy, **{option: 2})


SCALARS = [8, 8.0, np.float32(8), np.int64(8), np.array(8), np.array(8.0),
           np.float16(8), jnp.array(8), jnp.array(8.0),
           jnp.array(8, jnp.bfloat16)]  # fmt: skip


@pytest.mark.parametrize("init_scale", SCALARS, ids=repr)
def test_any_number_or_array_of_one_will_do_as_a_scale(init_scale):
    state = dynamic(init_scale=init_scale).init(jnp.zeros([]))
    assert (state.loss_scale, state.loss_scale.dtype) == (8, jnp.float32)
    tx = jaxmp.static_loss_scale(optax.sgd(1.0), init_scale)
    assert scales(tx, [1, 0]) == [8, 8]


FINITE = "must be finite and positive in float32, but is "
NO_SCALES = [
    *((x, ValueError, FINITE + str(x)) for x in (0, -1.0, np.inf, np.nan, 1e-40)),
    *((x, ValueError, FINITE) for x in (2.0**128, jnp.zeros(()), np.array(np.nan))),
    *((x, ValueError, FINITE) for x in (jnp.float32(jnp.inf), np.float16(-1))),
    (jnp.ones(1), ValueError, "must be"),
    *((x, TypeError, "must be") for x in (jnp.array(True), 8j)),
]


@pytest.mark.parametrize(("scale", "error", "message"), NO_SCALES)
def test_what_is_no_scale_is_refused_by_its_name(scale, error, message):
    for name in ("init_scale", "min_scale", "max_scale"):
        with pytest.raises(error, match=re.escape(f"`{name}` {message}")):
            dynamic(**{name: scale})
    with pytest.raises(error, match=re.escape(f"`scale` {message}")):
        jaxmp.static_loss_scale(optax.sgd(1.0), scale)


# The loss scales of other libraries

OTHERS = {
    "jmp.NoOpLossScale": jmp.NoOpLossScale(),
    "jmp.StaticLossScale": jmp.StaticLossScale(128.0),
    "jmp.DynamicLossScale": jmp.DynamicLossScale(jnp.float32(16), period=3, factor=4),
    "flax.DynamicScale": DynamicScale(scale=16.0, growth_interval=3),
}


def refused(take, scale):
    """Returns what to type for a scale of another library."""
    with pytest.raises(TypeError, match="does not take") as error:
        take(scale)
    return str(error.value)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    "take",
    [
        lambda x: jaxmp.loss_scaling(optax.sgd(1.0), x),
        lambda x: jaxmp.loss_scaling(x, "mixed_float16"),
        lambda x: jaxmp.loss_scaling(optax.sgd(1.0), "float16", init_scale=x),
        lambda x: jaxmp.static_loss_scale(optax.sgd(1.0), x),
        lambda x: jaxmp.value_and_grad(jnp.sum, loss_scale=x)(jnp.ones(2)),
        lambda x: jaxmp.nnx.value_and_grad(jnp.sum, loss_scale=x)(jnp.ones(2)),
        lambda x: jaxmp.unscale(jnp.ones(2), x),
        jaxmp.get_loss_scale,
    ],
)
def test_a_loss_scale_of_another_library_is_refused_by_name(take, name):
    assert refused(take, OTHERS[name]).startswith(f"jaxmp does not take a `{name}`, ")
    if jax.tree.leaves(OTHERS[name]):  # its values are not known there
        assert f"`{name}`" in refused(jax.jit(take), OTHERS[name])


@pytest.mark.parametrize(
    "scale",
    [
        jmp.DynamicLossScale(jnp.float32(2.0**30)),
        jmp.DynamicLossScale(jnp.full(4, 8.0)),
        jax.eval_shape(lambda: jmp.DynamicLossScale(jnp.float32(8))),
        DynamicScale(minimum_scale=None),
    ],
)
def test_what_to_type_for_a_loss_scale_whose_values_are_unusual_works(scale):
    line = re.findall("`(.*?)`", refused(jaxmp.get_loss_scale, scale))[1]
    exec(line, {"jaxmp": jaxmp, "optimizer": optax.sgd(1.0)})


@pytest.mark.parametrize("name", [x for x in OTHERS if x[0] == "j"])
def test_what_to_type_for_a_loss_scale_of_jmp_scales_as_it_did(name):
    (line, option) = re.findall("`(.*?)`", refused(jaxmp.get_loss_scale, OTHERS[name]))[
        1:
    ]
    assert option == "loss_scale=opt_state"
    names = {"jaxmp": jaxmp, "optimizer": optax.sgd(1.0)}
    exec(line, names)
    finite = [True] * 7 + [False] * 4 + [True, True, False] + [True] * 3
    theirs, expected = OTHERS[name], []
    for ok in finite:
        theirs = theirs.adjust(jnp.array(ok))
        expected.append(float(theirs.loss_scale))
    assert scales(names["tx"], finite) == expected


# Injected hyperparameters


def injected_run(make, hyperparams, finite):
    """Runs under jit, with hyperparameters set from outside before the last step."""
    tx, params = make(), jnp.ones(2)
    state, update, seen = jax.jit(tx.init)(params), jax.jit(tx.update), []
    for i, ok in enumerate(finite):
        if i == len(finite) - 1:
            state.hyperparams.update(hyperparams)
        _, state = update(jnp.full(2, 1.0 if ok else jnp.nan), state, params)
        seen.append(jaxmp.get_loss_scale(state).item())
    assert jaxmp.last_step_finite(state) == finite[-1]
    jaxmp.check_loss_scale(state)
    return seen


def test_optax_injects_the_options_of_a_dynamic_scale():
    def make():
        inject = optax.inject_hyperparams(jaxmp.dynamic_loss_scale)
        return inject(optax.sgd(1.0), init_scale=8.0, growth_interval=2)

    assert injected_run(make, {}, [1, 1, 0, 0]) == [8, 16, 8, 4]
    backoff = {"backoff_factor": jnp.float32(0.25)}
    assert injected_run(make, backoff, [1, 1, 0, 0]) == [8, 16, 8, 2]
    patience = {"hysteresis": jnp.int32(2)}
    assert injected_run(make, patience, [1, 1, 1, 0]) == [8, 16, 16, 16]
    with pytest.raises(ValueError, match="`init_scale` must be finite and positive"):
        optax.inject_hyperparams(jaxmp.dynamic_loss_scale)(
            optax.sgd(1.0), init_scale=-8.0
        ).init(jnp.ones(2))


def test_optax_injects_a_static_scale_and_its_schedule():
    inject = optax.inject_hyperparams(jaxmp.static_loss_scale)
    constant = partial(inject, optax.sgd(1.0), 8.0)
    assert injected_run(constant, {"scale": jnp.float32(4)}, [1, 0, 1]) == [8, 8, 4]
    rising = partial(inject, optax.sgd(1.0), lambda step: 8.0 * 2**step)
    assert injected_run(rising, {}, [1, 1, 0]) == [8, 16, 32]


# What a step returns, and what it costs to lower


def test_an_update_has_no_weak_type():
    update = {"w": jnp.asarray(2.0), "n": 3}  # weak
    tx = jaxmp.loss_scaling(optax.identity(), "O1")
    for run_update in (tx.update, jax.jit(tx.update)):
        found, _ = run_update(update, tx.init(update))
        assert not any(x.weak_type for x in found.values())


def test_a_step_of_more_arrays_holds_no_more_calls():
    def calls(arrays):
        params = {f"w{i}": jnp.ones(3, jnp.float16) for i in range(arrays)}
        tx = jaxmp.loss_scaling(optax.sgd(1.0, momentum=0.9), "O3")

        def step(grads, state):
            return tx.update(jaxmp.unscale(grads, state), state)

        lowered = jax.jit(step).lower(params, tx.init(params))
        return lowered.as_text().count("call @")

    assert calls(7) == calls(2)


def masked_loss(w, x, seen):
    scores = jnp.where(seen, x.astype(w.dtype) @ w, -1e9)
    return -jax.nn.log_softmax(scores)[:, 0].mean()


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_a_loss_that_is_nan_while_its_gradients_are_finite_is_an_error(wrap):
    tx = jaxmp.loss_scaling(optax.sgd(0.1), "mixed_float16")
    w, x = jnp.eye(4), jnp.ones((3, 4))

    @wrap
    def step(w, state, seen):
        grad_fn = jaxmp.value_and_grad(masked_loss, loss_scale=state, policy="f16")
        loss, grads = grad_fn(w, x, seen)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state, loss

    seen = jnp.ones((3, 4), bool)
    w, state, loss = step(w, tx.init(w), seen)
    jaxmp.check_loss_scale(state, loss=loss)
    _, state, loss = step(w, state, seen.at[1].set(False))
    assert not jnp.isfinite(loss)
    assert jaxmp.last_step_finite(state)
    jaxmp.check_loss_scale(state)
    with pytest.raises(FloatingPointError, match="loss is nan, but its gradients are"):
        jaxmp.check_loss_scale(state, loss=loss)
    # What the message says to type finds the line.
    report = jaxmp.find_overflow(masked_loss)(w.astype(jnp.float16), x, ~seen)
    assert "finfo" in report.advice


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_the_loss_of_a_skipped_step_may_be_anything(bad):
    tx = jaxmp.loss_scaling(optax.sgd(0.1), "mixed_float16")
    w = jnp.ones(2)
    _, skipped = tx.update(w * bad, tx.init(w), w)
    _, taken = tx.update(w, tx.init(w), w)
    for loss in (bad, jnp.array(bad), jnp.array(bad, jnp.bfloat16), np.float32(bad)):
        jaxmp.check_loss_scale(skipped, loss=loss)
        jaxmp.check_loss_scale((skipped, taken), loss=loss)
        with pytest.raises(FloatingPointError, match=f"loss is {bad}"):
            jaxmp.check_loss_scale(taken, loss=loss)
    # One of several runs.
    states = jax.tree.map(lambda *x: jnp.stack(x), skipped, taken)
    jaxmp.check_loss_scale(states, loss=jnp.array([bad, 1.0]))
    with pytest.raises(FloatingPointError):
        jaxmp.check_loss_scale(states, loss=jnp.array([1.0, bad]))
    with pytest.raises(TypeError, match="must be the loss of the last step"):
        jaxmp.check_loss_scale(taken, loss=(1.0, {}))


def test_a_stuck_run_in_bfloat16_is_not_said_to_overflow_float16():
    tx = jaxmp.loss_scaling(optax.sgd(0.1), "mixed_bfloat16")
    _, state = tx.update(jnp.full(2, jnp.nan), tx.init(jnp.ones(2)))
    with pytest.raises(FloatingPointError, match="overflows in the forward") as caught:
        jaxmp.check_loss_scale(state, max_skipped_in_a_row=1)
    assert "float16" not in str(caught.value)
