"""What readers need, by hand-made tables of small programs."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from jaxmp._autocast import needs
from jaxmp._autocast.analysis import Analysis
from jaxmp._autocast.graph import Trip
from jaxmp._jaxprs import jaxpr as _jaxpr

W, X = jnp.ones((8, 8)), jnp.ones((8, 8))
BITS = ("PRODUCT", "HALF", "HALF_BACK", "FULL", "FULL_BACK", "DIGITS", "GATE", "REGION")


def plan_of(fun, *args, wanted=needs.FULL):
    jaxpr = jax.make_jaxpr(fun)(*args)
    analysis = Analysis(np.dtype("float16"), jaxmp.DEFAULT_OPS)
    analysis.mark(jaxpr, ())
    return analysis.plan(jaxpr, Trip((wanted,) * len(jaxpr.out_avals)))


def read(fun, *args, wanted=needs.FULL):
    """Returns who reads what the first product in ``fun`` returns."""
    plan = plan_of(fun, *args, wanted=wanted)
    i = plan.kinds.index("product")
    return {name for name in BITS if plan.outs[i].wanted[0] & getattr(needs, name)}


def mean_away(h):
    return h - h.mean(-1, keepdims=True)


# What is made of `X @ W`, and who reads that product then.
READERS = {
    "another product": (lambda h: h @ W, {"PRODUCT"}),
    "a product, transposed": (lambda h: h.T @ h, {"PRODUCT"}),
    "a relu before one": (lambda h: jnp.maximum(h, 0) @ W, {"PRODUCT"}),
    "a relu by hand": (lambda h: lax.select(h > 0.0, h, 0 * h) @ W, {"PRODUCT"}),
    "a dropout": (lambda h: ((h > 1.0) * h / 0.9) @ W, {"PRODUCT"}),
    "a tanh before one": (lambda h: jnp.tanh(h) @ W, {"HALF"}),
    "a sum": (lambda h: h.sum(), {"FULL"}),
    "a shortcut and a norm": (
        lambda h: (h + mean_away(h) @ W) @ W, {"HALF", "FULL"}
    ),
    "an exponential": (jnp.exp, {"FULL", "DIGITS"}),
    "a softmax": (lambda h: jax.nn.softmax(h) @ W, {"FULL", "DIGITS"}),
    "a logarithm of a sigmoid": (
        lambda h: jnp.log(jax.nn.sigmoid(h)), {"FULL", "DIGITS"}
    ),
    "a divisor": (lambda h: (X / h) @ W, {"HALF", "DIGITS"}),
    "a mean that is taken away": (lambda h: mean_away(h) @ W, {"HALF", "FULL"}),
    "a difference": (lambda h: (h - h[::-1]) @ W, {"HALF"}),
    "an equality": (lambda h: (h == h[::-1]).sum(), {"FULL", "DIGITS"}),
    "a scale of a million": (lambda h: (1e6 * h) @ W, {"FULL"}),
    "a float32 region": (
        lambda h: jaxmp.float32_region(jnp.matmul)(h, W),
        {"FULL", "DIGITS", "GATE", "REGION"},
    ),
    "a callback": (
        lambda h: jax.pure_callback(lambda x: x, h, h) @ W, {"FULL", "DIGITS"}
    ),
    "nobody": (lambda h: W, set()),
}  # fmt: skip


@pytest.mark.parametrize(("fun", "expected"), READERS.values(), ids=READERS)
def test_the_readers_of_a_product_are_found(fun, expected):
    assert read(lambda w, x: fun(x @ w), W, X) == expected


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, jax.vmap])
@pytest.mark.parametrize("name", ["a tanh before one", "an exponential", "a sum"])
def test_calls_are_looked_through(name, wrap):
    fun, expected = READERS[name]
    if wrap is jax.vmap:
        wrapped = jax.vmap(lambda h: fun(h))
        assert read(lambda w, x: wrapped((x @ w)[None]), W, X) == expected
    else:
        assert read(lambda w, x: wrap(fun)(x @ w), W, X) == expected


def test_what_is_returned_keeps_its_digits_up_to_the_product():
    found = read(lambda w, x: 2 * jnp.tanh(x @ w), W, X, wanted=needs.DIGITS)
    assert found == {"FULL", "DIGITS"}


def test_only_the_gradient_of_a_loss_multiplies_by_it():
    def loss(w):
        return jnp.square(X @ w).mean()

    found = read(jax.value_and_grad(loss), W)
    assert found == {"FULL", "HALF_BACK"}
    assert not needs.is_half(needs.FULL | needs.HALF_BACK)


def carried(trip, *init):
    """Returns what the first carried value of a scan is needed for in any trip."""

    def fun(w, x):
        return lax.scan(lambda c, x: (trip(c, x, w), None), init, x[None])[0][0] @ w

    jaxpr = jax.make_jaxpr(fun)(W, X)
    analysis = Analysis(np.dtype("float16"), jaxmp.DEFAULT_OPS)
    (scan,) = (e for e in jaxpr.eqns if e.primitive.name == "scan")
    read = (needs.PRODUCT,) * len(scan.outvars)
    return analysis.inside(scan, Trip(read), ())


def test_a_loop_adds_up_where_no_product_is_on_the_way():
    trip = carried(lambda c, x, w: (c[0] + x @ w,), X)
    assert needs.has_digits(trip.wanted[0])
    trip = carried(lambda c, x, w: (c[0] + jnp.tanh(c[0] @ w + x),), X)
    assert needs.has_digits(trip.wanted[0])  # a layer of a residual stream
    trip = carried(lambda c, x, w: (jnp.tanh(c[0] @ w + x),), X)
    assert not trip.summed
    assert needs.is_carried(needs.PRODUCT, trip.wanted[0])


def test_what_changes_places_is_added_up_over_two_trips():
    trip = carried(lambda c, x, w: (c[1] + x @ w, c[0]), X, X)
    assert [out for _, out in trip.summed] == [1, 2]


def test_the_decay_of_a_state_is_a_gate_up_to_a_sigmoid():
    def fun(decay):
        def loss(w, x):
            a = decay(x @ w)
            return lax.scan(lambda c, x: (a * c + x, None), x, x[None])[0]

        return loss

    assert "GATE" in read(fun(lambda h: 1 - h), W, X)
    # Near one it hardly changes.
    assert "GATE" not in read(fun(jax.nn.sigmoid), W, X)


def inner_loop(c, r, s):
    return lax.scan(lambda c, _: (c * r + s, None), c, None, length=2)[0]


# Trips, and which of the two inputs of each multiply what is carried.
TRIPS = {
    "a decay": (lambda c, r, s: r * c + s, {0}),
    "of a sum": (lambda c, r, s: r * (c + s), {0}),
    "what enters": (lambda c, r, s: c + r * s, set()),
    "by way of products": (lambda c, r, s: (r * c) @ s, set()),
    "beside a product": (lambda c, r, s: r * c + (s * c) @ c, {0}),
    "the slope": (lambda c, r, s: jnp.sin(r * c) / s, {0, 1}),
    "in a loop": (inner_loop, {0}),
}


@pytest.mark.parametrize(("trip", "expected"), TRIPS.values(), ids=TRIPS)
def test_what_multiplies_what_is_carried_is_told_from_what_enters(trip, expected):
    square = jnp.ones((8, 8))

    def fun(r, s):
        return lax.scan(lambda c, x: (trip(c, *x), None), square, (r, s))[0] @ square

    jaxpr = jax.make_jaxpr(fun)(square[None], square[None])
    analysis = Analysis(np.dtype("float16"), jaxmp.DEFAULT_OPS)
    (scan,) = (e for e in jaxpr.eqns if e.primitive.name == "scan")
    wanted = analysis.inside(scan, Trip((needs.PRODUCT,)), ())
    ((body, plan),) = analysis.plans(scan, wanted, ())
    inputs = _jaxpr.in_vars(body.jaxpr)[-2:]
    exact = [plan.needs.get(x, 0) & (needs.GATE | needs.DIGITS) for x in inputs]
    assert {i for i, need in enumerate(exact) if need} == expected


def test_an_analysis_keeps_no_jaxpr_alive():
    # An autocast function lives as long as the program, and may trace again and again.
    analysis = Analysis(np.dtype("float16"), jaxmp.DEFAULT_OPS)
    # Of functions of its own: JAX keeps what it traces as long as a function lives.
    jaxpr = jax.make_jaxpr(lambda x: jax.checkpoint(lambda x: jnp.tanh(x))(x @ W))(X)
    for planned in (jaxpr, jaxpr.jaxpr, next(_jaxpr.sub_jaxprs(jaxpr.eqns[-1]))):
        analysis.plan(planned, Trip((needs.FULL,)))
        analysis.matters(planned)
    assert len(analysis._plans) >= 2
    del jaxpr, planned
    gc.collect()
    assert (
        len(analysis._plans) == len(analysis._matters) == len(analysis._programs) == 0
    )


def test_layers_that_share_a_jaxpr_are_analysed_once():
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
    analysis = Analysis(np.dtype("float16"), jaxmp.DEFAULT_OPS)

    def fun(w, x):
        for _ in range(9):
            x = layer(x, w)
        return x @ w

    jaxpr = jax.make_jaxpr(fun)(W, X)
    analysis.plan(jaxpr, Trip((needs.FULL,)))
    calls = [e for e in jaxpr.eqns if "jaxpr" in e.params]
    assert len(analysis._plans[calls[0].params["jaxpr"]]) <= 2
