"""--resume: earlier trials count again where nothing has changed, and only in the search."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpudoctor import codec
from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Case, Change, Edit, Envelope, Prescription, Trial, TrialBasis, Watched
from gpudoctor.tune import outputs, resume
from gpudoctor.tune.runner import CommandRunner
from gpudoctor.tune.sandbox import Sandbox
from gpudoctor.tune.search import Group, Purpose, Search, label


def change(number: int, workers: int) -> Change:
    edit = Edit(kind="loader-arguments", site="train.py:1", name="DataLoader", arguments={"num_workers": workers})
    title = f"num_workers={workers}"
    return Change(
        id=f"C{number}", rule="LDR001", site="train.py:1", mechanism="loader", title=title, change_class="exact",
        edits=(edit,),
    )  # fmt: skip


GROUPS = [Group(mechanism="loader", options=((change(1, 2),), (change(1, 4),)))]


class Fake(CommandRunner):
    """Rates by the number of workers; counts what was really run."""

    def __init__(self, folder: Path, factor: float = 1.0) -> None:
        (folder / "train.py").write_text("loader\n")
        super().__init__(
            [sys.executable, "train.py"],
            cwd=folder,
            sandbox=Sandbox(folder, None, "a test"),
            deadline=float("inf"),
            step_at=None,
            guard_writes=False,
            on_trial=lambda text: None,
        )
        self.steps, self.factor, self.ran = 20, factor, []
        self.text("train.py")

    def run(self, changes: Sequence[Change], purpose: Purpose) -> Trial:
        names = tuple(label(item) for item in changes)
        self.ran.append((purpose, names))
        rate = 10.0 * self.factor * (1.3 if changes else 1.0) * (1 + 0.002 * (len(self.ran) % 3))
        return Trial(changes=names, purpose=purpose, rate=rate, seconds=3.0, loader_wait_ms=50.0)

    def affords(self, runs: int, changes: Sequence[Change]) -> bool:
        return True

    def affords_confirmation(self, changes: Sequence[Change]) -> bool:
        return True

    ran: list[tuple[Purpose, tuple[str, ...]]]


def earlier(runner: Fake, groups: Sequence[Group] = GROUPS) -> resume.Earlier:
    """A whole search, as its case.json gives it back."""
    found = Search(runner, groups).search()
    told = Prescription(trials=tuple(found.trials), basis=resume.basis(runner, groups, asked_steps=None, seconds=4.0))
    watched = Watched(command=tuple(runner.command), cwd=str(runner.cwd), records=())
    envelope = Envelope(
        version="1", command="tune", status="clean", exit_code=0, case=Case(watched=watched), prescription=told
    )
    (runner.cwd / "case.json").write_text(codec.encode_envelope(envelope))
    return resume.read(runner.cwd)


def test_a_search_is_not_run_again_but_its_baseline_and_confirmation_are(tmp_path: Path) -> None:
    first = Fake(tmp_path)
    before = earlier(first)
    assert resume.mismatch(before, first, asked_steps=None) is None
    second, notes = Fake(tmp_path), []
    outcome = Search(resume.Replay(second, before, GROUPS, note=notes.append), GROUPS).search()
    assert outcome.verdict == "better"
    fresh = [purpose for purpose, _ in second.ran]
    assert fresh[0] == "baseline"
    assert set(fresh[1:]) == {"confirm"}
    assert len(second.ran) < len(first.ran)
    assert notes[0].endswith("trials of the earlier tune are used again")
    assert {label(item) for item in outcome.kept} == {"C1 num_workers=2"}


def test_a_machine_that_gives_another_rate_starts_anew(tmp_path: Path) -> None:
    before = earlier(Fake(tmp_path))
    second, notes = Fake(tmp_path, factor=1.5), []
    Search(resume.Replay(second, before, GROUPS, note=notes.append), GROUPS).search()
    assert ("search", ("C1 num_workers=2",)) in second.ran
    assert notes[0].startswith("the earlier trials are not used: the unchanged command now runs at 1.50x")


def test_a_label_that_now_means_another_edit_is_tried_again(tmp_path: Path) -> None:
    before = earlier(Fake(tmp_path))
    moved = dataclasses.replace(change(1, 2), site="train.py:9")
    groups = [Group(mechanism="loader", options=((moved,), (change(1, 4),)))]
    second = Fake(tmp_path)
    Search(resume.Replay(second, before, groups, note=lambda text: None), groups).search()
    assert ("search", ("C1 num_workers=2",)) in second.ran
    assert ("search", ("C1 num_workers=4",)) not in second.ran


def test_what_has_changed_is_named(tmp_path: Path) -> None:
    before = earlier(Fake(tmp_path))
    runner = Fake(tmp_path)
    assert resume.mismatch(before, runner, asked_steps=9) == "--steps or --step-at is another"
    runner.command = [*runner.command, "--lr", "1"]
    assert resume.mismatch(before, runner, asked_steps=None) == "the command or its directory is another"
    runner = Fake(tmp_path)
    (tmp_path / "train.py").write_text("other\n")
    assert resume.mismatch(before, runner, asked_steps=None) == "train.py has changed"
    (tmp_path / "train.py").unlink()
    assert resume.mismatch(before, runner, asked_steps=None) == "train.py has changed"


def test_nothing_to_resume_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(GpudoctorError, match="there is nothing to resume in"):
        resume.read(tmp_path)
    envelope = Envelope(version="1", command="checkup", status="clean", exit_code=0)
    (tmp_path / "case.json").write_text(codec.encode_envelope(envelope))
    with pytest.raises(GpudoctorError, match="holds no trials"):
        resume.read(tmp_path)
    (tmp_path / "case.json").write_text("{")
    with pytest.raises(GpudoctorError, match=r"case\.json"):
        resume.read(tmp_path)


def test_the_last_directory_is_the_one_to_resume(tmp_path: Path) -> None:
    assert outputs.latest(None, below=tmp_path) == tmp_path / "gpudoctor-out"
    for name in ("gpudoctor-out", "gpudoctor-out-2", "gpudoctor-out-3"):
        (tmp_path / name).mkdir()
    assert outputs.latest(None, below=tmp_path) == tmp_path / "gpudoctor-out-3"
    assert outputs.latest(Path("x"), below=tmp_path) == Path("x")


def test_a_basis_survives_the_file(tmp_path: Path) -> None:
    before = earlier(Fake(tmp_path)).basis
    assert codec.decode(codec.encode(before), TrialBasis, what="basis") == before
    assert set(before.texts) == {"train.py"}
    assert set(before.changes) == {"C1 num_workers=2", "C1 num_workers=4"}
