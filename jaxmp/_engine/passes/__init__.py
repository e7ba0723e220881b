"""Passes over a program before it is analysed: one table of all of them.

A *rewrite* is a function ``(equations, jaxpr, scopes, is_product) -> equations`` of one
jaxpr. A *marker* is a function ``(jaxpr, scopes)`` of a whole program, which yields
jaxprs, variables of theirs, and what these are needed for.

| pass | what for | the test that fails without it |
|---|---|---|
| `order` | scores are computed in the order in which the softmax reads them | \
`test_scores_are_computed_in_the_order_in_which_they_are_read` |
| `hoisting` | weight gradients of a recurrent scan are one product after it | \
`test_no_trip_adds_up_the_gradient_of_a_weight` |
| `endings` | loops that end by comparing what products computed stay float32 | \
`test_rule_10_a_loop_ends_as_in_float32_whatever_its_helper_is_called` |
| `moments` | means of a number and of its square stay float32 | \
`test_a_variance_by_a_window_is_near_that_of_float32` |
| `gates` | what multiplies a number many times without a loop stays float32 | \
`test_gates_of_which_many_multiply_one_another_have_all_digits` |
"""

from .endings import endings
from .gates import gates
from .hoisting import hoisting
from .moments import moments
from .order import order

REWRITES = order, moments, endings, hoisting
MARKERS = (gates,)
