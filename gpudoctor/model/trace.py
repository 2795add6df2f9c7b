"""What a profiler trace says about one rank. Times are milliseconds unless the name ends otherwise.

All `_pct` of one rank share one window: from the first to the last device activity that was launched in whole steps.
The last step of a trace is left out where there are several, because recording may end before its device work does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeviceWork = Literal["compute", "communication", "copy"]  # copy: copies and memsets
Bound = Literal["loader", "host", "copy", "communication", "device", "unknown"]
StepsFrom = Literal["ProfilerStep", "optimizer", "nvtx", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStep:
    """One step on the host's clock, and what the device did between its begin and its end.

    `communication_ms` and `copy_ms` are exposed: nothing was computed meanwhile. With `compute_ms` and `idle_ms` they
    sum to `wall_ms`.
    """

    name: str
    wall_ms: float
    loader_wait_ms: float | None = None  # None when the trace shows no loader
    sync_wait_ms: float = 0.0  # in synchronising calls and blocking copies
    compute_ms: float = 0.0
    communication_ms: float = 0.0
    copy_ms: float = 0.0
    idle_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceIdle:
    """Idle time of the window by cause; the parts sum to the idle time.

    loader: the host waited for the data loader. sync: the host stood in a synchronising call or blocking copy when the
    device ran dry, and had to launch again. host: the host had not launched the next work. launch: it had just
    launched it (latency). kernel: the gap between kernels that were queued (below 30 us). dependency: queued work
    waited for longer (for an event, another stream or another rank). unknown: its launch is not in the trace.
    """

    loader_ms: float = 0.0
    sync_ms: float = 0.0
    host_ms: float = 0.0
    launch_ms: float = 0.0
    kernel_ms: float = 0.0
    dependency_ms: float = 0.0
    unknown_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStream:
    """Gaps between one stream's activities, as HolisticTraceAnalysis sorts them: host_wait (the next was launched
    after the gap began), kernel_wait (below 30 us), other. Overlapping activities give negative gaps."""

    stream: int
    activities: int
    busy_ms: float
    host_wait_ms: float
    kernel_wait_ms: float
    other_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCopies:
    """Copies of one kind in the window. `gb_s` is all bytes over all time; None when the trace has no bytes."""

    kind: Literal["h2d", "d2h", "d2d", "p2p", "memset", "unknown"]
    memory: Literal["pageable", "pinned", "device", "managed", "unknown"]  # of the host side, or device
    calls: int
    bytes: int | None
    ms: float
    gb_s: float | None
    exposed_ms: float  # nothing was computed meanwhile
    with_compute: int = 0  # calls on the stream that computes most, so that they cannot overlap with it


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceWait:
    """Host calls that wait for the device, by call and origin, in whole steps (the window when there are none).

    `idle_after_ms`: device idle time that began during these calls and lasted until the next work was launched. It
    bounds what removing them can win.
    """

    call: str  # cudaStreamSynchronize, cudaMemcpyAsync, ...
    origin: str | None = None  # the outermost operator around it, such as aten::item
    inner: str | None = None  # the innermost operator
    site: str | None = None  # FILE:LINE of the user's code, or FILE (function), when the trace has stacks
    copy: Literal["h2d", "d2h", "other"] | None = None  # a copy from or to pageable memory, which blocks
    calls: int
    calls_per_step: float | None = None
    waited_ms: float
    idle_after_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceKernel:
    name: str
    kind: DeviceWork
    calls: int
    ms: float
    pct: float  # of the device's busy time, summed over streams


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLoader:
    name: str  # _SingleProcessDataLoaderIter, _MultiProcessingDataLoaderIter, or the range's own name
    workers: bool | None  # False: num_workers=0
    calls: int
    waited_ms: float
    idle_ms: float | None = None  # of these waits, while the device idled; None without device activity


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLane:
    """Occupied share (0 to 1) of each of the step's equal slices."""

    name: Literal["loader", "operators", "waits", "compute", "communication", "copy"]
    occupied: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTimeline:
    """One whole step: the one whose wall time is nearest to the median."""

    step: str
    wall_ms: float
    lanes: tuple[TraceLane, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """One rank of one trace. Every field that the trace does not tell is None or empty."""

    file: str
    format: Literal["kineto", "nsys"]
    rank: int  # as recorded, else from the file name, else counted
    rank_from: Literal["trace", "name", "order"] = "trace"
    world_size: int | None = None
    device: int | None = None
    device_name: str | None = None
    events: int = 0
    activities: int = 0  # on the device, in the window
    truncated: bool = False
    steps_from: StepsFrom = "none"
    whole_steps: int = 0
    steps: tuple[TraceStep, ...] = ()
    median_step_ms: float | None = None
    window_ms: float | None = None  # None when there is no device activity
    idle_pct: float | None = None
    compute_pct: float | None = None
    other_pct: float | None = None  # busy, but not computing: exposed communication and copies
    overlap_pct: float | None = None  # share of the communication during which something was computed
    compute_ms: float | None = None
    communication_ms: float | None = None
    copy_ms: float | None = None
    exposed_communication_ms: float | None = None
    exposed_copy_ms: float | None = None
    idle: TraceIdle | None = None
    kernels_per_step: float | None = None
    median_kernel_us: float | None = None
    streams: tuple[TraceStream, ...] = ()
    copies: tuple[TraceCopies, ...] = ()
    waits: tuple[TraceWait, ...] = ()
    kernels: tuple[TraceKernel, ...] = ()
    loader: TraceLoader | None = None
    timeline: TraceTimeline | None = None
    waits_for_peers_ms: float | None = None  # in communication, above the rank that waits least; the slow rank has 0
    pace: Literal["slow", "even", "fast"] | None = None  # among the ranks of one job: a slow one is waited for
    bound: Bound = "unknown"
    verdict: str = ""
    notes: tuple[str, ...] = ()
