"""Whether a program is traced to be explained: autocast then tells what it decides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

# JAX keeps what it has traced by its contexts, so that a program which is explained
# shares nothing with one that runs, nor with one that was explained before.
_LISTENER = jax.make_user_context(None)


@contextlib.contextmanager
def explaining(listener: Callable) -> Iterator[None]:
    """Has autocast functions that are called in here tell what they decide.

    Args:
        listener: Is told it, see :class:`jaxmp._autocast.replay.Caster`.
    """
    with _LISTENER(listener):
        yield


def listener() -> Callable[..., Any] | None:
    """Returns what is to be told, None if nobody asks."""
    return _LISTENER.value
