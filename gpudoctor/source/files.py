"""Finds source files and reads their text: encodings, notebooks, and everything that is no Python."""

from __future__ import annotations

import codecs
import io
import os
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpudoctor.source.notebook import NotANotebookError, Place, read_notebook

# Folders that hold no code of the user's own.
SKIPPED = {
    ".git",
    ".hg",
    ".svn",
    ".venv",
    "venv",
    ".tox",
    ".nox",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    "__pycache__",
    "node_modules",
    "site-packages",
    ".ipynb_checkpoints",
    ".eggs",
    "__pypackages__",
}
MAX_BYTES = 20_000_000  # more is data, not a script
_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceText:
    """One file as Python text. `subject` is how findings name it. `places` maps the lines of a notebook's text to the
    lines of the file and to cells; None for a plain file."""

    path: str
    subject: str
    text: str
    places: tuple[Place, ...] | None = None


class UnreadableError(Exception):
    """Why a file is not read: one line."""


def find_files(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """The .py, .pyi-less and .ipynb files of files and folders, each once and sorted, and what could not be read.

    Folders are walked without following links to folders, so that loops cannot happen; a link to a file is followed.
    """
    found: dict[str, str] = {}
    errors: list[str] = []
    for path in paths:
        try:
            inside = list(_walk(path, errors)) if Path(path).is_dir() else [path]
        except OSError as error:
            errors.append(f"cannot read {path!r}: {error.strerror or type(error).__name__}")
            continue
        if not inside and Path(path).is_dir():
            errors.append(f"{path!r} holds no Python file")
        for file in inside:
            found.setdefault(_real(file), file)
    return sorted(found.values()), errors


def _real(path: str) -> str:
    try:
        return os.path.realpath(path)
    except OSError:
        return path


def _walk(folder: str, errors: list[str]) -> Iterator[str]:
    def unreadable(error: OSError) -> None:
        errors.append(f"cannot read {str(error.filename)!r}: {error.strerror or type(error).__name__}")

    for where, folders, files in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(name for name in folders if name not in SKIPPED and not name.endswith(".egg-info"))
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        for name in sorted(files):
            if name.endswith((".py", ".ipynb")):
                yield os.path.join(where, name)  # noqa: PTH118 - a string join in a loop over many thousand files


def subject_of(path: str, cwd: str) -> str:
    """How findings name a file: relative to the directory of the command when it lies below it, else as given."""
    full = os.path.abspath(path)  # noqa: PTH100 - no links resolved: the name is the user's
    if full.startswith(cwd.rstrip("/") + "/"):
        return os.path.relpath(full, cwd).replace(os.sep, "/")
    return os.path.normpath(path).replace(os.sep, "/")


def read_source(path: str, subject: str) -> SourceText:
    """The text of a file in the encoding that it declares. UnreadableError says in one line what is wrong."""
    try:
        if not Path(path).is_file():
            why = "there is no such file" if not Path(path).exists() else "it is no regular file"
            raise UnreadableError(why)
        size = Path(path).stat().st_size
        if size > MAX_BYTES:
            raise UnreadableError(f"it has {size / 1e6:.0f} MB, which is no script")
        raw = Path(path).read_bytes()
    except OSError as error:
        raise UnreadableError(error.strerror or type(error).__name__) from None
    if path.endswith(".ipynb"):
        try:
            text, places = read_notebook(raw)
        except NotANotebookError as error:
            raise UnreadableError(str(error)) from None
        return SourceText(path=path, subject=subject, text=text, places=places)
    return SourceText(path=path, subject=subject, text=_decode(raw))


def _decode(raw: bytes) -> str:
    if raw.isascii() and b"\0" not in raw and not _COOKIE.search(raw[:200]):
        text = raw.decode("ascii")
    elif raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UnreadableError("it is UTF-16, which Python does not read: save it as UTF-8")
    elif b"\0" in raw:
        raise UnreadableError("it is binary, not Python source")
    else:
        try:
            encoding = tokenize.detect_encoding(io.BytesIO(raw).readline)[0]
            text = raw.decode(encoding)
        except (SyntaxError, UnicodeError, LookupError):
            first = next((n for n, line in enumerate(raw.split(b"\n"), 1) if not _is_utf8(line)), 1)
            raise UnreadableError(
                f"line {first} is not UTF-8, and no other encoding is declared or the declared one is wrong"
            ) from None
    text = text.removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
