"""What a matrix product is, its precision and its FLOPs."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jaxprs.jaxpr import (
    FLOAT32,
    Equation,
    is_inexact,
    is_transposed,
    names_of,
    open_jaxpr,
    sub_jaxprs,
    trace,
)
from .._jaxprs.sizes import as_number, size_of

# Matrix products and convolutions: what tensor cores do. NVIDIA, Train With Mixed
# Precision, and PyTorch, Autocast Op Reference, as in `lists`.
# Attention is two matrix products, with a softmax between them, as one operation.
# A loss head is one, and a cross-entropy.
ATTENTION, LOSS_HEAD = "dot_product_attention", "linear_cross_entropy"
_FUSED = frozenset({ATTENTION, LOSS_HEAD})
PRODUCTS = _FUSED | {"dot_general", "ragged_dot_general", "conv_general_dilated"}
# Products of operands in 8 bits or fewer, with a scale for each block: the user's.
SCALED_PRODUCTS = frozenset({"scaled_dot", "scaled_matmul", "scaled_matmul_wrapper"})

# No tensor core adds up fewer products at once: those of NVIDIA take 8 16-bit numbers.
FEWEST = 8

_32BIT = {FLOAT32, np.dtype(np.complex64)}
_16BIT = {np.dtype(jnp.float16), np.dtype(jnp.bfloat16)}
_LOWEST = lax.Precision.DEFAULT, lax.Precision.DEFAULT


def is_matrix_product(eqn: Equation, *, back: bool = False) -> bool:
    """Whether ``eqn`` is a matrix product that autocast may run in 16 bits.

    One that adds up fewer than eight numbers in the forward pass is arithmetic, and so
    are its gradients: rotations, poses, angles of rotary embeddings. Tensor cores gain
    nothing there. A convolution is one, however small its kernel.

    Args:
        eqn: The equation.
        back: Whether what holds it, such as a loop, belongs to a backward pass.
    """
    if not multiplies_matrices(eqn):
        return False
    if is_convolution(eqn) or is_fused(eqn):
        return True
    names = names_of(eqn)
    if not (names.transposed or back) or names.computed_again:
        return _terms(eqn) >= FEWEST
    # JAX multiplies a gradient by the other operand, of which the forward pass has
    # summed over the axes that are left. That of experts' weights comes second.
    groups = _group_dimensions(eqn)
    other = 1 if eqn.primitive.name == "dot_general" or groups else 0
    contracted, batch = _dimension_numbers(eqn)
    taken = {*contracted[other], *batch[other], *groups}
    shape = eqn.invars[other].aval.shape
    left = math.prod(n for axis, n in enumerate(shape) if axis not in taken)
    return as_number(left) >= FEWEST


def multiplies_matrices(eqn: Equation) -> bool:
    """Whether ``eqn`` is a convolution, or a floating matrix product with sums in it.

    An outer product is elementwise work. A product of two vectors, for each entry of a
    batch, is no work for tensor cores either.
    """
    if eqn.primitive.name not in PRODUCTS:
        return False
    if not any(map(is_inexact, eqn.invars[:2])):
        return False
    if is_convolution(eqn) or is_fused(eqn):
        return True
    lhs, rhs = (atom.aval for atom in eqn.invars[:2])
    (contracted, _), (batch, _) = _dimension_numbers(eqn)
    return _terms(eqn) > 1 and max(lhs.ndim, rhs.ndim) > len(contracted) + len(batch)


def _terms(eqn: Equation) -> float:
    """Returns how many products each entry of a matrix product adds up."""
    (contracted, _), _ = _dimension_numbers(eqn)
    shape = eqn.invars[0].aval.shape
    return as_number(math.prod(shape[axis] for axis in contracted))


def is_convolution(eqn: Equation) -> bool:
    return eqn.primitive.name == "conv_general_dilated"


def is_attention(eqn: Equation) -> bool:
    """Whether ``eqn`` is an attention, its tangent or its gradients."""
    return eqn.primitive.name == ATTENTION


def is_loss_head(eqn: Equation) -> bool:
    """Whether ``eqn`` is a loss head, its tangent or its gradients."""
    return eqn.primitive.name == LOSS_HEAD


def takes_unrounded(eqn: Equation) -> bool:
    """Whether ``eqn`` is given matrices before they are rounded, too.

    A loss head is, whose gradients are those of these.
    """
    return is_loss_head(eqn) and "moving" not in eqn.params


def is_fused(eqn: Equation) -> bool:
    """Whether ``eqn`` is products and what is between them, as one operation."""
    return eqn.primitive.name in _FUSED


def has_default_precision(eqn: Equation, default: Any = None) -> bool:
    """Whether nobody has asked for a ``precision`` of a product in particular.

    Products whose lines ask for none have that of ``default``.
    """
    asked = eqn.params.get("precision")
    asked = default if asked is None else asked
    asked = asked if isinstance(asked, tuple) else (asked,)
    return all(p in (None, lax.Precision.DEFAULT) for p in asked)


def default_precision() -> Any:
    """Returns the precision that JAX gives to products without one of their own.

    None where that is the lowest, as if they asked for nothing.
    """
    if jax.config.jax_default_matmul_precision is None:  # pyright: ignore
        return None
    matrix = jax.ShapeDtypeStruct((2, 2), FLOAT32)
    (eqn,) = trace(lax.dot, [matrix, matrix]).eqns
    return None if has_default_precision(eqn) else eqn.params["precision"]


def with_precision(eqn: Equation, precision: Any = _LOWEST) -> Equation:
    """Returns ``eqn``, where it is a product that has no precision, with this one."""
    if eqn.primitive.name not in PRODUCTS or eqn.params["precision"] is not None:
        return eqn
    return eqn.replace(params={**eqn.params, "precision": precision})


def is_of_float32(eqn: Equation) -> bool:
    """Whether ``eqn`` is a product of float32 operands, or of pairs of float32.

    TF32 and bfloat16 are what a GPU and a TPU make of those without a precision, and of
    complex64 operands too.
    """
    if eqn.primitive.name not in PRODUCTS:
        return False
    return all(atom.aval.dtype in _32BIT for atom in eqn.invars[:2])


def sizes(eqn: Equation) -> tuple[Any, Any, Any] | None:
    """Returns ``m``, ``k`` and ``n`` of a matrix product ``[m, k] x [k, n]``.

    None for all else: convolutions, groups of products.
    """
    if eqn.primitive.name != "dot_general":
        return None
    lhs, rhs = (atom.aval for atom in eqn.invars[:2])
    contracted, _ = _dimension_numbers(eqn)
    terms = math.prod(lhs.shape[i] for i in contracted[0])
    rows, columns = (
        math.prod(n for i, n in enumerate(x.shape) if i not in taken)
        for x, taken in zip((lhs, rhs), contracted, strict=True)
    )
    return rows, terms, columns


def is_batch(eqn: Equation, product: Equation) -> bool:
    """Whether ``eqn`` puts together what ``product`` keeps apart, such as images."""
    if eqn.primitive.name != "concatenate" or not is_convolution(product):
        return False
    batch, channels, *_ = product.params["dimension_numbers"].lhs_spec
    apart = product.params["feature_group_count"] > 1
    return eqn.params["dimension"] in ({batch, channels} if apart else {batch})


def has_number(eqn: Equation) -> bool:
    return any(size_of(atom.aval) == 1 for atom in eqn.invars)


def is_batched(eqn: Equation) -> bool:
    return eqn.primitive.name == "dot_general" and bool(_dimension_numbers(eqn)[1][0])


def flops(eqn: Equation, *, back: bool = False) -> float:
    """Returns the FLOPs of a matrix product or convolution, 0 for all else.

    The arguments are those of :func:`is_matrix_product`.
    """
    if eqn.primitive.name in SCALED_PRODUCTS:
        numbers = eqn.params.get("dimension_numbers")
        contracted = numbers[0][0] if numbers else (-1,)
        lhs, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        return 2.0 * math.prod(out) * math.prod(lhs[axis] for axis in contracted)
    if not is_matrix_product(eqn, back=back):
        return 0.0
    if is_convolution(eqn):
        return _convolution_flops(eqn)
    lhs, rhs = (atom.aval.shape for atom in eqn.invars[:2])
    if is_attention(eqn):
        batch, queries, heads, size = lhs
        product = 2.0 * batch * heads * queries * rhs[1] * size
        # Two products; a backward pass has twice as many, and a tangent too.
        return product * (4 if "moving" in eqn.params else 2)
    if is_loss_head(eqn):  # each gradient of a matrix is one more, and each tangent
        moving, form = eqn.params.get("moving", ()), eqn.params["form"]
        matrices = 1 + sum(i < 2 for i in moving)
        return 2.0 * matrices * math.prod(lhs) * rhs[form.words]
    (_, contracted), (_, batch) = _dimension_numbers(eqn)
    taken = {*contracted, *batch, *_group_dimensions(eqn)}
    rhs_free = math.prod(n for i, n in enumerate(rhs) if i not in taken)
    return 2.0 * math.prod(lhs) * rhs_free


def vector_of(eqn: Equation) -> int | None:
    """Returns which operand of a matrix product is a vector, or a batch of vectors.

    None if neither is, or if the axes of a mesh are part of a type.
    """
    if eqn.primitive.name != "dot_general":
        return None
    atoms = *eqn.invars, *eqn.outvars
    if any(axis is not None for x in atoms for axis in x.aval.sharding.spec):
        return None
    for i in (1, 0):
        taken = {axis for axes in _dimension_numbers(eqn) for axis in axes[i]}
        shape = eqn.invars[i].aval.shape
        if all(n == 1 for axis, n in enumerate(shape) if axis not in taken):
            return i
    return None


def sums_over_iterations(eqn: Equation) -> bool:
    """Whether the sum of a product over iterations is a product too."""
    return eqn.primitive.name == "dot_general"


def over_iterations(eqn: Equation) -> dict[str, Any]:
    """Returns the parameters of the product that sums ``eqn`` over all iterations.

    Its operands are those of all iterations, along a new first axis.
    """
    contracted, batch = _dimension_numbers(eqn)
    contracted = tuple((0, *(axis + 1 for axis in axes)) for axes in contracted)
    batch = tuple(tuple(axis + 1 for axis in axes) for axes in batch)
    return {"dimension_numbers": (contracted, batch)}


def _dimension_numbers(eqn: Equation) -> Any:
    """Returns the contracted and the batch dimensions, each of both operands."""
    if eqn.primitive.name == "dot_general":
        return eqn.params["dimension_numbers"]
    return eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers


def _group_dimensions(eqn: Equation) -> Any:
    """Returns the dimensions of the second operand that the groups of rows choose."""
    if eqn.primitive.name == "dot_general":
        return ()
    return eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions


def _convolution_flops(eqn: Equation) -> float:
    """Counts what is multiplied, neither padding nor the zeros of a dilation."""
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    lhs, rhs = (atom.aval.shape for atom in eqn.invars[:2])
    out = eqn.outvars[0].aval.shape
    batch, features, *window = numbers.out_spec
    products = out[batch] * out[features] * rhs[numbers.rhs_spec[1]]
    for i, dim in enumerate(window):
        taps = np.arange(rhs[numbers.rhs_spec[2 + i]]) * params["rhs_dilation"][i]
        starts = np.arange(out[dim]) * params["window_strides"][i]
        at = starts[:, None] + taps - params["padding"][i][0]
        dilation = params["lhs_dilation"][i]
        inside = (at >= 0) & (at <= (lhs[numbers.lhs_spec[2 + i]] - 1) * dilation)
        products *= int(np.sum(inside & (at % dilation == 0)))
    return 2.0 * products


def has_float32(eqn: Equation, dtype: np.dtype) -> bool:
    """Whether ``eqn`` is computed in float32, or returns it.

    Of a float32 and a 16-bit operand, or of two kinds of 16 bits, a product is one as
    well: JAX promotes them. A product that was written in one kind of 16 bits is not.
    """
    given, made = eqn.invars, eqn.outvars
    if is_fused(eqn):  # which keeps a bias, and the sums of its rows, in float32
        given, made = given[: 3 if is_attention(eqn) else 2], made[:1]
    ins = {atom.aval.dtype for atom in given if is_inexact(atom)}
    outs = {atom.aval.dtype for atom in made if is_inexact(atom)}
    if not ins <= {FLOAT32, *_16BIT} or not outs <= {FLOAT32, dtype}:
        return False
    return len(ins) != 1 or FLOAT32 in ins


def holds_product(eqn: Equation, *, back: bool = False) -> bool:
    """Whether an equation is a matrix product, or holds one.

    The arguments are those of :func:`is_matrix_product`.
    """
    back |= is_transposed(eqn)
    return is_matrix_product(eqn, back=back) or any(
        holds_product(inner, back=back)
        for body in sub_jaxprs(eqn)
        for inner in open_jaxpr(body).eqns
    )
