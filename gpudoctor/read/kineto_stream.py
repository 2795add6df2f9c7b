"""The event array of a kineto trace as pieces of whole events, read in bounded memory.

A trace of 1 GB is one JSON object. It is cut between two events: first where the last cut was made with the same
separator (kineto's own indentation, or whatever a tool wrote in its place), else at any ``},{``. A cut inside a string
or a nested object gives a piece that does not decode, so a decoder that refuses is what proves a cut; then the next
candidate is tried, and at last the braces are counted.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from gpudoctor.errors import GpudoctorError

PIECE_BYTES = 256 * 1024
_MOST_HEAD_BYTES = 64 * 1024 * 1024  # before the events: metadata, and PyTorch's INFO lines
_MOST_EVENT_BYTES = 64 * 1024 * 1024
_MOST_TAIL_BYTES = 4 * 1024 * 1024
_WINDOW = 64 * 1024  # of a piece's end, searched for a place to cut
_TRIES = 6  # candidates before the braces are counted

_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BARE = re.compile(rb"\s*\[")
_BETWEEN = re.compile(rb"\}(\s*,\s*)\{")
# A string that is not closed runs to the end, so that nothing inside it is taken for a brace.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\Z)|[{}\[\]]', re.DOTALL)

Decode = Callable[[bytes], bool]


@dataclass(slots=True)
class Ends:
    """What stands before and after the events, as JSON objects. `truncated`: the file ends, or is damaged, before the
    events end."""

    head: bytes = b"{}"
    tail: bytes = b"{}"
    truncated: bool = False


class Gunzip:
    """A gzip stream that gives what it has when the file is cut off or damaged, and remembers that it was."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._inflate = zlib.decompressobj(wbits=31)
        self._left = b""
        self.truncated = False
        self._ended = False

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; b"" at the end, also where it comes too early."""
        parts: list[bytes] = []
        have = 0
        while have < size and not self._ended:
            raw = self._left or self._file.read(1 << 18)
            if not raw:
                self.truncated = self.truncated or not self._inflate.eof
                self._ended = True
                break
            try:
                out = self._inflate.decompress(raw, size - have)
            except zlib.error:
                self.truncated = self._ended = True
                break
            self._left = self._inflate.unconsumed_tail
            if self._inflate.eof:  # a further member, or padding, may follow
                self._left = self._inflate.unused_data.lstrip(b"\0")
                self._inflate = zlib.decompressobj(wbits=31) if self._left else self._inflate
                self._ended = not self._left and not (more := self._file.read(1 << 18))
                if not self._left and not self._ended:
                    self._left = more
                    self._inflate = zlib.decompressobj(wbits=31)
            have += len(out)
            parts.append(out)
        return b"".join(parts)


def pieces(read: Callable[[int], bytes], decode: Decode, *, name: str) -> Ends:
    """Hand the events to `decode` as JSON arrays. It answers False, with no effect, for text that is no JSON.

    GpudoctorError when there is no array of events to find.
    """
    ends = Ends()
    buffer = _head(read, ends, name)
    separator: bytes | None = None
    wanted = PIECE_BYTES
    while data := read(PIECE_BYTES):
        buffer = buffer + data if buffer else data
        if len(buffer) < wanted:
            continue
        cut, separator, ended = _cut(buffer, separator, decode)
        if ended:
            break
        if cut == 0 and len(buffer) > _MOST_EVENT_BYTES:
            ends.truncated = True
            return ends
        # Text that gives nothing is tried again when it has doubled, so that damage does not cost the square of it.
        wanted = PIECE_BYTES if cut else 2 * len(buffer)
        buffer = buffer[cut:].lstrip(b" \t\r\n,")
    return _finish(buffer, separator, read, decode, ends)


def _head(read: Callable[[int], bytes], ends: Ends, name: str) -> bytes:
    """What follows the opening bracket of the events; ends.head becomes what stood before it."""
    buffer = b""
    while True:
        data = read(PIECE_BYTES)
        buffer += data
        text = buffer.removeprefix(b"\xef\xbb\xbf")
        if bare := _BARE.match(text):
            return text[bare.end() :]
        found = _EVENTS.search(text)
        if found:
            ends.head = text[: found.start()] + b'"traceEvents":[]}'
            return text[found.end() :]
        if not data or len(buffer) > _MOST_HEAD_BYTES:
            raise GpudoctorError(
                f"{name} is no profiler trace: it has no traceEvents",
                "a file written by torch.profiler's export_chrome_trace or tensorboard_trace_handler is expected",
            )


def _cut(buffer: bytes, separator: bytes | None, decode: Decode) -> tuple[int, bytes | None, bool]:
    """Decode as much of `buffer` as possible: where the rest begins, the separator, and whether the array ends here."""
    if separator is not None and (cut := _cut_at(buffer, separator, decode)):
        return cut, separator, False
    window = max(0, len(buffer) - _WINDOW)
    candidates = list(_BETWEEN.finditer(buffer, window))
    for found in candidates[: -_TRIES - 1 : -1]:
        if decode(b"[" + buffer[: found.start() + 1] + b"]"):
            return found.end() - 1, found[0], False
    last, close = _count(buffer)
    if last and not close and decode(b"[" + buffer[:last] + b"]"):
        return last, None, False
    return 0, None, close > 0


def _cut_at(buffer: bytes, separator: bytes, decode: Decode) -> int:
    place = buffer.rfind(separator)
    if place >= 0 and decode(b"[" + buffer[: place + 1] + b"]"):
        return place + len(separator) - 1
    return 0


def _count(buffer: bytes) -> tuple[int, int]:
    """The end of the last whole event, and the end of the bracket that closes the array after it (0: there is none)."""
    depth = last = 0
    for token in _TOKEN.finditer(buffer):
        kind = token[0]
        if kind in (b"{", b"["):
            depth += 1
        elif kind in (b"}", b"]"):
            depth -= 1
            if depth < 0:
                return last, token.end()
            if depth == 0:
                last = token.end()
    return last, 0


def _finish(buffer: bytes, separator: bytes | None, read: Callable[[int], bytes], decode: Decode, ends: Ends) -> Ends:
    """The last events, and what follows them."""
    if separator is not None:
        buffer = buffer[_cut_at(buffer, separator, decode) :]
    last, close = _count(buffer)
    whole = not last or decode(b"[" + buffer[:last] + b"]")
    ends.truncated = not whole or not close or buffer[close - 1 : close] != b"]"
    if not ends.truncated:
        tail = buffer[close:]
        while len(tail) <= _MOST_TAIL_BYTES and (data := read(PIECE_BYTES)):
            tail += data
        tail = tail.strip().removeprefix(b",")
        if tail.endswith(b"}"):
            ends.tail = b"{" + tail
    return ends
