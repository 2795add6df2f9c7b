"""The command as it is, fully watched once: what the steps wait for, and how long everything else may take."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gpudoctor.model import Watched, WatchRecord
from gpudoctor.tune.proof import training_records
from gpudoctor.tune.runner import START_UP_ALLOWANCE_S, CommandRunner

SHARE = 0.25  # of the budget: the first run ends here at the latest
# What the rest of the budget has to hold, in runs of the unchanged command: itself, one trial, the proof (2.2), two
# confirming pairs. A command that ends by itself that early is run to its end (then its code after the loop is proven
# too); where it is cut to a window, the window leaves time for more trials.
LEAST_RUNS = 8.5
WINDOW_RUNS = 10.0
MINIMUM_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRun:
    """The watched run and its wall time in seconds."""

    seen: Watched
    seconds: float

    @property
    def ended(self) -> bool:
        """Whether the command ended by itself, and well."""
        return self.seen.exit_code == 0 and all(record.ended == "exit" for record in training_records(self.seen))

    @property
    def steps(self) -> int:
        """Steps of the rank that made the fewest."""
        return min(_steps(record) for record in training_records(self.seen))

    @property
    def start_up_s(self) -> float:
        return max(record.start_up_s or 0.0 for record in training_records(self.seen))


def watch(runner: CommandRunner, *, steps: int | None, budget_s: float) -> FirstRun:
    """Run the command as it is for a quarter of the budget, longer where a slow start leaves fewer than 16 steps."""
    begun = time.monotonic()
    limit = budget_s * SHARE
    plan = runner.plan(
        (), steps=steps, watch_calls=True, max_seconds=limit, least_steps=MINIMUM_STEPS, probe_fetch=True
    )
    seen, _ = runner.watch(plan, deadline_s=limit + START_UP_ALLOWANCE_S)
    return FirstRun(seen=seen, seconds=time.monotonic() - begun)


def window(first: FirstRun, budget_s: float) -> int:
    """Steps of every trial: the whole run where the rest of the budget holds enough of them, else a part of it."""
    count = first.steps
    if holds_whole_runs(first, budget_s) or count <= MINIMUM_STEPS:
        return count
    # Code that is rewritten is run past the end of its loop as well: to the end of the command, where that is known.
    to_the_end = first.seconds if first.ended else 0.0
    share = (budget_s - first.seconds - to_the_end) / WINDOW_RUNS
    rate = count / max(first.seconds - first.start_up_s, 1e-9)
    return max(MINIMUM_STEPS, min(count, int((share - first.start_up_s) * rate)))


def holds_whole_runs(first: FirstRun, budget_s: float) -> bool:
    """Whether what the first run leaves of the budget holds enough runs as long as it."""
    return LEAST_RUNS * first.seconds <= budget_s - first.seconds


def plan_trials(runner: CommandRunner, first: FirstRun) -> None:
    """Tell the runner, whose window is known, how long its trials and the whole command are expected to take."""
    assert runner.steps is not None
    runner.baseline_s = first.seconds
    if runner.steps < first.steps:
        runner.baseline_s = first.start_up_s + (first.seconds - first.start_up_s) * runner.steps / first.steps
    runner.whole_s = first.seconds if first.ended else None


def too_few_steps(seen: Watched, budget_s: float) -> str | None:
    """Why the watched steps are too few to say that nothing costs time, or None."""
    slowest = min(training_records(seen), key=_steps)
    count = _steps(slowest)
    if count >= MINIMUM_STEPS:
        return None
    if slowest.ended == "exit":
        return (
            f"the command made only {count} steps, too few to tell what they cost: let it make {MINIMUM_STEPS} or more"
        )
    if slowest.ended == "steps":
        return f"--steps {count} is too few to tell what a step costs: give {MINIMUM_STEPS} or more"
    told = f"{count} step was" if count == 1 else f"{count} steps were"
    start_up = f" (its start alone took {slowest.start_up_s:.0f} s)" if slowest.start_up_s else ""
    return (
        f"only {told} seen in the {budget_s * SHARE:.0f} s that the budget allows the first run{start_up}: "
        "give a larger --budget"
    )


def _steps(record: WatchRecord) -> int:
    return len(record.steps) or record.batches
