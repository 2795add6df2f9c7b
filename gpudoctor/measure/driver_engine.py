"""Copies through the CUDA driver by cuda-bindings. Imported in the measuring child only."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from gpudoctor.errors import GpudoctorError
from gpudoctor.measure.engine import Memory, UnusableError, normal_bdf, visible

_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE: pinned for every context
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
_ALREADY = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
_OUT_OF_MEMORY = 2


@dataclass(frozen=True, slots=True)
class _On:
    """A stream or an event, with the device in whose context it was made."""

    device: int
    handle: Any


class DriverEngine:
    """One primary context a device, as torch has them too."""

    chooses_side = True

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver
        except Exception as error:  # noqa: BLE001  # a broken installation raises anything
            text = " ".join(str(error).split())
            raise UnusableError(f"cuda-bindings cannot be imported: {text}") from None
        self._cuda: Any = driver
        try:
            (code,) = driver.cuInit(0)
        except RuntimeError:  # the binding finds no libcuda.so.1
            raise UnusableError("the CUDA driver library libcuda.so.1 is not installed") from None
        if int(code):
            raise UnusableError(f"CUDA does not start: cuInit gives error {int(code)}{visible()}")
        version = self._call("cuDriverGetVersion")
        self.name = f"cuda-bindings, CUDA {version // 1000}.{version % 1000 // 10}"
        self._contexts: dict[int, Any] = {}
        self._current: int | None = None

    def ordinal(self, bdf: str) -> int:
        for index in range(self._call("cuDeviceGetCount")):
            text = self._call("cuDeviceGetPCIBusId", 32, self._call("cuDeviceGet", index))
            if normal_bdf(text.split(b"\0")[0].decode(errors="replace")) == bdf:
                return index
        raise GpudoctorError(f"CUDA does not show the GPU at {bdf}{visible()}")

    def free_bytes(self, device: int) -> int:
        self._use(device)
        return int(self._call("cuMemGetInfo")[0])

    def pinned(self, device: int, size: int) -> Memory:
        self._use(device)
        address = int(self._call("cuMemHostAlloc", size, _PORTABLE))
        return Memory(size, None, True, address, "cuMemFreeHost")

    def pageable(self, size: int) -> Memory:
        block = ctypes.create_string_buffer(size)
        return Memory(size, None, False, ctypes.addressof(block), block)

    def register(self, device: int, address: int, size: int, owner: Any) -> Memory:
        self._use(device)
        self._call("cuMemHostRegister", address, size, _PORTABLE)
        return Memory(size, None, True, address, owner)

    def on_device(self, device: int, size: int) -> Memory:
        self._use(device)
        return Memory(size, device, False, int(self._call("cuMemAlloc", size)), "cuMemFree")

    def release(self, memory: Memory) -> None:
        if memory.device is not None:
            self._use(memory.device)
        if isinstance(memory.owner, str):
            self._call(memory.owner, memory.address)
        elif memory.pinned:
            self._call("cuMemHostUnregister", memory.address)
        memory.owner = None

    def stream(self, device: int) -> Any:
        self._use(device)
        return _On(device, self._call("cuStreamCreate", _NON_BLOCKING))

    def event(self, device: int) -> Any:
        self._use(device)
        return _On(device, self._call("cuEventCreate", 0))

    def copy(
        self, stream: Any, target: Memory, source: Memory, size: int, *, at: int = 0, blocking: bool = False
    ) -> None:
        self._use(stream.device)
        into, out = target.address + at, source.address + at
        if source.device is None and target.device is not None:
            self._call("cuMemcpyHtoDAsync", into, out, size, stream.handle)
        elif target.device is None and source.device is not None:
            self._call("cuMemcpyDtoHAsync", into, out, size, stream.handle)
        else:
            self._call("cuMemcpyDtoDAsync", into, out, size, stream.handle)
        if blocking:
            self._call("cuStreamSynchronize", stream.handle)

    def fill(self, memory: Memory, value: int) -> None:
        assert memory.device is not None
        self._use(memory.device)
        self._call("cuMemsetD8", memory.address, value, memory.size)
        self._call("cuCtxSynchronize")

    def record(self, event: Any, stream: Any) -> None:
        self._use(stream.device)
        self._call("cuEventRecord", event.handle, stream.handle)

    def wait(self, stream: Any, event: Any) -> None:
        self._use(stream.device)
        self._call("cuStreamWaitEvent", stream.handle, event.handle, 0)

    def synchronize(self, event: Any) -> None:
        self._call("cuEventSynchronize", event.handle)

    def elapsed_s(self, begin: Any, end: Any) -> float:
        self._use(begin.device)
        return float(self._call("cuEventElapsedTime", begin.handle, end.handle)) / 1e3

    def peer_access(self, device: int, peer: int) -> bool:
        handles = [self._call("cuDeviceGet", index) for index in (device, peer)]
        if not int(self._call("cuDeviceCanAccessPeer", *handles)):
            return False
        self._use(peer)  # makes its context
        self._use(device)
        code, *_ = self._cuda.cuCtxEnablePeerAccess(self._contexts[peer], 0)
        if int(code) not in (0, _ALREADY):
            raise GpudoctorError(f"cuCtxEnablePeerAccess: {self._name(code)}")
        return True

    def peer_copy(self, stream: Any, target: Memory, source: Memory, size: int) -> None:
        assert target.device is not None
        assert source.device is not None
        self._use(stream.device)
        contexts = self._contexts
        self._call(
            "cuMemcpyPeerAsync",
            target.address,
            contexts[target.device],
            source.address,
            contexts[source.device],
            size,
            stream.handle,
        )

    def _use(self, device: int) -> None:
        if device == self._current:
            return
        if device not in self._contexts:
            handle = self._call("cuDeviceGet", device)
            self._contexts[device] = self._call("cuDevicePrimaryCtxRetain", handle)
        self._call("cuCtxSetCurrent", self._contexts[device])
        self._current = device

    def _call(self, function: str, *arguments: Any) -> Any:
        """The value of a driver call; GpudoctorError (MemoryError for a full memory) with CUDA's name of the error."""
        code, *values = getattr(self._cuda, function)(*arguments)
        if int(code) == _OUT_OF_MEMORY:
            raise MemoryError(f"{function}: {self._name(code)}")
        if int(code):
            raise GpudoctorError(f"{function}: {self._name(code)}")
        return values[0] if len(values) == 1 else values

    def _name(self, code: Any) -> str:
        _, name = self._cuda.cuGetErrorName(code)
        return name.decode() if isinstance(name, bytes) else str(name)
