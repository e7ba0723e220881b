"""Gradients: true units, accumulation, and what a loss function may be."""

from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxmp
from benchmarks.counting.measure import equations, traced
from conftest import assert_near, normal


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.tanh(nn.Dense(16)(x))
        return nn.Dense(3)(x)


MODEL = MLP()
X = normal(0, 12, 4)
Y = jnp.asarray(np.arange(12) % 3)
PARAMS = {
    "params": {
        "Dense_0": {"kernel": normal(1, 4, 16, scale=1 / 2), "bias": normal(2, 16)},
        "Dense_1": {"kernel": normal(3, 16, 3, scale=1 / 4), "bias": normal(4, 3)},
    }
}


def loss_fn(params, x, y, apply=MODEL.apply):
    logits = apply(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


# True units


@pytest.mark.parametrize(
    ("policy", "transform"),
    [(None, lambda f: f), ("float32", jax.jit)],
    ids=["no policy", "float32, jit"],
)
def test_in_float32_it_is_jax_value_and_grad_bit_for_bit(policy, transform):
    expected = transform(jax.value_and_grad(loss_fn))(PARAMS, X, Y)
    result = transform(jaxmp.value_and_grad(loss_fn, policy=policy))(PARAMS, X, Y)
    chex.assert_trees_all_equal(result, expected)


@pytest.mark.parametrize("scale", [2.0**-5, 8, 2.0**24])
def test_a_power_of_two_never_rounds(scale):
    expected = jax.value_and_grad(loss_fn)(PARAMS, X, Y)
    scaled = jaxmp.value_and_grad(loss_fn, loss_scale=scale)(PARAMS, X, Y)
    chex.assert_trees_all_equal(scaled, expected)


def test_a_float16_loss_survives_the_first_step():
    tx = jaxmp.loss_scaling(optax.sgd(1.0), "float16")
    scale = jaxmp.get_loss_scale(tx.init(jnp.ones(2)))
    loss, grads = jaxmp.value_and_grad(lambda w: (w * w).sum(), loss_scale=scale)(
        jnp.array([0.5, 0.25], jnp.float16)
    )
    assert loss.dtype == jnp.float32
    assert grads.dtype == jnp.float32
    assert loss == 0.3125
    np.testing.assert_array_equal(grads, [1.0, 0.5])


def test_one_compilation_serves_every_scale():
    step = jax.jit(lambda p, s: jaxmp.value_and_grad(loss_fn, loss_scale=s)(p, X, Y))
    for scale in (1.0, 2.0**15, 2.0**24):
        step(PARAMS, jnp.float32(scale))
    assert step._cache_size() == 1


# Casting


def test_targets_keep_their_precision_under_with_policy():
    apply = jaxmp.with_policy(lambda w, x: w * x, "mixed_float16")

    def squared_error(w, x, target):
        return (apply(w, x) - target) ** 2

    grad_fn = jaxmp.value_and_grad(squared_error, loss_scale=1.0)
    loss = grad_fn(jnp.ones([]), jnp.ones([]), 1e5)[0]
    assert loss == (1 - np.float32(1e5)) ** 2


def test_a_policy_casts_the_differentiated_arguments_alone():
    def dtypes(params, x):
        seen.extend([params["w"].dtype, params["n"].dtype, x.dtype])
        return params["w"].sum()

    seen = []
    params = {"w": jnp.ones(2), "n": jnp.arange(2)}
    grads = jaxmp.grad(dtypes, policy="mixed_bfloat16", allow_int=True)(
        params, jnp.ones(2)
    )
    assert seen == [jnp.bfloat16, jnp.int32, jnp.float32]
    assert grads["w"].dtype == jnp.float32
    assert grads["n"].dtype == jax.dtypes.float0


def test_parameters_are_cast_once_and_outside_the_loop():
    apply = jaxmp.with_policy(MODEL.apply, "mixed_float16")
    accumulate = jaxmp.value_and_grad(
        partial(loss_fn, apply=apply),
        policy="mixed_float16",
        loss_scale=2.0**10,
        accum_steps=4,
        batch_argnums=(1, 2),
    )
    eqns = traced(accumulate, PARAMS, X, Y)
    loops = [e.params["jaxpr"] for e in eqns if e.primitive.name == "scan"]

    def narrowed(eqns):
        return sorted(
            eqn.invars[0].aval.shape
            for eqn in eqns
            if eqn.primitive.name == "convert_element_type"
            and eqn.params["new_dtype"] == jnp.float16
            and eqn.invars[0].aval.shape in {(4, 16), (16, 3)}
        )

    assert narrowed(eqns) == [(4, 16), (16, 3)]
    assert loops
    assert all(narrowed(equations(body)) == [] for body in loops)


def test_loss_and_gradients_are_at_least_float32():
    with jax.enable_x64(True):
        w = jnp.ones(2, jnp.float64)
        grad_fn = jaxmp.value_and_grad(lambda w: (w * w).sum(), loss_scale=8)
        loss, grads = jax.jit(grad_fn)(w)
        assert (loss.dtype, grads.dtype) == (jnp.float64, jnp.float64)
        grad_fn = jaxmp.value_and_grad(lambda w: (w * w).sum())
        loss, grads = jax.jit(grad_fn)(w.astype("f2"))
        assert (loss.dtype, grads.dtype) == (jnp.float32, jnp.float32)


# Accumulation


@pytest.mark.parametrize(("scale", "steps"), [(1.0, 1), (1.0, 3), (2.0**15, 12)])
def test_accumulation_is_the_full_batch(steps, scale):
    expected = jax.value_and_grad(loss_fn)(PARAMS, X, Y)
    accumulate = jaxmp.value_and_grad(
        loss_fn, loss_scale=scale, accum_steps=steps, batch_argnums=(1, 2)
    )
    result = accumulate(PARAMS, X, Y)
    chex.assert_trees_all_equal_shapes_and_dtypes(result, expected)
    assert_near(result, expected, "float32", 8)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_sixteen_bit_gradients_are_added_in_float32(policy):
    # 4096 gradients of 1: in bfloat16 the sum would stop at 256, in float16 at 2048.
    def count(w, x):
        return (w * x).sum()

    grad = jaxmp.grad(
        count,
        policy=policy,
        loss_scale=1.0,
        accum_steps=4096,
        batch_argnums=1,
        reduction="sum",
    )
    dtype = jaxmp.get_policy(policy).compute_dtype
    assert grad(jnp.float32(1), jnp.ones(4096, dtype)) == 4096


@pytest.mark.parametrize(
    ("mesh", "steps"), [(False, 1), (False, 2), (True, 2)], ids=str
)
def test_what_is_no_array_in_aux_comes_back_as_it_was(steps, mesh):
    def loss(w, x):
        return jnp.mean(w * x), {"phase": "train", "x": x, "f": max, "n": 3}

    options: dict = {"mesh": jax.make_mesh((2,), ("data",))} if mesh else {}
    fun = jaxmp.value_and_grad(
        loss, has_aux=True, accum_steps=steps, batch_argnums=1, **options
    )
    (_, aux), grads = fun(2.0, jnp.arange(4.0))
    assert (aux["phase"], aux["f"], float(grads)) == ("train", max, 1.5)
    assert aux["x"].size == 4
    assert np.size(aux["n"]) == steps * (2 if mesh else 1)


def test_each_micro_batch_has_its_own_key_and_its_own_aux():
    def loss(w, batch, train):
        assert train is True
        noise = jax.random.uniform(batch["key"])
        return w * noise, {"noise": noise, "x": batch["x"]}

    key = jax.random.key(3)
    batch = {"key": key, "x": jnp.arange(6), "missing": None}
    (value, aux), grads = jaxmp.value_and_grad(
        loss, has_aux=True, accum_steps=3, batch_argnums=(1, 2)
    )(2.0, batch, True)
    noise = jax.vmap(jax.random.uniform)(jax.random.split(key, 3))
    np.testing.assert_array_equal(aux["noise"], noise)
    np.testing.assert_array_equal(aux["x"], [[0, 3], [1, 4], [2, 5]])
    assert len(set(noise.tolist())) == 3
    assert_near((grads, value), (noise.mean(), 2 * noise.mean()), "float32", 2)


def test_one_micro_batch_of_activations_is_held_at_a_time():
    def deep(w, x):
        for _ in range(8):
            x = jnp.sin(x @ w)
        return x.mean()

    def temporary_bytes(steps):
        fun = jaxmp.value_and_grad(deep, accum_steps=steps, batch_argnums=1)
        args = jnp.ones((8, 8)), jnp.ones((4096, 8))
        return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(8) < temporary_bytes(1) / 4


def test_what_micro_batches_return_beside_the_loss_is_kept_for_each():
    big = jnp.arange(2**15, dtype=jnp.float32)

    def loss(w, x):
        aux = {
            "mean": x.mean(0),
            "square": (x**2).mean(),
            "matrix": x.T @ x,
            "half": x[0].astype(jnp.bfloat16),
            "other half": x.sum().astype(jnp.bfloat16),
            "count": jnp.int32(x.shape[0]),
            "none": None,
            "key": jax.random.key(0),
            "big": big * x[0, 0],
            "number": 2.0,
            "empty": jnp.zeros((0, 3)),
        }
        return (x @ w).mean(), aux

    w, x = jnp.ones(3), jnp.arange(12.0).reshape(4, 3)
    options = {"has_aux": True, "batch_argnums": 1}
    fun = jaxmp.value_and_grad(loss, accum_steps=2, **options)
    (_, aux), _ = jax.jit(fun)(w, x)
    single = jax.jit(jaxmp.value_and_grad(loss, **options))
    parts = [single(w, x[i::2])[0][1] for i in range(2)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)
    chex.assert_trees_all_equal_shapes_and_dtypes(aux, stack)
    chex.assert_trees_all_close(aux | {"key": 0}, stack | {"key": 0}, rtol=1e-6)


def test_accumulation_keeps_gradients_of_integers_float0():
    params = {"w": jnp.float32(2), "n": jnp.arange(3), "key": jax.random.key(0)}
    grads = jaxmp.grad(
        lambda p, x: (p["w"] * x).mean(), allow_int=True, accum_steps=2, batch_argnums=1
    )(params, jnp.arange(4.0))
    assert grads["w"] == 1.5
    assert grads["n"].dtype == grads["key"].dtype == jax.dtypes.float0
    assert grads["n"].shape == (3,)


# A drop-in


def test_several_arguments_and_keywords_are_differentiated_as_in_jax():
    def fun(a, b, *, c):
        return a * b * c, {"c": c}

    for argnums in (0, 1, -1, (0, 1), (1,)):
        ours = jaxmp.value_and_grad(fun, argnums=argnums, has_aux=True)(2.0, 3.0, c=4.0)
        theirs = jax.value_and_grad(fun, argnums=argnums, has_aux=True)(2.0, 3.0, c=4.0)
        chex.assert_trees_all_equal(ours, theirs)
    assert jaxmp.grad(fun, has_aux=True)(2.0, 3.0, c=4.0) == (12.0, {"c": 4.0})


def test_a_gradient_penalty_works():
    def penalised(w, x):
        def critic(x):
            return (jnp.tanh(x) * w).sum()

        return (jax.grad(critic)(x) ** 2).sum()

    w, x = jnp.array([0.5, -1.0]), jnp.array([0.25, 2.0])
    expected = jax.value_and_grad(penalised)(w, x)
    result = jaxmp.value_and_grad(penalised, loss_scale=2.0**15)(w, x)
    chex.assert_trees_all_equal(result, expected)


def test_it_composes_with_vmap_and_with_itself():
    def cube(w):
        return w**3

    w = jnp.array([1.0, 2.0, 3.0])
    scaled = jaxmp.grad(cube, loss_scale=2.0**10)
    np.testing.assert_array_equal(jax.vmap(scaled)(w), 3 * w**2)
    twice = jaxmp.grad(scaled, loss_scale=2.0**10)
    np.testing.assert_array_equal(jax.vmap(twice)(w), 6 * w)


def test_nothing_of_the_function_but_its_name_is_copied():
    assert jaxmp.value_and_grad(loss_fn).__name__ == "loss_fn"
    jaxmp.value_and_grad(partial(loss_fn, y=Y))(PARAMS, X)


# A state in the place of a scale


SCALED = jaxmp.loss_scaling(optax.adam(1e-3), "mixed_float16", init_scale=2.0**10)
CHAIN = optax.chain(optax.clip_by_global_norm(1.0), SCALED)


def nnx_optimizer():
    return nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), SCALED, wrt=nnx.Param)


HOLDERS = {
    "scale": lambda: 2.0**10,
    "state": lambda: SCALED.init(PARAMS),
    "chain": lambda: CHAIN.init(PARAMS),
    "TrainState": lambda: TrainState.create(apply_fn=len, params=PARAMS, tx=CHAIN),
    "nnx.Optimizer": nnx_optimizer,
    "its state": lambda: nnx_optimizer().opt_state,
    "params and state": lambda: (PARAMS, SCALED.init(PARAMS)),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_state_stands_for_the_scale_in_it_wherever_a_scale_is_taken(name):
    def loss_fn(w):  # whose gradient is 2^-26, zero in float16, and 2^-16 when scaled
        return jnp.float32(checkpoint_name(w.astype(jnp.float16), "w")) * 2.0**-26

    state, w = HOLDERS[name](), jnp.float32(1)
    assert jaxmp.grad(loss_fn)(w) == 0
    assert jaxmp.grad(loss_fn, loss_scale=state)(w) == 2.0**-26
    assert jaxmp.value_and_grad(loss_fn, loss_scale=state)(w)[1] == 2.0**-26
    assert jaxmp.unscale(jnp.float16(1.0), state) == 2.0**-10
    assert jaxmp.activation_gradients(loss_fn, loss_scale=state)(w)["w"] == 2.0**-16
    if not name.startswith("nnx"):  # a graph object
        scaled = jax.jit(lambda s: jaxmp.grad(loss_fn, loss_scale=s)(w))(state)
        assert scaled == 2.0**-26


def test_a_scale_that_changes_is_followed_in_a_scan():
    tx = jaxmp.dynamic_loss_scale(optax.sgd(0.0), growth_interval=2, init_scale=8)
    w = jnp.float32(1)

    def step(state, _):
        _, grads = jaxmp.value_and_grad(lambda w: w * w, loss_scale=state)(w)
        return tx.update(grads, state, w)[1], (grads, jaxmp.get_loss_scale(state))

    _, (grads, scales) = jax.lax.scan(step, tx.init(w), length=4)
    assert scales.tolist() == [8, 8, 16, 16]
    assert grads.tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    "argnums",
    [1, np.int64(1), np.uint8(1), np.int32(-1), np.array(1), [0, 1], (np.int8(1), 0)],
)
def test_positions_are_what_they_are_in_jax(argnums):
    def f(w, v):
        return w * v**2

    expected = jax.value_and_grad(f, argnums)(3.0, 5.0)
    chex.assert_trees_all_equal(
        jaxmp.value_and_grad(f, argnums=argnums)(3.0, 5.0), expected
    )
    policy = jaxmp.value_and_grad(f, policy="float32", argnums=argnums)(3.0, 5.0)
    chex.assert_trees_all_equal(policy, expected)


# What is refused


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (jnp.ones(3), r"array float32\[3\].*mean"),
        (jnp.array(1), r"array int32\[\]"),
        (jnp.array(1j), r"array complex64\[\]"),
        (1, "1 of type int"),
        ((jnp.ones([]), {}), "tuple of 2.*has_aux=True"),
        (None, "None of type NoneType"),
        ("loss", "'loss' of type str"),
    ],
    ids=str,
)
def test_a_loss_that_is_no_real_scalar_is_named(result, message):
    with pytest.raises(TypeError, match=message):
        jaxmp.value_and_grad(lambda w: result)(1.0)


def test_a_missing_aux_is_named():
    with pytest.raises(TypeError, match=r"pair `\(loss, aux\)`.*array float32\[\]"):
        jaxmp.value_and_grad(lambda w: w, has_aux=True)(jnp.float32(1))


@pytest.mark.parametrize(
    ("leaf", "dtype"),
    [
        (jnp.arange(2), "int32"),
        (3, "int32"),
        (np.array(True), "bool"),
        (jax.random.key(0), "key<fry>"),
    ],
    ids=lambda x: str(x)[:8],
)
def test_integers_and_keys_are_named(leaf, dtype):
    params = {"w": 1.0, "layer": {"leaf": leaf}}
    for options in ({}, {"policy": "mixed_bfloat16"}):
        grad = jaxmp.grad(lambda p: jnp.float32(p["w"]) ** 2, **options)
        with pytest.raises(TypeError, match=f"`layer/leaf` has no .* is {dtype}"):
            jax.jit(grad)(params)
    grads = jaxmp.grad(lambda p: p["w"] ** 2, allow_int=True)(params)  # as it says
    assert grads["w"] == 2.0
    assert grads["layer"]["leaf"].dtype == jax.dtypes.float0


def test_complex_parameters_are_differentiated_as_in_jax():
    z = jnp.array(3.0 + 4.0j)
    scaled = jaxmp.value_and_grad(lambda z: jnp.abs(z), loss_scale=8)(z)
    chex.assert_trees_all_equal(scaled, jax.value_and_grad(jnp.abs)(z))


def test_empty_trees_and_none_leaves_pass():
    in_16_bits = {"policy": "float16", "loss_scale": 1.0}
    loss, grads = jaxmp.value_and_grad(lambda p: jnp.float32(2), **in_16_bits)({})
    assert (loss, grads) == (2, {})
    grads = jaxmp.grad(lambda p: p["w"], **in_16_bits)({"w": 1.0, "n": None})
    assert grads == {"w": 1.0, "n": None}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"reduction": "max"}, ValueError, '"mean" or "sum", but is \'max\''),
        ({"accum_steps": 0}, ValueError, "`accum_steps` must be at least 1"),
        ({"accum_steps": 2.0}, TypeError, "`accum_steps` must be an integer"),
        ({"accum_steps": True}, TypeError, "must be an integer, but is True"),
        ({"accum_steps": 2}, ValueError, "needs `batch_argnums`"),
        ({"policy": "float17"}, ValueError, "Did you mean `float1"),
        ({"policy": jnp.float16(1)}, TypeError, "needs a string or a policy"),
    ],
    ids=str,
)
def test_a_bad_option_is_named_before_anything_runs(options, error, message):
    with pytest.raises(error, match=message):
        jaxmp.value_and_grad(loss_fn, **options)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (jnp.ones((12, 2)), r"`accum_steps=8`.*argument 1 has the shape \[12, 2\]"),
        ({"image": jnp.ones(12)}, r"argument 1, leaf `image`, has the shape \[12\]"),
        (jnp.float32(1), r"argument 1 has the shape \[\]"),
        (jnp.zeros(2, jnp.uint32), "raw PRNG key.*jax.random.key"),
    ],
    ids=str,
)
def test_a_batch_that_cannot_be_split_is_named(batch, message):
    accumulate = jaxmp.grad(lambda w, x: w, accum_steps=8, batch_argnums=1)
    with pytest.raises(ValueError, match=message):
        accumulate(1.0, batch)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"argnums": 1}, TypeError, "`argnums=1` needs more positional arguments"),
        (
            {"accum_steps": 2, "batch_argnums": 1},
            TypeError,
            "`batch_argnums=1` needs more positional",
        ),
        (
            {"accum_steps": 2, "batch_argnums": 0},
            ValueError,
            "Argument 0 is in `argnums` and in `batch_argnums`",
        ),
    ],
    ids=str,
)
def test_a_bad_position_is_named(options, error, message):
    with pytest.raises(error, match=message):
        jaxmp.grad(lambda w, **batch: w, **options)(1.0, x=jnp.ones(4))


def test_labels_that_were_forgotten_are_named_beside_parts_of_several_sizes():
    grad_fn = jaxmp.grad(lambda w, *batch: w, accum_steps=2, batch_argnums=(1, 2))
    images, boxes, labels = jnp.ones((8, 3)), jnp.ones((16, 4)), jnp.ones(8)
    with pytest.raises(ValueError, match=r"Argument 3 has 8 .*batch_argnums=\(1, 2, 3"):
        grad_fn(1.0, images, boxes, labels)


def _conditional(w, x):
    return lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: jnp.zeros((4, 8)), x)


def _carried(w, x):
    return lax.scan(lambda h, _: (h @ w + jnp.ones(8), None), x, length=3)[0]


# What JAX takes of float32 arrays, and not of 16-bit ones.
REFUSED = {
    "fft": lambda w, x: jnp.fft.irfft(jnp.fft.rfft(x @ w)),
    "cholesky": lambda w, x: x @ jnp.linalg.cholesky(w),
    "solve": lambda w, x: x @ jnp.linalg.solve(w, x.T),
    "switch": _conditional,
    "select": lambda w, x: lax.select(x > 0, x @ w, jnp.zeros((4, 8))),
    "add": lambda w, x: lax.add(x @ w, jnp.zeros((4, 8))),
    "scan": _carried,
}


def note_of(fun, *args):
    """Returns the note of an error that what was cast has made."""
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        fun(*args)
    (note,) = [x for x in caught.value.__notes__ if "has cast" in x]
    assert "test_grad.py:" in note
    return note


@pytest.mark.parametrize("name", REFUSED)
def test_where_jax_refuses_what_was_cast_a_note_says_what_to_do(name):
    model = REFUSED[name]
    args = jnp.eye(8) * 2, jnp.ones((4, 8))
    note = note_of(jaxmp.with_policy(model, "mixed_bfloat16"), *args)
    assert "`with_policy` has cast" in note
    assert 'jaxmp.autocast(fun, "bfloat16")' in note
    jax.jit(jaxmp.autocast(model, "bfloat16"))(*args)  # as the note says


@pytest.mark.parametrize("name", ["cholesky", "select", "scan"])
def test_so_it_does_for_a_policy_of_value_and_grad(name):
    def loss(w, x):
        return jnp.mean(REFUSED[name](w, x.astype(w.dtype)).astype(jnp.float32))

    fun = jaxmp.value_and_grad(loss, policy="mixed_bfloat16")
    assert "`value_and_grad`" in note_of(fun, jnp.eye(8) * 2, jnp.ones((4, 8)))


@pytest.mark.parametrize(
    "fun",
    [lambda w, x: w @ x, lambda w, x: jnp.linalg.cholesky(x), lambda w, x: w.missing()],
    ids=["shapes", "not_square", "attribute"],
)
def test_errors_that_the_cast_has_not_made_get_no_note_of_it(fun):
    with pytest.raises((TypeError, ValueError, AttributeError)) as caught:
        jaxmp.with_policy(fun, "mixed_bfloat16")(jnp.eye(8), jnp.ones((4, 5)))
    assert not [x for x in getattr(caught.value, "__notes__", []) if "has cast" in x]
