"""Findings in source text for people: file by file, each line with why it is hot and why its value is on a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpudoctor.model import Envelope, Evidence, Finding, SourceFacts
from gpudoctor.report.human import WORDS, tally, word
from gpudoctor.report.text import Style, count

_LABELS = {
    "source": "line",
    "runs in each step": "hot",
    "called by": "call",
    "on the GPU": "gpu",
    "batches go to the GPU": "gpu",
}


def render_source(envelope: Envelope, style: Style) -> str:
    """Header, findings in the order of the files, and the closing line."""
    facts = envelope.case.source if envelope.case is not None else None
    blocks: list[list[str]] = []
    if facts is not None:
        blocks.append(_header(facts, style))
    told: set[tuple[object, ...]] = set()
    for file, findings in _by_file(envelope.findings):
        lines = [style.paint(style.text(file), "bold")]
        for finding in findings:
            lines += _finding(finding, told, style)
        blocks.append(lines)
    blocks.append(tally(envelope, style))
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def _header(facts: SourceFacts, style: Style) -> list[str]:
    loops = len(facts.hot_loops)
    parts = [
        count(facts.files, "file"),
        count(facts.lines, "line"),
        f"{count(loops, 'loop')} or hooks that run each step on a GPU"
        if loops != 1
        else "1 loop that runs each step on a GPU",
        f"torch {style.text(facts.torch)} ({style.text(facts.torch_from)})" if facts.torch else "torch version unknown",
    ]
    return style.fold(style.joined(parts), rest="  ")


def _by_file(findings: Sequence[Finding]) -> list[tuple[str, list[Finding]]]:
    files: dict[str, list[Finding]] = {}
    for finding in findings:
        files.setdefault(finding.subject.rpartition(":")[0] or finding.subject, []).append(finding)
    return [(file, sorted(found, key=lambda f: (_line(f), f.rule))) for file, found in sorted(files.items())]


def _line(finding: Finding) -> int:
    line = finding.subject.rpartition(":")[2]
    return int(line) if line.isdigit() else 0


def _near(text: str, finding: Finding, style: Style) -> str:
    """The text, with lines of the file under whose name the finding stands told by their numbers alone."""
    file = finding.subject.rpartition(":")[0]
    return style.text(re.sub(rf"(?<![\w./-]){re.escape(file)}:(\d+)", r"line \1", text) if file else text)


def _finding(finding: Finding, told: set[tuple[object, ...]], style: Style) -> list[str]:
    first = f" {WORDS[finding.severity][0]:<4} {style.text(finding.rule)}  "
    text = f"{_line(finding)}  {_near(finding.message, finding, style)}"
    if finding.confidence == "possible":
        text += " (possible)"
    lines = style.fold(text, first=first, rest=" " * 6)
    lines[0] = f" {word(finding.severity, style)} " + lines[0][6:]
    shared = any(symptom.startswith("the same cost as in ") for symptom in finding.symptoms)
    if shared and style.verbose <= 0:
        return lines + [line for s in finding.symptoms for line in _labelled("also", _near(s, finding, style), style)]
    for item in finding.evidence:
        lines += _evidence(item, finding, style)
    key = (finding.rule, finding.remedies)
    if key not in told or style.verbose > 0:
        told.add(key)
        for remedy in finding.remedies:
            label = "try" if remedy.kind == "measure" else "fix"
            lines += _labelled(label, _near(remedy.text, finding, style), style)
            if remedy.risk:
                lines += _labelled("", f"risk: {style.text(remedy.risk)}", style)
    return lines


def _evidence(item: Evidence, finding: Finding, style: Style) -> list[str]:
    text = _near(item.value, finding, style)
    if item.source and item.source != finding.subject:
        text += f"  ({_near(item.source, finding, style)})"
    return _labelled(_LABELS.get(item.fact, "seen"), text, style)


def _labelled(label: str, text: str, style: Style) -> list[str]:
    return style.fold(text, first=f"      {label:<5} ")
