"""The JSON envelope that every command prints; renderers get nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpudoctor.model.case import Artifact, Case
from gpudoctor.model.finding import Finding, NotChecked
from gpudoctor.model.measurement import Measurement
from gpudoctor.model.prescription import Prescription

SCHEMA = "gpudoctor/1"
Status = Literal["clean", "findings", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """`case` for one host, `cases` when artifacts came from several; measurements stand here once, not in the Case."""

    schema: str = SCHEMA
    version: str
    command: str
    status: Status
    exit_code: int
    case: Case | None = None
    cases: tuple[Case, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    findings: tuple[Finding, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()
    clean: tuple[str, ...] = ()  # codes of the rules that were checked and found nothing
    prescription: Prescription | None = None
    errors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
