"""Measuring what a device makes of float32 products at default precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_sensitivity import BODIES

import jaxmp
from conftest import rest_is_evidence
from jaxmp._diagnosis.sensitivity.search import relative_errors as _errors
from jaxmp._diagnosis.sensitivity.switches import Program
from jaxmp._diagnosis.wide_replay import compiled
from jaxmp._jaxprs.places import Place

RANDOM = np.random.default_rng(0)
FRACTIONS = {"tf32": 10, "bfloat16": 7}
W = {
    "phases": RANDOM.standard_normal((8, 8), np.float32),
    "head": RANDOM.standard_normal((8, 4), np.float32),
}
X = RANDOM.standard_normal((16, 8), np.float32)


def measure(fun, *args, policy="float32", **options):
    return jaxmp.sensitivity(fun, policy, progress=False, **options)(*args)


def exactly(fun):
    """Returns ``fun`` under the line that a report gives to paste."""

    @functools.wraps(fun)
    def exact(*args):
        with jax.default_matmul_precision("highest"):
            return fun(*args)

    return exact


def waves(w, x, phases=jnp.matmul):
    with jax.named_scope("phases"):
        h = jnp.sin(30 * phases(x, w["phases"]))
    with jax.named_scope("head"):
        return jnp.mean((h @ w["head"]) ** 2)


def rounded(x, kind):
    """Rounds to nearest, ties to even, in integers."""
    drop = 23 - FRACTIONS[kind]
    bits = np.asarray(x, np.float32).view(np.uint32)
    odd = (bits >> np.uint32(drop)) & np.uint32(1)
    bits = (bits + np.uint32((1 << (drop - 1)) - 1) + odd) >> np.uint32(drop)
    return (bits << np.uint32(drop)).view(np.float32)


def waves_by_hand(kind, exact=()):
    """Returns the loss and the gradients of `waves`, in NumPy and float64."""

    def product(module, a, b):
        if module not in exact:
            a, b = (rounded(z, kind) for z in (a, b))
        return a.astype(np.float64) @ b.astype(np.float64)

    angles = 30 * product("phases", X, W["phases"]).astype(np.float32).astype(float)
    h = np.sin(angles)
    y = product("head", h, W["head"])
    dy = 2 * y / y.size
    dh = product("head", dy, W["head"].T)
    grads = product("head", h.T, dy), product("phases", X.T, 30 * np.cos(angles) * dh)
    return np.mean(y**2), np.concatenate([np.ravel(x) for x in grads])


def errors_by_hand(kind, exact=()):
    loss, grads = waves_by_hand(kind, exact)
    loss_32, grads_32 = waves_by_hand(kind, ("phases", "head"))
    away = np.linalg.norm(grads - grads_32) / np.linalg.norm(grads_32)
    return abs(loss - loss_32) / abs(loss_32), away


@pytest.mark.parametrize("kind", FRACTIONS)
def test_the_errors_are_those_of_operands_rounded_by_hand(kind):
    report = measure(waves, W, X, float32_matmuls=kind, tolerance=0.02)
    close = functools.partial(pytest.approx, rel=0.02)
    assert (report.loss, report.gradients) == close(errors_by_hand(kind))
    assert report.gradients > 0.02
    rows = {row.path: row for row in report.modules}
    assert {*rows} == {"phases", "head"}
    for path, other in (("phases", "head"), ("head", "phases")):
        row, by_hand = rows[path], functools.partial(errors_by_hand, kind)
        assert (row.loss_alone, row.gradients_alone) == close(by_hand((other,)))
        assert (row.loss_without, row.gradients_without) == close(by_hand((path,)))
    assert report.float32_paths == ("phases",)
    assert report.meets_tolerance
    assert sum(row.share for row in report.modules) == pytest.approx(1)


@pytest.mark.parametrize("kind", FRACTIONS)
def test_what_is_pasted_takes_the_error_away(kind):
    options = {"float32_matmuls": kind, "tolerance": 0.02}
    before = measure(waves, W, X, **options)
    assert before.line == 'with jax.default_matmul_precision("highest"):'
    assert before.line in str(before)
    cured = functools.partial(waves, phases=exactly(jnp.matmul))
    after = measure(cured, W, X, **options)
    promised = before.loss_with_paths, before.gradients_with_paths
    assert (after.loss, after.gradients) == pytest.approx(promised)
    assert not after.line
    assert after.meets_tolerance
    with pytest.raises(ValueError, match="No device rounds it"):
        measure(exactly(waves), W, X, **options)
    with pytest.raises(ValueError, match="found nothing in 16 bits"):
        measure(waves, W, X)


@pytest.mark.parametrize("policy", ["bfloat16", "mixed_float16"])
def test_under_a_16_bit_policy_the_paths_have_all_digits(policy):
    report = measure(waves, W, X, policy=policy, float32_matmuls="tf32", tolerance=0.02)
    assert report.line == 'float32_paths=("phases",)'
    assert report.meets_tolerance
    # What autocast leaves to the device is measured, too.
    kept = jaxmp.float32_region(jnp.matmul, precision="default")
    left = functools.partial(waves, phases=kept)
    of_cpu = measure(left, W, X, policy=policy)
    of_device = measure(left, W, X, policy=policy, float32_matmuls="bfloat16")
    assert of_cpu.gradients < 0.05 < of_device.gradients
    assert of_device.gradients == pytest.approx(errors_by_hand("bfloat16")[1], rel=0.1)
    assert of_device.as_dict()["float32_matmuls"] == "bfloat16"
    assert "float32 matmuls at default precision in bfloat16" in " ".join(
        str(of_device).split()
    )


def test_a_gram_matrix_that_is_inverted_is_named():
    # Of its own numbers, so that float32's error of `solve` is far below that of tf32.
    random = np.random.default_rng(0)
    base = random.standard_normal((8, 1), np.float32)
    x = base + 0.5 * random.standard_normal((8, 4), np.float32)
    y = random.standard_normal((8, 2), np.float32)

    def loss(w, x, y, gram=lambda f: f.T @ f):
        features = x * w
        with jax.named_scope("gram"):
            gram = gram(features) + 1e-3 * jnp.eye(4)
        with jax.named_scope("fit"):
            fit = jnp.linalg.solve(gram, features.T @ y)
        return jnp.mean(jnp.square(fit))

    def by_hand(round_gram, round_fit):
        a, b = rounded(x, "tf32"), rounded(y, "tf32")
        a_gram, (a_fit, b_fit) = a if round_gram else x, (a, b) if round_fit else (x, y)
        gram = a_gram.T.astype(float) @ a_gram.astype(float) + 1e-3 * np.eye(4)
        fit = np.linalg.solve(gram, a_fit.T.astype(float) @ b_fit.astype(float))
        return np.mean(fit**2)

    w = jnp.ones(4)
    report = measure(loss, w, x, y, float32_matmuls="tf32", tolerance=1e-4)
    exact = by_hand(False, False)
    expected = abs(by_hand(True, True) - exact) / exact
    assert report.loss == pytest.approx(expected, rel=0.05)
    assert expected > 2e-4
    (row,) = (row for row in report.modules if row.path == "gram")
    alone = abs(by_hand(True, False) - exact) / exact
    assert row.loss_alone == pytest.approx(alone, rel=0.05)
    assert "gram" in report.float32_paths
    cured = functools.partial(loss, gram=exactly(lambda f: f.T @ f))
    after = measure(cured, w, x, y, float32_matmuls="tf32", tolerance=1e-4)
    assert after.loss == pytest.approx(row.loss_without, rel=1e-2)


@pytest.mark.parametrize(
    "fun", rest_is_evidence(BODIES, "scan", "whiles", "rule", "shards")
)
def test_products_are_rounded_wherever_they_are(fun):
    args = [jnp.asarray(RANDOM.standard_normal((8, 8), np.float32)) for _ in range(2)]
    jaxpr = jax.make_jaxpr(fun)(*args)
    program = Program(jaxpr, Place(), args, float32_matmuls="bfloat16")
    assert "in" in program.parts
    assert min(program.flops.values()) > 0
    off = np.zeros(len(program.parts), bool)
    run = compiled(program.run, off, *args)
    exact = jax.tree.leaves(compiled(fun, *args)(*args))
    assert max(map(float, _errors(run(off, *args), exact))) < 1e-6
    assert max(map(float, _errors(run(~off, *args), exact))) > 3e-5
    # What names a precision is left alone.
    named = jax.make_jaxpr(exactly(fun))(*args)
    assert not Program(named, Place(), args, float32_matmuls="bfloat16").parts


@pytest.mark.parametrize("kind", FRACTIONS)
def test_complex_operands_are_rounded_as_pairs(kind):
    def loss(w, x):
        with jax.named_scope("waves"):
            waves = (x + 2j * x) @ (w - 1j)
        return jnp.sum(jnp.abs(waves) ** 2)

    w = W["phases"]
    lhs, rhs = rounded(X, kind) + 1j * rounded(2 * X, kind), rounded(w, kind) - 1j
    expected = np.sum(np.abs(lhs.astype(complex) @ rhs.astype(complex)) ** 2)
    exact = np.sum(np.abs((X + 2j * X).astype(complex) @ (w - 1j)) ** 2)
    report = measure(loss, w, X, float32_matmuls=kind, tolerance=1e-6)
    assert report.loss == pytest.approx(abs(expected - exact) / exact, rel=0.05)
    assert report.float32_paths == ("waves",)


def test_a_convolution_and_what_casts_by_itself_are_told():
    kernel = RANDOM.standard_normal((3, 3, 2, 4), np.float32)
    images = RANDOM.standard_normal((2, 8, 8, 2), np.float32)

    def loss(kernel, images):
        with jax.named_scope("net"), jax.named_scope("conv"):
            y = jax.lax.conv_general_dilated(
                images,
                kernel,
                (1, 1),
                "SAME",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
        return jnp.mean(y.astype(jnp.bfloat16).astype(jnp.float32) ** 2)

    report = measure(loss, kernel, images, float32_matmuls="bfloat16", tolerance=1e-5)
    (row,) = (row for row in report.modules if row.path == "net/conv")
    assert row.share == 1
    assert row.gradients_alone > 1e-3
    assert "casts to bfloat16 by itself" in " ".join(str(report).split())
    assert max(map(len, str(report).splitlines())) <= 80

    def half(w, x):
        half = x.astype(jnp.bfloat16) @ w["phases"].astype(jnp.bfloat16)
        return waves(w, half.astype(jnp.float32))

    report = measure(half, W, X, policy=None, float32_matmuls="tf32", tolerance=0.5)
    assert report.is_cast
    assert not report.in_float32
    if report.line and report.meets_tolerance:
        assert 'default_matmul_precision("highest")' in " ".join(str(report).split())


@pytest.mark.parametrize("products", [None, *FRACTIONS])
def test_a_region_with_all_digits_has_them_on_any_device(products):
    region = jaxmp.float32_region(jnp.matmul, precision="highest")
    kept = functools.partial(waves, phases=region)
    report = measure(kept, W, X, policy=None, float32_matmuls=products)
    (row,) = (row for row in report.modules if row.path == "head")
    assert (row.loss_alone, row.gradients_alone) == (report.loss, report.gradients)
    assert not report.line


def test_another_name_is_refused():
    with pytest.raises(ValueError, match="`float32_matmuls` must be None or one of"):
        measure(waves, W, X, float32_matmuls="TF32")
