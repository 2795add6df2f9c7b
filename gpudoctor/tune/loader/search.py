"""Which loader settings to try, and when enough is known: ladder, then what may still be better, then confirmation.

Pure decisions over a Runner, so that the same code is judged by simulation (tests) and serves real loaders. The time
budget is hard: a trial that does not fit into it is not begun.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gpudoctor.tune.loader.surface import Cell, Fit, Surface

DEFAULT_PREFETCH = 2  # torch's own
PREFETCHES = (1, 2, 4, 8)
WINDOW_S = 1.2  # of one trial; more where starting the workers takes longer than that
LONG_WINDOW_S = 1.6
UNEVEN_WINDOW_S = 2.4  # where rows cost so differently that a window of few of them tells little
# A setting within 1 % of the best is as good (or within what is not known of their difference, up to 2.5 %), and the
# smallest of those is chosen; the search goes on while another one may be 3 % better at 2 standard deviations.
AS_GOOD, AS_GOOD_MOST, UNKNOWN_SHARE = 0.01, 0.025, 0.7
WORTH_TRYING, DEVIATIONS = 0.03, 2.0
LADDER_GAIN, LADDER_DROP = 1.05, 0.75  # two rungs that gain less, or one that loses a quarter, end the ladder
AT_ONCE = 2  # settings between two fits; tried in turn with the best one, so that drift favours none
CONFIRM_SHARE = 0.25  # of the budget at most, kept for the confirmation against the user's own setting
CONFIRM_ROUNDS = 3
PLAIN, PLAIN_DEVIATIONS = 1.25, 4.0  # a difference so large and sure is not confirmed any further
VARIANT_PAIRS = 6
NEAR = 0.8  # of the best rate: then 0 workers are confirmed as well
MOST_FAILURES = 3
MINIMUM_GAIN = 1.02

Purpose = Literal["ladder", "explore", "variant", "confirm"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Setting:
    """One way to run the loader. Without workers prefetch has no meaning and stands at its default."""

    workers: int
    prefetch: int = DEFAULT_PREFETCH
    whole_batch: bool = False
    in_order: bool = True
    one_thread: bool = False  # BLAS, OpenMP and OpenCV pools of each worker held to one thread
    persistent: bool = False

    @property
    def cell(self) -> Cell:
        return (self.workers, self.prefetch)


class Runner(Protocol):
    """Makes trials; knows the clock."""

    def run(self, setting: Setting, seconds: float, purpose: Purpose) -> float | None:
        """Distinct samples per second, or None when the trial failed (the runner keeps why)."""
        ...

    def expected_s(self, setting: Setting, seconds: float) -> float:
        """Wall time that a trial with a window of `seconds` will take: start and end of the workers included."""
        ...

    def left_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Where to search. `cpus`: CPUs that are usable, a rung of its own. `present`: the user's own setting.
    `target`: the rate that the training step can use; more is of no use. `first`: workers that should reach it.
    `fits`: whether memory and limits hold a setting. `variants`: other ways to run the best setting."""

    most_workers: int
    cpus: int
    present: Setting | None = None
    target: float | None = None
    first: int | None = None
    fits: Callable[[Setting], bool] = lambda _: True
    variants: tuple[Callable[[Setting], Setting], ...] = ()
    prefetches: tuple[int, ...] = PREFETCHES
    window_s: float = WINDOW_S
    base: Setting = field(default_factory=lambda: Setting(workers=0))  # what all cells share, such as whole_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """One setting's rate over another's, with the interval that holds it in 95 of 100 cases."""

    value: float
    low: float
    high: float


@dataclass(slots=True, kw_only=True)
class Outcome:
    """`best` is None when no trial gave a rate. `rates`: estimated rate of every tried setting."""

    best: Setting | None = None
    rates: dict[Setting, float] = field(default_factory=dict)
    repeats: dict[Setting, list[float]] = field(default_factory=dict)
    over_present: Ratio | None = None
    over_zero: Ratio | None = None
    interval: Ratio | None = None  # of the best rate itself, in samples per second
    noise: float = 0.0
    complete: bool = False  # False: the budget ended the search before it was sure
    variants: list[tuple[Setting, Ratio]] = field(default_factory=list)
    failures: list[Setting] = field(default_factory=list)


class Search:
    """One search. `outcome` is filled as it goes, so that an interrupted one still has its trials."""

    def __init__(self, runner: Runner, space: Space) -> None:
        self.runner, self.space = runner, space
        self.outcome = Outcome()
        self.surface = Surface(self._cells())
        self.window_s = space.window_s
        self.reserve_s = self._confirmation_s() if space.present is not None else 0.0
        self.dear = False  # starting workers takes longer than a window
        self.excluded: set[Cell] = set()

    def search(self) -> Outcome:
        """Ladder, exploration, variants, confirmation; returns `outcome`."""
        self._ladder()
        if self.surface.rows:
            self.outcome.complete = self._explore()
            self._confirm()
            self._variants()
            self._conclude()
        return self.outcome

    # the trials

    def _cells(self) -> list[Cell]:
        space = self.space
        cells = [(0, DEFAULT_PREFETCH)]
        for workers in range(1, space.most_workers + 1):
            fitting = [p for p in space.prefetches if space.fits(self._setting((workers, p)))]
            cells += [(workers, prefetch) for prefetch in fitting]
        if space.present is not None and space.present.cell not in cells:
            cells.append(space.present.cell)  # it is the user's: measured even beyond what we would allow
        return cells

    def _setting(self, cell: Cell) -> Setting:
        return dataclasses.replace(self.space.base, workers=cell[0], prefetch=cell[1])

    def _affords(self, cells: Sequence[Cell], reserve_s: float) -> bool:
        wanted = sum(self.runner.expected_s(self._setting(cell), self.window_s) for cell in cells)
        return wanted + reserve_s <= self.runner.left_s()

    def _try(self, cell: Cell, purpose: Purpose, reserve_s: float = 0.0) -> float | None:
        """One trial of a cell; None when it failed or does not fit into the time left."""
        if cell in self.excluded or cell not in self.surface.index or not self._affords([cell], reserve_s):
            return None
        setting = self._setting(cell)
        rate = self.runner.run(setting, self.window_s, purpose)
        if rate is None or rate <= 0:
            self._exclude(cell)
            return None
        self.surface.add(cell, rate, self.window_s)
        self.outcome.repeats.setdefault(setting, []).append(rate)
        return rate

    def _exclude(self, cell: Cell) -> None:
        """A setting that failed, and those that ask for more of everything than it."""
        self.outcome.failures.append(self._setting(cell))
        workers, prefetch = cell
        for other in self.surface.cells:
            more = other[0] >= workers and other[0] * other[1] >= workers * prefetch
            if other == cell or (workers > 0 and more):
                self.excluded.add(other)

    # ladder

    def _ladder(self) -> None:
        space = self.space
        rate = self._try((0, DEFAULT_PREFETCH), "ladder")
        best = rate or 0.0
        if space.present is not None and space.present.workers:
            present = self._try(space.present.cell, "ladder")
            if present is not None and self._reached(present):
                return  # what is left to find are fewer workers
        start_s = self.runner.expected_s(self._setting((1, DEFAULT_PREFETCH)), self.window_s) - self.window_s
        self.dear = start_s > WINDOW_S
        if self.dear:
            self.window_s = max(self.window_s, LONG_WINDOW_S)
        poor = 0
        for workers in self._rungs():
            if len(self.outcome.failures) >= MOST_FAILURES:
                break
            cell = (workers, self._prefetch(workers))
            known = self.outcome.repeats.get(self._setting(cell))
            rate = known[-1] if known else self._try(cell, "ladder")
            if rate is None:
                continue
            poor = poor + 1 if rate < best * LADDER_GAIN else 0
            dropped = rate < best * LADDER_DROP and workers >= 4
            best = max(best, rate)
            if poor >= 2 or dropped or self._reached(rate):
                break

    def _rungs(self) -> list[int]:
        """Powers of two, the usable CPUs and the most that is allowed; from the count that the step needs on."""
        most = self.space.most_workers
        rungs = {2**power for power in range(most.bit_length()) if 2**power <= most}
        rungs |= {most, min(self.space.cpus, most)} - {0}
        if self.dear and most > 1:
            rungs.discard(1)  # one worker alone brings little (overlap apart), and here each start is dear
        if self.space.first is not None and most:
            first = min(most, max(1, self.space.first))
            rungs = {first} | {rung for rung in rungs if rung > first}
        return sorted(rungs)

    def _prefetch(self, workers: int) -> int:
        """The default where it fits, else the largest that does."""
        allowed = [cell[1] for cell in self.surface.cells if cell[0] == workers]
        return DEFAULT_PREFETCH if DEFAULT_PREFETCH in allowed or not allowed else max(allowed)

    def _reached(self, rate: float) -> bool:
        return self.space.target is not None and rate >= self.space.target * (1 - WORTH_TRYING)

    # exploration

    def _explore(self) -> bool:
        """Until no setting may be noticeably better, or the budget (less the confirmation) is used up."""
        import numpy as np

        looked = False
        while len(self.outcome.failures) < MOST_FAILURES:
            fit = self.surface.fit()
            best = self._best(fit)
            cell = self.surface.cells[best]
            wider = (cell[0], 2 * cell[1])
            if not looked and cell[0] and wider in self.surface.index and not self._enough(fit, best):
                looked = True  # prefetch is told apart from the number of workers by one pair of trials
                picked = [wider]
            else:
                picked = self._promising(fit, best)
            if not picked:
                return True
            turn = [*picked, cell] if len(self.outcome.repeats) % 2 else [cell, *picked]
            if not self._affords(turn, self.reserve_s):
                turn = [*picked[:1], cell]
                if not self._affords(turn, self.reserve_s):
                    return not self._hopes(fit, best) > np.log1p(2 * WORTH_TRYING)
            for each in turn:
                self._try(each, "explore", self.reserve_s)
        return False

    def _best(self, fit: Fit) -> int:
        tried = {row for row in self.surface.rows if self.surface.cells[row] not in self.excluded}
        return max(tried or set(self.surface.rows), key=lambda row: float(fit.mean[row]))

    def _enough(self, fit: Fit, best: int) -> bool:
        return self._reached(math.exp(float(fit.mean[best])))

    def _hopes(self, fit: Fit, best: int) -> float:
        """How much better, in log rate, the most promising other cell may be."""
        upper = fit.mean - fit.mean[best] + DEVIATIONS * fit.deviations_from(best)
        upper[best] = -math.inf
        for cell in self.excluded:
            upper[self.surface.index[cell]] = -math.inf
        return float(upper.max())

    def _promising(self, fit: Fit, best: int) -> list[Cell]:
        """The cells that may be noticeably better; once the step's need is met, smaller ones that may meet it too."""
        import numpy as np

        gain = fit.mean - fit.mean[best] + DEVIATIONS * fit.deviations_from(best)
        if self._enough(fit, best):
            return self._smaller(fit, best)
        picked: list[Cell] = []
        for number in np.argsort(-gain):
            cell = self.surface.cells[int(number)]
            if gain[number] < WORTH_TRYING or len(picked) == AT_ONCE:
                break
            if int(number) != best and cell not in self.excluded:
                picked.append(cell)
        return picked

    def _smaller(self, fit: Fit, best: int) -> list[Cell]:
        """Halfway down to the smallest count that is known not to reach the target."""
        assert self.space.target is not None
        wanted = math.log(self.space.target * (1 - WORTH_TRYING))
        workers = self.surface.cells[best][0]
        short = [
            self.surface.cells[row][0]
            for row in set(self.surface.rows)
            if float(fit.mean[row]) < wanted and self.surface.cells[row][0] < workers
        ]
        enough = [
            self.surface.cells[row][0]
            for row in set(self.surface.rows)
            if float(fit.mean[row]) >= wanted and self.surface.cells[row] not in self.excluded
        ]
        low, high = max(short, default=-1), min([*enough, workers])
        middle = (low + high + 1) // 2
        cell = (middle, self._prefetch(middle) if middle else DEFAULT_PREFETCH)
        untried = cell in self.surface.index and self.surface.index[cell] not in self.surface.rows
        return [cell] if middle < high and untried and cell not in self.excluded else []

    # the end

    def _choice(self, fit: Fit) -> int:
        """The smallest tried setting that is as good as the best."""
        best = self._best(fit)
        unknown = UNKNOWN_SHARE * fit.deviations_from(best)
        allowed = [
            row
            for row in set(self.surface.rows)
            if self.surface.cells[row] not in self.excluded
            and (
                fit.mean[row] >= fit.mean[best] - min(AS_GOOD_MOST, max(AS_GOOD, float(unknown[row])))
                or self._enough(fit, row)
            )
        ]
        return min(allowed or [best], key=lambda row: self.surface.cells[row])

    def _confirm(self) -> None:
        """The choice, the best, the user's own and a near 0 workers, in turn, in the time that was kept for it."""
        for number in range(CONFIRM_ROUNDS):
            fit = self.surface.fit()
            best = self._best(fit)
            cells = [self.surface.cells[row] for row in dict.fromkeys((self._choice(fit), best))]
            own = self._present_cell()
            if own in self.surface.index and not (number and self._plain(fit, self._choice(fit), own)):
                cells.append(own)
            zero = self.surface.index[0, DEFAULT_PREFETCH]
            if zero in self.surface.rows and fit.mean[zero] > fit.mean[best] + math.log(NEAR):
                cells.append((0, DEFAULT_PREFETCH))
            cells = [cell for cell in dict.fromkeys(cells) if cell not in self.excluded]
            if len(cells) < 2:
                return
            if not self._affords(cells, self._variants_s()):
                return
            for cell in cells if number % 2 else reversed(cells):
                self._try(cell, "confirm")

    def _plain(self, fit: Fit, one: int, cell: Cell) -> bool:
        other = self.surface.index[cell]
        difference = abs(float(fit.mean[one] - fit.mean[other]))
        return difference > max(math.log(PLAIN), PLAIN_DEVIATIONS * float(fit.deviations_from(other)[one]))

    def _confirmation_s(self) -> float:
        """Time for the rounds of the present setting and the best one, as far as the budget's share goes."""
        assert self.space.present is not None
        most = Setting(workers=self.space.most_workers)
        round_s = sum(self.runner.expected_s(each, self.window_s) for each in (self.space.present, most))
        return min(CONFIRM_ROUNDS * round_s, CONFIRM_SHARE * self.runner.left_s())

    def _present_cell(self) -> Cell | None:
        return self.space.present.cell if self.space.present is not None else None

    def _variants_s(self) -> float:
        """Time for one pair of trials of each variant."""
        if not self.space.variants:
            return 0.0
        cell = self.surface.cells[self._best(self.surface.fit())]
        return 2 * len(self.space.variants) * self.runner.expected_s(self._setting(cell), self.window_s)

    def _variants(self) -> None:
        """Other ways to run the choice, each in turn with it."""
        for change in self.space.variants:
            cell = self.surface.cells[self._choice(self.surface.fit())]
            setting = change(self._setting(cell))
            if setting == self._setting(cell):
                continue
            pairs: list[tuple[float, float]] = []
            ratio: Ratio | None = None
            for _ in range(VARIANT_PAIRS):
                other_s = self.runner.expected_s(setting, self.window_s)
                if other_s + self.runner.expected_s(self._setting(cell), self.window_s) > self.runner.left_s():
                    break
                own = self._try(cell, "variant")
                other = self.runner.run(setting, self.window_s, "variant")
                if own is None or other is None or other <= 0:
                    break
                self.outcome.repeats.setdefault(setting, []).append(other)
                pairs.append((own, other))
                ratio = _paired(pairs, self._trial_noise(self.surface.fit()))
                if len(pairs) > 1 and (ratio.low > 1 or ratio.high < MINIMUM_GAIN):
                    break
            if ratio is not None:
                self.outcome.variants.append((setting, ratio))

    def _trial_noise(self, fit: Fit) -> float:
        """Of one trial as they were made here; half of it is the host's, which a longer window does not even out."""
        return fit.noise * math.sqrt(0.5 + 0.5 * WINDOW_S / self.window_s)

    def _conclude(self) -> None:
        fit = self.surface.fit()
        choice = self._choice(fit)
        outcome = self.outcome
        outcome.best = self._setting(self.surface.cells[choice])
        outcome.noise = fit.noise
        for row in set(self.surface.rows):
            outcome.rates[self._setting(self.surface.cells[row])] = math.exp(float(fit.mean[row]))
        rate = outcome.rates[outcome.best]
        half = 1.96 * self._trial_noise(fit) / math.sqrt(max(1, self.surface.rows.count(choice)))
        outcome.interval = Ratio(value=rate, low=rate * math.exp(-half), high=rate * math.exp(half))
        present = self._present_cell()
        if present is not None and self.surface.index.get(present) in self.surface.rows:
            outcome.over_present = _ratio(fit, choice, self.surface.index[present])
        zero = self.surface.index[0, DEFAULT_PREFETCH]
        if zero in self.surface.rows:
            outcome.over_zero = _ratio(fit, choice, zero)


def _ratio(fit: Fit, one: int, other: int) -> Ratio:
    if one == other:
        return Ratio(value=1.0, low=1.0, high=1.0)
    difference = float(fit.mean[one] - fit.mean[other])
    half = 1.96 * float(fit.deviations_from(other)[one])
    return Ratio(value=math.exp(difference), low=math.exp(difference - half), high=math.exp(difference + half))


def _paired(pairs: Sequence[tuple[float, float]], noise: float) -> Ratio:
    """The ratio second / first of neighbouring trials; the noise known from all trials stands in for their few."""
    logs = [math.log(other / own) for own, other in pairs]
    middle = sum(logs) / len(logs)
    half = 1.96 * noise * math.sqrt(2 / len(logs))
    return Ratio(value=math.exp(middle), low=math.exp(middle - half), high=math.exp(middle + half))


def search(runner: Runner, space: Space) -> Outcome:
    """Run the whole search; the module's first lines say how."""
    return Search(runner, space).search()
