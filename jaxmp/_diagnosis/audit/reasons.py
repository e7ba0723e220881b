"""For the audit: why autocast left an operation in float32, or a product in 16 bits."""

from collections.abc import Iterable

from ..._autocast import rules
from ..._jaxprs import jaxpr as _jaxpr
from ..._jaxprs import scopes as _scopes
from ..._jaxprs.places import Place
from ..._ops.lists import DEFAULT_OPS
from ..._ops.products import has_default_precision, is_resize
from ..._ops.table import is_iota, is_power, is_view, multiplies_itself

# What the user, or autocast's own marks, say of all that is in a scope.
_SCOPES = {
    _scopes.KEPT_FOR_MOMENTS: f"safeguard: {rules.MOMENTS}",
    _scopes.KEPT_TO_END: f"safeguard: {rules.COMPARING}",
    _scopes.KEPT_TO_COMPARE: f"safeguard: {rules.COMPARING}",
    _scopes.KEPT_FOR_DIGITS: "read exactly (3)",
    _scopes.KEPT_IN_LOOP: "a loop or a long product takes it (4)",
    _scopes.FLOAT32: "float32 region",
    _scopes.KEPT_BY_PATHS: "`float32_paths`",
    _scopes.KEPT_BY_OPS: "the lists in `ops`",
    _scopes.KEPT_BY_REFERENCE: "in a call that takes references",
}
# What autocast says of a product that is not in float8.
_SCOPES_16BIT = {
    _scopes.KEPT_BY_BFLOAT16_PATHS: "`bfloat16_paths`",
    _scopes.KEPT_BATCHED: "batched",
    _scopes.KEPT_SMALL: "a size below `min_size`",
    _scopes.KEPT_ODD: "a size that is no multiple of 16",
    _scopes.KEPT_OTHER_KIND: "no matmul of two floating matrices",
    _scopes.KEPT_IN_RULE: "in the rule of a custom derivative",
}


def computes(eqn: _jaxpr.Equation) -> bool:
    """Whether ``eqn`` does more than moving, casting or counting."""
    return not (is_view(eqn) or _jaxpr.is_cast(eqn) or is_iota(eqn))


def why_kept(eqn: _jaxpr.Equation, place: Place, *, is_product: bool) -> str:
    """Returns why autocast did not take ``eqn`` in 16 bits."""
    name = eqn.primitive.name
    if told := why_by_scopes(place.scopes):
        return told
    if is_product:
        return _why_product(eqn, place)
    if dtypes_of(eqn)[-1] != "float32":
        return _written_in(dtypes_of(eqn)[-1:])
    if is_power(eqn) or multiplies_itself(eqn):
        return "a square or a power"
    if name in DEFAULT_OPS.deny:
        return "denied by list"
    if name in DEFAULT_OPS.infer:
        return "takes float32, or feeds no matmul (3)"
    if name in DEFAULT_OPS.allow:
        return "no matmul"
    return "in no list"


def why_by_scopes(scopes: _scopes.Scopes) -> str:
    """Returns what the user or our marks say of some scopes, empty if nothing."""
    return next((_SCOPES[scope] for scope in scopes if scope in _SCOPES), "")


def why_16bit(eqn: _jaxpr.Equation, place: Place) -> str:
    """Returns why autocast did not take the operands of a product in float8."""
    for scope in place.scopes:
        if scope in _SCOPES_16BIT:
            return _SCOPES_16BIT[scope]
    return _written_in({str(atom.aval.dtype) for atom in eqn.invars[:2]})


def is_float64_leak(eqn: _jaxpr.Equation, place: Place) -> bool:
    """Whether a product inside autocast is float64, and no user has asked for it there.

    Autocast leaves that as it is.
    """
    if not any(str(x.aval.dtype) == "float64" for x in eqn.invars[:2]):
        return False
    reason = why_kept(eqn, place, is_product=True)
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
    if is_resize(eqn):
        return "a resize whose result must be float32"
    if not has_default_precision(eqn):
        return "its `precision`"
    if place.opaque:
        return f"inside `{place.opaque}`"
    if (dtypes := dtypes_of(eqn)) != ["float32"]:
        return _written_in(dtypes)
    if _jaxpr.is_differentiated(eqn):
        return "derivative of an operation that stayed float32"
    return "where autocast does not see it"
