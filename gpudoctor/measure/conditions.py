"""Was the host quiet while something was measured? Other work on the CPUs and swapping make copy rates lie."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BUSY_SHARE = 0.5  # of the CPUs at work for others: from here on a low figure is no verdict
_TICKS = 100  # USER_HZ of every Linux that Python runs on


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Counters of the kernel since boot; None where /proc does not tell."""

    at: float
    cpu_s: float | None  # of all processes, all CPUs
    own_s: float  # of this process and its children
    swapped_pages: int | None


def read(children: Iterable[int] = ()) -> Reading:
    """`children`: pids of children of ours that may still be there; those that ended are counted in any case."""
    # Asked before the system counts those that ended: one that ends meanwhile counts twice, and not never.
    living = sum(_process_s(pid) for pid in children)
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system + living
    return Reading(at=time.monotonic(), cpu_s=_cpu_s(), own_s=own, swapped_pages=_swapped())


def judge(before: Reading, after: Reading, cpus: int) -> tuple[tuple[str, ...], bool]:
    """Notes about what disturbed the time between two readings, and whether low figures of it mean nothing."""
    notes = []
    seconds = after.at - before.at
    busy = False
    if before.cpu_s is not None and after.cpu_s is not None and seconds > 0 and cpus:
        others = (after.cpu_s - before.cpu_s) - (after.own_s - before.own_s)
        share = others / seconds / cpus
        if share > BUSY_SHARE:
            busy = True
            notes.append(
                f"the host was busy: other processes used {share:.0%} of its CPUs during the measurements; low figures "
                "give no verdict, repeat on a quiet host"
            )
    if before.swapped_pages is not None and after.swapped_pages is not None:
        pages = after.swapped_pages - before.swapped_pages
        if pages > 0:
            busy = True
            notes.append(f"the host was swapping ({pages} pages during the measurements): free memory and repeat")
    return tuple(notes), busy


def _cpu_s() -> float | None:
    try:
        words = Path("/proc/stat").read_text().splitlines()[0].split()
        user, nice, system, _idle, _wait, interrupt, soft = (int(word) for word in words[1:8])
    except (OSError, ValueError, IndexError):
        return None
    return (user + nice + system + interrupt + soft) / _TICKS


def _process_s(pid: int) -> float:
    """CPU seconds of a process, 0 when it has gone."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / _TICKS  # utime and stime, the 14th and 15th of all words
    except (OSError, ValueError, IndexError):
        return 0.0


def _swapped() -> int | None:
    try:
        pairs = [line.split() for line in Path("/proc/vmstat").read_text().splitlines()]
        values = {name: int(value) for name, value in pairs}
    except (OSError, ValueError):
        return None
    if "pswpin" not in values:
        return None
    return values["pswpin"] + values.get("pswpout", 0)
