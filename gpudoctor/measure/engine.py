"""What a measuring child needs of CUDA, and which binding gives it: cuda-bindings where installed, torch otherwise.

Importing torch takes seconds and serves no copy: the driver's own calls through cuda-bindings (the package
`cuda-bindings`, maintained by NVIDIA) start in milliseconds. Both engines issue the same copies: one asynchronous
memcpy a block, by the copy engines, between pinned host memory and device memory.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, Protocol

from gpudoctor.errors import GpudoctorError

NAMES = ("cuda", "torch")


class UnusableError(GpudoctorError):
    """Copies cannot be measured on any GPU here: no binding, no CUDA build, no CUDA driver."""


@dataclass(slots=True)
class Memory:
    """A block of memory. `device` is the CUDA ordinal, None for host memory; `owner` keeps it alive."""

    size: int
    device: int | None
    pinned: bool
    address: int
    owner: Any = None


class Engine(Protocol):
    """Devices are CUDA ordinals; streams and events are the engine's own objects."""

    name: str

    def ordinal(self, bdf: str) -> int:
        """The CUDA ordinal of the GPU at a bus address. GpudoctorError when CUDA does not show it."""
        ...

    def free_bytes(self, device: int) -> int: ...
    def pinned(self, device: int, size: int) -> Memory: ...
    def pageable(self, size: int) -> Memory: ...
    def register(self, device: int, address: int, size: int, owner: Any) -> Memory:
        """Pin host memory that the caller mapped, and placed, itself."""
        ...

    def on_device(self, device: int, size: int) -> Memory: ...
    def release(self, memory: Memory) -> None: ...
    def stream(self, device: int) -> Any: ...
    def event(self, device: int) -> Any: ...
    def copy(
        self, stream: Any, target: Memory, source: Memory, size: int, *, at: int = 0, blocking: bool = False
    ) -> None:
        """`size` bytes from offset `at` on; `blocking` waits for the end, as a copy without pinned memory does."""
        ...

    def fill(self, memory: Memory, value: int) -> None:
        """Every byte of device memory; returns when it is done."""
        ...

    def record(self, event: Any, stream: Any) -> None: ...
    def wait(self, stream: Any, event: Any) -> None: ...
    def synchronize(self, event: Any) -> None: ...
    def elapsed_s(self, begin: Any, end: Any) -> float: ...
    def peer_access(self, device: int, peer: int) -> bool:
        """Whether `device` may read and write the memory of `peer`; switches it on where it may."""
        ...

    def peer_copy(self, stream: Any, target: Memory, source: Memory, size: int) -> None: ...

    chooses_side: bool  # whether a peer copy can be issued by the reading GPU as well as by the writing one


def available() -> str:
    """The engine that `open_engine` would take, without importing it: "cuda" or "torch"."""
    try:
        return "cuda" if importlib.util.find_spec("cuda.bindings.driver") is not None else "torch"
    except (ImportError, ValueError):  # no package cuda at all, or another one of that name
        return "torch"


def open_engine(wanted: str | None = None) -> Engine:
    """Start CUDA through the `wanted` binding, or the lightest one that is installed.

    Raises UnusableError, with the reason, when no GPU of this machine can be used.
    """
    if (wanted or available()) == "cuda":
        from gpudoctor.measure.driver_engine import DriverEngine

        return DriverEngine()
    from gpudoctor.measure.torch_engine import TorchEngine

    return TorchEngine()


def normal_bdf(text: str) -> str:
    """A bus address as the model writes it: lower case, four-digit domain."""
    domain, _, rest = text.strip().lower().partition(":")
    return f"{domain[-4:].zfill(4)}:{rest}"


def visible() -> str:
    """What hides GPUs from CUDA, in brackets; "" when nothing does."""
    import os

    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if hidden is None else f" (CUDA_VISIBLE_DEVICES is {hidden!r})"
