"""What audit, explain, find_overflow and sensitivity say of loss heads."""

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmp
from conftest import normal

ROWS, WIDTH, WORDS = 32, 16, 96
ARGS = normal(0, ROWS, WIDTH), normal(1, WIDTH, WORDS)
LABELS = jnp.zeros(ROWS, jnp.int32)
LOGITS = 4 * ROWS * WORDS


def by_optax(h, w):
    return optax.softmax_cross_entropy_with_integer_labels(h @ w, LABELS).mean()


def by_log_softmax(h, w):
    logs = jax.nn.log_softmax((h @ w).astype(jnp.float32) + jnp.ones(WORDS))
    return -jnp.take_along_axis(logs, LABELS[:, None], 1).mean()


def by_one_hot(h, w):
    cap = 30 * jnp.tanh(h @ w / 30)
    return optax.softmax_cross_entropy(cap, jax.nn.one_hot(LABELS, WORDS)).mean()


def by_hand(h, w):
    logits = (h.reshape(4, -1, WIDTH) @ w).reshape(-1, WORDS)
    top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    logs = jnp.log(jnp.exp(logits - top).sum(-1)) + top[:, 0]
    return (logs - logits[:, 0]).mean()


def head(h, w):
    return jaxmp.linear_cross_entropy(h, w, LABELS)


def as_gradient(fun):
    return jax.value_and_grad(fun, (0, 1))


FORMS = by_optax, by_log_softmax, by_one_hot, by_hand
HOW = {
    "loss": lambda fun: fun,
    "gradient": as_gradient,
    "around": lambda fun: jaxmp.autocast(as_gradient(fun)),
    "inside": lambda fun: as_gradient(jaxmp.autocast(fun)),
    "checkpoint": lambda fun: as_gradient(jax.checkpoint(fun)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", HOW)
def test_a_head_that_is_written_out_is_named_with_its_bytes(form, how):
    report = jaxmp.audit(HOW[how](form))(*ARGS)
    (row,) = report.loss_heads
    assert row.bytes == LOGITS
    assert row.where.startswith(inspect.getsourcefile(form) or "?")
    assert "jaxmp.linear_cross_entropy(hidden, kernel, labels)" in str(report)
    assert "12 KiB  of logits" in str(report)
    assert not report.attention


@pytest.mark.parametrize("how", HOW)
def test_what_it_says_to_type_is_not_named(how):
    report = jaxmp.audit(HOW[how](head))(*ARGS)
    assert not report.loss_heads
    # Behind a checkpoint the compiler removes two of six.
    products = {"loss": 1, "gradient": 3, "around": 3, "inside": 3, "checkpoint": 6}
    flops = 2.0 * ROWS * WIDTH * WORDS
    assert sum(report.flops.values()) == products[how] * flops
    assert report.fraction_16bit == (how in ("around", "inside"))


def test_what_is_no_head_is_not_named():
    def few(h, w):  # a classifier
        return by_optax(h, w[:, : WIDTH // 2])

    def attention(h, w):
        x = h.reshape(2, 1, -1, 16)
        return jax.nn.softmax(x @ x.swapaxes(2, 3)) @ x

    def not_of_a_matmul(h, w):
        return jax.nn.logsumexp(h) + jnp.sum(h @ w)

    for fun in (few, attention, not_of_a_matmul):
        assert not jaxmp.audit(fun)(*ARGS).loss_heads
    assert jaxmp.audit(attention)(*ARGS).attention


def test_explain_names_it():
    explanation = jaxmp.explain(jaxmp.autocast(as_gradient(head)))(*ARGS)
    (line,) = explanation.lines
    assert "jaxmp.linear_cross_entropy" in line.source
    assert line.dtype == "float32"
    assert line.matmuls == ("bfloat16",)


def test_find_overflow_names_it():
    def loss(h, w):
        return head(1e30 * h, 1e30 * w)

    report = jaxmp.find_overflow(jaxmp.autocast(as_gradient(loss)))(*ARGS)
    assert "linear_cross_entropy" in str(report)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_sensitivity_names_it_and_its_advice_is_followed(reduction):
    def loss(h, w):
        return jaxmp.linear_cross_entropy(h, w, LABELS, reduction=reduction).mean()

    report = jaxmp.sensitivity(loss, "bfloat16", tolerance=1e-6)(*ARGS)
    assert 0 < report.gradients < 2**-6
    (row,) = report.modules
    assert (row.name, row.share) == ("linear_cross_entropy", 1.0)
    assert report.line == 'float32_paths=("linear_cross_entropy",)'
    options = {"float32_paths": report.float32_paths}
    found, expected = (
        as_gradient(fun)(*ARGS) for fun in (jaxmp.autocast(loss, **options), loss)
    )
    assert all(map(jnp.array_equal, *map(jax.tree.leaves, (found, expected))))
