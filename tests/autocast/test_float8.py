"""Products in float8 under autocast, and all else as under bfloat16."""

import functools
import operator
import pathlib

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax import export, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from benchmarks.counting import collectives
from benchmarks.counting.measure import relative_error, traced
from conftest import mapped, normal
from jaxmp._autocast import rules
from jaxmp._ops import fp8 as _fp8

F8, BF16 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.bfloat16)
OPS = jaxmp.DEFAULT_OPS.with_fp8(min_size=16)
fp8 = functools.partial(jaxmp.autocast, policy="mixed_fp8", ops=OPS)


def make(seed=0):
    a, b = normal(seed, 32, 64, scale=1 / 8), normal(seed + 1, 64, 32, scale=1 / 8)
    return {"a": a, "b": b}, normal(seed + 2, 4, 16, 32)


PARAMS, X = make()


def loss(params, x):
    """Two products with weights, and two batched ones between them."""
    h = jnp.tanh(x @ params["a"])
    h = jnp.tanh(jnp.einsum("bqd,bkd->bqk", h, h) / 8) @ h
    with jax.named_scope("head"):
        return jnp.mean((x + h @ params["b"]) ** 2)


def scanned(params, x):
    """Four layers, and in each two products with weights."""

    def layer(x, weights):
        return x + jnp.tanh(x @ weights["a"]) @ weights["b"], None

    layers = jax.tree.map(lambda w: jnp.stack([w] * 4), params)
    return jnp.mean(lax.scan(layer, x, layers)[0] ** 2)


GRAD = jax.grad(loss)


def products(fun, *args):
    """Returns the dtypes of the operands of each product of a traced function."""
    eqns = (eqn for eqn in traced(fun, *args) if eqn.primitive.name == "dot_general")
    return [tuple(x.aval.dtype for x in eqn.invars) for eqn in eqns]


# Scales


def test_the_largest_magnitude_fills_the_range_and_units_are_powers_of_two():
    # All positive finite numbers of bfloat16, each the largest of an array of two.
    bits = np.arange(1, 0x7F80, dtype=np.uint16)
    top = bits.view(ml_dtypes.bfloat16)
    x = jnp.stack([jnp.asarray(top), -jnp.asarray(top) / 3], axis=1)
    rounded, unit = jax.jit(jax.vmap(_fp8.scaled))(x)
    unit = np.asarray(unit, np.float64)
    assert (np.frexp(unit)[0] == 0.5).all()
    limits = jnp.finfo(jnp.bfloat16)
    assert unit.min() == limits.tiny
    assert np.isfinite(1 / unit).all()
    assert (1 / unit <= float(limits.max)).all()
    scaled = np.float64(top) / unit
    assert scaled.max() == 448
    # Below 2^-117 the unit would be subnormal, which some devices take for zero.
    filled = np.float64(top) >= 2.0**-117
    assert (scaled[filled] > 224).all()
    normal = np.asarray(top) >= limits.tiny
    expected = (np.asarray(x, np.float64) / unit[:, None])[normal].astype(F8)
    np.testing.assert_array_equal(np.asarray(rounded)[normal], expected)


def test_zeros_stay_zeros():
    rounded, unit = _fp8.scaled(jnp.zeros(3, jnp.bfloat16))
    assert not np.asarray(rounded, np.float32).any()
    assert 0 < unit < jnp.inf


@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_a_product_is_that_of_its_rounded_operands(wanted):
    (x, w), results = (X[0].astype(BF16), PARAMS["a"].astype(BF16)), []
    for operand in (x, w):
        rounded, unit = _fp8.scaled(operand)
        results.append(np.float64(rounded) * np.float64(unit))
    (eqn,) = jax.make_jaxpr(lax.dot)(X[0], PARAMS["a"]).eqns
    found = jax.jit(lambda x, w: _fp8.multiplied(eqn, (x, w), wanted, False))(x, w)
    assert found.dtype == wanted
    expected = operator.matmul(*results)
    tolerance = 8 * jnp.finfo(wanted).eps * np.abs(expected).max()
    np.testing.assert_allclose(np.float64(found), expected, atol=tolerance)


# Which products


def test_products_with_weights_are_float8_forward_and_backward():
    found = products(fp8(GRAD), PARAMS, X)
    assert found.count((F8, F8)) == 5  # no gradient of the input
    assert found.count((BF16, BF16)) == 6
    assert len(found) == 11
    assert {d for pair in found for d in pair} == {F8, BF16}  # e5m2 nowhere


FORMS = {
    "scan": (jax.grad(scanned), 2 + 4),
    "remat": (jax.grad(jax.checkpoint(scanned)), 2 + 2 + 4),
    "remat of layers": (jax.checkpoint(jax.grad(scanned)), 2 + 4),
    "micro-batches": (
        jaxmp.value_and_grad(scanned, accum_steps=4, batch_argnums=1),
        2 + 4,
    ),
    "gradient of a gradient": (
        jax.grad(lambda p, x: optax.tree.norm(jax.grad(scanned)(p, x))),
        16,
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_in_every_form_all_of_them_are(name):
    # In the body of a scan, which is traced once. No product has two cotangents, and if
    # one had, both would be of one kind all the same.
    fun, count = FORMS[name]
    found = products(fp8(fun), PARAMS, X)
    assert set(found) == {(F8, F8)}
    assert len(found) >= count


def as_before(fun, *args, ops=OPS):
    """Asserts that a function traces to what it does under bfloat16."""
    expected = jax.make_jaxpr(jaxmp.autocast(fun, ops=ops))(*args)
    (eqn,) = jax.make_jaxpr(jaxmp.autocast(fun, "mixed_fp8", ops=ops))(*args).eqns
    # Within the rule for its gradient, of which nobody asks.
    assert str(eqn.params["call_jaxpr"]) == str(expected)


W = jnp.ones((32, 32))
KEPT = {
    "batched, in bfloat16": (
        lambda x, w: jnp.einsum("bij,bkj->bik", *2 * [x.astype(BF16)]),
        "batched",
    ),
    "small, in bfloat16": (
        lambda x, w: jnp.dot(
            x.astype(BF16), w[:, :8].astype(BF16), preferred_element_type=jnp.float32
        ),
        "not a multiple of 16",
    ),
    "batched": (lambda x, w: jnp.einsum("bij,bkj->bik", x, x), "batched"),
    "rows": (lambda x, w: x[0, :8] @ w, "not a multiple of 16"),
    "terms": (lambda x, w: x[..., :24] @ w[:24], "not a multiple of 16"),
    "columns": (lambda x, w: x @ w[:, :31], "not a multiple of 16"),
    "vector": (lambda x, w: x @ w[0], "not a multiple of 16"),
    "convolution": (
        lambda x, w: lax.conv(x.swapaxes(1, 2), w[:, :, None], (1,), "SAME"),
        "no matmul of two floating matrices",
    ),
    "integers": (
        lambda x, w: lax.dot(x[0], w.astype(jnp.int8)),
        "no matmul of two floating matrices",
    ),
}


@pytest.mark.keeps_float32
@pytest.mark.filterwarnings("ignore:No matmul runs in float8")
@pytest.mark.parametrize("name", KEPT)
def test_other_products_stay_as_they_are_and_the_audit_says_why(name):
    fun, reason = KEPT[name]
    as_before(fun, X, W)
    report = jaxmp.audit(fp8(fun))(X, W)
    assert report.fraction_8bit < 1
    reasons = {row.reason for row in report.kept_16bit}
    assert any(reason in r for r in reasons), report


def test_the_gradients_of_single_examples_are_batched():
    grad = jax.vmap(jax.grad(lambda w, x: jnp.sum((x @ w) ** 2)), (None, 0))
    assert products(fp8(grad), W, X) == [(F8, F8), (BF16, BF16)]


@pytest.mark.filterwarnings("ignore:No matmul runs in float8")
def test_products_below_the_smallest_size_stay_as_they_are():
    grad = jax.value_and_grad(loss)
    ops = jaxmp.DEFAULT_OPS
    args = PARAMS, X
    assert ops.min_size == 2048
    for lists in (ops, ops.with_fp8(min_size=33)):
        as_before(grad, *args, ops=lists)
    report = jaxmp.audit(jaxmp.autocast(grad, "mixed_fp8", ops=lists))(*args)
    reasons = {row.reason for row in report.kept_16bit}
    assert reasons == {"batched", "a size below `min_size`"}
    as_large = jaxmp.autocast(grad, "mixed_fp8", ops=ops.with_fp8(min_size=32))
    assert (F8, F8) in products(as_large, *args)


def test_a_program_in_which_nothing_runs_in_float8_is_told_once():
    small = jaxmp.autocast(GRAD, "mixed_fp8")
    with pytest.warns(UserWarning, match="No matmul runs in float8") as found:
        jax.make_jaxpr(small)(PARAMS, X)
    (warning,) = found
    assert warning.filename == __file__
    assert "at least 2048" in str(warning.message)
    jax.make_jaxpr(small)(PARAMS, X)
    for cast in (
        fp8(GRAD),
        fp8(GRAD, bfloat16_paths="head"),  # in which the only large one may be
        jaxmp.autocast(GRAD, "mixed_bfloat16"),
        jaxmp.autocast(jnp.sin, "mixed_fp8"),
        fp8(GRAD, float32_paths=("head",)),
    ):
        jax.make_jaxpr(cast)(*((PARAMS, X) if cast.__name__ != "sin" else (X,)))


def test_the_page_has_the_sentence_that_stands_beside_the_rules():
    docs = pathlib.Path(__file__).parents[2] / "docs"
    text = (docs / "formats_narrow.md").read_text()
    assert rules.FLOAT8 in " ".join(text.split())


@pytest.mark.parametrize("where", ["float32_paths", "bfloat16_paths", "precision"])
def test_the_user_keeps_products_out_of_float8(where):
    def head(x, w):
        with jax.named_scope("head"):
            return jnp.matmul(
                x, w, precision="highest" if where == "precision" else None
            )

    def fun(x, w):
        return head(x @ w, w)

    options = {} if where == "precision" else {where: "head"}
    cast = jaxmp.autocast(jax.grad(lambda *xs: fun(*xs).sum()), "mixed_fp8", ops=OPS)
    assert set(products(cast, X, W)) == {(F8, F8)} or where == "precision"
    cast = jaxmp.autocast(fun, "mixed_fp8", ops=OPS, **options)
    kept = BF16 if where == "bfloat16_paths" else np.dtype(np.float32)
    assert products(cast, X, W) == [(F8, F8), (kept, kept)]
    report = jaxmp.audit(cast)(X, W)
    (row,) = report.kept_16bit if where == "bfloat16_paths" else report.kept
    assert where in row.reason
    assert row.module == "head"
    assert report.fraction_8bit == 0.5


def test_paths_reach_into_loops_and_both_passes():
    def body(x, w):
        with jax.named_scope("head"):
            x = jnp.tanh(x @ w)
        return x @ w, None

    def fun(x, ws):
        return lax.scan(body, x, ws)[0].sum()

    ws = jnp.stack([W, W])
    found = products(fp8(jax.grad(fun, (0, 1)), bfloat16_paths=("head",)), X, ws)
    assert sorted(map(str, found)) == sorted(
        map(str, 3 * [(F8, F8)] + 3 * [(BF16, BF16)])
    )


def test_paths_mean_nothing_without_float8_and_are_checked():
    with pytest.raises(ValueError, match=r"`bfloat16_paths` has `haed`, but no named"):
        fp8(loss, bfloat16_paths="haed")(PARAMS, X)
    with pytest.raises(
        ValueError, match="out of eight bits, but this policy computes in f"
    ):
        jaxmp.autocast(loss, "mixed_float16", bfloat16_paths="head")
    for policy in ("mixed_bfloat16", "float32"):
        cast = jaxmp.autocast(loss, policy, bfloat16_paths="head")
        expected = jax.make_jaxpr(jaxmp.autocast(loss, policy))(PARAMS, X)
        assert str(jax.make_jaxpr(cast)(PARAMS, X)) == str(expected)


def test_an_inner_autocast_decides_for_itself():
    def fun(x, w):
        return jaxmp.autocast(lambda x: x @ w, "mixed_bfloat16")(x) @ w

    assert products(fp8(fun), X, W) == [(BF16, BF16), (F8, F8)]
    (row,) = jaxmp.audit(fp8(fun))(X, W).kept_16bit
    assert row.reason == "written in bfloat16"
    assert products(jaxmp.autocast(fp8(loss)), PARAMS, X).count((F8, F8)) == 2


def test_a_function_with_a_rule_has_the_same_products_inside_a_gradient():
    @jax.custom_jvp
    def linear(x):
        return x @ W

    linear.defjvp(lambda primals, tangents: (linear(*primals), tangents[0] @ W))
    total = lambda x: jnp.sum(linear(x) ** 2)  # noqa: E731
    for grad in (jax.grad(fp8(total)), fp8(jax.grad(total))):
        assert products(grad, X) == [(F8, F8), (F8, F8)]


def test_what_is_written_or_stored_in_16_bits_is_taken_too():
    x, w = X.astype(BF16), W.astype(BF16)
    for args in ((X, w), (x, W), (x, w)):
        grad = fp8(jax.grad(lambda x, w: jnp.sum((x @ w) ** 2), (0, 1)))
        assert products(grad, *args) == 3 * [(F8, F8)]
    kept = fp8(
        lambda x, w: jax.named_scope("head")(jnp.dot)(x, w), bfloat16_paths="head"
    )
    assert products(kept, x, w) == [(BF16, BF16)]
    (row,) = jaxmp.audit(kept)(x, w).kept_16bit
    assert row.reason == "`bfloat16_paths`"
    half = fp8(lambda x, w: x @ w)
    assert products(half, x.astype("float16"), w.astype("float16")) != [(F8, F8)]
    model = nn.Dense(64, dtype=BF16, param_dtype=BF16)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    assert products(fp8(model.apply), variables, x) == [(F8, F8)]
    ops = OPS.with_rounded_matmuls()
    cast = jaxmp.autocast(lambda x, w: x @ w, "mixed_fp8", ops=ops)
    assert products(cast, X, W) == [(F8, F8)]
    assert cast(X, W).dtype == jnp.float32


@pytest.mark.filterwarnings("ignore:No matmul runs in float8")
def test_sizes_that_are_left_open_stay_as_they_are():
    (rows,) = export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 32), jnp.float32)
    exported = export.export(jax.jit(fp8(lambda x: x @ W)))(x)
    assert "f8E4M3FN" not in exported.mlir_module()
    assert exported.call(X[0]).shape == (16, 32)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.gelu(nn.Dense(64, name="body")(x))
        return nn.Dense(32, name="head")(x)


def test_modules_of_linen_have_names():
    model = Model()
    variables = jax.eval_shape(model.init, jax.random.key(0), X)
    cast = fp8(model.apply, bfloat16_paths=("Model/head",))
    assert products(cast, variables, X) == [(F8, F8), (BF16, BF16)]
    report = jaxmp.audit(fp8(model.apply))(variables, X)
    assert report.fraction_8bit == 1
    assert not report.kept_16bit


def test_nnx_takes_the_same_arguments():
    model = nnx.Linear(32, 32, rngs=nnx.Rngs(0))

    def apply(model, x):
        with jax.named_scope("head"):
            return model(model(x))

    cast = jaxmp.nnx.autocast(apply, "mixed_fp8", ops=OPS)
    assert products(cast, model, X) == [(F8, F8), (F8, F8)]
    kept = jaxmp.nnx.autocast(apply, "mixed_fp8", ops=OPS, bfloat16_paths="head")
    assert products(kept, model, X) == [(BF16, BF16), (BF16, BF16)]


# Numbers


@functools.cache
def gradients():
    funs = {
        "float32": GRAD,
        "bf16": jaxmp.autocast(GRAD),
        "fp8": fp8(GRAD),
        "inside": jax.grad(fp8(loss)),
    }
    return {name: jax.jit(fun)(PARAMS, X) for name, fun in funs.items()}


def test_a_gradient_is_near_that_of_float32():
    found = gradients()
    assert relative_error(found["bf16"], found["float32"]) < 0.01
    assert 0.01 < relative_error(found["fp8"], found["float32"]) < 0.08


def test_inside_a_gradient_there_are_the_same_products():
    # Differentiated through its casts, an unscaled gradient would vanish.
    found = gradients()
    assert relative_error(found["inside"], found["float32"]) < 0.08
    # Bit for bit on some versions of JAX: others round the slope of tanh in between.
    assert relative_error(found["inside"], found["fp8"]) < 0.02
    inside = products(jax.grad(fp8(loss)), PARAMS, X)
    assert inside == products(fp8(GRAD), PARAMS, X)


def test_a_scaled_loss_has_the_same_gradient_bit_for_bit():
    scaled = jax.jit(fp8(jax.grad(lambda p, x, s: s * loss(p, x))))
    for k in (-60, -7, 60):
        found = scaled(PARAMS, X, 2.0**k)
        expected = jax.tree.map(lambda g, k=k: g * 2.0**k, scaled(PARAMS, X, 1.0))
        chex.assert_trees_all_equal(found, expected)


def test_a_scan_and_a_remat_have_the_gradient_too():
    expected = jax.jit(jax.grad(scanned))(PARAMS, X)
    for fun in (fp8(jax.grad(scanned)), jax.grad(jax.checkpoint(fp8(scanned)))):
        assert relative_error(jax.jit(fun)(PARAMS, X), expected) < 0.1


@pytest.mark.evidence
def test_a_second_derivative_is_one_of_the_same_products():
    def norm_of(grad):
        return jax.jit(jax.grad(lambda p: optax.tree.norm(grad(p, X)) ** 2))

    second = norm_of(GRAD)(PARAMS)
    assert relative_error(norm_of(jax.grad(fp8(loss)))(PARAMS), second) < 0.2


def test_a_batch_of_calls_has_a_scale_for_each():
    def call(x):
        return x @ W

    x = X * jnp.array([1.0, 2.0**20, 2.0**-20, 0.0])[:, None, None]
    found = jax.jit(jax.vmap(fp8(call)))(x)
    expected = jax.jit(lambda x: jnp.stack(list(map(fp8(call), x))))(x)
    np.testing.assert_array_equal(found, expected)


POISONED = {
    "input": (X.at[0, 0, 0].set(jnp.inf), 1.0),
    "weight": (X, jnp.nan),
    "cotangent": (X, jnp.inf),
}


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_not_finite_skips_the_step(inside):
    tx = jaxmp.loss_scaling(optax.sgd(1e-3), "mixed_fp8")

    def scaled(params, x, s):
        a = jnp.where(jnp.isnan(s), params["a"].at[0, 0].set(s), params["a"])
        # Only the largest entries of a cotangent become Inf: the others are finite.
        return s * 1e30 * jnp.sum((jnp.tanh(x @ a) @ params["b"]) ** 2)

    grad = jax.grad(fp8(scaled)) if inside else fp8(jax.grad(scaled))

    @jax.jit
    def step(params, state, x, s):
        updates, state = tx.update(grad(params, x, s), state, params)
        return optax.apply_updates(params, updates), state

    params, state = step(PARAMS, tx.init(PARAMS), X, 1e-30)
    assert state.skipped == 0
    for x, s in POISONED.values():
        params, after = step(PARAMS, tx.init(PARAMS), x, s)
        assert after.skipped == 1
        chex.assert_trees_all_equal(params, PARAMS)


def test_forward_mode_is_refused_with_a_word_on_what_to_do():
    with pytest.raises(TypeError, match="forward-mode") as caught:
        jax.jvp(fp8(scanned), (PARAMS, X), (PARAMS, X))
    (note,) = [n for n in caught.value.__notes__ if "float8" in n]
    assert "autocast(jax.hessian(loss), policy)" in note
    outside = fp8(lambda p, x: jax.jvp(loss, (p, x), (p, x)))
    assert (F8, F8) in products(outside, PARAMS, X)


@pytest.mark.keeps_float32
def test_forward_mode_over_a_rule_of_the_users_gets_no_word_on_float8():
    @jax.custom_vjp
    def ruled(x):
        return x

    ruled.defvjp(lambda x: (x, None), lambda _, g: (g,))
    tangent = jaxmp.autocast(lambda x: jax.jvp(ruled, (x,), (x,)), "bfloat16")
    with pytest.raises(TypeError, match="forward-mode") as caught:
        tangent(jnp.ones(2))
    assert not any("float8" in note for note in getattr(caught.value, "__notes__", ()))


# Devices


def test_shards_agree_with_one_device():
    def mean(params, x):
        return lax.pmean(fp8(loss)(params, x), "data")

    mesh = Mesh(jax.devices()[:2], "data")
    on_shards = jax.jit(mapped(mean, mesh, (P(), P("data")), P()))
    expected = gradients()["float32"]
    assert relative_error(jax.jit(jax.grad(on_shards))(PARAMS, X), expected) < 0.08
    assert relative_error(jax.jit(fp8(jax.grad(on_shards)))(PARAMS, X), expected) < 0.08


def test_explicit_shardings_are_kept():
    mesh = Mesh(jax.devices()[:2], "data", axis_types=(AxisType.Explicit,))

    def fun(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    expected = jax.jit(fp8(jax.grad(fun)))(PARAMS["a"], X)
    with jax.set_mesh(mesh):
        w, x = jax.device_put(PARAMS["a"], P()), jax.device_put(X, P("data"))
        for grad in (fp8(jax.grad(fun)), jax.grad(fp8(fun))):
            assert relative_error(jax.jit(grad)(w, x), expected) < 0.05


def test_sharded_weights_are_gathered_in_float8(compiled_anew):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    where = NamedSharding(mesh, P("data"))

    def fun(params, x):
        return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2)

    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        ({"a": jnp.ones((64, 128)), "b": jnp.ones((128, 64))}, jnp.ones((128, 64))),
    )
    sent = {}
    for policy in ("mixed_bfloat16", "mixed_fp8"):
        grad = jaxmp.autocast(jax.grad(fun), policy, ops=OPS)
        jitted = jax.jit(grad, out_shardings={"a": where, "b": where})
        found = collectives.collectives(collectives.partitioned(jitted, *args))
        gathered = [(c.dtype, c.size) for c in found if c.kind == "all-gather"]
        sent[policy] = [dtype for dtype, size in gathered if size > 1]
    assert "bf16" in sent["mixed_bfloat16"]
    assert set(sent["mixed_fp8"]) == {"f8e4m3fn"}
    assert len(sent["mixed_fp8"]) <= len(sent["mixed_bfloat16"])


# Other functions of jaxmp


def test_the_report_has_the_share_of_8_bits():
    report = jaxmp.audit(fp8(GRAD))(PARAMS, X)
    assert report.fraction_16bit == 1
    assert report.fraction_8bit == report.flops["float8_e4m3fn"] / sum(
        report.flops.values()
    )
    assert report.as_dict()["fraction_8bit"] == report.fraction_8bit
    text = str(report)
    assert "of them in 8 bits" in text
    assert "kept in 16 bits by autocast" in text
    assert max(map(len, text.splitlines())) <= 80
    # To find a scale is no work that somebody has left in float32.
    bf16 = jaxmp.audit(jaxmp.autocast(GRAD, ops=OPS))(PARAMS, X)
    assert report.kept == bf16.kept
    assert "8 bits" not in str(bf16)
    assert bf16.fraction_8bit == 0
    jaxmp.assert_16bit(fp8(GRAD), PARAMS, X)


def test_each_product_has_its_own_line():
    def fun(x, w):
        x = x @ w
        x = (x @ w[:, :24])[..., :16]
        return x @ w[:16] @ w[:, :24]

    first, second = jaxmp.audit(fp8(fun))(X, W).kept_16bit
    assert first.where != second.where


def test_a_fault_is_found_outside_of_scales():
    def fun(x, w):
        return jnp.exp(x) @ w

    report = jaxmp.find_overflow(fp8(fun))(100 * X[0], W)
    assert report.first.operation == "exp"
    assert not report.others
    report = jaxmp.find_overflow(fp8(fun))(X[0], W)
    assert report.advice == "All results are finite."
    assert not any("float8" in x.dtype for x in report.operations)
