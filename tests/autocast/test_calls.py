"""A `jit`, a call and a name change the dtype of no value."""

import pytest
from random_calls import changed, drawn


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "with gradients"])
@pytest.mark.parametrize("seed", range(16))
def test_calls_of_parts_of_a_random_program_change_no_dtype(seed, backward):
    hold(seed, backward)


def hold(seed, backward):
    program, dtype = drawn(seed), ("bfloat16", "float16")[seed % 2]
    assert not changed(program, dtype, backward=backward), program


@pytest.mark.evidence
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "with gradients"])
@pytest.mark.parametrize("seeds", range(0, 400, 50))
def test_calls_of_parts_of_any_program_change_no_dtype(seeds, backward):
    for seed in range(seeds, seeds + 50):
        hold(seed, backward)
