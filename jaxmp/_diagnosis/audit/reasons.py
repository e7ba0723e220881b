"""For the audit: why autocast left an operation in float32, or a product in 16 bits."""

from collections.abc import Iterable

from ..._autocast import rules
from ..._autocast.plan import Step
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs.places import Place
from ..._ops.lists import DEFAULT_OPS
from ..._ops.products import has_default_precision
from ..._ops.table import is_iota, is_view


def computes(eqn: _jaxpr.Equation) -> bool:
    """Whether ``eqn`` does more than moving, casting or counting."""
    return not (is_view(eqn) or _jaxpr.is_cast(eqn) or is_iota(eqn))


def why_kept(
    eqn: _jaxpr.Equation, place: Place, step: Step | None, *, is_product: bool
) -> str:
    """Returns why autocast did not take ``eqn`` in 16 bits.

    Args:
        eqn: The equation.
        place: Where it is.
        step: What was planned for it, None where JAX has written it behind autocast.
        is_product: Whether it is a matmul.
    """
    if step is not None and isinstance(step.by, str):
        return f"safeguard: {step.by}"
    if step is not None and step.kind == "keep" and step.why:
        return step.why
    if is_product:
        return _why_product(eqn, place)
    if dtypes_of(eqn)[-1] != "float32":
        return _written_in(dtypes_of(eqn)[-1:])
    if step is not None and step.kind in ("exact", "smooth"):
        if step.by == rules.LOOPS:
            return "loop carry, or a factor of one (4)"
        if step.is_read_exactly:
            return "read exactly (3)"
    name = eqn.primitive.name
    if name in DEFAULT_OPS.infer and (step is None or step.kind != "keep"):
        return "float32 input, or feeds no matmul (3)"
    is_known = name in DEFAULT_OPS.allow | DEFAULT_OPS.deny | DEFAULT_OPS.infer
    return "a float32 operation (3)" if is_known else "in none of the lists (3)"


def why_16bit(eqn: _jaxpr.Equation, step: Step | None) -> str:
    """Returns why autocast did not take the operands of a product in float8."""
    reason = step.why if step else ""
    return reason or _written_in({str(atom.aval.dtype) for atom in eqn.invars[:2]})


def is_float64_leak(eqn: _jaxpr.Equation, place: Place, step: Step | None) -> bool:
    """Whether a product inside autocast is float64, and no user has asked for it there.

    Autocast leaves that as it is.
    """
    if not any(str(x.aval.dtype) == "float64" for x in eqn.invars[:2]):
        return False
    reason = why_kept(eqn, place, step, is_product=True)
    return reason == _written_in(dtypes_of(eqn))


def dtypes_of(eqn: _jaxpr.Equation) -> list[str]:
    """Returns the floating and complex dtypes that ``eqn`` reads and returns.

    The widest is the last.
    """
    dtypes = {x.aval.dtype for x in (*eqn.invars, *eqn.outvars) if _jaxpr.is_inexact(x)}
    return [str(x) for x in sorted(dtypes, key=lambda x: (x.itemsize, str(x)))]


def _written_in(dtypes: Iterable[str]) -> str:
    return f"written in {' and '.join(sorted(dtypes))}"


def _why_product(eqn: _jaxpr.Equation, place: Place) -> str:
    if not has_default_precision(eqn):
        return "its `precision`"
    if place.opaque:
        return f"inside `{place.opaque}`"
    if (dtypes := dtypes_of(eqn)) != ["float32"]:
        return _written_in(dtypes)
    if _jaxpr.is_differentiated(eqn):
        return "derivative of an operation that stayed float32"
    return "where autocast does not see it"
