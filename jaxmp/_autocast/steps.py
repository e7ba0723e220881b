"""A step of the replay: one equation, and what is known of it before it is decided."""

from collections.abc import Sequence
from typing import NamedTuple

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import Equation
from .._jaxprs.scopes import Scopes, is_backward
from .._ops.lists import Definition
from .classes import Class
from .loops import Ways, joined
from .needs import Need


class Trip(NamedTuple):
    """What outputs of a jaxpr, or an equation, are needed for.

    And the ways through it by which the trips of a loop add up.
    """

    wanted: tuple[Need, ...]
    summed: Ways = ()


class Step(NamedTuple):
    """An equation, and what its replay depends on beside its inputs."""

    eqn: Equation
    kind: Class
    read: Trip  # what is needed of what it returns
    asks: Sequence[Need]  # what it needs of each input
    scopes: Scopes  # around the jaxpr
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
        return joined(self.read.wanted)

    @property
    def is_summed(self) -> bool:
        """Whether the trips of a loop add up what it returns."""
        return bool(self.read.summed)
