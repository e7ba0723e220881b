"""Scans over layers, and the residual streams that they carry."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from . import _jaxpr
from ._jaxpr import Equation
from ._op_lists import ADDS_UP, JOINS, VIEWS
from ._scopes import IsProduct, Scopes, inside
from ._trips import RUN_ONCE

# Networks are no deeper. What adds to a number more often may be a loop over time.
_MOST = 128
_ADDS = JOINS | ADDS_UP | VIEWS


class _Made(NamedTuple):
    """Of what a value in a trip is made, products aside."""

    added: frozenset[int] = frozenset()  # carried values, by additions alone
    others: frozenset[int] = frozenset()  # carried values, also in other ways
    carried: bool = False  # of something carried, also by products
    slices: bool = False  # of what the scan goes through, also by products


def residual_streams(
    loop: Equation, is_product: IsProduct, scopes: Scopes
) -> frozenset[int]:
    """Returns to what a scan over layers does nothing but add.

    A layer multiplies what is carried by weights of its own, which the scan goes
    through. Steps with the same weights, as in time, may be many and small.

    Args:
        loop: A ``scan`` or a ``while``.
        is_product: Tells whether an equation, in its scopes, is a product in 16 bits.
        scopes: Named scopes around its body.

    Returns:
        Its places among the outputs of ``loop``.
    """
    length = loop.params.get("length")
    if not isinstance(length, int) or length > _MOST:
        return frozenset()
    layout, layers = _jaxpr.call_layout(loop), 0

    def through(jaxpr: Any, ins: Sequence[_Made], scopes: Scopes) -> list[_Made]:
        def apply(eqn: Equation, ins: list[_Made]) -> list[_Made]:
            nonlocal layers
            here = scopes + _jaxpr.scope_names(eqn)
            if _jaxpr.call_kind(eqn) in RUN_ONCE:
                (body,) = _jaxpr.call_layout(eqn).bodies
                return through(body.jaxpr, ins, inside(eqn, here))
            made = _Made(
                added=frozenset().union(*(x.added for x in ins)),
                others=frozenset().union(*(x.others for x in ins)),
                carried=any(x.carried for x in ins),
                slices=any(x.slices for x in ins),
            )
            if is_product(eqn, here):
                weights = any(x.slices and not x.carried for x in ins)
                layers += made.carried and weights
                made = made._replace(added=frozenset(), others=frozenset())
            elif eqn.primitive.name not in _ADDS and not _jaxpr.is_cast(eqn):
                made = made._replace(others=made.added | made.others)
            return [made] * len(eqn.outvars)

        nothing = _Made()
        return _jaxpr.interpret(
            jaxpr, ins, apply, const=lambda _: nothing, literal=lambda _: nothing
        )

    def given(i: int) -> _Made:
        if i in layout.fixed_in:
            out = layout.fixed_out[i - layout.fixed_in.start]
            return _Made(added=frozenset([out]), carried=True)
        return _Made(slices=i >= layout.fixed_in.stop)

    (body,) = layout.bodies
    outs = through(body.jaxpr, [given(i) for i in body.operands], scopes)
    streams = (
        i for i in layout.fixed_out if outs[i].added == {i} and not outs[i].others
    )
    return frozenset(streams if layers else ())
