"""Loaders and hosts that exist as formulas only, to judge the loader search and an exhaustive grid alike.

Rates over workers and prefetch come in families: CPU-bound, waiting, pure Python, large batches, heavy-tailed and
tiny rows (the project's reference simulation of November 2026, the same figures), and two of our own: a disk that
seeks, and a CPU quota below the CPUs that are seen. A trial's rate has log-normal noise that shrinks with its window, a
slow drift of the host, and in one of twenty trials a disturbance that takes 10 to 30 % away.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from gpudoctor.tune.loader.search import Purpose, Setting, Space, search

PREFETCHES = (1, 2, 4, 8)
REFERENCE = ("cpu", "waiting", "python", "large", "tail", "tiny")
OURS = ("disk", "quota")
# The most workers, and the CPUs; the last one may oversubscribe them.
MACHINES = ((8, 8), (16, 16), (32, 24), (16, 8))
STARTS_S = (0.2, 4.0)  # fork and spawn, of one trial with workers
GRID_TRIAL_S = 5.0
Curve = Callable[[int, int], float]


@dataclass(frozen=True)
class Shape:
    slope: float = 1.0  # of one worker
    serial: float = 0.0  # share that workers wait for each other
    crosstalk: float = 0.0
    cap: float = math.inf
    over: float = 0.0  # lost with each worker beyond the CPUs
    none: float = 1.0  # the rate without workers
    prefetch: float = 0.0  # gained by deep queues


def shape(kind: str, most: int, cpus: int, rng: random.Random) -> Shape:
    u = rng.random
    if kind == "cpu":
        return Shape(
            serial=0.02 * u(), crosstalk=0.001 * u(), cap=cpus * (0.8 + 0.2 * u()), over=0.01 + 0.03 * u(), none=0.95,
            prefetch=0.02 * u(),
        )  # fmt: skip
    if kind == "waiting":
        return Shape(serial=0.01 * u(), cap=most * (0.3 + 1.2 * u()), prefetch=0.03 * u())
    if kind == "python":
        return Shape(serial=0.02 * u(), crosstalk=0.002 * u(), cap=cpus * 0.9, over=0.05 * u(), prefetch=0.01 * u())
    if kind == "large":
        return Shape(slope=0.5, serial=0.3 + 0.4 * u(), crosstalk=0.01 + 0.03 * u(), over=0.02, prefetch=-0.03 * u())
    if kind == "tail":
        return Shape(slope=0.7, serial=0.05 * u(), cap=most * (0.4 + u()), prefetch=0.25 + 0.35 * u())
    return Shape(slope=0.03 + 0.3 * u(), serial=0.3 * u(), crosstalk=0.01 * u(), cap=0.6, over=0.01, prefetch=0.1 * u())


def curve(kind: str, most: int, cpus: int, rng: random.Random) -> Curve:
    if kind in OURS:
        return _peaked(kind, most, cpus, rng)
    form = shape(kind, most, cpus, rng)

    def rate(workers: int, prefetch: int) -> float:
        if workers == 0:
            return form.none
        value = form.slope * workers
        value /= 1 + form.serial * (workers - 1) + form.crosstalk * workers * (workers - 1)
        value = min(value, form.cap)
        if workers > cpus:
            value /= 1 + form.over * (workers - cpus)
        return value * (1 + form.prefetch * (1 - 2 / (1 + prefetch)))

    return rate


def _peaked(kind: str, most: int, cpus: int, rng: random.Random) -> Curve:
    """Rises to a peak and falls behind it, with each worker more."""
    if kind == "disk":
        peak, fall = 1.5 + rng.random() * (0.75 * most - 1.5), 0.03 + 0.09 * rng.random()
        each, none, deep = 1.0, 0.9, 0.05 * rng.random()
    else:
        peak = 1.2 + rng.random() * (0.7 * min(most, cpus) - 1.2)
        fall, each, none, deep = 0.02 + 0.06 * rng.random(), 0.97, 0.97, 0.02 * rng.random()

    def rate(workers: int, prefetch: int) -> float:
        if workers == 0:
            return none
        value = min(each * workers, peak)
        if workers > peak:
            value /= 1 + fall * (workers - peak)
        return value * (1 + deep * (1 - 2 / (1 + prefetch)))

    return rate


@dataclass
class Host:
    """Makes trials of a curve and keeps the clock; a Runner of the search."""

    rate: Curve
    start_s: float
    noise: float
    rng: random.Random
    budget_s: float = math.inf
    used_s: float = 0.0
    drift: float = 0.0
    trials: list[Setting] = field(default_factory=list)

    def expected_s(self, setting: Setting, seconds: float) -> float:
        return seconds + ((self.start_s + 0.02 * setting.workers) if setting.workers else 0.0)

    def left_s(self) -> float:
        return self.budget_s - self.used_s

    def run(self, setting: Setting, seconds: float, purpose: Purpose) -> float | None:
        self.used_s += self.expected_s(setting, seconds)
        self.trials.append(setting)
        self.drift = 0.8 * self.drift + self.rng.gauss(0, 0.5 * self.noise)
        spread = self.noise * max(0.5, 0.5 * math.sqrt(4 / seconds))
        value = self.rate(setting.workers, setting.prefetch) * math.exp(self.rng.gauss(0, spread) + self.drift)
        return value * (0.7 + 0.2 * self.rng.random()) if self.rng.random() < 0.05 else value


def cells(most: int) -> list[Setting]:
    settings = [Setting(workers=0)]
    return settings + [Setting(workers=w, prefetch=p) for w in range(1, most + 1) for p in PREFETCHES]


def grid_s(most: int, start_s: float) -> float:
    """Time of an exhaustive grid with trials of 5 s."""
    host = Host(rate=lambda workers, prefetch: 1.0, start_s=start_s, noise=0.0, rng=random.Random(0))
    return sum(host.expected_s(setting, GRID_TRIAL_S) for setting in cells(most))


def regret(rate: Curve, most: int, chosen: Setting) -> float:
    """How far the chosen setting's true rate lies below the best, as a share."""
    best = max(rate(setting.workers, setting.prefetch) for setting in cells(most))
    return 1 - rate(chosen.workers, chosen.prefetch) / best


@dataclass
class Score:
    searched: list[float] = field(default_factory=list)  # regrets
    gridded: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)  # of the grid's time

    def within(self, regrets: list[float]) -> float:
        return sum(value <= 0.05 for value in regrets) / len(regrets)


def judge(
    machine: tuple[int, int], noise: float, *, seeds: range, repeats: int, grid: bool = False, share: float = 0.2
) -> Score:
    """All eight families on one machine; the search gets `share` of the grid's time as its budget."""
    most, cpus = machine
    score = Score()
    for seed in seeds:
        for number in range(repeats):
            for place, kind in enumerate((*REFERENCE, *OURS)):
                start_s = STARTS_S[(number + place) % 2]
                rng = random.Random(f"{seed} {most} {cpus} {noise} {kind} {number}")
                rate = curve(kind, most, cpus, rng)
                whole = grid_s(most, start_s)
                host = Host(rate=rate, start_s=start_s, noise=noise, rng=rng, budget_s=share * whole)
                found = search(host, Space(most_workers=most, cpus=cpus))
                assert found.best is not None
                score.searched.append(regret(rate, most, found.best))
                score.shares.append(host.used_s / whole)
                if grid:
                    other = Host(rate=rate, start_s=start_s, noise=noise, rng=rng)
                    rates = {setting: other.run(setting, GRID_TRIAL_S, "explore") for setting in cells(most)}
                    chosen = max(rates, key=lambda setting: rates[setting] or 0.0)
                    score.gridded.append(regret(rate, most, chosen))
    return score
