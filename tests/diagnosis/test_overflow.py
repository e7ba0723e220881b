"""Searching for the operation that made an Inf or NaN."""

import inspect
import json
import os
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxmp
from conftest import crossed, mapped, rest_is_evidence
from jaxmp._diagnosis.overflow import watch
from jaxmp._diagnosis.overflow.watch import Watched
from jaxmp._jaxprs.places import Place

HALF = jnp.float16
LOST = "underflow: share of values that are zero or subnormal, but not in float32"
CAST_BY = "autocast", "arguments"
X = jnp.array([1.0, 300.0, 2.0], HALF)


def find(fun, *args, **kwargs):
    return jaxmp.find_overflow(fun)(*args, **kwargs)


def line_of(fun, text):
    """Returns ``file:line`` of a line of a function."""
    lines, start = inspect.getsourcelines(fun)
    (offset,) = [i for i, line in enumerate(lines) if text in line]
    return f"{inspect.getsourcefile(fun)}:{start + offset}"


def test_the_first_operation_is_named_with_its_line_and_its_inputs():
    def loss(w, x):
        h = w + x
        with jax.named_scope("square"):
            h = h * w  # here
        return h.sum()

    report = find(loss, X, 0 * X)
    first = report.first
    assert (first.operation, first.dtype, first.kind) == ("mul", "float16", "Inf")
    assert first.where == line_of(loss, "# here")
    assert (first.module, first.backward, first.iterations) == ("square", False, ())
    assert first.inputs == (("float16", (3,), 300.0), ("float16", (3,), 300.0))
    assert first.largest == 65504
    assert report.reached == ("result",)
    assert report.finite_in_float32
    assert "forward pass overflows float16" in report.advice
    assert not report.others
    assert not report.notes


# What a function may be made of. Each squares its argument as often as it takes.


def scanned(x):
    def body(c, t):
        return c * t, c

    return jax.lax.scan(body, jnp.ones((), HALF), x)[0]


def scanned_from_the_end(x):
    def body(c, t):
        return c * t, c

    return jax.lax.scan(body, jnp.ones((), HALF), x, reverse=True)[0]


def repeated(x):
    def more(state):
        return state[0] < 4

    def body(state):
        return state[0] + 1, state[1] * state[1]

    return jax.lax.while_loop(more, body, (0, x))[1]


def chosen(x):
    return jax.lax.cond(x[0] > 0, lambda x: x * x, lambda x: x / 0, x)


@jax.custom_jvp
def with_jvp(x):
    return x * x


with_jvp.defjvp(lambda p, t: (with_jvp(*p), t[0]))


@jax.custom_vjp
def with_vjp(x):
    return x * x


with_vjp.defvjp(lambda x: (with_vjp(x), None), lambda _, t: (t,))


def sharded(x, *, check_vma=True):
    mesh = Mesh(jax.devices()[:2], "d")
    y = jnp.stack([0 * x, x])
    return mapped(lambda y: jax.lax.psum((y * y)[0], "d"), mesh, P("d"), P())(y)


KINDS = {
    "jit": (jax.jit(lambda x: x * x), ()),
    "vmap": (jax.vmap(lambda x: x * x), ()),
    "scan": (lambda x: scanned(jnp.full(3, x[1])), (1,)),
    "reversed": (lambda x: scanned_from_the_end(jnp.array([1, x[1], x[1]])), (1,)),
    "two": (lambda x: jax.lax.map(lambda t: scanned(jnp.stack([t, t])), x), (1, 1)),
    "while": (lambda x: repeated(x[1]), (0,)),
    "batch": (jax.vmap(repeated), (0,)),
    "cond": (chosen, ()),
    "custom_jvp": (with_jvp, ()),
    "custom_vjp": (with_vjp, ()),
    "shard_map": (sharded, ()),
    "unchecked": (lambda x: sharded(x, check_vma=False), ()),
}


@pytest.mark.parametrize(
    "kinds",
    [
        ("reversed", "cond", "while", "shard_map"),
        pytest.param(tuple(KINDS), marks=pytest.mark.evidence),
    ],
    ids=["some", "all"],
)
def test_it_is_found_inside_of_loops_branches_rules_and_shards(kinds):
    def all_kinds(x):
        outs = {}
        for kind in kinds:
            fun, _ = KINDS[kind]
            with jax.named_scope(kind):
                outs[kind] = fun(x)
        return outs

    report = find(all_kinds, X)
    faults = {x.module: x for x in (report.first, *report.others)}
    assert report.first.module == kinds[0]
    assert report.reached == (kinds[0],)
    for kind in kinds:
        fault, (_, iterations) = faults[kind], KINDS[kind]
        assert (fault.operation, fault.kind, fault.dtype) == ("mul", "Inf", "float16")
        assert fault.iterations == iterations, kind
        assert fault.inputs[0][2] == 300, kind
    assert not report.notes


def test_what_an_ended_loop_of_a_batch_throws_away_reaches_nothing():
    def squared(x, n):
        step = lambda s: (s[0] + 1, s[1] * s[1])  # noqa: E731
        return jax.lax.while_loop(lambda s: s[0] < n, step, (0, x))[1]

    # While the second goes on, the first is squared once more: 200⁴ is beyond float16.
    x, iterations = jnp.array([200, 1], HALF), jnp.array([1, 6])
    assert find(jax.vmap(squared), x, iterations).first is None
    assert find(jax.vmap(squared), x, iterations + 1).first.iterations == (1,)


def grown(x, length, reverse=False):
    return jax.lax.scan(
        lambda c, _: (1.5 * c, c), x, None, length=length, reverse=reverse
    )[0]


def grown_while(x):
    return jax.lax.while_loop(
        lambda s: s[0] < 90, lambda s: (s[0] + 1, 1.5 * s[1]), (0, x)
    )[1]


# 1.5 to the 28th power is beyond float16.
LONG = {
    "scan": (lambda x: grown(x, 90), (27,)),
    "reversed": (lambda x: grown(x, 90, reverse=True), (62,)),
    "while": (grown_while, (27,)),
    "inner": (
        lambda x: jax.lax.map(lambda x: grown(x, 60), x[None] * 2.0**-9)[0],
        (0, 42),
    ),
    "outer": (
        lambda x: jax.lax.scan(lambda c, _: (grown(c, 3), c), x, None, length=30)[0],
        (9, 0),
    ),
}


@crossed("name most_rows", [*LONG], [watch._MOST_ROWS, 8])
def test_the_iteration_is_told_in_loops_that_are_too_long_to_keep(
    name, most_rows, monkeypatch
):
    monkeypatch.setattr(watch, "_MOST_ROWS", most_rows)
    fun, iterations = LONG[name]
    report = find(fun, jnp.ones((), HALF))
    assert (report.first.operation, report.first.iterations) == ("mul", iterations)
    largest = max(top for *_, top in report.first.inputs)
    assert 65504 / 1.5 < largest <= 65504  # that of the iteration before
    assert report.reached == ("result",)
    assert any(x.nonfinite for x in report.operations)


@pytest.mark.parametrize("loop", [jax.lax.scan, None], ids=["scan", "while"])
def test_the_inputs_of_a_fault_in_a_loop_are_those_of_its_iteration(loop):
    factors = jnp.array([2.0**-12, 1, 2, 40000, 1], HALF)

    def product(x):
        if loop:
            return loop(lambda c, t: (c * t, None), x, factors)[0]
        more = lambda s: s[0] < 5  # noqa: E731
        step = lambda s: (s[0] + 1, s[1] * factors[s[0]])  # noqa: E731
        return jax.lax.while_loop(more, step, (0, x))[1]

    # Before, the first input was as large as 8192.
    first = find(product, jnp.full((), 8192, HALF)).first
    assert first.iterations == (3,)
    assert [top for *_, top in first.inputs] == [4, 40000]


def test_what_checkpoint_computes_again_is_forward():
    @jax.checkpoint
    def block(w, x):
        return jnp.sin((w * x) * x)  # the loss is dropped, and its gradient is NaN

    def loss(w):
        def body(h, w):
            return block(w, h) * 300, None

        return jax.lax.scan(body, X, w)[0].astype(jnp.float32).sum()

    report = find(jax.grad(loss), jnp.ones(2, HALF))
    assert report.first.operation == "mul"
    assert not report.first.backward
    assert "forward" in report.advice


@crossed("inner by", [jax.checkpoint, jax.jit], CAST_BY)
def test_what_is_backward_in_a_call_is_backward_and_on_its_own_line(inner, by):
    # Of a linear function nothing is computed again.
    @inner
    def steep(w, x):
        return 5000 * (x @ w)  # the line

    def loss(w, x):
        return jnp.mean(steep(w, jnp.sin(x)).astype(jnp.float32))

    args = jnp.eye(8), jnp.ones((8, 8))
    fun = jaxmp.value_and_grad(loss, loss_scale=2.0**15)
    if by == "autocast":
        report = find(jaxmp.autocast(fun, "float16"), *args)
    else:
        report = find(fun, *jaxmp.cast_tree(args, HALF))
    assert report.first.backward
    assert "loss scale is too large" in report.advice
    assert report.first.where == line_of(steep.__wrapped__, "# the line")


# By default what has an Inf that is masked.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize(
    "looked_at",
    [
        {"attention", "log", "half", "min"},
        pytest.param(None, marks=pytest.mark.evidence),
    ],
    ids=["some", "all"],
)
def test_sound_programs_are_called_sound(looked_at):
    keys = jnp.array([True, False, True])
    labels = jnp.array([0, 2, 1])
    mask = jnp.where(keys, 0.0, -jnp.inf)

    def attention(x, mask):
        scores = jnp.where(keys, x[:, None] * x, -jnp.inf)
        return jax.nn.softmax(scores + mask) @ x + jax.nn.logsumexp(scores + mask)

    def guarded_log(x):
        safe = jnp.where(x > 1, x - 1, 1.0)
        return jnp.where(x > 1, jnp.log(safe), 0.0) + jnp.where(x > 0, x, jnp.log(x))

    def loss(x, mask):
        key = jax.random.key(0)
        norm = nn.BatchNorm(use_running_average=False)
        half = jnp.where(keys, x.astype(HALF), -jnp.inf)
        low = jnp.where(keys, x.astype(HALF), -1e9)  # -Inf, and masked
        parts = {
            "attention": lambda: attention(x, mask),
            "log": lambda: guarded_log(x),
            "one hot": lambda: jax.nn.one_hot(labels, 3) * x,
            "argmax": lambda: x[jnp.argmax(x)],
            "random": lambda: (
                jax.random.normal(key, (3,), HALF) + jax.random.uniform(key)
            ),
            "gumbel": lambda: jax.random.categorical(key, x[None]),
            "pool": lambda: nn.max_pool(x[None, :, None], (2,), padding="SAME"),
            "norm": lambda: norm.init_with_output(key, x[None, :, None])[0],
            "half": lambda: jax.nn.softmax(half) + jax.nn.softmax(low),
            "min": lambda: (
                jnp.min(x, initial=jnp.inf)
                + jnp.nan_to_num(jax.lax.stop_gradient(x) / 0) * 0.0
            ),
            "losses": lambda: optax.softmax_cross_entropy_with_integer_labels(
                jnp.stack([x, x, x]), labels
            ),
        }
        parts = [parts[name]() for name in looked_at or parts]
        return sum(jnp.sum(part.astype(jnp.float32)) for part in parts)

    x = jnp.array([1.0, 3.0, 2.0])
    report = find(jax.value_and_grad(loss), x, mask)
    assert report.first is None
    assert report.reached == ()
    assert report.given == {"mask": (0, 1)}
    assert report.advice.startswith("All results are finite.")
    masked = {fault.operation for fault in report.others}
    assert "convert_element_type" in masked  # of -1e9


def step_with(scale):
    tx = jaxmp.loss_scaling(optax.sgd(0.1), "mixed_float16", init_scale=scale)

    def loss_fn(w, x):
        return jnp.mean((x @ w) ** 2)

    @jax.jit
    def step(w, opt_state, x):
        grad_fn = jaxmp.value_and_grad(loss_fn, loss_scale=opt_state)
        loss, grads = jaxmp.autocast(grad_fn, "mixed_float16")(w, x)
        updates, opt_state = tx.update(grads, opt_state, w)
        return optax.apply_updates(w, updates), opt_state, loss

    w = jnp.full((8, 2), 0.5)
    return step, (w, tx.init(w), jnp.full((8, 8), 10.0))


def test_a_skipped_step_is_explained_by_its_gradients():
    step, args = step_with(2.0**24)
    report = find(step, *args)
    assert report.first.backward
    assert report.first.dtype == "float16"
    assert report.reached == ("an `isfinite` check",)
    assert report.finite_in_float32
    assert "loss scale is too large for this step" in report.advice
    step, args = step_with(2.0**4)
    assert find(step, *args).first is None


def test_what_came_in_is_named_leaf_by_leaf():
    params = {"a": jnp.ones(2), "b": jnp.array([1.0, jnp.nan])}
    closed_over = jnp.array([jnp.inf, 1.0])

    def loss(params, x, mask):
        return (params["a"] * params["b"] * x + closed_over).sum() + mask.max()

    x, mask = jnp.array([jnp.inf, 1.0]), jnp.array([-jnp.inf, 0.0])
    report = find(loss, params, x=x, mask=mask)
    assert report.given == {
        "b": (1, 0),
        "x": (0, 1),
        "mask": (0, 1),
        "closed-over float32[2]": (0, 1),
    }
    assert report.first is None
    assert "`b` contains 1 NaN" in report.advice
    assert "no precision helps" in report.advice


def test_what_is_not_finite_in_float32_is_the_models():
    def loss(x):
        h = x.astype(HALF)
        return (jnp.log(h - h) * h).sum()

    report = find(loss, X)
    assert report.first.operation == "log"
    assert report.finite_in_float32 is False
    assert "the model or its data" in report.advice
    report = find(loss, X.astype(jnp.float32) * 0 - 1.0)
    assert report.finite_in_float32 is False


@pytest.mark.evidence
def test_the_cure_for_autocast_is_a_line_to_paste():
    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, kernel_init=nn.initializers.constant(300.0))(x)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Scaled(name="head")(nn.Dense(8)(x) * 0 + 100) @ jnp.ones((8, 8))

    model, x = Net(), jnp.ones((1, 8))
    params = model.init(jax.random.key(0), x)
    report = find(jaxmp.autocast(model.apply, HALF), params, x)
    assert report.first.module == "Net/head/Dense_0"
    assert '`float32_paths=("Net/head/Dense_0",)`' in report.advice
    report = find(
        jaxmp.autocast(jax.jit(lambda x: (x @ x) @ x), HALF), 300 * jnp.eye(9)
    )
    assert "`jaxmp.float32_region`" in report.advice


def test_what_an_operation_loses_is_counted():
    def f(x):
        return (x * x).astype(jnp.float32) + (x.astype(jnp.float32) * 2**-12).astype(
            HALF
        )

    x = jnp.array([1.0, 2.0**-13, 2.0**-7, 0.0], HALF)  # squares 1, 2^-26, 2^-14, 0
    mul, *_, cast = [x for x in find(f, x).operations if x.dtype == "float16"]
    assert (mul.operation, mul.lost, mul.max, mul.min) == ("mul", 0.25, 1.0, 2.0**-14)
    # 2^-19 is subnormal, and 2^-25 becomes zero.
    assert (cast.lost, cast.max) == (0.5, 2.0**-12)
    assert mul.headroom == pytest.approx(16, abs=1e-3)

    def again(x):
        return jax.lax.scan(lambda x, _: (x * x, None), x, length=2)[0]

    wide = jnp.array([1.0, 2.0**-5], HALF)
    (mul,) = [x for x in find(again, wide).operations if x.operation == "mul"]
    assert (mul.max, mul.min) == (1.0, 2.0**-20)  # of both iterations
    bfloat = find(lambda x: x * x, jnp.array([2.0**-60, 1.0], jnp.bfloat16))
    assert bfloat.operations[0].min == 2.0**-120
    assert bfloat.operations[0].lost == 0


def test_a_count_beyond_32_bits_stays_at_the_largest():
    most = np.uint32(2**32 - 1)
    many = jnp.full(6, 2**31 + 1, jnp.uint32)
    merged = np.asarray(watch._merged(many, many))
    np.testing.assert_array_equal(merged[watch.BAD :], most)
    few = watch._merged(jnp.arange(6, dtype=jnp.uint32), jnp.ones(6, jnp.uint32))
    assert few.tolist() == [1, 1, 3, 4, 5, 6]


def test_it_says_where_it_cannot_look():
    def f(x):
        goes = lambda s: s.sum() < 3.0  # noqa: E731
        x = jax.lax.while_loop(goes, lambda s: s + 1, x)
        return jax.lax.custom_linear_solve(
            lambda v: 2 * v, x, lambda matvec, b: b / 2, symmetric=True
        )

    report = find(f, jnp.ones(2))
    assert len(report.notes) == 2
    assert any("custom_linear_solve" in note for note in report.notes)
    assert "parts of the program could not be searched" in report.advice


def test_the_report_is_a_table_and_a_dict():
    step, args = step_with(2.0**24)
    report = find(step, *args)
    text = str(report)
    assert max(map(len, text.splitlines())) <= 80
    for words in ("first: ", "backward", "fewest bits"):
        assert words in text
    fields = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert fields["first"]["backward"] is True
    assert fields["operations"][0].keys() >= {"headroom", "lost", "where"}


def test_arrays_of_any_size_and_kind_pass():
    def f(x, n, key):
        z = jnp.fft.fft(jnp.ones(4)).sum() + jnp.exp(x.sum() * 1j)
        return x + n, z, jax.random.split(key), None, "text"

    report = find(f, jnp.ones(0), 3, jax.random.key(0))
    assert report.first is None


def test_values_are_needed():
    with pytest.raises(TypeError, match="`find_overflow` needs values, but `x` is abs"):
        find(lambda x: x, jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(TypeError, match="`argument 0` is abstract"):  # no signature
        find(max, jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(TypeError, match="is traced"):
        jax.jit(lambda x: find(lambda y: y, x))(X)
    with pytest.raises(TypeError, match="`find_overflow` needs a function"):
        jaxmp.find_overflow(X)


def test_parts_of_the_gradient_in_complex_and_integer_steps_are_exact():
    x = np.array([3.0, 70000.0], np.float32)
    report = find(lambda x: x.astype(HALF).astype(jnp.bfloat16), x)
    assert report.first.operation == "convert_element_type"
    assert report.first.inputs == (("float32", (2,), 70000.0),)


def test_constants_are_looked_at_when_the_program_runs(monkeypatch):
    # XLA would do that while it compiles, which takes minutes for a whole program.
    monkeypatch.setattr(watch, "_TOGETHER", 0)
    jaxpr = jax.make_jaxpr(lambda x: x + 3 * jnp.ones(8, HALF))(X[0])
    program = Watched(jaxpr, ["x"], Place(), "cpu")
    compiled = watch.jitted(program.replay, "cpu").lower(X[0]).compile()
    assert compiled.as_text().count(" reduce(") == 3  # of `x`, the product, the sum


def test_what_does_not_run_in_some_iterations_is_gone_past():
    def inner(y):
        return jax.lax.fori_loop(0, 2, lambda i, y: jnp.sqrt(y), y)

    def body(x, t):
        y = jax.lax.fori_loop(
            0, t, lambda i, y: inner(y) + jax.checkpoint(jnp.cos)(y) ** 2, x
        )
        y = jax.lax.cond(t > 1, lambda y: 1 + inner(y), jnp.cos, y)
        return 30 * x, y * x * x  # here

    def fun(x):
        return jax.lax.scan(body, x, jnp.array([0, 1, 2]))[1]

    assert find(fun, jnp.full((), 0.1, HALF)).first is None
    first = find(fun, jnp.ones((), HALF)).first
    assert (first.operation, first.where) == ("mul", line_of(body, "# here"))
    assert (first.iterations, first.code) == ((2,), "y * x * x")
    assert first.inputs[1] == ("float16", (), 900.0)


def test_an_input_that_a_mask_has_made_infinite_is_shown_so():
    def masked(x):
        return jax.nn.softmax(jnp.where(x > 0, -jnp.inf, 3 * x))

    report = find(masked, jnp.ones((2, 4), HALF))
    assert "float16[2, 4] up to ±Inf" in str(report)
    assert report.as_dict()["first"]["inputs"][0][2] == "inf"


# What is wrong with a program in 16 bits is told apart.


def epsilon(x):
    return x / (jnp.abs(x).sum() + 1e-8)


ZEROS = jnp.zeros(4, HALF)
AROUND_EPSILON = {
    "argument": epsilon,
    "jit": jax.jit(epsilon),
    "scan": lambda x: jax.lax.scan(lambda c, x: (c, epsilon(x)), 0.0, x[None])[1],
    "grad": jax.grad(lambda x: jax.checkpoint(epsilon)(x).sum()),
    "clip": lambda x: jnp.log(jnp.clip(x, 1e-9, 1.0)),
    "where": lambda x: 1 / jnp.where(x > 0, x, 1e-9),
    "with_policy": jaxmp.with_policy(jax.jit(epsilon), "mixed_float16"),
    "cond": lambda x: jax.lax.cond(x[0] > 0, lambda x: x, epsilon, x),
    # The first of two equal branches does not run.
    "branches": lambda x: jax.lax.cond(x[0] < 1, epsilon, epsilon, x),
    "vmap": lambda x: jax.vmap(epsilon)(x[:, None]),
    "while": lambda x: jax.lax.fori_loop(0, 2, lambda i, x: epsilon(x), x),
    "full": lambda x: x / (x + jnp.full_like(x, 1e-8)),
    "shard_map": lambda x: mapped(
        epsilon, Mesh(jax.devices()[:2], "d"), P("d"), P("d"), check_vma=False
    )(x),
}
CHEAP = {"argument", "grad", "clip", "with_policy", "branches"}


@pytest.mark.parametrize(
    "name", rest_is_evidence({name: name for name in AROUND_EPSILON}, *CHEAP)
)
def test_a_number_that_16_bits_lose_is_named_and_float32_has_it(name):
    x = ZEROS.astype(jnp.float32) if name == "with_policy" else ZEROS
    report = find(AROUND_EPSILON[name], x)
    assert report.first.kind == "zeros"
    assert report.finite_in_float32
    assert report.first.inputs
    number = "1e-09" if name in ("clip", "where") else "1e-08"
    assert f"The number {number} in the code at test_overflow.py:" in report.advice
    assert "not the precision" not in report.advice


def adam_step(params, state, x):
    tx = optax.adam(1e-3)

    def loss(params):
        return (params["w"] * x).sum() + 0 * params["unused"].sum()

    grads = jax.grad(loss)(params)
    updates, state = tx.update(grads, state, params)  # here
    return optax.apply_updates(params, updates), state


def test_a_whole_step_of_adam_with_float16_parameters():
    params = {"w": jnp.ones(4, HALF), "unused": jnp.ones(4, HALF)}
    report = find(jax.jit(adam_step), params, optax.adam(1e-3).init(params), X[0])
    assert report.first.where == line_of(adam_step, "# here")
    assert "The number 1e-08 in the code" in report.advice
    assert "Keep the parameters and the optimizer state in float32" in report.advice


in_16_bits = nn.Dense(2, dtype=HALF)
OWN_CASTS = {
    "epsilon": (lambda x: epsilon(x.astype(HALF)), None),
    "maximum": (lambda x: jnp.log(jnp.maximum(x.astype(HALF), 1e-12)), None),
    "flax": (lambda x: epsilon(in_16_bits.init_with_output(KEY, x)[0]), None),
    # Nobody can say that this 0 was not 1e-8, and it is not said that it was.
    "relu": (lambda x: 1 / jax.nn.relu(x.astype(HALF)), None),
    "model": (lambda x: (lambda h: h / h)(x.astype(HALF)), False),
    "zero": (lambda x: (lambda h: h / h)(x + 0.0), False),
    "constant": (lambda x: x.astype(HALF) / np.full(4, 1e-8, np.float16), None),
    "mask": (lambda x: x.astype(HALF) * -1e9, True),
}
KEY = jax.random.key(0)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize(
    ("fun", "finite_in_float32"), rest_is_evidence(OWN_CASTS, "epsilon", "model")
)
def test_the_precision_is_cleared_only_where_that_is_known(fun, finite_in_float32):
    report = find(fun, jnp.zeros(4))
    assert report.finite_in_float32 is finite_in_float32
    assert ("not the precision" in report.advice) == (finite_in_float32 is False)


def test_a_zero_that_float32_does_not_reach_waits_for_the_fault_that_it_has():
    def loss(x):
        logs = jnp.log(x * 1e-5)  # of 0 in float16
        return logs, jnp.sqrt(logs)

    report = find(loss, jnp.full(4, 2e-3, HALF))
    assert report.first.operation == "log"
    assert "sqrt gives NaN in float32 at test_overflow.py:" in report.advice
    assert "Mend that too, and search again." in report.advice
    assert "No loss scale helps" not in report.advice


def test_an_inf_of_the_code_in_a_result_is_told_of():
    report = find(lambda x: jnp.where(x > 1, x, jnp.inf), jnp.ones(4))
    assert "it may be there on purpose" in report.advice


def squared_logits(x, w):
    logits = (300 * x @ w) ** 2 @ w
    return logits.sum(-1)


def with_a_log(x, w):
    logits = squared_logits(x, w)
    return logits, -jnp.mean(jnp.log(1 - jax.nn.sigmoid(logits)))


def of_logits(x, w):
    logits = squared_logits(x, w)
    return logits, -jnp.mean(jax.nn.log_sigmoid(-logits))


def test_a_fault_of_float32_at_another_line_does_not_hide_that_of_float16():
    args = jnp.full((4, 8), 0.5), jnp.full((8, 8), 0.5)
    report = jaxmp.find_overflow(jaxmp.autocast(with_a_log, HALF))(*args)
    assert report.first.where == line_of(squared_logits, "(300 * x @ w) ** 2")
    assert report.finite_in_float32 is False
    assert "`jaxmp.float32_region` around the function of" in report.advice
    other = os.path.basename(line_of(with_a_log, "jnp.log("))
    assert f"log gives Inf in float32 at {other}" in report.advice
    assert "not the precision" not in report.advice
    # The advice, followed: first for float32, then for float16.
    assert "`jax.nn.log_sigmoid`" in report.advice
    again = jaxmp.find_overflow(jaxmp.autocast(of_logits, HALF))(*args)
    assert again.finite_in_float32
    assert again.first.where == report.first.where
    region = jaxmp.float32_region(of_logits)
    assert jaxmp.find_overflow(jaxmp.autocast(region, HALF))(*args).first is None


@pytest.mark.parametrize(
    ("fun", "cured"),
    [
        (lambda x: jnp.exp(x) / jnp.exp(x).sum(), jax.nn.softmax),
        (lambda x: jnp.log(jnp.exp(x).sum()), jax.nn.logsumexp),
        (lambda x: jnp.log(jax.nn.sigmoid(x)), jax.nn.log_sigmoid),
    ],
    ids=["softmax", "logsumexp", "log_sigmoid"],
)
def test_a_function_that_no_precision_cures_is_named(fun, cured):
    x = jnp.array([200.0, -200.0], HALF)
    report = find(fun, x)
    assert "not the precision" in report.advice
    assert f"`jax.nn.{cured.__name__}`" in report.advice
    assert find(cured, x).first is None


def masked(x, lowest):
    return jax.nn.softmax(jnp.where(jnp.ones((2, 3), bool), lowest, x))


@pytest.mark.parametrize(
    ("fun", "words", "cured"),
    [
        (lambda x: x / x.sum(), "add an epsilon to it", lambda x: x / (x.sum() + 1)),
        (
            jax.grad(lambda x: jnp.sqrt((x * x).sum())),
            "add the epsilon under the root",
            jax.grad(lambda x: jnp.sqrt((x * x).sum() + 1)),
        ),
        (
            lambda x: x * jax.lax.rsqrt((x * x).sum()),
            "add an epsilon to it",
            lambda x: x * jax.lax.rsqrt((x * x).sum() + 1),
        ),
        (
            lambda x: masked(x, -jnp.inf),
            "`jnp.finfo(x.dtype).min`",
            lambda x: masked(x, jnp.finfo(x.dtype).min),
        ),
    ],
    ids=["quotient", "gradient of a norm", "norm", "masked row"],
)
def test_what_divides_by_zero_is_told_an_epsilon_and_a_row_of_inf_a_mask(
    fun, words, cured
):
    x = jnp.zeros(3)
    report = find(fun, x)
    assert "not the precision" in report.advice
    assert words in report.advice
    assert find(cured, x).first is None


@pytest.mark.parametrize("dtype", [HALF, jnp.float32])
def test_an_operation_that_no_dtype_defines_says_what_its_input_is(dtype):
    x = jnp.array([2, 0], dtype)
    zero = "  the divisor is 0 in an entry, or nearly 0\n"
    outside = "  the input is 0 or negative in an entry\n"
    for fun, what in [
        (lambda x: 1 / x, zero),
        (lambda x: x / x, zero),
        (jnp.log, outside),
        (jax.lax.rsqrt, outside),
        (lambda x: jnp.sqrt(x - 1), outside),
    ]:
        report = find(fun, x)
        assert what in str(report)
        assert not report.first.finite_in_float32
        assert "the largest number" not in str(report)
    # A divisor that is too small for float16 alone, and an Inf that came in.
    assert "the largest number" in str(find(lambda x: x / 1e-5, X))
    masked = find(lambda x: jnp.log(x) / jnp.log(x), jnp.array([2, 0], dtype))
    assert zero not in str(masked)


def test_a_result_is_named_by_its_place_in_a_tuple():
    assert find(lambda x: (x, x * x), X).reached == ("result/1",)
    assert find(lambda x: (x, {"loss": x * x}), X).reached == ("result/1/loss",)
    assert find(lambda x: {"loss": x * x}, X).reached == ("loss",)


def test_what_the_fault_reached_is_named_in_words():
    report = find(lambda x: (x * x, jaxmp.all_finite(x * x)), X)
    assert "not finite because of it: `result/0`" in str(report)
    report = find(lambda x: {"loss": (y := x * x), "ok": jaxmp.all_finite(y)}, X)
    assert "not finite because of it: result `loss`, an `isfinite` check\n" in str(
        report
    )
    assert "not finite because of it: the result\n" in str(find(lambda x: x * x, X))


MASKS = {
    "where": lambda x, seen: jnp.where(seen, x, -1e9),
    "full_like": lambda x, seen: jnp.where(seen, x, jnp.full_like(x, -1e9)),
    "asarray": lambda x, seen: jnp.where(seen, x, jnp.asarray(-1e9, x.dtype)),
    "set": lambda x, seen: x.at[1].set(-1e9),
    "times": lambda x, seen: x + (1 - seen.astype(x.dtype)) * -1e9,
    "finfo": lambda x, seen: jnp.where(seen, x, LOWEST).astype(x.dtype),
}
LOWEST = jnp.finfo(jnp.float32).min


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("name", MASKS)
def test_the_line_of_a_mask_is_named_and_not_that_of_the_softmax(name):
    def model(x, seen):
        return jax.nn.softmax(MASKS[name](x, seen))

    seen = jnp.array([[True, False], [False, False]])
    cast = jaxmp.with_policy(model, "mixed_float16")
    report = find(lambda x: cast(x, seen).sum(), jnp.ones((2, 2)))
    assert report.first.where == line_of(MASKS[name], f'"{name}"')
    line = os.path.basename(report.first.where)
    number = f"{LOWEST:.4g}" if name == "finfo" else "-1e+09"
    assert f"number {number} in the code at {line} exceeds 6.55e+04" in report.advice
    assert "`jnp.finfo(x.dtype).min`" in report.advice


def test_where_nothing_runs_in_16_bits_it_says_what_to_pass():
    def loss(x):
        return (x @ x @ x).sum()

    x = jnp.ones((16, 16))
    assert "Nothing runs in 16 bits: pass the function that" in find(loss, x).advice
    for dtype in (HALF, jnp.bfloat16):
        assert "Nothing runs" not in find(jaxmp.autocast(loss, dtype), x).advice


def test_a_mask_has_no_row_among_the_least_headroom():
    def masked(x):
        masked = jnp.where(x > 1, x, jnp.finfo(x.dtype).min)
        return jax.nn.softmax(masked - masked.max()) * x

    report = find(masked, jnp.array([2, 1, 0], HALF))
    assert min(x.headroom for x in report.operations) == 0
    assert "  0.0  " not in str(report)


def norms(x):
    return {
        "sum": lambda: jnp.sum(x**2),
        "norm": lambda: jnp.linalg.norm(x),
        "kept": lambda: jnp.sum(x**2, keepdims=True),
        "loss": lambda: jnp.sum((x / 8).astype(HALF) ** 2).astype(HALF) * 64,
    }


@pytest.mark.parametrize("name", norms(None))
def test_a_scalar_that_overflows_is_no_number_in_the_code(name):
    report = find(lambda x: norms(x)[name](), jnp.full((64, 64), 10.0, HALF))
    assert report.first.kind == "Inf"
    assert "number in the code" not in report.advice
    assert "The forward pass overflows float16 here" in report.advice


def test_targets_that_look_like_a_mask_are_none():
    def loss(x, targets):
        return jnp.mean((x - targets) ** 2)

    cast = jaxmp.with_policy(loss, "mixed_float16")
    report = find(cast, jnp.ones(4), jnp.full(4, 1e5))
    assert "`targets` has values up to 1e+05" in report.advice
    assert "number in the code" not in report.advice


@pytest.mark.parametrize(
    "hide",
    [
        lambda g: optax.clip_by_global_norm(1.0).update(g, optax.EmptyState())[0],
        lambda g: g / jnp.linalg.norm(g),
        lambda g: g / jnp.linalg.norm(g, keepdims=True),
    ],
)
def test_what_an_overflow_makes_wrong_is_warned_of(hide):
    report = find(hide, jnp.full(8, 200.0, HALF))
    assert report.first is None
    assert "gave Inf where float32 would not" in report.advice
    assert find(hide, jnp.full(8, 20.0, HALF)).advice == "All results are finite."


# Zeros that float32 would not have.


def markov(x, around=lambda f: f):
    moves = jnp.full((8, 8), 0.125)

    def step(alpha, p):
        return around(lambda a, p: (a @ moves) * p)(alpha, p), None  # the step

    alpha = jax.lax.scan(step, jnp.full(8, 0.125), x)[0]
    return -jnp.log(alpha.sum())  # the logarithm


# The result is Inf, and 2% off.
@pytest.mark.parametrize(("steps", "p"), [(8, 0.01), (5, 0.02)])
def test_zeros_are_the_fault_and_not_the_logarithm_of_them(steps, p):
    x = jnp.full((steps, 8), p)
    report = find(jaxmp.autocast(markov, HALF), x)
    assert report.first.kind == "zeros"
    assert report.first.where == line_of(markov, "# the step")
    assert not report.first.backward


def test_zeros_before_a_scattered_sum_are_found_and_no_result_has_none():
    def scattered(x):
        sums = jnp.zeros(2, x.dtype).at[jnp.array([0, 1, 1])].add(x * x)
        return jnp.log(sums)

    report = find(scattered, jnp.full(3, 1e-4, HALF))
    assert (report.first.operation, report.first.kind) == ("mul", "zeros")
    assert report.finite_in_float32
    report = find(lambda x: (scattered(x), None)[1], jnp.full(3, 1e-4, HALF))
    assert report.advice == "All results are finite."


def test_where_float16_has_no_zeros_or_bfloat16_has_none_there_is_no_fault():
    x = jnp.full((8, 8), 0.01)
    assert find(jaxmp.autocast(markov, HALF), x[:2]).first is None
    assert find(jaxmp.autocast(markov, jnp.bfloat16), x).first is None


def test_a_lost_epsilon_reaches_the_loss_and_its_gradient():
    def loss(w, x):
        h = x @ w
        return jnp.mean((h / jnp.sqrt((h * h).mean(-1, keepdims=True) + 1e-8)) ** 2)

    grad_fn = jax.value_and_grad(jaxmp.with_policy(loss, "mixed_float16"))
    report = find(grad_fn, jnp.eye(8), jnp.ones((4, 8)).at[2].set(0))
    assert report.first.kind == "zeros"
    # The loss is 0 / 0 and the gradient 1 / 0: each begins at an operation of its own.
    assert report.reached == ("result/0", "result/1")


def small_units(w, x):
    return jnp.mean((x @ w) * 1e9)  # here


@pytest.mark.parametrize("fun", [small_units, jax.value_and_grad(small_units)])
def test_inputs_that_are_zeros_in_float16_are_named(fun):
    report = find(jaxmp.autocast(fun, HALF), jnp.ones((8, 2)), jnp.full((4, 8), 1e-9))
    assert report.first.kind == "zeros"
    assert report.first.where == line_of(small_units, "# here")
    assert not report.first.backward
    assert "100% of the values of `x`, which " in report.advice
    report = find(jnp.log, jnp.full(4, 1e-9, HALF))
    assert "`x` is float16 and all zeros" in report.advice


def test_gradients_that_are_lost_are_zeros_of_the_backward_pass():
    def loss(w, x):
        return jnp.mean(jaxmp.with_policy(jnp.matmul, "mixed_float16")(x, w)) / 2**26

    w, x = jnp.ones((8, 2)), jnp.ones((4, 8))
    report = find(jax.grad(loss), w, x)
    assert (report.first.kind, report.first.backward) == ("zeros", True)
    assert "the loss scale is too small" in report.advice
    scaled = find(jaxmp.value_and_grad(loss, loss_scale=2.0**20), w, x)
    assert scaled.first is None


@pytest.mark.parametrize(("size", "kind"), [(2.0**-16, None), (2.0**-20, "zeros")])
def test_a_gradient_may_lose_less_than_half(size, kind):
    factors = jnp.full(128, 2.0**-26).at[0].set(size)  # of which 127 are 0

    def loss(w, x):
        return jnp.sum((w.astype(HALF) * x).astype(jnp.float32) * factors)

    first = find(jax.grad(loss), jnp.ones(()), jnp.ones(128, HALF)).first
    assert (first and first.kind) == kind


class Sound(nn.Module):
    """What has zeros in plenty, which float32 has or which do not matter."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8)(x) - 0.5)
        x = nn.Dropout(0.5, deterministic=False)(x)
        scores = 40 * nn.LayerNorm()(x) @ x.T  # far tails
        seen = jnp.tril(jnp.ones(scores.shape, bool))
        scores = jnp.where(seen, scores, jnp.finfo(scores.dtype).min)
        far = jnp.exp(-jnp.arange(8, dtype=x.dtype) * 3)
        return nn.softmax(scores) @ (x * far)


@pytest.mark.parametrize(
    "cast",
    [
        lambda f: jaxmp.with_policy(f, "mixed_float16"),
        pytest.param(lambda f: jaxmp.autocast(f, HALF), marks=pytest.mark.evidence),
    ],
)
def test_zeros_that_do_not_matter_are_no_fault(cast):
    x = jax.random.normal(KEY, (16, 4))
    params = jax.jit(Sound().init)({"params": KEY, "dropout": KEY}, x)

    def loss(params, x):
        out = cast(lambda p, x: Sound().apply(p, x, rngs={"dropout": KEY}))(params, x)
        return jnp.mean(out**2)

    report = find(jax.value_and_grad(loss), params, x)
    assert any(row.lost for row in report.operations)
    assert report.first is None
    assert report.advice == "All results are finite."


# Data


GIVEN = {
    "norm": lambda w, x: (x - x.mean()) @ w,
    "tanh": jax.grad(lambda w, x: jnp.tanh(x @ w).sum()),
    "fft": lambda w, x: jnp.abs(jnp.fft.rfft(x)).sum() * w,
    "log": lambda w, x: jnp.log(jnp.exp(-x).min()) * w,  # the Inf is 0 in between
    "where": lambda w, x: jnp.log(jnp.where(jnp.isinf(x), 0.0, 1.0)).sum() * w,
}


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("around", [lambda f: f, lambda f: jaxmp.autocast(f, HALF)])
def test_an_inf_that_was_given_is_named_wherever_it_leads(name, around):
    w, x = jnp.ones((4, 2)), jnp.ones((3, 4)).at[1, 2].set(jnp.inf)
    report = find(around(GIVEN[name]), w, x)
    assert report.given == {"x": (0, 1)}
    assert "`x` contains 1 Inf" in report.advice
    assert "the model or its data at" not in report.advice


def test_an_inf_that_was_given_is_not_blamed_for_another_fault():
    def f(x, limit):
        return jnp.sum(x * x), jnp.minimum(x, limit)

    report = find(f, X, jnp.array(jnp.inf, HALF))
    assert report.given == {"limit": (0, 1)}
    assert "contains" not in report.advice
    assert "overflows float16" in report.advice


@pytest.mark.parametrize("diagnose", [jaxmp.find_overflow, jaxmp.sensitivity])
def test_arguments_that_were_donated_are_refused_with_what_to_type(diagnose):
    step = jax.jit(lambda w, x: (w * x).sum() + 0 * w, donate_argnums=0)
    w, x = jnp.ones(4), jnp.ones(4)
    step(w, x)
    with pytest.raises(ValueError, match=r"keep a copy .* jax.tree.map\(jnp.copy"):
        diagnose(lambda w, x: (w * x).sum())(w, x)


def test_no_row_of_the_table_says_that_nothing_was_lost():
    tiny = jnp.ones(8192, HALF).at[0].set(2.0**-20)
    report = find(lambda x: x * x, tiny)
    assert 0 < max(row.lost for row in report.operations) < 0.0005
    assert "underflow: " not in str(report)
    assert "0.0%" not in str(report)


def test_reports_read_programs_whose_rules_return_integers():
    def loss(w):
        return jnp.mean((jnp.frexp(w @ w)[0] @ w) ** 2)

    w, rounded = jnp.eye(8), jaxmp.with_policy(loss, "float16")
    for grad in (jaxmp.autocast(jax.grad(loss), "float16"), jax.grad(rounded)):
        assert jaxmp.find_overflow(grad)(w).first is None
        assert jaxmp.audit(grad)(w).fraction_16bit == 1
        assert jaxmp.explain(grad)(w).lines
    for fun in (loss, rounded):
        assert jaxmp.sensitivity(fun, "float16", progress=False)(w).gradients < 5e-3


# What a person reads


def sections(report):
    """Returns the rows of each part of the printed report, by its heading."""
    parts = str(report).split("\n\n")
    return {part.splitlines()[0]: part.splitlines()[1:] for part in parts}


def test_a_healthy_step_has_no_rows_but_of_what_is_near_or_lost():
    def loss(w, x):
        with jax.named_scope("net"):
            h = jnp.tanh(x @ w)
        return jnp.sum((h @ w) ** 2)

    w, x = (jax.random.normal(jax.random.key(i), (8, 8)) for i in range(2))
    step = jaxmp.autocast(jax.value_and_grad(loss), "float16")
    assert [*sections(jaxmp.find_overflow(step)(w, x))] == [
        "no operation made an Inf or NaN that reached a result",
        "All results are finite.",
    ]
    near = str(jaxmp.find_overflow(lambda x: x * x)(jnp.full(4, 200, jnp.float16)))
    assert "0.7  mul float16" in near
    # What is lost in float16, and changes no result by 1%, is named.
    few = jnp.array([1e-4] * 7 + [1.0], jnp.float16)
    report = jaxmp.find_overflow(lambda x: (x * x).astype("float32").sum())(few)
    assert report.first is None
    text = " ".join(str(report).split())
    assert "result, but 87.5% of what mul gives at test_overflow.py:" in text
    assert "zero or subnormal, and is not in float32" in text


@pytest.mark.parametrize("masked", [False, True])
def test_what_gave_inf_stands_first_among_the_headrooms(masked):
    # Its largest finite number has headroom, which is not the point.
    def fun(x):
        squares = x * x
        squares = jnp.where(squares > 1e4, 1.0, squares) if masked else squares
        return (x * 200).max(), squares.max()

    report = jaxmp.find_overflow(fun)(jnp.array([3.0, 200.0, 300.0], jnp.float16))
    assert (report.first is None) == masked
    rows = sections(report)["fewest bits below overflow (Inf, NaN: exceeded)"]
    numbers = [re.match(r" +([\w.]+) +mul float16\b", row) for row in rows]
    assert [x[1] for x in numbers if x] == ["Inf", "0.1"]  # each once


def test_a_derivative_says_what_part_of_the_line_it_belongs_to():
    def loss(x):
        e = jnp.exp(x)
        return (e / e.sum())[0] * 2.0  # quotient

    report = jaxmp.find_overflow(jax.grad(loss))(jnp.array([-9.0, 6.0], jnp.float16))
    # The power that differentiation computes for the division is nowhere in the line.
    (power,) = [x for x in report.operations if x.operation == "integer_pow"]
    assert power.code == "e / e.sum()"
    lost = sections(report)[LOST]
    assert any("integer_pow float16 of `e / e.sum()`" in row for row in lost)
    backward = [x for x in report.operations if x.backward]
    assert {"jnp.exp(x)", "e / e.sum()"} <= {x.code for x in backward}
    scaled = jaxmp.find_overflow(jax.grad(lambda x: loss(x) * 6e4))
    report = scaled(jnp.array([3.0, -3.0], jnp.float16))
    assert report.first.backward
    assert f"in the derivative of `{report.first.code}`" in str(report)


def test_an_expression_over_several_lines_is_cut_and_one_that_is_gone_is_left_out():
    # fmt: off
    def loss(x):
        return jnp.sum(
            x * x)
    # fmt: on

    report = jaxmp.find_overflow(jax.grad(loss))(jnp.full(3, 200.0, jnp.float16))
    codes = {x.operation: x.code for x in report.operations}
    assert codes["reduce_sum"] == "jnp.sum( …"
    assert codes["mul"] == "x * x"
    names = {"jnp": jnp}
    exec("def fun(x):\n    return x * x", names)
    report = jaxmp.find_overflow(names["fun"])(jnp.full(3, 300.0, jnp.float16))
    assert report.first.code == ""
    assert "`" not in str(report).split("\n\n")[0].replace("`x.astype", "")
