"""Repeat until the result is stable or the time is up, and describe what came out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

FEWEST = 3  # samples below which no spread can be told
STABLE_AFTER = 8  # samples before a series may count as stable
STABLE_SPREAD = 0.005  # 10th to 90th percentile as a share of the median
# An outlier is far away by the spread of the others (modified z-score) and far enough to matter.
_OUTLIER_SCORE = 14.826
_OUTLIER_SHARE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Samples in the order in which they were taken, and why the repeating ended."""

    samples: tuple[float, ...]
    stopped: Literal["stable", "time"]


def repeat(sample: Callable[[], float], *, seconds: float, clock: Callable[[], float] = time.monotonic) -> Series:
    """Call `sample` until its values are stable or `seconds` have passed; at least FEWEST times."""
    begin = clock()
    values: list[float] = []
    while True:
        values.append(sample())
        if len(values) >= STABLE_AFTER:
            low, high = spread(values)
            if high - low <= STABLE_SPREAD * statistics.median(values):
                return Series(samples=tuple(values), stopped="stable")
        if len(values) >= FEWEST and clock() - begin >= seconds:
            return Series(samples=tuple(values), stopped="time")


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0-1) of `values` lie, between neighbours by straight line; ValueError if empty."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> tuple[float, float]:
    """10th and 90th percentile."""
    return percentile(values, 0.1), percentile(values, 0.9)


def outliers(values: Sequence[float]) -> tuple[float, ...]:
    """Values far from the rest: something else used the link or the memory while they were taken."""
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return tuple(
        value
        for value in values
        if abs(value - middle) > _OUTLIER_SHARE * middle and abs(value - middle) > _OUTLIER_SCORE * deviation
    )
