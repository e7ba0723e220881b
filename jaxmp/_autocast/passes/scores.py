"""The order of attention scores: queries first, as the softmax reads them.

``einsum("btkgd,bskd->bkgts", q, k)`` is written as a product of ``k`` and ``q``, in
this order, and a transpose. XLA then keeps ``s`` far from the last axis in memory for
all that is computed elementwise, such as a softmax, and copies the weights, and their
gradient, for each product that takes them. The product of ``q`` and ``k`` is the same
numbers, and ``s`` is its last axis.
"""

from collections.abc import Sequence
from typing import Any

from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.jaxpr import Equation, Var
from ..._jaxprs.scopes import Asked, Scopes, is_backward
from ..._ops import products, table


def scores(
    eqns: Sequence[Equation], jaxpr: Any, scopes: Scopes, asked: Asked
) -> Sequence[Equation]:
    """Returns the equations, scores computed in the order in which they are read.

    Where the very next equation is the transpose, as ``einsum`` writes it. Not in the
    backward pass: what JAX transposes there, products take.

    A rewrite, see :mod:`jaxmp._autocast.passes`.
    """
    found: list[Equation] = []
    for eqn in eqns:
        if found and table.transposes(eqn) and products.is_batched(found[-1]):
            product, around = found[-1], scopes + _jaxpr.scope_names(found[-1])
            if (
                _is_turned(product, eqn)
                and product.outvars[0] not in _jaxpr.open_jaxpr(jaxpr).outvars
                and sum(product.outvars[0] in x.invars for x in eqns) == 1
                and not is_backward(product, around)
                and asked.is_product(product, around)
            ):
                found[-1:] = _swapped(product, eqn)
                continue
        found.append(eqn)
    return found


def _is_turned(product: Equation, moved: Equation) -> bool:
    """Whether ``moved`` puts an axis of the first operand of a product last.

    Of one that is larger than its operands, such as scores. What is smaller, such as
    what is attended to, is rather moved itself. Neither of one with symbolic sizes, nor
    of one whose axes lie on those of a mesh.
    """
    (out,) = product.outvars
    sizes = [x.aval.size for x in (*product.invars, out)]
    if moved.invars[0] is not out or not all(isinstance(n, int) for n in sizes):
        return False
    if any(x is not None for x in out.aval.sharding.spec):
        return False
    batch, first, _ = _axes(product)
    place = moved.params["permutation"][-1]
    return sizes[-1] > max(sizes[:-1]) and batch <= place < batch + first


def _axes(product: Equation) -> tuple[int, int, int]:
    """Returns how many axes a product's operands share, and have alone."""
    contracted, batch = product.params["dimension_numbers"]
    lhs, rhs = (
        x.aval.ndim - len(summed) - len(shared)
        for x, summed, shared in zip(product.invars, contracted, batch, strict=True)
    )
    return len(batch[0]), lhs, rhs


def _swapped(product: Equation, moved: Equation) -> list[Equation]:
    """Returns the product of the same operands the other way round, and a transpose."""
    batch, first, last = _axes(product)
    middle, end = batch + first, batch + first + last
    axes = [*range(batch), *range(middle, end), *range(batch, middle)]
    summed, shared = product.params["dimension_numbers"]
    params = {**product.params, "dimension_numbers": (summed[::-1], shared[::-1])}
    (out,) = product.outvars
    between = Var(out.aval.update(shape=tuple(out.aval.shape[i] for i in axes)))
    places = tuple(axes.index(i) for i in moved.params["permutation"])
    return [
        product.replace(invars=product.invars[::-1], outvars=[between], params=params),
        moved.replace(invars=[between], params={**moved.params, "permutation": places}),
    ]
