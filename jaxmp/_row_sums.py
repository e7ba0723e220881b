"""Sums over the rows that a product sends back, made of sums that are there already.

The gradient of a bias adds up what is sent back to it, over the rows of a batch. To the
bias of a layer norm the dense layer behind it sends ``d @ w.T``, and the sum of that is
``d.sum(0) @ w.T``, where ``d.sum(0)`` is the gradient of the dense layer's own bias. So
a matrix is read, and not all rows; and none of the rows has been rounded.

Sums are cheap in the kernel that computes what they add up. But XLA:GPU keeps the
parts of a sum in memory that the threads of a block share, and has room there for two
sums in float32. Behind a norm there are three: those of its scale, of its bias, and of
the bias before it.

Not where JAX divides the work between devices: the gradient, and the bias after a step,
would be sharded as the matrix is. In a `shard_map` each device has its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

from . import _jaxpr
from ._definitions import definitions_of
from ._jaxpr import Equation, Literal, Var, is_float32
from ._op_lists import ADDS_UP, RESHAPES, TOTALS, TRANSPOSES
from ._products import rows_summed
from ._scopes import ROW_SUMS, IsProduct, Scopes, is_backward
from ._sizes import size_of

# To read the matrix takes as long as to read as many rows as the sum has terms. There
# have to be more, because rows may be summed in the kernel that computes them, unread.
_ROWS_FOR_EACH_TERM = 4
# How many products and sums of them may be looked at for what one sum is made of.
_STEPS = 16


def with_row_sums(
    eqns: Sequence[Equation],
    scopes: Scopes,
    is_product: IsProduct,
    is_kept: Callable[[Scopes], bool],
) -> Sequence[Equation]:
    """Returns the equations, with sums over rows made of sums that are there.

    Args:
        eqns: The equations of a jaxpr.
        scopes: Named scopes around it.
        is_product: Tells whether an equation, in its scopes, is a product in 16 bits.
        is_kept: Tells whether what is in some scopes stays as it was written.
    """
    definition = definitions_of(eqns)
    # By what is summed up, and over which axes.
    totals: dict[tuple[Any, tuple[int, ...]], Any] = {}

    def of_sum(product: Equation, axes: tuple[int, ...]) -> Equation | None:
        """Returns the product of a sum that is the sum of ``product``, None if none."""
        if not is_product(product, scopes + _jaxpr.scope_names(product)):
            return None
        rows = rows_summed(product, axes)
        if rows is None:
            return None
        summed = product.invars[rows.operand]
        total = totals.get((summed, rows.axes))
        if total is None:
            return None
        if size_of(summed.aval) < _ROWS_FOR_EACH_TERM * size_of(total.aval) ** 2:
            return None
        ins = list(product.invars)
        ins[rows.operand] = total
        params = product.params | {"dimension_numbers": rows.dimension_numbers}
        return product.replace(invars=ins, params=params)

    def by_others(eqn: Equation) -> list[Equation]:
        """Returns what computes by other sums what ``eqn`` does, empty if none can."""
        products: list[Equation] = []
        sums: list[Equation] = []
        rest = [(eqn.invars[0], _axes(eqn))]
        while rest:
            x, axes = rest.pop()
            made = definition(x)
            if made is None or len(products) + len(sums) == _STEPS:
                return []
            if made.primitive.name in ADDS_UP:
                sums.append(made)
                rest += [(part, axes) for part in made.invars]
            elif (before := _axes_before(made, axes)) is not None:
                rest.append((made.invars[0], before))
            elif (product := of_sum(made, axes)) is not None:
                products.append(product)
            else:
                return []
        return _placed(products, sums, eqn)

    found = []
    for eqn in eqns:
        instead = []
        if _is_total(eqn):
            here = scopes + _jaxpr.scope_names(eqn)
            if is_backward(eqn, here) and not is_kept(here):
                instead = by_others(eqn)
            totals.setdefault((eqn.invars[0], _axes(eqn)), eqn.outvars[0])
        found += instead or [eqn]
    return found


def _is_total(eqn: Equation) -> bool:
    return (
        eqn.primitive.name in TOTALS
        and is_float32(eqn.outvars[0])
        and not isinstance(eqn.invars[0], Literal)
    )


def _axes(eqn: Equation) -> tuple[int, ...]:
    return tuple(sorted(eqn.params["axes"]))


def _placed(
    products: Sequence[Equation], sums: Sequence[Equation], eqn: Equation
) -> list[Equation]:
    """Returns the products, and sums of them, where ``eqn`` is."""
    (out,) = eqn.outvars
    made = [one.replace(outvars=[Var(out.aval)]) for one in products]
    total, *others = (one.outvars[0] for one in made)
    for one, other in zip(sums, others, strict=True):
        made.append(one.replace(invars=[total, other], outvars=[Var(out.aval)]))
        (total,) = made[-1].outvars
    made[-1] = made[-1].replace(outvars=[out])
    place = {"source_info": eqn.source_info, "ctx": eqn.ctx}
    return [_jaxpr.in_scope(one.replace(**place), ROW_SUMS) for one in made]


def _axes_before(eqn: Equation, axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the axes that were summed over if ``eqn`` moved what it was given.

    None if it does anything else, or if the sum would be moved too.
    """
    if eqn.primitive.name in TRANSPOSES:
        order = eqn.params["permutation"]
        left = [place for i, place in enumerate(order) if i not in axes]
        return tuple(sorted(order[i] for i in axes)) if left == sorted(left) else None
    if eqn.primitive.name in RESHAPES and eqn.params["dimensions"] is None:
        given, out = (x.aval.shape for x in (*eqn.invars, *eqn.outvars))
        rows = len(given) - (len(out) - len(axes))
        if axes == tuple(range(len(axes))) and given[rows:] == out[len(axes) :]:
            return tuple(range(rows))
    return None
