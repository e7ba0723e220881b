"""What the core asks of packages after it, imported by the call that needs it.

Nothing else imports from above. The core is then loaded without them: reading jaxprs
takes ``jax.extend``, and with it Pallas, which take longer than all of the core.
"""

from __future__ import annotations

from typing import Any


def traces() -> Any:
    """Returns the module that knows in which trace of JAX a call is."""
    from .._jaxprs import jaxpr

    return jaxpr


def module_scopes() -> Any:
    """Returns the context in which calls of modules have named scopes."""
    from .._jaxprs.modules import module_scopes

    return module_scopes


def handed_back() -> Any:
    """Returns the function that tells which arrays another one returns unchanged."""
    from .._jaxprs.state import handed_back

    return handed_back


def devices() -> Any:
    """Returns the module that takes gradients over several devices."""
    from .._devices import over_devices

    return over_devices


def function_checks() -> Any:
    """Returns the module that checks the program of a user's function."""
    from .._diagnosis import function_checks

    return function_checks
