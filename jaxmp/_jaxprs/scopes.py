"""Named scopes: float32 regions, ``float32_paths``, and the marks of autocast."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from .._base.checks import clipped
from . import jaxpr as _jaxpr
from .modules import without_repeats

# Equations in these stay as they were written: what the user keeps in float32, and what
# an inner autocast has decided already.
FLOAT32 = "jaxmp.float32"
# Inside a float32 region, and before its name: the precision of its products.
PRECISION = "jaxmp.precision."
AUTOCAST = "jaxmp.autocast"
# Around what stays float32 by `float32_paths`, also where residuals are stored.
FLOAT32_PATHS = "jaxmp.float32_paths"
# Before the name of a guard: around what that keeps as it was written.
SAFEGUARD = "jaxmp.safeguard."
# Before the number of a step of a plan: around what has come of it, where steps are
# recorded, see `jaxmp._autocast.emit.recording`.
STEP = "jaxmp.step."
# Around an autocast function with products in float8, around each of those, and around
# that part of it whose numbers are scaled.
FLOAT8 = "jaxmp.float8"
FLOAT8_PRODUCT = "jaxmp.float8.product"
FLOAT8_SCALED = "jaxmp.float8.scaled"
# Around the rounding of what a scan stacks for the backward pass.
STACKED = "jaxmp.stacked"
# Around what stores a residual in eight bits.
EIGHT_BITS = "jaxmp.eight_bits"
# Around the clip of what 16 bits would make an Inf of, which float32 has no need of.
SATURATED = "jaxmp.saturated"
# Around an attention that is written out, and before the reason.
ATTENTION = "jaxmp.attention."
# Around what is in a loop, a call or a remat that differentiation has written, and in
# one of a backward pass: only the equation that holds it tells. The latter is there for
# each backward pass of which another one is differentiated.
DIFFERENTIATED = "jaxmp.differentiated"
BACKWARD = "jaxmp.backward"
_MARKS = frozenset({DIFFERENTIATED, BACKWARD})


# Names of the scopes around something, the outermost first.
Scopes = tuple[str, ...]


class Asked(Protocol):
    """What a pass asks: what is a product in 16 bits, and what nobody reads."""

    def is_product(self, eqn: _jaxpr.Equation, scopes: Scopes = ()) -> bool: ...
    def is_unread(self, eqn: _jaxpr.Equation) -> bool: ...


def is_decided(scopes: Scopes) -> bool:
    """Whether the user or an inner autocast has decided what is in ``scopes``."""
    return FLOAT32 in scopes or AUTOCAST in scopes


def scopes_inside(eqn: _jaxpr.Equation, scopes: Scopes) -> Scopes:
    """Returns the scopes around what ``eqn``, which is in ``scopes``, holds."""
    around = tuple(name for name in scopes if name not in _MARKS)
    if (passes := _backward_passes(eqn, scopes)) > 0:
        return (*around, DIFFERENTIATED, *[BACKWARD] * passes)
    if DIFFERENTIATED in scopes or _jaxpr.is_differentiated(eqn):
        return (*around, DIFFERENTIATED)
    return around


def in_region(eqn: _jaxpr.Equation, guard: str) -> _jaxpr.Equation:
    """Returns ``eqn`` in a float32 region, by a guard of that name."""
    return _jaxpr.in_scope(_jaxpr.in_scope(eqn, f"{SAFEGUARD}{guard}"), FLOAT32)


def named_in(scopes: Scopes, prefix: str) -> str | None:
    """Returns what the first of ``scopes`` with a prefix names, None if none does."""
    found = (x.removeprefix(prefix) for x in scopes if x.startswith(prefix))
    return next(found, None)


def is_backward(eqn: _jaxpr.Equation, scopes: Scopes) -> bool:
    """Whether ``eqn``, which is in ``scopes``, belongs to a backward pass."""
    return _backward_passes(eqn, scopes) > 0


def _backward_passes(eqn: _jaxpr.Equation, scopes: Scopes) -> int:
    """Returns in how many backward passes ``eqn`` is, one differentiating another.

    Of one that computes a forward pass again, that is no part.
    """
    names = _jaxpr.names_of(eqn)
    return scopes.count(BACKWARD) + names.transposed - names.computed_again


def marks(scopes: Scopes) -> Scopes:
    """Returns what is known of differentiation in ``scopes``."""
    return tuple(name for name in scopes if name in _MARKS)


def is_under(path: Scopes, scopes: Scopes) -> bool:
    """Whether ``scopes`` lie in ``path``, which may leave out the outermost name.

    The outermost name of a Linen model is its class; differentiation repeats it.
    """
    scopes = tuple(name for name in scopes if not _is_mark(name))
    starts = (i for i in range(len(scopes)) if i == 0 or scopes[i - 1] == scopes[0])
    return any(scopes[i : i + len(path)] == path for i in starts)


def module_of(scopes: Scopes) -> str:
    """Returns the module path in ``scopes``.

    Our own marks and the subscripts of ``einsum`` are scopes, but no modules; and
    differentiation repeats what is around a remat or a cond.
    """
    names = (name for name in without_repeats(scopes) if not _is_mark(name))
    return "/".join(name for name in names if "->" not in name)


def _is_mark(name: str) -> bool:
    return name.startswith("jaxmp.")


def check_paths(option: str, paths: Mapping[str, Scopes], jaxpr: Any) -> None:
    """Refuses the paths of an option that name nothing in ``jaxpr``."""
    if not paths:
        return
    seen = set(all_scopes(jaxpr))
    for path, names in paths.items():
        if not any(is_under(names, scopes) for scopes in seen):
            named = (module_of(scopes).split("/") for scopes in seen)
            known = sorted({"/".join(names[:3]) for names in named} - {""})
            has = "The function has no named scopes. "
            if known:
                has = f"Its scopes are: {clipped(', '.join(known), 600)}. "
            raise ValueError(
                f"`{option}` has `{clipped(path)}`, but no named scope of the function "
                f"matches it. {has}Modules have a name, such as `blocks/0`; elsewhere "
                'open a scope, `with jax.named_scope("head"):`, or for float32 use '
                "`jaxmp.float32_region`."
            )


def all_scopes(jaxpr: Any, scopes: Scopes = ()) -> Iterator[Scopes]:
    for eqn in _jaxpr.open_jaxpr(jaxpr).eqns:
        here = scopes + _jaxpr.scope_names(eqn)
        yield here
        for body in _jaxpr.sub_jaxprs(eqn):
            yield from all_scopes(body, here)
