"""What tests of attention look for in programs."""

from benchmarks.counting.measure import traced


def attentions(fun, *args):
    """Returns the dtypes of operands and of results of each attention in a program."""
    return [
        tuple([str(x.aval.dtype) for x in atoms] for atoms in (eqn.invars, eqn.outvars))
        for eqn in traced(fun, *args)
        if eqn.primitive.name == "dot_product_attention"
    ]
