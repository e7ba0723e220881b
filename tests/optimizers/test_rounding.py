"""Sixteen bits: rounding at random has the right mean, and what it takes is kept."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmp._optimizers import rounding as _rounding

BFLOAT16 = ml_dtypes.finfo(ml_dtypes.bfloat16)
LARGEST, TINY = float(BFLOAT16.max), float(BFLOAT16.smallest_subnormal)
SEEDS = jax.jit(_rounding.noise_seeds)(0, np.uint32(0))


def round_at_random(x):
    return _rounding.round_stochastically(x, SEEDS, np.uint32(0))


def from_bits(bits):
    return np.asarray(bits, np.uint32).view(np.float32)


def bits_of(x):
    return np.asarray(x, np.float32).view(np.uint32)


RNG = np.random.default_rng(0)
ANY = from_bits(RNG.integers(0, 2**32, 2**18, np.uint32))  # also NaN and subnormals
FINITE = ANY[np.isfinite(ANY)]


# Rounding at random


def test_the_mean_of_many_draws_is_the_number():
    spacing = 2.0**-7
    cases = np.array(
        [
            [1, 2**-9, spacing],  # number, what is beyond it, how far the next one is
            [1, 2**-23, spacing],
            [-1.5, -(2**-8), -spacing],
            [2.0**-20, 2.0**-29, 2.0**-27],
            [0, TINY / 4, TINY],  # subnormal
            [3 * TINY, TINY / 2, TINY],
            [LARGEST - 2.0**120, 2.0**118, 2.0**120],
        ]
    )
    draws = 2**20
    low, beyond, spacing = cases.T[:, :, None]
    x = np.broadcast_to(np.float32(low + beyond), (len(cases), draws))
    ups = (np.asarray(round_at_random(x)).astype(float) - low) / spacing
    assert set(np.unique(ups)) == {0.0, 1.0}
    share = (beyond / spacing)[:, 0]
    error = np.sqrt(share * (1 - share) / draws)
    assert np.all(abs(ups.mean(1) - share) <= 4 * error)


def test_what_is_a_bfloat16_number_stays():
    every = from_bits(np.arange(2**16, dtype=np.uint32) << 16)
    rounded = np.asarray(round_at_random(every))
    np.testing.assert_array_equal(bits_of(rounded), bits_of(every))


def test_every_number_becomes_one_of_its_neighbours_and_none_becomes_inf():
    rounded = np.asarray(round_at_random(ANY))
    nan = np.isnan(ANY)
    np.testing.assert_array_equal(np.isnan(rounded), nan)
    low = bits_of(ANY) & 0xFFFF0000
    high = np.where(np.isfinite(from_bits(low + 0x10000)), low + 0x10000, low)
    found = bits_of(rounded)
    assert np.all((found == low) | (found == high) | nan)
    assert np.isfinite(rounded[np.isfinite(ANY)]).all()
    beyond = np.full(1000, np.finfo(np.float32).max)
    np.testing.assert_array_equal(round_at_random(beyond), LARGEST)


def test_the_noise_is_uniform_and_nothing_predicts_it():
    def noise(seed, step, array, shape=(256, 1024)):
        seeds = _rounding.noise_seeds(seed, jnp.uint32(step))
        return np.asarray(_rounding._noise(shape, seeds, np.uint32(array)), float)

    first = noise(0, 0, 0)
    n, values = first.size, first.astype(int)
    for part in (values >> 8, values & 0xFF):  # 255 degrees of freedom
        counts = np.bincount(part.ravel(), minlength=256)
        assert 160 < np.sum((counts - n / 256) ** 2) / (n / 256) < 370
    others = {
        "the next element": np.roll(first, 1, 1),
        "the next row": np.roll(first, 1, 0),
        "the next array": noise(0, 0, 1),
        "the next step": noise(0, 1, 0),
        "the next seed": noise(1, 0, 0),
        "another shape": noise(0, 0, 0, (1024, 256)).T,
    }
    for name, other in others.items():
        assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 4 / n**0.5, name


# What rounding takes


def test_a_bfloat16_number_and_its_rest_are_the_float32_number():
    stored, rest = map(np.asarray, _rounding.split(FINITE, jnp.bfloat16))
    nearest = np.asarray(FINITE.astype(ml_dtypes.bfloat16), np.float32)
    ties = (bits_of(FINITE) & 0xFFFF) == 0x8000  # away from zero, not to even
    np.testing.assert_array_equal(stored[~ties], nearest[~ties])
    assert rest.dtype == np.int16
    joined = _rounding.join(stored.astype(ml_dtypes.bfloat16), rest)
    kept = np.isfinite(stored)
    np.testing.assert_array_equal(bits_of(joined)[kept], bits_of(FINITE)[kept])
    ties = from_bits([0x3F808000, 0x3F818000, 0xBF808000, 0x00008000])
    stored, rest = _rounding.split(ties, jnp.bfloat16)
    joined = _rounding.join(stored.astype(jnp.bfloat16), rest)
    np.testing.assert_array_equal(bits_of(joined), bits_of(ties))


def test_a_float16_number_and_its_rest_are_the_float32_number():
    size = 2.0 ** RNG.uniform(-45, 16, 2**18)
    x = np.float32(size * RNG.choice([-1, 1], size.shape))
    x = np.append(x, np.float32([0, 65504, 65519, 2**-14 - 2**-26, 1 - 2**-12]))
    stored, rest = map(np.asarray, _rounding.split(x, jnp.float16))
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
        np.testing.assert_array_equal(stored.astype(np.float16), expected)
    joined = np.asarray(_rounding.join(expected, rest))
    normal = (abs(x) >= 2.0**-14) & np.isfinite(expected)
    np.testing.assert_array_equal(joined[normal], x[normal])
    small = abs(x) < 2.0**-14
    assert np.max(abs(joined - x)[small]) <= 2.0**-40
    np.testing.assert_array_equal(
        joined[np.isinf(expected)], expected[np.isinf(expected)]
    )


@pytest.mark.parametrize(
    ("dtype", "rests"),
    [
        (ml_dtypes.bfloat16, (-(2**15), -1, 0, 1, 2**15 - 1)),
        (np.float16, (-(2**14), -1, 0, 1, 2**14)),
    ],
)
def test_the_rest_of_another_number_moves_a_number_by_half_a_spacing(dtype, rests):
    # As where a parameter was set to zero, or read from another checkpoint.
    every = np.arange(2**16, dtype=np.uint16).view(dtype)
    every = every[np.isfinite(every.astype(np.float32))]
    below = np.nextafter(ml_dtypes.finfo(dtype).max, dtype(0))  # beyond is no number
    spacing = np.spacing(np.minimum(abs(every), below)).astype(float)
    for rest in rests:
        joined = _rounding.join(every, np.full(every.shape, rest, np.int16))
        moved = abs(np.asarray(joined).astype(float) - every.astype(float))
        assert np.all(moved <= spacing / 2)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_what_is_not_finite_has_no_rest(dtype):
    x = np.array([np.inf, -np.inf, np.nan, 3.4e38], np.float32)
    stored, rest = _rounding.split(x, dtype)
    np.testing.assert_array_equal(rest, 0)
    for some in (rest, rest - 5, rest + 5):
        joined = np.asarray(_rounding.join(stored.astype(dtype), some))
        np.testing.assert_array_equal(joined, [np.inf, -np.inf, np.nan, np.inf])
