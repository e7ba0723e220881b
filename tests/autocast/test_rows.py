"""Lookups and their gradients.

The gradient of one number in each row is a choice, and the same number. As a scatter it
would be written in float32 before products take it in 16 bits. That of a row of a table
adds up in float32 what products send back.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmp
from benchmarks.counting.measure import relative_error, traced
from conftest import assert_gradients_near, crossed, normal, usually_bfloat16

# Both are exact in float16, and so is their product.
X = jnp.asarray(np.float16(normal(0, 3, 5, 8)), jnp.float32)
EYE = jnp.asarray(np.eye(8, dtype=np.float32))
LABELS = jnp.array([[0, 6, 3, -1, -7], [1, 2, 2, 7, -8], [9, 0, 5, 6, 4]])
SCALE = jnp.asarray(np.linspace(0.5, 2, 15, dtype=np.float32).reshape(3, 5))


def cross_entropy(x):
    losses = optax.softmax_cross_entropy_with_integer_labels(x, LABELS % 7)
    return (losses * SCALE).sum()


def along(axis, labels, **options):
    def fun(x):
        rows = jnp.expand_dims(labels, axis)
        found = jnp.take_along_axis(x, rows, axis, **options)
        weights = jnp.arange(1.0, found.size + 1).reshape(found.shape)
        return jnp.where(jnp.isnan(found), 0, found * weights).sum()

    return fun


def of_columns(x):
    """Looks up with the labels of each column together."""
    numbers = lax.GatherDimensionNumbers(
        (), (2,), (2,), operand_batching_dims=(0, 1), start_indices_batching_dims=(1, 0)
    )
    found = lax.gather(x, (LABELS.T % 7)[..., None], numbers, (1, 1, 1))
    return (found * SCALE.T).sum()


def scattered(fun, *args):
    """Returns the shapes of the scatters in a function."""
    eqns = [e for e in traced(fun, *args) if e.primitive.name == "scatter-add"]
    return {eqn.outvars[0].aval.shape for eqn in eqns}


# Whether it becomes a choice, and a function of X.
LOOKUPS = {
    "cross entropy": (True, cross_entropy),
    # Places out of bounds are dropped, negative ones count from the end.
    "of each row": (True, along(2, LABELS)),
    "of each column": (True, along(1, jnp.array([[0, 4, 2, 5, -6, 1, -1, 3]] * 3))),
    "under vmap": (
        True,
        lambda x: jax.vmap(jax.vmap(lambda row, i: row[i]))(x, LABELS % 7).sum(),
    ),
    "clipped": (True, along(2, LABELS, mode="clip")),
    "of rows, column by column": (False, of_columns),
    "twice in a row": (
        False,
        lambda x: jnp.take_along_axis(x, jnp.array([[[2, 2]]]), 2).sum(),
    ),
}


@pytest.mark.needs_no_scale
@pytest.mark.parametrize("name", LOOKUPS)
def test_the_gradient_of_a_lookup_is_a_choice_and_the_same_number(name):
    chosen, lookup = LOOKUPS[name]

    def fun(x):
        return lookup(x @ EYE)

    cast = jaxmp.autocast(jax.value_and_grad(fun), "float16")
    assert (X.shape in scattered(cast, X)) == (not chosen)
    loss, grad = jax.jit(cast)(X)
    expected_loss, expected = jax.jit(jax.value_and_grad(lookup))(X)
    assert loss == expected_loss
    np.testing.assert_array_equal(grad, expected.astype(jnp.float16))


def test_bytes_that_are_places_do_not_wrap_around():
    x = jax.random.normal(jax.random.key(0), (2, 300))
    labels = np.array([[3], [200]], np.uint8)
    mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS

    def fun(x):
        numbers = lax.GatherDimensionNumbers((), (1,), (1,), (0,), (0,))
        x = x @ jnp.eye(300)
        found = lax.gather(x, labels[:, :, None], numbers, (1, 1), mode=mode)
        return found.sum()

    grad = jax.jit(jaxmp.autocast(jax.grad(fun)))(x)
    assert np.argwhere(grad).tolist() == [[0, 3], [1, 200]]


def test_a_number_may_be_what_is_added():
    numbers = lax.ScatterDimensionNumbers((), (0,), (0,))

    def fun(i, x):
        return lax.scatter_add(jnp.zeros(8), i, 2.0, numbers) @ EYE + x

    found = jaxmp.autocast(fun)(jnp.array([3]), jnp.zeros(8))
    assert found.dtype == jnp.float32
    assert found.tolist() == [0, 0, 0, 2, 0, 0, 0, 0]


@pytest.mark.keeps_float32
def test_what_float32_takes_is_no_choice():
    assert X.shape in scattered(jaxmp.autocast(jax.grad(cross_entropy)), X)


def test_what_is_added_to_is_no_choice():
    def fun(x):
        x = x @ EYE
        rows = jnp.arange(3)[:, None], jnp.arange(5)
        return jax.vmap(jax.vmap(lambda row, i: row.at[i].add(1)))(x, LABELS % 7)[rows]

    assert X.shape in scattered(jaxmp.autocast(fun), X)


@pytest.mark.needs_no_scale
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_the_gradient_of_logits_is_stored_as_the_products_take_it(dtype):
    """No float32 array of that size but the logits themselves leaves a fusion."""
    w = jax.random.normal(jax.random.key(1), (8, 8)) / 3

    def loss(w, x):
        return cross_entropy(x @ w)

    x = jax.random.normal(jax.random.key(2), (3, 5, 8))
    grad = jaxmp.autocast(jax.grad(loss, (0, 1)), dtype)
    eqns = list(traced(grad, w, x))
    assert X.shape not in scattered(grad, w, x)
    sums = [eqn.outvars[0] for eqn in eqns if eqn.primitive.name == "add_any"]
    (total,) = (var for var in sums if var.aval.shape == X.shape)
    consumers = [eqn for eqn in eqns if total in eqn.invars]
    assert [eqn.primitive.name for eqn in consumers] == ["convert_element_type"]


TABLE, W = normal(4, 6, 8), normal(5, 8, 8, scale=1 / 3)
ROWS = jnp.array([0, 3, 3, -1, 2, 3])


def looked_up(table, w):
    return jnp.tanh(table[ROWS] @ w)


def both_ends(table, w):
    """What the edges of a graph see of its nodes."""
    ends = [table[ROWS], table[ROWS[::-1]]]
    return jax.nn.gelu(jnp.concatenate(ends, axis=-1) @ jnp.concatenate([w, w.T]))


TABLES = {"a layer": looked_up, "a graph": both_ends}


@pytest.mark.needs_no_scale
@crossed("lookup dtype", TABLES, ["float16", "bfloat16"])
def test_the_gradient_of_a_table_is_off_by_a_few_last_digits(lookup, dtype):
    def loss(table, w):
        return (lookup(table, w) ** 2).sum()

    assert_gradients_near(loss, dtype, 4, TABLE, W, argnums=(0, 1))


def test_what_a_product_returned_keeps_its_digits_where_it_is_looked_up():
    """Its gradient, a lookup's, is made of these digits and not sent by a product."""

    def loss(table, w):
        rows = 100 + jnp.tanh(table @ w) @ w
        return ((rows[ROWS] - rows[ROWS[::-1]]) ** 2).mean()

    grad = jax.value_and_grad(loss, (0, 1))
    found = jax.jit(jaxmp.autocast(grad, "bfloat16"))(TABLE, W)
    expected = jax.jit(grad)(TABLE, W)
    assert relative_error(found[0], expected[0]) < 0.01
    assert relative_error(found[1], expected[1]) < 0.01


def test_forces_of_pairs_cancel():
    """Each pair sends back the same to both of its ends."""
    first, second = jnp.nonzero(~jnp.eye(6, dtype=bool))

    def energy(places, w):
        return jax.nn.silu((places[first] - places[second]) @ w).sum()

    forces = jax.jit(jaxmp.autocast(jax.grad(energy), "bfloat16"))(TABLE, W)
    assert jnp.abs(forces.sum(0)).max() < 1e-5 * jnp.abs(forces).max()


# Of six nodes, the ends of 24 edges.
SENDERS, RECEIVERS = jnp.arange(24) * 5 % 7 % 6, jnp.repeat(jnp.arange(6), 4)


def normed(x):
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def both(x):
    return jnp.concatenate([x[SENDERS], x[RECEIVERS]])


def shared(x, w, look_up):
    x = normed(x @ w)
    return look_up(x) @ w + jnp.exp(x).mean()


# Who looks up rows.
ROWS_OF = {
    "of an activation": lambda x, w: jax.nn.gelu(x @ w)[SENDERS] @ w,
    "of a norm": lambda x, w: shared(x, w, both),
    "few of it": lambda x, w: shared(x, w, lambda x: x[SENDERS[:4]]),
    "sums of norms": (
        lambda x, w: (normed(x @ w)[SENDERS] + (-normed(x @ w))[RECEIVERS]) @ w
    ),
}


@usually_bfloat16
@pytest.mark.parametrize("fun", ROWS_OF.values(), ids=ROWS_OF)
def test_gradients_of_rows_are_off_by_a_few_last_digits(fun, dtype):
    def loss(x, w):
        return (fun(x, w) ** 2).mean()

    assert_gradients_near(loss, dtype, 4, TABLE, W, argnums=(0, 1))


@pytest.mark.parametrize("rows", [lambda x, w: x, jnp.matmul], ids=["", "16 bits"])
def test_what_is_sent_back_to_a_lookup_adds_up_in_float32(rows):
    """In bfloat16 a sum of 4096 ones ends at 256."""
    zeros = jnp.zeros(4096, int)

    def loss(x, w):
        return (rows(x, w)[zeros] @ w).mean()

    assert_gradients_near(loss, "bfloat16", 2, TABLE, W)


LINEAR = jax.jvp, lambda f, x, t: jax.linearize(f, *x)


@crossed("derivative fill", LINEAR, [None, 1.0])
def test_a_row_out_of_bounds_has_no_tangent(derivative, fill):
    places = jnp.array([0, 7])

    def fun(x):
        rows = jnp.take(x @ W, places, 0, mode="fill", fill_value=fill)
        return jnp.tanh(rows @ W)

    cast = jaxmp.autocast(fun, "bfloat16")
    found = derivative(cast, (TABLE,), (jnp.zeros_like(TABLE),))[1]
    if callable(found):
        found = found(jnp.zeros_like(TABLE))
    expected = jax.jvp(fun, (TABLE,), (jnp.zeros_like(TABLE),))[1]
    np.testing.assert_array_equal(found, expected)
