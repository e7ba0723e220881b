"""Searching for the operation that made an Inf or NaN."""

import inspect
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxmp
import jaxmp.nnx
from jaxmp._places import Place
from jaxmp._probe import Probe

HALF = jnp.float16
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
    assert (first.module, first.backward, first.trips) == ("square", False, ())
    assert first.inputs == (("float16", (3,), 300.0), ("float16", (3,), 300.0))
    assert first.largest == 65504
    assert report.reached == ("result",)
    assert report.finite_in_float32
    assert "forward pass leaves float16" in report.advice
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
    return jax.shard_map(
        lambda y: jax.lax.psum((y * y)[0], "d"),
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P(),
    )(y)


KINDS = {
    "jit": (jax.jit(lambda x: x * x), ()),
    "vmap": (jax.vmap(lambda x: x * x), ()),
    "scan": (lambda x: scanned(jnp.full(3, x[1])), (1,)),
    "reversed": (lambda x: scanned_from_the_end(jnp.full(3, x[1])), (1,)),
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
        ("reversed", "cond"),
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
        fault, (_, trips) = faults[kind], KINDS[kind]
        assert (fault.operation, fault.kind, fault.dtype) == ("mul", "Inf", "float16")
        assert fault.trips == trips, kind
        assert fault.inputs[0][2] == 300, kind
    assert not report.notes


def test_what_an_ended_loop_of_a_batch_throws_away_reaches_nothing():
    def squared(x, n):
        step = lambda s: (s[0] + 1, s[1] * s[1])  # noqa: E731
        return jax.lax.while_loop(lambda s: s[0] < n, step, (0, x))[1]

    # While the second goes on, the first is squared once more: 200⁴ is beyond float16.
    x, trips = jnp.array([200, 1], HALF), jnp.array([1, 6])
    assert find(jax.vmap(squared), x, trips).first is None
    assert find(jax.vmap(squared), x, trips + 1).first.trips == (1,)


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


# By default what has an Inf that is swallowed.
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
        low = jnp.where(keys, x.astype(HALF), -1e9)  # -Inf, and swallowed
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
    swallowed = {fault.operation for fault in report.others}
    assert "convert_element_type" in swallowed  # of -1e9


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

    w = jnp.full((4, 2), 0.5)
    return step, (w, tx.init(w), jnp.full((8, 4), 10.0))


def test_a_skipped_step_is_explained_by_its_gradients():
    step, args = step_with(2.0**24)
    report = find(step, *args)
    assert report.first.backward
    assert report.first.dtype == "float16"
    assert report.reached == ("a test of finiteness",)
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
    assert "`b` came in with 1 NaN" in report.advice
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


@pytest.mark.parametrize(
    "masked",
    [
        lambda s, m: jnp.where(m, s, -1e9),
        lambda s, m: s + (1 - m.astype(s.dtype)) * -1e9,
        lambda s, m: jnp.where(m, s, jnp.finfo(jnp.float32).min).astype(HALF),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.evidence
def test_a_mask_beyond_the_format_is_told(masked):
    def attention(scores, mask):
        return jax.nn.softmax(masked(scores, mask))

    mask = jnp.array([[True, False], [False, False]])
    report = find(attention, jnp.ones((2, 2), HALF), mask)
    assert report.first.where.startswith(__file__)
    assert report.finite_in_float32
    assert "jnp.finfo(x.dtype).min" in report.advice


@pytest.mark.evidence
def test_the_cure_for_autocast_is_a_line_to_paste():
    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, kernel_init=nn.initializers.constant(300.0))(x)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Scaled(name="head")(nn.Dense(4)(x) * 0 + 100) @ jnp.ones((2, 2))

    model, x = Net(), jnp.ones((1, 4))
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
    bfloat = find(lambda x: x * x, jnp.array([2.0**-60, 1.0], jnp.bfloat16))
    assert bfloat.operations[0].min == 2.0**-120
    assert bfloat.operations[0].lost == 0


@pytest.mark.evidence
def test_a_model_of_equinox():
    eqx = pytest.importorskip("equinox")
    x = jnp.full((2, 3), 300.0)
    linear = eqx.nn.Linear(3, 3, key=jax.random.key(0))
    linear = jaxmp.cast_tree(linear, HALF)
    first = find(lambda m, x: jax.vmap(m)(x) * 3e4, linear, x.astype(HALF)).first
    assert first.kind == "Inf"


@pytest.mark.evidence
def test_a_model_of_haiku():
    hk = pytest.importorskip("haiku")
    x = jnp.full((2, 3), 300.0)
    net = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(3, name="big")(x) ** 2))
    params = net.init(jax.random.key(0), x)
    report = find(jaxmp.with_policy(net.apply, "mixed_float16"), params, 10 * x)
    assert report.first.operation == "integer_pow" or "big" in report.first.module


@pytest.mark.evidence
def test_nnx_modules():
    x = jnp.full((2, 3), 300.0)

    class Net(nnx.Module):
        def __init__(self):
            self.inner = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
            self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(self.inner(x)) * 1e4 * self.inner(x).astype(HALF)  # here

    def loss(model, x):
        return nnx.value_and_grad(lambda m: m(x).astype(jnp.float32).sum())(model)

    assert find(loss, Net(), x).first is None
    first = find(jaxmp.nnx.autocast(loss, HALF), Net(), x * 300).first
    assert first.where == line_of(Net, "# here") or "nnx" not in first.where


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
    assert "not all could be looked at" in report.advice


def test_the_report_is_a_table_and_a_dict():
    step, args = step_with(2.0**24)
    report = find(step, *args)
    text = str(report)
    assert max(map(len, text.splitlines())) <= 98
    for words in ("first: ", "backward", "least headroom"):
        assert words in text
    fields = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert fields["first"]["backward"] is True
    assert fields["operations"][0].keys() >= {"headroom", "lost", "where"}


@pytest.mark.parametrize("shape", [(0,)])
def test_arrays_of_any_size_and_kind_pass(shape):
    def f(x, n, key):
        z = jnp.fft.fft(jnp.ones(4)).sum() + jnp.exp(x.sum() * 1j)
        return x + n, z, jax.random.split(key), None, "text"

    report = find(f, jnp.ones(shape), 3, jax.random.key(0))
    assert report.first is None


def test_values_are_needed():
    with pytest.raises(TypeError, match="`find_overflow` needs values, but `x` is abs"):
        find(lambda x: x, jax.ShapeDtypeStruct((2,), jnp.float32))
    with pytest.raises(TypeError, match="is traced"):
        jax.jit(lambda x: find(lambda y: y, x))(X)
    with pytest.raises(TypeError, match="`find_overflow` needs a function"):
        jaxmp.find_overflow(X)


def test_parts_of_the_gradient_in_complex_and_integer_steps_are_exact():
    x = np.array([3.0, 70000.0], np.float32)
    report = find(lambda x: x.astype(HALF).astype(jnp.bfloat16), x)
    assert report.first.operation == "convert_element_type"
    assert report.first.inputs == (("float32", (2,), 70000.0),)


@pytest.mark.parametrize(
    ("fun", "is_made"),
    [
        (lambda x: x + jnp.ones(8), True),
        (lambda x: x + jnp.arange(8.0), True),
        (lambda x: x + np.arange(8, dtype=np.float32), True),
        (lambda x: x * 2, False),
    ],
)
def test_what_is_seen_of_constants_is_not_found_while_compiling(fun, is_made):
    # XLA would do that number by number, which takes minutes for a whole program.
    probe = Probe(jax.make_jaxpr(fun)(jnp.ones(8)), ["x"])
    text = jax.jit(probe.program(Place())).lower(jnp.ones(8)).as_text()
    assert ("optimization_barrier" in text) == is_made
