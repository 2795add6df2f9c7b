"""`gpudoctor tune`: baseline, candidate changes, trials, proof, confirmation, files."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gpudoctor import checkup, codec
from gpudoctor.errors import EXIT_INTERRUPTED, GpudoctorError
from gpudoctor.model import (
    Case,
    Change,
    ChangeClass,
    Envelope,
    Gain,
    LoaderSettings,
    Measurement,
    Prescription,
    ProofResult,
    Scaling,
    TrialBasis,
    Watched,
)
from gpudoctor.prescribe import launch
from gpudoctor.prescribe.workers import usable_cpus
from gpudoctor.tune import candidates, first_run, loader_study, outputs, resume, scaling, vetting, watched
from gpudoctor.tune import proof as proving
from gpudoctor.tune.first_run import FirstRun
from gpudoctor.tune.profiling import no_step
from gpudoctor.tune.rank_commands import with_ranks
from gpudoctor.tune.runner import CommandRunner, Interrupted, failure, judge
from gpudoctor.tune.sandbox import open_sandbox
from gpudoctor.tune.search import Group, Outcome, Search


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    command: tuple[str, ...]
    cwd: Path
    out: Path
    budget_s: float = 600.0
    steps: int | None = None
    step_at: str | None = None
    allow: frozenset[ChangeClass] = frozenset({"exact", "stochastic"})
    allow_writes: bool = False
    nproc: tuple[int, ...] = ()
    resume: bool = False
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    fail_on: str = "never"
    require_gpu: int | None = None


@dataclass(slots=True, kw_only=True)
class Session:
    """State of one tune, so that an interruption can report what was measured so far."""

    options: Options
    on_stage: Callable[[str], None]
    machine: Case
    case: Case = field(default_factory=Case)
    outcome: Outcome = field(default_factory=Outcome)
    advice: tuple[Change, ...] = ()
    proof: ProofResult | None = None
    scaling: Scaling | None = None
    basis: TrialBasis | None = None
    notes: list[str] = field(default_factory=list)


def tune(options: Options, machine: Case, *, begun: float, on_stage: Callable[[str], None]) -> Envelope:
    """Run the closed loop on the command and write the files into `options.out`.

    machine: the Case of this machine. begun: the time.monotonic() from which the budget counts. Raises GpudoctorError
    when the command fails or no step is ever seen. An interruption returns what was measured so far, exit code 130.
    """
    deadline = begun + options.budget_s
    left = dataclasses.replace(options, budget_s=max(1.0, deadline - time.monotonic()))
    session = Session(options=left, on_stage=on_stage, machine=machine, case=machine)
    earlier = resume.read(options.out) if options.resume else None
    sandbox = open_sandbox(options.cwd)
    if sandbox.own is None:
        session.notes.append(f"trials run without an overlay ({sandbox.reason}): writes below it are refused instead")
    runner = CommandRunner(
        options.command,
        cwd=options.cwd,
        sandbox=sandbox,
        deadline=deadline,
        step_at=options.step_at,
        guard_writes=not options.allow_writes,
        on_trial=on_stage,
    )
    try:
        ranks_run = _scale(session, runner, earlier) if options.nproc else None
        why_not = resume.mismatch(earlier, runner, asked_steps=options.steps) if earlier else None
        if why_not is not None:
            earlier = None
            session.notes.append(f"the earlier trials are not used: {why_not}")
        if earlier is not None:
            seconds = _take_up(session, runner, earlier)
        else:
            seconds = _discover(session, runner, ranks_run or _watch(session, runner))
        groups = _candidates(session, runner, earlier)
        session.basis = resume.basis(runner, groups, asked_steps=options.steps, seconds=seconds)
        trials = runner if earlier is None else resume.Replay(runner, earlier, groups, note=session.notes.append)
        search = Search(trials, groups, vetting.Vetting(runner, session).vet)
        session.outcome = search.outcome
        if groups:
            on_stage(f"{sum(len(group.options) for group in groups)} settings to try")
            search.search()
            if session.outcome.starved:
                session.outcome.reason += f": give --budget {_enough_s(options.budget_s, runner, groups)} or more"
        else:
            assert session.case.watched is not None
            few = first_run.too_few_steps(session.case.watched, session.options.budget_s)
            session.outcome.verdict = "no verdict" if few else "nothing"
            session.outcome.reason = few or (
                "no change is on offer: nothing that tune can change costs this command time"
            )
        return _finish(session, runner)
    except (Interrupted, KeyboardInterrupt):
        return _interrupted(session)
    finally:
        sandbox.close()


def _scale(session: Session, runner: CommandRunner, earlier: resume.Earlier | None) -> FirstRun | None:
    """The command once for each count of ranks; the loop goes on with the largest count that worked, and with its run,
    where it was run now."""
    options = session.options
    first: FirstRun | None = None
    before = earlier.prescription.scaling if earlier is not None else None
    if before is not None and tuple(row.ranks for row in before.rows) == options.nproc:
        found = before
        session.notes.append("the table of the rate by ranks is the earlier tune's")
    else:
        found, first = scaling.scale(
            options.command,
            options.nproc,
            cwd=options.cwd,
            sandbox=runner.sandbox,
            budget_s=options.budget_s * scaling.BUDGET_SHARE,
            steps=options.steps,
            step_at=options.step_at,
            gpu=bool(session.machine.gpus),
            cpus=math.floor(usable_cpus(session.machine)),
            check=lambda seen: _guard_files(session, runner, seen),
            on_stage=session.on_stage,
        )
    session.scaling = found
    largest = max(row.ranks for row in found.rows if row.rate is not None)
    command = tuple(with_ranks(options.command, largest))
    left_s = runner.left_s() + (first.seconds if first is not None else 0.0)
    session.options = dataclasses.replace(options, command=command, budget_s=max(1.0, left_s))
    runner.command = list(command)
    session.notes.append(f"changes are tried with {largest} {'rank' if largest == 1 else 'ranks'}")
    return first


def _watch(session: Session, runner: CommandRunner) -> FirstRun:
    session.on_stage("watching the command as it is")
    return first_run.watch(runner, steps=session.options.steps, budget_s=session.options.budget_s)


def _discover(session: Session, runner: CommandRunner, first: FirstRun) -> float:
    """Plan by the first run; returns how long it took. GpudoctorError where it shows nothing."""
    seen, budget_s = first.seen, session.options.budget_s
    problem = failure(seen)
    records = proving.training_records(seen)
    if problem is not None and not any(record.steps for record in records):
        raise GpudoctorError(
            f"the command failed unchanged: {problem}", "run it alone first; tune needs one that works"
        )
    rate, _, error = judge(dataclasses.replace(seen, stopped="steps", exit_code=0), changed=False)
    if rate is None:
        raise no_step(problem if problem is not None or seen.stopped == "exit" else error)
    if problem is not None:
        session.notes.append(f"the unchanged command ended early: {problem}; what was seen until then is used")
    _guard_files(session, runner, seen)
    runner.steps = first_run.window(first, budget_s)
    runner.natural_end = first.ended and first_run.holds_whole_runs(first, budget_s)
    _plan_by(session, runner, first)
    return first.seconds


def _candidates(session: Session, runner: CommandRunner, earlier: resume.Earlier | None) -> list[Group]:
    """The groups to try. Where several numbers of workers would be tried, the loader is searched on its own first."""

    def look() -> tuple[list[Group], tuple[Change, ...], list[str]]:
        options = session.options
        return candidates.candidates(
            session.case, runner, select=options.select, ignore=options.ignore, allow=options.allow
        )

    groups, session.advice, notes = look()
    site = candidates.workers_to_choose(groups)
    seconds = loader_study.search_s(session.case, runner.left_s())
    found = earlier.study if earlier is not None else None
    if earlier is None and site is not None and seconds is not None:
        found, told = loader_study.study(session.case, runner, site, seconds=seconds, on_stage=session.on_stage)
        session.notes += told
    if found is not None:
        session.case = dataclasses.replace(session.case, loader=found)
        groups, session.advice, notes = look()
    session.notes += notes
    return groups


def _enough_s(budget_s: float, runner: CommandRunner, groups: list[Group]) -> int:
    """About the budget that holds a trial. What is missing counts twice: the runs before the trials take a share."""
    missing = runner.needed_s(1, groups[0].options[0]) - runner.left_s()
    return math.ceil((budget_s + 2 * max(0.0, missing)) / 10) * 10


def _take_up(session: Session, runner: CommandRunner, earlier: resume.Earlier) -> float:
    """The watched run of the earlier tune in place of a fresh one, with its window."""
    _guard_files(session, runner, earlier.watched)
    runner.steps, runner.natural_end = earlier.basis.steps, earlier.basis.natural_end
    _plan_by(session, runner, FirstRun(seen=earlier.watched, seconds=earlier.basis.seconds))
    return earlier.basis.seconds


def _plan_by(session: Session, runner: CommandRunner, first: FirstRun) -> None:
    """What a trial will take, and the Case that the rules judge."""
    first_run.plan_trials(runner, first)
    session.case = dataclasses.replace(
        session.machine,
        watched=first.seen,
        measurements=(*session.machine.measurements, *watched.measurements(first.seen)),
    )


def _guard_files(session: Session, runner: CommandRunner, seen: Watched) -> None:
    """Without an overlay a trial would overwrite the user's files: stop and name them, unless that is allowed."""
    written = sorted({path for record in seen.records for path in record.writes})
    if not written:
        return
    names = ", ".join(written[:5]) + (f" and {len(written) - 5} more" if len(written) > 5 else "")
    if runner.sandbox.own is not None:
        note = f"the command writes {names}; trials write into an overlay, your files are untouched"
        if note not in session.notes:
            session.notes.append(note)
    elif not session.options.allow_writes:
        raise GpudoctorError(
            f"the command writes files: {names}, and this system offers no overlay ({runner.sandbox.reason})",
            "trials would write them again: give --allow-writes if that does no harm",
        )


def _finish(session: Session, runner: CommandRunner) -> Envelope:
    """Write the files and assemble the envelope."""
    options, outcome = session.options, session.outcome
    kept = outcome.kept
    files = {"report": _shown(options.out / "report.md"), "case": _shown(options.out / "case.json")}
    texts = {file: (old, new) for file, (old, new, _) in runner.patched_texts(kept).items()} if kept else {}
    findings = checkup.examine(session.case, command="tune", fail_on="never").findings
    config = launch.launch_config(session.case, options.command, findings=findings)
    config = launch.with_settings(config, kept)
    if texts:
        files["patch"] = _shown(options.out / "train.patch")
        outputs.write(options.out / "train.patch", outputs.diff(texts))
    if kept:
        files |= {"launch": _shown(options.out / "launch.sh")}
        outputs.write(options.out / "launch.sh", launch.render(config), executable=True)
    prescription = Prescription(
        launch=config,
        loader=_loader_settings(session.case, outcome),
        changes=(*kept, *outcome.dropped, *session.advice),
        trials=tuple(outcome.trials),
        basis=session.basis,
        proof=session.proof,
        scaling=session.scaling,
        files=files,
        verdict=verdict(outcome),
    )
    envelope = checkup.examine(
        session.case,
        command="tune",
        select=options.select,
        ignore=options.ignore,
        fail_on=options.fail_on,
        require_gpu=options.require_gpu,
        measurements=(*session.case.measurements, *_scaling(session), *_speedup(session, runner)),
        prescription=prescription,
        notes=tuple(session.notes),
    )
    _write_reports(envelope, options.out)
    return envelope


def _shown(path: Path) -> str:
    """Relative to where the person stands when it lies below, else absolute."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _write_reports(envelope: Envelope, out: Path) -> None:
    from gpudoctor import report

    outputs.write(out / "case.json", codec.encode_envelope(envelope) + "\n")
    outputs.write(out / "report.md", report.render(envelope, "markdown", width=None, unicode=True, color=False))


def _interrupted(session: Session) -> Envelope:
    prescription = Prescription(
        changes=(*session.outcome.dropped, *session.advice),
        trials=tuple(session.outcome.trials),
        basis=session.basis,
        scaling=session.scaling,
        verdict="interrupted: nothing was confirmed, so nothing is prescribed",
    )
    envelope = checkup.examine(
        session.case,
        command="tune",
        fail_on="never",
        measurements=(*session.case.measurements, *_scaling(session)),
        prescription=prescription,
        errors=("interrupted",),
        notes=tuple(session.notes),
    )
    envelope = dataclasses.replace(envelope, status="failed", exit_code=EXIT_INTERRUPTED)
    _write_reports(envelope, session.options.out)
    return envelope


def verdict(outcome: Outcome) -> str:
    """The result in one sentence."""
    if outcome.verdict == "better" and outcome.comparison is not None:
        c = outcome.comparison
        return f"{c.ratio:.2f}x the rate ({c.low:.2f} to {c.high:.2f}) in {c.baseline_runs} fresh pairs of runs"
    head = "no verdict" if outcome.verdict == "no verdict" else "nothing to change"
    return f"{head}: {outcome.reason}"


def _scaling(session: Session) -> tuple[Measurement, ...]:
    return scaling.measurements(session.scaling) if session.scaling is not None else ()


def _speedup(session: Session, runner: CommandRunner) -> tuple[Measurement, ...]:
    comparison = session.outcome.comparison
    if comparison is None or session.outcome.verdict != "better":
        return ()
    confirm = [trial for trial in session.outcome.trials if trial.purpose == "confirm"]
    return (
        Measurement(
            metric="tune.speedup",
            subject="command",
            value=round(comparison.ratio, 4),
            unit="x",
            spread=(round(comparison.low, 4), round(comparison.high, 4)),
            samples=comparison.baseline_runs,
            settings={
                "steps": runner.steps,
                "baseline_runs": comparison.baseline_runs,
                "tuned_runs": comparison.candidate_runs,
                "unit_of_rate": confirm[0].unit,
                "run_to_run_deviation": round(comparison.spread, 4),
            },
        ),
    )


def _loader_settings(case: Case, outcome: Outcome) -> tuple[LoaderSettings, ...]:
    """The kept loader arguments by call site; num_workers is always present."""
    by_site: dict[str, dict[str, int | bool | None]] = {}
    classes: dict[str, ChangeClass] = {}
    gains: dict[str, Gain | None] = {}
    for change in outcome.kept:
        for edit in change.edits:
            if edit.kind == "loader-arguments":
                by_site.setdefault(edit.site, {}).update(edit.arguments)
            elif edit.kind == "whole-batch":
                by_site.setdefault(edit.site, {})["batch_size"] = None
            else:
                continue
            gains[edit.site] = change.gain
            if classes.get(edit.site) != "stochastic":
                classes[edit.site] = change.change_class
    present = {
        loader.site: loader.num_workers
        for record in (case.watched.records if case.watched else ())
        for loader in record.loaders
    }
    return tuple(
        LoaderSettings(
            site=site,
            arguments={"num_workers": present.get(site, 0), **arguments},
            change_class=classes[site],
            gain=gains[site],
            confidence="certain",
        )
        for site, arguments in sorted(by_site.items())
    )
