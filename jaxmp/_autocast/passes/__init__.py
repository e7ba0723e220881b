"""Passes over a program before it is analysed: one table of all of them.

A *rewrite* is a function ``(equations, jaxpr, scopes, is_product) -> equations`` of one
jaxpr, the named scopes around it, and a function that says whether an equation, in its
scopes, is a product in 16 bits. A *marker* is a function ``(jaxpr, scopes, unread)`` of
a whole program and of its equations that are consumers of nothing, which returns
jaxprs, variables of theirs, and what these are needed for. They run in this order.
"""

from .comparing import compared, loops
from .gates import gates
from .hoisting import hoisting
from .scores import scores
from .variance import variance

REWRITES = {
    "scores": scores,
    "variance": variance,
    "loops": loops,
    "hoisting": hoisting,
}
MARKERS = {"compared": compared, "gates": gates}
