"""Eight devices: one decision, one scale, and the numbers of a single device."""

import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp

MESH = Mesh(np.array(jax.devices("cpu")[:8]), ("data",))
# Small integers and powers of two: every sum is exact, in any order.
PARAMS = {"w": jnp.arange(16.0).reshape(8, 2) - 8, "b": jnp.array([1.0, -0.0])}
X = (jnp.arange(128.0) % 7 - 3).reshape(16, 8)
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


def put(tree, spec_of):
    return jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(MESH, spec_of(x))), tree
    )


def replicated(x):
    return P()


def by_row(x):
    return P("data") if x.ndim == 2 else P()


# Plain jit


@pytest.mark.parametrize("spec_of", [replicated, by_row])
@pytest.mark.parametrize("tx", [TX, jaxmp.static_loss_scale(INNER, 8)])
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
    expected = run(jax.jit(partial(step, tx)), tx)
    chex.assert_trees_all_equal((params, state), expected)
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


def test_the_flag_is_global_under_jit():
    grads = put({"w": jnp.ones((8, 2)).at[6, 1].set(jnp.nan)}, by_row)
    finite = jax.jit(jaxmp.all_finite)(grads)
    assert finite.sharding.is_fully_replicated
    assert not finite


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
    compiled = jax.jit(jaxmp.all_finite).lower(tree).compile().as_text()
    moved = re.findall(r"= (.*) (?:all-|collective-|reduce-)\S+\(", compiled)
    assert moved
    assert not [line for line in moved if "f16" in line]


# shard_map


def same_on_all(check_vma):
    """Returns the options for parameters that are the same on every device."""
    return {"axis_name": "data"} | ({} if check_vma else {"shardings": P()})


def shard_map(fun, in_specs, out_specs, check_vma):
    return jax.jit(
        jax.shard_map(
            fun,
            mesh=MESH,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=check_vma,
        )
    )


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("with_axis", [True, False])
def test_shard_map_is_the_run_of_one_device(with_axis, check_vma):
    # The gradients are reduced, so the wrapper may or may not name the axis.
    tx = jaxmp.dynamic_loss_scale(
        INNER,
        init_scale=8,
        growth_interval=2,
        axis_name="data" if with_axis else None,
    )
    sharded_step = shard_map(
        partial(step, tx, **same_on_all(check_vma)),
        (P(), P(), P("data")),
        P(),
        check_vma,
    )
    result = run(sharded_step, tx)
    chex.assert_trees_all_equal(result, run(partial(step, TX), TX))
    assert result[1].skipped == 2


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("device", "poison"), [(0, jnp.inf), (3, -jnp.inf), (7, jnp.nan)]
)
def test_an_overflow_on_one_device_skips_on_all(device, poison, check_vma):
    # Each device owns a row of the parameters and sees the gradient of that alone.
    # With check_vma=True, JAX itself proves that the scale is the same everywhere.
    tx = jaxmp.loss_scaling(
        optax.adam(0.5), "mixed_float16", growth_interval=1, axis_name="data"
    )
    params = jnp.arange(16.0).reshape(8, 2)
    state = tx.init(params)
    specs = jax.tree.map(by_row, state)

    def local_step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, state.loss_scale[None]

    sharded_step = shard_map(
        local_step,
        (P("data"), specs, P("data")),
        (P("data"), specs, P("data")),
        check_vma,
    )
    good = jnp.ones((8, 2))
    before, state, scales = sharded_step(params, state, good)
    assert scales.tolist() == [2.0**16] * 8
    inner_state = state.inner_state
    bad = good.at[device, 1].set(poison)
    params, state, scales = sharded_step(before, state, bad)
    chex.assert_trees_all_equal((params, state.inner_state), (before, inner_state))
    assert scales.tolist() == [2.0**15] * 8
    assert state.skipped == 1
    params, state, scales = sharded_step(params, state, good)
    assert scales.tolist() == [2.0**16] * 8
    assert (params != before).all()


def test_without_the_axis_check_vma_finds_that_replicas_diverge():
    # Flax's DynamicScale under pmap diverges in silence.
    tx = jaxmp.dynamic_loss_scale(optax.sgd(1.0))
    params = jnp.ones((8, 2))
    state = tx.init(params)
    local = shard_map(lambda g: tx.update(g, state)[1].loss_scale, P("data"), P(), True)
    with pytest.raises(ValueError, match="Pass these axes as `axis_name`"):
        local(params)


@pytest.mark.parametrize("check_vma", [True, False])
def test_float16_gradients_are_averaged_in_float32(check_vma):
    # 8 times 2e4 is Inf in float16, and the mean is not.
    x = jnp.full(8, 2e4, jnp.float16)
    grad_fn = shard_map(
        jaxmp.value_and_grad(lambda w, x: (w * x).sum(), **same_on_all(check_vma)),
        (P(), P("data")),
        P(),
        check_vma,
    )
    loss, grad = grad_fn(jnp.float16(1), x)
    assert loss == grad == 2e4
    assert loss.dtype == grad.dtype == jnp.float32


@pytest.mark.parametrize("check_vma", [True, False])
def test_value_and_grad_is_that_of_one_device(check_vma):
    grad_fn = partial(jaxmp.value_and_grad, loss_fn, loss_scale=2.0**15)
    grad_fn = grad_fn(**same_on_all(check_vma))
    sharded = shard_map(grad_fn, (P(), P("data")), P(), check_vma)
    expected = jax.value_and_grad(loss_fn)(PARAMS, X)
    chex.assert_trees_all_equal(sharded(PARAMS, X), expected)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("tree", [{}, jnp.arange(8)], ids=["empty", "int"])
def test_what_is_not_floating_agrees_over_an_axis(tree, check_vma):
    finite = shard_map(
        partial(jaxmp.all_finite, axis_name="data"), (P("data"),), P(), check_vma
    )
    assert finite(tree)


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_agree_over_several_axes(check_vma):
    mesh = Mesh(MESH.devices.reshape(4, 2), ("data", "model"))
    finite = jax.shard_map(
        partial(jaxmp.all_finite, axis_name=("data", "model")),
        mesh=mesh,
        in_specs=P("data", "model"),
        out_specs=P(),
        check_vma=check_vma,
    )
    x = jnp.ones((4, 2))
    assert jax.jit(finite)(x)
    assert not jax.jit(finite)(x.at[2, 1].set(jnp.nan))


def test_an_axis_of_vmap_serves_as_well():
    tx = jaxmp.dynamic_loss_scale(optax.sgd(1.0), axis_name="replica")
    params = jnp.ones((4, 2))
    state = jax.vmap(tx.init)(params)
    update = jax.vmap(tx.update, axis_name="replica")
    updates, state = update(params.at[2, 0].set(jnp.inf), state)
    assert state.last_finite.tolist() == [False] * 4
    np.testing.assert_array_equal(updates, 0)
