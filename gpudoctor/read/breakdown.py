"""Where the device's time went in one trace: busy, idle and why, streams, copies.

The window and the shares follow HolisticTraceAnalysis (https://github.com/facebookresearch/HolisticTraceAnalysis), so
that its users find their figures again, with two differences: times keep their nanoseconds (HTA rounds each activity
inwards to whole microseconds, which turns up to 2 us an activity into idle time), and synchronisation records of the
driver (category cuda_sync) are not work, so they do not make the device busy.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The work of one device in the window, in order of its begin. `launched` is _NEVER where the launch is unknown."""

    start: Ints
    end: Ints
    kind: Ints
    stream: Ints
    name: Ints
    bytes: Ints
    correlation: Ints
    launched: Ints
    device: int | None
    others: int  # activities on other devices, left out

    @property
    def window(self) -> tuple[int, int]:
        return int(self.start[0]), int(self.end.max())

    def of(self, *kinds: int) -> Union:
        import numpy as np

        mask = np.isin(self.kind, kinds)
        return union(self.start[mask], self.end[mask])


def device_work(recording: Recording, before: int | None, device: int | None = None) -> Device | None:
    """The work launched before a time (None: all work), of one device (None: the busiest); None when there is none."""
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
    chosen = chosen[order]
    columns = ("start", "end", "kind", "stream", "name", "bytes", "correlation")
    return Device(
        **{name: table.ints(name)[chosen] for name in columns},
        launched=launched[order],
        device=device if device is not None and device >= 0 else None,
        others=others,
    )


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


def gaps_with_next(work: Device) -> tuple[Union, Ints]:
    """The gaps in which no stream of the device works, and for each the position of the activity that ends it."""
    import numpy as np

    start, end = work.window
    gaps = work.of(COMPUTE, COMMUNICATION, COPY, MEMSET).gaps(start, end)
    return gaps, np.searchsorted(work.start, gaps.end, side="left")


def idle_causes(gaps: Union, launched: Ints, loader: Union, waits: Union) -> TraceIdle:
    """Idle time by cause. `launched`: when the activity that ends each gap was launched.

    A gap is the host's until that launch, and of this part the loader's while the host waited for it. What begins while
    the host stood in a wait for the device is counted to the wait.
    """
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
    return TraceIdle(
        loader_ms=ms(by_loader.sum()),
        sync_ms=ms(left[after_wait].sum()),
        host_ms=ms(left[~after_wait].sum()),
        launch_ms=ms(np.where(late, length - host, 0).sum()),
        kernel_ms=ms(length[short].sum()),
        dependency_ms=ms(length[queued & ~short].sum()),
        unknown_ms=ms(length[unknown].sum()),
    )


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
    for stream in np.unique(work.stream):
        mine = work.stream == stream
        start, end, launched = work.start[mine], work.end[mine], work.launched[mine]
        gap = start[1:] - end[:-1]
        host = launched[1:] > end[:-1]
        kernel = ~host & (gap < KERNEL_GAP_NS)
        found.append(
            TraceStream(
                stream=int(stream),
                activities=int(mine.sum()),
                busy_ms=ms(union(start, end).total()),
                host_wait_ms=ms(gap[host].sum()),
                kernel_wait_ms=ms(gap[kernel].sum()),
                other_ms=ms(gap[~host & ~kernel].sum()),
            )
        )
    return tuple(sorted(found, key=lambda item: -item.busy_ms))


def ms(nanoseconds: float | np.integer) -> float:
    return round(float(nanoseconds) / 1e6, 4)
