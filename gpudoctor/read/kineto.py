"""Kineto traces (torch.profiler's JSON) into a Recording: typed decoding piece by piece, never the whole file.

Three ways to decode a piece, each slower and more forgiving than the one before: by category (only the fields that the
category needs), all fields of every event (for old traces, whose memory events have no category), event by event.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from gpudoctor.errors import GpudoctorError
from gpudoctor.read import kineto_decode as decode
from gpudoctor.read import kineto_names as names
from gpudoctor.read.kineto_decode import Decoders
from gpudoctor.read.kineto_stream import Ends, Gunzip, pieces
from gpudoctor.read.recording import COPY, MEMSET, SYNC, Mark, Recording, rounded_up

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

KIND = "kineto-trace"

_KIND_OF = {decode.COPY: COPY, decode.MEMSET: MEMSET, decode.SYNC: SYNC}
_LOOK_BYTES = 64 * 1024  # of a piece, searched for call stacks; a trace has them nearly everywhere or nowhere
_NANOSECONDS = 1e17  # a time above this is no number of microseconds since 1970
_STEP = re.compile(r"ProfilerStep")
_OPTIMIZER = re.compile(r"Optimizer\.step#")
_LOADER = re.compile(r"DataLoader|DataLoaderIter|\[pl\].*(?:train_dataloader_next|_next$)")


def read_kineto(path: Path | None, stream: BinaryIO | None = None, *, name: str) -> Recording:
    """The Recording of one trace, .json or .json.gz; of `stream` when there is no path.

    GpudoctorError when it cannot be read or has no events. A file that is cut off or damaged gives what stands before
    that, and `truncated`.
    """
    try:
        with path.open("rb") if path is not None else _borrowed(stream) as file:
            packed = file.peek(2)[:2] == b"\x1f\x8b" if hasattr(file, "peek") else False
            unzipped = Gunzip(file) if packed else None
            collector = _Collector()
            ends = pieces(unzipped.read if unzipped else file.read, collector.decode, name=name)
    except OSError as error:
        raise GpudoctorError(f"cannot read {name}: {error.strerror or error}") from None
    recording = collector.recording
    recording.truncated = ends.truncated or (unzipped is not None and unzipped.truncated)
    if not recording.events:
        why = (
            "it is cut off or damaged before the first event" if recording.truncated else "it is a trace without events"
        )
        raise GpudoctorError(f"cannot read {name}: {why}", "record at least one step with torch.profiler")
    collector.describe(ends)
    return recording


def _borrowed(stream: BinaryIO | None) -> Any:
    import contextlib
    import io

    if stream is None:
        raise OSError("standard input is not available")
    return contextlib.nullcontext(io.BufferedReader(stream) if isinstance(stream, io.RawIOBase) else stream)


class _Collector:
    """Decodes pieces and sorts their events into the columns of a Recording."""

    def __init__(self) -> None:
        self.recording = Recording()
        self._decoders = Decoders()
        self._kinds = names.Kinds()
        self._kind_of_name: dict[int, int] = {}
        self._calls = names.Calls()
        self._user_frames: dict[str, bool] = {}
        self._threads = _Threads()
        self._seen: set[int] = set()  # numbers of operators' names, and which of them are ranges
        self._marked: set[int] = set()
        self._base: float | None = None
        self._scale = 1000.0  # nanoseconds in the file's unit
        self._by_category = True
        self._stacks = False

    def decode(self, piece: bytes) -> bool:
        """Take over the events of a JSON array; False when it is no JSON."""
        import msgspec

        decoders = self._decoders
        stacks = piece.find(b'"Call stack"', 0, _LOOK_BYTES) >= 0 or self._stacks
        self._stacks = stacks
        if self._by_category:
            try:
                self._take(decoders.by_category(stacks).decode(piece), by_class=True)
            except msgspec.ValidationError:
                pass
            except (msgspec.DecodeError, RecursionError):
                return False
            else:
                return True
        try:
            events = decoders.plain.decode(piece)
        except msgspec.ValidationError:
            events = self._one_by_one(piece)
        except (msgspec.DecodeError, RecursionError):
            return False
        if not all(decoders.knows(event.cat) for event in events if event.cat is not None):
            decoders.learn({event.cat for event in events if event.cat is not None})
        # Where most pieces have events without a category, trying by category first is wasted.
        self._by_category = sum(event.cat is None for event in events) * 50 < len(events)
        self._take(events, by_class=False)
        return True

    def _one_by_one(self, piece: bytes) -> list[Any]:
        """The events that can be understood; the others are counted."""
        import msgspec

        found = []
        for raw in msgspec.json.decode(piece, type=list[msgspec.Raw]):
            try:
                found.append(self._decoders.one.decode(raw))
            except (msgspec.ValidationError, RecursionError):
                self.recording.not_understood += 1
        return found

    def _take(self, events: Sequence[Any], *, by_class: bool) -> None:
        by_role: list[list[Any]] = [[] for _ in range(decode.SKIP + 1)]
        put = {what: by_role[role].append for what, role in self._decoders.roles(by_class)}
        if by_class:
            for event in events:
                put[event.__class__](event)
        else:
            for event in events:
                if (add := put.get(event.cat)) is not None:
                    add(event)
        self.recording.events += len(events)
        self._operators(by_role[decode.OPERATOR])
        self._ranges(by_role[decode.RANGE])
        self._frames(by_role[decode.FRAME])
        self._runtime(by_role[decode.CALL])
        for role in (decode.KERNEL, decode.COPY, decode.MEMSET, decode.SYNC):
            self._activities(by_role[role], role)

    def _times(self, events: Sequence[Any]) -> tuple[Ints, Ints]:
        """Begin and length in nanoseconds, the begin from the base."""
        import numpy as np

        start = np.frombuffer(array("d", [event.ts for event in events]))
        length = np.frombuffer(array("d", [event.dur for event in events]))
        if self._base is None:
            if start[0] > _NANOSECONDS:
                self._scale = 1.0
            self._base = math.floor(start[0])
        start -= self._base
        if self._scale != 1.0:
            start *= self._scale
            length *= self._scale
        return np.rint(start, out=start).astype(np.int64), np.rint(length, out=length).astype(np.int64)

    def _operators(self, events: list[Any]) -> None:
        if not events:
            return
        recording = self.recording
        ids, stacks, threads = recording.names, recording.stacks, self._threads
        numbers = [ids[event.name] for event in events]
        if self._marks(events, numbers):  # old traces have their ranges among the operators
            kept = [place for place, number in enumerate(numbers) if number not in self._marked]
            events, numbers = [events[place] for place in kept], [numbers[place] for place in kept]
            if not events:
                return
        start, length = self._times(events)
        recording.operators.add(
            start=start, length=rounded_up(length), thread=[threads[event.tid] for event in events], name=numbers
        )
        if hasattr(events[0], "args") and (self._stacks or len(stacks) > 1):
            behind = len(recording.operators) - len(events) - len(recording.operators.ints("stack"))
            own = [stacks[event.args.stack] if event.args is not None else 0 for event in events]
            recording.operators.add(stack=[0] * behind + own)

    def _marks(self, events: list[Any], numbers: list[int]) -> bool:
        """Take over the ranges among operators; whether there are some."""
        fresh = set(numbers) - self._seen
        self._seen |= fresh
        if fresh:
            self._marked |= {number for event, number in zip(events, numbers, strict=True) if "#" in event.name}
        if self._marked.isdisjoint(numbers):
            return False
        self._ranges([event for event, number in zip(events, numbers, strict=True) if number in self._marked])
        return True

    def _ranges(self, events: list[Any]) -> None:
        for event in events:
            name = event.name
            kept = (
                self.recording.steps
                if _STEP.search(name)
                else self.recording.optimizer_steps
                if _OPTIMIZER.search(name)
                else self.recording.loader_waits
                if _LOADER.search(name)
                else None
            )
            if kept is not None:
                start, length = self._times([event])
                kept.append(Mark(name=name, start=int(start[0]), end=int(start[0] + length[0])))

    def _frames(self, events: list[Any]) -> None:
        known = self._user_frames
        for event in events:
            if event.name not in known and len(known) < 200_000:
                known[event.name] = names.user_frame(event.name) is not None
        events = [event for event in events if known.get(event.name)]
        if events:
            start, length = self._times(events)
            ids, threads = self.recording.names, self._threads
            self.recording.frames.add(
                start=start,
                length=rounded_up(length),
                thread=[threads[event.tid] for event in events],
                name=[ids[event.name] for event in events],
            )

    def _runtime(self, events: list[Any]) -> None:
        calls = self._calls
        events = [event for event in events if calls[event.name]]
        if not events:
            return
        start, length = self._times(events)
        correlation = _numbers("q", [-1 if event.args is None else event.args.correlation for event in events])
        self.recording.launches.add(start=start, correlation=correlation)
        chosen = [place for place, event in enumerate(events) if calls[event.name] == names.CALL]
        if chosen:
            ids, threads = self.recording.names, self._threads
            self.recording.calls.add(
                start=start[chosen],
                end=start[chosen] + length[chosen],
                correlation=[correlation[place] for place in chosen],
                thread=[threads[events[place].tid] for place in chosen],
                name=[ids[events[place].name] for place in chosen],
            )

    def _activities(self, events: list[Any], role: int) -> None:
        import numpy as np

        events = [event for event in events if event.args is not None]
        if not events:
            return
        start, length = self._times(events)
        ids = self.recording.names
        arguments = [event.args for event in events]
        numbers = [ids[event.name] for event in events]
        sized = role in (decode.COPY, decode.MEMSET)
        self.recording.activities.add(
            start=start,
            end=start + length,
            correlation=_numbers("q", [item.correlation for item in arguments]),
            bytes=_numbers("q", [item.bytes for item in arguments]) if sized else np.full(len(events), -1),
            stream=_numbers("i", [item.stream for item in arguments]),
            device=_numbers("i", [item.device for item in arguments]),
            name=numbers,
            kind=self._kinds_of(events, numbers) if role == decode.KERNEL else np.full(len(events), _KIND_OF[role]),
        )

    def _kinds_of(self, events: list[Any], numbers: list[int]) -> Any:
        """The kinds of kernels, by the numbers of their names."""
        import numpy as np

        kinds = self._kind_of_name
        try:
            return np.array([kinds[number] for number in numbers], dtype=np.int8)
        except KeyError:
            for event, number in zip(events, numbers, strict=True):
                if number not in kinds:
                    kinds[number] = self._kinds[event.name]
        return np.array([kinds[number] for number in numbers], dtype=np.int8)

    def describe(self, ends: Ends) -> None:
        """Rank, devices and clock from what stands around the events."""
        recording = self.recording
        base_ns = 0
        for text in (ends.head, ends.tail):
            about = _about(text)
            job = about.get("distributedInfo")
            if isinstance(job, dict):
                recording.rank = _rank(job.get("rank"), recording.rank)
                recording.world_size = _rank(job.get("world_size"), recording.world_size)
            devices = about.get("deviceProperties")
            for device in devices if isinstance(devices, list) else ():
                if isinstance(device, dict) and isinstance(device.get("id"), int) and device.get("name"):
                    recording.device_names[device["id"]] = str(device["name"])[:200]
            if isinstance(about.get("baseTimeNanoseconds"), int):
                base_ns = about["baseTimeNanoseconds"]
        recording.base_ns = base_ns + int((self._base or 0) * self._scale)


class _Threads(dict["int | str", int]):
    """Threads numbered in the order of their first use; 7 and "7" are one."""

    def __missing__(self, tid: int | str) -> int:
        key = int(tid) if isinstance(tid, str) and tid.isdecimal() else tid
        number = self[key] if key is not tid else min(len(self), 32_000)
        if len(self) < 100_000:
            self[tid] = number
        return number


def _numbers(kind: str, values: list[Any]) -> array[int]:
    """Whole numbers as a column; what is none, or too large, becomes -1."""
    try:
        return array(kind, values)
    except (TypeError, OverflowError):
        limit = 2**62 if kind == "q" else 2**31 - 1
        return array(kind, [_number(value, limit) for value in values])


def _number(value: float | str, limit: int) -> int:
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return -1
    return number if -limit <= number <= limit else -1


def _rank(value: object, known: int | None) -> int | None:
    """A whole number that is not negative, else what was known."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10_000_000 else known


def _about(text: bytes) -> dict[str, Any]:
    import json

    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # the surroundings are damaged, the events are not
        return {}
    return found if isinstance(found, dict) else {}
