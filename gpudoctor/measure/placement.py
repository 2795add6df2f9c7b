"""Runs in the measuring child: on which CPUs it runs, and on which NUMA node its host memory lies.

Python and torch cannot set a memory policy, so that the system calls are made directly (Linux on x86-64 and Arm).
They act on this process only; nothing on the machine is changed.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import mmap
import os
import platform
import sys
from dataclasses import dataclass

# mbind and move_pages in the system call tables of the kernel
_NUMBERS = {"x86_64": (237, 279), "aarch64": (235, 239)}
_MPOL_BIND = 2
_MAX_NODE = 1024
_WORD = 64
_PAGES_LOOKED_AT = 512


@dataclass(slots=True)
class Placed:
    """Mapped host memory. `share` of the pages looked at lie on the wanted node; None when that cannot be seen."""

    mapping: mmap.mmap
    address: int
    size: int
    share: float | None
    reason: str | None = None  # why the node could not be enforced, or seen


def bind_cpus(cpus: list[int]) -> list[int]:
    """Run on these CPUs (those of them that are allowed) from now on; the CPUs that were taken, [] for none."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return []
    usable = set(cpus) & os.sched_getaffinity(0)
    if not usable:
        return []
    os.sched_setaffinity(0, usable)
    return sorted(usable)


def on_node(size: int, node: int) -> Placed:
    """`size` bytes of host memory on a NUMA node: the policy is set before the first touch, then it is verified."""
    mapping = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    reason = _bind_memory(address, size, node)
    ctypes.memset(address, 1, size)  # touches every page, on the node of the policy
    share, unseen = _share(address, size, node)
    return Placed(mapping, address, size, share, reason or unseen)


def _libc() -> tuple[ctypes.CDLL, tuple[int, int]] | None:
    numbers = _NUMBERS.get(platform.machine())
    if sys.platform != "linux" or numbers is None:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc, numbers


def _bind_memory(address: int, size: int, node: int) -> str | None:
    """None when the policy holds, else why not."""
    found = _libc()
    if found is None:
        return f"no system call for memory policies on {sys.platform} {platform.machine()}"
    libc, (mbind, _) = found
    mask = (ctypes.c_ulong * (_MAX_NODE // _WORD))()
    mask[node // _WORD] = 1 << (node % _WORD)
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(size), ctypes.c_int(_MPOL_BIND), mask)
    if libc.syscall(ctypes.c_long(mbind), *arguments, ctypes.c_ulong(_MAX_NODE + 1), ctypes.c_uint(0)):
        return f"mbind to node {node}: {os.strerror(ctypes.get_errno())}"
    return None


def _share(address: int, size: int, node: int) -> tuple[float | None, str | None]:
    """The share of pages on the node, from the kernel's own answer, spread over the block."""
    found = _libc()
    if found is None:
        return None, "the place of pages cannot be asked for on this system"
    libc, (_, move_pages) = found
    pages = size // mmap.PAGESIZE
    count = min(pages, _PAGES_LOOKED_AT)
    addresses = (ctypes.c_void_p * count)(*(address + i * pages // count * mmap.PAGESIZE for i in range(count)))
    status = (ctypes.c_int * count)()
    # no target nodes: the kernel only tells where each page is
    if libc.syscall(ctypes.c_long(move_pages), 0, ctypes.c_ulong(count), addresses, None, status, 0):
        return None, f"move_pages: {os.strerror(ctypes.get_errno())}"
    places = collections.Counter(status)
    known = sum(number for place, number in places.items() if place >= 0)
    if not known:
        return None, "the kernel does not tell on which node the pages lie"
    return places[node] / known, None


def close(placed: Placed) -> None:
    """Give the mapping back; it stays while a buffer of it is in use elsewhere."""
    with contextlib.suppress(BufferError):
        placed.mapping.close()
