"""Equinox: modules that are pytrees, and loops with rules of their own."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from laws import (
    DTYPES,
    KEY,
    ORDERS,
    Program,
    drawn,
    hold,
    in_16_bits,
    multiplies_in_16_bits,
    near,
    normal,
    outside,
    programs,
)

import jaxmp
from benchmarks.counting.measure import run
from conftest import crossed, rest_is_evidence

eqx = pytest.importorskip("equinox", reason="Equinox is in the extra `programs`")
eqxi = pytest.importorskip("equinox.internal")


def split(make, loss):
    """Returns a loss of the arrays of a model, and these."""
    model = drawn(eqx.filter_eval_shape(make, key=KEY))
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return lambda params, *args: loss(eqx.combine(params, static), *args), params


def mlp():
    x, y = normal(1, 16, 8), normal(2, 16, 4)
    make = partial(eqx.nn.MLP, 8, 4, 32, 2)
    loss, params = split(make, lambda f, x, y: jnp.mean((jax.vmap(f)(x) - y) ** 2))
    return Program(loss, (params, x, y))


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __init__(self, key):
        self.cell = eqx.nn.GRUCell(3, 16, key=key)
        self.head = eqx.nn.Linear(16, "scalar", key=key)

    def __call__(self, xs):
        def step(h, x):
            return self.cell(x, h), None

        h, _ = jax.lax.scan(step, jnp.zeros(16), xs)
        return self.head(h)


def rnn_in_a_scan():
    xs = normal(1, 8, 12, 3)
    labels = (xs[:, :, 0].sum(1) > 0).astype(jnp.float32)

    def loss_fn(model, xs, labels):
        logits = jax.vmap(model)(xs)
        return jnp.mean(jnp.logaddexp(0, logits) - labels * logits)

    loss, params = split(Recurrent, loss_fn)
    return Program(loss, (params, xs, labels))


class Denoiser(eqx.Module):
    """Mixes the patches of an image and their features in turn, told of the time."""

    into: eqx.nn.Conv2d
    across: eqx.nn.MLP
    along: eqx.nn.MLP
    norms: list
    out: eqx.nn.Linear

    def __init__(self, key):
        self.into = eqx.nn.Conv2d(2, 12, 2, stride=2, key=key)
        self.across = eqx.nn.MLP(16, 16, 24, 1, key=key)
        self.along = eqx.nn.MLP(12, 12, 24, 1, key=key)
        self.norms = [eqx.nn.LayerNorm((12, 16)) for _ in range(2)]
        self.out = eqx.nn.Linear(12, 4, key=key)

    def __call__(self, t, image):
        time = jnp.broadcast_to(t / 5, (1, *image.shape[1:]))
        h = self.into(jnp.concatenate([image, time])).reshape(12, 16)
        h = h + jax.vmap(self.across)(self.norms[0](h))
        h = h + jax.vmap(self.along)(self.norms[1](h).T).T
        patches = jax.vmap(self.out)(h.T).reshape(4, 4, 2, 2)
        return patches.swapaxes(1, 2).reshape(image.shape)


def diffusion():
    """Score matching along a process that keeps the variance."""
    images = normal(1, 4, 1, 8, 8)

    def loss_fn(model, images, key):
        def one(image, t, noise):
            kept = jnp.exp(-t / 2)
            std = jnp.sqrt(jnp.maximum(-jnp.expm1(-t), 1e-5))
            score = model(t, image * kept + std * noise)
            return -jnp.expm1(-t) * jnp.mean((score + noise / std) ** 2)

        time_key, noise_key = jax.random.split(key)
        n = len(images)
        # One time of each of n stretches of equal length.
        t = (jnp.arange(n) + jax.random.uniform(time_key, (n,))) * 5 / n
        noise = jax.random.normal(noise_key, images.shape)
        return jax.vmap(one)(images, t, noise).mean()

    loss, params = split(Denoiser, loss_fn)
    return Program(loss, (params, images, KEY))


def checkpointed_loop():
    """As many steps as the numbers ask for, differentiable by checkpoints."""
    w, x = normal(1, 8, 8) / 4, normal(2, 8)

    def loss(w, x):
        def body(carry):
            step, x = carry
            return step + 1, x + 0.1 * jnp.tanh(w @ x)

        def more(carry):
            return (carry[0] < 3) | ((carry[1] ** 2).sum() < 20) & (carry[0] < 12)

        start = jnp.array(0), x
        loop = eqxi.while_loop(more, body, start, max_steps=16, kind="checkpointed")
        return (loop[1] ** 2).mean()

    # What the loop compares was computed by products.
    return Program(loss, (w, x), wide=True)


def loop_with_buffers():
    """A loop that writes each of its states into a buffer."""
    w, x = normal(1, 8, 8) / 4, normal(2, 8)

    def loss(w, x):
        def body(carry):
            step, x, out = carry
            x = x + 0.1 * jnp.tanh(w @ x)
            return step + 1, x, out.at[step].set(x)

        start = 0, x, jnp.zeros((8, 8))
        loop = eqxi.while_loop(
            lambda carry: carry[0] < 6,
            body,
            start,
            max_steps=8,
            buffers=lambda carry: carry[2],
            kind="checkpointed",
        )
        return (loop[2] ** 2).mean()

    return Program(loss, (w, x))


def attention_with_dropout():
    x = normal(1, 3, 10, 16)
    mask = jnp.tril(jnp.ones((10, 10), bool))

    def loss_fn(attend, x, keys):
        def one(x, key):
            return attend(x, x, x, mask=mask, key=key)

        return (jax.vmap(one)(x, keys) ** 2).mean()

    make = partial(eqx.nn.MultiheadAttention, 2, 16, dropout_p=0.25)
    loss, params = split(make, loss_fn)
    return Program(loss, (params, x, jax.random.split(KEY, 3)))


@pytest.mark.filterwarnings("ignore:Of the FLOPs:UserWarning")  # of the loop
@programs(
    mlp,
    rnn_in_a_scan,
    diffusion,
    checkpointed_loop,
    loop_with_buffers,
    attention_with_dropout,
)
def test_equinox_programs_are_what_they_were(program, policy, order):
    hold(program, policy, order)


@in_16_bits
def test_an_equinox_model_is_cast(policy):
    model = drawn(eqx.filter_eval_shape(eqx.nn.MLP, 8, 4, 32, 2, key=KEY))

    def apply(model, x):
        return jax.vmap(model)(x)

    params, static = eqx.partition(model, eqx.is_inexact_array)
    cast = jaxmp.with_policy(lambda p, x: apply(eqx.combine(p, static), x), policy)
    x = normal(1, 16, 8)
    near([cast(params, x)], [apply(model, x)], DTYPES[policy], 4)
    multiplies_in_16_bits(jaxmp.audit(cast)(params, x))


@pytest.mark.parametrize(
    "order", rest_is_evidence({f.__name__: f for f in ORDERS}, "outside")
)
def test_each_example_has_a_gradient_of_its_own(order):
    program = mlp()
    params, x, y = program.args
    rows = params, x[:, None], y[:, None]

    def each(grad_fn):
        return jax.vmap(grad_fn, (None, 0, 0))

    expected = run(each(jax.value_and_grad(program.loss)), *rows)[0]
    got = run(each(order(program.loss, "mixed_float16")), *rows)[0]
    near(got, expected, jnp.float16, 4)
    if order is outside:  # which may be around `vmap` as well
        grad_fn = each(jax.value_and_grad(program.loss))
        got = run(jaxmp.autocast(grad_fn, "mixed_float16"), *rows)[0]
        near(got, expected, jnp.float16, 4)


class Dropping(eqx.Module):
    """Has leaves of every kind: functions, flags, numbers, strings, integers."""

    linear: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    dropout: eqx.nn.Dropout
    activation: object
    name: str
    order: jax.Array
    factor: float

    def __init__(self, key):
        self.linear = eqx.nn.Linear(8, 8, key=key)
        self.norm, self.dropout = eqx.nn.LayerNorm(8), eqx.nn.Dropout(0.5)
        self.activation, self.name, self.factor = jax.nn.gelu, "a", 2.0
        self.order = jnp.arange(8)[::-1]

    def __call__(self, x, key):
        h = self.dropout(self.activation(self.norm(x)), key=key)
        return self.factor * self.linear(h)[self.order]


def whole_model():
    keys = jax.random.split(KEY, 8)

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x, keys[: len(x)]) ** 2)

    return loss, Dropping(KEY), normal(1, 8, 8)


@crossed("scale jit", [1.0, 2.0**10], [False, True])
def test_a_whole_model_is_differentiated_as_equinox_does(scale, jit):
    loss, model, x = whole_model()
    expected = eqx.filter_value_and_grad(loss)(model, x)
    grad_fn = jaxmp.value_and_grad(loss, loss_scale=scale)
    got = (eqx.filter_jit(grad_fn) if jit else grad_fn)(model, x)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    near(got, expected, jnp.float32, 4)
    assert got[1].factor is None
    assert got[1].activation is None


def test_a_model_beside_a_number_is_differentiated_as_both_are():
    loss, model, x = whole_model()
    grads = jaxmp.grad(lambda p, x: p["s"] * loss(p["m"], x))({"m": model, "s": 3.0}, x)
    assert grads["s"] == loss(model, x)
    expected = jax.tree.map(lambda g: 3 * g, eqx.filter_grad(loss)(model, x))
    near([grads["m"]], [expected], jnp.float32, 8)


def test_a_whole_model_is_split_in_micro_batches_and_over_a_mesh():
    loss, model, x = whole_model()
    model = eqx.nn.inference_mode(model)
    expected = eqx.filter_value_and_grad(loss)(model, x)
    options = {"batch_argnums": 1, "accum_steps": 2}
    near(jaxmp.value_and_grad(loss, **options)(model, x), expected, jnp.float32, 8)
    mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
    options = {"batch_argnums": 1, "mesh": mesh}
    near(jaxmp.value_and_grad(loss, **options)(model, x), expected, jnp.float32, 8)


def test_a_whole_model_trains_with_a_loss_scale():
    loss, model, x = whole_model()
    tx = jaxmp.loss_scaling(optax.adam(1e-2), "mixed_float16")

    def arrays(model):
        return eqx.filter(model, eqx.is_inexact_array)

    @eqx.filter_jit
    def step(model, opt_state, x):
        grad_fn = jaxmp.value_and_grad(loss, loss_scale=opt_state)
        value, grads = jaxmp.autocast(grad_fn, "mixed_float16")(model, x)
        updates, opt_state = tx.update(grads, opt_state, arrays(model))
        return eqx.apply_updates(model, updates), opt_state, value

    opt_state, values = tx.init(arrays(model)), []
    for _ in range(4):
        model, opt_state, value = step(model, opt_state, x)
        values.append(value)
    assert values == sorted(values, reverse=True)
    assert values[-1] < values[0]
    assert model.factor == 2.0
    assert model.dropout.p == 0.5
    assert model.linear.weight.dtype == jnp.float32
