"""Whatever is put wherever, an answer is short, and prints no array."""

import functools
import html
import inspect
import re
import traceback
import warnings
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxmp
import jaxmp.linen
import jaxmp.nnx
import jaxmp.plots

LONGEST = 1200
PACKAGE = Path(jaxmp.__file__).parent

# What is large, and stands where it should not


class Large(nn.Module):
    widths: tuple[int, ...] = tuple(range(2000))
    table: dict | None = None

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


PARAMS = {f"layer_{i}": {"kernel": jnp.full((8, 8), 3.3)} for i in range(6)}
TX = jaxmp.loss_scaling(optax.adam(1e-3), "mixed_float16")
STATE = TX.init(PARAMS)
POLICY = jaxmp.get_policy("mixed_float16").with_overrides(
    *[(f"layer_{i}/", "float32") for i in range(200)]
)
NET = nnx.Sequential(*[nnx.Linear(8, 8, rngs=nnx.Rngs(0)) for _ in range(4)])
SMALL, X = {"w": jnp.ones((8, 2))}, jnp.ones((8, 8))
LARGE = {
    "parameters": PARAMS,
    "a NumPy tree": jax.tree.map(np.asarray, PARAMS),
    "a list of arrays": jax.tree.leaves(PARAMS),
    "a state": STATE,
    "the state of adam": STATE.inner_state,
    "a Linen model": Large(table={f"name {i}": i for i in range(500)}),
    "an NNX model": NET,
    "an NNX optimizer": nnx.Optimizer(NET, optax.adam(1e-3), wrt=nnx.Param),
    "a TrainState": TrainState.create(apply_fn=len, params=PARAMS, tx=TX),
    "an array": jnp.linspace(0, 1, 4096).reshape(64, 64),
    "a NumPy array": np.linspace(0, 1, 999),
    "a dict": {f"name {i}": f"value {i}" for i in range(500)},
    "a string": "mixed_float16, " * 400,
    "a string of one word": "x" * 5000,
    "strings": [f"name_{i}" for i in range(500)],
    "numbers": list(range(3000)),
    "a large number": 10**4000,
    "a number that Python does not print": 10**5000,
    "a policy": POLICY,
    "a function": loss_fn,
    "a class": Large,
    "an optimizer": TX,
    "a report": jaxmp.audit(loss_fn)(SMALL, X),
    "nothing": None,
}

# What each name of a parameter takes, where it must be given and nothing is wrong.
GOOD = {
    "fun": loss_fn,
    "reference": loss_fn,
    "other": loss_fn,
    "module": nn.Dense,
    "model": nn.Dense(2),
    "policy": "mixed_float16",
    "inner": optax.sgd(0.1),
    "tx": TX,
    "params": PARAMS,
    "tree": SMALL,
    "ranges": SMALL,
    "dtype": "float16",
    "opt_state": STATE,
    "loss_scale": 2.0**15,
    "history": [STATE],
    "specs": None,
    "pred": True,
    "on_true": SMALL,
    "on_false": SMALL,
    "allow": {"dot_general"},
    "deny": {"exp"},
    "infer": {"add"},
    "param_dtype": "float32",
    "compute_dtype": "float16",
    "output_dtype": "float32",
}
REPORTS = {
    jaxmp.plots.overflow: jaxmp.find_overflow(loss_fn)(
        *jaxmp.cast_tree((SMALL, X), "float16")
    ),
    jaxmp.plots.parity: jaxmp.parity(loss_fn, loss_fn)(SMALL, X),
    jaxmp.plots.sensitivity: jaxmp.sensitivity(loss_fn, "bfloat16")(SMALL, X),
}


def public_functions():
    """Yields every public function, the methods of what they return, and its name."""
    for module in (jaxmp, jaxmp.linen, jaxmp.nnx, jaxmp.plots):
        for name in module.__all__:
            if inspect.isfunction(getattr(module, name)):
                yield f"{module.__name__}.{name}", getattr(module, name)
    yield "jaxmp.Policy", jaxmp.Policy
    yield "jaxmp.OpLists", jaxmp.OpLists
    for thing in (jaxmp.get_policy("O1"), jaxmp.DEFAULT_OPS):
        for name, method in inspect.getmembers(thing, inspect.ismethod):
            if not name.startswith("_"):
                yield f"{type(thing).__name__}.{name}", method
    yield "tx.update", TX.update


FUNCTIONS = dict(public_functions())


def good(fun, parameter):
    """Returns what is right in the place of a parameter that must be given."""
    if parameter.name == "report":
        return REPORTS[fun]
    if fun is TX.update:
        return {"updates": PARAMS, "state": STATE}[parameter.name]
    return GOOD.get(parameter.name)


def calls(fun):
    """Yields each parameter, and a function that puts something in its place."""
    parameters = inspect.signature(fun).parameters
    needed = [
        p
        for p in parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    for wrong in parameters.values():
        if wrong.kind == wrong.VAR_KEYWORD:
            continue

        def call(thing, wrong=wrong):
            given = {p.name: good(fun, p) for p in needed if p is not wrong}
            if wrong.kind == wrong.VAR_POSITIONAL:
                return fun(*given.values(), thing)
            if wrong.kind == wrong.POSITIONAL_ONLY:
                return fun(thing, *given.values())
            return fun(**given, **{wrong.name: thing})

        yield wrong.name, call


def check_answer(call, *, others_may_answer=False):
    """Calls something that may be wrong, and looks at what is answered."""
    messages = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            is_ours = PACKAGE in Path(frame.f_code.co_filename).parents
            is_answer = isinstance(error, (TypeError, ValueError, FloatingPointError))
            if others_may_answer and not (is_ours and is_answer):
                return
            if not is_answer:
                raise
            messages = [str(error), *getattr(error, "__notes__", ())]
    messages = [x for x in messages if "JAX has removed its internal frames" not in x]
    for message in (*messages, *(str(x.message) for x in caught)):
        assert 0 < len(message) <= LONGEST, f"{len(message)}: {message[:300]}"
        # Arrays and numbers in rows, as NumPy and JAX print them.
        assert not re.search(r"[Aa]rray\(|\d\.[\de+-]*,?\s+-?\d+\.\d", message), message


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_whatever_is_put_wherever_the_answer_is_short(name):
    for _, call in calls(FUNCTIONS[name]):
        for thing in LARGE.values():
            check_answer(
                functools.partial(call, thing),
                # Of the structure of the gradients, optax knows more.
                others_may_answer=FUNCTIONS[name] is TX.update,
            )


WRAPPERS = {
    "value_and_grad": jaxmp.value_and_grad,
    "value_and_grad, with aux": functools.partial(jaxmp.value_and_grad, has_aux=True),
    "value_and_grad, split": functools.partial(
        jaxmp.value_and_grad, accum_steps=3, batch_argnums=1
    ),
    "nnx.value_and_grad": jaxmp.nnx.value_and_grad,
    "with_policy": functools.partial(jaxmp.with_policy, policy="mixed_float16"),
    "autocast": jaxmp.autocast,
    "activation_gradients": jaxmp.activation_gradients,
    "audit": jaxmp.audit,
    "explain": jaxmp.explain,
    "sensitivity": jaxmp.sensitivity,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_whatever_a_wrapped_function_is_given_or_returns_the_answer_is_short(wrap):
    def total(*trees):
        arrays = (x for x in jax.tree.leaves(trees) if isinstance(x, jax.Array))
        return next(arrays, X).sum()

    check = functools.partial(check_answer, others_may_answer=True)
    for thing in LARGE.values():
        check(lambda thing=thing: wrap(total)(thing))
        check(lambda thing=thing: wrap(total)(SMALL, thing))
        check(lambda thing=thing: wrap(lambda x: thing)(X))


def test_a_model_in_the_place_of_the_parameters_is_named():
    with pytest.raises(
        TypeError, match=r"`argument` must be an array, but is .* Large"
    ):
        jaxmp.value_and_grad(lambda model, x: x.sum())(LARGE["a Linen model"], X)


def test_a_report_that_fails_a_test_is_cut_and_says_where_the_rest_is():
    def fun(params, x):
        for i in range(12):
            with jax.named_scope(f"a_long_name_of_a_block_{i}/and_of_its_attention"):
                x = x @ params[f"weight_{i}"]
        # Of a function with nothing in 16 bits the report is its verdict alone.
        return x.astype(jnp.bfloat16) @ x.T.astype(jnp.bfloat16)

    params = {f"weight_{i}": jnp.ones((8, 8)) for i in range(12)}
    with pytest.raises(AssertionError, match=r"`print\(jaxmp.audit\(fun\)") as error:
        jaxmp.assert_16bit(fun, params, X)
    assert len(str(error.value)) <= LONGEST


# The state of a loss scale


def test_a_loss_scale_state_is_one_line():
    numbers = "loss_scale=32768.0, good_steps=0, bad_steps=0, skipped=0"
    expected = f"LossScaleState({numbers}, last_finite=True, inner_state=a tuple of 2)"
    assert repr(STATE) == str(STATE) == expected
    stacked = jax.vmap(TX.init)({"w": jnp.ones((8, 2))})
    nowhere = jax.eval_shape(TX.init, SMALL)
    net = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    in_nnx = nnx.Optimizer(net, TX, wrt=nnx.Param).opt_state
    for state in (stacked, nowhere, in_nnx, jax.tree.map(lambda x: None, STATE)):
        assert "\n" not in repr(state)
        assert len(repr(state)) < 200
    assert "loss_scale=float32[8]," in repr(stacked)
    assert "loss_scale=float32[]," in repr(nowhere)
    jax.jit(lambda state: print(state))(STATE)


def test_a_donated_state_can_still_be_printed():
    state = TX.init(SMALL)
    state.loss_scale.delete()
    assert "loss_scale=float32[], good_steps=0" in repr(state)


# In a notebook


@pytest.mark.parametrize(
    "thing",
    [
        jaxmp.audit(loss_fn)(SMALL, X),
        jaxmp.find_overflow(loss_fn)(SMALL, X),
        jaxmp.sensitivity(loss_fn, "bfloat16")(SMALL, X),
        jaxmp.range_report({"<b>&": X}),
        STATE,
        jaxmp.get_policy('c=f16,"<i>x</i>"=f32'),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_a_notebook_shows_the_text_of_a_report(thing):
    shown = thing._repr_html_()
    text = repr(thing) if isinstance(thing, jaxmp.Policy) else str(thing)
    inside = re.fullmatch("<pre>(.*)</pre>", shown, re.S)[1]
    assert "<" not in inside
    assert html.unescape(inside) == text
