"""The window of a trial: whatever the length of the command, the budget holds a trial, the proof and a confirmation."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from gpudoctor.model import Change, ChangeClass, Edit, Step, Watched, WatchRecord
from gpudoctor.tune import first_run
from gpudoctor.tune.first_run import FirstRun
from gpudoctor.tune.runner import PROOF_SLOWER, CommandRunner
from gpudoctor.tune.sandbox import Sandbox
from gpudoctor.tune.search import label

CHANGE = Change(
    id="C1", rule="LDR001", site="train.py:4", mechanism="loader", title="num_workers=5", change_class="exact"
)
MORE = Change(
    id="C2", rule="SYN001", site="train.py:9", mechanism="waits", title="sum on the device", change_class="exact"
)


def seen(steps: int, *, start_up_s: float, ended: bool) -> Watched:
    record = WatchRecord(
        pid=1, ended="exit" if ended else "time", start_up_s=start_up_s, steps=(Step(wall_ms=1.0),) * steps
    )
    return Watched(command=("python", "train.py"), cwd="/", records=(record,), exit_code=0 if ended else None)


def runner(left_s: float, baseline_s: float) -> CommandRunner:
    here = Sandbox(root=Path(), own=None, reason="a test")
    made = CommandRunner(
        ["python", "train.py"], cwd=Path(), sandbox=here, deadline=time.monotonic() + left_s, step_at=None,
        guard_writes=True, on_trial=lambda _: None,
    )  # fmt: skip
    made.baseline_s = baseline_s
    return made


# 60 steps in 17.6 s after a start of 5.8 s are slow_scripts/images on an H200: of 150 s, nothing was left for a trial
@pytest.mark.parametrize("budget_s", [60.0, 150.0, 600.0])
@pytest.mark.parametrize(("start_up_s", "share"), [(1.0, 0.02), (1.0, 0.1), (2.5, 0.12), (5.8, 0.17), (3.0, 0.25)])
def test_the_budget_holds_a_trial_of_a_run_that_takes_any_share_of_it(
    budget_s: float, start_up_s: float, share: float
) -> None:
    start_up_s *= budget_s / 150
    elapsed, count = share * budget_s, 60
    first = FirstRun(seen=seen(count, start_up_s=start_up_s, ended=share < 0.25), seconds=elapsed)
    window = first_run.window(first, budget_s)
    baseline_s = start_up_s + (elapsed - start_up_s) * window / count
    made = runner(budget_s - elapsed - baseline_s, baseline_s)
    assert made.affords(1, [CHANGE])
    made.natural_end = first.ended and first_run.holds_whole_runs(first, budget_s)
    made.whole_s = elapsed if first.ended else None
    assert made.affords(1, [rewrite()])
    assert window == count or share >= 0.1


def test_a_short_run_is_tried_whole_and_a_window_has_some_steps_at_least() -> None:
    short = FirstRun(seen=seen(60, start_up_s=1.0, ended=True), seconds=10.0)
    assert first_run.window(short, 600.0) == 60
    cut = FirstRun(seen=seen(4000, start_up_s=20.0, ended=False), seconds=37.5)
    assert first_run.window(cut, 150.0) == first_run.MINIMUM_STEPS


def test_a_trial_is_expected_to_take_as_long_as_the_last_one_to_which_it_adds() -> None:
    made = runner(100.0, 18.0)
    assert made.expected_s([CHANGE]) == 18.0
    made.seconds[(label(CHANGE),)] = 8.0
    assert made.expected_s([CHANGE]) == 8.0
    assert made.expected_s([CHANGE, MORE]) == 8.0
    assert made.expected_s([MORE]) == 18.0
    made.seconds[(label(CHANGE), label(MORE))] = 7.0
    assert made.expected_s([CHANGE, MORE]) == 7.0


def test_nothing_to_change_is_not_said_of_steps_too_few_to_tell() -> None:
    cut = first_run.too_few_steps(seen(1, start_up_s=14.2, ended=False), 60.0)
    assert cut == (
        "only 1 step was seen in the 15 s that the budget allows the first run (its start alone took 14 s): "
        "give a larger --budget"
    )
    assert "made only 5 steps" in (first_run.too_few_steps(seen(5, start_up_s=1.0, ended=True), 60.0) or "")
    assert first_run.too_few_steps(seen(first_run.MINIMUM_STEPS, start_up_s=14.2, ended=False), 60.0) is None


def rewrite(change_class: ChangeClass = "exact") -> Change:
    edits = (Edit(kind="whole-batch", site="train.py:4"),)
    return Change(
        id="C3", rule="LDR023", site="train.py:4", mechanism="fetch", title="whole batches", change_class=change_class,
        edits=edits,
    )  # fmt: skip


def test_the_proof_of_a_rewrite_keeps_time_for_the_end_of_the_command() -> None:
    made = runner(100.0, 10.0)
    assert made.proof_s([CHANGE]) == pytest.approx(2 * PROOF_SLOWER * 10)
    assert made.proof_s([rewrite()]) == pytest.approx(2 * PROOF_SLOWER * 10 + 10)  # with shortened loaders
    made.whole_s = 50.0
    assert not made.proves_whole([rewrite()])
    assert made.proof_s([rewrite()]) == pytest.approx(2 * PROOF_SLOWER * 10 + 50)
    made.whole_s = 16.0  # two runs to the end take less than two windows and a run past the end of the loop
    assert made.proves_whole([rewrite()])
    assert not made.proves_whole([CHANGE])
    assert made.proof_s([rewrite()]) == pytest.approx(2 * PROOF_SLOWER * 16)


def test_a_rewrite_beside_other_draws_is_proven_alone_as_well() -> None:
    made = runner(100.0, 10.0)
    other = dataclasses.replace(CHANGE, change_class="stochastic")
    assert made.proof_s([rewrite(), other]) == pytest.approx(3 * PROOF_SLOWER * 10 + 10)
    assert made.proof_s([rewrite("stochastic"), other]) == pytest.approx(2 * PROOF_SLOWER * 10 + 10)


def test_after_the_proof_its_time_is_free_for_further_pairs() -> None:
    assert runner(25.0, 10.0).affords_confirmation([CHANGE])
    assert not runner(15.0, 10.0).affords_confirmation([CHANGE])
