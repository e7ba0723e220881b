"""What the engine makes of programs: laws of dtypes and values, rule by rule."""

import cProfile
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import product_dtypes, relative_error, traced
from conftest import at_once, in_both_dtypes, normal
from jaxmp import autocast
from jaxmp._autocast import rules
from jaxmp._autocast.emit import Emitter
from jaxmp._autocast.plan import Planner

W, X = normal(0, 8, 8, scale=0.3), normal(1, 4, 8)
HALVES = (jnp.float16, jnp.bfloat16)
both_dtypes = pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])


def decisions(fun, *args, dtype=jnp.bfloat16):
    """Returns name, how and rule of each equation, in the order of the program."""
    found = []
    planner = Planner(np.dtype(dtype), jaxmp.DEFAULT_OPS)

    def listener(step):
        found.append((step.eqn.primitive.name, step.how, step.rule))

    emitter = Emitter(planner, listener=listener)
    jax.make_jaxpr(emitter.wrap(fun))(*args)
    return found


def of(name, fun, *args):
    return [found[1:] for found in decisions(fun, *args) if found[0] == name]


@jaxmp.float32_region
@jax.jit
def several(x):
    """Its derivative is a call of several results, of which a product takes one."""
    return jnp.logaddexp(x, 0.0)


@both_dtypes
def test_a_region_may_call_what_has_several_results(dtype):
    def loss(w, x):
        return (several(x @ w) @ w).sum()

    found = autocast(jax.grad(loss), dtype)(W, X)
    assert relative_error(found, jax.jit(jax.grad(loss))(W, X)) < float(
        jnp.finfo(dtype).eps
    )


# Each rule, in a program that needs it.


def test_rule_1_what_the_user_keeps_is_left_as_it_was_written():
    def fun(w, x):
        return jaxmp.float32_region(jnp.matmul)(x, w)

    np.testing.assert_array_equal(autocast(fun)(W, X), fun(W, X))


def test_rule_2_a_product_returns_what_its_readers_need():
    def fun(w, x):
        return jax.nn.softmax(jnp.tanh(x @ w) @ w) @ w

    found = of("dot_general", fun, W, X)
    assert [how for how, _ in found] == ["half", "float32", "float32"]
    assert found[0][1] == rules.PRODUCT
    assert found[2][1] == rules.DIGITS  # it is returned


def test_rule_3_elementwise_work_follows_its_operands():
    def fun(w, x):
        return jnp.tanh(x @ w) @ w + jnp.tanh(x) @ w

    assert [how for how, _ in of("tanh", fun, W, X)] == ["half", "float32"]


def test_rule_4_a_bias_joins_and_in_float16_a_computed_sum_does_not():
    def biased(w, x):
        return jnp.tanh(x @ w + w[0]) @ w

    def with_a_norm(w, x):
        h = jax.nn.standardize(x @ w)
        return jnp.tanh(h + h @ w) @ w

    assert of("add", biased, W, X) == [("half", rules.JOINS)]
    found = {
        dtype: [
            how
            for name, how, rule in decisions(with_a_norm, W, X, dtype=dtype)
            if rule == rules.JOINS
        ]
        for dtype in HALVES
    }
    assert found == {jnp.float16: [], jnp.bfloat16: ["rounded"]}


@pytest.mark.parametrize("name", ["tanh", "logistic", "erf"])
@pytest.mark.parametrize("dtype", HALVES)
def test_rule_4_what_has_a_bound_is_rounded_on_its_way_to_a_product(name, dtype):
    bounded = {"tanh": jnp.tanh, "logistic": jax.nn.sigmoid, "erf": lax.erf}[name]

    def gated(w, x):
        h = x @ w
        return (h * (1 + bounded(h + h**3))) @ w

    def not_for_a_product(w, x):
        h = x @ w
        return (h * (1 + bounded(h + h**3))).mean()

    def for_a_logarithm(w, x):
        y = bounded(jax.nn.standardize(x @ w))
        return jnp.log(2 - y).sum() + (y * (x @ w)) @ w

    def for_a_mean_too(w, x):
        y = bounded(jax.nn.standardize(x @ w))
        return (y * (x @ w)) @ w + y.mean()

    def hows(fun):
        return [how for x, how, _ in decisions(fun, W, X, dtype=dtype) if x == name]

    assert hows(for_a_mean_too) == ["float32"]
    assert hows(gated) == ["half" if dtype == jnp.bfloat16 else "rounded"]
    assert hows(not_for_a_product) == ["float32"]
    assert hows(for_a_logarithm) == ["float32"]
    products = [x for x in decisions(gated, W, X, dtype=dtype) if x[0] == "mul"]
    assert products[-1][1:] == ("half", rules.FOLLOWS)


def test_rule_6_a_probability_keeps_its_digits_for_a_logarithm():
    def loss(w):
        p = jax.nn.sigmoid(7 + X @ w)
        return jnp.log(1 - p).mean() + (p @ w).mean()

    assert of("logistic", loss, W) == [("float32", rules.DIGITS)]


REARRANGED = {
    "sorted": jnp.sort,
    "the largest few": lambda h: lax.top_k(h, 3)[0],
    "in whole numbers": lambda h: jnp.round(h * 64),
    "the largest so far": lambda h: lax.cummax(h, axis=1),
}


@pytest.mark.parametrize("change", REARRANGED.values(), ids=REARRANGED)
def test_rule_6_what_is_put_into_another_order_and_returned_keeps_its_digits(change):
    def fun(w, x):
        h = x @ w
        return change(h), jnp.tanh(h) @ w

    rounded = [jnp.float32(jnp.bfloat16(x)) for x in (W, X)]
    found = autocast(fun)(W, X)[0]
    np.testing.assert_allclose(found, fun(*rounded)[0], rtol=1e-6)


def test_rule_7_a_softmax_that_a_product_takes_is_kept_in_16_bits():
    def loss(w):
        return (jax.nn.softmax(X @ w) @ w).sum()

    found = of("div", jax.grad(loss), W)
    assert ("stored", rules.KEPT) in found


def test_rule_8_a_loop_adds_up_in_float32():
    def total(w, xs):
        return lax.scan(lambda c, x: (c + (x @ w).mean(), None), 0.0, xs)[0]

    xs = jnp.ones((4096, 2, 8)) / 8
    found = jax.jit(autocast(jax.grad(total)))(W, xs)
    assert relative_error(found, jax.jit(jax.grad(total))(W, xs)) < 1e-2


# Loops that end (rule 9). A name decides nothing.

M = normal(5, 64, 64)
M = M @ M.T / 64 + jnp.eye(64)
B = normal(6, 64, 8)
MANY = 3000


def fixed_point(name):
    def step(x):
        d = M @ x - B
        return x - 0.15 * d, jnp.max(jnp.abs(d))

    step.__name__ = name
    step = jax.jit(step)

    def solve():
        return lax.while_loop(
            lambda s: (s[2] > 1e-5) & (s[1] < MANY),
            lambda s: (*((new := step(s[0]))[:1]), s[1] + 1, new[1]),
            (jnp.zeros_like(B), 0, jnp.float32(1e3)),
        )[1]

    return solve


def descent():
    slope = jax.grad(lambda x: 0.5 * x @ M @ x - B[:, 0] @ x)

    def trip(s):
        d = slope(s[0])
        return s[0] - 0.15 * d, s[1] + 1, jnp.linalg.norm(d)

    return lax.while_loop(
        lambda s: (s[2] > 1e-4) & (s[1] < MANY), trip, (B[:, 0], 0, jnp.float32(1))
    )[1]


@pytest.mark.parametrize(
    "trips",
    [*map(fixed_point, ("step", "softmax", "_softmax", "logsumexp")), descent],
    ids=["step", "softmax", "_softmax", "logsumexp", "descent"],
)
@pytest.mark.filterwarnings("ignore:Of the FLOPs:UserWarning")
def test_rule_9_a_loop_ends_as_in_float32_whatever_its_helper_is_called(trips):
    expected = jax.jit(trips)()
    assert expected < MANY
    assert abs(jax.jit(autocast(trips))() - expected) <= 1


def test_a_loop_that_ends_at_a_token_is_like_any_other_code():
    def generated(w, x):
        def trip(s):
            logits = s[0] @ w
            return jnp.tanh(logits), jnp.argmax(logits[0]), s[2] + 1

        return lax.while_loop(
            lambda s: (s[1] != 3) & (s[2] < 5), trip, (x, jnp.int32(0), 0)
        )

    assert product_dtypes(autocast(generated), W, X) == [{"bfloat16"}]


# Innocent edits change nothing.


def plain(w, x):
    h = jnp.tanh(x @ w + w[0])
    return jax.nn.softmax(h @ w) @ w


def softmax_by_hand(s):
    e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


EDITS = {
    "a jit": lambda w, x: jax.jit(plain)(w, x),
    "a jit around a layer": lambda w, x: (
        jax.nn.softmax(jax.jit(lambda w, x: jnp.tanh(x @ w + w[0]))(w, x) @ w) @ w
    ),
    "einsum": lambda w, x: jnp.einsum(
        "ij,jk->ik",
        jax.nn.softmax(jnp.tanh(jnp.einsum("ij,jk->ik", x, w) + w[0]) @ w),
        w,
    ),
    "a reshape and back": lambda w, x: (
        jax.nn.softmax(jnp.tanh((x @ w + w[0]).reshape(2, 2, 8)).reshape(4, 8) @ w) @ w
    ),
    "another name": lambda w, x: jax.jit(_renamed(plain))(w, x),
    "a softmax by hand": lambda w, x: (
        softmax_by_hand(jnp.tanh(x @ w + w[0]) @ w) @ w
    ),
    "vmap": lambda w, x: jax.vmap(plain, (None, 0))(w, x[:, None])[:, 0],
}  # fmt: skip


def _renamed(fun):
    def softmax(*args):
        return fun(*args)

    return softmax


@functools.cache
def value_and_gradients(fun, dtype):
    grad = jax.value_and_grad(lambda w, x: (fun(w, x) * X).sum(), (0, 1))
    return jax.tree.leaves(jax.jit(autocast(grad, dtype))(W, X))


@pytest.mark.parametrize(
    ("edit", "dtype"), in_both_dtypes(EDITS, "a jit", "einsum", "vmap")
)
def test_innocent_edits_change_no_value(edit, dtype):
    found, expected = (value_and_gradients(fun, dtype) for fun in (edit, plain))
    # XLA may leave out a rounding in the middle of what it fuses.
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < float(jnp.finfo(dtype).eps)


@both_dtypes
def test_a_number_without_a_point_is_a_number_too(dtype):
    """The zero of a dropout, and the number of a layer, which is the same layer."""

    def net(zero):
        return lambda w, x: jnp.where(x > 0, jnp.tanh(x @ w) @ w, zero) @ w

    found, expected = (decisions(net(zero), W, X, dtype=dtype) for zero in (0, 0.0))
    chosen = [x for x in found if x[0] == "select_n"]
    assert (
        chosen
        == [x for x in expected if x[0] == "select_n"]
        == [("select_n", "half", rules.FOLLOWS)]
    )


@pytest.mark.parametrize("name", EDITS)
def test_innocent_edits_change_no_dtype(name):
    names = "dot_general", "tanh", "add", "exp", "div"
    found, expected = (
        [x for x in decisions(fun, W, X) if x[0] in names]
        for fun in (EDITS[name], plain)
    )
    assert found == expected


def test_a_name_changes_no_equation():
    def spelled(fun):
        eqns = traced(autocast(jax.grad(lambda w, x: fun(w, x).sum())), W, X)
        return [(e.primitive.name, str(e.outvars[0].aval)) for e in eqns]

    assert spelled(_renamed(plain)) == spelled(lambda *args: plain(*args))


# All of it.


def test_a_float32_policy_changes_nothing():
    args = str(jax.make_jaxpr(plain)(W, X)), jax.make_jaxpr(autocast(plain, "f32"))
    assert args[0] == str(args[1](W, X))


def test_every_decision_has_a_rule():
    def loss(w, x):
        h = jax.nn.standardize(jnp.tanh(x @ w + w[0]) @ w)
        c = lax.scan(lambda c, y: (0.9 * c + y @ w, c @ w), h, jnp.stack([x, x]))
        return jnp.square(plain(w, c[0]) + c[1].mean(0)).mean()

    found = decisions(jax.grad(loss), W, X)
    assert {rule for *_, rule in found} <= set(rules.RULES)
    assert len({rule for *_, rule in found}) >= 5


FLOAT8 = jaxmp.DEFAULT_OPS.with_fp8(min_size=16)
LARGE, ROWS = normal(2, 32, 32, scale=0.2), normal(3, 4, 16, 32)


def written_by_hand(w, x):
    """Products that the user wrote in bfloat16, with results in both dtypes."""
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    return jnp.tanh(x @ w) @ w + jnp.dot(x, w, preferred_element_type=jnp.float32)


IN_FLOAT8 = {
    "plain": lambda w, x: plain(w, x).sum(),
    "hand": lambda w, x: written_by_hand(w, x).sum(),
    "scan": lambda w, x: lax.scan(
        lambda h, x: (jnp.tanh(h @ w + x @ w), h.sum()), x[0], x
    )[0].sum(),
}


@pytest.mark.parametrize("name", IN_FLOAT8)
def test_with_float8_each_value_has_the_dtype_that_it_has_without(name):
    fun = jax.grad(IN_FLOAT8[name], (0, 1))

    def found(float8):
        told = []

        def listener(step):
            told.append((str(step.eqn), step.how, step.rule))

        planner = Planner(np.dtype(jnp.bfloat16), FLOAT8, float8=float8)
        emitter = Emitter(planner, listener=listener)
        jaxpr = jax.make_jaxpr(emitter.wrap(fun))(LARGE, ROWS)
        products = product_dtypes(emitter.wrap(fun), LARGE, ROWS)
        return told, jaxpr.out_avals, products

    (with_float8, without) = found(True), found(False)
    assert with_float8[:2] == without[:2]
    assert "float8_e4m3fn" in str(with_float8[2])
    assert "float8_e4m3fn" not in str(without[2])


def test_a_product_that_is_written_in_bfloat16_returns_what_it_was_written_to():
    for dtype in (jnp.bfloat16, jnp.float32):

        def fun(w, x, dtype=dtype):
            x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
            return jnp.tanh(jnp.dot(x, w, preferred_element_type=dtype)) @ LARGE

        eqns = traced(autocast(fun, "mixed_fp8", ops=FLOAT8), LARGE, ROWS)
        in_8 = [
            eqn.outvars[0].aval.dtype
            for eqn in eqns
            if eqn.primitive.name == "dot_general"
            and eqn.invars[0].aval.dtype == jnp.float8_e4m3fn
        ]
        assert in_8 == [dtype, jnp.float32]


def gated(w, x):
    def trip(c, x):
        return jnp.tanh(x @ w) * c + jax.nn.relu(x @ w), None

    return lax.scan(trip, x, jnp.stack([x, x]))[0]


KEPT_BY_RULE = {
    "a float32 argument, or no matmul reads it (rule 3)": (
        "max",
        lambda w, x: jax.nn.relu(x @ w).sum(),
    ),
    "its reader needs float32 (rule 6)": (
        "logistic",
        lambda w, x: -jnp.log(jax.nn.sigmoid(jnp.tanh(x @ w) @ w)).mean(),
    ),
    "a loop or a long product takes it (rule 8)": ("tanh", gated),
}


@pytest.mark.parametrize("reason", KEPT_BY_RULE)
def test_the_audit_names_the_rule_that_has_decided(reason):
    operation, fun = KEPT_BY_RULE[reason]
    report = jaxmp.audit(autocast(fun))(W, X)
    assert reason in {k.reason for k in report.kept if k.operation == operation}, report


@both_dtypes
def test_of_what_returns_several_values_the_first_may_be_stored(dtype):
    def fun(w, x):
        values, places = lax.sort([jnp.cumsum(x @ w, 0), jnp.cumsum(x, 0)])
        mixed = jax.jit(lambda x: (jax.nn.standardize(x), x.sum()))
        with jax.named_scope("norm"):
            y, total = mixed(x)
        return jnp.tanh(values @ w).sum() + (y @ w + places).sum() + total

    grad = jax.grad(fun, (0, 1))
    casts = [autocast(grad, dtype, float32_paths=paths) for paths in ((), ("norm",))]
    exact, *found = at_once(grad, *casts)(W, X)
    assert all(relative_error(one, exact) < 0.02 for one in found)


def test_tracing_takes_as_long_as_the_program_is():
    def model(n):
        def fun(w):
            h, outs = X, []
            for _ in range(n):
                h = h + jnp.tanh(h @ w)
                outs.append(h)
            return jnp.mean(sum(outs) @ w)

        return jax.value_and_grad(fun)

    def calls(n):
        with cProfile.Profile() as profile:
            jax.make_jaxpr(autocast(model(n)))(W)
        return sum(entry.callcount for entry in profile.getstats())

    short, long, longer = (calls(n) for n in (20, 40, 80))
    assert (longer - long) < 2.1 * (long - short)


def test_layers_that_are_alike_are_rewritten_once():
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def fun(w, x):
        for _ in range(9):
            x = layer(x, w)
        return x @ w

    calls = [e for e in traced(autocast(fun), W, X) if "jaxpr" in e.params]
    assert len({id(e.params["jaxpr"]) for e in calls}) == 2  # the first has float32 X


def test_pairs_of_transformations_agree_with_float32():
    fun = jax.grad(lambda w: jnp.square(plain(w, X)).sum())
    orders = autocast(jax.jacfwd(fun)), jax.jacfwd(autocast(fun)), jax.jacfwd(fun)
    for one, other in itertools.combinations(at_once(*orders)(W), 2):
        assert relative_error(one, other) < 0.05


def test_a_sum_is_not_rounded_before_it_is_divided():
    def fun(w, x):
        return (x @ w).mean(0) @ w

    x = jnp.full((128, 8), 1000.0)
    for program in (fun, lambda w, x: jnp.sum(x @ w, 0) * (1 / 128) @ w):
        assert jnp.isfinite(autocast(program, "float16")(jnp.eye(8), x)).all()


def test_what_is_looked_up_by_a_range_was_given():
    def positions(w, table):
        x = table[jnp.arange(4)]
        return jnp.tanh(X @ w + x) @ w

    found = decisions(positions, W, normal(3, 9, 8), dtype=jnp.float16)
    assert [x[1:] for x in found if x[0] == "add"][-1] == ("half", rules.JOINS)


def test_to_take_zero_away_is_no_difference():
    def without_mean(w, bias):
        h = X @ w + bias
        return (h - jnp.zeros((4, 1))) @ w

    assert of("add", without_mean, W, W[0]) == [("half", rules.JOINS)]
