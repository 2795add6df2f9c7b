"""`gpudoctor profile`: one watched run of an unedited command."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpudoctor import observe
from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Case, WatchPlan
from gpudoctor.tune import watched
from gpudoctor.tune.proof import training_records
from gpudoctor.tune.runner import failure
from gpudoctor.tune.sandbox import open_sandbox

# Importing a framework and reading the data before the first step may take this long beyond the budget.
START_UP_ALLOWANCE_S = 120.0


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

    Raises GpudoctorError when no step is ever seen.
    """
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
            )
            seen = observe.watch(
                sandbox.wrap(command, Path(folder)),
                plan,
                cwd=cwd,
                deadline_s=budget_s + START_UP_ALLOWANCE_S,
                on_progress=on_progress,
            )
    finally:
        sandbox.close()
    seen = dataclasses.replace(seen, command=tuple(command))
    problem = failure(seen)
    stopped = seen.stopped == "interrupted"
    counted = [record for record in training_records(seen) if record.steps or record.batches]
    if not counted and not stopped:
        raise no_step(problem)
    notes = []
    fewest = min((len(record.steps) for record in counted), default=0)
    if problem is None and not stopped and fewest < steps:
        notes.append(f"the command ended after {fewest} of {steps} steps; the result is what was seen")
    written = sorted({path for record in seen.records for path in record.writes})
    if written and sandbox.own is None:
        notes.append(f"the command wrote {', '.join(written[:5])}")
    numbers = watched.measurements(seen)
    case = dataclasses.replace(machine, watched=seen, measurements=(*machine.measurements, *numbers))
    error = None if problem is None else f"the command failed: {problem}; the result holds what was seen until then"
    return Profiled(case=case, notes=tuple(notes), error=error, interrupted=stopped)


def no_step(problem: str | None) -> GpudoctorError:
    """The error for a command that made no step; `problem` is how it failed, None when it ended by itself."""
    if problem is not None:
        return GpudoctorError(f"the command failed before its first step: {problem}", "run it alone first")
    return GpudoctorError(
        "no step was ever seen: the command ended without an optimizer step, a module call or a loader batch",
        "name the line that makes one step with --step-at FILE:LINE; Python must be able to import torch there",
    )
