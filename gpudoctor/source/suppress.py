"""Comments that silence a line: ``# gpudoctor: ignore[SYN001]``, ``# gpudoctor: ignore``, ``# noqa: SYN001``."""

from __future__ import annotations

import io
import re
import tokenize
from typing import NamedTuple

from gpudoctor.source.project import Module

_COMMENT = re.compile(
    r"#\s*(?:gpudoctor:\s*ignore(?:\[(?P<codes>[^\]]*)\])?|noqa(?::\s*(?P<noqa>[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*))?)",
    re.IGNORECASE,
)


class Suppression(NamedTuple):
    """`codes` None silences every rule; `ours`: a comment in our words, told when it silences nothing."""

    file: str
    line: int
    codes: tuple[str, ...] | None
    ours: bool


def find_suppressions(module: Module) -> list[Suppression]:
    """Those in comments; the same words in a string silence nothing."""
    text = module.source.text
    if "gpudoctor" not in text and "noqa" not in text:
        return []
    lines = [number for number, line in enumerate(module.lines, 1) if _COMMENT.search(line)]
    if not lines:
        return []
    comments = _comments(text)
    found = []
    for number in lines:
        match = _COMMENT.search(comments.get(number, ""))
        if match is None:
            continue
        ours = "gpudoctor" in match[0].lower()
        written = match["codes"] if ours else match["noqa"]
        codes = (
            None if written is None else tuple(code.upper() for code in re.split(r"[,\s]+", written.strip()) if code)
        )
        found.append(Suppression(module.subject, module.line_of(number), codes, ours))
    return found


def _comments(text: str) -> dict[int, str]:
    found: dict[int, str] = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                found[token.start[0]] = token.string
    except (tokenize.TokenError, SyntaxError, IndentationError):
        pass  # it parsed, so what was read before the tokenizer gave up holds the comments that count
    return found
