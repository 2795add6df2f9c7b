"""What the names in a kineto trace mean: work on the device, calls of the CUDA and HIP runtime, frames of Python."""

from __future__ import annotations

import re
import sys

from gpudoctor.read.recording import COMMUNICATION, COMPUTE, COPY, MEMSET

_COMMUNICATION = re.compile(
    r"^nccl|ncclKernel|ncclDevKernel|^rccl|^msccl|^nvshmem|^hccl|cross_device_reduce|(?:one|two)_shot_all_reduce"
)
_MEMSET = re.compile(r"^(?:hip)?Memset", re.IGNORECASE)
_COPY = re.compile(r"^(?:hip)?Memcpy|^Copy(?:Host|Device)", re.IGNORECASE)
# Calls of the runtime that neither start work on the device nor wait for it: left out.
_QUERIES = re.compile(
    r"Query|EventRecord|EventCreate|EventDestroy|Occupancy|IsCapturing|CaptureInfo|Peek|GetLastError|FuncSet|FuncGet"
    r"|PointerGet|GetPriority|PriorityRange|DeviceGet|GetDevice|SetDevice|StreamWaitEvent|DriverGet|RuntimeGet"
    r"|Malloc|HostAlloc|StreamCreate|GetSymbol|ModuleGet|ModuleLoad|GetProcAddress|CtxGet|CtxPush|CtxPop|Attribute"
)
_WAITS = re.compile(r"Synchronize|^(?:cuda|hip)Free|^cuMemFree|^(?:cuda|hip)Memcpy(?!.*(?:Async|Peer))|^hipMemcpyWith")
_MEMCPY = re.compile(r"Memcpy|^cuMemcpy")

QUERY, LAUNCH, CALL = range(3)  # CALL: it may wait; when it is a copy, it starts work too

# Packages whose frames are never the user's own line.
_LIBRARIES = frozenset(
    {"torch", "torchvision", "torchaudio", "torchrec", "functorch", "triton", "lightning", "pytorch_lightning"}
    | {"lightning_fabric", "lightning_utilities", "transformers", "accelerate", "deepspeed", "peft", "datasets"}
    | {"numpy", "pandas", "tqdm", "torchmetrics", "ignite", "apex", "megatron", "timm", "PIL", "huggingface_hub"}
)
_FRAME = re.compile(r"(?P<file>[^;]+?)\((?P<line>\d+)\): (?P<function>.+)")
_LIBRARY_PATH = re.compile(r"site-packages|dist-packages|[\\/]lib[\\/]python\d|^<|^\(")


class Kinds(dict[str, int]):
    """The kind of device work by the name of a kernel, remembered."""

    def __missing__(self, name: str) -> int:
        if _COMMUNICATION.search(name):
            kind = COMMUNICATION
        elif _MEMSET.match(name):
            kind = MEMSET
        else:
            kind = COPY if _COPY.match(name) else COMPUTE
        if len(self) < 200_000:
            self[name] = kind
        return kind


class Calls(dict[str, int]):
    """QUERY, LAUNCH or CALL by the name of a runtime call, remembered."""

    def __missing__(self, name: str) -> int:
        waits = _WAITS.search(name) or _MEMCPY.search(name)
        kind = CALL if waits else QUERY if _QUERIES.search(name) else LAUNCH
        if len(self) < 10_000:
            self[name] = kind
        return kind


def copy_of(name: str) -> tuple[str, str]:
    """Direction and host memory of a copy or memset by its name: ("h2d", "pageable")."""
    lower = name.lower()
    if _MEMSET.match(name):
        return "memset", "device"
    direction = next(
        (
            kind
            for kind, words in (
                ("h2d", ("htod", "hosttodevice")),
                ("d2h", ("dtoh", "devicetohost")),
                ("d2d", ("dtod", "devicetodevice")),
                ("p2p", ("ptop",)),
            )
            if any(word in lower for word in words)
        ),
        "unknown",
    )
    if direction in ("d2d", "p2p"):
        return direction, "device"
    memory = next((word for word in ("pageable", "pinned", "managed") if word in lower), "unknown")
    return direction, memory


def user_frame(frame: str) -> tuple[str, str, str] | None:
    """(file, line, function) of "FILE(LINE): FUNCTION" when it is code of the user, else None."""
    found = _FRAME.fullmatch(frame.strip())
    if found is None:
        return None
    file = found["file"]
    top = re.split(r"[\\/]", file)[0].removesuffix(".py")
    if _LIBRARY_PATH.search(file) or top in _LIBRARIES or top in sys.stdlib_module_names:
        return None
    return file, found["line"], found["function"]


def site_of_stack(stack: str) -> str | None:
    """FILE:LINE of the innermost frame of the user in a "Call stack" (innermost first, ";" between)."""
    for frame in stack.split(";"):
        if user := user_frame(frame):
            return f"{user[0]}:{user[1]}"
    return None


def site_of_frame(name: str) -> str:
    """FILE (FUNCTION): the line of a Python range is where the function begins, not where it stood."""
    user = user_frame(name)
    return f"{user[0]} ({user[2]})" if user else name
