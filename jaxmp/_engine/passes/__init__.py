"""Passes over a program before it is analysed: one table of all of them.

A *rewrite* is a function ``(equations, jaxpr, scopes, is_product) -> equations`` of one
jaxpr. A *marker* is a function ``(jaxpr, scopes)`` of a whole program, which yields
jaxprs, variables of theirs, and what these are needed for.

| pass | what for | the test that fails without it |
|---|---|---|
| `order` | scores are computed in the order in which the softmax reads them | \
`test_scores_are_computed_queries_first` |
| `hoisting` | weight gradients of a recurrent scan are one product after it | \
`test_no_trip_adds_up_the_gradient_of_a_weight` |
| `endings` | loops that end by comparing what products computed stay float32 | \
`test_loops_end_after_as_many_trips` |
| `moments` | means of a number and of its square stay float32 | \
`test_a_variance_is_never_negative` |
| `gates` | what multiplies a number many times without a loop stays float32 | \
`test_gates_in_a_row_keep_their_digits` |
"""

from .endings import endings
from .gates import gates
from .hoisting import hoisting
from .moments import moments
from .order import order

REWRITES = order, moments, endings, hoisting
MARKERS = (gates,)
