"""What is wired so that it does nothing says so, and what is right says nothing."""

import warnings
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState

import jaxmp
from conftest import normal

X, Y = normal(0, 16, 8), normal(1, 16, 4)
PARAMS = {"w": normal(2, 8, 16, scale=1 / 4), "head": normal(3, 16, 4, scale=1 / 4)}
TX = jaxmp.loss_scaling(optax.sgd(0.1), "mixed_float16")
STATE = TX.init(PARAMS)


def apply(params, x):
    return jnp.tanh(x @ params["w"]) @ params["head"]


def loss(params, x, y):
    return jnp.mean((apply(params, x) - y) ** 2)


def cast_loss(params, x, y):
    model = jaxmp.with_policy(apply, "mixed_float16")
    return jnp.mean((model(params, x) - y) ** 2)


def said(fun, *args, **kwargs):
    """Returns what a call warns of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fun(*args, **kwargs)
    assert all(len(str(x.message)) < 1200 for x in found)
    return found


# A scale that was read once


def scanned(grad_fn):
    def run(params, x, y):
        return jax.lax.scan(lambda c, _: (c, grad_fn(params, x, y)), 0, length=2)

    return run


BAKED = {
    "jit": lambda s: jax.jit(jaxmp.value_and_grad(loss, loss_scale=s)),
    "grad": lambda s: jax.jit(jaxmp.grad(loss, loss_scale=s)),
    "the scale itself": lambda s: jax.jit(
        jaxmp.grad(loss, loss_scale=jaxmp.get_loss_scale(s))
    ),
    "two states": lambda s: jax.jit(jaxmp.grad(loss, loss_scale=(s, s))),
    "in a chain": lambda s: jax.jit(
        jaxmp.grad(loss, loss_scale=(optax.EmptyState(), s))
    ),
    "in a scan": lambda s: scanned(jaxmp.grad(loss, loss_scale=s)),
    "around autocast": lambda s: jax.jit(
        jaxmp.autocast(jaxmp.grad(loss, loss_scale=s), "mixed_float16")
    ),
    "inside autocast": lambda s: jax.jit(
        jaxmp.grad(jaxmp.autocast(loss, "mixed_float16"), loss_scale=s)
    ),
    "under vmap": lambda s: jax.jit(
        jax.vmap(jaxmp.grad(loss, loss_scale=s), in_axes=(None, 0, 0))
    ),
    "micro-batches": lambda s: jax.jit(
        jaxmp.grad(loss, loss_scale=s, accum_steps=2, batch_argnums=(1, 2))
    ),
    "jit in an audit": lambda s: jaxmp.audit(
        jax.jit(jaxmp.grad(cast_loss, loss_scale=s))
    ),
    "equinox": lambda s: eqx.filter_jit(jaxmp.grad(loss, loss_scale=s)),
}


@pytest.mark.parametrize("made_once", BAKED.values(), ids=BAKED.keys())
def test_a_scale_that_becomes_a_constant_is_said_once_at_the_users_line(made_once):
    (found,) = said(made_once(STATE), PARAMS, X, Y)
    assert "becomes a constant" in str(found.message)
    assert found.filename == __file__
    unscaled = jax.tree.map(lambda x: x, STATE._replace(loss_scale=jnp.float32(1)))
    assert not said(made_once(unscaled), PARAMS, X, Y)


def test_the_optimizer_of_nnx_outside_of_its_step_is_said():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    grad_fn = jaxmp.nnx.value_and_grad(
        lambda m, x: jnp.mean(m(x) ** 2), loss_scale=optimizer
    )
    (found,) = said(nnx.jit(grad_fn), model, X)
    assert "becomes a constant" in str(found.message)
    assert found.filename == __file__
    assert not said(grad_fn, model, X)


def test_following_the_advice_follows_the_scale():
    advised = jax.jit(
        lambda params, opt_state, x: jaxmp.value_and_grad(
            lambda params, x: loss(params, x, 1e4), loss_scale=opt_state
        )(params, x)
    )
    assert not said(advised, PARAMS, STATE, X)
    assert jaxmp.all_finite(advised(PARAMS, STATE, X))
    too_large = STATE._replace(loss_scale=jnp.float32(2.0**120))
    assert not jaxmp.all_finite(advised(PARAMS, too_large, X)[1])


RIGHT = {
    "eager": jaxmp.grad(loss, loss_scale=STATE),
    "eager autocast": jaxmp.autocast(jaxmp.grad(loss, loss_scale=STATE), "f16"),
    "eager vmap": jax.vmap(jaxmp.grad(loss, loss_scale=STATE), in_axes=(None, 0, 0)),
    "eager micro-batches": jaxmp.grad(
        loss, loss_scale=STATE, accum_steps=2, batch_argnums=(1, 2)
    ),
    "a gradient of it": jax.grad(
        lambda *args: jnp.sum(jaxmp.grad(loss, loss_scale=STATE)(*args)["w"] ** 2)
    ),
    "a number": jax.jit(jaxmp.grad(loss, loss_scale=2.0**15)),
    "a NumPy number": jax.jit(jaxmp.grad(loss, loss_scale=np.float32(8))),
    "audit": jaxmp.audit(jaxmp.grad(cast_loss, loss_scale=STATE)),
    "explain": jaxmp.explain(jaxmp.grad(cast_loss, loss_scale=STATE)),
    "find_overflow": jaxmp.find_overflow(jaxmp.grad(cast_loss, loss_scale=STATE)),
    "the state as an argument": lambda *args: jax.jit(
        lambda s, *args: jaxmp.grad(loss, loss_scale=s)(*args)
    )(STATE, *args),
}


@pytest.mark.parametrize("right", RIGHT.values(), ids=RIGHT.keys())
def test_a_scale_that_is_read_in_each_step_says_nothing(right):
    assert not said(right, PARAMS, X, Y)


# Two policies that differ


def step_of(tx, policy, grad_fn=jaxmp.value_and_grad):
    """Returns a step whose gradients are computed under another policy."""

    def step(params, state, x, y):
        grads = jaxmp.autocast(grad_fn(loss, loss_scale=state), policy)(params, x, y)[1]
        return tx.update(grads, state, params)

    return step


def wrapped(policy):
    return jaxmp.loss_scaling(optax.sgd(0.1), policy)


def inside_of(cast):
    def step(tx):
        def step(params, state, x, y):
            grads = jaxmp.grad(cast, loss_scale=state)(params, x, y)
            return tx.update(grads, state, params)

        return step

    return step


DIFFERING = {
    "autocast around": lambda tx: step_of(tx, "mixed_float16"),
    "autocast inside": inside_of(lambda *args: jaxmp.autocast(loss, "O1")(*args)),
    "with_policy": inside_of(cast_loss),
    "autocast around the step": lambda tx: jaxmp.autocast(
        inside_of(loss)(tx), "mixed_float16"
    ),
    "of two states": lambda tx: (
        lambda params, state, x, y: step_of(
            tx,
            "O1",
            lambda f, loss_scale: jaxmp.value_and_grad(f, loss_scale=(state,) * 2),
        )(params, state, x, y)
    ),
    "policy": lambda tx: (
        lambda params, state, x, y: tx.update(
            jaxmp.grad(cast_loss, policy="mixed_float16", loss_scale=state)(
                params, x, y
            ),
            state,
        )
    ),
    "in a chain": lambda tx: step_of(optax.chain(optax.identity(), tx), "O1"),
    "in a scan": lambda tx: (
        lambda params, state, x, y: jax.lax.scan(
            lambda s, _: step_of(tx, "O1")(params, s, x, y)[::-1], state, length=2
        )
    ),
}


@pytest.mark.parametrize("build", DIFFERING.values(), ids=DIFFERING.keys())
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_a_wrapper_of_another_policy_than_float16_is_said_once(build, policy):
    tx = wrapped(policy)
    state = tx.init(PARAMS)
    if build is DIFFERING["in a chain"]:
        state = (optax.EmptyState(), state)
    (found,) = said(jax.jit(build(tx)), PARAMS, state, X, Y)
    assert "computed in float16" in str(found.message)
    assert f'loss_scaling(optimizer, "{policy}")' in str(found.message)
    assert found.filename == __file__
    for right in (wrapped("O1"), jaxmp.static_loss_scale(optax.sgd(0.1))):
        assert not said(jax.jit(build(right)), PARAMS, state, X, Y)


def test_the_step_of_nnx_says_it_too():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, wrapped("mixed_bfloat16"), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, y):
        def loss(model, x, y):
            return jnp.mean((model(x) - y) ** 2)

        grad_fn = jaxmp.nnx.value_and_grad(loss, loss_scale=optimizer)
        _, grads = jaxmp.nnx.autocast(grad_fn, "mixed_float16")(model, x, y)
        optimizer.update(model, grads)

    (found,) = said(step, model, optimizer, X, Y)
    assert '"mixed_bfloat16"' in str(found.message)


WIDE = ["mixed_bfloat16", "mixed_float16_bfloat16", "float32"]


@pytest.mark.parametrize("policy", WIDE)
def test_a_wrapper_of_another_policy_with_range_enough_says_nothing(policy):
    for mine in ("mixed_bfloat16", "mixed_float16", "float32"):
        step = jax.jit(step_of(wrapped(mine), policy))
        assert not said(step, PARAMS, wrapped(mine).init(PARAMS), X, Y)


# A gradient without a scale

STATE_OF_FLOAT32 = jaxmp.loss_scaling(optax.sgd(1.0), "f32").init({})
UNSCALED = {
    "autocast around": lambda **o: jaxmp.autocast(jaxmp.grad(loss, **o), "O1"),
    "autocast inside": lambda **o: jaxmp.grad(jaxmp.autocast(loss, "O1"), **o),
    "with_policy inside": lambda **o: jaxmp.grad(cast_loss, **o),
    "policy": lambda **o: jaxmp.grad(cast_loss, policy="mixed_float16", **o),
    "under vmap": lambda **o: jaxmp.grad(
        lambda p, x, y: jax.vmap(cast_loss, (None, 0, 0))(p, x, y).mean(), **o
    ),
    "micro-batches": lambda **o: jaxmp.grad(
        cast_loss, accum_steps=2, batch_argnums=(1, 2), **o
    ),
    "a penalty": lambda **o: jaxmp.grad(
        lambda p, x, y: jnp.sum(jaxmp.grad(cast_loss, **o)(p, x, y)["w"] ** 2),
        loss_scale=8.0,
    ),
}


@pytest.mark.parametrize(
    ("build", "transform"),
    [
        *((build, jax.jit) for build in UNSCALED.values()),
        (UNSCALED["autocast around"], lambda f: f),
        (UNSCALED["micro-batches"], lambda f: f),
    ],
)
def test_a_float16_gradient_without_a_scale_is_said_once(build, transform):
    (found,) = said(transform(build()), PARAMS, X, Y)
    assert "without a loss scale" in str(found.message)
    assert found.filename == __file__
    assert not said(transform(build(loss_scale=1.0)), PARAMS, X, Y)


@pytest.mark.parametrize("scale", [1, 2.0**15, STATE_OF_FLOAT32], ids=str)
def test_any_scale_is_one(scale):
    for build in (UNSCALED["autocast inside"], UNSCALED["policy"]):
        assert not said(jax.jit(build(loss_scale=scale)), PARAMS, X, Y)


def apart(transform):
    """Returns losses in float16 that JAX traces before it differentiates them."""
    cast = {  # new functions, as JAX keeps the derivatives of those that it knows
        "with_policy": lambda *args: cast_loss(*args),
        "autocast": lambda *args: jaxmp.autocast(loss, "O1")(*args),
    }
    return {name: lambda *args, f=f: transform(f)(*args) for name, f in cast.items()}


def summed(fun):
    def run(params, x, y):
        return jax.lax.fori_loop(0, 2, lambda _, total: total + fun(params, x, y), 0.0)

    return run


APART = {
    "nothing": lambda fun: fun,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "loop": summed,
    "branch": lambda fun: (
        lambda p, *args: jax.lax.cond(p["w"][0, 0] < 9, fun, lambda *_: 0.0, p, *args)
    ),
}


@pytest.mark.parametrize("policy", [None, "mixed_bfloat16", "float32"])
@pytest.mark.parametrize("transform", APART.values(), ids=APART.keys())
@pytest.mark.parametrize("kind", ["with_policy", "autocast"])
def test_a_loss_in_float16_is_told_wherever_jax_has_traced_it(kind, transform, policy):
    """Also where `policy=` is another one, in which the parameters are cast."""

    def grad(**options):
        return jax.jit(jaxmp.grad(apart(transform)[kind], policy=policy, **options))

    (found,) = said(grad(), PARAMS, X, Y)
    assert "without a loss scale" in str(found.message)
    assert found.filename == __file__
    assert not said(grad(loss_scale=1.0), PARAMS, X, Y)

    def step(tx, params, state, x, y):
        grad_fn = jaxmp.grad(apart(transform)[kind], policy=policy, loss_scale=state)
        return tx.update(grad_fn(params, x, y), state)

    for mine, count in (("mixed_bfloat16", 1), ("mixed_float16", 0)):
        tx = wrapped(mine)
        found = said(jax.jit(partial(step, tx)), PARAMS, tx.init(PARAMS), X, Y)
        assert len(found) == count
        assert all(f'loss_scaling(optimizer, "{mine}")' in str(x) for x in found)


def of_scan(params, x, y):
    def layer(h, w):
        return jnp.tanh(h @ w), None

    return loss(params, jax.lax.scan(layer, x, jnp.stack([jnp.eye(8)] * 3))[0], y)


def over_a_mask(params, x, y):
    seen = y > 0
    return jnp.sum(jnp.square(apply(params, x) - y), where=seen) / seen.sum()


FORGOTTEN = {
    "jax.value_and_grad": jax.value_and_grad(loss),
    "jitted": jax.jit(jax.grad(loss)),
    "a root": jax.grad(lambda *args: jnp.sqrt(loss(*args))),
    "a sum": jax.grad(lambda params, x, y: jnp.sum(apply(params, x))),
    "a number": jax.grad(lambda p, x, y: loss(p, x, y) / 2 + 0.1 * p["w"][0, 0]),
    "over a count": jax.grad(over_a_mask),
    "of classes": jax.grad(
        lambda params, x, y: optax.softmax_cross_entropy_with_integer_labels(
            apply(params, x), y.argmax(-1)
        ).mean()
    ),
    "scan": jax.grad(of_scan),
    "remat": jax.grad(jax.checkpoint(loss)),
    "vmap": jax.vmap(jax.grad(loss), (None, 0, 0)),
    "vjp": lambda *args: jax.vjp(loss, *args)[1](1.0),
    "an image": jax.grad(lambda x, params, y: loss(params, x, y)),
}


@pytest.mark.parametrize("grad", FORGOTTEN.values(), ids=FORGOTTEN.keys())
def test_a_gradient_of_jax_in_float16_without_a_scale_is_said_once(grad):
    args = (X, PARAMS, Y) if grad is FORGOTTEN["an image"] else (PARAMS, X, Y)
    cast = jaxmp.autocast(grad, "mixed_float16")
    (found,) = said(cast, *args)
    assert "without a loss scale" in str(found.message)
    assert found.filename == __file__
    assert not said(cast, *args)
    assert len(said(jax.jit(jaxmp.autocast(grad, "mixed_float16")), *args)) == 1
    for policy in WIDE:
        assert not said(jaxmp.autocast(grad, policy), *args)


def test_the_gradients_of_nnx_and_a_train_state_are_told_too():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))

    def of_nnx(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    cast = jaxmp.nnx.autocast(nnx.value_and_grad(of_nnx), "mixed_float16")
    assert len(said(nnx.jit(cast), model, X, Y)) == 1
    scaled = jaxmp.nnx.value_and_grad(of_nnx, loss_scale=1.0)  # what it says
    assert not said(nnx.jit(jaxmp.nnx.autocast(scaled, "mixed_float16")), model, X, Y)
    state = TrainState.create(apply_fn=apply, params=PARAMS, tx=TX)

    @jax.jit
    def step(state, x, y):
        grad_fn = jax.grad(lambda p: jnp.mean((state.apply_fn(p, x) - y) ** 2))
        return state.apply_gradients(
            grads=jaxmp.autocast(grad_fn, "mixed_float16")(state.params)
        )

    assert len(said(step, state, X, Y)) == 1


# The gradients of these have a scale, or are meant to have none.
by_flax = DynamicScale()
MEANT = {
    "ours": jaxmp.value_and_grad(loss, loss_scale=1.0),
    "ours, jitted": jax.jit(jaxmp.grad(loss, loss_scale=2.0**15)),
    "a penalty in ours": jaxmp.grad(
        lambda *args: loss(*args) + jnp.sum(jax.grad(loss)(*args)["w"] ** 2),
        loss_scale=STATE,
    ),
    "by hand, a number": jax.grad(lambda *args: loss(*args) * 1024),
    "by hand, an array": jax.grad(lambda *args: jnp.float32(1024) * loss(*args)),
    "by Flax": lambda *args: by_flax.value_and_grad(loss)(*args)[1:],
    "by the cotangent": lambda *args: jax.vjp(loss, *args)[1](jnp.float32(1024)),
    "in a region": pytest.param(
        jaxmp.float32_region(jax.grad(loss)), marks=pytest.mark.keeps_float32
    ),
    "no gradient": loss,
    "tangents": lambda *args: jax.jvp(loss, args, args),
}


@pytest.mark.parametrize("grad", MEANT.values(), ids=MEANT.keys())
def test_gradients_that_are_scaled_or_meant_without_say_nothing(grad):
    def seen(*args):
        return [x for x in said(*args) if "constant of this" not in str(x.message)]

    assert not seen(jaxmp.autocast(grad, "mixed_float16"), PARAMS, X, Y)
    grad(PARAMS, X, Y)  # and JAX has traced it before
    assert not seen(jax.jit(jaxmp.autocast(grad, "mixed_float16")), PARAMS, X, Y)


def test_a_scale_by_hand_may_be_an_argument():
    def grad(params, scale, x, y):
        return jax.grad(lambda p: loss(p, x, y) * scale)(params)

    def of_exponent(params, exponent, x, y):
        return grad(params, jnp.exp2(jnp.minimum(exponent, 15)), x, y)

    for fun in (grad, of_exponent):
        step = jax.jit(jaxmp.autocast(fun, "mixed_float16"))
        assert not said(step, PARAMS, 10.0, X, Y)


def test_autocast_in_a_scaled_gradient_says_nothing_of_one_inside():
    def penalty(*args):
        return jnp.sum(jax.grad(loss)(*args)["w"] ** 2)

    cast = jaxmp.autocast(penalty, "mixed_float16")
    assert not said(jaxmp.grad(cast, loss_scale=8.0), PARAMS, X, Y)


@pytest.mark.parametrize("tool", ["audit", "explain"])
def test_a_tool_says_nothing_of_a_scale(tool):
    cast = jaxmp.autocast(jax.grad(loss), "mixed_float16")
    assert not said(getattr(jaxmp, tool)(cast), PARAMS, X, Y)


def test_no_gradient_is_no_gradient_without_a_scale():
    teacher = jaxmp.with_policy(apply, "mixed_float16")

    def student_loss(params, x):
        aims = teacher(PARAMS, x) + jaxmp.autocast(apply, "O1")(PARAMS, x)
        return jnp.mean((apply(params, x) - aims) ** 2)

    for policy in (None, "mixed_bfloat16"):
        grad_fn = jaxmp.grad(student_loss, policy=policy)
        assert not said(grad_fn, PARAMS, X)
        half = X.astype(jnp.bfloat16)  # or the look at a policy says what is float32
        assert not said(jax.jit(grad_fn), PARAMS, half)
    assert not said(teacher, PARAMS, X)
    assert not said(jaxmp.autocast(jax.jit(loss), "O1"), PARAMS, X, Y)
    for policy in ("mixed_bfloat16", "float32"):
        assert not said(jaxmp.autocast(jaxmp.grad(loss), policy), PARAMS, X, Y)
    region = jaxmp.float32_region(jaxmp.grad(loss))
    assert not said(jaxmp.autocast(region, "mixed_float16"), PARAMS, X, Y)


# A policy by which nothing runs in 16 bits


@pytest.mark.parametrize(
    ("policy", "steps"), [("mixed_float16", 1), ("mixed_bfloat16", 2)]
)
def test_a_policy_under_which_nothing_runs_in_16_bits_names_the_line(policy, steps):
    grad_fn = jaxmp.value_and_grad(
        loss, policy=policy, loss_scale=8.0, accum_steps=steps, batch_argnums=(1, 2)
    )
    (found,) = said(jax.jit(grad_fn), PARAMS, X, Y)
    assert "No matmul runs in 16 bits" in str(found.message)
    line = loss.__code__.co_firstlineno - 3  # of the first product in `apply`
    why = f"The matmul at test_wiring.py:{line} is float32 because `x` is."
    assert why in str(found.message)
    assert found.filename == __file__
    assert jaxmp.audit(grad_fn)(PARAMS, X, Y).fraction_16bit == 0

    # Its two pieces of advice.
    scaled = jaxmp.value_and_grad(loss, loss_scale=8.0)
    jaxmp.assert_16bit(jaxmp.autocast(scaled, policy), PARAMS, X, Y)
    model = jaxmp.with_policy(apply, policy)
    cast = jaxmp.value_and_grad(
        lambda p, x, y: jnp.mean((model(p, x) - y) ** 2), policy=policy, loss_scale=8.0
    )
    assert not said(jax.jit(cast), PARAMS, X, Y)
    jaxmp.assert_16bit(cast, PARAMS, X, Y)


def test_a_constant_that_keeps_all_in_float32_is_named():
    table = jnp.ones((4, PARAMS["w"].shape[0]))

    def loss_of_table(params, x):
        return jnp.mean((table[x] @ params["w"]) ** 2)

    grad_fn = jax.jit(jaxmp.grad(loss_of_table, policy="mixed_bfloat16"))
    (found,) = said(grad_fn, PARAMS, jnp.arange(4))
    why = f"is float32 because a constant float32{[*table.shape]} is."
    assert why in str(found.message)


def test_a_product_of_what_the_function_makes_has_no_cause():
    grad_fn = jaxmp.grad(
        lambda params: jnp.mean((jax.lax.iota(jnp.float32, 8) @ params["w"]) ** 2),
        policy="mixed_bfloat16",
    )
    (found,) = said(jax.jit(grad_fn), PARAMS)
    assert "every matmul to float32. To run them" in str(found.message)


def test_a_float64_batch_under_a_policy_is_told_to_be_cast():
    with jax.enable_x64(True):
        grad_fn = jax.jit(jaxmp.value_and_grad(loss, policy="mixed_bfloat16"))
        (found,) = said(grad_fn, PARAMS, np.asarray(X, np.float64), Y)
    assert "is float64 because `x` is. Cast it to float32" in str(found.message)


def test_a_policy_under_which_a_product_runs_in_16_bits_says_nothing():
    half, wide = X.astype(jnp.bfloat16), partial(jaxmp.grad, loss_scale=1.0)
    cast = wide(loss, policy="mixed_bfloat16")
    assert not said(jax.jit(cast), PARAMS, half, Y)
    assert not said(jax.jit(jaxmp.autocast(cast, "mixed_bfloat16")), PARAMS, X, Y)
    assert said(jax.jit(jaxmp.autocast(cast, "float32")), PARAMS, X, Y)
    assert not said(jax.jit(wide(loss, policy="float32")), PARAMS, X, Y)
    no_product = wide(lambda p: jnp.sum(p["w"] ** 2), policy="mixed_bfloat16")
    assert not said(jax.jit(no_product), PARAMS)


def test_a_policy_traces_the_loss_once_and_what_has_a_value_keeps_it():
    table, calls = np.arange(4.0), []

    def values(params, x, table, scale, name):
        calls.append(name)
        assert float(table[1]) == 1
        assert float(scale) == 2
        return jnp.mean((x @ params["w"]) ** 2) * scale

    grad_fn = jaxmp.grad(values, policy="mixed_bfloat16")

    two = jnp.float32(2)
    assert said(jax.jit(lambda p, x: grad_fn(p, x, table, two, "a name")), PARAMS, X)
    assert calls == ["a name"]  # it is traced once


def test_an_array_that_is_closed_over_is_found_too():
    @jax.jit
    def step(params, x, y):
        grad_fn = jaxmp.grad(lambda p: loss(p, x, y), policy="mixed_bfloat16")
        return grad_fn(params)

    (found,) = said(step, PARAMS, X, Y)
    assert "float32" in str(found.message)


def test_a_module_of_nnx_under_a_policy_is_looked_at():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    build = partial(jaxmp.nnx.value_and_grad, policy="mixed_bfloat16")
    grad_fn = nnx.jit(build(lambda m, x: jnp.mean(m(x) ** 2)))
    (found,) = said(grad_fn, model, X)
    assert "is float32 because `x` is." in str(found.message)
    cast = build(lambda m, x: jnp.mean(jaxmp.with_policy(m, "c=bf16")(x) ** 2))
    assert not said(nnx.jit(cast), model, X)


# Gradients that are divided already


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_gradients_in_true_units_are_not_divided_again(transform):
    def twice(params, opt_state):
        grads = jaxmp.grad(loss, loss_scale=opt_state)(params, X, Y)
        return jaxmp.unscale(grads["w"], opt_state)

    with pytest.raises(ValueError, match="divided them by its loss scale already"):
        transform(twice)(PARAMS, STATE)

    def by_hand(params, opt_state):
        scale = jaxmp.get_loss_scale(opt_state)
        true = jaxmp.grad(loss, loss_scale=opt_state)(params, X, Y)
        grads = jax.grad(lambda p: loss(p, X, Y) * scale)(params)
        return jaxmp.unscale(grads, opt_state), true

    got, true = transform(by_hand)(PARAMS, STATE)
    np.testing.assert_array_equal(got["w"], true["w"])

    def by_hand_with_ours(params, opt_state):
        scale = jaxmp.get_loss_scale(opt_state)
        grad_fn = jaxmp.grad(lambda p: loss(p, X, Y) * scale, loss_scale=1.0)
        return jaxmp.unscale(grad_fn(params), opt_state)

    got = transform(by_hand_with_ours)(PARAMS, STATE)
    np.testing.assert_array_equal(got["w"], true["w"])


# Several optimizers


def test_of_two_states_the_smaller_scale_is_used():
    small = STATE._replace(loss_scale=jnp.float32(4))
    seen = []

    @jax.custom_vjp
    def watched(x):
        return x

    watched.defvjp(lambda x: (x, None), lambda _, g: (seen.append(g), (g,))[1])
    for states in ((STATE, small), (small, STATE)):
        grad = jaxmp.grad(lambda x: watched(x), loss_scale=states)(3.0)
        assert grad == 1
        assert seen.pop() == 4
    with pytest.raises(ValueError, match="holds 2"):
        jaxmp.get_loss_scale((STATE, small))
