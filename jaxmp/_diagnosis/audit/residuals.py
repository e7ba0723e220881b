"""What forward passes hand to backward passes, in bytes by dtype.

A residual is a value that a forward pass computes and a backward pass reads. Arguments
are none: they are there anyway.
"""

from collections import Counter
from typing import Any

from ..._base.dtypes import is_narrow, is_wide
from ..._jaxprs import jaxpr as _jaxpr


def residual_bytes(jaxpr: Any) -> dict[str, int] | None:
    """Returns the bytes that forward passes in ``jaxpr`` hand to backward passes.

    By dtype; None if there is no backward pass in it.
    """
    body, found, sizes = _jaxpr.open_jaxpr(jaxpr), False, Counter()
    computed, narrowed = _computed(body), _only_narrowed(body)
    residuals = {}
    for eqn in body.eqns:
        if _jaxpr.is_transposed(eqn):
            found = True
            for atom in _jaxpr.variables(eqn.invars):
                if atom in computed:
                    var = computed[atom]
                    residuals[var] = narrowed.get(var, var.aval.dtype)
            continue
        for sub in _jaxpr.on_accelerator(eqn, [*_jaxpr.sub_jaxprs(eqn)]):
            inner = residual_bytes(sub)
            found = found or inner is not None
            sizes.update(inner or {})
    sizes.update(_sizes(residuals))
    return dict(sizes.most_common()) if found else None


def _computed(body: Any) -> dict[Any, Any]:
    """Maps what a forward pass computes to what a compiler would store of it.

    A float32 copy of a 16-bit value costs nothing to make again.
    """
    computed = {}
    for eqn in body.eqns:
        if not _jaxpr.is_transposed(eqn):
            computed.update((var, var) for var in eqn.outvars)
            if _jaxpr.is_cast(eqn):
                old, new = eqn.invars[0], eqn.outvars[0]
                if is_narrow(old.aval) and is_wide(new.aval):
                    if old in computed:
                        computed[new] = computed[old]
                    else:  # an argument
                        del computed[new]
    return computed


def _only_narrowed(body: Any) -> dict[Any, Any]:
    """Maps float32 values to the narrow dtype that is all the backward pass reads.

    The compiler sees that the forward pass has narrowed them already.
    """
    readers: dict[Any, set] = {}
    for eqn in body.eqns:
        if _jaxpr.is_transposed(eqn):
            dtype = eqn.outvars[0].aval.dtype if _jaxpr.is_cast(eqn) else None
            for atom in _jaxpr.variables(eqn.invars):
                readers.setdefault(atom, set()).add(dtype)
    return {
        var: dtype
        for var, dtypes in readers.items()
        for dtype in dtypes
        if len(dtypes) == 1 and dtype is not None and is_wide(var.aval)
        if dtype.itemsize <= 2
    }


def _sizes(dtypes: dict[Any, Any]) -> Counter[str]:
    """Adds up the bytes of variables, each in the dtype that is given for it."""
    sizes: Counter[str] = Counter()
    for var, dtype in dtypes.items():
        # `int`, as shapes may hold NumPy's.
        sizes[str(dtype)] += int(var.aval.size) * getattr(dtype, "itemsize", 0)
    return sizes
