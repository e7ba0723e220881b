"""Products that 16 bits make wrong, by what is made of them."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import ShapeDtypeStruct as Shape

import jaxmp
from benchmarks.networks.basic import TINY
from benchmarks.networks.families import SMALL
from conftest import crossed, rest_is_evidence
from jaxmp._diagnosis.audit.hazards import of_products
from jaxmp._diagnosis.sensitivity.switches import Program
from jaxmp._jaxprs.places import Place

X, Y = Shape((8, 8), jnp.float32), Shape((8, 8), jnp.float32)
REGION = 'with jax.named_scope("jaxmp.float32"):'
HIGHEST = 'with jax.default_matmul_precision("highest"):'


def fourier_features(x, y):
    return jnp.sin(2 * jnp.pi * x @ y.T)  # here


def of_two_terms(x, y):
    phases = 2 * jnp.pi * (x @ y.T)  # here
    return jnp.concatenate([jnp.cos(phases), jnp.sin(phases + 1)], axis=-1)


def distances(x, y):
    products = x @ y.T  # here
    squares = (x**2).sum(1)[:, None] + (y**2).sum(1)
    return jnp.sqrt(jnp.maximum(squares - 2 * products, 0))


def distances_by_einsum(x, y):
    def norms(x):
        return jnp.einsum("ij,ij->i", x, x)

    both = norms(x)[:, None] + norms(y)
    return both - jnp.einsum("id,jd->ij", 2 * x, y)  # here


def nearest_by_distance(x, y):
    products = 2 * x @ y.T  # here
    distances = (x * x).sum(1)[:, None] - products + (y * y).sum(1)
    return y[distances.argmin(-1)]


def turned(x, y):
    return jnp.exp(2j * jnp.pi * (x @ y.T)).real  # here


def within_a_period(x, y):
    return jnp.mod(x @ y.T, 1.0)  # here


def distances_from_norms(x, y):
    near = x @ y.T  # here
    norms = jnp.linalg.norm(x, axis=1, keepdims=True), jnp.linalg.norm(y, axis=1)
    return norms[0] ** 2 + norms[1] ** 2 - 2 * near


def covariance(x, y):
    means = jnp.outer(x.mean(0), y.mean(0))
    return x.T @ y / len(x) - means  # here


def covariance_from_sums(x, y):
    moments = len(x) * jnp.einsum("ni,nj->ij", x, y)  # here
    return moments - x.sum(0)[:, None] * y.sum(0)[None]


def curvature(x, y):
    kernel = jnp.array([1.0, -2.0, 1.0])
    return jnp.convolve(x[:, 0], kernel, mode="valid")  # here


def kernel_matrix(x, y):
    kernel = (x @ x.T + 1) ** 2  # here
    return jnp.linalg.cholesky(kernel + 0.1 * len(x) * jnp.eye(len(x)))


def in_a_scan(x, y):
    def step(carry, row):
        return carry, jnp.sin(x @ row)  # here

    return jax.lax.scan(step, 0, y)[1]


def solved(x, y):
    gram = x.T @ x  # here
    return jnp.linalg.solve(gram + 1e-3 * jnp.eye(8), y.T)


def factorised(x, y):
    return jnp.linalg.cholesky(x.T @ x + jnp.eye(8))  # here


WRONG = {
    "phase": (fourier_features, "phase"),
    "phases": (of_two_terms, "phase"),
    "turns": (turned, "phase"),
    "period": (within_a_period, "phase"),
    "distance": (distances, "distance"),
    "norms": (distances_from_norms, "distance"),
    "covariance": (covariance, "covariance"),
    "sums": (covariance_from_sums, "covariance"),
    "curvature": (curvature, "difference"),
    "kernel": (kernel_matrix, "inverse"),
    "einsum": (distances_by_einsum, "distance"),
    "nearest distance": (nearest_by_distance, "distance"),
    "scan": (in_a_scan, "phase"),
    "solve": (solved, "inverse"),
    "cholesky": (factorised, "inverse"),
}


# What to type where another formula has no hazard.
FORMULAS = {
    "distance": "jnp.sum((x[:, None] - y) ** 2, axis=-1)",
    "covariance": "(x - x.mean(0)).T @ (y - y.mean(0)) / len(x)",
    "difference": "slices, such as x[1:] - x[:-1]",
}


def hazards(fun, *args):
    jaxpr = jax.make_jaxpr(fun)(*args)
    return of_products(jaxpr, Place())[0]


@pytest.mark.parametrize(("fun", "kind"), WRONG.values(), ids=WRONG.keys())
def test_a_hazard_is_named_with_its_line_as_it_stands_and_under_autocast(fun, kind):
    lines, start = inspect.getsourcelines(fun)
    (line,) = [start + i for i, line in enumerate(lines) if "# here" in line]
    gradient = jax.value_and_grad(lambda x, y: fun(x, y).sum())
    for form in (fun, jaxmp.autocast(fun), jaxmp.autocast(gradient)):
        (found,) = hazards(form, X, Y)
        assert (found.kind, found.where) == (kind, f"{__file__}:{line}")
        assert found.at_default_precision == (form is fun)
        if kind in FORMULAS:
            assert found.cure == FORMULAS[kind]
        else:
            assert found.cure == (HIGHEST if form is fun else REGION)


def test_the_audit_prints_it_with_the_cure_and_the_cure_cures():
    def loss(x, y):
        with jax.named_scope("net"), jax.named_scope("features"):
            phases = x @ y.T
        return jnp.sin(phases).sum()

    report = jaxmp.audit(jaxmp.autocast(loss))(X, Y)
    (hazard,) = report.hazards
    assert hazard.cure == 'float32_paths=("net/features",)'
    text = str(report)
    assert "wrong in 16 bits" in text
    assert f"test_hazards.py:{hazard.where.rpartition(':')[2]} in net/features" in text
    assert max(map(len, text.splitlines())) <= 80
    assert report.as_dict()["hazards"][0]["kind"] == "phase"
    paths = ("net/features",)
    assert not jaxmp.audit(jaxmp.autocast(loss, float32_paths=paths))(X, Y).hazards


# Divides points by their lengths: their distances are no small differences.
NORMALISED = {
    "norm": lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
    "epsilon": lambda x: x / (jnp.linalg.norm(x, axis=-1)[:, None] + 1e-6),
    "where": lambda x: (
        lambda n: jnp.where(n > 0, x, 0) / jnp.where(n > 0, n, 1)
    )(jnp.sqrt(jnp.sum(x * x, -1, keepdims=True))),
    "maximum": lambda x: 4 * x / jnp.maximum(jnp.linalg.norm(x, axis=1), 1e-6)[:, None],
    "root": lambda x: x * jax.lax.rsqrt(jnp.einsum("ij,ij->i", x, x) + 1e-6)[:, None],
    "power": lambda x: x * jnp.sum(x**2, -1, keepdims=True) ** -0.5,
    "standardised": lambda x: jax.nn.standardize(x) * x[0] + x[1],
}  # fmt: skip


@pytest.mark.parametrize("unit", NORMALISED.values(), ids=NORMALISED)
@pytest.mark.parametrize("distances", [distances, distances_by_einsum])
def test_distances_may_lose_digits_but_not_those_of_normalised_points(distances, unit):
    def normalised(x, y):
        return distances(unit(x), unit(y))

    for form in (lambda f: f, jaxmp.autocast):
        text = " ".join(str(jaxmp.audit(form(distances))(X, Y)).split())
        assert "may lose digits in 16 bits" in text
        assert "measure with `sensitivity`" in text
        assert "wrong" not in text
        assert not jaxmp.audit(form(normalised))(X, Y).hazards
    # The error is one of rounding.
    x, y = jax.random.normal(jax.random.key(0), (2, 8, 8))
    exact, found = normalised(x, y), jaxmp.autocast(normalised)(x, y)
    assert jnp.linalg.norm(found - exact) < 2**-7 * jnp.linalg.norm(exact)


def units(out, back):
    def fun(x, y):
        kelvin = out(jnp.tanh(x @ y) @ y)  # here
        return back(kelvin) @ y

    return fun


# Units by numbers in the code, and differences of what they are added to.
UNITS = {
    "kelvin": (lambda t: t * 5 + 300, lambda t: (t - 298) / 5),
    "pascal": (lambda t: 1013.0 + t * 5, lambda t: (t + -1010.0) / 5),
    "tanh": (lambda t: 20 * jnp.tanh(t) - 273, lambda t: t + 270),
    "neighbours": (lambda t: t + 300, lambda t: t[1:] - t[:-1]),
    "mean": (lambda t: t + 300, lambda t: t - t.mean(0)),
    "roll": (lambda t: t + 300, lambda t: t - jnp.roll(t, 1, 0)),
    "pairs": (lambda t: t + 300, lambda t: t[jnp.arange(8)[::-1]] - t),
}


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize(("out", "back"), UNITS.values(), ids=UNITS)
def test_units_by_numbers_are_named_with_their_sum_and_its_cure_cures(
    out, back, policy
):
    def region(t):
        with jax.named_scope("jaxmp.float32"):
            return out(t)

    fun, cured = units(out, back), units(region, back)
    start = inspect.getsourcelines(out)[1]
    gradient = jax.value_and_grad(lambda x, y: fun(x, y).sum())
    for form in (fun, gradient):
        report = jaxmp.audit(jaxmp.autocast(form, policy))(X, Y)
        (found,) = report.hazards
        assert (found.kind, found.cure) == ("units", REGION)
        assert found.where == f"{__file__}:{start}"
        assert "the sum at test_hazards.py:" in str(report)
    assert not jaxmp.audit(fun)(X, Y).hazards
    assert not jaxmp.audit(jaxmp.autocast(cured, policy))(X, Y).hazards
    x, y = jax.random.normal(jax.random.key(0), (2, 8, 8)) / 2
    exact = fun(x, y)
    off, still = (
        jnp.linalg.norm(jaxmp.autocast(f, policy)(x, y) - exact) for f in (fun, cured)
    )
    assert still < off / 4


@pytest.mark.parametrize("sums", [jnp.sum, jnp.mean, lambda t: ((t - 0.3) ** 2).mean()])
@pytest.mark.parametrize(("number", "names"), [(300.0, ["units"]), (3.0, [])])
def test_what_is_summed_of_a_number_far_above_the_scale_is_named(sums, number, names):
    def fun(x, y):
        t = jnp.tanh(x @ y) @ y + number
        return sums(t), t @ y

    report = jaxmp.audit(jaxmp.autocast(fun))(X, Y)
    assert [x.kind for x in report.hazards] == names
    assert not jaxmp.audit(fun)(X, Y).hazards


# Differences of rows of a sum with an array, and what is none of these.
BETWEEN_ROWS = {
    "edges": (lambda t: t[FROM] - t[TO]),
    "neighbours": (lambda t: t[1:] - t[:-1]),
    "a diff": (lambda t: jnp.diff(t, axis=0)),
    "less the mean": (lambda t: t - t.mean(0)),
    "a roll": (lambda t: t - jnp.roll(t, 1, 0)),
    "in a jit": jax.jit(lambda t: t[1:] - t[:-1]),
    "scaled": (lambda t: (t[1:] - t[:-1]) * 0.5),
    "of a batch": (lambda t: (lambda s: (s[:, 1:] - s[:, :-1])[0])(t[None])),
}
WITHIN_ROWS = {
    "halves": (lambda t: (t[:, :4] - t[:, 4:]) @ jnp.ones((4, 8))),
    "less the mean": (lambda t: (t - t.mean(-1, keepdims=True)) / 8 + 0 * t),
}
FROM, TO = np.array([0, 1, 2, 5]), np.array([3, 7, 1, 6])


def of_rows(read, *, is_kept=False):
    def fun(x, y, b):
        with jax.named_scope("jaxmp.float32" if is_kept else "all"):
            rows = jnp.tanh(x @ y) @ y + b  # here
        return read(rows) @ y

    return fun


@pytest.mark.parametrize("policy", ["float16", "bfloat16"])
@pytest.mark.parametrize("read", BETWEEN_ROWS.values(), ids=BETWEEN_ROWS)
def test_differences_of_rows_of_a_sum_with_an_array_are_named(read, policy):
    x, y = jax.random.normal(jax.random.key(0), (2, 8, 8)) / 2
    b = 300 + jnp.arange(8.0)
    fun, cured = of_rows(read), of_rows(read, is_kept=True)
    report = jaxmp.audit(jaxmp.autocast(fun, policy))(x, y, b)
    (found,) = report.hazards
    line = inspect.getsourcelines(of_rows)[1] + 3
    assert (found.kind, found.cure) == ("difference", REGION)
    assert found.where == f"{__file__}:{line}"
    assert not jaxmp.audit(jaxmp.autocast(cured, policy))(x, y, b).hazards
    exact = fun(x, y, b)
    off, still = (
        jnp.linalg.norm(jaxmp.autocast(f, policy)(x, y, b) - exact)
        for f in (fun, cured)
    )
    assert still < off / 4


@pytest.mark.parametrize("read", WITHIN_ROWS.values(), ids=WITHIN_ROWS)
def test_differences_within_a_row_of_a_sum_with_a_bias_are_not(read):
    fun = of_rows(lambda t: read(t) + 0 * (t @ t.T @ t))
    b = Shape((8,), jnp.float32)
    assert not jaxmp.audit(jaxmp.autocast(fun))(X, Y, b).hazards


@pytest.mark.parametrize(
    "norm",
    [
        lambda t: (t - t.mean(0)) / t.std(0),
        lambda t: (t - t.mean(0)) * (jax.lax.rsqrt(t.var(0) + 1e-3) * jnp.arange(8.0)),
        lambda t: (
            (t - t.mean(0)) * jax.lax.rsqrt((t**2).mean(0) - t.mean(0) ** 2 + 1e-3)
        ),
    ],
)
def test_a_batch_norm_of_a_sum_with_a_bias_has_no_risk(norm):
    fun, b = of_rows(norm), Shape((8,), jnp.float32)
    assert not jaxmp.audit(jaxmp.autocast(fun))(X, Y, b).hazards


def moments(x, y):
    return (x @ (y * y)).mean() - (x @ y).mean() ** 2


def local_moments(x, y):
    return x @ y**2 - (x @ y) ** 2


@pytest.mark.parametrize("fun", [moments, local_moments])
def test_moments_of_an_input_are_named(fun):
    found = hazards(fun, X, Y)
    found += hazards(jaxmp.autocast(moments), X, Y)
    assert {x.kind for x in found} == {"covariance"}
    assert all("E[x²] - E[x]²" in x.why for x in found)


def test_what_was_cast_is_told_to_be_cast_back():
    half = Shape((8, 8), jnp.float16)
    (hazard,) = hazards(fourier_features, half, half)
    assert hazard.cure.startswith("x.astype(jnp.float32), for both operands")

    def cast_back(x, y):
        x, y = (z.astype(jnp.float32) for z in (x, y))
        return jnp.sin(jnp.matmul(x, y.T, precision="highest"))

    assert hazard.cure.endswith('precision="highest"')
    assert not hazards(cast_back, half, half)


def phase(x, y, product=jnp.matmul):
    with jax.named_scope("net"), jax.named_scope("phases"):
        phases = product(x, y.T)
    return jnp.sin(phases)


AT_DEFAULT = {
    "plain": phase,
    "float32 policy": jaxmp.autocast(phase, "float32"),
    "region": functools.partial(
        phase, product=jaxmp.float32_region(jnp.matmul, precision="default")
    ),
    "path": jaxmp.autocast(phase, float32_paths={"net/phases": "default"}),
}


@pytest.mark.parametrize("fun", AT_DEFAULT.values(), ids=AT_DEFAULT.keys())
def test_float32_at_default_precision_is_said_to_be_wrong_on_devices(fun):
    report = jaxmp.audit(fun)(X, Y)
    (hazard,) = report.hazards
    assert hazard.at_default_precision
    assert report.as_dict()["hazards"][0]["at_default_precision"]
    assert hazard.cure == HIGHEST
    text = " ".join(str(report).split())
    assert "float32 at default precision: TF32 on A100 and later" in text
    assert "bfloat16 on a TPU" in text
    assert max(map(len, str(report).splitlines())) <= 80


def test_a_region_has_all_digits_under_autocast_and_is_plain_float32_without():
    def in_a_region(x, y):
        with jax.named_scope("jaxmp.float32"):
            return jnp.sin(x @ y.T)

    gradient = jax.value_and_grad(lambda x, y: in_a_region(x, y).sum())
    for form in (in_a_region, gradient):
        assert not hazards(jaxmp.autocast(form), X, Y)
    (hazard,) = hazards(in_a_region, X, Y)
    assert hazard.at_default_precision


def test_float32_with_all_digits_is_wrong_in_16_bits_alone():
    paths = {"net/phases": "highest"}
    assert not hazards(jaxmp.autocast(phase, float32_paths=paths), X, Y)
    with jax.default_matmul_precision("highest"):
        (hazard,) = jaxmp.audit(phase)(X, Y).hazards
    assert not hazard.at_default_precision
    assert hazard.cure == 'float32_paths=("net/phases",)'


def cured(fun, kind):
    """Follows the advice."""
    if kind == "distance":
        # Of some functions the root, the negative or the nearest point is returned.
        return lambda x, y: jnp.sum((x[:, None] - y) ** 2, axis=-1)
    if kind == "covariance":
        return lambda x, y: (x - x.mean(0)).T @ (y - y.mean(0)) / len(x)
    if kind == "difference":
        return lambda x, y: x[2:, 0] - 2 * x[1:-1, 0] + x[:-2, 0]

    @functools.wraps(fun)
    def exact(x, y):
        with jax.default_matmul_precision("highest"):
            return fun(x, y)

    return exact


# The least relative error that a device makes, of values with an offset. Of choices
# between points of which each has one beside it, some of many fall the other way.
LEAST = {
    "phase": 0.05,
    "distance": 0.005,
    "covariance": 0.01,
    "difference": 1e-4,
    "inverse": 1e-4,
}


@pytest.mark.parametrize("device", ["tf32", "bfloat16"])
@pytest.mark.parametrize(
    ("fun", "kind"),
    rest_is_evidence(WRONG, "phase", "distance", "nearest distance", "solve"),
)
def test_the_advice_takes_the_error_of_a_device_away(fun, kind, device):
    mean, rows = (0, 4096) if fun is nearest_by_distance else (9, 8)
    random = np.random.default_rng(1)
    x = random.normal(mean, 1, (rows, 8)).astype(np.float32)
    y = np.repeat(random.normal(mean, 1, (4, 8)), 2, axis=0)
    y = (y + random.normal(0, 1e-4, (8, 8))).astype(np.float32)
    exact = cured(fun, kind)
    for form in (exact, jaxmp.autocast(exact)):
        assert not hazards(form, x, y)
    assert on_device(fun, device, x, y) > (
        0 if fun is nearest_by_distance else LEAST[kind]
    )
    # What has an offset no more is rounded as in any network.
    limit = 0.01 if kind == "covariance" else 0
    assert on_device(exact, device, x, y) <= limit


def on_device(fun, kind, *args):
    """Returns the relative error that a device makes of the products of ``fun``."""
    program = Program(jax.make_jaxpr(fun)(*args), Place(), args, float32_matmuls=kind)
    off = np.zeros(len(program.parts), bool)
    rounded, exact = (jax.jit(program.run)(x, *args)[0] for x in (~off, off))
    return jnp.linalg.norm(rounded - exact) / jnp.linalg.norm(exact)


def in_highest_precision(x, y):
    return jnp.sin(jnp.dot(x, y.T, precision="highest"))


def rotary(x, y):
    angles = jnp.einsum("i,j->ij", jnp.arange(8.0), 1e-4 ** (jnp.arange(8.0) / 8))
    return (x * jnp.sin(angles)) @ y.T


def normalised_before(x, y):
    h = x @ y.T
    h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True))
    return jnp.sin(h)


def with_regularizer(x, y):
    return 2 * (x @ y.T).mean() + 1e-3 * jnp.sum(y**2)


def activated(x, y):
    h = jax.nn.relu6(jax.nn.relu(x @ y.T))
    return jnp.where(h > 1, jnp.tanh(h), jax.nn.leaky_relu(h)).max(-1)


def from_zeros_and_of_ones(x, y):
    return jnp.zeros((8, 8)) @ y.T + jnp.ones((8, 8)) @ y.T  # a batch of ones


def decorrelated(x, y):  # whose gradient has twice a product beside its diagonal
    z = x @ y.T
    z = z - z.mean(0)
    cov = z.T @ z / 7
    apart = cov - jnp.diag(jnp.diag(cov))
    return jnp.sum(apart**2)


def moments_of_a_layer(x, y):
    h = x @ y.T
    mean = h.mean(0)
    return (h - mean) * jax.lax.rsqrt((h**2).mean(0) - mean * mean + 1e-3)


def attention_without_projections(x, y):
    return jax.nn.softmax(x @ x.T) @ x


def halves(x, y):
    left, right = jnp.split(x @ jnp.concatenate([y, x]).T, 2, axis=-1)
    scores = left @ right.T
    return jnp.diag(scores) - 2 * scores


def distances_from_a_diagonal(x, y):  # those of rounded points, and no worse
    gram = jnp.einsum("id,jd->ij", x, x)
    squares = jnp.diag(gram)
    return squares[:, None] + squares - 2 * gram


def turned_by_numbers(x, y):
    turns = jnp.exp(2j * jnp.pi * jnp.arange(8)) * jnp.full(8, 1 + 1j) * (2j + 1)
    return (turns.real * x) @ y.T


def style(x, y):
    return jnp.sum((x.T @ x - y.T @ y) ** 2)


def blurred(x, y):
    kernel = jnp.array([1.0, 2.0, 1.0]) / 4
    return jnp.convolve(jax.nn.relu(x @ y[0]), kernel)


def biased(x, y):  # and nothing is taken away but means, gates and exact GELUs
    h = jax.nn.gelu(x @ y.T + y[:, 0], approximate=False)
    h = h + jax.nn.gelu(h @ h + x[:, 0], approximate=False) @ h
    h = (x + h @ h - jnp.zeros(8)) @ h  # as Flax's RMS norm subtracts a mean of 0
    h = (h - h.mean(-1, keepdims=True)) * y[:, 1] + y[:, 2]
    gate = jax.nn.sigmoid(h @ h + y[:, 3])
    h = gate * h + (1 - gate) * jnp.tanh(h @ h + y[:, 0])
    wide = jnp.concatenate([h, x], -1)
    left, right = jnp.split(h @ wide + jnp.tile(y[:, 1], 2), 2, axis=-1)
    turned = left * x - right * y, right * x + left * y  # a rotation of both
    return jnp.concatenate(turned, -1) @ wide.T


PLAIN = jax.ShapeDtypeStruct((8, 10), jnp.float32)
LOSSES = {
    "cross entropy": lambda z, t: optax.softmax_cross_entropy(z, t).mean(),
    "labels": lambda z, t: optax.softmax_cross_entropy_with_integer_labels(
        z, t.argmax(-1)
    ).mean(),
    "squares": lambda z, t: jnp.mean((z - t) ** 2),
    "hinge": lambda z, t: jnp.maximum(0, 1 - z[:, :1] + z).mean(),
    "ranking": lambda z, t: jax.nn.softplus(z[:, None, 0] - z[None, :, 0]).mean(),
    "smoothness": lambda z, t: jnp.abs(jnp.diff(z, axis=0)).mean(),
}


@crossed("loss policy", LOSSES, ["mixed_float16", "mixed_bfloat16"])
def test_a_bias_is_no_hazard_in_a_loss_or_a_softmax(loss, policy):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            h = nn.Dense(8)(nn.relu(nn.Dense(8)(x)))
            return nn.Dense(10)(jax.nn.softmax(h) * (h - h.min(-1, keepdims=True)))

    apply, x = Net().apply, PLAIN
    params = jax.eval_shape(Net().init, jax.random.key(0), x)
    for form in (
        lambda params, x: loss(jaxmp.with_policy(apply, policy)(params, x), x),
        jaxmp.with_policy(lambda params, x: loss(apply(params, x), x), policy),
        jaxmp.autocast(lambda params, x: loss(apply(params, x), x), policy),
    ):
        for fun in (form, jax.value_and_grad(form)):
            assert not jaxmp.audit(fun)(params, x).hazards


def numbers_beside_what_they_scale(x, y):
    image = (127.5 * jnp.tanh(x @ y) + 127.5) / 127.5 - 1
    h = image @ y
    h = h * jnp.clip(h + 3, 0, 6) / 6
    h = 2 * jax.nn.sigmoid(h @ y) - 1
    scores = 30 * jnp.tanh((h @ y) / 30) - 1e9 * (x > 0)
    return jax.nn.softmax(scores) @ y


def interactions(x, y):  # of a factorisation machine, as large as its terms
    return (x @ y) ** 2 - x**2 @ y**2


RIGHT = [
    numbers_beside_what_they_scale,
    interactions,
    biased,
    decorrelated,
    moments_of_a_layer,
    attention_without_projections,
    halves,
    distances_from_a_diagonal,
    turned_by_numbers,
    style,
    blurred,
    in_highest_precision,
    rotary,
    normalised_before,
    with_regularizer,
    activated,
    from_zeros_and_of_ones,
]


@pytest.mark.parametrize("fun", RIGHT, ids=[fun.__name__ for fun in RIGHT])
def test_what_is_no_hazard_is_not_named(fun):
    gradient = jax.value_and_grad(lambda x, y: fun(x, y).astype("float32").sum())
    for form in (fun, jaxmp.autocast(gradient)):
        assert not hazards(form, X, Y)


NETWORKS = {f"tiny {name}": x for name, x in TINY.items()} | SMALL


@pytest.mark.parametrize("network", rest_is_evidence(NETWORKS, "tiny gpt", "lstm"))
def test_clean_networks_have_none(network):
    x, _ = network.shapes()
    variables = jax.eval_shape(network.model.init, jax.random.key(0), x)

    def loss(variables, x):
        out = network.model.apply(variables, x, mutable=["batch_stats"])[0]
        return jnp.mean(jax.nn.log_softmax(out.astype(jnp.float32)))

    for fun in (loss, jaxmp.autocast(jax.value_and_grad(loss))):
        assert not hazards(fun, variables, x)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_numbers_that_16_bits_lose_are_hazards():
    def model(x):
        scores = x / (jnp.abs(x).sum() + 1e-8)  # here
        return jax.nn.relu(scores) + jnp.zeros_like(x) - 1e9 * x

    half = jax.ShapeDtypeStruct((4,), jnp.float16)
    full = jax.ShapeDtypeStruct((4,), jnp.float32)
    epsilon, mask = jaxmp.audit(model)(half).hazards
    assert (epsilon.kind, epsilon.why) == ("number", "1e-08 is 0 in float16")
    assert (mask.kind, mask.why) == ("number", "1e+09 is Inf in float16")
    assert "a number at test_hazards.py:" in str(jaxmp.audit(model)(half))
    assert jaxmp.audit(model)(full).hazards == ()
    assert jaxmp.audit(model)(half.update(dtype=jnp.bfloat16)).hazards == ()
    cast = jaxmp.with_policy(model, "mixed_float16")
    assert jaxmp.audit(cast)(full).hazards[0].why == epsilon.why
    # What was written as 0 or Inf is none.
    written = lambda x: jnp.where(x > 0.0, x + 0.0, -jnp.inf)  # noqa: E731
    assert jaxmp.audit(written)(half).hazards == ()


SEEN = np.tri(4, dtype=bool)
BIAS = jnp.where(SEEN, 0.0, -1e9)
# Masks, and other numbers that a cast to 16 bits leaves nothing of.
MASKS = {
    "where": lambda x: jnp.where(SEEN, x, -1e9),
    "select": lambda x: jax.lax.select(jnp.asarray(SEEN), x, jnp.full_like(x, -1e9)),
    "bias": lambda x: x + jnp.where(SEEN, 0.0, -1e9),
    "numpy": lambda x: x + BIAS.astype(x.dtype),
    "jit": lambda x: jax.jit(lambda m, x: jnp.where(m, x, -1e9))(SEEN, x),
    "scan": lambda x: jax.lax.scan(
        lambda c, m: (c, jnp.where(m, c, -1e9)), x[0], jnp.asarray(SEEN)
    )[1],
    "cond": lambda x: jax.lax.cond(
        x[0, 0] > 0, lambda x: jnp.where(SEEN, x, -1e9), lambda x: x, x
    ),
}


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_1e9_is_a_hazard_however_it_is_written(name):
    def model(x):
        return jax.nn.softmax(MASKS[name](x).astype(x.dtype))

    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    cast = jaxmp.with_policy(model, "mixed_float16")
    (hazard,) = jaxmp.audit(cast)(x).hazards
    assert (hazard.kind, hazard.why) == ("number", "-1e+09 is Inf in float16")
    assert hazard.cure == "jnp.finfo(x.dtype).min"
    (hazard,) = jaxmp.audit(jax.grad(lambda x: cast(x).sum()))(x).hazards
    assert jaxmp.audit(model)(x).hazards == ()
    for policy in ("mixed_bfloat16", "mixed_float16"):
        assert jaxmp.audit(jaxmp.autocast(model, policy))(x).hazards == ()
    assert jaxmp.audit(jaxmp.with_policy(model, "mixed_bfloat16"))(x).hazards == ()


def test_numbers_that_are_chosen_and_have_a_place_in_16_bits_are_no_hazards():
    def model(x):
        y = jnp.where(SEEN, x, jnp.finfo(x.dtype).min)
        y = jnp.where(SEEN, y, -jnp.inf) + jnp.where(SEEN, 0.0, -1e4)
        y = jax.nn.relu(jnp.where(SEEN, y, 0)) + jnp.where(SEEN, y, 1e-4)
        return y * jnp.asarray(np.geomspace(1e-9, 1, 4), "float32").astype(x.dtype)

    x = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    assert jaxmp.audit(jaxmp.with_policy(model, "mixed_float16"))(x).hazards == ()


def test_a_guard_that_is_chosen_and_0_in_16_bits_is_a_hazard():
    def model(x):
        return 1 / jnp.where(x == 0, 1e-9, x)

    x = jax.ShapeDtypeStruct((4,), jnp.float32)
    (hazard,) = jaxmp.audit(jaxmp.with_policy(model, "mixed_float16"))(x).hazards
    assert hazard.why == "1e-09 is 0 in float16"
