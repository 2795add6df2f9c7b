"""Workflow commands that GitHub shows as annotations on the changed lines of a pull request."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpudoctor.model import Envelope, Finding
from gpudoctor.report.text import printable

# GitHub shows at most ten errors and ten warnings a step, and ten notices; what is beyond is lost.
SHOWN = 10
_COMMANDS = {"critical": "error", "error": "error", "warning": "warning", "info": "notice", "unknown": "notice"}
_SITE = re.compile(r"^(?P<file>.+):(?P<line>\d+)$")


def render_github(envelope: Envelope) -> str:
    """At most ten annotations of a kind, worst first, then one line that counts all findings."""
    lines: list[str] = []
    shown: dict[str, int] = {}
    for finding in envelope.findings:
        command = _COMMANDS[finding.severity]
        shown[command] = shown.get(command, 0) + 1
        if shown[command] <= SHOWN:
            lines.append(_annotation(command, finding))
    room = max(0, SHOWN - shown.get("error", 0))
    lines += [f"::error title=gpudoctor::{_data(error)}" for error in envelope.errors[:room]]
    lines.append(_summary(envelope, shown))
    return "\n".join(lines) + "\n"


def _annotation(command: str, finding: Finding) -> str:
    properties = []
    match = _SITE.match(finding.subject)
    if match is not None:
        properties += [f"file={_property(match['file'])}", f"line={match['line']}"]
    properties.append(f"title={_property(f'{finding.rule} {finding.name}')}")
    text = finding.message if match is not None else f"{finding.subject}: {finding.message}"
    if finding.remedies:
        text += f". Fix: {finding.remedies[0].text}"
    return f"::{command} {','.join(properties)}::{_data(text)}"


def _summary(envelope: Envelope, shown: dict[str, int]) -> str:
    """Plain text in the log, which GitHub does not cut."""
    total = len(envelope.findings)
    if not total and not envelope.errors:
        return "gpudoctor: nothing found"
    words = [f"{number} {name}{'s' if number > 1 else ''}" for name, number in sorted(shown.items())]
    text = f"gpudoctor: {', '.join(words) or 'no findings'}"
    if envelope.errors:
        text += f"; {len(envelope.errors)} not done"
    hidden = _hidden(list(shown.values()))
    if hidden:
        text += f" ({hidden} beyond what GitHub shows: gpudoctor {printable(envelope.command)} tells all)"
    return text


def _hidden(numbers: Sequence[int]) -> int:
    return sum(max(0, number - SHOWN) for number in numbers)


def _data(text: str) -> str:
    """The message of a command: one line, with % escaped as GitHub wants it."""
    return printable(text).replace("%", "%25")


def _property(text: str) -> str:
    return printable(text).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
