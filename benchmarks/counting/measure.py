"""What tests and benchmarks look at in programs, and how they run what is only read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
from jaxmp._jaxprs import jaxpr as _jaxpr
from jaxmp._ops import products as _products

# For programs whose speed does not matter: they are read, or run once.
IN_A_HURRY: dict[str, Any] = {"xla_backend_optimization_level": 0}
# Rounds where the program says, and nowhere else.
AS_WRITTEN = IN_A_HURRY | {"xla_allow_excess_precision": False}


def equations(jaxpr):
    """Yields every equation, those of inner jaxprs too; what a GPU would run."""
    for eqn in _jaxpr.open_jaxpr(jaxpr).eqns:
        yield eqn
        for body in _jaxpr.on_platform(eqn, [*_jaxpr.sub_jaxprs(eqn)]):
            yield from equations(body)


def traced(fun, *args):
    """Returns the equations of ``fun``."""
    return list(equations(jax.make_jaxpr(fun)(*args)))


def dtypes(eqn):
    """Returns the dtypes of the floating inputs of an equation."""
    found = (var.aval.dtype for var in eqn.invars)
    return [d for d in found if jnp.issubdtype(d, jnp.floating)]


def product_dtypes(fun, *args):
    """Returns the operand dtypes of every matrix product and convolution."""
    return product_dtypes_of(jax.make_jaxpr(fun)(*args))


def product_dtypes_of(jaxpr):
    """Returns the same of a jaxpr, whose outer products are left out.

    Unlike :func:`jaxmp._ops.products.is_matrix_product` it counts products of vectors
    too, so that tests see in which dtype autocast leaves them.
    """
    return [
        {d.name for d in dtypes(eqn)}
        for eqn in equations(jaxpr)
        if eqn.primitive.name in _products.PRODUCTS
        and eqn.params.get("dimension_numbers") != (((), ()), ((), ()))
    ]


def denied_of(dtype, jaxpr):
    """Returns the denied operations of a jaxpr that read ``dtype``."""
    denied = jaxmp.DEFAULT_OPS.deny - {"convert_element_type"}
    return [
        eqn.primitive.name
        for eqn in equations(jaxpr)
        if eqn.primitive.name in denied and np.dtype(dtype) in dtypes(eqn)
    ]


def relative_error(tree, reference):
    """Returns the distance of two pytrees over the norm of the second."""

    def flat(tree):
        leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(tree)]
        return np.concatenate(leaves).astype(np.float64)

    distance = np.linalg.norm(flat(tree) - flat(reference))
    return distance / np.linalg.norm(flat(reference))


def peak(compiled):
    """Returns the bytes that a compiled program needs, by its own account."""
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def run(fun, *args):
    """Returns ``fun(*args)`` and its jaxpr, compiled in a hurry."""
    trace = jax.jit(fun).trace(*args)
    compiled = trace.lower().compile(compiler_options=IN_A_HURRY)
    return compiled(*args), trace.jaxpr
