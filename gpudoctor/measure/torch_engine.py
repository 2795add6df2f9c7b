"""Copies through torch, where cuda-bindings is not installed. The only module here that imports torch."""

from __future__ import annotations

import ctypes
import importlib
import sys
from typing import Any

from gpudoctor.errors import GpudoctorError
from gpudoctor.measure.engine import Memory, UnusableError, normal_bdf, visible

_PORTABLE = 1  # cudaHostRegisterPortable


class TorchEngine:
    """Tensors of bytes; a peer copy is always issued by the GPU that is read from, as torch does it."""

    chooses_side = False

    def __init__(self) -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
        except Exception as error:  # noqa: BLE001  # a broken installation raises anything, OSError of a library included
            text = " ".join(str(error).split())
            raise UnusableError(f"torch cannot be imported: {text}") from None
        torch = self._torch
        if not torch.backends.cuda.is_built():
            raise UnusableError(
                f"torch {torch.__version__} is built without CUDA; install cuda-bindings or the CUDA build of torch"
            )
        name = "libcuda.so.1" if sys.platform != "win32" else "nvcuda.dll"
        try:
            self._driver = ctypes.CDLL(name)
        except OSError:
            raise UnusableError(f"the CUDA driver library {name} is not installed") from None
        if code := self._driver.cuInit(0):
            raise UnusableError(f"CUDA does not start: cuInit gives error {code}{visible()}")
        if not torch.cuda.is_available():
            raise UnusableError("torch finds no usable CUDA device although the driver starts")
        self.name = f"torch {torch.__version__}"

    def ordinal(self, bdf: str) -> int:
        count = ctypes.c_int()
        self._driver.cuDeviceGetCount(ctypes.byref(count))
        for index in range(count.value):
            text = ctypes.create_string_buffer(32)
            found = self._driver.cuDeviceGetPCIBusId(text, 32, index) == 0
            if found and normal_bdf(text.value.decode()) == bdf:
                return index
        raise GpudoctorError(f"CUDA does not show the GPU at {bdf}{visible()}")

    def free_bytes(self, device: int) -> int:
        return int(self._torch.cuda.mem_get_info(device)[0])

    def pinned(self, device: int, size: int) -> Memory:
        self._torch.cuda.set_device(device)
        return self._memory(self._new(size, device="cpu", pin_memory=True), None, pinned=True)

    def pageable(self, size: int) -> Memory:
        return self._memory(self._new(size, device="cpu"), None, pinned=False)

    def register(self, device: int, address: int, size: int, owner: Any) -> Memory:
        self._torch.cuda.set_device(device)
        code = self._torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE)
        if int(code):
            raise GpudoctorError(f"cudaHostRegister: error {int(code)}")
        # The buffer protocol of the mapping, so that no byte is copied.
        block = self._torch.frombuffer(owner, dtype=self._torch.uint8, count=size)
        return Memory(size, None, True, address, (block, owner))

    def on_device(self, device: int, size: int) -> Memory:
        return self._memory(self._new(size, device=f"cuda:{device}"), device, pinned=False)

    def release(self, memory: Memory) -> None:
        if isinstance(memory.owner, tuple):
            self._torch.cuda.cudart().cudaHostUnregister(memory.address)
        memory.owner = None
        if memory.device is not None:
            self._torch.cuda.empty_cache()

    def stream(self, device: int) -> Any:
        return self._torch.cuda.Stream(device)

    def event(self, device: int) -> Any:
        with self._torch.cuda.device(device):
            return self._torch.cuda.Event(enable_timing=True)

    def copy(
        self, stream: Any, target: Memory, source: Memory, size: int, *, at: int = 0, blocking: bool = False
    ) -> None:
        with self._torch.cuda.stream(stream):
            _part(target, at, size).copy_(_part(source, at, size), non_blocking=not blocking)

    def fill(self, memory: Memory, value: int) -> None:
        memory.owner.fill_(value)
        self._torch.cuda.synchronize(memory.device)

    def record(self, event: Any, stream: Any) -> None:
        event.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def elapsed_s(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3

    def peer_access(self, device: int, peer: int) -> bool:
        return bool(self._torch.cuda.can_device_access_peer(device, peer))  # torch switches it on with the first copy

    def peer_copy(self, stream: Any, target: Memory, source: Memory, size: int) -> None:
        self.copy(stream, target, source, size)

    def _new(self, size: int, **where: Any) -> Any:
        try:
            return self._torch.empty(size, dtype=self._torch.uint8, **where)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if "memory" in str(error).lower():
                raise MemoryError(" ".join(str(error).split())[:200]) from None
            raise

    def _memory(self, tensor: Any, device: int | None, *, pinned: bool) -> Memory:
        return Memory(int(tensor.numel()), device, pinned, int(tensor.data_ptr()), tensor)


def _part(memory: Memory, at: int, size: int) -> Any:
    tensor = memory.owner[0] if isinstance(memory.owner, tuple) else memory.owner
    return tensor[at : at + size]
