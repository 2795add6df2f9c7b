"""Which changes are tried together, and which only told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import test_prescribe_waits as waits
from test_prescribe_changes import CASE, COPIES, LOADER, TEXT

from gpudoctor.model import Change, ChangeClass, Edit, FetchProbe, LoaderChoice, LoaderStudy, Watched, WatchRecord
from gpudoctor.rules import studies
from gpudoctor.tune import loader_study
from gpudoctor.tune.candidates import candidates, with_the_stall, workers_to_choose
from gpudoctor.tune.runner import CommandRunner
from gpudoctor.tune.sandbox import Sandbox
from gpudoctor.tune.search import Group

EXACT_ROWS = FetchProbe(
    rows=64, row_by_row_ms=10.0, whole_batch_ms=9.0, equal=True, draws_random=False, repeatable=True
)


def groups(
    tmp_path: Path,
    text: str,
    *allow: Any,
    study: LoaderStudy | None = None,
    select: tuple[str, ...] = (),
    ignore: tuple[str, ...] = (),
    **values: Any,
) -> tuple[list[Group], tuple[Change, ...]]:
    (tmp_path / waits.FILE).write_text(text)
    record = WatchRecord(pid=1, watched_s=10.0, cuda=True, device="cuda:0", optimizer_steps=100, **values)
    watched = Watched(command=("python",), cwd=str(tmp_path), records=(record,))
    case = dataclasses.replace(CASE, watched=watched, loader=study)
    runner = CommandRunner(
        ("python", waits.FILE), cwd=tmp_path, sandbox=Sandbox(root=tmp_path, own=None, reason="no run"), deadline=1.0,
        step_at=None, guard_writes=True, on_trial=lambda _: None,
    )  # fmt: skip
    found, advice, notes = candidates(case, runner, select=select, ignore=ignore, allow=frozenset(allow))
    assert notes == []
    return found, advice


def test_one_group_takes_all_waits_of_the_loop(tmp_path: Path) -> None:
    copies = (waits.copy(waits.MADE, "x.to(device)"),)
    (group,), advice = groups(tmp_path, waits.MADE, "exact", "logging", syncs=waits.MADE_SYNCS, copies=copies)
    assert group.mechanism == "sync"
    assert len(group.options) == 1
    assert [len(unit) for unit in group.units] == [1] * 5  # each can be dropped on its own
    assert advice == ()


def test_what_pays_only_with_logging_is_told_without_it(tmp_path: Path) -> None:
    found, advice = groups(tmp_path, waits.SHOWN, "exact", "stochastic", syncs=waits.SHOWN_SYNCS)
    assert found == []
    log, *sums = advice
    assert log.reason == "not tried: needs --allow logging"
    assert {change.reason for change in sums} == {
        f"not tried: it pays only together with {log.id}, which needs --allow logging"
    }
    assert len(sums) == 2
    (group,), advice = groups(tmp_path, waits.SHOWN, "exact", "logging", syncs=waits.SHOWN_SYNCS)
    assert (len(group.options[0]), advice) == (3, ())


def test_what_is_done_for_a_rule_that_was_left_out_is_not_tried(tmp_path: Path) -> None:
    """On two H200s, --ignore SYN001 took its finding away and tried its sums all the same."""
    shown: Any = {"syncs": waits.SHOWN_SYNCS}
    (group,), advice = groups(tmp_path, waits.SHOWN, "exact", "logging", ignore=("SYN001",), **shown)
    assert [change.rule for change in group.options[0]] == ["SYN003"]
    assert advice == ()
    found, advice = groups(tmp_path, waits.SHOWN, "exact", "logging", select=("SYN001",), **shown)
    assert found == []
    assert {change.reason for change in advice} == {
        "not tried: it pays only together with what is done for SYN003, which was left out"
    }
    assert groups(tmp_path, waits.SHOWN, "exact", "logging", ignore=("syn",), **shown) == ([], ())


def test_pinning_joins_the_other_waits() -> None:
    loader = Change(
        id="C1", rule="LDR001", site=LOADER.site, mechanism="loader", title="t", change_class="exact",
        edits=(Edit(kind="loader-arguments", site=LOADER.site, arguments={"num_workers": 2, "pin_memory": True}),),
    )  # fmt: skip
    copies = Change(
        id="C2", rule="CPY001", site=COPIES[0].site, mechanism="loader", title="t", change_class="exact",
        edits=(Edit(kind="non-blocking", site=COPIES[0].site),),
    )  # fmt: skip
    drop = Change(
        id="C3", rule="SYN006", site="train.py:9", mechanism="sync", title="t", change_class="exact",
        edits=(Edit(kind="drop-call", site="train.py:9"),),
    )  # fmt: skip
    assert with_the_stall([loader, copies]) == [loader, copies]
    assert [(each.id, each.mechanism) for each in with_the_stall([loader, copies, drop])] == [
        ("C1.1", "loader"), ("C1.2", "sync"), ("C2", "sync"), ("C3", "sync"),
    ]  # fmt: skip


@pytest.mark.parametrize("allow", [("exact",), ("exact", "numerics")])
def test_numerics_are_offered_only_when_allowed(tmp_path: Path, allow: tuple[str, ...]) -> None:
    found, advice = groups(
        tmp_path, waits.MADE, *allow, syncs=waits.MADE_SYNCS[1:2], torch="2.11.0", argv=(waits.FILE,)
    )
    assert [group.mechanism for group in found] == (["sync", "optimizer"] if "numerics" in allow else ["sync"])
    assert advice == ()


def study_of(**changes: Any) -> LoaderStudy:
    found = studies.case_of(loader={"site": LOADER.site, "num_workers": 0}, **changes).loader
    assert found is not None
    return found


def settings_tried(found: list[Group]) -> list[list[str]]:
    return [[change.title for change in option] for group in found for option in group.options]


LADDER = [["num_workers=2"], ["num_workers=4"], ["num_workers=15"]]
CHOICE = LoaderChoice(arguments={"num_workers": 6, "prefetch_factor": 4, "in_order": False})


@pytest.mark.parametrize(
    ("allow", "study", "tried"),
    [
        (("exact",), None, LADDER),
        (("exact",), {"verdict": "no verdict", "choice": CHOICE}, LADDER),
        (("exact",), {"verdict": "change", "choice": CHOICE}, [["num_workers=6", "prefetch_factor=4"]]),
        (("exact", "stochastic"), {"verdict": "change", "choice": CHOICE},
         [["num_workers=6", "prefetch_factor=4", "in_order=False"]]),
        (("exact",), {"verdict": "keep"}, []),
        (("exact",), {"verdict": "change", "choice": CHOICE, "site": "other.py:3"},
         LADDER),
    ],
)  # fmt: skip
def test_a_search_over_the_loader_stands_in_for_trials_of_each_number_of_workers(
    tmp_path: Path, allow: tuple[ChangeClass, ...], study: dict[str, Any] | None, tried: list[list[str]]
) -> None:
    assert LOADER.site.partition(":")[0] == waits.FILE
    loader = dataclasses.replace(LOADER, fetch_probe=EXACT_ROWS)
    known = study_of(**study) if study is not None else None
    found, _ = groups(tmp_path, TEXT, *allow, study=known, loaders=(loader,), batches=100)
    assert settings_tried(found) == tried
    assert workers_to_choose(found) == (LOADER.site if len(tried) > 1 else None)


def test_a_search_is_made_only_where_it_is_cheap_beside_whole_trials() -> None:
    def seconds(left_s: float, start_up_s: float, ranks: int = 1) -> float | None:
        records = tuple(WatchRecord(pid=pid, start_up_s=start_up_s, optimizer_steps=50) for pid in range(ranks))
        watched = Watched(command=("python",), cwd="/w", records=records)
        return loader_study.search_s(dataclasses.replace(CASE, watched=watched), left_s)

    assert seconds(580.0, 8.0) == pytest.approx(50.0)
    assert seconds(3600.0, 8.0) == loader_study.MOST_S
    assert seconds(130.0, 6.0) is None  # slow_scripts/images with --budget 150: trials tell more for their time
    assert seconds(580.0, 50.0) is None
    assert seconds(580.0, 8.0, ranks=2) is None
