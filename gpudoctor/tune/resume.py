"""`tune --resume`: what an earlier tune watched and tried counts again, where command, window and texts are the same.

Only the search is spared. The baseline is run once afresh: where the machine gives another rate than then, the old
trials are not used. Proof and confirmation are never taken from a file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from gpudoctor import codec
from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Change, Envelope, LoaderStudy, Prescription, Trial, TrialBasis, Watched
from gpudoctor.tune import stats
from gpudoctor.tune.runner import CommandRunner
from gpudoctor.tune.search import Group, Purpose, label

DRIFT = 0.10  # the fresh baseline may differ from the old ones by this, or by as much as those among themselves


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """An earlier tune that got as far as its trials."""

    basis: TrialBasis
    watched: Watched
    study: LoaderStudy | None
    prescription: Prescription


def read(out: Path) -> Earlier:
    """The tune whose case.json lies in `out`; GpudoctorError when there is none that can be resumed."""
    path = out / "case.json"
    try:
        envelope = codec.decode(path.read_bytes(), Envelope, what=str(path))
    except OSError as error:
        raise GpudoctorError(
            f"there is nothing to resume in {out}: {error.strerror}", "name the earlier tune's directory with --out"
        ) from None
    told = envelope.prescription
    if envelope.command != "tune" or told is None or told.basis is None or envelope.case is None:
        raise GpudoctorError(f"{path} holds no trials that could be resumed", "run tune without --resume")
    case = envelope.case
    if case.watched is None:
        raise GpudoctorError(f"{path} does not hold the watched run", "run tune without --resume")
    return Earlier(basis=told.basis, watched=case.watched, study=case.loader, prescription=told)


def basis(runner: CommandRunner, groups: Sequence[Group], *, asked_steps: int | None, seconds: float) -> TrialBasis:
    """What this tune's trials belong to; seconds: of the watched run."""
    assert runner.steps is not None
    return TrialBasis(
        command=tuple(runner.command),
        cwd=str(runner.cwd),
        asked_steps=asked_steps,
        step_at=runner.step_at,
        steps=runner.steps,
        natural_end=runner.natural_end,
        seconds=round(seconds, 3),
        texts={file: _checksum(runner.cwd / file) for file in _files(runner, runner.texts)},
        changes=_fingerprints(groups),
    )


def mismatch(earlier: Earlier, runner: CommandRunner, *, asked_steps: int | None) -> str | None:
    """Why the earlier trials say nothing about this command, or None."""
    then = earlier.basis
    if then.command != tuple(runner.command) or then.cwd != str(runner.cwd):
        return "the command or its directory is another"
    if (then.asked_steps, then.step_at) != (asked_steps, runner.step_at):
        return "--steps or --step-at is another"
    changed = [file for file in _files(runner, then.texts) if then.texts.get(file) != _checksum(runner.cwd / file)]
    return f"{changed[0]} has changed" if changed else None


def _files(runner: CommandRunner, known: Sequence[str] | dict[str, str]) -> list[str]:
    """Files that hold sites, and scripts that the command names."""
    named = {word for word in runner.command if word.endswith(".py") and (runner.cwd / word).is_file()}
    return sorted({*known, *named})


def _checksum(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "not readable"


def _fingerprints(groups: Sequence[Group]) -> dict[str, str]:
    """A checksum of the edits by the label that trials name a change with: ids are given anew in each tune."""
    every = [change for group in groups for option in group.options for change in option]
    return {
        label(change): hashlib.sha256(repr((change.site, change.edits, change.environment)).encode()).hexdigest()[:16]
        for change in every
    }


class Replay:
    """A Runner that answers from the earlier trials where it can, and asks the real one else."""

    def __init__(
        self, runner: CommandRunner, earlier: Earlier, groups: Sequence[Group], *, note: Callable[[str], None]
    ) -> None:
        self.runner = runner
        self.note = note
        self.checked = False
        self.stored: dict[tuple[str, ...], list[Trial]] = {}
        now = _fingerprints(groups)
        same = {name for name, value in earlier.basis.changes.items() if now.get(name) == value}
        for trial in earlier.prescription.trials:
            searched = trial.rate is not None and trial.purpose in ("baseline", "search", "leave-one-out")
            if searched and set(trial.changes) <= same:
                self.stored.setdefault(trial.changes, []).append(trial)

    def run(self, changes: Sequence[Change], purpose: Purpose) -> Trial:
        """A trial of the earlier tune, else a fresh one; the first baseline is always fresh."""
        names = tuple(label(change) for change in changes)
        if not self.checked and not changes:
            self.checked = True
            trial = self.runner.run(changes, purpose)
            self._compare(trial)
            return trial
        if purpose != "confirm" and self.stored.get(names):
            old = self.stored[names].pop(0)
            self.runner.on_trial(f"{purpose}: {', '.join(names) or 'unchanged'}: as tried before")
            if old.seconds is not None:
                self.runner.seconds[names] = old.seconds
            return dataclasses.replace(old, purpose=purpose)
        return self.runner.run(changes, purpose)

    def _compare(self, fresh: Trial) -> None:
        before = [trial.rate for trial in self.stored.get((), ()) if trial.rate is not None]
        if not before or fresh.rate is None:
            self.stored.clear()
            return
        allowed = max(DRIFT, stats.spread(before))
        ratio = fresh.rate / statistics.median(before)
        if abs(math.log(ratio)) > math.log1p(allowed):
            self.stored.clear()
            self.note(
                f"the earlier trials are not used: the unchanged command now runs at {ratio:.2f}x of its rate then"
            )
            return
        self.note(f"{sum(map(len, self.stored.values()))} trials of the earlier tune are used again")

    def affords(self, runs: int, changes: Sequence[Change]) -> bool:
        known = len(self.stored.get(tuple(label(change) for change in changes), ())) if self.checked else 0
        return known >= runs or self.runner.affords(runs, changes)

    def affords_confirmation(self, changes: Sequence[Change]) -> bool:
        return self.runner.affords_confirmation(changes)
