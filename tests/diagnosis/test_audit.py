"""An audit counts what runs, names the one who is to blame, and nobody else."""

import functools
import itertools
import json
import pathlib
import random
import re
import runpy

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

import jaxmp
from benchmarks.counting import hlo, targets
from conftest import crossed

HALF, FULL = jnp.bfloat16, jnp.float32


def half(*shape):
    return jax.ShapeDtypeStruct(shape, HALF)


def full(*shape):
    return jax.ShapeDtypeStruct(shape, FULL)


def line(mark):
    """The place in this file that ends with the comment ``mark``."""
    for number, text in enumerate(pathlib.Path(__file__).read_text().splitlines(), 1):
        if text.endswith(f"# {mark}"):
            return f"{__file__}:{number}"
    raise ValueError(mark)


def sources(report):
    return [leak.source for leak in report.leaks]


MATMUL = 2.0 * 8**3  # FLOPs of two 8x8 matrices


# FLOPs


@pytest.mark.parametrize(
    ("fun", "shapes"),
    [
        (jnp.matmul, [(4, 8), (8, 16)]),
        (jnp.matmul, [(3, 4, 8), (3, 8, 16)]),
        (
            lambda a, b: jnp.einsum("bhqd,bkhd->bhqk", a, b),
            [(2, 3, 4, 8), (2, 5, 3, 8)],
        ),
        (lambda a, b: lax.conv(a, b, (1, 1), "VALID"), [(2, 3, 8, 8), (5, 3, 3, 3)]),
        (lambda a, b: lax.conv(a, b, (2, 2), "SAME"), [(2, 3, 8, 8), (5, 3, 3, 3)]),
        (
            lambda a, b: lax.conv_general_dilated(
                a, b, (1, 1), "VALID", rhs_dilation=(2, 2), feature_group_count=3
            ),
            [(2, 3, 8, 8), (6, 1, 3, 3)],
        ),
    ],
)
def test_flops_are_those_that_xla_counts(fun, shapes):
    args = [full(*shape) for shape in shapes]
    xla = jax.jit(fun).lower(*args).compile().cost_analysis()["flops"]
    assert jaxmp.audit(fun)(*args).flops == {"float32": xla}


@pytest.mark.parametrize(
    ("fun", "shapes"),
    [
        (jnp.matmul, [(4, 8), (8, 16)]),
        (lambda a, b: lax.conv(a, b, (1, 1), "VALID"), [(2, 3, 8, 8), (5, 3, 3, 3)]),
        (lambda a, b: lax.conv(a, b, (2, 2), "SAME"), [(2, 3, 8, 8), (5, 3, 3, 3)]),
        (lambda a, b: lax.ragged_dot(a, b, jnp.array([3, 5])), [(8, 8), (2, 8, 6)]),
    ],
)
def test_each_backward_product_costs_as_much_as_the_forward_one(fun, shapes):
    args = [full(*shape) for shape in shapes]
    (forward,) = jaxmp.audit(fun)(*args).flops.values()

    def both(*primals):
        out, pullback = jax.vjp(fun, *primals)
        return pullback(jnp.ones_like(out))

    backward = sum(jaxmp.audit(both)(*args).flops.values())
    assert backward == 3 * forward


def test_ragged_products_count_each_row_once():
    def fun(x, experts):
        return lax.ragged_dot(x, experts, jnp.array([3, 5]))

    report = jaxmp.audit(fun)(half(8, 16), half(2, 16, 6))
    assert report.flops == {"bfloat16": 2.0 * 8 * 16 * 6}


@pytest.mark.parametrize("shapes", [("i,i->", 8, 8), ("i,j->ij", 8, 8)])
def test_dot_products_and_outer_products_are_no_matrix_products(shapes):
    spec, *sizes = shapes
    report = jaxmp.audit(lambda *xy: jnp.einsum(spec, *xy))(*map(full, sizes))
    assert report.flops == {}
    assert report.fraction_16bit == 1
    assert not report.leaks


def test_loops_branches_and_devices_multiply():
    w = half(8, 8)

    def scanned(x, w):
        return lax.scan(lambda c, _: (c @ w, None), x, None, length=5)[0]

    def looped(x, w):
        return lax.while_loop(lambda c: c[0, 0] > 0, lambda c: c @ w, x)

    def branched(x, w):
        return lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ w @ w)

    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(
        jnp.matmul, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d")
    )
    nested = jax.jit(lambda x, w: scanned(jax.checkpoint(scanned)(x, w), w))

    assert jaxmp.audit(scanned)(w, w).flops == {"bfloat16": 5 * MATMUL}
    assert jaxmp.audit(branched)(w, w).flops == {"bfloat16": 3 * MATMUL}
    assert jaxmp.audit(sharded)(w, w).flops == {"bfloat16": MATMUL}
    assert jaxmp.audit(nested)(w, w).flops == {"bfloat16": 10 * MATMUL}
    report = jaxmp.audit(looped)(w, w)
    assert report.flops == {"bfloat16": MATMUL}
    (note,) = report.notes
    assert "while" in note
    assert pathlib.Path(__file__).name in note


def test_of_a_branch_for_each_platform_what_a_gpu_runs_counts():
    w = half(8, 8)
    once, twice = (lambda x, w: x @ w), (lambda x, w: x @ w @ w)

    def named(x, w):
        return lax.platform_dependent(x, w, rocm=twice, cuda=once, default=twice)

    def other(x, w):
        return lax.platform_dependent(x, w, tpu=once, default=twice)

    def scanned(x, w):
        return lax.scan(lambda c, _: (named(c, w), None), x, None, length=5)[0]

    assert jaxmp.audit(named)(w, w).flops == {"bfloat16": MATMUL}
    assert jaxmp.audit(other)(w, w).flops == {"bfloat16": 2 * MATMUL}
    assert jaxmp.audit(scanned)(w, w).flops == {"bfloat16": 5 * MATMUL}


def test_inputs_decide_the_dtype_of_a_product():
    def accumulated(x, w):
        return lax.dot(x, w, preferred_element_type=FULL)

    f16 = jax.ShapeDtypeStruct((8, 8), jnp.float16)
    assert jaxmp.audit(accumulated)(f16, f16).flops == {"float16": MATMUL}
    assert jaxmp.audit(accumulated)(f16, full(8, 8)).flops == {"float32": MATMUL}


# Causes


def test_a_float32_argument_is_named_with_its_path_module_line_and_share():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8)(x)
            x = nn.LayerNorm(use_bias=False)(x)  # the norm
            return nn.Dense(8)(nn.relu(nn.Dense(8)(x)))

    net = Net()
    variables = jax.eval_shape(net.init, jax.random.key(0), jnp.ones((8, 8)))

    def dtype(path, x):
        name = jax.tree_util.keystr(path)
        return jax.ShapeDtypeStruct(x.shape, FULL if "scale" in name else HALF)

    variables = jax.tree_util.tree_map_with_path(dtype, variables)
    (leak,) = jaxmp.audit(net.apply)(variables, half(8, 8)).leaks
    assert leak == type(leak)(
        source="params/LayerNorm_0/scale",
        kind="argument",
        dtype="float32",
        meets_16bit=True,
        module="Net/LayerNorm_0",
        where=line("the norm"),
        flops=2 * MATMUL,
        share=2 / 3,
    )
    assert str(leak) == "params/LayerNorm_0/scale (float32) meets 16-bit"

    def loss(variables, x):
        return net.apply(variables, x).astype(FULL).sum()

    (backward,) = jaxmp.audit(jax.grad(loss))(variables, half(8, 8)).leaks
    assert (backward.source, backward.module) == (leak.source, leak.module)
    assert backward.where == leak.where
    assert backward.flops == 3 * leak.flops


@pytest.mark.parametrize("scalar", [np.float32(3), jnp.float32(3)], ids=["np", "jnp"])
def test_a_float32_scalar_in_the_code_is_named_with_its_line(scalar):
    def fun(x, w):
        h = x * scalar  # the scalar
        return h.astype(FULL) @ w

    (leak,) = jaxmp.audit(fun)(half(8, 8), half(8, 8)).leaks
    assert str(leak) == "float32(3) meets 16-bit"
    assert (leak.kind, leak.where) == ("constant", line("the scalar"))


def test_a_float32_array_made_in_the_code_is_named_with_both_lines():
    def rotary(x, w):
        angles = jnp.arange(8.0)  # made
        return (x * jnp.sin(angles)) @ w  # met

    (leak,) = jaxmp.audit(rotary)(half(8, 8), half(8, 8)).leaks
    made = line("made").rpartition("/")[2]
    assert leak.source == f"float32[8] made at {made}"
    assert leak.where == line("met")


def test_a_cast_is_a_leak_only_if_it_reaches_a_product():
    def attention(q, k, v, back):
        p = jax.nn.softmax((q @ k).astype(FULL))  # the cast
        return p.astype(back) @ v

    args = half(8, 8), half(8, 8), half(8, 8)
    assert not jaxmp.audit(attention)(*args, HALF).leaks
    (leak,) = jaxmp.audit(attention)(*args, FULL).leaks
    assert str(leak) == "cast from 16-bit to float32"
    assert (leak.kind, leak.where) == ("cast", line("the cast"))
    assert leak.share == 0.5


def test_whoever_is_widened_by_others_is_not_to_blame():
    def fun(x, bias, w):
        wide = x.astype(FULL) * 2.0 + 1.0  # the only cast on purpose
        return (jax.nn.gelu(jnp.where(wide > 0, wide, x)) + bias) @ w

    (leak,) = jaxmp.audit(fun)(half(8, 8), half(8), half(8, 8)).leaks
    assert (leak.kind, leak.where) == ("cast", line("the only cast on purpose"))


def test_a_function_that_was_never_cast_names_its_arguments():
    def fun(params, x):
        return x @ params["w"] + params["b"]

    report = jaxmp.audit(fun)({"w": full(8, 8), "b": full(8)}, x=full(8, 8))
    assert sorted(map(str, report.leaks)) == [
        "w (float32) meets float32",
        "x (float32) meets float32",
    ]
    assert not any(leak.meets_16bit for leak in report.leaks)


def test_the_audit_of_what_is_not_cast_begins_with_what_to_do_and_lists_no_causes():
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return x.mean()

    params, x = [full(8, 8)] * 12, full(8, 8)
    report = jaxmp.audit(jax.grad(loss))(params, x)
    first, empty, *rest = str(report).splitlines()
    assert first.startswith("nothing is in 16 bits: use `jaxmp.autocast`")
    assert not empty
    assert len(report.leaks) > 10
    assert not any("meets" in line or "because of" in line for line in rest)
    with pytest.raises(AssertionError, match=r"use `jaxmp\.autocast`") as error:
        jaxmp.assert_16bit(loss, params, x)
    assert "Change the lines" not in str(error.value)
    # What is cast somewhere, or not cast on purpose, is another case.
    for fun, args in (
        (loss, ([half(8, 8), *params], x)),
        (jaxmp.autocast(loss), (params, x)),
        (jaxmp.autocast(jaxmp.float32_region(loss)), (params, x)),
        (lambda x: x, (x,)),
    ):
        assert "nothing is in 16 bits" not in str(jaxmp.audit(fun)(*args))


def test_a_number_as_path_follows_the_name_of_its_argument():
    def fun(layers, *rest):
        return rest[0] @ layers[1]

    assert sorted(sources(jaxmp.audit(fun)([half(8), full(8, 8)], full(8, 8)))) == [
        "argument 1",
        "layers/1",
    ]


def test_a_cause_is_listed_once_however_often_it_strikes():
    def layer(x, scale, w):
        return jnp.tanh((x * scale) @ w).astype(HALF)

    def unrolled(x, scale, w):
        for _ in range(4):
            x = jax.jit(layer)(x, scale, w)
        return x

    def scanned(x, scale, w):
        return lax.scan(lambda c, _: (layer(c, scale, w), None), x, None, length=4)[0]

    for fun in (unrolled, scanned):
        (leak,) = jaxmp.audit(fun)(half(8, 8), full(8), half(8, 8)).leaks
        assert (leak.source, leak.flops) == ("scale", 4 * MATMUL)


def test_the_worst_cause_comes_first():
    def fun(x, w, a, b):
        return ((x @ w + a) @ w + b) @ w

    report = jaxmp.audit(fun)(half(8, 8), half(8, 8), b=full(8), a=full(8))
    assert [(leak.source, leak.flops) for leak in report.leaks] == [
        ("a", 2 * MATMUL),
        ("b", MATMUL),
    ]
    assert report.flops == {"float32": 2 * MATMUL, "bfloat16": MATMUL}
    assert report.fraction_16bit == pytest.approx(1 / 3)


def _scan(f, x, s, w):
    return lax.scan(lambda c, _: (f(c, s, w), None), x, None, length=1)[0]


def _carry(f, x, s, w):
    return lax.scan(lambda c, _: ((c[0], f(x, c[0], w)), None), (s, x), length=1)[0][1]


def _while(f, x, s, w):
    return lax.while_loop(lambda c: c[0, 0] > 0, lambda c: f(c, s, w), x)


def _cond(f, x, s, w):
    return lax.cond(x[0, 0] > 0, lambda: f(x, s, w), lambda: x)


def _custom_jvp(f, x, s, w):
    g = jax.custom_jvp(f)
    g.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    return g(x, s, w)


def _custom_vjp(f, x, s, w):
    g = jax.custom_vjp(f)
    g.defvjp(lambda *args: (f(*args), None), lambda _, ct: (ct, None, None))
    return g(x, s, w)


def _policy(f, x, s, w):
    return jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)(x, s, w)


def _shard_map(f, x, s, w):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=(P(), P(), P()), out_specs=P())(x, s, w)


WRAPPERS = {
    "jit": lambda f, x, s, w: jax.jit(jax.jit(f))(x, s, w),
    "remat": lambda f, x, s, w: jax.checkpoint(f)(x, s, w),
    "remat with a policy": _policy,
    "scan": _scan,
    "scan carry": _carry,
    "while": _while,
    "cond": _cond,
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
    "shard_map": _shard_map,
    "vmap": lambda f, x, s, w: jax.vmap(f, (None, None, 0))(x, s, w[None])[0],
}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_causes_are_followed_through(wrapper):
    def layer(x, scale, w):
        return ((x * scale) @ w).astype(HALF)  # inside

    def fun(x, scale, w):
        return wrapper(layer, x, scale, w) @ w

    (leak,) = jaxmp.audit(fun)(half(8, 8), full(8), half(8, 8)).leaks
    assert (leak.source, leak.flops) == ("scale", MATMUL)
    assert (leak.meets_16bit, leak.where) == (True, line("inside"))
    assert not jaxmp.audit(fun)(half(8, 8), half(8), half(8, 8)).leaks


def test_causes_travel_through_a_carry_from_step_to_step():
    def fun(x, scale, w):
        def body(carry, _):
            a, b, c = carry
            return (x * scale, a, b), c @ w

        zeros = jnp.zeros_like(x, FULL)
        return lax.scan(body, (zeros, zeros, zeros), None, length=4)

    (leak,) = jaxmp.audit(fun)(half(8, 8), full(8), half(8, 8)).leaks
    assert leak.source == "scale"


def test_a_while_may_return_what_it_was_given():
    def fun(x, scale, w):
        def body(c):
            return c[0] - 1, jnp.zeros((8, 8))

        return lax.while_loop(lambda c: c[0] > 0, body, (len(w), x * scale))[1] @ w

    report = jaxmp.audit(fun)(half(8, 8), full(8), half(8, 8))
    assert any(leak.source.startswith("scale") for leak in report.leaks)


def test_a_function_of_jax_shared_by_two_lines_has_the_line_of_its_call():
    def fun(x, mask, w):
        a = jnp.where(mask, x, jnp.ones((8, 8)))
        b = jnp.where(mask, x, jnp.zeros((8, 8)))  # the second call
        return a.astype(HALF) @ w + b @ w

    mask = jax.ShapeDtypeStruct((8, 8), jnp.bool_)
    (leak,) = jaxmp.audit(fun)(half(8, 8), mask, half(8, 8)).leaks
    assert leak.where == line("the second call")


def test_what_autocast_keeps_in_a_loop_has_its_own_line():
    def loss(w, xs):
        def step(h, x):
            h = jnp.tanh(x @ w + h)
            with jax.named_scope("head"):
                return h, h @ h.T  # kept in the loop

        return lax.scan(step, jnp.zeros((8, 8)), xs)[1].sum()

    cast = jaxmp.autocast(jax.grad(loss), float32_paths=["head"])
    report = jaxmp.audit(cast)(full(8, 8), full(2, 8, 8))
    where = {kept.where for kept in report.kept}
    assert where == {line("kept in the loop")}


@pytest.mark.parametrize("wrapper", ["jit", "remat", "remat with a policy", "scan"])
def test_the_backward_pass_has_the_causes_of_the_forward_pass(wrapper):
    def layer(x, scale, w):
        return jnp.tanh((x * scale) @ w).astype(HALF)

    def loss(params, x, labels, loss_scale):
        scale, w = params
        h = WRAPPERS[wrapper](layer, x, scale, w).astype(FULL)
        return jnp.mean((h - labels) ** 2) * loss_scale

    args = half(8, 8), full(8, 8), full()
    for fun in (loss, jax.checkpoint(loss)):
        grad = jax.jit(jax.grad(fun, argnums=(0, 1)))
        report = jaxmp.audit(grad)((full(8), half(8, 8)), *args)
        assert sources(report) == ["params/0"]
        assert report.fraction_16bit == 0
        report = jaxmp.audit(grad)((half(8), half(8, 8)), *args)
        assert report.fraction_16bit == 1
        assert not report.leaks


def test_the_mixed_backward_of_an_accumulating_product_is_charged_to_it():
    def loss(w, x, labels):
        out = lax.dot(x, w, preferred_element_type=FULL)  # accumulates
        return jnp.sum((out - labels) ** 2)

    f16 = jax.ShapeDtypeStruct((8, 8), jnp.float16)
    (leak,) = jaxmp.audit(jax.grad(loss))(f16, f16, full(8, 8)).leaks
    assert str(leak) == "dot_general from 16-bit to float32"
    assert (leak.where, leak.share) == (line("accumulates"), 0.5)


def test_a_well_kept_training_step_has_no_leak():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.MultiHeadDotProductAttention(2, dtype=HALF)(x)
            x = nn.BatchNorm(use_running_average=False, dtype=HALF)(x)
            x = nn.Dropout(0.5, deterministic=False)(nn.LayerNorm(dtype=HALF)(x))
            x = nn.RNN(nn.LSTMCell(8, dtype=HALF))(x)
            return nn.Dense(8, dtype=HALF)(nn.gelu(x)).astype(FULL)

    net, tx = Net(), optax.adam(1e-3)
    x, rngs = full(2, 4, 8), {"params": jax.random.key(0), "dropout": jax.random.key(0)}
    variables = jax.eval_shape(net.init, rngs, x)
    opt_state = jax.eval_shape(tx.init, variables["params"])

    @jax.jit
    def step(variables, opt_state, x, labels, loss_scale):
        def loss(params):
            logits, _ = net.apply(
                {**variables, "params": params},
                x,
                rngs={"dropout": jax.random.key(0)},
                mutable=["batch_stats"],
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean() * loss_scale

        grads = jax.grad(loss)(variables["params"])
        grads = jax.tree.map(lambda g: g / loss_scale, grads)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(variables["params"], updates), opt_state

    labels = jax.ShapeDtypeStruct((2, 4), jnp.int32)
    report = jaxmp.audit(step)(variables, opt_state, x, labels, full())
    assert report.leaks == ()
    assert list(report.flops) == ["bfloat16"]
    assert report.fraction_16bit == 1


def test_an_nnx_model_is_an_argument_or_a_constant():
    model = nnx.Linear(8, 8, dtype=None, param_dtype=FULL, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)

    def fun(state, x):
        return nnx.merge(graphdef, state)(x)

    report = jaxmp.audit(fun)(state, half(8, 8))
    assert any("kernel" in source for source in sources(report))
    report = jaxmp.audit(model)(half(8, 8))
    assert "constant float32[8, 8]" in sources(report)


# Autocast


def test_what_autocast_keeps_is_explained_and_no_leak():
    @jax.named_scope("head")
    def head(x, w):
        return x @ w

    def loss(w, x):
        h = jnp.exp(x @ w)
        h = jnp.matmul(h, w, precision="highest")
        h = jaxmp.float32_region(jnp.matmul)(h, w)
        return jnp.mean(head(h, w) @ w)

    fun = jaxmp.autocast(loss, HALF, float32_paths=("head",))
    report = jaxmp.audit(fun)(full(8, 8), full(8, 8))
    assert report.flops == {"bfloat16": 2 * MATMUL, "float32": 3 * MATMUL}
    assert not report.leaks
    reasons = {k.reason: k for k in report.kept}
    assert reasons.keys() == {"its `precision`", "float32 region", "`float32_paths`"}
    assert reasons["`float32_paths`"].module == "head"
    words = " ".join(str(report).split())
    assert "kept in float32 by autocast" in words
    assert "20.0% dot_general, float32 region test_audit.py" in words


SCALED = {
    "scaled_matmul": lambda a, s: jax.nn.scaled_matmul(
        a[None], a[None], s[None], s[None]
    ),
    "scaled_dot": lambda a, s: lax.scaled_dot(a, a, lhs_scale=s, rhs_scale=s.T),
}


@pytest.mark.parametrize("name", SCALED)
def test_products_with_a_scale_for_each_block_are_counted(name):
    if not hasattr(lax if name == "scaled_dot" else jax.nn, name):
        pytest.skip("this JAX has none")
    a = jax.ShapeDtypeStruct((64, 64), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct((64, 2), jnp.float8_e8m0fnu)
    report = jaxmp.audit(SCALED[name])(a, scales)
    assert report.flops == {"float8_e4m3fn": 2 * 64**3}
    assert report.fraction_8bit == 1
    assert not report.notes
    assert not report.hazards


@pytest.mark.parametrize("name", ["ffi_call", "call_exported"])
def test_what_is_not_counted_is_said(name):
    def call(x):
        if name == "call_exported":
            return jax.export.export(jax.jit(lambda x: x @ x))(x).call(x)
        return jax.ffi.ffi_call("somewhere", jax.typeof(x))(x)

    report = jaxmp.audit(call)(full(8, 8))
    (note,) = report.notes
    assert f"`{name}`, its products not counted" in note
    assert "no matmul and convolution FLOPs" in str(report)
    assert "100.0%" not in str(report)


def _with_a_reference(w, x):
    total = jax.new_ref(jnp.zeros((8, 8)))

    def step(i, x):
        total[...] += x
        return x @ w

    return lax.fori_loop(0, 2, step, x) + total[...]


@jax.custom_batching.custom_vmap
def _opaque(x, w):
    return x @ w


@_opaque.def_vmap
def _(axis_size, in_batched, x, w):
    return x @ w, True


KEPT = {
    "its `precision`": lambda w, x: jnp.matmul(x, w, precision="highest"),
    "float32 region": lambda w, x: jaxmp.float32_region(jnp.matmul)(x, w),
    "`float32_paths`": lambda w, x: jax.named_scope("head")(jnp.matmul)(x, w),
    "the lists in `ops`": lambda w, x: lax.conv(
        x[None, None], w[None, None], (1, 1), "SAME"
    ),
    "in a call that takes references": _with_a_reference,
    "inside `custom_vmap_call`": lambda w, x: _opaque(x, w),
    "written in complex64": lambda w, x: (x * 1j) @ (w * 1j),
    "written in float16 and float32": lambda w, x: jnp.matmul(
        x, w, preferred_element_type=jnp.float16
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", KEPT)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_the_reason_why_a_product_was_kept_is_the_true_one(reason, wrap):
    fun = wrap(KEPT[reason])

    def net(w, x):
        with jax.named_scope("head" if reason == "`float32_paths`" else "body"):
            return fun(w, x)

    ops = jaxmp.DEFAULT_OPS.with_deny("conv_general_dilated")
    paths = ("head",) if reason == "`float32_paths`" else ()
    report = jaxmp.audit(jaxmp.autocast(net, ops=ops, float32_paths=paths))(
        full(8, 8), full(8, 8)
    )
    assert {k.reason for k in report.kept} == {reason}
    assert {k.module for k in report.kept} <= {"head", "body", "head/head"}


@pytest.mark.parametrize("size", [1, 4])
def test_derivatives_of_small_products_are_no_matmuls_wherever_they_are_taken(size):
    def loss(w, h):
        energy = lambda h: (jnp.tanh(h) @ w).sum()  # noqa: E731
        return (jax.grad(energy)(h) ** 2).sum()  # a product of `size` numbers

    args = full(16, size), full(8, 16)
    for step in (jaxmp.autocast(jax.grad(loss)), jax.grad(jaxmp.autocast(loss))):
        report = jaxmp.audit(step)(*args)
        assert report.fraction_16bit == 1
        assert not report.kept


# Numbers


def test_a_float32_mask_value_is_named_in_attention():
    mask = np.tril(np.ones((8, 8), bool))

    def attention(q):
        with jax.named_scope("attention"):
            s = jnp.einsum("bqd,bkd->bqk", q, q)
            s = jnp.where(mask, s, jnp.finfo(FULL).min)  # masks
            return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(s), q)

    (leak,) = jaxmp.audit(attention)(half(2, 8, 16)).leaks
    assert str(leak) == "float32(-3.40282e+38) meets 16-bit"
    assert (leak.kind, leak.share) == ("constant", 0.5)
    assert (leak.module, leak.where) == ("attention", line("masks"))


OPERATIONS = {
    "mul": lambda h, s: h * s,  # uses
    "where": lambda h, s: jnp.where(h > 0, h, s),  # uses
    "select": lambda h, s: jnp.select([h > 0, h < -1], [h, h], s),  # uses
    "clip": lambda h, s: jnp.clip(h, None, s),  # uses
    "leaky_relu": jax.nn.leaky_relu,
    "elu": lambda h, s: jax.nn.elu(h, s),  # uses
    "logaddexp": lambda h, s: jnp.logaddexp(h, s),  # uses
    "softplus": lambda h, s: jax.nn.softplus(h) - s,  # uses
    "power": lambda h, s: jnp.power(jnp.abs(h), s),  # uses
    "hypot": lambda h, s: jnp.hypot(h, s),  # uses
    "heaviside": lambda h, s: jnp.heaviside(h, s),  # uses
    "stack": lambda h, s: jnp.stack([h, jnp.full(h.shape, s)])[0],  # uses
    "own jit": lambda h, s: jax.jit(lambda a, b: (a * b) * 2.0)(h, s),  # uses
    "einsum": lambda h, s: jnp.einsum("ij,->ij", h, s),  # uses
}
USES = [
    f"{__file__}:{number}"
    for number, text in enumerate(pathlib.Path(__file__).read_text().splitlines(), 1)
    if text.endswith("# uses")
]


@crossed("operation differentiate", OPERATIONS, [False, True])
def test_a_number_that_widens_is_named_and_a_python_number_is_not(
    operation, differentiate
):
    def fun(w, x, s):
        return (operation(x @ w, s) @ w).sum()  # hands on

    fun = jax.grad(fun) if differentiate else fun
    for s in (np.float32(3), jnp.float32(3), np.array(3, np.float32)):
        (leak,) = jaxmp.audit(functools.partial(fun, s=s))(half(8, 8), half(8, 8)).leaks
        assert "float32(3)" in leak.source
        assert leak.meets_16bit
        assert leak.where in [*USES, line("hands on")]
    report = jaxmp.audit(functools.partial(fun, s=3.0))(half(8, 8), half(8, 8))
    assert report.fraction_16bit == 1
    assert not report.leaks


def test_a_number_has_the_line_where_it_enters():
    @jax.jit
    def inner(h, s):
        return h * s

    def fun(x, w):
        return inner(x @ w, np.float32(2)) @ w  # enters

    (leak,) = jaxmp.audit(fun)(half(8, 8), half(8, 8)).leaks
    assert (leak.source, leak.where) == ("float32(2)", line("enters"))


def test_numbers_in_float32_work_are_not_to_blame():
    def fun(x, w):
        wide = jnp.clip(x.astype(FULL), np.float32(-3), np.float32(3))  # on purpose
        return (jax.nn.softmax(wide * np.float32(0.5)) + jnp.float32(1)) @ w

    (leak,) = jaxmp.audit(fun)(half(8, 8), half(8, 8)).leaks
    assert (leak.kind, leak.where) == ("cast", line("on purpose"))


SOURCES = {
    "number": (lambda: np.float32(3), "float32(3)"),
    "jax number": (lambda: jnp.float32(3), "float32(3)"),
    "made number": (lambda: jnp.sqrt(np.float32(9)), "float32[] made at "),
    "made array": (lambda: jnp.arange(8.0) * 2.0 + 1, "float32[8] made at "),
    "random array": (
        lambda: jax.random.normal(jax.random.key(0), (8,)),
        "float32[8] made at ",
    ),
    "array": (lambda: np.ones(8, np.float32), "constant float32[8]"),
    "argument": (None, "s"),
    "nothing": (lambda: 3.0, None),
}
CLEAN = [
    jax.nn.gelu,
    jax.nn.softplus,
    lambda h: jnp.where(h > 0, h, -1e9),
    lambda h: jnp.clip(h, -1.0, 1.0),
    lambda h: jax.nn.softmax(h.astype(FULL) * np.float32(2)).astype(h.dtype),
    lambda h: jax.nn.standardize(h),
]


@pytest.mark.parametrize(
    "seed",
    [*range(20), *(pytest.param(s, marks=pytest.mark.evidence) for s in range(20, 60))],
)
def test_a_random_program_has_no_leak_but_the_one_that_was_put_in(seed):
    rng = random.Random(seed)
    source, expected = SOURCES[rng.choice(sorted(SOURCES))]
    operation = OPERATIONS[rng.choice(sorted(OPERATIONS.keys() - {"einsum"}))]
    differentiate = rng.random() < 0.4
    wrappers = WRAPPERS.keys() - ({"while"} if differentiate else set())
    # One shard_map is enough: a second over the same axis is refused by JAX.
    chosen = rng.sample(sorted(wrappers), rng.randint(0, 3))
    before, after = rng.choice(CLEAN), rng.choice(CLEAN)
    dtype = rng.choice([jnp.bfloat16, jnp.float16])

    def layer(x, s, w):
        return after((operation(before(x @ w), s) @ w).astype(dtype))

    for name in chosen:
        layer = functools.partial(WRAPPERS[name], layer)

    def fun(x, w, s):
        s = source() if source else s
        return (layer(x, s, w) @ w).astype(FULL).sum()

    fun = jax.grad(fun, argnums=(0, 1)) if differentiate else fun
    x = jax.ShapeDtypeStruct((8, 8), dtype)
    report = jaxmp.audit(fun)(x, x, full(8))
    assert report.fraction_16bit == 1 or report.leaks
    if expected is None:
        assert report.fraction_16bit == 1
    # `custom_jvp` above returns a tangent that skips the layer.
    for leak in report.leaks:
        assert expected in leak.source or "of float32(3)" in leak.source
        assert leak.meets_16bit
        assert leak.where.startswith(__file__)
    assert len(report.leaks) <= 1


def test_a_float32_value_of_which_nothing_is_known_still_has_a_line():
    mystery = Primitive("mystery")
    mystery.def_abstract_eval(lambda x, jaxpr: x.update(dtype=jnp.dtype(FULL)))

    def fun(x, w):
        body = jax.make_jaxpr(lambda x: x)(x)
        return mystery.bind(x, jaxpr=body) @ w  # a riddle

    report = jaxmp.audit(fun)(half(8, 8), half(8, 8))
    (leak,) = report.leaks
    at = line("a riddle").rpartition("/")[2]
    assert str(leak) == f"float32 of unknown origin at {at}"
    assert (leak.kind, leak.where) == ("unknown", line("a riddle"))
    assert leak.share == 1
    assert str(leak) in str(report)


def test_an_unknown_operation_may_hold_a_jaxpr_that_lacks_its_constants():
    holder = Primitive("holder")  # as the solvers of lineax do
    holder.def_abstract_eval(lambda x, jaxpr: x)

    def fun(x, w):
        body = jax.make_jaxpr(lambda x: x + jnp.asarray(np.arange(8.0, dtype="f4")))(x)
        assert body.consts
        return holder.bind(x @ w, jaxpr=body.jaxpr) @ w

    assert jaxmp.audit(fun)(full(8, 8), full(8, 8)).fraction_16bit == 0
    assert jaxmp.audit(jaxmp.autocast(fun))(full(8, 8), full(8, 8)).fraction_16bit == 1


def test_a_product_that_narrows_its_result_is_charged_as_well():
    def fun(x, w):
        wide = jnp.broadcast_to(np.float32(2), (8, 8))
        return jnp.matmul(x, wide, preferred_element_type=HALF)

    report = jaxmp.audit(fun)(half(8, 8), half(8, 8))
    assert report.fraction_16bit == 0
    assert len(report.leaks) == 1


def test_a_remat_in_a_scope_charges_its_backward_pass_to_the_same_cause():
    def layer(x, w):
        with jax.named_scope("block"):
            return (jnp.hypot(x @ w, np.float32(2)) @ w).astype(HALF)

    def loss(w, x):
        with jax.named_scope("block"):
            x = jax.checkpoint(jax.checkpoint(layer))(x, w)
        return x.astype(FULL).sum()

    (leak,) = jaxmp.audit(jax.grad(loss))(half(8, 8), half(8, 8)).leaks
    assert leak.source == "float32(2)"


def test_a_loop_that_never_runs_costs_nothing():
    def fun(x, w):
        return lax.scan(lambda c, _: (c @ w, None), x, None, length=0)[0]

    assert jaxmp.audit(fun)(full(8, 8), full(8, 8)).flops == {}


# Places


PROGRAM = """
import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxmp

model = nn.Sequential([nn.LayerNorm(), nn.Dense(8)])
x = jax.ShapeDtypeStruct((8, 8), jnp.float16)
variables = jax.eval_shape(model.init, jax.random.key(0), x)
policy = jaxmp.get_policy("mixed_float16").with_overrides(("scale", "float32"))
variables = jax.eval_shape(policy.cast_to_compute, variables)
report = jaxmp.audit(model.apply)(variables, x)
print(report)
"""


@pytest.mark.parametrize("name", ["train.py", "<stdin>", "<cell>", "7.py"])
def test_a_models_line_is_the_audits_where_all_the_code_is_a_librarys(name):
    names = {"__name__": "__main__"}
    exec(compile(PROGRAM, name, "exec"), names)
    (leak,) = names["report"].leaks
    assert leak.where == f"{name}:12"
    assert leak.module == "Sequential/layers_0"
    words = " ".join(str(names["report"]).split())
    assert f"{leak} Sequential/layers_0 {name}:12" in words


# Float32 that a device rounds


def at_default(fun, *args):
    """Returns the share at default precision, which the table says if there is any."""
    report = jaxmp.audit(fun)(*args)
    share = report.default_precision_flops / sum(report.flops.values())
    said = f"{share:.1%} of the FLOPs in float32 at default precision: TF32 on A100 and"
    text = str(report)
    assert (said in " ".join(text.split())) == (share > 0)
    assert ("default precision" in text) == (share > 0)
    assert max(map(len, text.splitlines())) <= 80
    assert report.as_dict()["default_precision_flops"] == report.default_precision_flops
    return share


@pytest.mark.parametrize(
    ("precision", "share"),
    [(None, 1), ("default", 1), ("highest", 0), ("high", 0), ("F32_F32_F32", 0)],
)
def test_float32_at_default_precision_is_told(precision, share):
    def fun(x, w):
        return jnp.matmul(x, w, precision=precision)

    assert at_default(fun, full(8, 8), full(8, 8)) == share
    assert at_default(fun, half(8, 8), half(8, 8)) == 0


def test_a_precision_for_all_products_counts_where_their_lines_have_none():
    def net(w, x):
        return jnp.matmul(jnp.tanh(x @ w), w, precision="default")

    args = full(8, 8), full(8, 8)
    assert at_default(net, *args) == 1
    for precision, share in [("highest", 0.5), ("tensorfloat32", 0.5), ("bfloat16", 1)]:
        with jax.default_matmul_precision(precision):
            assert at_default(net, *args) == share

    def inside(w, x):
        with jax.default_matmul_precision("highest"):
            x = x @ w
        return x @ w

    assert at_default(inside, *args) == 0.5


def test_what_the_user_keeps_in_float32_is_not_at_default_precision():
    def net(w, x, **options):
        kept = jaxmp.float32_region(jnp.matmul, **options)
        return jax.lax.scan(lambda x, _: (kept(x, w), None), x @ w, length=3)[0]

    args = full(8, 8), full(8, 8)
    assert at_default(jaxmp.autocast(net), *args) == 0
    of_device = functools.partial(net, precision="default")
    assert at_default(jaxmp.autocast(of_device), *args) == 0.75
    assert at_default(of_device, *args) == 1


# The report as data, and in a test


def test_a_report_is_plain_data():
    def fun(params, x):
        h = jaxmp.autocast(jnp.matmul, HALF)(x, params["w"])
        h = lax.while_loop(lambda h: h[0, 0] > 0, lambda h: h @ params["w"], h)
        return jnp.exp(h).astype(HALF) @ params["w"]

    report = jaxmp.audit(fun)({"w": full(8, 8)}, full(8, 8))
    data = report.as_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["fraction_16bit"] == report.fraction_16bit
    assert data["flops"] == report.flops
    assert data["residual_bytes"] == report.residual_bytes
    assert data["notes"] == list(report.notes)
    for name in ("leaks", "kept"):
        rows = getattr(report, name)
        assert [
            type(row)(**fields) for row, fields in zip(rows, data[name], strict=True)
        ] == [*rows]
    assert data["leaks"][0]["source"] == "w"


def test_16_bits_are_asserted_with_the_whole_report():
    def fun(x, w, fun=1.0):
        return (x @ w * fun) @ w

    args = half(8, 8), half(8, 8)
    jaxmp.assert_16bit(fun, *args)
    jaxmp.assert_16bit(jax.grad(lambda w, x: fun(x, w).sum()), *args)
    jaxmp.assert_16bit(fun, *args, fun=2.0)
    jaxmp.assert_16bit(jnp.sin, full(8))  # multiplies no matrices
    with pytest.raises(AssertionError) as error:
        jaxmp.assert_16bit(fun, *args, fun=np.float32(2))
    message = str(error.value)
    assert "of `fun` in 16 bits, but 50.0% of their FLOPs" in " ".join(message.split())
    assert str(jaxmp.audit(fun)(*args, fun=np.float32(2))) in message
    assert max(map(len, message.splitlines())) <= 80
    with pytest.raises(TypeError, match=r"assert_16bit\(fun, \*args\)"):
        jaxmp.assert_16bit(jnp.ones(3))


def test_what_autocast_keeps_is_not_16_bits_either():
    def fun(x, w):
        return jaxmp.float32_region(jnp.matmul)(x @ w, w)

    args = full(8, 8), full(8, 8)
    jaxmp.assert_16bit(jaxmp.autocast(jnp.matmul, HALF), *args)
    with pytest.raises(AssertionError, match="kept in float32 by autocast") as error:
        jaxmp.assert_16bit(jaxmp.autocast(fun, HALF), *args)
    assert "`assert not" in str(error.value)
    assert not jaxmp.audit(jaxmp.autocast(fun, HALF))(*args).leaks


# Residuals


def test_residuals_are_what_the_backward_pass_reads():
    def loss(w, x):
        h = jnp.sin(x @ w)
        return jnp.sum(jnp.sin(h @ w).astype(FULL))

    expected = {"bfloat16": 3 * 64 * 2}  # two cosines and the input of a product
    args = half(8, 8), half(8, 8)
    assert jaxmp.audit(loss)(*args).residual_bytes is None  # no backward pass
    for fun in (jax.grad(loss), jax.jit(jax.value_and_grad(loss))):
        assert jaxmp.audit(fun)(*args).residual_bytes == expected


def test_remat_shrinks_the_residuals_and_scan_multiplies_them():
    def layer(x, w):
        return jnp.sin(jnp.sin(jnp.sin(x @ w)))

    def loss(ws, x, body):
        return lax.scan(lambda c, w: (body(c, w), None), x, ws)[0].astype(FULL).sum()

    args = half(6, 8, 8), half(8, 8)
    plain, remat = (
        jaxmp.audit(jax.grad(lambda w, x: loss(w, x, body)))(*args).residual_bytes  # noqa: B023
        for body in (layer, jax.checkpoint(layer))
    )
    assert remat == {"bfloat16": 6 * 128}
    assert plain == {"bfloat16": 6 * 4 * 128}


def test_a_float32_copy_of_16_bits_is_not_counted_twice():
    def loss(x):
        h = jnp.sin(x)
        return jnp.sum(h.astype(FULL) * jnp.sin(h).astype(FULL))

    # Two cosines, the two factors.
    assert jaxmp.audit(jax.grad(loss))(half(8)).residual_bytes == {"bfloat16": 64}


# The report


def test_nothing_runs_and_static_arguments_stay_static():
    def fun(x, w, flip, *, mode, times):
        jax.debug.callback(lambda: pytest.fail("the function ran"))
        assert mode == "matmul"
        assert flip is True
        for _ in range(times):
            x = x @ w
        return {"x": x, "mode": mode}

    args = half(8, 8), np.ones((8, 8), HALF)
    report = jaxmp.audit(fun)(*args, True, mode="matmul", times=3)
    assert report.flops == {"bfloat16": 3 * MATMUL}


@pytest.mark.parametrize("wide", [False, True])
def test_what_is_printed_changes_nothing(wide):
    def fun(x, w, says):
        y = x.astype(FULL) if wide else x
        says(y)
        return y @ w

    def says(y):
        jax.debug.print("{y} {s}", y=y, s=np.float32(2))

    args = half(8, 8), half(8, 8)
    printed = jaxmp.audit(functools.partial(fun, says=says))(*args)
    assert printed == jaxmp.audit(functools.partial(fun, says=lambda _: None))(*args)


def test_the_table_is_narrow_and_plain_however_long_the_names():
    name = "a_parameter_with_quite_a_long_name"
    params = {name: {f"{name}_{i}": full(8) for i in range(30)}}

    def fun(params, x):
        with jax.named_scope("/".join(f"Block_{i}_of_many" for i in range(8))):
            for scale in params[name].values():
                x = x * scale
        return x @ x

    report = jaxmp.audit(fun)(params, half(8, 8))
    assert len(report.leaks) == 30
    text = str(report)
    assert max(map(len, text.splitlines())) <= 80
    assert "20 more" in text
    # Long names go on in the next line, and lose nothing.
    leak = report.leaks[0]
    assert f"{leak}{leak.module}".replace(" ", "") in "".join(text.split())


def test_the_example_shows_the_leak_and_its_cure(capsys):
    path = pathlib.Path(__file__).parents[2] / "examples" / "audit.py"
    example = runpy.run_path(str(path))
    example["main"](example["Args"](width=8, blocks=1, batch=2))
    before, after = capsys.readouterr().out.split("nn.LayerNorm(dtype=jnp.bfloat16)")
    assert "0.0% of matmul and convolution FLOPs in 16 bits" in before
    assert "params/LayerNorm_0/scale (float32) meets 16-bit" in before
    assert "100.0% of matmul and convolution FLOPs in 16 bits" in after


def test_a_function_is_expected():
    with pytest.raises(TypeError, match=r"audit\(fun\)\(\*args\)"):
        jaxmp.audit(jnp.ones(3))


# With JAX's setting `jax_enable_x64`

WIDE = np.linspace(0, 1, 64).reshape(8, 8)


def net(w, x, f=lambda h: h):
    return jnp.tanh(f(x @ w)) @ w


# What is float64 in a program, how it is named, and the share that it makes float64.
FLOAT64 = {
    "batch": ("x (float64) meets float32", 1, net),
    "constant": (
        "constant float64[8, 8] meets 16-bit", 0.6,
        lambda w, x: net(w, x, lambda h: h + WIDE),
    ),
    "made": (
        "float64[8] made at test_audit.py", 0.6,
        lambda w, x: net(w, x, lambda h: h + jnp.zeros(8)),
    ),
    "random": (
        "float64[8] made at test_audit.py", 0.6,
        lambda w, x: net(w, x, lambda h: h + jax.random.normal(jax.random.key(0), 8)),
    ),
    "number": (
        "float64(2) meets 16-bit", 0.6,
        lambda w, x: net(w, x, lambda h: h * np.float64(2)),
    ),
    "cast": (
        "cast from 16-bit to float64", 0.6,
        lambda w, x: net(w, x, lambda h: h.astype("float64")),
    ),
    "python": ("", 0, lambda w, x: net(w, x, lambda h: 2.0 * h)),
    "back": (
        "", 0,
        lambda w, x: net(w, x, lambda h: h.astype("float64").astype("float32")),
    ),
    "region": (
        "", 0.4,
        lambda w, x: jaxmp.float32_region(lambda w, x: x @ w.astype("float64"))(
            w, x
        ).astype("float32") @ w,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("named", "share", "fun"), FLOAT64.values(), ids=FLOAT64)
def test_a_leak_to_float64_is_named_and_nothing_that_it_promotes(named, share, fun):
    def loss(w, x):
        return jnp.mean(fun(w, x).astype("float32"))

    with jax.enable_x64(True):
        dtype = "float64" if fun is net else "float32"
        x = jax.ShapeDtypeStruct((8, 8), dtype)
        report = jaxmp.audit(jaxmp.autocast(jax.grad(loss)))(full(8, 8), x)
        plain = jaxmp.audit(jax.grad(loss))(full(8, 8), x)
    total = sum(report.flops.values())
    assert np.isclose(report.flops.get("float64", 0.0) / total, share)
    assert np.isclose(1 - report.fraction_16bit, share)
    assert len(report.leaks) == bool(named)
    if named:
        assert str(report.leaks[0]).startswith(named)
        assert np.isclose(report.leaks[0].share, share)
        assert "x.astype(jnp.float32)" in str(report)
        assert "not 16-bit because of" in str(report)
        assert not report.kept
        (leak,) = (x for x in plain.leaks if x.dtype == "float64")
        assert leak.source == report.leaks[0].source


def test_a_float64_batch_is_no_16_bits_and_its_cast_cures_it():
    with jax.enable_x64(True):
        w, x = full(8, 8), jax.ShapeDtypeStruct((8, 8), "float64")
        with pytest.raises(AssertionError, match=r"under `not 16-bit because of`"):
            jaxmp.assert_16bit(jaxmp.autocast(net), w, x)
        cured = jaxmp.autocast(lambda w, x: net(w, x.astype("float32")))
        jaxmp.assert_16bit(cured, w, x)


def complex_layers(multiply):
    """Two layers, of which the second has complex numbers of the first."""

    def loss(w, x):
        h = multiply(x, w)
        return jnp.abs(multiply(h * jnp.tanh(jnp.abs(h)), w)).sum()

    return jax.grad(loss)


def in_four(a, b):
    real = a.real @ b.real - a.imag @ b.imag
    return jax.lax.complex(real, a.real @ b.imag + a.imag @ b.real)


def as_told(report):
    """Returns the multiplication that a report says to write."""
    lines = str(report).partition("complex 16-bit matmuls")[2].splitlines()[1:]
    code = " ".join(itertools.takewhile(str.strip, lines))
    return eval(f"lambda a, b: {code.strip()}", {"jax": jax, "jnp": jnp})


def test_complex_matmuls_are_told_once_to_be_written_as_one_real_matmul():
    args = [jax.ShapeDtypeStruct((8, 8), jnp.complex64)] * 2
    plain = complex_layers(jnp.matmul)
    for fun in (plain, jaxmp.autocast(plain)):
        report = jaxmp.audit(fun)(*args)
        assert str(report).count("complex 16-bit matmuls") == 1
        assert "nothing is in 16 bits" not in str(report)
    assert not report.leaks
    assert {row.dtype for row in report.kept} == {"complex64"}
    wide = jaxmp.autocast(complex_layers(as_told(report)))
    cured = jaxmp.audit(wide)(*args)
    assert cured.fraction_16bit == 1
    assert "complex 16-bit" not in str(cured)

    keys = jax.random.split(jax.random.key(0))
    w, x = (jax.lax.complex(*jax.random.normal(key, (2, 64, 64))) / 8 for key in keys)
    exact = plain(w, x)
    four = jaxmp.autocast(complex_layers(in_four))(w, x)
    wide, four = (jnp.linalg.norm(y - exact) for y in (wide(w, x), four))
    assert wide < 6e-3 * jnp.linalg.norm(exact)
    assert wide < 1.2 * four  # the same digits


@pytest.mark.skipif(bool(targets.unavailable()), reason=str(targets.unavailable()))
def test_one_real_matmul_moves_less_than_four_as_its_page_says():
    shapes = [jax.ShapeDtypeStruct((n, 1024), jnp.complex64) for n in (1024, 8192)]
    plain = complex_layers(jnp.matmul)
    wide = complex_layers(as_told(jaxmp.audit(plain)(*shapes)))
    funs = [plain, *map(jaxmp.autocast, (wide, complex_layers(in_four)))]
    texts = [targets.compiled(fun, *shapes).as_text() for fun in funs]
    moved = [hlo.work(text).bytes / 1e9 for text in texts]
    page = pathlib.Path(__file__).parents[2] / "docs/cookbook/training.md"
    said = "moves {0} GB in complex64, {0} in this form, and {0} as four real matmuls"
    text = " ".join(page.read_text().split())
    numbers = re.search(said.format("([0-9.]+)"), text)
    assert numbers is not None
    np.testing.assert_allclose(moved, [*map(float, numbers.groups())], rtol=0.06)


def test_a_number_of_numpy_may_be_read_more_often_in_16_bits():
    def fun(x):
        for _ in range(2 if x.dtype == jnp.float16 else 1):
            x = jnp.log(x + np.full((), 1e-8, x.dtype))
        return x

    report = jaxmp.audit(fun)(jnp.ones(2, jnp.float16))
    assert "1e-08 is 0 in float16" in str(report)
