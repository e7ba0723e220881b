"""The parts of the engine: each is there for something that fails without it."""

import functools

import jax
import jax.numpy as jnp
import pytest
import test_compared
import test_endings
import test_hoisting
import test_relus
import test_scores
import test_variance
from jax import lax

import jaxmp
from benchmarks.counting.measure import relative_error, traced
from conftest import at_once, normal
from jaxmp import autocast
from jaxmp._autocast.passes import MARKERS, REWRITES

W, X = normal(0, 8, 8, scale=0.3), normal(1, 4, 8)


def leaks(w, state, x):
    """A leak into a second leak, as of a neuron."""
    current, potential = state
    current = jax.nn.sigmoid(5 + x @ w[0]) * current + 0.1 * (x @ w[1])
    return current, jax.nn.sigmoid(6 + x @ w[2]) * potential + 0.1 * current


@jax.checkpoint
def interpolates(w, h, x):
    """A gated unit that is recomputed in the backward pass."""
    z = jax.nn.sigmoid(x @ w[0] - 5)
    return (1 - z) * h + z * jnp.tanh(x @ w[1])


def of_a_matrix(w, state, x):
    """Linear attention whose keys decay."""
    decay = jax.nn.sigmoid(6 + x @ w[0])[:, :, None]
    return decay * state + 0.1 * (x @ w[1])[:, :, None] * x[:, None]


@pytest.mark.parametrize(
    ("body", "start"),
    [
        (leaks, (jnp.zeros((4, 8)), jnp.zeros((4, 8)))),
        (interpolates, jnp.zeros((4, 8))),
        (of_a_matrix, jnp.zeros((4, 8, 8))),
    ],
)
def test_a_chain_of_gates_is_as_near_as_the_loop_that_it_could_be(body, start):
    w, xs = normal(3, 3, 8, 8, scale=0.3), normal(4, 24, 4, 8)

    def scanned(w):
        return lax.scan(lambda state, x: (body(w, state, x), None), start, xs)[0]

    def chained(w):
        return functools.reduce(functools.partial(body, w), xs, start)

    def errors(fun):
        def loss(w):
            return sum(jnp.square(h @ w[0]).mean() for h in jax.tree.leaves(fun(w)))

        exact, *found = at_once(
            jax.grad(loss), autocast(jax.grad(loss)), jax.grad(autocast(loss))
        )(w)
        return [relative_error(one, exact) for one in found]

    assert max(errors(chained)) <= 1.1 * max(errors(scanned))


def test_a_loop_over_weights_needs_no_copy_of_them():
    def loss(w):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), X, w)[0].sum()

    def dtypes(fun, w):
        """Those of the weights in the forward loop and in the backward loop."""
        eqns = traced(autocast(jax.grad(fun)), w)
        loops = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
        inputs = [x.aval for loop in loops for x in loop.invars]
        return [x.dtype for x in inputs if x.shape == (3, *W.shape)]

    # An argument is there in float32, and what was computed need not be.
    assert dtypes(loss, jnp.stack([W] * 3)) == ["float32"] * 2
    assert dtypes(lambda w: loss(jnp.stack([w] * 3)), W) == ["bfloat16"] * 2


def test_micro_batches_read_weights_that_were_rounded_once():
    def loss(w, x):
        return jnp.tanh(jnp.tanh(x @ w) @ w).sum()

    grad = jaxmp.value_and_grad(loss, accum_steps=2, batch_argnums=1)
    eqns = traced(autocast(grad), W, X)
    (loop,) = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
    dtypes = [str(x.aval.dtype) for x in loop.invars if x.aval.shape == W.shape]
    assert dtypes == ["bfloat16", "float32"]  # the weight, and the sum of its gradients


# A law of each pass that fails without it.
LAWS = {
    # Without it a step of Gemma moves 1.11 times the bytes: bfloat16, for an H200.
    "scores": lambda: test_scores.test_scores_end_with_the_axis_that_is_read_last(
        "keys last", jax.jit
    ),
    "variance": lambda: test_variance.test_moments_are_near_those_of_float32(
        test_variance.MOMENTS["a window"], "bfloat16"
    ),
    "loops": lambda: test_endings.test_loops_end_after_as_many_iterations(
        test_endings.fixed_point, "bfloat16"
    ),
    # Without it one of an LSTM moves 1.78 times the bytes, of a GRU 1.44 times.
    "hoisting": lambda: test_hoisting.test_a_backward_scan_carries_no_weight_gradients(
        "simple", test_hoisting.BF16
    ),
    # Without it one of ResNet-50 moves 1.02 times the bytes, in 1.2 times the memory.
    "relus": test_relus.test_a_slope_reads_the_result_of_its_relu_and_not_its_argument,
    "compared": lambda: test_compared.test_as_many_steps_are_taken_as_in_float32(
        test_compared.armijo, "bfloat16"
    ),
    "gates": lambda: test_a_chain_of_gates_is_as_near_as_the_loop_that_it_could_be(
        interpolates, jnp.zeros((4, 8))
    ),
}


@pytest.mark.parametrize("name", [*REWRITES, *MARKERS])
@pytest.mark.filterwarnings("ignore:Of the FLOPs:UserWarning")
def test_a_law_fails_without_each_pass(name, monkeypatch):
    LAWS[name]()
    monkeypatch.delitem(REWRITES if name in REWRITES else MARKERS, name)
    with pytest.raises(AssertionError):
        LAWS[name]()
