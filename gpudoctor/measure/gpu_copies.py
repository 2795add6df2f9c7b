"""Runs in the measuring child: times copies of one GPU, of every kind that `copies` names.

One sample is a run of copies of one block between two CUDA events on a stream of its own, with one copy queued ahead
of the first event, so that launches are hidden behind copies. Blocks of 256 MiB: a launch takes microseconds and such
a copy milliseconds; larger blocks (nvbandwidth takes 512 MiB) give the same rate and only pin more memory.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpudoctor.measure import nvml_watch, placement
from gpudoctor.measure.engine import Engine, Memory, UnusableError, open_engine
from gpudoctor.measure.nvml_watch import Watch
from gpudoctor.measure.series import Series, repeat

MIB = 1024 * 1024
BLOCK_BYTES = 256 * MIB
LOCAL_BYTES = 512 * MIB  # a copy inside the GPU must exceed its L2 cache several times
SMALLEST_BYTES = 16 * MIB  # a smaller block measures launches and caches
COPIES = 16
FEWEST_COPIES = 4
CURVE_BYTES = tuple(4096 * 4**step for step in range(9))  # 4 KiB to 256 MiB
_CURVE_COPIES = 64
_TINY_BYTES = 4
_TINY_COPIES = 100  # of one sample of the latency
_MEMORY_SHARE = 8  # a block takes at most this part of the free memory, of the host and of the GPU
_SAMPLES_WANTED = 4  # at least, in the time of one kind of copy
_WARM_COPIES = 4  # at least, before the first copy that counts
_SETTLED = 1.02  # the last copies of the warm-up take at most this much longer than the fastest one
_MOST_WARM_UP_S = 0.3  # beyond the time given: a link that has not woken by then is measured as it is
_AGAINST = 1.25  # copies of the opposite direction for each copy that counts; raised where they end too early
_MOST_AGAINST = 20.0

Timer = Callable[[int], float]  # seconds that this many copies take

_engines: dict[str | None, Engine] = {}


def start(payload: dict[str, Any]) -> dict[str, Any]:
    """Start CUDA (payload: engine, None for the lightest) before it is known which GPU is measured; none is loaded."""
    threading.Thread(target=nvml_watch.wake, name="nvml", daemon=True).start()
    try:
        return {"engine": _opened(payload["engine"]).name}
    except UnusableError as error:
        return {"unusable": error.message}


def _opened(name: str | None) -> Engine:
    if name not in _engines:
        _engines[name] = open_engine(name)
    return _engines[name]


class Session:
    """CUDA, the GPU and its blocks; kept from call to call, since pinning memory takes longer than copying it."""

    def __init__(self, payload: dict[str, Any]) -> None:
        self.cpus = placement.bind_cpus(payload["cpus"])
        self.bdf: str = payload["bdf"]
        self.watch = Watch(self.bdf, payload.get("hops", ()))
        self.engine = _opened(payload.get("engine"))
        self.node: int | None = payload.get("node")
        self.device = self.engine.ordinal(self.bdf)
        self.placed: placement.Placed | None = None
        self.notes: list[str] = []
        self.plans: dict[str, tuple[int, int]] = {}  # of each kind: copies of one sample and the size of its blocks
        self.stream, self.other = self.engine.stream(self.device), self.engine.stream(self.device)
        self.begin, self.end, self.last = (self.engine.event(self.device) for _ in range(3))
        self._blocks: dict[tuple[str, int], Memory] = {}
        gpu = self.engine.free_bytes(self.device)
        host = [number for number in (_host_free_bytes(), payload["memory_bytes"]) if number]
        self.block_bytes = fitting(payload["block_bytes"], [gpu, *host])
        self.local_bytes = fitting(LOCAL_BYTES, [gpu])
        if self.block_bytes < payload["block_bytes"]:
            self.notes.append(
                f"little memory is free: blocks of {self.block_bytes // MIB} MiB instead of "
                f"{payload['block_bytes'] // MIB}"
            )

    def news(self) -> list[str]:
        """Notes since the last call: what was said once holds for the whole session."""
        fresh, self.notes = self.notes, []
        return fresh

    def host(self, number: int, *, pinned: bool = True) -> Memory:
        kind = "pinned" if pinned else "pageable"
        return self._block(kind, number, lambda size: self._host(size, pinned=pinned), self.block_bytes)

    def gpu(self, number: int, size: int | None = None) -> Memory:
        size = size or self.block_bytes
        kind = "gpu" if size == self.block_bytes else "local"
        return self._block(kind, number, lambda wanted: self.engine.on_device(self.device, wanted), size)

    def _block(self, kind: str, number: int, make: Callable[[int], Memory], size: int) -> Memory:
        key = (kind, number)
        while key not in self._blocks:
            try:
                self._blocks[key] = make(size)
            except MemoryError:
                if size // 2 < SMALLEST_BYTES:
                    raise
                size //= 2
                self.notes.append(f"no memory for larger blocks than {size // MIB} MiB ({kind})")
        return self._blocks[key]

    def _host(self, size: int, *, pinned: bool) -> Memory:
        if self.node is not None:
            self.placed = placement.on_node(size, self.node)
            return self.engine.register(self.device, self.placed.address, size, self.placed.mapping)
        if pinned:
            return self.engine.pinned(self.device, size)
        block = self.engine.pageable(size)
        ctypes.memset(block.address, 1, size)  # pages that were never written all map to one page of zeros
        return block


_session: Session | None = None


def session(payload: dict[str, Any]) -> Session:
    """The session of this child: one GPU, one engine, one NUMA node for its whole life."""
    global _session  # noqa: PLW0603  # a child serves one parent, one call after the other
    if _session is None or (_session.bdf, _session.node) != (payload["bdf"], payload.get("node")):
        _session = Session(payload)
    return _session


def copies(payload: dict[str, Any]) -> dict[str, Any]:
    """Rates or times of one kind of copy.

    payload: engine (None: the lightest), bdf, kind, cpus (to run on; empty: no binding), node (of the host memory;
    None: where the system puts it), block_bytes, seconds, warm_up_s, memory_bytes (limit or None), hops (bus addresses
    whose links are read during the copies).
    kind: h2d, d2h, h2d_pageable, d2h_pageable, h2d_while_d2h, d2h_while_h2d, d2d, h2d_latency, d2h_latency, h2d_curve,
    d2h_curve.
    Returns samples (GB/s; microseconds for a latency) or curve ([bytes, GB/s]...), stopped, bytes, copies, cpus,
    engine, readings (NVML counts), problem (of reading them), placed, notes; or unusable, the reason why no GPU here
    can be measured.
    """
    try:
        run = session(payload)
    except UnusableError as error:
        return {"unusable": error.message}
    result: dict[str, Any] = {"cpus": run.cpus, "engine": run.engine.name, "bytes": 0, "copies": 0}
    result |= _KINDS[payload["kind"].partition("_")[2] or payload["kind"]](run, payload)
    placed = run.placed
    return result | {
        "notes": run.news(),
        "placed": None if placed is None else {"share": placed.share, "reason": placed.reason},
    }


def _one_way(run: Session, payload: dict[str, Any]) -> dict[str, Any]:
    pinned = not payload["kind"].endswith("_pageable")
    host, gpu = run.host(0, pinned=pinned), run.gpu(0)
    size = min(host.size, gpu.size)
    target, source = (gpu, host) if payload["kind"].startswith("h2d") else (host, gpu)
    return _measure(run, payload, lambda part: _timer(run, target, source, part, blocking=not pinned), size, pinned)


def _local(run: Session, payload: dict[str, Any]) -> dict[str, Any]:
    """Bytes are counted once, though each is read and written: as nvbandwidth's device_local_copy counts."""
    target, source = run.gpu(0, run.local_bytes), run.gpu(1, run.local_bytes)
    size = min(target.size, source.size)
    timer = _timer(run, target, source, size)
    timer(FEWEST_COPIES)
    return _sampled(run, timer, COPIES, size, payload)


def _both_ways(run: Session, payload: dict[str, Any]) -> dict[str, Any]:
    """The direction that is named first counts; the other one runs from before its first to after its last copy."""
    host, gpu, host_2, gpu_2 = run.host(0), run.gpu(0), run.host(1), run.gpu(1)
    size = min(block.size for block in (host, gpu, host_2, gpu_2))
    counted, against = ((gpu, host), (host_2, gpu_2))
    if payload["kind"].startswith("d2h"):
        counted, against = ((host, gpu), (gpu_2, host_2))
    return _measure(run, payload, lambda part: _timer_against(run, counted, against, part), size, pinned=True)


def _latency(run: Session, payload: dict[str, Any]) -> dict[str, Any]:
    """Microseconds from the call to the end of a copy of four bytes, waited for by the CPU."""
    host, gpu = run.host(0), run.gpu(0)
    target, source = (gpu, host) if payload["kind"].startswith("h2d") else (host, gpu)

    def sample() -> float:
        begin = time.perf_counter()
        for _ in range(_TINY_COPIES):
            run.engine.copy(run.stream, target, source, _TINY_BYTES, blocking=True)
        return (time.perf_counter() - begin) / _TINY_COPIES * 1e6

    sample()
    with run.watch.window() as seen:
        series = repeat(sample, seconds=payload["seconds"])
    return _result(series, _TINY_BYTES, _TINY_COPIES, seen)


def _curve(run: Session, payload: dict[str, Any]) -> dict[str, Any]:
    """Rate by size; a large copy ahead of the small ones keeps their launches out of the figure."""
    host, gpu = run.host(0), run.gpu(0)
    target, source = (gpu, host) if payload["kind"].startswith("h2d") else (host, gpu)
    most = min(host.size, gpu.size)
    curve = []
    with run.watch.window() as seen:
        for size in (size for size in CURVE_BYTES if size <= most):
            count = max(FEWEST_COPIES, min(_CURVE_COPIES, most // size))
            timer = _timer(run, target, source, size, ahead=most)
            timer(1)
            series = repeat(lambda: count * size / timer(count) / 1e9, seconds=payload["seconds"] / len(CURVE_BYTES))  # noqa: B023
            curve.append([size, sorted(series.samples)[len(series.samples) // 2]])
    return {"curve": curve, "stopped": "time", "samples": [], "readings": seen.as_json(), "problem": seen.problem}


_KINDS: dict[str, Callable[[Session, dict[str, Any]], dict[str, Any]]] = {
    "h2d": _one_way,
    "d2h": _one_way,
    "pageable": _one_way,
    "while_d2h": _both_ways,
    "while_h2d": _both_ways,
    "d2d": _local,
    "latency": _latency,
    "curve": _curve,
}


def _measure(
    run: Session, payload: dict[str, Any], make: Callable[[int], Timer], size: int, pinned: bool
) -> dict[str, Any]:
    """Samples of one kind. The first call of a kind warms up longer, and finds out how much fits into a sample."""
    kind = payload["kind"]
    if kind not in run.plans:
        one = _warmed_up(make(size), payload["warm_up_s"])
        run.plans[kind] = plan(one, size, payload["seconds"] / _SAMPLES_WANTED, pinned=pinned)
    timer = make(run.plans[kind][1])
    timer(1)
    return _sampled(run, timer, *run.plans[kind], payload)


def _warmed_up(timer: Timer, seconds: float, clock: Callable[[], float] = time.monotonic) -> float:
    """Seconds of one copy when the link and the clocks are awake: these copies count for nothing.

    They go on for `seconds`, and a while longer where the last ones are still faster than those before.
    """
    begin = clock()
    times: list[float] = []
    while True:
        times.append(timer(1))  # one disturbed copy must not shrink the blocks: the fastest one is taken
        past = clock() - begin
        settled = max(times[-_WARM_COPIES + 1 :]) <= _SETTLED * min(times)
        if len(times) >= _WARM_COPIES and past >= seconds and (settled or past >= seconds + _MOST_WARM_UP_S):
            return min(times)


def _sampled(run: Session, timer: Timer, count: int, size: int, payload: dict[str, Any]) -> dict[str, Any]:
    with run.watch.window() as seen:  # after the warm-up: a link that wakes is no reading under load
        series = repeat(lambda: count * size / timer(count) / 1e9, seconds=payload["seconds"])
    return _result(series, size, count, seen)


def _result(series: Series, size: int, count: int, seen: nvml_watch.Window) -> dict[str, Any]:
    return {
        "samples": list(series.samples),
        "stopped": series.stopped,
        "bytes": size,
        "copies": count,
        "readings": seen.as_json(),
        "problem": seen.problem,
    }


def plan(one_copy_s: float, size: int, sample_s: float, *, pinned: bool) -> tuple[int, int]:
    """(copies, block size) for one sample of about `sample_s`.

    Fewer copies come first: a block must exceed the caches, and the ends of a run of four copies hide behind the copy
    that is queued ahead. Blocks are halved where that is not enough; pageable ones, which pass through caches,
    only where it is far from enough.
    """
    rate = size / max(one_copy_s, 1e-9)
    count = COPIES
    while count > FEWEST_COPIES and count * size / rate > sample_s:
        count -= 1
    most_s = sample_s if pinned else 4 * sample_s
    while size // 2 >= SMALLEST_BYTES and count * size / rate > most_s:
        size //= 2
    return count, size


def fitting(size: int, free: list[int]) -> int:
    """The block size that leaves most of the free memory alone; never below SMALLEST_BYTES."""
    while size > SMALLEST_BYTES and free and size > min(free) // _MEMORY_SHARE:
        size //= 2
    return size


def _timer(
    run: Session, target: Memory, source: Memory, size: int, *, blocking: bool = False, ahead: int | None = None
) -> Timer:
    engine, stream, begin, end = run.engine, run.stream, run.begin, run.end

    def seconds(count: int) -> float:
        if not blocking:
            engine.copy(stream, target, source, ahead or size)
        engine.record(begin, stream)
        for _ in range(count):
            # Pageable copies block, as those of a training script without pinning do.
            engine.copy(stream, target, source, size, blocking=blocking)
        engine.record(end, stream)
        engine.synchronize(end)
        return engine.elapsed_s(begin, end)

    return seconds


def _timer_against(run: Session, counted: tuple[Memory, Memory], against: tuple[Memory, Memory], size: int) -> Timer:
    engine, begin, end, last = run.engine, run.begin, run.end, run.last
    factor = _AGAINST

    def seconds(count: int) -> float:
        nonlocal factor
        while True:
            for _ in range(math.ceil(factor * count) + 2):
                engine.copy(run.other, *against, size)
            engine.record(last, run.other)
            engine.copy(run.stream, *counted, size)
            engine.record(begin, run.stream)
            for _ in range(count):
                engine.copy(run.stream, *counted, size)
            engine.record(end, run.stream)
            engine.synchronize(end)
            engine.synchronize(last)
            if engine.elapsed_s(end, last) >= 0 or factor >= _MOST_AGAINST:
                return engine.elapsed_s(begin, end)
            factor *= 2  # the opposite direction is faster: it ended while copies that count still ran

    return seconds


def _host_free_bytes() -> int | None:
    """What the kernel says can be allocated now; None where it does not tell."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
