"""The parts of the engine: each is there for something that fails without it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import relative_error, traced
from conftest import at_once, normal
from jaxmp import autocast
from jaxmp._autocast.passes import MARKERS, REWRITES

W, X = normal(0, 8, 8, scale=0.3), normal(1, 4, 8)


def test_scores_are_computed_in_the_order_in_which_they_are_read():
    def attention(q, k):
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k)
        return jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores), k)

    q, k = normal(2, 2, 6, 2, 3, 8), normal(3, 2, 9, 2, 8)
    eqns = traced(autocast(attention), q, k)
    shapes = [
        e.outvars[0].aval.shape for e in eqns if e.primitive.name == "dot_general"
    ]
    assert shapes[0][-1] == 9
    found = jax.jit(autocast(attention))(q, k)
    assert relative_error(found, attention(q, k)) < 1e-2


def test_no_iteration_adds_up_the_gradient_of_a_weight():
    def loss(w, u, xs):
        body = lambda h, x: (jnp.tanh(x @ w + h @ u),) * 2  # noqa: E731
        return jnp.square(lax.scan(body, 0 * xs[0], xs)[1]).mean()

    w, u = normal(2, 16, 16, scale=1 / 6), normal(3, 16, 16, scale=1 / 6)
    xs, grad = normal(4, 6, 4, 16), jax.grad(loss, (0, 1))
    eqns = traced(autocast(grad), w, u, xs)
    loops = [e for e in eqns if e.primitive.name == "scan"]
    assert len(loops) == 2
    assert (16, 16) not in [x.aval.shape for e in loops for x in e.outvars]
    found = jax.jit(autocast(grad))(w, u, xs)
    assert relative_error(found, grad(w, u, xs)) < 3e-2


def test_a_variance_by_a_window_is_near_that_of_float32():
    window = jnp.ones((1, 1, 3, 3)) / 9

    def variance(x):
        mean = lambda x: lax.conv(x, window, (1, 1), "VALID")  # noqa: E731
        return mean(x * x) - mean(x) ** 2

    x = 30 + normal(7, 1, 1, 9, 9)
    found, exact = jax.jit(autocast(variance))(x), variance(x)
    assert relative_error(found, exact) < 1e-4


def test_gates_of_which_many_multiply_one_another_have_all_digits():
    def kept(w):
        gates = jax.nn.sigmoid(7 + X @ w)
        h = X
        for _ in range(64):
            h = (gates * h) + 0 * h
        return jnp.tanh(h) @ w

    eqns = [e for e in traced(autocast(kept), W) if e.primitive.name == "logistic"]
    assert [eqn.outvars[0].aval.dtype for eqn in eqns] == ["float32"]


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


@pytest.mark.filterwarnings("ignore:Of the FLOPs:UserWarning")
def test_a_loop_that_ends_when_an_error_is_small_ends_as_in_float32():
    matrix = X.T @ X / 8 + jnp.eye(8)

    def solve(b):
        def body(state):
            x, n, _ = state
            change = 0.3 * (matrix @ x - b)
            return x - change, n + 1, abs(change).max()

        return lax.while_loop(
            lambda state: (state[2] > 1e-5) & (state[1] < 999),
            body,
            (b, 0, jnp.float32(1)),
        )[1]

    expected = jax.jit(solve)(W[0])
    assert expected < 999
    assert jax.jit(autocast(solve))(W[0]) <= expected + 1


@pytest.mark.filterwarnings("ignore:Of the FLOPs:UserWarning")
def test_a_search_that_compares_with_what_was_computed_before_moves():
    def loss(w):
        return jnp.square(jnp.tanh(X @ w) @ W).mean()

    def searched(w):
        before, slope = loss(w), jax.grad(loss)(w)

        def goes_on(state):
            step, iterations = state
            return (loss(w - step * slope) > before) & (iterations < 60)

        return lax.while_loop(goes_on, lambda s: (s[0] / 2, s[1] + 1), (1e-3, 0))

    def iterations(many):
        return lax.map(lambda w: searched(w)[1], many)

    # Each step gains less than rounding, and all are in vain if `before` is below.
    many = [W]
    for _ in range(8):
        many.append(many[-1] - 0.5 * jax.grad(loss)(many[-1]))
    expected, found = at_once(iterations, autocast(iterations))(jnp.stack(many))
    np.testing.assert_array_equal(found, expected)


# Each pass in the tables has its test here, and the test needs the pass.


@pytest.mark.parametrize("name", [*REWRITES, *MARKERS])
@pytest.mark.filterwarnings("ignore:Of the FLOPs:UserWarning")
def test_a_test_fails_without_each_pass(name, monkeypatch):
    table = REWRITES if name in REWRITES else MARKERS
    test = globals()[table[name].test]
    test()
    monkeypatch.delitem(table, name)
    with pytest.raises(AssertionError):
        test()
