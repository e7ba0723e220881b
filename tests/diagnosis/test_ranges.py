"""Exponents, classes and scales against NumPy in float64, and what records them."""

import contextlib
import json
import math

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from conftest import mapped

DTYPES = ["float32", "float16", "bfloat16"]


def with_neighbours(*values):
    """Returns float32 values, those next to them, and all of them negated."""
    x = np.array(values, np.float32)
    with np.errstate(over="ignore"):  # the neighbour above the maximum is Inf
        x = np.concatenate([x, np.nextafter(x, np.inf), np.nextafter(x, -np.inf)])
    return np.concatenate([x, -x]).astype(np.float32)


F32, BF16 = np.finfo(np.float32), ml_dtypes.finfo(ml_dtypes.bfloat16)
ADVERSARIAL = np.concatenate(
    [
        with_neighbours(0, 1, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 2.0**-14),
        with_neighbours(2.0**-14 - 2.0**-24, 2.0**-14 - 2.0**-25),
        with_neighbours(65504, 65519, 65520, 65536, np.inf, F32.max, F32.tiny),
        with_neighbours(2.0**-133, 2.0**-134, 2.0**-126 - 2.0**-134, 1.5 * 2.0**-134),
        with_neighbours(float(BF16.max), float(BF16.max) + 2.0**119, 2.0**-149),
        np.array([65519.99, np.nan, -np.nan], np.float32),
    ]
)


def every_kind(dtype, size=20_000):
    """Returns random bit patterns, so values of every exponent, and bad ones."""
    bits = np.random.default_rng(0).integers(0, 2**32, size, np.uint32)
    if dtype == "float32":
        return np.concatenate([bits.view(np.float32), ADVERSARIAL])
    return np.arange(2**16, dtype=np.uint16).view(np.dtype(dtype))  # all there are


@np.errstate(invalid="ignore")  # signalling NaNs
def expected_histogram(x, low, high):
    x = np.abs(np.asarray(x).astype(np.float64)).ravel()
    x = x[(x > 0) & (x < np.inf)]
    exponents = np.clip(np.frexp(x)[1] - 1, low, high)
    return np.bincount(exponents - low, minlength=high - low + 1)


@np.errstate(over="ignore", invalid="ignore")
def expected_counts(x, dtype):
    """Counts the classes by casting and looking at what came out."""
    finite = np.isfinite(x.astype(np.float32))
    y = np.abs(x.astype(dtype).astype(np.float64))
    tiny = float(jnp.finfo(dtype).tiny)
    return {
        "zero": np.sum(x == 0),
        "underflow": np.sum((x != 0) & (y == 0)),
        "subnormal": np.sum((y > 0) & (y < tiny)),
        "normal": np.sum((y >= tiny) & (y < np.inf)),
        "overflow": np.sum(finite & (y == np.inf)),
        "nonfinite": np.sum(~finite),
    }


def counts_of(stats):
    """Returns the counts, checked to be integers that the fractions stand for."""
    for name, count in stats.counts.items():
        assert type(count) is int
        assert getattr(stats, name) == (count / stats.size if stats.size else 0)
    return stats.counts


# The histogram


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bounds", [(-40, 16), (-149, 127), (-2, 2), (0, 1)])
def test_the_histogram_is_exact_on_every_bit_pattern(dtype, bounds):
    x, (low, high) = every_kind(dtype), bounds
    histogram = jax.jit(
        lambda x: jaxmp.exponent_histogram({"x": x}, low=low, high=high)
    )(x)
    assert histogram.dtype == jnp.int32
    np.testing.assert_array_equal(histogram, expected_histogram(x, low, high))


def test_trees_are_counted_whole_or_by_leaf():
    grads = {"a": jnp.full((3, 5), 0.5), "b": [jnp.float16(2), 1.0, None], "c": ()}
    whole = jaxmp.exponent_histogram(grads, low=-1, high=1)
    leaves = jaxmp.exponent_histogram(grads, low=-1, high=1, per_leaf=True)
    assert whole.tolist() == [15, 1, 1]
    assert jax.tree.structure(leaves) == jax.tree.structure(grads)
    assert leaves["a"].tolist() == [15, 0, 0]
    assert sum(jax.tree.leaves(leaves)).tolist() == whole.tolist()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 1, 2, 70), (4, 0)])
def test_every_shape_is_counted(shape):
    assert jaxmp.exponent_histogram(jnp.ones(shape)).sum() == math.prod(shape)


def test_the_histogram_can_be_vmapped():
    x = jnp.array([[1.0, 2.0], [2.0, 2.0]])
    counts = jax.vmap(lambda x: jaxmp.exponent_histogram(x, low=0, high=1))(x)
    assert counts.tolist() == [[1, 1], [0, 2]]


def test_float64_is_counted_too():
    with jax.enable_x64(True):
        x = jnp.array([2.0**-1074, 2.0**-1000, 1.0, 2.0**1000])
        counts = jaxmp.exponent_histogram(x, low=-1074, high=1000)
    assert counts.dtype == jnp.int32
    assert np.flatnonzero(counts).tolist() == [0, 74, 1074, 2074]


def test_float64_is_counted_exactly_where_jax_would_round_it():
    x = [np.array([2.0**-1074, 1 - 2.0**-40]), 2.0**1000]
    count = lambda: jaxmp.exponent_histogram(x, low=-1074, high=1000)  # noqa: E731
    for counts in (count(), jax.jit(count)()):
        assert np.flatnonzero(counts).tolist() == [0, 1073, 2074]


def test_more_than_an_int32_counts_is_refused():
    huge = [jax.ShapeDtypeStruct((2**15, 2**15), jnp.float16)] * 2
    with pytest.raises(ValueError, match=r"2147483648 entries.*`per_leaf=True`"):
        jax.eval_shape(jaxmp.exponent_histogram, huge)
    jax.eval_shape(lambda x: jaxmp.exponent_histogram(x, per_leaf=True), huge)


@pytest.mark.parametrize(
    "function", [jaxmp.exponent_histogram, jaxmp.range_report, jaxmp.suggest_loss_scale]
)
@pytest.mark.parametrize("leaf", [jnp.arange(3), jnp.array(True), 3, "text"])
def test_what_is_not_floating_is_refused(function, leaf):
    with pytest.raises(TypeError, match="needs floating leaves, but `a/b` is "):
        function({"a": {"b": leaf}, "c": jnp.ones(1)})


@pytest.mark.parametrize("kind", [jnp.array, np.array], ids=["jax", "numpy"])
def test_real_and_imaginary_parts_count_each(kind):
    z = kind([3 + 2.0**-26 * 1j, 1e5j, complex(np.nan, 1)])
    tree, parts = {"z": z, "n": 0.5 - 4j}, [z.real, z.imag, 0.5, -4.0]
    assert jaxmp.range_report(tree).total == jaxmp.range_report(parts).total
    assert jaxmp.suggest_loss_scale(tree) == jaxmp.suggest_loss_scale(parts) == 2.0**-4
    counts = jaxmp.exponent_histogram(tree)
    assert counts.tolist() == jaxmp.exponent_histogram(parts).tolist()
    assert jax.jit(jaxmp.exponent_histogram)({"z": z}).sum() == 4
    tx = jaxmp.record_ranges(every=1)
    _, state = tx.update({"z": jnp.asarray(z)}, tx.init(None))
    assert (state.exponents.sum(), state.zeros, state.nonfinite) == (4, 1, 1)
    assert state.max == 1e5


def test_buckets_in_the_wrong_order_are_refused():
    for function in (
        jaxmp.record_ranges,
        lambda **k: jaxmp.exponent_histogram(1.0, **k),
    ):
        with pytest.raises(ValueError, match=r"`low` must be below `high`.* 3 and 3"):
            function(low=3, high=3)
        with pytest.raises(TypeError, match=r"`low` must be an integer, but is -40\.0"):
            function(low=-40.0)


# The report


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", ["float16", "bfloat16", "float32"])
def test_the_report_is_the_cast(dtype, target):
    x = every_kind(dtype)
    stats = jaxmp.range_report(x, target).total
    assert counts_of(stats) == expected_counts(x, target)
    assert stats.size == x.size
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(x.astype(np.float64))
    magnitude = magnitude[(magnitude > 0) & (magnitude < np.inf)]
    assert (stats.min, stats.max) == (magnitude.min(), magnitude.max())


def test_the_total_is_that_of_all_values():
    x = ADVERSARIAL
    report = jaxmp.range_report({"a": x[:7], "b": {"c": x[7:], "d": x[:0]}})
    assert list(report.leaves) == ["a", "b/c", "b/d"]
    assert report.total == jaxmp.range_report(x).total
    assert report.leaves["a"] == jaxmp.range_report(x[:7]).total
    fractions = [getattr(report.total, name) for name in counts_of(report.total)]
    assert sum(fractions) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("tree", [{}, None, {"a": jnp.zeros((0, 3))}])
def test_an_empty_tree_has_an_empty_report(tree):
    report = jaxmp.range_report(tree)
    total = report.as_dict()["total"]
    assert set(total.pop("counts").values()) == set(total.values()) == {0}
    assert jaxmp.exponent_histogram(tree).sum() == 0
    assert "0 values as float16" in str(report)


def test_zeros_and_infinities_have_no_extremes():
    stats = jaxmp.range_report(jnp.array([0.0, jnp.inf, jnp.nan])).total
    assert (stats.min, stats.max) == (0, 0)


def test_a_report_is_plain_data():
    report = jaxmp.range_report({"w": jnp.ones(2, jnp.bfloat16)}, jnp.bfloat16)
    counts = {"zero": 0, "underflow": 0, "subnormal": 0, "normal": 2}
    counts |= {"overflow": 0, "nonfinite": 0}
    expected = {name: count / 2 for name, count in counts.items()}
    expected |= {"min": 1.0, "max": 1.0, "size": 2, "counts": counts}
    assert json.loads(json.dumps(report.as_dict())) == {
        "dtype": "bfloat16",
        "total": expected,
        "leaves": {"w": expected},
    }


def test_the_table_is_aligned_with_the_worst_leaves_first():
    good, bad = jnp.ones(1000), jnp.full(1000, 1e-9).at[0].set(1e-6)
    tree = {f"a_very_long_name_{i}/of_a/module_{i}": good for i in range(3)}
    tree |= {"inf": good * jnp.inf, "tiny": bad, "sub": good * 1e-6}
    tree["rare"] = jnp.ones(10**5).at[0].set(1e6)
    lines = str(jaxmp.range_report(tree)).splitlines()
    assert lines[0] == "106,000 values as float16"
    names = [line.split()[0] for line in lines[3:8]]
    assert names == ["total", "inf", "tiny", "rare", "sub"]
    assert len({len(line) for line in lines[3:] if " " in line}) == 1
    assert max(map(len, lines)) <= 80
    assert "<0.01" in lines[6]  # one value in 100,000 overflows, and that shows


def test_the_table_has_every_path_whole():
    layer = {"self_attention": {"query": {"kernel": jnp.ones(1)}}}
    tree = {"encoder": {f"layers_{i}": layer for i in range(3)}}
    report = jaxmp.range_report(tree)
    lines = str(report).splitlines()
    assert [line for line in lines if "/" in line] == [*report.leaves]
    assert max(map(len, lines)) <= 80


def test_paths_that_are_spelled_the_same_are_all_reported():
    report = jaxmp.range_report({"a": {"b": jnp.ones(1)}, "a/b": jnp.zeros(2)})
    assert {path: stats.size for path, stats in report.leaves.items()} == {
        "a/b": 1,
        "a/b#1": 2,
    }
    assert list(jaxmp.range_report(1.0).leaves) == ["(root)"]


def test_a_count_is_exact_where_its_fraction_is_rounded():
    counts = jaxmp.range_report(np.r_[1e-9, np.ones(48)]).total.counts
    assert (counts["underflow"], counts["normal"]) == (1, 48)


@pytest.mark.parametrize("function", [jaxmp.range_report, jaxmp.suggest_loss_scale])
def test_what_reads_values_refuses_traced_ones(function):
    with pytest.raises(TypeError, match=r"on the host, but `w` is traced.*outside"):
        jax.jit(lambda x: function({"w": x}) and x)(1.0)


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="Did you mean `float16`"):
        jaxmp.range_report(1.0, "flaot16")
    with pytest.raises(ValueError, match="`dtype` must be float16"):
        jaxmp.suggest_loss_scale(1.0, jnp.int8)


# The scale


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_scale_is_the_largest_that_fits(dtype):
    limit = float(jnp.finfo(dtype).max)
    for value in [*np.abs(every_kind("float32", 300)), 65504.0, 65505.0, limit]:
        if 0 < value < np.inf:
            scale = jaxmp.suggest_loss_scale(np.float32(-value), dtype, headroom=1)
            assert math.frexp(scale)[0] == 0.5
            assert 2.0**-126 <= scale <= 2.0**127
            fits = float(value) * scale <= limit
            assert fits or scale == 2.0**-126
            assert float(value) * scale * 2 > limit or scale == 2.0**127


def test_by_default_gradients_may_become_eight_times_as_large():
    scale = jaxmp.suggest_loss_scale({"w": jnp.array([1e-3, -0.9])})
    assert scale == jaxmp.suggest_loss_scale(0.9, headroom=8) == 2.0**13
    assert not np.isinf(np.float16(8 * 0.9 * scale))


def test_headroom_lowers_the_scale():
    scales = [jaxmp.suggest_loss_scale(1.0, headroom=h) for h in (1, 1.9, 2, 8, 0.5)]
    assert scales == [2.0**15, 2.0**15, 2.0**14, 2.0**12, 2.0**16]
    with pytest.raises(ValueError, match="`headroom` must be finite and positive"):
        jaxmp.suggest_loss_scale(1.0, headroom=0)
    with pytest.raises(TypeError, match="`headroom` must be a number"):
        jaxmp.suggest_loss_scale(1.0, headroom="8")


def test_headroom_can_be_an_array_and_beyond_all_floats():
    assert jaxmp.suggest_loss_scale(1.0, headroom=jnp.float32(8)) == 2.0**12
    assert jaxmp.suggest_loss_scale(2.0**-1000, headroom=2.0**1000) == 2.0**15
    assert jaxmp.suggest_loss_scale(2.0**100, headroom=2.0**1000) == 2.0**-126
    assert jaxmp.suggest_loss_scale(2.0**-100, headroom=2.0**-1074) == 2.0**127


def test_the_statistics_of_many_steps_give_one_scale():
    tx = jaxmp.record_ranges()
    _, state = tx.update(jnp.array([-1.0, jnp.inf]), tx.init(1.0))
    report = jaxmp.range_report({"w": jnp.array([4.0, jnp.nan])})
    assert jaxmp.suggest_loss_scale(state) == 2.0**12
    assert jaxmp.suggest_loss_scale(report) == 2.0**10
    assert jaxmp.suggest_loss_scale([state, {"r": report}]) == 2.0**10
    assert jaxmp.suggest_loss_scale([state, {"g": jnp.array(16.0)}]) == 2.0**8
    with pytest.raises(TypeError, match=r"Pass gradients.*RecordRangesState"):
        jaxmp.suggest_loss_scale(optax.chain(tx, optax.adam(0.1)).init(1.0))


def test_stacked_states_give_one_scale():
    tx = jaxmp.record_ranges()
    x = jnp.array([[1.0, 2.0], [4.0, 0.5]])
    states = jax.vmap(lambda x: tx.update(x, tx.init(x))[1])(x)
    assert jaxmp.suggest_loss_scale(states) == 2.0**10


@pytest.mark.parametrize("tree", [{}, jnp.zeros(3), jnp.array([jnp.inf, jnp.nan])])
def test_without_a_value_there_is_no_scale(tree):
    with pytest.raises(ValueError, match="needs a finite nonzero value"):
        jaxmp.suggest_loss_scale(tree)


# The recording


def steps_of_gradients(n=7):
    rng = np.random.default_rng(1)
    x = (
        rng.standard_normal((n, 6, 8)) * 2.0 ** rng.integers(-40, 10, (n, 6, 8))
    ).astype(np.float32)
    x[:, 0, 0] = 0
    x[2, 1, 1], x[3, 1, 1] = np.inf, np.nan
    return {"w": jnp.asarray(x), "b": jnp.asarray(x[:, 0]).astype(jnp.bfloat16)}


def run(tx, grads):
    """Updates under scan, which refuses a state whose structure or dtypes drift."""

    def step(state, g):
        updates, state = tx.update(g, state, g)
        return state, updates

    params = jax.tree.map(lambda g: jnp.zeros_like(g[0]), grads)
    return jax.jit(lambda s, g: jax.lax.scan(step, s, g))(tx.init(params), grads)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.evidence), 3])
def test_the_recorded_steps_add_up_and_the_updates_pass_through(every):
    grads = steps_of_gradients()
    state, updates = run(jaxmp.record_ranges(every=every, low=-30, high=4), grads)
    chex.assert_trees_all_equal(updates, grads)
    counted = jax.tree.map(lambda g: g[::every], grads)
    flat = np.concatenate([np.ravel(g).astype(np.float64) for g in counted.values()])
    expected = jaxmp.exponent_histogram(counted, low=-30, high=4)
    np.testing.assert_array_equal(state.exponents, expected)
    assert (state.steps, state.low) == (7, -30)
    assert state.zeros == np.sum(flat == 0)
    assert state.nonfinite == np.sum(~np.isfinite(flat)) > 0
    assert state.max == max(jaxmp.range_report(g).total.max for g in grads.values())


def test_the_maximum_is_that_of_all_steps():
    state, _ = run(jaxmp.record_ranges(every=4), {"w": jnp.array([1.0, 8.0, 2.0])})
    assert (state.exponents.sum(), state.max) == (1, 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_maximum_may_be_subnormal(dtype):
    # The CPU's maximum of floats would take them for zeros.
    tx = jaxmp.record_ranges()
    state, x = tx.init(1.0), np.array([2.0**-130, 0, 2.0**-131], dtype)
    for update in (tx.update, jax.jit(tx.update)):
        state = update(x, state)[1]
        np.testing.assert_array_equal(np.asarray(state.max).view(np.int32), 2**19)


def test_the_state_keeps_its_dtypes_under_x64():
    tx = jaxmp.record_ranges(every=2)
    with jax.enable_x64(True):
        state, _ = run(tx, {"w": jnp.array([1.0, 1e300, -2.0])})
        assert jaxmp.suggest_loss_scale(state) == 2.0**-116
    expected = [x.dtype for x in tx.init(1.0)]
    assert [x.dtype for x in state] == expected
    assert (state.exponents.sum(), state.max) == (2, F32.max)


def test_a_restored_state_keeps_its_buckets():
    restored = jaxmp.record_ranges(low=-8, high=8).init(1.0)
    _, state = jaxmp.record_ranges().update(jnp.array([1.0, 2.0**5]), restored)
    assert state.low == -8
    assert np.flatnonzero(state.exponents).tolist() == [8, 13]


def test_the_wrapper_shows_the_finite_steps_only():
    grads = steps_of_gradients()
    record = jaxmp.record_ranges(every=1)
    inside = jaxmp.loss_scaling(optax.chain(record, optax.sgd(1.0)), "float16")
    outside = optax.chain(record, jaxmp.loss_scaling(optax.sgd(1.0), "float16"))
    plain, _ = run(record, jax.tree.map(lambda g: g[jnp.array([0, 1, 4, 5, 6])], grads))
    all_of_them, _ = run(record, grads)
    for tx, expected in ((inside, plain), (outside, all_of_them)):
        opt_state, _ = run(tx, grads)
        state = optax.tree.get(opt_state, "RecordRangesState")
        chex.assert_trees_all_equal(state, expected)


def test_the_state_can_be_donated_and_compiles_once():
    tx = optax.chain(jaxmp.record_ranges(every=2), optax.adam(0.1))
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4, jnp.float16)}
    state, step = tx.init(params), jax.jit(tx.update, donate_argnums=1)
    before = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    for _ in range(3):
        _, state = step(params, state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == before
    assert step._cache_size() == 1
    assert state[0].exponents.sum() == 2 * 20


def test_leaves_that_are_not_floating_pass_uncounted():
    tx = jaxmp.record_ranges()
    grads = {"w": jnp.ones(2), "i": np.zeros(3, jax.dtypes.float0), "none": None}
    updates, state = tx.update(grads, tx.init(grads), extra=1)
    assert updates is grads
    assert state.exponents.sum() == 2
    _, state = tx.update({}, tx.init({}))
    assert state.steps == 1


def test_a_step_that_is_not_counted_costs_a_byte_for_each_value():
    # What a cond reads is in memory: float32 updates there would cost six bytes.
    tx = jaxmp.record_ranges()
    jaxpr = jax.make_jaxpr(tx.update)({"w": jnp.ones((4, 4))}, tx.init(1.0))
    (cond,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "cond"]
    sizes = [var.aval.size * var.aval.dtype.itemsize for var in cond.invars[1:]]
    counts = 4 * (57 + 2)  # what the state has counted so far
    assert sum(sizes) == 16 + counts


def test_the_same_parameter_of_many_layers_is_counted_at_once():
    # Compilers are slow with hundreds of scatters.
    tx = jaxmp.record_ranges()
    grads = {f"layer_{i}": {"kernel": jnp.ones((2, 3))} for i in range(20)}
    lowered = jax.jit(tx.update).lower(grads, tx.init(grads))
    assert lowered.as_text().count("call @_count(") == 1


def test_options_are_checked():
    with pytest.raises(ValueError, match="`every` must be at least 1"):
        jaxmp.record_ranges(every=0)
    with pytest.raises(TypeError, match="`every` must be an integer"):
        jaxmp.record_ranges(every=1.5)


# Sharded arrays


def mesh(shape=(8,), names=("data",)):
    return jax.sharding.Mesh(np.array(jax.devices("cpu")[:8]).reshape(shape), names)


@pytest.mark.parametrize(
    "spec",
    [
        ("x", "y"),
        (("x", "y"),),
        *(
            pytest.param(spec, marks=pytest.mark.evidence)
            for spec in (("x",), (None, "x"), ("y", "x"))
        ),
    ],
)
def test_sharded_arrays_give_the_numbers_of_unsharded_ones(spec):
    x = np.resize(ADVERSARIAL, (16, 24))
    sharding = NamedSharding(mesh((4, 2), ("x", "y")), P(*spec))
    sharded = {"w": jax.device_put(x, sharding)}
    histogram = jax.jit(jaxmp.exponent_histogram)
    np.testing.assert_array_equal(histogram(sharded), expected_histogram(x, -40, 16))
    assert jaxmp.range_report(sharded) == jaxmp.range_report({"w": x})
    assert jaxmp.suggest_loss_scale(sharded) == jaxmp.suggest_loss_scale(x)
    tx = jaxmp.record_ranges()
    update = jax.jit(tx.update)
    updates, state = update(sharded, tx.init(sharded))
    assert updates["w"].sharding.is_equivalent_to(sharding, 2)
    chex.assert_trees_all_equal(state, tx.update({"w": x}, tx.init(x))[1])
    for compiled in (histogram.lower(sharded), update.lower(sharded, state)):
        assert "all-gather" not in compiled.compile().as_text()


@pytest.mark.parametrize(
    "is_current", [True, pytest.param(False, marks=pytest.mark.evidence)]
)
def test_explicitly_sharded_arrays_are_counted(is_current):
    x = np.resize(ADVERSARIAL, (16, 24))
    explicit = jax.make_mesh(
        (4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2
    )
    sharding = NamedSharding(explicit, P("x", "y"))
    sharded = {"0": jax.device_put(x, sharding), "1": jax.device_put(x, sharding)}
    tx = jaxmp.record_ranges()
    with jax.set_mesh(explicit) if is_current else contextlib.nullcontext():
        histogram = jaxmp.exponent_histogram(sharded)
        _, state = jax.jit(tx.update)(sharded, tx.init(x))
    np.testing.assert_array_equal(histogram, 2 * expected_histogram(x, -40, 16))
    np.testing.assert_array_equal(state.exponents, histogram)
    assert state.max == F32.max


@pytest.mark.parametrize("check_vma", [True, False])
def test_axis_name_adds_over_devices(check_vma):
    x = np.resize(ADVERSARIAL, (8, 30))
    tx = jaxmp.record_ranges(axis_name="data")

    @jax.jit
    @lambda f: mapped(f, mesh(), (P("data"), P()), P(), check_vma=check_vma)
    def record(x, state):
        return tx.update(x, state)[1]

    whole = jaxmp.record_ranges()
    state = record(x, tx.init(x))
    chex.assert_trees_all_equal(state, whole.update(x, whole.init(x))[1])


def test_updates_that_are_the_same_on_all_devices_count_once():
    tx = jaxmp.record_ranges(axis_name="data")
    record = mapped(
        lambda x: tx.update({"same": jax.lax.psum(x, "data"), "own": x}, tx.init(x))[1],
        mesh(),
        P("data"),
        P(),
    )
    state = jax.jit(record)(jnp.ones((8, 3)))
    assert state.exponents[40] == 8 * 3  # 1
    assert state.exponents[43] == 3  # 1 + 1 + 1 + 1 + 1 + 1 + 1 + 1


def test_devices_that_differ_or_do_not_exist_are_named():
    def record(tx):
        return mapped(lambda x: tx.update(x, tx.init(x))[1], mesh(), P("data"), P())

    with pytest.raises(ValueError, match=r"differ over the mesh axes \['data'\]"):
        jax.eval_shape(record(jaxmp.record_ranges()), jnp.ones(8))
    with pytest.raises(ValueError, match="'rows' is not one"):
        jaxmp.record_ranges(axis_name="rows").update(1.0, jaxmp.record_ranges().init(1))
