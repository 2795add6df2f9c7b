"""cuda.bindings.driver on a machine without a GPU: memory of the host, and a clock that only copies move.

Each call has the name, the arguments and the answer of the real binding. FAKE_CUDA (JSON) changes the machine:
rates in GB/s (h2d, d2h, d2d, peer), both (share of a rate that is left while the other direction runs), peers (0: no
access), lost (peer copies deliver nothing), hang (peer copies never end), free_mib, compute (cuInit's error), real
(copies take their time by the clock of the machine, for those who look at that).
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from typing import Any

_SETTINGS = {
    "rates": {"h2d": 55.4, "d2h": 55.3, "d2d": 2092.0, "peer": 390.0},
    "both": 0.92,
    "peers": 1,
    "lost": False,
    "hang": False,
    "free_mib": 128,
    "compute": 0,
    "real": False,
    "bdfs": ["0000:3B:00.0", "0000:86:00.0"],
    **json.loads(os.environ.get("FAKE_CUDA", "{}")),
}
_LAUNCH_S = 2e-6
_REAL_COPY_BYTES = 8 << 20  # larger host copies only take time: their content is never looked at
_blocks: dict[int, Any] = {}
_filled: set[int] = set()  # by cuMemsetD8, and not yet the target of a copy: only then the content matters
_current: list[int | None] = [None]
_now = [1.0]
_way: dict[str, list[tuple[float, float]]] = {"h2d": [], "d2h": []}


class _Stream:
    def __init__(self) -> None:
        self.device = _current[0]
        self.time = 0.0


_Event = _Stream


def _clock() -> float:
    return time.monotonic() if _SETTINGS["real"] else _now[0]


def cuInit(flags: int) -> tuple[int]:
    return (_SETTINGS["compute"],)


def cuDriverGetVersion() -> tuple[int, int]:
    return 0, 13000


def cuGetErrorName(error: int) -> tuple[int, bytes]:
    return 0, {2: b"CUDA_ERROR_OUT_OF_MEMORY"}.get(error, b"CUDA_ERROR_INVALID_VALUE")


def cuDeviceGetCount() -> tuple[int, int]:
    return 0, len(_SETTINGS["bdfs"])


def cuDeviceGet(ordinal: int) -> tuple[int, int]:
    return 0, ordinal


def cuDeviceGetPCIBusId(length: int, device: int) -> tuple[int, bytes]:
    return 0, _SETTINGS["bdfs"][device].encode() + b"\0" + b" " * (length - 13)


def cuDevicePrimaryCtxRetain(device: int) -> tuple[int, int]:
    return 0, device + 100


def cuCtxSetCurrent(context: int) -> tuple[int]:
    _current[0] = context - 100
    return (0,)


def cuCtxSynchronize() -> tuple[int]:
    return (0,)


def cuMemGetInfo() -> tuple[int, int, int]:
    return 0, _SETTINGS["free_mib"] << 20, _SETTINGS["free_mib"] << 20


def _allocate(size: int) -> tuple[int, int]:
    if size > _SETTINGS["free_mib"] << 20:
        return 2, 0
    block = ctypes.create_string_buffer(size)
    _blocks[ctypes.addressof(block)] = block
    return 0, ctypes.addressof(block)


def cuMemHostAlloc(size: int, flags: int) -> tuple[int, int]:
    return _allocate(size)


def cuMemAlloc(size: int) -> tuple[int, int]:
    return _allocate(size)


def cuMemHostRegister(address: int, size: int, flags: int) -> tuple[int]:
    return (0,)


def cuMemHostUnregister(address: int) -> tuple[int]:
    return (0,)


def cuMemFree(address: int) -> tuple[int]:
    del _blocks[address]
    return (0,)


cuMemFreeHost = cuMemFree


def cuMemsetD8(address: int, value: int, size: int) -> tuple[int]:
    ctypes.memset(address, value, size)
    _filled.add(address)
    return (0,)


def cuStreamCreate(flags: int) -> tuple[int, _Stream]:
    return 0, _Stream()


def cuEventCreate(flags: int) -> tuple[int, _Event]:
    return 0, _Event()


def _run(stream: _Stream, size: int, way: str) -> None:
    rate = _SETTINGS["rates"][way]
    begin = max(stream.time, _clock())
    opposite = _way.get({"h2d": "d2h", "d2h": "h2d"}.get(way, ""), [])
    if any(left < begin < right for left, right in opposite[-3000:]):
        rate *= _SETTINGS["both"]
    stream.time = begin + _LAUNCH_S + size / rate / 1e9
    if way in _way:
        _way[way].append((begin, stream.time))


def cuMemcpyHtoDAsync(target: int, source: int, size: int, stream: _Stream) -> tuple[int]:
    _run(stream, size, "h2d")
    if size <= _REAL_COPY_BYTES:
        ctypes.memmove(target, source, size)
    return (0,)


def cuMemcpyDtoHAsync(target: int, source: int, size: int, stream: _Stream) -> tuple[int]:
    _run(stream, size, "d2h")
    if size <= _REAL_COPY_BYTES:
        ctypes.memmove(target, source, size)
    return (0,)


def cuMemcpyDtoDAsync(target: int, source: int, size: int, stream: _Stream) -> tuple[int]:
    _run(stream, size, "d2d")
    return (0,)


def cuMemcpyPeerAsync(target: int, into: int, source: int, out: int, size: int, stream: _Stream) -> tuple[int]:
    if _SETTINGS["hang"]:
        time.sleep(600)
    _run(stream, size, "peer")
    if target in _filled and not _SETTINGS["lost"]:
        ctypes.memmove(target, source, size)
    _filled.discard(target)
    return (0,)


def cuEventRecord(event: _Event, stream: _Stream) -> tuple[int]:
    if event.device != stream.device:
        return (400,)
    event.time = stream.time = max(stream.time, _clock())
    return (0,)


def cuStreamWaitEvent(stream: _Stream, event: _Event, flags: int) -> tuple[int]:
    stream.time = max(stream.time, event.time)
    return (0,)


def _until(moment: float) -> tuple[int]:
    if _SETTINGS["real"]:
        time.sleep(max(0.0, moment - time.monotonic()))
    _now[0] = max(_now[0], moment)
    return (0,)


def cuEventSynchronize(event: _Event) -> tuple[int]:
    return _until(event.time)


def cuStreamSynchronize(stream: _Stream) -> tuple[int]:
    return _until(stream.time)


def cuEventElapsedTime(begin: _Event, end: _Event) -> tuple[int, float]:
    return 0, (end.time - begin.time) * 1e3


def cuDeviceCanAccessPeer(device: int, peer: int) -> tuple[int, int]:
    return 0, _SETTINGS["peers"]


def cuCtxEnablePeerAccess(context: int, flags: int) -> tuple[int]:
    return (0,)
