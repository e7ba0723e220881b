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
from jaxmp._autocast.emit import Emitter
from jaxmp._autocast.passes import MARKERS, REWRITES
from jaxmp._autocast.plan import Planner

W, X = normal(0, 8, 8, scale=0.3), normal(1, 4, 8)


def decisions(fun, *args):
    """Returns name, how and rule of each equation, in the order of the program."""
    found = []
    planner = Planner(np.dtype(jnp.bfloat16), jaxmp.DEFAULT_OPS)

    def listener(step):
        found.append((step.eqn.primitive.name, step.how, step.rule))

    emitter = Emitter(planner, listener=listener)
    jax.make_jaxpr(emitter.wrap(fun))(*args)
    return found


def stored(fun, *args):
    """Returns the dtypes of what is stored in 16 bits for the backward pass too."""
    eqns = traced(autocast(fun), *args)
    barriers = [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]
    return [eqn.outvars[0].aval.dtype for eqn in barriers]


def test_dropout_lets_a_softmax_be_kept():
    mask = X > 0

    def loss(w, drop):
        p = jax.nn.softmax(X @ w)
        return (drop(p) @ w).sum()

    def dropped(p):
        return jnp.where(mask, p / 0.9, 0)

    for drop in (lambda p: p, dropped):
        found = stored(jax.grad(lambda w, d=drop: loss(w, d)), W)
        assert found == [jnp.bfloat16]


def test_the_gradient_of_a_lookup_of_labels_is_a_choice():
    def loss(w):
        logits = jax.nn.log_softmax(X @ w)
        return -jnp.take_along_axis(logits, jnp.array([[1], [0], [7], [3]]), 1).mean()

    grad = jax.grad(loss)
    names = [e.primitive.name for e in traced(autocast(grad), W)]
    assert "scatter-add" not in names
    assert relative_error(jax.jit(autocast(grad))(W), grad(W)) < 1e-2


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


def test_no_trip_adds_up_the_gradient_of_a_weight():
    def loss(w, u, xs):
        trip = lambda h, x: (jnp.tanh(x @ w + h @ u),) * 2  # noqa: E731
        return jnp.square(lax.scan(trip, 0 * xs[0], xs)[1]).mean()

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

    found = [how for name, how, _ in decisions(kept, W) if name == "logistic"]
    assert found == ["float32"]


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
    ("trip", "start"),
    [
        (leaks, (jnp.zeros((4, 8)), jnp.zeros((4, 8)))),
        (interpolates, jnp.zeros((4, 8))),
        (of_a_matrix, jnp.zeros((4, 8, 8))),
    ],
)
def test_a_chain_of_gates_is_as_near_as_the_loop_that_it_could_be(trip, start):
    w, xs = normal(3, 3, 8, 8, scale=0.3), normal(4, 24, 4, 8)

    def scanned(w):
        return lax.scan(lambda state, x: (trip(w, state, x), None), start, xs)[0]

    def chained(w):
        return functools.reduce(functools.partial(trip, w), xs, start)

    def errors(fun):
        def loss(w):
            return sum(jnp.square(h @ w[0]).mean() for h in jax.tree.leaves(fun(w)))

        exact, *found = at_once(
            jax.grad(loss), autocast(jax.grad(loss)), jax.grad(autocast(loss))
        )(w)
        return [relative_error(one, exact) for one in found]

    assert max(errors(chained)) <= 1.1 * max(errors(scanned))


def normed(scale, bias, x):
    h = jax.nn.standardize(x @ W) * scale + bias
    return ((jax.nn.silu(h) @ W) * X).sum()


def test_what_products_send_back_to_a_norm_is_rounded_once_and_copies_are_not():
    def of_a_mean(scale, bias, x):
        return jnp.mean(jax.nn.silu(jax.nn.standardize(x @ W) * scale + bias) @ W)

    args = 1 + W[0], W[1], X
    found, of_copies = (
        len(stored(jax.grad(fun, (0, 1, 2)), *args)) for fun in (normed, of_a_mean)
    )
    assert found == of_copies + 1


def test_a_softmax_that_is_kept_sends_back_nothing_to_all_scores_alike():
    # What the product sends back has 16 bits, so that its rounding plays no part.
    values = 64 + 4 * jnp.round(8 * W)

    def loss(q):
        return (jax.nn.softmax(q @ W) @ values).sum()

    found, exact = (jax.jit(f)(X) for f in (autocast(jax.grad(loss)), jax.grad(loss)))
    assert relative_error(found, exact) < 2e-2


def test_a_sum_that_several_read_is_stored_as_it_was_rounded():
    def fun(x):
        h = x @ W
        h = h + jax.nn.standardize(h)
        return jax.nn.standardize(h) @ W + jnp.tanh(h) @ W

    eqns = traced(autocast(fun), X)
    assert "optimization_barrier" in [eqn.primitive.name for eqn in eqns]


def test_a_loop_is_given_rounded_weights():
    def loss(w):
        return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), X, length=3)[0].sum()

    eqns = traced(autocast(jax.grad(loss)), W)
    loops = [eqn for eqn in eqns if eqn.primitive.name == "scan"]
    assert {loop.invars[0].aval.dtype for loop in loops} == {np.dtype(jnp.bfloat16)}


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
        def trip(state):
            x, n, _ = state
            change = 0.3 * (matrix @ x - b)
            return x - change, n + 1, abs(change).max()

        return lax.while_loop(
            lambda state: (state[2] > 1e-5) & (state[1] < 999),
            trip,
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
            step, trips = state
            return (loss(w - step * slope) > before) & (trips < 60)

        return lax.while_loop(goes_on, lambda s: (s[0] / 2, s[1] + 1), (1e-3, 0))

    def trips(many):
        return lax.map(lambda w: searched(w)[1], many)

    # Each step gains less than rounding, and all are in vain if `before` is below.
    many = [W]
    for _ in range(8):
        many.append(many[-1] - 0.5 * jax.grad(loss)(many[-1]))
    expected, found = at_once(trips, autocast(trips))(jnp.stack(many))
    np.testing.assert_array_equal(found, expected)


def test_what_was_chosen_is_found_where_it_was_chosen_from():
    def loss(w, x):
        h = jnp.sin(3 * x @ w)
        chosen = jnp.where(h >= lax.top_k(h, 3)[0][:, -1:], h, 0)
        return jnp.square(chosen @ w).sum()

    found, exact = (
        jax.jit(f)(W, X) for f in (jax.grad(autocast(loss)), jax.grad(loss))
    )
    assert relative_error(found, exact) < 0.1


def test_what_a_scan_stacks_for_the_backward_pass_is_bfloat16():
    def loss(w):
        def trip(c, x):
            return c + jax.nn.sigmoid(x @ w) * jnp.tanh(c @ w), None

        return jnp.square(lax.scan(trip, X, normal(3, 4, *X.shape))[0]).mean()

    forward, _ = [
        e for e in traced(autocast(jax.grad(loss)), W) if e.primitive.name == "scan"
    ]
    carried, *stacked = [var.aval.dtype for var in forward.outvars]
    assert carried == jnp.float32
    assert {*stacked} == {jnp.dtype(jnp.bfloat16)}


def test_a_weight_is_sent_in_16_bits():
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    spec = jax.sharding.PartitionSpec("data")

    def fun(w, x):
        return x @ lax.all_gather(w, "data", tiled=True)

    cast = jax.shard_map(
        autocast(fun), mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False
    )
    eqns = traced(cast, W, X)
    (gathered,) = [e.outvars[0].aval for e in eqns if e.primitive.name == "all_gather"]
    assert gathered.dtype == jnp.bfloat16


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
