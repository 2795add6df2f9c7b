"""Bytes of a file or of standard input as text, or one clear line that says why not."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import BinaryIO, TextIO

from gpudoctor.errors import GpudoctorError

MOST_BYTES = 64 * 1024 * 1024  # of one artifact; whole kernel logs are far below it


def one_line(name: str) -> str:
    """A file name that is safe inside a message: control characters are written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in name)


def load(path: str, stdin: TextIO | BinaryIO | None) -> tuple[str, str | None]:
    """The text of `path` ("-" is `stdin`), and a warning when bytes had to be replaced.

    GpudoctorError when there is no text: missing, a directory, no permission, empty, binary, larger than MOST_BYTES.
    """
    name = "standard input" if path == "-" else one_line(path)
    try:
        raw = _bytes(path, stdin)
    except OSError as error:
        raise GpudoctorError(f"cannot read {name}: {error.strerror or error}") from None
    except ValueError as error:  # a NUL byte in the path; a stream that is closed
        raise GpudoctorError(f"cannot read {name}: {error}") from None
    if len(raw) > MOST_BYTES:
        raise GpudoctorError(
            f"cannot read {name}: larger than {MOST_BYTES // 1024 // 1024} MiB", "cut the part that matters out of it"
        )
    if not raw.strip():
        raise GpudoctorError(f"cannot read {name}: it is empty")
    return _text(raw, name)


def _bytes(path: str, stdin: TextIO | BinaryIO | None) -> bytes:
    if path == "-":
        if stdin is None:
            raise OSError("standard input is not available")
        stream: TextIO | BinaryIO = getattr(stdin, "buffer", stdin)
        data = stream.read(MOST_BYTES + 1)
        return data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data
    mode = Path(path).stat().st_mode
    if stat.S_ISDIR(mode):
        raise OSError("it is a folder without files")
    if stat.S_ISBLK(mode):
        raise OSError("it is a device")
    with Path(path).open("rb") as file:
        return file.read(MOST_BYTES + 1)


def _text(raw: bytes, name: str) -> tuple[str, str | None]:
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):  # what a redirect in Windows PowerShell writes
        try:
            return raw.decode("utf-16"), None
        except UnicodeDecodeError as error:
            raise GpudoctorError(f"cannot read {name}: damaged UTF-16 text: {error.reason}") from None
    if b"\0" in raw:
        raise GpudoctorError(f"cannot read {name}: binary data, not text")
    try:
        return raw.decode("utf-8-sig"), None
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        text = raw.decode("utf-8", "replace")
        if sum(c == "\ufffd" for c in text) * 10 > len(text):
            raise GpudoctorError(f"cannot read {name}: binary data, not text") from None
        return text, f"{name} is not UTF-8 text (line {line}): the bytes that are not were replaced"
