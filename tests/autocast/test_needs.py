"""The lattice of needs: its laws hold for every set of readers."""

import ast
import itertools
from pathlib import Path

import pytest

from jaxmp._autocast import needs, rules

BITS = ("PRODUCT", "HALF", "HALF_BACK", "FULL", "FULL_BACK", "DIGITS", "GATE", "REGION")
ALL = range(2 ** len(BITS))


def of(*names):
    return sum(getattr(needs, name) for name in names)


def test_the_readers_are_eight_kinds_each_with_a_bit_of_its_own():
    assert of(*BITS) == 2 ** len(BITS) - 1


@pytest.mark.parametrize(
    ("readers", "is_half"),
    [
        ((), False),
        (("PRODUCT",), True),
        (("HALF",), True),
        (("HALF_BACK",), True),
        (("FULL",), False),
        (("FULL", "HALF_BACK"), False),  # a loss, whose gradient multiplies by it
        (("FULL", "HALF"), True),  # a residual stream: a norm and a shortcut
        (("FULL", "PRODUCT"), True),
        (("PRODUCT", "FULL_BACK"), True),
        (("PRODUCT", "DIGITS"), False),  # a probability that a logarithm reads too
        (("PRODUCT", "GATE"), False),
    ],
)
def test_a_value_has_16_bits_if_somebody_takes_them_and_nobody_needs_more(
    readers, is_half
):
    assert needs.is_half(of(*readers)) == is_half


def test_a_reader_who_needs_digits_never_lets_a_value_be_rounded():
    for need, exact in itertools.product(ALL, (needs.DIGITS, needs.GATE)):
        assert not needs.is_half(need | exact)
        assert not needs.is_kept(need | exact)
        assert not needs.is_carried(0, need | exact)


def test_what_is_kept_is_read_by_products_and_the_backward_pass_alone():
    free = of("PRODUCT", "HALF_BACK", "FULL_BACK")
    for need in ALL:
        kept = bool(need & needs.PRODUCT) and need | free == free
        assert needs.is_kept(need) == kept
        assert not kept or needs.is_half(need)


def test_a_float32_reader_of_the_last_value_lets_no_loop_carry_16_bits():
    for need in ALL:
        assert not needs.is_carried(needs.FULL, need)
        assert needs.is_carried(0, need) == needs.is_half(need)


def test_what_is_handed_on_is_part_of_what_is_needed_and_less_behind_a_sigmoid():
    for need in ALL:
        on, squashed = (needs.handed_on(need, squashed=x) for x in (False, True))
        assert on | need == need
        assert squashed | on == on
        assert not squashed & needs.GATE


def test_what_is_handed_over_in_float32_is_taken_in_16_bits_by_nobody():
    assert not any(needs.is_half(needs.in_float32(need)) for need in ALL)


def test_a_region_needs_everything():
    assert needs.has_region(needs.EVERYTHING)
    for need in (needs.EVERYTHING, needs.REGION | needs.PRODUCT):
        assert needs.has_region(needs.handed_on(need))
    assert not any(map(needs.has_region, range(needs.REGION)))


def test_nobody_else_looks_into_a_set_of_needs():
    folder = Path(needs.__file__).parent
    for path in folder.rglob("*.py"):
        if path.stem == "needs":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
                assert "needs" not in ast.unparse(node), (path.name, node.lineno)


def test_there_are_nine_rules_and_each_is_one_sentence():
    assert list(rules.RULES) == list(range(1, 10))
    for sentence in rules.RULES.values():
        assert sentence.endswith(".")
        assert ". " not in sentence
        assert "unless" not in sentence
        assert len(sentence.split()) <= 36
