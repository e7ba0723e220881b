"""The contestants of the benchmarks take part, and keep the form of their state."""

import jax

from benchmarks.counting.steps import (
    CONTESTANTS,
    STATES,
    UNCHECKED,
    contestants,
)
from benchmarks.networks.basic import TINY


def form(tree):
    """Returns the structure, shapes and dtypes of a pytree."""
    leaves = [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]
    return jax.tree.structure(tree), leaves


def test_a_step_keeps_the_form_of_its_state():
    network, left_out, taking_part = TINY["mlp"], [], []
    options = {"dtype": "float16", "accum_steps": 4}
    masters = [name for name in CONTESTANTS if name not in STATES]
    for step in contestants(network, masters, **options, report=left_out.append):
        state = jax.eval_shape(step.init)
        after, loss = jax.eval_shape(step.step, state, network.shapes())
        assert form(after) == form(state), step.name
        assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}
        assert (loss.shape, loss.dtype) == ((), "float32")
        taking_part.append(step.name)
    assert len(taking_part) + len(left_out) == len(masters)
    # A library that need not be there, and a step of one batch.
    assert set(masters) - set(taking_part) <= {"mpx", UNCHECKED}
