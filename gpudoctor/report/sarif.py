"""SARIF 2.1.0 for code scanning: relative paths, and fingerprints that survive lines moving up and down."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpudoctor.model import Envelope, Finding, Severity
from gpudoctor.report.text import printable

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS: dict[Severity, str] = {
    "critical": "error",
    "error": "error",
    "warning": "warning",
    "info": "note",
    "unknown": "note",
}
_RANKS = {"certain": 90.0, "likely": 60.0, "possible": 30.0}
_ROOT = "SRCROOT"
_SITE = re.compile(r"^(?P<file>.+):(?P<line>\d+)$")


def render_sarif(envelope: Envelope) -> str:
    """One run. A finding about a line has a location; one about the machine has a logical one with its subject."""
    base = _base(envelope.findings)
    codes = sorted({finding.rule for finding in envelope.findings})
    numbers = {code: number for number, code in enumerate(codes)}
    seen: Counter[str] = Counter()
    results = [_result(finding, numbers, base, seen) for finding in envelope.findings]
    run: dict[str, Any] = {
        "tool": {
            "driver": {
                "name": "gpudoctor",
                "semanticVersion": _semantic(envelope.version),
                "rules": [_rule(code, envelope) for code in codes],
            }
        },
        "columnKind": "unicodeCodePoints",
        "results": results,
        "invocations": [
            {
                "executionSuccessful": envelope.status != "failed",
                "exitCode": envelope.exit_code,
                "toolExecutionNotifications": [
                    {"level": "error", "message": {"text": _clean(error)}} for error in envelope.errors
                ],
            }
        ],
    }
    if base is not None:
        run["originalUriBaseIds"] = {_ROOT: {"uri": _uri(base) + "/"}}
    document = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _semantic(version: str) -> str:
    match = re.match(r"\d+\.\d+\.\d+", version)
    return match[0] if match else "0.0.0"


def _rule(code: str, envelope: Envelope) -> dict[str, Any]:
    first = next(finding for finding in envelope.findings if finding.rule == code)
    return {
        "id": code,
        "name": "".join(part.capitalize() for part in re.split(r"[^A-Za-z0-9]+", first.name)),
        "shortDescription": {"text": _clean(first.name.replace("-", " "))},
        "help": {"text": f"gpudoctor explain {_clean(code)}"},
        "defaultConfiguration": {"level": _LEVELS[first.severity]},
    }


def _result(finding: Finding, numbers: dict[str, int], base: str | None, seen: Counter[str]) -> dict[str, Any]:
    text = _clean(finding.message)
    for remedy in finding.remedies[:1]:
        text += f". Fix: {_clean(remedy.text)}"
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": numbers[finding.rule],
        "level": _LEVELS[finding.severity],
        "rank": _RANKS[finding.confidence],
        "message": {"text": text},
        "locations": [_location(finding.subject, base)],
        "partialFingerprints": {"gpudoctor/v1": _fingerprint(finding, base, seen)},
    }
    related: list[dict[str, Any]] = []
    for item in finding.evidence:
        if item.source and item.source != finding.subject and _SITE.match(item.source):
            location = _location(item.source, base)
            location["id"] = len(related) + 1
            location["message"] = {"text": f"{_clean(item.fact)}: {_clean(item.value)}"}
            related.append(location)
    if related:
        result["relatedLocations"] = related
    return result


def _location(subject: str, base: str | None) -> dict[str, Any]:
    match = _SITE.match(subject)
    if match is None:
        return {"logicalLocations": [{"fullyQualifiedName": _clean(subject), "kind": "resource"}]}
    file = match["file"]
    artifact: dict[str, Any] = {
        "uri": _uri(os.path.relpath(file, base) if base is not None and Path(file).is_absolute() else file)
    }
    if base is not None and Path(file).is_absolute():
        artifact["uriBaseId"] = _ROOT
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": max(1, int(match["line"]))}}}


def _fingerprint(finding: Finding, base: str | None, seen: Counter[str]) -> str:
    """By rule, file and the text of the line, not by its number; the second line with the same text counts as two."""
    match = _SITE.match(finding.subject)
    file = match["file"] if match else finding.subject
    if base is not None and Path(file).is_absolute():
        file = os.path.relpath(file, base)
    text = next((item.value for item in finding.evidence if item.fact == "source"), "" if match else finding.name)
    key = "\0".join((finding.rule, file.replace(os.sep, "/"), " ".join(text.split())))
    seen[key] += 1
    return hashlib.sha256(f"{key}\0{seen[key]}".encode(errors="replace")).hexdigest()[:32]


def _base(findings: tuple[Finding, ...]) -> str | None:
    """The folder that holds all files with absolute names, so that their paths can be relative; None without such."""
    folders = []
    for finding in findings:
        for name in (finding.subject, *(item.source or "" for item in finding.evidence)):
            match = _SITE.match(name)
            if match is not None and Path(match["file"]).is_absolute():
                folders.append(str(Path(match["file"]).parent))
    return os.path.commonpath(folders) if folders else None


def _uri(path: str) -> str:
    prefix = "file://" if path.startswith("/") else ""
    return prefix + quote(path.replace(os.sep, "/"), safe="/:@!$&'()*+,;=-._~", errors="replace")


def _clean(text: str) -> str:
    return printable(text)
