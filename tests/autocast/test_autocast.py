import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from benchmarks.counting.measure import product_dtypes, relative_error, run, traced
from conftest import (
    at_once,
    checking_leaks,
    crossed,
    in_both_orders,
    mapped,
    normal,
    rest_is_evidence,
)
from jaxmp._jaxprs import jaxpr as _jaxpr

W = normal(0, 8, 8, scale=0.3)
X = normal(1, 8, 8)


def mesh(size):
    return jax.make_mesh((size,), ("i",), axis_types=(AxisType.Auto,))


@jax.custom_vjp
def own_vjp(w, x):
    return jnp.tanh(x @ w)


def own_vjp_forward(w, x):
    y = own_vjp(w, x)
    return y, (w, x, y)


def own_vjp_backward(residuals, g):
    w, x, y = residuals
    h = g * (1 - y * y)
    return x.T @ h, h @ w.T


own_vjp.defvjp(own_vjp_forward, own_vjp_backward)


@jax.custom_jvp
def own_jvp(w, x):
    return jnp.tanh(x @ w)


@own_jvp.defjvp
def own_jvp_rule(primals, tangents):
    y = own_jvp(*primals)
    (w, x), (dw, dx) = primals, tangents
    return y, (1 - y * y) * (x @ dw + dx @ w)


def step(c, x, w):
    return jnp.tanh(c @ w) + x, c @ w


COMPOSED = {
    "jit": lambda w, x: jax.jit(step)(x, x, w),
    "scan": lambda w, x: lax.scan(
        functools.partial(step, w=w), x, jnp.ones((3, *x.shape))
    ),
    "fori": lambda w, x: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w), x),
    "while": lambda w, x: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x)
    ),
    "map": lambda w, x: lax.map(lambda row: jnp.tanh(row @ w), x),
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, lambda x: x @ w, jnp.exp, x) @ w,
    "switch": lambda w, x: (
        lax.switch(2, [lambda y: y, lambda y: y @ w, lambda y: jnp.sin(y)], x @ w) @ w
    ),
    "custom_jvp": lambda w, x: own_jvp(w, x @ w) @ w,
    "custom_vjp": lambda w, x: own_vjp(w, x @ w) @ w,
    "relu": lambda w, x: jax.nn.relu(x @ w) @ w,
    "gelu": lambda w, x: jax.nn.gelu(x @ w) @ w,
    "softmax": lambda w, x: jax.nn.softmax(x @ w) @ w,
    "logsumexp": lambda w, x: jax.nn.logsumexp(x @ w, axis=-1),
    "remat": lambda w, x: jax.checkpoint(step)(x, x, w),
    "remat with a policy": lambda w, x: jax.checkpoint(
        step, policy=jax.checkpoint_policies.dots_saveable
    )(x, x, w),
    "vmap": lambda w, x: jax.vmap(lambda row: jnp.tanh(row @ w) @ w)(x),
    "jvp": lambda w, x: jax.jvp(lambda x: jnp.tanh(x @ w) @ w, (x,), (x,)),
    "vjp": lambda w, x: jax.vjp(lambda x: jnp.tanh(x @ w), x)[1](x)[0] @ w,
    "shard_map": lambda w, x: mapped(
        lambda w, x: lax.psum(jnp.tanh(x @ w + w[0]) @ w, "i"),
        mesh(2),
        (P(), P("i")),
        P(),
    )(w, x),
    "take": lambda w, x: jnp.take(w, jnp.array([1, 2]), axis=0) @ w,
    "normalisation": lambda w, x: jax.nn.standardize(x @ w) * w[0] @ w,
    "convolution": lambda w, x: lax.conv(x[None, None], w[None, None], (1, 1), "SAME"),
    "ragged_dot": lambda w, x: lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([1, 3])),
    "solve": lambda w, x: jnp.linalg.solve(w + 3 * jnp.eye(8), (x @ w).T),
    "fft": lambda w, x: jnp.abs(jnp.fft.fft(x @ w)),
    "sort": lambda w, x: jnp.sort(x @ w, axis=-1) @ w,
    "constants": lambda w, x: (1.0 * jnp.ones(()), x @ w, jnp.float32(2) * 2),
}


def loss_of(fun):
    def loss(w, x):
        outs = jax.tree.leaves(fun(w, x))
        return sum(jnp.mean(jnp.sin(out)) for out in outs)

    return loss


@pytest.mark.parametrize("name", COMPOSED)
def test_values_keep_structure_and_dtypes_and_agree_with_float32(name):
    fun = COMPOSED[name]
    cast = jaxmp.autocast(fun, "float16")
    (out, expected), jaxpr = run(lambda *args: (cast(*args), fun(*args)), W, X)
    chex.assert_trees_all_equal_shapes_and_dtypes(out, expected)
    chex.assert_trees_all_close(out, expected, rtol=0.02, atol=0.02)
    weak = [a.weak_type for a in jaxpr.out_avals]
    assert weak[: len(weak) // 2] == weak[len(weak) // 2 :]


# Those with rules or bodies of their own; the values of all are compared above.
DIFFERENTIATED = {"scan", "fori", "cond", "custom_jvp", "custom_vjp", "softmax"}
DIFFERENTIATED |= {"remat with a policy", "vjp", "shard_map", "normalisation", "jit"}
DIFFERENTIATED |= {"convolution", "ragged_dot", "solve", "sort", "constants"}


@pytest.mark.needs_no_scale
@pytest.mark.parametrize(
    "name",
    # JAX has no gradient of a while loop.
    rest_is_evidence({x: x for x in COMPOSED if x != "while"}, *DIFFERENTIATED),
)
def test_gradients_agree_with_float32_in_every_order(name):
    loss = loss_of(COMPOSED[name])
    orders = in_both_orders(loss, "float16", grad=jax.grad)
    expected, *grads = at_once(*orders)(W, X)
    for got in grads:
        assert got.dtype == jnp.float32
        assert relative_error(got, expected) < 0.01


def closing_over(w, x):
    @jax.custom_vjp
    def fun(x):
        return x @ w

    fun.defvjp(lambda x: (x @ x.T @ x, x), lambda x, g: (x @ x.T @ g,))
    return fun(x)


@pytest.mark.needs_no_scale
@pytest.mark.parametrize(
    ("fun", "argnums", "count"),
    [(own_jvp, (0, 1), 3), (own_vjp, (0, 1), 3), (closing_over, 1, 4)],
)
def test_rules_of_custom_derivatives_run_in_16_bits(fun, argnums, count):
    def loss(w, x):
        return lax.scan(lambda c, x: (c + fun(w, x).sum(), None), 0.0, x[None])[0]

    plain, *orders = in_both_orders(loss, "float16", argnums, jax.grad)
    expected, *grads = at_once(plain, *orders)(W, X)
    for grad, got in zip(orders, grads, strict=True):
        assert relative_error(got, expected) < 0.01
        found = product_dtypes(grad, W, X)
        assert len(found) >= count
        assert all(dtypes == {"float16"} for dtypes in found)


def test_it_works_inside_vmap_and_shard_map_and_under_a_named_axis():
    def fun(w, x):
        return lax.psum(jnp.tanh(x @ w + w[0]) @ w, "i")

    cast, split = jaxmp.autocast(fun), (P(), P("i"))
    wraps = [jax.vmap(f, (None, 0), axis_name="i") for f in (fun, cast)]
    expected, out = at_once(*wraps)(W, X[:4])
    np.testing.assert_allclose(out, expected, atol=0.1)
    out = jax.jit(mapped(cast, mesh(4), split, P()))(W, X[:4])
    np.testing.assert_allclose(out[0], expected[0], atol=0.1)


def softly_capped(w):
    return jax.nn.softmax(jnp.tril(2 * jnp.tanh(X @ w / 2))) @ w


def recurrent(w, **options):
    def step(h, x):
        h = jnp.tanh(x @ w + h @ w)
        return h, h

    return lax.scan(step, 0 * X[:4], jnp.stack([X[:4], X[4:]]), **options)[1]


TWICE = {
    "tanh": lambda w: jnp.tanh(X @ w),
    "softmax": lambda w: jax.nn.softmax(4 * X @ w @ X.T) @ X**2,
    "capped": softly_capped,
    "softplus": lambda w: jax.nn.softplus(X @ w) @ w,
    "bias": lambda w: jax.nn.gelu(X @ w + w[0]) @ w,
    "custom_jvp": lambda w: COMPOSED["custom_jvp"](w, X),
    "recurrent": recurrent,
    "reversed": functools.partial(recurrent, reverse=True),
}


@pytest.mark.needs_no_scale
@pytest.mark.parametrize("fun", TWICE.values(), ids=TWICE)
def test_second_derivatives_agree_with_float32(fun):
    def loss(w):
        return jnp.mean(fun(w) ** 2)

    def again(grad):
        return jax.grad(lambda w: jnp.sum(grad(w) ** 2))

    def forward(grad):
        return lambda w: jax.jvp(grad, (w,), (2 * jax.grad(loss)(w),))[1]

    cast = functools.partial(jaxmp.autocast, policy="float16")
    grads = cast(jax.grad(loss)), jax.grad(cast(loss))
    forms = [
        f
        for of in (again, forward)
        for f in (cast(of(jax.grad(loss))), *map(of, grads))
    ]
    expected, *results = at_once(again(jax.grad(loss)), *forms)(W)
    for got in results:
        assert relative_error(got, expected) < 0.01


def test_nested_jit_keeps_name_shardings_and_donation():
    sharding = NamedSharding(mesh(2), P("i"))

    @functools.partial(jax.jit, donate_argnums=0, in_shardings=(sharding, None))
    def inner(x, w):
        return x @ w

    cast = jaxmp.autocast(lambda w, x: inner(x, w) @ w, jnp.float16)
    plain = [e for e in traced(inner, X, W) if e.primitive.name in ("jit", "pjit")]
    calls = [e for e in traced(cast, W, X) if e.params.get("name") == "inner"]
    for key in ("in_shardings", "out_shardings", "donated_invars", "keep_unused"):
        assert calls[0].params[key] == plain[0].params[key]


def test_effects_happen_once_and_see_float32(capsys):
    seen = []

    def fun(w, x):
        y = x @ w
        jax.debug.callback(lambda y: seen.append(y.dtype), y)
        jax.debug.print("mean {m}", m=(y @ w).mean())
        return y @ w

    jax.block_until_ready(jax.jit(jaxmp.autocast(fun, jnp.float16))(W, X))
    jax.effects_barrier()
    assert seen == [jnp.float32]
    assert capsys.readouterr().out.count("mean") == 1


def test_references_are_left_alone():
    def fun(w, x):
        ref = jax.new_ref(x)
        ref[...] = ref[...] @ w
        return ref[...] @ w

    np.testing.assert_allclose(jaxmp.autocast(fun)(W, X), fun(W, X), atol=0.05)


def test_scopes_and_source_lines_are_kept():
    def fun(w, x):
        with jax.named_scope("block"):
            return jnp.tanh(x @ w)

    def tanh(fun):
        return next(e for e in traced(fun, W, X) if e.primitive.name == "tanh")

    cast = tanh(jaxmp.autocast(fun))
    assert str(cast.source_info.name_stack).startswith("jaxmp.autocast/block")
    assert next(_jaxpr.frames(cast)) == next(_jaxpr.frames(tanh(fun)))


def test_a_scope_may_be_called_like_a_transformation():
    def named(x):
        with jax.named_scope("jvp"):
            return lax.sin(x)

    eqns = [jax.make_jaxpr(f)(1.0).eqns[0] for f in (jax.grad(lax.sin), named)]
    assert [_jaxpr.is_differentiated(eqn) for eqn in eqns] == [True, False]
    assert [_jaxpr.scope_names(eqn) for eqn in eqns] == [(), ("jvp",)]


# Tracing.


@pytest.mark.keeps_float32
@pytest.mark.parametrize("transform", [jax.vmap, jax.jacfwd, jax.jacrev])
def test_what_stays_as_it_was_is_transformed(transform):
    def fun(x):
        return lax.sin(2.0 * lax.sin(x))

    jaxpr = jax.make_jaxpr(transform(jaxmp.autocast(fun)))(X[0])
    expected = transform(fun)(X[0])
    got = jax.jit(_jaxpr.jaxpr_as_fun(jaxpr))(X[0])[0]
    chex.assert_trees_all_close(got, expected, rtol=1e-6)


def test_what_a_branch_closes_over_stays_in_the_branch():
    def fun(x, choice):
        y = lax.cos(x)
        sine = jaxmp.autocast(lambda: lax.sin(y) + y @ W)
        return lax.cond(choice, sine, lambda: y)

    eqns = jax.make_jaxpr(fun)(W, True).eqns
    names = [eqn.primitive.name for eqn in eqns]
    assert names.count("sin") == names.count("dot_general") == 0
    np.testing.assert_array_equal(fun(W, False), lax.cos(W))


def test_a_float32_policy_changes_nothing():
    def fun(w, x):
        return jax.nn.softmax(x @ w)

    cast = jaxmp.autocast(fun, "float32")
    assert str(jax.make_jaxpr(cast)(W, X)) == str(jax.make_jaxpr(fun)(W, X))


def test_explicit_dtypes_are_never_touched():
    def fun(x):
        return x @ x, x.astype(jnp.bfloat16) @ x.astype(jnp.bfloat16), x.astype(int)

    cast = jaxmp.autocast(fun, jnp.float16)
    assert product_dtypes(cast, W) == [{"float16"}, {"bfloat16"}]
    np.testing.assert_array_equal(cast(W)[1], fun(W)[1])
    half = W.astype(jnp.bfloat16)
    assert str(jax.make_jaxpr(cast)(half)) == str(jax.make_jaxpr(fun)(half))


@pytest.mark.needs_no_scale
def test_a_convolution_is_16_bit_throughout():
    # Of a float32 result on a GPU, XLA makes a convolution of float32 operands.
    def loss(w, x):
        dimensions = ("NHWC", "HWIO", "NHWC")
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dimensions)
        return jnp.square(y).mean()

    w, x = jnp.ones((3, 3, 2, 4)), jnp.ones((2, 8, 8, 2))
    cast = jaxmp.autocast(jax.value_and_grad(loss, argnums=(0, 1)), jnp.float16)
    convolutions = [
        {v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars)}
        for eqn in traced(cast, w, x)
        if eqn.primitive.name == "conv_general_dilated"
    ]
    assert convolutions == [{"float16"}] * 3
    _, grads = jax.eval_shape(cast, w, x)
    assert {grad.dtype.name for grad in grads} == {"float32"}


# Weights that are kept in 16 bits.


MIXED = {
    "matmul": lambda x, w: x @ w,
    "einsum": lambda x, w: jnp.einsum("bi,ij->bj", x, w),
    "dot_general": lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ()))),
    "reversed": lambda x, w: w @ x.T,
    "conv": lambda x, w: lax.conv(
        *promote_dtype(x[None, None], w[None, None, :3, :3]), (1, 1), "SAME"
    ),
    "batched": lambda x, w: jax.vmap(lambda x: w @ x)(x),
    "promoted": lambda x, w: jnp.dot(*promote_dtype(x, w)),
}


def promote_dtype(x, w):
    return x.astype(jnp.result_type(x, w)), w.astype(jnp.result_type(x, w))


HALVES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}


@pytest.mark.needs_no_scale
@crossed("product dtype stored", MIXED, HALVES, HALVES)
def test_a_product_with_a_16_bit_weight_runs_in_the_dtype_of_the_policy(
    product, dtype, stored
):
    w = W.astype(stored)

    def loss(x, w):
        return jnp.square(product(x, w)).mean()

    plain, *orders = in_both_orders(loss, dtype, (0, 1))
    expected, *results = at_once(plain, *orders)(X, w)
    for fun, (value, grads) in zip(orders, results, strict=True):
        assert all(d == {jnp.dtype(dtype).name} for d in product_dtypes(fun, X, w))
        chex.assert_trees_all_equal_dtypes(grads, expected[1])
        assert relative_error(value, expected[0]) < 0.02
        assert relative_error(grads, expected[1]) < 0.02
        report = jaxmp.audit(fun)(X, w)
        assert report.fraction_16bit == 1
        assert not report.kept


# The machine that traces.


@pytest.mark.needs_no_scale
@pytest.mark.parametrize("order", ["outside", "inside"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_what_a_program_becomes_does_not_depend_on_the_machine_that_traces(
    monkeypatch, dtype, order
):
    def loss(w, x):
        return jnp.exp(x @ w).mean()

    def lowered(platform):
        grad = {
            "outside": lambda *args: jaxmp.autocast(jax.grad(loss), dtype)(*args),
            "inside": lambda *args: jax.grad(jaxmp.autocast(loss, dtype))(*args),
        }[order]
        traced = jax.jit(grad).trace(W, X)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        return [x.split("->")[1] for x in text.splitlines() if "dot_general" in x]

    products = lowered("cuda")
    assert "xf32>" in products[0]  # the accumulator of the tensor cores
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert lowered("cuda") == products


def test_a_cpu_gives_the_sums_that_a_gpu_would():
    dtype = jnp.bfloat16

    def fun(x, w):
        return jnp.exp(x @ w)

    rounded = X.astype(dtype).astype(jnp.float32), W.astype(dtype).astype(jnp.float32)
    np.testing.assert_array_equal(jaxmp.autocast(fun, dtype)(X, W), fun(*rounded))


def test_a_primitive_may_give_a_number_of_pythons():
    size = Primitive("jaxmp_test_size")
    size.def_impl(lambda x: 4)
    size.def_abstract_eval(lambda x: ShapedArray((), jnp.dtype("int32")))

    def fun(x):
        return (x @ x) * size.bind(x), size.bind(x)

    out, count = jaxmp.autocast(fun)(jnp.eye(8))
    np.testing.assert_array_equal(out, 4 * jnp.eye(8))
    assert (count, count.dtype) == (4, jnp.int32)


# Haiku.


def test_autocast_inside_of_a_haiku_transform_is_refused_where_it_would_leak():
    hk = pytest.importorskip("haiku", reason="the extra `programs` has it")

    def makes_parameters(x):
        return jaxmp.autocast(lambda x: hk.Linear(4)(x))(x)

    def uses_its_keys(x):
        return jaxmp.autocast(lambda x: x + jax.random.normal(hk.next_rng_key(), ()))(x)

    def keeps_state(x):
        return jaxmp.autocast(lambda x: hk.set_state("mean", x.mean()))(x)

    key = jax.random.key(0)
    for fun in (makes_parameters, uses_its_keys, keeps_state):
        with pytest.raises(TypeError, match=r"autocast\(transformed.apply"):
            hk.transform_with_state(fun).init(key, X)
    harmless = hk.transform(lambda x: jaxmp.autocast(lambda x: x @ x.T)(x))
    assert harmless.apply({}, None, X).shape == (8, 8)
    net = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(4)(x)))
    params = net.init(key, X)
    assert product_dtypes(jaxmp.autocast(net.apply), params, X) == [{"bfloat16"}]


@crossed(
    "name order",
    ["tanh", "scan", "custom_jvp", "remat"],
    ["forward", "outside", "inside"],
)
def test_nothing_holds_a_tracer_when_its_trace_is_over(name, order):
    programs = {
        "tanh": lambda w, x: jnp.tanh(x @ w).mean(),
        "scan": lambda w, x: lax.scan(lambda c, _: (c @ w, None), x, None, 2)[0].mean(),
        "custom_jvp": lambda w, x: jax.nn.relu(x @ w).mean(),
        "remat": lambda w, x: jax.checkpoint(lambda x: jnp.exp(x @ w))(x).mean(),
    }
    loss = programs[name]
    fun = {
        "forward": jaxmp.autocast(loss),
        "outside": jaxmp.autocast(jax.grad(loss)),
        "inside": jax.grad(jaxmp.autocast(loss)),
    }[order]
    with checking_leaks():
        jax.jit(fun).trace(W, X)


# Opting out.


def in_float32(fun, *args):
    return sum(c == {"float32"} for c in product_dtypes(fun, *args))


def test_a_path_matches_whole_components_from_the_top():
    def fun(w, x):
        with jax.named_scope("Net"), jax.named_scope("block_1"):
            y = x @ w
            with jax.named_scope("head"):
                return y @ w

    for path in ("block", "head", "Net/block", "block_1/he"):
        with pytest.raises(ValueError, match=f"`{path}`.*Net/block_1"):
            jaxmp.autocast(fun, float32_paths=(path,))(W, X)
    for path, count in (("block_1", 2), ("block_1/head", 1), ("Net", 2)):
        assert in_float32(jaxmp.autocast(fun, float32_paths=(path,)), W, X) == count


def test_lists_can_be_changed():
    def fun(x):
        return jnp.tanh(x @ x) @ x

    def out_dtypes(name, fun, ops):
        eqns = traced(jaxmp.autocast(fun, ops=ops), W)
        return [e.outvars[0].aval.dtype for e in eqns if e.primitive.name == name]

    lists = jaxmp.DEFAULT_OPS
    assert out_dtypes("tanh", fun, lists) == [jnp.bfloat16]
    assert out_dtypes("tanh", fun, lists.with_deny("tanh")) == [jnp.float32]
    assert out_dtypes("exp", jnp.exp, lists.with_allow("exp")) == [jnp.bfloat16]
    ops = lists.with_deny("dot_general")
    assert in_float32(jaxmp.autocast(fun, ops=ops), W) == 2
    ops = lists.with_deny("scan")
    assert in_float32(jaxmp.autocast(COMPOSED["scan"], ops=ops), W, X) == 2


# Bad use.


def test_a_policy_with_overrides_points_to_float32_paths():
    policy = jaxmp.get_policy("mixed_float16").with_overrides(("head", "float32"))
    with pytest.raises(ValueError, match="float32_paths"):
        jaxmp.autocast(jnp.matmul, policy)


@pytest.mark.parametrize("policy", ["float64", jnp.float64, "float17", "mixed_float8"])
def test_a_dtype_without_16_bits_is_refused(policy):
    with pytest.raises((ValueError, TypeError)):
        jaxmp.autocast(jnp.matmul, policy)


def test_a_function_that_jax_cannot_trace_says_so():
    def branches(x):
        return x if x.sum() > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        jaxmp.autocast(branches)(X)
    assert any("`autocast` traces `" in note for note in error.value.__notes__)
    assert any("branches" in note for note in error.value.__notes__)
