"""What `explain` says of each line: what autocast does, and no second opinion."""

import collections
import contextlib
import functools
import html
import io
import json
import re
import types
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jaxmp
import jaxmp.nnx
from benchmarks.counting.measure import traced as equations_of
from jaxmp._autocast import rules
from jaxmp._autocast.emit import recording
from jaxmp._jaxprs import jaxpr as _jaxpr
from jaxmp._jaxprs.places import is_users
from jaxmp._jaxprs.scopes import STEP

HALVES = ("bfloat16", "float16")
PAGE = Path(__file__).parents[2] / "docs/explain.md"


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


W, X = shape(8, 8), shape(4, 8)


def explained(fun, *args):
    """Returns the report, no line of which is too long."""
    report = jaxmp.explain(fun)(*args)
    assert all(len(line) <= 80 for line in str(report).splitlines())
    fields = report.as_dict()
    assert json.loads(json.dumps(fields)) == fields
    return report


def at(report, source):
    """Returns what is said of the one line with such code."""
    (line,) = (x for x in report.lines if source in x.source)
    return line


def dtype_and_rule(report, source):
    line = at(report, source)
    return line.dtype, line.rule


# Programs


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        q, k, v = jnp.split(nn.Dense(24)(y), 3, axis=-1)
        s = jnp.einsum("bqd,bkd->bqk", q, k) / 8
        p = jax.nn.softmax(s)
        o = jnp.einsum("bqk,bkd->bqd", p, v)
        return x + nn.Dense(8)(o)


TOKENS = shape(2, 9, 8)
PARAMS = jax.eval_shape(Attention().init, jax.random.key(0), TOKENS)


def attention_loss(params, x):
    y = Attention().apply(params, x)
    return jnp.mean(y**2)


def layer(x, w):
    h = jnp.tanh(x @ w)
    return x + h, None


def scanned(ws, x):
    x, _ = lax.scan(layer, x, ws)
    return jnp.sum(x**2)


@jax.custom_jvp
def own_softmax(s):
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@own_softmax.defjvp
def own_softmax_rule(primals, tangents):
    y = own_softmax(*primals)
    t = y * tangents[0]
    return y, t - y * t.sum(-1, keepdims=True)


def own_attention(w, x):
    scores = x @ w
    p = own_softmax(scores)
    out = p @ w
    return (out @ w).sum()


def branches(w, x):
    def yes(x):
        return jnp.tanh(x @ w) @ w

    def no(x):
        return x * 2.0

    def goes_on(state):
        return state[0] < 9

    def once_more(state):
        i, x = state
        x = jnp.tanh(x @ w)
        return i + 1, x

    _, x = lax.while_loop(goes_on, once_more, (0, x))
    return lax.cond(x.sum() > 0, yes, no, x)


def plain(w, x):
    h = jnp.tanh(x @ w)
    return h @ w


def step(params, x):
    loss, grads = jax.value_and_grad(attention_loss)(params, x)
    new = optax.tree.add_scale(params, -0.1, grads)
    return new, loss


PROGRAMS = {
    "attention": (attention_loss, PARAMS, TOKENS),
    "attention, gradient": (jax.value_and_grad(attention_loss), PARAMS, TOKENS),
    "step": (jax.jit(step), PARAMS, TOKENS),
    "scan": (jax.value_and_grad(scanned), shape(5, 8, 8), X),
    "custom_jvp": (jax.grad(own_attention), W, W),
    "branches": (branches, W, X),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_that_is_explained_is_the_one_that_runs(name, dtype):
    fun, *args = PROGRAMS[name]

    def traced():
        return [
            (eqn.primitive.name, [str(x.aval) for x in (*eqn.invars, *eqn.outvars)])
            for eqn in equations_of(jaxmp.autocast(fun, dtype), *args)
        ]

    runs = traced()
    with recording() as steps:
        assert traced() == runs
    assert steps
    assert traced() == runs


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_line_has_a_dtype_that_the_program_has_there(name):
    fun, *args = PROGRAMS[name]
    fun, found = jaxmp.autocast(fun), {}

    def look(jaxpr, around):
        for eqn in _jaxpr.open_jaxpr(jaxpr).eqns:
            frames = (x[:2] for x in _jaxpr.frames(eqn) if is_users(x[0]))
            frame = next(frames, around)  # code of a library belongs to what calls it
            dtypes = {str(x.aval.dtype) for x in eqn.outvars}
            found.setdefault(frame, set()).update(dtypes)
            for body in _jaxpr.sub_jaxprs(eqn):
                look(body, frame)

    look(jax.make_jaxpr(fun)(*args), None)
    report = explained(fun, *args)
    for line in report.lines:
        is_loop = line.reason.startswith("carried")
        dtypes = {*line.dtype.split(", "), *line.also}
        assert dtypes <= found[line.file, line.number], line
        assert (line.rule in rules.SENTENCES | rules.SAFEGUARDS) != is_loop
    named = {x for line in report.lines for x in (line.rule, line.saved_by)} - {None}
    assert set(report.sentences) == named


# Sentences


def test_attention_is_told_line_by_line():
    report = explained(jaxmp.autocast(jax.grad(attention_loss)), PARAMS, TOKENS)
    norm, split, scores, softmax, mixed, _, loss = report.lines
    assert (norm.dtype, norm.rule) == ("float32", 3)
    assert norm.reason == "computed by LayerNorm"
    assert (split.dtype, split.rule) == ("bfloat16", 2)
    assert split.reason == f"feeds a matmul ({scores.number})"
    assert (scores.dtype, scores.rule) == ("float32", 3)
    assert scores.reason == f"feeds softmax ({softmax.number})"
    assert scores.matmuls == ("bfloat16",)
    assert (softmax.dtype, softmax.rule) == ("float32", 3)
    assert ([*dict(softmax.saved)], softmax.saved_by) == (["bfloat16"], 5)
    assert softmax.reason == f"feeds a matmul ({mixed.number})"
    assert (mixed.dtype, mixed.rule) == ("bfloat16", 2)
    assert loss.function == "attention_loss"
    assert {x.function for x in report.lines[:-1]} == {"Attention.__call__"}
    numbers = [x.number for x in report.lines[:-1]]
    assert numbers == sorted(numbers)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.second = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        h = nnx.relu(self.first(x))
        return self.second(h)


def test_a_model_of_nnx_is_told():
    net = Net(nnx.Rngs(0))
    loss = nnx.value_and_grad(lambda net, x: jnp.mean(net(x) ** 2))
    report = explained(jaxmp.nnx.autocast(loss), net, jnp.ones((4, 8)))
    hidden = at(report, "h = nnx.relu")
    assert (hidden.dtype, hidden.rule) == ("bfloat16", 2)
    assert "bool" in dict(hidden.saved)
    assert at(report, "self.second(h)").dtype == "float32"


def scanned_loss(ws, x):
    def body(x, w):
        return jnp.tanh(x @ w), None

    return jnp.sum(jax.lax.scan(body, x, ws)[0] ** 2)


def test_a_loop_is_told_once():
    report = explained(jaxmp.autocast(scanned), shape(5, 8, 8), X)
    assert len([x for x in report.lines if x.function == "layer"]) == 2
    assert dtype_and_rule(report, "return x + h, None") == ("float32", 4)
    assert at(report, "lax.scan(layer").reason == "carried from iteration to iteration"
    twice = explained(jaxmp.autocast(lambda w, x: plain(w, plain(w, x))), W, X)
    assert len(twice.lines) == 2


def recurrent(w, xs):
    def iteration(state, x):
        c, h = state
        z = jnp.tanh(x @ w + h @ w)
        i = jax.nn.sigmoid(x @ w)
        c = c + i * z
        return (c, jnp.tanh(c)), jnp.tanh(c)

    zeros = jnp.zeros((4, 8))
    return jnp.mean((lax.scan(iteration, (zeros, zeros), xs)[1] @ w) ** 2)


def test_what_a_scan_stacks_in_16_bits_has_sentence_5():
    fun = jaxmp.autocast(jax.value_and_grad(recurrent), "bfloat16")
    gate = at(explained(fun, W, shape(5, 4, 8)), "i = jax.nn.sigmoid(x @ w)")
    assert gate.dtype == "float32"
    assert ([*dict(gate.saved)], gate.saved_by) == (["bfloat16"], 5)


def test_a_while_loop_and_branches_are_told():
    report = explained(jaxmp.autocast(branches), W, X)
    assert at(report, "x = jnp.tanh(x @ w)")
    assert dtype_and_rule(report, "return x * 2.0") == ("float32", 3)
    assert at(report, "return jnp.tanh(x @ w) @ w").reason == "returned"


@pytest.mark.parametrize("dtype", HALVES)
def test_a_function_with_a_derivative_of_its_own_has_its_own_lines(dtype):
    report = explained(jaxmp.autocast(jax.grad(own_attention), dtype), W, W)
    e, p = at(report, "e = jnp.exp"), at(report, "return e / e.sum")
    assert e.function == p.function == "own_softmax"
    assert (e.dtype, e.reason) == ("float32", "computed by an exponential")
    assert ([*dict(p.saved)], p.saved_by) == ([dtype], 5)
    assert dtype_and_rule(report, "out = p @ w") == (dtype, 2)


def saved_by_user(w, x):
    with jax.named_scope("head"):
        first = jnp.tanh(x @ w)
    middle = first @ w
    with jax.named_scope("jaxmp.float32"):
        last = jnp.tanh(middle @ w)
    return last @ w


def stream(w, x):
    x = x @ w
    for _ in range(2):
        x = x + jnp.tanh(x @ w) @ w
    with jax.named_scope("head"):
        return x @ w  # the head


def test_what_the_user_keeps_has_sentence_1():
    report = explained(jaxmp.autocast(saved_by_user, float32_paths="head"), W, X)
    assert dtype_and_rule(report, "first = ") == ("float32", 1)
    assert at(report, "first = ").reason == "`float32_paths`"
    assert dtype_and_rule(report, "middle = ") == ("float32", 3)
    assert dtype_and_rule(report, "last = ") == ("float32", 1)
    assert at(report, "last = ").reason == "float32 region"
    # Arithmetic alone stands between this line and the head, however far it is.
    report = explained(jaxmp.autocast(stream, float32_paths="head"), W, X)
    assert dtype_and_rule(report, "x = x + ") == ("float32", 3)
    line = next(x for x in report.lines if "@ w  # the head" in x.source)
    assert at(report, "x = x + ").reason == f"feeds `float32_paths` ({line.number})"
    report = explained(jaxmp.autocast(stream), W, X)
    assert dtype_and_rule(report, "x = x + ") == ("bfloat16", 2)
    lists = jaxmp.DEFAULT_OPS.with_deny("tanh")
    report = explained(jaxmp.autocast(saved_by_user, ops=lists), W, X)
    assert at(report, "first = ").reason == "the lists in `ops`"
    assert at(report, "first = ").matmuls == ("bfloat16",)


def ends(w, x):
    def goes_on(state):
        return state[1] > 1e-3

    def once_more(state):
        y = jnp.tanh(state[0] @ w)
        return y, jnp.abs(y - state[0]).max()

    return lax.while_loop(goes_on, once_more, (x, 1.0))[0]


def gated(w, x):
    def trip(c, x):
        g = jnp.tanh(x @ w)
        return g * c + jax.nn.relu(x @ w), None

    return lax.scan(trip, x, jnp.stack([x, x]))[0]


def entropy(w, x):
    p = jax.nn.sigmoid(jnp.tanh(x @ w) @ w)
    return -jnp.log(p).mean()


def precise(w, x):
    y = jnp.matmul(x, w, precision="highest")
    return y.astype(jnp.float16) * 2


@pytest.mark.parametrize(
    ("fun", "args", "source", "rule"),
    [
        (ends, (W, X), "y = jnp.tanh(state[0] @ w)", rules.COMPARING),
        (gated, (W, X), "g = jnp.tanh(x @ w)", rules.LOOPS),
        (entropy, (W, X), "p = jax.nn.sigmoid", rules.FLOAT32),
        (precise, (W, X), "precision=", rules.AS_WRITTEN),
        (precise, (W, X), "y.astype", rules.AS_WRITTEN),
        (lambda w, x: x[:2] @ w, (W, X), "x[:2] @ w", rules.FLOAT32),
    ],
)
@pytest.mark.filterwarnings("ignore:Of the FLOPs:UserWarning")
def test_a_line_has_the_sentence_or_the_safeguard_that_decided(fun, args, source, rule):
    assert at(explained(jaxmp.autocast(fun), *args), source).rule == rule


def test_what_takes_float32_says_so_and_a_safeguard_has_its_name():
    def decays(w, x):
        s = jax.nn.sigmoid(x @ w)
        for _ in range(6):
            s = s * jax.nn.sigmoid(x @ w)
        halves = jnp.full((8, 8), 0.5) * w  # of arguments
        return (s @ halves).sum()

    report = explained(jaxmp.autocast(decays), W, X)
    gates = at(report, "s = jax.nn.sigmoid")
    assert (gates.dtype, gates.rule) == ("float32", "gates")
    assert gates.reason == "guard: gates"
    assert report.sentences["gates"] == rules.SAFEGUARDS["gates"]
    given = at(report, "# of arguments")
    assert (given.dtype, given.rule) == ("float32", 3)
    assert given.reason == "computed from inputs alone"


def test_float8_is_what_matmuls_take():
    fun, large = jaxmp.autocast(plain, "mixed_fp8"), shape(2048, 2048)
    report = explained(fun, large, large)
    assert at(report, "h = jnp.tanh").matmuls == ("float8_e4m3fn",)
    assert at(report, "h = jnp.tanh").dtype == "bfloat16"


# Programs without autocast, and with it inside


def by_hand(w, x):
    h = jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))
    return h.astype(jnp.float32).sum()


def test_a_program_without_autocast_has_dtypes_and_no_sentences():
    for fun in (by_hand, jax.grad(by_hand), jaxmp.autocast(by_hand, "float32")):
        report = explained(fun, W, X)
        assert dtype_and_rule(report, "h = jnp.tanh") == ("bfloat16", None)
        assert dtype_and_rule(report, "return h.astype") == ("float32", None)
        assert report.sentences == {}
        assert "Autocast is not used" in str(report)
    kept = at(explained(jax.grad(by_hand), W, X), "h = jnp.tanh")
    assert ([*dict(kept.saved)], kept.saved_by) == (["bfloat16"], None)
    cast = jaxmp.with_policy(plain, "mixed_float16")
    report = explained(cast, W, X)
    assert {x.dtype for x in report.lines} == {"float16"}
    assert {x.function for x in report.lines} == {"plain"}


@jax.jit
def with_autocast_inside(w, x):
    y = jaxmp.autocast(plain, "float16")(w, x)
    return jnp.tanh(y @ w)


def test_autocast_may_be_anywhere_inside():
    with_autocast_inside(jnp.ones((8, 8)), jnp.ones((4, 8)))  # and may have been traced
    for _ in range(2):
        report = explained(with_autocast_inside, W, X)
        assert dtype_and_rule(report, "h = jnp.tanh") == ("float16", 2)
        assert dtype_and_rule(report, "return jnp.tanh") == ("float32", None)
    both = explained(jaxmp.autocast(with_autocast_inside), W, X)
    assert dtype_and_rule(both, "h = jnp.tanh") == ("float16", 2)
    assert at(both, "return jnp.tanh").matmuls == ("bfloat16",)


def test_what_is_explained_leaves_no_trace():
    fun = jaxmp.autocast(jax.jit(plain))
    jaxmp.explain(fun)(W, X)
    names = {x for e in equations_of(fun, W, X) for x in _jaxpr.scope_names(e)}
    assert not any(x.startswith(STEP) for x in names)


def test_a_step_with_a_loss_scale_is_told():
    policy = jaxmp.get_policy("mixed_float16")
    tx = jaxmp.loss_scaling(optax.adam(1e-3), policy)
    state = jax.eval_shape(tx.init, PARAMS)

    @jax.jit
    def train_step(params, opt_state, x):
        grad_fn = jaxmp.value_and_grad(attention_loss, loss_scale=opt_state)
        loss, grads = jaxmp.autocast(grad_fn, policy)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    report = explained(train_step, PARAMS, state, TOKENS)
    assert dtype_and_rule(report, "p = jax.nn.softmax") == ("float32", 3)
    assert [*dict(at(report, "p = jax.nn.softmax").saved)] == ["float16"]
    assert dtype_and_rule(report, "updates, opt_state = ") == ("float32", None)
    assert "explained(" not in str(report)  # the line that asks computes nothing


def test_a_differentiated_autocast_function_says_what_is_kept():
    report = explained(jax.grad(jaxmp.autocast(attention_loss)), PARAMS, TOKENS)
    assert at(report, "p = jax.nn.softmax").saved
    assert not any(x.saved for x in explained(attention_loss, PARAMS, TOKENS).lines)


def test_a_line_has_the_bytes_that_it_saves_for_the_backward_pass():
    grad_fn = jaxmp.autocast(jax.grad(attention_loss))
    report = explained(grad_fn, PARAMS, TOKENS)
    assert at(report, "p = jax.nn.softmax").saved == (("bfloat16", 2 * 2 * 9 * 9),)
    assert "saves 324 B in bfloat16 (5)" in " ".join(str(report).split())
    # Query, key and value.
    assert at(report, "jnp.split").saved == (("bfloat16", 3 * 2 * 2 * 9 * 8),)
    total = collections.Counter()
    for line in report.lines:
        total.update(dict(line.saved))
    assert total == jaxmp.audit(grad_fn)(PARAMS, TOKENS).residual_bytes


def test_a_line_in_a_scan_has_the_bytes_of_all_iterations():
    report = explained(jaxmp.autocast(jax.grad(scanned_loss)), shape(5, 8, 8), X)
    ((dtype, size),) = at(report, "jnp.tanh").saved
    # What comes from the iteration before and the result; older JAX also saves one
    # minus it.
    stack = 2 * 5 * X.size
    assert (dtype, size) in [("bfloat16", 2 * stack), ("bfloat16", 3 * stack)]


def test_a_value_that_is_saved_in_another_shape_is_saved_once():
    def loss(w, x):
        h = jnp.tanh(x @ w)
        flat = h.reshape(-1)
        return jnp.sum(jnp.sin(h)) + jnp.sum(flat**2 * jnp.exp(flat))

    report = jaxmp.explain(jax.grad(loss))(W, X)
    (wide,) = dict(at(report, "h = jnp.tanh").saved).values()
    assert wide <= 2 * 4 * X.size  # the result, and one minus it
    assert "saves" not in " ".join(at(report, "flat = h").said())


def test_random_keys_that_a_checkpointed_layer_saves_have_their_bytes():
    def layer(x, key):
        return jnp.tanh(x @ x) * jax.random.normal(key, x.shape), None

    def loss(x, key):
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, jax.random.split(key, 5))
        return x.mean()

    key = jax.random.key(0)
    report = explained(jaxmp.autocast(jax.grad(loss)), shape(8, 8), key)
    assert dict(at(report, "jax.random.split(").saved)[str(key.dtype)] == 5 * 8


def test_a_matmul_of_a_gradient_inside_the_loss_has_its_line():
    def inner(w, x):
        h = x @ w
        return jnp.mean(jnp.tanh(h) ** 2)

    def loss(w, x):
        def step(w, _):
            return w - 0.1 * jax.grad(inner)(w, x), None

        return jnp.mean(jax.lax.scan(step, w, None, length=3)[0] ** 2)

    for step in loss, jax.value_and_grad(loss):
        report = explained(jaxmp.autocast(step), shape(8, 8), X)
        assert at(report, "h = x @ w").matmuls == ("bfloat16",)


# Lines


def test_two_lines_that_share_what_jax_has_traced_are_told_apart():
    def twice(w, x):
        a = jax.nn.softmax(x @ w)
        b = jax.nn.softmax(a @ w)
        c = jnp.where(b > 0, b @ w, 0.0)
        d = jnp.where(c > 0, c @ w, 0.0)
        return d.sum()

    report = explained(jaxmp.autocast(twice), W, X)
    assert [x.source[0] for x in report.lines] == ["a", "b", "c", "d", "r"]
    a, b, c, *_ = report.lines
    assert a.reason == f"feeds a matmul ({b.number})"
    assert b.reason == f"feeds a matmul ({c.number})"


def test_a_line_is_its_own_where_another_function_was_traced_before():
    def first(w, x):
        return lax.scan(lambda c, _: (c + jnp.tanh(c @ w), None), x, length=3)[0].sum()

    def phase(x, w):
        y = jnp.tanh(x @ w)
        return jnp.sin(y @ w), None

    def second(ws, x):
        x, _ = lax.scan(jax.checkpoint(phase), x, ws)
        return x.sum()

    for fun, w in ((first, W), (second, shape(3, 8, 8))):
        step = jax.grad(jaxmp.autocast(fun))
        report, found = explained(step, w, X), jaxmp.audit(step)(w, X)
    assert {line.function for line in report.lines} == {"phase", "second"}
    line = at(report, "return jnp.sin(y @ w), None")
    assert line.matmuls == ("bfloat16",)
    (hazard,) = found.hazards
    assert hazard.where == f"{__file__}:{line.number}"


def test_recursion_decorators_and_lambdas_have_their_lines():
    def power(w, x, n):
        h = jnp.tanh(x @ w)
        return h if n == 1 else power(w, h, n - 1)

    def decorated(fun):
        @functools.wraps(fun)
        def inner(*args):
            return fun(*args) * 2.0

        return inner

    fun = decorated(lambda w, x: power(w, x, 3) @ w)
    report = explained(jaxmp.autocast(fun), W, X)
    assert at(report, "h = jnp.tanh")
    found = {x.function for x in report.lines}
    assert found == {"power", "inner", "<lambda>"}


def test_a_line_that_runs_in_two_dtypes_has_both():
    def net(w, x):
        h = x @ w
        for i in range(3):
            h = jnp.tanh(h)  # the last is a result
            if i < 2:
                h = h @ w
        return h

    report = explained(jaxmp.autocast(net), W, X)
    line = at(report, "h = jnp.tanh(h)")
    assert (line.dtype, line.also) == ("bfloat16, float32", ())
    assert "bfloat16, float32" in str(report)
    assert len({*report.lines}) == len(report.lines)  # each has a hash


def test_code_without_a_file_says_so():
    names = {}
    code = "import jax.numpy as jnp\ndef f(w, x):\n    return jnp.tanh(x @ w)\n"
    exec(code, names)
    (line,) = explained(jaxmp.autocast(names["f"]), W, X).lines
    assert (line.source, line.number) == ("(no source)", 3)


def test_reports_name_the_cell_of_a_notebook_and_the_line_in_it(monkeypatch):
    compilerop = pytest.importorskip("IPython.core.compilerop")
    compiler, names = compilerop.CachingCompiler(), {}
    shell = types.SimpleNamespace(compile=compiler)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    code = "import jax.numpy as jnp\ndef f(w, x):\n    return jnp.exp(x @ w + 12)\n"
    exec(compile(code, compiler.cache(code, number=5), "exec"), names)
    report = explained(jaxmp.autocast(names["f"]), W, X)
    assert report.lines[0].source == "return jnp.exp(x @ w + 12)"
    assert "cell 5, f\n" in str(report)
    half = jnp.zeros((8, 8), jnp.float16), jnp.zeros((4, 8), jnp.float16)
    report = str(jaxmp.find_overflow(names["f"])(*half))
    assert "at cell 5, line 3" in report
    assert "Compute cell 5, line 3 in float32" in report
    single = jnp.zeros((8, 8)), half[1]
    assert "cell 5, line 3" in str(jaxmp.audit(names["f"])(*single))


def test_a_long_line_is_clipped_in_the_text_and_whole_in_the_data():
    def long_one(weights, inputs):
        return jnp.tanh(inputs @ weights) + jnp.tanh(inputs @ weights.T) + 1.0 - 2.0

    report = explained(jaxmp.autocast(long_one), W, X)
    assert "… " in str(report)
    assert report.lines[0].source.endswith("+ 1.0 - 2.0")


def test_code_of_a_library_alone_belongs_to_the_line_that_asks():
    (line,) = explained(jnp.matmul, W, W).lines
    assert "jaxmp.explain(fun)" in line.source
    report = jaxmp.explain(lambda x: x + 1)(shape(3, dtype=jnp.int32))
    assert report.lines == ()
    assert str(report).startswith("No line computes")


def test_a_notebook_shows_what_is_printed():
    report = explained(jaxmp.autocast(lambda w, x: jnp.where(x < 1, x @ w, 0.0)), W, X)
    assert html.escape(str(report)) in report._repr_html_()


def test_a_line_that_pythons_loop_runs_in_two_dtypes_has_both():
    def layers(w, x):
        for _ in range(3):
            x = jnp.tanh(x @ w)
        return x.sum()

    class Model(nn.Module):  # whose layers are one line, of a library
        @nn.compact
        def __call__(self, x):
            return nn.Sequential([nn.Dense(8) for _ in range(3)])(x)

    args = shape(8, 8), shape(8, 8)
    line, result = jaxmp.explain(jaxmp.autocast(layers))(*args).lines
    assert (line.dtype, result.dtype) == ("bfloat16, float32", "float32")
    assert line.rule == 2
    params = jax.eval_shape(Model().init, jax.random.key(0), args[1])
    (line,) = jaxmp.explain(jaxmp.autocast(Model().apply))(params, args[1]).lines
    assert line.dtype == "float32"


def test_what_only_a_matmul_reads_is_16_bits_by_the_fifth_sentence():
    def model(w, x):
        h = jax.nn.standardize(x @ w)
        y = jax.nn.relu(h)
        return y @ w

    def of_inputs(w, x):
        h = jax.nn.standardize(x)
        y = jax.nn.relu(h)
        return y @ w

    args = shape(8, 8), shape(8, 8)
    _, line, last = jaxmp.explain(jaxmp.autocast(model))(*args).lines
    assert (line.dtype, line.rule) == ("bfloat16", 5)
    assert line.reason == f"feeds a matmul ({last.number})"
    _, line, last = jaxmp.explain(jaxmp.autocast(of_inputs))(*args).lines
    assert (line.dtype, line.rule) == ("float32", 3)
    reason = f"moves float32 values, feeds a matmul ({last.number})"
    assert line.reason == reason


def test_a_comprehension_belongs_to_the_function_that_it_is_in():
    def model(ws, x):
        h = [[x @ w for w in ws] for _ in range(2)]
        y = {i: x @ w for i, w in enumerate(ws)}
        return sum(x @ a for a in h[0]) + y[0]

    report = jaxmp.explain(jaxmp.autocast(model))([shape(8, 8)] * 2, shape(8, 8))
    assert [x.function.rpartition(".")[2] for x in report.lines] == ["model"] * 3
    assert len({x.number for x in report.lines}) == 3


def test_a_loop_names_who_reads_its_last_value_in_float32():
    def loop(w, x):
        def step(_, h):
            return jnp.tanh(h @ w)

        return lax.fori_loop(0, 3, step, x @ w).mean()

    report = jaxmp.explain(jaxmp.autocast(loop))(shape(8, 8), shape(8, 8))
    step = at(report, "return jnp.tanh(h @ w)")
    assert (step.dtype, step.rule) == ("float32", 3)
    assert step.reason.startswith("feeds mean (")


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
def test_what_float16_does_not_stack_has_the_name_of_the_safeguard(policy):
    def loss(w, xs):
        def step(h, x):
            h = jnp.tanh(h @ w + x @ w)
            gate = jax.nn.sigmoid(x @ w)
            return h, h * gate

        return jnp.mean(lax.scan(step, xs[0], xs)[1] ** 2)

    program = jaxmp.autocast(jax.grad(loss), policy)
    report = jaxmp.explain(program)(shape(8, 8), shape(6, 8, 8))
    gate = at(report, "gate = jax.nn.sigmoid")
    is_kept = policy == "float16"
    assert gate.kept_by == "float16 range" * is_kept
    assert ("float32" in dict(gate.saved)) == is_kept
    assert ("float16 range" in str(report)) == is_kept
    assert ("float16 range" in report.sentences) == is_kept


def test_a_table_begins_with_the_names_of_its_columns():
    def model(w, x):
        return jnp.tanh(x @ w) @ w

    args = shape(8, 8), shape(8, 8)
    heads, empty, _, row = str(jaxmp.explain(jaxmp.autocast(model))(*args)).split(
        "\n", 3
    )
    assert heads.split() == ["line", "code", "dtype", "rule", "why"]
    assert not empty
    (line,) = jaxmp.explain(jaxmp.autocast(model))(*args).lines
    for name, cell in (("code", line.source), ("dtype", line.dtype)):
        assert heads.index(name) == row.index(cell)
    assert heads.index("why") == row.index(line.reason)
    # The last letter, as the number stands at the right.
    assert row[heads.index("line") + 3] == str(line.number)[-1]
    assert row[heads.index("rule") + 3] == str(line.rule)
    heads = str(jaxmp.explain(model)(*args)).split("\n")[0]
    assert heads.split() == ["line", "code", "dtype"]
    assert heads == heads.rstrip()


def test_the_page_shows_what_explain_prints():
    text = PAGE.read_text()
    program = re.search(r"^```python\n(.*?)^```", text, re.M | re.S)
    code = "\n" * text[: program.start(1)].count("\n") + program[1]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
    shown = re.search(r"^```text\n(.*?)^```", text, re.M | re.S)[1]
    assert shown == printed.getvalue()


def test_a_convolution_says_that_its_float32_was_rounded():
    def loss(w, x):
        y = lax.conv(x, w, (1, 1), "SAME")
        z = jnp.vdot(x[0, 0] @ w[0, 0], y[0, 0])
        return jnp.mean(y**2) + z

    args = shape(4, 4, 8, 8), shape(2, 4, 8, 8)
    lines = jaxmp.explain(jaxmp.autocast(jax.grad(loss), "bfloat16"))(*args).lines
    assert [(x.dtype, x.rounded) for x in lines] == [
        ("float32", "bfloat16"),
        ("float32", ""),
        ("float32", ""),
    ]
    assert "rounded to bfloat16" in lines[0].said()
    # It says what is.
    w, x = (jax.random.normal(jax.random.key(0), a.shape) for a in args)
    conv = jaxmp.autocast(lambda w, x: lax.conv(x, w, (1, 1), "SAME"), "bfloat16")
    for y in (conv(w, x), jax.grad(lambda w: conv(w, x).sum())(w)):
        np.testing.assert_array_equal(y, y.astype("bfloat16").astype("float32"))
    plain = jaxmp.explain(loss)(*args).lines
    assert not any(x.rounded for x in plain)


def test_a_matmul_that_float32_arithmetic_feeds_is_named():
    def fun(x, w):
        y = x @ w
        y = (y - y.mean(-1, keepdims=True)) / 8
        return jax.nn.relu(y) @ w  # here

    args = shape(8, 8), shape(8, 8)
    line, *_, last = jaxmp.explain(jaxmp.autocast(fun))(*args).lines
    assert (line.dtype, line.rule) == ("bfloat16", 2)
    assert line.reason == f"feeds a matmul ({last.number})"
