"""A step of the replay: one equation, and what is known of it before it is decided."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation
from .._jaxprs.scopes import Scopes, is_backward
from .._ops.lists import Definition
from . import needs
from .classes import Class
from .needs import Need


class Step(NamedTuple):
    """An equation, and what its replay depends on beside its inputs."""

    eqn: Equation
    kind: Class
    read: tuple[Need, ...]
    asks: Sequence[Need]  # what it needs of each input
    scopes: Scopes  # around the jaxpr
    path: frozenset[Any]  # between what a trip is given and what it adds up
    definition: Definition

    @property
    def around(self) -> Scopes:
        """The scopes around the equation, with its own."""
        return self.scopes + _jaxpr.scope_names(self.eqn)

    @property
    def back(self) -> bool:
        """Whether the equation belongs to the backward pass."""
        return is_backward(self.eqn, self.scopes)

    @property
    def need(self) -> Need:
        """What the readers of its outputs need."""
        return functools.reduce(int.__or__, self.read, needs.NOTHING)

    @property
    def is_summed(self) -> bool:
        """Whether the trips of a loop add up what it returns."""
        return bool(self.path) and not self.path.isdisjoint(self.eqn.outvars)
