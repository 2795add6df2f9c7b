"""Where the device's time went in one trace: busy, idle and why, streams, copies.

The window and the shares follow HolisticTraceAnalysis (https://github.com/facebookresearch/HolisticTraceAnalysis), so
that its users find their figures again, with two differences: times keep their nanoseconds (HTA rounds each activity
inwards to whole microseconds, which turns up to 2 us an activity into idle time), and synchronisation records of the
driver (category cuda_sync) are not work, so they do not make the device busy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpudoctor.model import TraceIdle, TraceStream
from gpudoctor.read.intervals import Union, union
from gpudoctor.read.recording import COMMUNICATION, COMPUTE, COPY, MEMSET, SYNC, Recording

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Mask = NDArray[np.bool_]

KERNEL_GAP_NS = 30_000  # between queued kernels; HTA's default
_NEVER = -(2**62)
_BLOCK = 100_000  # gaps looked at together


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The work of one device in the window, in order of its begin. `launched` is _NEVER where the launch is unknown."""

    start: Ints
    end: Ints
    kind: Ints
    stream: Ints
    name: Ints
    launched: Ints
    copies: Ints  # positions of the copies and memsets, and for each of them its bytes and correlation
    copy_bytes: Ints
    copy_correlation: Ints
    device: int | None
    others: int  # activities on other devices, left out
    present: tuple[int, ...]  # the kinds that there are
    streams: tuple[int, ...]
    unions: dict[tuple[int, ...], Union] = field(default_factory=dict)

    @property
    def window(self) -> tuple[int, int]:
        return int(self.start[0]), int(self.end.max())

    def of(self, *kinds: int) -> Union:
        """When work of these kinds ran."""
        import numpy as np

        kinds = tuple(kind for kind in kinds if kind in self.present)  # so that unions that are equal are kept once
        if kinds not in self.unions:
            mask = np.zeros(len(self.kind), dtype=bool)
            for kind in kinds:
                mask |= self.kind == kind
            self.unions[kinds] = union(self.start[mask], self.end[mask], ordered=True)
        return self.unions[kinds]


def device_work(
    recording: Recording, before: int | None, device: int | None = None, *, keep: bool = True
) -> Device | None:
    """The work launched before a time (None: all work), of one device (None: the busiest); None when there is none.

    `keep`: False gives the memory of the recording's activities and launches back.
    """
    import numpy as np

    table = recording.activities
    chosen = np.flatnonzero(table.ints("kind") != SYNC)
    others = 0
    if len(chosen):
        devices = table.ints("device")[chosen]
        known, counts = np.unique(devices, return_counts=True)
        device = int(known[counts.argmax()]) if device is None else device
        others = int(len(chosen) - (devices == device).sum())
        chosen = chosen[devices == device] if others else chosen
    launched = _launch_times(recording, table.ints("start")[chosen], table.ints("correlation")[chosen])
    if before is not None:
        whole = (launched < before) & (launched != _NEVER)
        chosen, launched = chosen[whole], launched[whole]
    if not len(chosen):
        return None
    order = np.argsort(table.ints("start")[chosen], kind="stable")
    chosen, launched = chosen[order], launched[order]
    if not keep:
        recording.launches.clear()

    def column(name: str) -> Ints:
        return table.ints(name)[chosen] if keep else table.take(name, chosen)

    kind = column("kind")
    copies = np.flatnonzero(kind >= COPY)
    stream = column("stream")
    work = Device(
        start=column("start"),
        end=column("end"),
        kind=kind,
        stream=stream,
        name=column("name"),
        launched=launched,
        present=tuple(np.flatnonzero(np.bincount(kind)).tolist()),
        streams=tuple(np.unique(stream).tolist()),
        copies=copies,
        copy_bytes=table.ints("bytes")[chosen[copies]],
        copy_correlation=table.ints("correlation")[chosen[copies]],
        device=device if device is not None and device >= 0 else None,
        others=others,
    )
    if not keep:
        table.clear()
    return work


def _launch_times(recording: Recording, activity_start: Ints, correlation: Ints) -> Ints:
    """When the call began that launched each activity; where several calls share its number, the last one before it."""
    import numpy as np

    launches = recording.launches
    known = launches.ints("correlation")
    if not len(known) or not len(correlation):
        return np.full(len(correlation), _NEVER)
    start = launches.ints("start")
    order = np.argsort(known, kind="stable")
    known = known[order]
    place = np.minimum(np.searchsorted(known, correlation), len(known) - 1)
    found = (known[place] == correlation) & (correlation >= 0)
    if (known[1:] == known[:-1]).any():
        order = order[np.lexsort((start[order], known))]
        last = np.searchsorted(known, correlation, side="right") - 1
        # Halving the interval of equal numbers, for all activities at once.
        low, high = place.copy(), np.maximum(last, place)
        while (low < high).any():
            middle = (low + high + 1) // 2
            before = start[order[middle]] <= activity_start
            low, high = np.where(before, middle, low), np.where(before, high, middle - 1)
            high = np.maximum(low, high)
        place = low
    return np.where(found, start[order[place]], _NEVER)


def gaps_with_next(work: Device, span: tuple[int, int]) -> tuple[Union, Ints]:
    """The gaps between two times in which no stream of the device works, and when the activity that ends each was
    launched. After the last activity the host has launched nothing more, so that gap is all the host's."""
    import numpy as np

    gaps = work.of(COMPUTE, COMMUNICATION, COPY, MEMSET).gaps(*span)
    place = np.searchsorted(work.start, gaps.end, side="left")
    launched = work.launched[np.minimum(place, len(work.launched) - 1)]
    beyond = place == len(work.launched)
    launched[beyond] = gaps.end[beyond]
    return gaps, launched


def idle_causes(gaps: Union, launched: Ints, loader: Union, waits: Union) -> TraceIdle:
    """Idle time by cause. `launched`: when the activity that ends each gap was launched.

    A gap is the host's until that launch, and of this part the loader's while the host waited for it. What begins while
    the host stood in a wait for the device is counted to the wait.
    """
    sums = [0] * 7
    for begin in range(0, len(gaps.start), _BLOCK):
        part = slice(begin, begin + _BLOCK)
        block = _idle_causes(Union(gaps.start[part], gaps.end[part]), launched[part], loader, waits)
        sums = [a + b for a, b in zip(sums, block, strict=True)]
    loaded, synced, host, launch, kernel, dependency, unknown = map(ms, sums)
    return TraceIdle(
        loader_ms=loaded,
        sync_ms=synced,
        host_ms=host,
        launch_ms=launch,
        kernel_ms=kernel,
        dependency_ms=dependency,
        unknown_ms=unknown,
    )


def _idle_causes(gaps: Union, launched: Ints, loader: Union, waits: Union) -> list[int]:
    import numpy as np

    length = gaps.end - gaps.start
    unknown = launched == _NEVER
    late = ~unknown & (launched > gaps.start)
    until = np.clip(launched, gaps.start, gaps.end)
    host = np.where(late, until - gaps.start, 0)
    queued = ~unknown & ~late
    by_loader = np.where(late, loader.before(until) - loader.before(gaps.start), 0)
    left = host - by_loader
    after_wait = late & inside(waits, gaps.start)
    short = queued & (length < KERNEL_GAP_NS)
    return [
        int(by_loader.sum()),
        int(left[after_wait].sum()),
        int(left[~after_wait].sum()),
        int(np.where(late, length - host, 0).sum()),
        int(length[short].sum()),
        int(length[queued & ~short].sum()),
        int(length[unknown].sum()),
    ]


def inside(item: Union, times: Ints) -> Mask:
    """Whether each time lies in the union."""
    import numpy as np

    if not len(item.start):
        return np.zeros(len(times), dtype=bool)
    place = np.searchsorted(item.start, times, side="right") - 1
    found: Mask = (place >= 0) & (times <= item.end[np.maximum(place, 0)])
    return found


def streams(work: Device) -> tuple[TraceStream, ...]:
    """The gaps between consecutive activities of each stream, by cause, busiest stream first."""
    import numpy as np

    found = []
    for stream in work.streams:
        mine = np.flatnonzero(work.stream == stream)
        start, end = work.start[mine], work.end[mine]
        busy = union(start, end, ordered=True).total()
        gap = start[1:] - end[:-1]
        host = work.launched[mine[1:]] > end[:-1]
        kernel = ~host & (gap < KERNEL_GAP_NS)
        found.append(
            TraceStream(
                stream=stream,
                activities=len(mine),
                busy_ms=ms(busy),
                host_wait_ms=ms(gap.sum(where=host)),
                kernel_wait_ms=ms(gap.sum(where=kernel)),
                other_ms=ms(gap.sum(where=~host & ~kernel)),
            )
        )
    return tuple(sorted(found, key=lambda item: -item.busy_ms))


def ms(nanoseconds: float | np.integer) -> float:
    return round(float(nanoseconds) / 1e6, 4)
