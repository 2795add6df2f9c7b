"""Reads what the injected package wrote: a record and a log of steps per process, and the files written."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Mapping
from pathlib import Path

from gpudoctor import codec
from gpudoctor.errors import GpudoctorError
from gpudoctor.model import Step, WatchRecord

_HEAD = struct.Struct("<d")
_STEP = struct.Struct("<5d")


def read_records(folder: Path, exit_codes: Mapping[int, int | None]) -> tuple[WatchRecord, ...]:
    """Records of processes that made steps, sorted by rank; of all watched processes when none made any
    (of the ranks alone, where there are ranks).

    exit_codes: pid -> exit code of the processes whose end the caller saw.
    """
    found = []
    for path in sorted(folder.glob("record-*.json")):
        try:
            record = codec.decode(path.read_bytes(), WatchRecord, what=path.name)
        except (OSError, GpudoctorError):
            continue  # an interpreter that was killed while it wrote, or a rank on a full disk
        record = _with_logged_steps(record, folder)
        if record.ended in ("exit", "exception", "unknown") and exit_codes.get(record.pid) is not None:
            record = dataclasses.replace(record, exit_code=exit_codes[record.pid])
        found.append(record)
    # a launcher imports torch too; it makes no steps and is no rank
    wanted = [record for record in found if record.steps] or [record for record in found if record.rank is not None]
    return tuple(sorted(wanted or found, key=lambda record: (record.rank or 0, record.pid)))


def _with_logged_steps(record: WatchRecord, folder: Path) -> WatchRecord:
    """The steps of a process that was killed or hangs: its last record is up to a second old, its log is not."""
    if record.ended != "unknown":
        return record
    steps = _logged(folder / f"steps-{record.pid}.bin")
    if not steps:
        return record
    watched = max(sum(step.wall_ms for step in steps) / 1000, record.watched_s or 0.0)
    timed = len(steps) - (steps[0].wall_ms == 0.0)  # the begin of the first step may not have been seen
    return dataclasses.replace(
        record,
        steps=steps,
        watched_s=watched or None,
        steps_per_s=timed / watched if watched and timed else None,
        batches_per_s=None,  # how many batches the last steps took was not written down
        notes=(*record.notes, "ended without its last record: sites and counts miss up to the last second"),
    )


def _logged(path: Path) -> tuple[Step, ...]:
    try:
        raw = path.read_bytes()
    except OSError:
        return ()
    if len(raw) < _HEAD.size:
        return ()
    count = int(_HEAD.unpack_from(raw)[0])
    end = min(len(raw), _HEAD.size + count * _STEP.size)
    return tuple(
        Step(
            wall_ms=values[0],
            loader_wait_ms=values[1],
            copy_wait_ms=values[2],
            sync_wait_ms=values[3],
            communication_ms=values[4],
        )
        for values in _STEP.iter_unpack(raw[_HEAD.size : end - (end - _HEAD.size) % _STEP.size])
    )


def steps_so_far(folder: Path) -> int:
    """Steps of the process that has made the most."""
    counts = [0]
    for path in folder.glob("steps-*.bin"):
        try:
            with path.open("rb") as file:
                counts.append(int(_HEAD.unpack(file.read(_HEAD.size))[0]))
        except (OSError, struct.error, ValueError):
            continue
    return max(counts)


def all_stopped(folder: Path) -> bool:
    """Every rank of this machine has reached its steps, written its record, and left."""
    stopped = list(folder.glob("left-*"))
    if not stopped:
        return False
    try:
        return len(stopped) >= min(int(path.read_text(encoding="ascii") or 0) or 10**9 for path in stopped)
    except (OSError, ValueError):
        return False


def read_writes(folder: Path) -> tuple[str, ...]:
    """Files below write_root that any process of the command wrote, renamed or removed."""
    try:
        text = (folder / "writes.txt").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ()
    names = {line.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for line in text.splitlines() if line}
    return tuple(sorted(names))
