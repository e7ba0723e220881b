"""Generated training steps are as near to float32 as the same cast by hand."""

import pytest

from benchmarks.generated import FORMS, drawn, smaller, worst_of


def hold(program, forms):
    worst = worst_of(program, forms)
    assert not worst.breaks_law, (worst, program)


@pytest.mark.parametrize("seed", range(4))
def test_a_step_is_no_further_from_float32_than_by_hand(seed):
    hold(drawn(seed, most=1), FORMS[seed // 2 % 2 :][:1])


@pytest.mark.evidence
@pytest.mark.parametrize("seed", range(66))
def test_any_step_is_no_further_from_float32_than_by_hand(seed):
    hold(drawn(seed), FORMS)


def test_smaller_programs_lead_to_one_plain_layer():
    program = drawn(10)
    while rest := list(smaller(program)):
        program = rest[0]
    assert [wrapper for _, wrapper, _ in program.layers] == ["plain"]
    assert program.loss == "squares"
