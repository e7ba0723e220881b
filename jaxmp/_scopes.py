"""Named scopes: what jaxmp writes into a program and reads there again."""

from collections.abc import Iterator, Mapping
from typing import Any

from . import _jaxpr

# Equations in these stay as they were written: what the user keeps in float32, and what
# an inner autocast has decided already.
FLOAT32 = "jaxmp.float32"
AUTOCAST = "jaxmp.autocast"
# These say why an operation stayed as it was, for the audit to read. What the equation
# itself and the default lists say has none.
KEPT_BY_PATHS = "jaxmp.kept.float32_paths"
KEPT_BY_OPS = "jaxmp.kept.ops"
KEPT_BY_REFERENCE = "jaxmp.kept.reference"


def is_decided(scope: tuple[str, ...]) -> bool:
    """Whether the user or an inner autocast has decided what is in ``scope``."""
    return FLOAT32 in scope or AUTOCAST in scope


def is_under(path: tuple[str, ...], scope: tuple[str, ...]) -> bool:
    """Whether ``scope`` lies in ``path``, which may leave out the outermost name.

    The outermost name of a Linen model is its class; differentiation repeats it.
    """
    starts = (i for i in range(len(scope)) if i == 0 or scope[i - 1] == scope[0])
    return any(scope[i : i + len(path)] == path for i in starts)


def module_of(scope: tuple[str, ...]) -> str:
    """Returns the module path in ``scope``.

    Our own marks and the subscripts of ``einsum`` are scopes, but no modules.
    """
    names = (name for name in scope if not name.startswith("jaxmp."))
    return "/".join(name for name in names if "->" not in name)


def check_paths(paths: Mapping[str, tuple[str, ...]], jaxpr: Any) -> None:
    """Refuses ``float32_paths`` that name nothing in ``jaxpr``."""
    if not paths:
        return
    scopes = set(_scopes(jaxpr))
    for path, names in paths.items():
        if not any(is_under(names, scope) for scope in scopes):
            seen = sorted({"/".join(scope[:3]) for scope in scopes if scope})
            raise ValueError(
                f"`float32_paths` has `{path}`, but no named scope of the function "
                f"matches it. Its scopes are: {', '.join(seen[:20]) or 'none'}. "
                "Linen names its modules; elsewhere use `jaxmp.float32_region`, "
                "or `jax.named_scope` and that name."
            )


def _scopes(jaxpr: Any, scope: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the named scopes of every equation."""
    for eqn in _jaxpr.open_jaxpr(jaxpr).eqns:
        here = scope + _jaxpr.scope_names(eqn)
        yield here
        for body in _jaxpr.sub_jaxprs(eqn):
            yield from _scopes(body, here)
