"""The report as GitHub-flavoured Markdown: report.md of tune and checkup."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpudoctor.model import Envelope, Finding, Remedy
from gpudoctor.report import tables, trace, watched
from gpudoctor.report.human import WORDS, gain_text, header
from gpudoctor.report.text import Style, printable
from gpudoctor.report.topo import render_topo

_STYLE = Style(width=None, unicode=True)
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~$@])")


def render_markdown(envelope: Envelope) -> str:
    """All sections that the envelope has something for; text from outside is escaped."""
    lines = [f"# gpudoctor {text(envelope.command)}: {envelope.status}", ""]
    cases = envelope.cases or ((envelope.case,) if envelope.case is not None else ())
    for case in cases:
        lines += [text(" ".join(header(case, _STYLE))), ""]
    for error in envelope.errors:
        lines += [f"**Not complete:** {text(error)}", ""]
    item = envelope.prescription
    if item is not None:
        if item.verdict:
            lines += ["## Result", "", f"**{text(item.verdict)}**", ""]
        lines += _fenced(tables.prescription(envelope, _STYLE))
    lines += _findings(envelope.findings)
    lines += _section("Measurements", tables.measurements(envelope, _STYLE))
    for case in cases:
        if case.watched is not None:
            lines += _section("Where the time went", watched.watched(case, _STYLE))
        if case.traces and case.watched is None:
            lines += _section("Traces", trace.traces(case.traces, _STYLE))
    for case in cases:
        if case.gpus:
            topology = render_topo(case, matrix=False, width=None, unicode=True, color=False)
            lines += _section("Topology", topology.splitlines())
    if envelope.artifacts:
        lines += _section("Read", tables.artifacts(envelope, _STYLE)[1:])
    lines += _checked(envelope)
    for note in envelope.notes:
        lines += [f"Note: {text(note)}", ""]
    lines.append(f"gpudoctor {text(envelope.version)}, {text(envelope.schema)}")
    return "\n".join(lines) + "\n"


def text(value: object) -> str:
    """One line in which no character starts markup, a link, a mention or HTML."""
    plain = printable(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(r"\\\1", plain)


def code(value: object) -> str:
    """A code span, outside of tables: its fence is longer than any run of backticks inside."""
    plain = printable(value)
    runs = re.findall(r"`+", plain)
    fence = "`" * (max((len(run) for run in runs), default=0) + 1)
    space = " " if runs or not plain else ""
    return f"{fence}{space}{plain}{space}{fence}"


def _findings(findings: Sequence[Finding]) -> list[str]:
    if not findings:
        return []
    lines = ["## Findings", "", "| | rule | subject | what | gain |", "|---|---|---|---|---|"]
    for finding in findings:
        gain = text(gain_text(finding.gain, _STYLE)) if finding.gain else ""
        lines.append(
            f"| {WORDS[finding.severity][0]} | {text(finding.rule)} | {text(finding.subject)}"
            f" | {text(finding.message)} | {gain} |"
        )
    lines.append("")
    for finding in findings:
        lines += [
            f"### {text(finding.rule)} {text(finding.name)}: {text(finding.subject)}",
            "",
            text(finding.message),
            "",
        ]
        for item in finding.evidence:
            expected = f", expected {text(item.expected)}" if item.expected else ""
            source = f" ({text(item.source)})" if item.source else ""
            lines.append(f"- seen: {text(item.fact)} = {text(item.value)}{expected}{source}")
        lines += [f"- also: {text(symptom)}" for symptom in finding.symptoms]
        lines += [f"- {_remedy(remedy)}" for remedy in finding.remedies]
        lines.append("")
    return lines


def _remedy(remedy: Remedy) -> str:
    body = code(remedy.text) if remedy.kind in ("command", "env") else text(remedy.text)
    risk = f"; risk: {text(remedy.risk)}" if remedy.risk else ""
    undo = f"; undo: {text(remedy.undo)}" if remedy.undo else ""
    return f"{'ask' if remedy.kind == 'measure' else 'fix'} ({remedy.kind}): {body}{risk}{undo}"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "", *_fenced(lines)] if lines else []


def _fenced(lines: Sequence[str]) -> list[str]:
    """A code block whose fence is longer than any run of backticks inside."""
    if not lines:
        return []
    longest = max((len(run) for line in lines for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *lines, fence, ""]


def _checked(envelope: Envelope) -> list[str]:
    lines: list[str] = []
    if envelope.clean or envelope.not_checked:
        lines += ["## Checked", ""]
    if envelope.clean:
        lines += [f"Without a finding: {' '.join(text(item) for item in envelope.clean)}", ""]
    if envelope.not_checked:
        lines += ["| not checked | reason |", "|---|---|"]
        lines += [f"| {text(item.rule)} | {text(item.reason)} |" for item in envelope.not_checked]
        lines.append("")
    return lines
