"""Keeps two gpudoctors apart: one that loads a link makes the figures of the other wrong."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gpudoctor.errors import GpudoctorError

NAME = "gpudoctor-measure.lock"


@contextlib.contextmanager
def exclusive() -> Iterator[str | None]:
    """Hold the lock of this machine; yields None, or why there is none. GpudoctorError when another gpudoctor has it.

    The lock goes with the process, however that ends; the empty file stays.
    """
    path = Path(tempfile.gettempdir()) / NAME
    try:
        fd = _open(path)
    except OSError as error:
        yield f"no lock against a second gpudoctor: {path}: {error.strerror}"
        return
    try:
        _take(fd)
        yield None
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    # Another user's file in a sticky folder may be opened, but not with O_CREAT; a link is never followed.
    safe = os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(FileExistsError):
        return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | safe, 0o644)
    return os.open(path, os.O_RDONLY | safe)


def _take(fd: int) -> None:
    if sys.platform == "win32":
        return
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise GpudoctorError(
            "another gpudoctor is measuring on this machine", "wait until it has finished; two would disturb each other"
        ) from None
