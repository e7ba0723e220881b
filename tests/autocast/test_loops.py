"""Loops: their weights are rounded once, and passes are told apart inside of them.

What differentiation has done stands on the equation that holds a loop, a call or a
remat, and not on those that are in it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import relative_error, traced
from conftest import assert_gradients_near, assert_near, at_once, both_dtypes, normal
from jaxmp._jaxprs import jaxpr as _jaxpr

F16, BF16 = np.dtype(jnp.float16), np.dtype(jnp.bfloat16)
SINGLE = np.dtype(np.float32)
W, U = jax.random.normal(jax.random.key(0), (2, 8, 8)) / 4
XS = jax.random.normal(jax.random.key(1), (5, 4, 8))


def in_loops(jaxpr, inside=False):
    """Yields each equation, and whether it is in a loop."""
    for eqn in _jaxpr.open_jaxpr(jaxpr).eqns:
        yield eqn, inside
        loops = inside or eqn.primitive.name in ("scan", "while")
        for body in _jaxpr.on_platform(eqn, [*_jaxpr.sub_jaxprs(eqn)]):
            yield from in_loops(body, loops)


def roundings(fun, *args):
    """Returns for each rounding of a weight, which is 8 by 8, whether it is in a loop.

    And for each product with a rounded weight.
    """
    casts, products = [], []
    for eqn, inside in in_loops(jax.make_jaxpr(fun)(*args)):
        kinds = [(var.aval.shape, var.aval.dtype) for var in eqn.invars]
        if _jaxpr.is_cast(eqn) and kinds == [((8, 8), SINGLE)]:
            casts.append(inside)
        if eqn.primitive.name == "dot_general" and kinds[1][0] == (8, 8):
            products.append(inside)
            assert kinds[1][1] != SINGLE
    return casts, products


def recurrent(w, u, xs):
    def step(h, x):
        h = jnp.tanh(x @ w + h @ u)
        return h, h

    return lax.scan(step, jnp.zeros((4, 8)), xs)[1]


def gated(w, u, xs):
    """Backwards through time, with a state that adds up."""

    def step(state, x):
        c, h = state
        a, b = jnp.split(x @ jnp.hstack([w, w]) + h @ jnp.hstack([u, u]), 2, axis=-1)
        c = jax.nn.sigmoid(a) * c + jnp.tanh(b)
        return (c, jnp.tanh(c)), c

    zeros = jnp.zeros((4, 8))
    return lax.scan(step, (zeros, zeros), xs, reverse=True)[1]


def nested(w, u, xs):
    def layer(h, _):
        return recurrent(w, u, h), None

    return lax.scan(layer, xs, None, length=2)[0]


def recomputed(w, u, xs):
    def step(h, x):
        h = jax.checkpoint(lambda h: jnp.tanh(x @ w + h @ u))(h)
        return h, h

    return lax.scan(step, jnp.zeros((4, 8)), xs)[1]


def counted(w, u, xs):
    return lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ w @ u), xs[0])


RECURRENCES = {
    "recurrent": recurrent,
    "scan of scan": nested,
    "remat in scan": recomputed,
    "fori_loop": counted,
    "vmap": jax.vmap(recurrent, (None, None, 2), 2),
}


def gradient_of(name):
    def loss(weights, xs):
        xs = jnp.stack([xs, xs], 2) if name == "vmap" else xs
        return (RECURRENCES[name](*weights, xs) ** 2).mean()

    return jax.grad(loss)


@pytest.mark.needs_no_scale
@pytest.mark.parametrize("name", RECURRENCES)
def test_a_loop_of_a_gradient_is_given_rounded_weights(name):
    grad = gradient_of(name)
    cast = jaxmp.autocast(grad, F16)
    casts, products = roundings(cast, (W, U), XS)
    assert casts
    assert not any(casts)
    assert any(products)
    assert_near(*at_once(cast, grad)((W, U), XS), F16, 4)


def test_a_state_that_adds_up_and_the_sums_of_gradients_stay_float32():
    def loss(weights, xs):
        return (gated(*weights, xs) ** 2).mean()

    grad = jax.grad(loss)
    eqns = traced(jaxmp.autocast(grad, BF16), (W, U), XS)
    carried = []
    for eqn in eqns:
        if eqn.primitive.name == "scan":
            consts, carries = _jaxpr.scan_counts(eqn)
            assert {v.aval.dtype for v in eqn.invars[:consts]} == {BF16}
            carried.append([v.aval.dtype for v in eqn.invars[consts:][:carries]])
    (state, _), sums = carried
    assert {state, *sums} == {SINGLE}
    both = at_once(jaxmp.autocast(grad, BF16), grad)((W, U), XS)
    assert relative_error(*both) < 0.02


def residuals(w, x, xs):
    """The loss of a network that is differentiated by its input."""

    def step(total, x):
        slope = jax.grad(lambda x: jnp.tanh(x @ w).sum())(x)
        return total + (slope**2).mean(), None

    return lax.scan(step, 0.0, xs)[0]


def summed(w, x, xs):
    return lax.scan(lambda c, x: (c + (x @ w).mean(), None), 0.0, xs)[0]


def stacked(w, x, xs):
    """Of which a weight that was computed is read."""
    w = w + w[:, :2] @ w[:2]
    return lax.scan(lambda c, x: (c, (x @ w).sum()), 0.0, xs)[1].sum()


def read_from(w, x, xs):
    """What a product has computed, in each iteration."""
    keys = x @ w
    return lax.scan(lambda c, x: (c + jnp.tanh(x @ keys.T).mean(), None), 0.0, xs)[0]


def in_a_rule(w, x, xs):
    softened = jax.custom_jvp(read_from)
    softened.defjvp(lambda primals, tangents: jax.jvp(read_from, primals, tangents))
    return softened(w, x, xs)


def inner_gradients(w, x, xs):
    """The gradient of an accumulation, which is to be differentiated again."""

    def loss(w):
        step = lambda c, x: (c + (jnp.tanh(x @ w) ** 2).mean(), None)  # noqa: E731
        return lax.scan(step, 0.0, xs)[0]

    return jax.grad(loss)(w) * W


@pytest.mark.parametrize(
    "fun", [summed, stacked, residuals, read_from, in_a_rule, inner_gradients]
)
def test_what_every_iteration_sends_back_adds_up_in_float32(fun):
    # In bfloat16 a sum stalls at 256 times what is added to it.
    xs = 1 + jax.random.uniform(jax.random.key(1), (1024, 2, 8))
    assert_gradients_near(lambda w: fun(w, xs[0], xs).sum(), BF16, 2.5, W)


def test_what_a_scan_is_given_stays_what_it_is_when_it_is_differentiated():
    def loss(scores, w, key, xs):
        weights = jax.nn.softmax(scores)  # kept in 16 bits for the backward pass

        def step(carry, x):
            total, key = carry
            key, new = jax.random.split(key)
            x = x + jax.random.normal(new, x.shape)
            return (total + (x @ (weights @ w)).mean(), key), total

        (total, _), totals = lax.scan(step, (0.0, key), xs, reverse=True, unroll=2)
        return total + totals.mean()

    args = W, U, jax.random.key(0), XS
    grad = jax.grad(loss)
    casts = jax.grad(jaxmp.autocast(loss, BF16)), jaxmp.autocast(grad, BF16)
    expected, *found = at_once(grad, *casts)(*args)
    assert all(relative_error(one, expected) < 0.02 for one in found)


def test_a_long_memory_keeps_the_digits_that_16_bits_have_not():
    def loss(weights, xs):
        w, u = (x.astype(xs.dtype) for x in weights)
        decays = jnp.exp(-0.02 * jax.nn.sigmoid(xs @ w))
        entries = jnp.sqrt(1 - decays**2 + 1e-6) * (xs @ u)

        def step(h, x):
            h = x[0] * h + x[1]
            return h, h

        states = lax.scan(step, jnp.zeros_like(xs[0]), (decays, entries))[1]
        return ((states @ w) ** 2).mean().astype(jnp.float32)

    grad = jax.grad(loss)

    def in_16_bits(weights, xs):
        return grad(weights, xs.astype(BF16))

    forms = grad, in_16_bits, jaxmp.autocast(grad, BF16)
    expected, native, found = at_once(*forms)((W, U), normal(3, 128, 4, 8))
    assert relative_error(native, expected) > 0.02
    assert relative_error(found, expected) < 0.01


def test_a_while_that_nothing_differentiates_is_given_rounded_weights():
    def generated(w, u, x, steps):
        def going(state):
            tokens = jnp.argmax(state[1] @ u, -1)
            return (state[0] < steps) & (tokens < 100).all()

        return lax.while_loop(going, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))

    args = W, U, XS[0], 7
    casts, products = roundings(jaxmp.autocast(generated, BF16), *args)
    assert casts == [False, False]
    assert products == [True, True]
    found, expected = at_once(jaxmp.autocast(generated, BF16), generated)(*args)
    assert found[0] == expected[0]
    np.testing.assert_allclose(found[1], expected[1], atol=0.02)


def test_a_while_has_its_derivative_forward():
    def fun(w):
        state = lax.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] @ w), (0, XS[0])
        )
        return state[1]

    both = at_once(jax.jacfwd(jaxmp.autocast(fun, F16)), jax.jacfwd(fun))(W)
    assert relative_error(*both) < 4e-3


# The backward pass inside of what holds jaxprs.


def attend(x):
    return jax.nn.softmax(x @ x.T / 3) @ (x * x)


LAYERS = {
    "call": attend,
    "scan": lambda x: lax.scan(lambda x, _: (attend(x), None), x, length=2)[0],
    "remat of scan": jax.checkpoint(
        lambda x: lax.scan(lambda x, _: (attend(x), None), x, length=2)[0]
    ),
}


@pytest.mark.needs_no_scale
@pytest.mark.parametrize("name", LAYERS)
def test_the_backward_pass_reads_a_softmax_in_16_bits_wherever_it_is(name):
    x = jax.random.normal(jax.random.key(2), (9, 8))
    grad = jax.grad(lambda x: (LAYERS[name](x) ** 2).sum())
    cast = jaxmp.autocast(grad, F16)
    eqns = traced(cast, x)
    stacked = [v.aval for e in eqns for v in e.outvars if v.aval.shape == (2, 9, 9)]
    assert all(aval.dtype == F16 for aval in stacked)
    assert bool(stacked) == (name in ("scan", "scan of jit", "remat of scan"))
    assert relative_error(*at_once(cast, grad)(x)) < 4e-3


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["", "remat"])
def test_what_rounding_leaves_of_the_sums_is_taken_out_in_a_loop_too(wrap):
    def loss(scores, v):
        def step(total, s):
            return total + (wrap(jax.nn.softmax)(s) @ v).sum(), None

        return lax.scan(step, 0.0, scores)[0]

    grad = jax.grad(loss)
    both = at_once(jaxmp.autocast(grad, BF16), grad)
    found, expected = both(normal(2, 2, 4, 8), W**2)
    assert relative_error(found, expected) < 0.02
    assert abs(found.sum(-1)).max() < 1e-5 * abs(found).max()


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["", "remat"])
def test_a_rounded_product_of_a_backward_scan_overflows(wrap):
    def loss(x, scale):
        step = wrap(lambda x, _: (x @ jnp.ones((8, 8)), None))
        return lax.scan(step, x, length=2)[0].sum() * scale

    ops = jaxmp.DEFAULT_OPS.with_rounded_matmuls()
    grad = jax.jit(jaxmp.autocast(jax.value_and_grad(loss), F16, ops=ops))
    x = jnp.full((4, 8), 2e3)  # forward it is cut to the largest number
    value, found = grad(x, 1.0)
    assert jnp.isfinite(value)
    assert jnp.isfinite(found).all()
    assert not jnp.isfinite(grad(x, 3e4)[1]).all()


# What a scan stacks, iteration by iteration.


def lstm(w, u, xs):
    """An LSTM without biases, whose state a product takes."""

    def step(state, x):
        c, h = state
        wide = jnp.concatenate([w, u, -w, -u], axis=1)
        i, f, g, o = jnp.split(x @ wide + h @ (wide / 2), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (c, h), h

    zeros = jnp.zeros((4, 8), xs.dtype)
    return lax.scan(step, (zeros, zeros), xs)[1] @ w


def grows(w, u, xs):
    """A state that leaves the range of float16."""

    def step(c, x):
        c = jax.nn.sigmoid(x @ w) * c + 1e5
        return c, jnp.tanh(x @ u) * c * 1e-5

    return lax.scan(step, jnp.zeros((4, 8), xs.dtype), xs)[1] @ w


def loss_of(fun):
    return lambda weights, xs: (fun(*weights, xs) ** 2).mean().astype(jnp.float32)


def stacks(fun, *args):
    """Returns the dtypes of what each scan stacks that has matrices to stack."""
    found = []
    for eqn in traced(fun, *args):
        if eqn.primitive.name == "scan":
            _, carries = _jaxpr.scan_counts(eqn)
            found.append([v.aval.dtype for v in eqn.outvars[carries:]])
    return found


@pytest.mark.needs_no_scale
def test_a_scan_stacks_for_the_backward_pass_in_bfloat16_what_it_multiplies_by():
    grad = jax.grad(loss_of(lstm))
    forward, _ = stacks(jaxmp.autocast(grad, BF16), (W, U), XS)
    # The cell, and the gate that multiplies it, have all their digits.
    assert forward.count(SINGLE) == 2
    assert forward.count(BF16) == len(forward) - 2 >= 8
    forward, _ = stacks(jaxmp.autocast(grad, F16), (W, U), XS)
    assert SINGLE in forward
    assert BF16 not in forward


def test_a_jit_in_an_iteration_changes_no_dtype_of_what_is_stacked():
    def step(h, w):
        y = h @ w
        return y, jnp.log(1.5 + jnp.tanh(y)).sum()

    def loss(call, ws, x):
        def layer(h, w):
            y, total = call(h, w)
            return jnp.tanh(y) * y, total

        h, totals = lax.scan(layer, x, ws)
        return (h**2).mean() + totals.sum()

    args = jnp.stack([W, W]), W
    found = [
        stacks(jaxmp.autocast(jax.grad(functools.partial(loss, call)), BF16), *args)[0]
        for call in (step, jax.jit(step))
    ]
    assert {BF16, SINGLE} <= {*found[0]}
    assert sorted(map(str, found[0])) == sorted(map(str, found[1]))


def test_a_stacked_softmax_is_divided_by_its_sums():
    values = 64 + 4 * jnp.round(4 * W)  # which have 16 bits, and so have their sums

    def loss(w, xs):
        def step(total, x):
            return total + (jax.nn.softmax(x @ w) @ values).sum(), None

        return lax.scan(step, 0.0, xs)[0]

    grad = jax.grad(loss)
    assert BF16 in stacks(jaxmp.autocast(grad, BF16), W, XS)[0]
    assert relative_error(*at_once(jaxmp.autocast(grad, BF16), grad)(W, XS)) < 0.02


@pytest.mark.parametrize("order", ["outside", "inside"])
def test_what_only_products_read_of_a_scan_is_stacked_in_16_bits(order):
    def plain(weights, xs):
        return loss_of(lstm)(weights, xs)

    if order == "inside":
        (found,) = stacks(jaxmp.autocast(plain, BF16), (W, U), XS)
        assert found == [BF16]
    grad = jax.grad(plain)
    cast = {
        "outside": jaxmp.autocast(grad, BF16),
        "inside": jax.grad(jaxmp.autocast(plain, BF16)),
    }[order]
    assert relative_error(*at_once(cast, grad)((W, U), XS)) < 0.01


def test_a_decay_of_a_loop_written_out_in_an_iteration_has_all_its_digits():
    def loss(weights, xs):
        w, u = weights

        def step(total, x):
            decay, h = jnp.exp(-jnp.exp(x @ w - 5)), x @ u
            for _ in range(32):
                h = decay * h
            return total + ((h @ w) ** 2).mean(), None

        return lax.scan(step, 0.0, xs)[0]

    grad = jax.grad(loss)
    both = at_once(jaxmp.autocast(grad, BF16), grad)((W, U), XS)
    assert relative_error(*both) < 0.01


@pytest.mark.needs_no_scale
def test_what_may_leave_the_range_of_float16_is_stacked_in_float32():
    grad = jax.grad(loss_of(grows))
    both = at_once(jaxmp.autocast(grad, F16), grad)((W, U), XS)
    assert relative_error(*both) < 4e-3


@both_dtypes
@pytest.mark.parametrize(
    "scaled",
    [lambda w: w / 0.9, lambda w: jnp.where(jnp.tri(9) > 0, w, 0) * 1.7],
    ids=["a number", "a mask"],
)
def test_a_weight_that_a_while_loop_scales_is_rounded_once(scaled, dtype):
    def powers(made, w, x):
        def step(counted):
            count, x = counted
            return count + 1, jnp.tanh(x @ made(w))

        return lax.while_loop(lambda counted: counted[0] < 3, step, (0, x))[1]

    inside = jaxmp.autocast(lambda w, x: powers(scaled, w, x), dtype)
    before = jaxmp.autocast(lambda w, x: powers(lambda w: w, scaled(w), x), dtype)
    x, w = normal(0, 9, 9), normal(1, 9, 9)
    assert jnp.array_equal(inside(w, x), before(w, x))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((3, 1, 16), "bfloat16"), ((1, 8, 16), "float32")],
    ids=["rows", "layers"],
)
def test_a_layer_adds_a_bias_where_a_term_repeats_over_rows_and_not_over_layers(
    shape, expected
):
    def run(w, x, terms):
        def layer(h, term):
            return jnp.tanh(h @ w + term) @ w, None

        return lax.scan(layer, x, jnp.broadcast_to(terms, (3, 8, 16)))[0]

    w, x, terms = jnp.ones((16, 16)), jnp.ones((8, 16)), jnp.ones(shape)
    eqns = traced(jaxmp.autocast(run), w, x, terms)
    (added,) = [eqn for eqn in eqns if eqn.primitive.name == "add"]
    assert added.outvars[0].aval.dtype == expected
