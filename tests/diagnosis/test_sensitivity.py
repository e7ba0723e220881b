"""Measuring which modules need float32."""

import dataclasses
import functools
import io
import json
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
from benchmarks.networks.families import SMALL
from conftest import mapped, rest_is_evidence
from jaxmp._diagnosis.sensitivity.rounded import marking
from jaxmp._diagnosis.sensitivity.search import relative_errors as _errors
from jaxmp._diagnosis.sensitivity.switches import Program
from jaxmp._diagnosis.wide_replay import compiled
from jaxmp._jaxprs.flatten import flatten
from jaxmp._jaxprs.places import Place

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal((8, 8), np.float32), np.arange(8) % 3
DTYPES = {"bfloat16": "bfloat16", "float16": "float16"}


class Fourier(nn.Module):
    """Features of which the phases are some hundreds, and a network on them."""

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, use_bias=False)
        x = jnp.sin(dense(8, name="phases")(x))
        return dense(3, name="head")(nn.relu(dense(8, name="a")(x)))


NET = Fourier()
PARAMS = {
    "params": {
        "phases": {"kernel": 60 * RANDOM.standard_normal((8, 8), np.float32)},
        "a": {"kernel": RANDOM.standard_normal((8, 8), np.float32) / 3},
        "head": {"kernel": RANDOM.standard_normal((8, 3), np.float32) / 3},
    }
}


def loss_of(apply):
    def loss(params, x, y):
        logits = apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return loss


def measure(fun, *args, **options):
    return jaxmp.sensitivity(fun, progress=False, **options)(*args)


@functools.cache
def fourier():
    return measure(loss_of(NET.apply), PARAMS, X, Y, policy="mixed_bfloat16")


def programs_of(fun, *args, dtype="bfloat16", **options):
    """Returns the switched program of a function under autocast, and its arguments."""
    flat = flatten(fun, args, {})
    cast = jaxmp.autocast(flat.fun, dtype, **options)
    return program_of(cast, *flat.leaves), flat


def program_of(cast, *args):
    with marking():
        return Program(jax.make_jaxpr(cast)(*args), Place(), args)


def test_the_part_that_needs_float32_comes_first_and_is_the_line_to_paste():
    report = fourier()
    assert report.modules[0].path == "Fourier/phases"
    assert report.modules[0].alone > 0.2 > 10 * report.modules[0].without
    assert report.float32_paths == ("Fourier/phases",)
    assert report.line == 'float32_paths=("Fourier/phases",)'
    assert report.meets_tolerance
    assert report.gradients > 0.2
    without_path = {row.path for row in report.modules if not row.has_path}
    assert without_path == {"Fourier"}  # no path but that of the whole net
    rows = {row.path: row for row in report.modules}
    # Of x[8, 8] @ w[8, 8] and its one gradient, that of w, and of the others' three.
    assert rows["Fourier/phases"].flops == 2 * 2 * 8 * 8 * 8
    assert rows["Fourier/a"].flops == 3 * 2 * 8 * 8 * 8
    assert sum(row.share for row in report.modules) == pytest.approx(1)


@pytest.mark.evidence
def test_what_is_pasted_gives_autocast_the_errors_that_were_told():
    report, loss = fourier(), loss_of(NET.apply)
    exact = jax.jit(jax.value_and_grad(loss))(PARAMS, X, Y)
    paths = {"float32_paths": report.float32_paths}
    cast = jaxmp.autocast(jax.value_and_grad(loss), "mixed_bfloat16", **paths)
    got = jax.jit(cast)(PARAMS, X, Y)
    errors = [float(x) for x in _errors(*(jax.tree.leaves(x) for x in (got, exact)))]
    # XLA leaves out some of the roundings here.
    assert report.measured == pytest.approx(errors, abs=2**-8)
    told = (report.loss_with_paths, report.gradients_with_paths)
    assert told == pytest.approx(report.measured, abs=2**-8)


class Residual(nn.Module):
    """Layers that add to a stream, of which the last reads phases."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, name="stem")(x)
        for i in range(2):
            h = nn.relu(nn.Dense(32, name=f"up_{i}")(x))
            x = x + nn.Dense(16, name=f"down_{i}")(h)
        wide = nn.initializers.normal(8.0)
        h = jnp.sin(nn.Dense(16, name="phase", kernel_init=wide)(nn.relu(x)))
        return nn.Dense(4, name="head")(h)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_errors_that_are_told_are_those_of_autocast_with_the_paths(dtype):
    x = np.random.default_rng(0).standard_normal((16, 16), np.float32)
    params = Residual().init(jax.random.key(0), x)

    def loss(params, x):
        return jnp.mean(Residual().apply(params, x) ** 2)

    everything = measure(loss, params, x, policy=dtype, tolerance=1.0)
    tolerance = everything.gradients / 1.3
    report = measure(loss, params, x, policy=dtype, tolerance=tolerance)
    assert report.float32_paths
    told = report.loss_with_paths, report.gradients_with_paths
    assert told == pytest.approx(report.measured, rel=1e-3)
    assert report.gradients_with_paths < 0.9 * everything.gradients


def test_a_function_that_casts_by_itself_is_told_its_overrides():
    policy = jaxmp.get_policy("mixed_bfloat16")
    apply = jaxmp.with_policy(NET.apply, policy)
    report = measure(loss_of(apply), PARAMS, X, Y)
    assert report.is_cast
    assert report.measured is None
    assert report.overrides == ((r"^(params/)?phases/", "float32"),)
    assert report.line == r'policy.with_overrides((r"^(params/)?phases/", "float32"))'
    kept = eval(report.line).cast_to_compute(PARAMS)["params"]
    assert kept["phases"]["kernel"].dtype == jnp.float32
    assert kept["head"]["kernel"].dtype == jnp.bfloat16


def test_products_in_float8_are_switched_with_their_scales():
    def loss(w, x):
        with jax.named_scope("layer"):
            return jnp.mean((x @ w) ** 2)

    w = jax.random.normal(jax.random.key(0), (32, 32))
    ops = jaxmp.DEFAULT_OPS.with_fp8(min_size=16)
    report = jaxmp.sensitivity(loss, "mixed_fp8", ops=ops, progress=False)(w, w.T)
    assert "float8" in report.dtype
    assert report.modules[0].gradients_alone > 2**-7
    assert report.modules[0].gradients_without < 1e-6
    assert not report.notes
    assert "only this in 8/16 bits" in str(report)


FLOAT8 = {"policy": "mixed_fp8", "ops": jaxmp.DEFAULT_OPS.with_fp8(min_size=16)}


def waves(params, x):
    """Two sines of numbers that are large or not, and two layers that are harmless."""
    with jax.named_scope("phases"):
        h = jnp.sin(x @ params["phases"])
    with jax.named_scope("sharp"):
        h = jnp.sin(h @ params["sharp"])
    with jax.named_scope("plain"):
        h = h + jnp.tanh(h @ params["plain"])
    with jax.named_scope("head"):
        return jnp.mean((h @ params["head"]) ** 2)


def waves_of(phases, sharp):
    random = np.random.default_rng(1)
    x = random.standard_normal((16, 16), np.float32)
    sizes = {"phases": (16, 32), "sharp": (32, 32), "plain": (32, 32), "head": (32, 16)}
    scales = {"phases": phases, "sharp": sharp, "plain": 0.1, "head": 0.2}
    return {
        name: scales[name] * random.standard_normal(shape, np.float32)
        for name, shape in sizes.items()
    }, x


# What is needed, by the scales of the phases and of the second sine.
IN_FLOAT8 = {
    "nothing": (0.2, 0.2, (False, False)),
    "float32": (60, 0.2, (True, False)),
    "bfloat16": (0.2, 3, (False, True)),
    "both": (60, 3, (True, True)),
}


@pytest.mark.parametrize(
    ("phases", "sharp", "expected"), rest_is_evidence(IN_FLOAT8, "both")
)
def test_the_fewest_paths_of_both_kinds_are_found(phases, sharp, expected):
    args = waves_of(phases, sharp)
    report = measure(waves, *args, **FLOAT8, tolerance=0.1)
    paths = {
        "float32_paths": report.float32_paths,
        "bfloat16_paths": report.bfloat16_paths,
    }
    assert tuple(map(bool, paths.values())) == expected
    assert report.meets_tolerance
    told = (report.loss_with_paths, report.gradients_with_paths)
    assert told == pytest.approx(report.measured, abs=0.03)
    for option, named in paths.items():
        text = ", ".join(f'"{path}"' for path in named)
        assert (f"{option}=({text}" in report.line) == bool(named)
    assert report.as_dict()["bfloat16_paths"] == list(report.bfloat16_paths)
    exact = jax.jit(jax.value_and_grad(waves))(*args)
    for option, named in paths.items():  # each is needed
        for path in named:
            fewer = {**paths, option: tuple(x for x in named if x != path)}
            cast = jaxmp.autocast(jax.value_and_grad(waves), **FLOAT8, **fewer)
            leaves = map(jax.tree.leaves, (compiled(cast, *args)(*args), exact))
            assert max(map(float, _errors(*leaves))) > 0.9 * 0.1, fewer


def test_an_override_that_matches_no_parameter_is_named():
    def loss(weights, x):
        def model(weights, x):
            with jax.named_scope("features"):
                return jnp.sin(x @ weights["b"])

        return jnp.mean(jaxmp.with_policy(model, "mixed_bfloat16")(weights, x))

    weights, x = {"b": jnp.full((8, 4), 33.3)}, jnp.full((8, 8), 3.33)
    report = jaxmp.sensitivity(loss, progress=False)(weights, x)
    assert report.float32_paths == ("features",)
    assert "override for `features`" in str(report).replace("\n", " ")


@pytest.mark.evidence
def test_a_function_under_autocast_is_taken_as_it_stands():
    loss = jaxmp.autocast(loss_of(NET.apply), "bfloat16")
    report = measure(loss, PARAMS, X, Y, policy="float16")
    assert report.dtype == "bfloat16"
    assert report.line == fourier().line


def test_gradients_of_the_users_own_are_compared_as_they_are():
    own = jax.value_and_grad(loss_of(NET.apply))
    report = measure(own, PARAMS, X, Y)
    assert report.modules == fourier().modules


def test_a_sound_model_needs_nothing():
    def loss(w, x):
        with jax.named_scope("a"):
            h = jnp.tanh(x @ w["a"])
        with jax.named_scope("b"):
            return jnp.mean((h @ w["b"]) ** 2), h / 0  # something else

    w = {"a": jnp.ones((8, 8)) / 4, "b": jnp.ones((8, 2))}
    report = measure(loss, w, X, has_aux=True)
    assert report.float32_paths == ()
    assert report.line == ""
    assert "Nothing needs float32: both errors are at most 0.05." in str(report)


def test_what_has_no_path_of_its_own_is_told():
    def loss(w, x):
        with jax.named_scope("head"):
            return jnp.mean(jnp.sin(x @ w["w"]) @ w["v"])

    def unnamed(w, x):
        return loss(w, jnp.sin(x @ w["u"]))

    w = {"u": jnp.full((8, 8), 99.9), "v": jnp.ones((8, 1)), "w": jnp.ones((8, 8)) / 9}
    report = measure(unnamed, w, X)
    # What a head in float32 reads keeps its digits, so that it is worth naming.
    assert set(report.float32_paths) <= {"head"}
    told = (report.loss_with_paths, report.gradients_with_paths)
    assert told == pytest.approx(report.measured, rel=2**-6)
    assert not report.meets_tolerance
    assert "What is left is in (in no module)" in " ".join(str(report).split())


def test_paths_are_as_few_and_as_cheap_as_the_tolerance_allows():
    # Three phases in a module; two of them are wrong, the third, the dearest, is not.
    def loss(w, x):
        with jax.named_scope("net"):
            total = 0.0
            for name in "abc":
                with jax.named_scope(name):
                    total += jnp.sin(x @ w[name]).mean()
            with jax.named_scope("head"):
                return total + jnp.mean(x @ w["head"])

    large = jnp.full((8, 8), 99.9)
    w = {"a": large, "b": large + 11, "c": jnp.ones((8, 64)) / 9, "head": large}
    report = measure(loss, w, X, tolerance=0.02)
    assert report.float32_paths == ("net/a", "net/b")
    assert report.meets_tolerance


def test_a_cheap_module_that_is_not_needed_in_the_end_is_left_out_again():
    sizes, factors = {"cheap": 16, "a": 64, "b": 64}, {"cheap": 4.0, "a": 1.2, "b": 1.2}
    random = np.random.default_rng(0)
    w = {k: random.standard_normal((n, n), np.float32) for k, n in sizes.items()}
    x = {k: random.standard_normal((64, n), np.float32) for k, n in sizes.items()}

    def loss(w, x):
        total = 0.0
        for name in sizes:
            with jax.named_scope(name):
                h = jnp.tanh(x[name] @ w[name] * 0.05) @ w[name]
                total += factors[name] * jnp.mean(h**2)
        return total

    # It gains the most for its FLOPs, and comes first. The others are above the aim.
    rows = {row.path: row.alone for row in measure(loss, w, x, tolerance=1.0).modules}
    assert rows["cheap"] < 0.8 * min(rows["a"], rows["b"])
    aim = (rows["cheap"] + min(rows["a"], rows["b"])) / 2
    report = measure(loss, w, x, tolerance=aim / 0.9)
    assert report.float32_paths == ("a", "b")
    assert report.meets_tolerance


def test_the_loss_scale_is_one_that_training_would_find():
    def loss(w, x):
        with jax.named_scope("head"):
            return 1e3 * jnp.mean((x @ w) ** 2)

    w = jnp.ones((8, 8))
    report = measure(loss, w, X, policy="float16")
    assert report.float32_paths == ()
    assert 1 < report.loss_scale < 2**15
    assert report.gradients < 0.01
    # Gradients in bfloat16 need none.
    tiny = lambda w, x: loss(w, x) * 2.0**-40  # noqa: E731
    report = measure(tiny, w, X, policy="c=f16,b=bf16")
    assert report.loss_scale == 1
    assert report.gradients < 0.02


def test_a_forward_pass_that_overflows_is_cured():
    def apply(w, x):
        with jax.named_scope("hidden"):
            h = jax.nn.relu(x @ w)
        with jax.named_scope("scores"):
            return (1000 * h) ** 2 @ w

    apply = jaxmp.with_policy(apply, "mixed_float16")
    report = measure(lambda w, x: 1e-3 * apply(w, x).mean(), jnp.ones((8, 8)), X)
    assert report.loss == report.gradients == np.inf
    without = {row.path: row.loss_without for row in report.modules}
    assert without["hidden"] == np.inf
    assert without["scores"] < 0.01
    assert report.float32_paths == ("scores",)
    assert report.meets_tolerance
    assert "inf" in str(report)
    assert json.loads(json.dumps(report.as_dict(), allow_nan=False))["loss"] == "inf"


@pytest.mark.evidence
@pytest.mark.parametrize(
    "name", ["gpt, scanned", "mixture of experts", "lstm", "u-net"]
)
def test_switches_stand_for_autocast_in_whole_networks(name):
    network = SMALL[name]
    x, y = network.batch()
    params = jax.jit(network.model.init)(jax.random.key(0), x)
    gradient = jax.value_and_grad(loss_of(network.model.apply))
    program, flat = programs_of(gradient, params, x, y)
    on = np.ones(len(program.parts), bool)
    got = compiled(program.run, on, *flat.leaves)(on, *flat.leaves)
    autocast = jaxmp.autocast(flat.fun, "bfloat16")
    real = compiled(autocast, *flat.leaves)(*flat.leaves)
    # XLA:CPU makes four operations of a sigmoid of bfloat16, which round one after the
    # other where no excess precision is allowed. The switches round it once.
    limit = 2**-8 if name == "lstm" else 2**-9
    assert max(map(float, _errors(got, real))) < limit


@pytest.mark.evidence
def test_depth_makes_rows_of_layers():
    def loss(w, x):
        for layer in ("l0", "l1"):
            for name in "ab":
                with jax.named_scope(f"{layer}/{name}"):
                    x = jnp.tanh(x @ w)
        return x.mean()

    report = measure(loss, jnp.eye(8), X, depth=1)
    assert sorted(row.path for row in report.modules if row.path) == ["l0", "l1"]


# What a function may be made of. Each has a product in the scope `in`, in a body.


def product(x, w):
    with jax.named_scope("in"):
        return jnp.tanh(x @ w)


def in_scan(w, x):
    def step(x, w):
        return product(x, w), x.sum()

    x, sums = jax.lax.scan(step, x, jnp.stack([w, w]))
    return x.sum() + sums.sum()


def in_while(w, x):
    def step(state):
        return state[0] + 1, product(state[1], w)

    return jax.lax.while_loop(lambda state: state[0] < 2, step, (0, x))[1].sum()


def in_whiles(w, x):
    def of_row(row):  # which has a stop of its own
        def step(state):
            return state[0] + 1, product(state[1], w)

        return jax.lax.while_loop(lambda s: s[0] < abs(row).sum(), step, (0.0, row))[1]

    return jax.vmap(of_row)(x).sum()


def in_cond(w, x):
    return jax.lax.cond(x[0, 0] > -9, product, lambda x, w: x, x, w).sum()


@jax.custom_vjp
def with_rule(x, w):
    return product(x, w)


with_rule.defvjp(lambda x, w: (product(x, w), (x, w)), lambda r, t: (t, r[0].T @ t))


def in_shards(w, x):
    mesh = Mesh(jax.devices()[:2], "d")
    spec = P("d")

    def shard(x, w):
        return jax.lax.psum(product(x, w).sum(), "d")

    return mapped(shard, mesh, (spec, P()), P())(x, w)


BODIES = {
    "scan": jax.value_and_grad(in_scan),
    "while": lambda w, x: (in_while(w, x), x),
    "whiles": lambda w, x: (in_whiles(w, x), x),
    "whiles of whiles": lambda w, x: (
        jax.vmap(lambda scale: in_whiles(w, scale * x))(jnp.array([0.5, 2.0])).sum(),
        x,
    ),
    "cond": jax.value_and_grad(in_cond),
    "jit": jax.value_and_grad(lambda w, x: jax.jit(product)(x, w).sum()),
    "remat": jax.value_and_grad(lambda w, x: jax.checkpoint(product)(x, w).sum()),
    "rule": jax.value_and_grad(lambda w, x: with_rule(x, w).sum()),
    "shards": jax.value_and_grad(in_shards),
}


@pytest.mark.parametrize(
    "fun", rest_is_evidence(BODIES, "scan", "whiles", "rule", "shards")
)
@pytest.mark.parametrize("dtype", rest_is_evidence(DTYPES, "bfloat16"))
def test_switches_reach_what_is_inside(fun, dtype):
    w = jnp.asarray(RANDOM.standard_normal((8, 8), np.float32))
    program, flat = programs_of(fun, w, X, dtype=dtype)
    off = np.zeros(len(program.parts), bool)
    run = compiled(program.run, off, *flat.leaves)
    exact = compiled(flat.fun, *flat.leaves)(*flat.leaves)
    cast = compiled(jaxmp.autocast(flat.fun, dtype), *flat.leaves)(*flat.leaves)
    eps = float(jnp.finfo(dtype).eps)
    assert max(map(float, _errors(run(off, *flat.leaves), exact))) < 1e-5
    assert max(map(float, _errors(run(~off, *flat.leaves), cast))) < 1e-6
    assert max(map(float, _errors(cast, exact))) > eps / 32
    assert "in" in program.parts


@pytest.mark.parametrize("fun", rest_is_evidence(BODIES, "scan", "shards"))
def test_switches_reach_what_casts_by_itself(fun):
    args = [RANDOM.standard_normal((8, 8)).astype(np.float16) for _ in range(2)]
    program = Program(jax.make_jaxpr(fun)(*args), Place(), args)
    off = np.zeros(len(program.parts), bool)
    run = compiled(program.run, off, *args)
    wide = [x.astype(np.float32) for x in args]
    exact, narrow = (
        jax.tree.leaves(compiled(fun, *x)(*x))
        for x in (wide, [*map(jnp.asarray, args)])
    )
    assert max(map(float, _errors(run(off, *args), exact))) < 1e-5
    assert max(map(float, _errors(run(~off, *args), narrow))) < 2**-9
    assert "in" in program.parts


# What autocast clips because it is beyond the range of float16.

HALF_X = X.astype(np.float16).astype(np.float32)


def beyond_in_sum(w, b):
    return jnp.mean((HALF_X @ w + b) @ w)


def beyond_in_product(w, b):
    return jnp.mean(jnp.tanh((HALF_X * 2**9) @ (w * 2**14) / b) ** 2)


ROUNDED = jaxmp.DEFAULT_OPS.with_rounded_matmuls()
CLIPPED = {
    "a sum": (beyond_in_sum, jaxmp.autocast(beyond_in_sum, "float16")),
    "a product": (
        beyond_in_product,
        jaxmp.autocast(beyond_in_product, "float16", ops=ROUNDED),
    ),
}
W, BEYOND = jnp.eye(8) / 2**6, jnp.full(8, 2.0**17)


@pytest.mark.parametrize(("fun", "cast"), CLIPPED.values(), ids=CLIPPED.keys())
def test_what_float16_clips_is_whole_in_float32(fun, cast):
    program = program_of(cast, W, BEYOND)
    off = np.zeros(len(program.parts), bool)
    run = compiled(program.run, off, W, BEYOND)
    exact, real = ([compiled(f, W, BEYOND)(W, BEYOND)] for f in (fun, cast))
    assert max(map(float, _errors(run(off, W, BEYOND), exact))) < 1e-5
    assert max(map(float, _errors(run(~off, W, BEYOND), real))) < 1e-5
    assert max(map(float, _errors(real, exact))) > 0.3


def test_the_error_of_what_float16_clips_is_told():
    report = measure(beyond_in_sum, W, BEYOND, policy="float16")
    assert report.float32_paths == ()
    assert report.measured
    assert report.loss == pytest.approx(report.measured[0], abs=1e-5)
    assert report.loss > 0.3


def test_the_table_has_at_most_98_columns_and_json_takes_the_dict():
    report = fourier()
    assert max(map(len, str(report).splitlines())) <= 80
    assert 'float32_paths=("Fourier/phases",)' in str(report)
    fields = json.loads(json.dumps(report.as_dict()))
    assert fields["float32_paths"] == ["Fourier/phases"]
    assert fields["modules"][0]["path"] == "Fourier/phases"
    assert fields["meets_tolerance"] is True


def test_the_picture_has_a_row_for_each_module_and_the_tolerance():
    pytest.importorskip("matplotlib", reason="matplotlib is in the extra `plot`")
    from jaxmp import plots

    ax = plots.sensitivity(fourier())
    names = [text.get_text() for text in ax.get_yticklabels()]
    assert "Fourier/phases".endswith(names[0])
    assert len(names) == len(fourier().modules)
    assert ax.lines[0].get_xdata()[0] == fourier().modules[0].alone
    assert ax.get_xscale() == "log"
    (legend,) = ax.figure.legends
    assert "tolerance (0.05)" in [x.get_text() for x in legend.get_texts()]


def test_the_conclusion_stands_first_and_ten_rows_at_least_behind_it():
    def loss(w, x):
        for i in range(13):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    w, x = jnp.eye(8) * 0.9, jnp.linspace(-1, 1, 32).reshape(4, 8)
    report = jaxmp.sensitivity(loss, "bfloat16")(w, x)
    conclusion, errors, table = str(report).split("\n\n")
    assert conclusion == "Nothing needs float32: both errors are at most 0.05."
    assert errors.startswith("relative errors with everything in bfloat16: loss ")
    headings, _, *rows, more = table.splitlines()
    assert headings.split("  ")[-2:] == [
        "only this in 16 bits",
        "all but this in 16 bits",
    ]
    assert len(rows) == 10
    left = len(report.modules) - 10
    assert more == f"  and {left} more in `report.modules`"
    last = report.modules[-1].path
    named = str(dataclasses.replace(report, float32_paths=(last,)))
    assert f'float32_paths=("{last}",)' in named.split("\n\n")[1]
    assert re.search(rf"^  {last} ", named, re.MULTILINE)
    assert named.endswith(f"  and {left - 1} more in `report.modules`")


def test_of_many_modules_the_worst_are_measured_and_the_others_estimated():
    def loss(w, x):
        for i in range(42):
            with jax.named_scope(f"layer_{i}"):
                x = x + jnp.sin(x @ w) / 8
        return jnp.mean(x**2)

    w = jax.random.normal(jax.random.key(0), (8, 8))
    report = measure(loss, w, X, policy="bfloat16", tolerance=1.0)
    assert [row.is_estimated for row in report.modules].count(False) == 10
    assert not any(row.is_estimated for row in report.modules[:10])
    most = max(report.loss, report.gradients)
    assert all(row.without <= most for row in report.modules[10:])
    (note,) = report.notes
    assert "estimated" in note


def test_a_cast_by_hand_has_the_digits_that_it_names():
    def fun(x):
        half = x.astype(jnp.bfloat16)
        few = jax.lax.reduce_precision(half, 8, 2).astype(jnp.float32)
        other = half.astype(jnp.float16) * jnp.float16(1.1)
        return few.sum(), other, jax.lax.reduce_precision(x, 8, 7) * x

    program = Program(jax.make_jaxpr(fun)(X), Place(), [X])
    outs = program.all_on(X)
    assert max(map(float, _errors(outs, compiled(fun, X)(X)))) < 1e-6


def test_a_bar_is_shown_where_it_is_asked_for(monkeypatch):
    pytest.importorskip("rich", reason="rich is in the extra `examples`")
    import rich.console

    text = io.StringIO()
    usual = rich.console.Console
    monkeypatch.setattr(
        rich.console, "Console", lambda stderr: usual(file=text, force_terminal=True)
    )

    def loss(w, x):
        return jnp.mean(x @ w)

    jaxmp.sensitivity(loss, progress=True)(jnp.eye(8), X)
    assert "100%" in text.getvalue()


def test_what_cannot_be_measured_is_refused():
    def loss(w, x):
        return jnp.mean(x @ w)

    w = jnp.eye(8)
    with pytest.raises(TypeError, match="`w` is abstract"):
        measure(loss, jax.ShapeDtypeStruct((8, 8), jnp.float32), X)
    with pytest.raises(TypeError, match=r"the first result is float32\[8, 8\]"):
        measure(jnp.matmul, X, w)
    with pytest.raises(TypeError, match="has_aux=True"):
        measure(lambda w, x: (loss(w, x), w), w, X)
    with pytest.raises(TypeError, match="no floating array in it"):
        measure(lambda i, w: loss(w, X), jnp.arange(3), w)
    with pytest.raises(ValueError, match="found nothing in 16 bits"):
        measure(loss, w, X, policy="float32")
    with pytest.raises(FloatingPointError, match="find_overflow"):
        measure(loss, w / 0, X)
    with pytest.raises(ValueError, match="`tolerance` must be a positive"):
        measure(loss, w, X, tolerance=0.0)
    with pytest.raises(ValueError, match="`depth` must be at least 1"):
        measure(loss, w, X, depth=0)
    with pytest.raises(TypeError, match="the loss"):
        jaxmp.sensitivity(NET)


def unit_loss(params, x, *, cast=lambda f: f):
    def model(params, x):
        with jax.named_scope("body"):
            h = x @ params["body"]
        with jax.named_scope("unit"):
            h = h / (jnp.abs(h).sum(-1, keepdims=True) * params["unit"] + 1e-8)
        with jax.named_scope("head"):
            return h @ params["head"]

    return jnp.mean(cast(model)(params, x).astype(jnp.float32) ** 2)


def test_a_module_whose_epsilon_16_bits_lose_is_named():
    key = jax.random.key(0)
    params = {"body": jax.random.normal(key, (8, 8)), "unit": jnp.ones(1)}
    params["head"] = jax.random.normal(key, (8, 2))
    x = jax.random.normal(key, (4, 8)).at[0].set(0.0)  # a padded row

    def loss(params, x):
        cast = lambda f: jaxmp.with_policy(f, "mixed_float16")  # noqa: E731
        return unit_loss(params, x, cast=cast)

    report = jaxmp.sensitivity(loss, progress=False)(params, x)
    assert report.float32_paths == ("unit",)
    assert report.loss == np.inf
    assert report.loss_with_paths < 0.05

    own = lambda p, x: unit_loss(p, x, cast=lambda f: f)  # noqa: E731
    narrow = lambda p, x: own(jax.tree.map(lambda x: x.astype("float16"), p), x)  # noqa: E731
    half = x.astype(jnp.float16)
    with pytest.raises(FloatingPointError, match="casts to float16 itself, and a num"):
        jaxmp.sensitivity(
            lambda p, x: narrow(p, x.astype(jnp.float16)), progress=False
        )(params, x)
    # Half-precision arguments are widened, and the number is 1e-8 again.
    report = jaxmp.sensitivity(own, progress=False)(
        jaxmp.cast_tree(params, "float16"), half
    )
    assert report.float32_paths == ("unit",)


def test_what_is_not_finite_in_float32_is_told_apart():
    def loss(w, x):
        return jnp.sqrt(jnp.sum((x @ w) ** 2))  # whose slope at 0 is Inf times 0

    args = jnp.ones((8, 2)), jnp.zeros((2, 8))
    with pytest.raises(FloatingPointError, match="gradients are not finite, although"):
        jaxmp.sensitivity(loss, progress=False)(*args)
    with pytest.raises(FloatingPointError, match="the loss is not finite there"):
        jaxmp.sensitivity(lambda w, x: 1 / loss(w, x), progress=False)(*args)
