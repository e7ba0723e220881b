"""The loss head is optax's cross-entropy of a matmul, whatever its options."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from benchmarks.counting.measure import relative_error
from conftest import at_once, crossed, normal

BATCH, LENGTH, WIDTH, WORDS = 3, 11, 16, 101  # 33 rows: no tile divides them
HIDDEN = normal(0, BATCH, LENGTH, WIDTH)
KERNEL = normal(1, WIDTH, WORDS, scale=0.3)
BIAS = normal(2, WORDS)
LABELS = jax.random.randint(jax.random.key(3), (BATCH, LENGTH), 0, WORDS)
WHERE = np.arange(LENGTH) < np.array([[11], [4], [0]])
WEIGHTS = np.linspace(-0.5, 3, BATCH * LENGTH, dtype=np.float32).reshape(BATCH, LENGTH)
EPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
ORDERS = {
    "around": lambda grad, fun, policy: jaxmp.autocast(grad(fun), policy),
    "inside": lambda grad, fun, policy: grad(jaxmp.autocast(fun, policy)),
}
OPTIONS = {
    "plain": {},
    "where": {"where": WHERE},
    "weights": {"weights": WEIGHTS},
    "both": {"where": WHERE[:, :1], "weights": WEIGHTS},
    "smooth": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "cap": {"soft_cap": 2.0},
    "all": {
        "where": WHERE,
        "weights": WEIGHTS,
        "label_smoothing": 0.2,
        "z_loss": 0.1,
        "soft_cap": 3.0,
    },
}
GRAD = functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
ARGS = HIDDEN, KERNEL, BIAS


def written(hidden, kernel, bias, *, labels=LABELS, reduction="mean", **options):
    """The same with an array of logits."""
    logits = hidden @ kernel + bias
    if cap := options.get("soft_cap"):
        logits = cap * jnp.tanh(logits / cap)
    targets = jax.nn.one_hot(labels, WORDS, dtype=logits.dtype)
    targets = optax.smooth_labels(targets, options.get("label_smoothing", 0.0))
    losses = optax.softmax_cross_entropy(logits, targets)
    losses += options.get("z_loss", 0.0) * jax.nn.logsumexp(logits, -1) ** 2
    counts = jnp.broadcast_to(options.get("weights", 1.0), losses.shape)
    counts = jnp.where(options.get("where", True), counts, 0)
    if reduction == "none":
        return counts * losses
    return jnp.sum(counts * losses) / (jnp.sum(counts) if reduction == "mean" else 1)


def head(hidden, kernel, bias, *, labels=LABELS, tile=8, **options):
    return jaxmp.linear_cross_entropy(
        hidden, kernel, labels, bias=bias, tile_rows=tile, **options
    )


def as_scalar(fun, options, reduction):
    """Returns a loss whose rows have cotangents of their own where it is of rows."""
    fun = functools.partial(fun, reduction=reduction, **options)
    if reduction != "none":
        return fun
    return lambda *args: jnp.sum(jnp.sin(fun(*args)))


@functools.cache
def exact(name, reduction):
    """Returns loss and gradients in float64."""
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in ARGS]
        options = {
            k: np.asarray(x, np.float64) if k == "weights" else x
            for k, x in OPTIONS[name].items()
        }
        found = jax.jit(GRAD(as_scalar(written, options, reduction)))(*wide)
        return jax.tree.map(np.asarray, found)


def check_near(found, expected, limit):
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for x, y in leaves:
        assert x.dtype == np.float32
        assert relative_error(x, y) <= limit


@crossed("options reduction", OPTIONS, ["mean", "sum", "none"])
def test_in_float32_it_is_that_of_optax(options, reduction):
    name = next(k for k, x in OPTIONS.items() if x is options)
    found = jax.jit(GRAD(as_scalar(head, options, reduction)))(*ARGS)
    check_near(found, exact(name, reduction), 3e-6)


@crossed("order policy reduction", [*ORDERS], EPS, ["mean", "none"])
@pytest.mark.filterwarnings("ignore:.*float16.*:UserWarning")
def test_it_is_as_near_as_what_is_written(order, policy, reduction):
    dtype = next(k for k, x in EPS.items() if x == policy)
    funs = [
        ORDERS[order](GRAD, as_scalar(fun, options, reduction), f"mixed_{dtype}")
        for options in (OPTIONS["plain"], OPTIONS["all"])
        for fun in (head, written)
    ]
    found = at_once(*funs)(*ARGS)
    for i, name in enumerate(("plain", "all")):
        ours, theirs = found[2 * i : 2 * i + 2]
        for x, y, z in zip(
            *map(jax.tree.leaves, (ours, theirs, exact(name, reduction))), strict=True
        ):
            assert x.dtype == np.float32
            assert relative_error(x, z) <= max(1.3 * relative_error(y, z), EPS[dtype])


@pytest.mark.parametrize("tile", [1, 7, 8, 32, 33, 34, None])
def test_any_tile_and_any_number_of_rows(tile):
    found = jax.jit(GRAD(functools.partial(head, tile=tile)))(*ARGS)
    check_near(found, exact("plain", "mean"), 3e-6)
    rows = HIDDEN[:0], LABELS[:0]
    grads = jax.grad(lambda h: head(h, KERNEL, BIAS, labels=rows[1]))(rows[0])
    assert grads.shape == rows[0].shape


def test_a_kernel_that_is_an_embedding():
    def tied(hidden, embedding):
        return head(hidden, embedding, BIAS, transposed=True)

    loss, grads = jax.jit(jax.value_and_grad(tied, (0, 1)))(HIDDEN, KERNEL.T)
    expected = exact("plain", "mean")
    check_near((loss, grads), (expected[0], (expected[1][0], expected[1][1].T)), 3e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_labels_that_are_masked_may_be_anything(reduction):
    labels = jnp.where(WHERE, LABELS, jnp.where(LABELS % 2, -100, 2**31 - 1))
    options = {"where": WHERE, "reduction": reduction}
    fun = functools.partial(head, labels=labels, **options)
    check_near(GRAD(fun)(*ARGS), exact("where", reduction), 3e-6)
    nothing = GRAD(functools.partial(fun, where=np.zeros(LABELS.shape, bool)))(*ARGS)
    for x in jax.tree.leaves(nothing):
        np.testing.assert_array_equal(x, 0)


@pytest.mark.parametrize("label", [-1, WORDS])
def test_a_label_that_is_no_word_and_counts_makes_the_loss_nan(label):
    labels = LABELS.at[1, 2].set(label)
    loss, grads = GRAD(functools.partial(head, labels=labels))(*ARGS)
    assert np.isnan(loss)
    assert np.isnan(grads[1]).all()
    rows = head(*ARGS, labels=labels, reduction="none")
    assert np.isnan(rows).sum() == 1


def test_small_dtypes_of_labels():
    few = functools.partial(head, labels=(LABELS % 100).astype(jnp.int8))
    np.testing.assert_allclose(few(*ARGS), head(*ARGS, labels=LABELS % 100))


def test_the_z_loss_is_returned_beside_it():
    options = {"z_loss": 0.1, "where": WHERE}
    loss, z_loss = head(*ARGS, **options, return_z_loss=True)
    assert abs(loss - head(*ARGS, **options)) < 1e-6
    np.testing.assert_allclose(loss - z_loss, head(*ARGS, where=WHERE), rtol=1e-5)
    both = jax.grad(lambda *x: sum(head(*x, **options, return_z_loss=True)))(*ARGS)
    np.testing.assert_array_equal(
        both, jax.grad(functools.partial(head, **options))(*ARGS)
    )


def test_the_gradient_of_weights():
    def total(fun, reduction, weights):
        losses = fun(*ARGS, weights=weights, reduction=reduction)
        return jnp.sum(jnp.sin(losses))

    for reduction in ("mean", "none"):
        both = [
            jax.grad(functools.partial(total, fun, reduction))(jnp.asarray(WEIGHTS))
            for fun in (head, written)
        ]
        np.testing.assert_allclose(*both, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("order", ORDERS)
def test_float16_needs_no_scale_inside(order):
    """The mean over 2^23 tokens is that of 33, with smaller weights."""

    def loss(hidden, kernel):
        small = np.full(LABELS.shape, 2.0**-23, np.float32)
        return head(hidden, kernel, BIAS, weights=small, reduction="sum")

    grad = ORDERS[order](lambda f: jax.grad(f, 1), loss, "mixed_float16")
    found = np.asarray(jax.jit(grad)(HIDDEN, KERNEL), np.float64)
    expected = exact("plain", "sum")[1][1] * 2.0**-23
    assert relative_error(found, expected) < 1e-3


def test_a_cast_model_has_gradients_in_its_dtype():
    cast = [x.astype(jnp.bfloat16) for x in ARGS]
    loss, grads = GRAD(head)(*cast)
    assert loss.dtype == jnp.float32
    assert {x.dtype for x in grads} == {jnp.dtype(jnp.bfloat16)}
    for x, y in zip(grads, exact("plain", "mean")[1], strict=True):
        assert relative_error(x.astype(jnp.float32), y) < 2**-6


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("cast", [False, True])
def test_tangents_and_second_derivatives(reduction, cast):
    def products(fun):
        fun = as_scalar(fun, OPTIONS["all"], reduction)
        fun = jaxmp.autocast(fun) if cast and fun is not written else fun

        def along(*args):
            return jax.jvp(jax.grad(fun, (0, 1, 2)), args, args)[1]

        def back(*args):
            return jax.grad(lambda *x: jnp.sum(jax.grad(fun)(*x) ** 2), (0, 1, 2))(
                *args
            )

        return lambda *args: (jax.jvp(fun, args, args), along(*args), back(*args))

    both = at_once(products(head), products(written))(*ARGS)
    for x, y in zip(*map(jax.tree.leaves, both), strict=True):
        assert relative_error(x, y) < (5e-2 if cast else 3e-5)


ERRORS = {
    "`kernel` has the shape .*transposed=True": {"kernel": KERNEL.T},
    "`labels` has the shape": {"labels": LABELS[0]},
    "`labels` .* must be integer": {"labels": HIDDEN[..., 0]},
    "`bias` has the shape": {"bias": BIAS[1:]},
    "`where` .* must be bool": {"where": LABELS},
    "`weights` has the shape|Incompatible shapes": {"weights": BIAS},
    "`reduction` must be 'mean', 'sum' or 'none'": {"reduction": "max"},
    "`label_smoothing` must be": {"label_smoothing": 1.5},
    "`z_loss` must be": {"z_loss": -1},
    "`soft_cap` must be": {"soft_cap": 0.0},
    "`tile_rows` must be": {"tile_rows": 0},
    "`hidden` .* must be floating": {"hidden": jnp.ones((3, 11, 16), int)},
}


@pytest.mark.parametrize(("text", "changed"), ERRORS.items(), ids=range(len(ERRORS)))
def test_what_does_not_fit_is_named(text, changed):
    given = {"hidden": HIDDEN, "kernel": KERNEL, "labels": LABELS} | changed
    with pytest.raises((TypeError, ValueError), match=text):
        jaxmp.linear_cross_entropy(**given)
