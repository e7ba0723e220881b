"""Laws of families of programs in which rounding once too often does harm.

No result is further from float32 than a stated factor times the same with its matmuls
cast by hand.
"""

import numpy as np
import pytest

from benchmarks.generated import FAMILIES, FORMS, Program, worst_of

DTYPES = "bfloat16", "float16"

# One of each family, and what has broken a law.
KNOWN = [
    "tanh, a factor, a scan",
    "a product, a length, a scale",
    "batch norm, a bias, two matmuls",
    "an average, associative",
    "times, in a scan",
    "over less than one, in a row",
]


def hold(name, seed, forms=FORMS):
    program = Program(((name, "plain", 0),), "squares", DTYPES[seed % 2], seed)
    worst = worst_of(program, forms)
    assert not worst.breaks_law, (worst, program)


@pytest.mark.parametrize("name", KNOWN)
def test_a_program_of_a_family_is_no_further_from_float32_than_by_hand(name):
    hold(name, 0, FORMS[:1])


@pytest.mark.evidence
@pytest.mark.filterwarnings("ignore:Of the FLOPs:UserWarning")  # which is right
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("family", FAMILIES)
def test_any_program_of_a_family_is_no_further_from_float32_than_by_hand(family, seed):
    names = sorted(FAMILIES[family])
    hold(str(np.random.default_rng(seed).choice(names)), seed)
