"""`gpudoctor profile`: one watched run of an unedited command."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpudoctor import observe
from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Case, TraceFacts, Watched, WatchPlan, WatchRecord
from gpudoctor.read.traces import read_traces
from gpudoctor.tune import watched
from gpudoctor.tune.proof import training_records
from gpudoctor.tune.runner import START_UP_ALLOWANCE_S, failure
from gpudoctor.tune.sandbox import open_sandbox

# Steps recorded with torch.profiler once the watched ones are over, where there is a GPU; and the time they may take.
PROFILED_STEPS = 3
PROFILED_ALLOWANCE_S = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """The machine's Case with what was watched. `error`: how the user's command failed, after some steps."""

    case: Case
    notes: tuple[str, ...]
    error: str | None
    interrupted: bool


def profile(
    command: Sequence[str],
    machine: Case,
    *,
    cwd: Path,
    steps: int,
    budget_s: float,
    step_at: str | None,
    on_progress: Callable[[int, int | None, float], None] | None = None,
) -> Profiled:
    """Watch the command for `steps` steps or `budget_s` seconds; what it writes below `cwd` goes into an overlay.

    On a machine with a GPU a few more steps are recorded with torch.profiler afterwards.

    Raises GpudoctorError when no step is ever seen.
    """
    profiled = PROFILED_STEPS if machine.gpus or machine.host.gpus_on_bus else 0
    sandbox = open_sandbox(cwd)
    try:
        with tempfile.TemporaryDirectory(prefix="gpudoctor-run-") as folder:
            records = Path(folder) / "records"
            records.mkdir()
            plan = WatchPlan(
                record_dir=str(records),
                steps=steps,
                max_seconds=budget_s,
                step_at=step_at,
                probe_fetch=True,
                write_root=str(cwd),
                profiler_steps=profiled,
            )
            seen = observe.watch(
                sandbox.wrap(command, Path(folder)),
                plan,
                cwd=cwd,
                deadline_s=budget_s + START_UP_ALLOWANCE_S + (PROFILED_ALLOWANCE_S if profiled else 0.0),
                on_progress=on_progress,
            )
            traces = _traces(seen, records)
    finally:
        sandbox.close()
    seen = dataclasses.replace(seen, command=tuple(command))
    seen, shown = watched.judged(seen, traces)
    problem = failure(seen)
    stopped = seen.stopped == "interrupted"
    counted = [record for record in training_records(seen) if record.steps or record.batches]
    if counted and all(record.ended in ("steps", "time") for record in counted):
        problem = None  # what happened to it afterwards, under the profiler, is no fault of the command
    if not counted and not stopped:
        raise no_step(problem)
    notes = []
    fewest = min((len(record.steps) for record in counted), default=0)
    if problem is None and not stopped and fewest < steps:
        notes.append(f"the command ended after {fewest} of {steps} steps; the result is what was seen")
    written = sorted({path for record in seen.records for path in record.writes})
    if written and sandbox.own is None:
        notes.append(f"the command wrote {', '.join(written[:5])}")
    notes += _told_once(counted, profiled)
    numbers = watched.measurements(seen, traces)
    case = dataclasses.replace(
        machine,
        watched=seen,
        traces=shown,
        measurements=(*machine.measurements, *numbers),
    )
    error = None if problem is None else f"the command failed: {problem}; the result holds what was seen until then"
    return Profiled(case=case, notes=tuple(notes), error=error, interrupted=stopped)


def _traces(seen: Watched, folder: Path) -> dict[int, TraceFacts]:
    """What the profiler windows show, by process id; a trace that cannot be read is as none."""
    files = {record.window.trace: record for record in seen.records if record.window and record.window.trace}
    found: dict[int, TraceFacts] = {}
    for job in read_traces([folder / name for name in files]).jobs:
        for facts in job:
            record = files[Path(facts.file).name]
            rank = record.rank if record.rank is not None else len(found)
            found[record.pid] = dataclasses.replace(
                facts,
                file=f"profiler window of rank {rank}",
                rank=rank,
                verdict="",  # that is the record's
            )
    return found


def _told_once(counted: list[WatchRecord], profiled: int) -> list[str]:
    """Notes about warm-up and the profiler window, which ranks have in common."""
    notes = []
    if any(len(record.steps) >= 8 and record.steady_from >= len(record.steps) // 2 for record in counted):
        notes.append("the step time had not become steady half-way: more --steps would tell more")
    if profiled and any(record.cuda for record in counted):
        missing = [record for record in counted if record.window is None or record.window.trace is None]
        reasons = {
            record.window.skipped or "it did not end" if record.window else "too few steps" for record in missing
        }
        if missing:
            notes.append(f"what the GPU did was not recorded: {', '.join(sorted(reasons))}")
    elif profiled and counted:
        notes.append("the command never used a GPU")
    return notes


def no_step(problem: str | None) -> GpudoctorError:
    """The error for a command that made no step; `problem` is how it failed, None when it ended by itself."""
    if problem is not None:
        return GpudoctorError(f"the command failed before its first step: {problem}", "run it alone first")
    return GpudoctorError(
        "no step was ever seen: the command ended without an optimizer step, a module call or a loader batch",
        "name the line that makes one step with --step-at FILE:LINE; Python must be able to import torch there",
    )
