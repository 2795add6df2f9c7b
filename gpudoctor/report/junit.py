"""JUnit XML for CI: one test case per rule and subject."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from xml.etree import ElementTree as ET

from gpudoctor.model import Envelope, Finding, severity_rank
from gpudoctor.report.text import Style, printable

REQUIRE_GPU = "require-gpu"
_STYLE = Style(width=None, unicode=True)
_CRASHED = re.compile(r"rule ([A-Z][A-Z0-9]{2}\d{3}) failed")  # as run_rules words it


@dataclass(frozen=True, slots=True, kw_only=True)
class _TestCase:
    classname: str
    name: str
    outcome: str | None = None  # failure, error, skipped; None passes
    message: str = ""
    text: str = ""


def render_junit(envelope: Envelope, *, fail_on: str = "error") -> str:
    """A testsuites document: findings at or above `fail_on` fail, milder ones pass with their text in system-out,
    rules that were not checked are skipped with the reason, a rule that crashed or an input that could not be
    read is an error."""
    cases = _apart(_cases(envelope, fail_on))
    totals = {kind: sum(case.outcome == kind for case in cases) for kind in ("failure", "error", "skipped")}
    counts = {
        "tests": str(len(cases)),
        "failures": str(totals["failure"]),
        "errors": str(totals["error"]),
        "skipped": str(totals["skipped"]),
        "time": "0",
    }
    root = ET.Element("testsuites", {"name": "gpudoctor", **{k: v for k, v in counts.items() if k != "skipped"}})
    suite = ET.SubElement(root, "testsuite", {"name": f"gpudoctor {_clean(envelope.command)}", **counts})
    if envelope.case is not None and envelope.case.host.hostname:
        suite.set("hostname", _clean(envelope.case.host.hostname))
    properties = ET.SubElement(suite, "properties")
    for key, value in (("version", envelope.version), ("status", envelope.status), ("fail_on", fail_on)):
        ET.SubElement(properties, "property", {"name": key, "value": _clean(value)})
    for case in cases:
        element = ET.SubElement(
            suite, "testcase", {"classname": _clean(case.classname), "name": _clean(case.name), "time": "0"}
        )
        if case.outcome is not None:
            attributes = {"message": _clean(case.message)}
            if case.outcome != "skipped":
                attributes["type"] = _clean(case.name.split(" ")[0])
            ET.SubElement(element, case.outcome, attributes).text = _block(case.text)
        elif case.text:
            ET.SubElement(element, "system-out").text = _block(case.text)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _cases(envelope: Envelope, fail_on: str) -> Iterator[_TestCase]:
    for error in envelope.errors:
        yield _error(error)
    for note in envelope.notes:
        if note.startswith(f"{REQUIRE_GPU}: "):
            yield _TestCase(classname="gpudoctor", name=REQUIRE_GPU, text=note)
    for finding in envelope.findings:
        yield _finding(finding, fail_on)
    for skipped in envelope.not_checked:
        yield _TestCase(
            classname=f"gpudoctor.{skipped.rule}",
            name=f"{skipped.rule} not checked",
            outcome="skipped",
            message=skipped.reason,
        )
    for code in envelope.clean:
        yield _TestCase(classname=f"gpudoctor.{code}", name=code)


def _apart(cases: Iterable[_TestCase]) -> list[_TestCase]:
    """Number the test cases that share a name: CI servers would merge them."""
    seen: dict[tuple[str, str], int] = {}
    found = []
    for case in cases:
        key = (case.classname, case.name)
        seen[key] = seen.get(key, 0) + 1
        found.append(case if seen[key] == 1 else replace(case, name=f"{case.name} #{seen[key]}"))
    return found


def _error(error: str) -> _TestCase:
    if error.startswith(f"{REQUIRE_GPU}: "):
        return _TestCase(classname="gpudoctor", name=REQUIRE_GPU, outcome="failure", message=error, text=error)
    crashed = _CRASHED.match(error)
    name = f"{crashed.group(1)} crashed" if crashed else "input or tool"
    classname = f"gpudoctor.{crashed.group(1)}" if crashed else "gpudoctor"
    return _TestCase(classname=classname, name=name, outcome="error", message=error, text=error)


def _finding(finding: Finding, fail_on: str) -> _TestCase:
    from gpudoctor.report.human import finding_lines

    return _TestCase(
        classname=f"gpudoctor.{finding.rule}",
        name=f"{finding.rule} {finding.name} {finding.subject}",
        outcome="failure" if fails(finding, fail_on) else None,
        message=f"{finding.severity}: {finding.message}",
        text="\n".join(finding_lines([finding], _STYLE)),
    )


def fails(finding: Finding, fail_on: str) -> bool:
    """Whether a finding is at or above `fail_on` (info, warning, error, critical, never)."""
    if fail_on == "never":
        return False
    return severity_rank(finding.severity) >= severity_rank(fail_on)  # type: ignore[arg-type]


def _clean(text: str) -> str:
    """One line without characters that XML 1.0 forbids."""
    return printable(text)


def _block(text: str) -> str:
    return "\n".join(printable(line) for line in text.split("\n"))
