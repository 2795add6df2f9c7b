"""Reads /proc and /sys below any root directory, and keeps the books: gaps, sources, conflicts."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from gpudoctor.model import Conflict, ConflictValue, Gap, GapReason, Source

_MOST_NUMBERS = 1 << 16  # no machine has more CPUs or nodes; a longer list is damage


class Reading(NamedTuple):
    """The stripped text of a file, or None and why there is none."""

    text: str | None
    reason: GapReason | None = None


def reason_of(error: OSError) -> GapReason:
    """A file that is there and refuses (link speed of a port that is down gives EINVAL) is "not supported"."""
    if isinstance(error, PermissionError):
        return "no permission"
    return "not present" if isinstance(error, (FileNotFoundError, NotADirectoryError)) else "not supported"


class Files:
    """Files of one machine: the live one (root "/"), or a tree that was recorded."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self.live = self.root == Path("/")

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def read(self, path: str) -> Reading:
        try:
            return Reading(self.at(path).read_bytes().decode(errors="replace").strip("\0\n\t "))
        except OSError as error:
            return Reading(None, reason_of(error))

    def number(self, path: str) -> int | None:
        """A decimal or 0x number, or None when the file is absent or says something else."""
        text = self.read(path).text
        try:
            return None if text is None else int(text, 0)
        except ValueError:
            return None

    def names(self, path: str) -> tuple[str, ...]:
        """The sorted names in a directory; empty when it cannot be listed."""
        return self.listing(path)[0]

    def listing(self, path: str) -> tuple[tuple[str, ...], GapReason | None]:
        try:
            return tuple(sorted(entry.name for entry in self.at(path).iterdir())), None
        except OSError as error:
            return (), reason_of(error)

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.at(path))

    def real(self, path: str) -> Path | None:
        """The path with links resolved, relative to the root; None when it leads nowhere or out of the tree."""
        try:
            return self.at(path).resolve(strict=True).relative_to(self.root)
        except (OSError, RuntimeError, ValueError):
            return None


@dataclass
class Notebook:
    """What could not be had, where facts came from, and who disagrees; ends up in the Case."""

    gaps: list[Gap] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    conflicts: list[Conflict] = field(default_factory=list)

    def gap(self, path: str, reason: GapReason, detail: str | None = None) -> None:
        if all(gap.path != path for gap in self.gaps):
            self.gaps.append(Gap(path=path, reason=reason, detail=detail))

    def extend(self, path: str, detail: str) -> None:
        """Add to the detail of a gap that was noted before."""
        for number, gap in enumerate(self.gaps):
            if gap.path == path:
                self.gaps[number] = replace(gap, detail=f"{gap.detail}; {detail}" if gap.detail else detail)

    def forget(self, path: str) -> None:
        """Drop the gap of a fact that another source had after all."""
        self.gaps[:] = [gap for gap in self.gaps if gap.path != path]

    def source(self, path: str, origin: str) -> None:
        self.sources.append(Source(path=path, origin=origin))

    def conflict(self, path: str, *values: tuple[object, str]) -> None:
        """Values with their origins."""
        kept = tuple(ConflictValue(value=str(value), origin=origin) for value, origin in values)
        self.conflicts.append(Conflict(path=path, values=kept))


def number_list(text: str | None) -> tuple[int, ...] | None:
    """A kernel list such as ``0-13,28-41``; () for an empty one, None for anything else."""
    if text is None:
        return None
    numbers: list[int] = []
    try:
        for part in filter(None, (part.strip() for part in text.split(","))):
            first, dash, last = part.partition("-")
            begin, end = int(first), int(last) if dash else int(first)
            if end - begin > _MOST_NUMBERS or len(numbers) > _MOST_NUMBERS:
                return None
            numbers.extend(range(begin, end + 1))
    except ValueError:
        return None
    return tuple(sorted(set(numbers)))


def list_text(numbers: tuple[int, ...]) -> str:
    """Sorted numbers as a kernel list."""
    parts: list[str] = []
    begin = previous = None
    for number in (*numbers, None):
        if previous is not None and number == previous + 1:
            previous = number
            continue
        if begin is not None:
            parts.append(str(begin) if begin == previous else f"{begin}-{previous}")
        begin = previous = number
    return ",".join(parts)
