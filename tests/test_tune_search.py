"""The search judged by simulation: no-effect tunes keep nothing, real effects are found, useless members go."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Sequence

import pytest

from gpudoctor.model import Change, Trial
from gpudoctor.tune import search as searching
from gpudoctor.tune.search import Group, Purpose


def change(number: int, mechanism: str = "loader", title: str = "t") -> Change:
    return Change(
        id=f"C{number}", rule="LDR001", site="train.py:1", mechanism=mechanism, title=title, change_class="exact"
    )


class Simulated:
    """A host with log-normal noise, slow drift and, now and then, a run that something else slowed down."""

    def __init__(self, seed: int, effects: dict[str, float], noise: float, runs: int = 60) -> None:
        self.rng = random.Random(seed)
        self.effects = effects
        self.noise = noise
        self.left = runs
        self.drift = 0.0

    def run(self, changes: Sequence[Change], purpose: Purpose) -> Trial:
        self.left -= 1
        self.drift += self.rng.gauss(0, self.noise / 6)
        rate = 10 * math.prod(self.effects.get(item.id, 1.0) for item in changes)
        rate *= math.exp(self.drift + self.rng.gauss(0, self.noise))
        if self.rng.random() < 0.05:
            rate /= self.rng.uniform(1.1, 1.3)
        return Trial(changes=tuple(searching.label(item) for item in changes), purpose=purpose, rate=rate)

    def affords(self, runs: int, changes: Sequence[Change]) -> bool:
        return self.left >= runs + 4

    def affords_confirmation(self, changes: Sequence[Change]) -> bool:
        return self.left >= 2


def groups() -> list[Group]:
    workers = tuple((change(1, title=f"num_workers={count}"), change(2, title="pin")) for count in (1, 2, 4, 8))
    units = (frozenset({"C1"}), frozenset({"C2"}))
    return [
        Group(mechanism="fetch", options=((change(5, "fetch"),),)),
        Group(mechanism="loader", options=workers, units=units),
        Group(
            mechanism="sync",
            options=((change(3, "sync"), change(4, "sync")),),
            units=(frozenset({"C3"}), frozenset({"C4"})),
        ),
    ]


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.08])
def test_at_most_five_percent_of_no_effect_tunes_keep_anything(noise: float) -> None:
    kept = sum(bool(searching.search(Simulated(seed, {}, noise), groups()).kept) for seed in range(200))
    assert kept <= 10, f"{kept} of 200 tunes without any effect kept a change"


def test_a_change_that_slows_down_is_never_kept() -> None:
    effects = {"C1": 0.9, "C2": 0.97, "C3": 0.95, "C4": 0.9, "C5": 0.8}
    assert not any(searching.search(Simulated(seed, effects, 0.05), groups()).kept for seed in range(100))


def test_a_real_effect_is_found_and_useless_members_are_dropped() -> None:
    found, pinned = 0, 0
    for seed in range(50):
        outcome = searching.search(Simulated(seed, {"C1": 3.0}, 0.03), groups())
        ids = {item.id for item in outcome.kept}
        found += "C1" in ids
        pinned += "C2" in ids
        if outcome.comparison is not None and "C1" in ids:
            assert outcome.comparison.low < 3.0 * 1.15
            assert outcome.comparison.high > 3.0 / 1.15
    assert found == 50
    assert pinned <= 35  # half the time a useless member looks useful in one run; it never costs the gain


def test_changes_that_pay_only_together_are_kept_together() -> None:
    class Together(Simulated):
        def run(self, changes: Sequence[Change], purpose: Purpose) -> Trial:
            self.effects = {"C3": 1.8} if {"C3", "C4"} <= {item.id for item in changes} else {}
            return super().run(changes, purpose)

    for seed in range(20):
        outcome = searching.search(Together(seed, {}, 0.03), groups())
        assert {"C3", "C4"} <= {item.id for item in outcome.kept}


def test_a_failing_option_is_dropped_with_its_error_and_the_rest_goes_on() -> None:
    class Failing(Simulated):
        def run(self, changes: Sequence[Change], purpose: Purpose) -> Trial:
            if any(item.id == "C5" for item in changes):
                return Trial(changes=("C5",), purpose=purpose, rate=None, error="ValueError: no")
            return super().run(changes, purpose)

    outcome = searching.search(Failing(1, {"C1": 2.0}, 0.02), groups())
    assert any(item.id == "C5" and "ValueError: no" in (item.reason or "") for item in outcome.dropped)
    assert "C1" in {item.id for item in outcome.kept}


def test_a_busy_host_gets_no_verdict() -> None:
    verdicts = {searching.search(Simulated(seed, {"C1": 1.2}, 0.5), groups()).verdict for seed in range(20)}
    assert "no verdict" in verdicts


def test_more_of_what_clearly_slows_down_is_not_tried() -> None:
    """Twelve workers where two are set already, at three quarters of the rate: fifteen would be no better."""
    counts = tuple((change(1, title=f"num_workers={count}"),) for count in (12, 15))
    for beyond in (True, False):
        host = Simulated(3, {"C1": 0.75}, 0.01)
        outcome = searching.search(host, [Group(mechanism="loader", options=counts, beyond=beyond)])
        assert not outcome.kept
        tried = [trial.changes[0] for trial in outcome.trials if trial.changes]
        twice = ["C1 num_workers=12"] * 2  # one run may have been disturbed
        assert tried == (twice if beyond else [*twice, *["C1 num_workers=15"] * 2])
        if beyond:
            (left,) = (item for item in outcome.dropped if item.title == "num_workers=15")
            assert left.reason == "not tried: a smaller step in this direction was slower"


def test_one_disturbed_run_does_not_hide_a_gain() -> None:
    """Another program ran beside the first trial of a change that makes the command 1.7 times as fast."""

    class Disturbed(Simulated):
        def run(self, changes: Sequence[Change], purpose: Purpose) -> Trial:
            first = purpose == "search" and not any(trial.changes for trial in self.seen)
            self.seen.append(super().run(changes, purpose))
            found = self.seen[-1]
            return dataclasses.replace(found, rate=(found.rate or 0.0) * 0.4) if first else found

        def __init__(self, seed: int, effects: dict[str, float], noise: float) -> None:
            super().__init__(seed, effects, noise)
            self.seen: list[Trial] = []

    for seed in range(20):
        outcome = searching.search(Disturbed(seed, {"C5": 1.7}, 0.03), groups())
        assert "C5" in {item.id for item in outcome.kept}, seed


def test_a_budget_without_a_trial_is_told_apart_from_nothing_to_win() -> None:
    outcome = searching.search(Simulated(0, {}, 0.02, runs=4), groups())
    assert outcome.starved
    assert outcome.verdict == "no verdict"
    assert not searching.search(Simulated(0, {}, 0.02), groups()).starved


def test_without_candidates_nothing_is_changed() -> None:
    outcome = searching.search(Simulated(0, {}, 0.02), [])
    assert outcome.verdict == "nothing"
    assert not outcome.kept


class Scripted(Simulated):
    """Rates as given, one a run, in place of simulated ones."""

    def __init__(self, rates: Sequence[float]) -> None:
        super().__init__(0, {}, 0.0, runs=len(rates))
        self.rates = list(rates)

    def run(self, changes: Sequence[Change], purpose: Purpose) -> Trial:
        self.left -= 1
        labels = tuple(searching.label(item) for item in changes)
        return Trial(changes=labels, purpose=purpose, rate=self.rates.pop(0) if self.rates else 10.0)

    def affords(self, runs: int, changes: Sequence[Change]) -> bool:
        return self.left >= runs

    def affords_confirmation(self, changes: Sequence[Change]) -> bool:
        return self.left >= 2


@pytest.mark.parametrize("rates", [[10.0, 12.0], [10.0, 20.0, 10.0, 9.0, 10.0, 11.0], [10.0, 12.0, 14.0, 9.0]])
def test_no_change_is_dropped_with_an_interval_over_orders_of_magnitude(rates: list[float]) -> None:
    outcome = searching.search(Scripted(rates), [Group(mechanism="sync", options=((change(3, "sync"),),))])
    assert not outcome.kept
    [dropped] = outcome.dropped
    intervals = re.findall(r"\(([0-9.]+) to ([0-9.]+)\)", dropped.reason or "")
    assert all(float(high) <= 11 * float(low) for low, high in intervals), dropped.reason
    assert intervals or "no interval" in (dropped.reason or "")
    if dropped.gain is not None:
        assert dropped.gain.high <= 11 * dropped.gain.low
