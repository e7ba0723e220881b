"""Whether a function multiplies in 16 bits at all, and which line keeps it from it."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.core

from .._base.checks import warn
from .._base.policy import Policy
from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.around import CastsItself, inside
from .._jaxprs.flatten import flatten
from .._jaxprs.places import Place, caller
from .audit.leaks import Walk


@dataclasses.dataclass(frozen=True)
class _Held:
    """A leaf that has a value, which the function may ask for."""

    value: Any


def warn_if_promoted(
    policy: Policy, fun: Callable[..., Any], args: Any, kwargs: Any
) -> None:
    """Warns where not one product of ``fun`` runs in 16 bits under a policy.

    The function is traced for it, and does not run. Tracing takes time, and ends where
    ``with_policy`` or ``autocast`` is met, which see to their inputs.

    Args:
        policy: What the parameters among the arguments have been cast by.
        fun: Function that JAX can trace.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    @functools.wraps(fun)
    def of_held(*args, **kwargs):
        args, kwargs = jax.tree.map(
            lambda x: x.value if isinstance(x, _Held) else x, (args, kwargs)
        )
        return fun(*args, **kwargs)

    args, kwargs = jax.tree.map(
        lambda x: x if isinstance(x, jax.core.Tracer) else _Held(x), (args, kwargs)
    )
    flat = flatten(of_held, args, kwargs)
    try:
        with inside(looking=True, unscaled=False):
            jaxpr = jax.make_jaxpr(flat.fun)(*flat.leaves)
    except CastsItself:
        return
    walk = Walk()
    inputs = [*map(walk.argument, flat.names, _jaxpr.in_avals(jaxpr))]
    walk.run(jaxpr, inputs, Place(user=caller()))
    report = walk.report(None, ())
    if not report.flops or report.fraction_16bit > 0:
        return
    why = ""
    if report.leaks:
        leak = report.leaks[0]
        why = f" {os.path.basename(leak.where)}: {leak}."
    warn(
        "No matrix product runs in 16 bits. `policy=` casts the differentiated "
        "arguments alone, and what is float32 beside them makes float32 of every "
        f"product.{why} To run all of it in {policy.compute_dtype} leave `policy=` out "
        "and put autocast around, `autocast(grad_fn, policy)`; or cast the inputs in "
        "the loss too, `jaxmp.with_policy(model.apply, policy)`."
    )
