"""Runs in the measuring child: copies from one GPU to another, direct and through host memory, with the data checked.

The check is one way: a pattern is written on the source, copied, and read back by the destination itself. A round
trip would also pass where both ways go wrong alike.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from gpudoctor.measure.engine import Engine, Memory, UnusableError, open_engine
from gpudoctor.measure.gpu_copies import MIB, fitting
from gpudoctor.measure.series import repeat

PAIR_BYTES = 256 * MIB
_CHECK_BYTES = 32 * MIB
_COPIES = 8
_STAGE_BYTES = 8 * MIB  # of one piece on the way through host memory: its launches are hidden behind its copies
_STAGES = 4  # pieces in flight: both halves of the way are busy
_TINY_BYTES = 4
_TINY_COPIES = 50

_engine: Engine | None = None
_blocks: dict[tuple[str, int], Memory] = {}


def pair(payload: dict[str, Any]) -> dict[str, Any]:
    """Copies from `source` to `target` (bus addresses).

    payload: engine, source, target, kind, seconds, memory_bytes. kind: "check" (is access granted, does the data
    arrive, direct and staged), "write" (issued by the source), "read" (issued by the target), "staged" (through
    pinned host memory), "latency" (microseconds of a direct copy of four bytes). Returns samples (GB/s), stopped,
    bytes; for "check" access, side (whether reading can be chosen), and write, read, staged (True: the data arrived).
    """
    global _engine  # noqa: PLW0603  # one engine a child
    try:
        _engine = _engine or open_engine(payload.get("engine"))
    except UnusableError as error:
        return {"unusable": error.message}
    return {"engine": _engine.name, **_Pair(_engine, payload).run(payload["kind"], payload["seconds"])}


class _Pair:
    def __init__(self, engine: Engine, payload: dict[str, Any]) -> None:
        self.engine = engine
        self.source, self.target = engine.ordinal(payload["source"]), engine.ordinal(payload["target"])
        free = min(engine.free_bytes(self.source), engine.free_bytes(self.target))
        held = _blocks.get(("gpu", self.source)), _blocks.get(("gpu", self.target))
        size = fitting(PAIR_BYTES, [free + sum(block.size for block in held if block)])
        self.out, self.into = self._gpu(self.source, size), self._gpu(self.target, size)
        self.size = min(self.out.size, self.into.size)
        self._stream: Any = None  # of the way down to the host
        self._marks: dict[int, tuple[Any, Any]] = {}

    def run(self, kind: str, seconds: float) -> dict[str, Any]:
        if kind == "check":
            access = self.engine.peer_access(self.source, self.target)
            both = access and self.engine.chooses_side and self.engine.peer_access(self.target, self.source)
            return {
                "access": access,
                "side": both,
                "write": self._arrives(self._direct, self.source) if access else None,
                "read": self._arrives(self._direct, self.target) if both else None,
                "staged": self._arrives(self._staged, self.target),
            }
        if kind == "latency":
            return self._latency(seconds)
        side = self.target if kind == "read" else self.source
        copy = self._staged if kind == "staged" else self._direct
        return self._rate(copy, self.target if kind == "staged" else side, seconds)

    def _rate(self, copy: Callable[[Any, int], None], side: int, seconds: float) -> dict[str, Any]:
        stream = self.engine.stream(side)
        begin, end = self.engine.event(side), self.engine.event(side)

        def sample() -> float:
            copy(stream, self.size)  # ahead of the first event: launches are hidden behind it
            self.engine.record(begin, stream)
            for _ in range(_COPIES):
                copy(stream, self.size)
            self.engine.record(end, stream)
            self.engine.synchronize(end)
            return _COPIES * self.size / self.engine.elapsed_s(begin, end) / 1e9

        sample()
        series = repeat(sample, seconds=seconds)
        return {"samples": list(series.samples), "stopped": series.stopped, "bytes": self.size}

    def _latency(self, seconds: float) -> dict[str, Any]:
        stream = self.engine.stream(self.source)
        begin, end = self.engine.event(self.source), self.engine.event(self.source)

        def sample() -> float:
            self._direct(stream, self.size)
            self.engine.record(begin, stream)
            for _ in range(_TINY_COPIES):
                self._direct(stream, _TINY_BYTES)
            self.engine.record(end, stream)
            self.engine.synchronize(end)
            return self.engine.elapsed_s(begin, end) / _TINY_COPIES * 1e6

        sample()
        series = repeat(sample, seconds=seconds)
        return {"samples": list(series.samples), "stopped": series.stopped, "bytes": _TINY_BYTES}

    def _direct(self, stream: Any, size: int) -> None:
        """Issued by the GPU that the stream belongs to."""
        self.engine.peer_copy(stream, self.into, self.out, size)

    def _staged(self, stream: Any, size: int) -> None:
        """In pieces through pinned memory: while one goes down, the one before it comes up (on the target's stream)."""
        engine = self.engine
        bounce = [self._host(number) for number in range(_STAGES)]
        down = self._down()
        piece = min(_STAGE_BYTES, size)
        for number in range(size // piece):
            slot = number % _STAGES
            block, (filled, emptied) = bounce[slot], self._events(slot)
            if number >= _STAGES:
                engine.wait(down, emptied)
            engine.copy(down, block, _view(self.out, number * piece), piece)
            engine.record(filled, down)
            engine.wait(stream, filled)
            engine.copy(stream, _view(self.into, number * piece), block, piece)
            engine.record(emptied, stream)
        # The next call must not write into a piece that this one still reads.
        engine.wait(down, self._events((size // piece - 1) % _STAGES)[1])

    def _down(self) -> Any:
        if self._stream is None:
            self._stream = self.engine.stream(self.source)
        return self._stream

    def _events(self, slot: int) -> tuple[Any, Any]:
        if slot not in self._marks:
            self._marks[slot] = (self.engine.event(self.source), self.engine.event(self.target))
        return self._marks[slot]

    def _arrives(self, copy: Callable[[Any, int], None], side: int) -> bool:
        """Whether every byte of a pattern is found in the target's memory, read by the target."""
        engine, size = self.engine, min(_CHECK_BYTES, self.size)
        pattern = _pattern(size, self.source * 64 + self.target)
        sent = self._host(0)
        received = self._host(_STAGES)
        engine.fill(self.into, 0xA5)
        stream, event = engine.stream(side), engine.event(side)
        fetch, fetched = engine.stream(self.target), engine.event(self.target)
        feed, fed = engine.stream(self.source), engine.event(self.source)
        for at in range(0, size, _STAGE_BYTES):
            ctypes.memmove(sent.address, pattern[at : at + _STAGE_BYTES], _STAGE_BYTES)
            engine.copy(feed, _view(self.out, at), sent, _STAGE_BYTES)
            engine.record(fed, feed)
            engine.synchronize(fed)
        copy(stream, size)
        engine.record(event, stream)
        engine.synchronize(event)
        for at in range(0, size, _STAGE_BYTES):
            engine.copy(fetch, received, _view(self.into, at), _STAGE_BYTES)
            engine.record(fetched, fetch)
            engine.synchronize(fetched)
            if ctypes.string_at(received.address, _STAGE_BYTES) != pattern[at : at + _STAGE_BYTES]:
                return False
        return True

    def _gpu(self, device: int, size: int) -> Memory:
        key = ("gpu", device)
        if key not in _blocks:
            _blocks[key] = self.engine.on_device(device, size)
        return _blocks[key]

    def _host(self, number: int) -> Memory:
        key = ("host", number)
        if key not in _blocks:
            _blocks[key] = self.engine.pinned(self.source, _STAGE_BYTES)
        return _blocks[key]


def _view(memory: Memory, at: int) -> Memory:
    owner = memory.owner
    if hasattr(owner, "narrow"):  # a tensor: its own view
        owner = owner.narrow(0, at, memory.size - at)
    return Memory(memory.size - at, memory.device, memory.pinned, memory.address + at, owner)


def _pattern(size: int, seed: int) -> bytes:
    """Bytes that differ between places and between pairs, so that neither a shift nor another pair's data passes."""
    import random

    return random.Random(seed).randbytes(size)  # noqa: S311  # a test pattern, no secret
