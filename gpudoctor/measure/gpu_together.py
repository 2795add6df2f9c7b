"""Runs in the measuring child: copies of one GPU from a given moment on, so that several children copy at once.

The moments at which blocks were done are told by the clock that all processes of a machine share; the parent counts
only the time in which every GPU was copying.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from gpudoctor.measure.engine import UnusableError
from gpudoctor.measure.gpu_copies import MIB, Session, session

CHUNK_BYTES = 32 * MIB
_QUEUED = 6  # copies ahead of the one that is waited for: the link never runs dry
_MOST_TIMES = 4000  # of one answer


def prepare(payload: dict[str, Any]) -> dict[str, Any]:
    """Allocate and warm up; payload as for gpu_copies.copies. Returns engine and cpus, or unusable."""
    try:
        run = session(payload)
    except UnusableError as error:
        return {"unusable": error.message}
    _copy_until(run, payload["kind"], 0.0, 0.1)
    return {"engine": run.engine.name, "cpus": run.cpus, "notes": run.news()}


def window(payload: dict[str, Any]) -> dict[str, Any]:
    """Copy from `start_at` (time.monotonic of this machine) for `seconds`; the times at which each chunk was done."""
    run = session(payload)
    times, size = _copy_until(run, payload["kind"], payload["start_at"], payload["seconds"])
    return {"times": times[:_MOST_TIMES], "bytes": size}


def _copy_until(run: Session, kind: str, start_at: float, seconds: float) -> tuple[list[float], int]:
    """The times at which copies were done, and their size."""
    host, gpu = run.host(0), run.gpu(0)
    target, source = (gpu, host) if kind == "h2d" else (host, gpu)
    engine, stream = run.engine, run.stream
    size = min(CHUNK_BYTES, host.size, gpu.size)
    places = max(1, min(host.size, gpu.size) // size)
    events = [engine.event(run.device) for _ in range(_QUEUED)]
    queued: deque[Any] = deque()
    times: list[float] = []
    time.sleep(max(0.0, start_at - time.monotonic()))
    end = time.monotonic() + seconds
    number = 0
    while True:
        busy = time.monotonic() < end
        if not busy and not queued:
            return times, size
        if busy and len(queued) < _QUEUED:
            event = events[number % _QUEUED]
            engine.copy(stream, target, source, size, at=number % places * size)
            engine.record(event, stream)
            queued.append(event)
            number += 1
            continue
        engine.synchronize(queued.popleft())
        times.append(time.monotonic())
