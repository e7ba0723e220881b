"""What a training run logs of its optimizer state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .._base.checks import check_positive, plain_array, short
from .._base.tree import called_in
from .loss_scale_state import get_loss_scale_state, looks_unused


def scalars(
    opt_state: Any,
    step: Any = None,
    *,
    prefix: str = "mixed_precision/",
    max_scale: float = 2.0**24,
) -> dict[str, Any]:
    """Returns what to log after each step, as a flat dict of scalar arrays.

    Call it in every step, inside ``jit`` or outside: it does not wait for the device.
    Convert the arrays to numbers every hundred steps, with ``jax.device_get`` or in the
    logger. If a jitted step donates its state, call this inside the step and return the
    result with the loss.

    Args:
        opt_state: A state with one :class:`LossScaleState` in it, as
            :func:`jaxmp.get_loss_scale` takes it. Those of
            :func:`jaxmp.record_ranges` in it are reported too.
        step: The number of steps so far, for ``skipped_share``.
        prefix: What each name begins with: a section of TensorBoard or W&B. A ``/`` is
            put behind a letter or a digit at its end.
        max_scale: That of :func:`jaxmp.dynamic_loss_scale`, where it was given.

    Returns:
        ``loss_scale``, ``good_steps`` and ``bad_steps`` in a row, ``skipped`` steps in
        all, ``last_finite`` as 0 or 1; ``looks_unused``, which is 1 where the scale has
        grown to ``max_scale`` without a skipped step, most likely because no gradient
        is computed with it; the share of the skipped steps, ``skipped_share``, where
        ``step`` is given; of recorded ranges ``max``, and ``zero_share`` and
        ``nonfinite_share`` of the counted values. Where several are recorded, of one
        tree of parameters each, that is the worst of them.

    Raises:
        ValueError: As :func:`jaxmp.get_loss_scale`, or if ``max_scale`` is not a
            positive number.

    Examples:
        >>> tx = jaxmp.loss_scaling(optax.sgd(0.1), "float16")
        >>> logged = jaxmp.scalars(tx.init(jnp.ones(2)), prefix="")
        >>> {name: x.item() for name, x in logged.items()}
        {'loss_scale': 32768.0, 'good_steps': 0, 'bad_steps': 0, 'skipped': 0, \
'last_finite': 1.0, 'looks_unused': 0.0}
    """
    state = get_loss_scale_state(opt_state)
    check_positive("max_scale", max_scale)
    unused = looks_unused(state.loss_scale, state.skipped, float(max_scale))
    found = {
        "loss_scale": state.loss_scale,
        "good_steps": state.good_steps,
        "bad_steps": state.bad_steps,
        "skipped": state.skipped,
        "last_finite": jnp.asarray(state.last_finite, jnp.float32),
        "looks_unused": unused.astype(jnp.float32),
    }
    if isinstance(step, int) and not 0 <= step < 2**31:
        raise ValueError(
            f"`step` must be the number of steps taken, but is {short(step)}. Leave it "
            "out where you do not count them."
        )
    if step is not None:
        found["skipped_share"] = _share(state.skipped, step)

    recorded = [_of_ranges(x) for x in called_in(opt_state, {"RecordRangesState"})]
    for name in recorded[0] if recorded else ():
        found[name] = jnp.stack([x[name] for x in recorded]).max()
    prefix = str(prefix)
    prefix += "/" * prefix[-1:].isalnum()
    return {f"{prefix}{name}": x for name, x in found.items()}


@jax.jit  # or `jax.transfer_guard` would forbid the number in it
def _share(count: jax.Array, total: jax.Array) -> jax.Array:
    return count / jnp.maximum(total, 1)


def _of_ranges(state: Any) -> dict[str, jax.Array]:
    zeros, nonfinite = plain_array(state.zeros), plain_array(state.nonfinite)
    total = plain_array(state.exponents).sum() + zeros + nonfinite
    return {
        "max": plain_array(state.max),
        "zero_share": _share(zeros, total),
        "nonfinite_share": _share(nonfinite, total),
    }
