"""Starts CUDA in a measuring child while NVML is still asked about the GPUs.

Starting the driver (or importing torch) takes longer than most of what is measured, and needs no answer of NVML: it
loads no GPU and takes no memory of one. The command line begins it before it imports anything heavy; the first GPU that
is measured takes the child over.
"""

from __future__ import annotations

import threading

from gpudoctor import child

TARGET = "gpudoctor.measure.gpu_copies:start"
_DEADLINE_S = 60.0
_begun: list[Early] = []
_closing: list[int] = []  # pids of children that were told to end


class Early:
    """A child in which `engine` is being started. Whether that went well is told by the first probe."""

    def __init__(self, engine: str | None) -> None:
        self.engine = engine
        self._server = child.Server()
        self._thread = threading.Thread(target=self._start, name="cuda", daemon=True)
        self._thread.start()

    def server(self) -> child.Server:
        """The child, when it has started; its call has a deadline."""
        self._thread.join()
        return self._server

    def _start(self) -> None:
        self._server.call(TARGET, {"engine": self.engine}, deadline_s=_DEADLINE_S)


def begin(words: list[str]) -> None:
    """Start a child now, with the engine that the words of the command line ask for."""
    engine = None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name == "--engine":
            engine = value or following
    if engine in (None, "auto", "cuda", "torch"):
        _begun.append(Early(None if engine == "auto" else engine))


def server(engine: str | None) -> child.Server:
    """The child that was begun early for this engine, or a new one that starts with its first call."""
    while _begun:
        early = _begun.pop()
        if early.engine == engine:
            return early.server()
        close(early.server())
    return child.Server()


def close(server: child.Server) -> None:
    """End a child beside what follows: its driver takes a while to give the memory back."""
    if server.pid is not None:
        _closing.append(server.pid)
    threading.Thread(target=server.close, name="close").start()


def closing() -> tuple[int, ...]:
    """The pids of children that were closed and may not have gone yet."""
    return tuple(_closing)


def discard() -> None:
    """End what was begun and is not needed."""
    while _begun:
        close(_begun.pop().server())
