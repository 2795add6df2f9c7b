"""The result for people: what the machine is, what is wrong, what to do, what it would gain."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from gpudoctor.model import Case, Envelope, Finding, Gain, Gpu, Severity, severity_rank
from gpudoctor.report import loader_curve, tables, trace, watched
from gpudoctor.report.text import Style, columns, count, pad, ranges, size, trimmed

# Words carry the meaning; colour only repeats it.
WORDS: dict[Severity, tuple[str, str]] = {
    "critical": ("FAIL", "red"),
    "error": ("FAIL", "red"),
    "warning": ("WARN", "yellow"),
    "info": ("INFO", "blue"),
    "unknown": ("ASK", "blue"),
}
_TALLY: tuple[tuple[Severity, str], ...] = (
    ("critical", "critical"),
    ("error", "error"),
    ("warning", "warning"),
    ("info", "info"),
    ("unknown", "open question"),
)
_SHOWN = 4  # evidence lines of one group before "and n more"


def render_human(envelope: Envelope, style: Style) -> str:
    """All sections that the envelope has something for, in the order in which people read."""
    blocks: list[list[str]] = []
    cases = envelope.cases or ((envelope.case,) if envelope.case is not None else ())
    blocks.append([line for case in cases for line in header(case, style)])
    if envelope.command == "read" or any(item.lines_not_understood or item.truncated for item in envelope.artifacts):
        blocks.append(tables.artifacts(envelope, style))
    blocks += [watched.watched(case, style) for case in cases if case.watched is not None]
    # The trace of a profiler window is told with the steps that were watched before it.
    told = style.verbose <= 0
    blocks += [trace.traces(case.traces, style) for case in cases if case.traces and not (case.watched and told)]
    told_here = envelope.prescription if envelope.command == "tune-loader" else None
    blocks += [
        loader_curve.study(case.loader, told_here, style) for case in cases if case.loader and not case.loader.faults
    ]
    blocks.append(tables.measurements(envelope, style))
    blocks.append(finding_lines(envelope.findings, style))
    if envelope.prescription is not None and envelope.command != "tune-loader":
        blocks.append(tables.prescription(envelope, style))
    blocks.append(tally(envelope, style))
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def header(case: Case, style: Style) -> list[str]:
    """One line of host facts; folded when the terminal is narrow."""
    host, software = case.host, case.software
    on_bus = host.gpus_on_bus or 0
    alone = len(case.gpus) == 1
    gpus = [name if alone else f"{many}x {name}" for name, many in names(case.gpus, style)]
    if not case.gpus and case.traces:
        gpus = [style.text(name) for name in trace.device_names(case)]
    elif not case.gpus:
        gpus = [f"{count(on_bus, 'NVIDIA GPU')} on the bus, none answers" if on_bus else "no NVIDIA GPU found"]
    parts = [
        style.text(host.hostname) if host.hostname else None,
        *gpus,
        f"driver {style.text(software.driver)}" if software.driver else None,
        f"CUDA {style.text(software.cuda_driver)}" if software.cuda_driver else None,
        f"torch {style.text(software.torch)}" if software.torch else None,
        count(len(case.numa_nodes), "NUMA node") if case.numa_nodes else None,
        f"{host.cpu_count} CPUs" if host.cpu_count else None,
        size(host.memory_bytes) if host.memory_bytes else None,
        style.text(host.virtualization) + " guest" if host.virtualization not in (None, "none") else None,
        style.text(host.container) + " container" if host.container not in (None, "none") else None,
    ]
    lines = style.fold(style.joined(parts), rest="  ")
    return [style.paint(line, "bold") for line in lines]


def names(gpus: Sequence[Gpu], style: Style) -> list[tuple[str, int]]:
    """GPU models with their number, in order of first appearance; NVIDIA's own prefix left out."""
    found = Counter(
        style.text(gpu.name).removeprefix("NVIDIA ") if gpu.name else "lost GPU" if gpu.lost else "GPU" for gpu in gpus
    )
    return list(found.items())


def finding_lines(findings: Sequence[Finding], style: Style) -> list[str]:
    """Findings as ranked; those of one rule with the same remedies share one block."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.rule, finding.severity, finding.remedies), []).append(finding)
    lines: list[str] = []
    for group in groups.values():
        lines += _one(group[0], style) if len(group) == 1 else _many(group, style)
    return lines


def word(severity: Severity, style: Style) -> str:
    """FAIL, WARN, INFO or ASK, coloured and four columns wide."""
    text, colour = WORDS[severity]
    return style.paint(text, colour, "bold") + " " * (4 - len(text))


def _one(finding: Finding, style: Style) -> list[str]:
    first = f" {WORDS[finding.severity][0]:<4} {style.text(finding.rule)}  "
    text = f"{style.text(finding.subject)}  {style.text(finding.message)}"
    if finding.confidence == "possible":
        text += " (possible)"
    lines = style.fold(text, first=first, rest=" " * 6)
    lines[0] = f" {word(finding.severity, style)} " + lines[0][6:]
    lines += _evidence([finding], style)
    lines += _symptoms(finding, style)
    return lines + _remedies(finding, style) + _gain(finding.gain, style)


def _many(group: Sequence[Finding], style: Style) -> list[str]:
    head = group[0]
    title = f"{style.text(head.rule)}  {style.text(head.name)}  {len(group)} times"
    lines = [f" {word(head.severity, style)} {title}"]
    width = min(16, max(columns(style.text(finding.subject)) for finding in group))
    for finding in group:
        subject = pad(style.text(finding.subject), width)
        lines += style.fold(style.text(finding.message), first=f"      {subject}  ", rest=" " * 8)
        lines += _symptoms(finding, style)
    lines += _evidence(group, style)
    gains = {finding.gain for finding in group}
    return lines + _remedies(head, style) + (_gain(head.gain, style) if len(gains) == 1 else [])


def _labelled(label: str, text: str, style: Style) -> list[str]:
    return style.fold(text, first=f"      {label:<6} ")


def _evidence(group: Sequence[Finding], style: Style) -> list[str]:
    seen = [item for finding in group for item in finding.evidence]
    shown = seen if style.verbose > 0 else seen[:_SHOWN]
    lines: list[str] = []
    for index, item in enumerate(shown):
        text = f"{style.text(item.fact)} = {style.text(item.value)}"
        if item.expected:
            text += f", expected {style.text(item.expected)}"
        if item.source:
            text += f" ({style.text(item.source)})"
        lines += _labelled("" if index else "seen", text, style)
    if len(shown) < len(seen):
        lines.append(f"{'':13}and {len(seen) - len(shown)} more (-v)")
    return lines


def _symptoms(finding: Finding, style: Style) -> list[str]:
    lines: list[str] = []
    for index, symptom in enumerate(finding.symptoms):
        lines += _labelled("" if index else "also", style.text(symptom), style)
    return lines


def _remedies(finding: Finding, style: Style) -> list[str]:
    lines: list[str] = []
    for remedy in finding.remedies:
        label = "ask" if remedy.kind == "measure" else "fix"
        lines += _labelled(label, style.text(remedy.text), style)
        if remedy.risk:
            lines += _labelled("", f"risk: {style.text(remedy.risk)}", style)
        if remedy.undo:
            lines += _labelled("", f"undo: {style.text(remedy.undo)}", style)
    return lines


def gain_text(gain: Gain, style: Style) -> str:
    """The gain with its basis, such as 1.2-3.0x (measured: tune)."""
    unit = "x" if gain.unit == "x" else f" {style.text(gain.unit)}"
    low, high = trimmed(gain.low), trimmed(gain.high)
    span = low if low == high else f"{low}{style.glyph('dash')}{high}"
    return f"{span}{unit} ({gain.basis}: {style.text(gain.source)})"


def _gain(gain: Gain | None, style: Style) -> list[str]:
    return _labelled("gain", gain_text(gain, style), style) if gain is not None else []


def tally(envelope: Envelope, style: Style) -> list[str]:
    """What was checked, what was not and why, and one closing line with the next thing to do."""
    lines: list[str] = []
    if envelope.clean or envelope.not_checked or envelope.findings:
        lines += _checked(envelope, style)
    counts = Counter(finding.severity for finding in envelope.findings)
    words = [
        f"{counts[severity]} {noun}" + ("s" if counts[severity] > 1 and noun[-1] in "rgn" else "")
        for severity, noun in _TALLY
        if counts[severity]
    ]
    verdict = ", ".join(words)
    if not verdict and envelope.status != "failed":
        verdict = "nothing else found" if _advised(envelope) else "nothing found"
    if envelope.status == "failed":
        problems = count(len(envelope.errors), "problem")
        verdict = "; ".join(part for part in (verdict, f"not complete: {problems}") if part)
    nothing_to_tell = not (envelope.clean or envelope.not_checked or envelope.findings or envelope.errors)
    if nothing_to_tell:
        return lines
    worst = max((severity_rank(finding.severity) for finding in envelope.findings), default=0)
    colour = "red" if worst >= 3 or envelope.status == "failed" else "yellow" if worst == 2 else "green"
    text = f"{verdict}.   " + _next(envelope, style)
    folded = style.fold(text.rstrip(), rest="  ")
    folded[0] = folded[0].replace(f"{verdict}.", style.paint(f"{verdict}.", colour), 1)
    return lines + folded


def _advised(envelope: Envelope) -> bool:
    """Whether a change was prescribed, so that "nothing found" would contradict it."""
    study = envelope.case.loader if envelope.case is not None else None
    kept = envelope.prescription is not None and any(change.kept for change in envelope.prescription.changes)
    return kept or (study is not None and study.verdict == "change")


# More rules than this are told by their commonest reasons alone, until -v is given.
_NAMED_RULES = 12
_NAMED_REASONS = 3


def _checked(envelope: Envelope, style: Style) -> list[str]:
    lines = []
    if envelope.clean:
        text = f"OK {count(len(envelope.clean), 'rule')}"
        if style.verbose > 0:
            text += ": " + " ".join(style.text(code) for code in envelope.clean)
        lines += style.fold(text, first=" ", rest=" " * 6)
    reasons: dict[str, list[str]] = {}
    for item in envelope.not_checked:
        codes = reasons.setdefault(item.reason, [])
        if item.rule not in codes:
            codes.append(item.rule)
    if reasons:
        rules = len({item.rule for item in envelope.not_checked})
        brief = style.verbose <= 0 and rules > _NAMED_RULES
        ranked = sorted(reasons.items(), key=lambda item: -len(item[1])) if brief else list(reasons.items())
        parts = [
            f"{_shorter(style.text(reason))} "
            + (f"({count(len(codes), 'rule')})" if brief else f"({' '.join(style.text(code) for code in codes)})")
            for reason, codes in (ranked[:_NAMED_REASONS] if brief else ranked)
        ]
        if brief:
            more = len(ranked) - _NAMED_REASONS
            parts.append((f"{count(more, 'other reason')}; " if more > 0 else "") + "-v names the rules")
        if style.width is None or len(parts) == 1:
            lines += style.fold(f"NOT CHECKED {rules}: " + "; ".join(parts), first=" ", rest=" " * 6)
        else:
            lines.append(f" NOT CHECKED {rules}")
            for part in parts:
                lines += style.fold(part, first=" " * 6, rest=" " * 8)
    return lines


def _shorter(reason: str) -> str:
    """gpu:0, gpu:1, gpu:2 as gpu:0-2."""

    def joined(found: re.Match[str]) -> str:
        return "gpu:" + ranges([int(index) for index in re.findall(r"\d+", found.group())])

    return re.sub(r"gpu:\d{1,4}(?:, gpu:\d{1,4})+", joined, reason)


def _next(envelope: Envelope, style: Style) -> str:
    steps = []
    if envelope.findings:
        steps.append(f"gpudoctor explain {style.text(envelope.findings[0].rule)}")
    if envelope.command == "checkup" and envelope.case is not None and envelope.case.gpus:
        if not envelope.measurements:
            steps.append("gpudoctor bench-pcie")
        if envelope.case.watched is None:
            steps.append("gpudoctor tune -- python train.py")
    return f"next: {style.joined(steps)}" if steps else ""


def summary_lines(findings: Sequence[Finding], style: Style, *, numbered: bool = False) -> list[str]:
    """One entry for each finding, without evidence and remedies, under a picture that marks where it is."""
    lines: list[str] = []
    for place, finding in enumerate(findings, start=1):
        mark = f"[{place}]" if numbered else ""
        first = f"{mark} {WORDS[finding.severity][0]:<4} {style.text(finding.rule)}  "
        text = f"{style.text(finding.subject)}  {style.text(finding.message)}"
        folded = style.fold(text, first=first, rest=" " * (6 + len(mark)))
        folded[0] = f"{mark} {word(finding.severity, style)} " + folded[0][6 + len(mark) :]
        lines += folded
    if findings:
        lines += ["", f"next: gpudoctor explain {style.text(findings[0].rule)}"]
    return lines
