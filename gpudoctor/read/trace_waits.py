"""Host calls that wait for the device: which they are, where in the program they come from, what they leave idle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gpudoctor.model import TraceWait
from gpudoctor.read.breakdown import Device, ms
from gpudoctor.read.intervals import Union, union
from gpudoctor.read.kineto_names import copy_of, site_of_frame, site_of_stack
from gpudoctor.read.recording import COPY, Recording, Table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_MOST_GROUPS = 50
_DEEPEST = 64  # operators looked at, from the last one that began, for the innermost around a call


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Waiting calls in order of their begin. `copy` is the direction of a copy that blocks, else ""."""

    start: Ints
    end: Ints
    thread: Ints
    name: Ints
    copy: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.start)

    def union(self) -> Union:
        return union(self.start, self.end)


def find_waits(recording: Recording, work: Device | None, span: tuple[int, int] | None) -> Waits:
    """Synchronising calls, and copies that block the host: from or to pageable memory, or without Async in their name.

    `span`: only calls that begin between these times.
    """
    import numpy as np

    table = recording.calls
    names = list(recording.names)
    start = table.ints("start")
    order = np.argsort(start, kind="stable")
    if span is not None:
        order = order[(start[order] >= span[0]) & (start[order] < span[1])]
    numbers = table.ints("name")[order].tolist()
    copies = {number for number in set(numbers) if "emcpy" in names[number]}
    asynchronous = {number for number in copies if "Async" in names[number]}
    directions = _directions(work, names) if copies else {}
    kept: list[int] = []
    copied: list[str] = []
    for place, (number, correlation) in enumerate(zip(numbers, table.ints("correlation")[order].tolist(), strict=True)):
        if number not in copies:
            kept.append(place)
            copied.append("")
            continue
        direction, blocks = directions.get(correlation, ("other", False))
        if blocks or number not in asynchronous:
            kept.append(place)
            copied.append(direction)
    rows = order[kept]
    columns = {name: table.ints(name)[rows] for name in ("start", "end", "thread", "name")}
    return Waits(**columns, copy=tuple(copied))


def _directions(work: Device | None, names: list[str]) -> dict[int, tuple[str, bool]]:
    """By correlation of a copy: its direction, and whether its host side is pageable, so that the call blocks."""
    import numpy as np

    if work is None:
        return {}
    found: dict[int, tuple[str, bool]] = {}
    by_name: dict[int, tuple[str, bool]] = {}
    for place in np.flatnonzero(work.kind == COPY).tolist():
        number = int(work.name[place])
        if number not in by_name:
            direction, memory = copy_of(names[number])
            host = direction in ("h2d", "d2h")
            by_name[number] = (direction if host else "other", host and memory in ("pageable", "unknown"))
        found[int(work.correlation[place])] = by_name[number]
    return found


def group_waits(recording: Recording, waits: Waits, idle_after: Ints, steps: int | None) -> tuple[TraceWait, ...]:
    """Waits by call and origin, the longest first. `idle_after`: nanoseconds that the device idled after each."""
    names = list(recording.names)
    stacks = list(recording.stacks)
    outer, inner = enclosing(recording.operators, waits)
    _, frame = enclosing(recording.frames, waits)
    operator_name = recording.operators.ints("name")
    operator_stack = recording.operators.ints("stack")
    frame_name = recording.frames.ints("name")
    groups: dict[tuple[str, str | None, str | None, str | None, str], list[int]] = {}
    sites: dict[int, str | None] = {}
    for place in range(len(waits)):
        origin = names[operator_name[outer[place]]] if outer[place] >= 0 else None
        within = names[operator_name[inner[place]]] if inner[place] >= 0 else None
        site = None
        if frame[place] >= 0:
            site = site_of_frame(names[frame_name[frame[place]]])
        for operator in (inner[place], outer[place]):
            if site is None and operator >= 0 and (stack := int(operator_stack[operator])):
                if stack not in sites:
                    sites[stack] = site_of_stack(stacks[stack])
                site = sites[stack]
        key = (names[waits.name[place]], origin, within, site, waits.copy[place])
        groups.setdefault(key, []).append(place)
    found = [
        TraceWait(
            call=call[:200],
            origin=origin[:200] if origin else None,
            inner=within[:200] if within and within != origin else None,
            site=site[:500] if site else None,
            copy=_copy(copy),
            calls=len(places),
            calls_per_step=round(len(places) / steps, 3) if steps else None,
            waited_ms=ms((waits.end[places] - waits.start[places]).sum()),
            idle_after_ms=ms(idle_after[places].sum()),
        )
        for (call, origin, within, site, copy), places in groups.items()
    ]
    found.sort(key=lambda wait: (-wait.waited_ms - wait.idle_after_ms, wait.call))
    return tuple(found[:_MOST_GROUPS])


def _copy(direction: str) -> Literal["h2d", "d2h", "other"] | None:
    if direction == "h2d":
        return "h2d"
    if direction == "d2h":
        return "d2h"
    return "other" if direction else None


def enclosing(ranges: Table, waits: Waits) -> tuple[Ints, Ints]:
    """For each wait the rows of the outermost and of the innermost range of its thread around it; -1: there is none."""
    import numpy as np

    outer = np.full(len(waits), -1, dtype=np.int64)
    inner = outer.copy()
    threads = ranges.ints("thread")
    for thread in np.unique(waits.thread):
        rows = np.flatnonzero(threads == thread)
        if not len(rows):
            continue
        mine = np.flatnonzero(waits.thread == thread)
        begin, finish = waits.start[mine], waits.end[mine]
        # Longer ones first where two begin together, so that a range follows the one it lies in.
        rows = rows[np.lexsort((-ranges.ints("end")[rows], ranges.ints("start")[rows]))]
        start, end = ranges.ints("start")[rows], ranges.ints("end")[rows]
        reach = np.maximum.accumulate(end)
        top = np.flatnonzero(np.concatenate(([True], start[1:] >= reach[:-1])))
        last = np.searchsorted(start, begin, side="right") - 1
        first = np.searchsorted(start[top], begin, side="right") - 1
        first = np.where(first >= 0, top[np.maximum(first, 0)], -1)
        around = (first >= 0) & (end[np.maximum(first, 0)] >= finish)
        place = last.copy()
        for _ in range(_DEEPEST):
            short = around & (place > first) & (end[np.maximum(place, 0)] < finish)
            if not short.any():
                break
            place[short] -= 1
        place = np.where(end[np.maximum(place, 0)] >= finish, place, first)
        outer[mine[around]] = rows[first[around]]
        inner[mine[around]] = rows[place[around]]
    return outer, inner
