"""What a scan carries: 16 bits if products alone read it, and float32 otherwise."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmp
from benchmarks.measure import relative_error, traced
from conftest import rest_is_evidence
from jaxmp import _jaxpr

F16, BF16 = np.dtype(jnp.float16), np.dtype(jnp.bfloat16)
SINGLE = np.dtype(np.float32)
LAYERS = 4
# Weights of four layers, their biases, and a batch.
WS = jax.random.normal(jax.random.key(0), (LAYERS, 8, 8)) / 2
BS = jax.random.normal(jax.random.key(1), (LAYERS, 8)) / 8
X = jax.random.normal(jax.random.key(2), (4, 8))
W = WS[0]


def layer(x, weights):
    w, b = weights
    return jax.nn.relu(x @ w + b), None


def scanned(ws, bs, x):
    return lax.scan(layer, x, (ws, bs))[0]


def written_out(ws, bs, x):
    for weights in zip(ws, bs, strict=True):
        x, _ = layer(x, weights)
    return x


def backwards(ws, bs, x):
    return lax.scan(layer, x, (ws, bs), reverse=True)[0]


def unrolled(ws, bs, x):
    return lax.scan(layer, x, (ws, bs), unroll=2)[0]


def rematerialised(ws, bs, x):
    return lax.scan(jax.checkpoint(layer), x, (ws, bs))[0]


def jitted(ws, bs, x):
    return lax.scan(jax.jit(layer), x, (ws, bs))[0]


def nested(ws, bs, x):
    """Two groups of two layers."""
    groups = jax.tree.map(lambda a: a.reshape(2, 2, *a.shape[1:]), (ws, bs))
    return lax.scan(lambda x, group: (scanned(*group, x), None), x, groups)[0]


def by_example(ws, bs, x):
    return jax.vmap(scanned, (None, None, 0))(ws, bs, x)


def tupled(ws, bs, x):
    """A count goes with it, and what is looked at for its sign."""

    def step(state, weights):
        i, x = state
        return (i + 1, layer(x, weights)[0]), (x > 0).sum()

    return lax.scan(step, (0, x), (ws, bs))[0][1]


FORMS = {
    "scan": scanned,
    "reverse": backwards,
    "unroll": unrolled,
    "remat": rematerialised,
    "remat of scan": jax.checkpoint(scanned),
    "jit": jitted,
    "jit of scan": jax.jit(scanned),
    "nested": nested,
    "vmap": by_example,
    "tuple": tupled,
}


def loss_of(fun):
    return lambda ws, bs, x: ((fun(ws, bs, x) @ W) ** 2).mean()


def carried(fun, *args, kind="scan"):
    """Returns for each loop the dtypes of the floats that it carries."""
    found = []
    eqn: Any
    for eqn in traced(fun, *args):
        if eqn.primitive.name == kind:
            layout = _jaxpr.call_layout(eqn)
            given = [eqn.invars[i].aval.dtype for i in layout.fixed_in]
            trip = _jaxpr.open_jaxpr(layout.bodies[-1].jaxpr)
            for outs in (eqn.outvars, trip.outvars):
                assert [x.aval.dtype for x in outs[: len(given)]] == given
            found.append([x for x in given if jnp.issubdtype(x, jnp.floating)])
    return found


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_what_products_alone_read_is_carried_in_16_bits(name, dtype):
    loss = loss_of(FORMS[name])
    forward = carried(jaxmp.autocast(loss, dtype), WS, BS, X)
    assert forward
    assert all(kinds == [dtype] for kinds in forward)
    # The gradient of a bias sums up what the backward pass carries.
    both = carried(jaxmp.autocast(jax.grad(loss), dtype), WS, BS, X)
    assert len(both) > len(forward)
    assert sum(kinds == [dtype] for kinds in both) >= len(forward)


@pytest.mark.parametrize("order", ["grad inside", "grad outside"])
@pytest.mark.parametrize(
    "name", rest_is_evidence({name: name for name in FORMS}, "scan", "remat", "nested")
)
def test_gradients_are_those_of_the_layers_written_out(name, order):
    def gradient(fun):
        if order == "grad inside":
            return jaxmp.autocast(jax.grad(loss_of(fun), (0, 1, 2)), BF16)
        return jax.grad(jaxmp.autocast(loss_of(fun), BF16), (0, 1, 2))

    ws, bs = (WS[::-1], BS[::-1]) if name == "reverse" else (WS, BS)
    found = jax.jit(gradient(FORMS[name]))(ws, bs, X)
    if name == "reverse":
        found = (found[0][::-1], found[1][::-1], found[2])
    expected = jax.jit(gradient(written_out))(WS, BS, X)
    exact = jax.jit(jax.grad(loss_of(written_out), (0, 1, 2)))(WS, BS, X)
    assert relative_error(found, expected) < 4 * float(jnp.finfo(BF16).eps)
    error = relative_error(expected, exact)
    assert relative_error(found, exact) < 1.2 * error


def test_a_backward_pass_carries_in_16_bits_what_products_alone_read():
    def loss(ws, x):
        x = lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, ws)[0]
        return ((x @ W) ** 2).mean()

    found = carried(jaxmp.autocast(jax.grad(loss), BF16), WS, X)
    assert found == [[BF16], [BF16]]


def recurrent(ws, bs, x):
    """A state that products alone read, in its trips, and nobody after them."""

    def step(h, w):
        h = jnp.tanh(h @ W + x @ w)
        return h, h @ w

    _, outs = lax.scan(step, x, ws)
    return outs.sum(0)


def test_what_nobody_reads_after_a_loop_does_not_decide():
    assert carried(jaxmp.autocast(recurrent, F16), WS, BS, X) == [[F16]]

    def read(ws, bs, x):
        step = lambda h, w: (jnp.tanh(h @ W + x @ w), h @ w)  # noqa: E731
        return lax.scan(step, x, ws)

    assert carried(jaxmp.autocast(read, F16), WS, BS, X) == [[SINGLE]]


# What others read keeps its digits.


def running_sum(total, weights):
    return total + X @ weights[0], None


def residual(x, weights):
    return x + jax.nn.relu(x @ weights[0]), None


def handed_on(x, weights):
    return x, (x @ weights[0]).sum()


def moved(x, weights):
    return jnp.roll(x, 1, axis=0), (x @ weights[0]).sum()


def chosen(x, weights):
    return jnp.where(weights[1][0] > 0, x, x @ weights[0]), None


def written_into(x, weights):
    return x.at[0].set((x @ weights[0])[0]), None


def gated(x, weights):
    return jax.nn.sigmoid(x @ weights[0]) * x, None


def compared(x, weights):
    return x @ weights[0], (x > X).sum()


def squared(x, weights):
    return x @ weights[0], (x**2).sum()


def divided_by(x, weights):
    return x @ weights[0], (1 / (x + 9)).sum()


def stacked(x, weights):
    return x @ weights[0], x


def precise(x, weights):
    return jnp.dot(x, weights[0], precision=lax.Precision.HIGHEST), None


def in_a_region(x, weights):
    with jax.named_scope("jaxmp.float32"):
        y = x @ weights[0]
    return y, None


KEPT = [
    running_sum,
    residual,
    moved,
    chosen,
    written_into,
    gated,
    compared,
    squared,
    divided_by,
    stacked,
    precise,
    in_a_region,
]


@pytest.mark.parametrize("step", KEPT)
def test_what_others_read_is_carried_in_float32(step):
    def fun(ws, bs, x):
        x, more = lax.scan(step, x, (ws, bs))
        return x @ W, more

    assert carried(jaxmp.autocast(fun, BF16), WS, BS, X) == [[SINGLE]]


def test_what_is_returned_or_added_to_is_carried_in_float32():
    for read in (lambda x: x, lambda x: x @ W + x, jnp.exp):
        fun = lambda *args, read=read: read(scanned(*args))  # noqa: E731
        assert carried(jaxmp.autocast(fun, BF16), WS, BS, X) == [[SINGLE]]


def test_paths_and_lists_of_the_user_are_followed():
    def named(ws, bs, x):
        def step(x, weights):
            with jax.named_scope("layer"):
                return layer(x, weights)

        return lax.scan(step, x, (ws, bs))[0]

    def kinds(**options):
        return carried(jaxmp.autocast(loss_of(named), BF16, **options), WS, BS, X)

    ops = jaxmp.DEFAULT_OPS
    assert kinds() == [[BF16]]
    assert kinds(ops=ops.with_rounded_products()) == [[BF16]]
    assert kinds(float32_paths=["layer"]) == [[SINGLE]]
    assert kinds(ops=ops.with_deny("scan")) == [[SINGLE]]
    assert kinds(ops=ops.with_deny("dot_general")) == [[SINGLE]]


def test_a_while_carries_float32():
    def fun(w, x):
        x = lax.while_loop(
            lambda s: s[0] < 3, lambda s: (s[0] + 1, jax.nn.relu(s[1] @ w)), (0, x)
        )[1]
        return x @ w

    assert carried(jaxmp.autocast(fun, BF16), W, X, kind="while") == [[SINGLE]]


# Sums over trips.


@pytest.mark.parametrize("step", [handed_on, moved, chosen])
def test_what_the_trips_send_back_to_a_carried_value_adds_up_in_float32(step):
    # In bfloat16 a sum stalls at 256 times what is added to it.
    trips = 1024
    ws = 1 + jax.random.uniform(jax.random.key(3), (trips, 8, 8))
    bs = jnp.ones((trips, 8))

    def loss(x):
        x, sums = lax.scan(step, x, (ws, bs))
        more = 0.0 if sums is None else sums.mean()
        return (x @ W).mean() + more

    expected = jax.jit(jax.grad(loss))(X)
    for grad in (
        jax.grad(jaxmp.autocast(loss, BF16)),
        jaxmp.autocast(jax.grad(loss), BF16),
    ):
        assert relative_error(jax.jit(grad)(X), expected) < 4e-3


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["", "remat"])
def test_gradients_of_shared_weights_add_up_in_float32(wrap):
    def loss(w, xs):
        def step(h, x):
            return jax.nn.relu(x @ w + h @ w), None

        return (lax.scan(wrap(step), X, xs)[0] @ W).mean()

    xs = jax.random.normal(jax.random.key(4), (3, 4, 8))
    kinds = carried(jaxmp.autocast(jax.grad(loss), BF16), W, xs)
    assert kinds[0] == [BF16]
    sums = traced(jaxmp.autocast(jax.grad(loss), BF16), W, xs)
    sums = [v.aval for e in sums if e.primitive.name == "add_any" for v in e.outvars]
    assert all(aval.dtype == SINGLE for aval in sums if aval.shape == W.shape)


def test_an_accumulation_over_micro_batches_adds_up_in_float32():
    def total(ws, bs, xs):
        def step(total, x):
            grads = jax.grad(loss_of(scanned), (0, 1))(ws, bs, x)
            return jax.tree.map(jnp.add, total, grads), None

        return lax.scan(step, jax.tree.map(jnp.zeros_like, (ws, bs)), xs)[0]

    kinds = carried(jaxmp.autocast(total, BF16), WS, BS, jnp.stack([X, X]))
    assert kinds[0] == [SINGLE, SINGLE]
    assert [BF16] in kinds[1:]


# Types.


@pytest.mark.parametrize("length", [0, 1])
def test_a_loop_may_have_no_trips_or_one(length):
    ws, bs = WS[:length], BS[:length]
    assert carried(jaxmp.autocast(loss_of(scanned), F16), ws, bs, X) == [[F16]]
    grad = jax.grad(loss_of(scanned), 2)
    found = jax.jit(jaxmp.autocast(grad, F16))(ws, bs, X)
    assert relative_error(found, jax.jit(grad)(ws, bs, X)) < 4e-3


def test_a_weak_type_is_carried_too():
    def fun(weights):
        w, x = jnp.full((8, 8), 0.5), jnp.full((4, 8), 0.5)
        x = lax.scan(lambda x, _: (lax.dot(x, w), None), x, length=2)[0]
        assert x.weak_type
        return x @ weights

    assert carried(jaxmp.autocast(fun, BF16), W) == [[BF16]]
    found, expected = jax.jit(jaxmp.autocast(fun, BF16))(W), fun(W)
    assert relative_error(found, expected) < float(jnp.finfo(BF16).eps)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shards_are_carried_too(kind):
    kinds = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((2,), ("batch",), axis_types=kinds)
    x = jax.device_put(X, jax.NamedSharding(mesh, P("batch")))

    def loss(ws, bs, x):
        part = lambda *args: lax.pmean(loss_of(scanned)(*args), "batch")  # noqa: E731
        specs = P(), P(), P("batch")
        return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P())(ws, bs, x)

    assert carried(jaxmp.autocast(loss, BF16), WS, BS, x) == [[BF16]]
    expected = jax.jit(jax.grad(loss))(WS, BS, x)
    for grad in (
        jax.grad(jaxmp.autocast(loss, BF16)),
        jaxmp.autocast(jax.grad(loss), BF16),
    ):
        assert relative_error(jax.jit(grad)(WS, BS, x), expected) < 0.03


def test_a_function_with_a_backward_rule_carries_so_inside():
    @jax.custom_vjp
    def fun(ws, bs, x):
        return loss_of(scanned)(ws, bs, x)

    fun.defvjp(
        lambda *args: (fun(*args), args),
        lambda args, g: jax.tree.map(
            lambda x: g * x, jax.grad(loss_of(scanned), (0, 1, 2))(*args)
        ),
    )
    assert carried(jaxmp.autocast(fun, BF16), WS, BS, X) == [[BF16]]
    assert [BF16] in carried(jaxmp.autocast(jax.grad(fun), BF16), WS, BS, X)


def test_what_is_carried_may_be_differentiated_twice_and_forward():
    loss = loss_of(scanned)

    def twice(cast):
        return jax.grad(lambda ws: (cast(jax.grad(loss))(ws, BS, X) ** 2).sum())

    found = jax.jit(twice(lambda f: jaxmp.autocast(f, BF16)))(WS)
    assert relative_error(found, jax.jit(twice(lambda f: f))(WS)) < 0.03

    def forward(cast):
        return jax.jvp(lambda ws: cast(loss)(ws, BS, X), (WS,), (WS,))[1]

    found = forward(lambda f: jaxmp.autocast(f, BF16))
    assert relative_error(found, forward(lambda f: f)) < 0.02
