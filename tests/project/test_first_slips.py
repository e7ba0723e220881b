"""What a newcomer types first and wrong is answered with what to type instead."""

import contextlib
import inspect
import io
import re
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh
from matplotlib.figure import Figure

import jaxmp
import jaxmp.linen
import jaxmp.nnx
import jaxmp.plots
from conftest import answered
from jaxmp._names import ANSWERS

PARAMS = {"w": jnp.ones(8)}
X, Y = jnp.arange(32.0).reshape(4, 8) / 8, jnp.arange(4.0)
MODEL, POLICY = nn.Dense(2), jaxmp.get_policy("mixed_float16")
VARIABLES = {"params": {"kernel": jnp.ones((8, 2)), "bias": jnp.zeros(2)}}
TX = jaxmp.loss_scaling(optax.adam(1e-3), "mixed_float16")
STATE = TX.init(PARAMS)
MESH = Mesh(jax.devices()[:2], ("data",))
BATCH = {"batch_argnums": (1, 2)}


class Transformed(NamedTuple):  # as `hk.transform` returns it
    init: Callable
    apply: Callable


HAIKU = Transformed(MODEL.init, MODEL.apply)


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] - y) ** 2)


def vag(**options):
    return jaxmp.value_and_grad(loss_fn, **options)


def returning(result, **options):
    return jaxmp.value_and_grad(lambda w: result, **options)(1.0)


# What is typed, and what of the answer tells how it should have been.
SLIPS = r"""
# The optimizer
jaxmp.loss_scaling("O1", optax.adam(1.0))
    comes first
jaxmp.loss_scaling(optax.adam, "O1")
    function `adam`. Call it.*`adam\(1e-3\)`
jaxmp.loss_scaling(STATE, "O1")
    type LossScaleState. Pass for example `optax.adam
jaxmp.static_loss_scale(optax.adam(1.0), "O1")
    `scale` must be a number, but is 'O1'
TX.update(PARAMS, PARAMS, PARAMS)
    `opt_state = tx
TX.update(PARAMS, optax.adam(1.0).init(PARAMS), PARAMS)
    but got a tuple of 2.*tx.init
TX.update(STATE, PARAMS, PARAMS)
    `tx.update\(grads, opt_state, params\)`
jaxmp.get_loss_scale(TX)
    is the optimizer. Pass what `tx.init\(params\)`
jaxmp.init_shardings(PARAMS, TX)
    `init_shardings\(tx, params\)` takes the optimizer first
jaxmp.with_policy(MODEL, "O1")
    module `Dense`.*`with_policy\(model.apply, policy\)`
jaxmp.with_policy("O1", MODEL.apply)
    function comes first: `with_policy\(fun, policy\)`
jaxmp.with_policy(X, "O1")
    array float32\[4, 8\]. Pass the function itself
jaxmp.value_and_grad(MODEL)
    the loss,
jaxmp.value_and_grad(loss_fn(PARAMS, X, Y))
    array float32\[\]. Pass the function itself, and call the result
jaxmp.grad(loss_fn, 0)
    `jaxmp.grad` takes the function, and everything else by its name.*argnums=0
jaxmp.nnx.value_and_grad(loss_fn, 0)
    `jaxmp.nnx.value_and_grad` takes the function.*argnums=0
jaxmp.autocast("mixed_float16", loss_fn)
    function comes first: `autocast\(fun, policy\)`
jaxmp.autocast("mixed_float16").__enter__()
    got str.*function comes first.*It is not a context manager.*as a decorator
jaxmp.autocast(MODEL)
    `autocast.model.apply
jaxmp.autocast(loss_fn, ops="tanh")
    `ops=jaxmp.DEFAULT_OPS.with_deny\(
jaxmp.float32_region(X)
    Pass the function
jaxmp.linen.activation_gradients(MODEL)
    Pass the loss
# A Linen model
jaxmp.linen.with_policy(MODEL.apply, "O2")
    method `apply`. Pass the model itself: `jaxmp.linen.with_policy\(model
jaxmp.linen.with_policy(MODEL.bind(VARIABLES), "O2")
    bound to variables: `model.unbind\(\)`
jaxmp.autocast(HAIKU)
    model\.apply
jaxmp.linen.with_policy(HAIKU, "O2")
    there is `jaxmp.with_policy`
# The arguments of the function in the same call
jaxmp.audit(loss_fn, PARAMS, X)
    ^Type `jaxmp.audit\(fun\)\(\*
jaxmp.sensitivity(loss_fn, "O1", PARAMS)
    ^Type `jaxmp.sensitivity\(loss_fn, "mixed_float16"\)\(\*args\)`
jaxmp.float32_region(jnp.matmul, X, X)
    ^Type `jaxmp.float32_region\(fun\)\(\*args\)`
jaxmp.with_policy(MODEL.apply, "O1", VARIABLES, X)
    ^Type `jaxmp.with_policy\(fun, .*\)\(\*args\)`
jaxmp.value_and_grad(loss_fn, accumulate=2)
    has no option `accumulate`. Expected one of .*accum_steps
jaxmp.value_and_grad(loss_fn, STATE)
    LossScaleState
# Autocast as torch has it
jaxmp.autocast().__enter__()
    ^Type `jaxmp.autocast\(fun, .*It is not a context manager
jaxmp.autocast("cuda", dtype=jnp.float16)
    names no device.*has no option `dtype`
jaxmp.autocast(policy="O1")
    `@functools.partial\(jaxmp.autocast, policy=\"mixed_float16\"\)`
# The operations and modules
jaxmp.DEFAULT_OPS.with_deny("softmax")
    Type `jaxmp.float32_region\(jax.nn.softmax\)`
jaxmp.DEFAULT_OPS.with_deny(jax.nn.softmax)
    type `jaxmp.float32_region\(fun\)`
jaxmp.autocast(loss_fn, float32_paths=jaxmp.audit(loss_fn))
    `float32_paths` must be.*`float32_paths=\("head",\)`
# The plots
jaxmp.plots.overflow(jaxmp.find_overflow(loss_fn))
    got the function `loss_fn`. Type `jaxmp.plots.overflow\(jaxmp.find_overflow
jaxmp.plots.sensitivity(jaxmp.audit(loss_fn)(PARAMS, X, Y))
    got an object of type DtypeReport. Type `jaxmp.plots.sensitivity\(jaxmp.se
jaxmp.plots.loss_scale([TX])
    is the optimizer. Pass what `tx.init
jaxmp.plots.exponents(jaxmp.range_report(PARAMS))
    Pass the parameters or gradients
# Policies
jaxmp.get_policy("fp16")
    `mixed_float16`, with float32 parameters\? `float16` has everything in 16
jaxmp.loss_scaling(optax.adam(1.0), "O1", scale=8)
    `jaxmp.static_loss_scale`.*no option `scale`
jaxmp.loss_scaling(optax.adam(1.0))
    ^Type `jaxmp.loss_scaling\(optax.adam\(1e-3\), \"mixed_float16\"\)`
# The loss scale
vag(loss_scale=POLICY)
    another argument, `policy
vag(loss_scale=TX)
    returns|`tx.init
vag(loss_scale=None)
    Leave it out
vag(loss_scale=True)
    must be a number, but is True
vag(loss_scale=PARAMS)
    no `LossScaleState` in
jaxmp.activation_gradients(loss_fn, loss_scale=TX)
    is the optimizer. Pass what
jaxmp.unscale(2.0**15, PARAMS)
    `unscale\(grads, loss_scale\)` takes the gradients first.*Swap
vag(mesh="data", **BATCH)
    `mesh=jax.sharding.Mesh\(jax.devices\(\).*`axis_name='data'`
vag(mesh=jax.sharding.NamedSharding(MESH, jax.P("data")), **BATCH)
    `mesh=sharding.mesh`
jaxmp.all_finite("data", axis_name=PARAMS)
    `axis_name="data"`
vag(axis_name=5)
    name of a mesh axis or several, but is 5
vag(argnums="params")
    `argnums=1`
vag(argnums=True)
    count from 0
vag(argnums=())(PARAMS, X, Y)
    Pass `argnums=0`
vag(argnums=(0, -3))(PARAMS, X, Y)
    each once
vag(batch_argnums="x")
    `batch_argnums=1`
vag()(params=PARAMS, x=X, y=Y)
    by position
# Trees
jaxmp.select_tree(PARAMS, PARAMS, jnp.array(True))
    `select_tree\(pred, on_true, on_false\)`.*got a dict.*last_step_finite
jaxmp.select_tree(STATE, PARAMS, PARAMS)
    Pass `jaxmp.last_step_finite\(opt_state\)`
jaxmp.cast_tree(jnp.float16, PARAMS)
    `cast_tree\(tree, dtype\)` takes the tree first
# What the loss returns
returning((jnp.ones(()), X))
    tuple of 2.*`has_aux=True`
returning({"loss": jnp.ones((4, 4))})
    a dict of 1.*`has_aux
returning(Y)
    float32\[4\].*`.mean\(\)`
returning([1.0, X], has_aux=True)
    pair.*list of 2
"""


@pytest.mark.usefixtures("few_objects")
@answered(SLIPS)
def test_a_slip_is_answered_with_a_sentence(typed, answer):
    with pytest.raises((TypeError, ValueError), match=answer) as error:
        eval(typed, globals())
    message = str(error.value)
    assert message.endswith(".")
    assert "`" in message
    assert len(message) < 400


# What each name of another library is for, as its users type it.
OTHERS = (
    "amp GradScaler LossScaleOptimizer DynamicScale StaticLossScale set_global_policy "
    "cast_to_half cast_to_compute force_full_precision filter_grad half_function"
)


@pytest.mark.parametrize("name", OTHERS.split())
def test_a_name_of_another_library_is_answered(name):
    with pytest.raises(AttributeError, match=f"^jaxmp has no `{name}`: ") as error:
        getattr(jaxmp, name)
    assert len(str(error.value)) < 400
    assert not hasattr(jaxmp, name)


@pytest.mark.parametrize("answer", sorted(set(ANSWERS.values())))
def test_the_answer_to_a_name_of_another_library_works(answer):
    def fun(params, x):
        return jnp.mean(x @ params["w"])

    names = {"jax": jax, "jaxmp": jaxmp, "optax": optax, "loss_fn": fun, "fun": fun}
    names |= {"params": PARAMS, "x": X, "opt_state": STATE}
    with contextlib.redirect_stdout(io.StringIO()):
        for typed in re.findall("`([^`]*)`", answer):
            exec(typed, names)
    assert re.search(r"`[^`]*jaxmp\.[^`]*`", answer)
    if "tx" in names:
        assert jaxmp.get_loss_scale(names["tx"].init(PARAMS)) > 1


@pytest.mark.parametrize(
    ("module", "name", "answer"),
    [
        (jaxmp.nnx, "with_policy", "type `jaxmp.with_policy`"),
        (jaxmp.nnx, "loss_scaling", "type `jaxmp.loss_scaling`"),
        (jaxmp.nnx, "grad", r"`jaxmp.nnx.value_and_grad\(.*the gradients second"),
        (jaxmp.nnx, "GradScaler", "state of the optimizer"),
        (jaxmp.nnx, "value_and_grads", "no attribute 'value_and_grads'"),
        (jaxmp.linen, "autocast", "type `jaxmp.autocast`"),
        (jaxmp.linen, "find_overflow", "type `jaxmp.find_overflow`"),
    ],
)
def test_a_front_end_says_where_a_name_is_that_it_lacks(module, name, answer):
    with pytest.raises(AttributeError, match=answer):
        getattr(module, name)
    assert not hasattr(module, name)


def test_no_public_name_is_that_of_another_library():
    assert not set(ANSWERS) & set(dir(jaxmp))


def test_a_misspelt_name_is_answered_by_python(capsys):
    with pytest.raises(AttributeError) as error:
        jaxmp.autocats  # noqa: B018
    sys.__excepthook__(error.type, error.value, None)
    assert "Did you mean: 'autocast'?" in capsys.readouterr().err


def test_what_the_answers_say_to_type_works():
    half = jaxmp.cast_tree((PARAMS, X, Y), "float16")
    assert jaxmp.audit(loss_fn)(PARAMS, X, Y).fraction_16bit == 0
    assert jaxmp.find_overflow(loss_fn)(*half).first is None
    report = jaxmp.sensitivity(loss_fn, "mixed_float16")(PARAMS, X, Y)
    jaxmp.plots.sensitivity(report)
    jaxmp.plots.exponents(PARAMS, ax=Figure().subplots())
    decorated = partial(jaxmp.autocast, policy="mixed_float16")(loss_fn)
    np.testing.assert_allclose(decorated(*half), loss_fn(PARAMS, X, Y), rtol=1e-2)
    kept = jaxmp.autocast(lambda x: jaxmp.float32_region(jax.nn.softmax)(x @ x.T))
    assert kept(X).dtype == jnp.float32


@pytest.mark.parametrize(
    "report", [jaxmp.audit, jaxmp.explain, jaxmp.find_overflow, jaxmp.sensitivity]
)
def test_a_report_that_is_not_called_says_so_when_it_is_printed(report):
    expected = f"<function jaxmp.{report.__name__}(loss_fn), to be called with the"
    assert str(report(loss_fn)).startswith(expected)
    assert inspect.signature(report(loss_fn)) == inspect.signature(loss_fn)


def test_what_looks_like_a_slip_and_is_none_passes():
    scale = jaxmp.get_loss_scale(STATE)
    jaxmp.unscale(jnp.float32(2), scale)  # one gradient, and it is a scalar
    jaxmp.cast_tree(PARAMS, np.dtype("float16"))
    jaxmp.select_tree(np.True_, PARAMS, PARAMS)
    jaxmp.autocast(MODEL.apply)(VARIABLES, X)
    jaxmp.autocast(eqx.nn.Linear(8, 2, key=jax.random.key(0)))(X[0])
    jaxmp.with_policy(MODEL.bind(VARIABLES), "mixed_float16")(X)
    jaxmp.grad(lambda w, x: w, mesh=MESH, batch_argnums=1)(1.0, X)
    jaxmp.grad(lambda w: w, mesh=MESH.abstract_mesh, batch_argnums=1)
    duck = SimpleNamespace(init=TX.init, update=TX.update)
    assert jaxmp.static_loss_scale(duck).init(PARAMS).loss_scale == 1


# Labels that are forgotten in `batch_argnums`


@pytest.mark.parametrize(
    "labels", [Y, np.ones(4), {"y": Y}, (Y, None), [Y, Y[:, None]]]
)
@pytest.mark.parametrize(
    "options", [{"accum_steps": 4}, {"mesh": MESH}], ids=["accumulated", "mesh"]
)
def test_labels_that_are_not_split_with_the_batch_are_refused(labels, options):
    def loss_of_a_tree(params, x, labels):
        return loss_fn(params, x, jax.tree.leaves(labels)[0])

    forgetful = jaxmp.value_and_grad(loss_of_a_tree, batch_argnums=1, **options)
    with pytest.raises(
        ValueError, match=r"Argument 2 has 4 examples.*Pass `.*=\(1, 2\)`"
    ):
        forgetful(PARAMS, X, labels)
    with pytest.raises(ValueError, match="Argument 2 has 4 examples"):
        jax.jit(forgetful)(PARAMS, X, labels)


@pytest.mark.parametrize(
    "batch_argnums", [(1, 2), [-2, -1], (2, 1, 1), np.array([1, 2])]
)
def test_the_answer_to_forgotten_labels_is_right(batch_argnums):
    whole = jax.value_and_grad(loss_fn)(PARAMS, X, Y)
    split = vag(accum_steps=4, batch_argnums=batch_argnums)(PARAMS, X, Y)
    np.testing.assert_array_equal(split[0], whole[0])
    np.testing.assert_array_equal(split[1]["w"], whole[1]["w"])


def test_what_has_as_many_rows_by_chance_passes_by_keyword():
    def loss_fn(params, x, table):  # of four classes, as the batch has four rows
        return jnp.mean(x @ params["w"] * table.sum())

    table = jnp.arange(4.0)
    grad = jaxmp.grad(loss_fn, accum_steps=2, batch_argnums=1)
    with pytest.raises(ValueError, match="pass it by keyword"):
        grad(PARAMS, X, table)
    expected = jax.grad(loss_fn)(PARAMS, X, table)["w"]
    np.testing.assert_array_equal(grad(PARAMS, X, table=table)["w"], expected)


@pytest.mark.parametrize(
    "other",
    [
        {"BatchNorm_0": {"mean": jnp.ones(4), "var": jnp.ones(4)}},  # four channels
        {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)},
        TrainState.create(apply_fn=len, params={"w": jnp.ones(4)}, tx=optax.sgd(1.0)),
        jax.random.key(0),
        jnp.float32(4),
        jnp.ones((3, 4)),
        (Y, 0.5),
        None,
        4,
        "four",
        True,
    ],
    ids=lambda other: type(other).__name__,
)
def test_what_is_no_part_of_the_batch_passes(other):
    grad = jaxmp.grad(lambda w, x, other: w * x.mean(), accum_steps=2, batch_argnums=1)
    assert grad(1.0, X, other) == X.mean()


def test_parameters_are_never_taken_for_a_part_of_the_batch():
    grad = jaxmp.grad(lambda w, x: (w * x.mean()).sum(), accum_steps=2, batch_argnums=1)
    np.testing.assert_array_equal(grad(jnp.ones(4), X), X.mean())
    both = jaxmp.grad(lambda x, w, v: (w * v).sum() * x.mean(), argnums=(1, 2),
                      accum_steps=2, batch_argnums=0)  # fmt: skip
    np.testing.assert_array_equal(both(X, Y, jnp.ones(4))[0], X.mean())


def test_a_batch_that_stays_whole_is_not_looked_at():
    one = Mesh(jax.devices()[:1], ("data",))
    expected = jax.jit(jax.grad(loss_fn))(PARAMS, X, Y)
    for options in ({}, {"accum_steps": 1}, {"mesh": one}):
        grad = jax.jit(jaxmp.grad(loss_fn, batch_argnums=1, **options))
        np.testing.assert_array_equal(grad(PARAMS, X, Y)["w"], expected["w"])
