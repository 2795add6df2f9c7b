"""Comments that silence a line: ``# gpudoctor: ignore[SYN001]``, ``# gpudoctor: ignore``, ``# noqa: SYN001``."""

from __future__ import annotations

import ast
import bisect
import io
import re
import tokenize
from typing import NamedTuple

from gpudoctor.source.project import Module

_COMMENT = re.compile(
    r"#\s*(?:gpudoctor:\s*ignore(?:\[(?P<codes>[^\]]*)\])?|noqa(?::\s*(?P<noqa>[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*))?)",
    re.IGNORECASE,
)


_OUR_CODE = re.compile(r"\b[A-Z]{3}[0-9]{3}\b")


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
    lines = [number for number, line in enumerate(module.lines, 1) if _may_silence(line)]
    found = []
    known: dict[int, str] = {}  # comments of the statements that were read so far, by line
    read_to = 0
    for number in lines:
        if number > read_to:
            first, read_to = _around(module, number)
            known = _comments("\n".join(module.lines[first - 1 : read_to]) + "\n", first)
        match = _COMMENT.search(known.get(number, ""))
        if match is None:
            continue
        ours = "gpudoctor" in match[0].lower()
        written = match["codes"] if ours else match["noqa"]
        codes = (
            None if written is None else tuple(code.upper() for code in re.split(r"[,\s]+", written.strip()) if code)
        )
        found.append(Suppression(module.subject, module.line_of(number), codes, ours))
    return found


def _may_silence(line: str) -> bool:
    """Most noqa comments name rules of other linters only: F401 is never ours."""
    if "gpudoctor" not in line and "noqa" not in line.lower():
        return False
    match = _COMMENT.search(line)
    if match is None:
        return False
    return match["noqa"] is None or _OUR_CODE.search(match["noqa"].upper()) is not None


def _around(module: Module, line: int) -> tuple[int, int]:
    """First and last line of the top-level statement at a line, else the line alone. A tokenizer that begins there
    knows whether the line is in a string, and need not read the whole file."""
    body = module.tree.body
    position = bisect.bisect_right(body, line, key=_first_line) - 1
    if position >= 0 and line <= (body[position].end_lineno or 0):
        return _first_line(body[position]), body[position].end_lineno or line
    return line, line


def _first_line(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", None)
    return min(statement.lineno, decorators[0].lineno) if decorators else statement.lineno


def _comments(text: str, first: int) -> dict[int, str]:
    """Comments by line; `first` is the line at which the text begins."""
    found: dict[int, str] = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                found[token.start[0] + first - 1] = token.string
    except (tokenize.TokenError, SyntaxError, IndentationError):
        pass  # it parsed, so what was read before the tokenizer gave up holds the comments that count
    return found
