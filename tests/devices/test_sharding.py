"""Eight devices: one decision, one scale, and the numbers of a single device."""

from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from benchmarks.counting.collectives import collectives
from conftest import assert_near, mapped, normal

MESH = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
# Small integers and powers of two: every sum is exact, in any order.
PARAMS = {
    "w": jnp.asarray(np.arange(-8, 8, dtype=np.float32).reshape(8, 2)),
    "b": jnp.array([1.0, -0.0]),
}
X = jnp.asarray((np.arange(128, dtype=np.float32) % 7 - 3).reshape(16, 8))
INNER = optax.chain(optax.trace(0.5), optax.scale(-(2.0**-6)))
TX = jaxmp.dynamic_loss_scale(INNER, init_scale=8, growth_interval=2)


def loss_fn(params, x):
    return (x @ params["w"] + params["b"]).mean()


def step(tx, params, state, x, **over):
    grads = jaxmp.grad(loss_fn, loss_scale=jaxmp.get_loss_scale(state), **over)(
        params, x
    )
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def batches():
    """Returns batches of two rows for each device; two have a bad entry on one."""
    inf, nan = (X.at[5, 3].set(poison) for poison in (jnp.inf, jnp.nan))
    return [X, inf, 2 * X, X, nan, X]


def run(step, tx):
    params, state = PARAMS, tx.init(PARAMS)
    for x in batches():
        params, state = step(params, state, x)
    return params, state


@cache
def on_one_device(tx):
    return run(jax.jit(partial(step, tx)), tx)


def put(tree, spec_of):
    return jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(MESH, spec_of(x))), tree
    )


def replicated(x):
    return P()


def by_row(x):
    return P("data") if x.ndim == 2 else P()


# Plain jit


STATIC = jaxmp.static_loss_scale(INNER, 8)


@pytest.mark.parametrize(("tx", "spec_of"), [(TX, by_row), (STATIC, replicated)])
def test_jit_with_shardings_is_the_run_of_one_device(tx, spec_of):
    params = put(PARAMS, spec_of)
    state = put(tx.init(PARAMS), spec_of)
    shardings = jax.tree.map(lambda x: x.sharding, (params, state))
    sharded_step = jax.jit(partial(step, tx))
    for x in batches():
        x = jax.device_put(x, NamedSharding(MESH, P("data")))
        params, state = sharded_step(params, state, x)
        for result, sharding in zip(
            jax.tree.leaves((params, state)), jax.tree.leaves(shardings), strict=True
        ):
            assert result.sharding.is_equivalent_to(sharding, result.ndim)
    chex.assert_trees_all_equal((params, state), on_one_device(tx))
    assert state.skipped == 2
    for x in state[:-1]:  # every device holds the same decision
        assert len({shard.data.item() for shard in x.addressable_shards}) == 1


def test_eager_init_and_update_keep_the_sharding_of_the_parameters():
    params = put(PARAMS, by_row)
    state = TX.init(params)
    assert state.inner_state[0].trace["w"].sharding == params["w"].sharding
    updates, state = TX.update(params, state, params)
    for w in (updates["w"], state.inner_state[0].trace["w"]):
        assert w.sharding.is_equivalent_to(params["w"].sharding, 2)


def test_no_gradient_moves_to_be_checked():
    # Alike but for a number in their names, and sharded in three ways.
    specs = [P("data"), P(None, "data"), P(), P("data")]
    grads = {f"layer_{i}": jnp.ones((8, 8), jnp.float16) for i in range(4)}

    def shard(x, spec):
        return jax.device_put(x, NamedSharding(MESH, spec))

    for poisoned in [None, *grads]:
        tree = dict(grads)
        if poisoned:
            tree[poisoned] = tree[poisoned].at[7, 7].set(jnp.inf)
        tree = dict(zip(tree, map(shard, tree.values(), specs), strict=True))
        assert jax.jit(jaxmp.all_finite)(tree) == (poisoned is None)
    moved = collectives(jax.jit(jaxmp.all_finite).lower(tree).compile().as_text())
    assert moved
    assert not [c for c in moved if "f16" in c.dtype]


# shard_map


def same_on_all(check_vma):
    """Returns the options for parameters that are the same on every device."""
    return {"axis_name": "data"} | ({} if check_vma else {"shardings": P()})


def shard_map(fun, in_specs, out_specs, check_vma):
    return jax.jit(mapped(fun, MESH, in_specs, out_specs, check_vma))


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_agree_over_several_axes(check_vma):
    mesh = Mesh(MESH.devices.reshape(4, 2), ("data", "model"))
    finite = mapped(
        partial(jaxmp.all_finite, axis_name=("data", "model")),
        mesh,
        P("data", "model"),
        P(),
        check_vma=check_vma,
    )
    x = jnp.ones((4, 2))
    assert jax.jit(finite)(x)
    assert not jax.jit(finite)(x.at[2, 1].set(jnp.nan))


# Parameters that are sharded over the axes of the reduction. Each loss is written once;
# without a mesh its collectives do nothing, and that is the reference.

GRID = Mesh(MESH.devices.reshape(4, 2), ("data", "model"))
ROWS = normal(0, 64, 8)


def gather(x, axis, dim=0):
    return jax.lax.all_gather(x, axis, axis=dim, tiled=True) if axis else x


def fsdp_loss(params, x, data=None, model=None):
    del model
    out = x @ gather(params["w"], data) + params["b"]
    return (jnp.tanh(out) ** 2).mean()


def experts_loss(params, x, data=None, model=None):
    # Of every row eight tokens, each of which goes to another expert and comes back.
    del model
    tokens = x[:, :, None] * params["b"]
    if data:
        tokens = jax.lax.all_to_all(tokens, data, 1, 0, tiled=True)
    done = jnp.tanh(jnp.einsum("nei,eij->nej", tokens, params["w"]))
    if data:
        done = jax.lax.all_to_all(done, data, 0, 1, tiled=True)
    return ((done + x[:, :, None]) ** 2).mean()


def tensor_loss(params, x, data=None, model=None):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    out = hidden @ params["v"]
    if model:
        out = jax.lax.psum(out, model)
    return ((out + params["c"]) ** 2).mean()


def both_loss(params, x, data=None, model=None):
    params = params | {"w": gather(params["w"], data)}
    return tensor_loss(params, x, data, model)


TENSOR = {"w": P(None, "model"), "b": P("model"), "v": P("model"), "c": P()}
SHARDED = {
    "fsdp": (fsdp_loss, MESH, {"w": P("data"), "b": P()}),
    "experts": (experts_loss, MESH, {"w": P("data"), "b": P()}),
    "tensor": (tensor_loss, GRID, TENSOR),
    "tensor and fsdp": (both_loss, GRID, TENSOR | {"w": P("data", "model")}),
}


def sharded_params(name):
    shapes = {"w": (8, 8, 8) if name == "experts" else (8, 8), "b": (8,)}
    if SHARDED[name][1] is GRID:
        shapes |= {"v": (8, 4), "c": (4,)}
    return {
        leaf: normal(seed, *shape)
        for seed, (leaf, shape) in enumerate(shapes.items(), 1)
    }


@cache
def gradients_on_one_device(name):
    grad_fn = jax.jit(jax.value_and_grad(SHARDED[name][0]))
    return grad_fn(sharded_params(name), ROWS)


def assert_close(result, expected):
    assert_near(result, expected, "float32", 16)


def over_mesh(name, check_vma, wrap=lambda f: f, **options):
    """Returns the gradients of one of the losses, differentiated on each device."""
    loss, mesh, specs = SHARDED[name]
    axes = {"data": "data", "model": "model" if mesh is GRID else None}
    options = {"axis_name": mesh.axis_names, "batch_argnums": 1} | options
    grad_fn = jaxmp.value_and_grad(partial(loss, **axes), **options)
    return mapped(
        wrap(grad_fn), mesh, (specs, P("data")), (P(), specs), check_vma=check_vma
    )


@pytest.mark.parametrize(
    ("check_vma", "name"),
    [(True, "tensor and fsdp"), (False, "experts"), (False, "fsdp")],
)
def test_gradients_of_sharded_parameters_are_those_of_one_device(check_vma, name):
    _, mesh, specs = SHARDED[name]
    params = sharded_params(name)
    shardings = None if check_vma else specs

    @jax.jit
    def run(params, x):
        mean = over_mesh(name, check_vma, shardings=shardings)
        parts = over_mesh(
            name, check_vma, shardings=shardings, accum_steps=2, loss_scale=2.0**10
        )
        total = over_mesh(name, check_vma, shardings=shardings, reduction="sum")
        total = jax.tree.map(lambda x: x / mesh.size, total(params, x))
        return mean(params, x), parts(params, x), total

    for result in run(params, ROWS):
        assert_close(result, gradients_on_one_device(name))


@pytest.mark.parametrize("name", ["tensor", "tensor and fsdp"])
def test_an_axis_over_which_the_loss_is_one_may_be_left_out(name):
    # JAX knows that the loss is the same over "model", and counts it once.
    params = sharded_params(name)
    result = jax.jit(over_mesh(name, True, axis_name="data"))(params, ROWS)
    assert_close(result, gradients_on_one_device(name))


def test_without_the_check_an_axis_of_the_shardings_may_not_be_left_out():
    # JAX would add up the losses over "model", each of which is the whole.
    step = over_mesh("tensor", False, axis_name="data", shardings=TENSOR)
    with pytest.raises(
        ValueError, match=r"sharded over 'model'.*Pass `axis_name=\('data', 'model'\)`"
    ):
        jax.jit(step)(sharded_params("tensor"), ROWS)


def test_sharded_parameters_under_autocast_and_an_inner_jit():
    params = sharded_params("fsdp")
    expected = gradients_on_one_device("fsdp")
    for wrap in (jaxmp.autocast, jax.jit):
        result = jax.jit(over_mesh("fsdp", True, wrap))(params, ROWS)
        assert_near(result, expected, "bfloat16", 16)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_leaf_without_a_gradient_may_be_sharded(check_vma):
    params = {"w": ROWS[:8], "idle": ROWS[8:16], "n": jnp.arange(8), "none": None}
    specs = {"w": P("data"), "idle": P("data"), "n": P("data"), "none": None}
    grad_fn = jaxmp.grad(
        lambda p, x: ((x @ gather(p["w"], "data")) ** 2).mean(),
        allow_int=True,
        axis_name="data",
        shardings=specs,
    )

    def on_device(params, x):
        grads = grad_fn(params, x)
        assert grads.pop("n").dtype == jax.dtypes.float0
        return grads

    out_specs = {leaf: spec for leaf, spec in specs.items() if leaf != "n"}
    sharded = shard_map(on_device, (specs, P("data")), out_specs, check_vma)
    result = sharded(params, ROWS)
    expected = jax.grad(lambda w: ((ROWS @ w) ** 2).mean())(params["w"])
    assert_close(result["w"], expected)
    np.testing.assert_array_equal(result["idle"], 0)


@pytest.mark.parametrize("check_vma", [True, False])
def test_several_arguments_have_their_shardings(check_vma):
    def loss(w, x, b):
        return ((x @ gather(w, "data") + b) ** 2).mean()

    grad_fn = jaxmp.grad(
        loss, argnums=(0, 2), axis_name="data", shardings=(P("data"), P())
    )
    in_specs = P("data"), P("data"), P()
    sharded = shard_map(grad_fn, in_specs, (P("data"), P()), check_vma)
    expected = jax.grad(lambda w, b: ((ROWS @ w + b) ** 2).mean(), (0, 1))
    assert_close(sharded(ROWS[:8], ROWS, ROWS[8]), expected(ROWS[:8], ROWS[8]))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_step_of_sharded_parameters_is_that_of_one_device(check_vma):
    # The gradients of eight devices differ: those of the wrapper agree by its axis.
    tx = jaxmp.dynamic_loss_scale(
        INNER, init_scale=8, growth_interval=2, axis_name="data"
    )
    specs = {"w": P("data"), "b": P()}

    def gathered(params, x):
        return loss_fn(params | {"w": gather(params["w"], "data")}, x)

    def sharded_step(params, state, x):
        scale = jaxmp.get_loss_scale(state)
        grad_fn = jaxmp.grad(
            gathered,
            loss_scale=scale,
            axis_name="data",
            shardings=None if check_vma else specs,
        )
        updates, state = tx.update(grad_fn(params, x), state, params)
        return optax.apply_updates(params, updates), state

    trace = jax.tree.map(by_row, tx.init(PARAMS))
    both = specs, trace
    result = run(shard_map(sharded_step, (*both, P("data")), both, check_vma), tx)
    chex.assert_trees_all_equal(result, on_one_device(TX))
    assert result[1].skipped == 2


def compiled_vmap(*args, **kwargs):
    return jax.jit(jax.vmap(*args, **kwargs))


@pytest.mark.parametrize("over", [compiled_vmap, jax.pmap])
def test_vmap_and_pmap_need_to_be_told(over):
    def loss(w, x):
        return ((x @ gather(w, "i")) ** 2).mean()

    expected = jax.grad(lambda w: ((ROWS @ w) ** 2).mean())(ROWS[:8])
    grad_fn = partial(jaxmp.grad, loss, axis_name="i")
    args = ROWS[:8].reshape(8, 1, 8), ROWS.reshape(8, 8, 8)
    result = over(grad_fn(shardings=P("i")), axis_name="i")(*args)
    assert_close(result.reshape(8, 8), expected)
    with pytest.raises(ValueError, match=r"JAX does not know.*Pass `shardings="):
        over(grad_fn(), axis_name="i")(*args)

    def replicas(w, x):
        return ((x @ w) ** 2).mean()

    grad_fn = jaxmp.grad(replicas, axis_name="i", shardings=P())
    result = over(grad_fn, axis_name="i", in_axes=(None, 0))(ROWS[:8], args[1])
    for each in result:
        assert_close(each, expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_loss_that_is_averaged_already_has_the_same_gradients(check_vma):
    # JAX then knows that it is the same everywhere: an eighth of the gradient was lost.
    def averaged(params, x):
        return jax.lax.pmean(loss_fn(params, x), "data")

    grad_fn = jaxmp.value_and_grad(averaged, **same_on_all(check_vma))
    sharded = shard_map(grad_fn, (P(), P("data")), P(), check_vma)
    expected = jax.value_and_grad(loss_fn)(PARAMS, X)
    chex.assert_trees_all_equal(sharded(PARAMS, X), expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_numpy_and_python_numbers_are_parameters_over_devices(check_vma):
    def loss(params, x):
        return (params["a"] * params["b"] * x).sum()

    grad_fn = jaxmp.grad(loss, **same_on_all(check_vma))
    params = {"a": np.float32(2), "b": 1.0}
    sharded = shard_map(lambda x: grad_fn(params, x), P("data"), P(), check_vma)
    assert sharded(jnp.arange(8.0)) == {"a": 3.5, "b": 7}


# Where the shardings are not known, or are not what they are said to be


def test_shardings_that_are_not_known_are_asked_for():
    sharded = shard_map(
        jaxmp.grad(loss_fn, axis_name="data"), (P(), P("data")), P(), False
    )
    with pytest.raises(
        ValueError, match=r"Pass `shardings=jax.sharding.PartitionSpec\(\)` where"
    ):
        sharded(PARAMS, X)


def test_shardings_are_those_that_jax_knows():
    def run(shardings, spec):
        grad_fn = jaxmp.grad(loss_fn, axis_name="data", shardings=shardings)
        shard_map(grad_fn, (spec, P("data")), spec, True)(PARAMS, X)

    said = {"w": P("data"), "b": P()}
    with pytest.raises(
        ValueError, match=r"that `w` is sharded.*'data', but.*knows.*same on every"
    ):
        run(said, P())
    with pytest.raises(
        ValueError, match=r"that `w` is the same on every.*'data', but.*is sharded"
    ):
        run(P(), said)


@pytest.mark.parametrize(
    ("shardings", "message"),
    [
        ({"w": P()}, "structure of the differentiated arguments.*JAX says"),
        ({"w": P(), "b": None}, "structure of the differentiated arguments"),
        ((P(), P()), "structure of the differentiated arguments"),
        (P("dta"), r"axis 'dta', but there is none around.*\('data',\)"),
        ({"w": P(("data", "model")), "b": P()}, "axis 'model', but there is none"),
    ],
    ids=str,
)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shardings_that_do_not_fit_are_named(check_vma, shardings, message):
    grad_fn = jaxmp.grad(loss_fn, axis_name="data", shardings=shardings)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        shard_map(grad_fn, (P(), P("data")), P(), check_vma)(PARAMS, X)


def test_an_axis_that_is_not_manual_has_no_say_in_the_shardings():
    def on_device(params, x):
        said = {"w": NamedSharding(GRID, P(None, "model")), "b": P()}
        return jaxmp.grad(loss_fn, axis_name="data", shardings=said)(params, x)

    for check_vma in (True, False):
        sharded = jax.shard_map(
            on_device,
            mesh=GRID,
            in_specs=(P(), P("data")),
            out_specs=P(),
            axis_names={"data"},
            check_vma=check_vma,
        )
        result = jax.jit(sharded)(PARAMS, X)
        chex.assert_trees_all_equal(result, jax.grad(loss_fn)(PARAMS, X))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"axis_name": "data", "shardings": "data"}, TypeError, "but got 'data'"),
        (
            {"axis_name": "data", "shardings": P(P.UNCONSTRAINED)},
            ValueError,
            "has an unconstrained",
        ),
        ({"shardings": P()}, ValueError, "`shardings` needs `mesh`, or `axis_name`"),
        (
            {"shardings": "data", "mesh": MESH, "batch_argnums": 1},
            TypeError,
            "but got 'data'",
        ),
    ],
    ids=["string", "unconstrained", "no axis", "string and mesh"],
)
def test_shardings_of_the_wrong_kind_are_named(options, error, message):
    with pytest.raises(error, match=message):
        jaxmp.value_and_grad(loss_fn, **options)
