"""Generated training steps are as near to float32 as the same cast by hand.

No result is further from float32 than a stated factor times the same with its matmuls
cast by hand: of steps that are drawn, and of families of programs in which rounding
once too often does harm.
"""

import numpy as np
import pytest

from benchmarks.generated import FAMILIES, FORMS, Program, drawn, smaller, worst_of

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


def hold(program, forms):
    worst = worst_of(program, forms)
    assert not worst.breaks_law, (worst, program)


def of_family(name, seed):
    return Program(((name, "plain", 0),), "squares", DTYPES[seed % 2], seed)


@pytest.mark.parametrize("seed", [0, 3])  # in both dtypes and forms
def test_a_step_is_no_further_from_float32_than_by_hand(seed):
    hold(drawn(seed, most=1), FORMS[seed // 2 % 2 :][:1])


@pytest.mark.evidence
@pytest.mark.parametrize("seed", range(66))
def test_any_step_is_no_further_from_float32_than_by_hand(seed):
    hold(drawn(seed), FORMS)


@pytest.mark.parametrize("name", KNOWN)
def test_a_program_of_a_family_is_no_further_from_float32_than_by_hand(name):
    hold(of_family(name, 0), FORMS[:1])


@pytest.mark.evidence
@pytest.mark.filterwarnings("ignore:Of the FLOPs:UserWarning")  # which is right
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("family", FAMILIES)
def test_any_program_of_a_family_is_no_further_from_float32_than_by_hand(family, seed):
    names = sorted(FAMILIES[family])
    hold(of_family(str(np.random.default_rng(seed).choice(names)), seed), FORMS)


def test_smaller_programs_lead_to_one_plain_layer():
    program = drawn(10)
    while rest := list(smaller(program)):
        program = rest[0]
    assert [wrapper for _, wrapper, _ in program.layers] == ["plain"]
    assert program.loss == "squares"
