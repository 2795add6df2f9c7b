"""Settings of the process as changes: which are offered, that a trial sets them, and that launch.sh carries them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpudoctor import observe
from gpudoctor.model import (
    Case,
    Change,
    Host,
    LaunchConfig,
    Limits,
    Software,
    Step,
    Watched,
    WatchedLoader,
    WatchRecord,
)
from gpudoctor.prescribe import launch
from gpudoctor.prescribe.changes import propose
from gpudoctor.tune.candidates import candidates
from gpudoctor.tune.runner import CommandRunner
from gpudoctor.tune.sandbox import Sandbox

LOADER = WatchedLoader(
    site="train.py:3", ordinal=0, role="train", loader_class="DataLoader", dataset_class="D", iterable_dataset=False,
    num_workers=2,
)  # fmt: skip


def case_of(
    *, cpus: int = 8, ranks: int = 1, cuda: bool = False, env: dict[str, str] | None = None, **more: Any
) -> Case:
    records = tuple(
        WatchRecord(pid=rank + 1, rank=rank, world_size=ranks, cuda=cuda, watched_s=10.0, optimizer_steps=9, **more)
        for rank in range(ranks)
    )
    return Case(
        host=Host(cpu_count=cpus),
        limits=Limits(allowed_cpus=tuple(range(cpus))),
        software=Software(environment=env or {}),
        watched=Watched(command=("python", "train.py"), cwd="/", records=records),
    )


def titles(case: Case, text: str = "import torch\n", allow: tuple[str, ...] = ("numerics",)) -> list[str]:
    found = propose(case, (), texts={"train.py": text}, safe=lambda *_: (True, None), allow=allow)
    return [change.title for change in found if change.mechanism == "threads"]


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        (case_of(cpus=8), ["1", "4"]),
        (case_of(cpus=8, loaders=(LOADER,)), ["1", "4", "6"]),
        (case_of(cpus=8, ranks=2), ["2", "4"]),  # torchrun's 1 is what they have
        (case_of(cpus=2, ranks=2), []),
        (case_of(cpus=1), []),
        (case_of(cpus=8, cuda=True), []),
        (case_of(cpus=8, env={"OMP_NUM_THREADS": "2"}), []),  # chosen by the person
    ],
)
def test_counts_that_are_offered(case: Case, wanted: list[str]) -> None:
    assert titles(case) == [f"OMP_NUM_THREADS={count}" for count in wanted]


def test_only_with_numerics_and_where_the_script_does_not_decide() -> None:
    assert titles(case_of(), allow=()) == []
    assert titles(case_of(), "import torch\ntorch.set_num_threads(3)\n") == []


STEPS = tuple(Step(wall_ms=10.0) for _ in range(200))


@pytest.mark.parametrize(
    ("retries", "torch", "env", "text", "offered"),
    [
        (40, "2.11.0", {}, "", True),
        (3, "2.11.0", {}, "", False),  # a few while it warms up
        (0, "2.11.0", {}, "", False),
        (None, "2.11.0", {}, "", False),
        (40, "2.0.1", {}, "", False),  # it has no such option
        (40, None, {}, "", False),
        (40, "2.11.0", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, "", False),
        (40, "2.11.0", {}, "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'x'\n", False),
    ],
)
def test_the_allocator_is_changed_only_with_evidence(
    retries: int | None, torch: str | None, env: dict[str, str], text: str, offered: bool
) -> None:
    case = case_of(cuda=True, env=env, alloc_retries=retries, torch=torch, steps=STEPS)
    found = propose(case, (), texts={"train.py": text}, safe=lambda *_: (True, None))
    assert [change.title for change in found] == ["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"] * offered
    assert all(change.change_class == "exact" and change.can_be_tried for change in found)


def runner(folder: Path, *words: str) -> CommandRunner:
    return CommandRunner(
        [sys.executable, *words], cwd=folder, sandbox=Sandbox(root=folder, own=None, reason="no run"), deadline=1.0,
        step_at=None, guard_writes=True, on_trial=lambda _: None,
    )  # fmt: skip


def test_they_are_tried_as_values_of_one_setting(tmp_path: Path) -> None:
    case = dataclasses.replace(case_of(cpus=8))
    groups, advice, _ = candidates(
        case, runner(tmp_path, "train.py"), select=(), ignore=(), allow=frozenset({"exact", "numerics"})
    )
    [group] = groups
    assert (group.mechanism, group.units) == ("threads", ())
    assert [[change.title for change in option] for option in group.options] == [
        ["OMP_NUM_THREADS=1"],
        ["OMP_NUM_THREADS=4"],
    ]
    assert advice == ()


SETTING = Change(
    id="C1", rule="LCH006", site="command", mechanism="threads", title="OMP_NUM_THREADS=3", change_class="numerics",
    environment={"OMP_NUM_THREADS": "3"}, reason="8 CPUs; unset it is 8",
)  # fmt: skip


def test_a_trial_sets_it_for_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code = "import os; print('threads', os.environ.get('OMP_NUM_THREADS'))"
    run = runner(tmp_path, "-c", code)
    for changes, said in (((), "threads None"), ((SETTING,), "threads 3")):
        output = tmp_path / f"output-{len(changes)}.txt"
        plan = run.plan(changes, steps=None, watch_calls=False)
        observe.watch(run.command, plan, cwd=tmp_path, deadline_s=150, output=output)
        assert output.read_text().strip() == said


def test_what_is_kept_stands_in_the_launch_script(tmp_path: Path) -> None:
    before = LaunchConfig(command=("sh", "-c", 'echo "$OMP_NUM_THREADS"'), env={"OMP_NUM_THREADS": "7"})
    config = launch.with_settings(before, (SETTING,))
    assert config.env == {"OMP_NUM_THREADS": "3"}
    [because] = config.because
    assert because.reason == "tried by tune (LCH006): 8 CPUs; unset it is 8"
    script = tmp_path / "launch.sh"
    script.write_text(launch.render(config))
    done = subprocess.run(
        ["bash", str(script)], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "3\n"
    assert launch.with_settings(before, ()) == before
