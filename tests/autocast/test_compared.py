"""Loops that take a step by comparing numbers compare numbers of one kind."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import product_dtypes, relative_error
from conftest import at_once, crossed, in_both_orders, normal

pytestmark = pytest.mark.filterwarnings("ignore:Of the FLOPs:UserWarning")

DTYPES = "bfloat16", "float16"
X = normal(0, 16, 8)
Y = jnp.tanh(X @ normal(1, 8, 4))
PARAMS = {"a": normal(2, 8, 8, scale=0.3), "b": normal(3, 8, 4, scale=0.2)}


def loss_fn(p):
    """In small units, so that the first steps of a search gain little."""
    return 1e-4 * jnp.mean((jnp.tanh(X @ p["a"]) @ p["b"] - Y) ** 2)


def moved(p, t, d):
    return jax.tree.map(lambda x, y: x - t * y, p, d)


def searched(tx, loss_fn=loss_fn):
    """The parameters after some steps of an optimizer that searches along a line."""

    def run(p):
        def step(carry, _):
            p, state = carry
            loss, g = jax.value_and_grad(loss_fn)(p)
            options = {"value": loss, "grad": g, "value_fn": loss_fn}
            updates, state = tx.update(g, state, p, **options)
            return (optax.apply_updates(p, updates), state), loss

        return lax.scan(step, (p, tx.init(p)), length=6)[0][0]

    return run


BACKTRACKING = optax.chain(
    optax.sgd(1e4), optax.scale_by_backtracking_linesearch(max_backtracking_steps=9)
)
SEARCHES = {
    "lbfgs": searched(optax.lbfgs()),
    "lbfgs of a jitted loss": searched(optax.lbfgs(), jax.jit(loss_fn)),
    "backtracking": searched(BACKTRACKING),
}


def armijo(p):
    """Halves a step until the loss falls, in a jitted function of its own."""

    @jax.jit
    def search(p, loss, g):
        slope = sum(jnp.vdot(x, x) for x in jax.tree.leaves(g))

        def goes_on(state):
            t, iterations = state
            rises = loss_fn(moved(p, t, g)) > loss - 1e-4 * t * slope
            return rises & (iterations < 60)

        start = jnp.float32(1e6), 0
        return lax.while_loop(goes_on, lambda s: (s[0] / 2, s[1] + 1), start)

    iterations = []
    for _ in range(3):
        t, count = search(p, *jax.value_and_grad(loss_fn)(p))
        p = moved(p, t, jax.grad(loss_fn)(p))
        iterations.append(count)
    return jnp.stack(iterations)


def trust_region(p):
    """Accepts a step that gains a tenth of what was promised, in a loop of a count."""

    def body(_, state):
        p, loss, radius, taken = state
        g = jax.grad(loss_fn)(p)
        norm = optax.tree.norm(g)
        new = moved(p, radius / norm, g)
        new_loss = loss_fn(new)
        gain = (loss - new_loss) / (radius * norm)
        p = jax.tree.map(lambda x, y: jnp.where(gain > 0.1, x, y), new, p)
        loss = jnp.where(gain > 0.1, new_loss, loss)
        radius = jnp.where(gain > 0.5, 2.0, jnp.where(gain < 0.25, 0.5, 1.0)) * radius
        return p, loss, radius, taken + (gain > 0.1)

    return lax.fori_loop(0, 20, body, (p, loss_fn(p), jnp.float32(0.5), 0))[3]


def sampled(p):
    """Metropolis' algorithm: the density of the first state is computed before."""

    def density(z):
        return -20 * jnp.sum((jnp.tanh(z @ p["a"]) @ p["b"]) ** 2) - z @ z / 2

    def body(state, key):
        z, before = state
        draw, accept = jax.random.split(key)
        new = z + 0.3 * jax.random.normal(draw, z.shape)
        after = density(new)
        taken = jnp.log(jax.random.uniform(accept)) < after - before
        return (jnp.where(taken, new, z), jnp.where(taken, after, before)), taken

    def chain(z):
        keys = jax.random.split(jax.random.key(0), 40)
        return lax.scan(body, (z, density(z)), keys)[1].sum()

    return jax.vmap(chain)(X[:2])


@pytest.mark.keeps_float32
@crossed("run dtype", SEARCHES, DTYPES)
def test_searches_of_optax_move_as_in_float32(run, dtype):
    expected, found = at_once(run, jaxmp.autocast(run, dtype))(PARAMS)
    expected, found = loss_fn(expected), loss_fn(found)
    assert expected < 0.5 * loss_fn(PARAMS)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.keeps_float32
@crossed("run dtype", [armijo, trust_region, sampled], DTYPES)
def test_as_many_steps_are_taken_as_in_float32(run, dtype):
    expected, found = at_once(run, jaxmp.autocast(run, dtype))(PARAMS)
    np.testing.assert_array_equal(found, expected)


W, Z = normal(4, 4, 4, scale=0.5), normal(5, 4)


def solved(w, z, each=lambda body: body):
    """Heun's steps, each as large as its error allows; always as many iterations."""

    def body(state, _):
        t, z, h = state
        h = jnp.minimum(h, 2.0 - t)
        a = jnp.tanh(w @ z)
        b = jnp.tanh(w @ (z + h * a))
        error = jnp.sqrt(jnp.mean((h * (b - a) / 2) ** 2)) / 1e-4
        z = jnp.where(error < 1, z + h * (a + b) / 2, z)
        t = jnp.where(error < 1, t + h, t)
        return (t, z, h * jnp.clip(0.9 * (error + 1e-10) ** -0.5, 0.2, 5.0)), None

    start = jnp.float32(0), z, jnp.float32(0.1)
    return lax.scan(each(body), start, length=80)[0][1]


def checkpointed(w, z):
    return solved(w, z, jax.checkpoint)


def checkpointed_as_a_whole(w, z):
    return jax.checkpoint(solved)(w, z)


def by_equinox(w, z):
    """Whose loops compute again, for the backward pass, what they do not keep."""
    eqxi = pytest.importorskip("equinox.internal", reason="Equinox is not installed")

    def body(state):
        t, z, h = state
        h = jnp.minimum(h, 2.0 - t)
        a = jnp.tanh(w @ z)
        b = jnp.tanh(w @ (z + h * a))
        error = jnp.sqrt(jnp.mean((h * (b - a) / 2) ** 2)) / 1e-4
        z = jnp.where(error < 1, z + h * (a + b) / 2, z)
        t = jnp.where(error < 1, t + h, t)
        return t, z, h * jnp.clip(0.9 * (error + 1e-10) ** -0.5, 0.2, 5.0)

    start = jnp.float32(0), z, jnp.float32(0.1)
    options = {"max_steps": 256, "kind": "checkpointed"}
    return eqxi.while_loop(lambda s: s[0] < 2.0 - 1e-6, body, start, **options)[1]


@pytest.mark.keeps_float32
@crossed(
    "solve dtype", [solved, checkpointed, checkpointed_as_a_whole, by_equinox], DTYPES
)
def test_the_gradient_belongs_to_the_steps_of_the_forward_pass(solve, dtype):
    def loss(w, z):
        return jnp.sum((solve(w, z) - 1) ** 2)

    exact, *found = at_once(*in_both_orders(loss, dtype, grad=jax.grad))(W, Z)
    for cast in found:
        assert relative_error(cast, exact) < 4 * float(jnp.finfo(dtype).eps)


V, H = normal(6, 8, 8, scale=0.3), normal(7, 4, 8)


def clipped_training(w, x):
    """Whether a gradient is clipped is no step that is taken or left."""
    tx = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))

    def step(state, _):
        w, opt_state = state
        g = jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        updates, opt_state = tx.update(g, opt_state, w)
        return (optax.apply_updates(w, updates), opt_state), None

    return lax.scan(step, (w, tx.init(w)), length=3)[0][0]


def skipped_training(w, x):
    """Nor is whether all is finite."""

    def step(w, _):
        loss, g = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return jnp.where(jnp.isfinite(loss), w - 0.1 * g, w), None

    return lax.scan(step, w, length=3)[0]


def best_of_all(w, x):
    """What only the end reads decides no step."""

    def step(state, _):
        w, best, least = state
        loss, g = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        best = jnp.where(loss < least, w, best)
        return (w - 0.1 * g, best, jnp.minimum(loss, least)), None

    return lax.scan(step, (w, w, jnp.float32(jnp.inf)), length=3)[0][1]


def residual_layers(w, x):
    """A relu chooses for each entry."""

    @jax.checkpoint
    def layer(x, _):
        return jnp.where(x > 0, x + x @ w, x), None

    def loss(w):
        return jnp.mean(lax.scan(layer, x, length=3)[0] ** 2)

    return jax.grad(loss)(w)


def masked_layers(w, x):
    """A mask of the batch was compared, and not with what matmuls return."""

    def layer(x, length):
        return jnp.where(jnp.arange(4)[:, None] < length, jnp.tanh(x @ w), x), None

    return lax.scan(layer, x, jnp.arange(4))[0]


@pytest.mark.parametrize(
    "fun",
    [clipped_training, skipped_training, best_of_all, residual_layers, masked_layers],
)
def test_loops_that_decide_no_step_run_in_16_bits(fun):
    found = product_dtypes(jaxmp.autocast(fun, "bfloat16"), V, H)
    assert found
    assert {dtype for dtypes in found for dtype in dtypes} == {"bfloat16"}


@pytest.mark.parametrize("norm", [jnp.linalg.norm, lambda x: jnp.abs(x).max()])
def test_what_a_norm_is_made_of_may_be_rounded_before_the_loop(norm):
    def fun(w, x):
        x = jnp.tanh(x @ w)

        def goes_on(state):
            return norm(state[0] - state[1]) > 1e-5

        def body(state):
            return jnp.tanh(0.3 * state[0] @ w + x), state[0]

        return lax.while_loop(goes_on, body, (x, x + 1))[0] @ w

    found = product_dtypes(jaxmp.autocast(fun, "bfloat16"), V, H)
    assert found == [{"bfloat16"}, {"float32"}, {"bfloat16"}]


def test_a_warning_says_that_most_is_float32_and_the_audit_names_the_lines():
    with pytest.warns(UserWarning, match="stay in float32") as caught:
        report = jaxmp.audit(jaxmp.autocast(armijo, "bfloat16"))(PARAMS)
    assert "`jaxmp.audit` names the lines" in str(caught[0].message)
    assert {x.reason for x in report.kept} == {"guard: data-dependent loop"}
    assert all("test_compared.py" in str(x) for x in report.kept)


def test_no_warning_where_the_loop_is_the_smaller_part_or_kept_by_the_user():
    def small(w, x):
        return lax.while_loop(lambda z: z.max() > 1, lambda z: z @ w, x[:1])[0] + x @ w

    def beside_layers(w, x):  # which are eight
        both = jnp.concatenate([x, x])
        found = lax.while_loop(lambda z: z.max() > 1, lambda z: z @ w, both)
        return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=8)[0] + found[0]

    def kept(p):
        return jaxmp.float32_region(armijo)(p)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fun in (small, beside_layers):
            jax.eval_shape(jaxmp.autocast(fun, "bfloat16"), V, H)
        jax.eval_shape(jaxmp.autocast(kept, "bfloat16"), PARAMS)
