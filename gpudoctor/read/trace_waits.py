"""Host calls that wait for the device: which they are, where in the program they come from, what they leave idle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gpudoctor.model import TraceWait
from gpudoctor.read.breakdown import Device, ms
from gpudoctor.read.intervals import Union, union
from gpudoctor.read.kineto_names import copy_of, site_of_frame, site_of_stack
from gpudoctor.read.recording import Recording, Table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

_MOST_GROUPS = 50
_BLOCK = 100_000  # ranges looked at together
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
    if work is None:
        return {}
    found: dict[int, tuple[str, bool]] = {}
    by_name: dict[int, tuple[str, bool]] = {}
    numbers = work.name[work.copies].tolist()
    for number, correlation in zip(numbers, work.copy_correlation.tolist(), strict=True):
        if number not in by_name:
            direction, memory = copy_of(names[number])
            host = direction in ("h2d", "d2h")
            by_name[number] = (direction if host else "other", host and memory in ("pageable", "unknown"))
        found[correlation] = by_name[number]
    return found


class Origins:
    """For each wait the operators and the line around it; once made, the recording's operators are not needed."""

    def __init__(self, recording: Recording, waits: Waits) -> None:
        self._names = list(recording.names)
        self._stacks = list(recording.stacks)
        outer, inner = enclosing(recording.operators, waits)
        _, frame = enclosing(recording.frames, waits)
        name, stack = recording.operators.ints("name"), recording.operators.ints("stack")
        self._outer = _of(name, outer)
        self._inner = _of(name, inner)
        self._frame = _of(recording.frames.ints("name"), frame)
        self._inner_stack, self._outer_stack = _of(stack, inner), _of(stack, outer)
        self._calls = waits.name
        self._sites: dict[int, str | None] = {-1: None, 0: None}

    def of(self, place: int) -> tuple[str, str | None, str | None, str | None]:
        """(call, outermost operator, innermost operator, site)"""
        outer, inner, frame = self._outer[place], self._inner[place], self._frame[place]
        site = site_of_frame(self._names[frame]) if frame >= 0 else None
        return (
            self._names[self._calls[place]],
            self._names[outer] if outer >= 0 else None,
            self._names[inner] if inner >= 0 else None,
            site or self._site(int(self._inner_stack[place])) or self._site(int(self._outer_stack[place])),
        )

    def _site(self, stack: int) -> str | None:
        if stack not in self._sites:
            self._sites[stack] = site_of_stack(self._stacks[stack])
        return self._sites[stack]


def _of(column: Ints, rows: Ints) -> Ints:
    """The values in some rows; -1 where the row is -1 or the column is empty."""
    import numpy as np

    return np.where(rows >= 0, column[np.maximum(rows, 0)], -1) if len(column) else np.full(len(rows), -1)


def group_waits(origins: Origins, waits: Waits, idle_after: Ints, steps: int | None) -> tuple[TraceWait, ...]:
    """Waits by call and origin, the longest first. `idle_after`: nanoseconds that the device idled after each."""
    groups: dict[tuple[str, str | None, str | None, str | None, str], list[int]] = {}
    for place, copy in enumerate(waits.copy):
        groups.setdefault((*origins.of(place), copy), []).append(place)
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
    for thread in np.unique(waits.thread):
        mine = np.flatnonzero(waits.thread == thread)
        begin, finish = waits.start[mine], waits.end[mine]
        rows = _around_any(ranges, int(thread), begin, finish)
        if not len(rows):
            continue
        start = ranges.ints("start")[rows]
        end = start + ranges.ints("length")[rows].astype(np.int64)
        # Longer ones first where two begin together, so that a range follows the one it lies in.
        order = np.lexsort((-end, start))
        rows, start, end = rows[order], start[order], end[order]
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


def _around_any(ranges: Table, thread: int, begin: Ints, finish: Ints) -> Ints:
    """Rows of a thread's ranges that hold a whole wait: of all ranges, these are few. Waits are in order."""
    import numpy as np

    found = [np.empty(0, dtype=np.int64)]
    threads, starts, lengths = ranges.ints("thread"), ranges.ints("start"), ranges.ints("length")
    shortest = (finish - begin).min()
    for block in range(0, len(starts), _BLOCK):
        part = slice(block, block + _BLOCK)
        rows = np.flatnonzero((threads[part] == thread) & (lengths[part] >= shortest)) + block
        start = starts[rows]
        # The waits of one thread follow each other, so a range that holds any holds the first that begins in it.
        next_wait = np.searchsorted(begin, start, side="left")
        known = next_wait < len(begin)
        holds = known & (start + lengths[rows].astype(np.int64) >= finish[np.minimum(next_wait, len(finish) - 1)])
        found.append(rows[holds])
    return np.concatenate(found)
