"""How operations take and return 16 bits: products, reductions, scatters and lookups.

Products of 16-bit operands are summed up in float32. What is rounded is marked so that
XLA does not widen it again.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.jaxpr import (
    FLOAT32,
    Equation,
    Primitive,
    bind,
    interpret,
    is_float32,
    remembered,
    trace,
)
from .._jaxprs.scopes import SATURATED
from .products import is_convolution, vector_of
from .table import adds_at


class ProductForm(NamedTuple):
    """A product, without its operands; hashable."""

    primitive: Primitive
    params: tuple[tuple[str, Any], ...]
    vector: int | None  # which operand is a vector, if one is
    backward: bool  # whether it belongs to a backward pass

    def bind(self, args: Sequence[Any], dtype: np.dtype) -> jax.Array:
        """Applies it to ``args``, and returns its result in ``dtype``."""
        options = {**dict(self.params), "preferred_element_type": dtype}
        return self.primitive.bind(*args, **options)

    def summed(self, args: Sequence[Any]) -> jax.Array:
        """Applies it to 16-bit ``args``, and returns its float32 sums.

        XLA:CPU has no such product of bfloat16 in every layout. The same sums of
        widened operands give the same numbers there. cuBLAS has none by a vector, for
        which XLA would write the matrix once more in float32. Multiplied and summed up,
        it is read once. The choice is made where the program is lowered.
        """
        if self.vector is None and all(x.dtype != jnp.bfloat16 for x in args):
            return self.bind(args, FLOAT32)
        jaxpr = _summed_by_platform(self, tuple(map(jax.typeof, args)))
        return interpret(jaxpr, args, bind)[0]


def product_of(eqn: Equation, *, backward: bool = False) -> ProductForm:
    """Returns what ``eqn`` is without its operands."""
    params = tuple(sorted(eqn.params.items()))
    return ProductForm(eqn.primitive, params, vector_of(eqn), backward)


@remembered  # Tracing the branches takes long.
def _summed_by_platform(product: ProductForm, avals: tuple) -> Any:
    vector = product.vector

    def summed(*args):
        return product.bind(args, FLOAT32)

    def widened(*args):
        return summed(*(_widened(x) if x.dtype == jnp.bfloat16 else x for x in args))

    @jax.custom_batching.custom_vmap
    def multiplied(*args):
        assert vector is not None
        matrix, numbers = args[1 - vector], dict(product.params)["dimension_numbers"]
        if product.backward:  # or XLA would store it in float32 too, for this consumer
            matrix = firmly_rounded(matrix)
        return times_vector(matrix, args[vector], vector, *numbers)

    @multiplied.def_vmap  # A batch of vectors may be a matrix.
    def batched(_, are_batched, *args):
        axes = [0 if is_batched else None for is_batched in are_batched]
        return jax.vmap(summed, axes)(*args), True

    branches: dict[str, Any] = {}
    if any(x.dtype == jnp.bfloat16 for x in avals):
        branches["cpu"] = widened
    if vector is not None:
        branches["cuda"] = multiplied

    def choose(*args):
        return [lax.platform_dependent(*args, **branches, default=summed)]

    return trace(choose, avals)


def times_vector(
    matrix: Any, vector: Any, place: int, contracted: Any, batch: Any
) -> jax.Array:
    """Returns a product by a vector as float32 sums of what is multiplied elementwise.

    Args:
        matrix: The matrix, or a batch of them.
        vector: The vector. All axes that the matrix does not share have size one.
        place: Which operand of the product the vector is.
        contracted: The axes to sum over, of each operand.
        batch: The other axes that they share, of each operand.
    """
    i = 1 - place
    shared, own = ((*batch[k], *contracted[k]) for k in (i, place))
    own = [axis for _, axis in sorted(zip(shared, own, strict=True))]
    ones = [axis for axis in range(vector.ndim) if axis not in own]
    entries = lax.transpose(_widened(vector), (*own, *ones))
    entries = lax.squeeze(entries, range(len(own), entries.ndim))
    entries = lax.broadcast_in_dim(entries, matrix.shape, sorted(shared))
    sums = jnp.sum(_widened(matrix) * entries, contracted[i])
    left = [axis for axis in range(matrix.ndim) if axis not in contracted[i]]
    free = [axis for axis in left if axis not in batch[i]]
    sums = lax.transpose(sums, [left.index(axis) for axis in (*batch[i], *free)])
    start = sums.ndim if place == 1 else len(batch[i])
    return lax.expand_dims(sums, range(start, start + len(ones)))


def _widened(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.float32)


def firmly_rounded(array: Any) -> Any:
    """Returns a 16-bit array whose rounding XLA does not leave out.

    XLA leaves it out for who widens the array again, such as a sum, and then may store
    float32 numbers for everybody. It does not if the rounded numbers are computed with.
    Behind a barrier it would not either, but could fuse no sum with what is before.
    """
    # The array itself, which XLA cannot know. A choice, because it may be transposed:
    # a test of the array could not be.
    itself = lax.optimization_barrier(np.True_)
    return lax.select(itself, array, lax.neg(array))


def bind_narrow(eqn: Equation, arrays: Sequence[Any], dtype: np.dtype) -> list[Any]:
    """Applies ``eqn`` to arrays of ``dtype`` where it was written for float32."""
    inner = {name: x for name, x in eqn.params.items() if _jaxpr.is_jaxpr(x)}
    changed = {name: _narrowed(x, dtype) for name, x in inner.items()}
    return _jaxpr.bind(eqn, arrays, **changed)


def _narrowed(jaxpr: Any, dtype: np.dtype) -> Any:
    """Returns a function of numbers, a jaxpr, in ``dtype``."""

    def apply(eqn: Equation, ins: list[Any]) -> list[Any]:
        if eqn.params.get("new_dtype") == FLOAT32:
            return _jaxpr.bind(eqn, ins, new_dtype=dtype)
        return bind_narrow(eqn, ins, dtype)

    def narrow(*numbers):
        return _jaxpr.interpret(
            jaxpr,
            numbers,
            apply,
            const=lambda x: np.asarray(x, dtype) if x.dtype == FLOAT32 else x,
            literal=lambda x: np.asarray(x.val, dtype) if is_float32(x) else x.val,
        )

    avals = _jaxpr.in_avals(jaxpr)
    avals = [x.update(dtype=dtype) if x.dtype == FLOAT32 else x for x in avals]
    closed = _jaxpr.trace(narrow, avals)
    return closed if isinstance(jaxpr, _jaxpr.ClosedJaxpr) else closed.jaxpr


def row_axis(eqn: Equation) -> int | None:
    """Returns along which axis ``eqn`` adds at most one number to each row.

    None if it does anything else.
    """
    if not adds_at(eqn):
        return None
    numbers = eqn.params["dimension_numbers"]
    operand, _, updates = (atom.aval for atom in eqn.invars)
    axes = numbers.scatter_dims_to_operand_dims
    others = [i for i in range(operand.ndim) if i not in axes]
    batch = list(numbers.scatter_indices_batching_dims)
    aligned = list(numbers.operand_batching_dims) == others and batch == sorted(batch)
    alone = updates.size == math.prod(operand.shape[i] for i in others)
    return axes[0] if len(axes) == 1 and aligned and alone else None


def added_to_zeros(eqn: Equation, zeros: Any, indices: Any, updates: Any) -> Any:
    """Returns what ``eqn``, which has a :func:`row_axis`, makes of ``zeros``."""
    axis, shape = row_axis(eqn), zeros.shape
    assert axis is not None
    row = [n if i == axis else 1 for i, n in enumerate(shape)]
    rows = [1 if i == axis else n for i, n in enumerate(shape)]
    if indices.dtype.itemsize < 4:  # it may end before the axis does
        indices = indices.astype(jnp.int32)
    places = lax.broadcasted_iota(indices.dtype, row, axis)
    if eqn.params["mode"] == lax.GatherScatterMode.CLIP:
        indices = jnp.clip(indices, 0, places.size - 1)
    indices, updates = jnp.reshape(indices, rows), jnp.reshape(updates, rows)
    # Of the zeros come the dtype and the sharding: what is added may be a number.
    return jnp.where(places == indices, updates, zeros)


def accumulated(
    eqn: Equation, operands: list[Any], dtype: np.dtype, linear: bool, backward: bool
) -> Any:
    """Returns the float32 sums of a product of 16-bit operands.

    JAX would differentiate it into products of 16-bit by float32, so it gets a rule by
    which the products of its derivatives are 16-bit too. What is ``linear`` is part of
    such a rule, and is rounded on the way like those.
    """

    # cuDNN has no 16-bit convolution with a float32 result: XLA widens the operands and
    # convolves in float32.
    if linear or is_convolution(eqn):
        (out,) = _jaxpr.bind(eqn, operands, preferred_element_type=dtype)
        return lax.convert_element_type(out, jnp.float32)
    product, avals = product_of(eqn, backward=backward), map(jax.typeof, operands)
    call = _jaxpr.written_as(_accumulated(product, tuple(avals), dtype), eqn)
    return _jaxpr.bind(call, operands)[0]


@_jaxpr.remembered  # A function with a rule takes long to trace.
def _accumulated(product: ProductForm, avals: tuple, dtype: np.dtype) -> Equation:
    """Returns an equation that calls such a product, of operands of these types."""

    def rule(primals, tangents):
        terms = [
            product.bind((*primals[:i], tangent, *primals[i + 1 :]), dtype)
            for i, tangent in enumerate(tangents)
            if not isinstance(tangent, SymbolicZero)
        ]
        terms = [lax.convert_element_type(term, jnp.float32) for term in terms]
        out = accumulate(*primals)
        return out, functools.reduce(lax.add, terms) if terms else lax.full_like(out, 0)

    @jax.custom_jvp
    def accumulate(*args):
        return product.summed(args)

    accumulate.defjvp(rule, symbolic_zeros=True)
    (call,) = _jaxpr.trace(accumulate, avals).eqns
    return call


def rounded(eqn: Equation, operands: list[Any], dtype: np.dtype, backward: bool) -> Any:
    """Returns a product in 16 bits that is not taken in them.

    A score beyond the range of float16 has its softmax in float32, where it is finite.
    In the backward pass such a number says that the step is to be skipped.
    """
    (out,) = _jaxpr.bind(eqn, operands, preferred_element_type=dtype)
    if dtype == jnp.bfloat16 or backward:
        return out
    limit = np.asarray(jnp.finfo(dtype).max, dtype)
    with jax.named_scope(SATURATED):
        return lax.clamp(-limit, out, limit)
