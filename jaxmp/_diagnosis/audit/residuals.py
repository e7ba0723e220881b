"""What forward passes store for backward passes, in bytes by dtype.

A residual is a value that a forward pass computes and a backward pass reads. Arguments
are none: they are there anyway.
"""

from collections import Counter, defaultdict
from typing import Any

from ..._base.dtypes import is_narrow, is_wide
from ..._jaxprs import jaxpr as _jaxpr


def residual_bytes(jaxpr: Any) -> dict[str, int] | None:
    """Returns the bytes that forward passes in ``jaxpr`` store for backward passes.

    By dtype; None if there is no backward pass in it.
    """
    found, sizes = False, Counter[str]()
    computed: dict[Any, Any] = {}  # with what a compiler would store of it
    readers = defaultdict[Any, set](set)  # in which dtypes backward passes read it
    for eqn in _jaxpr.open_jaxpr(jaxpr).eqns:
        if _jaxpr.is_transposed(eqn):
            found = True
            dtype = eqn.params["new_dtype"] if _jaxpr.is_cast(eqn) else None
            for var in _jaxpr.variables(eqn.invars):
                readers[var].add(dtype)
            continue
        computed.update((var, var) for var in eqn.outvars)
        if _jaxpr.is_cast(eqn):
            old, new = eqn.invars[0], eqn.outvars[0]
            if is_narrow(old.aval) and is_wide(new.aval):
                # A float32 copy of a 16-bit value costs nothing to make again.
                is_made = not isinstance(old, _jaxpr.Literal)
                computed[new] = computed.get(old) if is_made else None
        for sub in _jaxpr.on_accelerator(eqn, [*_jaxpr.sub_jaxprs(eqn)]):
            inner = residual_bytes(sub)
            found = found or inner is not None
            sizes.update(inner or {})
    for var in dict.fromkeys(computed.get(x) for x in readers):
        if var is not None:
            dtype = _stored_as(var, readers.get(var, set()))
            # `int`, as shapes may hold NumPy's.
            sizes[str(dtype)] += int(var.aval.size) * getattr(dtype, "itemsize", 0)
    return dict(sizes.most_common()) if found else None


def _stored_as(var: Any, dtypes: set[Any]) -> Any:
    """Returns the dtype of a value, or the only narrow one that is read of it.

    The compiler sees that the forward pass has narrowed it already.
    """
    read = next(iter(dtypes)) if len(dtypes) == 1 else None
    if read is not None and is_wide(var.aval) and read.itemsize <= 2:
        return read
    return var.aval.dtype
