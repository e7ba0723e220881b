"""Sharded parameters on a mesh: gathered once or layer by layer, summed onto shards."""

import functools
import re

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
import jaxmp.linen
import jaxmp.nnx
from benchmarks.counting.collectives import collectives, partitioned
from conftest import assert_near, mapped, normal

CPUS = np.array(jax.devices("cpu")[:8])
DATA = Mesh(CPUS, ("data",))
GRID = Mesh(CPUS.reshape(4, 2), ("data", "model"))
TYPED = Mesh(
    GRID.devices, GRID.axis_names, axis_types=(jax.sharding.AxisType.Explicit,) * 2
)
SUMS_BF16 = "p=f32,c=bf16,o=f32,r=bf16"

# A stack of three layers, each with two matrices and a vector.
PARAMS = {
    "up": normal(0, 3, 16, 32, scale=0.25),
    "bias": normal(1, 3, 32),
    "down": normal(2, 3, 32, 16, scale=0.25),
}
X = normal(3, 64, 16)
SPECS = {"up": P(None, "data"), "bias": P(), "down": P(None, None, "data")}
ON_GRID = {
    "up": P(None, "data", "model"),
    "bias": P(None, "model"),
    "down": P(None, "model", "data"),
}


def layer(x, weights):
    h = jnp.tanh(x.astype(weights["up"].dtype) @ weights["up"] + weights["bias"])
    return x + (h @ weights["down"]).astype(x.dtype), None


def loss_fn(params, x, layer=layer):
    out, _ = jax.lax.scan(jax.checkpoint(layer), x, params)
    return (out.astype(jnp.float32) ** 2).mean()


def by_layer(specs, policy=None, layer=layer):
    """Returns the loss of which each layer gathers its weights."""
    own = {name: P(*spec[1:]) for name, spec in specs.items()}

    def gathering(x, weights):
        return layer(x, jaxmp.gather(weights, own, policy))

    return functools.partial(loss_fn, layer=gathering)


def grad_of(form, policy=None, specs=SPECS, mesh=DATA, **options):
    """Returns ``value_and_grad`` of the loss, gathered once or by each layer."""
    options = {"mesh": mesh, "shardings": specs, "batch_argnums": 1} | options
    if form == "once":
        return jaxmp.value_and_grad(loss_fn, policy=policy, **options)
    loss = by_layer(specs, policy)
    return jaxmp.value_and_grad(loss, policy=policy, gather=False, **options)


@functools.cache
def on_one_device():
    return jax.jit(jax.value_and_grad(loss_fn))(PARAMS, X)


def put(specs, mesh, params=PARAMS):
    where = jax.tree.map(functools.partial(NamedSharding, mesh), specs)
    return jax.device_put(params, where)


# Values


def test_gradients_are_those_of_one_device_and_stay_on_the_shards():
    @jax.jit
    def run(params, x):
        return [
            grad_of(form, "mixed_float16", accum_steps=steps, loss_scale=8.0)(params, x)
            for form, steps in (("once", 1), ("once", 2), ("layers", 1), ("layers", 2))
        ]

    for loss, grads in run(put(SPECS, DATA), X):
        assert_near((loss, grads), on_one_device(), "float16", 10)
        for leaf, grad in grads.items():
            assert grad.dtype == jnp.float32
            expected = NamedSharding(DATA, SPECS[leaf])
            assert grad.sharding.is_equivalent_to(expected, grad.ndim)
    for _, grads in run(put(SPECS, DATA), X.at[63, 0].set(jnp.inf)):  # of one device
        assert not any(map(jaxmp.all_finite, grads.values()))


@pytest.mark.parametrize(
    ("mesh", "specs", "axis_name"),
    [(TYPED, ON_GRID, None), (GRID, ON_GRID, "data")],
    ids=["two axes, explicit", "tensor parallelism"],
)
def test_parameters_may_be_sharded_over_several_axes(mesh, specs, axis_name):
    @jax.jit
    def run(params, x):
        options = {"specs": specs, "mesh": mesh, "axis_name": axis_name}
        return [
            grad_of(form, "float32", accum_steps=2, **options)(params, x)
            for form in ("once", "layers")
        ]

    for result in run(put(specs, mesh), X):
        assert_near(result, on_one_device(), "float32", 16)
        for leaf, grad in result[1].items():
            expected = NamedSharding(mesh, specs[leaf])
            assert grad.sharding.is_equivalent_to(expected, grad.ndim)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_shard_map_of_the_user_gathers_too(check_vma):
    grad_fn = jaxmp.value_and_grad(
        by_layer(SPECS, "float32"),
        axis_name="data",
        shardings=None if check_vma else SPECS,
    )
    on_devices = mapped(
        grad_fn, DATA, (SPECS, P("data")), (P(), SPECS), check_vma=check_vma
    )
    assert_near(jax.jit(on_devices)(PARAMS, X), on_one_device(), "float32", 16)


def test_a_float16_sum_does_not_overflow_where_the_mean_does_not():
    policy, x = "p=f32,c=f16,o=f32,r=f16", jnp.full(16, 2e4, jnp.float16)

    def loss(w, x):
        return (w.astype(x.dtype) * x.mean()).astype(jnp.float32).sum()

    def gathering(w, x):
        return loss(jaxmp.gather(w, P("data"), policy), x)

    options = {"mesh": DATA, "shardings": P("data"), "batch_argnums": 1}

    @jax.jit
    def run(w, x):
        by_layer = jaxmp.value_and_grad(gathering, gather=False, **options)
        whole = jaxmp.value_and_grad(loss, policy=policy, loss_scale=1.0, **options)
        return whole(w, x), by_layer(w, x)

    for value, grads in run(jnp.ones(8), x):
        assert value == 16e4
        np.testing.assert_allclose(grads, 2e4, rtol=2e-3)  # and eight of them are Inf


def test_what_is_no_float_is_gathered_without_a_gradient():
    specs = {"w": P("data"), "n": P("data"), "one": P()}

    def loss(params, x):
        params = jaxmp.gather(params, specs, "mixed_bfloat16")
        assert params["n"].dtype == jnp.int32
        return (params["w"] * params["n"] * x.sum() * params["one"]).sum() / 8

    grad_fn = jaxmp.grad(
        loss, mesh=DATA, shardings=specs, gather=False, allow_int=True, batch_argnums=1
    )

    @jax.jit
    def run(w, n, x):
        grads = grad_fn({"w": w, "n": n, "one": 1.0}, x)
        assert grads["n"].dtype == jax.dtypes.float0
        return grads["w"]

    np.testing.assert_array_equal(
        run(jnp.ones(8), jnp.arange(8), jnp.ones(8)), jnp.arange(8) / 8
    )


# What is sent


def exchanged(fun, *args):
    return [c for c in collectives(partitioned(jax.jit(fun), *args)) if c.size > 1]


@pytest.mark.usefixtures("compiled_anew")
def test_gathered_once_everything_is_sent_once():
    found = exchanged(grad_of("once", SUMS_BF16, accum_steps=2), put(SPECS, DATA), X)
    sent = {(c.kind, c.dtype) for c in found}
    assert sent == {
        ("all-gather", "bf16"),
        ("reduce-scatter", "bf16"),
        ("all-reduce", "bf16"),  # of what is whole on every device
    }
    assert {c.times for c in found} == {1}
    numbers = PARAMS["up"].size + PARAMS["down"].size
    gathers = [c for c in found if c.kind == "all-gather"]
    sums = [c for c in found if c.kind == "reduce-scatter"]
    assert sum(c.sent for c in gathers) == 2 * numbers * 7 / 8
    assert sum(c.sent for c in sums) == 2 * numbers * 7 / 8


@pytest.mark.usefixtures("compiled_anew")
def test_gathered_by_layer_no_more_than_a_layer_is_ever_whole():
    step = grad_of("layers", "mixed_bfloat16", accum_steps=2)
    program = partitioned(jax.jit(step), put(SPECS, DATA), X)
    found = [c for c in collectives(program) if c.size > 1]
    # In each layer and micro-batch: forward, backward again, and the two gradients.
    kinds = {
        kind: sum(c.times for c in found if (c.kind, c.dtype) == kind)
        for kind in {(c.kind, c.dtype) for c in found}
    }
    assert kinds == {
        ("all-gather", "bf16"): 2 * 2 * 3 * 2,
        ("reduce-scatter", "f32"): 2 * 3 * 2,
        ("all-reduce", "f32"): 1,
    }
    assert {c.size for c in found if c.kind == "all-gather"} == {16 * 32}
    assert {c.times for c in found if c.kind == "all-reduce"} == {1}  # in no loop
    assert not re.findall(r"\[3,(?:16,32|32,16)\]", program)  # no whole stack


@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize(("form", "order"), [("once", "outside"), ("layers", "inside")])
def test_autocast_gathers_in_sixteen_bits_and_sums_in_float32(form, order):
    options = {"mesh": DATA, "shardings": SPECS, "batch_argnums": 1, "accum_steps": 2}
    loss = loss_fn if form == "once" else by_layer(SPECS)
    options["gather"] = form == "once"
    if order == "outside":
        step = jaxmp.autocast(jaxmp.value_and_grad(loss, **options))
    else:  # whose weights are given whole, and so gathered by the policy
        policy = "mixed_bfloat16" if form == "once" else None
        step = jaxmp.value_and_grad(jaxmp.autocast(loss), policy=policy, **options)
    params = put(SPECS, DATA)
    sent = {(c.kind, c.dtype) for c in exchanged(step, params, X)}
    expected = {("all-gather", "bf16"), ("reduce-scatter", "f32")}
    assert sent == expected | {("all-reduce", "f32")}
    assert_near(jax.jit(step)(params, X), on_one_device(), "bfloat16", 4)


def test_autocast_sums_the_gradients_of_any_gather_in_float32():
    # Of a gather in 16 bits JAX would add them up in 16 bits.
    def loss(w, x):
        return (x @ jax.lax.all_gather(w, "data", tiled=True)).sum()

    grad_fn = jaxmp.grad(jaxmp.autocast(loss), axis_name="data", shardings=P("data"))
    on_devices = mapped(
        grad_fn, DATA, (P("data"), P("data")), P("data"), check_vma=False
    )
    text = str(jax.make_jaxpr(on_devices)(jnp.ones((16, 2)), X))
    assert re.search(r"bf16\[16,2\] = all_gather", text)
    assert re.search(r"f32\[2,2\] = reduce_scatter", text)


def test_a_loop_that_reads_a_gathered_weight_in_every_iteration_sums_in_float32():
    # In bfloat16 a sum of ones ends at 256.
    def loss(w, xs):
        w = jax.lax.all_gather(w, "data", tiled=True)
        return jax.lax.scan(lambda c, x: (c, (x @ w).sum()), 0.0, xs)[1].sum()

    on_devices = mapped(
        jax.grad(jaxmp.autocast(loss)),
        DATA,
        (P("data"), P()),
        P("data"),
        check_vma=False,
    )
    found = jax.jit(on_devices)(jnp.ones((16, 4)), jnp.ones((1000, 1, 16)))
    assert jnp.all(found == 1000 * DATA.size)


def test_a_remat_policy_keeps_products_and_gathers_again():
    own = {name: P(*spec[1:]) for name, spec in SPECS.items()}

    def loss(params, x):
        def gathering(x, weights):
            return layer(x, jaxmp.gather(weights, own, "mixed_bfloat16"))

        kept = jax.checkpoint(gathering, policy=jax.checkpoint_policies.dots_saveable)
        return (jax.lax.scan(kept, x, params)[0] ** 2).mean()

    grad_fn = jaxmp.grad(
        loss, mesh=DATA, shardings=SPECS, gather=False, batch_argnums=1
    )
    text = str(jax.make_jaxpr(grad_fn)(PARAMS, X))
    assert "bf16[3,16,32]" not in text
    assert "bf16[3,8,32]" in text  # the products of eight rows


# Flax


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        init = nn.initializers.normal(0.2)
        h = nn.LayerNorm()(x)
        h = nn.tanh(nn.Dense(32, kernel_init=init, name="up")(h))
        return x + nn.Dense(16, kernel_init=init, use_bias=False, name="down")(h), None


class Model(nn.Module):
    block: type[nn.Module] = Block

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            nn.remat(self.block),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        return layers(name="layers")(x, None)[0]


BLOCK = {
    "LayerNorm_0": P(),
    "up": {"kernel": P("data"), "bias": P()},
    "down": P("data"),
}


def test_layers_of_linen_gather_with_their_names_and_shapes():
    plain = Model()
    model = Model(jaxmp.linen.gather(Block, BLOCK, "mixed_bfloat16"))
    params = jax.jit(model.init)(jax.random.key(0), X)
    same = jax.jit(plain.init)(jax.random.key(0), X)
    chex.assert_trees_all_equal(params, same)
    stack = jax.tree.map(lambda s: P(None, *s), BLOCK)
    options = {"policy": "mixed_bfloat16", "mesh": DATA, "batch_argnums": 1}
    of_shards = {"shardings": {"params": {"layers": stack}}, "gather": False}

    def loss(model, params, x):
        return (model.apply(params, x.astype(jnp.bfloat16)) ** 2).mean(dtype="float32")

    @jax.jit
    def run(params, x):
        whole = jaxmp.value_and_grad(functools.partial(loss, plain), **options)
        by_layer = jaxmp.value_and_grad(
            functools.partial(loss, model), **options, **of_shards
        )
        return whole(params, x), by_layer(params, x)

    whole, result = run(params, X)
    assert_near(result, whole, "bfloat16", 4)
    grads = result[1]["params"]["layers"]
    assert grads["up"]["kernel"].sharding.spec == P(None, "data")


class Residual(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs, dtype=jnp.bfloat16)
        self.down = nnx.Linear(32, 16, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.tanh(self.norm(self.up(x))))


def test_layers_of_nnx_gather_and_keep_what_they_change():
    specs = {"up": {"kernel": P("data"), "bias": P()}, "norm": P(), "down": P("data")}
    whole, model = (nnx.List([Residual(nnx.Rngs(i)) for i in (0, 1)]) for _ in "12")

    def loss(gathers, blocks, x):
        def call(block, x):
            return jaxmp.nnx.gather(block, specs, "mixed_bfloat16")(x)

        x = x.astype(jnp.bfloat16)
        for block in blocks:
            x = nnx.remat(call)(block, x) if gathers else block(x)
        return (x.astype(jnp.float32) ** 2).mean()

    options = {"policy": "mixed_bfloat16", "mesh": DATA, "batch_argnums": 1}
    of_shards = {"shardings": nnx.State({0: specs, 1: specs}), "gather": False}

    @nnx.jit
    def run(whole, model, x):
        grad_fn = jaxmp.nnx.value_and_grad(functools.partial(loss, False), **options)
        by_layer = jaxmp.nnx.value_and_grad(
            functools.partial(loss, True), **options, **of_shards
        )
        return grad_fn(whole, x), by_layer(model, x)

    expected, result = run(whole, model, X)
    assert_near(result, expected, "bfloat16", 4)
    assert result[1][0]["up"]["kernel"].dtype == jnp.float32
    assert model[0].up.kernel.shape == (16, 32)
    np.testing.assert_array_equal(model[1].norm.mean[...], whole[1].norm.mean[...])
    assert (model[1].norm.mean[...] != 0).all()


# What is refused


def run_with(loss=loss_fn, specs=SPECS, **options):
    options = {"mesh": DATA, "shardings": specs, "batch_argnums": 1} | options
    return jax.eval_shape(jaxmp.value_and_grad(loss, **options), PARAMS, X)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"up": P()}, "structure of the differentiated arguments.*one for each.*JAX"),
        (SPECS | {"bias": P(None, None, "data")}, r"3 entries for `bias`.*\[3, 32\]"),
        (SPECS | {"up": P("data")}, r"axis of `up` into 8 parts.*\[3, 16, 32\]"),
        (SPECS | {"up": P(None, "dta")}, r"`up` over 'dta', which is no.*\('data',\)"),
        (
            SPECS | {"up": NamedSharding(GRID, P(None, "data"))},
            "`up` on a mesh of.*'model': 2.*but `mesh` has.*'data': 8",
        ),
    ],
    ids=["structure", "rank", "size", "axis", "mesh"],
)
@pytest.mark.parametrize("gather", [True, False])
def test_shardings_that_do_not_fit_are_named(specs, message, gather):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        run_with(specs=specs, gather=gather)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mesh": DATA, "batch_argnums": 1}, ValueError, "needs `mesh` and `shard"),
        ({"axis_name": "data", "shardings": P()}, ValueError, "leave `gather` out"),
        ({"gather": 0}, TypeError, "must be True or False, but is 0"),
    ],
    ids=["no shardings", "no mesh", "no bool"],
)
def test_gather_without_what_it_needs_is_named(options, error, message):
    with pytest.raises(error, match=message):
        jaxmp.value_and_grad(loss_fn, **{"gather": False} | options)


def test_a_shard_that_is_never_gathered_is_named():
    def reads_a_shard(params, x):
        whole = jaxmp.gather(params, SPECS)
        return loss_fn(whole, x) + (params["down"] ** 2).sum()

    cure = r"`down` is sharded over 'data'.*jaxmp.gather\(params, specs.*leave `gather="
    with pytest.raises(ValueError, match=cure):
        run_with(reads_a_shard, gather=False)
    with pytest.raises(TypeError, match="dot_general") as caught:
        run_with(gather=False)
    assert re.search("sees shards, such as those of `down`", caught.value.__notes__[0])


def tensor_parallel(p):
    hidden = jnp.ones((4, 8)) @ p["v"]
    return jax.lax.psum(hidden @ p["w"], "data").sum()


def experts(p):
    return jax.lax.all_to_all(jnp.ones((8, 8)) @ p["e"][0], "data", 0, 0).sum()


def looped(p):
    def body(carry, _):
        a, b = carry
        return (b, a + p["w"].sum()), None

    return jax.lax.scan(body, (0.0, 0.0), length=3)[0][0]


@pytest.mark.parametrize(
    ("loss", "alone"),
    [
        (tensor_parallel, ""),
        (experts, ""),
        (looped, "w"),
        (lambda p: jax.lax.cond(True, lambda: p["v"].sum(), lambda: 0.0), "v"),
        (jax.jit(lambda p: p["e"].sum()), "e"),
    ],
)
def test_collectives_of_the_user_gather_as_well(loss, alone):
    specs = {"w": P("data"), "e": P("data"), "v": P(None, "data")}
    params = {"w": jnp.ones((8, 8)), "e": jnp.ones((8, 8, 8)), "v": jnp.ones((8, 8))}
    options = {"mesh": DATA, "shardings": specs, "batch_argnums": 1, "gather": False}
    grad_fn = jaxmp.value_and_grad(lambda p, x: loss(p), **options)
    if not alone:
        jax.eval_shape(grad_fn, params, X)
        return
    with pytest.raises(ValueError, match=f"`{alone}` is sharded over 'data'"):
        jax.eval_shape(grad_fn, params, X)


@pytest.mark.parametrize(
    ("specs", "error", "message"),
    [
        (
            {"up": P()},
            ValueError,
            r"structure of the tree that is gathered, or of a pre",
        ),
        (SPECS, ValueError, r"3 entries for `down`.*\[32, 2\].*scan over layers has"),
        (P("model"), ValueError, "`bias` over 'model', but.*no such mesh axis but"),
        ("data", TypeError, "`specs` must be made of.*but got 'data'"),
    ],
    ids=["structure", "rank", "axis", "kind"],
)
def test_specs_that_do_not_fit_are_named(specs, error, message):
    def gathering(x, weights):
        return layer(x, jaxmp.gather(weights, specs))

    with pytest.raises(error, match=f"(?s){message}"):
        run_with(functools.partial(loss_fn, layer=gathering), gather=False)


def test_a_gather_outside_of_a_mesh_says_where_it_belongs():
    with pytest.raises(ValueError, match=r"axis here. Call it inside.*plain `jax.jit`"):
        jax.jit(lambda p: jaxmp.gather(p, SPECS))(PARAMS)


def test_what_is_no_layer_is_named():
    with pytest.raises(TypeError, match=r"class of Linen modules, but.*Pass the class"):
        jaxmp.linen.gather(nn.Dense(2), P())
    with pytest.raises(TypeError, match=r"an NNX module, but.*the layer itself"):
        jaxmp.nnx.gather(jnp.tanh, P())
