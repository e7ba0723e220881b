"""What a logger takes of an optimizer state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp


def run(tx, grads):
    """Returns what is logged after each of some steps, of a jitted step."""

    @jax.jit
    def step(opt_state, grad, i):
        _, opt_state = tx.update(jnp.full(4, grad), opt_state, jnp.ones(4))
        return opt_state, jaxmp.scalars(opt_state, i, prefix="")

    opt_state, logged = tx.init(jnp.ones(4)), []
    for i, grad in enumerate(grads, 1):
        opt_state, found = step(opt_state, grad, i)
        logged.append({name: x.item() for name, x in found.items()})
    return opt_state, logged


def test_every_step_is_told_with_its_counters():
    tx = jaxmp.dynamic_loss_scale(optax.adam(0.1), init_scale=8.0, growth_interval=2)
    _, logged = run(tx, [1.0, jnp.inf, 1.0, 1.0])
    assert [x["loss_scale"] for x in logged] == [8, 4, 4, 8]
    assert [x["skipped"] for x in logged] == [0, 1, 1, 1]
    assert [x["skipped_share"] for x in logged] == [0, 0.5, np.float32(1 / 3), 0.25]
    assert [x["last_finite"] for x in logged] == [1, 0, 1, 1]
    assert [x["bad_steps"] for x in logged] == [0, 1, 0, 0]
    assert [x["good_steps"] for x in logged] == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("prefix", "name"),
    [("g", "g/skipped"), ("a/b2", "a/b2/skipped"), ("", "skipped")]
    + [(f"g{x}", f"g{x}skipped") for x in "/._- :"],
)
def test_a_prefix_and_a_name_have_something_between_them(prefix, name):
    tx = jaxmp.loss_scaling(optax.sgd(0.1), "mixed_float16")
    assert name in jaxmp.scalars(tx.init(jnp.ones(2)), prefix=prefix)


def test_recorded_ranges_are_told_the_worst_first():
    tx = optax.chain(
        jaxmp.record_ranges(every=1),
        optax.scale(0.0),
        jaxmp.record_ranges(every=1),
        jaxmp.loss_scaling(optax.sgd(0.1), "float16"),
    )
    opt_state, (_, last) = run(tx, [1.0, 3.0])
    assert (last["max"], last["zero_share"], last["nonfinite_share"]) == (3, 1, 0)
    assert jaxmp.scalars(opt_state).keys() >= {"mixed_precision/max"}


def test_nothing_is_fetched_and_nnx_is_unwrapped():
    net = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    tx = jaxmp.loss_scaling(optax.sgd(0.1), "float16")
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)
    logged = jaxmp.scalars(optimizer)
    assert all(isinstance(x, jax.Array) for x in logged.values())
    assert logged["mixed_precision/loss_scale"] == 2.0**15
    assert "mixed_precision/skipped_share" not in logged


def test_a_state_without_a_scale_is_refused():
    with pytest.raises(ValueError, match="must hold a loss scale"):
        jaxmp.scalars(optax.sgd(0.1).init(jnp.ones(2)))


def test_nothing_is_sent_to_the_device_in_hiding():
    tx = optax.chain(
        jaxmp.record_ranges(every=1), jaxmp.loss_scaling(optax.adam(0.1), "float16")
    )
    opt_state, _ = run(tx, [1.0, jnp.inf])
    steps = jnp.int32(2)
    expected = jaxmp.scalars(opt_state, steps)
    with jax.transfer_guard("disallow"):
        logged = jaxmp.scalars(opt_state, steps)
    assert logged == expected
    assert logged["mixed_precision/skipped_share"] == 0.5
