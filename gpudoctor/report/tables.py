"""Tables of the human report: artifacts, measurements, the watched command, and what tune tried."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from gpudoctor.model import Change, Envelope, Measurement, Prescription, Setting, Trial
from gpudoctor.report import copies
from gpudoctor.report.scaling import scaling
from gpudoctor.report.text import Style, columns, count, number, pad, ranges, size, trimmed

_VERDICTS = {
    "ok": ("OK", "green"),
    "low": ("WARN low", "yellow"),
    "bad": ("FAIL", "red"),
    "rejected": ("REJECTED", "yellow"),
    "no verdict": ("no verdict", "dim"),
}
_TOLD_SETTINGS = ("bytes", "binding", "backend", "ranks")
_TOLD_ELSEWHERE = ("loader.", "step.", "tune.", "scaling.", "trace.")  # in tables of their own
_EVENTS = ("kineto-trace", "nsys-sqlite")  # artifacts that are counted in events
_SITES = 8  # lines of code in the profile before "and n more"


def artifacts(envelope: Envelope, style: Style) -> list[str]:
    """What each file is, and how much of it was understood."""
    if not envelope.artifacts:
        return []
    rows = []
    for item in envelope.artifacts:
        notes = [count(item.lines, "event" if item.kind in _EVENTS else "line")]
        if item.lines_not_understood:
            notes.append(f"{item.lines_not_understood} not understood")
        if item.truncated:
            notes.append("truncated")
        rows.append((style.text(item.file), style.text(item.kind), ", ".join(notes)))
    return ["read", *style.table(rows, indent="  ")]


def measurements(envelope: Envelope, style: Style) -> list[str]:
    """One heading per subject, one line per metric: median, spread, verdict, what is expected."""
    told_here = [item for item in envelope.measurements if not item.metric.startswith(_TOLD_ELSEWHERE)]
    groups = copies.lines([item for item in told_here if copies.is_group(item)], style)
    shown = [item for item in told_here if not copies.is_group(item)]
    if not shown:
        return groups
    common = _common_settings(shown, style)
    counts = {item.samples for item in shown}
    repeats = str(counts.pop()) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    heading = f"median of {repeats} repeats"
    if told := _settings(common, style):
        heading += f", {told}"
    lines = style.fold(heading, rest="  ")
    rows = iter(_measurement_lines(shown, style))
    lines_of = {id(item): next(rows) for item in shown}
    subjects: dict[str, list[Measurement]] = {}
    for item in shown:
        subjects.setdefault(item.subject, []).append(item)
    for subject, items in subjects.items():
        own = {key: value for key, value in _common_settings(items, style).items() if key not in common}
        lines += style.fold(style.joined([*_subject(envelope, subject, style), _settings(own, style)]), rest="  ")
        for item in items:
            lines.append(lines_of[id(item)])
            for note in item.notes:
                lines += style.fold(style.text(note), first="      ")
    sources = sorted({style.text(item.expected.source) for item in shown if item.expected})
    if sources:
        lines += style.fold("expected: " + "; ".join(sources), rest="  ")
    return [*lines, "", *groups] if groups else lines


def _measurement_lines(items: Sequence[Measurement], style: Style) -> list[str]:
    """Aligned rows; a bar where the terminal has room for it."""
    plain = style.table([_measurement_row(item, style) for item in items], right=(1,), indent="  ")
    width = max(columns(line) for line in plain)
    room = 0 if style.width is None else min(24, style.width - width - 2)
    top = {item.unit: max(other.value for other in items if other.unit == item.unit) for item in items}
    lines = []
    for line, item in zip(plain, items, strict=True):
        if room >= 8 and top[item.unit] > 0:
            length = round(room * max(0.0, item.value) / top[item.unit])
            line = pad(line, width) + "  " + style.glyph("block") * length
        if item.verdict is not None:
            word, colour = _VERDICTS[item.verdict]
            line = line.replace(f"  {word}", f"  {style.paint(word, colour)}", 1)
        lines.append(line.rstrip())
    return lines


def _measurement_row(item: Measurement, style: Style) -> tuple[str, ...]:
    spread = ""
    if item.spread is not None:
        low, high = item.spread
        spread = f" {style.glyph('plus-minus')}{(high - low) / 2:.2g}"
    expected = ""
    if item.expected is not None:
        low_text = trimmed(item.expected.low)
        expected = f"expect >= {low_text}"
        if item.expected.high is not None:
            expected = f"expect {low_text}{style.glyph('dash')}{trimmed(item.expected.high)}"
    return (
        style.text(item.metric),
        number(item.value),
        style.text(item.unit) + spread,
        _VERDICTS[item.verdict][0] if item.verdict is not None else "",
        expected,
    )


def _common_settings(items: Sequence[Measurement], style: Style) -> dict[str, Setting]:
    """Settings that all of them share; without -v only those that change how the figures are read."""
    first, *others = [item.settings for item in items]
    return {
        key: value
        for key, value in first.items()
        if (style.verbose > 0 or key in _TOLD_SETTINGS) and all(other.get(key, ...) == value for other in others)
    }


def _settings(settings: Mapping[str, Setting], style: Style) -> str:
    parts = []
    for key, value in settings.items():
        name = style.text(key).replace("_", " ")
        if value is None or value is False:
            continue
        if value is True:
            parts.append(name)
        elif key == "bytes" and isinstance(value, int):
            parts.append(f"blocks of {size(value)}")
        else:
            parts.append(f"{name} {trimmed(value) if isinstance(value, float) else style.text(value)}")
    return ", ".join(parts)


def _subject(envelope: Envelope, subject: str, style: Style) -> list[str | None]:
    """A subject with what is known of the GPU: model and the link as it was during the copy."""
    parts: list[str | None] = [style.text(subject)]
    cases = envelope.cases or ((envelope.case,) if envelope.case is not None else ())
    for gpu in (gpu for case in cases for gpu in case.gpus if f"gpu:{gpu.index}" == subject):
        parts.append(style.text(gpu.name) if gpu.name else None)
        link = gpu.pcie
        if link is not None and link.generation and link.width:
            state = {"load": " under load", "idle": " (idle reading)"}.get(link.state, "")
            parts.append(f"PCIe {link.generation}.0 x{link.width}{state}")
        if gpu.throttle_reasons and gpu.throttle_state == "load":
            parts.append("clocks held by " + ", ".join(style.text(reason) for reason in gpu.throttle_reasons))
        break
    return parts


def prescription(envelope: Envelope, style: Style) -> list[str]:
    """Baseline against tuned, what was kept and dropped and why, the proof, and the files written."""
    item = envelope.prescription
    if item is None:
        return []
    lines = [*scaling(item.scaling, style), ""] if item.scaling is not None else []
    lines += _rates(item.trials, style)
    for measurement in envelope.measurements:
        if measurement.metric == "tune.speedup":
            lines += _speedup(measurement, style)
    if item.verdict and not any(measurement.metric == "tune.speedup" for measurement in envelope.measurements):
        lines += [style.paint(line, "bold") for line in style.fold(style.text(item.verdict))]
    lines += _changes(item, style)
    if item.proof is not None:
        text: str = item.proof.verdict
        if item.proof.compared:
            text += ": " + ", ".join(style.text(part) for part in item.proof.compared)
        if item.proof.reason:
            text += f" ({style.text(item.proof.reason)})"
        lines += style.fold(text, first="proof    ")
    for index, (kind, path) in enumerate(item.files.items()):
        lines.append(f"{'files' if not index else '':<8} {style.text(path)}  ({style.text(kind)})")
    watched = envelope.case.watched if envelope.case is not None else None
    if "patch" in item.files and watched is not None:
        where, diff = shlex.quote(style.text(watched.cwd)), shlex.quote(style.text(item.files["patch"]))
        lines += _command("apply    ", ("patch -p1", f"-d {where}", f"< {diff}"), style)
        lines += _command("undo     ", ("patch -R -p1", f"-d {where}", f"< {diff}"), style)
    return lines


def _command(head: str, parts: Sequence[str], style: Style) -> list[str]:
    """A shell command that can be copied: continued with a backslash where the terminal is too narrow."""
    line = head + " ".join(parts)
    if style.width is None or len(line) <= style.width:
        return [line]
    return [(head if not n else " " * len(head)) + p + " \\" * (n < len(parts) - 1) for n, p in enumerate(parts)]


def _rates(trials: Iterable[Trial], style: Style) -> list[str]:
    """Medians of the confirming runs, else of the baseline and nothing beside it."""
    done = [trial for trial in trials if trial.rate is not None]
    confirm = [trial for trial in done if trial.purpose == "confirm"]
    base = [trial for trial in confirm if not trial.changes] or [t for t in done if t.purpose == "baseline"]
    tuned = [trial for trial in confirm if trial.changes]
    if not base:
        return []
    columns_of = [base, tuned] if tuned else [base]
    unit = style.text(base[0].unit)
    rows = [("", "baseline", "tuned")[: 1 + len(columns_of)]]
    figures = (
        (unit, [[t.rate for t in runs] for runs in columns_of]),
        ("median step, ms", [[t.median_step_ms for t in runs] for runs in columns_of]),
        ("loader wait, ms/step", [[t.loader_wait_ms for t in runs] for runs in columns_of]),
        ("runs", None),
    )
    for name, values in figures:
        if values is None:
            rows.append((name, *(str(len(runs)) for runs in columns_of)))
            continue
        cells = []
        for run_values in values:
            known = [value for value in run_values if value is not None]
            cells.append(number(median(known)) if known else style.glyph("none"))
        if any(cell != style.glyph("none") for cell in cells):
            rows.append((name, *cells))
    return style.table(rows, right=(1, 2), indent="")


def _speedup(item: Measurement, style: Style) -> list[str]:
    text = f"tune.speedup {number(item.value)}x"
    if item.spread is not None:
        low, high = item.spread
        text += f", interval {number(low)}{style.glyph('dash')}{number(high)}x"
    lines = style.fold(f"{text}, {count(item.samples, 'pair')} of runs", rest="  ")
    colour = "green" if item.verdict == "ok" else "yellow"
    return [style.paint(line, "bold", colour) for line in lines]


def _changes(item: Prescription, style: Style) -> list[str]:
    lines: list[str] = []
    groups: tuple[tuple[str, list[Change]], ...] = (
        ("kept", [change for change in item.changes if change.kept]),
        ("not kept", [change for change in item.changes if not change.kept and change.can_be_tried]),
        ("advice", [change for change in item.changes if not change.kept and not change.can_be_tried]),
    )
    for label, changes in groups:
        for index, change in enumerate(changes):
            head = f"{label if not index else '':<8} "
            text = f"{style.text(change.rule)} {style.text(change.site)}  {style.text(change.title)}"
            if change.gain is not None:
                low, high = trimmed(change.gain.low), trimmed(change.gain.high)
                span = low if low == high else f"{low}{style.glyph('dash')}{high}"
                text += f"  {span}{'x' if change.gain.unit == 'x' else ' ' + style.text(change.gain.unit)}"
            if change.reason:
                text += f": {style.text(change.reason)}"
            lines += style.fold(text, first=head)
    if item.launch is not None and item.launch.ranks:
        for rank in item.launch.ranks:
            parts = [
                f"rank {rank.rank}",
                style.text(rank.gpu) if rank.gpu else None,
                f"NUMA node {rank.numa_node}" if rank.numa_node is not None else None,
                f"CPUs {ranges(rank.cpus)}" if rank.cpus else "not bound",
                style.text(rank.nic) if rank.nic else None,
            ]
            lines += style.fold(style.joined(parts), first=f"{'launch' if not rank.rank else '':<8} ")
    return lines
