"""Passes over a program before it is analysed: one table of all of them.

A *rewrite* is a function ``(equations, jaxpr, scopes, asked) -> equations`` of one
jaxpr, the named scopes around it, and :class:`scopes.Asked`. A *marker* is a function
``(jaxpr, scopes, unread)`` of a whole program and of its equations that are consumers
of nothing, which returns jaxprs, variables of theirs, and what these are needed for.
They run in this order.
"""

from .comparing import compared, loops
from .gates import gates
from .hoisting import hoisting
from .relus import relus
from .scores import scores
from .variance import variance

REWRITES = {
    "scores": scores,
    "variance": variance,
    "loops": loops,
    "hoisting": hoisting,
    "relus": relus,
}
MARKERS = {"compared": compared, "gates": gates}
