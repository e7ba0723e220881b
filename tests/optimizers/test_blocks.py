"""Eight bits: the mean is right, no Inf is hidden, no second moment becomes zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp._optimizers import blocks as _blocks
from jaxmp._optimizers import rounding as _rounding

SEEDS = jax.jit(_rounding.noise_seeds)(0, np.uint32(0))
RNG = np.random.default_rng(0)
ANY = (RNG.normal(size=(64, 512)) * 2.0 ** RNG.uniform(-20, 0, (64, 512))).astype("f4")


@jax.jit
def at_random(x):
    units = _blocks.units_from(*_blocks.extents(jnp.asarray(x)))
    codes = _blocks.encode(
        jnp.asarray(x), units, _rounding.draws(x.shape, SEEDS, np.uint32(0))
    )
    return _blocks.Int8Blocks(codes, units)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_mean_of_many_draws_is_the_number(sign):
    # The largest, so that there is a unit, and beside it numbers of any size.
    low = np.array([0.9, 0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-5], np.float32)
    if sign > 0:  # no zero below the first code
        low = low[:-1]
    row = np.concatenate([low, [1], np.full(256 - len(low) - 1, 0.3, np.float32)])
    row[-1] *= sign  # a negative number, or none
    found = np.asarray(_blocks.decode(at_random(np.tile(row, (2**14, 1)))), float)
    row = row.astype(np.float32)
    error = found.std(0) / 2**7
    assert np.all(abs(found.mean(0) - row) <= 4.5 * error + 2e-6 * abs(row))


def test_what_a_code_stands_for_stays():
    codes = np.tile(np.arange(-128, 128, dtype=np.int8), (4, 1))
    units = np.array([[1], [-1], [2.0**-100], [-(2.0**-100)]], jnp.bfloat16)
    codes[units[:, 0] > 0, 0] = 0  # no code of those
    codes[units[:, 0] < 0, 1] = 0  # nor what is less than the least
    x = _blocks.decode(_blocks.Int8Blocks(jnp.asarray(codes), jnp.asarray(units)))
    found = _blocks.encode(
        x, jnp.asarray(units), _rounding.draws(x.shape, SEEDS, np.uint32(0))
    )
    np.testing.assert_array_equal(found, codes)


@pytest.mark.parametrize(
    "x", [ANY, abs(ANY), ANY**2], ids=["any", "positive", "squares"]
)
def test_every_number_becomes_one_of_its_neighbours(x):
    blocks = at_random(x)
    found = np.asarray(_blocks.decode(blocks))
    largest = abs(x).reshape(64, 2, 256).max(-1).repeat(256, -1)
    # Codes are one apart, and 0.8% is what the unit is rounded up by, twice.
    if (x < 0).any():
        step = 1.016 * (2 * np.sqrt(abs(x) / largest) / 127 + 1 / 127**2) * largest
        assert np.all(found * x >= 0)
    else:
        root = (x / largest) ** 0.25
        step = 1.016 * ((root + 1 / 255) ** 4 - np.maximum(root - 1 / 255, 0) ** 4)
        step = np.maximum(step, (2 / 255) ** 4 * 1.016) * largest
        assert np.all(found > 0)
    assert np.all(abs(found - x) <= step)
    nearest = np.asarray(_blocks.decode(_blocks.nearest(jnp.asarray(x))))
    assert np.all(abs(nearest - x) <= abs(found - x) * (1 + 1e-6) + 1e-6 * largest)


def test_half_way_between_two_codes_the_lower_one_is_nearest():
    x = jnp.array([[0.5, 2.5, 6.5, -0.5, -2.5, -6.5]])  # between 0, 1, 4 and 9 units
    codes = _blocks.encode(x, jnp.ones((1, 1), jnp.bfloat16), 0.5)
    assert codes.tolist() == [[0, 1, 2, 0, -1, -2]]


def test_zeros_stay_and_what_is_positive_stays_positive():
    x = np.zeros((2, 256), np.float32)
    np.testing.assert_array_equal(_blocks.decode(at_random(x)), 0)
    x[0, :3] = 1, 1e-30, 1e-10
    found = np.asarray(_blocks.decode(at_random(x)))
    assert np.all((found > 0) == (x > 0))
    # At the end of the range as well, where the unit cannot be small enough.
    assert np.all(_blocks.decode(at_random(np.full((1, 256), 1e-37, "f4"))) > 0)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, -np.nan])
def test_an_inf_or_nan_is_not_hidden_and_stays_in_its_block(bad):
    x = ANY.copy()
    x[3, 5] = bad
    found = np.asarray(_blocks.decode(at_random(x)))
    assert np.isnan(found[3, :256]).all()
    expected = np.asarray(_blocks.decode(at_random(ANY)))
    np.testing.assert_array_equal(found[3, 256:], expected[3, 256:])
    np.testing.assert_array_equal(np.delete(found, 3, 0), np.delete(expected, 3, 0))


@pytest.mark.parametrize("width", [1, 7, 255, 256, 257, 300, 1000])
def test_rows_of_any_width_have_blocks(width):
    x = RNG.normal(size=(3, 2, width)).astype(np.float32)
    blocks = _blocks.nearest(jnp.asarray(x))
    assert blocks.codes.shape == x.shape
    assert blocks.units.shape == (3, 2, -(-width // 256))
    np.testing.assert_allclose(_blocks.decode(blocks), x, atol=0.02 * abs(x).max())


def test_a_unit_is_made_of_the_largest_size_and_of_whether_there_is_a_negative():
    rows = np.zeros((6, 256), np.float32)
    rows[0, :3] = 3, -1e-30, 2
    rows[1, :2] = 3, 1e-30
    rows[2, 0] = -0.0
    rows[3, 5] = -7
    rows[4, 9] = -np.inf
    rows[5, 9] = np.nan
    units = np.asarray(
        _blocks.units_from(*_blocks.extents(jnp.asarray(rows))), np.float32
    )[:, 0]
    top, top_of_positive = 127**2, 255.0**4
    exact = np.array([3 / top, -3 / top_of_positive, 0, 7 / top])
    assert np.all(np.abs(units[:4]) >= np.abs(exact))
    np.testing.assert_allclose(units[:4], exact, rtol=2**-7)
    assert np.isnan(units[4:]).all()


def test_the_program_and_python_agree():
    codes = at_random(ANY)
    with jax.disable_jit():
        expected = at_random(ANY)
    np.testing.assert_array_equal(codes.units, expected.units)
    differ = np.asarray(codes.codes) != np.asarray(expected.codes)
    assert differ.mean() < 1e-3  # of other fusions
