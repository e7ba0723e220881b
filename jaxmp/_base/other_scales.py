"""The loss scales of other libraries, for those who pass theirs first."""

from __future__ import annotations

from typing import Any

import jax
import jax.core
import numpy as np

# Which of ours each is, with its options, and what theirs are called.
_SCALES = {
    "jmp.NoOpLossScale": ("static_loss_scale", {}),
    "jmp.StaticLossScale": ("static_loss_scale", {"scale": "loss_scale"}),
    "jmp.DynamicLossScale": (
        "dynamic_loss_scale",
        {
            "init_scale": "loss_scale",
            "growth_interval": "period",
            "growth_factor": "factor",
            "min_scale": "min_loss_scale",
        },
    ),
    "flax.DynamicScale": (
        "dynamic_loss_scale",
        {
            "init_scale": "scale",
            "growth_interval": "growth_interval",
            "growth_factor": "growth_factor",
            "backoff_factor": "backoff_factor",
            "min_scale": "minimum_scale",
        },
    ),
}


def refuse_other_scale(x: Any) -> None:
    """Raises if ``x``, whatever it was passed as, is a loss scale of jmp or Flax.

    None is converted: its own loop unscales, too. Gradients that come back unscaled
    would be divided twice, and nobody would see it.
    """
    name = f"{type(x).__module__.partition('.')[0]}.{type(x).__name__}"
    if name not in _SCALES:
        return
    ours, names = _SCALES[name]
    values = {option: getattr(x, theirs) for option, theirs in names.items()}
    known = {
        option: np.asarray(value).item()
        for option, value in values.items()
        if isinstance(value, (int, float, np.ndarray, np.generic, jax.Array))
        and not isinstance(value, jax.core.Tracer)
        and np.size(value) == 1
    }
    if "growth_factor" in known:
        known.setdefault("backoff_factor", 1 / known["growth_factor"])
    if known.get("init_scale", 0) > 2.0**24:  # our maximum; theirs have none
        known["max_scale"] = known["init_scale"]
    options = "".join(f", {option}={value}" for option, value in known.items())
    raise TypeError(
        f"jaxmp does not take a `{name}`, because the state of the optimizer has the "
        f"loss scale: type `tx = jaxmp.{ours}(optimizer{options})`, and `loss_scale="
        "opt_state` for the gradients, which come back unscaled."
    )
