"""What a rule says, with the evidence, the remedies and the gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["unknown", "info", "warning", "error", "critical"]
SEVERITIES: tuple[Severity, ...] = ("unknown", "info", "warning", "error", "critical")


def severity_rank(severity: Severity) -> int:
    """0 for unknown up to 4 for critical."""
    return SEVERITIES.index(severity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One fact that led to a finding: its path, its value, what was expected, and where it was read."""

    fact: str
    value: str
    expected: str | None = None
    source: str | None = None  # file:line, or the probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One thing to do. `undo` says how to take it back; commands are printed, never run."""

    kind: Literal["command", "env", "config", "bios", "hardware", "code", "measure"]
    text: str
    risk: str | None = None
    undo: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a remedy can win: low to high in `unit`, and what the figures rest on."""

    low: float
    high: float
    unit: str  # "x" (factor of the rate), "%" or "GB/s"
    basis: Literal["measured", "profile", "published", "estimate"]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    rule: str
    name: str
    severity: Severity
    subject: str  # gpu:2, gpu:0-gpu:1, train.py:88, host
    message: str
    evidence: tuple[Evidence, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    gain: Gain | None = None
    confidence: Literal["certain", "likely", "possible"] = "likely"
    symptoms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NotChecked:
    """A rule whose facts are gaps: listed with the reason, never a silent pass."""

    rule: str
    reason: str
