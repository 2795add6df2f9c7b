"""Which changes are kept: groups by mechanism, alternating trials, leave-one-out, fresh confirmation.

Pure decisions over a Runner, so that the same code is judged by simulation (tests) and serves real commands.
A trial in the search may be a single run: what it suggests is provisional. Only the confirmation, made of fresh
alternating runs of the baseline and of the final combination, lets changes be kept.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gpudoctor.model import Change, Gain, Trial
from gpudoctor.tune import stats

_NO_TIME = "not tried: the time budget was used up"
Purpose = Literal["baseline", "search", "leave-one-out", "confirm", "proof"]
# A single pair of runs this far apart needs no repeat before the confirmation: it is beyond the run-to-run
# noise of any host on which a verdict is possible (stats.BUSY_SPREAD).
CLEAR_RATIO = 1.5
SEARCH_REPEATS = 3
# Two runs this far below what they are compared with are no gain that more would show; one may have been disturbed.
CLEARLY_WORSE = 0.8
CONFIRM_PAIRS = 6
CONFIRM_FIRST_LOOK = 2  # what a tight budget must hold
CONFIRM_ENOUGH = 3  # a clear gain is not measured any further; two pairs alone give a very wide interval


class Runner(Protocol):
    """Runs the user's command with some changes; knows what time is left for further trials."""

    def run(self, changes: Sequence[Change], purpose: Purpose) -> Trial: ...

    def affords(self, runs: int, changes: Sequence[Change]) -> bool:
        """Whether `runs` more trials with these changes fit before the time reserved for confirmation and proof."""
        ...

    def affords_confirmation(self, changes: Sequence[Change]) -> bool:
        """Whether one more pair of confirmation runs fits before the time reserved for proof."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Changes of one mechanism. `options` are alternative ways to do it (worker counts), the cheapest first; each
    is a whole set of changes. `units` are the members that leave-one-out may drop, each a set of change ids.
    `beyond`: every option is further from the present setting than the one before it, and the first further than it.
    `pointless` looks at the last trial of what is kept so far and says why the group cannot win anything, or None."""

    mechanism: str
    options: tuple[tuple[Change, ...], ...]
    units: tuple[frozenset[str], ...] = ()
    beyond: bool = False
    pointless: Callable[[Trial], str | None] | None = None


# Gets the changes that the search settled on; returns those that may be emitted and those that may not, with reasons.
Vet = Callable[[tuple[Change, ...]], tuple[tuple[Change, ...], tuple[Change, ...]]]


@dataclass(slots=True, kw_only=True)
class Outcome:
    kept: tuple[Change, ...] = ()
    dropped: tuple[Change, ...] = ()
    comparison: stats.Comparison | None = None
    trials: list[Trial] = field(default_factory=list)
    verdict: Literal["better", "nothing", "no verdict"] = "nothing"
    reason: str = ""
    starved: bool = False  # the time budget did not hold one trial of a change


class Search:
    """One search over groups. `outcome` is filled as it goes, so that an interrupted search still has its trials."""

    def __init__(self, runner: Runner, groups: Sequence[Group], vet: Vet | None = None) -> None:
        self.runner = runner
        self.groups = groups
        self.vet = vet
        self.outcome = Outcome()
        self.current: tuple[Change, ...] = ()
        self.rates: dict[tuple[str, ...], list[float]] = {}
        self.tests = max(1, sum(len(group.options) for group in groups))

    def search(self) -> Outcome:
        """Try every group on top of what is kept so far, then confirm the combination."""
        first = self._run((), "baseline")
        if first is None:
            self.outcome.verdict, self.outcome.reason = "no verdict", "the baseline gave no rate"
            return self.outcome
        for group in self.groups:
            why_not = group.pointless(self._last(self.current)) if group.pointless else None
            if why_not is None:
                self._try_group(group)
            else:
                self._drop(group.options[0], why_not)
        if self.current and self.vet is not None:
            self.current, refused = self.vet(self.current)
            self.outcome.dropped += refused
            if not self.current:
                self.outcome.reason = f"what gained was not proven: {refused[0].reason}"
                return self.outcome
        if not self.current:
            self._say_nothing()
            return self.outcome
        return self._confirm()

    def _last(self, changes: Sequence[Change]) -> Trial:
        names = tuple(label(change) for change in changes)
        return next(trial for trial in reversed(self.outcome.trials) if trial.changes == names)

    def _run(self, changes: Sequence[Change], purpose: Purpose) -> float | None:
        trial = self.runner.run(changes, purpose)
        self.outcome.trials.append(trial)
        if trial.rate is not None and purpose != "confirm":
            self.rates.setdefault(_key(changes), []).append(trial.rate)
        return trial.rate

    def _try_group(self, group: Group) -> None:
        before = self.current
        tried: list[tuple[float, tuple[Change, ...]]] = []
        for option in group.options:
            if not self.runner.affords(1, (*before, *option)):
                self._drop(option, _NO_TIME)
                continue
            rate = self._run((*before, *option), "search")
            if rate is None:
                self._drop(option, f"failed: {self.outcome.trials[-1].error or 'no rate'}")
                continue
            if self._is_worse(before, rate) and self.runner.affords(1, (*before, *option)):
                rate = self._once_more((*before, *option), rate)
            tried.append((rate, option))
            if len(tried) > 2 and tried[-1][0] < tried[-2][0] < tried[-3][0]:
                break  # options are ordered by size: twice worse in a row means that the best lies behind
            if group.beyond and len(tried) == 1 and self._is_worse(before, rate):
                for further in group.options[1:]:
                    self._drop(further, "not tried: a smaller step in this direction was slower", only_new=option)
                break
        if not tried:
            return
        best_rate = max(rate for rate, _ in tried)
        # the cheapest option within 2 % of the best
        best = next(option for rate, option in tried if rate >= best_rate * (1 - stats.MINIMUM_GAIN))
        for _, option in tried:
            if option is not best:
                self._drop(option, "another setting of the same group was as good or better", only_new=best)
        comparison, decision = self._settle(before, (*before, *best))
        if decision != "better":
            self._drop(best, _why_not(comparison, decision))
            return
        known = comparison.bounded
        gain = Gain(
            low=round(comparison.low if known else comparison.ratio, 3),
            high=round(comparison.high if known else comparison.ratio, 3),
            unit="x",
            basis="measured",
            source=f"{comparison.baseline_runs} and {comparison.candidate_runs} runs of the group in the search"
            + ("" if known else ", too few for an interval"),
        )
        self.current = (*before, *(dataclasses.replace(change, gain=gain) for change in best))
        if len(group.units) > 1:
            self._leave_one_out(group, before)

    def _once_more(self, changes: tuple[Change, ...], rate: float) -> float:
        """The better of a run that was clearly worse and its repeat. Where they differ by more than a host may vary,
        something disturbed the first: it is not counted."""
        again = self._run(changes, "search")
        if again is None or again <= rate:
            return rate
        if again > rate * (1 + stats.BUSY_SPREAD):
            self.rates[_key(changes)].remove(rate)
        return again

    def _is_worse(self, reference: tuple[Change, ...], rate: float) -> bool:
        return rate < CLEARLY_WORSE * statistics.median(self.rates[_key(reference)])

    def _settle(
        self, reference: tuple[Change, ...], candidate: tuple[Change, ...]
    ) -> tuple[stats.Comparison, stats.Decision]:
        """Alternate reference and candidate until the difference is clear, or repeats or time are used up."""
        while True:
            a, b = self.rates[_key(reference)], self.rates[_key(candidate)]
            comparison = stats.compare(a, b, tests=self.tests, repeats=[*self.rates.values()])
            decision = stats.decide(comparison)
            if comparison.ratio > CLEAR_RATIO and decision == "undecided":
                return comparison, "better"
            if len(b) > 1 and self._is_worse(reference, max(b)):
                return comparison, "not better"
            enough = min(len(a), len(b)) >= SEARCH_REPEATS
            if enough or (decision != "undecided" and min(len(a), len(b)) > 1):
                return comparison, decision
            changes, purpose = (reference, "baseline") if len(a) <= len(b) else (candidate, "search")
            if not self.runner.affords(1, changes) or self._run(changes, purpose) is None:  # type: ignore[arg-type]
                return comparison, decision

    def _leave_one_out(self, group: Group, before: tuple[Change, ...]) -> None:
        for unit in group.units:
            rest = tuple(change for change in self.current if change.id not in unit)
            present = [change for change in self.current if change.id in unit]
            # Three runs' time: a further pair in the confirmation is worth more than leaving one out.
            if not present or rest == before or not self.runner.affords(3, rest):
                continue
            without = self._run(rest, "leave-one-out")
            with_it = statistics.median(self.rates[_key(self.current)])
            if without is not None and without >= with_it:
                self._drop(present, f"adds nothing: {without / with_it:.2f}x of the rate remained without it")
                self.current = rest

    def _confirm(self) -> Outcome:
        baseline: list[float] = []
        candidate: list[float] = []
        comparison: stats.Comparison | None = None
        decision: stats.Decision = "undecided"
        history = {key: self.rates.get(key, []) for key in ((), _key(self.current))}
        # looks from the third pair on; with time for two pairs only, there is that one look
        looks = CONFIRM_PAIRS - CONFIRM_ENOUGH + 1
        for pair in range(CONFIRM_PAIRS):
            if pair >= CONFIRM_FIRST_LOOK and not self.runner.affords_confirmation(self.current):
                break
            # the order turns with every pair, so that a drift of the host favours neither
            for changes in ((), self.current) if pair % 2 == 0 else (self.current, ()):
                rate = self._run(changes, "confirm")
                if rate is None:
                    error = self.outcome.trials[-1].error or "no rate"
                    return self._reject(f"a confirmation run failed: {error}", "nothing")
                (candidate if changes else baseline).append(rate)
            if len(baseline) >= CONFIRM_FIRST_LOOK:
                # what the search saw of these two tells about the noise, but not about the gain
                repeats = [[*history[()], *baseline], [*history[_key(self.current)], *candidate]]
                tests = 1 if len(baseline) < CONFIRM_ENOUGH else looks
                comparison = stats.compare(baseline, candidate, tests=tests, repeats=repeats)
                decision = stats.decide(comparison)
                if decision != "undecided" and len(baseline) >= CONFIRM_ENOUGH:
                    break
        assert comparison is not None  # the first look is always reached or the outcome was rejected
        self.outcome.comparison = comparison
        if decision == "better":
            self.outcome.kept = tuple(dataclasses.replace(change, kept=True) for change in self.current)
            self.outcome.verdict = "better"
            return self.outcome
        if comparison.range > stats.BUSY_SPREAD:
            return self._reject(
                f"host busy: repeats of the unchanged command differed by {comparison.range:.0%}", "no verdict"
            )
        return self._reject(f"not confirmed in fresh runs: {_why_not(comparison, decision)}", "nothing")

    def _reject(self, reason: str, verdict: Literal["nothing", "no verdict"]) -> Outcome:
        self._drop(self.current, reason)
        self.current = ()
        self.outcome.verdict, self.outcome.reason = verdict, reason
        return self.outcome

    def _say_nothing(self) -> None:
        baseline = self.rates[()]
        if len(baseline) > 1 and stats.spread(baseline) > stats.BUSY_SPREAD:
            self.outcome.verdict = "no verdict"
            self.outcome.reason = (
                f"host busy: repeats of the unchanged command differed by {stats.spread(baseline):.0%}"
            )
        elif (
            self.groups
            and all(trial.purpose == "baseline" for trial in self.outcome.trials)
            and any(_NO_TIME in (change.reason or "") for change in self.outcome.dropped)
        ):
            self.outcome.verdict = "no verdict"
            self.outcome.starved = True
            self.outcome.reason = "the time budget did not hold one trial of a change"
        elif self.groups:
            self.outcome.reason = "no change gained more than the noise"
        else:
            self.outcome.reason = "no change is on offer"

    def _drop(self, changes: Sequence[Change], reason: str, *, only_new: Sequence[Change] = ()) -> None:
        known = {(change.id, change.title) for change in (*self.outcome.dropped, *only_new)}
        fresh = tuple(
            dataclasses.replace(change, kept=False, reason=reason)
            for change in changes
            if (change.id, change.title) not in known
        )
        self.outcome.dropped += fresh


def search(runner: Runner, groups: Sequence[Group], vet: Vet | None = None) -> Outcome:
    """Run the whole search; see the module's first lines for the rules."""
    return Search(runner, groups, vet).search()


def label(change: Change) -> str:
    """How a trial names a change: its id, with the setting where an id has several."""
    return f"{change.id} {change.title}"


def _key(changes: Sequence[Change]) -> tuple[str, ...]:
    return tuple(sorted(label(change) for change in changes))


def _why_not(comparison: stats.Comparison, decision: stats.Decision) -> str:
    if decision == "not better":
        return f"gains nothing: {comparison.text}"
    if comparison.baseline_runs < 2:
        return f"too few runs in the budget to tell: {comparison.text}"
    return f"within the noise: {comparison.text}, a gain has to exceed {comparison.threshold:.2f}x"
