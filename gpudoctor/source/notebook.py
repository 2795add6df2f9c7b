"""Notebooks as one Python text: code cells in order, magics taken out, every line with its place in the file."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any, NamedTuple

_CELL_MAGIC_OF_PYTHON = {"time", "timeit", "capture", "prun", "memit", "mprun", "lprun", "python", "python3", "px"}
_LINE_MAGIC = re.compile(r"^(\s*)[%!?]")
_ASSIGNED = re.compile(r"^(\s*[\w.,\s]+=\s*)[%!].*$")
_HELP = re.compile(r"^\s*[\w.]+\?{1,2}\s*$")


class Place(NamedTuple):
    """Where a line of the text comes from: line of the file (None: not found there), cell and line of the cell."""

    line: int | None
    cell: int
    cell_line: int


class NotANotebookError(Exception):
    """Why the JSON is no notebook that can be read."""


def read_notebook(raw: bytes) -> tuple[str, tuple[Place, ...]]:
    """Text and places of the code cells; cells of another language are left out. NotANotebookError otherwise."""
    try:
        content = raw.decode("utf-8-sig")
        document: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise NotANotebookError(f"it is no notebook: {' '.join(str(error).split())[:100]}") from None
    cells = document.get("cells") if isinstance(document, dict) else None
    if cells is None and isinstance(document, dict):  # nbformat 3
        sheets = document.get("worksheets")
        if isinstance(sheets, list) and sheets and isinstance(sheets[0], dict):
            cells = sheets[0].get("cells")
    if not isinstance(cells, list):
        raise NotANotebookError("it is no notebook: it has no cells")
    language = _language(document)
    if language not in (None, "python", "ipython", "python3"):
        raise NotANotebookError(f"it is a notebook of {language[:40] if language else language}, not of Python")
    lines: list[str] = []
    places: list[Place] = []
    position, known = 0, (0, 1)
    number = 0
    for cell in cells:
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        number += 1
        source = cell.get("source", cell.get("input", ""))
        written = source if isinstance(source, list) else [source]
        parts = [part for part in written if isinstance(part, str)]
        cell_lines = "".join(parts).split("\n")
        found: list[int | None] = [None] * len(cell_lines)
        if isinstance(source, list):
            row = 0
            for part in parts:
                hit = _find(content, part, position)
                if hit >= 0:
                    position = hit + 1
                    known = (hit, known[1] + content.count("\n", known[0], hit))
                    if row < len(found):
                        found[row] = known[1]
                row += part.count("\n")
        python = _without_magics(cell_lines)
        lines += python
        places += [Place(found[i], number, i + 1) for i in range(len(cell_lines))]
    return "\n".join(lines) + "\n", tuple(places)


def _language(document: dict[str, Any]) -> str | None:
    metadata = document.get("metadata")
    for key in ("kernelspec", "language_info"):
        part = metadata.get(key) if isinstance(metadata, dict) else None
        name = part.get("language" if key == "kernelspec" else "name") if isinstance(part, dict) else None
        if isinstance(name, str):
            return name.lower()
    return None


def _find(content: str, part: str, position: int) -> int:
    """Where the JSON string of one source line begins; written with or without escapes for other alphabets."""
    hit = content.find(json.dumps(part), position)
    return hit if hit >= 0 else content.find(json.dumps(part, ensure_ascii=False), position)


def _without_magics(lines: list[str]) -> list[str]:
    """As many lines as before, with shell commands, magics and help requests made harmless."""
    if not any(_LINE_MAGIC.match(line) or _HELP.match(line) or _ASSIGNED.match(line) for line in lines):
        return lines
    if _is_python("\n".join(lines)):
        return lines  # a line that begins with % may continue an expression or stand in a string
    first = next((line for line in lines if line.strip()), "")
    if first.startswith("%%"):
        word = first[2:].split(None, 1)
        if not word or word[0] not in _CELL_MAGIC_OF_PYTHON:
            return [""] * len(lines)
    result = []
    continued = False
    for line in lines:
        if continued:
            continued = line.rstrip().endswith("\\")
            result.append("")
            continue
        magic = _LINE_MAGIC.match(line)
        if magic:
            continued = line.rstrip().endswith("\\")
            result.append(f"{magic[1]}pass")
        elif _HELP.match(line):
            result.append("pass")
        elif assigned := _ASSIGNED.match(line):
            continued = line.rstrip().endswith("\\")
            result.append(f"{assigned[1]}None")
        else:
            result.append(line)
    return result


def _is_python(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
