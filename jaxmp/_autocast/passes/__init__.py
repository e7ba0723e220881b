"""Passes over a program before it is analysed: one table of all of them.

A *rewrite* is a function ``(equations, jaxpr, scopes, is_product) -> equations`` of one
jaxpr, the named scopes around it, and a function that says whether an equation, in its
scopes, is a product in 16 bits. A *marker* is a function ``(jaxpr, scopes)`` of a whole
program, which yields jaxprs, variables of theirs, and what these are needed for. They
run in this order.
"""

from collections.abc import Callable
from typing import NamedTuple

from .comparing import compared, loops
from .gates import gates
from .hoisting import hoisting
from .scores import scores
from .variance import variance


class Pass(NamedTuple):
    """A pass, and a test that fails without it."""

    run: Callable
    test: str


REWRITES = {
    "scores": Pass(
        scores,
        "test_scores_are_computed_in_the_order_in_which_they_are_read",
    ),
    "variance": Pass(
        variance,
        "test_a_variance_by_a_window_is_near_that_of_float32",
    ),
    "loops": Pass(
        loops,
        "test_a_loop_that_ends_when_an_error_is_small_ends_as_in_float32",
    ),
    "hoisting": Pass(
        hoisting,
        "test_no_iteration_adds_up_the_gradient_of_a_weight",
    ),
}
MARKERS = {
    "compared": Pass(
        compared,
        "test_a_search_that_compares_with_what_was_computed_before_moves",
    ),
    "gates": Pass(
        gates,
        "test_gates_of_which_many_multiply_one_another_have_all_digits",
    ),
}
