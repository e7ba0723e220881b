"""NNX: modules, streams, optimizers and metrics that the function itself changes."""

import copy

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from laws import DTYPES, near, normal

import jaxmp
import jaxmp.nnx
from conftest import rest_is_evidence

POLICIES = ["float32", *DTYPES]
IMAGES, LABELS = normal(1, 8, 8, 8, 1), jnp.arange(8) % 5
cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class Digits(nnx.Module):
    """A convolutional net whose dropout draws from a stream that is passed in."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(0.25)
        self.head = nnx.Linear(4 * 4 * 8, 5, rngs=rngs)

    def __call__(self, x, rngs):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.head(self.drop(x.reshape(len(x), -1), rngs=rngs))


@pytest.fixture(scope="module")
def made():
    """What training needs: a model, its optimizer, a metric and a stream."""
    model = Digits(nnx.Rngs(0))
    return (
        model,
        nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param),
        nnx.metrics.Average("loss"),
        nnx.Rngs(dropout=1),
    )


@pytest.fixture(scope="module")
def usual(made):
    """What Flax's own step comes to."""
    return after(nnx.jit(step), made)


def loss_fn(model, rngs, images, labels):
    return cross_entropy(model(images, rngs), labels).mean()


def state_of(objects):
    """Returns the numbers in NNX objects, keys as numbers."""

    def numbers(x):
        key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if key else x

    return jax.tree.map(numbers, nnx.to_pure_dict(nnx.state(objects)))


def after(step, made, steps=3):
    """Returns the losses of some steps, and the state that they leave."""
    objects = copy.deepcopy(made)
    losses = jnp.stack([step(*objects, IMAGES, LABELS) for _ in range(steps)])
    return losses, state_of(objects)


def step(model, optimizer, metric, rngs, images, labels):
    """Takes a step as Flax's own examples do."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, rngs, images, labels)
    optimizer.update(model, grads)
    metric.update(loss=loss)
    return loss


def autocast_gradient(policy):
    """A step in which autocast is around the gradient."""

    def step(model, optimizer, metric, rngs, images, labels):
        grad_fn = jaxmp.nnx.autocast(nnx.value_and_grad(loss_fn), policy)
        loss, grads = grad_fn(model, rngs, images, labels)
        optimizer.update(model, grads)
        metric.update(loss=loss)
        return loss

    return step


def gradient_of_autocast(policy):
    """A step in which autocast is inside the gradient."""

    def step(model, optimizer, metric, rngs, images, labels):
        grad_fn = nnx.value_and_grad(jaxmp.nnx.autocast(loss_fn, policy))
        loss, grads = grad_fn(model, rngs, images, labels)
        optimizer.update(model, grads)
        metric.update(loss=loss)
        return loss

    return step


def autocast_step(policy):
    """Autocast around the whole step."""
    return jaxmp.nnx.autocast(step, policy)


in_each_policy = pytest.mark.parametrize(
    "policy", rest_is_evidence({name: name for name in POLICIES}, "mixed_float16")
)
STEPS = [autocast_gradient, gradient_of_autocast, autocast_step]


@pytest.mark.parametrize(
    ("cast", "policy"),
    rest_is_evidence(
        {f"{f.__name__}-{policy}": (f, policy) for f in STEPS for policy in POLICIES},
        "autocast_gradient-mixed_float16",
        "gradient_of_autocast-mixed_float16",
        "autocast_step-float32",
    ),
)
def test_a_step_with_a_stream_as_an_argument_is_what_it_was(made, usual, cast, policy):
    losses, expected = usual
    got_losses, got = after(nnx.jit(cast(policy)), made)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    if policy == "float32":
        np.testing.assert_array_equal(got_losses, losses)
        chex.assert_trees_all_equal(got, expected)
        return
    near([got_losses], [losses], DTYPES[policy], 8)

    def counts(tree):
        leaves = jax.tree.leaves(tree)
        return [x for x in leaves if not jnp.issubdtype(x.dtype, jnp.floating)]

    chex.assert_trees_all_equal(counts(got), counts(expected))


@in_each_policy
def test_the_gradient_of_jaxmp_takes_the_stream_along(made, usual, policy):
    def with_policy(model, optimizer, metric, rngs, images, labels):
        grad_fn = jaxmp.nnx.value_and_grad(loss_fn, loss_scale=1.0)
        loss, grads = grad_fn(model, rngs, images, labels)
        optimizer.update(model, grads)
        metric.update(loss=loss)
        return loss

    losses, expected = usual
    got_losses, got = after(nnx.jit(jaxmp.nnx.autocast(with_policy, policy)), made)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    tolerance = DTYPES.get(policy, jnp.float32)
    near([got_losses], [losses], tolerance, 8)
    counts = [tree[3]["dropout"]["count"] for tree in (got, expected)]
    assert counts[0] == counts[1] == 3


def test_the_second_of_two_networks_is_differentiated(made):
    """As in a game of two networks, and in distillation."""
    student = made[0]
    teacher = Digits(nnx.Rngs(7))

    def loss(teacher, student, rngs, images):
        aims = nnx.softmax(teacher(images, rngs))
        return optax.softmax_cross_entropy(student(images, rngs), aims).mean()

    def gradients(value_and_grad):
        networks = copy.deepcopy((teacher, student, made[3]))
        value, grads = nnx.jit(value_and_grad(loss, argnums=1))(*networks, IMAGES)
        return value, nnx.to_pure_dict(grads), state_of(networks)

    expected = gradients(nnx.value_and_grad)
    chex.assert_trees_all_equal(gradients(jaxmp.nnx.value_and_grad), expected)


@in_each_policy
def test_a_game_of_two_networks_keeps_both_states(policy):
    generator = nnx.Sequential(
        nnx.Linear(4, 16, rngs=nnx.Rngs(0)),
        nnx.BatchNorm(16, rngs=nnx.Rngs(0)),
        nnx.relu,
        nnx.Linear(16, 6, rngs=nnx.Rngs(1)),
    )
    judge = nnx.Sequential(
        nnx.Linear(6, 16, rngs=nnx.Rngs(2)),
        nnx.BatchNorm(16, rngs=nnx.Rngs(0)),
        nnx.relu,
        nnx.Linear(16, 1, rngs=nnx.Rngs(3)),
    )
    z, real = normal(1, 8, 4), normal(2, 8, 6)

    def judged(judge, generator, z, real):
        logits = judge(jnp.concatenate([generator(z), real]))[:, 0]
        labels = jnp.concatenate([jnp.zeros(8), jnp.ones(8)])
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

    def played(grad_fn):
        networks = copy.deepcopy((judge, generator))
        loss, grads = nnx.jit(grad_fn)(*networks, z, real)
        return loss, nnx.to_pure_dict(grads), state_of(networks)

    expected = played(nnx.value_and_grad(judged))
    got = played(jaxmp.nnx.autocast(nnx.value_and_grad(judged), policy))
    if policy == "float32":
        chex.assert_trees_all_equal(got, expected)
    else:
        near(got, expected, DTYPES[policy], 8)
