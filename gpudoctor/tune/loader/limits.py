"""The most workers that may be tried, and what holds them: CPUs, shared memory, memory, open files, batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpudoctor.model import Case, LoaderPreflight
from gpudoctor.prescribe.workers import usable_cpus
from gpudoctor.tune.loader.search import DEFAULT_PREFETCH, Setting

SHARE = 0.8  # of what is free: the rest is for others
# Private memory of one worker before it holds a row (ours: fork 9-13 MiB, spawn and forkserver 144 MiB).
WORKER_BYTES = {"fork": 16 * 2**20, "spawn": 160 * 2**20, "forkserver": 160 * 2**20}
WAITING_FACTOR = 4.0  # rows that mostly wait may have so many workers a CPU
WAITING_MOST = 64
SPARE_BATCHES = 2  # in hand-over and in use
SPARE_FILES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`most`: workers of one rank; `because`: what holds them, in words."""

    most: int
    because: str
    shm_bytes: float | None
    memory_bytes: float | None
    files: float | None
    batch_bytes: int
    batch_tensors: int
    worker_bytes: int

    def fits(self, setting: Setting) -> bool:
        """Whether shared memory, memory and open files hold this setting."""
        return self.obstacle(setting) is None

    def obstacle(self, setting: Setting) -> str | None:
        """What does not hold this setting, or None."""
        flying = setting.workers * setting.prefetch + SPARE_BATCHES
        if self.shm_bytes is not None and flying * self.batch_bytes > self.shm_bytes:
            return "shared memory"
        need = setting.workers * (self.worker_bytes + self.batch_bytes) + flying * self.batch_bytes
        if self.memory_bytes is not None and need > self.memory_bytes:
            return "memory"
        if self.files is not None and flying * self.batch_tensors + 3 * setting.workers > self.files:
            return "open files"
        return None


def limits(case: Case, hello: Mapping[str, Any], preflight: LoaderPreflight, *, ranks: int) -> Limits:
    """The limits of each of `ranks` ranks on this machine. hello: the greeting of the process (CPUs, files, memory)."""
    cpus = max(1.0, min(usable_cpus(case), float(hello.get("cpus") or 1 << 16)) / ranks)
    share = preflight.cpu_share
    most, because = math.ceil(cpus), f"{cpus:g} usable CPUs a rank"
    if share is not None and share < 1:
        factor = min(WAITING_FACTOR, 1 / max(share, 1e-3))
        most = min(max(WAITING_MOST, math.ceil(cpus)), math.ceil(cpus * factor))
        if factor > 1.05:
            because += f", of which a row uses {share:.0%} of its time"
    shm = case.limits.shm_free_bytes if case.limits.shm_free_bytes is not None else case.limits.shm_bytes
    memory = _smallest(hello.get("memory_bytes"), case.limits.memory_bytes, case.host.memory_bytes)
    files = hello.get("files")
    sharing = hello.get("sharing") == "file_descriptor"
    start = str(hello.get("start_method") or "fork")
    copied = (preflight.pickle_bytes or 0) if start != "fork" else 0
    result = Limits(
        most=most,
        because=because,
        shm_bytes=SHARE * shm / ranks if shm is not None else None,
        memory_bytes=SHARE * memory / ranks if memory is not None else None,
        files=float(files) - int(hello.get("files_open") or 0) - SPARE_FILES if files and sharing else None,
        batch_bytes=preflight.batch_bytes or 0,
        batch_tensors=max(1, preflight.batch_tensors or 1),
        worker_bytes=WORKER_BYTES.get(start, WORKER_BYTES["spawn"]) + copied,
    )
    batches = (hello.get("loader") or {}).get("length")
    if isinstance(batches, int) and 0 < batches < most:
        most, because = batches, f"an epoch has {batches} batches"
    for workers in range(1, most + 1):
        obstacle = result.obstacle(Setting(workers=workers, prefetch=1))
        if obstacle is not None:
            most, because = workers - 1, f"{obstacle} holds no more"
            break
    return Limits(
        **{name: getattr(result, name) for name in Limits.__dataclass_fields__ if name not in ("most", "because")},
        most=most,
        because=because,
    )


def present_setting(loader: Mapping[str, Any]) -> Setting:
    """The loader's own setting, as a Setting."""
    workers = int(loader.get("num_workers") or 0)
    return Setting(
        workers=workers,
        prefetch=int(loader.get("prefetch_factor") or DEFAULT_PREFETCH) if workers else DEFAULT_PREFETCH,
        in_order=bool(loader.get("in_order", True)),
        persistent=bool(loader.get("persistent_workers")),
    )


def _smallest(*values: object) -> float | None:
    known = [float(value) for value in values if isinstance(value, (int, float)) and value > 0]
    return min(known, default=None)
