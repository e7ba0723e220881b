"""Each advice of `find_overflow`, followed: the program is then finite and right."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from conftest import rest_is_evidence

HALF = jnp.float16
POLICY = "mixed_float16"

X = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)
PADDED = X.at[0].set(0.0)


class Advised(NamedTuple):
    """A program with a fault, its advice, and the program that follows it."""

    faulty: Any
    words: str  # of the advice
    cured: Any
    exact: Any  # the same in float32
    args: tuple[Any, ...]


def policy(fun):
    return jaxmp.with_policy(fun, POLICY)


def autocast(fun, **options):
    return jaxmp.autocast(fun, HALF, **options)


# Overflow


def large(x):
    return jnp.sum((300 * x) ** 2)


def large_in_float32(x):
    return jnp.sum((300 * x.astype(jnp.float32)) ** 2)


OVERFLOW = Advised(
    policy(large), "`x.astype(jnp.float32)`", policy(large_in_float32), large, (X,)
)


def scores(x, around=lambda f: f):
    products = around(lambda x: (1e5 * x) @ x.T)
    return jnp.sum(products(x))


REGION = Advised(
    autocast(scores),
    "`jaxmp.float32_region` around",
    autocast(lambda x: scores(x, jaxmp.float32_region)),
    scores,
    (X,),
)


class Net(nn.Module):
    dtype: Any = None  # of the head
    size: float = 3e4

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.constant(self.size)
        x = jnp.abs(nn.Dense(8, name="body")(x))
        return nn.Dense(2, kernel_init=init, name="head", dtype=self.dtype)(x)


NET = Net()
PARAMS = NET.init(jax.random.key(0), X)
BEYOND = Net(size=1e5).init(jax.random.key(0), X)  # a kernel that float16 has not
PATHS = Advised(
    autocast(NET.apply),
    '`float32_paths=("Net/head",)`',
    autocast(NET.apply, float32_paths=("Net/head",)),
    NET.apply,
    (BEYOND, X),
)
PARAMETER = Advised(
    policy(NET.apply),
    '`policy.with_overrides(("head/kernel", "float32"))`',
    jaxmp.with_policy(
        NET.apply, jaxmp.get_policy(POLICY).with_overrides(("head/kernel", "float32"))
    ),
    NET.apply,
    (BEYOND, X),
)
KEPT = jaxmp.get_policy(POLICY).with_overrides(("head/", "float32"))
OVERRIDES = Advised(
    policy(NET.apply),
    '`policy.with_overrides(("head/", "float32"))`',
    jaxmp.with_policy(NET.apply, KEPT),
    NET.apply,
    (PARAMS, X),
)
DTYPE = Advised(
    Net(HALF).apply,
    "Give the module `Net/head` `dtype=jnp.float32`",
    Net(jnp.float32).apply,
    NET.apply,
    (PARAMS, X),
)


def far(x, target):
    return jnp.mean((x.sum(-1) - target) ** 2)


TARGETS = Advised(
    policy(far),
    "Put `with_policy` around the model alone",
    lambda x, target: jnp.mean((policy(lambda x: x.sum(-1))(x) - target) ** 2),
    far,
    (X, jnp.full(4, 1e5)),
)


def clipped(grads):
    return optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]


HIDDEN = Advised(
    clipped,
    "the results may be wrong",
    lambda x: clipped(x.astype(jnp.float32)),
    lambda x: clipped(x.astype(jnp.float32)),
    (jnp.full(8, 200.0, HALF),),
)


# Numbers in the code


def masked(x, low=-1e9):
    seen = jnp.tril(jnp.ones((4, 4), bool), -1)  # row 0 sees nothing
    scores = x @ x.T
    low = jnp.finfo(scores.dtype).min if low is None else low
    return jax.nn.softmax(jnp.where(seen, scores, low))


MASK = Advised(
    policy(masked),
    "`jnp.finfo(x.dtype).min`",
    policy(lambda x: masked(x, None)),
    masked,
    (X,),
)


def unit(x):
    return x / (jnp.abs(x).sum(-1, keepdims=True) + 1e-8)


EPSILON = Advised(
    policy(unit),
    "The number 1e-08 in the code",
    policy(lambda x: unit(x.astype(jnp.float32))),
    unit,
    (PADDED,),
)
OWN_EPSILON = Advised(
    lambda x: unit(x.astype(HALF)),
    "one such as 1e-8, its underflow is the cause",
    lambda x: unit(x.astype(HALF).astype(jnp.float32)),
    unit,
    (PADDED,),
)
FACTOR = Advised(
    policy(lambda x: jnp.tanh(x * 1e6) / 1e6),
    "the number 1e+06 in the code",
    policy(lambda x: jnp.tanh(x.astype(jnp.float32) * 1e6) / 1e6),
    lambda x: jnp.tanh(x * 1e6) / 1e6,
    (X,),
)

MASTERS = "The optimizer, or something else after the backward pass, computes in 16"
ADAM = optax.adam(1e-3)


def adam_step(params, grads):
    updates, state = ADAM.update(grads, ADAM.init(params))
    return optax.apply_updates(params, updates), state


def adam_step_in_float32(params, grads):
    return adam_step(*jaxmp.cast_tree((params, grads), "float32"))


OPTIMIZER = Advised(
    adam_step,
    '`jaxmp.cast_tree((params, grads), "float32")`',
    adam_step_in_float32,
    adam_step_in_float32,
    (jnp.ones(4, HALF), jnp.zeros(4, HALF)),
)

# Their squares are beyond float16.
SQUARES = OPTIMIZER._replace(
    words=f"It happens only in float16. {MASTERS}",
    args=(jnp.ones(4, HALF), jnp.full(4, 1e4, HALF)),
)
LOST_SQUARES = OPTIMIZER._replace(
    words=MASTERS, args=(jnp.ones(4, HALF), jnp.full(4, 1e-4, HALF))
)


# Zeros


def forward_algorithm(x, around=lambda f: f):
    moves = jnp.full((8, 8), 0.125)
    step = around(lambda alpha, p: (alpha @ moves) * p)
    alpha = jax.lax.scan(lambda a, p: (step(a, p), None), jnp.full(8, 0.125), x)[0]
    return -jnp.log(alpha.sum())


CARRY = Advised(
    autocast(forward_algorithm),
    "`jaxmp.float32_region` around",
    autocast(lambda x: forward_algorithm(x, jaxmp.float32_region)),
    forward_algorithm,
    (jnp.full((8, 8), 0.01),),
)


def nll(x):
    return -jnp.log(jax.nn.softmax(100 * x)).mean()


SOFTMAX = Advised(
    policy(nll),
    "are zero or subnormal in float16",
    policy(lambda x: nll(x.astype(jnp.float32))),
    nll,
    (X,),
)


def metres(x):
    return jnp.mean(jnp.abs(x * 3e4))


UNITS = Advised(
    policy(metres),
    "in units in which it is near 1",
    lambda x: policy(lambda x: jnp.mean(jnp.abs(x * 3e-4)))(x * 1e8),
    metres,
    (X * 1e-8,),
)
UNITS_OF_PRODUCT = Advised(
    autocast(lambda x: jnp.tanh((x @ x[0]) * 1e16)),
    "of the values of `x`, which ",
    autocast(lambda x: jnp.tanh(jaxmp.float32_region(jnp.matmul)(x, x[0]) * 1e16)),
    lambda x: jnp.tanh((x @ x[0]) * 1e16),
    (X * 1e-8,),
)


def tiny_loss(w, x):
    return jnp.mean(policy(lambda w, x: x @ w)(w, x)) / 2**26


def tiny_in_float32(w, x):
    return jnp.mean(x @ w) / 2**26


SCALE = Advised(
    jax.value_and_grad(tiny_loss),
    "the loss scale is too small",
    lambda w, x: jaxmp.value_and_grad(tiny_loss, loss_scale=2.0**20)(w, x),
    jax.value_and_grad(tiny_in_float32),
    (jnp.ones((8, 2)), X + 2),
)


ALL = {name: x for name, x in globals().items() if isinstance(x, Advised)}
SOME = {"OVERFLOW", "REGION", "MASK", "EPSILON", "OPTIMIZER", "SOFTMAX", "UNITS"}


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("case", rest_is_evidence(ALL, *SOME))
def test_an_advice_that_is_followed_cures(case):
    report = jaxmp.find_overflow(case.faulty)(*case.args)
    assert case.words in report.advice
    assert "not the precision" not in report.advice
    assert (report.first is not None) or "may be wrong" in report.advice
    cured = jax.tree.leaves(case.cured(*case.args))
    exact = jax.tree.leaves(case.exact(*case.args))
    for x, y in zip(cured, exact, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.isfinite(x).all()
        np.testing.assert_allclose(x, y, rtol=0.01, atol=0.01 * np.abs(y).max())
    again = jaxmp.find_overflow(case.cured)(*case.args)
    assert again.first is None, again.advice
    assert "may be wrong" not in again.advice
