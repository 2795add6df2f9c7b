"""Runs in the measuring child: times copies between host memory and one GPU. The only module here that imports torch.

One sample is a run of copies of one block between two CUDA events on a stream of its own. 256 MiB a block: a launch
takes microseconds and such a copy milliseconds, so that launches vanish in the figure; larger blocks (nvbandwidth
takes 512 MiB) give the same rate and only pin more memory.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpudoctor.errors import GpudoctorError
from gpudoctor.measure.nvml_watch import Watch
from gpudoctor.measure.series import repeat

MIB = 1024 * 1024
BLOCK_BYTES = 256 * MIB
SMALLEST_BYTES = 16 * MIB  # a smaller block measures launches and caches
COPIES = 16
FEWEST_COPIES = 4
_MEMORY_SHARE = 8  # a block takes at most this part of the free memory, of the host and of the GPU
_SAMPLES_WANTED = 4  # at least, in the time of one kind of copy

Copy = Callable[[], None]
Timer = Callable[[int], float]  # seconds that this many copies take


class UnusableError(GpudoctorError):
    """Copies cannot be measured on any GPU here: no torch, no CUDA build, no CUDA driver."""


def copies(payload: dict[str, Any]) -> dict[str, Any]:
    """Rate of one kind of copy.

    payload: device ("cuda", or "host" for a copy inside host memory, which needs no GPU), bdf, direction ("h2d",
    "d2h"), pinned, cpus (to run on; empty: no binding), block_bytes, seconds, warm_up_s, memory_bytes (limit or None).
    Returns samples (GB/s), stopped, bytes, copies, cpus (bound to), readings (NVML counts), notes; or unusable, the
    reason why no GPU of this machine can be measured.
    """
    try:
        return _copies(payload)
    except UnusableError as error:
        return {"unusable": error.message}


def _copies(payload: dict[str, Any]) -> dict[str, Any]:
    cpus = _bind(payload["cpus"])
    torch = _torch()
    notes: list[str] = []
    on_gpu = payload["device"] == "cuda"
    index = _cuda_index(torch, payload["bdf"]) if on_gpu else None
    timer, size = _make(torch, index, payload, notes)
    warm_end = time.monotonic() + payload["warm_up_s"]
    timer(1)  # touches pages and sets up the copy paths of the context
    one = timer(1)
    while time.monotonic() < warm_end:
        one = min(one, timer(1))  # one disturbed copy must not shrink the blocks
    sample_s = payload["seconds"] / _SAMPLES_WANTED
    count, wanted = plan(one, size, sample_s, pinned=payload["pinned"])
    if wanted != size:
        del timer
        timer, size = _make(torch, index, payload | {"block_bytes": wanted}, notes)
        timer(1)

    def sample() -> float:
        return count * size / timer(count) / 1e9

    result: dict[str, Any] = {"bytes": size, "copies": count, "cpus": cpus}
    if on_gpu:
        with Watch(payload["bdf"]) as watch:
            series = repeat(sample, seconds=payload["seconds"])
        result["readings"] = watch.as_json()
        if watch.problem:
            notes.append(f"the link was not (always) read during the copy: {watch.problem}")
    else:
        series = repeat(sample, seconds=payload["seconds"])
        result["readings"] = {}
    return result | {"samples": list(series.samples), "stopped": series.stopped, "notes": notes}


def plan(one_copy_s: float, size: int, sample_s: float, *, pinned: bool) -> tuple[int, int]:
    """(copies, block size) for one sample of about `sample_s`.

    Pinned copies shrink the block first: they do not pass through the CPU's caches, and many copies hide the ends of
    the run. Pageable copies take fewer copies first: a small block would stay in the caches.
    """
    rate = size / max(one_copy_s, 1e-9)
    count = COPIES
    if pinned:
        while size // 2 >= SMALLEST_BYTES and count * size / rate > sample_s:
            size //= 2
    while count > FEWEST_COPIES and count * size / rate > sample_s:
        count -= 1
    while not pinned and size // 2 >= SMALLEST_BYTES and count * size / rate > 4 * sample_s:
        size //= 2
    return count, size


def _bind(cpus: list[int]) -> list[int]:
    """Run on these CPUs (those of them that are allowed) from now on, so that memory allocated next lies near them."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return []
    usable = set(cpus) & os.sched_getaffinity(0)
    if not usable:
        return []
    os.sched_setaffinity(0, usable)
    return sorted(usable)


def _torch() -> Any:
    try:
        import torch
    except Exception as error:  # noqa: BLE001  # a broken installation raises anything, OSError of a library included
        text = " ".join(str(error).split())
        raise UnusableError(f"torch cannot be imported: {text}") from None
    return torch


def _cuda_index(torch: Any, bdf: str) -> int:
    """torch's index of the GPU at `bdf`. CUDA's order is not NVML's, and CUDA_VISIBLE_DEVICES may hide it."""
    if not torch.backends.cuda.is_built():
        raise UnusableError(
            f"torch {torch.__version__} is built without CUDA; install the CUDA build to measure copies"
        )
    name = "libcuda.so.1" if sys.platform != "win32" else "nvcuda.dll"
    try:
        cuda = ctypes.CDLL(name)
    except OSError:
        raise UnusableError(f"the CUDA driver library {name} is not installed") from None
    if code := cuda.cuInit(0):
        raise UnusableError(f"CUDA does not start: cuInit gives error {code}{_visible()}")
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    for index in range(count.value):
        text = ctypes.create_string_buffer(32)
        if cuda.cuDeviceGetPCIBusId(text, 32, index) == 0 and normal_bdf(text.value.decode()) == bdf:
            if not torch.cuda.is_available():
                raise UnusableError("torch finds no usable CUDA device although the driver shows one")
            return index
    raise GpudoctorError(f"CUDA does not show the GPU at {bdf}{_visible()}")


def _visible() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"


def normal_bdf(text: str) -> str:
    """A bus address as the model writes it: lower case, four-digit domain."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:].zfill(4)}:{rest}"


def _make(torch: Any, index: int | None, payload: dict[str, Any], notes: list[str]) -> tuple[Timer, int]:
    """Allocate the blocks and return the timer, with the size that memory allowed."""
    pinned = payload["pinned"] and index is not None
    free = [number for number in (_host_free_bytes(), payload["memory_bytes"]) if number]
    if index is not None:
        torch.cuda.set_device(index)
        free.append(torch.cuda.mem_get_info(index)[0])
    size = payload["block_bytes"]
    while size > SMALLEST_BYTES and free and size > min(free) // _MEMORY_SHARE:
        size //= 2
    while True:
        try:
            host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            host.fill_(1)  # pages that were never written all map to one page of zeros
            other = torch.ones(size, dtype=torch.uint8, device="cpu" if index is None else f"cuda:{index}")
            break
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if size // 2 < SMALLEST_BYTES or "memory" not in str(error).lower():
                raise
            size //= 2
    if size < payload["block_bytes"]:
        notes.append(f"little memory is free: blocks of {size // MIB} MiB instead of {payload['block_bytes'] // MIB}")
    source, target = (host, other) if payload["direction"] == "h2d" else (other, host)

    def copy() -> None:
        # Pageable copies block, as those of a training script without pinning do.
        target.copy_(source, non_blocking=pinned)

    return (_host_timer(copy) if index is None else _cuda_timer(torch, index, copy)), size


def _cuda_timer(torch: Any, index: int, copy: Copy) -> Timer:
    stream = torch.cuda.Stream(index)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds(count: int) -> float:
        with torch.cuda.stream(stream):
            begin.record(stream)
            for _ in range(count):
                copy()
            end.record(stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    torch.cuda.synchronize(index)  # the blocks were filled on another stream
    return seconds


def _host_timer(copy: Copy) -> Timer:
    def seconds(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            copy()
        return time.perf_counter() - begin

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
