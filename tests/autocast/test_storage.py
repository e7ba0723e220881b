"""What a product takes is moved in 16 bits, and all who read it read the same number.

Values and gradients stay within a few last digits of float32, whoever reads beside.
"""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata

import jaxmp
from benchmarks.counting.measure import relative_error, traced
from conftest import (
    assert_near,
    at_once,
    both_dtypes,
    crossed,
    in_both_dtypes,
    normal,
    usually_bfloat16,
)
from jaxmp._ops.narrow import firmly_rounded

W = normal(0, 8, 8, scale=1 / 3)
X = normal(1, 4, 8)
SCALE = jnp.asarray(np.linspace(0.5, 2, 8, dtype=np.float32))
HALF, SINGLE = np.dtype(jnp.bfloat16), np.dtype(np.float32)
DTYPES = "float16", "bfloat16"
ORDERS = {
    "outside": lambda loss, dtype: jaxmp.autocast(jax.grad(loss), dtype),
    "inside": lambda loss, dtype: jax.grad(jaxmp.autocast(loss, dtype)),
}


def normalised(w, x):
    """Returns float32 values that were computed: sums, a root, a scale from outside."""
    h = x @ w
    h = h - h.mean(-1, keepdims=True)
    return h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-5) * SCALE


def dtypes_of(name, fun, *args):
    eqns = traced(fun, *args)
    found = [e.outvars[0].aval.dtype for e in eqns if e.primitive.name == name]
    assert found, name
    return set(found)


def pooled(h):
    image = h.reshape(1, 4, 8, 1)
    window = (1, 2, 2, 1)
    h = lax.reduce_window(image, -jnp.inf, lax.max, window, (1, 1, 1, 1), "SAME")
    return h.reshape(4, 8)


PICKS = {
    "max": lambda h: lax.max(h, 0.0),
    "select_n": lambda h: jnp.where(X > 0, h, 0.0),
    "clamp": lambda h: lax.clamp(-1.0, h, 1.0),
    "transpose": lambda h: h.T.T,
    "reduce_window_max": pooled,
    "concatenate": lambda h: jnp.concatenate([h[:2], h[2:]]),
    "abs": jnp.abs,
    "neg": jnp.negative,
    "rev": lambda h: h[::-1],
}


@pytest.mark.parametrize("name", PICKS)
def test_what_a_product_takes_is_moved_in_16_bits_and_is_the_same_number(name):
    def fun(w, x):
        return PICKS[name](normalised(w, x)) @ w

    def at_the_product(w, x):
        h = PICKS[name](jaxmp.autocast(normalised, HALF)(w, x))
        return jnp.matmul(h.astype(HALF), w.astype(HALF), preferred_element_type=HALF)

    cast = jaxmp.autocast(fun, HALF)
    assert dtypes_of(name, cast, W, X) == {HALF}
    got, expected = at_once(cast, at_the_product)(W, X)
    np.testing.assert_allclose(got, expected.astype(jnp.float32), rtol=2**-7, atol=0.01)


def stream(w, x):
    """A residual stream, which is added to and looked at by its first operation."""
    h = normalised(w, x)
    return (h + lax.max(h, 0.0) @ w).sum()


def twice(w, x):
    """The same number by two equations, of which one is asked for the other."""
    h, greatest = normalised(w, x), normalised(w, x).max(-1, keepdims=True)
    return (jnp.where(h == greatest, lax.max(h, -9.0), 0.0) @ w).sum()


CONVOLUTIONS = {
    "strided": {"window_strides": (2, 2)},
    "grouped": {"window_strides": (1, 1), "feature_group_count": 2},
}


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
@pytest.mark.parametrize("order", ORDERS)
def test_a_kernel_is_reversed_in_16_bits_for_the_gradient_of_an_input(options, order):
    # Reversed in float32 and rounded then, cuDNN's own gradient is not found by XLA.
    kernel = jax.random.normal(jax.random.key(4), (3, 3, 4 // len(options), 4)) / 6
    image = jax.random.normal(jax.random.key(5), (2, 6, 6, 4))
    numbers = ("NHWC", "HWIO", "NHWC")

    def loss(image):
        h = lax.conv_general_dilated(
            image, kernel, padding="SAME", dimension_numbers=numbers, **options
        )
        return (h**2).sum()

    grad = ORDERS[order](loss, HALF)
    assert dtypes_of("rev", grad, image) == {HALF}
    assert relative_error(*at_once(grad, jax.grad(loss))(image)) < 2**-7


def test_the_gradient_of_a_reversed_weight_adds_up_in_float32():
    def loss(w):
        return sum((x @ w).sum() for x in jnp.split(jnp.tile(X, (8, 1)), 32))

    plain = jax.grad(jaxmp.autocast(loss, HALF))(W)
    reversed_ = jax.grad(jaxmp.autocast(lambda w: loss(w[::-1]), HALF))(W)
    np.testing.assert_array_equal(reversed_, plain[::-1])


def greatest(h):
    return jnp.where(h == h.max(-1, keepdims=True), h, 0.0)


# Their derivatives, or they themselves, look for the result among the inputs.
SEARCHES = {
    "max of two": lambda h: lax.max(h, h[::-1]),
    "maximum of an input": lambda h: jnp.maximum(h, X),
    "reduce_max, by its place": greatest,
    "max pooling": pooled,
    "the greatest three": lambda h: jnp.where(h >= lax.top_k(h, 3)[0][:, -1:], h, 0.0),
    "in a remat": jax.checkpoint(lambda h: lax.max(h, h[::-1])),
}


def sine(w, x):
    return jnp.sin(x @ w * 3)


# XLA leaves out the rounding of a bfloat16 sine for who widens it.
SEARCHED = {name: (search, normalised) for name, search in SEARCHES.items()} | {
    f"{name}, of a sine": (SEARCHES[name], sine)
    for name in ("the greatest three", "maximum of an input")
}


@pytest.mark.parametrize(("search", "inner"), SEARCHED.values(), ids=SEARCHED)
def test_what_is_chosen_is_found_among_that_from_which_it_was_chosen(search, inner):
    def loss(w, x):
        return ((search(inner(w, x)) @ w) ** 2).sum()

    grad = jax.grad(loss)
    expected, found = at_once(grad, jaxmp.autocast(grad, HALF))(W, X)
    assert relative_error(found, expected) < 0.1


def steps(w, x):
    """A clipped state that is moved by less than its last digit in 16 bits."""
    y = jax.nn.relu(x + 1e-3 * jnp.tanh(x @ w))
    return ((y - x) ** 2).sum() * 1e6 + (y @ w).sum() * 1e-3


def averages_out_of_range(w, x):
    y = jax.nn.relu(normalised(w, x) * 1e5)
    return y.mean() * 1e-5 + (jnp.minimum(y, 6.0) @ w).sum() * 1e-2


def averages_of_subnormals(w, x):
    y = jax.nn.relu(normalised(w, x) * 1e-9)
    return y.mean() * 1e9 + (y @ w).sum()


SEEN = [steps, twice, averages_of_subnormals, averages_out_of_range]


@pytest.mark.needs_no_scale
@crossed("loss order", SEEN, [*ORDERS])
def test_who_computes_with_what_was_chosen_sees_its_digits(loss, order):
    x, dtype = abs(X) + 0.1, HALF if loss is steps else jnp.float16
    expected, found = at_once(jax.grad(loss), ORDERS[order](loss, dtype))(W, x)
    assert relative_error(found, expected) < 0.02


# The softmax.

Q, V = (jax.random.normal(jax.random.key(i), (6, 8)) for i in (2, 3))


def attention(softmax):
    def loss(q, k, v):
        return (softmax(4 * q @ k.T) @ v**2).sum()

    return jax.value_and_grad(loss, (0, 1, 2))


@pytest.mark.needs_no_scale
@pytest.mark.parametrize("dtype", [jnp.float16, HALF])
def test_what_rounding_leaves_of_the_sums_of_a_softmax_is_taken_out(dtype):
    plain = attention(jax.nn.softmax)
    cast = jaxmp.autocast(plain, dtype)
    (loss, grads), (exact, expected) = at_once(cast, plain)(Q, Q, V)
    assert_near(loss, exact, dtype, 2)
    assert_near(grads, expected, dtype, 4)
    # Rounded weights do not sum to one. Their gradient does not notice.
    error = abs(grads[0].sum(-1) - expected[0].sum(-1)).max()
    assert error < 16 * float(jnp.finfo(dtype).eps)


DROPPED = jax.random.bernoulli(jax.random.key(5), 0.75, (6, 6))
DROPOUTS = {
    "where": lambda p: jnp.where(DROPPED, p / 0.9, 0.0),
    "mask, then scale": lambda p: p * DROPPED / 0.9,
    "scale, then mask": lambda p: p / 0.9 * DROPPED,
    "scaled mask": lambda p: p * (DROPPED.astype(p.dtype) / 0.9),
}


@pytest.mark.needs_no_scale
@crossed("drop dtype", DROPOUTS, DTYPES)
def test_what_dropout_divides_is_divided_in_float32(drop, dtype):
    loss = attention(lambda s: drop(jax.nn.softmax(s)))
    cast = jaxmp.autocast(loss, dtype)
    # 0.9 is no 16-bit number.
    (found, _), (expected, _) = at_once(cast, loss)(Q, Q, V)
    np.testing.assert_allclose(found, expected, rtol=jnp.finfo(dtype).eps)


@pytest.mark.needs_no_scale
@pytest.mark.parametrize(
    "dtype", [jnp.float16, pytest.param(HALF, marks=pytest.mark.evidence)]
)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
def test_attention_with_dropout_is_nearer_than_that_of_flax(order, dtype):
    def loss(q, k, v):
        options = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.1}
        out = nn.dot_product_attention(q, k, v, deterministic=False, **options)
        return (out.astype(jnp.float32) ** 2).sum()

    def in_16_bits(*args):
        return loss(*(x.astype(dtype) for x in args))

    forms = order(loss, dtype), jax.grad(in_16_bits), jax.grad(loss)
    found, own, exact = at_once(*forms)(*normal(0, 3, 2, 8, 4, 8))
    assert relative_error(found, exact) < relative_error(own, exact)


@pytest.mark.needs_no_scale
def test_a_softmax_over_very_many_is_finite():
    def loss(s, v):
        return (jax.nn.softmax(s) @ v).sum()

    s, v = jnp.zeros((1, 2**15)), jnp.ones((2**15, 2))
    grads = jax.jit(jaxmp.autocast(jax.grad(loss), jnp.float16))(s, v)
    assert jnp.isfinite(grads).all()


@pytest.mark.needs_no_scale
@both_dtypes
@pytest.mark.parametrize(("length", "divides"), [(2**14, True), (2**26, False)])
def test_the_weights_of_a_long_softmax_are_not_divided_by_their_sum(
    length, divides, dtype
):
    # Of 2**26 weights each may be 0 in float16, and so is their sum. Their numbers take
    # too much memory for a test.
    def loss(x, keys):
        return jnp.sum(jax.nn.softmax(x @ keys.T) @ keys)

    args = [jax.ShapeDtypeStruct((n, 8), jnp.float32) for n in (8, length)]
    grad = jax.grad(loss, (0, 1))
    program = str(jax.make_jaxpr(jaxmp.autocast(grad, dtype))(*args))
    assert program.count("= div ") == 1 + divides


@both_dtypes
@pytest.mark.parametrize("chosen", [False, True], ids=["plain", "chosen"])
def test_what_is_stored_is_multiplied_in_float32_also_where_it_is_chosen(chosen, dtype):
    def double(x):
        return jax.nn.softmax(2 * x)

    def loss(x, v):
        weights = double(x @ v)
        if chosen:
            weights = lax.cond(x[0, 0] > 0, jax.nn.softmax, double, x @ v)
        scaled = weights * 2.0
        return (scaled @ v).sum()

    grad = jaxmp.autocast(jax.grad(loss), dtype)
    report = jaxmp.explain(grad)(jnp.ones((8, 16)), jnp.ones((16, 16)))
    (line,) = (x for x in report.lines if "scaled = " in x.source)
    assert line.dtype == "float32"


# The gradient of an exact GELU.


GELUS = {
    "jax.nn": lambda x: jax.nn.gelu(x, approximate=False),
    "erf": lambda x: x * (0.5 + 0.5 * lax.erf(x / 2**0.5)),
    "jit": jax.jit(lambda x: x * (0.5 + 0.5 * lax.erf(x * 0.5**0.5))),
    "remat": jax.checkpoint(lambda x: x * lax.erfc(-x * 0.5**0.5) / 2),
    "ndtr": lambda x: x * jax.scipy.stats.norm.cdf(x),
}


@usually_bfloat16
@pytest.mark.parametrize("gelu", GELUS.values(), ids=GELUS.keys())
def test_an_exact_gelu_is_differentiated_where_it_was_rounded(gelu, dtype):
    def grad(act):
        return jax.value_and_grad(lambda w, x: (act(x @ w) @ w).sum())

    cast = jaxmp.autocast(grad(gelu), dtype)
    products = [e for e in traced(cast, W, X) if e.primitive.name == "dot_general"]
    assert products[0].outvars[0].aval.dtype == dtype
    (exact, expected), (loss, found) = at_once(grad(gelu), cast)(W, X)
    assert_near(loss, exact, dtype, 8)
    assert_near(found, expected, dtype, 2)


# Sums of cotangents.


def norm(x):
    h = x - x.mean(-1, keepdims=True)
    return h * lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-5) * 1.5


def block(x, w, b):
    return x + (jnp.tanh(norm(x) @ w) @ w + b)


def residual(ws, bs, x):
    for w, b in zip(ws, bs, strict=True):
        x = block(x, w, b)
    return (x @ ws[0]).sum()


WS, BS = normal(4, 3, 8, 8, scale=1 / 3), normal(5, 3, 8)


@jax.checkpoint
def recomputed(x, w, b):
    x = block(x, w, b)
    return x + jax.nn.softmax(4 * x @ x.T) @ (norm(x) @ w)


def layers(layer, ws, bs, x):
    for w, b in zip(ws, bs, strict=True):
        x = layer(x, w, b)
    return (x @ ws[0]).sum()


def scanned(layer, ws, bs, x):
    x, _ = lax.scan(lambda x, wb: (layer(x, *wb), None), x, (ws, bs))
    return (x @ ws[0]).sum()


def with_consumer(consumer):
    """A stream of which the cotangent in the middle has one more consumer."""

    @jax.custom_vjp
    def look(x):
        return x

    look.defvjp(lambda x: (x, x), lambda x, ct: (ct + 0.1 * consumer(ct, x),))

    def loss(ws, bs, x):
        x = block(x, ws[0], bs[0])
        x = block(look(x), ws[1], bs[1])
        return (x @ ws[0]).sum()

    return loss


# The gradient of a stream of layers: of each weight, each bias, and the input.
STREAMS = {
    "layers": residual,
    "scan of remat": functools.partial(scanned, recomputed),
    "a norm of a cotangent": with_consumer(
        lambda ct, x: ct * lax.rsqrt((ct * ct).sum() + 1)
    ),
}


def before_a_norm(w, b, x):
    return (norm(x @ w + b) @ w * X).sum()


# The gradient of a bias, beside those of the product before it.
BIASED = {
    "an activation": lambda w, b, x: (jax.nn.gelu(x @ w + b) @ w).sum(),
    "a norm": before_a_norm,
    "a scan": lambda w, b, x: lax.scan(
        lambda x, _: (norm(x @ w + b), None), x, length=2
    )[0][:, 0].sum(),
}


def activated(activation):
    """Products with norms between, each with a scale, a bias and an activation."""

    def loss(scale, bias, x):
        for _ in range(2):
            x = activation(norm(x @ W) * scale + bias)
        return jnp.sum((x @ W) * X)

    return loss


ACTIVATED = {
    "silu": activated(jax.nn.silu),
    "hard swish": activated(jax.nn.hard_swish),  # whose slope is one of small functions
    "a remat": jax.checkpoint(activated(jax.nn.silu)),
}


def layer_norm(x):
    return norm(x) * SCALE + X[0]


# What is made of a product, and then added to one.
ADDED = {
    "layer norm": layer_norm,
    "a gate": lambda h: jnp.exp(h) * (h.mean(0) @ W),
    "chosen with others": lambda h: jnp.where(X > 0, layer_norm(h), jnp.exp(h)),
}
# What leaves the range of float16, and returns to it in the norm behind.
FAR = {
    "a number": lambda h: layer_norm(h) * 1e6,
    "another number": lambda h: layer_norm(h) + 1e6,
    "masked": lambda h: jnp.where(X > 0, layer_norm(h), -1e6),
    "centred": lambda h: jnp.exp(7 * h) * 1e6 - (jnp.exp(7 * h) * 1e6).mean(0),
    "times a norm": lambda h: jnp.exp(7 * h) * 1e6 * layer_norm(h.mean(0)),
    "one over a norm": lambda h: 1 / (layer_norm(h) * jnp.exp(-20 + h.mean(0))),
    "times its sum": lambda h: h * jnp.exp(20 + h).sum(-1, keepdims=True),
    "of another order": lambda h: jnp.exp(20 + h) / (h * h).sum(-1, keepdims=True),
}


def added(fun):
    """Adds ``fun`` of a product to another product."""

    def loss(w, x):
        h = x @ w
        return ((layer_norm(fun(h) + x @ (2 * w)) @ w) * X).sum()

    return loss


@pytest.mark.parametrize("fun", FAR.values(), ids=FAR.keys())
def test_what_only_resembles_a_norm_keeps_the_range_of_float32(fun):
    def two_norms(w, x):
        h = x @ w
        return layer_norm(fun(h) + x @ (2 * w)) @ w

    both = at_once(jaxmp.autocast(two_norms, "float16"), two_norms)
    assert relative_error(*both(W, X)) < 1e-2


def test_weights_that_are_normed_between_steps_do_not_stall():
    def trained(w, x):
        def loss(w):
            return jnp.square(x @ w - 1).mean()

        w = w + 0 * (w @ w)  # computed
        for _ in range(6):
            w = w / jnp.linalg.norm(w, axis=0)
            w = w + -0.02 * jax.grad(loss)(w)
        return w / jnp.linalg.norm(w, axis=0)

    start = W / np.linalg.norm(W, axis=0)
    found, expected = at_once(jaxmp.autocast(trained, HALF), trained)(W, X)
    assert relative_error(found - start, expected - start) < 0.02


def behind(change):
    """A product behind a change of what was activated behind a norm."""

    def loss(scale, bias, x):
        h = change(jnp.tanh(norm(x @ W) * scale + bias)) @ W
        return jnp.sum(h * X[: len(h)])

    return loss


# What no product sends back, and what others need.
NOT_SENT_BACK = {
    "a float32 region": lambda scale, bias, x: jnp.sum(
        jax.nn.silu(jaxmp.float32_region(lambda h: norm(h) * scale + bias)(x)) @ W
    ),
    "a mean behind a product": lambda scale, bias, x: jnp.mean(
        jnp.tanh(norm(x @ W) * scale + bias) @ W
    ),
}


# Behind which the gradients leave the range of float16.
FACTORS = {
    "a factor that was given": behind(lambda h: h * (1e-6 * SCALE)),
    "a number": behind(lambda h: h * 1e-6),
    "a number for each": behind(lambda h: h * jnp.full(8, 1e-6)),
    "a divisor": behind(lambda h: h / 1e5),
}


@pytest.mark.needs_no_scale
def test_factors_around_an_activation_leave_its_gradients_in_the_range_of_float16():
    def loss(scale, bias, x, before, behind):
        h = jnp.tanh((norm(x @ W) * scale + bias) * before) * behind
        return jnp.sum((h @ W) * X)

    grad = jax.grad(loss, (0, 1, 2))
    cast = jax.jit(jaxmp.autocast(grad, jnp.float16))
    for before, behind in ((1.0, 1e-6), (1e6, 1.0)):
        factors = jnp.float32(before), jnp.float32(behind)
        args = SCALE / before, X[0] / before, X, *factors
        # What the product takes behind the norm is lost with 1e-6, as it is in Flax.
        assert_near(cast(*args)[:2], grad(*args)[:2], "float16", 8)


def averaged(h):
    """Activations and, times a gate, what a mean of many of them is for."""
    return h * jnp.tanh(h.mean(0, keepdims=True) @ W)


# What norms, softmaxes, pools and means send back, of what was sent back to them.
SENT_THROUGH = {
    "a norm": behind(norm),
    "a pool": behind(lambda h: norm(pooled(jax.nn.relu(h)))),
    "a mean of many": lambda scale, bias, x: jnp.sum(
        (averaged(jnp.tanh(norm(jnp.tile(x, (80, 1)) @ W) * scale + bias)) @ W)[:4] * X
    ),
}


def halved(h):
    window = (1, 2, 1, 1)
    return lax.reduce_window(h, -jnp.inf, lax.max, window, window, "VALID")


def pooled_beside_itself(w, x):
    h = jax.nn.silu(normalised(w, x).reshape(1, 4, 8, 1))
    return ((jnp.concatenate([halved(h), h], 1).reshape(6, 8) @ w) ** 2).sum()


def pooled_and_added_to(w, x):
    h = pooled(jax.nn.relu(normalised(w, x)))
    return ((h + jnp.tanh(h @ w)) ** 2).sum()


def nearly_linear(scale, bias, x):
    """An activation before a mean, which keeps the gradient of its norm."""
    h = jnp.tanh(norm((x @ W).T).T * (0.01 * scale) + bias)
    return jnp.sum((h.reshape(1, 4, 8).mean(1) @ W) * X[0])


POOLS = {
    "beside itself": pooled_beside_itself,
    "added to": pooled_and_added_to,
    "alone": lambda w, x: ((pooled(jax.nn.relu(normalised(w, x))) @ w) ** 2).sum(),
}
# A loss of products and given numbers, and by how many last digits its gradients may
# be off.
GRADIENTS = {
    **{f"stream, {n}": (f, (WS, BS, X), 16) for n, f in STREAMS.items()},
    **{f"bias, {n}": (f, (W, X[0], X), 8) for n, f in BIASED.items()},
    **{f"activated, {n}": (f, (SCALE, X[0], X), 8) for n, f in ACTIVATED.items()},
    **{f"behind, {n}": (f, (SCALE, X[0], X), 16) for n, f in NOT_SENT_BACK.items()},
    **{f"through {n}": (f, (SCALE, X[0], X), 16) for n, f in SENT_THROUGH.items()},
    **{f"pooled, {n}": (f, (W, X), 16) for n, f in POOLS.items()},
    **{f"added, {n}": (added(f), (W, X), 8) for n, f in ADDED.items()},
    "nearly linear": (nearly_linear, (SCALE, 0.01 * X[0], X), 8),
}


def check_gradient(case, dtype):
    loss, args, limit = case
    grad = jax.grad(loss, tuple(range(len(args))))
    assert_near(*at_once(jaxmp.autocast(grad, dtype), grad)(*args), dtype, limit)


@pytest.mark.needs_no_scale
@pytest.mark.parametrize(
    ("case", "dtype"), in_both_dtypes(GRADIENTS, "pooled, alone", "bias, a norm")
)
def test_a_gradient_is_off_by_a_few_last_digits(case, dtype):
    check_gradient(case, dtype)


@pytest.mark.parametrize("loss", FACTORS.values(), ids=FACTORS.keys())
def test_a_gradient_keeps_the_range_of_bfloat16(loss):
    check_gradient((loss, (SCALE, X[0], X), 16), HALF)


def test_gradients_between_batch_norms_are_nearer_than_those_of_a_model_in_16_bits():
    def batch_norm(h):
        return norm(h.T).T

    def loss(scale, bias, x):  # of which the gradients are sums that nearly cancel
        w = W.astype(x.dtype)
        h = jnp.tanh(batch_norm(x @ w) * scale + bias)
        return jnp.sum((batch_norm(h) @ w) * normal(7, 64, 8))

    def native(*args):
        return loss(*(x.astype(HALF) for x in args))

    args = SCALE, X[0], normal(6, 64, 8)
    grad = jax.grad(loss, (0, 1))
    forms = jaxmp.autocast(grad, HALF), jax.grad(native, (0, 1)), grad
    for got, reference, grad in zip(*at_once(*forms)(*args), strict=True):
        assert relative_error(got, grad) < relative_error(reference, grad)


@pytest.mark.needs_no_scale
def test_the_gradient_of_pooling_out_of_range_runs_in_float32():
    def loss(scale, bias, x):
        h = pooled(jnp.exp(3 * (norm(x @ W) * scale + bias)) * 1e6)
        return jnp.sum((norm(h) @ W) * X)

    cast = jaxmp.autocast(jax.grad(loss, (0, 1)), jnp.float16)
    args = SCALE, X[0], X
    assert dtypes_of("select_and_scatter_add", cast, *args) == {SINGLE}
    assert all(jnp.isfinite(grad).all() for grad in jax.jit(cast)(*args))


# Means.


def gated(w, x):
    """Squeeze and excitation: activations behind a norm, and a gate from their mean."""
    h = jax.nn.silu(layer_norm(x @ w))
    return (h * jax.nn.sigmoid(h.mean(0, keepdims=True) @ W)) @ w


def gated_before_a_shortcut(w, x):
    h = layer_norm(x @ w)
    gate = jax.nn.sigmoid(h.mean(0, keepdims=True) @ w)
    return jax.nn.relu(h * gate + x @ W) @ w


def beside(consumer):
    """Returns what ``consumer`` makes of activations, of which a gate takes means."""

    def fun(w, x):
        h = jax.nn.relu(layer_norm(x @ w) * 0.02 + 0.9)  # all near 0.9
        mean = h.mean(0)
        return jnp.tanh(h @ w) * (mean @ w), consumer(h, mean)

    return fun


def returned_by_jit(w, x):
    @jax.jit
    def activations(x):
        h = jax.nn.relu(layer_norm(x @ w) * 0.02 + 0.9)
        return h, h.mean(0)

    h, mean = activations(x)
    return jnp.tanh(h @ w) * (mean @ w), h - mean


# Consumers who make much of the last digits, or may, out of sight.
NEED_DIGITS = {
    "returned": beside(lambda h, mean: h),
    "returned by jit": returned_by_jit,
    "a variance": beside(lambda h, mean: jnp.var(h, 0)),
    "a difference behind a view": beside(lambda h, mean: h.T - mean[:, None]),
    "a difference behind a scale": beside(lambda h, mean: 2 * h - 2 * mean),
    "a difference of squares": beside(lambda h, mean: (h * h).mean(0) - mean**2),
    "a difference in jit": beside(lambda h, mean: jax.jit(jnp.subtract)(h, mean)),
    "a comparison": beside(lambda h, mean: h > mean),
    "a search": beside(lambda h, mean: h.argmax(0)),
    "a sort": beside(lambda h, mean: jnp.sort(h, 0)),
    "a sum that is compared": beside(lambda h, mean: h.sum(1) - h.sum(1)[0]),
}


@pytest.mark.parametrize("fun", NEED_DIGITS.values(), ids=NEED_DIGITS.keys())
def test_what_a_product_takes_keeps_its_digits_for_other_consumers(fun):
    """Rounded, it would be off by a fifth of what it differs by."""
    both = at_once(jaxmp.autocast(fun, HALF), fun)(W, X)
    (_, found), (_, expected) = both
    if jnp.issubdtype(found.dtype, jnp.inexact):
        assert jnp.abs(found - expected).max() < 5e-4
    else:
        assert (found == expected).mean() > 0.95


def window_sums(h, count=1.0):
    window = (1, 2, 1, 1)
    image = h.reshape(1, 4, 8, 1)
    sums = lax.reduce_window(image, 0.0, lax.add, window, window, "VALID")
    return (sums / count).reshape(2, 8) if count != 1 else sums.reshape(2, 8)


def joined(pool):
    def fun(w, x):
        h = jnp.concatenate([pool(x @ w + X[0]), jnp.tanh(x @ w)])
        return layer_norm(h) @ w

    return fun


FAR_OR_EXACT = {
    "added to what is far": joined(lambda h: window_sums(h + 1e6 * jnp.exp(h), 2)),
    "beside what is far": joined(
        lambda h: window_sums(jnp.concatenate([h[:2], 1e6 * jnp.exp(h[2:])]), 2)
    ),
    "taken away": lambda w, x: taken_away(w, x)[::2],
    "returned": lambda w, x: taken_away(w, x)[:2],
}


def taken_away(w, x):
    h = x @ w + 3.0
    means = window_sums(h, 2)
    return layer_norm(means) @ w, means, h.reshape(2, 2, 8) - means[:, None]


# Whatever is made of a mean, or of what it gates.
MEANS = {
    "a shortcut": gated_before_a_shortcut,
    "silu": gated,
    "windows": joined(lambda h: window_sums(h, 2)),
}


@crossed("fun dtype", MEANS, DTYPES)
def test_what_is_made_of_a_mean_is_off_by_a_few_last_digits(fun, dtype):
    assert_near(*at_once(jaxmp.autocast(fun, dtype), fun)(W, X), dtype, 4)


@pytest.mark.parametrize("fun", FAR_OR_EXACT.values(), ids=FAR_OR_EXACT.keys())
def test_means_of_windows_keep_range_and_digits_for_other_consumers(fun):
    both = at_once(jaxmp.autocast(fun, jnp.float16), fun)(W, X)
    for found, expected in zip(*map(jax.tree.leaves, both), strict=True):
        assert relative_error(found, expected) < 1e-2


@pytest.mark.parametrize("dtype", [jnp.float16, HALF])
def test_what_is_rounded_firmly_is_the_same_number(dtype):
    x = jnp.array([1.5, -0.0, jnp.inf, -jnp.inf, jnp.nan, 1e-7, 65504], dtype)
    rounded = jax.jit(firmly_rounded)(x)
    np.testing.assert_array_equal(*(v.astype(jnp.float32) for v in (rounded, x)))
    np.testing.assert_array_equal(jnp.signbit(rounded), jnp.signbit(x))
    for pull in jax.vjp(firmly_rounded, x)[1], jax.linear_transpose(firmly_rounded, x):
        np.testing.assert_array_equal(*pull(jnp.ones_like(x)), jnp.ones_like(x))


def test_a_backward_pass_with_biases_can_be_transposed():
    def fun(w, b, x):
        return jax.nn.gelu(x @ w + b) @ w

    out, pull = jax.vjp(fun, W, X[0], X)
    cast = jaxmp.autocast(pull, HALF)
    turned = [jax.linear_transpose(fun, out) for fun in (cast, pull)]
    assert_near(*at_once(*turned)((W, X[0], X)), HALF, 4)


@jax.custom_vjp
def with_sums_of_rows(p, w):
    return p @ w


def multiplies_by_what_sums_lack(operands, ct):
    p, w = operands
    return (ct @ w.T) * (1025 - 1024 * p.sum(-1, keepdims=True)), p.T @ ct


def both(*operands):
    return operands[0] @ operands[1], operands


with_sums_of_rows.defvjp(both, multiplies_by_what_sums_lack)


def sums_of_a_softmax(w, b, x):
    return (with_sums_of_rows(jax.nn.softmax(x @ w + b), w) ** 2).sum()


def test_a_rule_sees_sums_of_a_softmax_that_are_one():
    grad = jax.grad(sums_of_a_softmax, (0, 1))
    assert_near(*at_once(jaxmp.autocast(grad, HALF), grad)(W, X[0], X), HALF, 8)


@jax.custom_vjp
def with_log_of_a_sum(x, w):
    return x @ w


def adds_log_of_a_sum(operands, ct):
    x, w = operands
    return ct @ w.T, x.T @ ct + jnp.log(jnp.abs(ct.sum(0)) + 1e-3)


with_log_of_a_sum.defvjp(both, adds_log_of_a_sum)


def log_of_a_sum(w, b, x):
    out = with_log_of_a_sum(jnp.tanh(x @ w + b), w)
    return ((out - out.mean(0)) ** 2).sum()  # whose cotangents cancel


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rule_is_given_cotangents_that_cancel_in_float32(dtype):
    """Around the gradient there is no rule left: its sum reads what is stored."""
    cast = jax.grad(jaxmp.autocast(log_of_a_sum, dtype), (0, 1))
    both = at_once(cast, jax.grad(log_of_a_sum, (0, 1)))(W, X[0], X)
    assert_near(*both, dtype, 8)


# Rounded products.

ROUNDED = jaxmp.DEFAULT_OPS.with_rounded_matmuls()


def test_every_product_can_return_16_bits():
    fun = jax.value_and_grad(lambda w, x: jax.nn.logsumexp((x @ w) @ w))
    default = dtypes_of("dot_general", jaxmp.autocast(fun), W, X)
    assert default == {HALF, SINGLE}
    assert dtypes_of("dot_general", jaxmp.autocast(fun, ops=ROUNDED), W, X) == {HALF}


def test_a_region_sees_the_sums_all_the_same():
    def fun(x, w):
        return jaxmp.float32_region(jnp.exp)((x @ w).reshape(-1))

    found = dtypes_of("dot_general", jaxmp.autocast(fun, ops=ROUNDED), X, W)
    assert found == {SINGLE}


def test_rounded_products_overflow_in_the_backward_pass_alone():
    def loss(q, scale):
        weights = jax.nn.softmax(q @ q.T)
        return (weights @ q).sum() * scale

    grad = jax.jit(jaxmp.autocast(jax.value_and_grad(loss), "float16", ops=ROUNDED))
    q = 100 * jnp.eye(8)
    value, grads = grad(q * 4, 1.0)
    assert jnp.isfinite(value)
    assert jnp.isfinite(grads).all()
    assert not jnp.isfinite(grad(q, 1e6)[1]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_activation_that_a_norm_reads_too_is_stored_in_16_bits(dtype):
    """Whatever joins the argument of its `tanh`, such as the cube of a GELU."""

    def net(w, x):
        h = jax.nn.gelu(x @ w)
        scaled = h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6)
        return jnp.mean((h + scaled) @ w)

    grad = jaxmp.autocast(jax.grad(net), dtype)
    kept = jaxmp.audit(grad)(normal(0, 32, 32), normal(1, 64, 32)).residual_bytes
    assert kept["float32"] < 2 * 4 * 64 * 32  # the weights, a root, no activation twice
    assert kept[dtype] >= 3 * 2 * 64 * 32


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.gelu])
def test_the_slope_of_a_tanh_is_computed_of_16_bits_that_are_stored(activation, order):
    """Newer JAX has a primitive of its own for it, which is rounded once."""

    def loss(w):
        return jnp.sum((activation(X @ w) @ W) ** 2)

    eqns = traced(ORDERS[order](loss, "bfloat16"), W)
    made_by = {x.outvars[0]: x for x in eqns if len(x.outvars) == 1}
    slopes = [x for x in eqns if x.primitive.name in ("sub", "one_minus_square")]
    assert slopes
    for slope in slopes:
        if slope.outvars[0].aval.dtype == HALF:
            continue
        widened = made_by[slope.invars[0]]
        stored = made_by[widened.invars[0]]
        assert stored.outvars[0].aval.dtype == HALF
        assert stored.primitive.name == "optimization_barrier"


# Programs with values in the memory of the host, where no kernel of a GPU computes.
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def offloading(*names):
    """Returns a policy of `jax.checkpoint` that puts these values there."""
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst="pinned_host",
    )


def offloaded_stream(w, x):
    def layer(h, _):
        h = checkpoint_name(h, "h")
        return h + jnp.tanh(normalised(w, h)) @ w, None

    layer = jax.checkpoint(layer, policy=offloading("h"))
    return jnp.sum(lax.scan(layer, x, None, length=3)[0] ** 2)


def offloaded_softmax(w, x):
    def layer(h):
        a = checkpoint_name(jax.nn.softmax(checkpoint_name(h @ w, "s")), "a")
        return jnp.tanh(a @ w) + h

    layer = jax.checkpoint(layer, policy=offloading("s", "a"))
    return jnp.sum(layer(layer(x)) ** 2)


def stacked_on_the_host(w, x):
    def step(h, _):
        a = lax.stop_gradient(normalised(w, h))
        return jnp.tanh(h @ w) + h, jax.device_put((a, jnp.exp(a), h.shape[0]), HOST)

    h, stacks = lax.scan(step, x, None, length=3)
    a, b, _ = jax.device_put(stacks, DEVICE)
    return jnp.sum((a @ w + b @ w) ** 2) + jnp.sum((h @ w) ** 2)


def weights_of_the_host(w, x):
    layers = jax.device_put(lax.stop_gradient(jnp.stack([w, w])), HOST)

    def step(h, layer):
        return jnp.tanh(h @ jax.device_put(layer, DEVICE)) + h, None

    return jnp.sum((lax.scan(step, x, layers)[0] @ w) ** 2)


ON_HOST = offloaded_stream, offloaded_softmax, stacked_on_the_host, weights_of_the_host


MAY_BE_THERE = {"device_put", "stop_gradient"}  # and what holds equations
CALLS = {"jit", "custom_jvp_call", "custom_vjp_call"}
HOLDS = {"scan", "remat2", "checkpoint", *CALLS}


@pytest.mark.needs_no_scale
@pytest.mark.parametrize("loss", ON_HOST)
@crossed("policy order", [*DTYPES, "mixed_float16_bfloat16"], ORDERS)
def test_nothing_is_rounded_in_the_memory_of_the_host(loss, policy, order):
    found = on_the_host(order(loss, policy))
    assert "device_put" in {e.primitive.name for e in found}
    assert {e.primitive.name for e in found} <= MAY_BE_THERE | HOLDS


@pytest.mark.parametrize("loss", ON_HOST)
def test_a_loop_keeps_16_bits_on_the_host_and_gradients_are_near(loss):
    grad_fn = jaxmp.autocast(jax.grad(loss), "bfloat16")
    scans = [e for e in on_the_host(grad_fn) if e.primitive.name == "scan"]
    assert not any(
        x.aval.dtype == SINGLE and x.aval.memory_space == HOST
        for e in scans
        for x in e.outvars
    )
    error = relative_error(jax.jit(grad_fn)(W, X), jax.jit(jax.grad(loss))(W, X))
    assert error < 4 * jnp.finfo(HALF).eps


def on_the_host(fun):
    """Returns the equations that read or write its memory."""
    return [
        e
        for e in traced(fun, W, X)
        if any(x.aval.memory_space == HOST for x in [*e.invars, *e.outvars])
    ]


@pytest.mark.parametrize("first", [0, 1])
def test_a_cast_has_the_context_of_its_line_whatever_ran_before(first):
    def marked(w, x):
        with set_xla_metadata(marked="here"):
            return jnp.tanh(x @ w)

    w, x = np.ones((19, 23 + first), "f"), np.ones((17, 19), "f")  # cast nowhere else
    programs = [lambda w, x: jnp.tanh(x @ w), marked]
    for i in (first, 1 - first):
        text = jax.jit(jaxmp.autocast(programs[i], HALF)).lower(w, x).as_text()
        casts = re.findall(r"^    %.*convert (.*)", text, re.MULTILINE)
        assert len(casts) == 2
        assert all(("marked" in cast) == bool(i) for cast in casts)
