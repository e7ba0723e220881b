"""Times that can be compared: taken in turns, as medians of paired ratios."""

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np


def interleaved(
    samplers: Mapping[str, Callable[[], float]],
    rounds: int,
    *,
    until: float = math.inf,
) -> dict[str, list[float]]:
    """Takes samples in turns, so that what disturbs one disturbs all.

    Args:
        samplers: Functions that return a time.
        rounds: How often each is called; every round begins with another one.
        until: No round but the first begins after this ``time.monotonic()``.

    Returns:
        The times of each, of equal lengths: those of one round belong together.
    """
    names = list(samplers)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        if i and time.monotonic() > until:
            break
        first = i % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(samplers[name]())
    return times


def ratio(times: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Returns the median and the quartiles of the ratios, round by round."""
    return spread(np.divide(times, reference))


def spread(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Returns the median and the quartiles."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(median), "low": float(low), "high": float(high)}
