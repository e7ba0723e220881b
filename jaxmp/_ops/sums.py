"""Float32 sums of 16-bit products, and 16-bit numbers that XLA does not widen again."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jaxprs.jaxpr import FLOAT32, Equation, Primitive, bind, interpret, trace
from .products import vector_of


class Product(NamedTuple):
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
        """Applies it to 16-bit ``args``, see :func:`summed_by_platform`."""
        if self.vector is None and all(x.dtype != jnp.bfloat16 for x in args):
            return self.bind(args, FLOAT32)
        jaxpr = _summed_by_platform(self, tuple(map(jax.typeof, args)))
        return interpret(jaxpr, args, bind)[0]


def product_of(eqn: Equation, *, backward: bool = False) -> Product:
    """Returns what ``eqn`` is without its operands.

    Args:
        eqn: The product.
        backward: Whether it belongs to a backward pass.
    """
    params = tuple(sorted(eqn.params.items()))
    return Product(eqn.primitive, params, vector_of(eqn), backward)


def summed_by_platform(eqn: Equation, args: Sequence[Any]) -> jax.Array:
    """Applies a product to 16-bit operands and returns its float32 sums.

    XLA:CPU has no such product of bfloat16 in every layout. The same sums of widened
    operands give the same numbers there. cuBLAS has none by a vector, for which XLA
    would write the matrix once more in float32. Multiplied and summed up, it is read
    once. The choice is made where the program is lowered.

    Args:
        eqn: The product.
        args: Its operands.
    """
    return product_of(eqn).summed(args)


@functools.lru_cache(maxsize=4096)  # Tracing the branches takes long.
def _summed_by_platform(product: Product, avals: tuple) -> Any:
    vector = product.vector

    def summed(*args):
        return product.bind(args, FLOAT32)

    def widened(*args):
        return summed(*(_widened(x) if x.dtype == jnp.bfloat16 else x for x in args))

    @jax.custom_batching.custom_vmap
    def multiplied(*args):
        assert vector is not None
        matrix, numbers = args[1 - vector], dict(product.params)["dimension_numbers"]
        if product.backward:  # or XLA would store it in float32 too, for this reader
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

    Args:
        array: A 16-bit array.
    """
    # The array itself, which XLA cannot know. A choice, because it may be transposed:
    # a test of the array could not be.
    itself = lax.optimization_barrier(np.True_)
    return lax.select(itself, array, lax.neg(array))
