"""What audit, find_overflow, explain and sensitivity say of attention."""

import functools
import inspect
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxmp
import jaxmp.linen

BATCH, LENGTH, HEADS, SIZE = 2, 16, 4, 8
WIDTH = HEADS * SIZE


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


X = shape(BATCH, LENGTH, HEADS, SIZE)
NARROW = shape(BATCH, LENGTH, HEADS, SIZE, dtype=jnp.bfloat16)
WEIGHTS = BATCH * HEADS * LENGTH * LENGTH


def line_of(fun, text):
    """Returns ``file:line`` of the line of a function that has a text."""
    lines, first = inspect.getsourcelines(fun)
    (number,) = (i for i, line in enumerate(lines, first) if text in line)
    return f"{inspect.getsourcefile(fun)}:{number}"


def whys(fun, *args):
    return [row.why for row in jaxmp.audit(fun)(*args).attention]


attend = jaxmp.dot_product_attention


def test_an_attention_on_the_kernel_has_no_line():
    grad = jax.grad(lambda *x: jnp.sum(attend(*x, is_causal=True)), (0, 1, 2))
    assert whys(grad, NARROW, NARROW, NARROW) == []
    assert whys(jaxmp.autocast(grad), X, X, X) == []
    report = jaxmp.audit(jaxmp.autocast(grad))(X, X, X)
    assert report.fraction_16bit == 1
    assert report.flops == {"bfloat16": 6 * 2.0 * WEIGHTS * SIZE}


BIAS = shape(1, HEADS, LENGTH, LENGTH)
WHYS = {
    "float32": (lambda *x: attend(*x), (X, X, X), "float32, and the kernel takes 16"),
    "asked": (
        functools.partial(attend, implementation="xla"),
        (NARROW,) * 3,
        '`implementation="xla"`',
    ),
    "size": (
        attend,
        (shape(2, 16, 4, 12, dtype=jnp.bfloat16),) * 3,
        "heads have size 12; the kernel takes multiples of 8",
    ),
    "large": (attend, (shape(2, 16, 4, 264, dtype=jnp.bfloat16),) * 3, "up to 256"),
    "trained bias": (
        jax.grad(lambda b, *x: jnp.sum(attend(*x, b).astype(jnp.float32))),
        (BIAS, *[NARROW] * 3),
        "the bias is trained, .*`bias.astype",
    ),
    "tangent": (
        lambda *x: jax.jvp(attend, x, x)[1],
        (NARROW,) * 3,
        "a tangent is computed",
    ),
    "scale": (
        lambda s, *x: attend(*x, scale=s),
        (shape(), *[NARROW] * 3),
        "its scale is an array; .*`scale=1.0`",
    ),
    "region": (
        jaxmp.autocast(jaxmp.float32_region(attend)),
        (X, X, X),
        "float32, and the kernel takes 16",
    ),
}


@pytest.mark.keeps_float32
@pytest.mark.parametrize(("fun", "args", "why"), WHYS.values(), ids=WHYS.keys())
def test_the_reason_is_named(fun, args, why):
    report = jaxmp.audit(fun)(*args)
    (row,) = report.attention
    assert re.search(why, row.why), row.why
    assert row.bytes == 0
    assert "attention that is not cuDNN's kernel" in str(report)


FLAXS = [
    ("its dropout is active", ({"dropout_rate": 0.5}, {"deterministic": False})),
    ("its weights are sown", ({}, {"sow_weights": True})),
    pytest.param(
        "its `precision`",
        ({"precision": "highest"}, {}),
        marks=pytest.mark.keeps_float32,
    ),
]


@pytest.mark.parametrize(("why", "options"), FLAXS)
def test_what_goes_the_way_of_flax_is_named(why, options):
    layer = nn.MultiHeadDotProductAttention(
        HEADS, attention_fn=jaxmp.linen.dot_product_attention, **options[0]
    )
    x = jnp.ones((BATCH, LENGTH, WIDTH))
    variables = layer.init(jax.random.key(0), x, deterministic=True)

    def apply(variables, x):
        rngs = {"dropout": jax.random.key(1)}
        out = layer.apply(
            variables, x, rngs=rngs, mutable=["intermediates"], **options[1]
        )
        return jnp.sum(out[0])

    for fun in (apply, jax.grad(apply), jaxmp.autocast(jax.grad(apply))):
        (row,) = jaxmp.audit(fun)(variables, x).attention
        assert row.why.startswith(why)
        assert "MultiHeadDotProductAttention" in row.module


def written(query, key, value, bias=None, *, softmax=jax.nn.softmax, scale=SIZE**-0.5):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * scale
    if bias is not None:
        scores = scores + bias
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = softmax(jnp.where(seen, scores, -1e30))
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def by_hand(scores):
    exps = jnp.exp(scores - scores.max(-1, keepdims=True))
    return exps / exps.sum(-1, keepdims=True)


def scaled_before(query, key, value):
    return written(query / jnp.sqrt(SIZE), key, value, scale=1.0)


def not_scaled(query, key, value):
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key))
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def of_flax(query, key, value):
    return nn.dot_product_attention(query, key, value)


WRITTEN = [
    written,
    functools.partial(written, softmax=by_hand),
    scaled_before,
    not_scaled,
    of_flax,
    functools.partial(jax.nn.dot_product_attention, is_causal=True),
    jax.jit(written),
    jax.checkpoint(written),
    lambda q, k, v: written(q, k, v, jnp.ones((1, HEADS, 1, LENGTH))),
]


@pytest.mark.parametrize("fun", WRITTEN)
def test_an_attention_that_is_written_out_has_a_line(fun):
    def total(*args):
        return jnp.sum(fun(*args) ** 2)

    for program in (total, jax.grad(total), jax.value_and_grad(total)):
        (row,) = jaxmp.audit(program)(X, X, X).attention
        assert (row.why, row.bytes) == ("", 4 * WEIGHTS)
    for program in (jaxmp.autocast(jax.grad(total)), jax.grad(jaxmp.autocast(total))):
        report = jaxmp.audit(program)(X, X, X)
        (row,) = report.attention
        assert (row.why, row.bytes) == ("", 2 * WEIGHTS)
        assert "`jaxmp.dot_product_attention` saves" in str(report)


def test_the_line_is_that_of_the_weights_and_layers_add_up():
    def layer(x, _):
        scores = jnp.einsum("btnh,bsnh->bnts", x, x) * 0.5
        weights = jax.nn.softmax(scores)
        return jnp.einsum("bnts,bsnh->btnh", weights, x), None  # of the weights

    def layers(x):
        return jax.lax.scan(layer, x, length=3)[0]

    (row,) = jaxmp.audit(jax.grad(lambda x: jnp.sum(layers(x))))(X).attention
    assert row.where == line_of(layer, "# of the weights")
    assert row.bytes == 3 * 4 * WEIGHTS


def with_a_cap(query, key, value):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * 0.5
    weights = jax.nn.softmax(5 * jnp.tanh(scores))
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def with_dropout(query, key, value):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * 0.5
    weights = jax.nn.softmax(scores)
    weights = jnp.where(jnp.arange(LENGTH) % 2 == 0, weights / 0.5, 0)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def by_sigmoids(query, key, value):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * 0.5
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.sigmoid(scores), value)


def of_sums_of_others(query, key, value):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * 0.5
    others = jnp.exp(scores + 1)
    exps = jnp.exp(scores)
    weights = exps / others.sum(-1, keepdims=True)
    return jnp.einsum("bnts,bsnh->btnh", weights, value)


def never_read(query, key, value):
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) * 0.5
    return jax.nn.softmax(scores)


OTHERS = [with_a_cap, with_dropout, by_sigmoids, of_sums_of_others, never_read]


@pytest.mark.parametrize("fun", OTHERS)
def test_what_lacks_a_part_has_no_line(fun):
    for program in (fun, jaxmp.autocast(fun)):
        assert whys(jax.grad(lambda *x, f=program: jnp.sum(f(*x))), X, X, X) == []


def overflowing(at):
    """Returns a loss in which a number is out of range where it is said."""
    sizes = dict.fromkeys(["query", "key", "value", "result", "gradient"], 1.0)
    sizes[at] = 3e6

    def total(x):
        query, key, value = (x @ jnp.eye(SIZE) for _ in range(3))
        query = query * sizes["query"]  # query
        key = key * sizes["key"]  # key
        value = value * sizes["value"]  # value
        out = attend(query, key, value)  # attention
        out = out * sizes["result"]  # result
        scaled = (out @ jnp.ones((SIZE, SIZE))) * sizes["gradient"]  # gradient
        return jnp.sum(scaled)

    return total


@pytest.mark.filterwarnings("ignore:.*float16.*:UserWarning")
@pytest.mark.parametrize("at", ["query", "key", "value", "result", "gradient"])
def test_an_overflow_is_found_at_its_line(at):
    total = overflowing(at)
    x = jax.random.normal(jax.random.key(0), X.shape)
    report = jaxmp.find_overflow(jaxmp.autocast(jax.grad(total), "float16"))(x)
    assert report.first is not None
    assert report.first.where == line_of(total, f"# {at}")


@pytest.mark.filterwarnings("ignore:.*float16.*:UserWarning")
def test_a_gradient_that_attention_itself_makes_too_large_is_found_there():
    def total(x, key):
        out = attend(1e-4 * x, key, jnp.sin(x))  # attention
        return jnp.sum((out @ jnp.ones((SIZE, SIZE))) ** 2)

    x = jax.random.normal(jax.random.key(0), X.shape)
    grad = jaxmp.autocast(jax.grad(lambda x, key: 2e2 * total(x, key)), "float16")
    report = jaxmp.find_overflow(grad)(x, 3e4 * jnp.sign(x))
    assert report.first.where == line_of(total, "# attention")
    assert report.first.operation == "dot_product_attention"


def test_explain_names_its_dtype_and_what_is_kept():
    def total(w, x):
        query = x @ w
        out = attend(query, query, query)  # attention
        return jnp.sum((out @ w) ** 2)

    w, x = jnp.eye(SIZE), jnp.ones(X.shape)
    report = jaxmp.explain(jaxmp.autocast(jax.grad(total)))(w, x)
    (line,) = (x for x in report.lines if "# attention" in x.source)
    assert line.dtype == "bfloat16"
    assert line.matmuls == ("bfloat16",)


def test_sensitivity_measures_it():
    def total(w, x):
        query = x @ w
        return jnp.mean((attend(query, query, query) @ w) ** 2)

    w = jax.random.normal(jax.random.key(0), (SIZE, SIZE))
    x = jax.random.normal(jax.random.key(1), X.shape)
    report = jaxmp.sensitivity(total, "bfloat16")(w, x)
    assert 0 < report.gradients < 0.05
