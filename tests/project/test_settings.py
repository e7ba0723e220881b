"""JAX's settings: the public functions run under each, and give what they gave."""

import functools

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
import jaxmp.linen
from conftest import rest_is_evidence

SETTINGS = {
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "x64": lambda: jax.enable_x64(True),
    "debug_nans": lambda: jax.debug_nans(True),
    "no jit": jax.disable_jit,
}
PARAMS = {"w": np.float32([[1, -2], [0.5, 4]]), "b": np.float32([0.25, 0])}
GRADS = {"w": np.float32([[1, 2**-20], [0, 3]]), "b": np.float32([-1, 2**-30])}
X = np.float32([[1, 2], [3, 4], [-1, 0], [0.5, 8]])


def arrays(tree):
    return jax.tree.map(jnp.asarray, tree)


def loss_fn(params, x):
    y = jnp.dot(x.astype(params["w"].dtype), params["w"])
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


def train(policy):
    """Two steps of the README's loop, the second of which is skipped."""
    tx = jaxmp.loss_scaling(optax.sgd(0.5), policy, growth_interval=1)

    @jax.jit
    def step(params, state, x, factor):
        scale = jaxmp.get_loss_scale(state)
        grad_fn = jaxmp.value_and_grad(loss_fn, policy=policy, loss_scale=scale)
        _, grads = grad_fn(params, x)
        grads = jax.tree.map(lambda g: g * factor, grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, x = arrays((PARAMS, X))
    state = tx.init(params)
    for factor in np.float32([1, 3e38]):
        params, state = step(params, state, x, jnp.asarray(factor))
    jaxmp.check_loss_scale(state)
    return params, state


def accumulated():
    grad_fn = jaxmp.value_and_grad(
        loss_fn, policy="mixed_bfloat16", loss_scale=8, accum_steps=2, batch_argnums=1
    )
    return grad_fn(*arrays((PARAMS, X)))


def recorded():
    tx, grads = jaxmp.record_ranges(every=1), arrays(GRADS)
    return tx.update(grads, tx.init(grads))[1]


def linen():
    model = nn.Dense(2)  # a LayerNorm of Flax itself wants promotion
    variables = model.init(jax.random.key(0), jnp.asarray(X))
    return jaxmp.linen.with_policy(model, "O2")(variables, jnp.asarray(X))


def head():
    (params, x), labels = arrays((PARAMS, X)), jnp.array([0, 1, 1, 0], jnp.int32)
    loss = functools.partial(jaxmp.linear_cross_entropy, x, labels=labels)
    return jax.value_and_grad(loss)(params["w"])


def attention():
    x = jnp.asarray(np.sin(np.arange(32.0)).reshape(1, 4, 2, 4), jnp.bfloat16)
    return jaxmp.dot_product_attention(x, x, x, is_causal=True)


PROGRAMS = {
    "train f16": lambda: train("mixed_float16"),
    "accumulation": accumulated,
    "with_policy": lambda: jaxmp.with_policy(loss_fn, "O1")(*arrays((PARAMS, X))),
    "autocast": lambda: jaxmp.autocast(jax.grad(loss_fn))(*arrays((PARAMS, X))),
    "linen": linen,
    "casts": lambda: jaxmp.get_policy("O2").cast_to_compute(arrays(PARAMS)),
    "cast_tree": lambda: jaxmp.cast_tree(arrays(PARAMS), "f16"),
    "all_finite": lambda: jaxmp.all_finite(arrays(GRADS)),
    "select": lambda: jaxmp.select_tree(jnp.array(True), *arrays((PARAMS, GRADS))),
    "unscale": lambda: jaxmp.unscale(arrays(GRADS), jnp.float32(8)),
    "exponent_histogram": lambda: jaxmp.exponent_histogram(arrays(GRADS)),
    "range_report": lambda: jaxmp.range_report(arrays(GRADS)).total.max,
    "suggest_loss_scale": lambda: jaxmp.suggest_loss_scale(arrays(GRADS)),
    "record_ranges": recorded,
    "loss head": head,
    "attention": attention,
}


@functools.cache
def usual(program):
    return jax.tree.map(np.asarray, program())


CASES = {f"{s}-{p}": (SETTINGS[s], PROGRAMS[p]) for s in SETTINGS for p in PROGRAMS}
del CASES["strict promotion-attention"]  # that of `jax.nn` wants promotion
# What the others are made of. Without jit, each operation is compiled alone.
USUAL = [
    case
    for case in CASES
    if case.endswith(("autocast", "with_policy", "casts", "all_finite", "unscale"))
    or case in ("no jit-loss head", "no jit-attention", "strict promotion-loss head")
    or (case.endswith(("train f16", "range_report")) and not case.startswith("no jit"))
]


@pytest.mark.parametrize(("setting", "program"), rest_is_evidence(CASES, *USUAL))
def test_a_setting_of_jax_changes_nothing(program, setting):
    expected = usual(program)
    with setting():
        result = jax.tree.map(np.asarray, program())
    chex.assert_trees_all_equal_shapes_and_dtypes(result, expected)
    chex.assert_trees_all_close(result, expected, rtol=2**-7)
