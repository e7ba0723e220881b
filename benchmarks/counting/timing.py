"""Times that can be compared: taken in turns, as medians of paired ratios."""

import functools
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

Samples = Sequence[float] | np.ndarray
Name = TypeVar("Name", bound=Hashable)


def interleaved(
    samplers: Mapping[Name, Callable[[], float]],
    rounds: int,
    *,
    until: float = math.inf,
) -> dict[Name, list[float]]:
    """Takes samples in turns, so that what disturbs one disturbs all.

    Args:
        samplers: Functions that return a time.
        rounds: How often each is called; every round begins with another one.
        until: No round but the first begins after this ``time.monotonic()``.

    Returns:
        The times of each, of equal lengths: those of one round belong together.
    """
    names = list(samplers)
    times: dict[Name, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        if i and time.monotonic() > until:
            break
        first = i % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(samplers[name]())
    return times


def of_calls(
    call: Callable[[], Any],
    wait: Callable[[Any], Any],
    *,
    seconds: float,
    rounds: int,
) -> np.ndarray:
    """Returns samples of the seconds that one call takes, as :func:`sampler` takes."""
    sample = sampler(call, wait, seconds=seconds)
    return np.array([sample() for _ in range(rounds)])


def sampler(
    call: Callable[[], Any], wait: Callable[[Any], Any], *, seconds: float
) -> Callable[[], float]:
    """Returns a function that returns the seconds that one call takes.

    Args:
        call: Starts some work.
        wait: Waits for what the last call of a sample has returned.
        seconds: About how long a sample takes: as many calls as that needs.
    """

    def sample(calls):
        result = None
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        wait(result)
        return (time.perf_counter() - start) / calls

    return functools.partial(sample, calls_for(seconds, sample))


def calls_for(seconds: float, sample: Callable[[int], float]) -> int:
    """Returns how many calls take about so long. The first call only warms up."""
    sample(1)
    return max(1, math.ceil(seconds / sample(1)))


def ratio(times: Samples, reference: Samples) -> dict[str, float]:
    """Returns the median and the quartiles of the ratios, round by round."""
    return spread(np.divide(times, reference))


def spread(values: Samples) -> dict[str, float]:
    """Returns the median and the quartiles."""
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(median), "low": float(low), "high": float(high)}
