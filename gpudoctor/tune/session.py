"""`gpudoctor tune`: baseline, candidate changes, trials, proof, confirmation, files."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpudoctor import checkup, codec
from gpudoctor.errors import EXIT_INTERRUPTED, GpudoctorError
from gpudoctor.model import (
    Case,
    Change,
    ChangeClass,
    Edit,
    Envelope,
    Gain,
    LoaderSettings,
    Measurement,
    Prescription,
    ProofResult,
    Trial,
    Watched,
    WatchedLoader,
)
from gpudoctor.prescribe import changes as proposing
from gpudoctor.prescribe import launch
from gpudoctor.source import later_use
from gpudoctor.tune import outputs, vetting, watched
from gpudoctor.tune import proof as proving
from gpudoctor.tune.profiling import no_step
from gpudoctor.tune.runner import PROOF_RUNS, CommandRunner, Interrupted, failure, judge
from gpudoctor.tune.sandbox import open_sandbox
from gpudoctor.tune.search import Group, Outcome, Search

# Shares of the budget: the first, fully watched run ends here at the latest; one trial should not cost more than this.
DISCOVERY_SHARE = 0.25
TRIAL_SHARE = 0.12
NATURAL_SHARE = 0.15  # a script that ends by itself this early is run to its end: its code after the loop is proven too
MINIMUM_STEPS = 16
START_UP_ALLOWANCE_S = 120.0
# What a step may still wait for its loader before changing the loader is pointless; the same 2 % as everywhere.
POINTLESS_WAIT = 0.02


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
    notes: list[str] = field(default_factory=list)


def tune(options: Options, machine: Case, *, on_stage: Callable[[str], None]) -> Envelope:
    """Run the closed loop on the command and write the files into `options.out`.

    machine: the Case of this machine. Raises GpudoctorError when the command fails or no step is ever seen.
    An interruption returns what was measured so far, with exit code 130.
    """
    session = Session(options=options, on_stage=on_stage, machine=machine, case=machine)
    sandbox = open_sandbox(options.cwd)
    if sandbox.own is None:
        session.notes.append(f"trials run without an overlay ({sandbox.reason}): writes below it are refused instead")
    runner = CommandRunner(
        options.command,
        cwd=options.cwd,
        sandbox=sandbox,
        deadline=time.monotonic() + options.budget_s,
        step_at=options.step_at,
        guard_writes=not options.allow_writes,
        on_trial=on_stage,
    )
    try:
        _discover(session, runner)
        groups = _groups(session, runner)
        search = Search(runner, groups, vetting.Vetting(runner, session).vet)
        session.outcome = search.outcome
        if groups:
            on_stage(f"{sum(len(group.options) for group in groups)} settings to try")
            search.search()
        else:
            session.outcome.reason = "no change is on offer: nothing that tune can change costs this command time"
        return _finish(session, runner)
    except (Interrupted, KeyboardInterrupt):
        return _interrupted(session)
    finally:
        sandbox.close()


def _discover(session: Session, runner: CommandRunner) -> None:
    """One fully watched run: what the steps wait for, what the loaders are, and how long a run takes."""
    options = session.options
    session.on_stage("watching the command as it is")
    begun = time.monotonic()
    limit = options.budget_s * DISCOVERY_SHARE
    plan = runner.plan((), steps=options.steps, watch_calls=True, max_seconds=limit, probe_fetch=True)
    seen, _ = runner.watch(plan, deadline_s=limit + START_UP_ALLOWANCE_S)
    elapsed = time.monotonic() - begun
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
    runner.baseline_s = elapsed
    runner.steps = _window(seen, elapsed, options)
    slowest = min(len(record.steps) or record.batches for record in records)
    if runner.steps < slowest:
        start_up = max(record.start_up_s or 0.0 for record in records)
        runner.baseline_s = start_up + (elapsed - start_up) * runner.steps / slowest
    ended = all(record.ended == "exit" for record in records) and seen.exit_code == 0
    runner.natural_end = ended and elapsed <= options.budget_s * NATURAL_SHARE
    runner.reserve_s = PROOF_RUNS * runner.baseline_s
    session.case = dataclasses.replace(
        session.machine, watched=seen, measurements=(*session.machine.measurements, *watched.measurements(seen))
    )


def _window(seen: Watched, elapsed: float, options: Options) -> int:
    """Steps of every trial: the whole run where it is short, else what a trial's share of the budget holds."""
    records = proving.training_records(seen)
    count = min(len(record.steps) or record.batches for record in records)
    ended = all(record.ended == "exit" for record in records)
    share = options.budget_s * (NATURAL_SHARE if ended else TRIAL_SHARE)
    if elapsed <= share or count <= MINIMUM_STEPS:
        return count
    start_up = max(record.start_up_s or 0.0 for record in records)
    rate = count / max(elapsed - start_up, 1e-9)
    return max(MINIMUM_STEPS, min(count, int((share - start_up) * rate)))


def _guard_files(session: Session, runner: CommandRunner, seen: Watched) -> None:
    """Without an overlay a trial would overwrite the user's files: stop and name them, unless that is allowed."""
    written = sorted({path for record in seen.records for path in record.writes})
    if not written:
        return
    names = ", ".join(written[:5]) + (f" and {len(written) - 5} more" if len(written) > 5 else "")
    if runner.sandbox.own is not None:
        session.notes.append(f"the command writes {names}; trials write into an overlay, your files are untouched")
    elif not session.options.allow_writes:
        raise GpudoctorError(
            f"the command writes files: {names}, and this system offers no overlay ({runner.sandbox.reason})",
            "trials would write them again: give --allow-writes if that does no harm",
        )


def _groups(session: Session, runner: CommandRunner) -> list[Group]:
    """Candidate changes by mechanism. What is not allowed or has no edit becomes advice."""
    envelope = checkup.examine(
        session.case, command="tune", select=session.options.select, ignore=session.options.ignore, fail_on="never"
    )
    assert envelope.case is not None
    files = {site.rpartition(":")[0] for site in _sites(session.case)}
    texts = {}
    for file in sorted(files):
        path = runner.cwd / file
        if not Path(file).is_absolute() and path.suffix == ".py" and path.is_file():
            try:
                texts[file] = runner.text(file)
            except (OSError, UnicodeDecodeError) as error:
                session.notes.append(f"{file} cannot be read as UTF-8 text and is not changed: {error}")

    def safe(text: str, name: str, line: int) -> tuple[bool, str | None]:
        uses = later_use.later_uses(text, name, line)
        return uses.safe, uses.reason

    proposed = proposing.propose(envelope.case, envelope.findings, texts=texts, safe=safe)
    candidates, advice = [], []
    for change in proposed:
        if not change.edits:
            advice.append(change)
        elif change.change_class not in session.options.allow:
            advice.append(dataclasses.replace(change, reason=f"not tried: needs --allow {change.change_class}"))
        else:
            candidates.append(change)
    session.advice = tuple(advice)
    loader = _busiest_loader(session.case)
    groups = []
    for mechanism in ("fetch", "loader", "sync"):
        members = [change for change in candidates if change.mechanism == mechanism]
        if members:
            groups.append(_group(mechanism, members, session.case, loader))
    return groups


def _sites(case: Case) -> Iterable[str]:
    for record in case.watched.records if case.watched else ():
        yield from (loader.site for loader in record.loaders)
        yield from (copy.site for copy in record.copies)
        yield from (sync.site for sync in record.syncs)


def _busiest_loader(case: Case) -> WatchedLoader | None:
    loaders = [loader for record in (case.watched.records if case.watched else ()) for loader in record.loaders]
    return max(loaders, key=lambda loader: loader.wait_ms, default=None)


def _group(mechanism: str, members: Sequence[Change], case: Case, loader: WatchedLoader | None) -> Group:
    split = [part for change in members for part in _split(change)]
    units: list[frozenset[str]] = []
    copies = frozenset(change.id for change in split if _touches(change, {"pin_memory"}) or _moves(change))
    workers = frozenset(change.id for change in split if _touches(change, {"num_workers", "persistent_workers"}))
    if copies:
        units.append(copies)
    units += [frozenset({change.id}) for change in split if change.id not in copies | workers]
    persistent = frozenset(change.id for change in split if _touches(change, {"persistent_workers"}))
    if persistent and loader is not None and loader.num_workers > 0:
        units.append(persistent)
        workers -= persistent
    if workers:
        units.append(workers)
    options = [tuple(split)]
    if loader is not None:
        options = _worker_options(split, case, loader)
    waits = mechanism in ("fetch", "loader")
    return Group(
        mechanism=mechanism,
        options=tuple(options),
        units=tuple(units),
        pointless=_pointless if waits and not copies else None,
    )


def _split(change: Change) -> list[Change]:
    """One change an argument, so that leave-one-out can drop each on its own."""
    edit = change.edits[0]
    if edit.kind != "loader-arguments" or len(change.edits) > 1 or len(edit.arguments) < 2:
        return [change]
    parts = []
    for number, (name, value) in enumerate(edit.arguments.items(), start=1):
        one = Edit(kind=edit.kind, site=edit.site, name=edit.name, arguments={name: value})
        parts.append(dataclasses.replace(change, id=f"{change.id}.{number}", title=f"{name}={value}", edits=(one,)))
    return parts


def _touches(change: Change, names: set[str]) -> bool:
    return any(edit.kind == "loader-arguments" and names & set(edit.arguments) for edit in change.edits)


def _moves(change: Change) -> bool:
    return any(edit.kind == "non-blocking" for edit in change.edits)


def _worker_options(split: Sequence[Change], case: Case, loader: WatchedLoader) -> list[tuple[Change, ...]]:
    """The group with the proposed worker count, twice that, and the most that is allowed; the smallest first."""
    record = next(item for item in case.watched.records if loader in item.loaders) if case.watched else None
    target = next((change for change in split if _touches(change, {"num_workers"})), None)
    if target is None or record is None or case.watched is None:
        return [tuple(split)]
    proposed = target.edits[0].arguments["num_workers"]
    limit = proposing.loader_limit(case, record, len(proving.training_records(case.watched)))
    if not isinstance(proposed, int) or proposed < 1:
        return [tuple(split)]
    counts = sorted({proposed, min(limit, proposed * 2), max(limit, proposed)} - {loader.num_workers})
    options = []
    for count in counts:
        edit = dataclasses.replace(target.edits[0], arguments={**target.edits[0].arguments, "num_workers": count})
        variant = dataclasses.replace(target, title=f"num_workers={count}", edits=(edit, *target.edits[1:]))
        options.append(tuple(variant if change is target else change for change in split))
    return options or [tuple(split)]


def _pointless(trial: Trial) -> str | None:
    if trial.rate is None or trial.loader_wait_ms is None:
        return None
    share = trial.loader_wait_ms * trial.rate / 1000
    if share >= POINTLESS_WAIT:
        return None
    return f"not tried: a step waits {share:.1%} of its time for the loader, so little is left to win"


def _finish(session: Session, runner: CommandRunner) -> Envelope:
    """Write the files and assemble the envelope."""
    options, outcome = session.options, session.outcome
    kept = outcome.kept
    files = {"report": _shown(options.out / "report.md"), "case": _shown(options.out / "case.json")}
    texts = {file: (old, new) for file, (old, new, _) in runner.patched_texts(kept).items()} if kept else {}
    findings = checkup.examine(session.case, command="tune", fail_on="never").findings
    config = launch.launch_config(session.case, options.command, findings=findings)
    if kept:
        files |= {"launch": _shown(options.out / "launch.sh"), "patch": _shown(options.out / "train.patch")}
        outputs.write(options.out / "train.patch", outputs.diff(texts))
        outputs.write(options.out / "launch.sh", launch.render(config), executable=True)
    prescription = Prescription(
        launch=config,
        loader=_loader_settings(session.case, outcome),
        changes=(*kept, *outcome.dropped, *session.advice),
        trials=tuple(outcome.trials),
        proof=session.proof,
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
        measurements=(*session.case.measurements, *_speedup(session, runner)),
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
        verdict="interrupted: nothing was confirmed, so nothing is prescribed",
    )
    envelope = checkup.examine(
        session.case,
        command="tune",
        fail_on="never",
        measurements=session.case.measurements,
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
