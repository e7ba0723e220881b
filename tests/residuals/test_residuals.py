"""What is kept for the backward pass, in eight bits."""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import jaxpr_as_fun

import jaxmp
from benchmarks.counting import targets
from benchmarks.counting.measure import traced
from conftest import at_once
from jaxmp._residuals.replay import with_narrow_residuals

KINDS = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
ROWS, WIDTH = 64, 128


def keys(n):
    return jax.random.split(jax.random.key(0), n)


def layers(n=2, width=WIDTH):
    return [
        (
            jax.random.normal(key, (width, 2 * width)) / width**0.5,
            jax.random.normal(key, (2 * width, width)) / width**0.5 / 2,
        )
        for key in keys(n)
    ]


def batch(width=WIDTH):
    return jax.random.normal(jax.random.key(1), (ROWS, width))


def assert_nothing_was_rounded(found, usual):
    # Compiled code may differ in the last digit of float32, on some processors.
    np.testing.assert_allclose(found, usual, atol=1e-6 * np.abs(usual).max(), rtol=0)


def residual_mlp(params, x):
    for up, down in params:
        x = x + jax.nn.gelu(x @ up) @ down
    return jnp.mean(x**2)


def scanned(params, x, *, remat=False):
    def layer(x, weights):
        return x + jax.nn.gelu(x @ weights[0]) @ weights[1], None

    layer = jax.checkpoint(layer) if remat else layer
    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def remat_mlp(params, x):
    @jax.checkpoint
    def layer(x, up, down):
        return x + jax.nn.gelu(x @ up) @ down

    for up, down in params:
        x = layer(x, up, down)
    return jnp.mean(x**2)


def relu_net(params, x):
    for up, down in params:
        x = jax.nn.relu(x @ up) @ down
    return jnp.mean(x**2)


def args_of(name):
    """Returns parameters and a batch; layers that are scanned are stacked."""
    params = layers()
    if "scan" in name:
        params = jax.tree.map(lambda *w: jnp.stack(w), *params)
    return params, batch()


LOSSES = {
    "layers": residual_mlp,
    "relu": relu_net,
    "scan": scanned,
    "scan of remat": functools.partial(scanned, remat=True),
    "remat": remat_mlp,
}


def grad_of(loss, residuals: Any = None, policy="mixed_bfloat16", **options: Any):
    grad = jax.value_and_grad(loss)
    return jax.jit(jaxmp.autocast(grad, policy, residuals=residuals, **options))


def distance(tree, exact):
    """Returns how far a pytree is from another, relative to that."""
    difference = jax.tree.map(jnp.subtract, tree, exact)
    return float(optax.tree.norm(difference) / optax.tree.norm(exact))


def kept(fun, *args) -> Any:
    return jaxmp.audit(fun)(*args).residual_bytes


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_near_and_the_loss_is_the_same(name):
    loss, args = LOSSES[name], args_of(name)
    _, exact = jax.jit(jax.value_and_grad(loss))(*args)
    usual, rounded = grad_of(loss)(*args)
    # A float8 has four significant bits, and an integer the place of seven in a row.
    for kind, bar in {"int8": 3, "fp8": 10}.items():
        found, grads = grad_of(loss, kind)(*args)
        assert found == usual
        ratio = distance(grads, exact) / distance(rounded, exact)
        assert 1 < ratio < bar, kind


def test_any_gradient_function_can_store_eight_bits():
    def run(jaxpr, arrays):
        return jaxpr_as_fun(jaxpr)(*arrays)

    args = layers(), batch()
    leaves, tree = jax.tree.flatten(args)
    grad = jax.value_and_grad(residual_mlp)
    jaxpr = jax.make_jaxpr(lambda *xs: jax.tree.leaves(grad(*tree.unflatten(xs))))
    narrowed = with_narrow_residuals(run, "int8", ())
    loss, *grads = narrowed(jaxpr(*leaves), leaves)
    exact, exact_grads = grad(*args)
    np.testing.assert_allclose(loss, exact, rtol=1e-6)
    assert 0 < distance(grads, jax.tree.leaves(exact_grads)) < 0.02
    sizes = kept(lambda *xs: narrowed(jaxpr(*leaves), xs), *leaves)
    assert sizes["int8"] >= 2 * ROWS * WIDTH > sizes["float32"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSSES)
def test_what_is_large_is_kept_in_eight_bits(name, kind):
    sizes = kept(grad_of(LOSSES[name], kind), *args_of(name))
    eight = sizes.pop(str(np.dtype(KINDS[kind])))
    scales = sizes.pop("float32")
    assert eight >= 2 * ROWS * WIDTH
    assert scales < eight / 8
    assert sum(sizes.values()) <= 2 * ROWS * WIDTH  # no more than `x` in bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_not_stored_again(kind):
    def loss(params, x):
        every = jnp.concatenate([jnp.stack([up, down.T]) for up, down in params])
        for i in range(len(every)):
            w = jax.lax.dynamic_index_in_dim(every, i, keepdims=False)
            x = jnp.tanh(x @ (w / jnp.linalg.norm(w))) @ w.T
        return jnp.mean(x**2)

    params = layers(2)
    sizes = kept(grad_of(loss, kind), params, batch())
    # Of each of four layers what goes in, if it was computed, and what is in between.
    assert sizes[str(np.dtype(KINDS[kind]))] == 4 * ROWS * 3 * WIDTH


def test_a_recurrent_loop_stacks_eight_bits_alone():
    def loss(w, rows):
        def step(h, x):
            h = jnp.tanh((x + h) @ w)
            return h, jax.nn.sigmoid(h)

        return jnp.mean(jax.lax.scan(step, rows[0], rows)[1] ** 2)

    def stacked(grad):
        """The dtypes of what loops stack, wherever they are."""
        loops = [eqn for eqn in traced(grad, w, rows) if eqn.primitive.name == "scan"]
        outs = [x.aval for eqn in loops for x in eqn.outvars]
        return [str(x.dtype) for x in outs if x.shape == (steps, ROWS, WIDTH)]

    steps = 3
    w, rows = layers(1)[0][0][:, :WIDTH] / 4, jnp.stack([batch()] * steps)
    usual, found = grad_of(loss), grad_of(loss, "int8")
    assert 0 < distance(found(w, rows)[1], usual(w, rows)[1]) < 0.02
    by_usual, by_found = (collections.Counter(stacked(x)) for x in (usual, found))
    assert by_found["int8"] == 2  # `h`, and what the sigmoid returns
    # What the backward loop hands to the matmul of the weights stays.
    assert by_found["bfloat16"] == 1 < by_usual["bfloat16"]


def test_what_several_consumers_share_is_stored_once():
    # `gelu` and its slope, and the product behind it, read what the first one returns.
    args = layers(1), batch()
    sizes = kept(grad_of(residual_mlp, "int8"), *args)
    assert sizes["int8"] == ROWS * WIDTH + ROWS * 2 * WIDTH  # the result, and `x @ up`


@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_pass_waits_once_for_what_is_stored(kind):
    eqns = traced(grad_of(residual_mlp, kind), *args_of("layers"))
    waits = [x for x in eqns if x.primitive.name == "optimization_barrier"]
    assert max(len(x.invars) for x in waits) > 2
    assert all(len(x.invars) == len({*map(id, x.invars)}) for x in waits)


def of_pairs(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2), (1, 2), "VALID")


@pytest.mark.parametrize("fun", [jax.nn.relu, of_pairs])
def test_a_slope_is_zero_where_it_was(fun):
    # Numbers that eight bits round to zero beside the largest of their row.
    x, w = batch(), jnp.eye(WIDTH).at[0, 0].set(1e4)
    x = x.at[:, 0].set(1.0)
    inputs = jax.grad(lambda x, w: jnp.sum(fun(x @ w)))
    usual = jax.jit(jaxmp.autocast(inputs))(x, w)
    found = jax.jit(jaxmp.autocast(inputs, residuals="int8"))(x, w)
    assert 0 < (found == 0).sum() < found.size
    np.testing.assert_array_equal(found == 0, usual == 0)
    np.testing.assert_array_equal(found, usual)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_reaches_the_gradients(kind):
    params, x = layers(1), batch()
    grad = grad_of(residual_mlp, kind)
    for poison in (jnp.inf, -jnp.inf, jnp.nan):
        assert not jaxmp.all_finite(grad(params, x.at[3, 5].set(poison))[1])
    for size in (0.0, 1e-38, 1e-20, 1.0, 1e12):  # of some rows
        assert jaxmp.all_finite(grad(params, x.at[:4].mul(size))[1])


def test_what_is_divided_by_keeps_its_digits():
    def loss(w, x):
        return jnp.mean(jnp.log(jnp.abs(x @ w) + 0.1))

    w = layers(1)[0][0]
    usual, found = grad_of(loss)(w, batch()), grad_of(loss, "int8")(w, batch())
    assert_nothing_was_rounded(found[1], usual[1])


def test_a_quotient_is_not_computed_again_from_a_divisor_in_eight_bits():
    def loss(w, x, parts):
        p, q = (jnp.exp(4 * jnp.tanh(x @ part)) for part in parts)
        held = map(jax.lax.stop_gradient, (p, q, p / q))
        return sum(jnp.mean(one * (x @ own)) for one, own in zip(held, w, strict=True))

    up = layers(1)[0][0]
    args = [up, 2 * up, 3 * up], batch(), [up, -up]
    exact = jax.jit(jax.grad(loss))(*args)
    found = grad_of(loss, "int8")(*args)[1]
    assert distance(found, exact) < 0.05
    assert kept(grad_of(loss, "int8"), *args)["int8"] >= 3 * ROWS * 2 * WIDTH


def test_a_statistic_is_stored_and_not_its_copies():
    def loss(w, x):
        h = x @ w
        copies = jnp.broadcast_to(jnp.mean(h, 1, keepdims=True), h.shape)
        return jnp.mean(jnp.tanh(h * copies))

    w = layers(1)[0][0]
    assert kept(grad_of(loss, "int8"), w, batch())["float32"] < 4 * ROWS * 8


def test_a_solver_is_differentiated_with_what_was_stored():
    def loss(w, x):
        return jnp.mean(jnp.linalg.solve(w.T @ w + jnp.eye(WIDTH), (x @ w).T) ** 2)

    w = layers(1)[0][0][:, :WIDTH]
    usual, found = grad_of(loss)(w, batch()), grad_of(loss, "int8")(w, batch())
    assert 0 < distance(found[1], usual[1]) < 0.01


def test_a_region_and_paths_keep_what_they_store():
    def loss(params, x):
        (up, down), *_ = params
        with jax.named_scope("body"):
            x = jnp.tanh(jnp.tanh(x @ up) @ up.T @ up)
        with jax.named_scope("head"):
            return jnp.mean(jnp.tanh(x @ down))

    args = layers(1), batch()
    both = kept(grad_of(loss, "int8", bfloat16_paths=("body", "head")), *args)
    assert "int8" not in both
    head = kept(grad_of(loss, "int8", bfloat16_paths="head"), *args)
    all_of_it = kept(grad_of(loss, "int8"), *args)
    assert 0 < head.get("int8", 0) < all_of_it["int8"]

    paths = {"float32_paths": ("body", "head")}
    usual = grad_of(loss, **paths)(*args)[1]
    found = grad_of(loss, "int8", **paths)(*args)[1]
    jax.tree.map(assert_nothing_was_rounded, found, usual)
    region = jaxmp.float32_region(loss)
    usual = grad_of(region)(*args)[1]
    found = grad_of(region, "int8")(*args)[1]
    jax.tree.map(assert_nothing_was_rounded, found, usual)


def test_what_a_checkpoint_names_is_stored_as_it_is():
    def loss(params, x):
        policy = jax.checkpoint_policies.save_only_these_names("hidden")

        @functools.partial(jax.checkpoint, policy=policy)
        def layer(x, up, down):
            hidden = checkpoint_name(x @ up, "hidden")
            return x + jax.nn.gelu(hidden) @ down

        for up, down in params:
            x = layer(x, up, down)
        return jnp.mean(x**2)

    args = layers(2), batch()
    sizes = kept(grad_of(loss, "int8"), *args)
    eight = sizes.pop("int8")
    assert sum(sizes.values()) >= 2 * ROWS * 2 * WIDTH * 2
    assert eight >= ROWS * WIDTH


def test_an_explanation_says_how_it_is_stored():
    def loss(params, x):
        hidden = x @ params[0][0]
        return jnp.mean(jnp.tanh(hidden) @ params[0][1])

    lines = jaxmp.explain(grad_of(loss, "int8"))(layers(1), batch()).lines
    (hidden,) = [line for line in lines if "hidden =" in line.source]
    sizes = dict(hidden.saved)
    scales = sizes.pop("float32")
    assert [*sizes] == ["int8"]
    assert scales < sizes["int8"] / 8
    lines = jaxmp.explain(grad_of(loss))(layers(1), batch()).lines
    assert not any("int8" in dict(line.saved) for line in lines)


def test_micro_batches_store_in_eight_bits_too():
    def grad(residuals):
        fun = jaxmp.value_and_grad(
            residual_mlp, loss_scale=1.0, accum_steps=2, batch_argnums=1
        )
        return jax.jit(jaxmp.autocast(fun, residuals=residuals))

    args = layers(), jnp.tile(batch(), (2, 1))
    assert kept(grad("int8"), *args)["int8"] > 2 * ROWS * WIDTH
    usual, found = grad(None)(*args), grad("int8")(*args)
    assert found[0] == usual[0]
    assert 0 < distance(found[1], usual[1]) < 0.02


def test_a_second_gradient_may_follow_the_first():
    def sharpness_aware(params, x):
        grads = jax.grad(residual_mlp)(params, x)
        size = optax.tree.norm(grads)
        moved = jax.tree.map(lambda p, g: p + 0.05 * g / size, params, grads)
        return residual_mlp(params, x), jax.grad(residual_mlp)(moved, x)

    def learning_to_learn(params, x):
        def after_an_update(params):
            grads = jax.grad(residual_mlp)(params, x)
            return residual_mlp(
                jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), x
            )

        return jax.value_and_grad(after_an_update)(params)

    for fun in (sharpness_aware, learning_to_learn):
        _, usual = jax.jit(jaxmp.autocast(fun))(*args_of("layers"))
        small = jax.jit(jaxmp.autocast(fun, residuals="int8"))
        _, found = small(*args_of("layers"))
        assert 0 < distance(found, usual) < 0.03
        # The weights that an update has moved are not stored in eight bits.
        assert kept(small, *args_of("layers"))["int8"] <= 12 * ROWS * WIDTH


def test_it_can_be_batched():
    params, x = layers(1), batch()
    grad = grad_of(residual_mlp, "int8")
    one = grad(params, x)[1]
    many = jax.jit(jax.vmap(grad, (None, 0)))(params, x[None])[1]
    assert distance(jax.tree.map(lambda x: x[0], many), one) < 0.01


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_inside_the_gradient_stores_the_same(name):
    args = args_of(name)
    inside = jax.value_and_grad(jaxmp.autocast(LOSSES[name], residuals="int8"))
    found, around = jax.jit(inside), grad_of(LOSSES[name], "int8")
    jax.tree.map(np.testing.assert_array_equal, found(*args), around(*args))
    assert kept(found, *args)["int8"] == kept(around, *args)["int8"]
    # A program without a gradient stores nothing for one.
    alone = jaxmp.autocast(LOSSES[name], residuals="int8")
    assert alone(*args) == jaxmp.autocast(LOSSES[name])(*args)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_go_with_it(kind):
    def norm(grad):
        return lambda *args: optax.tree.norm(grad(*args))

    def cast(fun):
        return jaxmp.autocast(fun, residuals=kind)

    args, grad = (layers(1), batch()), jax.grad(residual_mlp)
    penalty = jax.grad(norm(grad))
    inside = jax.grad(norm(jax.grad(cast(residual_mlp))))
    casts = cast(penalty), jax.grad(norm(cast(grad))), inside
    exact, *found = at_once(penalty, *casts)(*args)
    for one in found:
        assert 0 < distance(one, exact) < 0.05


def test_forward_mode_inside_says_where_autocast_goes():
    args = layers(1), batch()
    with pytest.raises(TypeError, match="forward-mode") as error:
        jax.jvp(jaxmp.autocast(residual_mlp, residuals="int8"), args, args)
    (note,) = (x for x in error.value.__notes__ if x.startswith("Functions that store"))
    assert "without `residuals`" in note


def test_a_small_model_stores_what_it_stored():
    args = layers(2, 16), batch(16)
    assert kept(grad_of(residual_mlp, "int8"), *args).keys() == {"bfloat16", "float32"}


def test_float8_products_read_what_is_stored():
    ops, args = jaxmp.DEFAULT_OPS.with_fp8(min_size=16), args_of("layers")
    usual = grad_of(residual_mlp, None, "mixed_fp8", ops=ops)
    found = grad_of(residual_mlp, "int8", "mixed_fp8", ops=ops)
    assert jaxmp.audit(found)(*args).fraction_8bit == 1
    assert kept(found, *args)["int8"] >= 2 * ROWS * 3 * WIDTH
    assert 0 < distance(found(*args)[1], usual(*args)[1]) < 0.05


def test_float32_stays_bitwise():
    args = layers(), batch()
    found = grad_of(residual_mlp, "int8", "float32")(*args)
    usual = grad_of(residual_mlp, None, "float32")(*args)
    jax.tree.map(np.testing.assert_array_equal, found, usual)


def test_errors_say_what_to_type():
    with pytest.raises(ValueError, match="'int8', 'fp8' or None, but is 'int4'"):
        grad_of(residual_mlp, "int4")
    with pytest.raises(ValueError, match="`bfloat16_paths` has `head`, but no"):
        grad_of(residual_mlp, "int8", bfloat16_paths="head")(layers(), batch())


@pytest.mark.skipif(bool(targets.unavailable()), reason=str(targets.unavailable()))
def test_code_for_a_gpu_stores_eight_bits():
    # XLA's GPU compiler removes what a CPU test would still find.
    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    x, unrolled = shape(65536, 128), [(shape(128, 512), shape(512, 128))] * 4
    stacked = shape(4, 128, 512), shape(4, 512, 128)

    def compiled(name, residuals):
        params = stacked if "scan" in name else unrolled
        found = targets.compiled(grad_of(LOSSES[name], residuals), params, x)
        return found.as_text(), found.memory_analysis().temp_size_in_bytes

    _, usual = compiled("layers", None)
    for kind, dtype in {"int8": "s8", "fp8": "f8e4m3fn"}.items():
        text, memory = compiled("layers", kind)
        assert f"{dtype}[65536,128]" in text
        assert memory < 0.5 * usual, kind
    assert "s8[4,65536,128]" in compiled("scan of remat", "int8")[0]


def test_what_is_padded_is_stored_padded():
    # A scan in parallel pads on each level. XLA takes gigabytes to compile one of 256
    # steps if the backward pass pads again.
    def loss(w, x):
        padded = jnp.pad(x @ w, ((0, ROWS), (0, 0)))
        return jnp.mean((padded @ w) ** 2)

    sizes = kept(grad_of(loss, "int8"), jnp.eye(WIDTH), batch())
    assert sizes["int8"] == 2 * (2 * ROWS) * WIDTH  # and what is squared
