"""The pipeline Case -> findings -> envelope, for the command line and as a library.

>>> from gpudoctor import checkup
>>> envelope = checkup.passive()          # this machine, without loading it
>>> [finding.message for finding in envelope.findings]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from gpudoctor import __version__, profiles
from gpudoctor.errors import EXIT_FINDINGS, EXIT_OK, EXIT_USAGE, GpudoctorError
from gpudoctor.judge import judged_all
from gpudoctor.model import (
    SEVERITIES,
    Artifact,
    Case,
    Envelope,
    Finding,
    Measurement,
    NotChecked,
    Prescription,
    Status,
    severity_rank,
)

FAIL_ON = ("info", "warning", "error", "critical", "never")
REQUIRE_GPU = "require-gpu"


def passive(
    *, root: Path | None = None, timeout_s: float = 10.0, fail_on: str = "error", require_gpu: int | None = None
) -> Envelope:
    """Look at this machine without loading it. `root` is another root directory with sys/ and proc/ below it."""
    from gpudoctor.collect import collect_case

    case = collect_case(root=root, timeout_s=timeout_s)
    return examine(case, command="checkup", fail_on=fail_on, require_gpu=require_gpu)


def examine(
    case: Case,
    *,
    command: str,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    fail_on: str = "error",
    require_gpu: int | None = None,
    artifacts: Sequence[Artifact] = (),
    measurements: Sequence[Measurement] = (),
    prescription: Prescription | None = None,
    errors: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Envelope:
    """Run the rules on one Case and say how it ended.

    select, ignore: rule codes, families or names. fail_on: the severity from which findings make exit code 1, one of
    FAIL_ON. require_gpu: fewer GPUs that answer make exit code 1 and an entry in `errors`. measurements are added to
    those of the Case before the rules see it. errors: what could not be read or done; they make exit code 2.
    Raises GpudoctorError for a fail_on, select or ignore that does not exist.
    """
    return examine_all(
        (case,),
        command=command,
        select=select,
        ignore=ignore,
        fail_on=fail_on,
        require_gpu=require_gpu,
        artifacts=artifacts,
        measurements=measurements,
        prescription=prescription,
        errors=errors,
        notes=notes,
    )


def examine_all(
    cases: Sequence[Case],
    *,
    command: str,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    fail_on: str = "error",
    require_gpu: int | None = None,
    artifacts: Sequence[Artifact] = (),
    measurements: Sequence[Measurement] = (),
    prescription: Prescription | None = None,
    errors: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Envelope:
    """As `examine`, for the Cases of several hosts: each finding names its host in front of the message.

    `measurements` belong to the only Case; with several Cases each keeps its own. `require_gpu` holds for each host.
    """
    from gpudoctor.rules import run_rules

    if fail_on not in FAIL_ON:
        raise GpudoctorError(f"there is no severity {fail_on!r} to fail on", f"one of {' '.join(FAIL_ON)}")
    errors, notes = list(errors), list(notes)
    complete: list[Case] = []
    findings: list[Finding] = []
    not_checked: list[NotChecked] = []
    clean: list[str] = []
    for number, case in enumerate(cases, start=1):
        own = case.measurements
        if len(cases) == 1:
            own = (*own, *(item for item in measurements if item not in own))
        case = judged_all(dataclasses.replace(case, profile=profiles.for_case(case), measurements=own))
        complete.append(case)
        report = run_rules(case, select=select, ignore=ignore)
        label = f"{case.host.hostname or f'case {number}'}: " if len(cases) > 1 else ""
        findings += [dataclasses.replace(item, message=label + item.message) for item in report.findings]
        not_checked += [dataclasses.replace(item, reason=label + item.reason) for item in report.not_checked]
        clean += [code for code in report.clean if code not in clean]
        errors += [label + error for error in report.errors]
        if require_gpu is not None:
            met, text = _require(case, require_gpu)
            (notes if met else errors).append(f"{REQUIRE_GPU}: {label}{text}")
        notes += [
            f"{label}gpu:{gpu.index} ({gpu.bdf or gpu.uuid or 'address unknown'}) does not answer:"
            f" {gpu.lost_reason or 'lost'}; what could not be read of it was not checked"
            for gpu in case.gpus
            if gpu.lost
        ]
        if not case.gpus and not case.host.gpus_on_bus and not case.traces and case.source is None:
            notes.append(f"{label}no NVIDIA GPU found; rules about GPUs were not checked")
    if require_gpu is not None and not cases:
        errors.append(f"{REQUIRE_GPU}: 0 GPUs answer, {require_gpu} required")
    if len(cases) > 1:
        findings.sort(key=lambda item: -severity_rank(item.severity))
        stained = {item.rule for item in findings} | {item.rule for item in not_checked}
        clean = [code for code in clean if code not in stained]
    status, exit_code = outcome(findings, errors, fail_on)
    one = len(complete) == 1
    return Envelope(
        version=__version__,
        command=command,
        status=status,
        exit_code=exit_code,
        case=complete[0] if one else None,
        cases=() if one else tuple(complete),
        artifacts=tuple(artifacts),
        measurements=complete[0].measurements if one else tuple(measurements),
        findings=tuple(findings),
        not_checked=tuple(not_checked),
        clean=tuple(clean),
        prescription=prescription,
        errors=tuple(errors),
        notes=tuple(notes),
    )


def outcome(findings: Sequence[Finding], errors: Sequence[str], fail_on: str) -> tuple[Status, int]:
    """Status and exit code; 2 (something could not be done) beats 1 (findings, or --require-gpu not met)."""
    unmet = [error for error in errors if error.startswith(f"{REQUIRE_GPU}: ")]
    worst = max((severity_rank(item.severity) for item in findings), default=0)
    limit = severity_rank(fail_on) if fail_on in SEVERITIES else len(SEVERITIES)
    exit_code = EXIT_FINDINGS if unmet or worst >= limit else EXIT_OK
    if len(errors) > len(unmet):
        exit_code = EXIT_USAGE
    if errors:
        return "failed", exit_code
    return ("findings" if worst >= severity_rank("info") else "clean"), exit_code


def _require(case: Case, wanted: int) -> tuple[bool, str]:
    answering = sum(not gpu.lost for gpu in case.gpus)
    verb = "GPU answers" if answering == 1 else "GPUs answer"
    text = f"{answering} {verb}, {wanted} required"
    if answering < wanted and case.host.gpus_on_bus and case.host.gpus_on_bus > answering:
        text += f" ({case.host.gpus_on_bus} on the bus)"
    return answering >= wanted, text
