"""How many loader workers a rank may have, and how many a loop needs."""

from __future__ import annotations

import math

from gpudoctor.model import Case, WatchedLoader, WatchRecord

_SHM_SHARE = 0.8  # of the free shared memory; the rest is left for NCCL and other users
_DEFAULT_PREFETCH = 2  # torch's own, a worker


def loader_limit(case: Case, record: WatchRecord, ranks: int) -> int:
    """The most loader workers that one rank should get; 0 when shared memory does not hold one worker's batches.

    CPUs: the affinity mask and the cgroup quota, whichever is smaller, divided by the ranks of this machine, less
    one for the rank itself, at least 1. Shared memory: the batches in flight, (workers * prefetch_factor + 2) *
    batch bytes, stay below 0.8 of what is free for a rank.
    """
    ranks = max(1, ranks)
    limit = max(1, math.floor(usable_cpus(case) / ranks) - 1)
    free = case.limits.shm_free_bytes if case.limits.shm_free_bytes is not None else case.limits.shm_bytes
    loaders = [loader for loader in record.loaders if loader.role != "other" and loader.batch_bytes]
    if free is not None and loaders:
        for loader in loaders:
            prefetch = loader.prefetch_factor or _DEFAULT_PREFETCH
            batches = _SHM_SHARE * free / ranks / (loader.batch_bytes or 1)
            limit = min(limit, max(0, math.floor((batches - 2) / prefetch)))
    return limit


def usable_cpus(case: Case) -> float:
    """CPUs that this process may use: the smaller of affinity and quota; the machine's count when both are unknown."""
    known = case.limits.cpus
    if case.limits.allowed_cpus is None:  # a quota may be larger than the machine
        known = min(known or math.inf, case.host.cpu_count or 1)
    return float(known or 1)


def worker_ladder(limit: int) -> tuple[int, ...]:
    """The worker counts worth trying below a limit: powers of two, and the limit. Zero is the caller's baseline."""
    steps = [2**power for power in range(max(0, limit).bit_length()) if 2**power <= limit]
    return tuple(sorted({*steps, limit})) if limit > 0 else ()


def needed_workers(loader: WatchedLoader, watched_s: float) -> int | None:
    """Workers that would make batches as fast as the loop uses them; None when too little was seen.

    Without workers the wait is the time to make a batch. With w workers that the loop waits for, w batches are made
    in the time of w steps, so one takes w steps.
    """
    if loader.batches < 1 or watched_s <= 0:
        return None
    step_ms = watched_s * 1000 / loader.batches
    wait_ms = loader.wait_ms / loader.batches
    use_ms = max(step_ms - wait_ms, step_ms / 100)
    make_ms = wait_ms if loader.num_workers == 0 else loader.num_workers * step_ms
    return max(1, math.ceil(make_ms / use_ms))
