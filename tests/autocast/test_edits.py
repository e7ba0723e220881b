"""Innocent edits of a program change no dtype and no value.

`docs/rules.md` says which edits are not innocent, and why.
"""

import functools
import operator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from benchmarks.counting.measure import AS_WRITTEN, dtypes, relative_error
from conftest import normal
from jaxmp import autocast
from jaxmp._jaxprs import jaxpr as _jaxpr
from jaxmp._ops import products as _products

ROWS, SIZE = 8, 8
X = normal(0, ROWS, SIZE)
WEIGHTS = {f"w{i}": normal(i + 1, SIZE, SIZE, scale=SIZE**-0.5) for i in range(6)} | {
    "b": normal(9, SIZE, scale=0.1),
    "g": 1 + normal(10, SIZE, scale=0.1),
}
STACK = normal(11, 3, SIZE, SIZE, scale=SIZE**-0.5)


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def softmax(x):
    return jax.nn.softmax(x)


def written_out(x):
    p = jnp.exp(x - lax.stop_gradient(x.max(-1, keepdims=True)))
    return p / p.sum(-1, keepdims=True)


# Each is one function of a value and the weights, in several spellings.
SAME = {
    "a dense layer": [
        lambda x, w: x @ w["w0"],
        lambda x, w: jnp.matmul(x, w["w0"]),
        lambda x, w: jnp.dot(x, w["w0"]),
        lambda x, w: jnp.einsum("...i,ij->...j", x, w["w0"]),
        lambda x, w: lax.dot_general(x, w["w0"], (((1,), (0,)), ((), ()))),
        lambda x, w: jnp.tensordot(x, w["w0"], 1),
        lambda x, w: (w["w0"].T @ x.T).T,
        lambda x, w: jnp.einsum("ij,kj->ik", x, w["w0"].T),
        lambda x, w: (x.reshape(2, -1, SIZE) @ w["w0"]).reshape(x.shape),
        lambda x, w: jax.vmap(lambda row: row @ w["w0"])(x),
        lambda x, w: jax.vmap(lambda row: w["w0"].T @ row)(x),
        lambda x, w: lax.map(lambda row: row @ w["w0"], x),
    ],
    "a bias": [
        lambda x, w: x @ w["w0"] + w["b"],
        lambda x, w: w["b"] + x @ w["w0"],
        lambda x, w: jnp.add(jnp.dot(x, w["w0"]), jnp.broadcast_to(w["b"], x.shape)),
        lambda x, w: jax.vmap(lambda row: row @ w["w0"] + w["b"])(x),
    ],
    "a relu": [
        lambda x, w: jax.nn.relu(x @ w["w0"]),
        lambda x, w: jnp.maximum(x @ w["w0"], 0),
        lambda x, w: jnp.where(x @ w["w0"] > 0, x @ w["w0"], 0),
        lambda x, w: lax.max(x @ w["w0"], jnp.zeros_like(x)),
        lambda x, w: jnp.clip(x @ w["w0"], 0),
    ],
    "a silu": [
        lambda x, w: jax.nn.silu(x @ w["w0"]),
        lambda x, w: (lambda h: h * jax.nn.sigmoid(h))(x @ w["w0"]),
        lambda x, w: (lambda h: jax.nn.sigmoid(h) * h)(x @ w["w0"]),
        lambda x, w: (lambda h: h * lax.logistic(h))(x @ w["w0"]),
    ],
    "a scale": [
        lambda x, w: x @ w["w0"] / 2,
        lambda x, w: x @ w["w0"] * 0.5,
        lambda x, w: 0.5 * (x @ w["w0"]),
        lambda x, w: x @ w["w0"] / jnp.float32(2),
        lambda x, w: x @ w["w0"] / np.sqrt(np.float32(4)),
        lambda x, w: x @ w["w0"] / jnp.sqrt(jnp.float32(4)),
        lambda x, w: x @ w["w0"] * jnp.full((), 0.5),
    ],
    "a norm": [
        lambda x, w: norm(x @ w["w0"]) * w["g"],
        lambda x, w: w["g"] * norm(x @ w["w0"]),
        lambda x, w: jax.jit(norm)(x @ w["w0"]) * w["g"],
        lambda x, w: jax.vmap(norm)(x @ w["w0"]) * w["g"],
    ],
    "a residual": [
        lambda x, w: x + jnp.tanh(norm(x) @ w["w0"]) @ w["w1"],
        lambda x, w: jnp.tanh(norm(x) @ w["w0"]) @ w["w1"] + x,
        lambda x, w: jax.vmap(lambda r: r + jnp.tanh(norm(r) @ w["w0"]) @ w["w1"])(x),
    ],
    "attention": [
        lambda x, w: softmax((x @ w["w0"]) @ (x @ w["w1"]).T / 2) @ (x @ w["w2"]),
        lambda x, w: written_out((x @ w["w0"]) @ (x @ w["w1"]).T / 2) @ (x @ w["w2"]),
        lambda x, w: jnp.einsum(
            "qk,kd->qd",
            softmax(jnp.einsum("qd,kd->qk", x @ w["w0"], x @ w["w1"]) / 2),
            x @ w["w2"],
        ),
        lambda x, w: (
            lambda v, k, q: jax.jit(softmax)(jnp.einsum("qd,kd->qk", q, k) * 0.5) @ v
        )(x @ w["w2"], x @ w["w1"], x @ w["w0"]),
    ],
    "a batched product": [
        lambda x, w: jnp.einsum("bij,bjk->bik", *pairs(x, w)).reshape(x.shape),
        lambda x, w: jnp.matmul(*pairs(x, w)).reshape(x.shape),
        lambda x, w: jax.vmap(jnp.matmul)(*pairs(x, w)).reshape(x.shape),
        lambda x, w: jax.vmap(lambda a, b: jax.vmap(jnp.dot, (0, None))(a, b))(
            *pairs(x, w)
        ).reshape(x.shape),
        lambda x, w: lax.batch_matmul(*pairs(x, w)).reshape(x.shape),
    ],
    "layers without a shortcut": [
        lambda x, w: functools.reduce(lambda x, w: jnp.tanh(x @ w), w["s"], x),
        lambda x, w: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w["s"])[0],
        lambda x, w: lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w["s"][i]), x),
    ],
    "a difference": [
        lambda x, w: x @ w["w0"] - x @ w["w1"],
        lambda x, w: x @ w["w0"] + -(x @ w["w1"]),
        lambda x, w: -(x @ w["w1"]) + x @ w["w0"],
        lambda x, w: -(x @ w["w1"] - x @ w["w0"]),
        lambda x, w: jnp.subtract(x @ w["w0"], x @ w["w1"]),
        lambda x, w: x @ w["w0"] + -1 * (x @ w["w1"]),
    ],
    "a square": [
        lambda x, w: (x @ w["w0"]) ** 2,
        lambda x, w: jnp.square(x @ w["w0"]),
        lambda x, w: (lambda h: h * h)(x @ w["w0"]),
        lambda x, w: lax.integer_pow(x @ w["w0"], 2),
        lambda x, w: jnp.power(x @ w["w0"], 2),
    ],
    "a ratio": [
        lambda x, w: x @ w["w0"] / (2 + jnp.tanh(x @ w["w1"])),
        lambda x, w: x @ w["w0"] * (1 / (2 + jnp.tanh(x @ w["w1"]))),
        lambda x, w: x @ w["w0"] * (2 + jnp.tanh(x @ w["w1"])) ** -1,
        lambda x, w: x @ w["w0"] * jnp.reciprocal(2 + jnp.tanh(x @ w["w1"])),
    ],
    "a gate": [
        lambda x, w: jax.nn.sigmoid(x @ w["w0"]) * (x @ w["w1"]),
        lambda x, w: (x @ w["w1"]) * jax.nn.sigmoid(x @ w["w0"]),
        lambda x, w: jax.nn.glu(jnp.concatenate([x @ w["w1"], x @ w["w0"]], -1)),
        lambda x, w: (lambda h: h[:, :SIZE] * jax.nn.sigmoid(h[:, SIZE:]))(
            x @ jnp.concatenate([w["w1"], w["w0"]], 1)
        ),
        lambda x, w: (lambda h: operator.mul(h[0], jax.nn.sigmoid(h[1])))(
            jnp.split(x @ jnp.concatenate([w["w1"], w["w0"]], 1), 2, -1)
        ),
    ],
    "a dropout": [
        lambda x, w: jnp.where(mask(), x @ w["w0"] / 0.5, 0),
        lambda x, w: jnp.where(mask(), x @ w["w0"], 0) / 0.5,
        lambda x, w: lax.select(mask(), x @ w["w0"] * 2, jnp.zeros_like(x)),
    ],
    "a mean": [
        lambda x, w: (x @ w["w0"]).mean(0) + x,
        lambda x, w: (x @ w["w0"]).sum(0) / ROWS + x,
        lambda x, w: x + jnp.mean(x @ w["w0"], axis=0, keepdims=True),
        lambda x, w: x + jax.jit(lambda h: h.sum(0) * (1 / ROWS))(x @ w["w0"]),
    ],
    "an offset": [
        lambda x, w: jax.nn.relu(x @ w["w0"] + 30 * w["g"]) - 30 * w["g"],
        lambda x, w: (lambda o: jax.nn.relu(x @ w["w0"] + o) - o)(30 * w["g"]),
        lambda x, w: (
            jax.jit(lambda h, o: jax.nn.relu(h + o))(x @ w["w0"], 30 * w["g"])
            - 30 * w["g"]
        ),
    ],
}


def pairs(x, w):
    return x.reshape(2, 4, SIZE), jnp.stack([w["w0"], w["w1"]])


def mask():
    return X > -1


def helper(layer):
    def called(*args):
        return layer(*args)

    return called


def named(layer):
    def softmax(x, w):
        with jax.named_scope("layer_norm"):
            return layer(x, w)

    return jax.named_call(jax.jit(softmax), name="loss")


def reshaped(layer):
    return lambda x, w: layer(x.reshape(-1).reshape(x.shape).T.T, w)


AROUND = {
    "nothing": lambda layer: layer,
    "jit": jax.jit,
    "a helper": helper,
    "names": named,
    "a reshape and back": reshaped,
    "jit in jit": lambda layer: jax.jit(helper(jax.jit(layer))),
    "checkpoint": jax.checkpoint,
    "cond": lambda layer: lambda x, w: lax.cond(True, layer, layer, x, w),
}

# What is made of a layer.
LOSSES = {
    "a product": lambda y, w: jnp.tanh(y @ w["w5"]).mean(),
    "a norm": lambda y, w: jnp.tanh(norm(y) @ w["w5"]).mean(),
    "a loss": lambda y, w: -jax.nn.log_softmax(y)[:, 0].mean(),
}


def program(layers, loss="a product"):
    """Returns a loss. Layers are pairs of a function and of what is around it."""

    def run(w, x):
        w = w | {"s": STACK}
        x = x @ w["w4"]
        for i, (layer, around) in enumerate(layers):
            x = checkpoint_name(AROUND[around](layer)(x, w), f"layer {i}")
        return LOSSES[loss](x, w)

    return run


def seen(jaxpr: Any):
    """Yields products with the dtypes that they take and return, and named values."""
    for eqn in _jaxpr.open_jaxpr(jaxpr).eqns:
        name = eqn.primitive.name
        if _products.is_matrix_product(eqn):
            out: Any = eqn.outvars[0].aval
            yield "product", tuple(d.name for d in dtypes(eqn)), out.dtype.name
        elif name == "name":
            yield eqn.params["name"], str(getattr(eqn.outvars[0].aval, "dtype", None))
        for body in _jaxpr.on_platform(eqn, [*_jaxpr.sub_jaxprs(eqn)]):
            yield from seen(body)


def decided(fun, *args, dtype=jnp.bfloat16):
    """Returns which dtypes there are, without how often."""
    return set(seen(jax.make_jaxpr(autocast(fun, dtype))(*args)))


@functools.cache  # as it is first, a layer is compared with many
def decided_of(layers, loss):
    """Returns which dtypes there are in the forward pass, and with a gradient."""
    fun = program(layers, loss)
    return decided(fun, WEIGHTS, X), decided(jax.value_and_grad(fun), WEIGHTS, X)


def agree(layers, edited, loss):
    """Checks dtypes in both orders of gradient."""
    assert decided_of(layers, loss) == decided_of(edited, loss)


def values_agree(layers, edited, loss):
    def both(w, x):
        funs = [jax.value_and_grad(program(p, loss)) for p in (layers, edited)]
        return [*(autocast(f, jnp.bfloat16)(w, x) for f in funs), funs[0](w, x)]

    compiled = jax.jit(both).lower(WEIGHTS, X).compile(compiler_options=AS_WRITTEN)
    one, other, exact = compiled(WEIGHTS, X)
    # Sums in another order may round to the next number, here and there.
    assert relative_error(other, one) <= 2**-7
    assert relative_error(other, exact) <= 2 * relative_error(one, exact) + 2**-9


KINDS = sorted(SAME)
edits = st.tuples(
    st.sampled_from(KINDS), st.integers(1, 11), st.sampled_from(sorted(AROUND))
)
losses = st.sampled_from(sorted(LOSSES))


def both_of(drawn):
    """Returns layers as they are first, and as they are edited."""
    before = ((SAME[kind][0], "nothing") for kind, _, _ in drawn)
    after = ((SAME[kind][i % len(SAME[kind])], around) for kind, i, around in drawn)
    return tuple(before), tuple(after)


@pytest.mark.parametrize("kind", KINDS)
def test_each_spelling_of_a_layer_has_the_same_dtypes(kind):
    for i in range(1, len(SAME[kind])):
        agree(*both_of([(kind, i, "nothing")]), "a norm")


@pytest.mark.parametrize("around", sorted(AROUND))
def test_what_is_around_a_layer_changes_no_dtype(around):
    for kind in ("attention", "a gate", "an offset"):
        agree(*both_of([(kind, 0, around)]), "a product")


gate = jax.nn.sigmoid

# What an iteration makes of what it carries and of two matmuls.
STEPS = {
    "a sum": lambda c, h, k: c + jnp.tanh(h),
    "a sum of products": lambda c, h, k: c + h * k,
    "a decay": lambda c, h, k: c * checkpoint_name(gate(h), "gate") + k,
    "an interpolation": lambda c, h, k: c + checkpoint_name(gate(h), "gate") * (k - c),
    "a factor": lambda c, h, k: c * (1 + h),
    "a maximum": lambda c, h, k: jnp.maximum(c, h) + k,
    "a norm": lambda c, h, k: norm(c + h),
    "a matmul": lambda c, h, k: jnp.tanh(c @ WEIGHTS["w3"] + h),
    "a matmul beside": lambda c, h, k: c * k + (c * (1 + h)) @ WEIGHTS["w3"],
}


def with_rule(fun):
    called = jax.custom_jvp(fun)
    called.defjvp(lambda xs, tangents: jax.jvp(fun, xs, tangents))
    return called


def mapped(fun):
    return lambda *xs: lax.map(lambda xs: fun(*xs), [x[None] for x in xs])[0]


AROUND_STEPS = {
    "jit": jax.jit,
    "jit in jit": lambda fun: jax.jit(helper(jax.jit(fun))),
    "checkpoint": jax.checkpoint,
    "a rule": with_rule,
    "cond": lambda fun: lambda *xs: lax.cond(True, fun, fun, *xs),
    "a map": lambda fun: mapped(lambda *xs: fun(*xs)),
}


def loop(step, start, weights, xs):
    """Returns what a scan carries. Matmuls take the terms as well, and the carry."""

    def iteration(c, x):
        h, k = jnp.tanh(x @ weights["w0"]), x @ weights["w1"]
        h, k, c = map(checkpoint_name, (h, k, c), "hkc")
        return step(c, h, k), (h @ weights["w2"]) * (k @ weights["w2"])

    c, ys = lax.scan(iteration, start, xs)
    return (c @ weights["w2"]).mean() + ys.mean()


@functools.cache
def decided_in_a_loop(step, around=lambda step: step):
    args = X, WEIGHTS, normal(21, 3, ROWS, SIZE)
    return decided(functools.partial(loop, around(step)), *args)


@pytest.mark.parametrize("around", sorted(AROUND_STEPS))
def test_what_is_around_a_step_of_a_loop_changes_no_dtype(around):
    for name, step in STEPS.items():
        edited = decided_in_a_loop(step, AROUND_STEPS[around])
        assert edited == decided_in_a_loop(step), name


@hypothesis.settings(max_examples=5)
@hypothesis.given(st.lists(edits, min_size=1, max_size=3), losses)
def test_edits_of_a_program_change_nothing(drawn, loss):
    agree(*both_of(drawn), loss)
    values_agree(*both_of(drawn), loss)


@pytest.mark.evidence
@hypothesis.settings(max_examples=60)
@hypothesis.given(st.lists(edits, min_size=1, max_size=4), losses)
def test_edits_of_any_program_change_nothing(drawn, loss):
    agree(*both_of(drawn), loss)
    values_agree(*both_of(drawn), loss)
