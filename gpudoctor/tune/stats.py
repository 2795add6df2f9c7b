"""A/B statistics that every comparison shares: rates in log space, pooled variance, Student intervals.

Rates of repeated runs differ by a factor rather than by an amount, so the comparison is between means of
logarithms and a result is a ratio with an interval. Few runs are affordable, so the variance is pooled over
both arms and the interval comes from Student's t. Repeated looks and several candidates are paid for by
dividing the error probability (Bonferroni).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MINIMUM_GAIN = 0.02  # below this nobody notices, and drift between runs is as large
# Two runs can agree by chance; no host repeats better than this from run to run (ours: 40 repeats of a CPU example).
NOISE_FLOOR = 0.005
ERROR_PROBABILITY = 0.05
# Baseline repeats further apart than this say that something else used the machine.
BUSY_SPREAD = 0.30
# An interval that reaches over more than this factor bounds nothing: one or two noisy runs give it.
WIDEST = 10.0

Decision = Literal["better", "not better", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`ratio` = geometric mean of the candidate's rates over the baseline's, with its interval low..high."""

    ratio: float
    low: float
    high: float
    baseline_runs: int
    candidate_runs: int
    spread: float  # of equal runs among themselves: pooled standard deviation, relative; 0 without repeats
    range: float  # of the baseline runs: largest over smallest, minus 1

    @property
    def threshold(self) -> float:
        """The ratio that a gain has to exceed: 1 + max(2 %, spread of equal runs)."""
        return 1 + max(MINIMUM_GAIN, self.spread)

    @property
    def bounded(self) -> bool:
        """Whether the interval says anything about the ratio."""
        return self.high <= WIDEST * self.low

    @property
    def text(self) -> str:
        """The ratio with its interval, or with why there is none: 1.30x (1.10 to 1.54)."""
        if self.bounded:
            return f"{self.ratio:.2f}x ({self.low:.2f} to {self.high:.2f})"
        runs = (self.baseline_runs, self.candidate_runs)
        few = "one pair of runs" if runs == (1, 1) else f"{runs[0]} and {runs[1]} runs"
        return f"{self.ratio:.2f}x ({few}, no interval)"


def student_cdf(t: float, df: int) -> float:
    """P(T <= t) for whole degrees of freedom; finite sums 26.7.3 and 26.7.4 of Abramowitz and Stegun (1964)."""
    if df < 1:
        raise ValueError(f"degrees of freedom must be at least 1, not {df}")
    theta = math.atan(abs(t) / math.sqrt(df))
    cosine, sine = math.cos(theta), math.sin(theta)
    term, total = 1.0, 0.0
    if df % 2:
        term = cosine
        for k in range(1, df - 1, 2):
            total += term
            term *= cosine * cosine * (k + 1) / (k + 2)
        inside = 2 / math.pi * (theta + sine * total)
    else:
        for k in range(0, df - 1, 2):
            total += term
            term *= cosine * cosine * (k + 1) / (k + 2)
        inside = sine * total
    return 0.5 + math.copysign(inside, t) / 2


def student_quantile(probability: float, df: int) -> float:
    """The t with P(T <= t) = probability, by bisection to 1e-9 relative."""
    if not 0 < probability < 1:
        raise ValueError(f"a probability lies between 0 and 1, not {probability}")
    if probability < 0.5:
        return -student_quantile(1 - probability, df)
    low, high = 0.0, 1.0
    while student_cdf(high, df) < probability:
        high *= 2
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, df) < probability else (low, middle)
    return (low + high) / 2


def spread(rates: Sequence[float]) -> float:
    """Largest over smallest rate, minus 1; 0 for fewer than two."""
    return max(rates) / min(rates) - 1 if len(rates) > 1 else 0.0


def compare(
    baseline: Sequence[float],
    candidate: Sequence[float],
    *,
    tests: int = 1,
    repeats: Sequence[Sequence[float]] | None = None,
) -> Comparison:
    """Ratio of rates (per second, all positive) with a two-sided interval of error 0.05 / tests.

    repeats: all runs that say how much equal runs differ, one sequence a configuration; the two arms alone when not
    given. Without any repeat there is no spread and the interval is (0, inf) in principle: it is returned as the
    ratio divided and multiplied by 10, so that nothing is decided from it.
    """
    if not baseline or not candidate:
        raise ValueError("each arm needs at least one run")
    logs = [[math.log(rate) for rate in arm] for arm in (baseline, candidate)]
    means = [statistics.fmean(arm) for arm in logs]
    ratio = math.exp(means[1] - means[0])
    groups = [[math.log(rate) for rate in group] for group in repeats or (baseline, candidate) if group]
    df = sum(len(group) - 1 for group in groups)
    if df == 0:
        return Comparison(
            ratio=ratio, low=ratio / 10, high=ratio * 10, baseline_runs=1, candidate_runs=1, spread=0.0, range=0.0
        )
    squares = sum((value - statistics.fmean(group)) ** 2 for group in groups for value in group)
    deviation = max(math.sqrt(squares / df), NOISE_FLOOR)
    t = student_quantile(1 - ERROR_PROBABILITY / 2 / tests, df)
    half = t * deviation * math.sqrt(1 / len(baseline) + 1 / len(candidate))
    return Comparison(
        ratio=ratio,
        low=ratio * math.exp(-half),
        high=ratio * math.exp(min(half, 50.0)),
        baseline_runs=len(baseline),
        candidate_runs=len(candidate),
        spread=math.expm1(deviation),
        range=spread(baseline),
    )


def decide(comparison: Comparison) -> Decision:
    """better: the gain exceeds the threshold and the interval lies above 1. not better: the interval leaves no room
    for a gain of 2 %, or the ratio is below 1. undecided: more runs could tell."""
    if comparison.ratio > comparison.threshold and comparison.low > 1:
        return "better"
    if comparison.high < 1 + MINIMUM_GAIN or comparison.ratio < 1:
        return "not better"
    return "undecided"
