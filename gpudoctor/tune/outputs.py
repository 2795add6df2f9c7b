"""The directory that tune writes: launch.sh, train.patch, report.md and case.json."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from pathlib import Path

from gpudoctor.errors import GpudoctorError
from gpudoctor.prescribe import patch

DEFAULT = "gpudoctor-out"


def choose(named: Path | None, *, force: bool, below: Path) -> Path:
    """The output directory, made: the named one, or gpudoctor-out/, gpudoctor-out-2/ ... below `below`."""
    if named is None:
        candidates = itertools.chain([DEFAULT], (f"{DEFAULT}-{number}" for number in itertools.count(2)))
        named = next(path for path in (below / name for name in candidates) if not path.exists())
    elif named.exists() and not force:
        raise GpudoctorError(f"the output directory {named} exists", "use --force to write into it, or name another")
    try:
        named.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GpudoctorError(
            f"cannot make the output directory {named}: {error.strerror}", "name another with --out"
        ) from None
    return named


def latest(named: Path | None, *, below: Path) -> Path:
    """The directory of the tune to resume: the named one, or the last of gpudoctor-out/, gpudoctor-out-2/ ..."""
    if named is not None:
        return named
    found = DEFAULT
    for number in itertools.count(2):
        if not (below / f"{DEFAULT}-{number}").is_dir():
            return below / found
        found = f"{DEFAULT}-{number}"
    raise AssertionError("itertools.count does not end")


def diff(texts: Mapping[str, tuple[str, str]]) -> str:
    """One unified diff over all changed files; paths are relative to the directory where the command ran."""
    return "".join(patch.unified_diff(file, old, new) for file, (old, new) in sorted(texts.items()))


def write(path: Path, text: str, *, executable: bool = False) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
        if executable:
            temporary.chmod(0o755)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise GpudoctorError(f"cannot write {path}: {error.strerror}", "free space or name another --out") from None
