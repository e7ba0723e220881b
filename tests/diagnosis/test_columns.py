"""Naming the columns of the data that 16 bits round away."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp

RANDOM = np.random.default_rng(0)
ROWS = 64
YEARS = 2010 + np.arange(ROWS, dtype=np.float32) % 14
PLACES = 48.85 + 0.05 * RANDOM.standard_normal(ROWS, np.float32)
PLAIN = RANDOM.standard_normal(ROWS, np.float32)
X = np.stack([YEARS, PLAIN, PLACES], 1)
Y = (YEARS - 2016) / 4 + 10 * (PLACES - 48.85)
# Of a model that takes raw columns: a norm behind the first layer sets them right.
W = {"in": RANDOM.standard_normal((3, 16), np.float32), "out": np.ones((16, 1)) / 16}
EXPECTED = {"bfloat16": [0, 2], "float16": [2]}  # float16 holds each year to 2048


def net(w, x):
    h = x @ w["in"]
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
    return (jax.nn.relu(h) @ w["out"])[:, 0]


def loss(w, x, y):
    return jnp.mean((net(w, x) - y) ** 2)


def columns(fun, *args, policy="bfloat16"):
    report = jaxmp.sensitivity(fun, policy, progress=False)(*args)
    return [(x.argument, x.column) for x in report.columns]


def by_steps(w, x, y):
    def step(total, batch):
        return total + loss(w, *batch), None

    batches = jax.tree.map(lambda x: x.reshape(2, ROWS // 2, *x.shape[1:]), (x, y))
    return jax.lax.scan(step, 0.0, batches)[0]


PROGRAMS = {
    "a loss": loss,
    "its gradient": jax.value_and_grad(loss),
    "jit": jax.jit(loss),
    "checkpoint": jax.checkpoint(loss),
    "scan": by_steps,
    "transposed": lambda w, x, y: loss(w, x.T.T, y),
}


@pytest.mark.parametrize("fun", PROGRAMS.values(), ids=PROGRAMS)
def test_columns_behind_an_offset_are_named_and_no_other(fun):
    expected = [("x", i) for i in EXPECTED["bfloat16"]]
    assert columns(fun, W, X, Y) == expected


@pytest.mark.parametrize("dtype", EXPECTED)
def test_a_model_that_casts_by_itself_is_told_the_same(dtype):
    policy = jaxmp.get_policy(f"mixed_{dtype}")

    def cast(w, x, y):
        return jnp.mean((jaxmp.with_policy(net, policy)(w, x) - y) ** 2)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1, dtype=jnp.dtype(dtype))(x)[:, 0]

    def linen(w, x, y):
        return jnp.mean((Model().apply(w, x) - y) ** 2)

    expected = [("x", i) for i in EXPECTED[dtype]]
    assert columns(cast, W, X, Y) == expected
    assert columns(linen, Model().init(jax.random.key(0), X), X, Y) == expected


def test_arguments_that_are_put_together_are_named_each():
    def stacked(w, data):
        x = jnp.stack([data["year"], data["plain"], data["lat"]], 1)
        return jnp.mean(net(w, x))

    data = {"year": YEARS.astype(np.int32), "plain": PLAIN, "lat": PLACES}
    assert columns(stacked, W, data) == [("lat", None), ("year", None)]


def test_what_is_told_of_a_column_is_what_numpy_finds():
    report = jaxmp.sensitivity(loss, "bfloat16", progress=False)(W, X, Y)
    for found in report.columns:
        x = X[:, found.column].astype(np.float64)
        left = np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)
        assert found.values == len(np.unique(x))
        assert found.values_left == len(np.unique(left))
        assert found.error == pytest.approx(np.std(left - x) / np.std(x), rel=1e-3)
    assert "x[..., 0]: 14 values are 3 in bfloat16" in str(report)
    told = json.loads(json.dumps(report.as_dict()))["columns"]
    assert [x["values_left"] for x in told] == [x.values_left for x in report.columns]


@pytest.mark.parametrize("dtype", EXPECTED)
def test_what_is_advised_cures(dtype):
    def measured(x):
        return jaxmp.sensitivity(loss, dtype, progress=False)(W, x, Y)

    raw = measured(X)
    centred, standardised = (
        measured(X - X.mean(0)),
        measured((X - X.mean(0)) / X.std(0)),
    )
    assert "Subtract the mean from these inputs" in str(raw)
    for cured in (centred, standardised):
        assert cured.columns == ()
        assert "Subtract the mean" not in str(cured)
        assert cured.gradients < raw.gradients / 4


def test_sound_data_is_not_named():
    def one_hot(n):
        return np.eye(n, dtype=np.float32)[RANDOM.integers(n, size=ROWS)]

    heavy = np.exp(2 * RANDOM.standard_normal((ROWS, 4))).astype(np.float32)
    data = {
        "standardised": RANDOM.standard_normal((4096, 8), np.float32),
        "few rows": RANDOM.standard_normal((8, 4096), np.float32),
        "three rows": RANDOM.standard_normal((3, 4096), np.float32),
        "image": RANDOM.random((2, 8, 8, 3), np.float32),
        "bytes": RANDOM.integers(256, size=(2, 8, 8, 3)).astype(np.float32),
        "one-hot": one_hot(10),
        "rare": np.eye(ROWS, 4, dtype=np.float32),
        "embedded": RANDOM.standard_normal((2, ROWS, 16), np.float32) / 4,
        "constant": np.full((ROWS, 2), 2016.1, np.float32),
        "noise of float32": np.float32(0.1) + 1e-8 * np.arange(ROWS)[:, None],
        "positions": np.arange(1024.0)[:, None],
        "steps": np.linspace(0, 1, ROWS)[:, None],
        "prices": heavy,
        "masked": np.where(RANDOM.random((ROWS, 4)) < 0.5, 0, heavy),
        "empty": np.zeros((0, 3), np.float32),
    }
    data = {name: np.asarray(x, np.float32) for name, x in data.items()}

    def fun(w, data):
        means = [jnp.mean(jnp.tanh(x @ w[name])) for name, x in data.items() if x.size]
        return sum(means)

    w = {name: np.ones((x.shape[-1], 2), np.float32) for name, x in data.items()}
    for dtype in EXPECTED:
        assert columns(fun, w, data, policy=dtype) == [], dtype


def test_what_keeps_float32_is_not_named():
    # Targets, and what is centred in the program, and a region of float32.
    targets = np.stack([1e5 + PLAIN, YEARS], 1)

    def fun(w, x, y):
        with jax.named_scope("jaxmp.float32"):
            kept = x @ w["in"]
        h = (x - x.mean(0)) @ w["in"] + kept
        return jnp.mean((h @ w["out"] - y) ** 2)

    assert columns(fun, W, X, targets) == []


def test_parameters_are_not_named():
    w = {"in": 50 + W["in"], "out": 1 + 1e-3 * W["in"][0][:, None]}
    assert columns(loss, w, (X - X.mean(0)) / X.std(0), Y) == []
