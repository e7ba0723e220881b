"""The five sentences are true of every value: what they do not allow is float32.

The oracle is written from the sentences alone, and knows nothing of the engine.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from observed import Comparison, compared, values_of

from benchmarks import golden, law
from conftest import crossed, in_both_dtypes

oracle = pytest.importorskip("oracle")
pytestmark = pytest.mark.skipif(
    jax.__version__ not in (golden.NEWEST, golden.OLDER),
    reason=f"the oracle knows the programs of JAX {golden.NEWEST} and {golden.OLDER}",
)

EVERYDAY = (
    "llama", "gpt", "gpt, scanned", "mixture of experts", "vit", "convnext", "resnet",
    "u-net", "lstm", "bert", "mixer", "efficientnet", "gru",
)  # fmt: skip
FORMS = "forward", "with gradients"
KNOWN = 623, 862, 20331, 20351, 20353  # generated programs that have broken the law


@functools.cache
def of_generated(seed: int, form: str) -> Comparison:
    """Returns what the sentences and autocast make of a generated program."""
    fun, args = golden._generated(seed)
    fun = inspect.unwrap(fun) if form == "forward" else fun
    return compared(values_of(fun, args), oracle.allowed)


@functools.cache
def of_model(name: str, form: str, dtype: str) -> Comparison:
    """Returns what the sentences and autocast make of a step of a model."""
    fun, args = golden._network(name)
    fun = inspect.unwrap(fun) if form == "forward" else fun
    return compared(values_of(fun, args, jnp.dtype(dtype)), oracle.allowed)


def fail_beyond(found: Comparison, program: str) -> None:
    """Fails if a value is in 16 bits that the sentences do not allow."""
    if found.beyond:
        lines = "\n".join(map(str, found.beyond))
        pytest.fail(
            f"Autocast has 16 bits in {program} where no sentence allows it:\n{lines}",
            pytrace=False,
        )


# Of the usual cases of the next test those with gradients.
USUAL = range(1, golden.GENERATED, 2)


@pytest.mark.keeps_float32  # some of the programs
@crossed("seed form", [*range(golden.GENERATED), *KNOWN], FORMS)
def test_no_value_of_a_program_is_in_16_bits_that_no_sentence_allows(seed, form):
    found = of_generated(seed, form)
    fail_beyond(found, f"program {seed}, {form}")
    if form == "forward":  # and what is allowed is so, or a guard is named
        assert found.unnamed == []


def of_sums(program: law.Program, form: str) -> Comparison:
    """Returns the same of a program with factors, masks and several results."""
    weights, batch = law.inputs(program, 1)
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (weights, batch)
    )
    fun = law.step_of(program)
    fun = jax.value_and_grad(fun, has_aux=True) if form == "with gradients" else fun
    return compared(values_of(fun, args), oracle.allowed)


@pytest.mark.keeps_float32  # some of the programs
@crossed("seed form", range(golden.GENERATED), FORMS)
def test_no_value_that_is_also_returned_is_in_16_bits_that_no_sentence_allows(
    seed, form
):
    fail_beyond(of_sums(law.drawn(seed), form), f"law.drawn({seed}), {form}")


@pytest.mark.evidence
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("first", range(golden.GENERATED, 1000, 100))
def test_so_it_is_in_a_thousand_programs(first, form):
    for seed in range(first, first + 100):
        fail_beyond(of_generated(seed, form), f"program {seed}, {form}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "dtype"), in_both_dtypes({x: x for x in EVERYDAY}))
def test_a_model_has_the_16_bits_that_are_allowed_or_a_guard_is_named(
    name, dtype, form
):
    found = of_model(name, form, dtype)
    fail_beyond(found, f"{name}, {form}")
    assert found.unnamed == []


def of_loop(step: Callable, count: int, *, chunks: bool = False) -> Callable:
    """Returns a loss of what a scan makes of rows, or a scan of scans of them."""

    def loss(w, rows):
        def scanned(carry, rows):
            return lax.scan(functools.partial(step, w), carry, rows)

        carry = (rows[0] @ w["in"],) * count
        if chunks:
            rows = rows.reshape(2, -1, *rows.shape[1:])
            found = lax.scan(scanned, carry, rows)
        else:
            found = scanned(carry, rows)
        return sum(jnp.mean((x @ w["out"]) ** 2) for x in jax.tree.leaves(found))

    return loss


def gate(w: Any, row: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(row @ w["gate"])


def elman(w, carry, row):
    (h,) = carry
    h = jnp.tanh(row @ w["in"] + h @ w["to itself"])
    return (h,), h


def lstm(w, carry, row):
    c, h = carry
    forget = jax.nn.sigmoid(row @ w["gate"] + h @ w["to itself"])
    c = forget * c + (1 - forget) * jnp.tanh(row @ w["in"])
    h = jnp.tanh(c) * forget
    return (c, h), h


def swapped(w, carry, row):
    a, b = carry
    return (gate(w, row) * b + row @ w["in"], gate(w, row) * a), gate(w, row)


def second_order(w, carry, row):
    """A filter that multiplies the last value but one by a gate."""
    last, before = carry
    now = 0.5 * last - gate(w, row) * before + row @ w["in"]
    return (now, last), gate(w, row)


def rotation(w, carry, row):
    re, im = carry
    cos, sin = jnp.tanh(row @ w["in"]), gate(w, row)
    return (cos * re - sin * im, sin * re + cos * im), (re, sin)


def leapfrog(w, carry, row):
    x, v = carry
    v = v - gate(w, row) * x
    return (x + gate(w, row) * v, v), gate(w, row)


def momentum(w, carry, row):
    x, v = carry
    v = gate(w, row) * v + jnp.tanh(x @ w["to itself"] + row) @ w["in"]
    return (x - gate(w, row) * v, v), gate(w, row)


def adam(w, carry, row):
    x, m, v = carry
    g = jnp.tanh(x @ w["to itself"] + row) @ w["in"]
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return (x - 0.1 * m / (jnp.sqrt(v) + 1e-6), m, v), x


def kalman(w, carry, row):
    mean, var = carry
    var = gate(w, row) * var + 1
    gain = var / (var + jax.nn.softplus(row @ w["out"]))
    return (mean + gain * (row @ w["in"] - mean), (1 - gain) * var), gate(w, row)


def branched(w, carry, row):
    def turned(a, b):
        return lax.cond(row[0, 0] > 0, lambda: (b, a), lambda: (a, b))

    a, b = turned(*carry)
    return (gate(w, row) * a + row @ w["in"], b), gate(w, row)


def softplus(x: jax.Array) -> jax.Array:
    """Reads its exponential exactly, and returns it to the backward pass."""
    return jnp.log1p(jnp.exp(x))


def helped(w, carry, row):
    (h,) = carry
    return (jnp.tanh(jax.jit(softplus)(h @ w["to itself"]) @ w["in"] + row),), h


def helped_in_a_loop(w, carry, row):
    (h,) = carry
    for_two = lax.fori_loop(0, 2, lambda _, x: softplus(x), h @ w["to itself"])
    return (jnp.tanh(for_two @ w["in"] + row),), h


def helped_in_a_branch(w, carry, row):
    (h,) = carry
    h = h @ w["to itself"]
    h = lax.cond(row[0, 0] > 0, lambda: softplus(h), lambda: h)
    return (jnp.tanh(h @ w["in"] + row),), h


def of_inputs(w, carry, row):
    """Reads a function of the row, an input, in a matmul and by arithmetic."""
    (h,) = carry
    row = softplus(row)
    return (jnp.tanh(row * (row @ w["in"]) + h @ w["to itself"]),), h


def clipped(w, carry, row):
    """Compares a weight, for the slope of a maximum, that only matmuls read else."""
    (h,) = carry
    return (jnp.tanh(h @ jnp.maximum(row.T @ row, w["to itself"])),), h


STEPS = {
    elman: 1, lstm: 2, swapped: 2, second_order: 2, rotation: 2, leapfrog: 2,
    momentum: 2, adam: 3, kalman: 2, branched: 2, helped: 1, helped_in_a_loop: 1,
    helped_in_a_branch: 1, of_inputs: 1, clipped: 1,
}  # fmt: skip


@pytest.mark.keeps_float32  # some of the programs
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunks", [False, True], ids=["", "in chunks"])
@pytest.mark.parametrize("step", STEPS)
def test_no_value_of_a_loop_is_in_16_bits_that_no_sentence_allows(step, chunks, form):
    loss = of_loop(step, STEPS[step], chunks=chunks)
    loss = jax.value_and_grad(loss) if form == "with gradients" else loss
    names = "in", "gate", "to itself", "out"
    weights = {name: jax.ShapeDtypeStruct((16, 16), "float32") for name in names}
    rows = jax.ShapeDtypeStruct((6, 4, 16), "float32")
    found = compared(values_of(loss, (weights, rows)), oracle.allowed)
    fail_beyond(found, f"{step.__name__}, {form}")


@pytest.mark.parametrize("saved", ["names", "matmuls"])
def test_what_a_policy_of_checkpointing_saves_is_no_exception(saved):
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names("h")
    if saved == "matmuls":
        policy = policies.dots_with_no_batch_dims_saveable

    def layer(x, w):
        return jax.nn.gelu(checkpoint_name(x @ w, "h"))

    def loss(w, x):
        layer_again = jax.checkpoint(layer, policy=policy)
        return (layer_again(layer_again(x, w), w) ** 2).mean()

    args = (jax.ShapeDtypeStruct((16, 16), "float32"),) * 2
    found = compared(values_of(jax.value_and_grad(loss), args), oracle.allowed)
    fail_beyond(found, f"a layer of which {saved} are saved")


def test_of_what_the_sentences_allow_nearly_all_is_in_16_bits():
    found = [of_model(x, form, "bfloat16") for x in EVERYDAY for form in FORMS]
    allowed, float32 = (
        sum(len(getattr(x, field)) for x in found) for field in ("allowed", "float32")
    )
    assert float32 <= 0.03 * allowed


def test_what_is_allowed_and_float32_in_a_gradient_is_nearly_always_so_for_a_guard():
    found = [of_generated(seed, "with gradients") for seed in USUAL]
    allowed, unnamed = (
        sum(len(getattr(x, field)) for x in found) for field in ("allowed", "unnamed")
    )
    assert unnamed <= 0.01 * allowed
