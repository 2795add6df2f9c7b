"""Runs the user's command under observe with some changes applied, and turns each run into a Trial."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpudoctor import observe
from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Change, PatchedSource, ProofPlan, Trial, Watched, WatchPlan, WatchRecord
from gpudoctor.prescribe import patch
from gpudoctor.tune import proof as proving
from gpudoctor.tune.loops import loops_around
from gpudoctor.tune.sandbox import Sandbox, checksums, read_written
from gpudoctor.tune.search import Purpose, label

# A trial that takes this many times as long as expected hangs or is hopeless.
PATIENCE = 3.0
GRACE_S = 20.0
# Importing a framework and reading the data before the first step may take this long beyond the budget.
START_UP_ALLOWANCE_S = 120.0
# A proof run takes so many times as long as a trial: deterministic algorithms, hashes.
PROOF_SLOWER = 1.1


class Interrupted(Exception):  # noqa: N818 -- not an error: the person pressed Ctrl-C or the process was terminated
    """A run was interrupted; what was measured so far is kept by the caller."""


class CommandRunner:
    """Trials of one command. `steps` is the window of every trial; `deadline` is a time.monotonic() value."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        sandbox: Sandbox,
        deadline: float,
        step_at: str | None,
        guard_writes: bool,
        on_trial: Callable[[str], None],
    ) -> None:
        self.command = list(command)
        self.cwd = cwd
        self.sandbox = sandbox
        self.deadline = deadline
        self.step_at = step_at
        self.guard_writes = guard_writes
        self.on_trial = on_trial
        self.steps: int | None = None
        self.natural_end = False  # the unchanged command was seen to end by itself within a trial's share of the budget
        self.whole_s: float | None = None  # wall time of the whole command, where it was seen to end by itself
        self.baseline_s = 0.0  # expected wall time of a baseline trial
        self.seconds: dict[tuple[str, ...], float] = {}
        self.texts: dict[str, str] = {}  # original text by site file

    def left_s(self) -> float:
        """Seconds until the budget is used up."""
        return self.deadline - time.monotonic()

    def expected_s(self, changes: Sequence[Change]) -> float:
        """Expected wall time of one trial: as long as the last one like it, else as the last one to which it adds
        changes (they are kept only when they make it faster), in the end the baseline."""
        names = tuple(label(change) for change in changes)
        for count in range(len(names), 0, -1):
            if names[:count] in self.seconds:
                return self.seconds[names[:count]]
        return self.baseline_s

    def needed_s(self, runs: int, changes: Sequence[Change]) -> float:
        """Seconds for so many trials with these changes, their proof, and two confirming pairs."""
        confirmation = 2 * (self.baseline_s + min(self.baseline_s, self.expected_s(changes)))
        return self.proof_s(changes) + confirmation + runs * self.expected_s(changes)

    def affords(self, runs: int, changes: Sequence[Change]) -> bool:
        return self.left_s() > self.needed_s(runs, changes)

    def affords_confirmation(self, changes: Sequence[Change]) -> bool:
        return self.left_s() > self.baseline_s + self.expected_s(changes)

    def proves_whole(self, changes: Sequence[Change]) -> bool:
        """Whether the proof runs go to the end of the command: where its trials do, and where windows and one more run
        past the end of the loop would take longer."""
        if self.natural_end or self.whole_s is None:
            return self.natural_end
        runs = _proof_runs(changes)
        return any(map(proving.rewrites, changes)) and runs * self.whole_s <= runs * self.baseline_s + self.whole_s

    def proof_run_s(self, *, whole: bool) -> float:
        """Expected wall time of a proof run."""
        return PROOF_SLOWER * (self.whole_s if whole and self.whole_s is not None else self.baseline_s)

    def proof_s(self, changes: Sequence[Change]) -> float:
        """Seconds that the proof of these changes is expected to take, the run past the end of the loop included."""
        whole = self.proves_whole(changes)
        seconds = _proof_runs(changes) * self.proof_run_s(whole=whole)
        if not whole and any(map(proving.rewrites, changes)):
            seconds += self.baseline_s if self.whole_s is None else self.whole_s
        return seconds

    def run(self, changes: Sequence[Change], purpose: Purpose) -> Trial:
        """One timing trial: only steps and loader waits are watched."""
        names = tuple(label(change) for change in changes)
        self.on_trial(f"{purpose}: {', '.join(names) or 'unchanged'}")
        load = os.getloadavg()[0]
        begun = time.monotonic()
        plan = self.plan(changes, steps=self.steps, watch_calls=False)
        watched, _ = self.watch(plan, deadline_s=PATIENCE * max(self.baseline_s, 5.0) + GRACE_S)
        seconds = time.monotonic() - begun
        self.seconds[names] = seconds
        if not changes:
            self.baseline_s = seconds  # a trial is watched less than the first run: its own time plans better
            if self.natural_end:
                self.whole_s = seconds
        rate, unit, error = judge(watched, changed=bool(changes))
        records = proving.training_records(watched)
        steps = min((len(record.steps) for record in records), default=0)
        slowest = min(records, key=lambda record: record.steps_per_s or 0.0, default=None)
        return Trial(
            changes=names,
            purpose=purpose,
            rate=rate,
            unit=unit,
            steps=steps,
            median_step_ms=median_step_ms(slowest) if slowest else None,
            # ranks in lock-step go as fast as the one that waits longest
            loader_wait_ms=max((wait for r in records if (wait := mean_loader_wait_ms(r)) is not None), default=None),
            steady_wait=max((share for r in records if (share := steady_wait(r)) is not None), default=None),
            seconds=round(seconds, 2),
            load_average=round(load, 2),
            error=error,
        )

    def plan(
        self,
        changes: Sequence[Change],
        *,
        steps: int | None,
        watch_calls: bool,
        max_seconds: float | None = None,
        least_steps: int = 1,
        probe_fetch: bool = False,
        proof: ProofPlan | None = None,
        end_loop_after: int | None = None,
    ) -> WatchPlan:
        """A plan with the changes' patched texts; GpudoctorError when an edit no longer applies. With end_loop_after
        the loops of training are left early as well."""
        patched = self.patched(changes) if end_loop_after is None else self.shortened(changes)
        return WatchPlan(
            record_dir="",
            steps=steps,
            max_seconds=max_seconds,
            least_steps=least_steps,
            step_at=self.step_at,
            patched=tuple(patched),
            environment={name: value for change in changes for name, value in change.environment.items()},
            watch_calls=watch_calls,
            probe_fetch=probe_fetch,
            end_loop_after=end_loop_after,
            proof=proof,
            guard_writes="deny" if self.guard_writes and self.sandbox.own is None and changes else "list",
            write_root=str(self.cwd),
        )

    def patched(self, changes: Sequence[Change]) -> list[PatchedSource]:
        """The changed text of every file that the changes edit."""
        sources = []
        for file, (_, new, lines) in self.patched_texts(changes).items():
            sources.append(PatchedSource(path=str(self.cwd / file), text=new, lines=lines))
        return sources

    def shortened(self, changes: Sequence[Change]) -> list[PatchedSource]:
        """As `patched`, with the loops that are left early, and with the other files of the command that hold some."""
        changed = self.patched_texts(changes)
        texts = {**self.texts, **{file: new for file, (_, new, _) in changed.items()}}
        known = {(self.cwd / file).resolve() for file in texts}
        for word in self.command:
            if word.endswith(".py") and (self.cwd / word).is_file() and (self.cwd / word).resolve() not in known:
                with contextlib.suppress(OSError, UnicodeDecodeError):  # nothing of it is changed either
                    texts[word] = self.text(word)
        lines = {file: lines for file, (_, _, lines) in changed.items()}
        loops = loops_around(texts, lines)
        return [
            PatchedSource(
                path=str(self.cwd / file), text=texts[file], lines=lines.get(file, ()), end_loops=loops.get(file, ())
            )
            for file in sorted(changed.keys() | loops.keys())
        ]

    def patched_texts(self, changes: Sequence[Change]) -> dict[str, tuple[str, str, tuple[int, ...]]]:
        """Old text, new text and changed lines by file; all edits of a file are applied together."""
        edits = [edit for change in changes for edit in change.edits]
        result = {}
        for file in sorted({edit.site.rpartition(":")[0] for edit in edits}):
            old = self.text(file)
            of_file = [edit for edit in edits if edit.site.rpartition(":")[0] == file]
            done = patch.apply_edits(old, of_file, file=file)
            if done.refused:
                edit, why = done.refused[0]
                raise GpudoctorError(f"the edit at {edit.site} cannot be made: {why}")
            result[file] = (old, done.text, done.lines)
        return result

    def text(self, file: str) -> str:
        """The original text of a site's file, line ends kept."""
        if file not in self.texts:
            self.texts[file] = (self.cwd / file).read_bytes().decode("utf-8")
        return self.texts[file]

    def watch(self, plan: WatchPlan, *, deadline_s: float) -> tuple[Watched, tuple[str, ...]]:
        """Run the command once in the sandbox; returns what was watched and the lines it printed."""
        watched, lines, _ = self._watch(plan, deadline_s, list_written=False)
        return watched, lines

    def watch_to_its_end(
        self, plan: WatchPlan, *, deadline_s: float
    ) -> tuple[Watched, tuple[str, ...], dict[str, str] | None]:
        """As `watch`, and a checksum of each file written below the working directory, where the command ended by
        itself; None when it did not, or files could not be listed."""
        return self._watch(plan, deadline_s, list_written=True)

    def _watch(
        self, plan: WatchPlan, deadline_s: float, *, list_written: bool
    ) -> tuple[Watched, tuple[str, ...], dict[str, str] | None]:
        with tempfile.TemporaryDirectory(prefix="gpudoctor-run-") as folder:
            records, output = Path(folder) / "records", Path(folder) / "output"
            records.mkdir()
            plan = dataclasses.replace(plan, record_dir=str(records))
            command = self.sandbox.wrap(self.command, Path(folder), list_written=list_written)
            watched = observe.watch(command, plan, cwd=self.cwd, deadline_s=max(1.0, deadline_s), output=output)
            lines = tuple(output.read_text(errors="replace").splitlines()) if output.exists() else ()
            files = None
            if list_written and watched.stopped == "exit":
                written = read_written(Path(folder))
                files = written if self.sandbox.own is not None else checksums(self.cwd, watched.writes)
        if watched.stopped == "interrupted":
            raise Interrupted
        return dataclasses.replace(watched, command=tuple(self.command)), lines, files


def _proof_runs(changes: Sequence[Change]) -> int:
    """Unchanged, changed, and once more where some of the changes must not change any number and others may."""
    return 3 if proving.proven_alone(changes) else 2


def judge(watched: Watched, *, changed: bool) -> tuple[float | None, str, str | None]:
    """(rate, unit, error): the slowest rank's steps/s, or batches/s where step counts disagree."""
    records = proving.training_records(watched)
    error = failure(watched)
    if error is not None:
        return None, "steps/s", error
    if changed:
        missed = {path: lines for record in records for path, lines in record.patched_missed.items() if lines}
        executed = any(record.patched_lines for record in records)
        if missed and not executed:
            path, lines = next(iter(missed.items()))
            return None, "steps/s", f"the changed line {Path(path).name}:{lines[0]} was never executed"
    unit = "batches/s" if any(record.counts_differ and record.batches_per_s for record in records) else "steps/s"
    rates = [record.batches_per_s if unit == "batches/s" else record.steps_per_s for record in records]
    known = [rate for rate in rates if rate]
    if not known:
        return None, unit, "no step was seen"
    return min(known), unit, None


def failure(watched: Watched) -> str | None:
    """One line that says how the command failed, or None when it was stopped by us or ended with 0."""
    for record in watched.records:
        if record.ended == "exception" and record.exception:
            return record.exception
    if watched.stopped == "deadline":
        return "the command did not reach the last step in time and was ended"
    if watched.stopped == "exit" and watched.exit_code not in (0, None):
        tail = (watched.stderr_tail.strip().splitlines() or ["it printed nothing on stderr"])[-1]
        return f"the command ended with exit code {watched.exit_code}: {tail}"
    return None


def median_step_ms(record: WatchRecord) -> float | None:
    """Median wall time of a step; bursts from the prefetch queue make it lie about the rate."""
    return round(statistics.median(step.wall_ms for step in record.steps), 3) if record.steps else None


def steady_wait(record: WatchRecord) -> float | None:
    """The share of the steps behind the warm-up that waits for the loader: without the start of its workers."""
    total = sum(step.wall_ms for step in record.steady)
    return round(sum(step.loader_wait_ms for step in record.steady) / total, 4) if total else None


def mean_loader_wait_ms(record: WatchRecord) -> float | None:
    """Mean time a step waits for its batch."""
    return round(statistics.fmean(step.loader_wait_ms for step in record.steps), 3) if record.steps else None
