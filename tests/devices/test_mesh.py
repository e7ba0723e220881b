"""Many devices: what is reduced and gathered, where, and in which dtype."""

import functools
import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from benchmarks.counting.collectives import collectives, partitioned
from conftest import assert_near, crossed, mapped, normal
from jaxmp._compiled.text import bits

CPUS = np.array(jax.devices("cpu")[:8])
DATA = Mesh(CPUS, ("data",))
GRID = Mesh(CPUS.reshape(4, 2), ("data", "model"))


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(16)(x)


MODEL = MLP()
X = normal(0, 64, 32)
Y = jnp.asarray(np.arange(64) % 16)
PARAMS = {
    "params": {
        "Dense_0": {"kernel": normal(1, 32, 64, scale=1 / 6), "bias": normal(2, 64)},
        "Dense_1": {"kernel": normal(3, 64, 16, scale=1 / 8), "bias": normal(4, 16)},
    }
}


def loss_of(apply):
    def loss_fn(params, x, y):
        logits = apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return loss_fn


def exchanged(fun, *args):
    """Returns the collectives of a function."""
    return collectives(partitioned(jax.jit(fun), *args))


# The loss scale over a mesh


def over_four(step, how, specs):
    """Runs a step on four devices, or for four parts, and returns its states."""
    if how in ("shard_map", "unchecked shard_map"):
        mesh, stacked = Mesh(jax.devices()[:4], ("data",)), P("data")
        is_checked = how == "shard_map"
        own = lambda *args: jax.tree.map(lambda x: x[None], step(*args))  # noqa: E731
        return jax.jit(mapped(own, mesh, specs, stacked, is_checked))
    axes = tuple(0 if spec else None for spec in specs)
    transform = {"pmap": jax.pmap, "vmap": jax.vmap}[how]
    return transform(step, axis_name="data", in_axes=axes)


HOWS = ["shard_map", "unchecked shard_map", "pmap", "vmap"]


@crossed("how poison", HOWS, [jnp.inf, 1.0])
def test_averaged_gradients_need_no_axis_for_their_loss_scale(how, poison):
    x = jnp.ones((8, 4)).at[3, 1].multiply(poison)
    x = x if "shard_map" in how else x.reshape(4, 2, 4)
    shardings = None if how == "shard_map" else P()

    def states(axis_name):
        tx = jaxmp.loss_scaling(optax.sgd(0.1), "float16", axis_name=axis_name)

        def step(w, state, x):
            _, grads = jaxmp.value_and_grad(
                lambda w, x: jnp.mean((x @ w) ** 2),
                loss_scale=state,
                axis_name="data",
                shardings=shardings,
            )(w, x)
            updates, state = tx.update(grads, state, w)
            return optax.apply_updates(w, updates), state

        w = jnp.ones((4, 2))
        return over_four(step, how, (P(), P(), P("data")))(w, tx.init(w), x)

    without, with_axis = states(None), states("data")
    chex.assert_trees_all_equal(without, with_axis)
    assert without[1].skipped.tolist() == [poison > 1] * 4


@pytest.mark.parametrize("how", HOWS)
def test_gradients_of_sharded_parameters_need_one(how):
    grads = jnp.ones((4, 2)).at[1, 0].set(jnp.inf)
    grads = grads if "shard_map" in how else grads[:, None]

    def skipped(axis_name):
        tx = jaxmp.loss_scaling(optax.sgd(0.1), "float16", axis_name=axis_name)
        state = tx.init(jnp.ones((1, 2)))
        step = lambda state, grads: tx.update(grads, state)[1].skipped  # noqa: E731
        return over_four(step, how, (P(), P("data")))(state, grads).tolist()

    assert skipped("data") == [1, 1, 1, 1]
    if how == "shard_map":
        with pytest.raises(ValueError, match="Pass these axes as `axis_name`"):
            skipped(None)
    else:
        assert skipped(None) == [0, 1, 0, 0]


# Gradients over a mesh

FORMS = ["mesh", "shard_map", "unchecked shard_map"]


def over_devices(loss_fn, form, batched, **options):
    """Puts a loss over eight devices in one of three ways, with one signature."""
    options["batch_argnums"] = batched
    if form == "mesh":
        return jaxmp.value_and_grad(loss_fn, mesh=DATA, **options)
    if form == "unchecked shard_map":
        options["shardings"] = P()  # the same on every device
    grad_fn = jaxmp.value_and_grad(loss_fn, axis_name="data", **options)

    def on_device(*args):
        value, grads = grad_fn(*args)
        loss, aux = value if options.get("has_aux") else (value, None)
        return (loss, grads), jax.tree.map(lambda x: x[None], aux)

    def step(*args):
        (loss, grads), aux = mapped(
            on_device,
            DATA,
            tuple(
                P("data") if i in batched and x.ndim else P()
                for i, x in enumerate(args)
            ),
            (P(), P("data")),
            check_vma=form == "shard_map",
        )(*args)
        return ((loss, aux) if options.get("has_aux") else loss), grads

    return step


@functools.cache
def on_one_device(name):
    loss_fn = loss_of(jaxmp.with_policy(MODEL.apply, name))
    return jax.jit(jaxmp.value_and_grad(loss_fn, loss_scale=8.0))(PARAMS, X, Y)


@pytest.mark.parametrize(
    ("mesh", "name", "steps"), [(DATA, "mixed_float16", 4), (GRID, "float32", 4)]
)
def test_a_mesh_gives_the_gradients_of_one_device(mesh, name, steps):
    policy = jaxmp.get_policy(name)
    loss_fn = loss_of(jaxmp.with_policy(MODEL.apply, policy))
    expected = on_one_device(name)
    step = jaxmp.value_and_grad(
        loss_fn,
        policy=policy,
        loss_scale=8.0,
        accum_steps=steps,
        batch_argnums=(1, 2),
        axis_name="data",
        mesh=mesh,
    )
    result = jax.jit(step)(PARAMS, X, Y)
    chex.assert_trees_all_equal_shapes_and_dtypes(result, expected)
    assert_near(result, expected, policy.compute_dtype, 16)


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize(("compute", "reduce"), [("bf16", None), ("f16", "bf16")])
def test_gradients_are_summed_in_the_reduce_dtype_once(compute, reduce):
    text = f"p=f32,c={compute},o=f32" + (f",r={reduce}" if reduce else "")
    step = jaxmp.value_and_grad(
        loss_of(jaxmp.with_policy(MODEL.apply, text)),
        policy=text,
        loss_scale=2.0**10,
        accum_steps=4,
        batch_argnums=(1, 2),
        mesh=DATA,
    )
    found = exchanged(step, PARAMS, X, Y)
    sums = [c for c in found if c.kind == "all-reduce" and c.size > 1]
    assert sorted(c.size for c in sums) == sorted(
        x.size for x in jax.tree.leaves(PARAMS)
    )
    assert {c.dtype for c in sums} == {reduce or "f32"}
    assert {c.times for c in found} == {1}  # outside of the loop


@pytest.mark.parametrize(
    ("form", "reduce"), [*((x, "") for x in FORMS), ("unchecked shard_map", ",r=f16")]
)
def test_a_float16_sum_does_not_overflow_where_the_mean_does_not(form, reduce):
    def loss_fn(w, x):
        return jnp.float32((w.astype(x.dtype) * x).mean())

    def run(w, x):  # w cast by us, w cast in the function, and two micro-batches
        cast = {"policy": "p=f32,c=f16,o=f32" + reduce}
        for options in (cast, {}, {**cast, "accum_steps": 2}):
            yield over_devices(loss_fn, form, (1,), loss_scale=1.0, **options)(w, x)

    x = jnp.full(16, 2e4, jnp.float16)  # the sum of eight is Inf
    for loss, grad in jax.jit(lambda *args: list(run(*args)))(jnp.float32(1), x):
        assert loss == 2e4
        np.testing.assert_allclose(grad, 2e4, rtol=2e-3)


def test_sum_serves_unequal_counts_of_tokens():
    mask = (jnp.arange(64) < 9).astype(jnp.float32)  # two devices have all of them

    def masked(params, x, y, mask, count):
        losses = optax.softmax_cross_entropy_with_integer_labels(
            MODEL.apply(params, x), y
        )
        return (losses * mask).sum() / count

    args = PARAMS, X, Y, mask, mask.sum()
    steps = [
        jaxmp.value_and_grad(
            masked,
            accum_steps=count,
            batch_argnums=(1, 2, 3),
            reduction="sum",
            mesh=DATA,
        )
        for count in (1, 2)
    ]
    expected = jax.jit(jax.value_and_grad(masked))(*args)
    for result in jax.jit(lambda *args: [step(*args) for step in steps])(*args):
        assert_near(result, expected, "float32", 16)


def test_keys_differ_by_device_and_micro_batch_and_aux_is_kept_of_each():
    def loss(w, x, key):
        noise = jax.random.uniform(key)
        return w * noise, {"noise": noise, "x": x}

    def run(*args):
        options = {"has_aux": True, "accum_steps": 2}
        return [over_devices(loss, f, (1, 2), **options)(*args) for f in FORMS]

    x = jnp.arange(32)
    first, *others = jax.jit(run)(jnp.float32(2), x, jax.random.key(0))
    (value, aux), grad = first
    assert aux["noise"].shape == (8, 2)
    assert len(np.unique(aux["noise"])) == 16
    np.testing.assert_array_equal(aux["x"], x.reshape(8, 2, 2).swapaxes(1, 2))
    assert_near((grad, value), (aux["noise"].mean(), 2 * grad), "float32", 4)
    for other in others:
        chex.assert_trees_all_equal(other, first)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_both_kinds_of_mesh_axes_work(kind):
    axis_type = getattr(jax.sharding.AxisType, kind)
    mesh = Mesh(CPUS, ("data",), axis_types=(axis_type,))
    loss_fn = loss_of(MODEL.apply)
    step = jaxmp.value_and_grad(loss_fn, batch_argnums=(1, 2), mesh=mesh)
    expected = on_one_device("float32")
    assert_near(jax.jit(step)(PARAMS, X, Y), expected, "float32", 16)


def test_the_mesh_form_works_without_jit():
    # And says nothing of the scale, which is read in each step.
    state = jaxmp.loss_scaling(optax.sgd(0.1), "mixed_float16").init(jnp.ones(2))
    step = jaxmp.value_and_grad(
        lambda w, x: (w * x).mean(), batch_argnums=1, mesh=DATA, loss_scale=state
    )
    assert step(jnp.float32(2), jnp.arange(8.0)) == (7, 3.5)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(x.shape[-1])(x)), None


class Scanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        return layers()(x, None)[0]


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):  # begins with a carry of zeros
        return nn.RNN(nn.SimpleCell(8))(x.reshape(-1, 4, 8)).mean(1)


LAYERS = {c.__name__: c for c in (Scanned, Recurrent)}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_layers_give_over_devices_what_they_give_on_one(layer):
    model = layer()
    params = jax.jit(model.init)(jax.random.key(0), X)

    def loss_fn(params, x):
        return (model.apply(params, x) ** 2).mean()

    # With the check, JAX refuses a scan whose carry is the same on all devices before
    # it and differs after.
    forms = [f for f in FORMS if not (layer is Recurrent and f == "shard_map")]

    def run(params, x):
        steps = [over_devices(loss_fn, f, (1,), accum_steps=2) for f in forms]
        return jax.value_and_grad(loss_fn)(params, x), [s(params, x) for s in steps]

    expected, results = jax.jit(run)(params, X)
    for result in results:
        assert_near(result, expected, "float32", 16)


class Normed(nn.Module):
    axis_name: str | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, axis_name=self.axis_name)(x)
        return nn.Dense(4)(x)


def test_batch_norm_synchronises_over_the_axis():
    variables = jax.jit(Normed().init)(jax.random.key(0), X)

    def loss_of(model):
        def loss_fn(params, stats, x):
            out, new = model.apply(
                {"params": params, "batch_stats": stats}, x, mutable=["batch_stats"]
            )
            return (out**3).mean(), new["batch_stats"]

        return loss_fn

    def run(*args):
        steps = [
            over_devices(loss_of(Normed("data")), f, (2,), has_aux=True) for f in FORMS
        ]
        alone = jax.value_and_grad(loss_of(Normed()), has_aux=True)
        return alone(*args), [step(*args) for step in steps]

    args = variables["params"], variables["batch_stats"], X
    ((loss, stats), grads), results = jax.jit(run)(*args)
    for (synchronised, new), new_grads in results:
        assert_near((synchronised, new_grads), (loss, grads), "float32", 64)
        for device in range(8):
            one = jax.tree.map(lambda x: x[device], new)  # noqa: B023
            assert_near(one, stats, "float32", 16)


# Skips and states


def test_forgetting_axis_name_in_the_gradients_is_named():
    # JAX would return the sum of the gradients, here taken in float16, and Inf.
    def loss_fn(w, x):
        return jnp.float32((w.astype(x.dtype) * x).mean())

    def averaged(w, x):
        return jax.lax.pmean(loss_fn(w, x), "data")

    def step(fun):
        grad_fn = jaxmp.value_and_grad(fun)
        specs = P(), P("data")
        return jax.shard_map(grad_fn, mesh=DATA, in_specs=specs, out_specs=P())

    args = jnp.float32(1), jnp.full(8, 2e4, jnp.float16)
    with pytest.raises(ValueError, match=r"Pass `axis_name='data'` to"):
        jax.jit(step(loss_fn))(*args)
    assert jax.jit(step(averaged))(*args)[0] == 2e4  # the user's own reduction stays


def test_replicas_with_a_state_each_need_no_axis_name():
    tx = jaxmp.loss_scaling(optax.sgd(0.1), "float16")

    def step(state, grads):
        state = jax.tree.map(lambda x: x[0], state)
        return jax.tree.map(lambda x: x[None], tx.update(grads[0], state)[1])

    states = jax.vmap(tx.init)(jnp.ones((8, 1)))
    grads = jnp.ones((8, 1)).at[3].set(jnp.inf)
    replicas = jax.shard_map(step, mesh=DATA, in_specs=P("data"), out_specs=P("data"))
    result = jax.jit(replicas)(states, grads)
    assert result.skipped.tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


def fsdp_shardings(mesh, *axes):
    def sharding(x):
        spec = axes if x.ndim > 1 else axes[:1]
        return NamedSharding(mesh, P(*spec))

    return jax.tree.map(sharding, PARAMS)


FACTORED = optax.adafactor(0.1, min_dim_size_to_factor=16)


@pytest.mark.parametrize("inner", [optax.adam(0.1), FACTORED])
def test_the_state_lies_where_the_parameters_lie_and_stays_there(inner):
    tx = jaxmp.loss_scaling(inner, "mixed_float16")
    shardings = fsdp_shardings(GRID, "data", "model")
    params = jax.device_put(PARAMS, shardings)
    state_shardings = jaxmp.init_shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=state_shardings)(params)
    moments = [x for x in jax.tree.leaves(state.inner_state) if x.shape == (32, 64)]
    expected = params["params"]["Dense_0"]["kernel"].sharding
    assert all(x.sharding == expected for x in moments)
    assert moments or inner is FACTORED
    assert state.loss_scale.sharding.is_fully_replicated

    @jax.jit
    def step(params, state, x, y):
        grads = jaxmp.grad(
            loss_of(jaxmp.with_policy(MODEL.apply, "mixed_float16")),
            loss_scale=jaxmp.get_loss_scale(state),
        )(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    x, y = jax.device_put((X, Y), NamedSharding(GRID, P("data")))
    pinned = jax.jit(step, out_shardings=(shardings, state_shardings))
    for _ in range(3):
        params, state = pinned(params, state, x, y)
    assert pinned._cache_size() == 1
    for array, sharding in zip(
        jax.tree.leaves((params, state)),
        jax.tree.leaves((shardings, state_shardings)),
        strict=True,
    ):
        assert array.sharding.is_equivalent_to(sharding, array.ndim)
    assert jaxmp.last_step_finite(state)


@pytest.mark.parametrize(
    ("axes", "name"), [((), "mixed_float16"), (("data", "model"), "mixed_bfloat16")]
)
def test_jit_with_shardings_gives_the_gradients_of_one_device(axes, name):
    policy = jaxmp.get_policy(name)
    shardings = fsdp_shardings(GRID, *axes)
    params = jax.device_put(PARAMS, shardings)
    x, y = jax.device_put((X, Y), NamedSharding(GRID, P("data")))

    @jax.jit
    def step(params, x, y):
        def loss_fn(params, x, y):
            params = policy.cast_to_compute(params, shardings=shardings)
            return loss_of(jaxmp.with_policy(MODEL.apply, policy))(params, x, y)

        return jaxmp.value_and_grad(loss_fn, loss_scale=8.0)(params, x, y)

    assert_near(step(params, x, y), on_one_device(name), policy.compute_dtype, 16)


# Gathers


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize(
    ("mesh", "axes", "name"),
    [
        (DATA, ("data",), "mixed_float16"),
        (DATA, ("data",), "float32"),
        (GRID, ("data", "model"), "mixed_bfloat16"),
    ],
)
def test_weights_are_gathered_in_the_compute_dtype(mesh, axes, name):
    policy = jaxmp.get_policy(name)
    shardings = fsdp_shardings(mesh, *axes)
    params = jax.device_put(PARAMS, shardings)
    x = jax.device_put(X, NamedSharding(mesh, P("data")))

    def forward(params, x):
        weights = policy.cast_to_compute(params, shardings=shardings)
        # The layer gathers what it needs; asking for all of it is the worst case.
        weights = jax.lax.with_sharding_constraint(weights, NamedSharding(mesh, P()))
        return jaxmp.with_policy(MODEL.apply, policy)(weights, x)

    found = exchanged(forward, params, x)
    gathered = [c for c in found if c.kind == "all-gather"]
    moved = sum(bits(c.dtype) * c.size for c in gathered)
    whole = sum(x.size for x in jax.tree.leaves(PARAMS))
    wide = 32 if name == "float32" else 16
    assert {bits(c.dtype) for c in gathered} == {wide}
    rounds = 1 if mesh is DATA else 1.6  # matrices are gathered over one axis first
    assert whole * wide <= moved <= rounds * whole * wide


@pytest.mark.usefixtures("compiled_anew")
def test_micro_batches_move_no_rows_under_jit():
    grad_fn = jaxmp.value_and_grad(
        loss_of(MODEL.apply), accum_steps=4, batch_argnums=(1, 2)
    )
    data = jax.device_put((X, Y), NamedSharding(DATA, P("data")))
    params = jax.device_put(PARAMS, NamedSharding(DATA, P()))
    found = exchanged(grad_fn, params, *data)
    assert {c.kind for c in found} == {"all-reduce"}
    sizes = {x.size for x in jax.tree.leaves(PARAMS)} | {1}  # gradients and the loss
    assert {c.size for c in found} <= sizes


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("steps", [1, 4])
def test_a_mesh_gathers_pinned_copies_in_sixteen_bits_and_once(steps):
    shardings = fsdp_shardings(DATA, "data")
    params = jax.device_put(PARAMS, shardings)
    policy = jaxmp.get_policy("mixed_bfloat16")
    grad_fn = jaxmp.value_and_grad(
        loss_of(jaxmp.with_policy(MODEL.apply, policy)),
        policy=policy,
        accum_steps=steps,
        batch_argnums=(1, 2),
        mesh=DATA,
    )

    def step(params, x, y):
        return grad_fn(policy.cast_to_compute(params, shardings=shardings), x, y)

    found = exchanged(step, params, X, Y)
    gathers = [c for c in found if c.kind == "all-gather"]
    assert sum(c.size for c in gathers) == sum(x.size for x in jax.tree.leaves(PARAMS))
    assert {c.dtype for c in gathers} == {"bf16"}
    assert {c.times for c in found} == {1}  # outside of the loop


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis_name": "dta"}, r"axes of the mesh, \('data',\), but 'dta' is not"),
        ({"axis_name": ("data", "model")}, "'model' is not one"),
        ({"batch_argnums": None}, "`mesh` needs `batch_argnums`"),
    ],
    ids=str,
)
def test_a_bad_option_is_named(options, message):
    options = {"mesh": DATA, "batch_argnums": 1} | options
    with pytest.raises(ValueError, match=message):
        jaxmp.value_and_grad(lambda w, x: w, **options)


@pytest.mark.parametrize(
    ("steps", "size", "message"),
    [
        (1, 12, r"8 devices must divide.*argument 1, leaf `x`, has the shape \[12\]"),
        (2, 24, r"`accum_steps=2` on 8 devices must divide.*multiple of 16"),
    ],
)
def test_a_batch_that_does_not_divide_is_named(steps, size, message):
    step = jaxmp.grad(lambda w, b: w, accum_steps=steps, batch_argnums=1, mesh=DATA)
    with pytest.raises(ValueError, match=message):
        step(1.0, {"x": jnp.ones(size)})


@pytest.mark.parametrize("function", ["value_and_grad", "loss_scaling", "all_finite"])
def test_an_axis_that_is_not_around_is_named(function):
    tx = jaxmp.loss_scaling(optax.sgd(0.1), "float16", axis_name="dta")
    w = jnp.ones(2)
    calls = {
        "value_and_grad": jaxmp.grad(lambda w: w.sum(), axis_name="dta"),
        "loss_scaling": lambda w: tx.update(w, tx.init(w))[0],
        "all_finite": lambda w: jaxmp.all_finite(w, axis_name=("data", "dta")),
    }
    call = calls[function]
    inside = jax.shard_map(call, mesh=DATA, in_specs=P(), out_specs=P())
    with pytest.raises(
        ValueError, match=r"\('data',\), but 'dta' is not one. Pass the"
    ):
        jax.jit(inside)(w)
    with pytest.raises(ValueError, match=r"no `axis_name` under plain"):
        jax.jit(call)(w)


@pytest.mark.parametrize(
    ("shardings", "message"),
    [
        ({"w": P("data")}, "tree prefix"),
        ({"w": P("data"), "b": P(None, "data")}, "rank"),
        ({"w": P("data"), "b": None}, "None"),
    ],
    ids=["structure", "rank", "none"],
)
def test_mismatched_shardings_are_named(shardings, message):
    shardings = {
        k: spec if spec is None else NamedSharding(DATA, spec)
        for k, spec in shardings.items()
    }
    policy = jaxmp.get_policy("mixed_bfloat16")
    params = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
    with pytest.raises(
        ValueError, match=f"(?s)x.sharding, params.*JAX says.*{message}"
    ):
        jax.jit(lambda p: policy.cast_to_compute(p, shardings=shardings))(params)


def test_arguments_on_other_devices_than_the_mesh_are_named():
    step = jaxmp.grad(lambda p, x: p["w"] * x.mean(), batch_argnums=1, mesh=DATA)
    half = Mesh(CPUS[:4], ("data",))
    params = jax.device_put({"w": jnp.float32(1)}, NamedSharding(half, P()))
    with pytest.raises(ValueError, match=r"`0/w` was put on 4.*`jax.device_put"):
        step(params, jnp.ones(8))


def test_parameters_that_lie_on_no_mesh_are_named():
    tx = jaxmp.loss_scaling(optax.sgd(0.1), "float16")
    with pytest.raises(ValueError, match=r"lie on one mesh.*device_put"):
        jaxmp.init_shardings(tx, PARAMS)


def constrained_on_its_mesh(params, x):
    sharding = NamedSharding(DATA, P("data"))
    return jax.lax.with_sharding_constraint(x @ params, sharding).mean()


def constrained_by_flax(params, x):
    return nn.with_logical_constraint(x @ params, ("batch", None)).mean()


def boxed(params, x):
    box = nn.Partitioned(params, (None, "data"))
    return (x @ nn.meta.unbox(box)).mean()


@pytest.mark.parametrize("loss", [constrained_on_its_mesh, constrained_by_flax, boxed])
def test_a_constraint_on_an_axis_of_the_mesh_is_named_with_its_cure(loss):
    step = jaxmp.value_and_grad(loss, batch_argnums=1, mesh=DATA)
    if loss is not constrained_on_its_mesh:  # which JAX refuses when `jit` has traced
        step = jax.jit(step)
    rules = nn.logical_axis_rules([("batch", "data")])
    args = jnp.ones((32, 8)), X
    with jax.set_mesh(DATA), rules:
        with pytest.raises(ValueError, match=r"(?i)manual") as caught:
            step(*args)
        cures = "'data' again.*logical_axis_rules.*meta.unbox.*leave `mesh=` out"
        assert re.search(cures, " ".join(caught.value.__notes__))
        jax.jit(jaxmp.value_and_grad(loss))(*args)  # the last of them
        if loss is constrained_by_flax:
            with nn.logical_axis_rules([]):
                step(*args)


def test_other_errors_under_a_mesh_carry_no_note():
    def loss(params, x):
        raise ValueError("no")

    step = jaxmp.value_and_grad(loss, batch_argnums=1, mesh=DATA)
    with pytest.raises(ValueError, match="no") as caught:
        step(1.0, jnp.ones(8))
    assert "constrain" not in " ".join(getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize("function", ["value_and_grad", "grad", "autocast"])
def test_a_reduce_dtype_that_nothing_uses_is_said_aloud(function):
    policy = "p=f32,c=bf16,o=f32,r=bf16"
    cure = "with `axis_name`" if function == "autocast" else "Pass one of the two"
    with pytest.warns(UserWarning, match=f"`reduce_dtype`.*is not used.*{cure}"):
        getattr(jaxmp, function)(lambda w: w, policy=policy)


def test_a_reduce_dtype_is_not_used_where_every_parameter_is_sharded():
    policy = "p=f32,c=f32,o=f32,r=bf16"
    w = 1 + jnp.arange(8) / 2**12  # rounds in bfloat16
    summed = jnp.full(1, 1.0)

    def loss(params, x):
        return (params["own"] * x + params.get("same", 0)).sum()

    def run(params):
        specs = {"own": P("data"), "same": P()}
        specs = {name: specs[name] for name in params}
        grad_fn = jaxmp.grad(loss, policy=policy, axis_name="data")
        on_devices = jax.shard_map(
            grad_fn, mesh=DATA, in_specs=(specs, P("data")), out_specs=specs
        )
        return jax.jit(on_devices)(params, w)["own"]

    np.testing.assert_array_equal(run({"own": w, "same": summed}), w / 8)
    with pytest.warns(UserWarning, match="`reduce_dtype`.*is not used.*every"):
        run({"own": w})
