"""Weight gradients of recurrent layers: one product after the loop, not one each."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jaxmp
from benchmarks.counting.measure import relative_error, traced
from conftest import assert_near, at_once, crossed, normal
from jaxmp._devices.varying import vary
from jaxmp._jaxprs import jaxpr as _jaxpr

F16, BF16 = np.dtype(jnp.float16), np.dtype(jnp.bfloat16)
SINGLE = np.dtype(np.float32)
# Weights of 16 by 16, batches of 4, and 6 steps.
W, U = normal(0, 16, 16, scale=1 / 6), normal(1, 16, 16, scale=1 / 6)
XS = normal(2, 6, 4, 16)
ZEROS = jnp.zeros((4, 16))


def simple(w, u, xs, **options):
    """Elman, 1990."""

    def step(h, x):
        h = jnp.tanh(x @ w + h @ u)
        return h, h

    return lax.scan(step, 0 * xs.sum(axis=0), xs, **options)[1]


def reset(w, u, xs):
    """A gated unit, of whose weights two gates are made in each iteration."""

    def step(h, x):
        both = jnp.concatenate([w, w.T], axis=1)
        r, z = jnp.split(jax.nn.sigmoid(x @ both), 2, axis=-1)
        h = (1 - z) * jnp.tanh(x @ u + (r * h) @ u) + z * h
        return h, h

    return lax.scan(step, ZEROS, xs)[1]


def parts(w, u, xs):
    """A layer whose weights for its input and its state are rows of one array."""

    def step(h, x):
        h = jnp.tanh(x[:, :8] @ w[:8] + h[:, :8] @ w[8:])
        return h, h

    return lax.scan(step, ZEROS, xs)[1]


def stacked(w, u, xs):
    """Two layers with weights of their own, one after the other."""

    def layer(xs, weights):
        return simple(*weights, xs), None

    return lax.scan(layer, xs, (jnp.stack([w, u]), jnp.stack([u, w])))[0]


def given_states(w, u, xs):
    """A layer that only its last state leaves."""
    return lax.scan(lambda h, x: (jnp.tanh(x + h @ u @ w), None), 0 * xs[0], xs)[0]


LAYERS = {
    "simple": simple,
    "reversed": functools.partial(simple, reverse=True),
    "unrolled": functools.partial(simple, unroll=2),
    "reset": reset,
    "parts": parts,
    "stacked": stacked,
    "given states": given_states,
    "vmap": jax.vmap(simple, (0, 0, None)),
}


def gradient_of(name):
    def loss(weights, xs):
        if name == "vmap":
            weights = jax.tree.map(lambda w: jnp.stack([w, -w]), weights)
        return (LAYERS[name](*weights, xs) ** 2).mean()

    return jax.grad(loss)


def loops(fun, *args):
    return [eqn for eqn in traced(fun, *args) if eqn.primitive.name == "scan"]


def sums(fun, *args):
    """Returns how many float32 arrays of the size of weights the scans carry."""
    found = 0
    for eqn in loops(fun, *args):
        consts, carries = _jaxpr.scan_counts(eqn)
        carried = [v.aval for v in eqn.invars[consts:][:carries]]
        found += sum(x.shape[-2:] == (16, 16) and x.dtype == SINGLE for x in carried)
    return found


def products_of_all_iterations(fun, *args):
    """Returns the dtypes of each product that contracts over iterations and batches."""
    return [
        (*(v.aval.dtype for v in eqn.invars), eqn.outvars[0].aval.dtype)
        for eqn in traced(fun, *args)
        if eqn.primitive.name == "dot_general"
        and len(eqn.params["dimension_numbers"][0][0]) == 2
    ]


@pytest.mark.needs_no_scale
@crossed("name dtype", [*LAYERS], [F16, BF16])
def test_a_backward_scan_carries_no_weight_gradients(name, dtype):
    grad = gradient_of(name)
    cast = jaxmp.autocast(grad, dtype)
    assert sums(cast, (W, U), XS) == 0
    found = products_of_all_iterations(cast, (W, U), XS)
    assert set(found) == {(dtype, dtype, SINGLE)}
    assert len(found) == 3 if name == "reset" else 2
    assert_near(*at_once(cast, grad)((W, U), XS), dtype, 2)


@pytest.mark.needs_no_scale
def test_a_sum_that_has_begun_goes_on():
    def loss(w, xs):  # a layer in each iteration of another loop, which adds up too
        def outer(total, xs):
            return total + (simple(w, U, xs) ** 2).mean(), None

        return lax.scan(outer, 0.0, jnp.stack([xs, -xs, xs]))[0]

    cast = jaxmp.autocast(jax.grad(loss), F16)
    assert products_of_all_iterations(cast, W, XS)
    found = jax.jit(cast)(W, XS)
    assert relative_error(found, jax.jit(jax.grad(loss))(W, XS)) < 2e-3


# What stays in the iterations.


def accumulated(weights, xs):
    """Micro-batches, whose gradients the user adds up."""

    def loss(weights, x):
        return (jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]) ** 2).mean()

    def step(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, x)), None

    return lax.scan(step, jax.tree.map(jnp.zeros_like, weights), xs)[0]


def independent(weights, xs):
    """Chunks of a loss, of which only one at a time is to be in memory."""

    def loss(weights):
        def step(total, x):
            return total + (jnp.tanh(x @ weights[0]) ** 2).mean(), None

        return lax.scan(step, 0.0, xs)[0]

    return jax.grad(loss)(weights)


def counted(weights, xs):
    """Chunks of a loss that is divided by how many of its terms count."""

    def loss(weights):
        def step(state, x):
            total, count = state
            counts = x[:, 0] > 0
            terms = (jnp.tanh(x @ weights[0]) ** 2).mean(axis=1) * counts
            return (total + terms.sum(), count + counts.sum()), None

        total, count = lax.scan(step, (0.0, 0), xs)[0]
        return total / count

    return jax.grad(loss)(weights)


def blocks(weights, xs):
    """Attention as in FlashAttention, whose backward pass counts the blocks of keys."""
    q, (block, _) = weights[0], xs.shape[1:]

    def scores(q, k, i):
        seen = jnp.arange(len(q))[:, None] >= i * block + jnp.arange(block)
        return jax.nn.sigmoid(jnp.where(seen, q @ k.T, -1e3))

    @jax.custom_vjp
    def attend(q):
        return sum(scores(q, k, i) @ k for i, k in enumerate(xs))

    def backward(q, g):
        def step(state, k):
            dq, i = state
            p = scores(q, k, i)
            return (dq + (g @ k.T * p * (1 - p)) @ k, i + 1), None

        return (lax.scan(step, (jnp.zeros_like(q), 0), xs)[0][0],)

    attend.defvjp(lambda q: (attend(q), q), backward)
    return jax.grad(lambda q: (attend(q) ** 2).mean())(q)


def added_too(weights, xs):
    """A weight that is multiplied, and added to the state as it is."""

    def loss(w):
        def step(h, x):
            return h + w + jnp.tanh(h @ w), None

        return (lax.scan(step, weights[1], xs)[0] ** 2).mean()

    return jax.grad(loss)(weights[0])


def no_iterations(weights, xs):
    return gradient_of("simple")(weights, xs[:0])


def large_batch(weights, xs):
    return gradient_of("given states")(weights, jnp.tile(xs, (1, 64, 1)))


def in_full(weights, xs):
    with jax.default_matmul_precision("highest"):
        return gradient_of("simple")(weights, xs)


def in_a_path(weights, xs):
    with jax.named_scope("head"):
        return gradient_of("simple")(weights, xs)


def forward(weights, xs):
    """A sum of products that the user has written."""
    zeros = jnp.zeros((16, 16))
    return lax.scan(lambda sum, x: (sum + x.T @ x, None), zeros, xs)[0]


def read_in_the_iteration(weights, xs):
    """The sum of products is read by each iteration, backward."""

    def step(state, x):
        h, fast = state
        h = jnp.tanh(x + h @ fast)
        return (h, 0.9 * fast + h.T @ h / 8), None

    def loss(w):
        return (lax.scan(step, (ZEROS, w), xs)[0][0] ** 2).mean()

    return jax.grad(loss)(weights[0])


def inside(weights, xs):
    return simple(*weights, xs)


STAY = [accumulated, independent, counted, blocks, added_too, no_iterations]
STAY += [large_batch, in_full, in_a_path, forward, read_in_the_iteration, inside]


@pytest.mark.needs_no_scale
@pytest.mark.keeps_float32
@pytest.mark.parametrize("fun", STAY)
def test_what_is_no_recurrent_layer_or_stays_float32_is_added_up_in_its_iterations(fun):
    paths = ("head",) if fun is in_a_path else ()
    cast = jaxmp.autocast(fun, F16, float32_paths=paths)
    assert not products_of_all_iterations(cast, (W, U), XS)
    for found, expected in zip(
        *map(jax.tree.leaves, at_once(cast, fun)((W, U), XS)), strict=True
    ):  # zeros, if there are no iterations
        assert jnp.linalg.norm(found - expected) <= 0.03 * jnp.linalg.norm(expected)


# Where it is, and where it is asked for.

CELL = nn.RNN(nn.GRUCell(16), name="layer")


def rnn(params, xs):
    return (CELL.apply(params, xs) ** 2).mean()


@pytest.fixture(scope="module")
def cell():
    xs = jnp.swapaxes(XS, 0, 1)
    return jax.jit(CELL.init)(jax.random.key(0), xs), xs


@pytest.mark.needs_no_scale
def test_a_product_of_all_iterations_has_the_scopes_of_its_layer(cell):
    ops = jaxmp.DEFAULT_OPS.with_rounded_matmuls()
    cast = jaxmp.autocast(jax.grad(rnn), F16, ops=ops)
    places = [
        _jaxpr.scope_names(eqn)
        for eqn in traced(cast, *cell)
        if eqn.primitive.name == "dot_general" and eqn.invars[0].aval.ndim == 3
    ]
    assert {names[-2:] for names in places} == {
        ("cell", name) for name in ("ir", "iz", "in", "hr", "hz", "hn")
    }
    assert jaxmp.audit(cast)(*cell).fraction_16bit == 1


def test_what_a_path_keeps_in_float32_adds_up_in_the_iterations(cell):
    path = "layer/cell.scan_fn/cell/hn"
    cast = jaxmp.autocast(jax.grad(rnn), BF16, float32_paths=path)
    assert sums(cast, *cell) == 1
    assert len(products_of_all_iterations(cast, *cell)) == 5


@pytest.mark.needs_no_scale
@pytest.mark.parametrize("check_vma", [True, False])
def test_the_gradient_of_a_layer_may_be_that_of_shards(check_vma):
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    grad = jaxmp.autocast(gradient_of("simple"), F16)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(None, "data")),
        out_specs=PartitionSpec("data"),
        check_vma=check_vma,
    )
    def sharded(weights, xs):
        weights = vary(weights, ("data",))  # so that nothing is summed over it
        grads = grad(weights, jnp.concatenate([xs, xs], axis=1))
        return jax.tree.map(lambda g: g[None], grads)

    found = jax.jit(sharded)((W, U), XS)
    halves = [jnp.concatenate([x, x], axis=1) for x in jnp.split(XS, 2, axis=1)]
    expected = [jax.jit(gradient_of("simple"))((W, U), x) for x in halves]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *expected)
    assert relative_error(found, expected) < 2e-3
    assert products_of_all_iterations(sharded, (W, U), XS)


def test_products_of_all_iterations_may_be_float8():
    ops = jaxmp.DEFAULT_OPS.with_fp8(min_size=16)
    grad = gradient_of("simple")
    cast = jaxmp.autocast(grad, "mixed_fp8", ops=ops)
    xs = normal(2, 6, 16, 16)  # float8 takes multiples of 16
    assert set(jaxmp.audit(cast)((W, U), xs).flops) == {"float8_e4m3fn"}
    assert sums(cast, (W, U), xs) == 0
    found = jax.jit(cast)((W, U), xs)
    assert relative_error(found, jax.jit(grad)((W, U), xs)) < 0.1
