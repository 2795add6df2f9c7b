"""The statistics of tune: quantiles against published tables, coverage, decisions."""

from __future__ import annotations

import math
import random

import pytest

from gpudoctor.tune import stats


@pytest.mark.parametrize(
    ("df", "probability", "expected"),
    [  # NIST/SEMATECH e-Handbook of Statistical Methods, table 1.3.6.7.2
        (1, 0.975, 12.706),
        (2, 0.975, 4.303),
        (3, 0.995, 5.841),
        (4, 0.90, 1.533),
        (7, 0.975, 2.365),
        (10, 0.995, 3.169),
        (30, 0.95, 1.697),
    ],
)
def test_student_quantile_agrees_with_the_table(df: int, probability: float, expected: float) -> None:
    assert stats.student_quantile(probability, df) == pytest.approx(expected, abs=6e-4)
    assert stats.student_quantile(1 - probability, df) == pytest.approx(-expected, abs=6e-4)


def test_intervals_cover_the_true_ratio() -> None:
    rng = random.Random(7)
    covered = 0
    for _ in range(400):
        arms = [[100 * scale * math.exp(rng.gauss(0, 0.04)) for _ in range(3)] for scale in (1.0, 1.3)]
        result = stats.compare(*arms)
        covered += result.low <= 1.3 <= result.high
    assert 0.92 <= covered / 400 <= 0.98


def test_more_tests_widen_the_interval() -> None:
    one = stats.compare([10, 10.2, 9.9], [12, 12.1, 11.8])
    many = stats.compare([10, 10.2, 9.9], [12, 12.1, 11.8], tests=10)
    assert many.low < one.low < one.ratio < one.high < many.high


def test_decisions() -> None:
    assert stats.decide(stats.compare([10, 10.1, 9.9], [20, 20.3, 19.9])) == "better"
    assert stats.decide(stats.compare([10, 10.1, 9.9], [9.9, 10.0, 9.95])) == "not better"
    assert stats.decide(stats.compare([10, 10.02, 9.99], [10.01, 10.0, 10.02])) == "not better"
    assert stats.decide(stats.compare([10], [30])) == "undecided"  # one run an arm proves nothing
    # a gain inside the spread of the baseline is no gain
    assert stats.decide(stats.compare([10, 13, 10.5, 12.5], [13, 13.1, 12.9, 13.2])) != "better"


def test_an_empty_arm_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one run"):
        stats.compare([], [1.0])


def test_an_interval_that_bounds_nothing_is_not_told() -> None:
    """One pair whose only repeat (of another configuration) was noisy: Student's t with one degree of freedom."""
    noisy = stats.compare([10.0], [12.0], tests=20, repeats=[[10.0], [12.0], [9.0, 11.0]])
    assert noisy.high > 1000
    assert not noisy.bounded
    assert noisy.text == "1.20x (one pair of runs, no interval)"
    more = stats.compare([10.0, 30.0], [12.0], tests=20)
    assert more.text == "0.69x (2 and 1 runs, no interval)"


def test_an_interval_that_bounds_is_told() -> None:
    clear = stats.compare([10.0, 10.1, 10.05], [13.0, 13.1, 13.05])
    assert clear.bounded
    assert clear.text == f"1.30x ({clear.low:.2f} to {clear.high:.2f})"
    assert not stats.compare([10.0], [12.0]).bounded
