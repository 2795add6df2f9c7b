"""Unified diffs that `git apply` and `patch -p1` take, and writing them to disk in one step, with the way back."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import re
import shutil
import tempfile
import tokenize
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from gpudoctor.errors import GpudoctorError

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = "\\ No newline at end of file\n"


def unified_diff(file: str, old: str, new: str) -> str:
    """The patch from `old` to `new`, with ``a/`` and ``b/`` paths; empty when they are equal.

    Line ends stay as they are. No ``diff --git`` line: with one, git applies nothing from below a subfolder.
    GpudoctorError when `file` is not a plain relative path.
    """
    _checked(file)
    tab = "\t" if " " in file else ""  # ends the name for patch, as git writes it
    result = []
    for number, line in enumerate(
        difflib.unified_diff(_lines(old), _lines(new), f"a/{file}{tab}", f"b/{file}{tab}", lineterm="\n")
    ):
        result.append(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}" if number > 1 else f"{line}\n")
    return "".join(result)


def encoding_of(text: str) -> str:
    """The encoding that the text's own cookie asks for, else utf-8: a diff must be written in it."""
    head = "\n".join(re.split(r"\r\n?|\n", text.removeprefix("\ufeff"))[:2])
    try:
        return tokenize.detect_encoding(io.BytesIO(head.encode("utf-8", "replace")).readline)[0]
    except SyntaxError:
        return "utf-8"


def apply_to_disk(root: Path, changes: Mapping[str, tuple[str, str]], reverse: Path) -> None:
    """Write the new texts below `root`, all or none, after the reverse diff was saved at `reverse`.

    changes: relative path -> (old text, new text). GpudoctorError when a file is not what the old text says, lies
    outside of root, or cannot be written; nothing is changed then.
    """
    writes: list[tuple[Path, bytes, bytes]] = []
    back = []
    for file, (old, new) in changes.items():
        target = _target(root, file)
        encoding = encoding_of(old)
        before, after = _encoded(file, old, encoding), _encoded(file, new, encoding)
        if _read(target, file) != before:
            raise GpudoctorError(f"{file} was changed since the patch was made", "run the command again")
        writes.append((target, before, after))
        back.append(unified_diff(file, new, old).encode(encoding))
    _write_all([(reverse, None, b"".join(back)), *writes])


def revert(reverse: Path, root: Path | None = None) -> tuple[str, ...]:
    """Apply a saved reverse diff below `root` (default: the working directory); returns the files that were restored.

    GpudoctorError when a file was changed since; nothing is changed then.
    """
    base = root if root is not None else Path.cwd()
    try:
        patch = reverse.read_bytes()
    except OSError as error:
        raise GpudoctorError(f"cannot read {reverse}: {error.strerror}") from None
    writes: list[tuple[Path, bytes | None, bytes]] = []
    files = []
    for file, hunks in _parsed(patch, reverse):
        target = _target(base, file)
        before = _read(target, file)
        writes.append((target, before, _applied(before, hunks, file)))
        files.append(file)
    _write_all(writes)
    return tuple(files)


def _lines(text: str) -> list[str]:
    """Lines as git and patch see them: only a line feed ends one."""
    parts = text.split("\n")
    return [part + "\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _checked(file: str) -> None:
    path = PurePosixPath(file)
    plain = file and not path.is_absolute() and ".." not in path.parts and str(path) == file
    if not plain or re.search(r"[\x00-\x1f\x7f\"\\]", file) or not file.isprintable():
        raise GpudoctorError(
            f"no patch can be written for {file!r}", "run the command in the directory that holds the script"
        )


def _target(root: Path, file: str) -> Path:
    _checked(file)
    base = root.resolve()
    target = (base / file).resolve()
    if not target.is_relative_to(base):
        raise GpudoctorError(f"{file} leads outside of the working directory", "patch the file where it lies")
    return target


def _encoded(file: str, text: str, encoding: str) -> bytes:
    try:
        return text.encode("utf-8" if encoding == "utf-8-sig" else encoding)
    except (UnicodeError, LookupError):
        raise GpudoctorError(f"{file} cannot be written in its own encoding, {encoding}") from None


def _read(target: Path, file: str) -> bytes:
    try:
        return target.read_bytes()
    except OSError as error:
        raise GpudoctorError(f"cannot read {file}: {error.strerror}") from None


def _write_all(writes: list[tuple[Path, bytes | None, bytes]]) -> None:
    """Replace every file, or none: new contents are written beside the files first, then put in their places."""
    staged: list[tuple[str, Path]] = []
    done: list[tuple[Path, bytes | None]] = []
    try:
        for target, _, after in writes:
            target.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
            staged.append((name, target))
            with os.fdopen(handle, "wb") as stream:
                stream.write(after)
                stream.flush()
                os.fsync(stream.fileno())
            if target.exists():
                shutil.copymode(target, name)
            else:
                Path(name).chmod(0o644)
        for (name, target), (_, before, _) in zip(staged, writes, strict=True):
            Path(name).replace(target)
            done.append((target, before))
    except OSError as error:
        for target, before in done:
            with contextlib.suppress(OSError):  # the first error is the one that is told
                target.unlink() if before is None else target.write_bytes(before)
        raise GpudoctorError(f"cannot write {error.filename or 'the patch'}: {error.strerror}") from None
    finally:
        for name, _ in staged:
            Path(name).unlink(missing_ok=True)


Hunk = tuple[int, list[bytes]]  # first line in the old text, 1-based, and the hunk's lines with their marks


def _parsed(patch: bytes, reverse: Path) -> list[tuple[str, list[Hunk]]]:
    """The files and hunks of a diff that unified_diff wrote; GpudoctorError for anything else."""
    wrong = GpudoctorError(f"{reverse} is no reverse patch written by gpudoctor")
    lines = patch.split(b"\n")
    lines = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    files: list[tuple[str, list[Hunk]]] = []
    position = 0
    while position < len(lines):
        line = lines[position]
        if line.startswith(b"--- a/") and position + 1 < len(lines) and lines[position + 1].startswith(b"+++ b/"):
            try:
                files.append((line[6:].rstrip(b"\t\n").decode(), []))
            except UnicodeDecodeError:
                raise wrong from None
            position += 2
            continue
        head = _HUNK.match(line)
        if head is None or not files:
            raise wrong
        left = [int(head[2] or 1), int(head[4] or 1)]
        body: list[bytes] = []
        position += 1
        while position < len(lines) and (left[0] > 0 or left[1] > 0 or lines[position].startswith(b"\\")):
            mark = lines[position][:1]
            left[0] -= mark in b" -" and mark != b"\\"
            left[1] -= mark in b" +" and mark != b"\\"
            body.append(lines[position])
            position += 1
        if left != [0, 0]:
            raise wrong
        files[-1][1].append((int(head[1]) + (int(head[2] or 1) == 0), body))
    if not files:
        raise wrong
    return files


def _applied(before: bytes, hunks: list[Hunk], file: str) -> bytes:
    parts = before.split(b"\n")
    old = [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
    new: list[bytes] = []
    position = 0
    for start, body in hunks:
        new += old[position : start - 1]
        position = start - 1
        for number, marked in enumerate(body):
            if marked.startswith(b"\\"):
                continue
            line = marked[1:]
            if number + 1 < len(body) and body[number + 1].startswith(b"\\"):
                line = line.removesuffix(b"\n")
            if marked[:1] in b" -":
                if position >= len(old) or old[position] != line:
                    raise GpudoctorError(f"{file} was changed since it was patched", "undo the patch by hand")
                position += 1
            if marked[:1] in b" +":
                new.append(line)
    return b"".join(new + old[position:])
