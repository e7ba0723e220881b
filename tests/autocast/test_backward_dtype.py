"""Float16 forward and bfloat16 backward: no gradient leaves the range, in any order.

A loss over 2^40 has gradients far below the range of float16, and one times 2^24 has
gradients above it. A single cotangent in float16 would be zero, or Inf.
"""

import functools
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmp
from benchmarks.counting import hlo, targets
from benchmarks.counting.measure import AS_WRITTEN, equations, relative_error
from benchmarks.networks.planted import Result, program
from conftest import at_once, mapped, normal, rest_is_evidence
from jaxmp._jaxprs import jaxpr as _jaxpr

POLICY = "mixed_float16_bfloat16"
EPS = float(jnp.finfo(jnp.bfloat16).eps)
SIZE, BATCH, LENGTH = 16, 8, 6
X = normal(0, BATCH, SIZE)
SEQUENCE = normal(1, BATCH, LENGTH, SIZE)
W = {f"w{i}": normal(2 + i, SIZE, SIZE, scale=SIZE**-0.5) for i in range(4)}
W["b"] = normal(7, SIZE, scale=0.1)
LAYERS = {"w": normal(8, 3, SIZE, SIZE, scale=SIZE**-0.5), "b": normal(9, 3, SIZE) / 9}


def of_logits(logits):
    labels = jnp.arange(logits[..., 0].size).reshape(logits.shape[:-1]) % SIZE
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def mlp(w, x):
    h = jax.nn.gelu(x @ w["w0"] + w["b"])
    return of_logits(norm(jnp.tanh(h @ w["w1"]) + h) @ w["w2"])


def attend(w, x):
    q, k, v = (x @ w[f"w{i}"] for i in range(3))
    mask = jnp.tri(LENGTH, dtype=bool)
    scores = jnp.where(mask, jnp.einsum("btd,bsd->bts", q, k) / 4, -1e9)
    return of_logits((x + jax.nn.softmax(scores) @ v) @ w["w3"])


def layer(h, w):
    return h + jax.nn.relu(norm(h) @ w["w"] + w["b"])


def scanned(layers, x, wrap=lambda f: f):
    step = wrap(layer)
    h, _ = lax.scan(lambda h, w: (step(h, w), None), x, layers)
    return of_logits(h @ layers["w"][0])


def recurrent(w, x):
    def cell(carry, x):
        h, c = carry
        gate, new = jax.nn.sigmoid(x @ w["w0"] + h @ w["w1"]), jnp.tanh(h @ w["w2"] + x)
        c = gate * c + (1 - gate) * new
        return (jnp.tanh(c), c), h

    start = jnp.zeros((BATCH, SIZE)), jnp.zeros((BATCH, SIZE))
    _, hs = lax.scan(cell, start, jnp.swapaxes(x, 0, 1))
    return of_logits(jnp.swapaxes(hs, 0, 1) @ w["w3"])


def branches(w, x):
    h = x @ w["w0"]
    h = lax.cond(jnp.sum(x) > 0, lambda h: jnp.tanh(h @ w["w1"]), lambda h: h, h)
    h = lax.cond(jnp.sum(x) <= 0, lambda h: jnp.tanh(h @ w["w1"]), lambda h: h, h)
    return of_logits(h @ w["w2"])


@jax.custom_vjp
def scaled_product(x, w):
    return jnp.tanh(x @ w)


def _forward(x, w):
    out = scaled_product(x, w)
    return out, (x, w, out)


def _backward(kept, cotangent):
    x, w, out = kept
    sent = cotangent * (1 - out * out)
    return sent @ w.T, x.T @ sent


scaled_product.defvjp(_forward, _backward)


def own_rule(w, x):
    return of_logits(scaled_product(scaled_product(x, w["w0"]), w["w1"]) @ w["w2"])


def in_a_branch(fun, w, x):
    return lax.cond(jnp.sum(x) > 0, fun, lambda w, x: x, w, x)


def in_a_scan(fun, w, x):
    return lax.scan(lambda h, _: (fun(w, h), None), x, length=3)[0]


@pytest.mark.parametrize(
    "options",
    [{"policy": POLICY}, {"policy": "bfloat16", "residuals": "int8"}],
    ids=["two dtypes", "eight bits"],
)
@pytest.mark.parametrize(
    "around", [lambda fun, w, x: fun(w, x), in_a_branch, in_a_scan]
)
def test_a_rule_may_print_the_gradient_that_it_returns(around, options):
    seen = []

    @jax.custom_vjp
    def watched(x):
        return x

    def backward(kept, cotangent):
        def record(*xs):
            seen.append(xs)

        jax.debug.callback(record, cotangent, kept, ordered=True)
        return (cotangent,)

    watched.defvjp(lambda x: (x, x), backward)

    def loss(w, x):
        return jnp.mean(around(lambda w, x: watched(jnp.tanh(x @ w)), w, x) ** 2)

    args = W["w1"], jnp.abs(X)
    exact = jax.grad(loss)(*args)
    jax.effects_barrier()
    expected, seen[:] = seen[:], []
    gradient = jax.jit(jax.grad(jaxmp.autocast(loss, **options)))(*args)
    jax.effects_barrier()
    assert relative_error(gradient, exact) < 0.03
    assert relative_error(seen, expected) < 0.03


def test_a_reference_may_be_written_in_both_passes():
    def loss(w, x):
        total = jax.new_ref(jnp.zeros_like(x))
        total[...] = jnp.tanh(x @ w)
        total[0, :] += 1.0
        return jnp.mean((total[...] @ w) ** 2)

    args = W["w1"], X
    exact, gradient = (
        jax.jit(jax.grad(x))(*args) for x in (loss, jaxmp.autocast(loss, POLICY))
    )
    assert relative_error(gradient, exact) < 0.03


@jax.custom_jvp
def squashed(x):
    return x / (1 + jnp.abs(x))


squashed.defjvp(
    lambda primals, tangents: (
        squashed(*primals),
        tangents[0] / (1 + jnp.abs(primals[0])) ** 2,
    )
)


def own_tangent(w, x):
    return of_logits(squashed(squashed(x @ w["w0"]) @ w["w1"]) @ w["w2"])


def looked_up(w, x):
    rows = w["w0"][jnp.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % SIZE]
    h = jnp.maximum(rows @ w["w1"], x @ w["w2"])
    return of_logits(h.max(1) @ w["w3"])


def in_region(w, x):
    h = jnp.tanh(x @ w["w0"])
    with jax.named_scope("head"):
        return of_logits(h @ w["w1"] @ w["w2"])


def on_shards(w, x):
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))

    def local(w, x):
        return jnp.tanh(jnp.tanh(x @ w["w0"]) @ w["w1"]) @ w["w2"]

    return of_logits(mapped(local, mesh, (P(), P("data")), P("data"))(w, x))


def searched(w, x):
    """Goes through a loop that cannot be differentiated, of what is not."""
    size = lax.while_loop(lambda s: s < jnp.abs(x).max(), lambda s: s * 2, 1.0)
    return mlp(w, x / size)


def nested(w, x):
    inner = jaxmp.autocast(lambda w, x: jnp.tanh(x @ w["w0"]) @ w["w1"], "bfloat16")
    return of_logits(jnp.tanh(inner(w, x)) @ w["w2"])


def associative(w, x):
    gates, new = jax.nn.sigmoid(x @ w["w0"]), x @ w["w1"]

    def joined(one, other):
        return one[0] * other[0], other[0] * one[1] + other[1]

    return of_logits(lax.associative_scan(joined, (gates, new), axis=1)[1] @ w["w2"])


def solved(w, x):
    matrix = w["w0"] @ w["w0"].T + 4 * jnp.eye(SIZE)
    return of_logits(jnp.linalg.solve(matrix, (x @ w["w1"]).T).T @ w["w2"])


remat = jax.checkpoint
PROGRAMS = {
    "mlp": (mlp, W, X),
    "attention": (attend, W, SEQUENCE),
    "scan": (scanned, LAYERS, X),
    "scan of remat": (functools.partial(scanned, wrap=remat), LAYERS, X),
    "recurrent": (recurrent, W, SEQUENCE),
    "cond": (branches, W, X),
    "custom_vjp": (own_rule, W, X),
    "custom_jvp": (own_tangent, W, X),
    "lookup": (looked_up, W, SEQUENCE),
    "shard_map": (on_shards, W, X),
    "while": (searched, W, X),
    "nested": (nested, W, X),
    "associative scan": (associative, W, SEQUENCE),
    "solve": (solved, W, X),
}
USUAL = "attention", "scan of remat", "recurrent", "custom_vjp", "shard_map", "cond"
OPTIONS = {
    "plain": {},
    "float32_paths": {"float32_paths": ("head",)},
    "denied": {"ops": jaxmp.DEFAULT_OPS.with_deny("tanh")},
    "rounded": {"ops": jaxmp.DEFAULT_OPS.with_rounded_matmuls()},
}
SCALES = (1.0, 2.0**-40, 2.0**24)


def outside(loss, policy, **options):
    return jaxmp.autocast(jax.value_and_grad(loss), policy, **options)


def inside(loss, policy, **options):
    return jax.value_and_grad(jaxmp.autocast(loss, policy, **options))


def run(args, *funs):
    """Runs functions of the same arguments in one program that rounds where it says."""
    return compiled(args, *funs)(args)


def compiled(args, *funs):
    lowered = jax.jit(lambda args: [fun(*args) for fun in funs]).lower(args)
    return lowered.compile(compiler_options=AS_WRITTEN)


def scaled(loss, scale):
    return lambda *args: loss(*args) * scale


def check(
    loss,
    *args,
    orders=(outside, inside),
    grad=jax.value_and_grad,
    allowed=EPS,
    exact_loss=True,
    **options,
):
    """Compares loss and gradient, over 2^40 and times 2^24 as well, with float32."""

    def usual(policy):
        def run(*args):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of float16 without a loss scale
                return jaxmp.autocast(grad(loss), policy, **options)(*args)

        return run

    def ours(order):
        def run(*args_and_scale):
            *args, scale = args_and_scale
            return order(scaled(loss, scale), POLICY, **options)(*args)

        return run

    plain = grad(loss), usual("mixed_bfloat16"), usual("mixed_float16")
    (expected, exact), (_, bf16), (half, _) = run(args, *plain)
    program = compiled((*args, 1.0), *map(ours, orders))
    allowed = max(1.25 * relative_error(bf16, exact), allowed)
    for scale, (got, gradient) in ((s, x) for s in SCALES for x in program((*args, s))):
        gradient = jax.tree.map(lambda x, s=scale: x / s, gradient)
        assert relative_error(gradient, exact) <= allowed, scale
        digits = 2**-14 if exact_loss else EPS
        near = 2 * abs(half - expected) + digits * abs(expected)
        assert abs(got / scale - expected) <= near, scale


@pytest.mark.needs_no_scale
@pytest.mark.parametrize("name", rest_is_evidence({x: x for x in PROGRAMS}, *USUAL))
def test_no_cotangent_is_float16(name):
    check(*PROGRAMS[name])


@pytest.mark.needs_no_scale
@pytest.mark.parametrize("name", OPTIONS)
def test_no_cotangent_is_float16_with_options(name):
    check(in_region, W, X, **OPTIONS[name])


@pytest.mark.parametrize("name", ["attention", "scan"])
def test_both_orders_are_one_program(name):
    loss, *args = PROGRAMS[name]
    one, other = run(args, outside(loss, POLICY), inside(loss, POLICY))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def of_mean(loss):
    """Differentiates a mean over examples that are mapped over."""
    return jax.value_and_grad(
        lambda w, x: jax.vmap(loss, (None, 0))(w, x[:, None]).mean()
    )


def with_aux(loss):
    fun = jax.value_and_grad(
        lambda *args: (loss(*args), loss(*args) ** 2), has_aux=True
    )

    def grad_fn(*args):
        (value, _), gradient = fun(*args)
        return value, gradient

    return grad_fn


def closed_over(loss):
    return lambda w, x: jax.value_and_grad(lambda w: loss(w, x))(w)


def on_devices(loss):
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
    return jaxmp.value_and_grad(loss, mesh=mesh, batch_argnums=1)


TRAINERS = {
    "jit": lambda loss: jax.jit(jax.value_and_grad(jax.jit(loss))),
    "grad of vmap": of_mean,
    "aux": with_aux,
    "closed over": closed_over,
    "accum_steps": lambda loss: jaxmp.value_and_grad(
        loss, accum_steps=2, batch_argnums=1
    ),
    "mesh": on_devices,
}


SIMPLE = rest_is_evidence({x: x for x in ("mlp", "scan of remat")}, "mlp")


@pytest.mark.needs_no_scale
@pytest.mark.parametrize("of", SIMPLE)
@pytest.mark.parametrize(
    "name", rest_is_evidence({x: x for x in TRAINERS}, "jit", "mesh")
)
def test_a_trainer_that_somebody_else_owns_needs_no_scale(name, of):
    def inside(loss, policy):
        return TRAINERS[name](jaxmp.autocast(loss, policy))

    def around(loss, policy):
        return jaxmp.autocast(TRAINERS[name](loss), policy)

    check(*PROGRAMS[of], orders=(inside, around), grad=TRAINERS[name])


def test_what_is_closed_over_has_a_gradient():
    def loss(w, x):
        return jaxmp.autocast(lambda x: mlp(w, x), POLICY)(x) * 2.0**-40

    exact, got = at_once(jax.grad(mlp), jax.grad(loss))(W, X)
    got = jax.tree.map(lambda x: x * 2.0**40, got)
    assert relative_error(got, exact) <= 4 * EPS


def of_norm(loss):
    """A penalty on the gradient: a gradient of a gradient."""

    def penalty(w, x):
        gradient = jax.grad(loss, argnums=1)(w, x)
        return jnp.sqrt(jnp.sum(gradient**2)) + loss(w, x)

    return jax.value_and_grad(penalty)


@pytest.mark.needs_no_scale
@pytest.mark.parametrize("of", SIMPLE)
def test_second_derivatives_are_bfloat16(of):
    loss, *args = PROGRAMS[of]
    check(
        loss,
        *args,
        orders=(
            lambda loss, policy: of_norm(jaxmp.autocast(loss, policy)),
            lambda loss, policy: jaxmp.autocast(of_norm(loss), policy),
        ),
        grad=of_norm,
        exact_loss=False,  # it has a gradient in it
    )


def test_forward_mode_inside_says_where_autocast_goes():
    with pytest.raises(TypeError, match="forward-mode") as error:
        jax.jvp(jaxmp.autocast(mlp, POLICY), (W, X), (W, X))
    assert "autocast(jax.hessian(loss), policy)" in "".join(error.value.__notes__)
    out, tangent = jaxmp.autocast(lambda w: jax.jvp(mlp, (w, X), (w, X)), POLICY)(W)
    assert out.dtype == tangent.dtype == jnp.float32


BEHIND = {
    "a jit": lambda f: jax.jvp(jax.jit(f), (W, X), (W, X)),
    "a linearization": lambda f: jax.linearize(f, W, X)[1](W, X),
}


@pytest.mark.parametrize("tangent", BEHIND.values(), ids=BEHIND)
def test_forward_mode_behind_one_is_refused_by_the_words_of_jax_which_the_faq_has(
    tangent,
):
    with pytest.raises(TypeError, match="forward-mode") as error:
        tangent(jaxmp.autocast(mlp, POLICY))
    faq = (pathlib.Path(__file__).parents[2] / "docs" / "faq.md").read_text()
    assert f"### {str(error.value).splitlines()[0].split(' function')[0]}" in faq


@pytest.mark.needs_no_scale
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_residuals_of_eight_bits_go_with_it(kind):
    check(mlp, W, X, residuals=kind, allowed=0.05)


def test_values_are_float16_and_gradients_bfloat16():
    def dots(jaxpr):
        return [
            {str(atom.aval.dtype) for atom in eqn.invars}
            for eqn in equations(jaxpr)
            if eqn.primitive.name == "dot_general"
        ]

    def two(w, x):
        return jnp.sum((x @ w["w0"]) @ w["w1"])

    for order in (outside, inside):
        found = dots(jax.make_jaxpr(jax.jit(order(two, POLICY)))(W, X))
        assert found[:2] == [{"float16"}] * 2
        assert found[2:] == [{"bfloat16"}] * (len(found) - 2) != []


def test_integers_and_keys_go_through():
    def loss(w, x, key, n):
        kept = jax.random.bernoulli(key, 0.9, x.shape)
        return mlp(w, jnp.where(kept, x, 0)) / n

    args = W, X, jax.random.key(0), jnp.int32(3)
    exact = jax.grad(loss)(*args)
    assert relative_error(jax.grad(jaxmp.autocast(loss, POLICY))(*args), exact) <= EPS
    step = jax.jit(jax.grad(jaxmp.autocast(loss, POLICY), argnums=(0, 1)))
    assert relative_error(step(*args)[0], exact) <= EPS


def test_a_weight_is_rounded_once_for_all_micro_batches():
    grad_fn = jaxmp.value_and_grad(mlp, accum_steps=2, batch_argnums=1)
    jaxpr = jax.make_jaxpr(jaxmp.autocast(grad_fn, POLICY))(W, X)
    (scan,) = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan")
    body = scan.params["jaxpr"].jaxpr
    casts = [x for x in body.eqns if x.primitive.name == "convert_element_type"]
    read = {x for eqn in casts for x in eqn.invars}
    consts, _ = _jaxpr.scan_counts(scan)
    weights = [x for x in body.invars[:consts] if x.aval.ndim == 2]
    assert {x.aval.dtype.name for x in weights} == {"float16", "bfloat16"}
    assert read.isdisjoint(weights)


@pytest.mark.parametrize(
    "seed",
    [*range(4), *(pytest.param(i, marks=pytest.mark.evidence) for i in range(4, 24))],
)
def test_a_planted_underflow_of_gradients_is_none(seed):
    planted = program("underflow, backward", seed)
    loss = planted.functions("float32")["loss"]
    found = run(
        planted.args("float32"),
        jax.value_and_grad(loss),
        outside(loss, POLICY),
        inside(loss, POLICY),
    )
    exact, *ours = [
        Result(
            float(value), np.concatenate([np.ravel(x) for x in jax.tree.leaves(grads)])
        )
        for value, grads in found
    ]
    assert all(one.agrees(exact) for one in ours)


@pytest.mark.needs_no_scale
@pytest.mark.skipif(bool(targets.unavailable()), reason=str(targets.unavailable()))
def test_what_an_activation_stores_for_the_other_pass_is_16_bits(compiled_anew):
    def loss(w, x):
        for up, down in zip(w["up"], w["down"], strict=True):
            x = x + jax.nn.gelu(x @ up) @ down
        return jnp.mean(x**2)

    shapes = [(512, 2048), (2048, 512), (8192, 512)]
    up, down, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    w = {"up": [up] * 3, "down": [down] * 3}
    one, two = (
        targets.compiled(jaxmp.autocast(jax.grad(loss), policy), w, x)
        for policy in ("mixed_float16", POLICY)
    )
    moved = [hlo.work(x.as_text()).bytes for x in (one, two)]
    assert moved[1] <= 1.15 * moved[0]
    used = [x.memory_analysis().temp_size_in_bytes for x in (one, two)]
    assert used[1] <= 1.15 * used[0]
