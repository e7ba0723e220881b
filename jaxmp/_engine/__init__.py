"""A new inside of autocast, which is built beside the one that is in use.

It decides the dtype of every value by the ten rules of :mod:`jaxmp._engine.rules`.
`jaxmp.autocast` does not use it yet; `pytest --engine` runs all tests against it.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from .. import _autocast
from .._policy import PolicyLike
from .replay import Caster


def autocast(fun: Callable, policy: PolicyLike | None = None, **options: Any) -> Any:
    """Runs ``fun`` as :func:`jaxmp.autocast` does, by the rules of this engine.

    Args:
        fun: Function that JAX can trace.
        policy: A policy, its string, or a dtype; None is bfloat16.
        **options: Those of :func:`jaxmp.autocast`.

    Returns:
        A function with the signature of ``fun``.
    """
    with in_use():
        return _autocast.autocast(fun, policy, **options)


@contextlib.contextmanager
def in_use() -> Iterator[None]:
    """Lets functions that are made inside run by this engine. For tests, in one thread.

    It ends when the engine is the only one.
    """
    before: Any = _autocast.Caster
    _autocast.Caster = Caster  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        _autocast.Caster = before
