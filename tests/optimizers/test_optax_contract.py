"""Optax: steps skipped without a trace, by every optimizer, under every transform."""

from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from updates import add_poison, skips_without_a_trace, step_of

import jaxmp
from conftest import bits, rest_is_evidence

SCHEDULE = optax.linear_schedule(0.5, 0.125, 4)

ALIASES = {
    "adabelief": optax.adabelief(0.25),
    "adadelta": optax.adadelta(0.25),
    "adafactor": optax.adafactor(0.25, min_dim_size_to_factor=2),
    "adagrad": optax.adagrad(0.25),
    "adam": optax.adam(SCHEDULE),
    "adamax": optax.adamax(0.25),
    "adamw": optax.adamw(SCHEDULE, weight_decay=0.5),
    "amsgrad": optax.amsgrad(0.25),
    "fromage": optax.fromage(0.25),
    "lamb": optax.lamb(0.25),
    "lars": optax.lars(0.25),
    "lbfgs": optax.lbfgs(0.25, linesearch=None),
    "lion": optax.lion(0.25),
    "nadam": optax.nadam(0.25),
    "noisy_sgd": optax.noisy_sgd(0.25, key=jax.random.key(0)),
    "novograd": optax.novograd(0.25),
    "radam": optax.radam(0.25),
    "rmsprop": optax.rmsprop(0.25, centered=True, momentum=0.5),
    "sgd": optax.sgd(SCHEDULE, momentum=0.5, nesterov=True),
    "sm3": optax.sm3(0.25),
    "yogi": optax.yogi(0.25),
    "polyak_sgd": optax.polyak_sgd(),  # wants `value`
    "schedule_free": optax.contrib.schedule_free(optax.adam(0.25), 0.25),
    "prodigy": optax.contrib.prodigy(),
}
COMPOSITIONS = {
    "chain": optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.5),
        optax.scale_by_schedule(SCHEDULE),
    ),
    "masked": optax.masked(optax.adam(0.25), {"w": False, "b": True}),
    "multi_transform": optax.multi_transform(
        {"adam": optax.adam(0.25), "sgd": optax.sgd(SCHEDULE)},
        {"w": "adam", "b": "sgd"},
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(
        SCHEDULE, weight_decay=0.5
    ),
    "MultiSteps": optax.MultiSteps(optax.adam(0.25), 3),
    "ema": optax.chain(optax.sgd(0.25), optax.ema(0.5)),
    "add_noise": optax.chain(
        optax.add_noise(0.5, 0.5, jax.random.key(0)), optax.sgd(0.25)
    ),
    "apply_if_finite": optax.apply_if_finite(optax.adam(0.25), 2),
    "reduce_on_plateau": optax.chain(
        optax.sgd(0.25), optax.contrib.reduce_on_plateau(patience=1)
    ),
}
PARAMS = {"w": jnp.array([[1.0, -2.0], [-0.0, 0.5]]), "b": jnp.array([0.25, -0.0])}
GRADS = {"w": jnp.array([[0.5, 0.25], [-1.0, 2.0]]), "b": jnp.array([0.5, -0.25])}
POISONS = [jnp.inf, -jnp.inf, jnp.nan]
GOOD = 0.0  # what is added to a good step


# Skipped steps


# One of each kind: with moments, factored, with keys, wants the loss, ...
USUAL = ["adam", "adafactor", "noisy_sgd", "polyak_sgd"]
USUAL += ["multi_transform", "MultiSteps", "apply_if_finite"]
SKIPPING = {
    name: (jaxmp.dynamic_loss_scale(tx, init_scale=8, growth_interval=2), PARAMS, GRADS)
    for name, tx in (ALIASES | COMPOSITIONS).items()
}
LOOKAHEAD = optax.lookahead(optax.adam(0.25), sync_period=2, slow_step_size=0.5)
# Moments of float16 parameters would drift to float32; optax.apply_if_finite raises.
HALVES = jaxmp.cast_tree((PARAMS, GRADS), jnp.float16)
O3 = jaxmp.loss_scaling(optax.adam(0.25, eps=2.0**-10), "O3", growth_interval=2)
MORE = {
    "lookahead": (
        jaxmp.dynamic_loss_scale(LOOKAHEAD, growth_interval=2),
        optax.LookaheadParams(PARAMS, PARAMS),
        GRADS,
    ),
    "static scale": (jaxmp.static_loss_scale(ALIASES["adamw"], 8), PARAMS, GRADS),
    "float16": (O3, *HALVES),
    "float32 gradients of float16": (O3, HALVES[0], GRADS),
}


@pytest.mark.parametrize(
    ("tx", "params", "grads"), rest_is_evidence(SKIPPING | MORE, *USUAL, *MORE)
)
def test_a_skipped_step_leaves_no_trace(tx, params, grads):
    skips_without_a_trace(tx, params, grads)


@pytest.mark.parametrize("name", ["chain", "inject_hyperparams", "MultiSteps"])
def test_the_run_is_that_of_inner_without_the_bad_steps(name):
    # MultiSteps outside would keep an Inf in its accumulator for good.
    good = [jax.tree.map(lambda g, i=i: g * 0.5**i, GRADS) for i in range(5)]
    bad = [add_poison(GRADS, poison) for poison in POISONS]
    inner = COMPOSITIONS[name]
    tx = jaxmp.dynamic_loss_scale(inner)
    step = jax.jit(step_of(tx))

    def run(grads):
        params, state = PARAMS, tx.init(PARAMS)
        for g in grads:
            params, state = step(params, state, g)
        return params, state.inner_state

    def plain_run(grads):
        plain = optax.with_extra_args_support(inner)
        plain_step, params, state = jax.jit(step_of(plain)), PARAMS, plain.init(PARAMS)
        for g in grads:
            params, state = plain_step(params, state, g)
        return params, state

    with_bad = run([bad[0], *good[:2], *bad[1:], *good[2:], bad[0]])
    assert bits(with_bad) == bits(run(good))
    eps = float(jnp.finfo(jnp.float32).eps)  # another program, other fusions
    chex.assert_trees_all_close(with_bad, plain_run(good), rtol=8 * eps, atol=8 * eps)


def test_what_is_outside_is_not_skipped():
    inside = jaxmp.dynamic_loss_scale(
        optax.chain(optax.add_decayed_weights(0.5), optax.sgd(1.0))
    )
    outside = optax.chain(
        jaxmp.dynamic_loss_scale(optax.identity()),
        optax.add_decayed_weights(0.5),
        optax.sgd(1.0),
    )
    bad = add_poison(GRADS, jnp.nan)
    params, _ = step_of(inside)(PARAMS, inside.init(PARAMS), bad)
    assert bits(params) == bits(PARAMS)
    params, state = step_of(outside)(PARAMS, outside.init(PARAMS), bad)
    chex.assert_trees_all_equal(params, jax.tree.map(lambda p: p / 2, PARAMS))
    assert not jaxmp.last_step_finite(state)


def test_an_overflow_is_hidden_by_a_clip_before_the_wrapper():
    # optax.clip turns an Inf into 1.0: the wrapper goes around it.
    bad = add_poison(GRADS, jnp.inf)
    hidden = optax.chain(optax.clip(1.0), jaxmp.dynamic_loss_scale(optax.sgd(1.0)))
    seen = jaxmp.dynamic_loss_scale(optax.chain(optax.clip(1.0), optax.sgd(1.0)))
    for tx, finite in [(hidden, True), (seen, False)]:
        _, state = step_of(tx)(PARAMS, tx.init(PARAMS), bad)
        assert jaxmp.last_step_finite(state) == finite


# The contract


class ValueState(NamedTuple):
    """State of an optimizer that wants the loss, and remembers it."""

    value: jax.Array  # float32[]


def scale_by_value():
    def update(updates, state, params=None, *, value, **extra_args):
        return jax.tree.map(lambda u: u * value, updates), ValueState(value)

    return optax.GradientTransformationExtraArgs(
        lambda params: ValueState(jnp.float32(0)), update
    )


@pytest.mark.parametrize(
    "wrap",
    [
        jaxmp.dynamic_loss_scale,
        jaxmp.static_loss_scale,
        partial(jaxmp.loss_scaling, policy="mixed_float16"),
    ],
)
def test_extra_arguments_reach_inner(wrap):
    tx = wrap(optax.chain(scale_by_value(), optax.sgd(1.0)))
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    state = tx.init(PARAMS)
    updates, state = tx.update(GRADS, state, PARAMS, value=jnp.float32(3), other=None)
    chex.assert_trees_all_equal(updates, jax.tree.map(lambda g: -3 * g, GRADS))
    assert state.inner_state[0].value == 3
    bad = add_poison(GRADS, jnp.inf)
    _, state = tx.update(bad, state, PARAMS, value=jnp.float32(jnp.nan))
    assert state.inner_state[0].value == 3
    with pytest.raises(TypeError, match="value"):
        tx.update(GRADS, state, PARAMS)


def test_parameters_are_as_optional_as_for_inner():
    tx = jaxmp.dynamic_loss_scale(optax.sgd(1.0))
    updates, _ = tx.update(GRADS, tx.init(PARAMS))
    chex.assert_trees_all_equal(updates, jax.tree.map(jnp.negative, GRADS))
    tx = jaxmp.dynamic_loss_scale(optax.adamw(1.0))
    with pytest.raises(ValueError, match="not passing `params`"):
        tx.update(GRADS, tx.init(PARAMS))


def test_optax_maps_the_parameters_in_the_state_alone():
    tx = jaxmp.dynamic_loss_scale(optax.adam(1.0), init_scale=8)
    state = tx.init(PARAMS)
    for map_params in (optax.tree_map_params, optax.tree.map_params):
        mapped = map_params(tx, lambda x: x + 1, state)
        assert bits(mapped[:-1]) == bits(state[:-1])
        adam = mapped.inner_state[0]
        ones = jax.tree.map(jnp.ones_like, PARAMS)
        chex.assert_trees_all_equal(adam, adam._replace(mu=ones, nu=ones))
        assert adam.count == 0


def test_optax_gets_and_sets_by_name():
    tx = optax.chain(optax.clip(1.0), jaxmp.dynamic_loss_scale(optax.adam(1.0)))
    state = tx.init(PARAMS)
    assert optax.tree.get(state, "loss_scale") == 2.0**15
    assert optax.tree.get(state, "skipped") == 0
    state = optax.tree.set(state, loss_scale=jnp.float32(8))
    assert jaxmp.get_loss_scale(state) == 8


def test_inner_sees_a_learning_rate_that_was_set():
    inner = optax.inject_hyperparams(optax.sgd)(0.5)
    tx = jaxmp.dynamic_loss_scale(inner)
    state = optax.tree.set(tx.init(PARAMS), learning_rate=jnp.float32(2))
    updates, _ = tx.update(GRADS, state, PARAMS)
    chex.assert_trees_all_equal(updates, jax.tree.map(lambda g: -2 * g, GRADS))


# Transformations of JAX

POISONED = jnp.array([GOOD, jnp.inf, GOOD, GOOD, jnp.nan, -jnp.inf, GOOD])
TX = jaxmp.dynamic_loss_scale(optax.adamw(SCHEDULE), growth_interval=2, hysteresis=2)


def scan(tx, params, state, poisons):
    """Scans over steps; a state that drifts in structure or dtype is refused."""

    def step(carry, poison):
        return step_of(tx)(*carry, add_poison(GRADS, poison)), None

    return jax.lax.scan(step, (params, state), poisons)[0]


def test_jit_scan_and_python_agree():
    scanned = scan(TX, PARAMS, TX.init(PARAMS), POISONED)
    params, state = PARAMS, TX.init(PARAMS)
    for poison in POISONED:
        params, state = step_of(TX)(params, state, add_poison(GRADS, poison))
    eps = float(jnp.finfo(jnp.float32).eps)
    chex.assert_trees_all_close((params, state), scanned, rtol=8 * eps, atol=8 * eps)
    chex.assert_trees_all_equal(state[:-1], scanned[1][:-1])
    assert state.skipped == 3
    assert state.inner_state[0].count == 4


def test_vmapped_replicas_are_independent():
    poisons = jnp.stack([POISONED, POISONED[::-1], jnp.zeros_like(POISONED)])
    replicas = jax.tree.map(lambda x: jnp.stack([x] * 3), PARAMS)
    run = partial(scan, TX)
    params, state = jax.jit(jax.vmap(run))(
        replicas, jax.vmap(TX.init)(replicas), poisons
    )
    assert state.skipped.tolist() == [3, 3, 0]
    eps = float(jnp.finfo(jnp.float32).eps)
    alone = jax.jit(run)
    for i, poison in enumerate(poisons):
        expected = alone(PARAMS, TX.init(PARAMS), poison)
        result = jax.tree.map(lambda x, i=i: x[i], (params, state))
        chex.assert_trees_all_close(result, expected, rtol=8 * eps, atol=8 * eps)
        chex.assert_trees_all_equal(result[1][:-1], expected[1][:-1])


def test_both_arguments_can_be_donated():
    tx = jaxmp.loss_scaling(optax.adam(0.5), "f16", growth_interval=2)
    step = jax.jit(step_of(tx), donate_argnums=(0, 1))
    kept = jax.jit(step_of(tx))
    params = jax.tree.map(jnp.copy, PARAMS)
    state = tx.init(params)
    for poison in POISONED:
        grads = add_poison(GRADS, poison)
        expected = kept(params, state, grads)
        donated = jax.tree.leaves((params, state.inner_state, state.skipped))
        params, state = step(params, state, grads)
        assert all(x.is_deleted() for x in donated)
        assert bits((params, state)) == bits(expected)
    assert step._cache_size() == 1


def test_no_dtype_drifts_with_x64():
    with jax.enable_x64(True):
        params, grads = (
            {"w": jaxmp.cast_tree(tree["w"], jnp.float64), "b": tree["b"]}
            for tree in (PARAMS, GRADS)
        )
        tx = jaxmp.dynamic_loss_scale(COMPOSITIONS["MultiSteps"], growth_interval=2)
        skips_without_a_trace(tx, params, grads)
        state = tx.init(params)
        assert state.loss_scale.dtype == jnp.float32
        assert state.good_steps.dtype == jnp.int32


# Trees of every kind


@pytest.mark.parametrize(
    "params", [{}, (), None, {"a": None}, {"a": optax.MaskedNode()}], ids=repr
)
def test_a_tree_without_leaves_is_finite(params):
    tx = jaxmp.dynamic_loss_scale(optax.adam(1.0), init_scale=8, growth_interval=1)
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert updates == params
    assert state.loss_scale == 16


def test_none_leaves_and_masked_nodes_pass_through():
    params = {"w": jnp.ones(2), "none": None, "masked": optax.MaskedNode()}
    tx = jaxmp.dynamic_loss_scale(optax.adam(1.0))
    for grad in (0.5, jnp.nan):
        grads = {**params, "w": jnp.full(2, grad)}
        updates, state = tx.update(grads, tx.init(params), params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        assert updates["masked"] == optax.MaskedNode()
        assert state.last_finite == jnp.isfinite(grad)


@pytest.mark.parametrize("poison", [0.0, jnp.inf])
def test_integer_parameters_keep_their_updates(poison):
    params = {"w": jnp.ones(2), "n": jnp.arange(2)}
    grads = jaxmp.grad(lambda p: (p["w"] * (1 + poison)).sum(), allow_int=True)(params)
    inner = optax.masked(optax.sgd(0.5), {"w": True, "n": False})
    tx = jaxmp.dynamic_loss_scale(inner)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert updates["n"].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(updates["w"], 0.0 if poison else -0.5)
    updates, _ = tx.update({**grads, "n": jnp.arange(2)}, tx.init(params), params)
    assert updates["n"].dtype == jnp.int32
    np.testing.assert_array_equal(updates["n"], [0, 0] if poison else [0, 1])


KEYS = jax.random.split(jax.random.key(0), 2)
LEAVES = {
    "bool": (jnp.array([True, False]), jnp.array([False, False])),
    "int": (jnp.array([3, -4]), jnp.array([0, 0])),
    "uint": (jnp.array([3, 4], jnp.uint8), jnp.array([0, 0], jnp.uint8)),
    "numpy bool": (np.array([True]), np.array([False])),
    "key": (KEYS, KEYS),
    "float0": (np.zeros(2, jax.dtypes.float0),) * 2,
    "complex": (jnp.array([1j]), jnp.array([-0j])),
    "float8": (jnp.ones(2, jnp.float8_e5m2), -jnp.zeros(2, jnp.float8_e5m2)),
    "number": (2.5, -0.0),
    "text": ("adam", "adam"),
    "none": (None, None),
}


# All in a program, and without `jit` what differs there.
@pytest.mark.parametrize(
    ("update", "zero", "jit"),
    [
        *((*leaf, True) for leaf in LEAVES.values()),
        *((*LEAVES[x], False) for x in ("int", "numpy bool", "float0", "number")),
    ],
)
def test_updates_of_every_kind_pass_and_leave_no_trace(update, zero, jit):
    # They are what `inner` makes them; `jax.grad` gives floats and float0 only.
    inner = optax.stateless(lambda u, p: {"w": u["w"], "other": update})
    tx = jaxmp.dynamic_loss_scale(inner)
    state = tx.init({"w": jnp.ones(1)})
    for finite, expected in ((True, update), (False, zero)):
        with jax.disable_jit(not jit):
            grads = {"w": jnp.where(finite, jnp.ones(1), jnp.nan)}
            updates, new_state = tx.update(grads, state)
        assert new_state.last_finite == finite
        if isinstance(expected, (str, type(None))):
            assert updates["other"] == expected
        else:
            expected = jax.tree.map(jnp.asarray, expected) if finite or jit else zero
            assert bits(jnp_tree(updates["other"])) == bits(jnp_tree(expected))


def jnp_tree(x):
    """Returns an array, and leaves what JAX has no arrays of."""
    is_float0 = getattr(x, "dtype", None) == jax.dtypes.float0
    return x if is_float0 else jnp.asarray(x)


def counting(start, update):
    """Returns an optimizer of a state that ``update`` changes."""
    return optax.GradientTransformation(
        lambda params: start, lambda u, s, p=None: (u, update(s))
    )


STATES = {
    "text that stays": ({"n": 0, "x": "a"}, lambda s: {**s, "n": s["n"] + 1}),
    "text that changes": ("a", lambda s: s + "b"),
    "a number": (0, lambda s: s + 1),
    "a bool": (True, lambda s: not s),
    "NumPy": (np.zeros(2), lambda s: s + 1),
    "None becomes an array": (None, lambda s: jnp.ones(2)),
    "an array becomes None": (jnp.ones(2), lambda s: None),
    "a tuple grows": ((), lambda s: (*s, jnp.ones(1))),
    "a shape changes": (jnp.zeros(()), lambda s: jnp.ones(3)),
    "a key": (KEYS[0], lambda s: jax.random.fold_in(s, 1)),
    "float0": (np.zeros(2, jax.dtypes.float0), lambda s: np.zeros(2, s.dtype)),
}


# All without `jit`, where more is taken.
@pytest.mark.parametrize(
    ("start", "update", "jit"),
    [
        *((*state, False) for state in STATES.values()),
        *((*STATES[x], True) for x in ("text that stays", "NumPy", "float0")),
    ],
)
def test_inner_states_that_optax_alone_takes_pass_and_are_skipped(start, update, jit):
    inner, grads = counting(start, update), jnp.ones(2)
    tx = jaxmp.dynamic_loss_scale(inner)
    with jax.disable_jit(not jit):
        _, plain = inner.update(grads, inner.init(grads))
        _, good = tx.update(grads, tx.init(grads))
        _, bad = tx.update(grads * jnp.nan, tx.init(grads))
    for ours, expected in ((good, plain), (bad, start)):
        ours = ours.inner_state
        assert jax.tree.structure(ours) == jax.tree.structure(expected)
        for x, y in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
            assert jnp.shape(x) == jnp.shape(y) if not isinstance(y, str) else x == y
            if getattr(y, "dtype", None) != jax.dtypes.float0:
                assert np.all(x == y)
    assert (good.skipped, bad.skipped) == (0, 1)


@pytest.mark.parametrize(
    ("start", "named"), [(None, "None"), (jnp.zeros(()), r"float32\[\]")]
)
def test_a_state_that_jit_cannot_skip_is_explained(start, named):
    tx = jaxmp.dynamic_loss_scale(counting(start, lambda s: jnp.ones(2)))
    with pytest.raises(TypeError, match=rf"could not undo.*\n.*{named}\n.*\n.*\[2\]"):
        jax.jit(tx.update)(jnp.ones(2), tx.init(jnp.ones(2)))


@pytest.mark.parametrize("grad", [0.5, np.float32(0.5), jnp.float16(0.5)], ids=repr)
def test_a_number_is_a_gradient(grad):
    tx = jaxmp.dynamic_loss_scale(optax.sgd(1.0))
    updates, _ = tx.update(grad, tx.init(1.0), 1.0)
    assert updates == -0.5


# What the inner optimizer makes of finite gradients


def broken_after(steps):
    """An optimizer whose updates are NaN from some step on."""

    def update(updates, state, params=None):
        bad = jnp.where(state >= steps, jnp.nan, 0.0)
        return jax.tree.map(lambda u: -0.5 * u + bad, updates), state + 1

    return optax.GradientTransformation(lambda _: jnp.zeros([], jnp.int32), update)


@pytest.mark.parametrize("policy", ["mixed_float16", "float32"])
def test_updates_that_are_not_finite_are_skipped_where_they_are_checked(policy):
    inner = optax.chain(optax.trace(0.5), broken_after(2))
    tx = jaxmp.loss_scaling(inner, policy, check_updates=True)
    params = {"w": jnp.array([1.0, -0.0])}
    grads = jax.tree.map(jnp.ones_like, params)
    state = tx.init(params)
    for _ in range(2):
        updates, state = jax.jit(tx.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
    before = params, state.inner_state
    updates, state = jax.jit(tx.update)(grads, state, params)
    after = optax.apply_updates(params, updates), state.inner_state
    chex.assert_trees_all_equal(after, before)
    assert not np.signbit(after[0]["w"]).any() ^ np.signbit(before[0]["w"]).any()
    assert (state.skipped, state.bad_steps, bool(state.last_finite)) == (1, 1, False)
    assert state.loss_scale == (2**14 if policy == "mixed_float16" else 1)

    unchecked = jaxmp.loss_scaling(inner, policy)
    state = unchecked.init(params)._replace(inner_state=before[1])
    assert not jaxmp.all_finite(unchecked.update(grads, state, params)[0])


@pytest.mark.parametrize("mode", ["f16", "O1"])
def test_a_second_gradient_that_overflows_inside_is_skipped_by_itself(mode):
    # Sharpness-aware minimisation: its second gradient overflows float16 in step 2.
    def loss(p, x, factor):
        return jnp.mean((x @ p["w"]) ** 2) * factor

    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    sam = optax.contrib.sam(optax.adam(1e-2), ascent, opaque_mode=True)
    tx = jaxmp.loss_scaling(sam, mode)
    p, x = {"w": jnp.ones((8, 1))}, jnp.full((8, 8), 0.5)

    @jax.jit
    def step(p, s, factor):
        def gradient(factor):
            grad_fn = jaxmp.grad(loss, loss_scale=s)
            return lambda q, _=None: jaxmp.autocast(grad_fn, mode)(q, x, factor)

        grads = gradient(1.0)(p)
        updates, s = tx.update(grads, s, p, grad_fn=gradient(factor))
        return optax.apply_updates(p, updates), s

    s = tx.init(p)
    for i in range(4):
        before = p, s.inner_state
        p, s = step(p, s, 1e6 if i == 2 else 1.0)
        assert s.last_finite == (i != 2)
        if i == 2:
            chex.assert_trees_all_equal((p, s.inner_state), before)
    assert jaxmp.all_finite(p)
    assert (s.skipped, s.loss_scale) == (1, 2**14)


def test_a_frozen_gradient_of_nan_skips_nothing_with_the_wrapper_inside():
    params = {"frozen": jnp.zeros(3), "w": jnp.ones(4)}
    labels = {"frozen": "f", "w": "t"}
    tx = optax.partition(
        {"t": jaxmp.loss_scaling(optax.adam(0.1), "f32"), "f": optax.set_to_zero()},
        labels,
    )
    plain = optax.partition({"t": optax.adam(0.1), "f": optax.set_to_zero()}, labels)

    def loss(p):
        return jnp.sum(p["w"] ** 2) + 0.0 * jnp.sqrt(jnp.sum(p["frozen"] ** 2))

    @jax.jit
    def step(p, s, q, t):
        grads = jaxmp.grad(loss, loss_scale=s)(p)
        updates, s = tx.update(grads, s, p)
        expected, t = plain.update(jax.grad(loss)(q), t, q)
        return optax.apply_updates(p, updates), s, optax.apply_updates(q, expected), t

    p, s, q, t = params, tx.init(params), params, plain.init(params)
    for _ in range(3):
        p, s, q, t = step(p, s, q, t)
    chex.assert_trees_all_equal(p, q)
    jaxmp.check_loss_scale(s, max_skipped_in_a_row=1)
    assert jaxmp.get_loss_scale_state(s).skipped == 0


# 16-bit parameters

WITH_A_COND = {
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-3), 3),
    "conditionally_transform": optax.conditionally_transform(
        optax.adam(1e-3), lambda step, **_: step % 2 == 0
    ),
    "galore": optax.contrib.galore(1e-3),
    "mechanize": optax.contrib.mechanize(optax.adam(1e-3)),
}


@pytest.mark.parametrize("inner", WITH_A_COND.values(), ids=WITH_A_COND.keys())
def test_what_wants_16_bit_gradients_is_told_the_wrapper_that_it_works_in(inner):
    params = {"w": jnp.ones((16, 8), jnp.bfloat16)}
    grads = {"w": jnp.ones((16, 8))}  # as `value_and_grad` returns them
    tx = jaxmp.loss_scaling(inner, "bfloat16")
    with pytest.raises(TypeError) as caught:
        tx.update(grads, tx.init(params), params)
    notes = " ".join(caught.value.__notes__)
    assert "jaxmp.loss_scaling(jaxmp.kahan_summation(optimizer), policy)" in notes

    tx = jaxmp.loss_scaling(jaxmp.kahan_summation(inner), "bfloat16")
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    assert jaxmp.all_finite(optax.apply_updates(params, updates))


def test_other_errors_of_an_optimizer_carry_no_note():
    def fail(updates, state, params=None):
        raise TypeError("no")

    failing = optax.GradientTransformation(lambda _: optax.EmptyState(), fail)
    tx = jaxmp.loss_scaling(failing, "O1")
    params = {"w": jnp.ones(2)}
    with pytest.raises(TypeError, match="no") as caught:
        tx.update(params, tx.init(params), params)
    assert not hasattr(caught.value, "__notes__")


# Leaves that are not floating


@pytest.mark.parametrize("poison", [1.0, jnp.inf])
@pytest.mark.parametrize("ours", [True, False], ids=["jaxmp.grad", "jax.grad"])
def test_an_integer_base_in_one_tree_with_what_is_trained_passes(ours, poison):
    params = {"base": jnp.ones((4, 1), jnp.int8), "a": jnp.ones((4, 1))}
    parts = {"t": optax.adam(0.1), "f": optax.set_to_zero()}
    tx = jaxmp.loss_scaling(optax.partition(parts, {"base": "f", "a": "t"}), "O1")

    def loss(p, x):
        return jnp.mean((x @ (p["base"] * 0.125 + p["a"])) ** 2)

    @jax.jit
    def step(p, s, x):
        grad = partial(jaxmp.grad, loss_scale=s) if ours else jax.grad
        updates, s = tx.update(grad(loss, allow_int=True)(p, x), s, p)
        assert updates["base"].dtype == jax.dtypes.float0
        return updates["a"], s

    updates, state = step(params, tx.init(params), jnp.full((8, 4), poison))
    assert state.last_finite == (poison == 1)
    assert (updates == 0).all() == (poison != 1)
