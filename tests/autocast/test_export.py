"""What autocast makes of a function is exported with sizes that are left open."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import export, lax
from jax.core import max_dim, min_dim

import jaxmp
from benchmarks.counting.measure import (
    dtypes,
    product_dtypes,
    product_dtypes_of,
    relative_error,
    traced,
)
from conftest import normal, rest_is_evidence
from jaxmp._jaxprs.sizes import as_number

D, H = 16, 32
SHAPES = {
    "first": (D, H),
    "second": (H, D),
    "bias": (H,),
    "scale": (D,),
    "kernel": (3, 3, 3, D),
    "heads": (3, D, 2, 8),
    "table": (11, D),
    "places": (12, D),
}
W = {
    name: normal(i, *shape, scale=0.5) for i, (name, shape) in enumerate(SHAPES.items())
}


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def integers(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def drawn(specs):
    """Returns arrays of these shapes and dtypes."""
    arrays = [normal(20 + i, *x.shape) for i, x in enumerate(specs)]
    return [
        x if spec.dtype == jnp.float32 else np.int32(3 * np.abs(x))
        for x, spec in zip(arrays, specs, strict=True)
    ]


def layer_norm(w, x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5) * w["scale"]


def batch_norm(x):
    axes = tuple(range(x.ndim - 1))
    return (x - x.mean(axes)) * lax.rsqrt(x.var(axes) + 1e-5)


def mlp(w, x):
    h = jax.nn.gelu(layer_norm(w, x) @ w["first"] + w["bias"])
    return batch_norm(jax.nn.silu(h) @ w["second"]) @ w["first"]


def exact_gelu(w, x):
    h = jax.nn.gelu(x @ w["first"] + w["bias"], approximate=False)
    return layer_norm(w, x + h @ w["second"]) @ w["first"]


def swiglu(w, x):
    h = jax.nn.silu(x @ w["first"]) * (x @ w["first"][:, ::-1])
    return h @ w["second"]


def conv_net(w, x):
    def conv(x, kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=dims
        )

    x = jax.nn.relu(batch_norm(conv(x, w["kernel"])))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = conv(x, jnp.concatenate([w["kernel"]] * 6, 2)[:, :, :D])
    x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
    return x.mean((1, 2)) @ w["first"]


def attention(w, x, mask=None):
    q, k, v = jnp.einsum("btd,cdhe->cbthe", layer_norm(w, x), w["heads"])
    scores = jnp.einsum("bthe,bshe->bhts", q, k) / 2
    if mask is None:
        mask = jnp.where(jnp.tri(x.shape[1], dtype=bool), 0.0, -1e9)
    weights = jax.nn.softmax(scores + mask)
    out = jnp.einsum("bhts,bshe->bthe", weights, v).reshape(x.shape)
    return (x + out) @ w["first"]


def language_model(w, tokens):
    x = w["table"][tokens] + jnp.take(w["places"], jnp.arange(tokens.shape[1]), 0)
    return attention(w, x) @ w["second"] @ w["table"].T


def cross_entropy(w, tokens):
    logits = language_model(w, tokens)
    labels = jnp.roll(tokens, 1, axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def positions(w, x, places):
    return (jax.nn.relu(x @ w["first"]) @ w["second"] + places) @ w["first"]


def rnn(w, x):
    def step(h, x):
        h = jnp.tanh(x @ w["first"] + h @ w["second"] @ w["first"] + w["bias"])
        return h, h

    last, hs = lax.scan(step, jnp.zeros((x.shape[0], H)), x.swapaxes(0, 1))
    return last @ w["second"] + (hs @ w["second"]).mean(0)


def layers(w, x):
    stack = jnp.stack([w["first"] @ w["second"]] * 3)

    @jax.checkpoint
    def layer(x, kernel):
        return x + jax.nn.gelu(layer_norm(w, x) @ kernel), None

    return lax.scan(layer, x, stack)[0] @ w["first"]


# A function, and the shapes of its arguments, of which some sizes may be left open.
CASES = {
    "mlp": (mlp, lambda b, t: [floats(b, D)]),
    "mlp of 2b": (mlp, lambda b, t: [floats(2 * b, D)]),
    "exact gelu": (exact_gelu, lambda b, t: [floats(b, t, D)]),
    "swiglu": (swiglu, lambda b, t: [floats(b, t, D)]),
    "conv net of any width": (conv_net, lambda b, t: [floats(b, 8, 4 * t, 3)]),
    "attention": (attention, lambda b, t: [floats(b, t, D)]),
    "biased attention": (attention, lambda b, t: [floats(b, t, D), floats(2, t, t)]),
    "cross entropy": (cross_entropy, lambda b, t: [integers(b, t)]),
    "positions": (positions, lambda b, t: [floats(b, t, D), floats(t, D)]),
    "rnn": (rnn, lambda b, t: [floats(b, 5, D)]),
    "layers": (layers, lambda b, t: [floats(b, t, D)]),
}


def loss(fun):
    return lambda w, *args: (fun(w, *args) ** 2).mean()


def gradients(fun):
    return jax.value_and_grad(loss(fun))


ORDERS = {
    "forward": jaxmp.autocast,
    "outside": lambda fun, dtype: jaxmp.autocast(gradients(fun), dtype),
    "inside": lambda fun, dtype: jax.value_and_grad(jaxmp.autocast(loss(fun), dtype)),
}
USUAL = ["mlp forward bfloat16", "attention inside float16", "rnn outside float16"]


def symbolic(shapes):
    return shapes(*export.symbolic_shape("b, t"))


@pytest.mark.needs_no_scale
@pytest.mark.parametrize(
    ("name", "order", "dtype"),
    rest_is_evidence(
        {
            f"{name} {order} {dtype}": (name, order, dtype)
            for name in CASES
            for order in ORDERS
            for dtype in ("float16", "bfloat16")
        },
        *USUAL,
    ),
)
def test_exported_functions_compute_what_jitted_ones_do(name, order, dtype):
    fun, shapes = CASES[name]
    cast = jax.jit(ORDERS[order](fun, dtype))
    specs = symbolic(shapes)
    found = product_dtypes_of(cast.trace(W, *specs).jaxpr)
    assert found
    assert all(operands == {dtype} for operands in found)
    exported = export.export(cast)(W, *specs)
    # The count of a mean is a number while tracing only where sizes are: what is
    # divided by another one is then rounded once less.
    limit = 2 * float(jnp.finfo(dtype).eps) if order == "outside" else 0
    for sizes in [(2, 9), (5, 8)]:
        args = drawn(shapes(*sizes))
        assert relative_error(exported.call(W, *args), cast(W, *args)) <= limit


@pytest.mark.parametrize(
    "name", ["exact gelu", "swiglu", "biased attention", "positions", "layers"]
)
def test_sizes_that_are_left_open_decide_as_usual_ones_do(name):
    fun, shapes = CASES[name]

    def written(specs):
        return [
            (eqn.primitive.name, dtypes(eqn))
            for eqn in traced(jaxmp.autocast(fun, "bfloat16"), W, *specs)
            if dtypes(eqn)
        ]

    assert written(symbolic(shapes)) == written(shapes(5, 8))


def test_a_contraction_over_an_open_size_is_a_product_and_one_over_one_term_is_none():
    def operands(terms):
        args = floats(4, terms), floats(terms, 6)
        return product_dtypes(jaxmp.autocast(jnp.matmul, "bfloat16"), *args)

    (b,) = export.symbolic_shape("b")
    assert operands(b) == operands(2 * b - 1) == operands(8) == [{"bfloat16"}]
    assert operands(b - b + 1) == operands(1) == [{"float32"}]


def test_accumulated_gradients_and_aux_of_open_sizes_can_be_exported():
    def with_aux(w, x):
        y = mlp(w, x)
        return (y**2).mean(), {"y": y, "mean": y.mean(), "deviation": y.std()}

    grad = jaxmp.value_and_grad(with_aux, has_aux=True, accum_steps=2, batch_argnums=1)
    cast = jax.jit(jaxmp.autocast(grad, "mixed_bfloat16"))
    (_, aux), _ = jax.eval_shape(cast, W, *symbolic(lambda b, t: [floats(2 * b, D)]))
    assert str(aux["y"].shape) == "(2, b, 32)"


def test_an_audit_counts_open_sizes_as_a_number_and_says_so():
    fun, shapes = CASES["attention"]
    specs = symbolic(shapes)
    report = jaxmp.audit(jaxmp.autocast(gradients(fun), "bfloat16"))(W, *specs)
    assert report.notes == ("symbolic sizes count as 1024",)
    expected = jaxmp.audit(jaxmp.autocast(gradients(fun), "bfloat16"))(
        W, floats(1024, 1024, D)
    )
    assert report.flops == expected.flops
    assert report.residual_bytes == expected.residual_bytes
    assert report.fraction_16bit == 1
    with pytest.raises(AssertionError, match=r"but 100.0% of their FLOPs are not"):
        jaxmp.assert_16bit(fun, W, *specs)


EXPRESSIONS = {
    "a sum": lambda b, t: 2 * b * t + b**2 * t - 3,
    "a negative term": lambda b, t: 8 - b + 3 * t,
    "a quotient": lambda b, t: (b + 1) // 2 * t,
    "a remainder": lambda b, t: b % 3 + -t % 8,
    "what is padded": lambda b, t: (b + -b % 16) // 4 - 1,
    "the larger": lambda b, t: max_dim(b - 7, 2 * t) * 2,
    "the smaller": lambda b, t: min_dim(b * t, 128) + t,
    "a number": lambda b, t: 12,
    "a number of NumPy's": lambda b, t: np.int64(12),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_open_size_as_a_number_is_the_expression_of_that_number(name):
    size = EXPRESSIONS[name]
    for names in ("b, t", "max_length, Größe"):
        found = as_number(size(*export.symbolic_shape(names)), 1000)
        assert found == size(1000, 1000)
        assert type(found) is int
