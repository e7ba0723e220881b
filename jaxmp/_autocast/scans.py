"""Scans that are given rounded weights, and whose gradients add up in float32."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax

from .._jaxprs import jaxpr as _jaxpr
from .._jaxprs.custom_rules import places_of_moving, replaced
from .._jaxprs.jaxpr import FLOAT32, Equation
from .._ops.precision import with_default_precision


def scanned(
    eqn: Equation, arrays: Sequence[Any], wide: Mapping[int, Any], body: Any
) -> list[Any]:
    """Applies a scan whose weights were rounded before its first trip.

    JAX adds up what the trips send back to a constant in the dtype of that constant,
    and a sum in bfloat16 stalls after some hundreds of them. So where the scan is
    differentiated, it is given the float32 weights, and rounds them in each trip.

    Args:
        eqn: The scan.
        arrays: What it is given.
        wide: By place, the float32 array of what was rounded.
        body: Its body in mixed precision.
    """
    if not wide:
        return _jaxpr.bind_bodies(eqn, arrays, [body])
    places = sorted(wide)  # and no tracer: the rule lives as long as its jaxpr

    def trip(*args):
        in_16_bits = [
            lax.convert_element_type(args[i], _jaxpr.in_avals(body)[i].dtype)
            for i in places
        ]
        return _jaxpr.jaxpr_as_fun(body)(*replaced(args, places, in_16_bits))

    def rounding_in_each_trip(*args):
        avals = [
            aval.update(dtype=FLOAT32) if i in places else aval
            for i, aval in enumerate(_jaxpr.in_avals(body))
        ]
        return _jaxpr.bind_bodies(eqn, args, [_jaxpr.trace(trip, avals)])

    @jax.custom_jvp
    def scan(arrays, wide):
        return _jaxpr.bind_bodies(eqn, arrays, [body])

    def rule(primals, tangents):
        args, moved = (replaced(x, places, y) for x, y in (primals, tangents))
        moving = places_of_moving(eqn, moved)

        def differentiated(*xs):
            outs, tangents = jax.jvp(
                lambda *xs: rounding_in_each_trip(*replaced(args, moving, xs)),
                xs[: len(moving)],
                xs[len(moving) :],
            )
            return [*outs, *tangents]

        pairs = [*(args[i] for i in moving), *(moved[i] for i in moving)]
        outs, count = with_default_precision(differentiated, pairs), len(eqn.outvars)
        return outs[:count], outs[count:]

    scan.defjvp(rule, symbolic_zeros=True)
    return scan(list(arrays), [wide[i] for i in places])
