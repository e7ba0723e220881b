"""What loops carry: 16 bits, as between layers written out, or float32, as sums."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import relative_error, traced
from conftest import (
    at_once,
    both_dtypes,
    crossed,
    in_both_orders,
    normal,
    rest_is_evidence,
    usually_bfloat16,
)
from jaxmp._jaxprs import jaxpr as _jaxpr

WIDTH, DEPTH = 16, 5
F32 = np.float32


def dense(h, layer):
    return jax.nn.gelu(h @ layer["w"] + layer["b"])


def residual(h, layer):
    return h + jnp.tanh(h @ layer["w"] + layer["b"])


def normed(h, layer):
    mean, var = h.mean(-1, keepdims=True), h.var(-1, keepdims=True)
    return h + dense((h - mean) * lax.rsqrt(var + 1e-5), layer)


LAYERS = {"dense": dense, "residual": residual, "normed": normed}
LAYERS |= {f"{name}, again": jax.checkpoint(fun) for name, fun in LAYERS.items()}


def params(depth=DEPTH):
    shapes = {"w": (depth, WIDTH, WIDTH), "b": (depth, WIDTH)}
    layers = {
        name: normal(i, *shape) / 4 for i, (name, shape) in enumerate(shapes.items())
    }
    return {"in": normal(2, 8, WIDTH) / 3, "layers": layers, "out": normal(3, WIDTH, 4)}


X = normal(4, 6, 8)


def scanned(layer):
    def loss(params, x):
        iteration = lambda h, weights: (layer(h, weights), None)  # noqa: E731
        h, _ = lax.scan(iteration, x @ params["in"], params["layers"])
        return jnp.mean((h @ params["out"]) ** 2)

    return loss


def written_out(layer):
    def loss(params, x):
        h = x @ params["in"]
        for i in range(DEPTH):
            h = layer(h, jax.tree.map(lambda w, i=i: w[i], params["layers"]))
        return jnp.mean((h @ params["out"]) ** 2)

    return loss


def carried(fun, *args):
    """Returns the dtypes of the floating numbers that each loop of ``fun`` carries."""
    loops = [e for e in traced(fun, *args) if _jaxpr.call_kind(e) in ("scan", "while")]
    found = []
    for eqn in loops:
        values = [eqn.invars[i].aval.dtype for i in _jaxpr.call_layout(eqn).fixed_in]
        found.append({str(d) for d in values if jnp.issubdtype(d, jnp.floating)})
    return found


def recurrent(p, x):
    trip = lambda h, x: (jnp.tanh(x + h @ p["layers"]["w"][0]), None)  # noqa: E731
    xs = jnp.stack([x @ p["in"]] * 9)
    return jnp.mean((lax.scan(trip, jnp.zeros_like(xs[0]), xs)[0] @ p["out"]) ** 2)


@usually_bfloat16
@pytest.mark.parametrize("layer", rest_is_evidence(LAYERS, "normed", "dense, again"))
def test_scanned_layers_are_as_near_as_layers_written_out(layer, dtype):
    def own(params, x):
        narrow = jaxmp.cast_tree((params, x), dtype)
        return scanned(layer)(*narrow).astype(jnp.float32)

    exact, found, other, own = at_once(
        jax.grad(scanned(layer)),
        jaxmp.autocast(jax.grad(scanned(layer)), dtype),
        jaxmp.autocast(jax.grad(written_out(layer)), dtype),
        jax.grad(own),
    )(params(), X)
    away = relative_error(found, exact)
    assert 0 < away < 1.5 * relative_error(other, exact)
    assert away < 1.25 * relative_error(own, exact)  # of one draw


LOOPS_16 = {
    "dense": (scanned(dense), 2),
    "dense, again": (scanned(jax.checkpoint(dense)), 2),
    "recurrent": (recurrent, 1),
}


@pytest.mark.needs_no_scale
@both_dtypes
@pytest.mark.parametrize(("loss", "count"), LOOPS_16.values(), ids=LOOPS_16)
def test_layers_with_a_product_between_hand_on_16_bits(loss, count, dtype):
    for grad_fn in in_both_orders(loss, dtype)[1:]:
        found = carried(grad_fn, params(), X)
        assert found[:count] == [{dtype}] * count
        assert len(found) == 2


def scan(trip, p, x):
    return lax.scan(lambda h, w: (trip(h, w), None), x @ p["in"], p["layers"]["w"])[0]


def of_first(p):
    return p["layers"]["w"][0]


def swapped(p, x):
    def iteration(pair, w):
        return (pair[1], pair[0] + pair[1] @ w), None

    return lax.scan(iteration, (x @ p["in"], x @ p["in"]), p["layers"]["w"])[0][0]


def second_order(p, x):
    def iteration(pair, w):
        last, before = pair
        return (0.5 * last + 0.4 * before + x @ p["in"] @ w, last), None

    return lax.scan(iteration, (x @ p["in"], x @ p["in"]), p["layers"]["w"])[0][0]


def with_computed_weights(p, x):
    weights = jnp.tanh(p["layers"]["w"] @ of_first(p))
    trip = lambda h, w: (h + jnp.tanh(h @ w), None)  # noqa: E731
    return lax.scan(trip, x @ p["in"], weights)[0]


unit = jaxmp.float32_region(lambda h: h / jnp.linalg.norm(h))
OFFSET = np.float32(1000) + normal(5, 6, WIDTH)
STAY = {
    "a running sum": lambda p, x: scan(lambda s, w: s + x @ p["in"] @ w, p, x),
    "the same weights": lambda p, x: scan(
        lambda h, _: h + 1e-3 * (h @ of_first(p)), p, x
    ),
    "decaying": lambda p, x: scan(lambda h, w: 0.99 * h + h @ w, p, x),
    "counted": lambda p, x: lax.fori_loop(
        0, 9, lambda i, h: h + 1e-3 * (h @ of_first(p)), x @ p["in"]
    ),
    "swapped": swapped,
    "second order": second_order,
    "a float32 region": lambda p, x: scan(lambda h, w: unit(h) @ w, p, x),
    "computed weights": with_computed_weights,
    # What was given keeps its digits, in which the first layer takes a difference.
    "given": lambda p, x: lax.scan(
        lambda h, w: (h + (h - h.mean(-1, keepdims=True)) @ w, None),
        OFFSET,
        p["layers"]["w"],
    )[0],
}


@crossed("fun dtype", STAY, ["bfloat16", "float16"])
def test_what_grows_or_is_kept_stays_float32(fun, dtype):
    cast = jaxmp.autocast(lambda p, x: fun(p, x) @ p["out"], dtype)
    assert carried(cast, params(), X) == [{"float32"}]


@both_dtypes
def test_what_a_loss_reads_after_the_last_layer_is_not_rounded(dtype):
    def loss(p, x):
        h = scan(lambda h, w: jnp.tanh(h @ w), p, x)
        return -jax.nn.log_softmax(h)[:, 0].mean()

    assert carried(jaxmp.autocast(loss, dtype), params(), X) == [{"float32"}]


@both_dtypes
def test_the_gate_of_the_last_value_but_one_has_its_digits(dtype):
    """Of a filter of second order, whose gates a product reads too."""

    def filtered(p, xs, dot):
        def trip(pair, x):
            last, before = pair
            gate = jax.nn.sigmoid(dot(x, p["gate"]) + 5)
            now = 0.01 * last + gate * before + dot(x, p["in"])
            return (now, last), dot(gate, p["out"])

        return lax.scan(trip, (jnp.zeros((4, WIDTH)),) * 2, xs)[0]

    def by_hand(x, w):
        return jnp.matmul(*jaxmp.cast_tree((x, w), dtype), preferred_element_type=F32)

    p = {x: normal(i, WIDTH, WIDTH) / 8 for i, x in enumerate(["gate", "in", "out"])}
    exact, found, own = at_once(
        lambda *args: filtered(*args, jnp.matmul),
        jaxmp.autocast(lambda *args: filtered(*args, jnp.matmul), dtype),
        lambda *args: filtered(*args, by_hand),
    )(p, normal(3, 400, 4, WIDTH))
    assert 0 < relative_error(found, exact) < 1.5 * relative_error(own, exact)


@pytest.mark.needs_no_scale
@both_dtypes
def test_a_recurrent_layer_carries_16_bits_in_chunks_too(dtype):
    def loss(p, xs):
        def layer(h, xs):
            trip = lambda h, x: (jnp.tanh(x @ p["u"] + h @ p["w"]), None)  # noqa: E731
            return lax.scan(trip, h, xs)

        h, _ = lax.scan(layer, jnp.zeros((6, WIDTH)), xs)
        return jnp.mean((h @ p["o"]) ** 2)

    p = {"u": normal(0, 8, WIDTH), "w": normal(1, WIDTH, WIDTH) / 4}
    p["o"] = normal(2, WIDTH, 4)
    grad_fn = jaxmp.autocast(jax.grad(loss), dtype)
    assert carried(grad_fn, p, normal(3, 3, 3, 6, 8))[:2] == [{dtype}] * 2


@pytest.mark.keeps_float32
def test_complex_numbers_may_be_carried():
    def spun(z):
        return lax.scan(lambda z, _: (z * 1j / (2 + 1j), None), z, None, length=4)[0]

    z = jnp.ones(3, "complex64")
    assert jnp.array_equal(jaxmp.autocast(spun, "bfloat16")(z), spun(z))


@pytest.mark.needs_no_scale
@both_dtypes
def test_what_tokens_send_back_to_a_state_adds_up_in_float32(dtype):
    """It is changed by what was computed of each of them, as in a delta rule."""

    def loss(p, xs):
        def step(state, x):
            key = x @ p["w"]
            return state + key.T @ jnp.tanh(key @ state), x @ state

        keys = xs @ p["in"]
        return jnp.mean(lax.scan(step, p["w"] @ p["w"], keys)[1] ** 2)

    p = {"in": normal(0, 8, WIDTH) / 9, "w": normal(1, WIDTH, WIDTH) / 4}
    eqns = traced(jaxmp.autocast(jax.grad(loss), dtype), p, normal(2, 9, 6, 8))
    loops = [e for e in eqns if _jaxpr.call_kind(e) == "scan"]
    states = [
        v.aval.dtype for e in loops for v in e.outvars if v.aval.shape == p["w"].shape
    ]
    assert states == [np.float32] * 2


@both_dtypes
def test_what_a_loop_starts_from_has_its_digits_if_there_is_no_iteration(dtype):
    def fun(p, x, loop):
        h = jax.nn.softmax(x @ p["in"])
        iteration = lambda i, h: jnp.tanh(h @ p["layers"]["w"][i])  # noqa: E731
        h = loop(iteration, h)
        return jnp.sum(h * h), jnp.sum(jnp.tanh(h) @ p["out"])

    def squares(loop):
        wrapped = jaxmp.autocast(lambda n, p, x: fun(p, x, partial(loop, n)), dtype)
        return wrapped(0, params(), X)[0]

    looped = squares(lambda n, iteration, h: lax.fori_loop(0, n, iteration, h))
    np.testing.assert_allclose(looped, squares(lambda n, iteration, h: h), rtol=1e-6)


@pytest.mark.needs_no_scale
@both_dtypes
def test_weights_are_rounded_once_for_what_is_computed_again(dtype):
    def loss(p, x):
        return jnp.sum(
            jax.checkpoint(dense)(x @ p["in"], {"w": p["w"], "b": p["b"]}) ** 2
        )

    p = {"in": normal(0, 8, WIDTH), "w": normal(1, WIDTH, WIDTH), "b": normal(2, WIDTH)}
    eqns = traced(jaxmp.autocast(jax.grad(loss), dtype), p, X)
    (again,) = filter(_jaxpr.is_remat, eqns)
    found = [v.aval.dtype for v in again.invars if v.aval.shape == (WIDTH, WIDTH)]
    assert found == [dtype]
